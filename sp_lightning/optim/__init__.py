"""Optimizer steps of streamed weights."""
