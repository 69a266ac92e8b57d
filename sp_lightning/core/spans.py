"""Spans: pieces of a step's work and of its waiting. A timeline, measured or simulated, is made of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, get_args

Lane = Literal["up", "compute", "down", "optimizer", "host"]
CAUSES = ("compute", "weights", "gradients", "activations", "optimizer", "other")
LANES: tuple[Lane, ...] = get_args(Lane)  # "optimizer" is the thread that steps, "host" the one that launches


class Span(NamedTuple):
    """A piece of a lane's work, or of its waiting, between two moments in seconds."""

    lane: Lane
    unit: str
    start: float
    end: float
    phase: str = ""  # of the unit: "forward" or "backward"; of a copy: "weights", "gradients" or "activations"
    stall: str = ""  # what was waited for; empty where work was done
    nbytes: int = 0  # that a copy moved

    @property
    def seconds(self) -> float:
        """The span's duration."""
        return self.end - self.start


def causes(spans: Sequence[Span], start: float, end: float) -> dict[str, float]:
    """Split the seconds between two moments by cause: one sum for each of CAUSES, which add up to the whole.

    Lanes overlap, causes do not. Each moment counts for the first of these under way: compute, a stall of the compute
    stream, a stall of the host, a step of the optimizer; or else for "other".
    """
    layers = [("compute", [span for span in spans if span.lane == "compute" and not span.stall])]
    for lane in ("compute", "host"):
        stalls = [span for span in spans if span.lane == lane and span.stall]
        layers += [(cause, [span for span in stalls if span.stall == cause]) for cause in CAUSES[1:-1]]
    layers.append(("optimizer", [span for span in spans if span.lane == "optimizer"]))
    return _first_cause(layers, start, end)


def _first_cause(layers: Iterable[tuple[str, list[Span]]], start: float, end: float) -> dict[str, float]:
    """Split the seconds between two moments by layer, each moment counted for the first layer that covers it."""
    seconds = dict.fromkeys(CAUSES, 0.0)
    covered: list[tuple[float, float]] = []
    before = 0.0
    for cause, spans in layers:
        clipped = [(max(start, span.start), min(end, span.end)) for span in spans]
        covered = _union([*covered, *(piece for piece in clipped if piece[0] < piece[1])])
        total = sum(b - a for a, b in covered)
        seconds[cause] += total - before
        before = total
    seconds["other"] = end - start - before
    return seconds


def _union(pieces: list[tuple[float, float]]) -> list[tuple[float, float]]:
    result: list[tuple[float, float]] = []
    for start, end in sorted(pieces):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result
