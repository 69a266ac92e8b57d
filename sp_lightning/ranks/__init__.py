"""Several devices, one process for each, that train one model on torch.distributed."""
