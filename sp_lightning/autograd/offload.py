"""``activations="offload"``: tensors that autograd saved inside a unit wait on the host for the unit's backward.

1. Each tensor goes down once, however often it was saved, and comes up once, to an address of the same alignment:
   kernels are chosen by it.
2. A device tensor is kept until the caller's stream waited for its copy, at the end of the next unit: dropped earlier,
   its memory would be given to another tensor while the copy reads it. Until then code may write to it, even after its
   unit, and the copy holds either bytes. Such a tensor is *overtaken*, and unpacking it is an error.
3. On the way up, memory is allocated on the caller's stream, which frees it later; the up stream waits for the kernels
   that may still use it. A tensor that came up and is not unpacked, because its gradient is not needed, is kept until
   backward ends: that stream waits for the copy before its memory is given out again.
4. Units may be called on several of the caller's streams. Then the allocator is told which other stream uses a tensor.
   A copy through staging buffers, which is on a stream of its own, keeps what it copies until it ended.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..compat.tensors import FLATTEN, arrived, is_zero_tensor, storage_id
from ..host.telemetry import Counters
from ..host.unit_numbers import ALIGNMENT, aligned
from ..memory.device import Device
from ..memory.layout import Field
from ..memory.staging import Arrival
from ..memory.watched_parameters import quietly


class PlaceOnHost:
    """The host memory of a saved tensor."""

    def __init__(self, device: Device, counters: Counters, source: Tensor) -> None:
        """Start the copy of a row of bytes on the device to the host."""
        self._device, self._counters = device, counters
        self.nbytes = source.nbytes
        self._host = device.passing(source.nbytes)
        under_way = counters.listener.work("down", "", "activations", source.nbytes)
        self.arrived = device.send_down([(self._host, source)], under_way)

    def send(self, target: Tensor) -> Arrival:
        """Start the copy of the bytes to a row on the device, once they are on the host."""
        under_way = self._counters.listener.work("up", "", "activations", target.nbytes)
        return self._device.send_up([(target, self._host)], under_way, after=self.arrived)


@dataclass(eq=False)
class OffloadedTensor:
    """A saved tensor on the host: the bytes that it spans, and its shape and strides."""

    like: Field
    version: int
    first: int  # byte of an aligned block at which the tensor begins
    place: PlaceOnHost
    source: Tensor | None  # the device tensor, kept for the copy (Rule 2); detached, as it may lead to what saved it
    uses: int = 1
    overtaken: bool = False  # Rule 2
    unpacks_left: int = 0  # until the device copy can be dropped
    device: Tensor | None = field(default=None)
    ready: Any = None  # event on the up stream: the device copy is filled
    stream: Any = None  # of the caller, on which the memory of the device copy was allocated


class Offload:
    """The saved tensors of units on their way to the host and back (Rule 1)."""

    def __init__(self, device: Device, counters: Counters) -> None:
        self.device = device
        self.counters = counters
        self._there: weakref.WeakSet[PlaceOnHost] = weakref.WeakSet()
        self.active = False  # whether a unit's forward is running, whose saved tensors go down
        self._visit: dict[Any, OffloadedTensor] = {}  # saved by the running unit
        self._left: list[OffloadedTensor] = []  # by the unit before
        self._streams: list[Any] = []  # on which units were called (Rule 4)
        self._not_unpacked: set[OffloadedTensor] = set()  # on the device again, or on their way

    @property
    def host_nbytes(self) -> int:
        """Bytes of host memory that saved tensors have."""
        return sum(place.nbytes for place in self._there)

    def begin(self) -> None:
        """Begin a unit's forward: what autograd saves from here on goes down."""
        self.active = True

    def end(self) -> list[OffloadedTensor]:
        """End a unit's forward and return its saved tensors. Drops the device tensors of the unit before (Rule 2)."""
        self.active = False
        self.let_go()
        self._left, self._visit = list(self._visit.values()), {}
        return self._left

    def let_go(self) -> None:
        """Order the caller's stream after the copies of the unit before, and drop its device tensors."""
        if self._left:
            with self.counters.listener.waiting("activations"):
                for saved in self._left:
                    saved.place.arrived.wait(self.device.compute)
                    saved.overtaken = saved.source is not None and saved.source._version != saved.version
                    saved.source = None
        self._left = []

    def finish(self) -> None:
        """Drop all device tensors: no unit saves any more."""
        self.active = False
        self._left, self._visit = [*self._left, *self._visit.values()], {}
        if self._left:
            with quietly():
                self.let_go()

    def backward_done(self) -> None:
        """End a backward: drop what came up and was not unpacked (Rule 3)."""
        not_unpacked, self._not_unpacked = self._not_unpacked, set()
        for saved in not_unpacked:
            saved.ready.wait(saved.stream)
            saved.device = None

    def pack(self, tensor: Tensor) -> Any:
        """Start a tensor's way down, and return what stands for it.

        Tensors saved outside of units, small ones, those on another device, and those that are more or less than their
        bytes (sparse, conjugated, made of tensors) stay as they are.
        """
        if not self.active or not self.device.holds(tensor) or tensor.layout is not torch.strided:
            return tensor
        if tensor.is_nested or tensor.is_conj() or tensor.is_neg() or is_zero_tensor(tensor):
            return tensor
        source = arrived(tensor) if hasattr(type(tensor), FLATTEN) else tensor
        if hasattr(type(source), FLATTEN):
            return tensor
        span = _span(source)
        if span.numel() * span.element_size() < ALIGNMENT:
            return tensor
        place = storage_id(span.untyped_storage()), span.storage_offset()
        key = (*place, tensor.dtype, tensor.shape, tensor.stride(), tensor._version)
        saved = self._visit.get(key)
        if saved is None:
            saved = self._visit[key] = self._send(tensor, span)
            self._record_streams(saved)
        else:
            saved.uses += 1
        return saved

    def _send(self, tensor: Tensor, span: Tensor) -> OffloadedTensor:
        self.device.down.wait_event(self.device.compute.record_event())
        row = span.view(torch.uint8)
        place = PlaceOnHost(self.device, self.counters, row)
        self._there.add(place)
        self.counters.bytes_offloaded += row.nbytes
        like = Field("", tensor.dtype, tuple(tensor.shape), tensor.stride(), 0, row.nbytes)
        return OffloadedTensor(like, tensor._version, span.data_ptr() % ALIGNMENT, place, tensor.detach())

    def _record_streams(self, latest: OffloadedTensor) -> None:
        """Tell the allocator that the down stream reads tensors of several streams (Rule 4).

        The stream that waits for a copy need not be the one that the memory belongs to.
        """
        first_seen = self.device.compute not in self._streams
        if first_seen:
            self._streams.append(self.device.compute)
        if len(self._streams) > 1:
            for saved in (*self._left, *self._visit.values()) if first_seen else (latest,):
                if saved.source is not None:
                    saved.source.record_stream(self.device.down)

    def fetch(self, saved: OffloadedTensor) -> None:
        """Start a saved tensor's way up, if it has not begun."""
        if saved.device is not None:
            return
        size, nbytes = saved.like.dtype.itemsize, saved.like.nbytes
        block = torch.empty(ALIGNMENT + aligned(nbytes), dtype=torch.uint8, device=self.device.torch_device)
        offset = (saved.first - block.data_ptr()) % ALIGNMENT // size * size
        storage = block.untyped_storage()
        empty = torch.empty(0, dtype=saved.like.dtype, device=block.device)
        saved.stream = self.device.compute
        self.device.up.wait_event(saved.stream.record_event())  # the block's memory may still be in use there
        saved.ready = saved.place.send(block[offset : offset + nbytes])
        self.counters.bytes_brought_back += nbytes
        saved.device = empty.set_(storage, offset // size, saved.like.shape, saved.like.stride)
        saved.unpacks_left = saved.uses
        self._not_unpacked.add(saved)

    def unpack(self, saved: OffloadedTensor) -> Tensor:
        """Return a saved tensor on the device, with the caller's stream ordered after its bytes."""
        if saved.overtaken:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a tensor of shape {saved.like.shape}, while it was copied to the host"
            )
        self.fetch(saved)
        tensor = saved.device
        assert tensor is not None
        compute = self.device.compute
        with self.counters.listener.waiting("activations"):
            saved.ready.wait(compute)
        if saved.stream != compute:
            tensor.record_stream(compute)
        self._not_unpacked.discard(saved)
        saved.unpacks_left -= 1
        if not saved.unpacks_left:
            saved.device = None
        return tensor


def _span(tensor: Tensor) -> Tensor:
    """Return the memory from a tensor's first element to its last, as one row."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    length = 1 + sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), tensor.storage_offset(), (length,), (1,))
