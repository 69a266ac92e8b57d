"""Where gradients land on the host, and how they lie side by side on the device before.

1. A unit's gradients land in a slab of their own, which becomes ``.grad``. What the user still holds of it is never
   written again, and what somebody made of ``.grad`` (``p.grad.data = ...``) is not in the slab: such a parameter gets
   new memory.
2. A gradient that comes down narrower than it is on the host (of what travels in autocast's type, or of FP32 master
   weights) lands in the second half of the room of all such gradients in FP32, and is widened from the front: what is
   written never reaches what is not read yet. So it takes no memory of its own, and a unit comes down in one piece.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..compat.references import references, storage_uses
from .device import Device
from .layout import ALIGNMENT, Layout, aligned
from .parameters import true_grad
from .staging import Copies
from .unit_store import UnitStore

_kind = operator.attrgetter("dtype", "requires_grad")
SMALL = 4096  # elements that are widened by way of a copy


@dataclass(frozen=True)
class GradientSlot:
    """Where a gradient lands: a tensor, and the bytes of a flat page-locked buffer that it is."""

    tensor: Tensor
    flat: Tensor
    offset: int
    room: Tensor | None = None  # in which it is widened (Rule 2)


class PackedGradients:
    """Gradients side by side in a device buffer, whose memory comes and goes, as on their places on the host."""

    def __init__(self, device: Device, places: list[GradientSlot]) -> None:
        layout = Layout.of([("", place.tensor) for place in places])
        self.nbytes = sum(field.nbytes for field in layout.fields)
        self._device = device
        self._size = max(layout.nbytes, ALIGNMENT)
        self._layout = layout
        self._flat = device.device_bytes(self._size)
        self._storage = self._flat.untyped_storage()
        self._views: list[Tensor] = []
        self._runs = list(_runs(places, layout))
        self.copies: Copies = ()  # what brings them to the host: as few as can be
        self._parts = list(_parts_of_one_type([field.dtype for field in layout.fields]))

    def pack(self, grads: list[Tensor]) -> None:
        """Copies them in, on the current stream."""
        self._device.claim(self._storage, self._size)
        if not self._views:
            self._views = [self._layout.view(self._storage, field) for field in self._layout.fields]
            self.copies = [(host[to : to + n], self._flat[at : at + n]) for host, to, at, n in self._runs]
        for part in self._parts:  # a call with several types would copy one by one
            torch._foreach_copy_(self._views[part], grads[part])

    def free(self) -> None:
        """Gives the device memory back, on the current stream."""
        self._device.shrink(self._storage)


def _parts_of_one_type(types: list[torch.dtype]) -> Iterator[slice]:
    start = 0
    for _, same in itertools.groupby(types):
        end = start + sum(1 for _ in same)
        yield slice(start, end)
        start = end


class GradientSlab:
    """Where the gradients of a unit's weights land (Rule 1); frozen ones have no room."""

    def __init__(self, store: UnitStore, device: Device) -> None:
        self.autocast = store.autocast
        self._fields = store.layout.fields
        self._device = device
        trained = [index for index, parameter in enumerate(store.params) if parameter.requires_grad]
        narrow = sum(aligned(self._fields[index].nbytes) for index in trained if index in store.narrow)
        wide = sum(aligned(store.host_layout.fields[i].nbytes) for i in trained if i not in store.narrow)
        self.nbytes = max(2 * narrow + wide, ALIGNMENT)
        self._places = dict(self._laid_out(store, device.slab(self.nbytes), trained, narrow))
        self._rooms = {index: place.room for index, place in self._places.items() if place.room is not None}
        self._unseen = {index: _seen([place.tensor]) for index, place in self._places.items()}
        self._all_unseen = self._all_seen()
        self._packings: dict[tuple[int, ...], PackedGradients] = {}  # of those that came together before

    def _laid_out(
        self, store: UnitStore, flat: Tensor, trained: list[int], narrow: int
    ) -> Iterator[tuple[int, GradientSlot]]:
        """What is widened first (Rule 2), then the others, in the parameters' types."""
        storage = flat.untyped_storage()
        first, then = 0, 2 * narrow
        for index in trained:
            field, travelling = store.host_layout.fields[index], self._fields[index]
            if index in store.narrow:
                at = narrow + first
                room = Layout.own_view(storage, replace(field, offset=2 * first))
                yield index, GradientSlot(Layout.own_view(storage, replace(travelling, offset=at)), flat, at, room)
                first += aligned(travelling.nbytes)
            else:
                yield index, GradientSlot(Layout.own_view(storage, replace(field, offset=then)), flat, then)
                then += aligned(field.nbytes)

    def references(self, index: int, grad: Tensor | None) -> int:
        """How often a gradient that landed here is referred to from here."""
        place = self._places.get(index)
        if place is None or grad is None:
            return 0
        return (grad is place.tensor) + (grad is place.room) + (grad is self._rooms.get(index))

    def room(self, indices: list[int], grads: list[Tensor]) -> tuple[list[GradientSlot], PackedGradients]:
        """Page-locked memory for gradients, with the parameters' strides, that nobody looks at."""
        unseen = self._all_seen() == self._all_unseen
        widening = unseen or _seen([*self._rooms.values()]) == self._all_unseen[1]
        places = [self._room(index, grad, unseen, widening) for index, grad in zip(indices, grads, strict=True)]
        if any(place is not self._places.get(index) for index, place in zip(indices, places, strict=True)):
            return places, PackedGradients(self._device, places)
        packing = self._packings.get(tuple(indices))
        if packing is None:
            packing = self._packings[tuple(indices)] = PackedGradients(self._device, places)
        return places, packing

    def _all_seen(self) -> tuple[Any, Any]:
        """Of all places, and of the rooms that they are widened in."""
        return _seen([place.tensor for place in self._places.values()]), _seen([*self._rooms.values()])

    def _room(self, index: int, grad: Tensor, unseen: bool, widening: bool) -> GradientSlot:
        place = self._places.get(index)  # None: it did not train when the slab was made
        fits = place is not None and grad.dtype is place.tensor.dtype and (widening or place.room is None)
        if place is not None and fits and (unseen or _seen([place.tensor]) == self._unseen[index]):
            return place
        field = self._fields[index]
        flat = self._device.passing(max(grad.numel() * grad.element_size(), ALIGNMENT))
        empty = torch.empty(0, dtype=grad.dtype, device="cpu")
        tensor = empty.set_(flat.untyped_storage(), 0, field.shape, field.stride)
        return GradientSlot(tensor, flat, 0)


def _seen(tensors: list[Tensor]) -> Any:
    """What changes when somebody refers to one, or makes it another one: ``p.grad.data = ...``, ``grad.t_()``."""
    return (
        *references(tensors),
        storage_uses(tensors),
        list(map(Tensor.data_ptr, tensors)),
        list(map(Tensor.size, tensors)),
        list(map(Tensor.stride, tensors)),
        list(map(_kind, tensors)),
    )


def _references_to_grad(parameter: Tensor) -> tuple[list[int], ...]:
    """Count the references to a gradient, and to its bytes."""
    grads = [_known(true_grad(parameter))]
    return *references(grads), storage_uses(grads)


def _known(grad: Tensor | None) -> Tensor:
    assert grad is not None
    return grad


def is_own(parameter: Tensor, slab: GradientSlab | None, index: int) -> bool:
    """Whether nobody but the parameter, and the slab that it may be in, refers to its gradient."""
    from_slab = 0 if slab is None else slab.references(index, true_grad(parameter))
    return _references_to_grad(parameter) == _own_references(from_slab)


@functools.cache
def _own_references(from_slab: int) -> tuple[list[int], ...]:
    """What there is of a gradient that is its parameter's alone."""
    parameter = torch.zeros(1, device="cpu", requires_grad=True)
    parameter.grad = torch.zeros(1, device="cpu")
    slab = [parameter.grad] * from_slab
    references = _references_to_grad(parameter)
    slab.clear()
    return references


def _runs(places: list[GradientSlot], layout: Layout) -> Iterator[tuple[Tensor, int, int, int]]:
    """Copies that bring packed fields to their places: (buffer, offset there, offset here, bytes), as few as can be."""
    run: tuple[Tensor, int, int, int] | None = None
    for place, field in zip(places, layout.fields, strict=True):
        if run is not None and run[0] is place.flat and place.offset - field.offset == run[1] - run[2]:
            run = (*run[:3], field.offset + field.nbytes - run[2])
            continue
        if run is not None:
            yield run
        run = (place.flat, place.offset, field.offset, field.nbytes)
    if run is not None:
        yield run


def widened(grad: Tensor, room: Tensor) -> Tensor:
    """The gradient in FP32, in its room, which ends where the gradient does or before (Rule 2)."""
    if grad.numel() <= SMALL:
        return room.copy_(grad.clone())
    narrow, wide = (torch.as_strided(tensor, (tensor.numel(),), (1,)) for tensor in (grad, room))
    done, count = 0, narrow.numel()
    while done < count:
        # As many as have their places before the first that is not read yet: half of what is left, at least.
        free = (narrow.data_ptr() + 2 * done - wide.data_ptr()) // 4 - done
        if free < SMALL:
            wide[done:] = narrow[done:].clone()
            break
        part = slice(done, min(count, done + free))
        wide[part] = narrow[part]
        done = part.stop
    return room
