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
        # Who steps a unit's weights last.
        self._steppers: weakref.WeakValueDictionary[Unit, optim.Optimizer] = weakref.WeakValueDictionary()

    def add_unit(self, unit: Unit) -> None:
        super().add_unit(unit)
        if not unit.is_resident:
            self._states[unit] = SharedState(unit, self._team)

    def step_beside_backward(self, optimizer: optim.Optimizer | None) -> None:
        # Steps of whole weights wait for each other, so all ranks take them in one order.
        super().step_beside_backward(optimizer if type(optimizer) in ELEMENTWISE else None)

    def delivered(self, unit: Unit, whose: list[Weight], is_complete: bool) -> None:
        has_parts = all(map(_has_parts, whose))  # all ranks step whole weights in one order
        super().delivered(unit, whose, is_complete and has_parts)

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
                self._show_truth(unit)
            unit.note_stepped()
            unit.steps.end()
        except BaseException as failed:  # whoever waits for the step gets it
            error = error or failed
        if error is not None:
            self._note_failed(self._steppers.get(unit), unit.name, error)
        ended.set_result(None) if error is None else ended.set_exception(error)

    def _note_failed(self, optimizer: optim.Optimizer | None, where: str, error: BaseException) -> None:
        """Tell the other ranks, which may have stepped their parts of what this one has not."""
        self._team.fail(error)
        if optimizer is not None:
            mark(optimizer, f"an optimizer step ended half-way, at {where}, by {type(error).__name__}: {error}")

    def _show_truth(self, unit: Unit) -> None:
        """Have the user see the truth again, of which the user's edits are part by now."""
        if unit in self._edited:
            self._edited.discard(unit)
            for weight in unit.weights:
                if weight.is_narrow and weight.place is None:
                    self._slabs.twin_of(weight.value).drop()
            if unit.slab.numel():  # some weight of it is not in a file
                self._slabs.twin_of(unit.slab).drop()
        self._states[unit].show_truth()

    def _step_units(self, work: Any, step: SlicedOptimizer, *args: Any) -> None:
        try:
            super()._step_units(work, step, *args)
        except BaseException as error:  # the others wait for what has not begun here
            self._note_failed(step.user, "a unit on the device", error)
            raise

    def _submit(
        self, unit: Unit, whose: list[Weight], sliced: SlicedOptimizer, groups: Any, state: Any, outcome: Outcome
    ) -> None:
        if unit.is_edited():
            self._edited.add(unit)
        for weight in whose:
            self._states[unit].let_go(weight, sliced.user, state.peek(weight.host) or {})
        self._steppers[unit] = sliced.user
        super()._submit(unit, whose, sliced, groups, state, outcome)

    def _step(self, unit: Unit, work: list[StepWork], sliced: SlicedOptimizer, state: Any) -> None:
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
        shared, parts = self._states[unit], SliceState()
        for weight, _, _ in own:
            if entries := state.peek(weight.host):
                parts[weight.host] = shared.take(weight, sliced.user, entries)
        sliced.step([self._part(item, sliced.scales) for item in own], cast(Any, parts), self._place)
        sliced.unscale(own)
        for weight, _, _ in own:
            if made := parts.peek(weight.host):
                shared.keep(weight, sliced.user, made, state.make(weight.host))
        increment_version([weight.value for weight, _, _ in own])

    def _part(self, item: StepWork, is_written: bool) -> Any:
        """Return this rank's part of a weight and its gradient."""
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
                continue  # it stays in each rank's file, or in its own pages
            for face in (weight.value, weight.wire) if weight.is_narrow else (weight.value,):
                part_of(self._slabs.truth(face)).copy_(part_of(weight.value))

    def _after(self, optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        super()._after(optimizer, args, kwargs)
        # The user's own code stepped whole weights, or shards.
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if not (optimizer in self._adopted and not steps_by_weight(optimizer)):
            params = [param for param in params if is_dtensor(param)]
        self._submit_publishing({unit for param in params if (unit := unit_of(param)) is not None})

    def publish(self) -> None:
        self._submit_publishing({unit for unit in self._states if unit.is_edited()})

    def _submit_publishing(self, units: set[Unit]) -> None:
        """Start steps of these units in which ranks only copy what their users wrote to the truth."""
        for unit in sorted(units & self._states.keys(), key=lambda unit: unit.index):
            self._edited.add(unit)
            publish = functools.partial(self._publish, unit)
            unit.begin_step(functools.partial(self._start, unit, unit.weights, publish))
            unit.window.drop(unit)


def _has_parts(weight: Weight) -> bool:
    """Whether ranks step parts of a weight: a number has none."""
    return bool(weight.value.ndim)


def _is_cut(item: StepWork) -> bool:
    """Whether ranks step parts of a weight with this gradient: none without strides has any."""
    return _has_parts(item.weight) and getattr(item.grad, "layout", torch.strided) is torch.strided
