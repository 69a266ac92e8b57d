"""Which units are on the device: what comes and goes when one is visited.

1. A *pass* is all visits from the opening of the outermost scope (a forward of the root, a Lightning step) to the
   opening of the next one, backward included. The order of a pass is recorded and predicts the next of its kind:
   learned, never trusted. A unit that is not there when it is visited is fetched.
2. Nothing is freed by leaving a unit: the schedule says at later visits what has to go. What somebody still uses stays.
3. Without room for a unit or its gradients an "auto" window shrinks: what can go, goes. How large it should be is the
   tuner's to say (tuner.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..autograd.streamed_unit import StreamedUnit
from ..core.schedule import Schedule
from ..core.telemetry import Counters
from ..memory.device import Device
from ..memory.unit_store import Residency
from ..options import Options
from .tuner import Tuner


class _InUse:
    """The units that can not leave the device now, asked one by one."""

    def __init__(self, units: list[StreamedUnit]) -> None:
        self._units = units

    def __contains__(self, index: object) -> bool:
        assert isinstance(index, int)
        return not self._units[index].movable


class Window:
    """The units on the device, and those on their way up."""

    def __init__(self, units: list[StreamedUnit], device: Device, options: Options, counters: Counters) -> None:
        self.units = units
        self.device = device
        self.counters = counters
        self.only_inference = False
        self._in_use = _InUse(units)
        self.tuner = Tuner(options, [unit.sizes() for unit in units], device, counters)
        self.schedule = Schedule([unit.store.nbytes for unit in units], self.tuner.window, self.tuner.transfer)
        self.tuner.begin()
        device.make_room = self._make_room
        self._orders: dict[Any, list[int]] = {}  # of the last pass of each kind (Rule 1)
        self._kind: Any = None
        self._recorded: list[int] = []
        self._last: StreamedUnit | None = None  # the unit required last

    # ---- passes

    def begin_pass(self, kind: Any) -> None:
        """The pass so far ends, and one of this kind begins (Rule 1)."""
        shows_all = self._kind is not None and (self._kind[1] or self.only_inference)
        self._orders[self._kind] = self._recorded
        self._recorded = []
        self._kind = (kind, torch.is_grad_enabled())
        self.tuner.next_pass(self._kind, self._kind[1], shows_all)
        self._follow_tuner()
        self._last = None
        self._drop_stale()
        self.schedule.begin(self._orders.get(self._kind, ()), wrap=not torch.is_grad_enabled())

    @property
    def order(self) -> list[int]:
        """The visits of the pass so far, as unit indices."""
        return list(self._recorded)

    def interrupt(self) -> None:
        """What was visited last is no more: its visit was broken off."""
        self._last = None

    def resume(self, state: dict[str, int], why: str) -> None:
        """Begins with the sizes that an earlier run chose, or a plan."""
        self.tuner.resume(state, why)
        self._follow_tuner()

    def ran_out(self) -> None:
        """The model's own code found no room on the device."""
        self.tuner.ran_out()
        self._follow_tuner()

    def _follow_tuner(self) -> None:
        if (self.tuner.window, self.tuner.transfer) != (self.schedule.window, self.schedule.transfer):
            self.schedule.resize(self.tuner.window, self.tuner.transfer)

    def _drop_stale(self) -> None:
        """Units whose host bytes changed have to come up again: better planned than at their visit."""
        stale = {unit.index: unit for unit in self.units if unit.store.stale()}
        if stale:
            self.device.compute.synchronize()  # which may be what changes them (``non_blocking=True``)
        self.follow()
        for index in self.schedule.resident:
            if index in stale and stale[index].movable:
                self.schedule.invalidate([index])
                self._evict(stale[index])

    # ---- visits

    def require(self, unit: StreamedUnit) -> None:
        """The unit is resident, and the caller's stream is ordered after its bytes."""
        store = unit.store
        if unit.unit.resident:
            if store.residency is Residency.HOST:
                store.load()
        elif unit is not self._last or store.residency is Residency.HOST:
            self._visit(unit)
        store.wait_load()

    def _visit(self, unit: StreamedUnit) -> None:
        """Does what the schedule says."""
        self.tuner.visiting(self.schedule.resident_nbytes)
        self._follow_tuner()
        has_room = len(self.schedule.resident) < self.schedule.window
        decision = self.schedule.visit(unit.index, self._in_use)
        self.tuner.visited(self.schedule.resident_nbytes)
        self.counters.surprises += decision.surprise
        self.counters.extra_held += len(self.schedule.resident) > self.schedule.window
        if has_room and unit.index in decision.load:
            self._load(unit, unit)  # before the way up waits for the last readers of what goes to make room for others
        for index in decision.evict:
            self._evict(self.units[index])
        for index in decision.load:
            ahead = self.units[index]
            if ahead is not unit and ahead.store.stepping:
                self.schedule.invalidate([index])  # what is visited goes on; a later visit has it fetched
            elif ahead.store.residency is Residency.HOST:
                self._load(ahead, unit)
        self._last = unit
        self._recorded.append(unit.index)

    def _load(self, unit: StreamedUnit, visited: StreamedUnit) -> None:
        """Starts a unit's way up (Rule 3)."""
        try:
            unit.store.load()
        except torch.OutOfMemoryError:
            self.schedule.invalidate([unit.index])
            if not self.tuner.may_shrink:
                raise
            self._shrink(visited)
            if unit is visited:
                unit.store.load()
                self.schedule.keep(unit.index)

    def _make_room(self) -> bool:
        """For something else than a unit; whether there may be some now."""
        before = self.schedule.resident_nbytes
        if self.tuner.may_shrink:
            self._shrink(self._last)
        return self.schedule.resident_nbytes < before

    def _shrink(self, visited: StreamedUnit | None) -> None:
        self.tuner.full()
        self._follow_tuner()
        for index in self.schedule.resident:
            unit = self.units[index]
            if unit is not visited and unit.store.residency is Residency.DEVICE and unit.movable:
                self.schedule.invalidate([index])
                self._evict(unit)

    def _evict(self, unit: StreamedUnit) -> None:
        unit.stand_ins.collect_writes()
        unit.stand_ins.unbind()
        unit.store.free()

    def retype(self, unit: StreamedUnit, types: dict[int, torch.dtype]) -> None:
        """A movable unit's weights travel in these types from its next load on."""
        unit.store.wait_step()  # whose thread converts into the buffer that is made anew
        if unit.store.residency is Residency.DEVICE:
            self.schedule.invalidate([unit.index])
            self._evict(unit)
        unit.store.retype(types)
        unit.stand_ins.remake()
        self.schedule.weigh(unit.index, unit.store.nbytes)
        self.tuner.resized([each.sizes() for each in self.units])

    # ---- what the user keeps

    def kept(self) -> Iterator[StreamedUnit]:
        """Units whose stand-ins outlive their visit."""
        for unit in self.units:
            if unit.store.residency is Residency.DEVICE and not unit.visits and unit.stand_ins.in_use():
                yield unit

    def follow(self) -> None:
        """Device bytes that the user keeps a reference to become what the host's are now."""
        for unit in self.kept():
            if unit.store.stale():
                self.refill(unit)

    def refill(self, unit: StreamedUnit) -> None:
        """In place: whoever refers to the bytes sees the new ones, as in a plain run."""
        unit.store.wait_step()
        unit.stand_ins.collect_writes()
        written = unit.store.written()
        unit.stand_ins.check_replaced()
        unit.store.load()
        unit.store.wait_load()
        unit.stand_ins.overwritten(written)

    def settle(self) -> None:
        """No fill reads host bytes any more: they may be written from here on."""
        for unit in self.units:
            if unit.store.residency is Residency.DEVICE:
                unit.store.settle()
