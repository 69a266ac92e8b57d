"""What a rehearsal found: who is visited when, and what each visit takes, whatever the window is.

1. Which weights are on the device is the schedule's matter: ``Script.peak`` runs it over the visits, beside whose bytes
   its own count. So one script serves every window.
2. Each byte has a term. What a visit leaves behind is "kept for backward"; what comes and goes is the unit's own.
3. What is between two batches lies on the straight line between their scripts, visit by visit.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ..core.schedule import Schedule
from ..core.sizing import UnitBytes
from ..memory.partition import Unit

# What bytes are for (Rule 2).
BATCH = "batch"
BUFFERS = "buffers"
KEPT = "kept for backward"
WORKING = "activations of one unit"
OUTSIDE = "outside the units"
GRADIENTS = "gradient buffers"
WINDOW = "window"
ROOT = "resident root"
ALL = "beside the weights"  # where terms are not told apart

PASSES = 3  # the first one predicts nothing; from the second on all are alike, unless the first left something


@dataclass
class Visit:
    """From the moment in which a unit is needed to that in which another one is."""

    unit: int | None  # None before the first one
    held: tuple[int, ...]  # units that are being visited meanwhile
    backward: bool
    flops: float = 0.0  # in half precision
    fp32_flops: float = 0.0  # in all others
    kernels: int = 0
    sends: list[int] = field(default_factory=list)  # units whose gradients start their way down
    stowed_nbytes: int = 0  # activations that go to the host
    fetched_nbytes: int = 0  # and come back
    nbytes: int = 0  # most of what is on the device beside weights
    terms: dict[str, int] = field(default_factory=dict)  # at that moment
    moment: int = 0
    course: list[int] = field(default_factory=list)  # bytes whenever some were added: the most moves with the batch


@dataclass(frozen=True)
class StepTrace:
    """What a rehearsal found: all that the window does not change."""

    units: tuple[Unit, ...]
    sizes: tuple[UnitBytes, ...]  # of all units, the resident ones included, as they are in the first step
    wire: tuple[
        UnitBytes, ...
    ]  # and as they travel later, when some weights are known to be cast (autocast_weights.py)
    cast_nbytes: int  # of what is converted for that
    visits: tuple[Visit, ...]

    def between(self, other: StepTrace, share: float) -> StepTrace:
        """On the line from this script (0) through the other (1), which has the same visits (Rule 3)."""

        def line(one: float, two: float) -> float:
            return max(0.0, one + share * (two - one))

        def visit(one: Visit, two: Visit) -> Visit:
            course = [int(line(*pair)) for pair in zip(one.course, two.course, strict=True)]
            return replace(
                one,
                flops=line(one.flops, two.flops),
                fp32_flops=line(one.fp32_flops, two.fp32_flops),
                stowed_nbytes=int(line(one.stowed_nbytes, two.stowed_nbytes)),
                fetched_nbytes=int(line(one.fetched_nbytes, two.fetched_nbytes)),
                nbytes=max(course),
                terms={ALL: max(course)},
                course=course,
            )

        pairs = zip(self.visits, other.visits, strict=True)
        return replace(self, visits=tuple(visit(one, two) for one, two in pairs))

    def is_like(self, other: StepTrace) -> bool:
        """Whether both have the same visits."""
        mine, theirs = ([(visit.unit, len(visit.course)) for visit in script.visits] for script in (self, other))
        return mine == theirs

    @property
    def streamed(self) -> list[UnitBytes]:
        """The units that come and go."""
        return [size for unit, size in zip(self.units, self.sizes, strict=True) if not unit.resident]

    @property
    def root_nbytes(self) -> int:
        """What stays."""
        return sum(size.nbytes for unit, size in zip(self.units, self.sizes, strict=True) if unit.resident)

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        return sum(unit.numel for unit in self.units)

    @property
    def order(self) -> list[int]:
        """The visits that the schedule sees."""
        indices = (visit.unit for visit in self.visits)
        return [index for index in indices if index is not None]

    def peak(self, window: int, transfer: int = 1) -> dict[str, int]:
        """The most bytes on the device, term by term, with that window."""
        worst, most = -1, {}
        schedule = Schedule([size.nbytes for size in self.sizes], window, transfer)
        trained = [unit.index for unit in self.units if unit.trainable]
        for number in range(PASSES):
            schedule.invalidate(trained)
            schedule.begin(self.order if number else ())
            for visit in self.visits:
                if visit.unit is not None:
                    schedule.visit(visit.unit, visit.held)
                weights = schedule.resident_nbytes
                if weights + visit.nbytes > worst:
                    worst = weights + visit.nbytes
                    most = {WINDOW: weights, ROOT: self.root_nbytes, **visit.terms}
        return most
