"""The bottleneck of a run, from measured steps: their lower bound, and one sentence that says what to change.

1. The lower bound (``floor``) is the simulation's, with measured times in place of the machine's rates.
2. A change is judged by the measured step: what it saves of a lane's work, it saves of the time that the step waits for
   that lane. Nothing else changes, and a step never gets shorter than its compute.
3. Only changes whose saving is known that way are named with a time; the sentence has the two that save most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..core import remedies
from ..core.machine import Machine
from ..core.simulation import LowerBound, floor
from ..core.unit_numbers import UnitNumbers
from ..runtime.recorder import RecordedStep, UnitTimes

SMALL = 0.05  # of a step: less waiting than this is not worth advice
WORTH_IT = 0.03  # of a step: a change that saves less is not named
NANO = 1e9
WAITED_FOR = {
    "disk": "waits for the disk",
    "weights": "waits for weights on their way up",
    "gradients": "waits for gradients on their way down",
    "activations": "waits for offloaded activations",
    "optimizer": "waits for the host optimizer",
}


@dataclass(frozen=True, kw_only=True)
class RunSetting:
    """The sizes and options of a run, and the resources that it had."""

    window: int
    transfer: int
    units: int  # streamed ones
    spare_units: int = 0  # how many more fit into the device's memory
    threads: int = 1  # of torch on the host
    cores: int = 1
    overlaps: bool = True  # whether units are stepped while backward runs, or would not gain from it
    waits_as: str = ""  # why they are stepped after backward
    single: bool = False  # whether weights travel in FP32
    activations: str = "keep"


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """The times of a typical step, in seconds."""

    step_s: float
    causes: Mapping[str, float]  # telemetry.CAUSES
    forward_s: float = 0.0
    backward_s: float = 0.0
    up_s: float = 0.0  # in which copies to the device ran
    down_s: float = 0.0
    optimizer_s: float = 0.0
    fetches: int = 0  # units copied to the device
    floor_s: float | None = None
    setting: RunSetting = field(default_factory=lambda: RunSetting(window=1, transfer=1, units=1))

    @property
    def compute_s(self) -> float:
        """Seconds in which units computed."""
        return self.forward_s + self.backward_s


class Advice(NamedTuple):
    """A change, and how long the step would take with it."""

    what: str
    step_s: float


def measured(
    steps: Sequence[RecordedStep], times: Mapping[str, UnitTimes], setting: RunSetting, resident: Collection[str] = ()
) -> MeasuredRun:
    """Summarise the step of median length; ``steps`` must not be empty."""
    step = sorted(steps, key=lambda step: step.seconds)[len(steps) // 2]
    forward = sum(span.seconds for span in step.of("compute") if span.phase == "forward")
    return MeasuredRun(
        step_s=step.seconds,
        causes=step.causes(),
        forward_s=forward,
        backward_s=step.busy("compute") - forward,
        up_s=step.busy("up"),
        down_s=step.busy("down"),
        optimizer_s=step.busy("optimizer"),
        fetches=len(step.of("up")),
        floor_s=measured_floor(times.values(), setting.window, resident).seconds if times else None,
        setting=setting,
    )


def measured_floor(times: Iterable[UnitTimes], window: int, resident: Collection[str] = ()) -> LowerBound:
    """Compute the lower bound of a step over these units, at the measured rates (Rule 1)."""
    times = list(times)
    units = [
        UnitNumbers(
            name=t.unit,
            up_nbytes=t.up_nbytes,
            down_nbytes=t.down_nbytes,
            parameters=round(t.step_s * NANO),
            forward_flops=t.forward_s,
            backward_flops=t.backward_s,  # including the forward that "recompute" repeats
            resident=t.unit in resident,
        )
        for t in times
    ]
    clock = Machine(
        name="measured",
        flops_per_s=1.0,
        up_bytes_per_s=_rate([(t.up_nbytes, t.up_s) for t in times]),
        down_bytes_per_s=_rate([(t.down_nbytes, t.down_s) for t in times]),
        duplex=1.0,  # measured rates include it
        dram_bytes_per_s=NANO,
        device_nbytes=0,
        host_nbytes=0,
        optimizer_bytes_per_parameter=1,
    )
    return floor(units, window, clock, recompute=False)


def _rate(copies: Iterable[tuple[int, float]]) -> float:
    copies = list(copies)
    seconds = sum(s for _, s in copies)
    return sum(nbytes for nbytes, _ in copies) / seconds if seconds else math.inf


# ---- the sentence


def sentence(m: MeasuredRun) -> str:
    """Say in one sentence what holds the step back and what would help."""
    waits = {cause: m.causes.get(cause, 0.0) for cause in WAITED_FOR}
    outside = m.causes.get("other", 0.0)
    cause = max(waits, key=lambda name: waits[name])
    streaming = f"streaming costs {_percent(sum(waits.values()), m)}"
    if max(waits[cause], outside) < SMALL * m.step_s:
        return (
            f"Units compute {_percent(m.causes.get('compute', 0.0), m)} of each step and {streaming}: "
            "a larger window or a faster host would gain next to nothing."
        )
    if outside > waits[cause]:
        return (
            f"{_percent(outside, m)} of each step passes outside of the units, which wait for nothing then, and "
            f"{streaming}: look at the data loader, the loss, logging and callbacks."
        )
    return f"{_percent(waits[cause], m)} of each step {WAITED_FOR[cause]}; {_advice(m, cause)}."


def _percent(seconds: float, m: MeasuredRun) -> str:
    return f"{100 * seconds / m.step_s:.0f} %"


def _advice(m: MeasuredRun, cause: str) -> str:
    good = [change for change in CHANGES[cause](m) if change.step_s < m.step_s * (1 - WORTH_IT)]
    if not good:
        return WITHOUT_CHANGE[cause]
    best, *other = sorted(good, key=lambda change: change.step_s)[:2]
    now, then = in_unit_of(m.step_s, m.step_s), in_unit_of(m.step_s, best.step_s)
    if other and in_unit_of(m.step_s, other[0].step_s) == then:
        return f"with {best.what}, or {other[0].what}, the step would take about {then} instead of {now}"
    second = f"; with {other[0].what}, about {in_unit_of(m.step_s, other[0].step_s)}" if other else ""
    return f"with {best.what} the step would take about {then} instead of {now}{second}"


def in_unit_of(step_s: float, seconds: float) -> str:
    """Format seconds with two digits, in seconds or milliseconds to suit the step: "1.4 s", "0.88 s", "85 ms"."""
    value, unit = (seconds, "s") if step_s >= 1 else (seconds * 1e3, "ms")
    rounded = float(f"{value:.2g}")
    digits = max(0, 1 - math.floor(math.log10(rounded))) if rounded > 0 else 0
    return f"{rounded:.{digits}f} {unit}"


WITHOUT_CHANGE = {
    "disk": "the disk is the limit: a larger host_budget leaves less there, and a larger batch, or more accumulated "
    "batches per step, gives more compute to hide it",
    "weights": "the link is the limit: a larger batch, or more accumulated batches per step, gives more compute to "
    "hide the copies",
    "gradients": "the link is the limit: a larger batch gives more compute to hide the copies",
    "activations": "the link is the limit: keep activations on the device (activations='keep', a smaller batch)",
    "optimizer": "all cores work on it already: a larger batch gives more compute to hide its steps",
}


def _without(m: MeasuredRun, cause: str, seconds: float) -> float:
    return max(m.step_s - min(m.causes[cause], seconds), m.compute_s)


def _optimizer(m: MeasuredRun) -> Iterator[Advice]:
    s = m.setting
    if s.threads < s.cores:
        faster = m.optimizer_s * (1 - s.threads / s.cores)
        yield Advice(f"{s.cores} threads instead of {s.threads}", _without(m, "optimizer", faster))
    if not s.overlaps:
        why = (
            f"not now, because {s.waits_as}"
            if s.waits_as
            else "optimizer_overlap=True and nothing that needs all gradients first"
        )
        yield Advice(f"units stepped while backward runs ({why})", _without(m, "optimizer", m.backward_s))


def _weights(m: MeasuredRun) -> Iterator[Advice]:
    s = m.setting
    if s.window == 1 and s.units > 1:
        hidden = min(m.compute_s, m.up_s)
        two = remedies.window(2)
        yield Advice(f"{two.what} ({two.cost})", _without(m, "weights", hidden))
    elif s.spare_units and s.window < s.units and m.fetches:
        more = min(s.spare_units, s.units - s.window)
        spared = more * m.up_s / m.fetches
        yield Advice(
            f"{remedies.window(s.window + more).what} (there is memory for it)", _without(m, "weights", spared)
        )
    yield from _half_the_bytes(m, "weights", m.up_s)


def _gradients(m: MeasuredRun) -> Iterator[Advice]:
    return _half_the_bytes(m, "gradients", m.down_s)


def _half_the_bytes(m: MeasuredRun, cause: str, seconds: float) -> Iterator[Advice]:
    for remedy in remedies.half_precision(m.setting.single):
        yield Advice(remedy.what, _without(m, cause, seconds / 2))


def _activations(m: MeasuredRun) -> Iterator[Advice]:
    for remedy in remedies.activations(m.setting.activations) if m.setting.activations == "offload" else ():
        yield Advice(remedy.what, max(m.step_s - m.causes["activations"] + m.forward_s, m.compute_s))


CHANGES: dict[str, Callable[[MeasuredRun], Iterator[Advice]]] = {  # by what the step waits for (Rule 2)
    "disk": lambda m: iter(()),
    "weights": _weights,
    "gradients": _gradients,
    "activations": _activations,
    "optimizer": _optimizer,
}
