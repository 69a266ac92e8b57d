"""Tensors that autograd saves inside a visit, and how they are unpacked.

1. A saved tensor that lies in a streamed unit's buffer is replaced by a note of its place there. Unpacking the note
   makes the unit resident: the safety net under every way in which backward may reach a unit.
2. Only the innermost saved-tensor hooks apply. Ours pass everything on to the pair that was in force outside, units'
   tensors too, so that an outer checkpoint or ``save_on_cpu`` sees exactly what it sees in a plain run.
3. A weight that was written in place between its use and its backward is an error, as in a plain run, wherever it was
   written. Where ``p.data = ...`` replaced its data, autograd's reference to the weight itself gives the new bytes, and
   one to a view of it the old ones, as in a plain run: the old bytes are left to it (unit_store.py, Rule 8).
4. Under autocast a plain run saves a cast copy, which does not change when the weight is written. Nor do the saved
   bytes of a weight that travelled as that copy.
5. Code that disables saved-tensor hooks (``torch.func`` does) would be refused where ours are in force: ours are taken
   out meanwhile. What autograd saves then refers to the weights themselves, and keeps their units on the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from ..compat.dynamo import never_compiled_hook
from ..compat.graph import pop_hooks, push_hooks, top_hooks
from ..compat.patches import DISABLE_SAVED_TENSORS_HOOKS
from ..compat.storages import has_storage, negated_view, storage_id
from ..errors import ExactnessError
from ..memory.parameters import DeviceParameter, true_version
from .offload import Offload, OffloadedTensor
from .streamed_unit import StreamedUnit

Pack = Callable[[Tensor], Any]
Unpack = Callable[[Any], Tensor]


class SavedWeight:
    """A note of a saved tensor's place in a unit's buffer (Rule 1)."""

    __slots__ = (
        *("build", "bytes", "conjugate", "device_version", "dtype", "host_version", "index", "memory", "negative"),
        *("offset", "shape", "stride", "unit", "whole"),
    )

    def __init__(self, unit: StreamedUnit, tensor: Tensor, whole: bool) -> None:
        self.unit = unit
        self.dtype = tensor.dtype
        self.offset: int = tensor.storage_offset()  # type: ignore[assignment]
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.conjugate, self.negative = tensor.is_conj(), tensor.is_neg()  # which operators apply to the bytes
        self.index = unit.store.field_at(self.offset * tensor.element_size())
        self.host_version = unit.store.version(self.index)
        self.device_version = true_version(unit.stand_ins.outputs[self.index])
        self.build = unit.stand_ins.build
        self.memory = unit.store.memory
        self.whole = whole  # the weight itself, not a view of it
        stays = not self.whole or self.index in unit.store.autocast
        self.bytes = unit.store.contents[self.index] if stays else None

    def is_of(self, tensor: Tensor, whole: bool) -> bool:
        """Whether the note is the one that saving this tensor now would give; both begin at the same element."""
        store, stand_ins = self.unit.store, self.unit.stand_ins
        return (
            self.memory is store.memory
            and self.whole is whole
            and self.dtype is tensor.dtype
            and self.shape == tensor.shape
            and self.stride == tensor.stride()
            and self.conjugate == tensor.is_conj()
            and self.negative == tensor.is_neg()
            and self.build == stand_ins.build
            and self.host_version == store.version(self.index)
            and self.device_version == true_version(stand_ins.outputs[self.index])
            and (self.bytes is None or self.bytes is store.contents[self.index])
        )

    def tensor(self) -> Tensor:
        """Return the tensor as a view of the unit's buffer, which must be resident, or of the weight's old bytes."""
        store, first = self.unit.store, self.offset
        storage = store.storage
        if self.bytes is None and torch.is_grad_enabled():  # create_graph: the new graph saves it past our hooks
            store.saved_again.add(self.index)
        if self.bytes is not None and self.bytes.before is not None:
            storage = store.bytes_before(self.index, self.bytes.before)
            first -= store.layout.fields[self.index].offset // self.dtype.itemsize
        empty = torch.empty(0, dtype=self.dtype, device=store.storage.device)
        tensor = empty.set_(storage, first, self.shape, self.stride)
        tensor = tensor.conj() if self.conjugate else tensor
        return negated_view(tensor) if self.negative else tensor

    def check(self) -> None:
        """Raise if the weight was written in place since it was saved (Rules 3 and 4)."""
        store, stand_ins = self.unit.store, self.unit.stand_ins
        if self.index in store.autocast:
            return
        host = store.version(self.index)
        device = true_version(stand_ins.outputs[self.index]) if stand_ins.build == self.build else self.device_version
        if host != self.host_version or device != self.device_version:
            written_on_host = host != self.host_version
            now, then = (host, self.host_version) if written_on_host else (device, self.device_version)
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{store.names[self.index]} is at version {now}; expected version {then} instead"
            )


def saved_weight(unit: StreamedUnit, tensor: Tensor) -> SavedWeight:
    """Return a note of a tensor's place; reuse the last one while it holds, since whole weights are saved often."""
    whole = isinstance(tensor, DeviceParameter)
    place = unit.store.place_of(tensor.host) if isinstance(tensor, DeviceParameter) else tensor
    before: SavedWeight | None = unit.store.saved.get(place.storage_offset())  # type: ignore[arg-type]
    if before is not None and before.is_of(place, whole):
        return before
    made = SavedWeight(unit, place, whole)
    unit.store.keep_saved(made.index, made.offset, made)
    return made


class SavedActivation:
    """A saved tensor that stays where it is, with its version: autograd checks none of what goes through hooks."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # a saved result leads to its node: neither would ever be freed
        self.version = true_version(tensor)

    def unpacked(self) -> Tensor:
        """Return the tensor; raise if it was written in place since it was saved (Rule 3)."""
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a tensor of shape {tuple(self.tensor.shape)} is at version {self.tensor._version}; "
                f"expected version {self.version} instead"
            )
        return self.tensor


class SavedTensors:
    """The pair of hooks in force during an outermost visit."""

    def __init__(
        self,
        owner: Callable[[int], StreamedUnit | None],
        owner_of: Callable[[Tensor], StreamedUnit | None],
        require: Callable[[StreamedUnit], None],
        offload: Offload,
    ) -> None:
        self._owner = owner  # of a storage
        self._owner_of = owner_of  # of a host parameter
        self.require = require
        self._offload = offload

    def push(self, name: str) -> None:
        """Put our hooks in force, in front of those that were (Rule 2)."""
        outer = top_hooks(False)
        hooks = self if outer is None else _Composed(self, name, *outer)
        push_hooks(hooks.pack, hooks.unpack)
        DISABLE_SAVED_TENSORS_HOOKS.install(_disabled)

    @staticmethod
    def pop() -> None:
        """Take our hooks out of force."""
        DISABLE_SAVED_TENSORS_HOOKS.remove()
        pop_hooks()

    def unit_of(self, tensor: Tensor) -> StreamedUnit | None:
        """Return the unit in whose buffer a tensor lies, or whose parted stand-in it is (unit_store.py, Rule 10).

        A sparse tensor, which has no storage, belongs to none.
        """
        if not has_storage(tensor):
            return None
        unit = self._owner(storage_id(tensor.untyped_storage()))
        if unit is None and isinstance(tensor, DeviceParameter):
            unit = self._owner_of(tensor.host)
            return unit if unit is not None and unit.store.is_parted(tensor.host) else None
        return unit

    @never_compiled_hook
    def pack(self, tensor: Tensor) -> Any:
        """Return what autograd is to keep of a tensor (Rule 1)."""
        unit = self.unit_of(tensor)
        if unit is not None:
            return saved_weight(unit, tensor)
        packed = self._offload.pack(tensor)
        return SavedActivation(tensor) if packed is tensor else packed

    @never_compiled_hook
    def unpack(self, saved: Any) -> Tensor:
        """Return the tensor of which ``saved`` was kept."""
        if type(saved) is SavedWeight:
            self.require(saved.unit)
            saved.check()
            return saved.tensor()
        if type(saved) is OffloadedTensor:
            return self._offload.unpack(saved)
        return saved.unpacked()  # type: ignore[no-any-return]


class _Composed:
    """Our hooks in front of the pair that was in force, for one visit (Rule 2)."""

    def __init__(self, ours: SavedTensors, name: str, pack: Pack, unpack: Unpack) -> None:
        self._ours, self._name = ours, name
        self._outer_pack, self._outer_unpack = pack, unpack

    @never_compiled_hook
    def pack(self, tensor: Tensor) -> Any:
        """Return what we keep of a tensor, and what the pair outside does."""
        unit = self._ours.unit_of(tensor)
        return unit and saved_weight(unit, tensor), self._outer_pack(tensor)

    @never_compiled_hook
    def unpack(self, pair: Any) -> Tensor:
        """Return the tensor that the pair outside kept, with its unit resident."""
        saved, packed = pair
        if saved is not None:
            self._ours.require(saved.unit)
            saved.check()
        try:
            return self._outer_unpack(packed)
        except CheckpointError as error:
            said = f"{self._name} ran again in backward, and not as it did in forward: {error}"
            raise ExactnessError(said) from error


@contextlib.contextmanager
def _disabled(error_message: str) -> Iterator[None]:
    """Disable saved-tensor hooks where ours are in force (Rule 5); other hooks still refuse."""
    hooks = top_hooks(False)
    ours = hooks is not None and getattr(hooks[0], "__module__", None) == __name__
    if ours:
        pop_hooks()
    try:
        with DISABLE_SAVED_TENSORS_HOOKS.original(error_message):
            yield
    finally:
        if ours:
            push_hooks(*hooks)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Find all tensors in a value: in sequences, mappings, dataclasses and attributes of plain objects."""
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
