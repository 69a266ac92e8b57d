"""Whether the host's memory suffices for ranks and for what files hold, before a run starts (stream/preflight.py).

Ranks check this once, together, for all of them. What they share cannot be had without its memory: if weights, wire
copies and gradients alone exceed it, the run stops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from ..errors import HostMemoryError
from ..host import remedies
from ..host.machine import host_memory
from ..host.unit_numbers import STATES, HostBytes, UnitHostBytes, host_bytes
from ..options import format_bytes
from ..ranks.alone import Alone
from ..ranks.board import Board, Ranks
from ..storage.in_memory import InMemory
from ..stream.partition import Unit
from ..stream.preflight import WORTH_CHECKING, log, short_of, terms_of


@dataclass(frozen=True, kw_only=True)
class OutOfMemoryReport:
    """The report on a device that ran out of memory in the model's own code."""

    where: str
    capacity: int
    allocated: int
    window: int
    window_nbytes: int  # that the window's units take now
    largest_unit: int
    activations: str
    finer: list[str]  # classes of smaller units

    def message(self) -> str:
        """Say what fills the device, and name three changes that make room."""
        others = format_bytes(self.allocated - self.window_nbytes)
        return (
            f"superpipeline: of {format_bytes(self.capacity)} on {self.where}, the window of {self.window} took "
            f"{format_bytes(self.window_nbytes)}, and activations, gradients, buffers and all else {others}; "
            "to make room: " + "; ".join(list(self._changes())[:3])
        )

    def _changes(self) -> Iterator[str]:
        for remedy in remedies.activations(self.activations):
            yield f"{remedy.what} ({remedy.cost})"
        if self.window > 1:
            freed = format_bytes(self.window_nbytes - self.largest_unit)
            yield f"{remedies.window(1).what} ({freed} less; {remedies.window(1).cost})"
        for remedy in (remedies.HALF_BATCHES, *remedies.smaller_units(self.finer)):
            yield f"{remedy.what} ({remedy.cost})"


def check_host(
    units: Sequence[Unit],
    device_dtype: Callable[[torch.dtype], torch.dtype],
    storage: InMemory,
    team: Alone,
    training: bool = True,
) -> None:
    """Warn if the host memory that training will allocate exceeds what is free, with what would fit (Rule 2).

    Args:
        units: All units, the resident ones included.
        device_dtype: The type in which weights of a type travel.
        storage: Where weights and the optimizer's state will be.
        team: The ranks of this machine, which come here together.
        training: Whether there are gradients and an optimizer at all.
    """
    held = [[p for _, p in unit.params if id(p) not in storage.in_files] for unit in units]
    parameters = [p for unit in held for p in unit]
    of_units = [UnitHostBytes.of(unit, device_dtype) for unit in held]
    whole = host_bytes(of_units, states=STATES["AdamW"], training=training)
    there = storage.on_disk  # of the first of these terms first
    for name in ("optimizer", "weights", "gradients", "wire"):
        term = getattr(whole, name)
        whole, there = replace(whole, **{name: max(0, term - there)}), max(0, there - term)
    missing = UnitHostBytes.of([p for p in parameters if p.is_meta or id(p) in storage.adopted]).weights
    if not isinstance(team.ranks, Ranks):
        to_come = replace(whole, weights=missing)
        if to_come.total >= WORTH_CHECKING:
            free = host_memory().free
            if to_come.total > free:
                log.warning("superpipeline: training will take %s", short_of(parameters, whole, to_come, free, 1))
    elif whole.total >= WORTH_CHECKING:
        whole = team.sharing.together(whole, max(unit.trained for unit in of_units) if training else 0)
        _check_ranks(parameters, whole, whole.weights - missing, team.ranks)


def _check_ranks(parameters: Sequence[nn.Parameter], whole: HostBytes, here: int, ranks: Ranks) -> None:
    """Check the host memory of all ranks; `here` is the bytes of weights that this rank has made."""
    board = Board(ranks, 0)
    present = board.exchange(here)
    free = board.exchange(host_memory().free)[0]  # after the first exchange all ranks have made their models
    room = free + sum(present)
    shared = replace(whole, optimizer=0)  # which may be another one than AdamW
    if shared.total > room:
        raise HostMemoryError(
            f"{ranks.size} ranks need {format_bytes(shared.total)} of host memory without the optimizer's state "
            f"({terms_of(shared)}), but {format_bytes(free)} are free and {format_bytes(sum(present))} have their "
            "weights already; train fewer parameters, or use half precision or fewer devices"
        )
    to_come = replace(whole, weights=max(0, whole.weights - sum(present)))
    spared = sum(present) - whole.weights  # once the ranks share the weights
    if whole.total > room and ranks.rank == 0:
        log.warning(
            "superpipeline: training on %d devices will take %s%s",
            ranks.size,
            short_of(parameters, whole, to_come, free + max(0, spared), ranks.size),
            f". The ranks made {format_bytes(sum(present))} of weights, which are {format_bytes(whole.weights)} once "
            "shared: make them in configure_model, under torch.device('meta'), and they are never more"
            if spared > 0
            else "",
        )


def check_copies(module: nn.Module, ranks: int) -> None:
    """Warn if processes that are about to start make more copies of this module than the host has room for."""
    units = UnitHostBytes.of(p for p in module.parameters() if not p.is_meta)
    copies = (ranks - 1) * units.weights
    if copies < WORTH_CHECKING:
        return
    free = host_memory().free
    if copies > free:
        log.warning(
            "superpipeline: each of %d processes makes the model in __init__, with %s of weights, until it has moved "
            "into the memory that they share: %s more, but %s are free, and the system may end a process. Make the "
            "model in configure_model, under torch.device('meta')",
            ranks,
            format_bytes(units.weights),
            format_bytes(copies),
            format_bytes(free),
        )
