"""Recipes to copy from: each a file and the YAML that configures it. docs/recipes.md lists them."""
