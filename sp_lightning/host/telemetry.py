"""Spans of a step's work and waiting, from which a timeline and sums by cause are made."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Literal, NamedTuple, get_args

Lane = Literal["disk in", "up", "compute", "down", "optimizer", "disk out", "host"]
CAUSES = ("compute", "disk", "weights", "gradients", "activations", "optimizer", "other")
LANES: tuple[Lane, ...] = get_args(Lane)  # "optimizer" is the thread that steps, "host" the one that launches
NOT_RECORDED: AbstractContextManager[None] = contextlib.nullcontext()


class Span(NamedTuple):
    """A piece of a lane's work, or of its waiting, between two moments in seconds."""

    lane: Lane
    unit: str
    start: float
    end: float
    # Of compute: "forward" or "backward"; of a copy: "weights", "gradients", "activations" or "state"; or "step".
    phase: str = ""
    stall: str = ""  # what was waited for; empty where work was done
    nbytes: int = 0  # that a copy moved


def causes(spans: Sequence[Span], start: float, end: float) -> dict[str, float]:
    """Split the seconds between two moments by cause: one sum for each of CAUSES, which add up to the whole.

    Lanes overlap, causes do not. Each moment counts for the first of these under way: compute, a wait of the host for
    the disk, a stall of the compute stream, another stall of the host, a step of the optimizer; or else for "other".
    """
    stalls: list[tuple[Lane, str]] = [(lane, cause) for lane in ("compute", "host") for cause in CAUSES[1:-1]]
    # While the host waits for the disk it launches nothing, so a stall of the compute stream is the disk's.
    order: list[tuple[Lane, str]] = [("compute", ""), ("host", "disk"), *stalls, ("optimizer", "")]
    seconds, before = dict.fromkeys(CAUSES, 0.0), 0.0
    covered: list[tuple[float, float]] = []
    for kind in order:
        found = [(max(start, s.start), min(end, s.end)) for s in spans if (s.lane, s.stall) == kind]
        covered = _union([*covered, *((a, b) for a, b in found if a < b)])
        total = sum(b - a for a, b in covered)
        seconds[kind[1] or kind[0]] += total - before
        before = total
    seconds["other"] = end - start - before
    return seconds


def _union(pieces: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Join the intervals that overlap or touch, and return all in order."""
    result: list[tuple[float, float]] = []
    for start, end in sorted(pieces):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result
