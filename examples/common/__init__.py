"""What the recipes share."""
