"""The trace of a step: which unit is visited when, and what each visit takes, whatever the window is.

1. The schedule decides which weights are on the device: ``StepTrace.peak`` runs it over the visits, and adds the
   resident weights to the bytes of each visit. So one trace serves every window. If some weights travel cast, it does
   so twice: for the first step, with weights as they are and half the window (window.py, Rule 4), and for a later one.
2. Each byte has a term. What a visit leaves behind is "kept for backward"; what it also frees is "activations of one
   unit".
3. The trace of a batch between two others lies on the straight line between theirs, visit by visit.
4. A trace of answers has three passes over the weights (answers.py, Rule 1). Its peak is that of all of them.
5. A step that begins with answers has phases, of which the last one trains. Its peak is that of all of them.
6. Of several models each has a window of its own, which the others' visits leave alone.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..core.schedule import Schedule
from ..core.unit_numbers import UnitNumbers
from ..memory.partition import Unit
from ..wholes.whole import part_of

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


@dataclass(frozen=True)
class StepPhase:
    """Visits that stand for as many in a step as they do a number of times (Rule 5)."""

    begin: int  # the place of the first one
    times: float


@dataclass
class Visit:
    """The time from the moment a unit is needed until another unit is."""

    unit: int | None  # None before the first visit
    in_use: tuple[int, ...]  # units in use meanwhile, which cannot be evicted
    backward: bool
    halves: bool  # in a first step, whether the window is half as wide (window.py, Rule 4)
    flops: float = 0.0  # in half precision
    fp32_flops: float = 0.0  # in all other types
    moved_nbytes: float = 0.0  # of the device's memory, that operators with FLOPs read and write
    other_nbytes: float = 0.0  # of the device's memory, that all other operators read and write
    mesh_nbytes: float = 0.0  # sent by collectives to devices with other shards
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
    narrow: Mapping[int, int]  # bytes of the wire copies of weights that travel in another type, by their ids
    visits: tuple[Visit, ...]
    models: tuple[int, ...]  # of each unit, the number of its model (Rule 6)
    passes: tuple[int, ...] = ()  # places of the first visits of an answer's passes (Rule 4)
    phases: tuple[StepPhase, ...] = ()  # of a step that begins with answers (Rule 5)
    shards: int = 1  # devices among which layers are cut

    def of_pass(self, number: int) -> StepTrace:
        """Return the trace of one pass of an answer (Rule 4)."""
        begin, end = (*self.passes, len(self.visits))[number : number + 2]
        return replace(self, visits=self.visits[begin:end], passes=())

    def of_phases(self) -> list[tuple[StepTrace, float]]:
        """Return the trace of each phase that has visits, and how often it takes place (Rule 5)."""
        ends = [*(phase.begin for phase in self.phases[1:]), len(self.visits)]
        return [
            (replace(self, visits=self.visits[phase.begin : end], phases=()), phase.times)
            for phase, end in zip(self.phases, ends, strict=True)
            if phase.begin < end
        ]

    def between(self, other: StepTrace, share: float) -> StepTrace:
        """Return the trace on the line from this one (0) through the other (1), which has the same visits (Rule 3)."""

        def line(one: float, two: float) -> float:
            return max(0.0, one + share * (two - one))

        def visit(one: Visit, two: Visit) -> Visit:
            totals, casts = [int(line(*pair)) for pair in zip(one.totals, two.totals, strict=False)], one.casts
            if len(one.totals) != len(two.totals):  # code around the models makes tensors for each row
                totals = [int(line(one.nbytes, two.nbytes))]
                casts = [totals[0] - int(line(one.later().nbytes, two.later().nbytes))]
            return replace(
                one,
                flops=line(one.flops, two.flops),
                fp32_flops=line(one.fp32_flops, two.fp32_flops),
                moved_nbytes=line(one.moved_nbytes, two.moved_nbytes),
                other_nbytes=line(one.other_nbytes, two.other_nbytes),
                mesh_nbytes=line(one.mesh_nbytes, two.mesh_nbytes),
                stowed_nbytes=int(line(one.stowed_nbytes, two.stowed_nbytes)),
                fetched_nbytes=int(line(one.fetched_nbytes, two.fetched_nbytes)),
                nbytes=max(totals),
                terms={ALL: max(totals)},
                totals=totals,
                casts=casts,
            )

        pairs = zip(self.visits, other.visits, strict=True)
        return replace(self, visits=tuple(visit(one, two) for one, two in pairs))

    def is_like(self, other: StepTrace) -> bool:
        """Whether both traces have the same visits."""
        mine, theirs = ([(visit.unit, len(visit.totals)) for visit in trace.visits] for trace in (self, other))
        return mine == theirs

    def has_visits_of(self, other: StepTrace) -> bool:
        """Whether both traces visit the same units, if not with as many steps to a visit's peak."""
        return [visit.unit for visit in self.visits] == [visit.unit for visit in other.visits]

    @property
    def streamed(self) -> list[UnitNumbers]:
        """Sizes of the units that stream."""
        return [size for size in self.sizes if not size.resident]

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole model, with those that other ranks have shards of."""
        shards = [whole for unit in self.units for whole in unit.wholes if whole.is_shard]
        elsewhere = sum(whole.parameter.numel() - part_of(whole).numel() for whole in shards)
        return sum(unit.numel for unit in self.units) + elsewhere

    @property
    def trains_shards(self) -> bool:
        """Whether any of the parameters that train is a DTensor."""
        return any(whole.is_shard and whole.parameter.requires_grad for unit in self.units for whole in unit.wholes)

    @property
    def order(self) -> list[int]:
        """Units in the order in which the schedule sees them visited."""
        indices = (visit.unit for visit in self.visits)
        return [index for index in indices if index is not None]

    def peak(self, window: int, transfer: int = 1) -> dict[str, int]:
        """Return the peak of the bytes on the device with that window, term by term: in the first step, or later."""
        if self.sizes == self.wire:
            return self._peak(self.sizes, self.visits, window, transfer)
        first = self._peak(self.sizes, self.visits, window, transfer, halves=True)
        later = self._peak(self.wire, self._later, window, transfer)
        return max(later, first, key=lambda terms: sum(terms.values()))

    @functools.cached_property
    def _later(self) -> list[Visit]:
        return [visit.later() for visit in self.visits]

    def _peak(
        self, sizes: Sequence[UnitNumbers], visits: Sequence[Visit], window: int, transfer: int, halves: bool = False
    ) -> dict[str, int]:
        if halves and all(visit.halves for visit in visits):  # two windows have one half
            window, halves = max(1, window // 2), False
            transfer = min(transfer, window)
        trained = tuple(unit.index for unit in self.units if unit.trainable)
        visited = tuple((visit.unit, visit.in_use, halves and visit.halves) for visit in visits)
        nbytes = tuple(size.up_nbytes for size in sizes)
        resident = _resident_nbytes(nbytes, self.models, trained, visited, window, transfer)
        beside = [visit.nbytes for visit in visits] * PASSES
        worst = max(range(len(resident)), key=lambda place: resident[place] + beside[place])
        root = sum(size.up_nbytes for size in sizes if size.resident)
        return {WINDOW: resident[worst], ROOT: root, **visits[worst % len(visits)].terms}


@functools.lru_cache(maxsize=256)
def _resident_nbytes(
    nbytes: tuple[int, ...],
    models: tuple[int, ...],
    trained: tuple[int, ...],
    visits: tuple[tuple[int | None, tuple[int, ...], bool], ...],
    window: int,
    transfer: int,
) -> list[int]:
    """Return the bytes of streamed weights on the device in each visit of the passes (Rule 1).

    Args:
        nbytes: Of each unit.
        models: Of each unit, the number of its model, which has a schedule of its own (Rule 6).
        trained: Units that a step changes.
        visits: The visited unit of each visit, the units in use meanwhile, and whether the window is half as wide.
        window: Of the schedule, as is ``transfer``.
    """
    found = []
    schedules = {model: Schedule(nbytes, window, transfer) for model in models}
    orders: dict[int, list[int]] = {model: [] for model in models}
    for unit, _, _ in visits:
        if unit is not None:
            orders[models[unit]].append(unit)
    for number in range(PASSES):
        for model, schedule in schedules.items():
            schedule.invalidate([unit for unit in trained if models[unit] == model])
            schedule.begin(orders[model] if number else ())
        for unit, in_use, halves in visits:
            if unit is not None:
                schedule, now = schedules[models[unit]], max(1, window // 2) if halves else window
                if now != schedule.window:
                    schedule.resize(now, min(transfer, now))
                schedule.visit(unit, in_use)
            found.append(sum(schedule.resident_nbytes for schedule in schedules.values()))
    return found
