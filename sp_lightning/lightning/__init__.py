"""Lightning's strategy and callback over the engine."""
