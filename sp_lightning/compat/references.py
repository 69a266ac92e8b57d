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

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_use_count: Any = vars(torch._C.TensorBase)["_use_count"]  # no annotation of torch's has it in 2.14


def references(tensors: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    """Count the references to each tensor, from Python and from C++."""
    return list(map(sys.getrefcount, tensors)), list(map(_use_count, tensors))


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
