"""Decisions, predictions and measurements as plain numbers: nothing here computes with tensors."""
