"""How large the window can be: first from what the budget or the free memory holds, then from what was measured.

1. With a budget, the window is the largest whose bytes fit into it: the resident root, two gradient buffers of the
   largest unit, and the window's units, the largest ones if need be.
2. Without one, the first passes run with a small window. After the first pass of each kind that made gradients (of
   any, where no training follows) the memory that was never used is known, and the window grows into nine tenths of it.
3. On the CPU there is nothing to gain from more than two units: device memory is host memory.
4. A choice that the user made is not changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .config import Options, format_bytes
from .errors import MemoryBudgetError

FIRST_WINDOW = 2  # one computes while the next one comes
SPARE_SHARE = 0.9  # of the memory that was never used: the rest is for what varies from step to step


@dataclass(frozen=True)
class UnitBytes:
    """What planning has to know about a unit."""

    name: str
    nbytes: int
    gradient_nbytes: int


def largest_window(units: Sequence[UnitBytes], budget: int) -> int:
    """How many of these units fit into a budget at once, whichever they are; 0 if not every single one does."""
    total = 0
    for count, nbytes in enumerate(sorted((unit.nbytes for unit in units), reverse=True)):
        total += nbytes
        if total > budget:
            return count
    return len(units)


def first_window(options: Options, units: Sequence[UnitBytes], resident_nbytes: int, on_host: bool) -> int:
    """The window to begin with (Rules 1 to 4)."""
    gradients = 2 * max((unit.gradient_nbytes for unit in units), default=0)
    count = max(1, len(units))
    if options.memory_budget is None:
        wanted = FIRST_WINDOW if options.window == "auto" else options.window
        return min(wanted, count)
    _check_budget(options.memory_budget, units, resident_nbytes)
    fits = largest_window(units, options.memory_budget - resident_nbytes - gradients)
    if options.window != "auto":
        if fits < min(options.window, count):
            raise MemoryBudgetError(
                f"window {options.window} does not fit into memory_budget {format_bytes(options.memory_budget)}, "
                f"which holds {max(fits, 1)} of the largest units; lower window or leave it to 'auto'"
            )
        return min(options.window, count)
    return min(max(fits, 1), FIRST_WINDOW if on_host else count)


def grown_window(units: Sequence[UnitBytes], window: int, spare: int) -> int:
    """The window after a pass that left ``spare`` bytes unused (Rule 2)."""
    largest = max((unit.nbytes for unit in units), default=0)
    if not largest:
        return window
    return min(max(1, len(units)), window + int(spare * SPARE_SHARE) // largest)


def _check_budget(budget: int, units: Sequence[UnitBytes], resident_nbytes: int) -> None:
    """Every unit must fit with its own gradient and the resident root."""
    if not units:
        return
    worst = max(units, key=lambda unit: unit.nbytes + unit.gradient_nbytes)
    needed = worst.nbytes + worst.gradient_nbytes + resident_nbytes
    if needed > budget:
        raise MemoryBudgetError(
            f"memory_budget needs at least {format_bytes(needed)} for {worst.name}, got {format_bytes(budget)}; "
            "raise it, or name smaller units"
        )
