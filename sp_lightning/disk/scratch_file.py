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
7. A file in several folders consists of one nameless file in each, and its bytes lie in stripes, in turn in each of
   them. What is above this file has one range of offsets. A transfer of several stripes moves those of each folder in
   a thread of its own. Of each file the first stripe is left for trials.
8. A file in memory would be no gain, and on a network filesystem the two ways may differ: both are refused. So is one
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
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..core.unit_numbers import aligned
from ..errors import DiskError, OptionError
from ..memory.layout import Layout
from ..memory.pinned import MappedPiece, Reserved, libc, mapped
from ..options import format_both, format_bytes
from .direct_file import BLOCK, IN_MEMORY, OPEN, DirectFile, Mount, blocks, mount_of

log = logging.getLogger(__name__)

SEGMENT = max(BLOCK, mmap.ALLOCATIONGRANULARITY)  # a mapping of a part of a file begins at a multiple of it
STRIPE = 16 << 20  # bytes; a multiple of SEGMENT (Rule 7)
ADDRESSES = 1 << 30  # that are reserved at a time
STRIPING = 6  # threads for each folder beside the first
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


class OneProcess:
    """A process that has a file of its own."""

    rank, size = 0, 1

    def pass_on(self, make: Callable[[], int], what: int = 0) -> int:
        return make()


class Extent(NamedTuple):
    """The range of a tensor in the file."""

    offset: int
    nbytes: int


class SharedSegment(NamedTuple):
    """A segment of several ranks, as pieces of files with descriptors that who takes it closes."""

    file: ScratchFile
    pieces: Sequence[MappedPiece]
    begin: int


class _Part(DirectFile):
    """A nameless file in one folder."""

    def __init__(self, folder: str, ranks: FileRanks, holds_activations: bool) -> None:
        """Make the file of these ranks; raise OptionError where its folder cannot hold it (Rule 8)."""
        mount = check_folder(folder)
        self._rank = ranks.rank
        self._holds_activations = holds_activations
        fd = ranks.pass_on(functools.partial(_make, folder))
        contents = "activations go" if holds_activations else "optimizer state goes"
        super().__init__(f"the scratch file in {folder}", fd, mount.kind, contents)
        self.folder = folder
        self.device = mount.device
        try:
            if ranks.rank == 0:
                _check_empty(fd, folder, mount)
            self._open_directly(os.O_RDWR, self._both_ways_are_equal)
        except BaseException:
            self.close()
            raise

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
                raise no_room(self.folder, nbytes, activations=self._holds_activations) from error
            raise self._failed(begin, number, True) from error

    def check(self) -> None:
        """Do nothing: no other process has this file."""

    def offset_of(self, address: int, nbytes: int) -> int | None:
        return None

    def _failed(self, offset: int, number: int, writes: bool) -> DiskError:
        # Of what is here there is no other copy but in a checkpoint; of activations no one needs any.
        outcome = f"Check the disk, or name another one, and {DiskError.GO_ON}" * (not self._holds_activations)
        outcome = outcome or "Weights are as they were: check the disk, or name another one"
        return DiskError(path=self.path, offset=offset, errno=number, writes=writes, outcome=outcome)

    def _both_ways_are_equal(self, direct: int) -> bool:
        """Write on each way and read on the other (Rule 2)."""
        at, private = self._rank * SEGMENT, mmap.MAP_PRIVATE
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


class Stripe(NamedTuple):
    """A range of one folder's file, and where in the whole range it begins."""

    part: _Part
    offset: int
    at: int
    nbytes: int


class ScratchFile(_Part):
    """A nameless file in a folder, or in several, of which tensors are made."""

    def __init__(self, folders: str | Sequence[str], ranks: FileRanks, holds_activations: bool = False) -> None:
        """Make the file of these ranks; raise OptionError where a folder cannot hold it (Rule 8).

        ``holds_activations``: errors and the log name them, not the optimizer's state.
        """
        self.folders = (folders,) if isinstance(folders, str) else tuple(folders)
        self._ranks = ranks
        self._others: list[_Part] = []  # of the folders but the first, whose file is this one (Rule 7)
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()  # whose state is here, or will be
        self._end = ranks.size * SEGMENT if len(self.folders) == 1 else len(self.folders) * STRIPE
        self._lock = threading.Lock()  # held by whoever takes a range (Rule 4)
        self._addresses = Reserved(ADDRESSES)  # of tensors
        self._places: dict[int, Extent] = {}  # of tensors that live, by their addresses
        self._threads: ThreadPoolExecutor | None = None
        super().__init__(self.folders[0], ranks, holds_activations)
        try:
            for folder in self.folders[1:]:
                self._others.append(_Part(folder, ranks, holds_activations))
            if self._others:
                self._threads = ThreadPoolExecutor(STRIPING * len(self._others), "superpipeline-stripe")
            OPEN.add(self)
            FILES.add(self)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for part in self._others:
            part.close()
        if self._threads is not None:
            self._threads.shutdown()
        self._addresses.close()
        super().close()

    def tensors(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Allocate tensors of zeros with these shapes, types and strides (Rule 3)."""
        layout = Layout.of([("", tensor) for tensor in like], BLOCK)
        nbytes = max(layout.nbytes, BLOCK)
        begin, reserved = self._take(nbytes)
        pieces = [MappedPiece(one.part.descriptor, one.offset, one.at) for one in self._stripes(begin, nbytes)]
        flat, before_unmapping = mapped(pieces, nbytes, mmap.MAP_SHARED, self.path, reserved)
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
        descriptors = {
            part: self._ranks.pass_on(functools.partial(os.dup, part.descriptor), what) for part in self._parts
        }
        pieces = [MappedPiece(descriptors[one.part], one.offset, one.at) for one in self._stripes(begin, nbytes)]
        for part in descriptors.keys() - {one.part for one in self._stripes(begin, nbytes)}:
            os.close(descriptors[part])
        return SharedSegment(self, pieces, begin)

    def hold(self, begin: int, nbytes: int, part: Tensor, at: int | None) -> None:
        """Allocate a range for all ranks, and find there the part of it that this one moves, if any, until `forget`."""
        if nbytes:
            self._allocate(begin, blocks(nbytes))
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

    def part_on(self, devices: Collection[int]) -> float:
        """Return the part of the file that lies on these disks."""
        return sum(part.device in devices for part in self._parts) / len(self._parts)

    def offset_of(self, address: int, nbytes: int) -> int | None:
        place = self._places.get(address)
        return place.offset if place is not None and nbytes <= place.nbytes else None

    # ---- details

    @property
    def _parts(self) -> list[_Part]:
        return [self, *self._others]

    def _stripes(self, begin: int, nbytes: int) -> Iterator[Stripe]:
        """Yield the ranges of all files in a range, in order (Rule 7)."""
        parts, at = self._parts, 0
        count = len(parts)
        while at < nbytes:
            number, within = divmod(begin + at, STRIPE)
            piece = nbytes - at if count == 1 else min(nbytes - at, STRIPE - within)
            offset = begin + at if count == 1 else number // count * STRIPE + within
            yield Stripe(parts[number % count], offset, at, piece)
            at += piece

    def _move(
        self, call: Callable[..., int], memory: memoryview, begin: int, nbytes: int, writes: bool = False
    ) -> None:
        by_part: dict[_Part, list[Stripe]] = {}
        for one in self._stripes(begin, nbytes):
            by_part.setdefault(one.part, []).append(one)

        def move(stripes: list[Stripe]) -> None:
            for part, offset, at, size in stripes:
                DirectFile._move(part, call, memory[at:], offset, size, writes)

        first, *others = by_part.values()
        beside = [self._threads.submit(move, stripes) for stripes in others] if self._threads is not None else []
        try:
            move(first)
        finally:
            wait(beside)  # whatever comes of it: they move this memory
        for one_moved in beside:
            one_moved.result()

    def _take(self, nbytes: int, first: int = 0, reserves: bool = True) -> tuple[int, int | None]:
        """Take the next range, and allocate it from this byte of it on; return where it begins, and its address.

        One thread does so at a time (Rule 4). The address is None if none was reserved.
        """
        with self._lock:
            begin = self._end
            self._allocate(begin + first, nbytes - first)
            self._end = -(-(begin + nbytes) // SEGMENT) * SEGMENT
            return begin, self._addresses.take(self._end - begin) if reserves else None

    def _allocate(self, begin: int, nbytes: int) -> None:
        stripes = list(self._stripes(begin, nbytes))
        for part in self._parts:
            offsets = [(one.offset, one.offset + one.nbytes) for one in stripes if one.part is part]
            if offsets:  # its stripes lie side by side there
                part.allocate(offsets[0][0], offsets[-1][1] - offsets[0][0])

    def _free(self, address: int, nbytes: int) -> None:
        """Forget a segment, which is about to be unmapped, and give its space back (Rule 4)."""
        self.forget(address, nbytes)
        libc().madvise(address, nbytes, mmap.MADV_REMOVE)  # the file may be closed, and other segments of it live on


def in_file(nbytes: Iterable[int]) -> int:
    """Return the most bytes of the file that tensors of these sizes span, each allocated after the other."""
    return sum(blocks(one) + SEGMENT for one in nbytes)


def check_folder(folder: str) -> Mount:
    """Raise OptionError where a scratch file cannot be; return the folder's mount (Rule 8)."""
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
    """Raise OptionError where a file that was just made is not on a disk that writes in place (Rule 8)."""
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


def shares(folders: Sequence[str], nbytes: int) -> dict[str, int]:
    """Return how many bytes of a file in these folders lie on each of their disks, by a folder on it (Rule 7)."""
    by_disk: dict[int, list[str]] = {}
    for folder in folders:
        by_disk.setdefault(_device_of(folder), []).append(folder)
    return {of_disk[0]: -(-nbytes * len(of_disk) // len(folders)) for of_disk in by_disk.values()}


def moving_nbytes(
    folders: Iterable[str], tensors_of: Iterable[Sequence[Tensor]], into: ScratchFile | None = None
) -> int:
    """Count the bytes that tensors have on folders' disks by now, and need no more room for in a scratch file there.

    Those in other files move into this one, or a new one, as they are given: what moves at once lies in both for a
    moment, so the most of that has no room yet.
    """
    devices = set(map(_device_of, folders))
    files = {file: file.part_on(devices) for file in list(FILES)}
    total = most = 0
    for tensors in tensors_of:
        there = [(file, aligned(t.nbytes)) for t in tensors for file in files if file.place_of(t) is not None]
        total += sum(int(files[file] * nbytes) for file, nbytes in there)
        most = max(most, sum(int(files[file] * nbytes) for file, nbytes in there if file is not into))
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


def no_room(folder: str, nbytes: int, checkpoints: int = 0, activations: bool = False) -> DiskError:
    """Make the error of a disk that has no room for these bytes of state, or activations, and of checkpoints."""
    there = free_nbytes(folder)
    needed, free = format_both(nbytes + checkpoints, there)
    missing, remedies = nbytes + checkpoints - there, ["name another disk"]
    what = "Activations need" if activations else "Optimizer state needs"
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
    """Have an empty file written in place; what lies below an overlay may know no other way (Rule 8)."""
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
