"""The trace of a step: which unit is visited when, and what each visit takes, whatever the window is.

1. The schedule decides which weights are on the device: ``StepTrace.peak`` runs it over the visits, and adds the
   resident weights to the bytes of each visit. So one trace serves every window. If some weights travel cast, it does
   so twice: for the first step, with weights as they are and half the window (window.py, Rule 4), and for a later one.
2. Each byte has a term. What a visit leaves behind is "kept for backward"; what it also frees is "activations of one
   unit".
3. The trace of a batch between two others lies on the straight line between theirs, visit by visit.
4. A trace of answers has three passes over the weights (dry_run.py, Rule 5). Its peak is that of all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ..core.schedule import Schedule
from ..core.unit_numbers import UnitNumbers
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
CACHE = "keys and values"
ALL = "beside the weights"  # all terms together

PASSES = 3  # the first predicts nothing; the second may find what the first left; from then on all are alike


@dataclass
class Visit:
    """The time from the moment a unit is needed until another unit is."""

    unit: int | None  # None before the first visit
    in_use: tuple[int, ...]  # units in use meanwhile, which cannot be evicted
    backward: bool
    flops: float = 0.0  # in half precision
    fp32_flops: float = 0.0  # in all other types
    moved_nbytes: float = 0.0  # of the device's memory, that operators with FLOPs read and write
    sends: list[int] = field(default_factory=list)  # units whose gradients start their way down
    stowed_nbytes: int = 0  # activations offloaded to the host
    fetched_nbytes: int = 0  # activations fetched back
    nbytes: int = 0  # peak on the device beside weights
    terms: dict[str, int] = field(default_factory=dict)  # of the peak
    moment: int = 0  # of the peak: storages allocated by then
    totals: list[int] = field(default_factory=list)  # after each increase: which is the peak depends on the batch
    casts: list[int] = field(default_factory=list)  # of those bytes the casts of weights, which later steps do not make

    def later(self) -> Visit:
        """Return the same visit in a later step."""
        fewer = self.nbytes - max(
            (total - casts for total, casts in zip(self.totals, self.casts, strict=True)), default=0
        )
        term = WORKING if self.terms.get(WORKING, 0) >= fewer else max(self.terms, key=self.terms.__getitem__)
        return replace(self, nbytes=self.nbytes - fewer, terms={**self.terms, term: self.terms.get(term, 0) - fewer})


@dataclass(frozen=True)
class StepTrace:
    """The trace of a step: everything that does not depend on the window."""

    units: tuple[Unit, ...]
    sizes: tuple[UnitNumbers, ...]  # of all units, resident ones included, in the first step
    wire: tuple[UnitNumbers, ...]  # of all units later, when some weights travel cast (autocast_weights.py)
    wire_nbytes: tuple[int, ...]  # by unit, of the copies of weights that travel in another type than on the host
    frozen_wire_nbytes: tuple[int, ...]  # of those, the copies of frozen weights
    castable: frozenset[int]  # ids of weights that may come to travel in autocast's type
    uncast: frozenset[int]  # ids of weights that have no wire copies, later
    visits: tuple[Visit, ...]
    passes: tuple[int, ...] = ()  # places of the first visits of an answer's passes (Rule 4)

    def of_pass(self, number: int) -> StepTrace:
        """Return the trace of one pass of an answer (Rule 4)."""
        begin, end = (*self.passes, len(self.visits))[number : number + 2]
        return replace(self, visits=self.visits[begin:end], passes=())

    def between(self, other: StepTrace, share: float) -> StepTrace:
        """Return the trace on the line from this one (0) through the other (1), which has the same visits (Rule 3)."""

        def line(one: float, two: float) -> float:
            return max(0.0, one + share * (two - one))

        def visit(one: Visit, two: Visit) -> Visit:
            totals = [int(line(*pair)) for pair in zip(one.totals, two.totals, strict=True)]
            return replace(
                one,
                flops=line(one.flops, two.flops),
                fp32_flops=line(one.fp32_flops, two.fp32_flops),
                moved_nbytes=line(one.moved_nbytes, two.moved_nbytes),
                stowed_nbytes=int(line(one.stowed_nbytes, two.stowed_nbytes)),
                fetched_nbytes=int(line(one.fetched_nbytes, two.fetched_nbytes)),
                nbytes=max(totals),
                terms={ALL: max(totals)},
                totals=totals,
            )

        pairs = zip(self.visits, other.visits, strict=True)
        return replace(self, visits=tuple(visit(one, two) for one, two in pairs))

    def is_like(self, other: StepTrace) -> bool:
        """Whether both traces have the same visits."""
        mine, theirs = ([(visit.unit, len(visit.totals)) for visit in trace.visits] for trace in (self, other))
        return mine == theirs

    @property
    def streamed(self) -> list[UnitNumbers]:
        """Sizes of the units that stream."""
        return [size for size in self.sizes if not size.resident]

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole model."""
        return sum(unit.numel for unit in self.units)

    @property
    def order(self) -> list[int]:
        """Units in the order in which the schedule sees them visited."""
        indices = (visit.unit for visit in self.visits)
        return [index for index in indices if index is not None]

    def peak(self, window: int, transfer: int = 1) -> dict[str, int]:
        """Return the peak of the bytes on the device with that window, term by term: in the first step, or later."""
        if self.sizes == self.wire:
            return self._peak(self.sizes, self.visits, window, transfer)
        narrow = max(1, window // 2)
        sizes = narrow, min(transfer, narrow)
        if sizes not in self._firsts:  # two windows have one half
            self._firsts[sizes] = self._peak(self.sizes, self.visits, *sizes)
        first = self._firsts[sizes]
        later = self._peak(self.wire, self._later, window, transfer)
        return max(later, first, key=lambda terms: sum(terms.values()))

    @functools.cached_property
    def _firsts(self) -> dict[tuple[int, int], dict[str, int]]:
        """The peaks of the first step that were found so far, by window and transfer."""
        return {}

    @functools.cached_property
    def _later(self) -> list[Visit]:
        return [visit.later() for visit in self.visits]

    def _peak(
        self, sizes: Sequence[UnitNumbers], visits: Sequence[Visit], window: int, transfer: int
    ) -> dict[str, int]:
        trained = tuple(unit.index for unit in self.units if unit.trainable)
        visited = tuple((visit.unit, visit.in_use) for visit in visits)
        resident = _resident_nbytes(tuple(size.up_nbytes for size in sizes), trained, visited, window, transfer)
        beside = [visit.nbytes for visit in visits] * PASSES
        worst = max(range(len(resident)), key=lambda place: resident[place] + beside[place])
        root = sum(size.up_nbytes for size in sizes if size.resident)
        return {WINDOW: resident[worst], ROOT: root, **visits[worst % len(visits)].terms}


@functools.lru_cache(maxsize=256)
def _resident_nbytes(
    nbytes: tuple[int, ...],
    trained: tuple[int, ...],
    visits: tuple[tuple[int | None, tuple[int, ...]], ...],
    window: int,
    transfer: int,
) -> list[int]:
    """Return the bytes of streamed weights on the device in each visit of the passes (Rule 1).

    Args:
        nbytes: Of each unit.
        trained: Units that a step changes.
        visits: The visited unit of each visit, and the units in use meanwhile.
        window: Of the schedule, as is ``transfer``.
    """
    found = []
    schedule = Schedule(nbytes, window, transfer)
    order = [unit for unit, _ in visits if unit is not None]
    for number in range(PASSES):
        schedule.invalidate(trained)
        schedule.begin(order if number else ())
        for unit, in_use in visits:
            if unit is not None:
                schedule.visit(unit, in_use)
            found.append(schedule.resident_nbytes)
    return found
