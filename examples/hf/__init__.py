"""Scripts with the Trainer, TRL, accelerate and diffusers, each with a line around it that streams its models."""
