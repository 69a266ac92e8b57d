"""Whether there is room for a run, from what is known before it: the sizes of units, nothing that has to be measured.

1. Device: a run stops before it starts if weights and gradients alone can not fit. What activations take is not known
   here (`sp_lightning.plan` measures it), so what passes may still not fit; what is refused certainly does not.
2. Host: gradients, what travels in another type and the optimizer's state are still to come when streaming begins. If
   they exceed what is free the system may end the process without a word, so that is said before any of it is taken.
3. The cost in time of what would fit is told in bytes that go up in a step: the rest of a step is not known here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from .autotune import UnitBytes, largest_window
from .config import format_bytes
from .errors import MemoryBudgetError
from .host import host_memory
from .host_bytes import STATES, UnitHostBytes, host_bytes
from .layout import aligned
from .schedule import loads, sweep
from .units import Unit

WORTH_ASKING = 2**28  # bytes; less is not worth finding out how much is free

log = logging.getLogger(__name__)


class Offer(NamedTuple):
    """Something that would fit."""

    what: str
    nbytes: int
    up: float  # bytes that go up in a step, compared with now


def check_device(units: Sequence[UnitBytes], window: int, free: int, where: str, can_halve: bool) -> None:
    """Rule 1.

    Args:
        units: All of them, the resident ones included, with the gradients that they will have.
        window: That was asked for; 1 for an automatic one.
        free: Bytes of the device.
        where: Its name.
        can_halve: Whether weights are FP32 and could be computed with in half precision.
    """
    needed = _needed(units, window)
    if needed > free:
        offers = "; ".join(
            f"{offer.what} ({format_bytes(offer.nbytes)}, {offer.up:.2g} times the bytes up)"
            for offer in _offers(units, window, free, can_halve)
        )
        raise MemoryBudgetError(
            f"with window {window}, weights and gradients alone need {format_bytes(needed)} on {where}, and "
            f"{format_bytes(free)} are free; "
            + (f"what would fit: {offers}" if offers else "name smaller units, or use a device with more memory")
        )


def _needed(units: Sequence[UnitBytes], window: int) -> int:
    """Certainly: the smallest units that make up a window, or the largest one with its gradients."""
    streamed = [unit for unit in units if not unit.resident]
    root = sum(unit.nbytes for unit in units if unit.resident)
    fewest = sum(sorted(unit.nbytes for unit in streamed)[:window])
    return root + max(fewest, max((unit.nbytes + unit.gradient_nbytes for unit in streamed), default=0))


def _offers(units: Sequence[UnitBytes], window: int, free: int, can_halve: bool) -> Iterator[Offer]:
    streamed = [unit for unit in units if not unit.resident]
    root = sum(unit.nbytes for unit in units if unit.resident)
    smaller = min(largest_window(streamed, free - root), window - 1)
    if smaller >= 1 and _needed(units, smaller) <= free:
        yield Offer(f"window={smaller}", _needed(units, smaller), _up(streamed, smaller) / _up(streamed, window))
    if can_halve:
        halves = [replace(u, nbytes=u.nbytes // 2, gradient_nbytes=u.gradient_nbytes // 2) for u in units]
        if _needed(halves, window) <= free:
            yield Offer("precision='bf16-true' with master_weights=True", _needed(halves, window), 0.5)
    frozen = [replace(unit, gradient_nbytes=0) for unit in units]
    if window == 1 and _needed(frozen, window) <= free:
        yield Offer("training adapters beside frozen weights", _needed(frozen, window), 1.0)


def _up(streamed: Sequence[UnitBytes], window: int) -> int:
    sizes = [unit.nbytes for unit in streamed]
    return sum(sizes[index] for index in loads(sizes, sweep(len(sizes)), window))


def sizes(units: Sequence[Unit], device_dtype: Callable[[torch.dtype], torch.dtype], training: bool) -> list[UnitBytes]:
    """What units will take on the device."""

    def nbytes(parameters: Iterable[nn.Parameter]) -> int:
        return sum(aligned(p.numel() * device_dtype(p.dtype).itemsize) for p in parameters)

    return [
        UnitBytes(
            unit.name,
            nbytes(p for _, p in unit.params),
            nbytes(p for _, p in unit.params if p.requires_grad and training),
            unit.resident,
        )
        for unit in units
    ]


def check_host(units: Sequence[Unit], device_dtype: Callable[[torch.dtype], torch.dtype]) -> None:
    """Rule 2, for units that will train."""
    of_units = [UnitHostBytes.of([p for _, p in unit.params], device_dtype) for unit in units]
    missing = [UnitHostBytes.of([p for _, p in unit.params if p.is_meta]).weights for unit in units]
    to_come = replace(host_bytes(of_units, states=STATES["AdamW"]), weights=sum(missing))
    if to_come.total < WORTH_ASKING:
        return
    free = host_memory().free
    if to_come.total > free:
        log.warning(
            "superpipeline: training will take %s more of host memory (weights %s, converted for their way %s, "
            "gradients %s, optimizer %s if it is AdamW), and %s are free: the system may end the process. "
            "Train fewer parameters, use an optimizer with less state, or close what else runs",
            *map(format_bytes, (to_come.total, to_come.weights, to_come.wire, to_come.gradients, to_come.optimizer)),
            format_bytes(free),
        )
