"""An open file of which ranges are moved past the page cache, between the disk and page-aligned memory.

1. A transfer is complete or an error: short ones are continued, and all else is a DiskError.
2. Transfers are direct: whole blocks. A filesystem that refuses them, or whose direct reads differ from buffered ones,
   is read and written through the page cache, which is dropped behind; one line in the log says so.
"""

from __future__ import annotations

import abc
import errno
import logging
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import DiskError

log = logging.getLogger(__name__)

BLOCK = 4096  # bytes: direct transfers begin and end at multiples of it, in the file and in memory
NETWORK = ("nfs", "cifs", "smb", "ceph", "lustre", "gpfs", "beegfs", "afs", "9p", "glusterfs", "fuse.sshfs", "ncpfs")
IN_MEMORY = ("tmpfs", "ramfs")
DIRECT: int = getattr(os, "O_DIRECT", 0)  # Linux only
REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)  # of direct transfers by a filesystem


def filesystem(device: int) -> str:
    """Return the type of the filesystem with this device number, such as "ext4"; "" if it is not listed."""
    number = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            mount, _, about = line.partition(" - ")
            if mount.split()[2] == number:
                return about.split()[0]
    return ""


def is_network(kind: str) -> bool:
    """Whether a type of filesystem is a network's."""
    return kind.startswith(NETWORK)


def blocks(nbytes: int) -> int:
    """Round a number of bytes up to whole blocks."""
    return -(-nbytes // BLOCK) * BLOCK


def holder(address: int, nbytes: int) -> tuple[DirectFile, int] | None:
    """Find the open file that has the bytes at this address of a mapping, and where in it; None if there is none.

    Through a mapping every page has to be faulted in, which takes several times the disk's time, and fills the page
    cache: whoever needs many of a tensor's bytes reads the file instead.
    """
    for file in list(OPEN):
        offset = file.offset_of(address, nbytes)
        if offset is not None:
            return file, offset
    return None


class DirectFile(abc.ABC):
    """An open file whose ranges are read, and written, directly where that is possible (Rule 2)."""

    def __init__(self, path: str, fd: int, kind: str, contents: str) -> None:
        """Take over a descriptor of a file on a filesystem of this kind; the log names its contents."""
        self.path, self.filesystem = path, kind
        self._fd: int | None = fd
        self._direct: int | None = None
        self.is_direct = False
        self._contents = contents
        self._said = threading.Lock()  # taken by the first of several threads that are refused, for good

    def read(self, memory: memoryview, begin: int, nbytes: int) -> None:
        """Read bytes from a multiple of BLOCK on into memory that has room for whole blocks (Rule 1)."""
        self._move(os.preadv, memory, begin, nbytes)

    def write(self, memory: memoryview, begin: int, nbytes: int) -> None:
        """Write whole blocks from a multiple of BLOCK on (Rule 1)."""
        self._move(os.pwritev, memory, begin, nbytes, writes=True)

    @abc.abstractmethod
    def offset_of(self, address: int, nbytes: int) -> int | None:
        """Return where in the file the bytes at this address are; None if they are not there."""

    @abc.abstractmethod
    def check(self) -> None:
        """Raise if the file is not what it was when it was opened."""

    def close(self) -> None:
        """Close the file; mappings of it live on. Safe twice."""
        OPEN.discard(self)
        fds, self._fd, self._direct = (self._fd, self._direct), None, None
        for fd in fds:
            if fd is not None:
                os.close(fd)

    # ---- details

    def _move(
        self, call: Callable[..., int], memory: memoryview, begin: int, nbytes: int, writes: bool = False
    ) -> None:
        assert self._fd is not None
        done = 0
        while done < nbytes:
            direct = self._direct if self.is_direct and done % BLOCK == 0 else None
            fd, room = (self._fd, nbytes) if direct is None else (direct, blocks(nbytes))
            try:
                count = call(fd, [memory[done:room]], begin + done)
            except OSError as error:
                if direct is not None and error.errno in REFUSALS:
                    self.is_direct = False
                    self._say_buffered(str(error.strerror))
                    continue
                raise self._failed(begin + done, error.errno or errno.EIO, writes) from error
            if count == 0:
                self.check()
                raise self._failed(begin + done, errno.ENOSPC if writes else errno.ENODATA, writes)
            done += count
        if not self.is_direct:
            os.posix_fadvise(self._fd, begin, nbytes, os.POSIX_FADV_DONTNEED)

    def _failed(self, offset: int, number: int, writes: bool) -> DiskError:
        return DiskError(path=self.path, offset=offset, errno=number, writes=writes)

    def _open_directly(self, flags: int, same: Callable[[int], bool]) -> None:
        """Open the file for direct transfers, and keep to them if a trial finds the same bytes (Rule 2)."""
        why: Any = "its direct transfers differ from buffered ones"
        try:
            self._direct = os.open(f"/proc/self/fd/{self._fd}", flags | os.O_CLOEXEC | DIRECT)
            if same(self._direct):
                self.is_direct = True
                return
        except OSError as error:
            why = error.strerror
        self._say_buffered(str(why))

    def _say_buffered(self, why: str) -> None:
        if not self._said.acquire(blocking=False):
            return
        log.warning(
            "superpipeline: %s, on %s, cannot be read directly (%s): %s through the page cache, which takes several "
            "times the processor's time",
            self.path,
            self.filesystem or "an unknown filesystem",
            why,
            self._contents,
        )


@dataclass(frozen=True)
class FileRange:
    """A range of a file."""

    file: DirectFile
    offset: int
    nbytes: int


OPEN: weakref.WeakSet[DirectFile] = weakref.WeakSet()  # over whose mappings tensors lie
