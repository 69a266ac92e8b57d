"""Which units are on the device: the schedule decides, by what followed when units were last visited in this order.

The visits are one endless trace. While it goes on as predicted nothing is looked up; at a surprise the prediction
becomes what came after the longest like run of visits, and then that again: the period of a loop.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..compat.torch import dispatch_mode_count, graph_task, without_dispatch_modes
from ..errors import UnsupportedError
from ..host.device import Device, DeviceMemoryError
from ..host.room import Room
from ..options import format_bytes
from .activations import Activations
from .leaf import NO_CONTEXT, graph_after_close
from .residency import Presence
from .schedule import Schedule
from .unit import Unit
from .wholes import show_device, show_host

LONGEST = 1 << 15  # visits that are remembered
LOOKED_AT = 8  # earlier visits of a unit that are compared, by as many visits before each


class Trace:
    """The visits so far, and the period that they are expected to repeat."""

    def __init__(self) -> None:
        self._visits: list[int] = []
        self._places: dict[int, list[int]] = {}
        self._period: list[int] = []
        self._at = 0

    def add(self, unit: int) -> list[int] | None:
        """Record a visit; after a surprise, return the new period that is expected to repeat, which begins with it."""
        visits, period = self._visits, self._period
        if visits and visits[-1] == unit:
            return None
        self._at += 1
        found = None
        if not period or period[self._at % len(period)] != unit:
            places = self._places.get(unit, [])[-LOOKED_AT:]
            place = max(reversed(places), key=self._likeness, default=None)
            if place is not None:
                found = self._period = visits[place:]
                self._at = 0
        if len(visits) > LONGEST:
            visits.clear()
            self._places.clear()
        self._places.setdefault(unit, []).append(len(visits))
        visits.append(unit)
        return found

    def _likeness(self, place: int) -> int:
        """Count how many visits just before a place are the same as those just before now."""
        before, now = self._visits[max(place - LOOKED_AT, 0) : place], self._visits
        return next((n for n, unit in enumerate(reversed(before)) if unit != now[-1 - n]), len(before))


_open: weakref.WeakSet[Window] = weakref.WeakSet()  # windows of the process's streams


class Window:
    """Loads units ahead of their visits, and evicts others."""

    def __init__(self, device: Device, policy: Activations) -> None:
        self._units: Sequence[Unit] = ()
        self._device, self.policy = device, policy
        self._trace = Trace()
        self._current: tuple[Unit | None, Any] = None, None  # the unit that was visited last, and on which stream
        self._in_use: dict[int, Unit] = {}
        self.caller: int | None = None  # the thread whose call of a streamed module is under way
        self.thread: int | None = None  # the thread that called a streamed module last, and will call backward
        self.is_in_call = False  # whether a call of a streamed module is under way
        self.is_in_step = False  # whether the code of a step is under way, as Lightning's `training_step`
        self._is_closed = False

    def begin(self, units: Sequence[Unit], room: Room) -> None:
        """Start to stream units. The list may grow later, by held units alone: the schedule has no place for others."""
        _open.add(self)
        self._units, self.room = units, room
        self._schedule = Schedule([unit.nbytes for unit in units], room.window, room.transfer)
        self._streamed = sum(not unit.is_held for unit in units)
        self._wholes = [whole for unit in units for whole in unit.wholes]

    @contextlib.contextmanager
    def using(self, unit: Unit) -> Iterator[None]:
        """Visit a unit and keep it on the device meanwhile, under hooks that save its weights as references."""
        mine = self.hold([unit])
        try:
            with self.policy.saving():
                yield
        finally:
            self.let_go(mine)

    def hold(self, units: Sequence[Unit]) -> list[Unit]:
        """Visit units, and keep them on the device until `let_go`; return those that were not kept before."""
        mine = []
        try:
            for unit in units:
                self.visit(unit)
                if unit.index not in self._in_use:
                    self._in_use[unit.index] = unit
                    mine.append(unit)
        except BaseException:
            self.let_go(mine)
            raise
        return mine

    def let_go(self, units: Sequence[Unit]) -> None:
        """Let these units be evicted again."""
        for unit in units:
            self._in_use.pop(unit.index, None)

    def lend(self) -> list[Unit]:
        """Put the leaves of all streams into their modules, for a root's code that reads weights of other layers.

        The root may read weights of layers that it does not call. Custom autograd functions get leaves past the
        parameters' own dispatch. Other streams' are lent too, such as a teacher's. Shards, which do not bring their
        bytes, are left out. Weights of several tensors stay in the modules, and are read on the device.
        """
        lent = [unit for each in _open for unit in each._units if not (unit.wholes or unit.sharded)]
        for unit in lent:
            unit.lend()
        show_device(self._wholes)
        return lent

    def take_back(self, lent: Sequence[Unit]) -> None:
        """Put the user's parameters back into the modules, after `lend`."""
        for unit in lent:
            unit.take_back()
        show_host(self._wholes)

    def begin_call(self, units: Sequence[Unit]) -> list[Unit]:
        """Keep a called module's units on the device, and note that a call is under way; return those kept anew."""
        if units and self._device.is_capturing():
            raise UnsupportedError(
                f"{units[0].name} was entered while a CUDA graph is captured, whose replays would read its weights"
                " where they are now: streamed ones do not stay there. Leave out the graph"
            )
        held = self.hold(units)
        self.is_in_call = True
        if graph_task() == -1:
            self.caller = self.thread = threading.get_ident()
        return held

    def end_call(self, held: Sequence[Unit], was_in_call: bool) -> None:
        """Note that a call has ended, and let its units be evicted again."""
        if not was_in_call:
            self.is_in_call, self.caller = False, None
        self.let_go(held)

    def visit(self, unit: Unit) -> None:
        """Make a unit's weights readable on the device for work that the current stream launches next."""
        here = unit, self._device.current_stream()
        if here == self._current:
            return
        if self._is_closed:
            raise graph_after_close(unit.name)
        self._current = None, None  # if the visit fails, the next one looks anew
        listener, phase = self._device.counters.listener, "forward" if graph_task() == -1 else "backward"
        # Modes of dispatch are those of a selective checkpoint, or of fake tensors.
        with without_dispatch_modes() if dispatch_mode_count() else NO_CONTEXT:
            if not unit.is_held:
                self._bring(unit, here[1])
            with NO_CONTEXT if listener is None else listener.waiting("weights", unit.name, phase):
                unit.show(here[1])
        self._current = here

    def _bring(self, unit: Unit, stream: Any) -> None:
        """Load a visited unit if it is absent or stale, with the evictions and prefetches that the schedule decides."""
        if len(self._schedule.loaded) == self._streamed <= self.room.window and not unit.is_stale():
            return  # all units are there, and stay
        period = self._trace.add(unit.index)
        schedule, room, counters = self._schedule, self.room, self._device.counters
        if unit.index in schedule.loaded and unit.index not in self._in_use and unit.is_stale():
            self.drop(unit)
        if period:
            schedule.begin(period, wrap=True)
        schedule.window, schedule.transfer = room.window, room.transfer
        decision = schedule.visit(unit.index, self._in_use)
        counters.surprises += decision.surprise
        for index in decision.evict:
            self._units[index].evict()
        try:
            for index in decision.load:
                if index in schedule.loaded:  # a load before this one may have found no memory
                    self._load(self._units[index], stream, is_needed=index == unit.index)
        except BaseException:
            schedule.invalidate(i for i in decision.load if self._units[i].memory.state is Presence.ABSENT)
            raise
        if decision.load and room.grows:
            room.note_memory(schedule.loaded_nbytes)

    @property
    def loaded_nbytes(self) -> int:
        """The bytes of the units that are on the device, or on their way there."""
        return self._schedule.loaded_nbytes

    def _load(self, unit: Unit, stream: Any, is_needed: bool) -> None:
        """Load a unit. Where the device is full, a unit that is needed now takes the place of all idle ones."""
        try:
            unit.load(stream)
        except torch.OutOfMemoryError as error:
            self.room.shrink(self.room.window - 1, "the device had no memory for a unit")
            if not is_needed:
                self._schedule.invalidate([unit.index])
                return
            idle = [index for index in self._schedule.loaded if index not in self._in_use and index != unit.index]
            for index in self._schedule.invalidate(idle):
                self._units[index].evict()
            try:
                unit.load(stream)
            except torch.OutOfMemoryError:
                used = sum(other.nbytes for other in self._units if other.memory.state is not Presence.ABSENT)
                raise DeviceMemoryError(
                    f"{unit.name} needs {format_bytes(unit.nbytes, up=True)} on {self._device.torch_device}, which is"
                    f" full: units in use hold {format_bytes(used)}, and all else is activations, other tensors and the"
                    " allocator's own. Take smaller batches, activations='recompute' or 'offload', or fewer resident"
                    " units"
                ) from error

    def look_again(self, unit: Unit) -> None:
        """Make the next visit of a unit compare its versions: the host may have written the weights."""
        if self._current[0] is unit:
            self._current = None, None

    def drop(self, *units: Unit) -> None:
        """Evict units whose weights change, except for held ones."""
        self._current = None, None
        for index in self._schedule.invalidate([unit.index for unit in units if not unit.is_held]):
            self._units[index].evict()

    def close(self) -> None:
        """Evict all units that are not held, and refuse visits from here on."""
        self._current, self._is_closed = (None, None), True
        _open.discard(self)
        for unit in self._units:
            self.drop(unit)
