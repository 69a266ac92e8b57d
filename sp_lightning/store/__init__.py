"""Bytes that are not in memory: frozen weights in their files, and a scratch file for what exceeds the budget."""
