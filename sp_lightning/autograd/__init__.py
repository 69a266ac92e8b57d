"""Stand-ins for weights on the device, and the tensors that autograd saves: how they go down and come up."""
