"""How many calls in lockstep fit on the device: ``at_once="auto"``.

1. The first call runs alone to its end. What it *keeps* is the most that it had on the device, beside weights, where it
   was about to enter a unit: that is what a call keeps while others run. The rest of its peak is what the running call
   *works* with.
2. As many calls are under way as fit beside the resident root, a window, a reserve of 5 %, what else is on the device,
   and what one of them works with; at least one, and at most 64. An "auto" window counts with all units if a call fits
   beside them, since then nothing has to travel; else with two, as more calls save more traffic than more units do. It
   shrinks before they begin.
3. A later call that keeps more counts from then on: fewer calls begin, and those under way go on. So the largest should
   come first.
4. On the CPU eight are under way: memory is not counted there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ..memory.device import Device

ON_HOST = 8
MOST = 64


class Measured(Protocol):
    """A call, with the bytes that it keeps by now (Rule 1)."""

    kept_nbytes: int


class CallMemory:
    """The device memory that calls take."""

    def __init__(self, device: Device, window: Any) -> None:
        self._device = device
        self._window = window
        self._before = self._device.beside_weights()  # the first call
        self._last = self._before
        self._kept = 1  # bytes, the most that any call kept
        self._works: int | None = None  # bytes that the running call needs beside that; None: not measured
        self._fullest = 0, 0  # bytes in use at the fullest entry of the first call, and those beside weights

    def goes_on(self) -> None:
        """Begin to count for a call whose turn begins."""
        self._last = self._device.beside_weights()

    def arrives(self, call: Measured) -> None:
        """Count what the running call keeps where it is about to enter a unit."""
        now = self._device.beside_weights()
        call.kept_nbytes += now - self._last
        self._last = now
        self._kept = max(self._kept, call.kept_nbytes)
        if self._works is None:
            self._fullest = max(self._fullest, (self._device.memory_allocated(), now))

    def ends(self) -> None:
        """Take what the first call needed beside what it kept, from the device's peak."""
        if self._works is None:
            in_use, beside_weights = self._fullest
            peak = self._device.memory_peak() - (in_use - beside_weights)
            self._works = max(0, peak - self._before - self._kept)

    def fits(self, under_way: Sequence[Measured]) -> int:
        """Return how many calls may be under way (Rule 2), with these among them."""
        if self._works is None:
            return 1
        base = self._device.beside_weights() - sum(call.kept_nbytes for call in under_way)
        rooms = (room - base - self._works for room in self._window.tuner.rooms_beside_window())
        count = next((room // self._kept for room in rooms if room >= self._kept), 1)
        count = min(count, MOST)
        self._window.expect(base + count * self._kept + self._works, f"{count} calls at once")
        return count
