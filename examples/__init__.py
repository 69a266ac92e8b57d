"""Recipes to copy from: each a folder with a LightningCLI config and what it configures. docs/recipes.md lists them."""
