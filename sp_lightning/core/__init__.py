"""Decisions, predictions and measurements as plain numbers, without tensors."""
