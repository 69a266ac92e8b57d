"""Fine-tuning of an image classifier."""
