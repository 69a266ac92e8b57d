"""``activations="offload"``: what autograd saved inside a unit waits on the host for its backward.

1. Each tensor goes down once, however often it was saved, and comes back once, to an address of the same alignment:
   kernels are chosen by it.
2. A device tensor is kept until the caller's stream waited for its copy, at the end of the next unit: dropped early,
   its memory would be given away while it is read. Written until then, by code that may do so after its unit, the copy
   may be of either: it was *overtaken*, and whoever needs it is told so.
3. On the way back, memory is taken on the caller's stream, which frees it later; the up stream waits for the kernels
   that may still use it. What came back and was not asked for, as its gradient was not, is kept until backward ends:
   that stream waits for the copy before its memory is given out again.
4. Units may be called on several streams of the caller's. Then the allocator is told who else uses a tensor.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..core.telemetry import Counters
from ..memory.device import Device
from ..memory.layout import ALIGNMENT, aligned


@dataclass(eq=False)
class OffloadedTensor:
    """A saved tensor on the host: the bytes that it spans, and how it looked."""

    like: Tensor  # on the meta device
    version: int
    first: int  # byte of an aligned block at which it begins
    host: Tensor
    arrived: Any  # on the host, recorded on the down stream; a way up that begins earlier carries old bytes
    uses: int = 1
    overtaken: bool = False  # Rule 2
    pending: int = 0  # unpackings until the device copy can go
    device: Tensor | None = field(default=None)
    ready: Any = None
    stream: Any = None  # whose memory the device copy is


class Offload:
    """Moves what units save to the host and back (Rule 1)."""

    def __init__(self, device: Device, counters: Counters) -> None:
        self.device = device
        self.counters = counters
        self.active = False  # whether what is saved now belongs to a unit as a whole
        self._visit: dict[Any, OffloadedTensor] = {}  # what the unit under way saved
        self._leaving: list[tuple[Tensor, OffloadedTensor]] = []  # its device tensors, kept until their copies are done
        self._left: list[tuple[Tensor, OffloadedTensor]] = []  # those of the unit before
        self._streams: list[Any] = []  # on which units were called
        self._on_host: weakref.WeakSet[OffloadedTensor] = weakref.WeakSet()
        self._unasked: set[OffloadedTensor] = set()  # what is on its way back

    @property
    def host_nbytes(self) -> int:
        """Of what is on the host now."""
        return sum(saved.host.untyped_storage().nbytes() for saved in self._on_host)

    def begin(self) -> None:
        """A unit's forward begins."""
        self.active = True

    def end(self) -> list[OffloadedTensor]:
        """It ends; what the one before saved may go once the caller's stream waited for its copies."""
        self.active = False
        self.let_go()
        self._left, self._leaving = self._leaving, []
        saved = list(self._visit.values())
        self._visit = {}
        return saved

    def let_go(self) -> None:
        """Drops device tensors whose copies the caller's stream now waits for."""
        if self._left:
            with self.counters.listener.waiting("activations"):
                for tensor, saved in self._left:
                    saved.arrived.wait(self.device.compute)
                    saved.overtaken = tensor._version != saved.version
        self._left = []

    def finish(self) -> None:
        """Nothing more is saved: all of them."""
        self.active = False
        self._left += self._leaving
        self._leaving, self._visit = [], {}
        self.let_go()

    def backward_done(self) -> None:
        """Nothing more is asked for (Rule 3)."""
        unasked, self._unasked = self._unasked, set()
        for saved in unasked:
            saved.ready.wait(saved.stream)
            saved.device = None

    def pack(self, tensor: Tensor) -> Any:
        """Starts the way down; small and foreign tensors stay as they are, and what is more or less than its bytes."""
        if not self.active or tensor.device != self.device.torch_device or tensor.layout is not torch.strided:
            return tensor
        if tensor.is_nested or tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor():
            return tensor
        span = _span(tensor)
        if span.numel() * span.element_size() < ALIGNMENT:
            return tensor
        place = span.untyped_storage()._cdata, span.storage_offset()
        key = (*place, tensor.dtype, tensor.shape, tensor.stride(), tensor._version)
        saved = self._visit.get(key)
        if saved is None:
            saved = self._visit[key] = self._send(tensor, span)
        else:
            saved.uses += 1
        return saved

    def _send(self, tensor: Tensor, span: Tensor) -> OffloadedTensor:
        nbytes = span.numel() * span.element_size()
        host = torch.empty(0, dtype=span.dtype, device="cpu").set_(
            self.device.passing(aligned(nbytes)).untyped_storage(), 0, span.shape, (1,)
        )
        down = self.device.down
        down.wait_event(self.device.compute.record_event())
        under_way = self.counters.listener.work("down", "", "activations", nbytes)
        arrived = self.device.send_down([(host.view(torch.uint8), span.view(torch.uint8))], under_way)
        self.counters.bytes_offloaded += nbytes
        like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        saved = OffloadedTensor(like, tensor._version, span.data_ptr() % ALIGNMENT, host, arrived)
        self._leaving.append((tensor, saved))
        self._mind_streams()
        self._on_host.add(saved)
        return saved

    def _mind_streams(self) -> None:
        """Rule 4: who waits for a copy need not be whose memory it is."""
        if self.device.compute not in self._streams:
            self._streams.append(self.device.compute)
            if len(self._streams) > 1:
                for tensor, _ in (*self._left, *self._leaving):
                    tensor.record_stream(self.device.down)
        elif len(self._streams) > 1:
            self._leaving[-1][0].record_stream(self.device.down)

    def fetch(self, saved: OffloadedTensor) -> None:
        """Starts the way back."""
        if saved.device is not None:
            return
        size = saved.host.element_size()
        room = torch.empty(
            ALIGNMENT + aligned(saved.host.numel() * size), dtype=torch.uint8, device=self.device.torch_device
        )
        offset = (saved.first - room.data_ptr()) % ALIGNMENT
        storage = room.untyped_storage()
        empty = torch.empty(0, dtype=saved.like.dtype, device=room.device)
        span = empty.set_(storage, offset // size, saved.host.shape, (1,))
        saved.stream = self.device.compute
        self.device.up.wait_event(saved.stream.record_event())  # whose memory it was
        nbytes = saved.host.numel() * size
        under_way = self.counters.listener.work("up", "", "activations", nbytes)
        copies = [(span.view(torch.uint8), saved.host.view(torch.uint8))]
        saved.ready = self.device.send_up(copies, under_way, after=saved.arrived)
        self.counters.bytes_brought_back += nbytes
        saved.device = empty.set_(storage, offset // size, saved.like.shape, saved.like.stride())
        saved.pending = saved.uses
        self._unasked.add(saved)

    def unpack(self, saved: OffloadedTensor) -> Tensor:
        """The tensor as it was; the caller's stream is ordered after its bytes."""
        if saved.overtaken:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a tensor of shape {tuple(saved.like.shape)}, while it went to the host"
            )
        self.fetch(saved)
        tensor = saved.device
        assert tensor is not None
        compute = self.device.compute
        with self.counters.listener.waiting("activations"):
            saved.ready.wait(compute)
        if saved.stream != compute:
            tensor.record_stream(compute)
        self._unasked.discard(saved)
        saved.pending -= 1
        if not saved.pending:
            saved.device = None
        return tensor


def _span(tensor: Tensor) -> Tensor:
    """The memory from a tensor's first element to its last, as one row."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    length = 1 + sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), tensor.storage_offset(), (length,), (1,))
