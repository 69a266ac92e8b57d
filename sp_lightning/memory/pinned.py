"""Host memory of our own, exact to the page, and page-locked if the device can register it.

1. A slab is a private anonymous mapping. No allocator rounds it up (torch's page-locked one does, to a power of two),
   and when the last tensor over it dies its pages go back to the system, which those of ``malloc`` often do not.
2. The pages of a slab are touched by several threads and then locked as one range. One range, because a copy that
   crosses two is refused. Touched before, because a driver faults in untouched pages one after the other as it locks
   them, holding its own lock.
3. A slab is locked once and unlocked once: by `unlock`, when its last tensor dies, or when the interpreter ends,
   whichever comes first. The mapping outlives its lock, because the finalizer that unlocks it refers to it.
4. A forked process does not get locked pages: Linux would copy all of them, for each worker of a ``DataLoader``. A
   plain run's weights, on the device, are not there either. Reading a slab in a forked process raises an error, because
   touching the missing pages would end it. A forked process unlocks nothing: the locks are its parent's.
"""

from __future__ import annotations

import bisect
import ctypes
import functools
import mmap
import operator
import os
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..compat.tensors import StorageReference, forbid_access, storage_id
from ..errors import HostMemoryError
from ..host.machine import mappings

_locked: dict[int, tuple[int, int]] = {}  # storages of locked slabs and their bytes, by their address
_views: list[tuple[int, Any]] = []  # storages over parts of slabs, with their addresses
_most_views = 1024  # before those that died are dropped
MESSAGE = (
    "a streamed weight, its gradient or its optimizer state lies in memory that a forked process does not have "
    "(page-locked, over a file, or shared by ranks): read it before the fork, or start the process by 'spawn'"
)
CHUNK = 32 << 20  # bytes that a thread touches at a time
MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000  # of mmap, which Python does not name
MOST_THREADS = 8  # with more the kernel's own locks take the time


class PageLock(Protocol):
    """A device's way to lock host memory that it did not allocate."""

    def lock(self, address: int, nbytes: int) -> None:
        """Lock this memory, so that the device copies from and to it by itself; RuntimeError if that is refused."""

    def unlock(self, address: int) -> None:
        """Unlock this memory after all queued copies. Raises nothing, because it runs where a tensor dies."""


class HostAllocator:
    """Allocator of slabs, which unlocks those that it locked."""

    def __init__(self) -> None:
        self._locks: list[weakref.finalize[..., Any]] = []

    def plain(self, nbytes: int) -> Tensor:
        """Allocate an unlocked slab, whose pages are taken when they are first written."""
        return _tensor_over(_memory(_mapping(nbytes)))

    def locked(self, nbytes: int, lock: PageLock) -> Tensor:
        """Allocate a locked slab (Rules 2 to 4)."""
        mapping = _mapping(nbytes)
        memory = _memory(mapping)
        flat = _tensor_over(memory)
        _touch(flat)
        lock.lock(flat.data_ptr(), nbytes)
        self._locks.append(weakref.finalize(memory, _unlock, lock, mapping, flat.data_ptr(), os.getpid()))
        _share_with_forks(mapping, False)
        _locked[flat.data_ptr()] = storage_id(flat.untyped_storage()), flat.nbytes
        _mind_forks()
        return flat

    def lock(self, flat: Tensor, lock: PageLock) -> Callable[[], object]:
        """Lock memory that something else mapped; return what unlocks it, which its owner may call first."""
        lock.lock(flat.data_ptr(), flat.nbytes)
        unlock = weakref.finalize(self, _unlock_foreign, lock, flat.data_ptr(), os.getpid())
        self._locks.append(unlock)
        return unlock

    def unlock(self) -> None:
        """Unlock all slabs, which remain as ordinary memory. Safe twice."""
        for unlock in self._locks:
            unlock()  # does nothing the second time
        self._locks.clear()


def _mapping(nbytes: int) -> mmap.mmap:
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
        return mmap.mmap(-1, nbytes)
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # a fault for each 2 MiB instead of 4 KiB
        with suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def _memory(mapping: mmap.mmap) -> ctypes.Array[ctypes.c_uint8]:
    """Make the object to which all tensors over a mapping refer: it dies with the last of them."""
    return (ctypes.c_uint8 * len(mapping)).from_buffer(mapping)


def _tensor_over(memory: ctypes.Array[ctypes.c_uint8]) -> Tensor:
    with torch.inference_mode(False):
        return torch.frombuffer(memory, dtype=torch.uint8)


def _touch(flat: Tensor) -> None:
    """Fault in all pages of a new slab."""
    pieces = [flat[begin : begin + CHUNK : mmap.PAGESIZE] for begin in range(0, len(flat), CHUNK)]
    with ThreadPoolExecutor(min(len(pieces), os.cpu_count() or 1, MOST_THREADS), "superpipeline-touch") as threads:
        list(threads.map(Tensor.zero_, pieces))


def _unlock(lock: PageLock, mapping: mmap.mmap, address: int, process: int) -> None:
    if os.getpid() == process:
        lock.unlock(address)
        _share_with_forks(mapping, True)
        _locked.pop(address, None)


def _unlock_foreign(lock: PageLock, address: int, process: int) -> None:
    if os.getpid() == process:
        lock.unlock(address)


class MappedRange(NamedTuple):
    """A range of a file to map: the file's descriptor, and the first byte there."""

    descriptor: int
    offset: int = 0


def mapped(
    source: MappedRange,
    nbytes: int,
    flags: int,
    what: str = "host memory that the ranks share",
    reserved: int | None = None,
) -> tuple[Tensor, list[Callable[[], object]]]:
    """Map a range of a file; return the memory, and what is called before it is unmapped.

    The memory begins at the address ``reserved``, if one is given, and is unmapped with the last tensor over it. The
    mapping holds no descriptor (that of `mmap.mmap` does, and a process may have few). Forked processes do not get it
    (Rule 4).
    """
    how = flags if reserved is None else flags | MAP_FIXED
    address = libc().mmap(reserved, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, how, *source)
    if address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise HostMemoryError(f"cannot map {nbytes} bytes of the {what} ({os.strerror(number)})")
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    flat = _tensor_over(memory)
    libc().madvise(address, nbytes, mmap.MADV_DONTFORK)
    before: list[Callable[[], object]] = [keep_from_forks(flat)]
    weakref.finalize(memory, _unmap, address, nbytes, before, os.getpid()).atexit = False
    return flat, before


class Reserved:
    """Addresses for mappings of one file that follow each other there, and so are one mapping to the kernel.

    A process may have 65,530 mappings (vm.max_map_count), and the kernel puts each new one below the one before.
    """

    def __init__(self, nbytes: int) -> None:
        """Reserve ``nbytes`` of addresses at a time, without memory."""
        self._nbytes = nbytes
        self._begin = self._room = 0

    def take(self, nbytes: int) -> int | None:
        """Return the first of the next addresses; None if the system has none to reserve."""
        if nbytes > self._room:
            self.close()
            room = max(nbytes, self._nbytes)
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
            found = libc().mmap(None, room, 0, flags, -1, 0)  # for no access
            if found == ctypes.c_void_p(-1).value:
                return None
            self._begin, self._room = found, room
        address = self._begin
        self._begin, self._room = address + nbytes, self._room - nbytes
        return address

    def close(self) -> None:
        """Give back what is left. Safe twice."""
        if self._room:
            libc().munmap(self._begin, self._room)
            self._room = 0


def _unmap(address: int, nbytes: int, before: list[Callable[[], object]], process: int) -> None:
    if os.getpid() == process:
        for ending in reversed(before):
            ending()
        libc().munmap(address, nbytes)


@functools.cache
def libc() -> ctypes.CDLL:
    """Load the C library, for calls that Python does not have; each sets its error number."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    library.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    library.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
    return library


def keep_from_forks(flat: Tensor) -> Callable[[], object]:
    """Refuse reads of this memory in forked processes (Rule 4); return what ends that, for when it is unmapped."""
    _locked[flat.data_ptr()] = storage_id(flat.untyped_storage()), flat.nbytes
    _mind_forks()
    return functools.partial(_locked.pop, flat.data_ptr(), None)


def note_view(storage: torch.UntypedStorage) -> None:
    """Note a storage over a part of a slab, which a forked process may not read either (Rule 4)."""
    global _most_views
    if len(_views) > _most_views:
        _views[:] = [view for view in _views if not view[1].expired()]
        _most_views = max(1024, 2 * len(_views))
    _views.append((storage.data_ptr(), StorageReference(storage)))


def is_foreign(tensor: torch.Tensor) -> bool:
    """Whether neither torch nor a slab has a tensor's bytes: then no count shows what else refers to them.

    Slabs of runs that have ended count as well. NumPy's memory is foreign, and so is torch's that NumPy was given.
    """
    storage = tensor.untyped_storage()
    if storage.resizable():
        return False
    return not any(view.cdata == storage_id(storage) and not view.expired() for _, view in _views)


def find_foreign(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Find tensors with foreign bytes, by their ids, but for those over private mappings of files.

    Loaders make such mappings, and nothing else is over them.
    """
    foreign = list(filter(is_foreign, tensors))
    there = mappings() if foreign else []
    return {id(one) for one in foreign if not any(at.begin <= one.data_ptr() < at.end for at in there)}


def _share_with_forks(mapping: mmap.mmap, shared: bool) -> None:
    if hasattr(mmap, "MADV_DONTFORK"):
        mapping.madvise(mmap.MADV_DOFORK if shared else mmap.MADV_DONTFORK)


@functools.cache
def _mind_forks() -> None:
    os.register_at_fork(after_in_child=_refuse_all)


def _refuse_all() -> None:
    """Make every read of a locked slab an error, in a forked process (Rule 4)."""
    for storage, _ in _locked.values():
        forbid_access(storage, MESSAGE)
    slabs = sorted((address, address + nbytes) for address, (_, nbytes) in _locked.items())
    for address, reference in _views:
        at = bisect.bisect_right(slabs, address, key=operator.itemgetter(0)) - 1
        if at >= 0 and address < slabs[at][1] and not reference.expired():
            forbid_access(reference.cdata, MESSAGE)
