"""Fine-tuning of a vision-language model."""
