"""What happened, in numbers: counters that only grow, and the latest few of a measured quantity."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from .spans import Lane

_NOTHING = contextlib.nullcontext()


class StepListener:
    """To whom the phases of a step report when they begin and end; this one does not listen (recorder.py does)."""

    def begin_pass(self, kind: str, trains: bool) -> None:
        """All that follows belongs to a new pass."""

    def work(self, lane: Lane, unit: str, phase: str, nbytes: int = 0) -> AbstractContextManager[None]:
        """What is issued within is work of a lane."""
        return _NOTHING

    def waiting(self, cause: str, unit: str = "", phase: str = "") -> AbstractContextManager[None]:
        """Within, the compute stream is made to wait; after it, it computes for that unit, or the one it was at."""
        return _NOTHING

    def left(self, around: str, in_backward: bool) -> None:
        """A visit ended, within that of another unit if there is one; in backward its gradients are still to come."""

    def idle(self) -> None:
        """What the compute stream does next belongs to no unit."""

    def host_waited(self, cause: str, begin: float, end: float) -> None:
        """The host did, between two readings of ``time.perf_counter``."""

    def step_may_begin(self) -> None:
        """The calling thread has nothing to do any more before the optimizer's own step."""

    def stepped(self) -> None:
        """The optimizer's own step ended."""


@dataclass
class Counters:
    """Everything counted since the start. Take a `snapshot` and ask `since` for what a step added."""

    fetches: int = 0  # units brought up
    bytes_up: int = 0
    bytes_down: int = 0
    bytes_offloaded: int = 0  # what autograd saved, on its way to the host
    bytes_brought_back: int = 0
    writebacks: int = 0  # units that model code changed in place on the device
    bytes_written_back: int = 0
    evictions: int = 0
    extra_held: int = 0  # visits that held a unit beyond the window
    stepped_ahead: int = 0  # parameters stepped while backward ran
    held_steps: int = 0  # steps that ran on beside the next forward
    surprises: int = 0  # visits that were not the predicted one
    stall_ms: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # by cause
    listener: StepListener = field(default_factory=StepListener, repr=False, compare=False)  # is no figure

    @contextlib.contextmanager
    def stall(self, cause: str) -> Iterator[None]:
        """Times a wait of the host."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            end = time.perf_counter()
            self.stall_ms[cause] += (end - begin) * 1e3
            self.listener.host_waited(cause, begin, end)

    def snapshot(self) -> dict[str, Any]:
        """The values now, in a dictionary that later counting does not change."""
        figures = {name: value for name, value in vars(self).items() if name != "listener"}
        return {**figures, "stall_ms": dict(self.stall_ms)}

    def since(self, previous: Mapping[str, Any]) -> dict[str, Any]:
        """What was added after `previous`, an earlier snapshot of these counters."""
        now = self.snapshot()
        stalls_before = previous["stall_ms"]
        added = {name: value - previous[name] for name, value in now.items() if name != "stall_ms"}
        added["stall_ms"] = {cause: ms - stalls_before.get(cause, 0.0) for cause, ms in now["stall_ms"].items()}
        return added


class Rolling:
    """The last `size` values of a measured quantity; NaN stands for "nothing measured yet"."""

    def __init__(self, size: int) -> None:
        self._values: deque[float] = deque(maxlen=size)

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: float) -> None:
        self._values.append(value)

    @property
    def median(self) -> float:
        return statistics.median(self._values) if self._values else math.nan

    @property
    def mean(self) -> float:
        return statistics.fmean(self._values) if self._values else math.nan
