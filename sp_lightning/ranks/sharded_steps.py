"""Steps of several ranks: each steps its part of every weight, in memory that all of a machine's ranks share.

1. A rank steps its part of a unit once every rank is ready: it has submitted the step, and its copies of the slab are
   done. The step is over when every rank has stepped its part.
2. Before it steps, a rank copies its parts of what its user wrote (shared_slabs.py) to the truth. All ranks make
   alike edits, so the truth is whole then; at the end of the step the user's own pages are given up.
3. State is whole in memory that ranks share, too: a checkpoint of any number of ranks is that of one device. Each kind
   of state of each optimizer has a range of a unit's memory, in the order in which steps first make it: ranks step
   units in different orders. Numbers, such as a count of steps, are each rank's own.
4. Ranks may begin steps beside their backwards, each of other units: so nothing waits for a step before the user's
   call of `step`, by which all have begun.
5. An optimizer that does not treat each element by itself, or writes into gradients, steps whole weights, on every
   rank, in its user's copy.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import torch
from torch import Tensor, optim
from torch.autograd.graph import increment_version

from ..compat.tensors import is_dtensor
from ..errors import UnsupportedError
from ..host.device import Device, aligned
from ..optim.filed import SliceState, is_shaped, ranged
from ..optim.half_applied import mark
from ..optim.slices import SlicedOptimizer, StepWork, steps_by_weight, steps_in_parts
from ..optim.steps import Steps
from ..optim.unit_steps import OptimizerStep
from ..store.store import Store
from ..stream.host_gradient import GradientBytes
from ..stream.leaf import Weight
from ..stream.parameters import unit_of
from ..stream.unit import Unit
from .shared_slabs import KINDS, WIDEST
from .team import Team
from .watch import Meeting, Stage


class SharedSteps(Steps):
    """The optimizers of a stream through several devices."""

    def __init__(self, chunk: int, overlap: bool, device: Device, store: Store, team: Team) -> None:
        super().__init__(chunk, overlap, device, store)
        self._team, self._slabs = team, team.slabs
        self._ends = ThreadPoolExecutor(1, "superpipeline-ends")  # waits until all ranks have stepped a unit
        self._states: dict[Unit, SharedState] = {}
        self._edited: set[Unit] = set()

    def add_unit(self, unit: Unit) -> None:
        """Step this unit's weights as well; reserve shared memory for their optimizer state if they are streamed."""
        super().add_unit(unit)
        if not unit.is_resident:
            self._states[unit] = SharedState(unit, self._team)

    def step_beside_backward(self, optimizer: optim.Optimizer | None) -> None:
        """Step gradients as they come, by this optimizer if it is elementwise; None: no longer."""
        # Steps of whole weights wait for each other, so all ranks take them in one order.
        super().step_beside_backward(optimizer if steps_in_parts(optimizer, self._device) else None)

    def delivered(self, unit: Unit, whose: list[Weight], is_complete: bool) -> None:
        """Step a unit's weights now, if their gradients are final and all its weights have parts."""
        has_parts = all(map(_has_parts, whose))  # all ranks step whole weights in one order
        super().delivered(unit, whose, is_complete and has_parts)

    def _start(
        self, unit: Unit, whose: list[Weight], run: Callable[[], None], optimizer: optim.Optimizer | None
    ) -> Future[None]:
        """Queue this rank's part of a unit's step on the thread; return a future that is done with all ranks' parts."""
        meet, place, count = self._team.board.meet, f"the step of {unit.name}", len(whose)
        ready = meet(Stage.READY, unit.index, count, place, unit.wait_copy)

        def run_part() -> Meeting:
            """Step this rank's part once all ranks are ready, and tell the others. Runs on the thread."""
            ready.synchronize()
            run()
            return meet(Stage.STEPPED, unit.index, count, place)

        return self._ends.submit(self._end, unit, self.thread.submit(run_part), optimizer)

    def _end(self, unit: Unit, part: Future[Meeting], optimizer: optim.Optimizer | None) -> None:
        """Wait until all ranks have stepped their parts of a unit, and show the weights to the user. Runs on a thread.

        The unit's loads may begin from here on, also after an error.
        """
        with self._noting_failure(optimizer, unit.name), contextlib.ExitStack() as ends:
            ends.callback(unit.steps.end)
            ends.callback(unit.note_stepped)
            part.result().synchronize()
            self._show_truth(unit)

    @contextlib.contextmanager
    def _noting_failure(self, optimizer: optim.Optimizer | None, where: str) -> Iterator[None]:
        """Tell the other ranks of an error in this context, and mark the optimizer's step as half-applied."""
        try:
            yield
        except BaseException as error:
            self._team.fail(error)
            if optimizer is not None:
                mark(optimizer, f"an optimizer step ended half-way, at {where}, by {type(error).__name__}: {error}")
            raise

    def close(self) -> None:
        """Finish all steps, and end the threads that run and end them."""
        super().close()
        self._ends.shutdown()

    def _show_truth(self, unit: Unit) -> None:
        """Give up this rank's own pages of a unit: the user sees the truth, which has the user's edits by now."""
        if unit in self._edited:
            self._edited.discard(unit)
            for weight in unit.weights:
                if weight.place is None:
                    self._slabs.drop_edits(weight.value)
                    self._slabs.drop_edits(weight.wire)
        self._states[unit].show_truth()

    def _step_units(self, step: OptimizerStep, work: Any) -> None:
        """Step resident units and start the steps of the others; tell the other ranks if that fails."""
        with self._noting_failure(step.sliced.user, "a unit on the device"):  # others wait for steps not begun here
            super()._step_units(step, work)

    def _submit(self, step: OptimizerStep, unit: Unit, whose: list[Weight]) -> None:
        """Start a unit's step; copy state tensors that the user took out first, as the step overwrites their memory."""
        if unit.is_edited():
            self._edited.add(unit)
        for weight in whose:
            self._states[unit].detach_taken(weight, step.sliced.user, step.state.peek(weight.host) or {})
        super()._submit(step, unit, whose)

    def _step(self, unit: Unit, work: list[StepWork], sliced: SlicedOptimizer, state: Any) -> None:
        """Step this rank's parts of a unit's weights, or whole weights where there are no parts. Runs on the thread."""
        own = [item for item in work if _is_cut(item, sliced)]
        if whole := [item for item in work if not _is_cut(item, sliced)]:
            sliced.step(whole, state, self._place)
            # All ranks first: what one publishes would show in weights that another has not stepped yet.
            self._team.board.meet(Stage.WHOLE, unit.index, len(whole), f"the step of {unit.name}").synchronize()
            self._edited.add(unit)
        if unit in self._edited:
            self._publish(unit)
        shared, parts = self._states[unit], SliceState()
        for weight, _, _ in own:
            if entries := state.peek(weight.host):
                parts[weight.host] = shared.take_parts(weight, sliced.user, entries)
        shared.publish_edits()
        sliced.step([self._part(item, sliced.changes_gradients) for item in own], cast(Any, parts), self._place)
        sliced.unscale(own)
        for weight, _, _ in own:
            if made := parts.peek(weight.host):
                shared.put_back(weight, sliced.user, made, state.make(weight.host))
        increment_version([weight.value for weight, _, _ in own])

    def _part(self, item: StepWork, is_written: bool) -> Any:
        """Return a weight's step cut to this rank's part of the weight, the wire copy and the gradient."""
        part_of, grad = self._team.part_of, item.grad
        if isinstance(grad, GradientBytes):
            grad.arrived.synchronize()
            raw = part_of(grad.raw)
            if is_written or len(grad.factors) > 1:
                raw = raw.clone()  # the user's gradient stays as it is
        else:
            raw = part_of(torch.empty_like(item.weight.value).copy_(grad))
        value, wire = (part_of(self._slabs.truth(face)) for face in (item.weight.value, item.weight.wire))
        return ranged(item, value, wire, raw)

    @torch.no_grad()
    def _publish(self, unit: Unit) -> None:
        """Copy this rank's parts of weights that the user edited to the truth, which all ranks read (Rule 2)."""
        part_of = self._team.part_of
        for weight in unit.weights:
            if weight.place is not None:
                continue  # file-backed: each rank has the bytes in its file, or in pages of its own
            for face in (weight.value, weight.wire) if weight.is_narrow else (weight.value,):
                part_of(self._slabs.truth(face)).copy_(part_of(weight.value))

    def _after(self, optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Publish the weights that the optimizer's own code stepped whole, and DTensors, after its step."""
        super()._after(optimizer, args, kwargs)
        is_whole = optimizer in self._adopted and not steps_by_weight(optimizer)
        params = [param for group in optimizer.param_groups for param in group["params"]]
        stepped = [unit_of(param) for param in params if is_whole or is_dtensor(param)]  # by the optimizer's own code
        self._submit_publishing({unit for unit in stepped if unit is not None})

    def publish(self) -> None:
        """Start to copy this rank's parts of all edited weights to the truth. Collective."""
        self._submit_publishing({unit for unit in self._states if unit.is_edited()})

    def _submit_publishing(self, units: set[Unit]) -> None:
        """Start steps of these units in which each rank only copies its parts of the user's edits to the truth."""
        for unit in sorted(units & self._states.keys(), key=lambda unit: unit.index):
            self._edited.add(unit)
            publish = functools.partial(self._publish, unit)
            unit.begin_step(functools.partial(self._start, unit, unit.weights, publish, None))
            unit.window.drop(unit)


def _has_parts(weight: Weight) -> bool:
    """Whether ranks step parts of a weight: one without dimensions has none."""
    return bool(weight.value.ndim)


def _is_cut(item: StepWork, sliced: SlicedOptimizer) -> bool:
    """Whether ranks step parts of this weight: it has dimensions, a dense gradient, and no file of each rank's own.

    A step that writes into gradients is of whole weights: each rank has a gradient of its own.
    """
    has_parts = _has_parts(item.weight) and item.weight.place is None and not sliced.writes_gradients
    return sliced.is_elementwise and has_parts and getattr(item.grad, "layout", torch.strided) is torch.strided


# ---- optimizer state


class Entry:
    """A tensor of a weight's optimizer state in shared memory."""

    def __init__(self, face: Tensor, part: Tensor) -> None:
        self.face = face  # the user has it
        self.part = part  # this rank's part of the truth
        self.version = face._version  # differs once the user has written to the face


class SharedState:
    """The optimizer state of one unit's weights, in ranges of memory that ranks share."""

    def __init__(self, unit: Unit, team: Team) -> None:
        self._unit, self._team = unit, team
        self._places, self._nbytes = dict[Weight, int](), 0
        for weight in unit.weights:
            self._places[weight] = self._nbytes
            self._nbytes += aligned(WIDEST * weight.value.nbytes)
        self._begin = team.slabs.reserve(KINDS * self._nbytes)
        self._kinds: dict[Any, int] = {}  # numbers of kinds, by optimizer and name
        self._entries: dict[Any, dict[str, Entry]] = {}  # by weight and optimizer
        self._edited: list[Tensor] = []  # faces that differ from the truth

    def _entry(self, weight: Weight, optimizer: optim.Optimizer, key: str, dtype: torch.dtype) -> Entry:
        """Return the shared memory of one kind of a weight's state."""
        stepper = weakref.ref(optimizer)
        entries = self._entries.setdefault((weight, stepper), {})
        if key not in entries:
            kind = self._kinds.setdefault((stepper, key), len(self._kinds))
            if kind >= KINDS or dtype.itemsize > WIDEST * weight.value.itemsize:
                raise UnsupportedError(
                    f"{key} of {weight.name} is {dtype}, and number {kind + 1} of the kinds of state in its unit: use"
                    f" at most {KINDS}, of at most {WIDEST} times the weight's bytes"
                )
            slabs = self._team.slabs
            face = slabs.face(self._begin + kind * self._nbytes + self._places[weight], weight.value, dtype)
            entries[key] = Entry(face, self._team.part_of(slabs.truth(face)))
        return entries[key]

    def detach_taken(self, weight: Weight, optimizer: optim.Optimizer, own: dict[str, Any]) -> None:
        """Copy tensors that the user took out of a weight's state to memory of their own: a step overwrites theirs."""
        entries = self._entries.get((weight, weakref.ref(optimizer)), {})
        for key, entry in list(entries.items()):
            if own.get(key) is not entry.face:
                self._unit.wait_step()
                entry.face.data = entry.face.clone()
                del entries[key]

    def publish_edits(self) -> None:
        """Copy this rank's parts of optimizer state that the user edited to the truth.

        Called before each step of the unit, for all of its weights.
        """
        for entry in (entry for entries in self._entries.values() for entry in entries.values()):
            if entry.face._version != entry.version:
                entry.part.copy_(self._team.part_of(entry.face))
                entry.version = entry.face._version
                self._edited.append(entry.face)

    def take_parts(self, weight: Weight, optimizer: optim.Optimizer, own: dict[str, Any]) -> dict[str, Any]:
        """Return a weight's state cut to this rank's parts. Entries that the user replaced become edits."""
        parts = dict(own)
        for key, value in own.items():
            if is_shaped(value, weight.value):
                entry = self._entry(weight, optimizer, key, value.dtype)
                if value is not entry.face:
                    entry.face.copy_(value)
                own[key], parts[key] = entry.face, entry.part
        return parts

    def put_back(self, weight: Weight, optimizer: optim.Optimizer, made: dict[str, Any], own: dict[str, Any]) -> None:
        """Store the state that a step made for this rank's part of a weight; called after each step.

        ``made`` is what the step returned; ``own``, the user's state of the weight, gets whole tensors.
        """
        for key, value in made.items():
            own[key] = value
            if isinstance(value, Tensor) and value.ndim:
                entry = self._entry(weight, optimizer, key, value.dtype)
                if value is not entry.part:
                    entry.part.copy_(value)
                own[key] = entry.face

    def show_truth(self) -> None:
        """Give up this rank's own pages of the state: the user sees the truth, which has the user's edits by now."""
        while self._edited:
            self._team.slabs.drop_edits(self._edited.pop())
