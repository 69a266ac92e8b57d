"""Weights that stay in the files that they were loaded from, read past the page cache as they are needed."""
