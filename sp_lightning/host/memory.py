"""Slabs: host memory that stays, exact to the page, and page-locked where the device can register it.

- A slab is a private mapping. No allocator rounds it up, and its pages return to the system with its last tensor.
- Pages are touched by several threads and then locked as one range: a copy that crosses two ranges is refused, and a
  driver faults in untouched pages one by one.
- A slab is unlocked once: by `unlock_all`, with its last tensor, or as the interpreter ends.
- A forked process does not get locked pages, which the kernel would copy for each worker of a data loader.
- Where several processes share slabs (ranks/shared_slabs.py), user tensors lie over a private mapping of the pages, and
  copies and steps use a shared one, the *truth*. Here both are the same mapping.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor

TOUCHED_AT_ONCE = 32 << 20  # bytes that a thread touches at a time
MOST_THREADS = 8  # with more, the kernel's own locks take the time
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # mallopt's numbers of these parameters
SMALL_THRESHOLD, USUAL_THRESHOLD = 1 << 20, 32 << 20  # bytes of the blocks that malloc maps one by one


class PageLock(Protocol):
    """A device's way to lock host memory that it did not allocate."""

    def lock(self, address: int, nbytes: int) -> None:
        """Lock memory, so that the device copies from and to it by itself; raise RuntimeError if that is refused."""

    def unlock(self, address: int) -> None:
        """Unlock memory after all queued copies. Blocks; raises nothing, as it runs where a tensor dies."""


class Slabs:
    """An allocator of slabs, which unlocks those that it locked."""

    are_hidden = False  # whether no forked process gets any slab

    def __init__(self) -> None:
        self._locks: list[weakref.finalize[..., Any]] = []

    def expect(self, nbytes: int) -> None:
        """Prepare for slabs of weights of this many bytes, with gradients and state; does nothing here."""

    def plain(self, nbytes: int) -> Tensor:
        """Allocate an unlocked slab, whose pages are taken when they are first written."""
        return tensor_over(memory_of(self._mapping(nbytes)))

    def locked(self, nbytes: int, lock: PageLock | None) -> Tensor:
        """Allocate a page-locked slab; without a PageLock, from torch's own page-locked memory."""
        if lock is None:
            return locked_by_torch(nbytes)
        mapping = self._mapping(nbytes)
        memory = memory_of(mapping)
        flat = tensor_over(memory)
        self._touch(flat)
        lock.lock(flat.data_ptr(), nbytes)
        self._locks.append(weakref.finalize(memory, unlock, lock, mapping, flat.data_ptr(), os.getpid()))
        mapping.madvise(mmap.MADV_DONTFORK)
        return flat

    def unlock_all(self) -> None:
        """Unlock all slabs, which remain usable as ordinary memory. A second call does nothing."""
        for unlock in self._locks:
            unlock()  # does nothing the second time
        self._locks.clear()

    def truth(self, tensor: Tensor) -> Tensor:
        """Return the tensor over the truth that has ``tensor``'s offset, shape and strides: here ``tensor`` itself."""
        return tensor

    def fill(self, tensor: Tensor, source: Tensor) -> None:
        """Copy a weight's initial values into a tensor over a slab."""
        tensor.copy_(source)

    def keep(self, tensor: Tensor) -> Tensor:
        """Return the host tensor to use for a weight whose slab holds only a wire copy: here ``tensor`` itself."""
        return tensor

    def _mapping(self, nbytes: int) -> mmap.mmap:
        """Map new memory for a slab."""
        return private_mapping(nbytes)

    def _touch(self, flat: Tensor) -> None:
        """Fault in all pages of a new slab."""
        touch_pages(flat, Tensor.zero_)


def private_mapping(nbytes: int) -> mmap.mmap:
    """Map anonymous memory that no other process shares, in huge pages where the system has them."""
    mapping = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)  # a fault for each 2 MiB instead of 4 KiB
    return mapping


def memory_of(mapping: mmap.mmap) -> ctypes.Array[ctypes.c_uint8]:
    """Make the object that all tensors over a mapping refer to, and which dies with the last of them."""
    return (ctypes.c_uint8 * len(mapping)).from_buffer(mapping)


def tensor_over(memory: ctypes.Array[ctypes.c_uint8]) -> Tensor:
    """Make a flat tensor of bytes over a mapping."""
    with torch.inference_mode(False):
        return torch.frombuffer(memory, dtype=torch.uint8)


def touch_pages(flat: Tensor, touch: Callable[[Tensor], object]) -> None:
    """Call a function on one byte of each page of a flat tensor, on several threads. Blocks until all are touched."""
    pieces = [flat[begin : begin + TOUCHED_AT_ONCE : mmap.PAGESIZE] for begin in range(0, len(flat), TOUCHED_AT_ONCE)]
    with ThreadPoolExecutor(min(len(pieces), os.cpu_count() or 1, MOST_THREADS), "superpipeline-touch") as threads:
        list(threads.map(touch, pieces))


def locked_by_torch(nbytes: int) -> Tensor:
    """Allocate page-locked memory from torch's caching allocator."""
    with torch.inference_mode(False):
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def unlock(lock: PageLock, mapping: mmap.mmap, address: int, process: int) -> None:
    """Unlock a slab and give it to forked processes again; do nothing in a forked process."""
    if os.getpid() == process:
        lock.unlock(address)
        mapping.madvise(mmap.MADV_DOFORK)


def keep_from_forks(flat: Tensor) -> None:
    """Hide memory that consists of whole pages from forked processes, for good."""
    ctypes.CDLL(None).madvise(ctypes.c_void_p(flat.data_ptr()), ctypes.c_size_t(flat.nbytes), mmap.MADV_DONTFORK)


def map_blocks_from(nbytes: int) -> None:
    """Make glibc's malloc map blocks of at least this size one by one, so that freeing one returns it to the system.

    glibc takes smaller blocks from a heap that only shrinks at its end, and raises the threshold to the largest block
    ever freed, up to USUAL_THRESHOLD: most of a model's tensors are smaller. Units that came and went among gradients
    left 1.5 times as much memory as the gradients. Nothing changes where the user set malloc's thresholds, or with
    another C library.
    """
    chosen = "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not os.environ.keys() & chosen and "glibc.malloc" not in os.getenv("GLIBC_TUNABLES", ""):
        mallopt(MMAP_THRESHOLD, nbytes)
        mallopt(TRIM_THRESHOLD, 2 * nbytes)
