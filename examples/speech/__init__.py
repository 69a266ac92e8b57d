"""Fine-tuning of a speech recognizer, of which the encoder and the decoder stream."""
