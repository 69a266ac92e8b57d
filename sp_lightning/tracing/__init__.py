"""Tracing: one step of a model on tensors without data, and what each of its visits takes."""
