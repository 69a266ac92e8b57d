"""Several machines, each of which has one host copy of the model for its ranks."""
