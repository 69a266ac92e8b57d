"""A timeline as a picture: its lanes, its waiting, where the time goes, and the lower bound (``floor``).

Drawing needs matplotlib, from the extra "plots". Several timelines share one time axis, one above the other.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..core.telemetry import CAUSES, LANES, Lane, Span, causes
from ..errors import MissingExtraError
from .timeline import NAMES, Step, Timeline, in_words

INK, FAINT, FLOOR = "#1f2933", "#9aa5b1", "#111111"
WORK: dict[tuple[Lane, str], tuple[str, str]] = {  # two shades, for neighbouring units
    ("disk in", "weights"): ("#8a78b8", "#ab9dcf"),
    ("disk in", "state"): ("#b57fa5", "#cda4c1"),
    ("disk out", "state"): ("#b57fa5", "#cda4c1"),
    ("up", "weights"): ("#3aa6a0", "#6cc3be"),
    ("up", "activations"): ("#c9b26b", "#dccb95"),
    ("compute", "forward"): ("#5b8fd6", "#86aee3"),
    ("compute", "backward"): ("#3d5fa3", "#5f80c0"),
    ("down", "gradients"): ("#e08e45", "#efb17c"),
    ("down", "activations"): ("#c9b26b", "#dccb95"),
    ("network", "gradients"): ("#a0703c", "#bf9468"),
    ("optimizer", "step"): ("#6a9f58", "#93bf83"),
}
DEFAULT_PHASE: dict[Lane, str] = {
    "disk in": "weights",
    "up": "weights",
    "compute": "forward",
    "down": "gradients",
    "network": "gradients",
    "optimizer": "step",
    "disk out": "state",
}
WAITS = "#d64550"
CAUSE_COLORS = {
    "compute": "#4c77bd",
    "disk": "#e7c3dd",
    "weights": "#f3b9be",
    "gradients": "#f7cfd2",
    "network": "#e3c9ae",
    "activations": "#fae0e2",
    "optimizer": "#eda3a9",
    "other": "#cbd2d9",
}
TEXT_PT = 7.0
WIDTH_IN, ROW_IN = 13.0, 0.36


def figure(timelines: Sequence[Timeline], step: int | None = None) -> Any:
    """Draw one step of each timeline, the typical one or the one at that place, as a matplotlib figure."""
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtraError(feature="a picture of a timeline", package="matplotlib", extra="plots")
    from matplotlib.figure import Figure

    chosen = [(timeline, timeline.step(step)) for timeline in timelines]
    longest = max(max(s.seconds, s.floor_s or 0.0) for _, s in chosen)
    scale, unit = (1.0, "s") if longest >= 2 else (1e3, "ms")
    rows = [_rows(timeline, s) for timeline, s in chosen]
    heights = [len(lanes) + 1.65 for lanes in rows]
    drawn = Figure(figsize=(WIDTH_IN, ROW_IN * (sum(heights) + 1.6 + 2.4 * len(rows))), facecolor="white")
    axes = drawn.subplots(len(chosen), 1, squeeze=False, sharex=True, gridspec_kw={"height_ratios": heights})[:, 0]
    for axis, (timeline, s), lanes in zip(axes, chosen, rows, strict=True):
        _Panel(axis, timeline, s, lanes, scale, unit, longest).draw()
    axes[-1].set_xlabel(f"time in {unit}", color=INK, fontsize=8.5)
    _legend(drawn, chosen)
    drawn.tight_layout(rect=(0, 0.48 / drawn.get_figheight(), 1, 1), h_pad=1.0)
    return drawn


def save(timelines: Sequence[Timeline], path: str | os.PathLike[str], step: int | None = None) -> None:
    """Draw a picture and write it in the format of the file's suffix, and create missing directories."""
    drawn = figure(timelines, step)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(path, dpi=150)


def _rows(timeline: Timeline, step: Step) -> list[Lane]:
    """Return the lanes with work; the host's only if it waits long enough to be visible."""
    seconds = dict.fromkeys(LANES, 0.0)
    for span in timeline.spans:
        seconds[span.lane] += max(0.0, min(span.end, step.end) - max(span.start, step.start))
    return [lane for lane in LANES if seconds[lane] > (0.005 * step.seconds if lane == "host" else 0)]


def short(unit: str) -> str:
    """Shorten a unit's name to the number of its block, or to the last part of the name."""
    number = re.search(r"(\d+)$", unit)
    return number[1] if number else unit.rsplit(".", 1)[-1]


class _Panel:
    """One step of one timeline on one axis."""

    def __init__(
        self, axis: Any, timeline: Timeline, step: Step, rows: list[Lane], scale: float, unit: str, longest: float
    ) -> None:
        self.axis = axis
        self.timeline = timeline
        self.step = step
        self.rows = rows
        self.scale = scale
        self.unit = unit
        self.longest = longest * scale
        within = (s for s in timeline.spans if s.end > step.start and s.start < step.end)
        self.spans = [s._replace(start=max(s.start, step.start), end=min(s.end, step.end)) for s in within]

    def draw(self) -> None:
        for row, lane in enumerate(self.rows):
            self._lane(row, lane)
        self._where_it_goes(len(self.rows) + 0.35)
        self._floor()
        self._frame()

    def _lane(self, row: int, lane: Lane) -> None:
        shades: dict[str, int] = {}
        for span in self.spans:
            if span.lane != lane:
                continue
            if span.stall:
                self._block(row, span, "white", edge=WAITS, hatch="//////", text=NAMES[span.stall])
                continue
            phase = span.phase if (lane, span.phase) in WORK else DEFAULT_PHASE.get(lane, "")
            shade = shades.setdefault(span.unit, len(shades) % 2)
            text = short(span.unit) or ("all units" if lane == "optimizer" else "")
            self._block(row, span, WORK[lane, phase][shade], text=text)

    def _block(self, row: float, span: Span, color: str, edge: str = "white", hatch: str = "", text: str = "") -> None:
        left, width = (span.start - self.step.start) * self.scale, span.seconds * self.scale
        line = 0.0 if hatch or width < 0.002 * self.longest else 0.4
        self.axis.barh(
            row, width, left=left, height=0.78, color=color, edgecolor=edge, linewidth=line, hatch=hatch or None
        )
        if text and self._fits(text, width):
            ink = INK if _is_light(color) else "white"
            behind = {"facecolor": color, "edgecolor": "none", "pad": 1.0}  # over hatches, and the line of the floor
            place: dict[str, Any] = {"ha": "center", "va": "center", "zorder": 5, "bbox": behind}
            self.axis.text(left + width / 2, row, text, fontsize=TEXT_PT, color=ink, **place)

    def _fits(self, text: str, width: float) -> bool:
        inches = width / self.longest * WIDTH_IN * 0.86
        return inches * 72 > (len(text) + 0.9) * TEXT_PT * 0.58

    def _where_it_goes(self, row: float) -> None:
        """Draw the step as one bar, sorted by what its time went to."""
        shares = causes(self.spans, self.step.start, self.step.end)
        at = self.step.start
        for cause in CAUSES:
            span = Span("compute", "", at, at + shares[cause])
            percent = f"{100 * shares[cause] / self.step.seconds:.0f} %"
            fitting = [t for t in (f"{NAMES[cause]} {percent}", percent) if self._fits(t, span.seconds * self.scale)]
            if span.seconds > 0:
                self._block(row, span, CAUSE_COLORS[cause], text=fitting[0] if fitting else "")
            at = span.end

    def _floor(self) -> None:
        end = self.step.seconds * self.scale
        bottom = len(self.rows) + 0.95
        self.axis.plot([end, end], [-0.6, bottom], color=FAINT, linewidth=1.0)
        if self.step.floor_s is not None:
            floor = self.step.floor_s * self.scale
            self.axis.plot([floor, floor], [-0.85, bottom], color=FLOOR, linewidth=1.5, linestyle=(0, (4, 2)))
            text = f"floor {self._time(self.step.floor_s)}"
            self.axis.text(floor, -0.95, text, ha="center", va="bottom", fontsize=8, color=FLOOR)

    def _time(self, seconds: float) -> str:
        return f"{seconds * self.scale:.3g} {self.unit}"

    def _frame(self) -> None:
        step, axis = self.step, self.axis
        merit = "" if step.floor_s is None else f", floor / step {step.floor_s / step.seconds:.2f}"
        title = f"{self.timeline.title}, {self.timeline.source}: {step.name} takes {self._time(step.seconds)}{merit}"
        axis.set_title(title, loc="left", fontsize=10.5, color=INK, fontweight="bold", pad=22)
        shares = causes(self.spans, step.start, step.end)
        axis.text(0, 1, in_words(shares), transform=axis.transAxes, fontsize=8.5, color=INK, va="bottom")
        axis.set_yticks([*range(len(self.rows)), len(self.rows) + 0.35])
        axis.set_yticklabels([*self.rows, "the step"], fontsize=8.5, color=INK)
        axis.set_ylim(len(self.rows) + 0.95, -0.7)
        axis.set_xlim(0, self.longest * 1.005)
        axis.tick_params(axis="y", length=0)
        axis.tick_params(axis="x", colors=INK, labelsize=8, labelbottom=True)
        for side in ("top", "right", "left"):
            axis.spines[side].set_visible(False)
        axis.spines["bottom"].set_color(FAINT)


def _is_light(color: str) -> bool:
    if color == "white":
        return True
    red, green, blue = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue > 150


def _legend(drawn: Any, chosen: list[tuple[Timeline, Step]]) -> None:
    from matplotlib.patches import Patch

    spans = [span for timeline, _ in chosen for span in timeline.spans]
    entries = [
        ("weights from files", "disk in", "weights"),
        ("optimizer's state from disk", "disk in", "state"),
        ("weights up", "up", "weights"),
        ("forward", "compute", "forward"),
        ("backward", "compute", "backward"),
        ("gradients down", "down", "gradients"),
        ("gradients to other machines", "network", "gradients"),
        ("activations, down and up", "down", "activations"),
        ("optimizer's steps", "optimizer", "step"),
        ("optimizer's state to disk", "disk out", "state"),
    ]
    there = {(s.lane, s.phase or DEFAULT_PHASE.get(s.lane, "")) for s in spans if not s.stall}
    handles = [
        Patch(facecolor=WORK[lane, phase][0], label=label)  # type: ignore[index]
        for label, lane, phase in entries
        if (lane, phase) in there
    ]
    if any(span.stall for span in spans):
        handles.append(Patch(facecolor="white", edgecolor=WAITS, hatch="//////", linewidth=0, label="waits"))
    shown = [causes(timeline.spans, step.start, step.end) for timeline, step in chosen]
    handles += [
        Patch(facecolor=CAUSE_COLORS[cause], label=f"the step: {NAMES[cause]}")
        for cause in CAUSES
        if any(shares[cause] > sum(shares.values()) / 200 for shares in shown)  # as in_words
    ]
    ncols = -(-len(handles) // 2)
    drawn.legend(handles=handles, loc="lower left", ncols=ncols, frameon=False, fontsize=8, labelcolor=INK)
