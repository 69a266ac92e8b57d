"""Slabs: host memory that stays, exact to the page, and page-locked where the device can register it.

1. A slab is a private mapping. No allocator rounds it up, and its pages return to the system with its last tensor.
2. Pages are touched by several threads and then locked as one range: a copy that crosses two ranges is refused, and a
   driver faults in untouched pages one by one.
3. A slab is unlocked once: by `unlock_all`, with its last tensor, or as the interpreter ends.
4. A forked process does not get locked pages, which the kernel would copy for each worker of a data loader.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor

TOUCHED_AT_ONCE = 32 << 20  # bytes of one thread's turn
MOST_THREADS = 8  # with more, the kernel's own locks take the time


class PageLock(Protocol):
    """A device's way to lock host memory that it did not allocate."""

    def lock(self, address: int, nbytes: int) -> None:
        """Lock memory, so that the device copies from and to it by itself; raise RuntimeError if that is refused."""

    def unlock(self, address: int) -> None:
        """Unlock memory after all queued copies. Raises nothing: it runs where a tensor dies."""


class Slabs:
    """An allocator of slabs, which unlocks those that it locked."""

    def __init__(self) -> None:
        self._locks: list[weakref.finalize[..., Any]] = []

    def plain(self, nbytes: int) -> Tensor:
        """Allocate an unlocked slab, whose pages are taken when they are first written."""
        return _over(_memory(_mapping(nbytes)))

    def locked(self, nbytes: int, lock: PageLock) -> Tensor:
        """Allocate a locked slab."""
        mapping = _mapping(nbytes)
        memory = _memory(mapping)
        flat = _over(memory)
        _touch(flat)
        lock.lock(flat.data_ptr(), nbytes)
        self._locks.append(weakref.finalize(memory, _unlock, lock, mapping, flat.data_ptr(), os.getpid()))
        _share_with_forks(mapping, False)
        return flat

    def unlock_all(self) -> None:
        """Unlock all slabs, which remain as ordinary memory. Safe twice."""
        for unlock in self._locks:
            unlock()  # does nothing the second time
        self._locks.clear()


def _mapping(nbytes: int) -> mmap.mmap:
    size = max(nbytes, 1)
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
        return mmap.mmap(-1, size)
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # a fault for each 2 MiB instead of 4 KiB
        with suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def _memory(mapping: mmap.mmap) -> ctypes.Array[ctypes.c_uint8]:
    """Make the object to which all tensors over a mapping refer, and which dies with the last of them."""
    return (ctypes.c_uint8 * len(mapping)).from_buffer(mapping)


def _over(memory: ctypes.Array[ctypes.c_uint8]) -> Tensor:
    with torch.inference_mode(False):
        return torch.frombuffer(memory, dtype=torch.uint8)


def _touch(flat: Tensor) -> None:
    """Fault in all pages of a new slab."""
    pieces = [flat[begin : begin + TOUCHED_AT_ONCE : mmap.PAGESIZE] for begin in range(0, len(flat), TOUCHED_AT_ONCE)]
    with ThreadPoolExecutor(min(len(pieces), os.cpu_count() or 1, MOST_THREADS), "superpipeline-touch") as threads:
        list(threads.map(Tensor.zero_, pieces))


def _unlock(lock: PageLock, mapping: mmap.mmap, address: int, process: int) -> None:
    if os.getpid() == process:
        lock.unlock(address)
        _share_with_forks(mapping, True)


def keep_from_forks(flat: Tensor) -> None:
    """Keep memory that begins and ends with a page from forked processes, for good."""
    if hasattr(mmap, "MADV_DONTFORK"):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(flat.data_ptr()), ctypes.c_size_t(flat.nbytes), mmap.MADV_DONTFORK)


def _share_with_forks(mapping: mmap.mmap, shared: bool) -> None:
    if hasattr(mmap, "MADV_DONTFORK"):
        mapping.madvise(mmap.MADV_DOFORK if shared else mmap.MADV_DONTFORK)
