"""Recorded steps, lane by lane: as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing, and as a picture.

Times are seconds since the beginning of the first step; a trace has microseconds with three decimals.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import MissingExtraError
from ..host.recorder import RecordedStep
from ..host.telemetry import CAUSES, LANES, Lane, Span

LANE_NAMES: dict[Lane, str] = {
    "disk in": "disk to host",
    "up": "host to device",
    "compute": "compute",
    "down": "device to host",
    "optimizer": "optimizer on the host",
    "disk out": "host to disk",
    "host": "host thread waits",
}
NAMES = {cause: f"waits for {cause}" for cause in CAUSES}
NAMES |= {"compute": "compute", "disk": "waits for the disk"}
NAMES |= {"other": "outside of units"}
COLORS: dict[Lane, dict[str, str]] = {  # by lane and phase, the usual phase first
    "disk in": {"weights": "#8a78b8", "state": "#b57fa5"},
    "up": {"weights": "#3aa6a0", "activations": "#c9b26b"},
    "compute": {"forward": "#6f9bda", "backward": "#3d5fa3"},
    "down": {"gradients": "#e08e45", "activations": "#c9b26b"},
    "optimizer": {"step": "#6a9f58"},
    "disk out": {"state": "#b57fa5"},
    "host": {"": "#9aa5b1"},
}
WAITS, FLOOR = "#d64550", "#111111"
INCHES_WIDE, ROW_INCHES = 13.0, 0.36
NARROW = 0.012  # share of a step: a shorter span has no room for its name


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Recorded steps, the work and the waiting in them, and the work that runs on into them."""

    title: str
    steps: tuple[RecordedStep, ...]
    spans: tuple[Span, ...]
    floor_s: float  # the floor of the step that is drawn

    @classmethod
    def of(cls, title: str, steps: Sequence[RecordedStep], around: Sequence[RecordedStep], floor_s: float) -> Timeline:
        """Make a timeline of some steps; of the steps ``around`` them only work that runs on into them is shown."""
        zero, others = steps[0].start, [step for step in around if step not in steps]
        runs_on = [span for step in others for span in step.spans if span.start < zero < span.end]
        spans = [*runs_on, *(span for step in steps for span in step.spans)]
        moved = (span._replace(start=span.start - zero, end=span.end - zero) for span in spans)
        return cls(title=title, steps=tuple(steps), spans=tuple(moved), floor_s=floor_s)

    def write(self, folder: Path) -> Path:
        """Write ``trace.json`` and, where matplotlib is installed, ``timeline.png``; return the trace's path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "trace.json"
        path.write_text(json.dumps(self.trace()))
        if importlib.util.find_spec("matplotlib") is not None:
            self.picture().savefig(folder / "timeline.png", dpi=150)
        return path

    # ---- the trace

    def trace(self) -> dict[str, Any]:
        """Return the timeline in the format of Chrome's trace events."""
        lanes = [lane for lane in LANES if any(span.lane == lane for span in self.spans)]
        names = ["steps", *(LANE_NAMES[lane] for lane in lanes)]
        events: list[dict[str, Any]] = [
            {"ph": "M", "pid": 1, "tid": tid, "name": what, "args": {key: value}}
            for tid, name in enumerate(names)
            for what, key, value in (("thread_name", "name", name), ("thread_sort_index", "sort_index", tid))
        ]
        zero = self.steps[0].start
        events += [_event(0, f"step {step.number}", step.start - zero, step.end - zero) for step in self.steps]
        for span in self.spans:
            name = f"waits for {span.stall}" if span.stall else f"{span.unit} {span.phase}".strip()
            events.append(_event(1 + lanes.index(span.lane), name, span.start, span.end, nbytes=span.nbytes))
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"title": self.title}}

    # ---- the picture

    def picture(self) -> Any:
        """Draw the step of median length as a matplotlib figure."""
        if importlib.util.find_spec("matplotlib") is None:
            raise MissingExtraError(feature="a picture of a timeline", package="matplotlib", extra="plots")
        from matplotlib.figure import Figure

        step = sorted(self.steps, key=lambda step: step.seconds)[len(self.steps) // 2]
        start, end = step.start - self.steps[0].start, step.end - self.steps[0].start
        spans = [span for span in self.spans if span.end > start and span.start < end]
        lanes = [lane for lane in LANES if any(span.lane == lane for span in spans)]
        figure = Figure(figsize=(INCHES_WIDE, ROW_INCHES * (len(lanes) + 5)), facecolor="white", layout="tight")
        axis = figure.subplots()
        for span in spans:
            left, right = max(span.start, start) - start, min(span.end, end) - start
            _draw(axis, lanes.index(span.lane), span, 1e3 * left, 1e3 * (right - left), 1e3 * step.seconds)
        axis.axvline(1e3 * self.floor_s, color=FLOOR, linestyle=(0, (4, 2)), label="floor")
        causes = {NAMES[cause]: seconds for cause, seconds in step.causes().items() if seconds > 0.005 * step.seconds}
        shares = ", ".join(f"{name} {seconds / step.seconds:.0%}" for name, seconds in causes.items())
        axis.set_title(f"{self.title}: step {step.number} takes {1e3 * step.seconds:.3g} ms\n{shares}", loc="left")
        axis.set_yticks(range(len(lanes)), [LANE_NAMES[lane] for lane in lanes])
        axis.set_xlim(0, 1e3 * step.seconds)
        axis.invert_yaxis()
        axis.set_xlabel("time in ms")
        shown = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))  # each label once
        axis.legend(shown.values(), shown, loc="upper left", bbox_to_anchor=(0, -0.18), ncols=4, frameon=False)
        return figure


def _event(tid: int, name: str, start: float, end: float, **about: int) -> dict[str, Any]:
    """Make an event of Chrome's trace format from seconds."""
    at, till = round(start * 1e6, 3), round(end * 1e6, 3)
    return {"ph": "X", "pid": 1, "tid": tid, "name": name, "ts": at, "dur": round(till - at, 3), "args": about}


def _draw(axis: Any, row: int, span: Span, left: float, width: float, whole: float) -> None:
    """Draw a span as a block: work in the color of its phase, waiting hatched."""
    if span.stall:
        axis.barh(row, width, left=left, height=0.78, color="white", edgecolor=WAITS, hatch="//////", label="waits")
        return
    colors = COLORS[span.lane]
    phase = span.phase if span.phase in colors else next(iter(colors))
    label = f"{LANE_NAMES[span.lane]}: {phase}"
    axis.barh(row, width, left=left, height=0.78, color=colors[phase], edgecolor="white", linewidth=0.4, label=label)
    if width > NARROW * whole:
        axis.text(left + width / 2, row, short(span.unit), ha="center", va="center", fontsize=7, color="white")


def short(unit: str) -> str:
    """Shorten a unit's name to the number of its block, or to the last part of the name."""
    number = re.search(r"(\d+)$", unit)
    return number[1] if number else unit.rsplit(".", 1)[-1]
