"""The weights of one unit: a record of each, and the wire copies in which some of them go up.

They follow the rules of the unit (host_copy.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ..errors import ExactnessError
from ..host.unit_numbers import ALIGNMENT, aligned
from .device import Device
from .layout import Field, Layout
from .watched_parameters import true_data, true_dtype, true_version

BY_ITSELF = 1 << 20  # bytes from which a weight that travels as it is goes up from the slab


class Home(Protocol):
    """A place in which weights of a unit lie."""

    def adopt(self, index: int, field: Field, data: Tensor) -> Tensor:
        """Take a weight's bytes, and return the tensor over them that becomes the parameter's data."""

    def ranges(self) -> list[tuple[int, int]]:
        """List where the bytes lie: addresses, and numbers of bytes."""


class SavedBytes:
    """A token for the bytes that a weight has now, for what autograd saves of them (host_copy.py, Rule 6)."""

    __slots__ = ("before",)

    def __init__(self) -> None:
        self.before: Tensor | None = None  # on the host, once the weight has other ones


class Stamp(NamedTuple):
    """A state of a unit's host bytes (host_copy.py, Rule 4)."""

    epoch: object  # a number; of bytes that another tensor shares an object that equals no other
    versions: list[int]
    addresses: list[int]


class Changes(NamedTuple):
    """The weights that differ between two states of a unit's host bytes, by their indices."""

    written: list[int]  # in place, as version counters say
    replaced: list[int]  # by other data


@dataclass(eq=False, slots=True)
class Weight:
    """One parameter of a unit: where its bytes are, and what refers to them."""

    parameter: nn.Parameter
    host: Field  # its place in the slab
    home: Home | None  # where its bytes lie (host_copy.py, Rule 2)
    storage: torch.UntypedStorage  # of its data when the device buffer was filled last
    stride: tuple[int, ...]  # at the same time
    field: Field  # its place in the device buffer
    first: int = 0  # its data's first element in that storage, whose address `share_memory_()` changes
    wire: Tensor | None = None  # its wire copy (host_copy.py, Rule 5); None: it goes up from its home
    buffer: Tensor | None = None  # bytes in which the wire copy is, unless it is in a file
    saved: SavedBytes | None = None  # made when autograd first saves a part of its bytes (host_copy.py, Rule 6)
    parted: bool = False  # whether its stand-in has memory of its own (stand_ins.py, Rule 7)
    saved_again: bool = False  # whether create_graph saved it past our hooks

    @property
    def is_narrow(self) -> bool:
        """Whether it travels in another type than it has on the host."""
        return self.field.dtype is not self.host.dtype

    def anew(self, field: Field) -> Weight:
        """Return it with this place in the device buffer, without what refers to the bytes that travel now."""
        return replace(self, field=field, wire=None, buffer=None, saved=None, parted=False, saved_again=False)

    def leave(self, before: Callable[[], Tensor]) -> None:
        """Leave its bytes to what autograd saved of them, if anything: it gets others now (host_copy.py, Rule 6)."""
        if self.saved is not None:
            self.saved.before, self.saved = before(), None

    def note_data(self) -> None:
        """Note where the parameter's data is, and how it is laid out."""
        data = self.parameter
        self.storage, self.first, self.stride = data.untyped_storage(), int(data.storage_offset()), data.stride()

    def data_before(self) -> Tensor:
        """Make a tensor over the data that the parameter had when the device buffer was filled last."""
        empty = torch.empty(0, dtype=self.host.dtype, device="cpu")
        with torch.inference_mode(False):
            return empty.set_(self.storage, self.first, self.host.shape, self.stride)

    def place_of_wire(self) -> tuple[Tensor, int]:
        """Return the bytes in which the wire copy is, and its first byte there."""
        assert self.wire is not None and self.buffer is not None
        return self.buffer, int(self.wire.storage_offset()) * self.wire.itemsize

    def check_data(self, data: Tensor, dtype: torch.dtype) -> None:
        """Raise if data given to the parameter in a step has another type than this, or another shape or strides."""
        field = self.host
        if data.shape != field.shape or true_dtype(data) != dtype:
            raise ExactnessError(
                f"parameter {field.name} was {dtype} {tuple(field.shape)} when streaming began and is now "
                f"{true_dtype(data)} {tuple(data.shape)}; change it between steps"
            )
        if data.stride() != self.stride:
            raise ExactnessError(
                f"parameter {field.name} had strides of {self.stride} when its step began and now has "
                f"{data.stride()}, with which kernels may compute other bits; change its memory format between steps"
            )


@dataclass(eq=False, slots=True)
class Conversion:
    """A wire copy that a step may convert while it has the weight's new bytes at hand."""

    wire: Tensor
    source: tuple[int, int] | None = None  # version and address of the data that was converted; None: none was

    def done(self, data: Tensor) -> None:
        """Note that the wire copy was converted from this data."""
        self.source = true_version(data), data.data_ptr()


def lay_out_wire(weights: Sequence[Weight], device: Device) -> None:
    """Allocate these weights' wire copies in one buffer, unless all go up as they are (host_copy.py, Rule 5)."""
    if not any(weight.is_narrow for weight in weights):
        return
    copied = [weight for weight in weights if weight.is_narrow or weight.field.nbytes < BY_ITSELF]
    layout = layout_with([weight.field for weight in copied], [weight.field.dtype for weight in copied])
    buffer = device.slab(max(layout.nbytes, ALIGNMENT))
    for weight, field in zip(copied, layout.fields, strict=True):
        weight.wire, weight.buffer = layout.view(buffer.untyped_storage(), field), buffer


def fill_wire(
    weights: Sequence[Weight], data: Sequence[Tensor], remembered: Collection[int], done: Collection[int] = ()
) -> None:
    """Convert host bytes, which lie in these tensors, into the wire copies (host_copy.py, Rule 5).

    ``remembered``: indices of weights of which autograd may have saved the bytes before (host_copy.py, Rule 6).
    ``done``: indices of weights of which the wire copies have these bytes.
    """
    with torch.no_grad():
        for index, (weight, tensor) in enumerate(zip(weights, data, strict=True)):
            if weight.wire is None or index in done:
                continue
            now = true_data(tensor)
            if index in remembered:
                now = now.to(weight.wire.dtype)
                if same_bytes(weight.wire, now):
                    continue
                weight.leave(weight.wire.clone)
            weight.wire.copy_(now)


def layout_with(fields: Sequence[Field], types: Sequence[torch.dtype]) -> Layout:
    """Lay out tensors like these fields, but of these types, one after the other."""
    placed, end = [], 0
    for field, dtype in zip(fields, types, strict=True):
        nbytes = math.prod(field.shape) * dtype.itemsize
        placed.append(replace(field, dtype=dtype, offset=end, nbytes=nbytes))
        end += aligned(nbytes)
    return Layout(tuple(placed), end)


def device_dtype(compute_dtype: torch.dtype | None, dtype: torch.dtype) -> torch.dtype:
    """Return the type in which weights of a type travel, if those in FP32 have ``compute_dtype`` on the device."""
    return compute_dtype or dtype if dtype is torch.float32 else dtype


def same_bytes(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one type have the same bytes, also in a NaN."""
    return torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
