"""Vectors of many texts."""
