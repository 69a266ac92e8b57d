"""The processes that train one model, with a device each: what they say to each other, by torch.distributed.

1. All collectives of gradients come in one order on all ranks, that of backwards and units; weights go up without any.
   So ranks may skip units, call them in other orders and evaluate alone.
2. Gradients are summed as a tree of a machine's ranks, and then of machines.
3. Buffers are the first rank's before a forward that trains, or a Trainer's validation, if it follows a forward whose
   gradients were exchanged: DDP's rule.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout

from ..compat.dynamo import never_compiled
from ..errors import UnsupportedError
from ..host.device import Device
from ..store.pipeline import elements_of
from ..stream.unit import Unit
from .shared_slabs import SharedSlabs, made_file, opened_file, table, this_machine
from .watch import KEEPALIVE, Board, Watch

UNITS = 1 << 16  # numbers on the board for each rank
VECTOR = 64  # elements: kernels round a whole vector in another way than the rest


class Team:
    """The ranks of a process group, with what those of one machine share."""

    def __init__(
        self, group: dist.ProcessGroup, timeout: timedelta = default_pg_timeout, keepalive: timedelta = KEEPALIVE
    ) -> None:
        self._group, self.rank, self.size = group, group.rank(), group.size()
        file = made_file()
        # Agents of torchrun are machines, wherever they run.
        machine = this_machine(), os.environ.get("GROUP_RANK")
        machines, processes, files = zip(*self._gathered_objects((machine, os.getpid(), file)), strict=True)
        own = [rank for rank, machine in enumerate(machines) if machine == machines[self.rank]]
        self.local, self.local_rank = len(own), own.index(self.rank)
        self._check_alike(list(machines))
        if self.local_rank:
            os.close(file)
            file = opened_file(processes[own[0]], files[own[0]])
        self.slabs = SharedSlabs(file, not self.local_rank)
        self._local_group = self._subgroup(own)
        across = list(range(self.local_rank, self.size, self.local))
        self._across = self._subgroup(across) if len(across) > 1 else None  # over machines
        others = {rank: processes[rank] for rank in own if rank != self.rank}
        self._watch = Watch(group, others, timeout, keepalive)
        self._is_on_host = True  # whether collectives of gradients block the host
        self.board = Board(table(file, self.local, UNITS), self.local_rank, self._watch)
        self.has_failed = False  # whether this rank ends by an error
        self.exchanges = True  # whether backwards exchange gradients
        self._are_buffers_due = False
        self.follows_buffers = True

    def _gathered_objects(self, own: Any) -> list[Any]:
        """Return every rank's object, by rank. Collective; blocks."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, own, group=self._group)
        return found

    def _check_alike(self, machines: list[Any]) -> None:
        """Raise unless all machines have equally many ranks, each machine's numbered one after the other."""
        if machines != [machine for machine in dict.fromkeys(machines) for _ in range(self.local)]:
            counts = [machines.count(machine) for machine in dict.fromkeys(machines)]
            raise UnsupportedError(
                f"machines have {counts} ranks, or ranks that do not follow one another: start as many on each"
            )

    def _subgroup(self, ranks: list[int]) -> dist.ProcessGroup:
        """Make a process group of some ranks, this one among them. Collective for those."""
        if len(ranks) == self.size:
            return self._group
        ranks = [dist.get_global_rank(self._group, rank) for rank in ranks]
        return dist.new_group(ranks, use_local_synchronization=True)  # type: ignore[return-value]

    def part_of(self, tensor: Tensor) -> Tensor:
        """Return the elements of a dense tensor that this rank steps; the last ranks may get fewer, or none."""
        numel, size = tensor.numel(), -(-tensor.numel() // (VECTOR * self.local)) * VECTOR
        start, stop = (min(rank * size, numel) for rank in (self.local_rank, self.local_rank + 1))
        return elements_of(tensor, start, stop)

    # ---- gradients

    def start_exchange(self, parts: Tensor) -> tuple[Tensor, Any]:
        """Start to send a part to each rank of the machine; return the buffer for theirs, and the work. Collective."""
        got = torch.empty_like(parts)
        return got, dist.all_to_all_single(got, parts, group=self._local_group, async_op=True)

    def gathered(self, part: Tensor, place: str, over_machines: bool = False) -> Tensor:
        """Gather a part from each rank of the machine, or from this local rank of each machine, as rows. Collective."""
        group = self._across if over_machines else self._local_group
        if group is None or group.size() == 1:
            return part.view(1, -1)
        rows = part.new_empty(group.size(), len(part))
        self.wait(dist.all_gather(list(rows), part, group=group, async_op=True), place)
        return rows

    def start_maximum(self, flags: Tensor) -> Any:
        """Start to take the largest value of each flag over all ranks, in place. Collective."""
        return dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group, async_op=True)

    def wait(self, work: Any, place: str) -> None:
        """Make the calling thread's stream wait for a collective; block if the collective is of tensors on the host."""
        self._watch.wait(work, place, self._is_on_host)

    # ---- weights and buffers

    def check_alike(self, weights: list[str], advice: str) -> None:
        """Raise unless all ranks describe their weights in the same way; the error ends with advice. Collective."""
        with self._watch.waiting("the model"):
            all_of_ranks = self._gathered_objects(weights)
        for rank, others in enumerate(all_of_ranks):
            for own, other in itertools.zip_longest(weights, others, fillvalue="none"):
                if own != other:
                    raise UnsupportedError(
                        f"the ranks' models differ: rank {self.rank} has {own}, rank {rank} {other}. {advice}"
                    )

    def check_new(self, name: str) -> None:
        """Raise for a weight that came after streaming began: each rank has one of its own."""
        raise UnsupportedError(
            f"{name} came after streaming began, and each of several devices has one of its own: make weights, and put"
            " others in their place, before the module is streamed"
        )

    def share_units(self, units: list[Unit], device: Device) -> None:
        """Copy the first rank's weights to all ranks; streamed ones once to each machine. Collective."""
        self._is_on_host = device.is_host
        for unit in units:
            for source in unit.sources:
                self._broadcast_to_host(source, self._group, device)
            if not unit.is_resident:
                narrow = [self.slabs.truth(weight.value) for weight in unit.weights if weight.is_narrow]
                if self._across is not None and not self.local_rank:
                    for truth in [unit.truth, *narrow]:  # of the first machine
                        self._broadcast_to_host(truth, self._across, device)
                unit.note_stepped()
        self.wait(dist.barrier(self._group, async_op=True), "the weights")

    def _broadcast_to_host(self, tensor: Tensor, group: dist.ProcessGroup, device: Device) -> None:
        """Copy a host tensor from a group's first rank to the others, by way of the device. Collective."""
        there = tensor.to(device.torch_device)
        self.wait(dist.broadcast(there, group_src=0, group=group, async_op=True), "the first weights")
        tensor.copy_(there)

    def share_buffers(self, module: nn.Module) -> None:
        """Copy the first rank's buffers to all ranks, in one message. Collective."""
        buffers = [buffer for buffer in module.buffers() if buffer.numel()]
        if not buffers:
            return
        with torch.no_grad():
            together = torch.cat([buffer.reshape(-1).view(torch.uint8) for buffer in buffers])
            self.wait(dist.broadcast(together, group_src=0, group=self._group, async_op=True), "the buffers of rank 0")
            parts = together.split_with_sizes([buffer.nbytes for buffer in buffers]) if self.rank else ()
            for buffer, part in zip(buffers, parts, strict=False):
                buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))

    @never_compiled
    def begin_forward(self, module: nn.Module) -> None:
        """Copy the first rank's buffers to all if they are due before this forward (Rule 3). Collective then."""
        self._watch.check()
        if self._are_buffers_due:
            self.share_buffers(module)
        self._are_buffers_due = torch.is_grad_enabled() and self.exchanges and self.follows_buffers

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Exchange no gradients in this context: each rank's own accumulate in `.grad`."""
        before, self.exchanges = self.exchanges, False
        try:
            yield
        finally:
            self.exchanges = before

    def close(self) -> None:
        """End this rank's threads; other ranks that wait for this one raise. A second call does nothing."""
        self.board.close()
        self._watch.close()

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks of an error. A second call does nothing."""
        self.has_failed = True
        self._watch.fail(error)
