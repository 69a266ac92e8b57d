"""The Lightning strategy and callback, on top of the engine."""
