"""Training a language model of which few weights are used."""
