"""The speed of a disk, as large direct transfers of several threads find it, and its filesystem.

1. All is measured on one nameless file, which is gone however the process ends. It takes at most a quarter of the free
   space; a long write goes over the same ranges again.
2. A drive may write fast until a cache of its own is full. The last part of a long write is what a run can count on,
   if the write was long enough: more time finds more.
3. Both directions run at once for a while, because some disks have one pipe for both.
4. Where direct transfers are refused, the page cache would be measured: writes are synced, and its pages dropped before
   they are read.
5. Of several folders each is measured by itself, then all at once, since they may share a disk or a link. A run has
   equally much in each.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from ..disk.direct_file import DIRECT, mount_of
from ..disk.direct_ring import buffer_over
from ..disk.scratch_file import no_local_disk, rotates
from ..errors import OptionError
from ..memory.pinned import HostAllocator, libc

CHUNK = 8 << 20  # bytes of a transfer
THREADS = 3  # in each direction
LARGEST = 4 << 30  # bytes of the file
PART = 0.2  # of the long write, at both ends, whose rates are compared
WRITES, READS, BOTH = 0.5, 0.2, 0.3  # of the time


@dataclass(frozen=True, kw_only=True)
class DiskSpeed:
    """A disk as a folder finds it."""

    folder: str
    filesystem: str  # "" if unknown
    rotates: bool
    is_direct: bool  # whether transfers past the page cache are possible
    read_bytes_per_s: float
    write_bytes_per_s: float  # at first
    sustained_bytes_per_s: float  # in the last part of the long write
    duplex: float  # the share of its speed that each direction has while both run
    written_nbytes: int  # by the long write
    free_nbytes: int
    elsewhere: str = ""  # what it is if it is no local disk


def check_folder(folder: str | os.PathLike[str]) -> None:
    """Refuse a folder that cannot be measured, before anything is."""
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise OptionError(argument="disk", found=os.fspath(folder), allowed="a directory that can be written")


def measure_disk(folder: str | os.PathLike[str], seconds: float, largest: int | None = None) -> DiskSpeed:
    """Measure the disk of a folder for about ``seconds``, with a file of at most ``largest`` bytes."""
    path = os.path.abspath(folder)
    check_folder(folder)
    free = shutil.disk_usage(path).free
    count = min(largest or LARGEST, free // 4) // CHUNK
    if count < 2:
        allowed = f"a directory on a disk with at least {8 * CHUNK >> 20} MiB free (found {free >> 20} MiB)"
        raise OptionError(argument="disk", found=os.fspath(folder), allowed=allowed)
    with tempfile.TemporaryFile(dir=path, buffering=0) as file, _direct(file.fileno()) as direct:
        mount = mount_of(file.fileno())
        elsewhere = no_local_disk(mount, file.fileno())
        trial = _Trial(file.fileno() if direct is None else direct, direct is not None)
        libc().fallocate(file.fileno(), 0, 0, count * CHUNK)  # if the filesystem does such a thing
        written = trial.run(WRITES * seconds, range(count), os.pwrite)
        first, last = _rate(written, 0, PART), _rate(written, 1 - PART, 1)
        if direct is None:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        read = _rate(trial.run(READS * seconds, range(count), trial.read))
        with ThreadPoolExecutor(1) as beside:
            writing = beside.submit(trial.run, BOTH * seconds, range(count // 2), os.pwrite)
            reads = _rate(trial.run(BOTH * seconds, range(count // 2, count), trial.read))
            writes = _rate(writing.result())
    return DiskSpeed(
        folder=path,
        filesystem=mount.kind,
        elsewhere=elsewhere,
        rotates=rotates(mount),
        is_direct=direct is not None,
        read_bytes_per_s=read,
        write_bytes_per_s=first,
        sustained_bytes_per_s=last,
        duplex=min(1.0, (reads / read + writes / last) / 2),
        written_nbytes=len(written[1]) * CHUNK,
        free_nbytes=free,
    )


def measure_disks(folders: Sequence[str | os.PathLike[str]], seconds: float) -> list[DiskSpeed]:
    """Measure the disk of each folder and, if there are several, all together; each has an equal part of the time."""
    seconds /= len(folders) + (len(folders) > 1)
    found = [measure_disk(folder, seconds) for folder in folders]
    if len(found) == 1:
        return found
    with ThreadPoolExecutor(len(folders)) as beside:
        at_once = list(beside.map(lambda folder: measure_disk(folder, seconds), folders))
    return [*found, _together(at_once)]


def _together(disks: Sequence[DiskSpeed]) -> DiskSpeed:
    """Return the speed of a file in stripes over disks that were measured at once: the slowest disk sets it."""
    count = len(disks)
    return DiskSpeed(
        folder=", ".join(disk.folder for disk in disks),
        filesystem=", ".join(dict.fromkeys(disk.filesystem for disk in disks)),
        elsewhere=next(filter(None, (disk.elsewhere for disk in disks)), ""),
        rotates=any(disk.rotates for disk in disks),
        is_direct=all(disk.is_direct for disk in disks),
        read_bytes_per_s=count * min(disk.read_bytes_per_s for disk in disks),
        write_bytes_per_s=count * min(disk.write_bytes_per_s for disk in disks),
        sustained_bytes_per_s=count * min(disk.sustained_bytes_per_s for disk in disks),
        duplex=min(disk.duplex for disk in disks),
        written_nbytes=sum(disk.written_nbytes for disk in disks),
        free_nbytes=count * min(disk.free_nbytes for disk in disks),
    )


Times = tuple[float, list[float]]  # when transfers began, and the ends of all


def _rate(times: Times, begin: float = 0, end: float = 1) -> float:
    """Compute bytes per second in a part of the time, from 0 to 1, in which transfers ended."""
    start, ends = times
    seconds = max(ends) - start
    since, until = start + begin * seconds, start + end * seconds
    return max(1, sum(since < moment <= until for moment in ends)) * CHUNK / max(until - since, 1e-9)


class _Trial:
    """Transfers of chunks of a file by several threads, until the time is over."""

    def __init__(self, fd: int, is_direct: bool) -> None:
        self._fd = fd
        self._is_direct = is_direct
        self._random = os.urandom(CHUNK)  # because a compressing filesystem would write zeros faster

    def run(self, seconds: float, chunks: range, transfer: Callable[[int, memoryview, int], int]) -> Times:
        """Transfer chunks in turn, each thread at least one."""
        ends: list[float] = []
        order, lock = itertools.cycle(chunks), threading.Lock()
        begin = time.perf_counter()

        def work() -> None:
            buffer = buffer_over(HostAllocator().plain(CHUNK))  # as a run's: in pages as large
            memory = buffer.memory
            memory[:] = self._random
            while True:
                with lock:
                    at = next(order) * CHUNK
                done = transfer(self._fd, memory, at)
                while done < CHUNK:
                    done += transfer(self._fd, memory[done:], at + done)
                if transfer is os.pwrite and not self._is_direct:
                    os.fdatasync(self._fd)
                ends.append(time.perf_counter())
                if ends[-1] - begin >= seconds:
                    return

        with ThreadPoolExecutor(THREADS, "superpipeline-disk-speed") as threads:
            for thread in [threads.submit(work) for _ in range(THREADS)]:
                thread.result()
        return begin, ends

    def read(self, fd: int, memory: memoryview, at: int) -> int:
        """Read into memory; what went through the page cache is dropped from it."""
        count = os.preadv(fd, [memory], at)
        if not self._is_direct:
            os.posix_fadvise(fd, at, count, os.POSIX_FADV_DONTNEED)
        return count


@contextmanager
def _direct(fd: int) -> Iterator[int | None]:
    """Open a file again for direct transfers, or yield None where there are none."""
    try:
        direct = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC | DIRECT)
    except OSError:
        yield None
        return
    try:
        yield direct
    finally:
        os.close(direct)
