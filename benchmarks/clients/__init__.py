"""Libraries that use Lightning, each run with its own API on tiny data."""
