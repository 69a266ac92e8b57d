"""Slabs that all ranks of a machine share: one copy of the model's bytes, which each maps twice.

- All slabs are ranges of one file without a name (a memfd), gone with the last process that maps it. Ranks allocate in
  the same order, so a range has the same place on all of them. A range takes memory where it is written.
- The *truth* is the shared mapping: the device copies from and to it, and steps write it. What the user's tensors are
  over is a private mapping of the same pages, the *face*: where this process wrote nothing it shows the truth, and
  what it writes there stays its own. So an edit that each rank makes is not made several times to the same bytes.
- `drop_edits` gives up this process's own pages: the face shows the truth again.
"""

from __future__ import annotations

import errno
import mmap
import os
import socket
import sys
from bisect import bisect_right, insort
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import UnsupportedError
from ..host.device import dense_strides
from ..host.memory import PageLock, Slabs, memory_of, tensor_over, touch_pages

SIZE = 1 << 46  # bytes of the file; ranges that were never written take no memory


class Twin(NamedTuple):
    """A slab with two mappings: the face, under the user's tensors, and the truth, which ranks share."""

    address: int  # of the face
    face: Tensor
    truth: Tensor
    mapping: mmap.mmap  # of the face
    offset: int  # of the slab in the file

    def has(self, address: int) -> bool:
        """Whether an address is in the face."""
        return 0 <= address - self.address < len(self.face)

    def truth_of(self, tensor: Tensor) -> Tensor:
        """Return the tensor over the shared truth at the place and in the form of one over the face."""
        at = tensor.data_ptr() - self.address
        part = self.truth.untyped_storage()[at : at + tensor.numel() * tensor.itemsize]
        with torch.inference_mode(False):
            return torch.empty(0, dtype=tensor.dtype, device="cpu").set_(part, 0, tensor.shape, tensor.stride())

    def drop_edits(self) -> None:
        """Give up this process's own pages of the face, which then shows the truth again."""
        self.mapping.madvise(mmap.MADV_DONTNEED)

    def tensor(self, at: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Make a tensor over the face at a byte, in the shape and strides of another one, with a storage of its own."""
        part = self.face.untyped_storage()[at : at + like.numel() * dtype.itemsize]
        with torch.inference_mode(False):
            return torch.empty(0, dtype=dtype, device="cpu").set_(part, 0, like.shape, like.stride())


class SharedSlabs(Slabs):
    """An allocator of slabs that all ranks of a machine share, and whose weights the first rank fills."""

    are_hidden = True

    def __init__(self, descriptor: int, is_first: bool) -> None:
        super().__init__()
        allow_open_files()
        self._descriptor, self._is_first = descriptor, is_first
        self._at = 0
        self._twins: list[Twin] = []  # in the order of their addresses

    def reserve(self, nbytes: int) -> int:
        """Reserve a range of the file, which takes no memory yet, and return its offset. Same order on all ranks."""
        at, self._at = self._at, self._at + -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        return at

    def at(self, offset: int, nbytes: int) -> Twin:
        """Map a reserved range of the file, by its offset, as a face and its truth."""
        return self._twin(tensor_over(memory_of(self._map_file(offset, nbytes, mmap.MAP_SHARED))), offset)

    def plain(self, nbytes: int) -> Tensor:
        """Allocate an unlocked slab that ranks share, and return its face. Same order on all ranks."""
        at = self._at
        return self._twin(super().plain(nbytes), at).face

    def locked(self, nbytes: int, lock: PageLock | None) -> Tensor:
        """Allocate a page-locked slab that ranks share, and return its face; give the range back if that is refused."""
        at = self._at
        try:
            if lock is None:
                raise RuntimeError("this kind of device locks no memory that processes share")
            return self._twin(super().locked(nbytes, lock), at).face
        except BaseException:
            self._at = at
            raise

    def _twin(self, truth: Tensor, offset: int) -> Twin:
        """Map the face of a slab, and register it with the truth."""
        mapping = self._map_file(offset, len(truth), mmap.MAP_PRIVATE)
        face = tensor_over(memory_of(mapping))
        twin = Twin(face.data_ptr(), face, truth, mapping, offset)
        insort(self._twins, twin, key=lambda twin: twin.address)
        return twin

    def renewed(self, twin: Twin) -> Twin:
        """Map a new face of a slab; the old one keeps the bytes that it shows, for views that the user has of it."""
        twin.face.copy_(twin.face.clone())  # pages of this process alone
        self._twins.remove(twin)
        return self._twin(twin.truth, twin.offset)

    def twin_of(self, tensor: Tensor) -> Twin:
        """Return the slab that has a tensor in its face."""
        return self._twins[bisect_right(self._twins, tensor.data_ptr(), key=lambda twin: twin.address) - 1]

    def truth(self, tensor: Tensor) -> Tensor:
        """Return the tensor over the shared truth at the place and in the form of one over a face."""
        return self.twin_of(tensor).truth_of(tensor)

    def fill(self, tensor: Tensor, source: Tensor) -> None:
        """Copy a weight's initial values to the truth, on the first rank alone."""
        if self._is_first:
            self.truth(tensor).copy_(source)

    def keep(self, tensor: Tensor) -> Tensor:
        """Copy a weight to shared memory in its own type, and return the tensor over the face."""
        like = torch.empty_strided(tensor.shape, dense_strides(tensor), dtype=tensor.dtype, device="meta")
        offset = self.reserve(tensor.nbytes)
        kept = self.at(offset, max(tensor.nbytes, 1)).tensor(0, like, tensor.dtype)
        self.fill(kept, tensor)
        return kept

    def unlock_all(self) -> None:
        """Unlock all slabs, which remain as ordinary memory that forks get, and close the file's descriptor."""
        super().unlock_all()
        for twin in self._twins:
            twin.mapping.madvise(mmap.MADV_DOFORK)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _mapping(self, nbytes: int) -> mmap.mmap:
        """Reserve a range of the file for a slab, and map its truth."""
        return self._map_file(self.reserve(max(nbytes, 1)), nbytes, mmap.MAP_SHARED)

    def _map_file(self, offset: int, nbytes: int, flags: int) -> mmap.mmap:
        """Map a range of the file, which forked processes do not get."""
        try:
            mapping = mmap.mmap(self._descriptor, max(nbytes, 1), flags=flags, offset=offset)
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
            raise UnsupportedError(
                "this process may not have as many open files as there are ranges of memory that its ranks share:"
                " raise the hard limit (ulimit -Hn)"
            ) from error
        mapping.madvise(mmap.MADV_DONTFORK)  # what a forked process reads there would change as these ranks step
        return mapping

    def _touch(self, flat: Tensor) -> None:
        """Fault in all pages of a new slab, without writing to them."""
        touch_pages(flat, Tensor.sum)  # reads only: other ranks may have written there


def counters(slabs: SharedSlabs, rows: int, columns: int) -> Tensor:
    """Map a table of numbers that all ranks read and write, zero at first."""
    return slabs.at(slabs.reserve(rows * columns * 8), rows * columns * 8).truth.view(torch.int64).view(rows, columns)


# ---- the file


def check_possible() -> None:
    """Raise UnsupportedError where the system has no memfd by which processes could share memory."""
    if not (hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")):
        raise UnsupportedError(
            f"several devices share host memory by memfd, which {sys.platform} has not: use devices=1, or"
            " strategy='ddp'"
        )


def allow_open_files() -> None:
    """Raise this process's limit of open files as far as it may be: before Python 3.13 each mapping has one."""
    import resource  # which Windows has not

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


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
