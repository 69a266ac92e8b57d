"""A unit: weights that travel as one, in a page-locked slab on the host and in fresh memory on the device.

1. Evicting a unit drops the reference to its memory: what still has a view of it keeps it.
2. The memory is of compute's pool, as all that the model allocates: whenever it is let go of, its next user is queued
   behind its last reader. A copy up waits for what compute had queued when the memory was allocated.
3. A unit on the device is stale when its weights' versions have moved since the copy, or its epoch, which steps move
   and writes that no version shows.
4. Whatever writes to the slab first waits for copies that read it (`wait_copy`), and for the unit's step (`wait_step`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..compat.streaming import without_dispatch
from ..host.device import Arrival, Device, aligned, dense_strides
from .lazy import set_data
from .leaf import Absent, Leaf, Narrow, Weight


class Unit:
    """Weights that travel as one."""

    is_resident = False

    def __init__(self, index: int, name: str, weights: list[Weight], device: Device) -> None:
        self.index, self.name, self.weights, self.device = index, name, weights, device
        self.nbytes = sum(aligned(weight.nbytes) for weight in weights)
        self.flat: Tensor | None = None  # its memory on the device, from a load to the eviction
        self.is_shown = False  # whether the leaves have that memory
        self.window: Any = None  # which visits it
        self.saving: Callable[[], Any] = contextlib.nullcontext  # hooks on saved tensors around a use by other code
        self.depth = 0  # calls of its modules that are under way
        self.trained = 0  # weights that require grad
        self.calls = 0  # forwards since steps are taken beside backward
        self.epoch = 0
        self.is_final = False  # stepped beside this backward, which may go on with the bytes on the device
        self.is_open = False  # the user has an array over the bytes, and may write at any time
        self.has_new_wire = False  # whether weights that travel in another type may have been written
        self.pending: Future[None] | None = None  # its last step
        self._home: Any = None  # the stream of the memory on the device
        self._arrived: Any = None  # the end of the copy up
        self._copied: Arrival | None = None  # the same, until the host has waited for it
        self._stamp: tuple[int, list[int]] | None = None  # epoch and versions of what was copied; None: not yet copied
        self._jobs = 0  # steps that are under way
        self._is_wanted = False  # whether to copy it up after the last of them
        self._lock = threading.Lock()
        self._allocate()
        at, blank = 0, device.empty(self.nbytes)
        for weight in weights:
            weight.unit, weight.at = self, at
            self._adopt(weight, blank)
            at += aligned(weight.nbytes)
        blank.untyped_storage().resize_(0)

    # ---- making

    def _allocate(self) -> None:
        self.slab = self.device.slab(self.nbytes)

    def _adopt(self, weight: Weight, blank: Tensor) -> None:
        """Move a parameter's bytes into the slab, and make its leaf."""
        with torch.inference_mode(False):
            self._take_bytes(weight)
            weight.blank = self._over(blank, weight)
            if weight.is_narrow:
                weight.there = weight.blank.detach()
                weight.leaf = Narrow(_without_bytes(weight.value, self.device.torch_device), requires_grad=False)
            else:
                weight.there = weight.leaf = Absent(weight.blank.detach(), requires_grad=False)
        weight.leaf.__dict__ = weight.host.__dict__  # attributes that a forward sets on the weight are the parameter's

    def _take_bytes(self, weight: Weight) -> None:
        host = weight.host
        # A storage of its own: torch.save writes whole storages, and safetensors refuses shared ones.
        part = self.slab.untyped_storage()[weight.at : weight.at + weight.nbytes]
        weight.wire = torch.empty(0, dtype=weight.dtype).set_(part, 0, host.shape, dense_strides(host.data))
        weight.wire.copy_(host.data)
        if not weight.is_narrow:
            host.data = weight.wire
        weight.value = host.detach()

    def _over(self, flat: Tensor, weight: Weight) -> Tensor:
        """Make a tensor over a weight's place in device memory, with a version of its own."""
        empty = torch.empty(0, dtype=weight.dtype, device=flat.device)
        place = weight.at // weight.dtype.itemsize
        return empty.set_(flat.untyped_storage(), place, weight.wire.shape, weight.wire.stride())

    # ---- memory on the device

    def load(self) -> None:
        """Start to copy the weights up; while they are being stepped, have the step do so at its end."""
        with self._lock:
            self._home = self.device.compute
            self.flat = self.device.empty(self.nbytes)
            self.device.up.wait_event(self._home.record_event())
            self._stamp = None
            self._is_wanted = self._jobs > 0
            if not self._is_wanted:
                self._copy()

    def _copy(self) -> None:
        assert self.flat is not None
        if self.has_new_wire:
            self._cast()
        self._arrived = self._copied = self.device.send_up(self.flat, self.slab)
        self._stamp = self._now()
        if self.is_open:
            self.wait_copy()  # nothing makes the user's next write to the array wait

    def _now(self) -> tuple[int, list[int]]:
        return self.epoch, [weight.value._version for weight in self.weights]

    def is_stale(self) -> bool:
        """Whether what is on the device, or on its way there, is no longer what the host has."""
        if self.flat is None or self.is_final or self._stamp is None:
            return False
        return self.is_open or self._stamp != self._now()

    def _cast(self) -> None:
        """Make the copies that travel in another type anew."""
        self.has_new_wire = False
        self.wait_copy()
        for weight in self.weights:
            if weight.is_narrow:
                weight.wire.copy_(weight.value)

    def wait_copy(self) -> None:
        """Wait until no copy reads the slab, which is about to be written."""
        if (copied := self._copied) is not None:
            copied.synchronize()
            self._copied = None

    def show(self) -> None:
        """Have compute wait for the weights, and give the bytes to the leaves.

        Leaves of weights that were written get a new version, as in a plain run.
        """
        if self.flat is None:
            self.load()
        if self._stamp is None or not self.is_final:
            self.wait_step()
        self._arrived.wait(self.device.compute)
        self.keep_for_stream()
        if not self.is_shown:
            self.is_shown = True
            self._give_bytes()

    def keep_for_stream(self) -> None:
        """Keep the memory until work on the calling thread's stream is done, where that is a stream of the user's."""
        if (here := self.device.compute) != self._home:
            self.device.keep_for(self.memory, here)

    @property
    def memory(self) -> Tensor:
        """The unit's memory on the device, where it is."""
        assert self.flat is not None
        return self.flat

    def _give_bytes(self) -> None:
        assert self._stamp is not None
        with without_dispatch(), torch.inference_mode(False):
            for weight, version in zip(self.weights, self._stamp[1], strict=True):
                set_data(weight.there, self._over(self.memory, weight))
                if not weight.is_narrow:
                    weight.there.__class__ = Leaf
                self._show_version(weight, version)

    def _show_version(self, weight: Weight, version: int) -> None:
        if version != weight.shown:
            if weight.shown >= 0:
                increment_version(weight.there)
            weight.shown = version

    def evict(self) -> None:
        """Let go of the memory on the device."""
        with self._lock, without_dispatch():
            self._is_wanted = False
            if self.flat is not None and self._stamp is not None and not self.is_shown:
                self._arrived.wait(self._home)  # the memory's next user is queued behind the copy
            self.flat = None
            for weight in self.weights if self.is_shown else ():
                set_data(weight.there, weight.blank)
                if not weight.is_narrow:
                    weight.there.__class__ = Absent
            self.is_shown = False

    # ---- what the host does with the bytes

    def before_host_access(self, weight: Weight) -> None:
        """Wait until the host may read and write a weight's bytes."""
        self.wait_step()
        self.wait_copy()
        self.has_new_wire = True
        self.window.look_again(self)

    def keep_write(self, weight: Weight) -> None:
        """Copy to the host what was written to a leaf."""
        self.wait_copy()
        with torch.no_grad(), without_dispatch():
            weight.value.copy_(weight.there)
        weight.shown = weight.value._version
        weight.is_exposed = False
        self._stamp = self._now()

    # ---- steps

    def begin_step(self, step: Callable[[], Future[None]]) -> Future[None]:
        """Note a step, which this function starts."""
        with self._lock:
            self._jobs += 1
            self.epoch += 1
        self.pending = step()
        return self.pending

    def end_step(self) -> None:
        """Copy the unit up if a load waits for its last step. Called by the step's thread."""
        with self._lock:
            self._jobs -= 1
            if self._is_wanted and not self._jobs:
                self._is_wanted = False
                self._copy()

    def wait_step(self) -> None:
        """Wait until no step of the unit is pending; raise what it raised."""
        if (pending := self.pending) is not None:
            try:
                pending.result()
            finally:
                if self.pending is pending:  # it was until now: other threads wait as well
                    self.pending = None

    # ---- the modules' parameters

    def bind(self) -> None:
        """Put the leaves into the modules."""
        with without_dispatch():
            self.trained = 0
            for weight in self.weights:
                trains = weight.host.requires_grad
                self.trained += trains
                if weight.leaf.requires_grad != trains:
                    weight.leaf.requires_grad_(trains)
                for slot in weight.slots:
                    if slot.get() is weight.host:
                        slot.set(weight.leaf)

    def unbind(self) -> None:
        """Put the user's parameters back."""
        for weight in self.weights:
            for slot in weight.slots:
                if slot.get() is weight.leaf:
                    slot.set(weight.host)

    def written(self) -> list[Any]:
        """List what changes for a leaf when the user's forward writes to it."""
        with without_dispatch():
            return [(weight.there._version, weight.is_exposed) for weight in self.weights]

    def keep_writes(self, before: list[Any]) -> None:
        """Copy to the host what was written to leaves since `written`."""
        for weight, then, now in zip(self.weights, before, self.written(), strict=True):
            if then != now:
                self.keep_write(weight)


class ResidentUnit(Unit):
    """Weights that never leave the device, where their truth is: the host has their bytes once they were read."""

    is_resident = True

    def _allocate(self) -> None:
        self._sources: list[Tensor] = []

    def _take_bytes(self, weight: Weight) -> None:
        host = weight.host
        weight.wire = torch.empty_strided(host.shape, dense_strides(host.data), dtype=host.dtype, device="cpu")
        weight.wire.untyped_storage().resize_(0)
        self._sources.append(host.data)
        host.data = weight.wire
        weight.value = host.detach()
        weight.is_ahead = True

    def load(self) -> None:
        """Copy the weights up, and drop the host's bytes."""
        self._home = self.device.compute
        self.flat = self.device.empty(self.nbytes)
        with without_dispatch(), torch.no_grad(), torch.inference_mode(False):
            for weight, source in zip(self.weights, self._sources, strict=True):
                self._over(self.flat, weight).copy_(source)
        self._sources.clear()
        self._arrived = self._home.record_event()
        self._stamp = self._now()

    def show(self) -> None:
        if self.flat is not None and self.is_stale():
            self._refresh()
        super().show()

    def is_stale(self) -> bool:
        return self.is_open or self._stamp != self._now()

    def _refresh(self) -> None:
        """Copy up what the host has written; the memory and the leaves stay."""
        with without_dispatch(), torch.no_grad(), torch.inference_mode(False):
            for weight in self.weights:
                if not weight.is_ahead:
                    self._over(self.memory, weight).copy_(weight.value)
                self._show_version(weight, weight.value._version)
        self._stamp = self._now()

    def evict(self) -> None:
        """Bring all bytes down, and let go of the memory on the device. Called at the end of the stream."""
        for weight in self.weights:
            self.before_host_access(weight)
        super().evict()

    def before_host_access(self, weight: Weight) -> None:
        """Bring a weight's bytes down if the device has newer ones."""
        if weight.is_ahead:
            if self.flat is None:
                self.show()
            self.wait_step()
            weight.is_ahead = False
            storage = weight.wire.untyped_storage()
            if not storage.nbytes():
                storage.resize_(weight.nbytes)
            with without_dispatch(), torch.no_grad():
                weight.wire.copy_(self._over(self.memory, weight))
        self.window.look_again(self)

    def keep_write(self, weight: Weight) -> None:
        """Note that the device has newer bytes of a weight than the host."""
        weight.is_ahead, weight.is_exposed = True, False
        with without_dispatch():
            increment_version(weight.value)
        weight.shown = weight.value._version
        self._stamp = self._now()
        if self.is_open:
            self.before_host_access(weight)


def _without_bytes(like: Tensor, device: torch.device) -> Tensor:
    empty = torch.empty_like(like, device=device, requires_grad=False)
    empty.untyped_storage().resize_(0)
    return empty
