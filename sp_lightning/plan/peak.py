"""What is on the device at each moment of a step, from a trace, the window and the policy of activations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ..core.schedule import Schedule
from ..core.unit_numbers import UnitNumbers
from .trace import Trace, Visit

# What bytes on the device are for.
WINDOW, ROOT, KEPT, WORKING = "window", "resident root", "kept for backward", "activations of one unit"
GRADIENTS = "gradient buffers"
PASSES = 3  # over the units: from the third on all are alike


@dataclass
class Sweep:
    """A step's loads, and the bytes on the device by term at its fullest moment."""

    terms: dict[str, int] = field(default_factory=dict)
    loads: dict[bool, list[int]] = field(default_factory=lambda: {False: [], True: []})  # units, by "in backward"


@dataclass(eq=False)
class _Forward:
    visit: Visit
    away: float = 0.0  # bytes that it saved and that are not on the device


def sweep(
    found: Trace,
    sizes: Sequence[UnitNumbers],
    window: int,
    transfer: int,
    activations: str,
    casts: Sequence[int] | None = None,
) -> Sweep:
    """Take the run's own schedule through the visits of a step.

    Args:
        found: The visits.
        sizes: The units' bytes.
        window: Units on the device at once.
        transfer: Units exchanged at a time.
        activations: The policy.
        casts: Of a run's first step: the bytes of the cast that a unit makes on the device.
    """
    schedule = Schedule([size.up_nbytes for size in sizes], window, min(transfer, window))
    trained = [index for index, size in enumerate(sizes) if size.trained]
    order = [visit.unit for visit in found.visits if visit.unit is not None]
    result, most = Sweep(), -1.0
    for number in range(PASSES):
        schedule.invalidate(trained)
        schedule.begin(order if number else ())
        result.loads = {False: [], True: []}
        for visit, before, peak in _bytes_at(found.visits, activations):
            if visit.unit is not None:
                result.loads[visit.backward] += schedule.visit(visit.unit, visit.in_use).load
            if casts and visit.unit is not None:
                packed = sizes[visit.unit].down_nbytes * visit.backward  # when no cast is there
                peak += max(0, casts[visit.unit] - packed)
            if schedule.resident_nbytes + before + peak > most:
                most = schedule.resident_nbytes + before + peak
                kept = min(before, before + peak - visit.gradients)
                working = before + peak - visit.gradients - kept
                terms = {WINDOW: schedule.resident_nbytes, KEPT: kept, WORKING: working, GRADIENTS: visit.gradients}
                result.terms = {name: int(nbytes) for name, nbytes in terms.items()}
    root = sum(size.up_nbytes for size in sizes if size.resident)
    result.terms |= {ROOT: root, "batch": int(found.batch), "buffers": found.buffers}
    return result


def sent(visit: Visit, activations: str) -> float:
    """Return the bytes of activations that a visit sends to the host."""
    if visit.backward or "offload" not in activations or not visit.saved:
        return 0.0
    return visit.arguments if "recompute" in activations else visit.saved


def _bytes_at(visits: Sequence[Visit], activations: str) -> Iterator[tuple[Visit, float, float]]:
    """Yield each visit, the bytes beside weights as it begins, and what it adds at most.

    What a forward saved is away during later visits: at once where it runs again, one visit later where it goes to the
    host. A backward has all of it again.
    """
    recomputes, there = "recompute" in activations, 0.0
    forwards: dict[int, list[_Forward]] = defaultdict(list)
    leaving: list[tuple[_Forward, float]] = []
    for visit in visits:
        peak, held = visit.peak, 0.0
        if visit.unit is not None and visit.backward:
            leaving.clear()
            if forwards[visit.unit]:
                forward = forwards[visit.unit].pop()
                there += forward.away
                peak = max(peak, recomputes * (forward.visit.peak - forward.visit.inner))
                held = recomputes * forward.visit.held
        yield visit, there, peak
        there += visit.grown - held
        if visit.unit is not None and not visit.backward and visit.saved:  # else it keeps nothing
            forwards[visit.unit].append(_Forward(visit))
            for forward, nbytes in leaving:
                forward.away, there = forward.away + nbytes, there - nbytes
            leaving = [(forwards[visit.unit][-1], sent(visit, activations))]
            if recomputes:
                forwards[visit.unit][-1].away, there = visit.inner, there - visit.inner + visit.held
