"""Tensors that autograd saves inside units: weights as references to their unit, the rest as the policy says.

While a unit runs, saved tensors pass `SavedTensors`. A weight is saved as a reference: its unit, and its range of the
unit's bytes. The unit is visited when backward unpacks the reference, so the graph keeps no memory of weights. Hooks of
other code (a checkpoint of the user's around the unit or inside) get all other tensors.
"""

from __future__ import annotations

import contextlib
import operator
import weakref
from bisect import bisect_right
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from ..compat.dynamo import never_compiled_hook
from ..compat.tensors import consists_of_tensors, flattened
from ..compat.torch import storage_id, top_hooks
from ..errors import ExactnessError
from ..host.device import Arrival, Device, Ring, dense_strides
from .leaf import NO_CONTEXT, Weight, stepped_already, written_between
from .residency import shown

SMALLEST = 1 << 10  # bytes; less is not worth a copy
UNPACK: Callable[[Any], Tensor] = operator.methodcaller("get")  # `get` of the object that `pack` returned


class Kept:
    """A saved tensor that stays where it is. `detach` shares its version, so writes are found as in a plain run."""

    __slots__ = ("_now", "_shape", "_version", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor.detach()
        self._shape = tensor.shape
        self._version = self._now = tensor._version

    def release(self) -> Tensor:
        """Drop the reference to the tensor, of which another form is kept from here on, and return the tensor."""
        assert self.tensor is not None
        tensor, self.tensor = self.tensor, None
        self._now = tensor._version
        return tensor

    @never_compiled_hook
    def get(self) -> Any:
        """Return the tensor; raise torch's own error if it was written in place since, or until `release`."""
        now = self._now if self.tensor is None else self.tensor._version
        if now != self._version:
            raise written_error(now, self._version, self._shape)
        return self.tensor


def written_error(version: int, expected: int, shape: torch.Size) -> RuntimeError:
    """Make torch's own error for a saved tensor, of this shape, that was written in place before backward."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of"
        f" shape {list(shape)} is at version {version}; expected version {expected} instead"
    )


class SavedWeight:
    """A saved weight, or a view of one, as a reference to its unit, which is brought to the device in backward."""

    __slots__ = ("edits", "place", "version", "weight")

    def __init__(self, tensor: Tensor, weight: Weight) -> None:
        self.weight, self.version, self.edits = weight, weight.there._version, weight.edits
        self.place = tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()

    @never_compiled_hook
    def get(self) -> Tensor:
        """Visit the unit, and return the weight or view on the device; raise if it was stepped or written since."""
        unit = self.weight.unit
        unit.window.visit(unit)
        if self.weight.is_stepped_early and (unit.is_past_step or not unit.is_final):
            raise stepped_already(self.weight.name)
        dtype, shape, stride, offset = self.place
        there = self.weight.there
        if (there._version, self.weight.edits) != (self.version, self.edits):
            if self.weight.is_lent and not unit.is_final:
                raise written_between(self.weight.name)
            if there._version != self.version:
                raise written_error(there._version, self.version, shape)
        memory: Tensor = unit.memory.flat
        return memory.view(dtype).as_strided(shape, stride, offset)


class SavedWhole:
    """A saved weight that consists of several tensors, or its transpose: each of the tensors is packed by itself."""

    __slots__ = ("device", "form", "parts")

    def __init__(self, form: Any, parts: list[Any], device: torch.device) -> None:
        self.form, self.parts, self.device = form, parts, device

    @never_compiled_hook
    def get(self) -> Tensor:
        """Unpack the tensors, and return the weight that is made again of them."""
        whole: Tensor = self.form.whole(map(UNPACK, self.parts), self.device)
        return whole


class Trip:
    """The tensors that one unit's forward saved and offloads: to the host in forward, back to the device in backward.

    Each trip knows the one before, whose tensors backward needs next.
    """

    def __init__(self, device: Device, before: Callable[[], Trip | None]) -> None:
        self._device = device
        self._before = before  # returns the trip of the unit before; None: its graph was freed
        self._saved: dict[Any, Moved] = {}
        self._stream = device.current_stream()  # the forward's; after `fetch` that of the memory of the copies
        self._is_on_others = False  # whether tensors were saved on streams of the user's
        self._arrivals: list[Arrival] = []  # ends of the copies to the device
        self._waiting: Any = device.up  # the stream that waited for these copies last; the up stream: none
        self._arriving: list[Tensor] = []  # memory that may not be freed before compute waits for the copies into it
        self._ring: Ring | None = None  # keeps the copied tensors on the device; set when the forward ends

    def add(self, tensor: Tensor) -> Moved:
        """Start to copy a saved tensor to the host; one that is saved several times is copied once."""
        where = tensor.untyped_storage().data_ptr(), tensor.storage_offset()
        key = (*where, tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        if key not in self._saved:
            here = self._device.current_stream()
            self._is_on_others |= here != self._stream
            self._saved[key] = Moved(self, tensor, self._device, here)
        return self._saved[key]

    def close(self, ring: Ring) -> None:
        """End the forward: the ring releases the tensors on the device behind their copies to the host."""
        self._ring = ring
        if self._saved:
            moved = list(self._saved.values())
            sources = [one.release() for one in moved]
            for source in sources if self._is_on_others else ():
                self._device.keep_for(source, self._device.down)  # it may be allocated on any stream
            ring.hold(sources, [one.went_down for one in moved], self._stream)

    def fetch(self) -> None:
        """Start to copy all tensors back to the device. Out of memory raises, and the next call copies the rest."""
        if not self._saved:
            return
        if self._ring is not None:
            self._ring.let_go()  # frees memory for the tensors that come back now
        self._stream = self._device.current_stream()
        for key in list(self._saved):
            there, arrival = self._saved[key].fetch()
            del self._saved[key]
            self._arriving.append(there)
            self._arrivals.append(arrival)

    def wait(self, there: Tensor) -> None:
        """Make compute wait for the unit's saved tensors, and start to fetch the saved tensors of the unit before."""
        if (here := self._device.current_stream()) != self._waiting:
            self._waiting = here
            listener = self._device.counters.listener
            with NO_CONTEXT if listener is None else listener.waiting("activations"):
                self._wait_arrivals(here)
        if here != self._stream:
            self._device.keep_for(there, here)
        if (before := self._before()) is not None:
            with contextlib.suppress(torch.OutOfMemoryError):  # backward fetches them when they are needed
                before.fetch()

    def _wait_arrivals(self, stream: Any) -> None:
        """Make a stream wait for all copies to the device that were started."""
        for arrival in self._arrivals:
            arrival.wait(stream)
        self._arriving = []

    def __del__(self) -> None:
        if self._arriving:
            self._wait_arrivals(self._stream)  # the graph was dropped: the memory goes back to its pool


class Moved(Kept):
    """A saved tensor that is in host memory between forward and backward; making the object starts the copy there."""

    __slots__ = ("_device", "_form", "_here", "_there", "_trip", "went_down")

    def __init__(self, trip: Trip, tensor: Tensor, device: Device, here: Any) -> None:
        super().__init__(tensor)  # until the forward ends: its address is a key in its trip
        self._trip, self._device = trip, device
        self._form = tensor.shape, tensor.stride(), tensor.dtype
        self._here: Tensor | None = device.passing(tensor.nbytes)
        self._there: Tensor | None = None
        device.down.wait_event(here.record_event())
        flat = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        self.went_down = device.send_down(self._here, flat, phase="activations")

    def fetch(self) -> tuple[Tensor, Arrival]:
        """Start to copy the tensor back, behind its copy to the host; return its device memory and the copy's end."""
        assert self._here is not None
        device, there = self._device, self._device.empty(self._here.nbytes)
        device.after_compute(device.up)
        arrival = device.send_up(there, self._here, phase="activations", after=self.went_down)
        self._there, self._here = there, None
        return there, arrival

    @never_compiled_hook
    def get(self) -> Any:
        """Fetch the unit's saved tensors, and return this one; raise torch's own error if it was written in place."""
        if super().get() is not None:
            return self.tensor  # the forward is under way, and a backward inside of it
        self._trip.fetch()
        assert self._there is not None
        self._trip.wait(self._there)
        shape, stride, dtype = self._form
        return self._there.view(dtype).as_strided(shape, stride)


class Handed(Kept):
    """A saved tensor that outer hooks packed, such as a checkpoint's."""

    __slots__ = ("packed", "policy", "unpack")

    def __init__(self, tensor: Tensor, hooks: Any, policy: Activations) -> None:
        self.packed, self.unpack, self.policy = hooks[0](tensor), hooks[1], policy
        super().__init__(tensor)

    @never_compiled_hook
    def get(self) -> Any:
        """Unpack the tensor by the outer hooks; if a second run of a unit's forward differed, name the unit."""
        super().get()
        try:
            return self.unpack(self.packed)
        except CheckpointError as error:
            if not self.policy.repeated:
                raise  # the error is that of a checkpoint of the user's
            raise ExactnessError(
                f"{self.policy.repeated} ran again in backward, and not as it did before: its second run saved other"
                " tensors than its first; use activations='keep' or 'offload'"
            ) from error


class SavedTensors(torch.autograd.graph.saved_tensors_hooks):
    """The saved-tensor hooks under which a unit runs: weights become references, the rest follows the policy."""

    unpack_hook = staticmethod(UNPACK)

    def __init__(self, policy: Activations, trip: Trip | None = None, outer: Any = None) -> None:
        self._policy, self._trip = policy, trip
        self.outer = outer  # hooks of other code, which get all tensors but weights
        self._handed: list[Handed] = []  # tensors that went to them

    @never_compiled_hook
    def pack_hook(self, tensor: Tensor) -> Any:
        """Pack a saved tensor: a weight as a reference, another by outer hooks, on the host, or as it is."""
        if type(tensor) is not Tensor and consists_of_tensors(tensor):
            return self._pack_whole(tensor)
        memory = shown.get(storage_id(tensor.untyped_storage())) if tensor.layout is torch.strided else None
        if memory is not None:
            weight = memory.weights[bisect_right(memory.places, tensor.storage_offset() * tensor.itemsize) - 1]
            is_as_shown = weight.is_shard or tensor._version == weight.there._version  # a shard's view has its own
            if is_as_shown and not tensor.is_conj() and not tensor.is_neg():
                if (here := self._policy.device.current_stream()) != memory.home:  # a stream of the user's
                    self._policy.device.keep_for(memory.flat, here)
                return SavedWeight(tensor, weight)
        if self.outer is not None:
            handed = Handed(tensor, self.outer, self._policy)
            self._handed.append(handed)
            return handed
        if self._trip is not None and self._policy.moves(tensor):
            return self._trip.add(tensor)
        return Kept(tensor)

    def _pack_whole(self, tensor: Tensor) -> Any:
        """Pack a tensor that consists of several tensors: each by itself if any of them is a weight."""
        form, parts = flattened(tensor)
        if not any(storage_id(part.untyped_storage()) in shown for _, part in parts):
            return Kept(tensor)
        return SavedWhole(form, [self.pack_hook(part) for _, part in parts], self._policy.device.torch_device)


class SavedInside(SavedTensors):
    """The same hooks inside of hooks of other code, for one call."""

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        for handed in self._handed:
            handed.release()
        self._handed.clear()


class Activations:
    """The policy for saved activations between forward and backward: keep, offload or recompute."""

    def __init__(self, policy: str, device: Device) -> None:
        self.recomputes, self.offloads = "recompute" in policy, "offload" in policy
        self.device = device
        self.is_repeated = False  # whether the forward that runs now runs again in backward
        self.repeated = ""  # the name of the unit that was last run to be repeated
        self.ring, self._hooks = Ring(), SavedTensors(self)
        self._last: Callable[[], Trip | None] = lambda: None

    def saving(self) -> Any:
        """Return the hooks to enter while weights are used; an empty context if ours are active or grad mode is off."""
        if not torch.is_grad_enabled():
            return NO_CONTEXT
        top = top_hooks(False)
        if top is None:
            return self._hooks
        is_ours = isinstance(getattr(top[0], "__self__", None), SavedTensors)
        return NO_CONTEXT if is_ours else SavedInside(self, outer=top)

    def moves(self, tensor: Tensor) -> bool:
        """Whether a saved tensor is offloaded: it is on the device, large enough, and has no gaps or overlaps."""
        return (
            tensor.layout is torch.strided
            and not tensor.is_nested
            and tensor.nbytes >= SMALLEST
            and tensor.device == self.device.torch_device
            and not isinstance(tensor, nn.Parameter)
            and not tensor.is_conj()
            and not tensor.is_neg()
            and (tensor.is_contiguous() or tensor.stride() == dense_strides(tensor))
        )

    def run(self, repeat: Callable[..., Any], call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a unit's forward with its activations offloaded, recomputed, both or neither, as the options say.

        Inside of the user's own checkpoint, just call it. ``repeat`` runs a forward so that backward runs it again.
        """
        if not (self.recomputes or self.offloads):
            return call(*args, **kwargs)
        top = top_hooks(False)
        ours = None if top is None else getattr(top[0], "__self__", None)
        if (ours.outer if isinstance(ours, SavedTensors) else top) is not None:  # inside a checkpoint of the user's
            return call(*args, **kwargs)  # which saves or repeats the unit's tensors itself
        if not self.offloads:
            return repeat(call, args, kwargs, Kept, self)
        trip = Trip(self.device, self._last)
        self._last = weakref.ref(trip)
        hooks = SavedTensors(self, trip)
        try:
            with hooks:
                return repeat(call, args, kwargs, hooks.pack_hook, self) if self.recomputes else call(*args, **kwargs)
        finally:
            trip.close(self.ring)
