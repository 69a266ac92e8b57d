"""Resident units: which ones never leave the device, where they are stepped.

First those with a tied weight: its gradient is complete last, and the next forward needs it first, so that nothing
could hide its ways. Then from the first unit of the model on. Which they are is decided before the first step.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..host.device import Device, DeviceMemoryError
from ..options import Bytes, format_bytes
from .partition import FoundUnit

COPIES = 4  # of a weight that trains: itself, its gradient, and state as AdamW has it


def choose(cut: Sequence[FoundUnit], slots: Mapping[Any, Collection[Any]], count: int | Bytes) -> list[FoundUnit]:
    """Choose the resident units of a model that is cut into these parts, a number of them or as many as fit into bytes.

    ``slots`` has the places of parameters in the modules.
    """
    tied = {id(param) for param, places in slots.items() if len(places) > 1}
    order = [part for part in cut if not part.resident]
    order.sort(key=lambda part: not any(id(param) in tied for _, param in part.params))
    if isinstance(count, Bytes):
        nbytes = [sum((COPIES if p.requires_grad else 1) * p.nbytes for _, p in part.params) for part in order]
        count = sum(total <= int(count) for total in itertools.accumulate(nbytes))
    return order[:count]


def free_bytes(device: Device) -> int:
    """Return the bytes that are free on a device."""
    return device.memory_capacity() - device.memory_allocated()


def too_many(device: Device, chosen: Sequence[FoundUnit], free: int) -> DeviceMemoryError:
    """Make the error of a device without room for these units; it names a number that fits into what was free."""
    totals = list(itertools.accumulate(part.nbytes for part in chosen))
    fewer = min(sum(total <= free for total in totals), len(chosen) - 1)
    return DeviceMemoryError(
        f"{len(chosen)} resident units of {format_bytes(totals[-1], up=True)} do not fit on {device.torch_device},"
        f" where {format_bytes(free)} were free: set resident={fewer}, or fewer for gradients and optimizer state"
    )
