"""Private names by which torch chooses kernels, and tells what its allocators did.

Tried with torch 2.11 and 2.15. Without the settings a forward that runs again in backward could take other kernels than
it took at first, and have other bits. The public functions around them warn, or set several at a time. Without the
figures each visit of a unit under ``window="auto"`` would take ten times as long to read the device's memory.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.nn.attention import SDPBackend
from torch.utils._foreach_utils import (
    _device_has_foreach_support,
    _group_tensors_by_device_and_dtype,
    _has_foreach_support,
)


class _OrderOfAttention:
    """Whether torch has set the order in which it tries its kernels for attention.

    On a device that cuDNN serves best, torch puts cuDNN's first itself, at a process's first attention and whatever the
    order was. Whoever put back an order that was read earlier would have other kernels from there on.
    """

    BY_TORCH = [
        SDPBackend.CUDNN_ATTENTION.value,
        SDPBackend.FLASH_ATTENTION.value,
        SDPBackend.EFFICIENT_ATTENTION.value,
        SDPBackend.MATH.value,
    ]

    def __init__(self) -> None:
        self.is_by_torch = False

    def note(self) -> None:
        """Note that the order is the one that torch sets: somebody else may have chosen it on another device."""
        on_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self.is_by_torch = on_cuda and torch.cuda.get_device_capability()[0] in (9, 10)


# Settings that contexts change for a while: (getter, setter).
CHOICES: list[tuple[Callable[[], Any], Callable[[Any], object]]] = [
    (torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
    (torch._C._get_mem_efficient_sdp_enabled, torch._C._set_sdp_use_mem_efficient),
    (torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
    (torch._C._get_cudnn_sdp_enabled, torch._C._set_sdp_use_cudnn),
    (torch._C._get_overrideable_sdp_enabled, torch._C._set_sdp_use_overrideable),
    (torch._C._get_sdp_priority_order, torch._C._set_sdp_priority_order),
    (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    (torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark),
    (torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic),
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
]


_ORDER = _OrderOfAttention()
_PLACE = [setter for _, setter in CHOICES].index(torch._C._set_sdp_priority_order)


def kernel_choices() -> list[Any]:
    """Read the settings for choosing kernels (`torch.nn.attention.sdpa_kernel`, `torch.backends.cudnn.flags`)."""
    found = [get() for get, _ in CHOICES]
    if not _ORDER.is_by_torch and found[_PLACE][:-1] == _ORDER.BY_TORCH:
        _ORDER.note()
    return [*found, _ORDER.is_by_torch]


def choose_kernels(found: list[Any]) -> None:
    """Set what `kernel_choices` read, except for what is in effect already."""
    *values, was_by_torch = found
    if not _ORDER.is_by_torch and torch._C._get_sdp_priority_order()[:-1] == _ORDER.BY_TORCH:
        _ORDER.note()
    if _ORDER.is_by_torch and not was_by_torch:
        values[_PLACE] = [*_ORDER.BY_TORCH, values[_PLACE][-1]]
    for (get, choose), value in zip(CHOICES, values, strict=True):
        if get() != value:
            choose(value)


memory_figures: Callable[[int], dict[str, Any]] = torch._C._accelerator_getDeviceStats


def mkl_root() -> int | None:
    """Return the address of MKL's square root of many numbers, or None where torch has no MKL.

    Without it an optimizer's step in compiled code would have other roots for the rarest numbers, and not be used.
    """
    return _address("VMSSQRT_")


def openmp_parallel() -> int | None:
    """Return the address of the function by which torch's OpenMP runs a function on its threads, or None.

    Without it compiled steps would need a runtime of their own, whose threads would compete with torch's for the cores.
    """
    return _address("GOMP_parallel")


def _address(name: str) -> int | None:
    function = getattr(ctypes.CDLL(torch._C.__file__), name, None)
    return None if function is None else ctypes.cast(function, ctypes.c_void_p).value


def share_operators(threads: int) -> bool:
    """Let at most `threads` threads share each operator of the calling thread; return whether that took effect.

    Without it threads that step an optimizer on a busy machine would wait for each other in each operator. The public
    function changes the number for all threads that begin later.
    """
    torch.get_num_threads()  # sets the number of a thread that never asked for it
    function = getattr(ctypes.CDLL(torch._C.__file__), "omp_set_num_threads", None)
    if function is not None:
        function(threads)
    return torch.get_num_threads() == threads


@functools.cache
def can_share_operators() -> bool:
    """Whether ``share_operators`` does what it says: it finds torch's threads by the name of a function of OpenMP."""
    with ThreadPoolExecutor(1) as thread:
        return all(thread.map(share_operators, (1, 2, 1)))


def grouped_by_device_and_dtype(tensors: list[torch.Tensor]) -> list[list[int]]:
    """Group tensors, by their places in the list, in torch's order, which is not that of the list."""
    groups: Any = _group_tensors_by_device_and_dtype([tensors], with_indices=True)  # type: ignore[list-item]
    return [places for _, places in groups.values()]


def norms_of_each(tensors: list[torch.Tensor], kind: float, foreach: bool | None) -> list[torch.Tensor]:
    """Compute the norm of each tensor as `torch.nn.utils.clip_grad_norm_` does: by its kernels for lists, or singly."""
    device = tensors[0].device
    if _has_foreach_support(tensors, device) if foreach is None else foreach and _device_has_foreach_support(device):
        return list(torch._foreach_norm(tensors, kind))
    return [torch.linalg.vector_norm(tensor, kind) for tensor in tensors]
