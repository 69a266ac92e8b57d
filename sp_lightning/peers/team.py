"""The processes that train one model, with a device each: what they say to each other, by torch.distributed.

1. All collectives of gradients come in one order on all ranks, that of backwards and units; weights go up without any.
   So ranks may skip units, call them in other orders and evaluate alone.
2. Gradients are summed as a tree of a machine's ranks, and then of machines.
3. Buffers are the first rank's before a forward that trains, if it follows one whose gradients were exchanged: DDP's
   rule.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout

from ..host.device import Device
from ..stream.unit import Unit
from . import memory
from .board import Board
from .cut import Cut
from .memory import check_possible
from .watch import KEEPALIVE, Watch

UNITS = 1 << 16  # numbers on the board


class Team:
    """The ranks of a process group, those of a machine among them."""

    def __init__(
        self, group: dist.ProcessGroup, timeout: timedelta = default_pg_timeout, keepalive: timedelta = KEEPALIVE
    ) -> None:
        check_possible()
        self._group, self.rank, self.size = group, group.rank(), group.size()
        machines = self._gathered_objects((socket.gethostname(), os.environ.get("GROUP_RANK")))
        own = [rank for rank, machine in enumerate(machines) if machine == machines[self.rank]]
        self.local, self.local_rank = len(own), own.index(self.rank)
        self._local_group = group
        descriptor = memory.made() if not self.local_rank else -1
        opened = self._gathered_objects((os.getpid(), descriptor))
        process, number = opened[own[0]]
        if self.local_rank:
            descriptor = memory.opened(process, number)
        self.slabs = memory.SharedSlabs(descriptor, not self.local_rank)
        processes = [opened[rank][0] if rank in own else None for rank in range(self.size)]
        self._watch = Watch(group, processes, timeout, keepalive)
        self._is_on_host = True  # whether collectives of gradients block the host
        self.board = Board(memory.counters(self.slabs, self.local, UNITS), self.local_rank, self._watch)
        self.has_failed = False  # whether this rank ends by an error
        self.exchanges = True  # whether backwards exchange gradients
        self._are_buffers_due = False
        self.follows_buffers = True

    def _gathered_objects(self, own: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, own, group=self._group)
        return found

    def cut(self, numel: int) -> Cut:
        """Return how a number of elements is cut among the ranks of the machine."""
        return Cut.of(numel, self.local)

    # ---- gradients

    def start_exchange(self, rows: Tensor) -> tuple[Tensor, Any]:
        """Start to send a row to each rank of the machine; return what will have their rows for this one."""
        got = torch.empty_like(rows)
        return got, dist.all_to_all_single(got, rows, group=self._local_group, async_op=True)

    def over_machines(self, mean: Tensor) -> Tensor:
        """Add what other machines have of the same part."""
        return mean

    def gathered(self, part: Tensor, place: str) -> Tensor:
        """Return the parts of all ranks of the machine, a row for each."""
        rows = part.new_empty(self.local, len(part))
        self.wait(dist.all_gather(list(rows), part, group=self._local_group, async_op=True), place)
        return rows

    def start_maximum(self, flags: Tensor) -> Any:
        """Start to take the largest value of each flag over all ranks, in place."""
        return dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group, async_op=True)

    def wait(self, work: Any, place: str) -> None:
        """Have the caller's stream wait for a collective; of the host's tensors, the caller waits."""
        self._watch.wait(work, place, self._is_on_host)

    # ---- weights and buffers

    def share_units(self, units: list[Unit], device: Device) -> None:
        """Have the first rank's weights on all ranks. The first of each machine wrote the streamed ones."""
        self._is_on_host = device.is_host
        for unit in units:
            for source in unit.sources:
                there = source.to(device.torch_device)
                self._broadcast(there)
                source.copy_(there)
            if not unit.is_resident:
                unit.note_stepped()
        self.wait(dist.barrier(self._group, async_op=True), "the weights")

    def share_buffers(self, module: nn.Module) -> None:
        """Have the first rank's buffers on all ranks, in one message."""
        buffers = [buffer for buffer in module.buffers() if buffer.numel()]
        if not buffers:
            return
        with torch.no_grad():
            together = torch.cat([buffer.reshape(-1).view(torch.uint8) for buffer in buffers])
            self._broadcast(together)
            parts = together.split_with_sizes([buffer.nbytes for buffer in buffers]) if self.rank else ()
            for buffer, part in zip(buffers, parts, strict=False):
                buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))

    def begin_forward(self, module: nn.Module) -> None:
        """Take the first rank's buffers, if that is due (Rule 3)."""
        self._watch.check()
        if self._are_buffers_due:
            self.share_buffers(module)
        self._are_buffers_due = self.exchanges and self.follows_buffers

    def _broadcast(self, tensor: Tensor) -> None:
        self.wait(dist.broadcast(tensor, group_src=0, group=self._group, async_op=True), "what rank 0 has")

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave gradients with their rank in this context."""
        before, self.exchanges = self.exchanges, False
        try:
            yield
        finally:
            self.exchanges = before

    def close(self) -> None:
        """End what was begun. Safe twice."""
        self.board.close()
        self._watch.close()

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks of an error. Safe twice."""
        self.has_failed = True
        self._watch.fail(error)
