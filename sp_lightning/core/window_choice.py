"""Choose the window and the transfer: pure decisions from bytes and times.

Each decision gives its reason in one line, with all the numbers from which it was made.

1. With a budget, the window is at most the largest whose bytes always fit into it: the resident root, two gradient
   buffers of the largest unit, and as many of the largest units as the window has places.
2. Without a budget, it is at most what fits on the device beside the most that anything else ever took there, and a
   reserve for what varies from step to step.
3. Of those windows the smallest is chosen that comes within 2 % of the fastest: steps are simulated (simulation.py)
   with measured times. Units of equal sizes count as equals, with the median of their times, rounded as it is printed.
4. A value that the user set is not changed. On the CPU more than two units gain nothing: device memory is host memory.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ..errors import MemoryBudgetError
from ..options import Options, format_both, format_bytes
from .machine import Machine
from .schedule import Schedule
from .simulation import simulate
from .unit_numbers import UnitNumbers

FIRST_WINDOW = 2  # one unit computes while the next one is loaded
RESERVE_SHARE = 0.05  # of the device's memory
GROWTH = 4  # factor by which a window grows at most at a time: larger ones are approached in measured steps
WORTH = 0.02  # the share of a step's time for which a larger window is worth its memory

# Costs in these simulations are times, so the machine does one of everything in a nanosecond.
_CLOCK = Machine(
    name="clock",
    flops_per_s=1e9,
    up_bytes_per_s=1e9,
    down_bytes_per_s=1e9,
    duplex=1,  # times were measured with both directions in use
    dram_bytes_per_s=1e9,
    device_nbytes=0,
    host_nbytes=0,
    optimizer_bytes_per_parameter=1,
)


# ---- memory


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
        """Return the largest window that fits, at least 1 (Rule 2)."""
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
    """Return the window to begin with, from which it grows if there is no budget (Rules 1, 2 and 4)."""
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


# ---- time


class MeasuredTimes(Protocol):
    """Measured times of a unit, in seconds (recorder.py)."""

    @property
    def up_s(self) -> float: ...
    @property
    def forward_s(self) -> float: ...
    @property
    def backward_s(self) -> float: ...
    @property
    def down_s(self) -> float: ...
    @property
    def step_s(self) -> float: ...


class UnitMs(NamedTuple):
    """Milliseconds of one unit in a step, rounded as they are printed."""

    up: float
    forward: float
    backward: float
    down: float
    step: float
    resident: bool = False

    def __str__(self) -> str:
        return "/".join(f"{value:g}" for value in self[:5]) + " resident" * self.resident


@dataclass(frozen=True)
class Times:
    """Times of a step's units, in the order of forward."""

    units: tuple[UnitMs, ...]
    overlap: bool  # units are stepped while backward runs
    runs_on: bool = False  # units are stepped while the next forward runs

    @property
    def streamed(self) -> int:
        """Number of units that pass through the window."""
        return sum(not unit.resident for unit in self.units)

    def step_ms(self, window: int, transfer: int) -> float:
        """Simulate a step with these sizes and return its milliseconds."""
        schedule = Schedule([0] * len(self.units), window, min(transfer, window))
        simulated = simulate(
            self._costs(), schedule, _CLOCK, optimizer_overlap=self.overlap, steps_into_forward=self.runs_on
        )
        return simulated.step_s * 1e3

    def _costs(self) -> list[UnitNumbers]:
        return [
            UnitNumbers(
                name=str(index),
                up_nbytes=round(unit.up * 1e6),
                down_nbytes=round(unit.down * 1e6),
                parameters=round(unit.step * 1e6),
                forward_flops=unit.forward * 1e6,
                backward_flops=unit.backward * 1e6,
                resident=unit.resident,
            )
            for index, unit in enumerate(self.units)
        ]

    def __str__(self) -> str:
        runs = ((len(list(run)), unit) for unit, run in itertools.groupby(self.units))
        listed = ", ".join(f"{count} x {unit}" for count, unit in runs)
        when = " after backward" * (not self.overlap) + " and beside forward" * self.runs_on
        return f"{listed} ms up/forward/backward/down/step{when}"


class WindowChoice(NamedTuple):
    """A window, a transfer, and the predicted milliseconds of a step with them."""

    window: int
    transfer: int
    ms: float


def times_of(
    units: Sequence[UnitNumbers], measured: Mapping[str, MeasuredTimes], overlap: bool, runs_on: bool = False
) -> Times | None:
    """Combine units and measured times, in the order of measurement; None if no streamed unit was measured (Rule 3)."""
    sizes = {unit.name: unit for unit in units}
    alike: dict[tuple[int, int, bool], list[MeasuredTimes]] = defaultdict(list)
    for name, times in measured.items():
        if name in sizes:
            alike[_kind(sizes[name])].append(times)
    if not any(not resident for _, _, resident in alike):
        return None
    median = {kind: _median(times, kind[2]) for kind, times in alike.items()}
    return Times(tuple(median[_kind(sizes[name])] for name in measured if name in sizes), overlap, runs_on)


def choose(times: Times, most: int, window: int | None = None, transfer: int | None = None) -> WindowChoice:
    """Choose the smallest window that is worth it, of at most ``most``, and its transfer; given values are used."""
    most = max(1, min(most, times.streamed))
    if window is None:
        enough = times.step_ms(most, transfer or 1) * (1 + WORTH)
        low, high = min(FIRST_WINDOW, most), most
        while low < high:  # a larger window is never slower
            middle = (low + high) // 2
            if times.step_ms(middle, transfer or 1) <= enough:
                high = middle
            else:
                low = middle + 1
        window = low
    tried = [transfer] if transfer is not None else [2**power for power in range(window.bit_length())]
    ms = {size: times.step_ms(window, size) for size in tried}
    fastest = min(ms.values())
    best = next(size for size in tried if ms[size] <= fastest * (1 + WORTH / 4))
    return WindowChoice(window, min(best, window), ms[best])


def _kind(unit: UnitNumbers) -> tuple[int, int, bool]:
    return unit.up_nbytes, unit.down_nbytes, unit.resident


def _median(times: Sequence[MeasuredTimes], resident: bool) -> UnitMs:
    columns = zip(*((t.up_s, t.forward_s, t.backward_s, t.down_s, t.step_s) for t in times), strict=True)
    up, forward, backward, down, step = (float(f"{statistics.median(column) * 1e3:.3g}") for column in columns)
    return UnitMs(up, forward, backward, down, step, resident)
