"""Layout of a unit's tensors in one flat byte buffer, and typed tensors over those bytes.

1. Every field begins at a multiple of `ALIGNMENT` bytes, as a separate allocation would: vector and BLAS kernels are
   chosen by the alignment of pointers, and another kernel means other bits.
2. A tensor without gaps and overlaps keeps its strides (channels_last stays); any other becomes contiguous.
3. The same layout serves the host slab and the device buffer, so that a unit travels as one run of bytes.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..host.unit_numbers import ALIGNMENT, aligned
from .pinned import note_view


@dataclass(frozen=True)
class Field:
    """One tensor's place in the buffer: `offset` and `nbytes` in bytes, `stride` in elements."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Layout:
    """The places of several tensors in one buffer of `nbytes` bytes."""

    fields: tuple[Field, ...]
    nbytes: int
    elsewhere: frozenset[int] = frozenset()  # indices of those that are not in it

    @classmethod
    def of(
        cls, named_tensors: Iterable[tuple[str, Tensor]], alignment: int = ALIGNMENT, without: Container[int] = ()
    ) -> Layout:
        """Lay the tensors out one after the other, in the given order. Reads no data, copies nothing.

        Those with the indices ``without`` lie elsewhere, and take no bytes.
        """
        fields, end = [], 0
        for index, (name, tensor) in enumerate(named_tensors):
            nbytes = tensor.numel() * tensor.element_size()
            fields.append(Field(name, tensor.dtype, tuple(tensor.shape), _stride_in_buffer(tensor), end, nbytes))
            end += 0 if index in without else aligned(nbytes, alignment)
        return cls(tuple(fields), end, frozenset(index for index in range(len(fields)) if index in without))

    def indices_in(self, ranges: Sequence[tuple[int, int]]) -> list[int]:
        """List the tensors with bytes in any of these ranges of the buffer (first byte, byte after the last)."""
        return [
            index
            for index, field in enumerate(self.fields)
            if index not in self.elsewhere
            and any(start < field.offset + field.nbytes and field.offset < end for start, end in ranges)
        ]

    def own_views(self, storage: torch.UntypedStorage) -> list[Tensor]:
        """Make a tensor over each field's bytes (`own_view`), without elements for those that lie elsewhere."""
        return [
            self.own_view(storage, Field(f.name, f.dtype, (0,), (1,), 0, 0) if i in self.elsewhere else f)
            for i, f in enumerate(self.fields)
        ]

    def at_multiples(self, alignment: int) -> Layout:
        """Return the layout in which these tensors begin at multiples of this many bytes."""
        fields, end = [], 0
        for index, field in enumerate(self.fields):
            fields.append(replace(field, offset=end))
            end += 0 if index in self.elsewhere else aligned(field.nbytes, alignment)
        return replace(self, fields=tuple(fields), nbytes=end)

    def reshaped(self, index: int, shape: torch.Size) -> Layout:
        """Return the layout in which a tensor without gaps has another shape, of as many elements."""
        field = replace(self.fields[index], shape=tuple(shape), stride=_contiguous(shape))
        return replace(self, fields=(*self.fields[:index], field, *self.fields[index + 1 :]))

    @staticmethod
    def view(storage: torch.UntypedStorage, field: Field) -> Tensor:
        """Make a tensor over the field's bytes that shares `storage`, with a version counter of its own.

        Views of one tensor would share one counter, and an in-place write to one weight would invalidate what autograd
        saved of the others.
        """
        return _tensor_over(storage, field, field.offset)

    @staticmethod
    def own_view(storage: torch.UntypedStorage, field: Field) -> Tensor:
        """Make a tensor over the field's bytes whose storage is that slice alone; it keeps the whole slab alive.

        `torch.save` writes whole storages: over the slab's own storage, each saved parameter would write the slab.
        """
        if storage.device.type == "meta":  # which has no bytes to share
            return _tensor_over(torch.UntypedStorage(field.nbytes, device="meta"), field, 0)  # type: ignore[no-untyped-call]
        part = storage[field.offset : field.offset + field.nbytes]
        note_view(part)
        return _tensor_over(part, field, 0)


def in_order(tensor: Tensor, field: Field) -> Tensor:
    """Return a tensor's elements, flat, in the order in which the parameter's lie in memory."""
    if tensor.stride() != field.stride:
        tensor = torch.empty_strided(field.shape, field.stride, dtype=tensor.dtype, device="cpu").copy_(tensor)
    return torch.as_strided(tensor, (tensor.numel(),), (1,))


def as_few_runs(
    places: Iterable[tuple[Tensor, int]], fields: Iterable[Field]
) -> Iterator[tuple[Tensor, int, int, int]]:
    """Merge the copies between fields of a layout and their places, each a first byte in some flat buffer.

    Yields runs: (buffer, first byte there, first byte in the layout's buffer, bytes).
    """
    run: tuple[Tensor, int, int, int] | None = None
    for (buffer, there), field in zip(places, fields, strict=True):
        if run is not None and run[0] is buffer and there - field.offset == run[1] - run[2]:
            run = (*run[:3], field.offset + field.nbytes - run[2])
            continue
        if run is not None:
            yield run
        run = (buffer, there, field.offset, field.nbytes)
    if run is not None:
        yield run


def _tensor_over(storage: torch.UntypedStorage, field: Field, offset: int) -> Tensor:
    # A tensor made in inference mode has no version counter, and autograd would refuse it ever after.
    with torch.inference_mode(False):
        empty = torch.empty(0, dtype=field.dtype, device=storage.device)
        return empty.set_(storage, offset // field.dtype.itemsize, field.shape, field.stride)


def _stride_in_buffer(tensor: Tensor) -> tuple[int, ...]:
    if tensor.numel() == 0 or is_dense(tensor):
        return tensor.stride()
    return _contiguous(tensor.shape)


def _contiguous(shape: torch.Size) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one run of memory, each its own place; dimensions of size 1 may have any stride."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
