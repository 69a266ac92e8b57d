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

from ..errors import ExactnessError
from ..memory.parameters import DeviceParameter, true_version
from .dynamo import never_compiled_hook
from .offload import Offload, OffloadedTensor
from .streamed_unit import StreamedUnit

Pack = Callable[[Tensor], Any]
Unpack = Callable[[Any], Tensor]
_hooks = torch._C._autograd
_disable: Any = torch.autograd.graph.disable_saved_tensors_hooks


class SavedWeight:
    """A note of a saved tensor's place in a unit's buffer (Rule 1)."""

    __slots__ = (
        *("build", "bytes", "conjugate", "device_version", "dtype", "host_version", "index", "memory", "negative"),
        *("offset", "shape", "stride", "unit"),
    )

    def __init__(self, unit: StreamedUnit, tensor: Tensor) -> None:
        store, whole = unit.store, isinstance(tensor, DeviceParameter)  # else a view
        if isinstance(tensor, DeviceParameter):
            self.index = store.index_of[id(tensor.host)]
            tensor = store.device_view(self.index) if store.weights[self.index].parted else tensor
        else:
            self.index = store.index_at(int(tensor.storage_offset()) * tensor.element_size())
        self.unit = unit
        self.dtype = tensor.dtype
        self.offset = int(tensor.storage_offset())
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.conjugate, self.negative = tensor.is_conj(), tensor.is_neg()  # which operators apply to the bytes
        self.host_version = store.version(self.index)
        self.device_version = true_version(unit.stand_ins.outputs[self.index])
        self.build = unit.stand_ins.build
        self.memory = store.memory
        self.bytes = None if whole and self.index not in store.autocast else store.saved_bytes(self.index)

    def tensor(self) -> Tensor:
        """Return the tensor as a view of the unit's buffer, which must be resident, or of the weight's old bytes."""
        store, first = self.unit.store, self.offset
        storage = store.storage
        if self.bytes is None and torch.is_grad_enabled():  # create_graph: the new graph saves it past our hooks
            store.weights[self.index].saved_again = True
        if self.bytes is not None and self.bytes.before is not None:
            storage = store.bytes_before(self.index, self.bytes.before)
            first -= store.layout.fields[self.index].offset // self.dtype.itemsize
        empty = torch.empty(0, dtype=self.dtype, device=store.storage.device)
        tensor = empty.set_(storage, first, self.shape, self.stride)
        tensor = tensor.conj() if self.conjugate else tensor
        return torch._neg_view(tensor) if self.negative else tensor

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
        self._require = require
        self._offload = offload
        self._pushed: list[tuple[tuple[Pack, Unpack], Any]] = []  # and the function that `_disabled` replaced

    def push(self, name: str) -> None:
        """Put our hooks in force, in front of those that were (Rule 2)."""
        outer = _hooks._top_saved_tensors_default_hooks(False)
        hooks = (self._pack, self._unpack) if outer is None else self._composed(name, *outer)
        _hooks._push_saved_tensors_default_hooks(*hooks)
        self._pushed.append((hooks, torch.autograd.graph.disable_saved_tensors_hooks))
        torch.autograd.graph.disable_saved_tensors_hooks = self._disabled

    def pop(self) -> None:
        """Take our hooks out of force."""
        _, torch.autograd.graph.disable_saved_tensors_hooks = self._pushed.pop()
        _hooks._pop_saved_tensors_default_hooks()

    @contextlib.contextmanager
    def _disabled(self, error_message: str) -> Iterator[None]:
        """Stand in for ``disable_saved_tensors_hooks`` while ours are in force (Rule 5); other hooks still refuse."""
        hooks = _hooks._top_saved_tensors_default_hooks(False)
        ours = bool(self._pushed) and hooks == self._pushed[-1][0]
        if ours:
            _hooks._pop_saved_tensors_default_hooks()
        try:
            with _disable(error_message):
                yield
        finally:
            if ours:
                _hooks._push_saved_tensors_default_hooks(*hooks)

    @staticmethod
    @never_compiled_hook
    def enabled() -> bool:
        """Whether the calling code admits saved-tensor hooks; if not, saved weights keep their unit on the device."""
        return bool(_hooks._saved_tensors_hooks_is_enabled())  # type: ignore[attr-defined]

    def _unit_of(self, tensor: Tensor) -> StreamedUnit | None:
        """Return the unit in whose buffer a tensor lies, or whose parted stand-in it is (unit_store.py, Rule 10).

        A sparse tensor, which has no storage, belongs to none.
        """
        if not torch._C._has_storage(tensor):
            return None
        unit = self._owner(tensor.untyped_storage()._cdata)
        if unit is None and isinstance(tensor, DeviceParameter):
            unit = self._owner_of(tensor.host)
            return (
                unit if unit is not None and unit.store.weights[unit.store.index_of[id(tensor.host)]].parted else None
            )
        return unit

    @never_compiled_hook
    def _pack(self, tensor: Tensor) -> Any:
        unit = self._unit_of(tensor)
        if unit is not None:
            return SavedWeight(unit, tensor)
        packed = self._offload.pack(tensor)
        return SavedActivation(tensor) if packed is tensor else packed

    @never_compiled_hook
    def _unpack(self, saved: Any) -> Tensor:
        if type(saved) is SavedWeight:
            self._require(saved.unit)
            saved.check()
            return saved.tensor()
        if type(saved) is OffloadedTensor:
            return self._offload.unpack(saved)
        return saved.unpacked()  # type: ignore[no-any-return]

    def _composed(self, name: str, outer_pack: Pack, outer_unpack: Unpack) -> tuple[Pack, Unpack]:
        @never_compiled_hook
        def pack(tensor: Tensor) -> Any:
            unit = self._unit_of(tensor)
            return unit and SavedWeight(unit, tensor), outer_pack(tensor)

        @never_compiled_hook
        def unpack(pair: Any) -> Tensor:
            saved, packed = pair
            if saved is not None:
                self._require(saved.unit)
                saved.check()
            try:
                return outer_unpack(packed)
            except CheckpointError as error:
                raise ExactnessError(f"{name} ran again in backward, and not as it did in forward: {error}") from error

        return pack, unpack


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
