"""Pretraining with one block for all, and then with a block for each."""
