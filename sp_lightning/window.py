"""Which units are on the device: what comes and goes when one is visited.

1. A *pass* is all visits from the opening of the outermost scope (a forward of the root, a Lightning step) to the
   opening of the next one, backward included. The order of a pass is recorded and predicts the next of its kind:
   learned, never trusted. A unit that is not there when it is visited is fetched.
2. Nothing is freed by leaving a unit: the schedule says at later visits what has to go. What somebody still uses stays.
3. Without room for a unit an "auto" window shrinks: what can go, goes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .autotune import UnitBytes, first_window, grown_window
from .binding import Binding
from .config import Options, format_bytes
from .device import Device
from .gradients import Gradients
from .schedule import Schedule
from .store import Residency, UnitStore
from .telemetry import Counters
from .units import Slot, Unit

log = logging.getLogger(__name__)
Receive = Callable[["StreamedUnit", Any, Gradients], Gradients]


class StreamedUnit:
    """A unit at run time: its bytes, its stand-ins and how deep we are inside it."""

    def __init__(self, unit: Unit, store: UnitStore, slots: list[tuple[int, Slot]], receive: Receive) -> None:
        self.unit = unit
        self.name = unit.name
        self.index = unit.index
        self.store = store
        self.visits = 0
        self.binding = Binding(store, slots, lambda node, grads: receive(self, node, grads))

    def stand_in(self, parameter: Tensor) -> Tensor:
        """The device tensor for one of its host parameters."""
        return self.binding.outputs[self.store.index_of[id(parameter)]]

    def sizes(self) -> UnitBytes:
        """What planning has to know."""
        trainable = (p.requires_grad for p in self.store.params)
        fields = zip(self.store.layout.fields, trainable, strict=True)
        return UnitBytes(self.name, self.store.nbytes, sum(field.nbytes for field, needed in fields if needed))

    @property
    def movable(self) -> bool:
        """Whether its bytes may leave the device now."""
        return not self.visits and not self.binding.in_use()


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
        self._sizes = [unit.sizes() for unit in units if not unit.unit.resident]
        root_nbytes = sum(unit.store.nbytes for unit in units if unit.unit.resident)
        window = first_window(options, self._sizes, root_nbytes, device.is_host)
        transfer = 1 if options.transfer == "auto" else min(options.transfer, window)
        self.schedule = Schedule([unit.store.nbytes for unit in units], window, transfer)
        self._may_grow = options.window == "auto" and options.memory_budget is None
        self._may_shrink = options.window == "auto"
        self._orders: dict[Any, list[int]] = {}  # of the last pass of each kind (Rule 1)
        self._kind: Any = None
        self._recorded: list[int] = []
        self._last: StreamedUnit | None = None  # the unit required last

    # ---- passes

    def begin_pass(self, kind: Any) -> None:
        """The pass so far ends, and one of this kind begins (Rule 1)."""
        self._grow(self._kind)
        self._orders[self._kind] = self._recorded
        self._recorded = []
        self._kind = (kind, torch.is_grad_enabled())
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

    def _grow(self, kind: Any) -> None:
        """After the first pass of a kind: into the memory that it never used (autotune.py, Rule 2)."""
        if not self._may_grow or kind is None or kind in self._orders:
            return
        if not kind[1] and not self.only_inference:
            return  # a pass without gradients does not show what training needs
        headroom = self.device.memory_headroom()
        if headroom is None:
            return
        window = grown_window(self._sizes, self.schedule.window, headroom)
        if window != self.schedule.window:
            log.info(
                "superpipeline: window %d -> %d, as %s of device memory were never used",
                self.schedule.window,
                window,
                format_bytes(headroom),
            )
            self.schedule.resize(window, self.schedule.transfer)

    def _drop_stale(self) -> None:
        """Units whose host bytes changed have to come up again: better planned than at their visit."""
        self.follow()
        for index in self.schedule.resident:
            unit = self.units[index]
            if unit.store.stale() and unit.movable:
                self.schedule.invalidate([index])
                self._evict(unit)

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
        decision = self.schedule.visit(unit.index, self._in_use)
        self.counters.surprises += decision.surprise
        self.counters.extra_held += len(self.schedule.resident) > self.schedule.window
        for index in decision.evict:
            self._evict(self.units[index])
        for index in decision.load:
            if self.units[index].store.residency is Residency.HOST:
                self._load(self.units[index], unit)
        self._last = unit
        self._recorded.append(unit.index)

    def _load(self, unit: StreamedUnit, visited: StreamedUnit) -> None:
        """Starts a unit's way up (Rule 3)."""
        try:
            unit.store.load()
        except torch.OutOfMemoryError:
            self.schedule.invalidate([unit.index])
            if not self._may_shrink:
                raise
            self._shrink(visited)
            if unit is visited:
                unit.store.load()
                self.schedule.keep(unit.index)

    def _shrink(self, visited: StreamedUnit) -> None:
        window = max(1, self.schedule.window - 1)
        log.warning("superpipeline: out of device memory; window %d -> %d", self.schedule.window, window)
        self._may_grow = False
        self.schedule.resize(window, min(self.schedule.transfer, window))
        for index in self.schedule.resident:
            unit = self.units[index]
            if unit is not visited and unit.store.residency is Residency.DEVICE and unit.movable:
                self.schedule.invalidate([index])
                self._evict(unit)

    def _evict(self, unit: StreamedUnit) -> None:
        unit.binding.collect_writes()
        unit.binding.unbind()
        unit.store.free()

    # ---- what the user keeps

    def kept(self) -> Iterator[StreamedUnit]:
        """Units whose stand-ins outlive their visit."""
        for unit in self.units:
            if unit.store.residency is Residency.DEVICE and not unit.visits and unit.binding.in_use():
                yield unit

    def follow(self) -> None:
        """Device bytes that the user keeps a reference to become what the host's are now."""
        for unit in self.kept():
            if unit.store.stale():
                self.refill(unit)

    def refill(self, unit: StreamedUnit) -> None:
        """In place: whoever refers to the bytes sees the new ones, as in a plain run."""
        unit.binding.collect_writes()
        written = unit.store.written()
        unit.store.load()
        unit.store.wait_load()
        unit.binding.overwritten(written)

    def settle(self) -> None:
        """No fill reads host bytes any more: they may be written from here on."""
        for unit in self.units:
            if unit.store.residency is Residency.DEVICE:
                unit.store.settle()
