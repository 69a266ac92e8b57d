"""Record what each step did and when, lane by lane, without making any of its work wait.

1. Work on the device is marked by timed events on the streams that do it, work of the host by its clock. Recording
   an event costs microseconds of the launching thread; nothing is synchronised while steps run.
2. The events of a pass are read once two later passes have begun and all of the events have happened. At the end
   ``flush`` waits for those that are left.
3. At the begin of each pass both clocks are read at the same moment, by an event on a stream that is always idle. The
   clocks drift apart between passes, not within one.
4. The compute stream belongs to one unit at a time: from the moment its bytes are there to the next wait or the end of
   its visit, and in backward to the begin of the next unit. A wait of the stream is the time between the events before
   and after it. Time lost because the host launched too late is not seen, and counts as the unit's.
5. A pass that is not wanted costs only the check. Wanted passes should be consecutive: work that happens every few
   passes, such as an optimizer's step, is then seen as often as it happens.
"""

from __future__ import annotations

import copy
import functools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from .device import NOT_RECORDED, Device
from .telemetry import Lane, Span, causes

LAG = 2  # passes that begin after a pass before it is read (Rule 2)
DISK_LANES: tuple[Lane, ...] = ("disk in", "disk out")
OF_THE_HOST: tuple[Lane, ...] = ("optimizer", *DISK_LANES)  # lanes that are timed by the host's clock
KEPT = 16  # recorded passes from which figures are made


@dataclass(frozen=True, kw_only=True)
class RecordedStep:
    """One pass over the units, from its begin to the next one's; times are ``time.perf_counter``'s."""

    number: int
    kind: str  # "train", "validate", "forward", ...
    trains: bool  # whether autograd recorded
    batch: int = 0  # how many earlier passes had the same `trains`
    start: float
    end: float
    spans: tuple[Span, ...]  # in the order of their starts

    @property
    def seconds(self) -> float:
        """The pass's duration."""
        return self.end - self.start

    def of(self, lane: Lane) -> list[Span]:
        """Return the spans in which a lane worked, without its stalls."""
        return [span for span in self.spans if span.lane == lane and not span.stall]

    def busy(self, lane: Lane) -> float:
        """Return how many seconds the lane worked."""
        return sum(span.seconds for span in self.of(lane))

    def nbytes(self, lane: Lane) -> int:
        """Return how many bytes the lane moved."""
        return sum(span.nbytes for span in self.of(lane))

    def causes(self) -> dict[str, float]:
        """Split the pass's seconds by cause (`telemetry.causes`)."""
        return self._causes

    @functools.cached_property  # read again and again while the step is one of the last
    def _causes(self) -> dict[str, float]:
        """Split the seconds by cause, once: the sums are read again and again while the step is one of the last."""
        return causes(self.spans, self.start, self.end)


class _Entry:
    """A span whose ends are not times yet, but events of the device or seconds of the host."""

    __slots__ = ("end", "lane", "nbytes", "phase", "stall", "start", "unit")

    def __init__(self, lane: Lane, unit: str, phase: str = "", stall: str = "", nbytes: int = 0) -> None:
        self.lane = lane
        self.unit = unit
        self.phase = phase
        self.stall = stall
        self.nbytes = nbytes
        self.start: Any = None
        self.end: Any = None


@dataclass(eq=False)
class _Pass:
    """A pass whose events may not have happened yet."""

    number: int
    kind: str
    trains: bool
    batch: int
    reference: Any  # the pass's begin, on the device's clock
    start: float  # the same moment, on the host's clock
    end: float = 0.0
    entries: list[_Entry] = field(default_factory=list)

    def happened(self) -> bool:
        """Whether all events of the pass have happened; each is asked, as streams finish in any order."""
        ends = (entry.end for entry in reversed(self.entries))
        return self.reference.query() and all(isinstance(end, float) or end.query() for end in ends)

    def read(self) -> RecordedStep:
        """Convert the pass's events to times, and return the recorded step."""
        spans = [
            Span(e.lane, e.unit, self._at(e.start), self._at(e.end), e.phase, e.stall, e.nbytes) for e in self.entries
        ]
        spans = sorted([*_one_after_the_other(spans)], key=lambda span: span.start)
        return RecordedStep(
            number=self.number,
            kind=self.kind,
            trains=self.trains,
            batch=self.batch,
            start=self.start,
            end=self.end,
            spans=tuple(spans),
        )

    def _at(self, moment: Any) -> float:
        """Convert an event, or a time of the host's clock, to seconds of the host's clock."""
        if isinstance(moment, float):
            return moment
        return self.start + float(self.reference.elapsed_time(moment)) / 1e3


def _one_after_the_other(spans: Iterable[Span]) -> Iterator[Span]:
    """Yield spans by their ends, without overlaps in disk lanes: there none starts before the last one ended."""
    until = dict.fromkeys(DISK_LANES, 0.0)
    for span in sorted(spans, key=lambda span: span.end):
        if span.lane in until:
            span = span._replace(start=max(span.start, until[span.lane]))
            until[span.lane] = span.end
        yield span


class _Work:
    """A piece of work: marks both of its ends. It may be done in parts, one after the other."""

    def __init__(self, entry: _Entry, entries: list[_Entry], now: Callable[[], Any]) -> None:
        self._entry = entry
        self._entries = entries
        self._now = now

    def __enter__(self) -> None:
        self._entry.start = self._now()

    def __exit__(self, *_: object) -> None:
        self._entry.end = self._now()
        self._entries.append(copy.copy(self._entry))


class _Wait:
    """A wait of the compute stream: ends the compute before it and begins the compute after it (Rule 4)."""

    def __init__(self, recorder: Recorder, stall: _Entry, unit: str, phase: str) -> None:
        self._recorder = recorder
        self._stall = stall
        self._next = (unit, phase)

    def __enter__(self) -> None:
        self._stall.start = self._recorder._end_compute()

    def __exit__(self, *_: object) -> None:
        self._stall.end = self._recorder._begin_compute(*self._next)
        self._recorder._add(self._stall)


class Recorder:
    """Records passes and keeps the last ``keep``; ``wanted`` selects them by `RecordedStep.batch`."""

    def __init__(self, clock: Device, keep: int = KEPT, wanted: Callable[[int], bool] = lambda batch: True) -> None:
        self._clock = clock
        self._wanted = wanted
        self._passes: deque[_Pass] = deque()  # passes that are not read yet
        self._now: _Pass | None = None  # the pass under way, if it is recorded
        self._count = 0  # passes begun, recorded or not
        self._batches = {True: 0, False: 0}  # passes begun, recorded or not, by whether they train
        self._computing: _Entry | None = None
        self.steps: deque[RecordedStep] = deque(maxlen=keep)

    # ---- listening

    def begin_pass(self, kind: str, trains: bool) -> None:
        """End the pass under way and begin a new one, to which all that is recorded from now on belongs."""
        self._end_pass()
        self._read(LAG)
        batch = self._batches[trains]
        if self._wanted(batch):
            reference, start = self._clock.both_clocks()
            self._now = _Pass(self._count, kind, trains, batch, reference, start)
            self._passes.append(self._now)
        self._count += 1
        self._batches[trains] += 1

    def work(self, lane: Lane, unit: str, phase: str, nbytes: int = 0) -> AbstractContextManager[None]:
        """Return a context that records the work issued in it as a span of one lane."""
        of_pass = self._now  # read once: another thread may end the pass meanwhile
        if of_pass is None:
            return NOT_RECORDED
        now: Callable[[], Any] = time.perf_counter
        if lane not in OF_THE_HOST:
            now = lambda: self._clock.moment(self._clock.compute)  # noqa: E731  # of the copying thread
        return _Work(_Entry(lane, unit, phase, "", nbytes), of_pass.entries, now)

    def waiting(self, cause: str, unit: str = "", phase: str = "") -> AbstractContextManager[None]:
        """Return a context that records a wait of the compute stream; ``unit``: whose compute begins after the wait."""
        now = self._computing
        if self._now is None or (unit and now is not None and (now.unit, now.phase) == (unit, phase)):
            return NOT_RECORDED
        if not unit and now is not None:
            unit, phase = now.unit, now.phase
        return _Wait(self, _Entry("compute", unit, phase, cause), unit, phase)

    def idle(self) -> None:
        """Note that the compute stream's next work belongs to no unit."""
        if self._computing is not None:
            self._end_compute()

    def host_waited(self, cause: str, begin: float, end: float) -> None:
        """Record that the host waited between two readings of ``time.perf_counter``."""
        entry = _Entry("host", "", "", cause)
        entry.start, entry.end = begin, end
        self._add(entry)

    # ---- reading

    def flush(self) -> None:
        """End the pass under way, wait for all queued work and read every pass (Rule 2)."""
        self._end_pass()
        for stream in (self._clock.up, self._clock.down, self._clock.compute):
            stream.synchronize()
        self._read(0)
        self._passes.clear()

    def trained(self, since: int = 0) -> list[RecordedStep]:
        """Return the recorded passes that train, from the number ``since`` on."""
        return [step for step in self.steps if step.trains and step.number >= since]

    # ---- details

    def _add(self, entry: _Entry) -> None:
        """Add an entry to the pass under way, if one is recorded."""
        now = self._now  # read once: another thread may end the pass meanwhile
        if now is not None:
            now.entries.append(entry)

    def _begin_compute(self, unit: str, phase: str) -> Any:
        """Record an event at which compute for a unit begins, and return the event."""
        moment = self._clock.moment(self._clock.compute)
        if unit:
            self._computing = _Entry("compute", unit, phase)
            self._computing.start = moment
        return moment

    def _end_compute(self) -> Any:
        """Record an event at which the compute under way ends, and return the event."""
        moment = self._clock.moment(self._clock.compute)
        if self._computing is not None:
            self._computing.end = moment
            self._add(self._computing)
            self._computing = None
        return moment

    def _end_pass(self) -> None:
        """End the pass under way, with its last unit's compute."""
        self.idle()
        if self._now is not None:
            self._now.end = time.perf_counter()
            self._now = None

    def _read(self, later: int) -> None:
        """Read the oldest passes: those with at least ``later`` passes after them, and whose events have happened."""
        while self._passes and self._count - self._passes[0].number > later and self._passes[0].happened():
            self.steps.append(self._passes.popleft().read())
