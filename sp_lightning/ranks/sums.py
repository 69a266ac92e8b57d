"""Sums over ranks in one order, whatever the backend, the window or the number of messages: a binary tree of ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def tree(parts: list[Tensor]) -> Tensor:
    """Sum tensors as a binary tree, ((0 + 1) + (2 + 3)) + ..., into the first one; overwrites others, too."""
    while len(parts) > 1:
        pairs = zip(parts[::2], [*parts[1::2], None], strict=False)
        parts = [one if other is None else one.add_(other) for one, other in pairs]
    return parts[0]


def tree_hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations, and takes no string
    """Sum DDP's gradients as several devices do here, as a communication hook: the reference for more than two ranks.

    ``DistributedDataParallel(...).register_comm_hook(None, sp_lightning.tree_hook)``, or
    ``DDPStrategy(ddp_comm_hook=sp_lightning.tree_hook)`` on CUDA. On several machines that have another number of
    ranks each than a power of two, ``state`` is that number. Where DDP has a ``process_group``, ``state`` is that
    group.
    """
    group, of_machine = (state, None) if isinstance(state, dist.ProcessGroup) else (None, state)
    size = dist.get_world_size(group)
    of_all = [torch.empty_like(bucket.buffer()) for _ in range(size)]
    gathered = dist.all_gather(of_all, bucket.buffer(), group, async_op=True).get_future()

    def summed(_: Any) -> Tensor:
        """Sum the gathered buckets of all ranks by machine, and then over machines."""
        shares = [part * (1.0 / size) for part in of_all]
        step = of_machine or size
        return tree([tree(shares[first : first + step]) for first in range(0, size, step)])

    return gathered.then(summed)
