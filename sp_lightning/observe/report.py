"""The report on a run: figures for loggers, a table when it begins, three lines when it ends.

A report reads a handle's recorder and its `stats` and works without Lightning.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

from ..handle import Handle
from ..host.machine import peak_memory
from ..host.recorder import KEPT, RecordedStep, Recorder
from ..host.telemetry import LANES, Lane
from ..options import format_bytes, format_seconds
from .timeline import NAMES

GB = 1e9
WARM_UP = 2  # steps left out of the figures: they record the order of visits and allocate memory
SMALL = 0.05  # share of a step: less waiting than this is not worth advice
MORE_COMPUTE = "a larger batch, or more accumulated batches, gives more compute to hide it"
HALF = "precision='bf16-true' with master_weights=True halves the bytes of FP32 weights"
ADVICE = {  # by the cause of the wait
    "disk": f"a larger host_budget leaves less on the disk; {MORE_COMPUTE}",
    "weights": f"a larger window lets copies run further ahead; {MORE_COMPUTE}; {HALF}",
    "gradients": f"{MORE_COMPUTE}; {HALF}",
    "activations": "activations='recompute' computes them again in place of copying them",
    "optimizer": f"give torch all cores (OMP_NUM_THREADS), and see the log for why units are not stepped while "
    f"backward runs; {MORE_COMPUTE}",
}


@runtime_checkable
class Planned(Protocol):
    """The part of a plan that a report shows beside measured values."""

    @property
    def window(self) -> int: ...

    @property
    def device_nbytes(self) -> int: ...

    @property
    def step_s(self) -> float: ...


class RunReport:
    """Record training passes of a handle and turn them into figures; ``close`` restores the handle.

    Of every ``every`` * ``KEPT`` passes the first ``KEPT`` are recorded, and all passes whose numbers are in ``also``.
    """

    def __init__(self, handle: Handle, plan: Planned | None = None, every: int = 1, also: Collection[int] = ()) -> None:
        self._handle = handle
        self._plan = plan
        self._recorder = handle.record(
            Recorder(handle.device, wanted=lambda batch: batch // KEPT % every == 0 or batch in also)
        )
        self._seen = 0  # passes of any kind, up to the last one that was read
        self._fresh: list[RecordedStep] = []  # training passes since the last call of ``figures``
        self._last: deque[RecordedStep] = deque(maxlen=KEPT)

    # ---- while the run goes on

    def update(self) -> list[RecordedStep]:
        """Return training passes that became readable since the last call, numbered from 0 among training passes."""
        new = [step for step in self._recorder.steps if step.number >= self._seen]
        self._seen = max([self._seen, *(step.number + 1 for step in new)])
        numbered = [replace(step, number=step.batch) for step in new if step.trains]
        self._fresh = (self._fresh + numbered)[-KEPT:]
        self._last.extend(numbered)
        while self._last and self._last[0].number < WARM_UP < self._last[-1].number:
            self._last.popleft()
        return numbered

    @property
    def last(self) -> list[RecordedStep]:
        """The latest training passes, without the warm-up if the run is long enough."""
        return list(self._last)

    def figures(self) -> dict[str, float]:
        """Return mean figures of the training passes since the last call, by name; empty if there were none."""
        steps, self._fresh = self._fresh, []
        if not steps:
            return {}
        causes = [step.causes() for step in steps]
        mean = {cause: statistics.fmean(c[cause] for c in causes) * 1e3 for cause in causes[0]}
        step_ms = statistics.fmean(step.seconds for step in steps) * 1e3
        floor_ms = statistics.fmean(map(floor_s, steps)) * 1e3
        on_disk = self._handle.uses_files
        moved = {f"bytes_{lane}": statistics.fmean(step.nbytes(lane) for step in steps) for lane in ("up", "down")}
        found = {**moved, "step_ms": step_ms, "floor_ms": floor_ms, "floor_share": floor_ms / step_ms}
        found["compute_ms"] = mean["compute"]
        found |= {f"stall_{cause}_ms": mean[cause] for cause in ADVICE if cause != "disk" or on_disk}
        found["outside_ms"] = mean["other"]
        found |= {"up_gb_per_s": _rate(steps, "up"), "down_gb_per_s": _rate(steps, "down")}
        if on_disk:
            found |= {"disk_in_gb_per_s": _rate(steps, "disk in"), "disk_out_gb_per_s": _rate(steps, "disk out")}
        stats = self._handle.stats()
        found |= {"device_peak_bytes": float(self.device_peak()), "host_peak_bytes": float(peak_memory())}
        return found | {"resident_share": stats["resident_bytes"] / stats["weight_bytes"]}

    def stall_share(self) -> float | None:
        """Return the share of the latest recorded step that was stalls, from 0 to 1."""
        return _stall_share(self._last[-1]) if self._last else None

    def device_peak(self) -> int:
        """Return the peak of device memory in bytes."""
        return self._handle.device.memory_peak()

    # ---- when the run begins and ends

    def table(self) -> dict[str, str]:
        """Return the rows of a table for the beginning of a run: units, window and memory on both sides, by name."""
        stats, rest = self._handle.stats(), self._handle.stats()["resident_root_bytes"]
        grows = ", until the first steps show what is free" if self._handle.options.window == "auto" else ""
        host = f"weights {format_bytes(stats['host_weight_bytes'])}, "
        host += f"gradients {format_bytes(stats['host_gradient_bytes'])}, and the optimizer's state"
        rows = {
            "units": f"{stats['units']}" + (f", and {format_bytes(rest)} that stay on the device" if rest else ""),
            "window": f"{stats['window']} of them on the device{grows}",
            "transfer": f"{stats['transfer']} at a time",
            "device": f"{format_bytes(stats['window_bytes'])} for weights and gradients, plus activations",
            "host": host,
        }
        if self._plan is not None:
            rows["device"] = f"{format_bytes(self._plan.device_nbytes)} planned"
            rows["step"] = f"{format_seconds(self._plan.step_s)} planned"
        return rows

    def lines(self) -> list[str]:
        """Return the lines that end a run: measured beside planned values, and what bounded it; empty without steps."""
        if not self._last:
            return []
        step, stats, plan = typical(self._last), self._handle.stats(), self._plan
        planned = "" if plan is None else f" ({format_seconds(plan.step_s)} planned)"
        floor = f"floor {format_seconds(floor_s(step))} ({floor_s(step) / step.seconds:.2f} of the step)"
        memory = f"{format_bytes(stats['window_bytes'])} for weights and gradients"
        if plan is not None and stats["window"] == plan.window:
            memory = f"{format_bytes(plan.device_nbytes)} planned"
        return [
            f"a step took {format_seconds(step.seconds)}{planned}, {floor}: {in_words(step.causes())}",
            f"device peak {format_bytes(self.device_peak())} ({memory}) with window {stats['window']}; "
            f"host peak {format_bytes(peak_memory())}",
            bound_by(step.causes()),
        ]

    def rank_figures(self) -> list[float]:
        """Return this rank's part of the report, for `ranks_in_words`; zeros if no step was recorded."""
        if not self._last:
            return [0.0] * 4
        step = typical(self._last)
        return [step.seconds, _stall_share(step), float(self.device_peak()), float(peak_memory())]

    def close(self) -> list[RecordedStep]:
        """Stop recording, wait for the device, and return the training passes that were not read yet."""
        self._handle.stop_recording()
        return self.update()


# ---- of recorded steps


def typical(steps: Collection[RecordedStep]) -> RecordedStep:
    """Return the step of median length."""
    return sorted(steps, key=lambda step: step.seconds)[len(steps) // 2]


def floor_s(step: RecordedStep) -> float:
    """Return the seconds of the busiest lane's work: a step's time if all other work ran beside it."""
    return min(step.seconds, max(step.busy(lane) for lane in LANES))


def in_words(causes: Mapping[str, float]) -> str:
    """Format the shares of a step's time by cause, in percent, the largest first."""
    total = sum(causes.values())
    percents = {NAMES[cause]: round(100 * seconds / total) for cause, seconds in causes.items()}
    return ", ".join(f"{name} {share} %" for name, share in sorted(percents.items(), key=lambda one: -one[1]) if share)


def bound_by(causes: Mapping[str, float]) -> str:
    """Say in one sentence what a step's time mostly went to, and what would shorten it."""
    total = sum(causes.values())
    waits = max(ADVICE, key=lambda cause: causes[cause])
    if max(causes[waits], causes["other"]) < SMALL * total:
        return (
            f"Compute bounds the step, with {_percent(causes['compute'] / total)} of it: a larger window or a faster "
            "host would gain next to nothing."
        )
    if causes["other"] > causes[waits]:
        return (
            f"{_percent(causes['other'] / total)} of each step passes outside of the units, which wait for nothing: "
            "look at the data loader, the loss, logging and callbacks."
        )
    return f"{_percent(causes[waits] / total)} of each step {NAMES[waits]}: {ADVICE[waits]}."


def _percent(share: float) -> str:
    """Format a share as whole percent."""
    return f"{100 * share:.0f} %"


def ranks_in_words(figures: Sequence[Sequence[float]]) -> str:
    """Format each rank's seconds of a step, share of waiting, and peaks of device and host memory."""
    listed = (
        f"rank {rank} {format_seconds(step_s)}, waits {waits:.0%}, device peak {format_bytes(int(device))}, "
        f"host peak {format_bytes(int(host))}"
        for rank, (step_s, waits, device, host) in enumerate(figures)
    )
    return "by rank: " + "; ".join(listed)


def _stall_share(step: RecordedStep) -> float:
    """Return the share of a step that units waited, for any cause."""
    causes = step.causes()
    return sum(causes[cause] for cause in ADVICE) / step.seconds


def _rate(steps: Sequence[RecordedStep], lane: Lane) -> float:
    """Return the GB/s of a lane, over the time in which it worked."""
    seconds = sum(step.busy(lane) for step in steps)
    return sum(step.nbytes(lane) for step in steps) / seconds / GB if seconds else 0.0
