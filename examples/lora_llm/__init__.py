"""Low-rank adapters on a frozen language model."""
