"""A dense language model, adapted to be a mixture of experts."""
