"""A plan's windows and transfers as a picture: memory against time, the chosen point, and the device's memory.

Needs matplotlib, from the extra "plots".
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from ..errors import MissingExtraError
from ..options import format_bytes
from ..planning.forecast import Plan, SweepPoint

GIB = 2**30
INK, FAINT, CHOSEN, LIMIT = "#1f2933", "#9aa5b1", "#d64550", "#111111"
TRANSFERS = ("#3d5fa3", "#3aa6a0", "#e08e45", "#6a9f58")
BEHIND = {"facecolor": "white", "edgecolor": "none", "pad": 1.5, "alpha": 0.9}


def check_matplotlib() -> None:
    """Raise MissingExtraError, before any work, if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtraError(feature="a picture of a plan", package="matplotlib", extra="plots")


def figure(plan: Plan) -> Any:
    """Make a matplotlib figure: a line for each transfer, its points labelled with their windows."""
    check_matplotlib()
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(9, 5), facecolor="white")
    axis = drawn.subplots()
    shown = _shown(plan)
    widths = [plan.available, *(point.nbytes for point in shown)]
    left, right = 0.95 * min(widths) / GIB, 1.02 * max(widths) / GIB
    for number, transfer in enumerate(sorted({point.transfer for point in shown})[: len(TRANSFERS)]):
        _draw_line(axis, [point for point in shown if point.transfer == transfer], number, plan.available)
    axis.scatter([plan.device_nbytes / GIB], [plan.step_s], s=170, facecolors="none", edgecolors=CHOSEN, linewidths=2)
    note = f"chosen: window {plan.window},\ntransfer {plan.transfer},\n{format_bytes(plan.device_nbytes)}"
    place: dict[str, Any] = {"xytext": (14, 18), "textcoords": "offset points", "bbox": BEHIND, "zorder": 9}
    axis.annotate(note, (plan.device_nbytes / GIB, plan.step_s), color=CHOSEN, fontsize=9, **place)
    axis.axvline(plan.available / GIB, color=LIMIT, linewidth=1, linestyle="--", label="device memory")
    if any(point.nbytes > plan.available for point in shown):
        axis.axvspan(plan.available / GIB, right, color=LIMIT, alpha=0.05, linewidth=0)
        beyond: dict[str, Any] = {"transform": axis.get_xaxis_transform(), "ha": "right", "va": "top", "fontsize": 9}
        axis.text(right - 0.01 * (right - left), 0.98, "does not fit", color=INK, **beyond)
    axis.axhline(plan.floor_s, color=FAINT, linewidth=1, linestyle=":", label=f"lower bound, set by the {plan.binds}")
    slowest, fastest = max(point.step_s for point in shown), min(plan.floor_s, *(point.step_s for point in shown))
    room = 0.15 * (slowest - fastest) + 0.01 * slowest
    axis.set_ylim(max(0.0, fastest - room), slowest + room)
    _label_windows(axis, [point for point in shown if point.transfer == shown[0].transfer], right - left)
    axis.set_xlim(left, right)
    axis.set_xlabel("device memory in GiB; the numbers are windows", color=INK)
    axis.set_ylabel("predicted seconds of a step", color=INK)
    about = f"batch of {plan.rows} {plan.counted}, {plan.precision}, activations {plan.options.activations!r}"
    axis.set_title(f"{plan.model} on {plan.machine.name}: {about}", color=INK, fontsize=10, loc="left")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    axis.legend(facecolor="white", edgecolor="none", framealpha=0.9, fontsize=8, loc="upper center")
    drawn.tight_layout()
    return drawn


def draw(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Draw a plan to a file, in the format of its ending; make missing directories."""
    drawn = figure(plan)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(path, dpi=150)


def _shown(plan: Plan) -> list[SweepPoint]:
    """List the points near the device's memory: those far beyond it are no choice."""
    near = [point for point in plan.sweep if point.nbytes <= 1.6 * plan.available]
    return near if len(near) > 2 else list(plan.sweep)


def _draw_line(axis: Any, points: list[SweepPoint], number: int, available: int) -> None:
    """Draw a transfer's line. Larger transfers have smaller points, so all stay visible; too large ones are hollow."""
    color, size = TRANSFERS[number], (8, 5.5, 3.5, 2)[number]
    gib, seconds = [point.nbytes / GIB for point in points], [point.step_s for point in points]
    label = f"transfer {points[0].transfer}"
    axis.plot(gib, seconds, linewidth=1.2, color=color, zorder=3 + number)
    axis.plot([], [], marker="o", markersize=size, linewidth=1.2, color=color, label=label)
    for point, x, y in zip(points, gib, seconds, strict=True):
        face = color if point.nbytes <= available else "white"
        axis.plot([x], [y], marker="o", markersize=size, color=color, markerfacecolor=face, zorder=4 + number)


def _label_windows(axis: Any, points: list[SweepPoint], width: float) -> None:
    """Write the windows below their points; those of neighbours that would overlap stand together: "2 to 4"."""
    low, high = axis.get_ylim()
    groups: list[list[SweepPoint]] = []
    for point in points:
        last = groups[-1][-1] if groups else None
        near = last is not None and abs(point.nbytes - last.nbytes) / GIB < 0.035 * width
        if near and last is not None and abs(point.step_s - last.step_s) < 0.06 * (high - low):
            groups[-1].append(point)
        else:
            groups.append([point])
    place: dict[str, Any] = {"xytext": (0, -17), "textcoords": "offset points", "bbox": BEHIND, "zorder": 8}
    for group in groups:
        text = str(group[0].window) if len(group) == 1 else f"{group[0].window} to {group[-1].window}"
        middle = sum(point.nbytes for point in group) / len(group) / GIB, min(point.step_s for point in group)
        axis.annotate(text, middle, fontsize=8, color=INK, ha="center", **place)
