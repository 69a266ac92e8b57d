"""Tensors that autograd saves inside a visit, and how they are unpacked.

1. A saved tensor that lies in a streamed unit's buffer is replaced by a note of its place there. Unpacking the note
   makes the unit resident: the safety net under every way in which backward may reach a unit.
2. Only the innermost saved-tensor hooks apply. Ours pass everything on to the pair that was in force outside, units'
   tensors too, so that an outer checkpoint or ``save_on_cpu`` sees exactly what it sees in a plain run.
3. A weight that was written in place between its use and its backward is an error, as in a plain run, wherever it was
   written. Where ``p.data = ...`` replaced its data, autograd's reference to the weight itself gives the new bytes, and
   one to a view of it the old ones, as in a plain run: the old bytes are left to it (host_copy.py, Rule 6).
4. Under autocast a plain run saves a cast copy, which does not change when the weight is written. Nor do the saved
   bytes of a weight that travelled as that copy, or was cast on the device (autocast_weights.py, Rule 6).
5. Code that disables saved-tensor hooks (``torch.func`` does) would be refused where ours are in force: ours are taken
   out meanwhile, and those of a checkpoint of ours with them. What autograd saves then stays where it is, in both runs
   of a forward alike; it refers to the weights themselves, and keeps their units on the device.
6. A saved tensor may consist of others that lie in a unit's buffer: a quantised weight, or a view of one. Then each of
   these is packed by itself, and unpacking makes the whole again. So is a DTensor that goes to the host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError, checkpoint

from ..compat.dynamo import never_compiled_hook
from ..compat.patches import DISABLE_SAVED_TENSORS_HOOKS
from ..compat.tensors import (
    FLATTEN,
    flattened,
    has_storage,
    hide_from_selective_checkpoints,
    is_dtensor,
    negated_view,
    pop_hooks,
    push_hooks,
    storage_id,
    top_hooks,
    without_dispatch,
)
from ..errors import ExactnessError
from ..memory.watched_parameters import is_stand_in, true_data, true_version
from ..memory.weights import SavedBytes
from .autocast_weights import SavedCast
from .offload import Offload, OffloadedTensor
from .stand_ins import StreamedUnit

Pack = Callable[[Tensor], Any]
Unpack = Callable[[Any], Tensor]
OWN_CHECKPOINT = "is_superpipelines"  # an attribute of its hook that packs
SHARED = (Tensor, torch.nn.Module, ModuleType)  # what a copy of an object has in common with it


class SavedWeight(NamedTuple):
    """A note of a saved tensor's place in a unit's buffer (Rule 1)."""

    unit: StreamedUnit
    weight: int  # its index
    offset: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    conjugate: bool  # which operators apply to the bytes
    negative: bool
    host_version: int
    device_version: int
    build: int  # `StandIns.build` when autograd saved it: since then the stand-ins may have been made anew
    memory: object
    bytes: SavedBytes | None  # of a view, and of a weight that travelled cast; else the weight's own at unpacking

    @classmethod
    def of(cls, unit: StreamedUnit, tensor: Tensor) -> SavedWeight:
        """Note the place of a tensor: a weight of the unit, or a view of one."""
        store, stand_ins, is_weight = unit.store, unit.stand_ins, is_stand_in(tensor)
        place = tensor
        if is_stand_in(tensor):
            index = store.index_of[id(tensor.host)]
            if store.weights[index].parted:
                place = store.on_device.view(index)
        else:
            index = store.on_device.index_at(int(tensor.storage_offset()) * tensor.itemsize)
        return cls(
            unit,
            index,
            int(place.storage_offset()),
            place.dtype,
            place.shape,
            place.stride(),
            place.is_conj(),
            place.is_neg(),
            store.version(index),
            true_version(stand_ins.outputs[index]),
            stand_ins.build,
            store.memory,
            None if is_weight and index not in store.autocast else store.saved_bytes(index),
        )

    def tensor(self) -> Tensor:
        """Return the tensor as a view of the unit's buffer, which must be resident, or of the weight's old bytes."""
        store, first = self.unit.store, self.offset
        storage = store.on_device.storage
        if self.bytes is None and torch.is_grad_enabled():  # create_graph: the new graph saves it past our hooks
            store.weights[self.weight].saved_again = True
        if self.bytes is not None and self.bytes.before is not None:
            field = store.on_device.layout.fields[self.weight]
            with torch.inference_mode(False), torch.no_grad():
                before = torch.empty_strided(field.shape, field.stride, dtype=field.dtype, device=storage.device)
                storage = before.copy_(self.bytes.before).untyped_storage()
            store.counters.bytes_up += field.nbytes
            first -= field.offset // self.dtype.itemsize
        tensor = true_data(self.unit.stand_ins.places[self.weight])  # takes less time than an empty one
        if tensor.dtype is not self.dtype:
            tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, first, self.shape, self.stride)
        tensor = tensor.conj() if self.conjugate else tensor
        return negated_view(tensor) if self.negative else tensor

    def check(self) -> None:
        """Raise if the weight was written in place since it was saved (Rules 3 and 4)."""
        store, stand_ins = self.unit.store, self.unit.stand_ins
        if self.weight in store.autocast:
            return
        host = store.version(self.weight)
        device = true_version(stand_ins.outputs[self.weight]) if stand_ins.build == self.build else self.device_version
        if host != self.host_version or device != self.device_version:
            written_on_host = host != self.host_version
            now, then = (host, self.host_version) if written_on_host else (device, self.device_version)
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{store.names[self.weight]} is at version {now}; expected version {then} instead"
            )


class SavedWhole(NamedTuple):
    """A note of a saved tensor that consists of others, some of which lie in a unit's buffer (Rule 6)."""

    form: Any
    parts: list[Any]  # as each is packed
    device: torch.device


class SavedTensors:
    """The pair of hooks in force during an outermost visit."""

    def __init__(
        self,
        owner: Callable[[int], StreamedUnit | None],
        owner_of: Callable[[Tensor], StreamedUnit | None],
        require: Callable[[StreamedUnit], None],
        offload: Offload,
        casts: Mapping[int, Callable[[Tensor], SavedCast]],
    ) -> None:
        self._owner = owner  # of a storage
        self._owner_of = owner_of  # of a host parameter
        self._require = require
        self.offload = offload
        self.in_force = False
        self._casts = casts

    def push(self, name: str) -> None:
        """Put our hooks in force, in front of the present ones (Rule 2)."""
        outer = top_hooks(False)
        hooks: tuple[Pack, Unpack] = self._pack, self._unpack
        if outer is not None:
            hooks = partial(self._pack_in_front, outer[0]), partial(self._unpack_in_front, name, outer[1])
            hide_from_selective_checkpoints(hooks[0], outer)
        push_hooks(*hooks)
        self.in_force = True
        DISABLE_SAVED_TENSORS_HOOKS.install(_disabled)

    def pop(self) -> None:
        """Take our hooks out of force."""
        self.in_force = False
        DISABLE_SAVED_TENSORS_HOOKS.remove()
        pack, _ = top_hooks(False)
        pop_hooks()
        if isinstance(pack, partial):
            vars(pack).clear()  # what graphs refer to leads to no hooks that it does not need

    def _unit_of(self, tensor: Tensor) -> StreamedUnit | None:
        """Return the unit in whose buffer a tensor lies, or whose parted stand-in it is (stand_ins.py, Rule 7).

        A sparse tensor, which has no storage, belongs to none.
        """
        if not has_storage(tensor):
            return None
        unit = self._owner(storage_id(tensor.untyped_storage()))
        if unit is None and is_stand_in(tensor):
            unit = self._owner_of(tensor.host)
            return (
                unit if unit is not None and unit.store.weights[unit.store.index_of[id(tensor.host)]].parted else None
            )
        return unit

    def _parts(self, tensor: Tensor) -> tuple[Any, list[Tensor]] | None:
        """Take a tensor apart that consists of others, if any lies in a unit's buffer or is to go down (Rule 6)."""
        with without_dispatch():
            form, named = flattened(tensor)
        parts = [part for _, part in named]
        goes_down = self.offload.active and is_dtensor(tensor)
        return (form, parts) if goes_down or any(self._unit_of(part) is not None for part in parts) else None

    @never_compiled_hook
    def _pack(self, tensor: Tensor) -> Any:
        if hasattr(type(tensor), FLATTEN) and (found := self._parts(tensor)) is not None:
            return SavedWhole(found[0], [self._pack(part) for part in found[1]], tensor.device)
        unit = self._unit_of(tensor)
        if unit is not None:
            return SavedWeight.of(unit, tensor)
        if self._casts and has_storage(tensor):
            note = self._casts.get(storage_id(tensor.untyped_storage()))
            if note is not None:
                return note(tensor)
        if self.offload.active:
            packed = self.offload.pack(tensor)
            if packed is not tensor:
                return packed
        # It stays where it is, detached: a saved result leads to its node, and neither would ever be freed. Its version
        # goes along, as autograd checks none of what goes through hooks.
        return tensor.detach(), true_version(tensor)

    @never_compiled_hook
    def _unpack(self, saved: Any) -> Tensor:
        if type(saved) is SavedWeight:
            self._require(saved.unit)
            saved.check()
            return saved.tensor()
        if type(saved) is SavedCast:
            self._require(saved.bytes.unit)
            return saved.tensor()
        if type(saved) is OffloadedTensor:
            return self.offload.unpack(saved)
        if type(saved) is SavedWhole:
            return saved.form.whole(map(self._unpack, saved.parts), saved.device)  # type: ignore[no-any-return]
        tensor, version = saved
        if tensor._version != version:  # Rule 3
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a tensor of shape {tuple(tensor.shape)} is at version {tensor._version}; expected version {version} "
                "instead"
            )
        return tensor  # type: ignore[no-any-return]

    @never_compiled_hook
    def _pack_in_front(self, outer_pack: Pack, tensor: Tensor) -> Any:
        if hasattr(type(tensor), FLATTEN) and (found := self._parts(tensor)) is not None:
            units = map(self._unit_of, found[1])
            notes = [SavedWeight.of(unit, part) for unit, part in zip(units, found[1], strict=True) if unit is not None]
            return notes, outer_pack(tensor)
        unit = self._unit_of(tensor)
        return unit and SavedWeight.of(unit, tensor), outer_pack(tensor)

    @never_compiled_hook
    def _unpack_in_front(self, name: str, outer_unpack: Unpack, pair: Any) -> Tensor:
        saved, packed = pair
        for note in saved if type(saved) is list else () if saved is None else (saved,):
            self._require(note.unit)
            note.check()
        try:
            return outer_unpack(packed)
        except CheckpointError as error:
            found = str(error).partition("Tip:")[0].strip()  # torch's tips are for those who call a checkpoint
            raise ExactnessError(
                f"{name} ran again in backward, and not as it did in forward: {found}\nIt depends on something outside "
                "of it that has changed (a counter, a cache such as parametrize.cached(), a level of forward-mode "
                "differentiation that ended before backward); use activations='keep' or 'offload'"
            ) from error


@contextlib.contextmanager
def _disabled(error_message: str) -> Iterator[None]:
    """Disable saved-tensor hooks where ours are in force (Rule 5); other hooks still refuse."""
    ours = []
    while (hooks := top_hooks(False)) is not None and (_is_ours(hooks[0]) or hasattr(hooks[0], OWN_CHECKPOINT)):
        ours.append(hooks)
        pop_hooks()
    try:
        with DISABLE_SAVED_TENSORS_HOOKS.original(error_message):
            yield
    finally:
        for hooks in reversed(ours):
            push_hooks(*hooks)


def mark_own_checkpoint() -> None:
    """Mark the hooks in force as our own checkpoint's (Rule 5)."""
    setattr(top_hooks(False)[0], OWN_CHECKPOINT, True)


def is_checkpointed() -> bool:
    """Whether a non-reentrant checkpoint runs the code that runs now, for the first or second time."""
    return getattr(_pack_behind_ours(), "__module__", None) == checkpoint.__module__


def _is_ours(pack: Pack) -> bool:
    innermost = getattr(pack, "func", pack)  # ours may be a partial function
    return isinstance(getattr(innermost, "__self__", None), SavedTensors)


def _pack_behind_ours() -> Pack | None:
    """Return the pack hook that is in force, or to which ours passes everything on (Rule 2); None if there is none."""
    hooks = top_hooks(False)
    pack: Any = hooks and hooks[0]
    while pack is not None and _is_ours(pack):
        pack = pack.args[0] if isinstance(pack, partial) else None
    return pack  # type: ignore[no-any-return]


def tensors_in(value: Any) -> list[Tensor]:
    """Find all tensors in a value that no module leads to."""
    return [item for item in reachable(value) if isinstance(item, Tensor)]


def reachable(value: Any) -> list[Any]:
    """Find what a copy of a value shares with it: tensors, modules, and Python's modules, which lead to everything.

    Looks into sequences, sets, mappings, bound methods, partial functions and attributes of plain objects.
    """
    found, stack, seen = [], [value], set()
    while stack:
        item = stack.pop()
        if isinstance(item, SHARED):
            found.append(item)
        elif id(item) not in seen:
            seen.add(id(item))
            if isinstance(item, dict):
                stack += dict.values(item)  # a registry's own ``values`` may import what it names
            elif isinstance(item, (list, tuple, set, frozenset)):
                stack += item
            elif isinstance(item, MethodType):
                stack.append(item.__self__)
            elif isinstance(item, partial):
                stack += (item.func, item.args, item.keywords)
            elif hasattr(item, "__dict__") and not isinstance(item, type):
                stack += vars(item).values()
    return found
