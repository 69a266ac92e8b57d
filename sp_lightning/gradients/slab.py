"""Memory of a unit's gradients: slots on the host, where they arrive, and the buffer in which the device packs them.

1. A unit's gradients arrive in the slots of a slab of their own, and these become ``.grad``. A slot that the user's
   code still refers to is never written again, and one that it changed (``p.grad.data = ...``) may no longer be in the
   slab: for such a parameter the next gradient gets new memory.
2. A gradient that comes down in a narrower type than ``.grad`` has (its weight travels in autocast's type, or as a copy
   of FP32 master weights) is widened in place. The FP32 views of all such gradients lie side by side; the narrow ones
   arrive in the second half of those bytes and are widened from the front, so that a write never reaches bytes that are
   not read yet. So they need no memory of their own, and a unit's gradients come down in one piece.
3. One that comes down in bfloat16 stays so until code asks for it (watched_parameters.py, Rule 9), where the host steps
   with its own code, which widens it in the cache: the same bits, less memory, and fewer bytes on their way to and from
   memory. When code asks for one, or a second gradient is added to one, all of its unit are widened into a slab as in
   Rule 2, in which the unit's gradients arrive from then on. A unit's FP32 gradients lie in a second slab, which stays
   when that of the narrow ones is freed.
4. Only memory is exchanged then: values, and what other code has of them, stay as they are.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..compat.references import references, storage_uses, uses_of
from ..compat.tensors import copy_all
from ..host.unit_numbers import ALIGNMENT, aligned
from ..memory.device import Device
from ..memory.host_copy import HostCopy
from ..memory.layout import Layout, as_few_runs
from ..memory.staging import Copies
from ..memory.watched_parameters import NarrowGradient, quietly, set_true_grad, true_dtype, true_grad
from ..memory.weights import layout_with
from ..optim import native

_dtype, _requires_grad = operator.attrgetter("dtype"), operator.attrgetter("requires_grad")
MOST_PACKED = 16  # sets of gradients that come together, of which a slab keeps what packs them
SMALL = 1 << 15  # elements that are widened by way of a copy, and whose operators threads do not share


@dataclass(frozen=True)
class GradientSlot:
    """One gradient's place on the host: a tensor, and where its bytes are in a flat page-locked buffer."""

    tensor: Tensor
    flat: Tensor
    offset: int
    wide_view: Tensor | None = None  # into which the gradient is widened (Rule 2)
    wide_offset: int = 0  # where that is in the same buffer
    lands_in: Tensor | None = None  # the tensor over a file into whose bytes it goes from there (a file)
    narrow: Callable[[], NarrowGradient] | None = None  # makes what ``.grad`` becomes, if it stays as it came (Rule 3)


class PackedGradients:
    """Gradients packed side by side in a device buffer, whose memory comes and goes, for one copy to their slots."""

    def __init__(self, device: Device, gradient_slots: list[GradientSlot]) -> None:
        layout = Layout.of([("", slot.tensor) for slot in gradient_slots])
        self.nbytes = sum(field.nbytes for field in layout.fields)
        self._device = device
        self._size = max(layout.nbytes, ALIGNMENT)
        self._layout = layout
        self._flat = device.device_bytes(self._size)
        self._storage = self._flat.untyped_storage()
        self._views: list[Tensor] = []
        self._runs = list(as_few_runs(((slot.flat, slot.offset) for slot in gradient_slots), layout.fields))
        self.copies: Copies = ()  # to the slots on the host, as few as possible
        self._parts = list(_parts_of_one_type([field.dtype for field in layout.fields]))

    def pack(self, grads: list[Tensor]) -> None:
        """Copy gradients into the buffer, on the current stream."""
        self._device.claim(self._storage, self._size)
        if not self._views:
            self._views = [self._layout.view(self._storage, field) for field in self._layout.fields]
            self.copies = [(host[to : to + n], self._flat[at : at + n]) for host, to, at, n in self._runs]
        for part in self._parts:  # one call with several types would copy the tensors one by one
            copy_all(self._views[part], grads[part])

    def free(self) -> None:
        """Free the buffer's device memory, on the current stream."""
        self._device.shrink(self._storage)


def _parts_of_one_type(types: list[torch.dtype]) -> Iterator[slice]:
    start = 0
    for _, same in itertools.groupby(types):
        end = start + sum(1 for _ in same)
        yield slice(start, end)
        start = end


class GradientSlab:
    """Host slab with a slot for each gradient of a unit (Rule 1); frozen weights have none."""

    alignment = ALIGNMENT
    make_transfer: Callable[..., Any] | None = None  # makes what gradients come down in, if it is no `GradientTransfer`
    is_read = False  # whether code has asked for gradients that could have stayed as they came down (Rule 3)
    wide: GradientSlab | None = None  # in which the unit's gradients arrive from now on (Rule 3)
    # Around an exchange of the memory of gradients of these parameters (Rule 4).
    exchanging: Callable[[Collection[Tensor]], AbstractContextManager[Any]] = contextlib.nullcontext

    def __init__(self, store: HostCopy, device: Device, allocate: Callable[[int], Tensor] | None = None) -> None:
        self._made_for = store.autocast, dict(store.cast_gradients)
        fields = store.on_device.layout.fields
        types = [store.cast_gradients.get(index, field.dtype) for index, field in enumerate(fields)]
        self._fields = layout_with(fields, types).fields
        self._device = device
        self.narrow = narrow_in(store)
        trained = [index for index, parameter in enumerate(store.params) if parameter.requires_grad]
        narrow = sum(self._rounded(self._fields[index].nbytes) for index in trained if index in self.narrow)
        wide = sum(self._rounded(store.host_layout.fields[i].nbytes) for i in trained if i not in self.narrow)
        self.nbytes = 0
        self._slots = dict(self._lay_out(store, allocate or device.slab, trained, narrow, wide))
        self._widened = {index for index, slot in self._slots.items() if slot.wide_view is not None}
        self._tensors = [slot.tensor for slot in self._slots.values()]
        self._tensors += [slot.wide_view for slot in self._slots.values() if slot.wide_view is not None]
        self._storages = list(map(Tensor.untyped_storage, self._tensors))
        self._untouched = self._traces()
        # By the gradients that came together before, and their types; few of them.
        self._packed: dict[tuple[Any, ...], tuple[list[GradientSlot], PackedGradients]] = {}

    def _lay_out(
        self, store: HostCopy, allocate: Callable[[int], Tensor], trained: list[int], narrow: int, wide: int
    ) -> Iterator[tuple[int, GradientSlot]]:
        """Lay out the slots: those of gradients to widen first (Rule 2), then the others, in the parameters' types.

        ``narrow`` and ``wide`` are the bytes in which they come down.
        """
        self.nbytes = max(2 * narrow + wide, self.alignment)
        flat = allocate(self.nbytes)
        storage = flat.untyped_storage()
        first, then = 0, 2 * narrow
        for index in trained:
            field, travelling = store.host_layout.fields[index], self._fields[index]
            if index in self.narrow:
                at = narrow + first
                view = Layout.own_view(storage, replace(field, offset=2 * first))
                yield (
                    index,
                    GradientSlot(Layout.own_view(storage, replace(travelling, offset=at)), flat, at, view, 2 * first),
                )
                first += self._rounded(travelling.nbytes)
            else:
                yield index, GradientSlot(Layout.own_view(storage, replace(field, offset=then)), flat, then)
                then += self._rounded(field.nbytes)

    def widen(self) -> None:
        """Widen gradients that stayed as they came down: none do, but in a `NarrowSlab` (Rule 3)."""

    def _rounded(self, nbytes: int) -> int:
        return aligned(nbytes, self.alignment)

    def place_of(self, index: int) -> Tensor | None:
        """Return what becomes ``.grad`` once a gradient came here; None if its weight was frozen when this was made."""
        slot = self._slots.get(index)
        return None if slot is None else slot.tensor if slot.wide_view is None else slot.wide_view

    def fits(self, store: HostCopy) -> bool:
        """Whether the unit's gradients still come down in the types that the slab was made for."""
        autocast, cast_gradients = self._made_for
        return autocast is store.autocast and cast_gradients == store.cast_gradients

    def references(self, index: int, grad: Tensor | None) -> int:
        """Count the references from this slab to a parameter's gradient."""
        slot = self._slots.get(index)
        if slot is None or grad is None:
            return 0
        return 2 * (grad is slot.tensor or grad is slot.wide_view)  # by its slot, and in the list of all

    def slots_for(self, indices: list[int], grads: list[Tensor]) -> tuple[list[GradientSlot], PackedGradients]:
        """Return slots to which no other code refers, in the parameters' strides, and what packs for them."""
        traces = self._traces()
        key = (*indices, *[grad.dtype for grad in grads])
        known = self._packed.get(key)
        if known is not None and traces == self._untouched:
            return known
        free = self._free(traces)
        found = [self._slot_for(index, grad, free) for index, grad in zip(indices, grads, strict=True)]
        if any(slot is not self._slots.get(index) for index, slot in zip(indices, found, strict=True)):
            return found, PackedGradients(self._device, found)
        if known is None:
            if len(self._packed) == MOST_PACKED:  # of experts other ones may come together in each step
                self._packed.clear()
            known = self._packed[key] = found, PackedGradients(self._device, found)
        return known

    def _free(self, traces: tuple[list[Any], ...]) -> set[int]:
        """Find the slots that no other code refers to, by what was read of all."""
        same = self._same(traces)
        free = {index for index, is_free in zip(self._slots, same, strict=False) if is_free}
        if not all(same[len(self._slots) :]):  # widening would write over bytes that code refers to
            free -= self._widened
        return free

    def _same(self, traces: tuple[list[Any], ...]) -> list[bool]:
        """Say of each tensor whether these traces are those that it had when the slab was made."""
        return [
            now == before
            for now, before in zip(zip(*traces, strict=True), zip(*self._untouched, strict=True), strict=True)
        ]

    def _traces(self) -> tuple[list[Any], ...]:
        """Read what changes when code refers to a slot's tensor or alters it: ``p.grad.data = ...``, ``grad.t_()``."""
        return (
            *references(self._tensors),
            uses_of(self._storages),
            list(map(Tensor.data_ptr, self._tensors)),
            list(map(Tensor.size, self._tensors)),
            list(map(Tensor.stride, self._tensors)),
            list(map(_dtype, self._tensors)),
            list(map(_requires_grad, self._tensors)),
        )

    def _slot_for(self, index: int, grad: Tensor, free: Collection[int]) -> GradientSlot:
        slot = self._slots.get(index)  # None: the weight was frozen when the slab was made
        if slot is not None and index in free and grad.dtype is slot.tensor.dtype:
            return slot
        field = self._fields[index]
        flat = self._device.passing(max(grad.numel() * grad.element_size(), ALIGNMENT))
        empty = torch.empty(0, dtype=grad.dtype, device="cpu")
        tensor = empty.set_(flat.untyped_storage(), 0, field.shape, field.stride)
        return GradientSlot(tensor, flat, 0)


def narrow_in(store: HostCopy) -> Collection[int]:
    """Return which of a unit's gradients come down in a narrower type than ``.grad`` has, by index."""
    return store.narrow | store.cast_gradients.keys()


def can_stay_narrow(store: HostCopy) -> bool:
    """Whether gradients of a unit come down in a narrower type, and all of these as Rule 3 has it."""
    fields = store.on_device.layout.fields
    types = {store.cast_gradients.get(index, fields[index].dtype) for index in narrow_in(store)}
    return types == {torch.bfloat16}


class NarrowSlab(GradientSlab):
    """A slab in which gradients stay in the type in which they came down (Rule 3)."""

    def __init__(self, store: HostCopy, device: Device) -> None:
        self._store = store
        self._lock = threading.Lock()  # of whoever widens
        super().__init__(store, device)

    def _lay_out(
        self, store: HostCopy, allocate: Callable[[int], Tensor], trained: list[int], narrow: int, wide: int
    ) -> Iterator[tuple[int, GradientSlot]]:
        widen = weakref.WeakMethod(self.widen)  # what ``.grad`` leads to would live as long as the parameter
        for stays, nbytes in ((True, narrow), (False, wide)):
            flat, at = allocate(max(nbytes, self.alignment)) if nbytes else torch.empty(0), 0
            self.nbytes += flat.nbytes
            for index in trained:
                if (index in self.narrow) is not stays:
                    continue
                field = (self._fields if stays else store.host_layout.fields)[index]
                tensor = Layout.own_view(flat.untyped_storage(), replace(field, offset=at))
                dtype = store.host_layout.fields[index].dtype
                made = functools.partial(NarrowGradient.of, tensor, dtype, widen) if stays else None
                yield index, GradientSlot(tensor, flat, at, narrow=made)
                at += self._rounded(field.nbytes)

    def references(self, index: int, grad: Tensor | None) -> int:
        wide = 0 if self.wide is None else self.wide.references(index, grad)
        return super().references(index, grad) + wide

    def slots_for(self, indices: list[int], grads: list[Tensor]) -> tuple[list[GradientSlot], PackedGradients]:
        with self._lock:  # another thread may widen
            return super().slots_for(indices, grads) if self.wide is None else self.wide.slots_for(indices, grads)

    def widen(self) -> None:
        """Widen all gradients of the unit that are as they came down, into another slab."""
        with self._lock, quietly(), torch.inference_mode(False), torch.no_grad():
            kept = {
                index: grad
                for index, slot in self._slots.items()
                if type(grad := true_grad(self._store.params[index])) is NarrowGradient
                and grad.came_down is slot.tensor
            }
            if not kept:
                return
            # Where there is one already, gradients may be on their way into it.
            slab = GradientSlab(self._store, self._device) if self.wide is None else None
            params = [self._store.params[index] for index in kept]
            with self.exchanging(params):
                for parameter, (index, grad) in zip(params, kept.items(), strict=True):
                    place = None if slab is None else slab.place_of(index)
                    grad.wide = grad.made(place)
                    if true_grad(parameter) is grad:  # else code on another thread took it away meanwhile
                        set_true_grad(parameter, grad.wide)
            if slab is not None:
                self.is_read = slab.is_read = True
                self.wide, self.nbytes = slab, slab.nbytes
                # Nothing arrives here any more: the memory is free once nothing is on its way there.
                self._slots = {index: slot for index, slot in self._slots.items() if slot.narrow is None}
                self._tensors = [slot.tensor for slot in self._slots.values()]
                self._storages = list(map(Tensor.untyped_storage, self._tensors))
                self._packed.clear()


def _references_to_grad(parameter: Tensor) -> tuple[list[int], ...]:
    """Count the references to a parameter's gradient from Python and from C++, and those to its storage."""
    grads = [_known(true_grad(parameter))]
    return *references(grads), storage_uses(grads)


def _known(grad: Tensor | None) -> Tensor:
    assert grad is not None
    return grad


def is_own(parameter: Tensor, slab: GradientSlab | None, index: int) -> bool:
    """Whether only the parameter, and the slab that its gradient may be in, refer to that gradient.

    No count shows who refers to memory that is neither torch's nor a slab's, such as NumPy's.
    """
    grad = _known(true_grad(parameter))
    if type(grad) is NarrowGradient:  # of which no code knows
        return True
    if grad.layout is not torch.strided:
        return False
    from_slab = 0 if slab is None else slab.references(index, grad)
    if not from_slab and not grad.untyped_storage().resizable():
        return False
    del grad  # this reference would be counted
    return _references_to_grad(parameter) == _own_references(from_slab)


@functools.cache
def _own_references(from_slab: int) -> tuple[list[int], ...]:
    """Count the references to a gradient to which only its parameter refers, and a slab ``from_slab`` times."""
    parameter = torch.zeros(1, device="cpu", requires_grad=True)
    parameter.grad = torch.zeros(1, device="cpu")
    slab: list[Any] = [parameter.grad] * from_slab
    if from_slab:
        slab.append(parameter.grad.untyped_storage())  # which the slab refers to as well
    references = _references_to_grad(parameter)
    slab.clear()
    return references


def runs_to_widen(slots: Iterable[GradientSlot]) -> Iterator[tuple[Tensor, Tensor]]:
    """Merge gradients that lie side by side in a slab, and their FP32 views, into few flat tensors (Rule 2)."""
    runs: list[tuple[GradientSlot, int]] = []  # the first slot, and the bytes from its first one on
    for slot in slots:
        if runs:
            first, nbytes = runs[-1]
            ahead = slot.offset - first.offset
            beside = 0 <= ahead - nbytes < ALIGNMENT and slot.wide_offset - first.wide_offset == 2 * ahead
            if beside and slot.flat is first.flat and slot.tensor.dtype is first.tensor.dtype:
                runs[-1] = first, ahead + slot.tensor.nbytes
                continue
        runs.append((slot, slot.tensor.nbytes))
    for slot, nbytes in runs:
        narrow = slot.flat[slot.offset : slot.offset + nbytes].view(slot.tensor.dtype)
        yield narrow, slot.flat[slot.wide_offset : slot.wide_offset + 2 * nbytes].view(torch.float32)


def widened(grad: Tensor, wide_view: Tensor) -> Tensor:
    """Widen a flat gradient into its FP32 view, which ends where the gradient does or before (Rule 2)."""
    done, count = 0, grad.numel()
    while done < count:
        # As many elements as end before the first that is not read yet: at least half of those that are left.
        free = (grad.data_ptr() + 2 * done - wide_view.data_ptr()) // 4 - done
        if free < SMALL:
            wide_view[done:] = grad[done:].clone()
            break
        part = slice(done, min(count, done + free))
        wide_view[part] = grad[part]
        done = part.stop
    return wide_view


def widen(slots: Iterable[GradientSlot]) -> None:
    """Widen gradients, in the order in which they lie, into their FP32 views (Rule 2)."""
    for narrow, wide in runs_to_widen(slots):
        if not native.LIBRARY.widen(narrow, wide):  # else in one parallel region
            widened(narrow, wide)


def accumulate(parameter: Tensor, before: Tensor | None, grad: Tensor) -> None:
    """Add a gradient to ``.grad``, which is ``before``, or set it, as autograd does for a leaf."""
    if grad.dtype is not (dtype := true_dtype(parameter)):
        grad = grad.to(dtype)
    if before is None:
        set_true_grad(parameter, grad)
        return
    with torch.no_grad():  # in which autograd adds to a gradient that has a graph of its own (``create_graph``), too
        if before.layout is not torch.strided:
            set_true_grad(parameter, grad + before)  # in this order: a sparse one takes no dense one
        else:
            before += grad
