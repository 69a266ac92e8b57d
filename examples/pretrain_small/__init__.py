"""A language model from nothing, on one device, in a fixed time."""
