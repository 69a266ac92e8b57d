"""What to hold, how long it takes and what happened: numbers only, no tensors."""
