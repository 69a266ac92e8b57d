"""What autograd saves inside a visit, and how it comes back.

1. A saved tensor that lies in a streamed unit's buffer is replaced by its place there. To be unpacked it makes the unit
   resident: the safety net under every way in which backward may reach a unit.
2. Only the innermost saved-tensor hooks apply. Ours hand everything on to the pair that was in force outside, units'
   tensors too, so that an outer checkpoint or ``save_on_cpu`` sees exactly what it sees in a plain run.
3. A weight that was written between its use and its backward is an error, as in a plain run, wherever it was written.
4. ``recompute`` is torch's own non-reentrant checkpoint around a unit's forward: it keeps torch's random state and
   autocast, and composes with Rule 2. Python's and NumPy's random states are kept as well. Forward runs again on copies
   of the buffers as they were, so buffers are updated once, and on the weights as they were, where it writes to them.
5. ``offload`` sends what autograd saved to page-locked memory, each tensor once however often it was saved, and brings it
   back to an address of the same alignment (kernels are chosen by it). The device tensor is kept until the caller's
   stream waited for the copy: dropped early, its memory would be given away while it is read.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .device import Device
from .layout import ALIGNMENT, aligned
from .telemetry import Counters

if TYPE_CHECKING:
    from .engine import StreamedUnit

Pack = Callable[[Tensor], Any]
Unpack = Callable[[Any], Tensor]
_hooks = torch._C._autograd


class SavedWeight:
    """The place of a saved tensor in a unit's buffer (Rule 1)."""

    __slots__ = ("build", "device_version", "dtype", "host_version", "index", "offset", "shape", "stride", "unit")

    def __init__(self, unit: StreamedUnit, tensor: Tensor) -> None:
        self.unit = unit
        self.dtype = tensor.dtype
        self.offset = tensor.storage_offset()
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.index = unit.store.field_at(self.offset * tensor.element_size())
        self.host_version = unit.store.params[self.index]._version
        self.device_version = unit.binding.outputs[self.index]._version
        self.build = unit.binding.build

    def tensor(self) -> Tensor:
        """The same view of the unit's buffer, which must be resident."""
        empty = torch.empty(0, dtype=self.dtype, device=self.unit.store.storage.device)
        return empty.set_(self.unit.store.storage, self.offset, self.shape, self.stride)  # type: ignore[call-overload]

    def check(self) -> None:
        """Rule 3."""
        store, binding = self.unit.store, self.unit.binding
        host = store.params[self.index]._version
        device = binding.outputs[self.index]._version if binding.build == self.build else self.device_version
        if host != self.host_version or device != self.device_version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{store.names[self.index]} is at version {host}; expected version {self.host_version} instead"
            )


class SavedTensors:
    """The pair of hooks in force during an outermost visit."""

    def __init__(
        self,
        owner: Callable[[int], StreamedUnit | None],
        require: Callable[[StreamedUnit], None],
        offload: Offload,
    ) -> None:
        self._owner = owner  # of a storage
        self._require = require
        self._offload = offload

    def push(self) -> None:
        """Begins to see what autograd saves, in front of whoever saw it so far (Rule 2)."""
        outer = _hooks._top_saved_tensors_default_hooks(False)
        hooks = (self._pack, self._unpack) if outer is None else self._composed(*outer)
        _hooks._push_saved_tensors_default_hooks(*hooks)

    def pop(self) -> None:
        """Ends it."""
        _hooks._pop_saved_tensors_default_hooks()

    @staticmethod
    def enabled() -> bool:
        """Whether the calling code admits saved-tensor hooks; if not, what is saved holds its unit on the device."""
        return bool(_hooks._saved_tensors_hooks_is_enabled())

    def _pack(self, tensor: Tensor) -> Any:
        unit = self._owner(tensor.untyped_storage()._cdata)
        return self._offload.pack(tensor) if unit is None else SavedWeight(unit, tensor)

    def _unpack(self, saved: Any) -> Tensor:
        if type(saved) is SavedWeight:
            saved.check()
            self._require(saved.unit)
            return saved.tensor()
        if type(saved) is OnHost:
            return self._offload.unpack(saved)
        return saved  # type: ignore[no-any-return]

    def _composed(self, outer_pack: Pack, outer_unpack: Unpack) -> tuple[Pack, Unpack]:
        def pack(tensor: Tensor) -> Any:
            unit = self._owner(tensor.untyped_storage()._cdata)
            return unit and SavedWeight(unit, tensor), outer_pack(tensor)

        def unpack(pair: Any) -> Tensor:
            saved, packed = pair
            if saved is not None:
                saved.check()
                self._require(saved.unit)
            return outer_unpack(packed)

        return pack, unpack


# ---- recompute


class Recompute:
    """Runs a unit's forward so that autograd keeps its inputs only (Rule 4)."""

    def __init__(self, device: Device) -> None:
        self._anchor = torch.empty(0, device=device.torch_device)  # tells the checkpoint whose random state to keep

    def run(self, call: Callable[..., Any], root: nn.Module, written: Written, args: Any, kwargs: Any) -> Any:
        """``call(*args, **kwargs)`` now, and once more when backward needs what it saves."""
        kept = _Kept(root, written)

        def forward(_anchor: Tensor, *args: Any, **kwargs: Any) -> Any:
            return call(*args, **kwargs)

        def contexts() -> tuple[Any, Any]:
            return written.recording(kept.weights), kept.again()

        return checkpoint(forward, self._anchor, *args, use_reentrant=False, context_fn=contexts, **kwargs)


class Written:
    """Passes on which weights model code wrote, and what they were before, to the call under which it did."""

    def __init__(self) -> None:
        self._records: list[dict[Any, Tensor]] = []
        self.restored: dict[Any, Tensor] = {}  # what the weights were, for a call that runs again

    @contextlib.contextmanager
    def recording(self, record: dict[Any, Tensor]) -> Iterator[None]:
        """What is reported within goes into ``record``."""
        self._records.append(record)
        try:
            yield
        finally:
            self._records.remove(record)

    def report(self, key: Any, before: Tensor) -> None:
        """A weight was written; ``before`` is its host copy, not yet overwritten."""
        if self._records and key not in self._records[-1]:
            self._records[-1][key] = before.clone()


class _Kept:
    """What a unit's forward may change outside of its outputs, as it was before."""

    def __init__(self, root: nn.Module, written: Written) -> None:
        self.written = written
        self.weights: dict[Any, Tensor] = {}
        self.python = random.getstate()
        self.numpy = _numpy_state()
        self.buffers = [
            (child._buffers, name, buffer.detach().clone())
            for child in root.modules()
            for name, buffer in child._buffers.items()
            if buffer is not None
        ]

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Within, all is as it was; afterwards, as it is."""
        python, numpy = random.getstate(), _numpy_state()
        current = [(place, name, place.get(name)) for place, name, _ in self.buffers]
        restored, self.written.restored = self.written.restored, self.weights
        try:
            random.setstate(self.python)
            _set_numpy_state(self.numpy)
            for place, name, before in self.buffers:
                place[name] = before.clone()  # again: it may run a third time
            yield
        finally:
            self.written.restored = restored
            for place, name, buffer in current:
                place[name] = buffer
            random.setstate(python)
            _set_numpy_state(numpy)


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy")
    return numpy and numpy.random.get_state()


def _set_numpy_state(state: Any) -> None:
    if state is not None:
        sys.modules["numpy"].random.set_state(state)


# ---- offload


@dataclass(eq=False)
class OnHost:
    """A saved tensor on the host: the bytes that it spans, and how it looked."""

    like: Tensor  # on the meta device
    first: int  # byte of an aligned block at which it begins
    host: Tensor
    arrived: Any  # on the host, recorded on the down stream; a way up that begins earlier carries old bytes
    uses: int = 1
    pending: int = 0  # unpackings until the device copy can go
    device: Tensor | None = field(default=None)
    ready: Any = None


class Offload:
    """Moves what units save to the host and back (Rule 5)."""

    def __init__(self, device: Device, counters: Counters) -> None:
        self.device = device
        self.counters = counters
        self.active = False  # whether what is saved now belongs to a unit as a whole
        self._visit: dict[Any, OnHost] = {}  # what the unit under way saved
        self._leaving: list[tuple[Tensor, Any]] = []  # its device tensors, kept until their copies are done
        self._left: list[tuple[Tensor, Any]] = []  # those of the unit before

    def begin(self) -> None:
        """A unit's forward begins."""
        self.active = True

    def end(self) -> list[OnHost]:
        """It ends; what the one before saved may go once the caller's stream waited for its copies."""
        self.active = False
        self.let_go()
        self._left, self._leaving = self._leaving, []
        saved = list(self._visit.values())
        self._visit = {}
        return saved

    def let_go(self) -> None:
        """Drops device tensors whose copies the caller's stream now waits for."""
        for _tensor, arrived in self._left:
            self.device.compute.wait_event(arrived)
        self._left = []

    def finish(self) -> None:
        """Nothing more is saved: all of them."""
        self.active = False
        self._left += self._leaving
        self._leaving, self._visit = [], {}
        self.let_go()

    def pack(self, tensor: Tensor) -> Any:
        """Starts the way down; small and foreign tensors stay as they are."""
        if not self.active or tensor.device != self.device.torch_device or tensor.layout is not torch.strided:
            return tensor
        span = _span(tensor)
        if span.numel() * span.element_size() < ALIGNMENT:
            return tensor
        key = (span.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor._version)
        saved = self._visit.get(key)
        if saved is None:
            saved = self._visit[key] = self._send(tensor, span)
        else:
            saved.uses += 1
        return saved

    def _send(self, tensor: Tensor, span: Tensor) -> OnHost:
        nbytes = span.numel() * span.element_size()
        host = torch.empty(0, dtype=span.dtype).set_(  # type: ignore[call-overload]
            self.device.host_bytes(aligned(nbytes)).untyped_storage(), 0, span.shape, (1,)
        )
        down = self.device.down
        down.wait_event(self.device.compute.record_event())
        with down, torch.no_grad():
            host.copy_(span, non_blocking=True)
            arrived = down.record_event()
        self._leaving.append((tensor, arrived))
        self.counters.bytes_offloaded += nbytes
        like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return OnHost(like, span.data_ptr() % ALIGNMENT, host, arrived)

    def fetch(self, saved: OnHost) -> None:
        """Starts the way back."""
        if saved.device is not None:
            return
        size = saved.host.element_size()
        room = torch.empty(ALIGNMENT + aligned(saved.host.numel() * size), dtype=torch.uint8, device=self.device.torch_device)
        offset = (saved.first - room.data_ptr()) % ALIGNMENT
        storage = room.untyped_storage()
        empty = torch.empty(0, dtype=saved.like.dtype, device=room.device)
        span = empty.set_(storage, offset // size, saved.host.shape, (1,))  # type: ignore[call-overload]
        up = self.device.up
        up.wait_event(saved.arrived)
        up.wait_event(self.device.compute.record_event())  # whose memory it was
        with up, torch.no_grad():
            span.copy_(saved.host, non_blocking=True)
            saved.ready = up.record_event()
        self.counters.bytes_brought_back += saved.host.numel() * size
        saved.device = empty.set_(storage, offset // size, saved.like.shape, saved.like.stride())  # type: ignore[call-overload]
        saved.pending = saved.uses

    def unpack(self, saved: OnHost) -> Tensor:
        """The tensor as it was; the caller's stream is ordered after its bytes."""
        self.fetch(saved)
        tensor = saved.device
        assert tensor is not None
        self.device.compute.wait_event(saved.ready)
        saved.pending -= 1
        if not saved.pending:
            saved.device = None
        return tensor


def _span(tensor: Tensor) -> Tensor:
    """The memory from a tensor's first element to its last, as one row."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    length = 1 + sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), tensor.storage_offset(), (length,), (1,))  # type: ignore[call-overload]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in a value, in whatever containers: sequences, mappings, dataclasses, plain objects' attributes."""
    stack, seen = [value], set()
    while stack:
        item = stack.pop()
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, (str, bytes, int, float, bool, type(None), type, torch.nn.Module)) or id(item) in seen:
            continue
        else:
            seen.add(id(item))
            if isinstance(item, dict):
                stack.extend(item.values())
            elif isinstance(item, (list, tuple, set, frozenset)):
                stack.extend(item)
            elif hasattr(item, "__dict__"):
                stack.extend(vars(item).values())
