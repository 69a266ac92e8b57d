"""Batch inference: answers to many prompts."""
