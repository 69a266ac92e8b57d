"""Parameters that consist of tensors: quantised ones, and the shards of tensor parallelism."""
