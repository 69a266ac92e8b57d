"""Gradients: the memory in which a unit's gradients arrive on the host, and their way down to it."""
