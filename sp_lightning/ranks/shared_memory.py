"""Host memory that the ranks of a machine share: what is true for all, what each one's user sees, and their boxes.

1. A shared slab is a memfd: a file without a name, in no file system, gone with the last process that maps it; state
   on a disk is a part of a scratch file, which has no name either (the disk). Every rank maps it twice. Its
   *truth* is the shared mapping, which only the library writes and the device copies from and to. Its *face* is a
   private mapping of the same pages, over which lie the tensors that user code gets.
2. Where a rank wrote nothing, its face shows the truth, also what other ranks write there later. A write through a
   face gives this rank a page of its own (the kernel copies it), whichever way the write takes: no version counter,
   view or array hides it. So an edit that every rank makes is not made several times to the same bytes.
3. Private pages are found in the page table, by the kernel itself (since Linux 6.7) or by reading it, and dropped by
   `drop`: the face shows the truth again there.
4. A forked process gets neither mapping, as no slab (pinned.py, Rule 4): truth and face would show it later steps.
5. A *box* is memory of one rank in which its gradients lie while the other ranks read them: a file of which only what
   was written takes memory (Rule 1). It has room for several times the gradients, because they are laid out again when
   they change their types.
6. A box is taken in regions, each mapped and page-locked by itself. A region is given back when all owners have summed
   what lies there, or once it has arrived of a backward that failed, and taken again for gradients of about its size.
7. A region that nobody took for `IDLE` exchanges is given up: its memory goes back to the system.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import HostMemoryError, UnsupportedError
from ..memory.device import Device
from ..memory.layout import Field, Layout
from ..memory.pinned import MappedRange, libc, mapped
from ..memory.weights import Stamp

PAGE = mmap.PAGESIZE
PAGEMAP = "/proc/self/pagemap"
ENTRY = 8  # bytes of an entry there
PRESENT, SWAPPED, OF_A_FILE = 63, 62, 61  # its bits
ALONE = "use devices=1, or strategy='ddp'"
PUNCH_HOLE = 3  # of fallocate: FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
BLOCK = 1 << 16  # pages whose entries are read at a time
WORD = 8  # bytes that are compared as one number
COMPARED = PAGE << 10  # bytes that are compared at a time
FOUND = 1 << 9  # ranges that the kernel lists at a time
IDLE = 1  # exchanges after which a region that nobody needs is given up (Rule 7)


class SlabRange(NamedTuple):
    """Bytes of a slab, from the first to the one after the last."""

    start: int
    end: int


class SharedSlab:
    """One slab of all ranks: its truth and its face in this process (Rule 1)."""

    def __init__(self, source: MappedRange, nbytes: int, is_first: bool, keep: bool = False) -> None:
        """Map a range of a file, and close its descriptor unless there is to be another face."""
        self.nbytes, self.is_first = nbytes, is_first
        self.truth, self.before_unmapping = mapped(source, nbytes, mmap.MAP_SHARED)
        self.face, _ = mapped(source, nbytes, mmap.MAP_PRIVATE)
        self._source: MappedRange | None = source  # for further faces
        if not keep:
            self.forget()

    def forget(self) -> None:
        """Make no further faces. Safe twice."""
        if self._source is not None:
            os.close(self._source.descriptor)
        self._source = None

    def keep_face(self) -> None:
        """Leave the face to its users, with the bytes that it shows now, and make another one."""
        bytes_ = self.face[::PAGE]
        bytes_.copy_(bytes_.clone())  # a page of its own for each that was touched
        assert self._source is not None
        self.face, _ = mapped(self._source, self.nbytes, mmap.MAP_PRIVATE)

    def lock(self, device: Device) -> None:
        """Page-lock the truth, for copies by the device itself; a lock on the face would make each page private."""
        lock_in(device, self.truth, self.before_unmapping)

    def private(self) -> list[SlabRange]:
        """Find the ranges of pages that this process wrote through the face (Rule 3)."""
        start = self.face.data_ptr()
        found = scan_pages if _kernel_scans() else read_pages
        return [SlabRange(one - start, end - start) for one, end in _joined(found(start, start + self.nbytes))]

    def changed(self) -> list[SlabRange]:
        """Find this process's own pages whose bytes differ from the truth, and give up the others."""
        changed: list[SlabRange] = []
        equal: list[SlabRange] = []
        for start, end in self.private():
            for at in range(start, end, COMPARED):
                part = slice(at, min(at + COMPARED, end))
                face, truth = (slab[part].view(torch.int64).view(-1, PAGE // WORD) for slab in (self.face, self.truth))
                for page, differs in zip(range(at, end, PAGE), (face != truth).any(1).tolist(), strict=False):
                    (changed if differs else equal).append(SlabRange(page, page + PAGE))
        self.drop(list(_joined(equal)))
        return list(_joined(changed))

    def drop(self, ranges: list[SlabRange]) -> None:
        """Give up this process's own pages in these ranges: the face shows the truth again (Rule 3)."""
        for start, end in ranges:
            if libc().madvise(self.face.data_ptr() + start, end - start, mmap.MADV_DONTNEED):
                raise OSError(ctypes.get_errno(), "madvise refused to drop private pages")


class SharedHome:
    """The slab of a unit's weights: its face shows them to user code, and its truth goes up to the device."""

    is_shared = True

    def __init__(self, slab: SharedSlab) -> None:
        self.slab = slab
        self.truth = slab.truth
        self.settled: Stamp | None = None  # of the host bytes when the face was last equal to the truth

    def adopt(self, index: int, field: Field, data: Tensor) -> Tensor:
        if self.slab.is_first:
            Layout.own_view(self.truth.untyped_storage(), field).copy_(data)
        return Layout.own_view(self.slab.face.untyped_storage(), field)

    def ranges(self) -> list[tuple[int, int]]:
        return [(flat.data_ptr(), flat.nbytes) for flat in (self.truth, self.slab.face)]

    def written(self, stamp: Stamp) -> Sequence[SlabRange]:
        return () if stamp == self.settled else self.slab.private()


class Box:
    """The boxes of all ranks: this one's, from which it takes regions, and the others', which it reads."""

    def __init__(self, rank: int, size: int, descriptor_of: Callable[[int], int], device: Device, nbytes: int) -> None:
        self._device = device
        self._nbytes = paged(nbytes)
        self.of: list[Tensor] = []
        for other in range(size):
            descriptor = descriptor_of(self._nbytes)
            self.of.append(mapped(MappedRange(descriptor), self._nbytes, mmap.MAP_SHARED)[0])
            if other == rank:
                self._descriptor = descriptor
            else:
                os.close(descriptor)
        self._end = 0
        self._holes: list[tuple[int, int]] = []  # bytes of regions that were given up: where, and how many
        self._starts: dict[int, int] = {}  # of regions, by their address here
        self._free: list[Tensor] = []
        self._idle: dict[int, int] = {}  # for how many exchanges nobody took a region, by its address

    def region(self, nbytes: int) -> Tensor:
        """Take memory of this rank's box, page-locked for its device: free memory, if there is any of about this size.

        It never waits: the box grows.
        """
        nbytes = max(nbytes, 1)  # no memory cannot be mapped
        region = self.free_for(nbytes)
        if region is None:
            return self._grow(paged(nbytes))
        self._free = [other for other in self._free if other is not region]
        self._idle[region.data_ptr()] = 0
        return region

    def free_for(self, nbytes: int) -> Tensor | None:
        """Return the free region that would be taken: always the first one, so that the others may be given up."""
        fitting = [region for region in self._free if paged(nbytes) <= region.numel() <= 2 * paged(nbytes)]
        return min(fitting, key=lambda region: (region.numel(), self._starts[region.data_ptr()]), default=None)

    def _grow(self, nbytes: int) -> Tensor:
        room, start = min(((room, start) for start, room in self._holes if room >= nbytes), default=(0, self._end))
        if start + nbytes > self._nbytes:
            raise UnsupportedError("the gradients of this model change their types too often for several devices")
        region, before = mapped(MappedRange(self._descriptor, start), nbytes, mmap.MAP_SHARED)
        lock_in(self._device, region, before)
        self._starts[region.data_ptr()] = start
        self._idle[region.data_ptr()] = 0
        if start == self._end:
            self._end += nbytes
        else:
            self._holes.remove((start, room))
            if room > nbytes:
                self._holes.append((start + nbytes, room - nbytes))
        return region

    def give_back(self, region: Tensor) -> None:
        """Let a region be taken again."""
        self._free.append(region)

    def trim(self) -> list[Tensor]:
        """Give up the regions that nobody took for `IDLE` exchanges; return them, for their last references."""
        left: list[Tensor] = []
        for region in self._free:
            address = region.data_ptr()
            self._idle[address] += 1
            if self._idle[address] > IDLE:
                start = self._starts.pop(address)
                del self._idle[address]
                drop_pages(self._descriptor, start, region.numel())
                self._holes.append((start, region.numel()))
                left.append(region)
        if left:
            self._join_holes()
        self._free = [region for region in self._free if region.data_ptr() in self._starts]
        return left

    def _join_holes(self) -> None:
        """Join holes that touch one another, and give the last one up if nothing lies behind it."""
        joined: list[tuple[int, int]] = []
        for start, room in sorted(self._holes):
            if joined and sum(joined[-1]) == start:
                start, room = joined[-1][0], joined.pop()[1] + room
            joined.append((start, room))
        if joined and sum(joined[-1]) == self._end:
            self._end, _ = joined.pop()
        self._holes = joined

    def place(self, region: Tensor, tensor: Tensor) -> int | None:
        """Return where in the box a tensor begins; None if it is not in this region, or that is not of the box."""
        start = self._starts.get(region.data_ptr())
        offset = tensor.data_ptr() - region.data_ptr()
        return start + offset if start is not None and 0 <= offset < region.numel() else None

    def close(self) -> None:
        """Give up all memory that nothing else refers to. Safe twice."""
        if self.of:
            os.close(self._descriptor)
        self.of.clear()
        self._free.clear()


def check_possible() -> None:
    """Raise UnsupportedError where no memory can be shared (Rule 1)."""
    if not (hasattr(os, "memfd_create") and hasattr(socket, "SO_PEERCRED")):
        raise UnsupportedError(f"several devices share host memory by memfd, which {sys.platform} has not; {ALONE}")


def make(nbytes: int) -> int:
    """Make the memory of a slab; return its descriptor (Rule 1)."""
    try:
        descriptor = os.memfd_create("superpipeline", os.MFD_CLOEXEC)
    except OSError as error:
        raise UnsupportedError(
            f"several devices share host memory by memfd, which the system refuses ({error}); {ALONE}"
        ) from error
    try:
        os.ftruncate(descriptor, nbytes)
    except OSError as error:
        os.close(descriptor)
        raise HostMemoryError(f"cannot share {nbytes} bytes of host memory ({error})") from error
    return descriptor


def drop_pages(descriptor: int, start: int, nbytes: int) -> None:
    """Give memory of a slab back to the system, for all ranks: it reads as zeros."""
    if libc().fallocate(descriptor, PUNCH_HOLE, start, nbytes):
        raise OSError(ctypes.get_errno(), "fallocate refused to drop pages of shared memory")


def drop_own_pages(tensor: Tensor) -> None:
    """Give this process's memory of a tensor back to the system: but for its first and last page, it reads as zeros."""
    start = paged(tensor.data_ptr())
    nbytes = (tensor.data_ptr() + tensor.untyped_storage().nbytes()) // PAGE * PAGE - start
    if nbytes > 0 and libc().madvise(start, nbytes, mmap.MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), "madvise refused to drop private pages")


def paged(nbytes: int) -> int:
    """Round a number of bytes up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


class _Scan(ctypes.Structure):
    """An argument of the kernel's scan of a page table (struct pm_scan_arg)."""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in ("size", "flags", "start", "end", "walked", "found", "room", "pages", "not", "all", "any", "told")
    ]


SCAN = 3 << 30 | ctypes.sizeof(_Scan) << 16 | ord("f") << 8 | 16  # the number of the call: PAGEMAP_SCAN
IS_OF_A_FILE, IS_PRESENT, IS_SWAPPED = 1 << 2, 1 << 3, 1 << 4


@functools.cache
def _kernel_scans() -> bool:
    """Whether the kernel finds pages by itself."""
    try:
        list(scan_pages(PAGE, 2 * PAGE))
    except OSError:
        return False
    return True


def scan_pages(start: int, end: int) -> Iterator[SlabRange]:
    """Have the kernel find the pages between two addresses that are of no file, and in memory or swapped out."""
    import fcntl  # which Windows has not

    regions = (ctypes.c_uint64 * (3 * FOUND))()  # of each its start, its end, and what it is
    mine = IS_PRESENT | IS_SWAPPED
    with open(PAGEMAP, "rb", buffering=0) as pagemap:
        while start < end:
            place = ctypes.addressof(regions)
            scan = _Scan(
                ctypes.sizeof(_Scan), 0, start, end, 0, place, FOUND, 0, IS_OF_A_FILE, IS_OF_A_FILE, mine, mine
            )
            count = fcntl.ioctl(pagemap, SCAN, scan)
            yield from (SlabRange(regions[3 * at], regions[3 * at + 1]) for at in range(count))
            start = scan.walked


def read_pages(start: int, end: int) -> Iterator[SlabRange]:
    """Read in the page table where the same pages are."""
    first, pages = start // PAGE, -(-(end - start) // PAGE)
    with open(PAGEMAP, "rb", buffering=0) as pagemap:
        for block in range(0, pages, BLOCK):
            pagemap.seek((first + block) * ENTRY)
            entries = torch.frombuffer(bytearray(pagemap.read(min(BLOCK, pages - block) * ENTRY)), dtype=torch.int64)
            there = ((entries >> PRESENT) | (entries >> SWAPPED)) & 1
            own = (there & ~(entries >> OF_A_FILE) & 1).nonzero().flatten().tolist()
            yield from (SlabRange((first + block + page) * PAGE, (first + block + page + 1) * PAGE) for page in own)


def _joined(ranges: Iterable[SlabRange]) -> Iterator[SlabRange]:
    start = end = -1
    for range_ in ranges:
        if range_.start != end:
            if end > 0:
                yield SlabRange(start, end)
            start = range_.start
        end = range_.end
    if end > 0:
        yield SlabRange(start, end)


def lock_in(device: Device, flat: Tensor, before_unmapping: list[Callable[[], object]]) -> None:
    """Page-lock a mapping for a device, until it is unmapped."""
    unlock = device.lock(flat)
    if unlock is not None:
        before_unmapping.append(unlock)
