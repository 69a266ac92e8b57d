"""How many units fit on the device: `window="auto"`, from bytes.

- *Others* is all memory on the device but the window's units. After a step that raised the device's peak, others took
  that peak, less the window's units when most was allocated. The largest such figure counts.
- A run begins with one unit, because the memory of activations is not known. After each step the window grows into
  what others and a reserve leave free: while weights train at most fourfold.
- The first step that trains begins small again: what evaluation left free says nothing about backward.
- Where an allocation failed, the window stays smaller than it was.
- Gradients that stay on the device until the step may be there beside the next forward: the window leaves room for all
  of them, and one that does not fit beside the most that a forward took goes down.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import MemoryBudgetError
from ..options import Count, format_both, format_bytes
from .device import Device

CPU_WINDOW = 2  # one unit computes while the next one is loaded
RESERVE_SHARE = 0.05  # share of the device's memory that is left free
GROWTH = 4  # factor by which a window grows at most at a time: larger ones are approached in measured steps

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class UnitNumbers:
    """The bytes of one unit."""

    name: str
    up_nbytes: int  # of its weights on the device, which each load copies
    down_nbytes: int  # of its gradients; 0 for a frozen unit
    parameters: int = 0  # elements that train
    resident: bool = False  # stays on the device, outside the window
    cast: int = 0  # elements that train, are FP32 on the host, and travel in half precision


def largest_window(units: Sequence[UnitNumbers], budget: int) -> int:
    """Return how many of these units fit into a budget at once, whichever they are; 0 if one alone does not."""
    total = 0
    for count, nbytes in enumerate(sorted((unit.up_nbytes for unit in units), reverse=True)):
        total += nbytes
        if total > budget:
            return count
    return len(units)


def first_window(window: Count, budget: int | None, units: Sequence[UnitNumbers], on_host: bool) -> int:
    """Return how many units the window holds at first; without a budget an automatic window grows later.

    With a budget it has room for the resident units and their gradients, two gradient buffers of the largest unit that
    streams, and a full window of the largest units. A size set by the user is kept, or MemoryBudgetError is raised.
    On the CPU more than two units gain nothing: device memory is host memory.
    """
    streamed = [unit for unit in units if not unit.resident]
    count = max(1, len(streamed))
    if budget is None:
        first = CPU_WINDOW if on_host else 1
        return min(first if window == "auto" else window, count)
    left = budget - sum(unit.up_nbytes + unit.down_nbytes for unit in units if unit.resident)
    worst = max(streamed, key=lambda unit: unit.up_nbytes + unit.down_nbytes, default=None)
    if worst is not None and worst.up_nbytes + worst.down_nbytes > left:
        needs, got = format_both(worst.up_nbytes + worst.down_nbytes + budget - left, budget)
        raise MemoryBudgetError(
            f"memory_budget needs at least {needs} for {worst.name}, got {got}: raise it, or name smaller units"
        )
    gradients = 2 * max((unit.down_nbytes for unit in streamed), default=0)
    fits = max(1, largest_window(streamed, left - gradients))
    if window == "auto":
        return min(fits, CPU_WINDOW if on_host else count)
    if fits < min(window, count):
        raise MemoryBudgetError(
            f"window {window} does not fit into memory_budget {format_bytes(budget)}, which holds {fits} of the largest"
            " units; lower window or leave it to 'auto'"
        )
    return min(window, count)


class Room:
    """The sizes of the window, which grows into the device's memory where the user left that open."""

    def __init__(
        self,
        window: Count,
        transfer: Count,
        budget: int | None,
        units: Sequence[UnitNumbers],
        device: Device,
        keeps_gradients: bool = False,
    ) -> None:
        self._device, self._budget = device, budget
        self._streamed = [unit for unit in units if not unit.resident]
        gradients = [unit.down_nbytes for unit in self._streamed]
        self._packs = sum(gradients) if keeps_gradients else 2 * max(gradients, default=0)
        self._kept: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # bytes of gradients that stay
        self._beside = 0  # the most bytes in use besides gradients that stay
        self.window = self._first = first_window(window, budget, units, device.is_host)
        self._transfer = 1 if transfer == "auto" else transfer
        self.transfer = min(self._transfer, self.window)
        self._most = self.window if budget is not None or device.is_host else max(1, len(self._streamed))
        self.grows = window == "auto" and not device.is_host  # whether the window may change from step to step
        self._others = self._peak = 0
        self._fullest = self._window_then = 0  # most bytes allocated in this step, and the window's share then
        self._was_trained = self._has_begun = False
        if self.grows:
            device.reset_memory_peak()

    def note_memory(self, window_nbytes: int) -> None:
        """Note the device memory in use after loads, and how many bytes of that are the window's units."""
        if (allocated := self._device.memory_allocated()) > self._fullest:
            self._fullest, self._window_then = allocated, window_nbytes

    def takes(self, nbytes: int) -> bool:
        """Return whether nbytes of gradients may stay on the device until the step; note the memory in use now."""
        kept = sum(self._kept.values())
        now = self._device.memory_allocated() - kept if self._beside else self._device.memory_peak()
        self._beside = max(self._beside, now)
        return self._beside + kept + nbytes <= (1 - RESERVE_SHARE) * self._device.memory_capacity()

    def keep(self, gradient: Any, nbytes: int) -> None:
        """Count a gradient's bytes as used on the device for as long as the gradient lives."""
        self._kept[gradient] = nbytes

    def begin_step(self, trains: bool) -> None:
        """Resize the window for the next step, by the memory that the step before it took."""
        if not self.grows:
            return
        if self._has_begun:
            self._note_peak()
        if trains and not self._was_trained:
            self._was_trained = True
            if self._has_begun:
                self._device.reset_memory_peak()
                self._peak = self._others = 0
            self._resize(self._first, "the first step that trains")
        elif self._has_begun:
            self._grow(GROWTH * self.window if trains else self._most)
        self._has_begun = True
        self._fullest = self._window_then = 0

    def _note_peak(self) -> None:
        """Update the device's memory peak, and the part of it that the window's units did not take."""
        peak = self._device.memory_peak()
        if peak > self._peak:
            self._peak = peak
            is_first = self._was_trained and self.window == self._first
            packs = self._packs if is_first else 0  # gradients that a faster host would have on their way down
            self._others = max(self._others, peak - self._window_then + packs)

    def _grow(self, limit: int) -> None:
        """Resize the window to what fits beside the most that others took and a reserve, up to a limit."""
        capacity = self._device.memory_capacity()
        reserve = int(capacity * RESERVE_SHARE)
        fit = max(1, largest_window(self._streamed, max(0, capacity - reserve - self._others)))
        most = self._most if self._budget is not None else min(self._most, fit)
        found = f"at most {most} fit: of {capacity} bytes others take {self._others}, and {reserve} are a reserve"
        self._resize(min(most, limit), found)

    def _resize(self, window: int, why: str) -> None:
        """Set the window's size, fit the transfer to it, and log the reason."""
        if window != self.window:
            log.info("superpipeline: window %d -> %d: %s", self.window, window, why)
            self.window, self.transfer = window, min(self._transfer, window)

    def shrink(self, window: int, why: str) -> None:
        """Reduce an automatic window for good, after the device ran out of memory. A window set by the user stays."""
        if self.grows and self.window > 1:
            self._most = window
            self._resize(window, why)
