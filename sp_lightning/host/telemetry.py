"""Counters, spans of a step's work and waiting, and a listener for its phases.

A timeline, measured or simulated, is made of spans.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypedDict, get_args

Lane = Literal["disk in", "up", "compute", "down", "optimizer", "disk out", "host"]
CAUSES = ("compute", "disk", "weights", "gradients", "activations", "optimizer", "other")
LANES: tuple[Lane, ...] = get_args(Lane)  # "optimizer" is the thread that steps, "host" the one that launches


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
    layers = [("compute", [span for span in spans if span.lane == "compute" and not span.stall])]
    # While the host waits for the disk it launches nothing, so a stall of the compute stream is the disk's.
    layers.append(("disk", [span for span in spans if span.lane == "host" and span.stall == "disk"]))
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
    bytes_offloaded: int  # of saved activations, to the host
    bytes_brought_back: int  # of saved activations, to the device again
    writebacks: int  # units that model code changed in place on the device
    bytes_written_back: int
    evictions: int  # units whose device memory was given back
    stepped_ahead: int  # parameters stepped while backward ran
    held_steps: int  # optimizer steps that ran beside the next forward
    surprises: int  # visits that were not the predicted one
    stall_ms: dict[str, float]  # milliseconds for which the host waited, by cause
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
    host_bytes: int  # host memory that streaming takes
    host_weight_bytes: int  # host memory of weights and their wire copies
    host_gradient_bytes: int  # host memory that gradients take in a step


@dataclass
class Counters:
    """Counts since the start. Take a `snapshot` and pass it to `since` for what a step added."""

    fetches: int = 0  # units loaded
    bytes_up: int = 0
    bytes_down: int = 0
    disk_read: int = 0  # bytes of weights, state and gradients, from files
    disk_written: int = 0
    bytes_offloaded: int = 0  # of saved activations, to the host
    bytes_brought_back: int = 0  # of saved activations, to the device again
    writebacks: int = 0  # units that model code changed in place on the device
    bytes_written_back: int = 0
    evictions: int = 0
    stepped_ahead: int = 0  # parameters stepped while backward ran
    held_steps: int = 0  # deferred steps, which ran beside the next forward
    surprises: int = 0  # visits that were not the predicted one
    stall_ms: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # by cause
    listener: Any = field(default=None, repr=False, compare=False)  # a recorder (recorder.py), and no figure

    @contextlib.contextmanager
    def stall(self, cause: str) -> Iterator[None]:
        """Measure a wait of the host and add it to its cause."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            end = time.perf_counter()
            self.stall_ms[cause] += (end - begin) * 1e3
            if self.listener is not None:
                self.listener.host_waited(cause, begin, end)

    def snapshot(self) -> dict[str, Any]:
        """Return the values now, in a dictionary that later counting does not change."""
        figures = {name: value for name, value in vars(self).items() if name != "listener"}
        return {**figures, "stall_ms": dict(self.stall_ms)}

    def since(self, previous: Mapping[str, Any]) -> dict[str, Any]:
        """Return what was added after `previous`, an earlier snapshot of these counters."""
        now = self.snapshot()
        stalls_before = previous["stall_ms"]
        added = {name: value - previous[name] for name, value in now.items() if name != "stall_ms"}
        added["stall_ms"] = {cause: ms - stalls_before.get(cause, 0.0) for cause, ms in now["stall_ms"].items()}
        return added
