"""Answers about the images of a folder."""
