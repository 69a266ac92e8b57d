"""Steps of several ranks: each steps its part of every weight, in memory that all of a machine's ranks share.

1. A rank begins a unit's step once no rank reads what is stepped, and has called the step or is past its backward. The
   step is over when every rank has stepped its parts.
2. Before it steps, a rank copies its parts of what its user wrote (memory.py) to the truth. All ranks make
   alike edits, so the truth is whole then; at the end of the step the user's own pages are given up.
3. State is whole in memory that ranks share, too: a checkpoint of any number of ranks is that of one device. Numbers,
   such as a count of steps, are each rank's own.
4. Ranks may begin steps beside their backwards, each of other units: so nothing waits for a step before the user's
   call of `step`, by which all have begun.
5. An optimizer that does not treat each element by itself steps whole weights, on every rank, in its user's copy.
"""

from __future__ import annotations

import functools
import itertools
import mmap
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, cast

import torch
from torch import Tensor, nn, optim
from torch.autograd.graph import increment_version

from ..compat.tensors import is_dtensor
from ..errors import UnsupportedError
from ..host.device import Device, aligned
from ..optim.half_applied import Outcome
from ..optim.slices import ELEMENTWISE, SlicedOptimizer, Work, is_known
from ..optim.state import WaitingState
from ..optim.steps import Steps
from ..store.store import Store
from ..stream.gradients import GradientBytes
from ..stream.leaf import Weight
from ..stream.parameters import unit_of
from ..stream.unit import Unit
from .board import Stage
from .cut import Cut
from .memory import SharedSlabs, Twin
from .team import Team

PAGE = mmap.PAGESIZE
PLANES = 64  # kinds of state that a unit may have
LARGEST = 8  # bytes of an element of state


class WeightPart:
    """A weight with one dimension, as slices see it: the elements that this rank steps."""

    is_part = False

    def __init__(self, weight: Weight, cut: Cut, rank: int, slabs: SharedSlabs) -> None:
        self.whole, self.host, self.unit, self.name = weight, weight.host, weight.unit, weight.name
        self.is_narrow, self.dtype = weight.is_narrow, weight.dtype
        self.value = cut.part_of(slabs.truth(weight.value), rank)
        self.wire = cut.part_of(slabs.truth(weight.wire), rank)
        self.there = weight.there


class GradientPart(GradientBytes):
    """The elements of a gradient that belong to this rank's part; the gradient stays as it is."""

    def true(self) -> Tensor:
        self.arrived.synchronize()
        part = self.raw.to(self.weight.value.dtype)
        for factor in self.factors:
            part = part * factor
        return part

    def make_true(self) -> None:
        self.raw, self.factors = self.true(), []


class State:
    """Optimizer state as the slicer gets it: each entry that is like a weight is this rank's part of it."""

    def __init__(self, real: Any, planes: Planes, parts: list[WeightPart], cuts: list[Cut], rank: int) -> None:
        self._real, self._planes, self._rank = real, planes, rank
        self._parts = {id(part.host): (part, cut) for part, cut in zip(parts, cuts, strict=True)}
        self._made: dict[int, dict[str, Any]] = {}

    def peek(self, host: nn.Parameter) -> dict[str, Any]:
        """Return the parts of a weight's entry."""
        if id(host) not in self._made:
            own = self._real.peek(host) or {}
            self._made[id(host)] = {key: self._part(host, key, entry) for key, entry in own.items()}
        return self._made[id(host)]

    make = peek

    def part_of(self, weight: Weight) -> tuple[WeightPart, Cut]:
        """Return this rank's part of a weight, and how that is cut."""
        return self._parts[id(weight.host)]

    def _part(self, host: nn.Parameter, key: str, entry: Any) -> Any:
        part, cut = self._parts[id(host)]
        if not isinstance(entry, Tensor) or entry.shape != part.whole.value.shape:
            return entry
        own = self._planes.part(part.whole, key, entry, cut, self._rank)
        self._real.make(host)[key] = self._planes.face(part.whole, key, entry.dtype)
        return own

    def keep(self) -> None:
        """Put what the step made into the state."""
        for at, made in self._made.items():
            part, cut = self._parts[at]
            for key, entry in made.items():
                real = self._real.make(part.host)
                if isinstance(entry, Tensor) and entry.ndim:
                    whole = self._planes.face(part.whole, key, entry.dtype)
                    own = cut.part_of(self._planes.slabs.truth(whole), self._rank)
                    if own.data_ptr() != entry.data_ptr():
                        own.copy_(entry)
                    real[key] = whole
                else:
                    real[key] = entry


class Planes:
    """Shared memory for the state of a unit's weights: a plane for each kind of state of each optimizer."""

    def __init__(self, unit: Unit, slabs: SharedSlabs) -> None:
        self.slabs = slabs
        self._places, self._size = {}, 0
        for weight in unit.weights:
            self._places[weight] = self._size
            self._size += aligned(weight.value.numel() * LARGEST)
        self._size = -(-self._size // PAGE) * PAGE
        self._offset = slabs.reserve(PLANES * self._size)
        self._twins: dict[Any, Twin] = {}
        self._faces: dict[Any, Tensor] = {}
        self._versions: dict[Any, int] = {}
        self.optimizer: Any = None  # whose state is meant
        self.edited: list[Twin] = []  # what the user wrote to

    def face(self, weight: Weight, key: str, dtype: torch.dtype) -> Tensor:
        """Return the user's tensor for an entry."""
        name = self.optimizer, key
        if name not in self._twins:
            if len(self._twins) == PLANES:
                raise UnsupportedError(
                    f"optimizers keep more than {PLANES} kinds of state for a unit: use fewer at a time"
                )
            at = self._offset + len(self._twins) * self._size
            self._twins[name] = self.slabs.at(at, self._size)
        if (*name, weight) not in self._faces:
            face = self._twins[name].tensor(self._places[weight], weight.value, dtype)
            self._faces[(*name, weight)] = face
            self._versions[(*name, weight)] = face._version
        return self._faces[(*name, weight)]

    def part(self, weight: Weight, key: str, entry: Tensor, cut: Cut, rank: int) -> Tensor:
        """Return a rank's part of an entry, with what the user wrote to it, or put in its place."""
        face = self.face(weight, key, entry.dtype)
        own = cut.part_of(self.slabs.truth(face), rank)
        name = self.optimizer, key, weight
        if entry is not face or face._version != self._versions[name]:
            like = entry if entry.stride() == face.stride() else torch.empty_like(face).copy_(entry)
            own.copy_(cut.part_of(like, rank))
            self._versions[name] = face._version
            self.edited.append(self._twins[self.optimizer, key])
        return own


class SharedSteps(Steps):
    """The optimizers of a stream through several devices."""

    def __init__(self, chunk: int, overlap: bool, device: Device, store: Store, team: Team) -> None:
        super().__init__(chunk, overlap, device, store)
        self._team, self._slabs = team, team.slabs
        self._planes: dict[Unit, Planes] = {}
        # Optimizers, in the order in which they first stepped.
        self._numbers: weakref.WeakKeyDictionary[optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._next = itertools.count()
        self._edited: set[Unit] = set()

    def add_unit(self, unit: Unit) -> None:
        super().add_unit(unit)
        if not unit.is_resident:
            self._planes[unit] = Planes(unit, self._slabs)

    def step_beside_backward(self, optimizer: optim.Optimizer | None) -> None:
        # Steps of whole weights wait for each other, so all ranks take them in one order.
        super().step_beside_backward(optimizer if type(optimizer) in ELEMENTWISE else None)

    def delivered(self, unit: Unit, whose: list[Weight], is_complete: bool) -> None:
        super().delivered(unit, whose, is_complete and all(map(_has_parts, whose)))  # for the same reason

    def _start(self, unit: Unit, whose: list[Weight], run: Callable[[], None]) -> Future[None]:
        """Give this rank's part of a unit's step to the thread, and return the end of all parts (Rule 1)."""
        follow, place, count = self._team.board.follow, f"the step of {unit.name}", len(whose)
        ready = follow(Stage.READY, unit.index, count, place, unit.wait_copy)
        ended: Future[None] = Future()

        def run_part() -> None:
            try:
                ready.result()
                run()
            except BaseException as error:
                self._end(unit, ended, error)
                return
            stepped = follow(Stage.STEPPED, unit.index, count, place)
            stepped.add_done_callback(lambda stepped: self._end(unit, ended, stepped.exception()))

        self.thread.submit(run_part)
        return ended

    def _end(self, unit: Unit, ended: Future[None], error: BaseException | None) -> None:
        try:
            if error is None:
                self._give_up_edits(unit)
            self._planes[unit].edited.clear()
            unit.note_stepped()
            unit.steps.end()
        except BaseException as failed:  # whoever waits for the step gets it
            error = error or failed
        if error is not None:
            self._note_failed(Outcome(error=error, where=unit.name))
        ended.set_result(None) if error is None else ended.set_exception(error)

    def _note_failed(self, outcome: Outcome) -> None:
        # Other ranks may have stepped their parts of what this one has not.
        if self._failed.error is None:
            self._failed = outcome
        self._team.fail(outcome.error)

    def _give_up_edits(self, unit: Unit) -> None:
        """Have the user see the truth again, of which what he wrote is part by now."""
        if unit in self._edited:
            self._edited.discard(unit)
            for weight in unit.weights:
                if weight.is_narrow and weight.place is None:
                    self._slabs.twin_of(weight.value).drop()
            if unit.slab.numel():  # some weight of it is not in a file
                self._slabs.twin_of(unit.slab).drop()
        for twin in self._planes[unit].edited:
            twin.drop()

    def _submit(self, unit: Unit, *args: Any) -> None:
        if unit.is_edited():
            self._edited.add(unit)
        super()._submit(unit, *args)

    def _step(self, unit: Unit, work: list[Work], sliced: SlicedOptimizer, state: Any) -> None:
        own = [item for item in work if sliced.is_elementwise and _is_cut(item)]
        if len(own) < len(work):
            cut = {id(item.weight) for item in own}
            whole = [item for item in work if id(item.weight) not in cut]
            sliced.step(whole, state, self._place)
            # What others publish would show in weights that this rank has not stepped.
            self._team.board.follow(Stage.WHOLE, unit.index, len(whole), f"the step of {unit.name}").result()
            self._edited.add(unit)
        if unit in self._edited:
            self._publish(unit)
        mine = self._state_of(unit, [item.weight for item in own], sliced.user, state)
        work = [self._part(item, *mine.part_of(item.weight), self._team.local_rank) for item in own]
        sliced.step(work, cast(Any, mine), self._place)
        mine.keep()
        increment_version([item.weight.value for item in own])

    def _state_of(self, unit: Unit, whose: list[Weight], optimizer: optim.Optimizer, state: Any) -> State:
        """Return this rank's parts of weights and of their state."""
        rank, planes = self._team.local_rank, self._planes[unit]
        if optimizer not in self._numbers:
            self._numbers[optimizer] = next(self._next)
        planes.optimizer = self._numbers[optimizer]
        cuts = [self._team.cut(weight.value.numel()) for weight in whose]
        parts = [WeightPart(weight, cut, rank, self._slabs) for weight, cut in zip(whose, cuts, strict=True)]
        return State(state, planes, parts, cuts, rank)

    @staticmethod
    def _part(item: Work, part: Any, cut: Cut, rank: int) -> Work:
        """Make the slicer's view of this rank's part of a weight and its gradient."""
        grad = item.grad
        if not isinstance(grad, GradientBytes):
            return Work(part, cut.part_of(torch.empty_like(item.weight.value).copy_(grad), rank), item.group)
        made = GradientPart(part, cut.part_of(grad.raw, rank), grad.arrived, None)
        made.factors = grad.factors
        return Work(part, made, item.group)

    @torch.no_grad()
    def _publish(self, unit: Unit) -> None:
        """Copy this rank's parts of what the user wrote to the truth (Rule 2)."""
        for weight in unit.weights:
            if weight.place is not None:
                continue  # it stays in each rank's file, or in its own pages
            cut, rank = self._team.cut(weight.value.numel()), self._team.local_rank
            for face in (weight.value, weight.wire) if weight.is_narrow else (weight.value,):
                cut.part_of(self._slabs.truth(face), rank).copy_(cut.part_of(weight.value, rank))

    def _after(self, optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        super()._after(optimizer, args, kwargs)
        # The user's own code stepped whole weights, or shards.
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if not (optimizer in self._adopted and not is_known(optimizer)):
            params = [param for param in params if is_dtensor(param)]
        self._submit_publishing({unit for param in params if (unit := unit_of(param)) is not None})

    def publish(self) -> None:
        self._submit_publishing({unit for unit in self._planes if unit.is_edited()})

    def _submit_publishing(self, units: set[Unit]) -> None:
        """Start steps of these units in which ranks only copy what their users wrote to the truth."""
        for unit in sorted(units & self._planes.keys(), key=lambda unit: unit.index):
            self._edited.add(unit)
            publish = functools.partial(self._publish, unit)
            unit.begin_step(functools.partial(self._start, unit, unit.weights, publish))
            unit.window.drop(unit)

    def place_state(self, optimizer: optim.Optimizer) -> None:
        """Put state into memory that ranks share, as steps would. Collective where there is any."""
        super().place_state(optimizer)
        if type(optimizer) not in ELEMENTWISE or not isinstance(optimizer.state, WaitingState):
            return
        owned: dict[Unit, list[Weight]] = {}
        for param, state in dict.items(optimizer.state):
            weight = self._weight(param)
            if weight is not None and weight.unit in self._planes and any(map(self._is_private, state.values())):
                owned.setdefault(weight.unit, []).append(weight)
        for unit, whose in sorted(owned.items(), key=lambda one: one[0].index):
            if unit.is_edited():
                self._edited.add(unit)
            adopt = functools.partial(self._adopt_state, unit, whose, optimizer, optimizer.state)
            unit.begin_step(functools.partial(self._start, unit, whose, adopt))

    def _is_private(self, entry: Any) -> bool:
        """Whether a tensor of the state is not in memory that ranks share."""
        return isinstance(entry, Tensor) and bool(entry.ndim) and not self._slabs.has(entry)

    def _adopt_state(self, unit: Unit, whose: list[Weight], optimizer: optim.Optimizer, state: Any) -> None:
        if unit in self._edited:
            self._publish(unit)  # a step's end gives up what the user wrote
        mine = self._state_of(unit, whose, optimizer, state)
        for weight in whose:
            mine.peek(weight.host)


def _has_parts(weight: Weight) -> bool:
    """Whether ranks step parts of a weight: a number has none."""
    return bool(weight.value.ndim)


def _is_cut(item: Work) -> bool:
    """Whether ranks step parts of a weight with this gradient: none without strides has any."""
    return _has_parts(item.weight) and getattr(item.grad, "layout", torch.strided) is torch.strided
