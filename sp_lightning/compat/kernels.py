"""Private names by which torch chooses kernels, and tells what its allocators did.

Tried with torch 2.11 and 2.15. Without the settings a forward that runs again in backward could take other kernels than
it took at first, and have other bits. The public functions around them warn, or set several at a time. Without the
figures each visit of a unit under ``window="auto"`` would take ten times as long to read the device's memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

memory_figures: Callable[[int], dict[str, Any]] = torch._C._accelerator_getDeviceStats


def openmp_parallel() -> int | None:
    """Return the address of the function by which torch's OpenMP runs a function on its threads, or None.

    Without it compiled steps would need a runtime of their own, whose threads would compete with torch's for the cores.
    """
    return _address("GOMP_parallel")


def _address(name: str) -> int | None:
    function = getattr(ctypes.CDLL(torch._C.__file__), name, None)
    return None if function is None else ctypes.cast(function, ctypes.c_void_p).value
