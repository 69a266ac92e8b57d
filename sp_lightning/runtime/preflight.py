"""Whether there is room for a run, from what is known before it: the sizes of units, nothing that has to be measured.

1. Device: a run stops before it starts if weights and gradients alone can not fit. What activations take is not known
   here (`sp_lightning.plan` measures it), so what passes may still not fit; what is refused certainly does not.
2. Host: gradients, what travels in another type and the optimizer's state are still to come when streaming begins. If
   they exceed what is free the system may end the process without a word, so that is said before any of it is taken.
3. What a change costs is told in seconds: those that weights, gradients and the optimizer take at least in a step, on
   this machine, as it is measured then. What units compute is not known here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from ..core.host import host_memory
from ..core.machine import Machine
from ..core.schedule import Schedule
from ..core.simulation import UnitCost, simulate
from ..core.sizing import UnitBytes, first_window
from ..errors import MemoryBudgetError
from ..memory.footprint import STATES, UnitHostBytes, host_bytes
from ..memory.layout import aligned
from ..memory.partition import CONTAINERS, Unit
from ..options import Options, format_both, format_bytes, format_seconds

WORTH_ASKING = 2**28  # bytes; less is not worth finding out how much is free

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Remedies:
    """What is there to make a run fit."""

    can_halve: bool  # weights are FP32 and could be computed with in half precision
    finer: Callable[[], tuple[str, list[UnitBytes]] | None]  # smaller units: their classes, and themselves
    measure: Callable[[], Machine]


Needed = Callable[[Sequence[UnitBytes], int], int]  # bytes of these units with this window


def check_device(units: Sequence[UnitBytes], window: int, free: int, where: str, means: Remedies) -> None:
    """Rule 1.

    Args:
        units: All of them, the resident ones included, with the gradients that they will have.
        window: That was asked for; 1 for an automatic one.
        free: Bytes of the device.
        where: Its name.
        means: Asked if it does not fit.
    """
    needed = needed_at_least(units, window)
    if needed > free:
        needs, there_is = format_both(needed, free)
        raise MemoryBudgetError(
            f"with window {window}, weights and gradients alone need {needs} on {where}, and {there_is} are free; "
            f"{_remedies(units, window, free, means, needed_at_least)}"
        )


def check_budget(options: Options, units: Sequence[UnitBytes], on_host: bool, means: Remedies) -> None:
    """The same for a budget that the user gave."""
    budget = options.memory_budget
    if budget is None:
        return
    root = sum(unit.nbytes for unit in units if unit.resident)
    try:
        first_window(options, [unit for unit in units if not unit.resident], root, on_host)
    except MemoryBudgetError as error:
        window = 1 if options.window == "auto" else options.window
        said = _remedies(units, window, budget, means, needed_in_budget)
        raise MemoryBudgetError(f"{error}; {said}") from None


def needed_at_least(units: Sequence[UnitBytes], window: int) -> int:
    """Certainly: the smallest units that make up a window, or the largest one with its gradients."""
    streamed = [unit for unit in units if not unit.resident]
    root = sum(unit.nbytes for unit in units if unit.resident)
    fewest = sum(sorted(unit.nbytes for unit in streamed)[:window])
    return root + max(fewest, max((unit.nbytes + unit.gradient_nbytes for unit in streamed), default=0))


def needed_in_budget(units: Sequence[UnitBytes], window: int) -> int:
    """As `autotune.first_window` counts."""
    streamed = sorted((unit for unit in units if not unit.resident), key=lambda unit: -unit.nbytes)
    root = sum(unit.nbytes for unit in units if unit.resident)
    gradients = max((unit.gradient_nbytes for unit in streamed), default=0)
    alone = max((unit.nbytes + unit.gradient_nbytes for unit in streamed), default=0)
    return root + (alone if window == 1 else sum(unit.nbytes for unit in streamed[:window]) + 2 * gradients)


def least_s(units: Sequence[UnitBytes], window: int, machine: Machine, transfer: int = 1) -> float:
    """Seconds that weights, gradients and the optimizer take in a step at least (Rule 3)."""
    costs = [
        UnitCost(
            name=unit.name,
            up_nbytes=unit.nbytes,
            down_nbytes=unit.gradient_nbytes,
            parameters=unit.trained,
            forward_flops=0.0,
            backward_flops=0.0,
            resident=unit.resident,
        )
        for unit in units
    ]
    return simulate(costs, Schedule([unit.nbytes for unit in units], window, transfer), machine).step_s


def _remedies(units: Sequence[UnitBytes], window: int, free: int, means: Remedies, needed: Needed) -> str:
    """The first three: what changes no result comes before what does."""
    tried = list(_tried(units, window, free, means, needed))
    fitting = [(what, other, size) for what, other, size in tried if needed(other, size) <= free]
    if not fitting:
        return "name smaller units, or use a device with more memory"
    machine = means.measure()
    listed = "; ".join(
        f"{what} ({format_bytes(needed(other, size))}, {format_seconds(least_s(other, size, machine))})"
        for what, other, size in fitting[:3]
    )
    now = format_seconds(least_s(units, window, machine))
    return (
        f"what would fit, and the time that weights, gradients and AdamW take in a step here at least, which is {now} "
        f"as it is: {listed}"
    )


def _tried(
    units: Sequence[UnitBytes], window: int, free: int, means: Remedies, needed: Needed
) -> Iterator[tuple[str, Sequence[UnitBytes], int]]:
    smaller = next((size for size in range(window - 1, 0, -1) if needed(units, size) <= free), 0)
    if smaller:
        yield f"window={smaller}", units, smaller
    finer = means.finer()
    if finer is not None:
        yield f"units={finer[0]}", finer[1], window
    if means.can_halve:
        halves = [replace(u, nbytes=u.nbytes // 2, gradient_nbytes=u.gradient_nbytes // 2) for u in units]
        yield "precision='bf16-true' with master_weights=True", halves, window
    if any(unit.gradient_nbytes for unit in units):
        frozen = [replace(unit, gradient_nbytes=0, trained=0) for unit in units]
        yield "training adapters beside frozen weights", frozen, window
    if smaller > 1 and needed(units, 1) < needed(units, smaller):
        yield "window=1", units, 1


@dataclass(frozen=True, kw_only=True)
class OutOfMemoryReport:
    """A device that ran out of memory in the model's own code."""

    where: str
    capacity: int
    allocated: int
    window: int
    window_nbytes: int  # of that
    largest_unit: int
    activations: str
    copies: int  # bytes of weights that autocast made and autograd keeps, in the first step only
    finer: list[str]  # classes of smaller units
    step_s: Callable[[int], float] | None  # with a window, where times were measured
    forward_s: float  # of all units, where they were

    def message(self) -> str:
        """What it is full of, and three changes that make room."""
        others = format_bytes(self.allocated - self.window_nbytes)
        if self.copies:
            others += f" ({format_bytes(self.copies)} are weights in autocast's type, which the first step alone keeps)"
        return (
            f"superpipeline: of {format_bytes(self.capacity)} on {self.where} the window of {self.window} held "
            f"{format_bytes(self.window_nbytes)} and activations, gradients, buffers and all else {others}; "
            "what makes room: " + "; ".join(list(self._changes())[:3])
        )

    def _changes(self) -> Iterator[str]:
        more = {"keep": "recompute", "offload": "recompute", "recompute": "recompute+offload"}.get(self.activations)
        if more == "recompute":
            yield f"activations='recompute' (each forward runs twice{_more(self.forward_s)})"
        elif more is not None:
            yield f"activations={more!r} (what is kept goes to the host and comes back)"
        if self.window > 1:
            freed = format_bytes(self.window_nbytes - self.largest_unit)
            slower = 0.0 if self.step_s is None else self.step_s(1) - self.step_s(self.window)
            yield f"window=1 ({freed} less; no weights come up while a unit computes{_more(slower)})"
        yield "batches of half the size and accumulate_grad_batches twice as large (weights come up twice as often)"
        if self.finer:
            yield f"units={self.finer} (a window and gradients of smaller units)"


def _more(seconds: float) -> str:
    return f": {format_seconds(seconds)} a step more" if seconds > 0 else ""


def finer_classes(units: Sequence[Unit]) -> list[str]:
    """Class names that cut the largest unit into its parts, and leave the others whole; none if it has no parts."""
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
            sum(p.numel() for _, p in unit.params if p.requires_grad and training),
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
            "Train a tenth of the parameters, as adapters do (%s less), use an optimizer with half the state "
            "(%s less), or close what else runs",
            *map(format_bytes, (to_come.total, to_come.weights, to_come.wire, to_come.gradients, to_come.optimizer)),
            format_bytes(free),
            format_bytes(9 * (to_come.gradients + to_come.optimizer) // 10),
            format_bytes(to_come.optimizer // 2),
        )
