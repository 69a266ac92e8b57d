"""Direct preference optimization of a language model against a frozen reference."""
