"""Loops of one's own with Lightning's Fabric: pretraining, adapters, generation, and a GAN."""
