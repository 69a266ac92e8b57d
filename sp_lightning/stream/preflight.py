"""Before a run begins: which units are resident, and whether memory suffices, from the sizes of the units.

- Resident units never leave the device, where they are stepped. First come those with a tied weight: its gradient is
  complete last, and the next forward needs it first, so no computation could hide its copies. The other units follow
  in the model's order.
- A run stops before it starts if weights and gradients alone cannot fit on the device. The memory of activations is not
  known here (`sp_lightning.plan` measures it): a run that passes may still not fit.
- On the host, gradients, wire copies and the optimizer's state are still to be allocated. If they exceed what is free,
  the system may end the process without a message: a warning comes before any allocation.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import MemoryBudgetError
from ..host.device import Device, DeviceMemoryError, aligned
from ..host.machine import host_memory
from ..host.room import UnitNumbers, first_window
from ..options import Bytes, Options, format_both, format_bytes
from .partition import FoundUnit
from .shards import Sharded
from .wholes import part_of

COPIES = 4  # of a weight that trains: itself, its gradient, and state as AdamW has it
WORTH_CHECKING = 2**28  # bytes; for less, free memory is not looked up

log = logging.getLogger(__name__)


# ---- resident units


def choose_residents(
    cut: Sequence[FoundUnit], slots: Mapping[Any, Collection[Any]], count: int | Bytes
) -> list[FoundUnit]:
    """Choose the units that stay on the device: ``count`` of them, or as many as fit into so many bytes.

    Units with tied weights come first: ``slots`` has several places in modules for these.
    """
    tied = {id(param) for param, places in slots.items() if len(places) > 1}
    order = [part for part in cut if not part.resident]
    order.sort(key=lambda part: not any(id(param) in tied for _, param in part.params))
    if isinstance(count, Bytes):
        shards = [whole for part in order for whole in part.wholes if isinstance(whole, Sharded)]
        largest = {id(part_of(whole)): whole.largest_numel() for whole in shards}  # on any rank: all choose alike
        numels = [[(p, largest.get(id(p), p.numel())) for _, p in part.params] for part in order]
        nbytes = [sum((COPIES if p.requires_grad else 1) * p.element_size() * n for p, n in each) for each in numels]
        count = sum(total <= int(count) for total in itertools.accumulate(nbytes))
    return order[:count]


def free_bytes(device: Device) -> int:
    """Return the bytes that are free on a device."""
    return max(0, device.memory_capacity() - device.memory_allocated())


def too_many_residents(device: Device, chosen: Sequence[FoundUnit], free: int) -> DeviceMemoryError:
    """Make the error for resident units that do not fit on the device; it suggests a number that fits."""
    totals = list(itertools.accumulate(part.nbytes for part in chosen))
    fewer = min(sum(total <= free for total in totals), len(chosen) - 1)
    return DeviceMemoryError(
        f"{len(chosen)} resident units of {format_bytes(totals[-1], up=True)} do not fit on {device.torch_device},"
        f" where {format_bytes(free)} were free: set resident={fewer}, or fewer for gradients and optimizer state"
    )


# ---- memory


def check_memory(
    units: Sequence[FoundUnit],
    options: Options,
    device: Device,
    travels_as: Callable[[nn.Parameter], torch.dtype],
    trains: bool,
) -> None:
    """Raise if weights and gradients cannot fit on the device or into `memory_budget`; warn if the host lacks memory.

    Args:
        units: All units, the resident ones included.
        options: The user's options.
        device: The device that computes.
        travels_as: The type in which a weight travels.
        trains: Whether training certainly follows.
    """
    if not device.is_host:
        window = 1 if options.window == "auto" else options.window
        _check_device(sizes(units, travels_as, trains), window, free_bytes(device), device)
    first_window(options.window, options.memory_budget, sizes(units, travels_as, True), device.is_host)
    if trains and not options.uses_files:  # with files, the store decides what exceeds `host_budget`
        _check_host(units, travels_as)


def _check_device(units: Sequence[UnitNumbers], window: int, free: int, device: Device) -> None:
    """Raise if the smallest window, or the largest unit with its gradients, does not fit beside resident units."""
    streamed = [unit for unit in units if not unit.resident]
    fewest = sum(sorted(unit.up_nbytes for unit in streamed)[:window])
    largest = max((unit.up_nbytes + unit.down_nbytes for unit in streamed), default=0)
    needed = sum(unit.up_nbytes for unit in units if unit.resident) + max(fewest, largest)
    if needed > free:
        needs, available = format_both(needed, free)
        raise MemoryBudgetError(
            f"with window {window}, weights and gradients alone need {needs} on {device.torch_device}, but {available}"
            " are free: lower window, name smaller units, compute in half precision, or train adapters; `python -m"
            " sp_lightning plan` says what would fit"
        )


def _check_host(units: Sequence[FoundUnit], travels_as: Callable[[nn.Parameter], torch.dtype]) -> None:
    """Warn if the host memory that training will allocate exceeds what is free."""
    params = [param for unit in units for _, param in unit.params]
    missing = sum(param.nbytes for param in params if param.is_meta)
    wires = sum(param.numel() * travels_as(param).itemsize for param in params if travels_as(param) is not param.dtype)
    gradients = sum(param.nbytes for param in params if param.requires_grad)
    needed = missing + wires + 3 * gradients
    if needed >= WORTH_CHECKING and needed > (free := host_memory().free):
        log.warning(
            "superpipeline: training will take %s more of host memory: gradients %s, optimizer %s if it is AdamW, and"
            " the rest for weights and copies that travel; but %s are free, and the system may end the process. Close"
            " other programs, set disk= a folder on a local SSD, or train adapters; `python -m sp_lightning plan` says"
            " what would fit",
            *map(format_bytes, (needed, gradients, 2 * gradients, free)),
        )


def check_copies(module: nn.Module, ranks: int) -> None:
    """Warn if processes that are about to start make more copies of this module than the host has room for."""
    nbytes = sum(param.nbytes for param in module.parameters() if not param.is_meta)
    copies = (ranks - 1) * nbytes
    if copies >= WORTH_CHECKING and copies > (free := host_memory().free):
        log.warning(
            "superpipeline: each of %d processes makes the model in __init__, with %s of weights, until it has moved "
            "into the memory that they share: %s more, but %s are free, and the system may end a process. Make the "
            "model in configure_model, under torch.device('meta')",
            ranks,
            *map(format_bytes, (nbytes, copies, free)),
        )


def sizes(
    units: Sequence[FoundUnit], travels_as: Callable[[nn.Parameter], torch.dtype], training: bool
) -> list[UnitNumbers]:
    """Return the bytes that each unit takes on the device: of its weights and, with ``training``, of its gradients."""

    def nbytes(parameters: Iterable[nn.Parameter]) -> int:
        """Return the bytes of parameters in the types in which they travel."""
        return sum(aligned(p.numel() * travels_as(p).itemsize) for p in parameters)

    def of(unit: FoundUnit) -> UnitNumbers:
        """Return the bytes and counts of one unit."""
        weights = [p for _, p in unit.params]
        trained = [p for p in weights if p.requires_grad and training]
        cast = [p for p in trained if travels_as(p) is not p.dtype]
        elements, cast_elements = (sum(p.numel() for p in some) for some in (trained, cast))
        return UnitNumbers(
            unit.name, nbytes(weights), nbytes(trained), elements, resident=unit.resident, cast=cast_elements
        )

    return list(map(of, units))
