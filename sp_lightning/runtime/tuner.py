"""``window="auto"`` and ``transfer="auto"`` in a run: what is watched, and when the sizes change.

1. A run starts from the sizes that a plan or the run that it resumes had found, as far as they fit, and keeps them
   until it has measured times of its own. Without either its first pass holds one unit: what activations take is not
   known, and without an order nothing could come early anyway. After each pass the window may grow, at most fourfold,
   into the memory that the pass left (sizing.py, Rule 2).
2. The most that others take is known where the device's peak rose: that peak, less the window's units when most was
   allocated. It never falls, so a window that shrank for a large batch does not grow back before the next one.
3. Within a pass, at each visit, what others hold is compared with the last pass of its kind at the same visit. Where it
   rises faster, its peak will be higher by as much: the window shrinks at once, before the model asks for the memory.
   In a pass without a predecessor, twice the largest rise between two visits has to be free.
4. Where the device is full all the same, what can leave leaves (window.py, Rule 3), and so many units are not held
   again. So it is where the allocator gave its cache back to the device in a pass, which is slow.
5. Times are measured in the first passes and decide once (sizing.py, Rule 3), and anew when memory changes.
6. Every change is logged in one line with the numbers that it follows from. None changes a result.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core.recorder import Recorder
from ..core.sizing import GROWTH, DeviceBudget, Times, UnitBytes, WindowChoice, choose, first_window, sizes_of, times_of
from ..core.telemetry import Counters, StepListener
from ..memory.device import Device
from ..options import Options

log = logging.getLogger(__name__)

ENOUGH = 2  # recorded passes, after one that is not counted
SMALL_RISE = 1 << 20  # bytes: less says nothing about what follows


@dataclass
class _MemoryProfile:
    """What others held at each visit of a pass."""

    others: list[int] = field(default_factory=list)
    window: list[int] = field(default_factory=list)  # and the window's units
    peak: int = 0

    def window_when_fullest(self) -> int:
        sums = [others + window for others, window in zip(self.others, self.window, strict=True)]
        return self.window[sums.index(max(sums))] if sums else 0

    def expected(self, before: _MemoryProfile | None) -> tuple[int, float]:
        """The peak of this pass, and how much faster it rises than the one before (Rule 3)."""
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
    """Chooses window and transfer, and says when they change."""

    def __init__(self, options: Options, units: Sequence[UnitBytes], device: Device, counters: Counters) -> None:
        self._options = options
        self._units = units
        self._streamed = [unit for unit in units if not unit.resident]
        self._device = device
        self._counters = counters
        root_nbytes = sum(unit.nbytes for unit in units if unit.resident)
        self.window = first_window(options, self._streamed, root_nbytes, device.is_host)
        self.transfer = 1 if options.transfer == "auto" else min(options.transfer, self.window)
        self.may_shrink = options.window == "auto"
        self._watches_memory = self.may_shrink and not device.is_host
        self._fills_memory = self._watches_memory and options.memory_budget is None
        self._most = self.window if options.memory_budget is not None else max(1, len(self._streamed))
        self._capacity = 0
        self._others = 0
        self._device_peak = 0
        self._retries = 0
        self._rises: dict[Any, _MemoryProfile] = {}  # of the last pass of each kind
        self._rise = _MemoryProfile()
        self._kind: Any = None
        self._times: Times | None = None
        self._choices: dict[int, WindowChoice] = {}  # by the largest window that fits
        self._told = False  # where to start from
        self._listened = False
        self._recorder: Recorder | None = None

    # ---- passes

    def begin(self) -> None:
        """Streaming begins: what was allocated before does not count."""
        if self._watches_memory:
            self._device.reset_memory_peak()
            self._capacity = self._device.memory_capacity()
            self._retries = self._device.memory_retries()
            budget = self._options.memory_budget
            why = "what activations take is not known before the first pass"
            if budget is not None:
                root = sum(unit.nbytes for unit in self._units if unit.resident)
                gradients = 2 * max((unit.gradient_nbytes for unit in self._streamed), default=0)
                why = f"of a budget of {budget} bytes {root} for what stays and {gradients} for gradients"
            log.info(
                "superpipeline: begins with window %d and transfer %d: %s, units %s; the device has %d bytes",
                self.window,
                self.transfer,
                why,
                sizes_of(self._streamed),
                self._capacity,
            )

    def resized(self, units: Sequence[UnitBytes]) -> None:
        """Units have these sizes from now on (autocast_weights.py)."""
        self._units = units
        self._streamed = [unit for unit in units if not unit.resident]
        self._choices.clear()

    def end(self) -> None:
        """Nothing more is measured for us."""
        if self._recorder is not None and self._counters.listener is self._recorder:
            self._counters.listener = StepListener()
        self._recorder = None

    def next_pass(self, kind: Any, trains: bool, showed_all: bool) -> None:
        """A pass of this kind begins; the one before showed what training needs, or what is all there is."""
        if self._device.is_host:
            return
        if self._kind is not None:
            self._note_memory()
        if showed_all:
            self._note_times()
            self._decide()
        if trains and not self._listened and "auto" in (self._options.window, self._options.transfer):
            self._enable_reads()
        self._kind, self._rise = kind, _MemoryProfile()

    def _enable_reads(self) -> None:
        """Records from the next pass on: the first one is like no other."""
        self._listened = True
        if type(self._counters.listener) is StepListener:
            self._counters.listener = self._recorder = Recorder(self._device)

    def _note_memory(self) -> None:
        """Rule 2."""
        if not self._watches_memory or not self._rise.others:
            return
        self._capacity = self._device.memory_capacity()
        peak = self._device.memory_peak()
        self._rise.peak = max(self._rise.others)
        if peak > self._device_peak:
            self._device_peak = peak
            self._rise.peak = max(self._rise.peak, peak - self._rise.window_when_fullest())
        elif self._kind in self._rises:  # its own is not known, but was no more than what was seen
            self._rise.peak = max(self._rise.peak, self._rises[self._kind].peak)
        self._others = max(self._others, self._rise.peak)
        self._rises[self._kind] = self._rise
        retries = self._device.memory_retries()
        if retries > self._retries and self.window > 1:
            self._shrink(self.window - 1, f"the allocator had to give its cache back {retries - self._retries} times")
            self._most = self.window
        self._retries = retries

    def _note_times(self) -> None:
        """Rule 5."""
        recorder = self._counters.listener
        if self._times is not None or not isinstance(recorder, Recorder):
            return
        first = recorder is not self._recorder  # somebody else's has the first pass, too
        if len(recorder.trained()) >= ENOUGH + first:
            ahead, held = self._counters.stepped_ahead > 0, self._counters.held_steps > 0
            self._times = times_of(self._units, recorder.times(), overlap=ahead, runs_on=held)
            self._choices.clear()
            self.end()

    def _decide(self) -> None:
        most = self._most
        memory = DeviceBudget(capacity=self._capacity, others=self._others)
        if self._fills_memory:
            most = min(most, memory.most(self._streamed))
        choice = self._choice(most)
        window = min(choice.window, GROWTH * self.window) if self.may_shrink else self.window  # Rule 1
        transfer = min(choice.transfer, window)
        if (window, transfer) != (self.window, self.transfer):
            fits = f"at most {most} fit" + f", as {memory}, units {sizes_of(self._streamed)}" * self._fills_memory
            self._become(window, transfer, fits + self._gain(choice))

    def _choice(self, most: int) -> WindowChoice:
        if most not in self._choices:
            window = None if self.may_shrink else self.window
            transfer = None if self._options.transfer == "auto" else self._options.transfer
            if self._times is None and self._told:
                self._choices[most] = WindowChoice(min(self.window, most), transfer or self.transfer, 0.0)
            elif self._times is None:
                self._choices[most] = WindowChoice(window or most, transfer or 1, 0.0)
            else:
                self._choices[most] = choose(self._times, most, window, transfer)
        return self._choices[most]

    def _gain(self, choice: WindowChoice) -> str:
        if self._times is None:
            return ""
        now = self._times.step_ms(self.window, self.transfer)
        chosen = f"window {choice.window} and transfer {choice.transfer}"
        return f"; {now:.3g} ms predicted, {choice.ms:.3g} with {chosen}, from {self._times}"

    def _become(self, window: int, transfer: int, reason: str) -> None:
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
        self._become(window, min(self.transfer, window), reason)

    # ---- within a pass

    def visiting(self, window_nbytes: int) -> None:
        """A unit is about to be visited while so many bytes of the window's are on the device (Rule 3)."""
        if not self._watches_memory:
            return
        self._rise.others.append(self._device.memory_allocated() - window_nbytes)
        self._rise.window.append(window_nbytes)
        if self.window == 1:
            return
        expected, ratio = self._rise.expected(self._rises.get(self._kind))
        memory = DeviceBudget(capacity=self._capacity, others=expected)
        most = memory.most(self._streamed)
        if most < self.window:
            self._others = max(self._others, expected)
            self._shrink(most, f"activations rise {ratio:.2f} times as fast as in the pass before; {memory} expected")

    def visited(self, window_nbytes: int) -> None:
        """It is on the device, or on its way, with so many bytes in all."""
        if self._watches_memory:
            self._rise.window[-1] = max(self._rise.window[-1], window_nbytes)

    def full(self) -> None:
        """The device had no room (Rule 4)."""
        window = max(1, self.window - 1)
        log.warning("superpipeline: out of device memory; window %d -> %d", self.window, window)
        self._most = window
        self.window, self.transfer = window, min(self.transfer, window)

    def ran_out(self) -> None:
        """The model's own code found no room: if the run goes on, with less (Rule 4)."""
        if self.may_shrink and self.window > 1:
            window = self.window // 2
            log.warning(
                "superpipeline: out of device memory in the model's own code; window %d -> %d", self.window, window
            )
            self._most = window
            self.window, self.transfer = window, min(self.transfer, window)

    @property
    def times(self) -> Times | None:
        """What was measured of a step's units, once it was."""
        return self._times

    # ---- checkpoints

    def state(self) -> dict[str, int]:
        """What a resumed run starts from; nothing where nothing was chosen."""
        if self._device.is_host or "auto" not in (self._options.window, self._options.transfer) or not self._kind:
            return {}
        return {"window": self.window, "transfer": self.transfer, "others_nbytes": self._others}

    def resume(self, state: dict[str, int], why: str) -> None:
        """Starts from what an earlier run chose, or a plan, as far as it fits here."""
        if not state or self._device.is_host:
            return
        self._told = True
        self._others = max(self._others, state["others_nbytes"])
        window, transfer = self.window, self.transfer
        if self._options.window == "auto":
            window = min(state["window"], self._most)
            if self._fills_memory:
                window = min(window, DeviceBudget(capacity=self._capacity, others=self._others).most(self._streamed))
        if self._options.transfer == "auto":
            transfer = state["transfer"]
        if self._fills_memory:
            memory = DeviceBudget(capacity=self._capacity, others=self._others)
            why += f"; at most {memory.most(self._streamed)} fit, as {memory}, units {sizes_of(self._streamed)}"
        self._become(window, min(transfer, window), why)
