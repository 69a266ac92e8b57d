"""A few steps, lane by lane, as a trace for Chrome (chrome://tracing) and Perfetto (ui.perfetto.dev).

1. Measured and simulated steps both become a ``Timeline``, which is written to a trace, read from one, and drawn as a
   picture (timeline_plot.py).
2. Times are seconds since the beginning of the first step; a trace has microseconds with three decimals.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.simulation import Simulation
from ..core.telemetry import CAUSES, LANES, Lane, Span, causes
from ..errors import OptionError, TraceError
from ..runtime.recorder import RecordedStep

FORMAT = "sp_lightning timeline 1"
LANE_NAMES: dict[Lane, str] = {
    "disk in": "disk to host",
    "up": "up: host to device",
    "compute": "compute",
    "down": "down: device to host",
    "network": "to other machines",
    "optimizer": "optimizer on the host",
    "disk out": "host to disk",
    "host": "host thread waits",
}
STEPS = "steps"
NAMES = {cause: f"waits for {cause}" for cause in CAUSES}
NAMES |= {"compute": "compute", "disk": "waits for the disk", "network": "waits for the network"}
NAMES |= {"other": "outside of units"}


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of a timeline."""

    name: str
    start: float
    end: float
    floor_s: float | None = None  # lower bound; None if not known

    @property
    def seconds(self) -> float:
        """The duration of the step."""
        return self.end - self.start


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Steps, and the work and waiting in them."""

    title: str  # such as "Llama 3 8B on rtx4090"
    source: str  # "measured" or "simulated"
    steps: tuple[Step, ...]
    spans: tuple[Span, ...]

    def typical(self) -> Step:
        """Return the step of median length."""
        return sorted(self.steps, key=lambda step: step.seconds)[len(self.steps) // 2]

    def step(self, place: int | None) -> Step:
        """Return the step at a place, counted from 0, or the typical one for None."""
        if place is None:
            return self.typical()
        if not 0 <= place < len(self.steps):
            raise OptionError(argument="step", found=place, allowed=f"from 0 to {len(self.steps) - 1}, as recorded")
        return self.steps[place]


def measured(
    steps: Sequence[RecordedStep], title: str, floor_s: float | None = None, before: Sequence[Span] = ()
) -> Timeline:
    """Make a timeline of recorded steps.

    Args:
        steps: One or more steps.
        title: What ran.
        floor_s: Lower bound of a step (bottleneck.py).
        before: Spans of the step before, of which those that run on into these steps are shown.
    """
    zero = steps[0].start
    runs_on = [span for span in before if span.end > zero]
    return Timeline(
        title=title,
        source="measured",
        steps=tuple(
            Step(name=f"step {s.number}", start=s.start - zero, end=s.end - zero, floor_s=floor_s) for s in steps
        ),
        spans=tuple(
            span._replace(start=span.start - zero, end=span.end - zero)
            for span in [*runs_on, *(span for step in steps for span in step.spans)]
        ),
    )


def simulated(simulation: Simulation, title: str) -> Timeline:
    """Make a timeline of a simulated step."""
    step = Step(name="step", start=0.0, end=simulation.step_s, floor_s=simulation.floor.seconds)
    spans = sorted([*_with_phases(simulation.timeline), *simulation.waits], key=lambda span: span.start)
    return Timeline(title=title, source="simulated", steps=(step,), spans=tuple(spans))


def _with_phases(spans: Iterable[Span]) -> list[Span]:
    """Label compute spans: the first one of a unit is its forward, all others are backward."""
    seen: set[str] = set()
    result = []
    for span in spans:
        phase = span.phase
        if span.lane == "compute":
            phase = "backward" if span.unit in seen else "forward"
            seen.add(span.unit)
        result.append(span._replace(phase=phase))
    return result


# ---- in words


def summary(timeline: Timeline, place: int | None = None) -> str:
    """Describe a step in one line: its time, its lower bound, and where its time went."""
    step = timeline.step(place)
    floor = (
        "" if step.floor_s is None else f", floor {step.floor_s:.3g} s ({step.floor_s / step.seconds:.2f} of the step)"
    )
    where = in_words(causes(timeline.spans, step.start, step.end))
    return f"{timeline.title}, {timeline.source}: {step.name} took {step.seconds:.3g} s{floor}: {where}"


def in_words(shares: dict[str, float]) -> str:
    """List what a step's seconds went to, longest first, without shares below half a percent."""
    total = sum(shares.values()) or 1.0
    order = sorted(shares, key=lambda cause: -shares[cause])
    return ", ".join(
        f"{NAMES[cause]} {100 * shares[cause] / total:.0f} %" for cause in order if shares[cause] > total / 200
    )


# ---- the trace


def to_trace(timeline: Timeline) -> dict[str, Any]:
    """Convert a timeline to the Trace Event Format, with lanes as threads."""
    lanes = [lane for lane in LANES if any(span.lane == lane for span in timeline.spans)]
    names = [STEPS, *(LANE_NAMES[lane] for lane in lanes)]
    process = {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": f"{timeline.title} ({timeline.source})"}}
    threads = [
        {"ph": "M", "pid": 1, "tid": tid, "name": what, "args": {key: value}}
        for tid, name in enumerate(names)
        for what, key, value in (("thread_name", "name", name), ("thread_sort_index", "sort_index", tid))
    ]
    steps = [_event(0, "step", s.name, s.start, s.end, {"floor_s": s.floor_s}) for s in timeline.steps]
    work = [_span_event(1 + lanes.index(span.lane), span) for span in timeline.spans]
    return {
        "traceEvents": [process, *threads, *steps, *work],
        "displayTimeUnit": "ms",
        "otherData": {"format": FORMAT, "title": timeline.title, "source": timeline.source},
    }


def _span_event(tid: int, span: Span) -> dict[str, Any]:
    about = {"lane": span.lane, "unit": span.unit, "phase": span.phase, "stall": span.stall, "nbytes": span.nbytes}
    if span.stall:
        return _event(tid, "stall", f"waits for {span.stall}", span.start, span.end, about)
    return _event(tid, "work", " ".join(filter(None, (span.unit, span.phase))) or "step", span.start, span.end, about)


def _event(tid: int, category: str, name: str, start: float, end: float, about: dict[str, Any]) -> dict[str, Any]:
    at, till = round(start * 1e6, 3), round(end * 1e6, 3)
    return {
        "ph": "X",
        "pid": 1,
        "tid": tid,
        "cat": category,
        "name": name,
        "ts": at,
        "dur": round(till - at, 3),
        "args": about,
    }


def from_trace(trace: Any, where: str = "the trace") -> Timeline:
    """Restore a timeline from its trace."""
    about = trace.get("otherData") if isinstance(trace, dict) else None
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise TraceError(
            f"{where} is no timeline of sp_lightning: it lacks otherData.format {FORMAT!r}; "
            "write one with SuperpipelineCallback(timeline='run/') or python -m sp_lightning plan --timeline"
        )
    try:
        events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        steps = tuple(_step(event) for event in events if event["cat"] == "step")
        spans = tuple(_span(event) for event in events if event["cat"] != "step")
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(f"{where} is damaged: missing or wrong in an event: {error}; write it again") from error
    if not steps:
        raise TraceError(f"{where} has {len(spans)} spans but no step; record at least one")
    return Timeline(title=str(about["title"]), source=str(about["source"]), steps=steps, spans=spans)


def _step(event: dict[str, Any]) -> Step:
    floor_s = event["args"]["floor_s"]
    start, end = _times(event)
    return Step(name=event["name"], start=start, end=end, floor_s=None if floor_s is None else float(floor_s))


def _span(event: dict[str, Any]) -> Span:
    about = event["args"]
    start, end = _times(event)
    if about["lane"] not in LANES:
        raise ValueError(f"lane {about['lane']!r}")
    return Span(about["lane"], about["unit"], start, end, about["phase"], about["stall"], int(about["nbytes"]))


def _times(event: dict[str, Any]) -> tuple[float, float]:
    return event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6


# ---- files


def save(timeline: Timeline, path: str | os.PathLike[str]) -> Path:
    """Write a timeline as a trace, and create missing directories."""
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(to_trace(timeline)))
    return file


def load(path: str | os.PathLike[str]) -> Timeline:
    """Read a timeline from a trace file."""
    try:
        trace = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}; pass the trace.json that a run wrote") from error
    except ValueError as error:
        raise TraceError(f"{path} is not JSON ({error}); pass the trace.json that a run wrote") from error
    return from_trace(trace, str(path))
