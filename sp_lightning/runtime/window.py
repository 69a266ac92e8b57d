"""Which units are on the device: what is loaded and evicted when a unit is visited.

1. A *pass* is all visits from the opening of one outermost scope (a forward of the root, a Lightning step) to the
   opening of the next, backward included. The order of a pass is recorded and predicts the next pass of its kind, but
   is never relied on: a unit that is absent when it is visited is fetched then.
2. Leaving a unit frees nothing: the schedule says at later visits which units go. A unit in use stays.
3. Where the device has no memory for a unit or its gradients, an "auto" window shrinks: each unit that can go is
   evicted. The tuner decides how large the window should be (tuner.py).
4. In a pass under autocast whose weights take up to twice the bytes of later passes (autocast_weights.py, Rule 3) the
   window is half as wide, so that it takes no more memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ..autograd.stand_ins import StreamedUnit
from ..compat.dynamo import never_compiled
from ..host.telemetry import Counters
from ..memory.device import Device
from ..memory.watched_parameters import quietly
from ..options import Options
from ..stream.schedule import Schedule
from .tuner import Tuner


class _InUse:
    """The indices of the units that cannot leave the device now, looked up one by one."""

    def __init__(self, units: list[StreamedUnit]) -> None:
        self._units = units

    def __contains__(self, index: object) -> bool:
        assert isinstance(index, int)
        return not self._units[index].movable


class Window:
    """The window: the units on the device and on their way up."""

    def __init__(self, units: list[StreamedUnit], device: Device, options: Options, counters: Counters) -> None:
        self.units = units
        self.device = device
        self.counters = counters
        self.only_inference = False
        self._in_use = _InUse(units)
        self.tuner = Tuner(options, [unit.sizes() for unit in units], device)
        self.schedule = Schedule(
            [unit.store.on_device.nbytes for unit in units], self.tuner.window, self.tuner.transfer
        )
        self.tuner.begin()
        device.make_room = self._make_room
        self._orders: dict[Any, list[int]] = {}  # visits of the last pass of each kind (Rule 1)
        self._kind: tuple[Any, bool] | None = None
        self._visited: list[int] = []
        self._last: StreamedUnit | None = None  # the unit required last
        self.borrowed: set[StreamedUnit] = set()  # outside of their visits, and perhaps written there through views
        self.halves = True  # Rule 4
        self._is_wide = self._halved = False

    # ---- passes

    def begin_pass(self, kind: Any, is_wide: bool = False) -> None:
        """End the pass so far and begin one of this kind (Rule 1); ``is_wide``: as in Rule 4."""
        shows_all = self._kind is not None and (self._kind[1] or self.only_inference)
        self._orders[self._kind] = self._visited
        self._visited = []
        self._kind = (kind, torch.is_grad_enabled())
        self.tuner.next_pass(self._kind, shows_all)
        self._is_wide, self._halved = is_wide and self.halves, False
        self._follow_tuner()
        self._last = None
        self._drop_stale()
        self.schedule.begin(self._orders.get(self._kind, ()), wrap=not torch.is_grad_enabled())

    @property
    def kind(self) -> tuple[Any, bool] | None:
        """The kind of the pass, and whether it has gradients; None before the first one."""
        return self._kind

    @property
    def order(self) -> list[int]:
        """The visits of the pass so far, as unit indices."""
        return list(self._visited)

    def interrupt(self) -> None:
        """Forget the last visit, which an exception broke off."""
        self._last = None

    def resume(self, state: dict[str, int], why: str) -> None:
        """Begin with the sizes that an earlier run or a plan chose."""
        self.tuner.resume(state, why)
        self._follow_tuner()

    def ran_out(self) -> None:
        """Shrink the window after the model's own code ran out of device memory."""
        self.tuner.ran_out()
        self._follow_tuner()

    def _follow_tuner(self) -> None:
        window = max(1, self.tuner.window // 2) if self._halved else self.tuner.window
        sizes = window, min(self.tuner.transfer, window)
        if sizes != (self.schedule.window, self.schedule.transfer):
            self.schedule.resize(*sizes)

    def _drop_stale(self) -> None:
        """Evict stale units, so that the schedule plans their loads instead of meeting them at their visits."""
        stale = {unit.index: unit for unit in self.units if unit.store.stale()}
        if stale:
            self.device.compute.synchronize()  # a copy down with ``non_blocking=True`` may still change host bytes
        self.refresh_referenced()
        for index in self.schedule.resident:
            if index in stale and stale[index].movable:
                self.schedule.invalidate([index])
                self._evict(stale[index])

    # ---- visits

    def require(self, unit: StreamedUnit) -> None:
        """Make the unit resident and order the caller's stream after its bytes."""
        store = unit.store
        if unit.unit.resident:
            if not store.on_device.is_loaded:
                store.load()
        elif unit is not self._last or not store.on_device.is_loaded:
            self._visit(unit)
            if not store.on_device.is_loaded:
                self._load(unit, unit)  # an earlier load was interrupted after the schedule counted on it
        store.on_device.wait_load()

    def _visit(self, unit: StreamedUnit) -> None:
        """Load and evict what the schedule says for a visit of this unit."""
        if self.tuner.watches_memory:
            self.tuner.visiting(self.schedule.resident_nbytes)
        if self._is_wide and torch.is_autocast_enabled(self.device.torch_device.type):
            self._is_wide, self._halved = False, True
        self._follow_tuner()
        has_room = len(self.schedule.resident) < self.schedule.window
        decision = self.schedule.visit(unit.index, self._in_use)
        if self.tuner.watches_memory:
            self.tuner.visited(self.schedule.resident_nbytes)
        self.counters.surprises += decision.surprise
        self.counters.extra_held += len(self.schedule.resident) > self.schedule.window
        if has_room and unit.index in decision.load:
            self._load(unit, unit)  # first: an eviction makes the up stream wait for the evicted unit's last readers
        for index in decision.evict:
            self._evict(self.units[index])
        for index in decision.load:
            ahead = self.units[index]
            if ahead is not unit and ahead.store.is_being_stepped:
                self.schedule.invalidate([index])  # no waiting for its step here: a later visit has it fetched
            elif not ahead.store.on_device.is_loaded:
                self._load(ahead, unit)
        self._last = unit
        self._visited.append(unit.index)

    def _load(self, unit: StreamedUnit, visited: StreamedUnit) -> None:
        """Start the load of a unit, with a smaller window where memory is short (Rule 3)."""
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
        """Evict units for an allocation that is not a unit's; return whether any of them went."""
        before = self.schedule.resident_nbytes
        if self.tuner.may_shrink:
            self._shrink(self._last)
        return self.schedule.resident_nbytes < before

    def _shrink(self, visited: StreamedUnit | None) -> None:
        self.tuner.full()
        self._follow_tuner()
        for index in self.schedule.resident:
            unit = self.units[index]
            if unit is not visited and unit.store.on_device.is_loaded and unit.movable:
                self.schedule.invalidate([index])
                self._evict(unit)

    def _evict(self, unit: StreamedUnit) -> None:
        unit.stand_ins.collect_writes()
        unit.stand_ins.unbind()
        unit.store.on_device.free()

    def retype(self, unit: StreamedUnit, types: dict[int, torch.dtype]) -> None:
        """Have a movable unit's weights travel in these types from its next load on."""
        if unit.store.on_device.is_loaded:
            self.schedule.invalidate([unit.index])
            self._evict(unit)
        unit.store.retype(types)
        unit.stand_ins.remake()
        self.schedule.weigh(unit.index, unit.store.on_device.nbytes)
        self.tuner.resized(unit.index, unit.sizes())

    # ---- units that user code refers to

    def collect_writes(self, units: Iterable[StreamedUnit] = ()) -> None:
        """Write back what code wrote, outside of visits, to the device bytes of these units, or of all."""
        with quietly():
            for unit in units or self.units:
                if (unit.store.on_device.is_loaded or unit.stand_ins.full_precision.old_copies) and not unit.visits:
                    unit.stand_ins.collect_writes()

    @never_compiled
    def collect_from_borrowed(self) -> None:
        """Write back what code wrote to borrowed weights; forget the units to which no view is left."""
        self.collect_writes(self.borrowed)
        with quietly():
            self.borrowed = {unit for unit in self.borrowed if unit.stand_ins.may_be_written()}

    def referenced_elsewhere(self) -> Iterator[StreamedUnit]:
        """Yield the units outside of their visits whose stand-ins or device bytes user code refers to."""
        for unit in self.units:
            if unit.store.on_device.is_loaded and not unit.visits and unit.stand_ins.in_use():
                yield unit

    def refresh_referenced(self) -> None:
        """Update the device bytes that user code refers to from the host's."""
        for unit in self.referenced_elsewhere():
            if unit.store.stale():
                self.refill(unit)
        for unit in self.units:
            if unit.stand_ins.full_precision.old_copies and not unit.visits:
                unit.stand_ins.full_precision.refresh()

    def refill(self, unit: StreamedUnit, has_collected: bool = False) -> None:
        """Fill a unit's device bytes again in place: all references to them see the new values, as in a plain run.

        ``has_collected``: what code wrote on the device is on the host already, beneath what was written there since.
        """
        changes = unit.store.changes(unit.store.on_device.stamp)
        if not has_collected:
            unit.stand_ins.collect_writes()
        unit.stand_ins.check_replaced(changes.replaced)
        unit.store.refill()
        unit.stand_ins.full_precision.refill()
        unit.stand_ins.overwritten(changes.written)
        unit.stand_ins.note_bytes()
