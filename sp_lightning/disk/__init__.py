"""Weights in their files, optimizer state in a scratch file, and checkpoints, all moved past the page cache."""
