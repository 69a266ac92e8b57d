"""A small language model that learns from a large one."""
