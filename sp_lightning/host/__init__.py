"""The host: its memory, page locks and cores, and the device beside it."""
