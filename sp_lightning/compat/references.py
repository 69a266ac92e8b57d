"""Reference counts: whether something else refers to a tensor, to its bytes, or to an object.

1. A count includes the references of the code that counts. So each count is compared with a baseline: what the same
   function counted for an object that nothing else refers to, or at a time when nothing else referred to this one.
2. A tensor's bytes can be written through its storage (`p.untyped_storage()`), which is one object in Python for all
   who ask for it. So the uses of a storage are those by tensors, in C++, and those of that object, in Python.
3. Only this file depends on how CPython counts references (3.10 to 3.14, with the global interpreter lock) and on
   torch's private ``Tensor._use_count`` and ``torch._C._storage_Use_Count`` (tried with 2.11 and 2.15).
   Without them nothing could be stepped beside other work, and no unit could leave the device.
"""

from __future__ import annotations

import functools
import operator
import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .tensors import has_storage, storage_id

_use_count: Any = vars(torch._C.TensorBase)["_use_count"]  # no annotation of torch's has it in 2.14
_storage_uses: Any = torch._C._storage_Use_Count
OWN_PARAMETER_USES = 2  # in C++: by the Python object, and by the node that accumulates the gradient


def references(tensors: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    """Count the references to each tensor, from Python and from C++."""
    return list(map(sys.getrefcount, tensors)), list(map(_use_count, tensors))


def caller_has(name: str, module: str) -> bool:
    """Whether the caller of the calling function has a local variable of this name, in a function of this module."""
    frame = sys._getframe(2)
    return frame.f_globals.get("__name__") == module and name in frame.f_locals


def storage_uses(tensors: Sequence[Tensor]) -> list[int]:
    """Count the tensors and objects that refer to each tensor's bytes (Rule 2)."""
    return uses_of(list(map(Tensor.untyped_storage, tensors)))


def uses_of(storages: Sequence[torch.UntypedStorage]) -> list[int]:
    """Count the tensors and objects that refer to each storage (Rule 2)."""
    return list(map(operator.add, map(_storage_uses, map(storage_id, storages)), map(sys.getrefcount, storages)))


@functools.cache
def own_uses(references: int = 0) -> int:
    """Count the uses of a storage that one tensor and this many references in Python have."""
    tensor = torch.zeros(1, device="cpu")
    others = [tensor.untyped_storage()] * references
    found = storage_uses([tensor])[0]
    del others
    return found


@functools.cache
def uses_without_tensor() -> int:
    """Count the uses of a storage to which one reference in Python is left."""
    kept = [torch.zeros(1, device="cpu").untyped_storage()]
    return uses_of(list(kept))[0]


def shares_storage(tensor: Tensor) -> bool:
    """Whether something else refers to the bytes of this tensor."""
    return storage_uses([tensor])[0] > own_uses()


def sharing_bytes(tensors: Sequence[Tensor]) -> set[int]:
    """Return the ids of the tensors whose bytes another tensor refers to; sharing a storage alone does not count."""
    by_storage: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        by_storage.setdefault(storage_id(tensor.untyped_storage()), []).append(tensor)
    found: set[int] = set()
    for members in by_storage.values():
        if overlapping(members) or storage_uses(members[:1])[0] >= own_uses() + len(members):
            found.update(map(id, members))
    return found


def overlapping(tensors: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Find tensors, of these, that have bytes in common with one that begins before them; each pair is one of these."""
    found: list[tuple[Tensor, Tensor]] = []
    furthest: tuple[int, Tensor] | None = None  # the end of what lies before, and whose it is
    for tensor in sorted(filter(Tensor.data_ptr, tensors), key=Tensor.data_ptr):  # those that have bytes
        end = tensor.data_ptr() + _extent(tensor)
        if furthest is not None and tensor.numel() and tensor.data_ptr() < furthest[0]:
            found.append((furthest[1], tensor))
        if furthest is None or end > furthest[0]:
            furthest = end, tensor
    return found


def _extent(tensor: Tensor) -> int:
    """Count the bytes from a tensor's first element to the end of its last one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize if tensor.numel() else 0


def is_referenced_elsewhere(parameter: Tensor) -> bool:
    """Whether code in C++, such as a graph, refers to a parameter beyond its own accumulation of gradients."""
    return int(_use_count(parameter)) > OWN_PARAMETER_USES


def is_entry_shared(holder: Mapping[Any, Any], key: Any) -> bool:
    """Whether something other than this entry refers to the object under the key."""
    return _of_entry(holder, key) != _own_entry()


def are_tensors_of_entry_shared(holder: Mapping[Any, Any], key: Any) -> bool:
    """Whether something else refers to the dictionary under this key, to a tensor in it, or to a tensor's bytes."""
    if is_entry_shared(holder, key):
        return True
    tensors = [value for value in holder[key].values() if isinstance(value, Tensor)]
    return not all(map(has_storage, tensors)) or _of_listed(tensors) != _own_listed(len(tensors))


def _of_entry(holder: Mapping[Any, Any], key: Any) -> tuple[int, int]:
    return sys.getrefcount(holder[key]), weakref.getweakrefcount(holder[key])


@functools.cache
def _own_entry() -> tuple[int, int]:
    return _of_entry({"key": {}}, "key")


def _of_listed(tensors: list[Tensor]) -> tuple[list[int], ...]:
    return *references(tensors), list(map(weakref.getweakrefcount, tensors)), storage_uses(tensors)


@functools.cache
def _own_listed(count: int) -> tuple[list[int], ...]:
    """Count the references to tensors that one dictionary and one list refer to."""
    entries = {number: torch.zeros(1, device="cpu") for number in range(count)}
    return _of_listed(list(entries.values()))
