"""Sets of adapters with options of their own, trained side by side over one frozen language model."""
