"""What stands in for a weight on the device, what autograd saves, and how it comes back."""
