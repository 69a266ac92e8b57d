"""Steps of several ranks: each steps its part of every weight, in memory that all of a machine's ranks share.

1. A rank steps its part of a unit once every rank is ready: it has submitted the step, and its copies of the slab are
   done. The step is over when every rank has stepped its part.
2. Before it steps, a rank copies its parts of what its user wrote (shared_slabs.py) to the truth. All ranks make
   alike edits, so the truth is whole then; at the end of the step the user's own pages are given up.
3. State is whole in memory that ranks share, too: a checkpoint of any number of ranks is that of one device. Numbers,
   such as a count of steps, are each rank's own.
4. Ranks may begin steps beside their backwards, each of other units: so nothing waits for a step before the user's
   call of `step`, by which all have begun.
5. An optimizer that does not treat each element by itself steps whole weights, on every rank, in its user's copy.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, cast

import torch
from torch import optim
from torch.autograd.graph import increment_version

from ..compat.tensors import is_dtensor
from ..host.device import Device
from ..optim.filed import SliceState, ranged
from ..optim.half_applied import Outcome, mark
from ..optim.slices import ELEMENTWISE, SlicedOptimizer, StepWork, steps_by_weight
from ..optim.steps import Steps
from ..store.store import Store
from ..stream.host_gradient import GradientBytes
from ..stream.leaf import Weight
from ..stream.parameters import unit_of
from ..stream.unit import Unit
from .board import Stage
from .shared_state import SharedState
from .team import Team


class SharedSteps(Steps):
    """The optimizers of a stream through several devices."""

    def __init__(self, chunk: int, overlap: bool, device: Device, store: Store, team: Team) -> None:
        super().__init__(chunk, overlap, device, store)
        self._team, self._slabs = team, team.slabs
        self._states: dict[Unit, SharedState] = {}
        self._edited: set[Unit] = set()
        # The optimizer that stepped a unit's weights last.
        self._steppers: weakref.WeakValueDictionary[Unit, optim.Optimizer] = weakref.WeakValueDictionary()

    def add_unit(self, unit: Unit) -> None:
        """Step this unit's weights as well; reserve shared memory for their optimizer state if they are streamed."""
        super().add_unit(unit)
        if not unit.is_resident:
            self._states[unit] = SharedState(unit, self._team)

    def step_beside_backward(self, optimizer: optim.Optimizer | None) -> None:
        """Step gradients as they come, by this optimizer if it is elementwise; None: no longer."""
        # Steps of whole weights wait for each other, so all ranks take them in one order.
        super().step_beside_backward(optimizer if type(optimizer) in ELEMENTWISE else None)

    def delivered(self, unit: Unit, whose: list[Weight], is_complete: bool) -> None:
        """Step a unit's weights now, if their gradients are final and all its weights have parts."""
        has_parts = all(map(_has_parts, whose))  # all ranks step whole weights in one order
        super().delivered(unit, whose, is_complete and has_parts)

    def _start(self, unit: Unit, whose: list[Weight], run: Callable[[], None]) -> Future[None]:
        """Give this rank's part of a unit's step to the thread; return a future of all ranks' parts (Rule 1)."""
        follow, place, count = self._team.board.follow, f"the step of {unit.name}", len(whose)
        ready = follow(Stage.READY, unit.index, count, place, unit.wait_copy)
        ended: Future[None] = Future()

        def run_part() -> None:
            """Step this rank's part once all ranks are ready, and tell the others. Runs on the thread."""
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
        """Show the stepped weights to the user, and complete the future of a unit's step, or fail it."""
        try:
            if error is None:
                self._show_truth(unit)
            unit.note_stepped()
            unit.steps.end()
        except BaseException as failed:  # raised in every wait for the step
            error = error or failed
        if error is not None:
            self._note_failed(self._steppers.get(unit), unit.name, error)
        ended.set_result(None) if error is None else ended.set_exception(error)

    def _note_failed(self, optimizer: optim.Optimizer | None, where: str, error: BaseException) -> None:
        """Tell the other ranks of a failed step, and mark the optimizer's step as half-applied."""
        self._team.fail(error)
        if optimizer is not None:
            mark(optimizer, f"an optimizer step ended half-way, at {where}, by {type(error).__name__}: {error}")

    def _show_truth(self, unit: Unit) -> None:
        """Give up this rank's own pages of a unit: the user sees the truth, which has the user's edits by now."""
        if unit in self._edited:
            self._edited.discard(unit)
            for weight in unit.weights:
                if weight.is_narrow and weight.place is None:
                    self._slabs.twin_of(weight.value).drop_edits()
            if unit.slab.numel():  # some weight of the unit is not file-backed
                self._slabs.twin_of(unit.slab).drop_edits()
        self._states[unit].show_truth()

    def _step_units(self, work: Any, step: SlicedOptimizer, *args: Any) -> None:
        """Step resident units and start the steps of the others; tell the other ranks if that fails."""
        try:
            super()._step_units(work, step, *args)
        except BaseException as error:  # other ranks wait for steps that did not begin here
            self._note_failed(step.user, "a unit on the device", error)
            raise

    def _submit(
        self, unit: Unit, whose: list[Weight], sliced: SlicedOptimizer, groups: Any, state: Any, outcome: Outcome
    ) -> None:
        """Start a unit's step; copy state tensors that the user took out first, as the step overwrites their memory."""
        if unit.is_edited():
            self._edited.add(unit)
        for weight in whose:
            self._states[unit].detach_taken(weight, sliced.user, state.peek(weight.host) or {})
        self._steppers[unit] = sliced.user
        super()._submit(unit, whose, sliced, groups, state, outcome)

    def _step(self, unit: Unit, work: list[StepWork], sliced: SlicedOptimizer, state: Any) -> None:
        """Step this rank's parts of a unit's weights, or whole weights where there are no parts. Runs on the thread."""
        are_cut = sliced.is_elementwise  # file-backed weights are each rank's own
        own = [item for item in work if are_cut and _is_cut(item) and item.weight.place is None]
        if len(own) < len(work):
            cut = {id(item.weight) for item in own}
            whole = [item for item in work if id(item.weight) not in cut]
            sliced.step(whole, state, self._place)
            # All ranks first: what one publishes would show in weights that another has not stepped yet.
            self._team.board.follow(Stage.WHOLE, unit.index, len(whole), f"the step of {unit.name}").result()
            self._edited.add(unit)
        if unit in self._edited:
            self._publish(unit)
        shared, parts = self._states[unit], SliceState()
        shared.publish_edits()
        for weight, _, _ in own:
            if entries := state.peek(weight.host):
                parts[weight.host] = shared.take_parts(weight, sliced.user, entries)
        sliced.step([self._part(item, sliced.scales) for item in own], cast(Any, parts), self._place)
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
        """Copy this rank's parts of what the user wrote to the truth (Rule 2)."""
        part_of = self._team.part_of
        for weight in unit.weights:
            if weight.place is not None:
                continue  # file-backed: each rank has the bytes in its file, or in pages of its own
            for face in (weight.value, weight.wire) if weight.is_narrow else (weight.value,):
                part_of(self._slabs.truth(face)).copy_(part_of(weight.value))

    def _after(self, optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Publish the weights that the optimizer's own code stepped whole, and DTensors, after its step."""
        super()._after(optimizer, args, kwargs)
        # The user's own code stepped whole weights, or shards.
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if not (optimizer in self._adopted and not steps_by_weight(optimizer)):
            params = [param for param in params if is_dtensor(param)]
        self._submit_publishing({unit for param in params if (unit := unit_of(param)) is not None})

    def publish(self) -> None:
        """Start to copy this rank's parts of all edited weights to the truth. Collective."""
        self._submit_publishing({unit for unit in self._states if unit.is_edited()})

    def _submit_publishing(self, units: set[Unit]) -> None:
        """Start steps of these units in which each rank only copies its parts of the user's edits to the truth."""
        for unit in sorted(units & self._states.keys(), key=lambda unit: unit.index):
            self._edited.add(unit)
            publish = functools.partial(self._publish, unit)
            unit.begin_step(functools.partial(self._start, unit, unit.weights, publish))
            unit.window.drop(unit)


def _has_parts(weight: Weight) -> bool:
    """Whether ranks step parts of a weight: one without dimensions has none."""
    return bool(weight.value.ndim)


def _is_cut(item: StepWork) -> bool:
    """Whether ranks step parts of this weight: it has dimensions, and a dense gradient."""
    return _has_parts(item.weight) and getattr(item.grad, "layout", torch.strided) is torch.strided
