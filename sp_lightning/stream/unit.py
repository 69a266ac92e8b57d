"""A unit: weights that travel as one, in a page-locked slab on the host and in fresh memory on the device.

- Only `evict` lets go of the unit's memory on the device (residency.py). The window calls it, between visits; a held
  unit does so itself where its weights were written.
- A unit on the device is stale when its weights' versions have moved since the copy, or its epoch, which steps move
  and writes that no version shows.
- Whatever writes to the slab first waits for copies that read it (`wait_copy`), and for the unit's step (`wait_step`).
- A load of a unit that is being stepped takes memory at once; the last of its steps starts the copy, as it ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..compat.dynamo import wait_beside_compilation
from ..compat.torch import without_dispatch
from ..host.device import Arrival, Device, aligned, dense_strides
from ..host.room import UnitNumbers
from ..host.telemetry import NOT_RECORDED
from ..store.store import FiledWeights
from .lazy import data_of, requires_grad_of, set_requires_grad, stored_version, version_of
from .leaf import Absent, Leaf, Weight, stepped_already
from .residency import NO_BYTES, Presence, Residency
from .wholes import WholeWeight

Stamp: TypeAlias = tuple[int, list[int]]  # epoch and versions of a unit's weights


class Pending:
    """The steps of a unit that may not have ended, and an action that waits for the last of them."""

    def __init__(self) -> None:
        self.last: Future[None] | None = None  # the last step's future; None once something has waited for it
        self._count = 0  # steps that are under way
        self._then: Callable[[], None] | None = None  # the action that waits for the last step
        self._lock = threading.Lock()

    def begin(self, submit: Callable[[], Future[None]]) -> Future[None]:
        """Start a step by calling ``submit``, and count the step as under way until `end`."""
        with self._lock:
            self._count += 1
        last = submit()
        with self._lock:
            self.last = last
        return last

    def end(self) -> None:
        """Count a step as ended; after the last one, run the action that waits. Called by the step's thread."""
        with self._lock:
            self._count -= 1
            if not self._count and self._then is not None:
                then, self._then = self._then, None
                then()

    def after(self, action: Callable[[], None]) -> None:
        """Run an action now, or on the step's thread as the last step under way ends. Does not wait for steps."""
        with self._lock:
            if self._count:
                self._then = action
            else:
                action()

    def cancel(self) -> None:
        """Drop the action that waits for the last step. Blocks while that action runs."""
        with self._lock:
            self._then = None

    def wait(self) -> None:
        """Wait until no step is under way; raise the last step's error."""
        if (last := self.last) is not None:
            try:
                if not last.done():
                    wait_beside_compilation(last)
                last.result()
            finally:
                with self._lock:  # another thread may wait or begin a step; an interrupt ends only the wait
                    if self.last is last and last.done():
                        self.last = None


class Unit:
    """Weights that travel between host and device as one."""

    is_held = False  # whether the window lets the unit stay on the device
    is_resident = False  # whether the weights' truth is on the device

    def __init__(
        self,
        index: int,
        name: str,
        weights: list[Weight],
        device: Device,
        window: Any,
        filed: FiledWeights | None = None,
    ) -> None:
        weights = sorted(weights, key=lambda weight: weight.place is not None)  # file-backed ones behind the slab's
        self.index, self.name, self.weights, self.device, self.window = index, name, weights, device, window
        self.nbytes = sum(aligned(weight.nbytes) for weight in weights)
        self._filed = filed
        self.spill: Any = None  # the files to which gradients go (store.py); None: memory
        self.wholes: list[WholeWeight] = []  # quantised weights that consist of this unit's tensors
        self.steps = Pending()
        self.depth = 0  # 1 while a call of the unit's modules is under way, else 0
        self.bound = 0  # calls under way during which the modules have the leaves
        self.calls = 0  # forwards since steps beside backward began
        self.epoch = 0  # counts steps, and host writes that no version shows
        self.is_exposed = False  # whether the user may have an array over the bytes, which cannot wait for a step
        self.is_final = False  # stepped beside this backward, which may go on to use the old bytes on the device
        # Copies of leaves whose `.data` the user read in this call: writes to `.data` move no version.
        self.exposed: dict[Weight, Tensor] = {}
        # What reads of `.data` gave for leaves in another type, with its version.
        self.copies: list[tuple[Weight, Tensor, int]] = []
        self._before_access: Stamp | None = None  # at the host's first access since the wire copies were made
        self._has_stale_wires = False  # whether the wire copies are to be made anew
        self._copied: Arrival | None = None  # the end of the last copy up; None once the host has waited for it
        self._stamp: Stamp | None = None  # of the bytes that were copied up; None: the copy has not begun
        self.sources: list[Tensor] = []  # resident weights' bytes, until the first load
        self.stepped: Stamp | None = None  # as the last step left the weights, if the truth is not the slab itself
        self._allocate()
        at, blank = 0, device.empty(self.nbytes)
        for weight in weights:
            weight.unit, weight.at = self, at
            self._adopt(weight, blank)
            at += aligned(weight.nbytes)
        blank.untyped_storage().resize_(0)
        self.memory = Residency(device, weights, self.nbytes)
        self._note_tensors()
        self._dispatching: list[Any] = [leaf for leaf in self._leaves if type(leaf) is Absent]  # absent outside calls
        # DTensor parameters, by their index in the list of weights.
        self.sharded = [(index, weight.host) for index, weight in enumerate(weights) if weight.is_shard]
        self.note_slots()

    # ---- making

    def _allocate(self) -> None:
        """Allocate the slab for the weights that are in memory, and find its truth, which ranks share."""
        nbytes = sum(aligned(weight.nbytes) for weight in self.weights if weight.place is None)
        self.slab = self.device.slab(nbytes) if nbytes else NO_BYTES
        self.truth = self.device.slabs.truth(self.slab) if nbytes else NO_BYTES

    def _adopt(self, weight: Weight, blank: Tensor) -> None:
        """Move a parameter's bytes into the slab, and make its leaf, which shows a range of ``blank`` while absent."""
        with torch.inference_mode(False):
            self._take_bytes(weight)
            weight.form = weight.wire.shape, weight.wire.stride(), weight.at // weight.dtype.itemsize
            empty = torch.empty(0, dtype=weight.dtype, device=blank.device)  # with a version of its own
            weight.blank = empty.set_(blank.untyped_storage(), weight.form[2], *weight.form[:2])
            weight.make_leaf()

    def _take_bytes(self, weight: Weight) -> None:
        """Copy a parameter's bytes into the slab in the type that travels, and set the weight's host tensors.

        Bytes that are in a file stay there.
        """
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
        """Put another parameter of the same form in a weight's place; backwards that saved the old bytes raise."""
        weight.host = host
        with torch.inference_mode(False), without_dispatch():
            self._take_bytes(weight)
            increment_version(weight.there)  # a backward that saved the old bytes raises
            set_requires_grad(weight.leaf, host.requires_grad)
        weight.leaf.__dict__ = host.__dict__
        weight.shown = weight.value._version
        self._note_tensors()
        self.epoch += 1

    def _note_tensors(self) -> None:
        """List parameters, host bytes and leaves, and the tensors whose versions show writes on the device."""
        self._hosts: list[Any] = [weight.host for weight in self.weights]
        self._values = [weight.value for weight in self.weights]
        self._leaves: list[Any] = [weight.leaf for weight in self.weights]
        self._there = [weight.leaf if weight.is_shard else weight.there for weight in self.weights]

    def note_slots(self) -> None:
        """List the slots of modules that hold the unit's parameters, after modules have changed."""
        self._slots = [(index, *slot) for index, weight in enumerate(self.weights) for slot in weight.slots]
        # Weights whose gradients come: the user has replaced those without slots.
        self.trained = sum(bool(weight.slots) and requires_grad_of(weight.host) for weight in self.weights)

    def numbers(self) -> UnitNumbers:
        """Return the unit's sizes: bytes of weights up and of gradients down, trained parameters; whether it stays."""
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
        """Allocate memory on the stream ``here``, and start the copy up: now, or as the unit's pending steps end."""
        self.memory.allocate(here)
        self._stamp = None
        self.device.counters.fetches += 1
        self.steps.after(self._copy)

    def _copy(self) -> None:
        """Queue the copy of the slab, and of bytes in files, to the device; note the versions that were copied."""
        if self._may_have_stale_wires() or self._has_stale_wires:
            self._cast()
        source = self.slab if self.is_edited() else self.truth
        flat, stamp = self.memory.flat, self._now()
        copied = self.device.send_up(flat[: self.slab.nbytes], source, self.name, "weights")
        if self._filed is not None:
            copied = self._filed.send_up(flat, copied, stamp)
        self.memory.arrived = self._copied = copied
        self._stamp = stamp

    def _now(self) -> Stamp:
        """Return the epoch and the current versions of the weights on the host."""
        versions = list(map(stored_version, self._values))
        for index, host in self.sharded:
            versions[index] += stored_version(host)
        return self.epoch, versions

    def is_stale(self) -> bool:
        """Whether the host's weights have changed since the copy to the device, or the copy has failed.

        False while a backward beside the unit's step uses the old bytes.
        """
        if self.memory.state is Presence.ABSENT or self.is_final or self._stamp is None:
            return False
        has_failed = self._filed is not None and self._filed.has_failed
        return has_failed or self._stamp != self._now()

    @property
    def is_past_step(self) -> bool:
        """Whether the device has the weights as stepped beside this backward, because the unit was loaded again."""
        return self.is_final and self._stamp == self._now()

    def is_edited(self) -> bool:
        """Whether the slab is to be read: it is the truth itself, or the user may have written to it since a step."""
        return self.truth is self.slab or self.stepped != self._now()

    def _cast(self) -> None:
        """Make the wire copies in another type anew from the weights. Waits for copies that read them."""
        self._has_stale_wires = False
        self.wait_copy()
        for weight in self.weights if self.is_edited() else ():
            if weight.is_narrow:
                weight.wire.copy_(weight.value)

    def show(self, here: Any = None) -> None:
        """Show the unit's bytes in the leaves to work on the stream ``here`` (the caller's); load an absent unit.

        Blocks while the unit's step is under way, but not in the backward beside which it runs: that uses old bytes.
        """
        here = self.device.current_stream() if here is None else here
        if self.memory.state is Presence.ABSENT:
            self.load(here)
        if self.steps.last is not None and (self._stamp is None or not self.is_final):
            self.wait_step()
        if here != self.memory.shown_on:
            assert self._stamp is not None
            self.memory.show(here, self._stamp[1])
            if self.depth:
                self._set_class(Leaf)

    def evict(self) -> None:
        """Release the unit's memory on the device, and cancel a copy up that waits for a step."""
        self.steps.cancel()
        self.device.counters.evictions += self.memory.state is not Presence.ABSENT
        self.memory.release()
        if self.depth:
            self._set_class(Absent)
        if self.wholes:
            self._note_tensors()  # parts got new leaves: code that kept the old ones keeps the memory

    # ---- on the host

    def wait_copy(self) -> None:
        """Block until no copy up reads the slab, so that the slab may be written."""
        if (copied := self._copied) is not None:
            copied.synchronize()
            if self._copied is copied:  # else another thread has begun a new copy
                self._copied = None

    def before_host_access(self, weight: Weight) -> None:
        """Wait for steps and copies of the unit, so that the host may read and write a weight's bytes.

        Raises for a weight that was stepped beside this backward.
        """
        if self.is_final and weight.is_stepped_early:
            raise stepped_already(weight.name)
        self.wait_step()
        self.wait_copy()
        if self._before_access is None:
            self._before_access = self._now()
        self.window.look_again(self)

    def _may_have_stale_wires(self) -> bool:
        """Whether the host may have written weights since their wire copies were made; the next call looks anew."""
        before, self._before_access = self._before_access, None
        return before is not None and (self.is_exposed or before != self._now())

    def keep_write(self, weight: Weight) -> None:
        """Copy a weight that was written on the device to the host; raise if the write would be lost. Blocks."""
        self.device.counters.nbytes["down"] += weight.nbytes
        self.wait_copy()
        if weight.is_narrow:
            if have_other_bytes(weight.there.detach().to("cpu"), weight.wire):
                raise weight.lost_write()
            return
        with torch.no_grad(), without_dispatch():
            weight.value.copy_(weight.there)
            if weight.is_shard:
                increment_version(weight.there)  # torch moved only the version of the DTensor
        self._stamp = self._now()
        weight.shown = self._stamp[1][self.weights.index(weight)]

    # ---- steps

    def begin_step(self, step: Callable[[], Future[None]]) -> Future[None]:
        """Start a step of this unit by calling ``step``; copies on the device are stale from here on."""
        self._has_stale_wires |= self._may_have_stale_wires()  # a step may leave some wire copies as they are
        self.epoch += 1
        return self.steps.begin(step)

    def note_stepped(self) -> None:
        """Note the current versions as those of the truth: what is written to the slab later is an edit."""
        self.stepped = self._now()

    def wait_step(self) -> None:
        """Wait until no step of the unit is pending; raise the error of one that failed."""
        if (last := self.steps.last) is not None:
            with NOT_RECORDED if last.done() else self.device.counters.stall("optimizer"):
                self.steps.wait()

    # ---- the modules' parameters

    def bind(self) -> list[int]:
        """Put the leaves into the modules for a call of the unit; return their versions, for `written_since`."""
        self._set_class(Leaf)
        with without_dispatch():
            self.lend()
            return list(map(stored_version, self._there))

    def _set_class(self, kind: type[Leaf]) -> None:
        """Have functions use the leaves as they are (`Leaf`), or bring the unit first (`Absent`)."""
        for leaf in self._dispatching:
            leaf.__class__ = kind

    def lend(self) -> None:
        """Put the leaves into the modules without loading the unit; a function that gets one loads the unit."""
        self.bound += 1
        if self.bound == 1:
            self._exchange(self._hosts, self._leaves)
            for whole in self.wholes:
                whole.bind()

    def unbind(self) -> None:
        """Undo a `bind`: functions that get a leaf bring the unit first from here on."""
        self._set_class(Absent)
        self.take_back()

    def take_back(self) -> None:
        """Undo one `bind` or `lend`; the last one puts the user's parameters back into the modules."""
        self.bound = max(0, self.bound - 1)  # 0 if binding failed
        if not self.bound:
            self._exchange(self._leaves, self._hosts)
            for whole in self.wholes:
                whole.unbind()

    def _exchange(self, there: list[Any], given: list[Any]) -> None:
        """Replace tensors in the modules by those of the same index, unless the user's code has put others there."""
        for index, holder, key in self._slots:
            if holder.get(key) is there[index]:
                holder[key] = given[index]

    def written_since(self, versions: list[int]) -> list[Weight]:
        """List the weights that the user's forward wrote to, and raise for writes that are lost.

        Blocks if the forward read `.data`: the bytes are compared.
        """
        copies, exposed = self.copies, self.exposed
        self.copies, self.exposed = [], {}
        for weight, data, version in copies:
            if version_of(data) != version:
                raise weight.lost_write()
        with without_dispatch():
            now = list(map(stored_version, self._there))
            if now == versions and not exposed:
                return []
            return [
                weight
                for weight, before, after in zip(self.weights, versions, now, strict=True)
                if before != after or (weight in exposed and have_other_bytes(exposed[weight], data_of(weight.there)))
            ]


def have_other_bytes(*alike: Tensor) -> bool:
    """Whether two tensors of one form, without gaps, have other bytes. Blocks."""
    one, other = (tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8) for tensor in alike)
    return not torch.equal(one, other)
