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

import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from .device import Device
from .telemetry import NOT_RECORDED, Lane, Span, causes

LAG = 2  # passes that begin after a pass before it is read (Rule 2)
OF_THE_HOST: tuple[Lane, ...] = ("optimizer", "disk in", "disk out", "host")  # lanes timed by the host's clock
KEPT = 16  # recorded passes from which figures are made


@dataclass(kw_only=True)
class RecordedStep:
    """One pass over the units, from its begin to the next one's; times are ``time.perf_counter``'s."""

    number: int
    trains: bool  # whether autograd recorded
    batch: int = 0  # how many earlier passes had the same `trains`
    start: float
    end: float = 0.0
    spans: list[Span] = field(default_factory=list)  # in the order of their starts

    @property
    def seconds(self) -> float:
        """The pass's duration."""
        return self.end - self.start

    def of(self, lane: Lane) -> list[Span]:
        """Return the spans in which a lane worked, without its stalls."""
        return [span for span in self.spans if span.lane == lane and not span.stall]

    def busy(self, lane: Lane) -> float:
        """Return how many seconds the lane worked."""
        return sum(span.end - span.start for span in self.of(lane))

    def nbytes(self, lane: Lane) -> int:
        """Return how many bytes the lane moved."""
        return sum(span.nbytes for span in self.of(lane))

    def causes(self) -> dict[str, float]:
        """Split the pass's seconds by cause (`telemetry.causes`)."""
        return causes(self.spans, self.start, self.end)


class Recorder:
    """Records passes and keeps the last ``keep``; ``wanted`` selects them by `RecordedStep.batch`."""

    def __init__(self, device: Device, keep: int = KEPT, wanted: Callable[[int], bool] = lambda batch: True) -> None:
        self._device, self._idle_stream = device, device.new_stream()
        self._wanted = wanted
        # Passes that are not read yet, each with its start on the device's clock. Ends of their spans are no times yet,
        # but events of the device or seconds of the host.
        self._passes: deque[tuple[RecordedStep, Any]] = deque()
        self._now: RecordedStep | None = None  # the pass under way, if it is recorded
        self._begun: Counter[bool] = Counter()  # passes, recorded or not, by whether they train
        self._computing: Span | None = None
        self.steps: deque[RecordedStep] = deque(maxlen=keep)

    # ---- listening

    def begin_pass(self, trains: bool) -> None:
        """End the pass under way and begin a new one, to which all that is recorded from now on belongs."""
        self._end_pass()
        self._read(LAG)
        batch = self._begun[trains]
        if self._wanted(batch):
            before = time.perf_counter()
            reference = self._device.moment(self._idle_stream)
            start = (before + time.perf_counter()) / 2
            self._now = RecordedStep(number=self._begun.total(), trains=trains, batch=batch, start=start)
            self._passes.append((self._now, reference))
        self._begun[trains] += 1

    def work(
        self, lane: Lane, unit: str = "", phase: str = "", nbytes: int = 0, stall: str = ""
    ) -> AbstractContextManager[None]:
        """Return a context that records the work issued in it as a span of one lane, or what the lane waited for."""
        now = self._now  # read once: another thread may end the pass meanwhile
        return NOT_RECORDED if now is None else self._timed(now.spans, Span(lane, unit, 0, 0, phase, stall, nbytes))

    def waiting(self, cause: str, unit: str = "", phase: str = "") -> AbstractContextManager[None]:
        """Return a context that records a wait of the compute stream; ``unit``: whose compute begins after the wait."""
        now = self._computing
        if self._now is None or (unit and now is not None and (now.unit, now.phase) == (unit, phase)):
            return NOT_RECORDED
        if not unit and now is not None:
            unit, phase = now.unit, now.phase
        return self._wait(Span("compute", unit, 0, 0, phase, cause))

    def idle(self) -> None:
        """Note that the compute stream's next work belongs to no unit."""
        if self._computing is not None:
            self._end_compute()

    # ---- reading

    def flush(self) -> None:
        """End the pass under way, wait for all queued work of the device, and read every pass into ``steps``."""
        self._end_pass()
        self._device.synchronize()
        self._read(0)
        self._passes.clear()

    # ---- details

    @contextlib.contextmanager
    def _timed(self, spans: list[Span], span: Span) -> Iterator[None]:
        """Append ``span`` to ``spans`` with the begin and end of this context, by the clock of the span's lane."""
        now = time.perf_counter if span.lane in OF_THE_HOST else self._moment
        start: Any = now()
        try:
            yield
        finally:
            spans.append(span._replace(start=start, end=now()))

    @contextlib.contextmanager
    def _wait(self, stall: Span) -> Iterator[None]:
        """End the compute under way, record this context as a wait, and then begin the compute of the wait's unit."""
        start = self._end_compute()
        try:
            yield
        finally:
            end = self._moment()
            self._add(stall._replace(start=start, end=end))
            if stall.unit:
                self._computing = Span("compute", stall.unit, end, 0, stall.phase)

    def _moment(self) -> Any:
        """Record an event on the calling thread's stream."""
        return self._device.moment(self._device.current_stream())

    def _add(self, span: Span) -> None:
        """Add a span to the pass under way, if one is recorded."""
        now = self._now  # read once: another thread may end the pass meanwhile
        if now is not None:
            now.spans.append(span)

    def _end_compute(self) -> Any:
        """Record an event at which the compute under way ends, and return the event."""
        moment = self._moment()
        if self._computing is not None:
            self._add(self._computing._replace(end=moment))
            self._computing = None
        return moment

    def _end_pass(self) -> None:
        """End the pass under way, with its last unit's compute."""
        self.idle()
        if self._now is not None:
            self._now.end = time.perf_counter()
            self._now = None

    def _read(self, later: int) -> None:
        """Read the oldest passes: those with at least ``later`` passes after them, and whose events have completed."""
        while self._passes and self._begun.total() - self._passes[0][0].number > later:
            step, reference = self._passes[0]
            spans = tuple(step.spans)  # to which other threads may still add
            ends = (span.end for span in reversed(spans))  # each is asked, as streams finish in any order
            if not all(isinstance(moment, float) or moment.query() for moment in (reference, *ends)):
                break
            self._passes.popleft()
            begin = step.start, reference
            timed = (span._replace(start=_at(span.start, *begin), end=_at(span.end, *begin)) for span in spans)
            step.spans = sorted(timed, key=lambda span: span.start)
            self.steps.append(step)


def _at(moment: Any, start: float, reference: Any) -> float:
    """Convert an event to the host clock's seconds; ``reference`` is an event at ``start``. Return a float as it is."""
    return moment if isinstance(moment, float) else start + float(reference.elapsed_time(moment)) / 1e3
