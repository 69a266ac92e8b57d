"""Whether memory suffices for a run, from the sizes of its units: all that is known before it starts.

1. Device: a run stops before it starts if weights and gradients alone cannot fit. The memory of activations is not
   known here (`sp_lightning.plan` measures it): a run that passes may still not fit, one that is refused certainly
   does not.
2. Host: gradients, wire copies and the optimizer's state are still to be allocated when streaming begins. If they
   exceed the free memory, the system may end the process without a message, so a warning comes before any allocation.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from ..errors import MemoryBudgetError, PartitionError
from ..host import remedies
from ..host.device import Device
from ..host.machine import host_memory
from ..host.unit_numbers import STATES, HostBytes, UnitHostBytes, UnitNumbers, aligned, host_bytes
from ..host.window_choice import first_window
from ..options import Options, format_both, format_bytes
from .partition import CONTAINERS, FoundUnit, partition

WORTH_CHECKING = 2**28  # bytes; for less, free memory is not looked up

log = logging.getLogger(__name__)


def check_memory(
    module: nn.Module,
    units: Sequence[FoundUnit],
    options: Options,
    device: Device,
    travels_as: Callable[[nn.Parameter], torch.dtype],
    trains: bool,
) -> None:
    """Raise if weights and gradients cannot fit on the device or into the budget; warn of a host that would be filled.

    Args:
        module: The module.
        units: All units, the resident ones included.
        options: The user's options.
        device: The device that computes.
        travels_as: The type in which a weight travels.
        trains: Whether training certainly follows.
    """

    def finer() -> tuple[list[str], list[UnitNumbers]]:
        classes = finer_classes(units)
        with contextlib.suppress(PartitionError):
            return classes, sizes(partition(module, classes), travels_as, trains)
        return [], []

    params = [param for unit in units for _, param in unit.params]
    can_halve = trains and not options.master_weights and {param.dtype for param in params} == {torch.float32}
    means = Means(can_halve=can_halve, finer=finer)
    if not device.is_host:
        window = 1 if options.window == "auto" else options.window
        free = max(0, device.memory_capacity() - device.memory_allocated())
        of_device = sizes(units, travels_as, trains)
        check_device(of_device, window, free, str(device.torch_device), means)
    check_budget(options, sizes(units, travels_as, True), device.is_host, means)
    if trains:
        check_host(units, travels_as)


def check_host(units: Sequence[FoundUnit], travels_as: Callable[[nn.Parameter], torch.dtype]) -> None:
    """Warn if the host memory that training will allocate exceeds what is free, with what would fit (Rule 2)."""
    params = [param for unit in units for _, param in unit.params]
    own = UnitHostBytes.of(params)
    wire = sum(aligned(p.numel() * travels_as(p).itemsize) for p in params if travels_as(p) is not p.dtype)
    whole = host_bytes([replace(own, wire=wire)], states=STATES["AdamW"])
    missing = UnitHostBytes.of(param for param in params if param.is_meta).weights
    to_come = replace(whole, weights=missing)
    if to_come.total >= WORTH_CHECKING and to_come.total > (free := host_memory().free):
        log.warning("superpipeline: training will take %s", short_of(params, whole, to_come, free, 1))


@dataclass(frozen=True, kw_only=True)
class Means:
    """The changes that could make a run fit."""

    can_halve: bool  # weights are FP32, and computing with them in half precision is possible
    finer: Callable[[], tuple[list[str], list[UnitNumbers]]]  # smaller units, if any: their classes, and their sizes


Needed = Callable[[Sequence[UnitNumbers], int], int]  # bytes of these units with this window


def check_device(units: Sequence[UnitNumbers], window: int, free: int, where: str, means: Means) -> None:
    """Refuse a run whose weights and gradients alone cannot fit on the device (Rule 1).

    Args:
        units: All units, the resident ones included, with the gradients that they will have.
        window: The window of the options; 1 for "auto".
        free: The free bytes of the device.
        where: The device's name.
        means: The changes that the error can offer.
    """
    needed = needed_at_least(units, window)
    if needed > free:
        needs, available = format_both(needed, free)
        raise MemoryBudgetError(
            f"with window {window}, weights and gradients alone need {needs} on {where}, but {available} are free; "
            f"{_describe_remedies(units, window, free, means, needed_at_least)}"
        )


def check_budget(options: Options, units: Sequence[UnitNumbers], on_host: bool, means: Means) -> None:
    """Refuse a run whose weights and gradients alone cannot fit into the user's ``memory_budget`` (Rule 1)."""
    budget = options.memory_budget
    if budget is None:
        return
    root = sum(unit.up_nbytes for unit in units if unit.resident)
    try:
        first_window(options, [unit for unit in units if not unit.resident], root, on_host)
    except MemoryBudgetError as error:
        window = 1 if options.window == "auto" else options.window
        changes = _describe_remedies(units, window, budget, means, needed_in_budget)
        raise MemoryBudgetError(f"{error}; {changes}") from None


def needed_at_least(units: Sequence[UnitNumbers], window: int) -> int:
    """Return the device bytes that a run certainly needs.

    These are a window of the smallest units, or the largest unit with its gradients, beside the resident root.
    """
    streamed = [unit for unit in units if not unit.resident]
    root = sum(unit.up_nbytes for unit in units if unit.resident)
    fewest = sum(sorted(unit.up_nbytes for unit in streamed)[:window])
    return root + max(fewest, max((unit.up_nbytes + unit.down_nbytes for unit in streamed), default=0))


def needed_in_budget(units: Sequence[UnitNumbers], window: int) -> int:
    """Return the device bytes that a run needs as `window_choice.first_window` counts them for a budget."""
    streamed = sorted((unit for unit in units if not unit.resident), key=lambda unit: -unit.up_nbytes)
    root = sum(unit.up_nbytes for unit in units if unit.resident)
    gradients = max((unit.down_nbytes for unit in streamed), default=0)
    alone = max((unit.up_nbytes + unit.down_nbytes for unit in streamed), default=0)
    return root + (alone if window == 1 else sum(unit.up_nbytes for unit in streamed[:window]) + 2 * gradients)


def _describe_remedies(units: Sequence[UnitNumbers], window: int, free: int, means: Means, needed: Needed) -> str:
    """Name the first three changes that would fit, those that change no result before those that do."""
    tried = list(_tried(units, window, free, means, needed))
    fitting = [(what, other, size) for what, other, size in tried if needed(other, size) <= free]
    if not fitting:
        return "name smaller units, or use a device with more memory"
    listed = (f"{what} ({format_bytes(needed(other, size))})" for what, other, size in fitting[:3])
    return "these would fit (device memory): " + "; ".join(listed)


def _tried(
    units: Sequence[UnitNumbers], window: int, free: int, means: Means, needed: Needed
) -> Iterator[tuple[str, Sequence[UnitNumbers], int]]:
    smaller = next((size for size in range(window - 1, 0, -1) if needed(units, size) <= free), 0)
    if smaller:
        yield remedies.window(smaller).what, units, smaller
    classes, finer = means.finer()
    for remedy in remedies.smaller_units(classes):
        yield remedy.what, finer, window
    for remedy in remedies.half_precision(means.can_halve):
        halves = [replace(u, up_nbytes=u.up_nbytes // 2, down_nbytes=u.down_nbytes // 2) for u in units]
        yield remedy.what, halves, window
    if any(unit.down_nbytes for unit in units):
        frozen = [replace(unit, down_nbytes=0, parameters=0) for unit in units]
        yield remedies.ADAPTERS.what, frozen, window
    if smaller > 1 and needed(units, 1) < needed(units, smaller):
        yield remedies.window(1).what, units, 1


def finer_classes(units: Sequence[FoundUnit]) -> list[str]:
    """List class names that cut the largest unit into its parts and leave the others whole; none if it has no parts."""
    streamed = [unit for unit in units if not unit.resident]
    largest = max(streamed, key=lambda unit: unit.nbytes, default=None)
    if largest is None:
        return []
    cut = {type(module) for _, module in largest.modules}
    parts = [part for _, module in largest.modules for part in _parts(module)]
    others = [module for unit in streamed for _, module in unit.modules if type(module) not in cut]
    return list(dict.fromkeys(type(module).__name__ for module in (*parts, *others))) if len(parts) > 1 else []


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, CONTAINERS):
            yield from _parts(child)
        elif any(True for _ in child.parameters()):
            yield child


def sizes(
    units: Sequence[FoundUnit], travels_as: Callable[[nn.Parameter], torch.dtype], training: bool
) -> list[UnitNumbers]:
    """List what units will take on the device: weights and, with training, gradients."""

    def nbytes(parameters: Iterable[nn.Parameter]) -> int:
        return sum(aligned(p.numel() * travels_as(p).itemsize) for p in parameters)

    def of(unit: FoundUnit) -> UnitNumbers:
        weights = [p for _, p in unit.params]
        trained = [p for p in weights if p.requires_grad and training]
        cast = [p for p in trained if travels_as(p) is not p.dtype]
        elements, cast_elements = (sum(p.numel() for p in some) for some in (trained, cast))
        return UnitNumbers(
            unit.name, nbytes(weights), nbytes(trained), elements, resident=unit.resident, cast=cast_elements
        )

    return list(map(of, units))


def terms_of(nbytes: HostBytes) -> str:
    named = {"weights": nbytes.weights, "wire copies": nbytes.wire, "gradients": nbytes.gradients + nbytes.under_way}
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in named.items())


def short_of(parameters: Sequence[nn.Parameter], whole: HostBytes, to_come: HostBytes, free: int, ranks: int) -> str:
    """Describe what will be missing on the host, and what would fit."""
    half = all(p.dtype.itemsize <= 2 for p in parameters if p.is_floating_point())
    listed = remedies.host(half=half, wires=whole.wire > 0, activations="keep", optimizer="AdamW")
    present = whole.weights - to_come.weights
    count = sum(p.numel() for p in parameters if p.requires_grad)
    known = [remedy for remedy in listed if not remedy.has_disk]  # nobody gave a folder
    left = [(remedy, _host_left(remedy, whole, half, count, ranks) - present) for remedy in known]
    fitting = [f"{remedy.what} ({format_bytes(max(0, n))}; {remedy.how})" for remedy, n in left if n <= free]
    return (
        f"{format_bytes(to_come.total)} more host memory ({terms_of(to_come)}, optimizer "
        f"{format_bytes(to_come.optimizer)} if it is AdamW), but {format_bytes(free)} are free: the system may end the "
        "process. Close other programs, or, with what each would still take: "
        + ("; ".join(fitting[:3]) or "nothing fits but a smaller model")
    )


def _host_left(remedy: remedies.HostRemedy, whole: HostBytes, half: bool, trained: int, ranks: int) -> int:
    """Return the bytes of host memory that the whole run takes with this change, on this many devices."""
    halved = 2 if remedy.half and not half else 1
    share = remedies.ADAPTED if remedy.adapters else 1
    optimizer = whole.optimizer / halved
    weights = whole.weights / halved * remedy.base_bits / 16
    if remedy.optimizer is not None:  # each of several ranks steps all weights, with a state of its own
        optimizer = ranks * remedies.STATE_NBYTES[remedy.optimizer] * trained
        weights *= ranks + 1 if ranks > 1 else 1
    keeps_wire = not remedy.half and "wire_dtype" not in remedy.options
    gradients = (whole.gradients + whole.under_way) / halved
    return int(weights + keeps_wire * whole.wire + share * (gradients + optimizer))


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
