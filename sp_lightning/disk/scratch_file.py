"""The scratch file: optimizer state on a local disk, as tensors that any code may use and in ranges that are moved.

1. It has no name (O_TMPFILE) and only its user may open it: however the process ends, its space is free again. It is
   no checkpoint, and nothing ever resumes from it.
2. It has two ways to its bytes. Tensors lie over a shared mapping and are right at any time for any code, by page
   faults. The library moves the same ranges directly and never touches the mapping. The kernel keeps the two equal: a
   direct read writes dirty pages out first, a direct write drops cached ones. A trial finds out whether this filesystem
   does; where it does not, both ways go through the page cache.
3. Each tensor has whole blocks of its own, allocated before it has bytes: a write never finds the disk full. A range
   that was never written reads as zeros.
4. A range lives as long as any tensor over its segment; then its space is free again, also after the file was closed.
   Ranges are taken one at a time, on any thread: one in backward takes those of gradients, while another one may step.
5. A forked process gets no mapping (pinned.py, Rule 4): what it wrote would be the parent's state.
6. Several ranks of a machine have one file, which the first one makes. All take its segments together, in one order, so
   no rank asks another one where a segment is, and each allocates what it needs of one. None knows when the others are
   done with a segment: it lives as long as the file.
7. A file in memory would be no gain, and on a network filesystem the two ways may differ: both are refused. So is one
   that copies on write, where an allocated range may still find the disk full, unless it can be told not to. What lies
   below an overlay is not listed: if it is memory, written pages cannot be dropped; if it copies, it is told not to.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import functools
import gc
import logging
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..core.unit_numbers import aligned
from ..errors import DiskError, OptionError
from ..memory.layout import Layout
from ..memory.pinned import MappedRange, Reserved, libc, mapped
from ..options import format_both, format_bytes
from .direct_file import BLOCK, IN_MEMORY, OPEN, DirectFile, Mount, blocks, mount_of

log = logging.getLogger(__name__)

SEGMENT = max(BLOCK, mmap.ALLOCATIONGRANULARITY)  # a mapping of a part of a file begins at a multiple of it
ADDRESSES = 1 << 30  # that are reserved at a time
STACKED = ("overlay", "aufs")
COPIES_ON_WRITE = ("btrfs", "zfs", "bcachefs", "nilfs2")
GET_FLAGS, SET_FLAGS, NO_COPY = 0x80086601, 0x40086602, 0x00800000  # FS_IOC_GETFLAGS, FS_IOC_SETFLAGS, FS_NOCOW_FL
ALLOWED = "a folder on a local disk of this machine"


class FileRanks(Protocol):
    """The ranks of a machine, one or several, that have one scratch file (ranks/board.py)."""

    rank: int
    size: int

    def pass_on(self, make: Callable[[], int], what: int = 0) -> int:
        """Return the descriptor that the first rank makes, which all come to have."""


class Extent(NamedTuple):
    """The range of a tensor in the file."""

    offset: int
    nbytes: int


class SharedSegment(NamedTuple):
    """A segment of several ranks, as a range of a file with a descriptor that who takes it closes."""

    file: ScratchFile
    source: MappedRange
    begin: int


class ScratchFile(DirectFile):
    """A nameless file in a folder, of which tensors are made."""

    def __init__(self, folder: str, ranks: FileRanks) -> None:
        """Make the file of these ranks; raise OptionError where its folder cannot hold it (Rule 7)."""
        mount = check_folder(folder)
        self.folder, self.device = folder, mount.device
        self._ranks = ranks
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()  # whose state is here, or will be
        self._end = ranks.size * SEGMENT
        self._lock = threading.Lock()  # held by whoever takes a range (Rule 4)
        self._addresses = Reserved(ADDRESSES)  # of tensors
        self._places: dict[int, Extent] = {}  # of tensors that live, by their addresses
        fd = ranks.pass_on(functools.partial(_make, folder))
        super().__init__(f"the scratch file in {folder}", fd, mount.kind, "optimizer state goes")
        try:
            if ranks.rank == 0:
                _check_empty(fd, folder, mount)
            self._open_directly(os.O_RDWR, self._both_ways_are_equal)
            OPEN.add(self)
            FILES.add(self)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._addresses.close()
        super().close()

    @property
    def descriptor(self) -> int:
        assert self._fd is not None
        return self._fd

    def allocate(self, begin: int, nbytes: int) -> None:
        """Allocate a range; raise DiskError if the disk is full."""
        try:
            os.posix_fallocate(self.descriptor, begin, nbytes)
        except OSError as error:
            number = error.errno or errno.EIO
            if number == errno.ENOSPC:
                raise no_room(self.folder, nbytes) from error
            raise self._failed(begin, number, True) from error

    def check(self) -> None:
        """Do nothing: no other process has this file."""

    def _failed(self, offset: int, number: int, writes: bool) -> DiskError:
        # Of what is here there is no other copy but in a checkpoint.
        outcome = f"Check the disk, or name another one, and {DiskError.GO_ON}"
        return DiskError(path=self.path, offset=offset, errno=number, writes=writes, outcome=outcome)

    def _both_ways_are_equal(self, direct: int) -> bool:
        """Write on each way and read on the other (Rule 2)."""
        at, private = self._ranks.rank * SEGMENT, mmap.MAP_PRIVATE
        self.allocate(at, BLOCK)
        with (
            mmap.mmap(-1, BLOCK) as memory,
            mmap.mmap(self.descriptor, BLOCK, offset=at) as shared,
            mmap.mmap(self.descriptor, BLOCK, private, offset=at) as face,  # where ranks share state (shared_memory.py)
        ):
            for first, second in (b"12", b"34"):
                memory[:] = bytes([first]) * BLOCK
                if os.pwritev(direct, [memory], at) != BLOCK or not shared[:] == face[:] == memory[:]:
                    return False
                shared[:] = bytes([second]) * BLOCK
                if os.preadv(direct, [memory], at) != BLOCK or not shared[:] == face[:] == memory[:]:
                    return False
            shared[:] = bytes(BLOCK)
        return True

    def tensors(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Allocate tensors of zeros with these shapes, types and strides (Rule 3)."""
        layout = Layout.of([("", tensor) for tensor in like], BLOCK)
        nbytes = max(layout.nbytes, BLOCK)
        begin, reserved = self._take(nbytes)
        source = MappedRange(self.descriptor, begin)
        flat, before_unmapping = mapped(source, nbytes, mmap.MAP_SHARED, self.path, reserved)
        address = flat.data_ptr()
        for field in layout.fields:
            self._places[address + field.offset] = Extent(begin + field.offset, field.nbytes)
        before_unmapping.append(functools.partial(self._free, address, nbytes))
        with torch.inference_mode(False):
            return [layout.own_view(flat.untyped_storage(), field) for field in layout.fields]

    def share(self, nbytes: int, what: int) -> SharedSegment:
        """Take a segment with the other ranks; ``what``: a number for its purpose, the same on all ranks (Rule 6)."""
        # The last block, so that the file has it all; nobody may make it shorter.
        begin, _ = self._take(nbytes, max(0, nbytes - BLOCK), reserves=False)
        descriptor = self._ranks.pass_on(functools.partial(os.dup, self.descriptor), what)
        return SharedSegment(self, MappedRange(descriptor, begin), begin)

    def hold(self, begin: int, nbytes: int, part: Tensor, at: int | None) -> None:
        """Allocate a range for all ranks, and find there the part of it that this one moves, if any, until `forget`."""
        if nbytes:
            self.allocate(begin, blocks(nbytes))
        if at is not None:
            self._places[part.data_ptr()] = Extent(at, part.nbytes)

    def forget(self, address: int, nbytes: int) -> None:
        """Forget the tensors over a mapping, which is about to end."""
        for one in [one for one in list(self._places) if address <= one < address + nbytes]:
            self._places.pop(one, None)

    def divide(self, whole: Tensor, parts: Iterable[Tensor]) -> None:
        """Know the places of these parts of a tensor from now on, not the tensor's; each has blocks of its own."""
        begin, place = whole.data_ptr(), self._places.pop(whole.data_ptr())
        for part in parts:
            self._places[part.data_ptr()] = Extent(place.offset + part.data_ptr() - begin, part.nbytes)

    def place_of(self, tensor: Tensor) -> Extent | None:
        """Return the range of a tensor that fills one; None if it is no such tensor of this file."""
        place = self._places.get(tensor.data_ptr())
        return place if place is not None and place.nbytes == tensor.nbytes else None

    def offset_of(self, address: int, nbytes: int) -> int | None:
        place = self._places.get(address)
        return place.offset if place is not None and nbytes <= place.nbytes else None

    # ---- details

    def _take(self, nbytes: int, first: int = 0, reserves: bool = True) -> tuple[int, int | None]:
        """Take the next range, and allocate it from this byte of it on; return where it begins, and its address.

        One thread does so at a time (Rule 4). The address is None if none was reserved.
        """
        with self._lock:
            begin = self._end
            self.allocate(begin + first, nbytes - first)
            self._end = -(-(begin + nbytes) // SEGMENT) * SEGMENT
            return begin, self._addresses.take(self._end - begin) if reserves else None

    def _free(self, address: int, nbytes: int) -> None:
        """Forget a segment, which is about to be unmapped, and give its space back (Rule 4)."""
        self.forget(address, nbytes)
        libc().madvise(address, nbytes, mmap.MADV_REMOVE)  # the file may be closed, and other segments of it live on


def in_file(nbytes: Iterable[int]) -> int:
    """Return the most bytes of the file that tensors of these sizes span, each allocated after the other."""
    return sum(blocks(one) + SEGMENT for one in nbytes)


def check_folder(folder: str) -> Mount:
    """Raise OptionError where a scratch file cannot be; return the folder's mount (Rule 7)."""
    if not sys.platform.startswith("linux"):
        raise OptionError(argument="disk", found=folder, allowed="None on this system: it needs Linux")
    if not os.path.isdir(folder):
        raise OptionError(argument="disk", found=folder, allowed=f"{ALLOWED}; there is no such folder")
    mount = mount_of(folder)
    if elsewhere := no_local_disk(mount):
        raise _refused(folder, mount, elsewhere)
    if rotates(mount):
        log.warning(
            "superpipeline: disk=%r is on a rotating disk, which takes 10 to 50 times as long as an SSD", folder
        )
    return mount


def _make(folder: str) -> int:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise OptionError(argument="disk", found=folder, allowed=f"{ALLOWED} ({error.strerror})") from error


def _check_empty(fd: int, folder: str, mount: Mount) -> None:
    """Raise OptionError where a file that was just made is not on a disk that writes in place (Rule 7)."""
    if mount.kind in (*COPIES_ON_WRITE, *STACKED):
        _refuse_copies(fd, folder, mount.kind)
    if elsewhere := no_local_disk(mount, fd):
        raise _refused(folder, mount, elsewhere)


def _refused(folder: str, mount: Mount, where: str) -> OptionError:
    allowed = f"{ALLOWED}; this one is on {mount.kind}, {where}"
    return OptionError(argument="disk", found=folder, allowed=allowed)


def no_local_disk(mount: Mount, empty: int | None = None) -> str:
    """Say what a mount is that is on no local disk, by an empty file there if one is given; "" for one that is."""
    if mount.kind in IN_MEMORY:
        return "a filesystem in memory"
    if mount.is_remote:
        return "a network filesystem, or one that is not known to be local"
    if empty is not None and mount.kind in STACKED and _stays_in_memory(empty):
        return "over a filesystem in memory"
    return ""


def _stays_in_memory(empty: int) -> bool:
    """Whether the pages of an empty file cannot be dropped once they were written: then they are nowhere else."""
    try:
        os.pwrite(empty, bytes(SEGMENT), 0)
        os.fsync(empty)
        os.posix_fadvise(empty, 0, SEGMENT, os.POSIX_FADV_DONTNEED)
        with mmap.mmap(empty, SEGMENT) as shared:
            first, pages = ctypes.c_char.from_buffer(shared), (ctypes.c_ubyte * (SEGMENT // mmap.PAGESIZE))()
            known = libc().mincore(ctypes.addressof(first), SEGMENT, pages) == 0
            del first
        return known and all(page & 1 for page in pages)
    except OSError:  # of a disk that is full or broken, which is said when a range is allocated
        return False


def check_room(folder: str, nbytes: int, checkpoints: int = 0) -> None:
    """Raise DiskError if a folder's disk has no room for these bytes of state and of checkpoints."""
    if not make_room(folder, nbytes + checkpoints):
        raise no_room(folder, nbytes, checkpoints)


def make_room(folder: str, nbytes: int) -> bool:
    """Return whether a folder's disk has room for this many bytes, if need be after a garbage collection.

    An optimizer of an earlier run may be left in a cycle, such as with its scheduler, and its state with it.
    """
    if free_nbytes(folder) < nbytes:
        gc.collect()
    return free_nbytes(folder) >= nbytes


def moving_nbytes(folder: str, tensors_of: Iterable[Sequence[Tensor]], into: ScratchFile | None = None) -> int:
    """Count the bytes that tensors have on a folder's disk by now, and need no more room for in a scratch file there.

    Those in other files move into this one, or a new one, as they are given: what moves at once lies in both for a
    moment, so the most of that has no room yet.
    """
    device = _device_of(folder)
    files = [file for file in list(FILES) if file.device == device]
    total = most = 0
    for tensors in tensors_of:
        there = [(file, aligned(t.nbytes)) for t in tensors for file in files if file.place_of(t) is not None]
        total += sum(nbytes for _, nbytes in there)
        most = max(most, sum(nbytes for file, nbytes in there if file is not into))
    return total - most


def in_memory_nbytes(tensors: Iterable[Tensor]) -> int:
    """Count the bytes of tensors that lie in no scratch file."""
    files = list(FILES)
    return sum(tensor.nbytes for tensor in tensors if all(file.place_of(tensor) is None for file in files))


def free_nbytes(folder: str) -> int:
    """Return how many bytes can still be written to a folder's disk."""
    with _asking(folder):
        status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def _device_of(folder: str) -> int:
    with _asking(folder):
        return mount_of(folder).device


@contextlib.contextmanager
def _asking(folder: str) -> Iterator[None]:
    """Raise DiskError where the system can say nothing of a folder, which may be gone by now."""
    try:
        yield
    except OSError as error:
        outcome = (
            f"The folder has to be there as long as the run: put it back, or name another one, and {DiskError.GO_ON}"
        )
        raise DiskError(path=folder, offset=0, errno=error.errno or errno.EIO, outcome=outcome) from error


def no_room(folder: str, nbytes: int, checkpoints: int = 0) -> DiskError:
    """Make the error of a disk that has no room for these bytes of state, and of checkpoints."""
    there = free_nbytes(folder)
    needed, free = format_both(nbytes + checkpoints, there)
    missing, remedies = nbytes + checkpoints - there, ["name another disk"]
    what = "Optimizer state needs"
    if checkpoints:
        what = f"Optimizer state ({format_bytes(nbytes)}) and checkpoints ({format_bytes(checkpoints)}) need"
        remedies.insert(0, "save checkpoints elsewhere (ModelCheckpoint(dirpath=...))")
    if missing <= nbytes:
        remedies.append(f"raise host_budget by {format_bytes(missing, up=True)}")
    return DiskError(
        path=folder,
        offset=0,
        errno=errno.ENOSPC,
        writes=True,
        outcome=f"{what} {needed} there, and {free} are free: nothing was stepped. "
        + " or ".join([f"Free {format_bytes(missing, up=True)}", *remedies]),
    )


def rotates(mount: Mount) -> bool:
    """Whether the system says that a mount's disk rotates; of a virtual one it does not know."""
    device = mount.device
    if not os.major(device):  # of several disks, of which the table has one
        with contextlib.suppress(OSError):
            device = os.stat(mount.source).st_rdev
    here = f"/sys/dev/block/{os.major(device)}:{os.minor(device)}"
    if "virt" in os.path.realpath(here):
        return False
    for queue in (f"{here}/queue", f"{here}/../queue"):  # of the disk, or of the one that has this partition
        try:
            with open(f"{queue}/rotational") as file:
                return file.read().strip() == "1"
        except OSError:
            continue
    return False


def _refuse_copies(fd: int, folder: str, kind: str) -> None:
    """Have an empty file written in place; what lies below an overlay may know no other way (Rule 7)."""
    import fcntl  # which Windows has not

    flags = array.array("l", [0])
    try:
        fcntl.ioctl(fd, GET_FLAGS, flags)
        flags[0] |= NO_COPY
        fcntl.ioctl(fd, SET_FLAGS, flags)
    except OSError as error:
        if kind in COPIES_ON_WRITE:
            allowed = f"{ALLOWED}; this one is on {kind}, which copies what is written, and cannot be told not to"
            raise OptionError(argument="disk", found=folder, allowed=allowed) from error


FILES: weakref.WeakSet[ScratchFile] = weakref.WeakSet()  # that tensors lie in; some are closed
