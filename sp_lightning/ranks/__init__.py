"""Several devices: one process for each, a *rank*, and one host copy of the model for all ranks of a machine."""
