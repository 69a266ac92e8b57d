"""Host memory that all ranks of a machine share: one nameless file in memory (a memfd), which each process maps twice.

- The file is gone with the last process that maps it. Ranks reserve ranges of it in the same order, so a range has the
  same place on all of them. A range takes memory where it is written.
- The *truth* is the shared mapping: the device copies from and to it, and steps write it. What the user's tensors are
  over is a private mapping of the same pages, the *face*: where this process wrote nothing it shows the truth, and
  what it writes there stays its own. So an edit that each rank makes is not made several times to the same bytes.
- `drop_edits` gives up this process's own pages: the face shows the truth again.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedError
from ..host.memory import PageLock, Slabs, memory_of, tensor_over, touch_pages, unlock

SIZE = 1 << 46  # bytes of the file; ranges that were never written take no memory
KINDS = 32  # kinds of optimizer state that a unit may have
WIDEST = 2  # times the bytes of a weight: state of one kind
REST = 1 << 36  # bytes for all but weights, gradients and state
NO_RESERVE = 0x4000  # mmap.MAP_NORESERVE, which Python has from 3.13 on: count only pages that are written


class SharedSlabs(Slabs):
    """An allocator of slabs that all ranks of a machine share, and whose weights the first rank fills."""

    are_hidden = True

    def __init__(self, descriptor: int, is_first: bool) -> None:
        """Take over the file's descriptor, which is closed with the last reference to this object."""
        super().__init__()
        weakref.finalize(self, os.close, descriptor)
        self._descriptor, self._is_first = descriptor, is_first
        self._mappings: list[mmap.mmap] = []  # of the truth and the face
        self._end = self._size = 0  # the end of the ranges that were reserved, and of the mappings

    def expect(self, nbytes: int) -> None:
        """Map as much of the file as weights of so many bytes may need, with their gradients and state."""
        self._size = (KINDS * WIDEST + 4) * nbytes + REST
        try:
            for flags in (mmap.MAP_SHARED, mmap.MAP_PRIVATE | NO_RESERVE):
                self._mappings.append(mmap.mmap(self._descriptor, self._size, flags))
        except OSError as error:
            raise UnsupportedError(
                f"this process may not map the memory that ranks share ({error.strerror}): allow it addresses without"
                " limit (ulimit -v unlimited, vm.overcommit_memory=0)"
            ) from error
        for mapping in self._mappings:
            mapping.madvise(mmap.MADV_DONTFORK)  # what a forked process reads there would change as these ranks step
        self._truth, self._face = (tensor_over(memory_of(mapping)) for mapping in self._mappings)

    def reserve(self, nbytes: int) -> int:
        """Reserve a range of the file, which takes no memory yet, and return its offset. Same order on all ranks."""
        begin = self._end
        self._end += -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        assert self._end <= self._size
        return begin

    def face(self, offset: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Make a tensor over the face at an offset, in the shape of another one, with a storage of its own."""
        return _over(self._face, offset, torch.empty_like(like, dtype=dtype, device="meta"))

    def truth(self, tensor: Tensor) -> Tensor:
        """Return the tensor over the shared truth at the place and in the form of one over the face."""
        return _over(self._truth, tensor.data_ptr() - self._face.data_ptr(), tensor)

    def face_of(self, truth: Tensor) -> Tensor:
        """Return the tensor over the face at the place and in the form of one over the shared truth."""
        return _over(self._face, truth.data_ptr() - self._truth.data_ptr(), truth)

    def drop_edits(self, face: Tensor) -> None:
        """Give up this process's own pages under a tensor, which then shows the truth again."""
        if face.numel():
            begin = face.data_ptr() - self._face.data_ptr()
            before = begin % mmap.PAGESIZE
            self._mappings[1].madvise(mmap.MADV_DONTNEED, begin - before, before + face.nbytes)

    def plain(self, nbytes: int) -> Tensor:
        """Allocate an unlocked slab that ranks share, and return its face. Same order on all ranks."""
        return self.face(self.reserve(max(nbytes, 1)), torch.empty(nbytes, device="meta"), torch.uint8)

    def locked(self, nbytes: int, lock: PageLock | None) -> Tensor:
        """Allocate a page-locked slab that ranks share, and return its face; give the range back if that is refused."""
        if lock is None:
            raise RuntimeError("this kind of device locks no memory that processes share")
        begin, face = self._end, self.plain(nbytes)
        truth = self.truth(face)
        try:
            touch_pages(truth, Tensor.sum)  # reads only: other ranks may have written there
            lock.lock(truth.data_ptr(), nbytes)
        except BaseException:
            self._end = begin
            raise
        self._locks.append(weakref.finalize(self, unlock, lock, self._mappings[0], truth.data_ptr(), os.getpid()))
        return face

    def fill(self, tensor: Tensor, source: Tensor) -> None:
        """Copy a weight's initial values to the truth, on the first rank alone."""
        if self._is_first:
            self.truth(tensor).copy_(source)

    def keep(self, tensor: Tensor) -> Tensor:
        """Copy a weight to shared memory in its own type, and return the tensor over the face."""
        kept = self.face(self.reserve(max(tensor.nbytes, 1)), tensor, tensor.dtype)
        self.fill(kept, tensor)
        return kept

    def unlock_all(self) -> None:
        """Unlock all slabs, which remain as ordinary memory that forks get."""
        super().unlock_all()
        for mapping in self._mappings:
            mapping.madvise(mmap.MADV_DOFORK)


def _over(flat: Tensor, offset: int, form: Tensor) -> Tensor:
    """Make a tensor over flat memory at an offset, in the form of a dense one, with a storage of its own."""
    part = flat.untyped_storage()[offset : offset + form.nbytes]
    with torch.inference_mode(False):
        return torch.empty(0, dtype=form.dtype, device="cpu").set_(part, 0, form.shape, form.stride())


# ---- the file


def table(descriptor: int, rows: int, columns: int) -> Any:
    """Map a table of numbers that all ranks read and write, zero at first, at the end of the file."""
    kind = ctypes.c_int64 * columns * rows
    begin = SIZE - mmap.PAGESIZE * (ctypes.sizeof(kind) // mmap.PAGESIZE + 1)
    return kind.from_buffer(mmap.mmap(descriptor, ctypes.sizeof(kind), mmap.MAP_SHARED, offset=begin))


def made_file() -> int:
    """Create the nameless file in memory that has all slabs; return its descriptor."""
    descriptor = os.memfd_create("superpipeline")
    os.ftruncate(descriptor, SIZE)
    return descriptor


def opened_file(process: int, descriptor: int) -> int:
    """Open the file that another process created, by that process's id and descriptor."""
    try:
        return os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise UnsupportedError(
            f"process {process} of this machine shares no memory with this one ({error}): have one user start all"
            " ranks, in one container"
        ) from error


def this_machine() -> str:
    """Identify the machine, and the container where it has processes of its own."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot} {os.stat('/proc/self/ns/pid').st_ino}"
