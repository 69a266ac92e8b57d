"""Choose the window: pure decisions from bytes.

Each decision gives its reason in one line, with all the numbers from which it was made.
Of the windows that fit the largest is chosen: memory that is left serves nobody, and a larger one is never slower.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import MemoryBudgetError
from ..options import Options, format_both, format_bytes
from .unit_numbers import UnitNumbers

FIRST_WINDOW = 2  # one unit computes while the next one is loaded
RESERVE_SHARE = 0.05  # of the device's memory
GROWTH = 4  # factor by which a window grows at most at a time: larger ones are approached in measured steps


@dataclass(frozen=True, kw_only=True)
class DeviceBudget:
    """Device memory of this process and what it is for, in bytes."""

    capacity: int  # that this process can have
    others: int  # the most that anything but the window's units took

    @property
    def reserve(self) -> int:
        """Bytes left free for what varies from step to step."""
        return int(self.capacity * RESERVE_SHARE)

    @property
    def spare(self) -> int:
        """Bytes for the window's units."""
        return max(0, self.capacity - self.reserve - self.others)

    def most(self, units: Sequence[UnitNumbers]) -> int:
        """Return the largest window that fits beside the most that others ever took and the reserve, at least 1."""
        return max(1, largest_window(units, self.spare))

    def __str__(self) -> str:
        return f"of {self.capacity} bytes {self.others} for others and {self.reserve} in reserve"


def sizes_of(units: Sequence[UnitNumbers]) -> str:
    """Format the units' bytes, largest first: "1 x 2048, 12 x 1024"."""
    sizes = sorted((unit.up_nbytes for unit in units), reverse=True)
    return ", ".join(f"{len(list(run))} x {nbytes}" for nbytes, run in itertools.groupby(sizes))


def largest_window(units: Sequence[UnitNumbers], budget: int) -> int:
    """Return how many of these units fit into a budget at once, whichever they are; 0 if one alone does not."""
    total = 0
    for count, nbytes in enumerate(sorted((unit.up_nbytes for unit in units), reverse=True)):
        total += nbytes
        if total > budget:
            return count
    return len(units)


def first_window(options: Options, units: Sequence[UnitNumbers], resident_nbytes: int, on_host: bool) -> int:
    """Return the window to begin with, from which it grows if there is no budget.

    With a budget it has room for the resident root, two gradient buffers of the largest unit, and as many of the
    largest units as the window has places. A value of the user's stays. On the CPU more than two units gain nothing:
    device memory is host memory.
    """
    gradients = 2 * max((unit.down_nbytes for unit in units), default=0)
    count = max(1, len(units))
    if options.memory_budget is None:
        first = FIRST_WINDOW if on_host else 1
        return min(first if options.window == "auto" else options.window, count)
    _check_budget(options.memory_budget, units, resident_nbytes)
    fits = max(1, largest_window(units, options.memory_budget - resident_nbytes - gradients))
    if options.window != "auto":
        if fits < min(options.window, count):
            raise MemoryBudgetError(
                f"window {options.window} does not fit into memory_budget {format_bytes(options.memory_budget)}, "
                f"which holds {fits} of the largest units; lower window or leave it to 'auto'"
            )
        return min(options.window, count)
    return min(fits, FIRST_WINDOW if on_host else count)


def _check_budget(budget: int, units: Sequence[UnitNumbers], resident_nbytes: int) -> None:
    """Check that every unit fits with its own gradient and the resident root."""
    if not units:
        return
    worst = max(units, key=lambda unit: unit.up_nbytes + unit.down_nbytes)
    needed = worst.up_nbytes + worst.down_nbytes + resident_nbytes
    if needed > budget:
        needs, got = format_both(needed, budget)
        raise MemoryBudgetError(f"memory_budget needs at least {needs} for {worst.name}, got {got}; raise it")
