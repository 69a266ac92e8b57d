"""Fine-tuning of a diffusion transformer or a UNet on cached latents and texts."""
