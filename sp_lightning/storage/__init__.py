"""Where the weights and the optimizer state of one run lie: in memory, or beyond a budget of it in files."""
