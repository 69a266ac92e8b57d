"""Calls of one streamed module that run by turns."""
