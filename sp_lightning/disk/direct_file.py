"""An open file of which ranges are moved past the page cache, between the disk and page-aligned memory.

1. A transfer is complete or an error: short ones are continued, and all else is a DiskError.
2. Transfers are direct: whole blocks. A filesystem that refuses them, or whose direct reads differ from buffered ones,
   is read and written through the page cache, which is dropped behind; one line in the log says so.
3. The mount that a file is on says where its bytes are. A device number of the file's own may be a part's, such as a
   btrfs subvolume's, and is not listed anywhere. A filesystem that has a block device is on a disk of this machine; of
   the others few are, and those are known by name: all else is taken for a network's.
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
from typing import Any, NamedTuple

from ..errors import DiskError

log = logging.getLogger(__name__)

BLOCK = 4096  # bytes: direct transfers begin and end at multiples of it, in the file and in memory
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "rootfs")
# Filesystems that are on this machine without a block device of their own (Rule 3).
LOCAL = ("btrfs", "zfs", "bcachefs", "ubifs", "erofs", "overlay", "aufs", "ecryptfs", *IN_MEMORY)
LOCAL_FUSE = ("ntfs-3g", "exfat", "fuse-overlayfs", "unionfs", "mergerfs", "bindfs", "gocryptfs", "encfs", "cryfs")
DIRECT: int = getattr(os, "O_DIRECT", 0)  # Linux only
REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)  # of direct transfers by a filesystem


class Mount(NamedTuple):
    """The mount that a file is on (Rule 3)."""

    kind: str  # of filesystem, such as "ext4"; "" if it is not listed
    device: int  # the number of the filesystem: one for all of its parts
    source: str = ""  # what is mounted, such as "/dev/sda1"

    @property
    def is_remote(self) -> bool:
        """Whether the filesystem is a network's, as far as is known."""
        return not os.major(self.device) and is_network(self.kind)


def mount_of(file: int | str) -> Mount:
    """Find the mount of an open file's descriptor, or of a path."""
    fd = file if isinstance(file, int) else os.open(file, getattr(os, "O_PATH", os.O_RDONLY) | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as lines:
            number = next((line.split()[1] for line in lines if line.startswith("mnt_id:")), "")
    finally:
        if fd is not file:
            os.close(fd)
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            mount, _, about = line.partition(" - ")
            if mount.split()[0] == number:
                device, (kind, source) = mount.split()[2], about.split()[:2]
                return Mount(kind, os.makedev(*map(int, device.split(":"))), source)
    return Mount("", status.st_dev)


def is_network(kind: str) -> bool:
    """Whether a filesystem of this type, without a block device, is taken for a network's (Rule 3)."""
    family, _, name = kind.partition(".")
    return bool(kind) and kind not in LOCAL and family != "fuseblk" and not (family == "fuse" and name in LOCAL_FUSE)


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
        """Raise if the file changed since it was opened."""

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
