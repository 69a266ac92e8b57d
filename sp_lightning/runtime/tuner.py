"""``window="auto"`` and ``transfer="auto"`` in a run: what is watched, and when the sizes change.

1. A run starts from the sizes that a plan or a resumed run chose, as far as they fit. The memory that came with them
   counts, too: that of other batches, or of another device. Without such sizes the window of the first pass is one
   unit: the memory of activations is not known yet, and without a recorded order nothing could be loaded early anyway.
   After each pass the window may grow, at most fourfold, into the memory that the pass left (window_choice.py).
2. *Others* is all memory on the device but the window's units. Its peak is known after a pass in which the device's
   peak rose: that peak, less the window's units when most was allocated. The largest of these peaks counts, so a window
   that shrank for a large batch does not grow back before the next one.
3. At each visit in a pass, others are compared with the last pass of the same kind at the same visit. If they rise
   faster, their peak will be higher in proportion: the window shrinks at once, before the model asks for the memory. In
   a pass without a predecessor, twice the largest rise between two visits has to be free.
4. If the device runs out of memory all the same, the units that can leave are evicted (window.py, Rule 3), and the
   window stays smaller than it was from then on. The same holds after a pass in which the allocator gave its cache back
   to the device, which is slow.
5. Each change is logged in one line with the numbers that it follows from. No change alters a result.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from ..host.unit_numbers import UnitNumbers
from ..host.window_choice import GROWTH, DeviceBudget, first_window, sizes_of
from ..memory.device import Device
from ..options import Options, format_bytes

log = logging.getLogger(__name__)

SMALL_RISE = 1 << 20  # bytes: a smaller rise predicts nothing


@dataclass
class _MemoryProfile:
    """The device memory at each visit of a pass."""

    others: list[int] = field(default_factory=list)  # bytes (Rule 2)
    window: list[int] = field(default_factory=list)  # bytes of the window's units
    peak: int = 0  # of others

    def window_when_fullest(self) -> int:
        sums = [others + window for others, window in zip(self.others, self.window, strict=True)]
        return self.window[sums.index(max(sums))] if sums else 0

    def expected(self, before: _MemoryProfile | None) -> tuple[int, float]:
        """Predict the peak of this pass, and by what factor it rises faster than the last of its kind (Rule 3)."""
        now, first = self.others[-1], self.others[0]
        if before is None:
            return now + 2 * max((b - a for a, b in zip(self.others, self.others[1:], strict=False)), default=0), 1.0
        index = len(self.others) - 1
        then = before.others[index] - before.others[0] if index < len(before.others) else 0
        if then < SMALL_RISE:
            return before.peak, 1.0
        ratio = max(1.0, (now - first) / then)
        return int(first + ratio * (before.peak - before.others[0])), ratio


class Tuner:
    """The choice of window and transfer during a run."""

    def __init__(self, options: Options, units: list[UnitNumbers], device: Device) -> None:
        self._options = options
        self._units = units
        self._streamed = [unit for unit in units if not unit.resident]
        self._device = device
        root_nbytes = sum(unit.up_nbytes for unit in units if unit.resident)
        self.window = first_window(options, self._streamed, root_nbytes, device.is_host)
        self.transfer = 1 if options.transfer == "auto" else min(options.transfer, self.window)
        self.may_shrink = options.window == "auto"
        self.watches_memory = self.may_shrink and not device.is_host  # around visits
        self._fills_memory = self.watches_memory and options.memory_budget is None
        self._most = self.window if options.memory_budget is not None else max(1, len(self._streamed))
        self._capacity = 0
        self._own_nbytes = 0  # the most that anything but the units of the window took in this run
        self._resumed_nbytes = 0  # in the resumed run, or by the plan (Rule 1)
        self._device_peak = 0
        self._retries = 0
        self._profiles: dict[Any, _MemoryProfile] = {}  # of the last pass of each kind, with its peak
        self._profile = _MemoryProfile()
        self._kind: Any = None

    # ---- passes

    def begin(self) -> None:
        """Begin with streaming: allocations from before do not count towards the peak."""
        if self.watches_memory:
            self._device.reset_memory_peak()
            self._capacity = self._device.memory_capacity()
            self._retries = self._device.memory_retries()
            budget = self._options.memory_budget
            why = "the memory of activations is not known before the first pass"
            if budget is not None:
                root = sum(unit.up_nbytes for unit in self._units if unit.resident)
                gradients = 2 * max((unit.down_nbytes for unit in self._streamed), default=0)
                why = f"of a budget of {budget} bytes, {root} are for the resident root and {gradients} for gradients"
            log.info(
                "superpipeline: starts with window %d and transfer %d: %s, units %s; the device has %s",
                self.window,
                self.transfer,
                why,
                sizes_of(self._streamed),
                format_bytes(self._capacity),
            )

    def resized(self, index: int, unit: UnitNumbers) -> None:
        """Take note of a unit's new size: its weights travel in other types now (autocast_weights.py)."""
        self._units[index] = unit
        self._streamed = [unit for unit in self._units if not unit.resident]

    def next_pass(self, kind: Any, showed_all: bool) -> None:
        """Begin a pass of this kind; decide on sizes first if the one before ``showed_all`` memory that a run uses."""
        if self._device.is_host:
            return
        if self._kind is not None:
            self._note_memory()
        if showed_all:
            self._grow()
        self._kind, self._profile = kind, _MemoryProfile()

    def _note_memory(self) -> None:
        """Take note of the memory of the pass that ends (Rules 2 and 4)."""
        if not self.watches_memory or not self._profile.others:
            return
        self._capacity = self._device.memory_capacity()
        peak = self._device.memory_peak()
        self._profile.peak = max(self._profile.others)
        if peak > self._device_peak:
            self._device_peak = peak
            self._profile.peak = max(self._profile.peak, peak - self._profile.window_when_fullest())
        elif self._kind in self._profiles:  # the peak of this pass is unknown, but not above the known one
            self._profile.peak = max(self._profile.peak, self._profiles[self._kind].peak)
        self._own_nbytes = max(self._own_nbytes, self._profile.peak)
        self._profiles[self._kind] = self._profile
        retries = self._device.memory_retries()
        if retries > self._retries and self.window > 1:
            self._shrink(self.window - 1, f"the allocator gave its cache back {retries - self._retries} times")
            self._most = self.window
        self._retries = retries

    @property
    def _others_nbytes(self) -> int:
        return max(self._own_nbytes, self._resumed_nbytes)

    def _grow(self) -> None:
        """Let the window be the largest that fits (Rule 1)."""
        if not self.may_shrink:
            return
        most, memory = self._most, DeviceBudget(capacity=self._capacity, others=self._others_nbytes)
        if self._fills_memory:
            most = min(most, memory.most(self._streamed))
        window = min(most, GROWTH * self.window)
        why = f"at most {most} fit" + f", as {memory}, units {sizes_of(self._streamed)}" * self._fills_memory
        self._set_sizes(window, min(self.transfer, window), why)

    def _set_sizes(self, window: int, transfer: int, reason: str) -> None:
        if (window, transfer) == (self.window, self.transfer):
            return
        log.info(
            "superpipeline: window %d -> %d, transfer %d -> %d: %s",
            self.window,
            window,
            self.transfer,
            transfer,
            reason,
        )
        self.window, self.transfer = window, transfer

    def _shrink(self, window: int, reason: str) -> None:
        self._set_sizes(window, min(self.transfer, window), reason)

    # ---- within a pass

    def visiting(self, window_nbytes: int) -> None:
        """Watch memory before a visit, with this many bytes of the window's units on the device (Rule 3)."""
        self._profile.others.append(self._device.memory_allocated() - window_nbytes)
        self._profile.window.append(window_nbytes)
        if self.window == 1:
            return
        expected, ratio = self._profile.expected(self._profiles.get(self._kind))
        memory = DeviceBudget(capacity=self._capacity, others=expected)
        most = memory.most(self._streamed)
        if most < self.window:
            self._own_nbytes = max(self._own_nbytes, expected)
            self._shrink(most, f"activations rise {ratio:.2f} times as fast as in the pass before; {memory} expected")

    def visited(self, window_nbytes: int) -> None:
        """Take note of the window's bytes with the units that this visit loads."""
        self._profile.window[-1] = max(self._profile.window[-1], window_nbytes)

    def full(self) -> None:
        """Shrink the window by one unit: an allocation on the device failed (Rule 4)."""
        window = max(1, self.window - 1)
        log.warning("superpipeline: out of device memory; window %d -> %d", self.window, window)
        self._most = window
        self.window, self.transfer = window, min(self.transfer, window)

    def ran_out(self) -> None:
        """Halve the window: the model's own code ran out of device memory, and the run may go on (Rule 4)."""
        if self.may_shrink and self.window > 1:
            window = self.window // 2
            log.warning(
                "superpipeline: out of device memory in the model's own code; window %d -> %d", self.window, window
            )
            self._most = window
            self.window, self.transfer = window, min(self.transfer, window)

    # ---- checkpoints

    def state(self) -> dict[str, int]:
        """Return the sizes that a resumed run starts from; empty if none were chosen."""
        if self._device.is_host or "auto" not in (self._options.window, self._options.transfer) or not self._kind:
            return {}
        return {"window": self.window, "transfer": self.transfer, "others_nbytes": self._others_nbytes}

    def resume(self, state: dict[str, int], why: str) -> None:
        """Start from the sizes that an earlier run or a plan chose, as far as they fit here."""
        if not state or self._device.is_host:
            return
        self._resumed_nbytes = state["others_nbytes"]
        window, transfer = self.window, self.transfer
        if self._options.window == "auto":
            window = min(state["window"], self._most)
            if self._fills_memory:
                window = min(
                    window, DeviceBudget(capacity=self._capacity, others=self._others_nbytes).most(self._streamed)
                )
        if self._options.transfer == "auto":
            transfer = state["transfer"]
        if self._fills_memory:
            memory = DeviceBudget(capacity=self._capacity, others=self._others_nbytes)
            why += f"; at most {memory.most(self._streamed)} fit, as {memory}, units {sizes_of(self._streamed)}"
        self._set_sizes(window, min(transfer, window), why)
