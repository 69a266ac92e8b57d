"""A file whose ranges are moved past the page cache, between a local disk and page-aligned memory.

- A transfer is complete or an error: short ones are continued, and all else is a DiskError.
- Transfers are direct: whole blocks. A filesystem that refuses them, or whose direct reads differ from buffered ones,
  is read and written through the page cache, which is dropped behind; one line in the log says so.
- A filesystem without a block device is a network's, unless it is known to be local.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from typing import NamedTuple

from ..errors import DiskError

log = logging.getLogger(__name__)

BLOCK = 4096  # bytes: direct transfers begin and end at multiples of it, in the file and in memory
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "rootfs")
LOCAL = ("btrfs", "zfs", "bcachefs", "ubifs", "erofs", "overlay", "aufs", "ecryptfs", *IN_MEMORY)
LOCAL_FUSE = ("ntfs-3g", "exfat", "fuse-overlayfs", "unionfs", "mergerfs", "bindfs", "gocryptfs", "encfs", "cryfs")
REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)  # errors by which filesystems refuse direct transfers


class Mount(NamedTuple):
    """The mount that a file is on. The file's own device number may be a subvolume's, which no list of mounts has."""

    kind: str  # of filesystem, such as "ext4"; "" if it is not listed
    device: int  # the number of the filesystem
    source: str = ""  # what is mounted, such as "/dev/sda1"

    @property
    def is_remote(self) -> bool:
        """Whether the filesystem is a network's, as far as is known."""
        family, _, name = self.kind.partition(".")
        is_known = self.kind in LOCAL or family == "fuseblk" or (family == "fuse" and name in LOCAL_FUSE)
        return bool(self.kind) and not os.major(self.device) and not is_known


def mount_of(file: int | str) -> Mount:
    """Find the mount of an open file's descriptor, or of a path."""
    fd = file if isinstance(file, int) else os.open(file, os.O_PATH | os.O_CLOEXEC)
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


def blocks(nbytes: int) -> int:
    """Round a number of bytes up to whole blocks."""
    return -(-nbytes // BLOCK) * BLOCK


class DirectFile:
    """An open file whose ranges are read, and written, directly where that is possible."""

    outcome = ""  # advice in the error of a failed transfer
    fd = -1  # of a file that could not be opened, which is closed all the same
    _direct: int | None = None

    def __init__(self, path: str, fd: int, kind: str) -> None:
        """Take over the descriptor of a file on a filesystem of this kind."""
        self.path, self.filesystem, self.fd = path, kind, fd

    def read(self, memory: memoryview, begin: int, nbytes: int) -> None:
        """Read a range of the file, from a multiple of BLOCK on, into memory that has room for whole blocks. Blocks."""
        self._move(os.preadv, memory, begin, nbytes)

    def write(self, memory: memoryview, begin: int, nbytes: int) -> None:
        """Write memory that has whole blocks to a range of the file, from a multiple of BLOCK on. Blocks."""
        self._move(os.pwritev, memory, begin, nbytes, writes=True)

    def check(self) -> None:
        """Raise if the file changed after it was opened, where that can be known."""

    def close(self) -> None:
        """Close the file; mappings of it live on. Safe twice."""
        fds, self.fd, self._direct = (self.fd, self._direct), -1, None
        for fd in fds:
            if fd is not None and fd >= 0:
                os.close(fd)

    # ---- details

    def _move(
        self, call: Callable[..., int], memory: memoryview, begin: int, nbytes: int, writes: bool = False
    ) -> None:
        """Call preadv or pwritev until all bytes are moved, directly where possible; raise DiskError if that fails."""
        done = 0
        while done < nbytes:
            direct = self._direct if done % BLOCK == 0 else None
            fd, room = (self.fd, nbytes) if direct is None else (direct, blocks(nbytes))
            try:
                count = call(fd, [memory[done:room]], begin + done)
            except OSError as error:
                if direct is not None and error.errno in REFUSALS:
                    self._go_on_buffered(str(error.strerror))
                    continue
                raise self.failed(begin + done, error.errno or errno.EIO, writes) from error
            if count == 0:
                self.check()
                raise self.failed(begin + done, errno.ENOSPC if writes else errno.ENODATA, writes)
            done += count
        if self._direct is None:
            os.posix_fadvise(self.fd, begin, nbytes, os.POSIX_FADV_DONTNEED)

    def failed(self, offset: int, number: int, writes: bool) -> Exception:
        """Make the DiskError of a read, or of a write, that failed at this offset."""
        return DiskError(path=self.path, offset=offset, errno=number, writes=writes, outcome=self.outcome)

    def open_directly(self, flags: int, is_same: Callable[[int], bool]) -> None:
        """Open the file for direct transfers; stay with the page cache if a trial finds other bytes, or an error."""
        why = "its direct transfers differ from buffered ones"
        try:
            self._direct = os.open(f"/proc/self/fd/{self.fd}", flags | os.O_CLOEXEC | os.O_DIRECT)
            if is_same(self._direct):
                return
        except OSError as error:
            why = str(error.strerror)
        self._go_on_buffered(why)

    def _go_on_buffered(self, why: str) -> None:
        """Move bytes through the page cache from now on, and log why."""
        direct, self._direct = self._direct, None
        if direct is not None:
            os.close(direct)
        log.warning(
            "superpipeline: %s, on %s, cannot be read or written directly (%s): its bytes go through the page cache,"
            " which takes several times the processor's time",
            self.path,
            self.filesystem or "an unknown filesystem",
            why,
        )
