"""Counts of what a stream did, and spans of a step's work and waiting, of which a timeline is made."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, TypedDict, get_args

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

    @property
    def seconds(self) -> float:
        """The span's duration."""
        return self.end - self.start


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


class Stats(TypedDict):
    """The figures that `Handle.stats` returns: counts since streaming began, then what is so now. Bytes unless said."""

    fetches: int  # units copied to the device
    bytes_up: int  # copied to the device
    bytes_down: int  # copied to the host
    disk_read: int  # of weights, state and gradients, from files
    disk_written: int  # of weights, state and gradients
    evictions: int  # units whose device memory was given back
    stepped_ahead: int  # parameters stepped while backward ran
    held_steps: int  # optimizer steps that ran beside the next forward
    surprises: int  # visits that were not the predicted one
    pending_step: str | None  # "in backward" or "deferred" while an optimizer step runs beside other work
    compiled_step: str | None  # variant of the compiled step: "avx512", "avx2" or "default"; None while torch steps
    window: int  # units
    transfer: int  # units
    units: int  # units that stream
    resident_root_bytes: int  # weights that stay on the device
    weight_bytes: int  # all weights, as they are on the device
    resident_bytes: int  # weights that are on the device now
    window_bytes: int  # on the device, of resident weights and of a full window, with their gradients
    device_peak: int  # the most on the device so far
    host_weight_bytes: int  # host memory of weights and their wire copies
    host_gradient_bytes: int  # host memory that gradients take in a step


class Counters:
    """Counts since streaming began, and the recorder that is told of each piece of work."""

    def __init__(self) -> None:
        self.nbytes: collections.Counter[Lane] = collections.Counter()  # that each lane moved
        self.fetches = self.evictions = self.surprises = 0
        self.stepped_ahead = self.held_steps = 0
        self.listener: Any = None  # a recorder (recorder.py) while there is one

    def record(self, lane: Lane, unit: str, phase: str, nbytes: int = 0) -> AbstractContextManager[None]:
        """Count the bytes that a lane moves, and return a context in which the recorder times the work."""
        self.nbytes[lane] += nbytes
        return NOT_RECORDED if self.listener is None else self.listener.work(lane, unit, phase, nbytes)

    def stall(self, cause: str) -> AbstractContextManager[None]:
        """Return a context in which the recorder times a wait of the host."""
        return NOT_RECORDED if self.listener is None else self.listener.work("host", stall=cause)
