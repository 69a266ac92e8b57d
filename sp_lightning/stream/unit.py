"""A unit: weights that travel as one, in a page-locked slab on the host and in fresh memory on the device.

- Only `evict` lets go of the unit's memory on the device (residency.py). The window calls it, between visits; a held
  unit does so itself where its weights were written.
- A unit on the device is stale when its weights' versions have moved since the copy, or its epoch, which steps move
  and writes that no version shows.
- Whatever writes to the slab first waits for copies that read it (`wait_copy`), and for the unit's step (`wait_step`).
- A load of a unit that is being stepped takes memory at once; the last of its steps starts the copy, as it ends.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..compat.torch import without_dispatch
from ..host.device import NOT_RECORDED, Arrival, Device, aligned, dense_strides
from ..host.room import UnitNumbers
from ..store.store import FiledWeights
from .lazy import data_of, requires_grad_of, set_requires_grad, stored_version
from .leaf import Absent, Leaf, Narrow, Visitor, Weight, stepped_already, version_of
from .residency import NO_BYTES, Presence, Residency, show_versions
from .wholes import WholeWeight

Stamp: TypeAlias = tuple[int, list[int]]  # epoch and versions of a unit's weights


class Pending:
    """The last step of a unit, which may not have ended, and those before it."""

    def __init__(self) -> None:
        self.last: Future[None] | None = None  # until something has waited for it
        self._count = 0  # steps that are under way
        self._then: Callable[[], None] | None = None
        self._lock = threading.Lock()

    def begin(self, submit: Callable[[], Future[None]]) -> Future[None]:
        """Note a step, which this function starts."""
        with self._lock:
            self._count += 1
        last = submit()
        with self._lock:
            self.last = last
        return last

    def end(self) -> None:
        """Note the end of a step, and run what waits for the last one. Called by the step's thread."""
        with self._lock:
            self._count -= 1
            if not self._count and self._then is not None:
                then, self._then = self._then, None
                then()

    def after(self, action: Callable[[], None]) -> None:
        """Run an action now, or as the last step ends, by the step's thread. Does not wait for the steps."""
        with self._lock:
            if self._count:
                self._then = action
            else:
                action()

    def cancel(self) -> None:
        """Drop the action that waits. Blocks while it runs."""
        with self._lock:
            self._then = None

    def wait(self) -> None:
        """Wait until no step is under way; raise what the last one raised."""
        if (last := self.last) is not None:
            try:
                last.result()
            finally:
                with self._lock:  # other threads wait as well, or begin a step; an interrupt ends the wait alone
                    if self.last is last and last.done():
                        self.last = None


class Unit:
    """Weights that travel as one."""

    is_held = False  # whether the window lets it stay on the device
    is_resident = False  # whether its truth is on the device

    def __init__(
        self,
        index: int,
        name: str,
        weights: list[Weight],
        device: Device,
        window: Visitor,
        filed: FiledWeights | None = None,
    ) -> None:
        weights = sorted(weights, key=lambda weight: weight.place is not None)  # the slab has the first ones
        self.index, self.name, self.weights, self.device, self.window = index, name, weights, device, window
        self.nbytes = sum(aligned(weight.nbytes) for weight in weights)
        self._filed = filed
        self.spill: Any = None  # where its gradients go (store.py); None: into memory
        self.wholes: list[WholeWeight] = []  # which consist of some of its weights
        self.steps = Pending()
        self.depth = 0  # calls of its modules that are under way
        self.bound = 0  # calls for whose time the modules have the leaves
        self.trained = 0  # weights that require grad
        self.calls = 0  # forwards since steps are taken beside backward
        self.epoch = 0
        self.is_exposed = False  # whether the user may have an array over its bytes, which cannot wait for a step
        self.is_final = False  # stepped beside this backward, which may go on with the bytes on the device
        # The bytes, in this call, of leaves that the user may write behind their versions.
        self.exposed: dict[Weight, Tensor] = {}
        self.copies: list[tuple[Weight, Tensor, int]] = []  # `.data` of what travels in another type, and its version
        self._before_access: Stamp | None = None  # before the first access since the copies in other types were right
        self._has_new_wires = False  # whether these copies are to be made anew
        self._copied: Arrival | None = None  # the end of the copy up, until the host has waited for it
        self._stamp: Stamp | None = None  # of what was copied; None: not yet copied
        self.sources: list[Tensor] = []  # the first bytes of weights that the host does not keep
        self.stepped: Stamp | None = None  # of what the last step left, where the truth is elsewhere
        self._allocate()
        at, blank = 0, device.empty(self.nbytes)
        for weight in weights:
            weight.unit, weight.at = self, at
            self._adopt(weight, blank)
            at += aligned(weight.nbytes)
        blank.untyped_storage().resize_(0)
        self.memory = Residency(device, weights, self.nbytes)
        self._hosts: list[Any] = [weight.host for weight in weights]
        self._note_leaves()
        self._dispatching: list[Any] = [leaf for leaf in self._leaves if type(leaf) is Absent]  # outside of calls
        # DTensors, and their places among the weights.
        self.sharded = [(index, weight.host) for index, weight in enumerate(weights) if weight.is_shard]
        self._values = [weight.value for weight in weights]
        self.note_slots()

    # ---- making

    def _allocate(self) -> None:
        nbytes = sum(aligned(weight.nbytes) for weight in self.weights if weight.place is None)
        self.slab = self.device.slab(nbytes) if nbytes else NO_BYTES
        self.truth = self.device.slabs.truth(self.slab) if nbytes else NO_BYTES

    def _adopt(self, weight: Weight, blank: Tensor) -> None:
        """Move a parameter's bytes into the slab, and make its leaf."""
        with torch.inference_mode(False):
            self._take_bytes(weight)
            weight.form = weight.wire.shape, weight.wire.stride(), weight.at // weight.dtype.itemsize
            empty = torch.empty(0, dtype=weight.dtype, device=blank.device)  # with a version of its own
            weight.blank = empty.set_(blank.untyped_storage(), weight.form[2], *weight.form[:2])
            if weight.is_lent:
                weight.there = weight.blank.detach()
                weight.leaf = Narrow(_without_bytes(weight.value, self.device.torch_device), requires_grad=False)
            elif weight.is_shard:
                weight.there = weight.blank.detach()
                weight.leaf = weight.leaf_over(weight.there)
                weight.leaf.__dict__ = weight.host.__dict__
                return
            elif weight.is_part:
                # A plain tensor, to which the whole refers.
                weight.there = weight.leaf = weight.blank.detach()  # type: ignore[assignment]
                return
            else:
                weight.there = weight.leaf = Absent(weight.blank.detach(), requires_grad=False)
        weight.leaf.weight = weight
        weight.leaf.__dict__ = weight.host.__dict__  # attributes that a forward sets on the weight are the parameter's

    def _take_bytes(self, weight: Weight) -> None:
        host: Any = weight.bytes_of_host
        if weight.place is not None:
            weight.wire, weight.value = host.data, host.detach()
            return
        # A storage of its own: torch.save writes whole storages, and safetensors refuses shared ones.
        part = self.slab.untyped_storage()[weight.at : weight.at + weight.nbytes]
        weight.wire = torch.empty(0, dtype=weight.dtype, device="cpu").set_(
            part, 0, host.shape, dense_strides(host.data)
        )
        self.device.slabs.fill(weight.wire, host.data)
        host.data = self.device.slabs.keep(host.data) if weight.is_narrow else weight.wire
        weight.value = host.detach()

    def replace(self, weight: Weight, host: Any) -> None:
        """Have another parameter of the same form in a weight's place, from now on."""
        weight.host = host
        with torch.inference_mode(False), without_dispatch():
            self._take_bytes(weight)
            increment_version(weight.there)  # what autograd saved is overwritten
        weight.leaf.__dict__ = host.__dict__
        weight.shown = weight.value._version
        self._hosts = [each.host for each in self.weights]
        self._values = [each.value for each in self.weights]
        self.epoch += 1

    def _note_leaves(self) -> None:
        self._leaves: list[Any] = [weight.leaf for weight in self.weights]
        self._there = [weight.leaf if weight.is_shard else weight.there for weight in self.weights]

    def note_slots(self) -> None:
        """Note anew where the modules have the parameters."""
        slots = [(index, slot) for index, weight in enumerate(self.weights) for slot in weight.slots]
        self._slots = [(index, slot.holder, slot.key) for index, slot in slots if slot.inside is None]
        self._inner_slots = [(index, slot) for index, slot in slots if slot.inside is not None]
        self._has_slots = [bool(weight.slots) for weight in self.weights]

    def numbers(self) -> UnitNumbers:
        """Return the unit's bytes: of its weights on the device, and of its gradients."""
        trained = [weight for weight in self.weights if weight.host.requires_grad]
        return UnitNumbers(
            name=self.name,
            up_nbytes=self.nbytes,
            down_nbytes=sum(aligned(weight.nbytes) for weight in trained),
            parameters=sum(weight.host.numel() for weight in trained),
            resident=self.is_held,
        )

    # ---- on the device

    def load(self, here: Any) -> None:
        """Start to copy the weights up, into memory of the stream ``here``."""
        self.memory.allocate(here)
        self._stamp = None
        self.device.counters.fetches += 1
        self.device.counters.bytes_up += self.nbytes
        self.steps.after(self._copy)

    def _copy(self) -> None:
        if self._may_have_new_wires() or self._has_new_wires:
            self._cast()
        source = self.slab if self.is_edited() else self.truth
        listener = self.device.counters.listener
        recorded = NOT_RECORDED if listener is None else listener.work("up", self.name, "weights", self.nbytes)
        flat, stamp = self.memory.flat, self._now()
        copied = self.device.send_up(flat[: self.slab.nbytes], source, recorded=recorded)
        if self._filed is not None:
            copied = self._filed.send_up(flat, copied, stamp)
        self.memory.arrived = self._copied = copied
        self._stamp = stamp

    def _now(self) -> Stamp:
        versions = list(map(stored_version, self._values))
        for index, host in self.sharded:
            versions[index] += stored_version(host)
        return self.epoch, versions

    def is_stale(self) -> bool:
        """Whether what is on the device, or on its way there, is no longer what the host has."""
        if self.memory.state is Presence.ABSENT or self.is_final or self._stamp is None:
            return False
        has_failed = self._filed is not None and self._filed.has_failed
        return has_failed or self._stamp != self._now()

    @property
    def is_past_step(self) -> bool:
        """Whether the device has what a step beside this backward left, as the unit was loaded again."""
        return self.is_final and self._stamp == self._now()

    def is_edited(self) -> bool:
        """Whether the slab may have other bytes than its truth, as the user wrote to it since the last step."""
        return self.truth is self.slab or self.stepped != self._now()

    def _cast(self) -> None:
        """Make the copies that travel in another type anew."""
        self._has_new_wires = False
        self.wait_copy()
        for weight in self.weights if self.is_edited() else ():
            if weight.is_narrow:
                weight.wire.copy_(weight.value)

    def show(self, here: Any = None) -> None:
        """Show the weights in the leaves to what is launched on the stream ``here``: by default the caller's.

        Blocks while the unit's step is under way.
        """
        here = self.device.current_stream() if here is None else here
        if self.memory.state is Presence.ABSENT:
            self.load(here)
        if self.steps.last is not None and (self._stamp is None or not self.is_final):
            self.wait_step()
        if here != self.memory.shown_on:
            assert self._stamp is not None
            self.memory.show(here, self._stamp[1])

    def evict(self) -> None:
        """Release the memory on the device."""
        self.steps.cancel()
        self.device.counters.evictions += self.memory.state is not Presence.ABSENT
        self.memory.release()
        if self.wholes:
            self._note_leaves()  # parts have others, and the old ones their memory

    # ---- on the host

    def wait_copy(self) -> None:
        """Wait until no copy reads the slab, which is about to be written."""
        if (copied := self._copied) is not None:
            copied.synchronize()
            if self._copied is copied:  # and no other thread has begun one
                self._copied = None

    def before_host_access(self, weight: Weight) -> None:
        """Wait until the host may read and write a weight's bytes."""
        if self.is_final and weight.is_stepped_early:
            raise stepped_already(weight.name)
        self.wait_step()
        self.wait_copy()
        if self._before_access is None:
            self._before_access = self._now()
        self.window.look_again(self)

    def _may_have_new_wires(self) -> bool:
        """Whether somebody wrote what travels in another type, since the host was accessed. Asking forgets accesses."""
        before, self._before_access = self._before_access, None
        return before is not None and (self.is_exposed or before != self._now())

    def keep_write(self, weight: Weight) -> None:
        """Copy to the host what was written to a leaf."""
        self.device.counters.bytes_written_back += weight.nbytes
        self.wait_copy()
        if weight.is_narrow:
            if not torch.equal(weight.there.detach().to("cpu").view(torch.uint8), weight.wire.view(torch.uint8)):
                raise weight.lost_write()
            return
        with torch.no_grad(), without_dispatch():
            weight.value.copy_(weight.there)
            if weight.is_shard:
                increment_version(weight.there)  # the write moved the version of the leaf alone
        self._stamp = self._now()
        weight.shown = self._stamp[1][self.weights.index(weight)]

    # ---- steps

    @property
    def pending(self) -> Future[None] | None:
        """The last step, unless something has waited for it."""
        return self.steps.last

    def begin_step(self, step: Callable[[], Future[None]]) -> Future[None]:
        """Note a step, which this function starts."""
        self._has_new_wires |= self._may_have_new_wires()  # some of its weights may not be stepped
        self.epoch += 1
        return self.steps.begin(step)

    def note_stepped(self) -> None:
        """Note that the slab has the bytes of its truth."""
        self.stepped = self._now()

    def wait_step(self) -> None:
        """Wait until no step of the unit is pending; raise what it raised."""
        if (last := self.steps.last) is not None:
            with NOT_RECORDED if last.done() else self.device.counters.stall("optimizer"):
                self.steps.wait()

    # ---- the modules' parameters

    def bind(self) -> list[int]:
        """Put the leaves into the modules. Return their versions, for `written_since`."""
        self.exposed.clear()
        self.copies.clear()
        with without_dispatch():
            for leaf in self._dispatching:
                leaf.__class__ = Leaf
            self.lend()
            return list(map(stored_version, self._there))

    def lend(self) -> None:
        """Put the leaves into the modules; they bring their bytes where a function gets them."""
        self.bound += 1
        if self.bound > 1 and not self.sharded:
            return  # parameters that were frozen since have told their leaves
        with without_dispatch():
            train = list(map(requires_grad_of, self._hosts))
            self.trained = sum(map(operator.and_, train, self._has_slots))  # modules may have other parameters by now
            if train != list(map(requires_grad_of, self._leaves)):
                for leaf, trains in zip(self._leaves, train, strict=True):
                    set_requires_grad(leaf, trains)
            if self.bound == 1:
                self._exchange(self._hosts, self._leaves)
                for whole in self.wholes:
                    whole.bind()

    def unbind(self) -> None:
        """Put the user's parameters back, unless a call around this one has the leaves."""
        self.bound = max(0, self.bound - 1)  # none where binding failed
        if not self.depth:
            for leaf in self._dispatching:
                leaf.__class__ = Absent
        if not self.bound:
            self._exchange(self._leaves, self._hosts)
            for whole in self.wholes:
                whole.unbind()

    def _exchange(self, there: list[Any], given: list[Any]) -> None:
        """Put other tensors into the modules' places, but not where the user's code put others."""
        for index, holder, key in self._slots:
            if holder.get(key) is there[index]:
                holder[key] = given[index]
        for index, slot in self._inner_slots:
            if slot.get() is there[index]:
                slot.set(given[index])

    def written_since(self, versions: list[int]) -> list[Weight]:
        """List the weights that the user's forward wrote to, and raise for writes that are lost.

        Blocks if it read `.data`, whose bytes are compared.
        """
        for weight, data, version in self.copies:
            if version_of(data) != version:
                raise weight.lost_write()
        self.copies.clear()
        with without_dispatch():
            now = list(map(stored_version, self._there))
            if now == versions and not self.exposed:
                return []
            changed = zip(self.weights, versions, now, strict=True)
            written = [
                weight for weight, before, after in changed if before != after or self._was_written_unseen(weight)
            ]
        self.exposed.clear()
        return written

    def _was_written_unseen(self, weight: Weight) -> bool:
        before = self.exposed.get(weight)
        return before is not None and not torch.equal(_bytes_of(before), _bytes_of(data_of(weight.there)))


class HeldUnit(Unit):
    """Weights that stay on the device in the type that computes, while the host has and steps the true ones."""

    is_held = True

    def show(self, here: Any = None) -> None:
        if self.is_stale():
            self.evict()
        super().show(here)


class ResidentUnit(Unit):
    """Weights that never leave the device, where their truth is: the host has their bytes once they were read."""

    is_held = is_resident = True

    def _allocate(self) -> None:
        """Allocate nothing: the host has bytes of what was read alone."""

    def _take_bytes(self, weight: Weight) -> None:
        host = weight.host
        weight.wire = torch.empty_strided(host.shape, dense_strides(host.data), dtype=host.dtype, device="cpu")
        weight.wire.untyped_storage().resize_(0)
        self.sources.append(host.data)
        host.data = weight.wire
        weight.value = host.detach()
        weight.is_ahead = True

    def replace(self, weight: Weight, host: Any) -> None:
        super().replace(weight, host)
        with torch.no_grad():
            self._on_device(weight).copy_(self.sources.pop())

    def load(self, here: Any) -> None:
        """Copy the weights up, and drop the host's bytes."""
        self.memory.allocate(here)
        self.device.counters.bytes_up += self.nbytes
        with without_dispatch(), torch.no_grad(), torch.inference_mode(False):
            for weight, source in zip(self.weights, self.sources, strict=True):
                self._on_device(weight).copy_(source)
        self.sources.clear()
        self.memory.arrived = here.record_event()
        self._stamp = self._now()

    def _on_device(self, weight: Weight) -> Tensor:
        return self.memory.flat.view(weight.dtype).as_strided(*weight.form)

    def show(self, here: Any = None) -> None:
        if self.memory.state is not Presence.ABSENT and self.is_stale():
            self._refresh()
        super().show(here)

    def is_stale(self) -> bool:
        return self._stamp != self._now()

    def _refresh(self) -> None:
        """Copy up what the host has written; the memory and the leaves stay."""
        self._stamp = self._now()
        with without_dispatch(), torch.no_grad(), torch.inference_mode(False):
            for weight, version in zip(self.weights, self._stamp[1], strict=True):
                if weight.is_ahead:
                    continue
                # A graph of a backward that is differentiated may have the memory, which is not to change in vain.
                there, new = self._on_device(weight), weight.value.to(self.memory.flat.device)
                if version != weight.shown or not torch.equal(_bytes_of(there), _bytes_of(new)):
                    there.copy_(new)
            show_versions(self.weights, self._stamp[1])

    def evict(self) -> None:
        """Bring all bytes down, and let go of the memory on the device. Called at the end of the stream."""
        for weight in self.weights:
            self.before_host_access(weight)
        super().evict()

    def before_host_access(self, weight: Weight) -> None:
        """Bring a weight's bytes down if the device has newer ones."""
        if weight.is_ahead:
            if self.memory.state is Presence.ABSENT:
                self.show()
            self.wait_step()
            weight.is_ahead = False
            storage = weight.wire.untyped_storage()
            if not storage.nbytes():
                storage.resize_(weight.nbytes)
            with without_dispatch(), torch.no_grad():
                weight.wire.copy_(self._on_device(weight))
        self.window.look_again(self)

    def keep_write(self, weight: Weight) -> None:
        """Note that the device has newer bytes of a weight than the host."""
        weight.is_ahead = True
        with without_dispatch():
            increment_version(weight.value)
        weight.shown = weight.value._version
        self._stamp = self._now()


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return a tensor without gaps as its bytes, in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _without_bytes(like: Tensor, device: torch.device) -> Tensor:
    empty = torch.empty_like(like, device=device, requires_grad=False)
    empty.untyped_storage().resize_(0)
    return empty
