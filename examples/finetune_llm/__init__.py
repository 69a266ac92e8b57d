"""Full fine-tuning of a causal language model."""
