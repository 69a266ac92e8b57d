"""Files on a local disk whose ranges move past the page cache, and those that frozen weights were loaded from.

- A transfer is complete or an error: short ones are continued, and all else is a DiskError.
- Transfers are direct: whole blocks. A filesystem that refuses them, or whose direct reads differ from buffered ones,
  is read and written through the page cache, which is dropped behind; one line in the log says so.
- The kernel says which file has a tensor's bytes: those of a private mapping (``/proc/self/maps``) none of whose pages
  was written (``/proc/self/pagemap``). How the file was loaded does not matter, nor does its format. The parameter
  stays a tensor over the mapping. Once a page of it was written, the memory has its bytes, and the file no longer.
- Such a file has to stay what it was when streaming began: its size and its time of modification are compared after
  each fill. A file that another one replaced (``os.replace``) stays open, and what it was.
- A filesystem without a block device is a network's, unless it is known to be local. It may show a change of a file
  late, or not at all: weights are not left there.
"""

from __future__ import annotations

import bisect
import errno
import functools
import logging
import mmap
import os
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import DiskError, SourceFileError
from ..host.device import dense_strides
from ..host.machine import Mapping, mappings

log = logging.getLogger(__name__)

BLOCK = 4096  # bytes: direct transfers begin and end at multiples of it, in the file and in memory
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "rootfs")
LOCAL = ("btrfs", "zfs", "bcachefs", "ubifs", "erofs", "overlay", "aufs", "ecryptfs", *IN_MEMORY)
LOCAL_FUSE = ("ntfs-3g", "exfat", "fuse-overlayfs", "unionfs", "mergerfs", "bindfs", "gocryptfs", "encfs", "cryfs")
REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)  # errors by which filesystems refuse direct transfers

PAGE = mmap.PAGESIZE
# The highest byte of a page's entry in pagemap. A page that is present or swapped out, and no file's, was written.
_PRESENT, _SWAPPED, _OF_A_FILE = 0x80, 0x40, 0x20
_UNWRITTEN = bytes(byte for byte in range(256) if byte & _OF_A_FILE or not byte & (_PRESENT | _SWAPPED))
_ENTRY = 8  # bytes of a page's entry


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


def mount_of(path: str) -> Mount:
    """Return the mount that a path is on. For an open file, pass ``/proc/self/fd/`` and its descriptor."""
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as lines:
            number = next((line.split()[1] for line in lines if line.startswith("mnt_id:")), "")
    finally:
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
        """Close the file; mappings of it stay valid. A second call does nothing."""
        fds, self.fd, self._direct = (self.fd, self._direct), -1, None
        for fd in fds:
            if fd is not None and fd >= 0:
                os.close(fd)

    def __del__(self) -> None:
        self.close()

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
                if count == 0:
                    self.check()
                    raise OSError(errno.ENOSPC if writes else errno.ENODATA, "no byte was moved")
            except OSError as error:
                if direct is not None and error.errno in REFUSALS:
                    self._go_on_buffered(str(error.strerror))
                    continue
                offset, number = begin + done, error.errno or errno.EIO
                raise DiskError(
                    path=self.path, offset=offset, errno=number, writes=writes, outcome=self.outcome
                ) from error
            done += count
        if self._direct is None:
            os.posix_fadvise(self.fd, begin, nbytes, os.POSIX_FADV_DONTNEED)

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


def find(tensors: Iterable[Tensor]) -> dict[int, Mapping]:
    """Find the tensors whose bytes lie in local files; return the file range of each, by the tensor's id."""
    there = mappings()
    begins = [mapping.begin for mapping in there]
    found: dict[int, Mapping] = {}
    is_local = functools.cache(_is_local)  # says once what is not
    for tensor in tensors:
        data = tensor.data
        if data.is_meta or data.layout is not torch.strided or not data.nbytes or data.stride() != dense_strides(data):
            continue
        address = data.data_ptr()
        mapping = there[bisect.bisect_right(begins, address) - 1]
        is_inside = mapping.begin <= address and address + data.nbytes <= mapping.end
        if data.is_conj() or data.is_neg() or not is_inside:
            continue
        if is_local(mapping.path) and not is_written(address, data.nbytes):
            offset = mapping.offset + address - mapping.begin
            found[id(tensor)] = mapping._replace(begin=address, end=address + data.nbytes, offset=offset)
    return found


def _is_local(path: str) -> bool:
    """Whether a path is on a local filesystem; log a warning if it is a network's."""
    try:
        mount = mount_of(path)
    except OSError:  # the file has no name by now
        return False
    if mount.is_remote:
        log.warning("superpipeline: weights are copied from %s, on %s: it may change unnoticed", path, mount.kind)
    return not mount.is_remote


def is_written(address: int, nbytes: int) -> bool:
    """Whether this process has written to a page of these addresses."""
    first, end = address // PAGE, -(-(address + nbytes) // PAGE)
    with open("/proc/self/pagemap", "rb") as pages:
        pages.seek(first * _ENTRY)
        entries = pages.read((end - first) * _ENTRY)
    return bool(entries[_ENTRY - 1 :: _ENTRY].translate(None, _UNWRITTEN))


class SourceFile(DirectFile):
    """A file on disk that frozen weights are read from during the run."""

    def __init__(self, mapping: Mapping) -> None:
        """Open the file of a mapping; raise SourceFileError if its path leads to another file by now."""
        try:
            fd = os.open(mapping.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise _gone(mapping.path, str(error.strerror)) from error
        super().__init__(mapping.path, fd, mount_of(f"/proc/self/fd/{fd}").kind)
        self._state = self._now()
        if _identity(fd) != mapping.file:
            raise _gone(mapping.path, "another file has its name by now")
        if self.filesystem not in IN_MEMORY:
            self.open_directly(os.O_RDONLY, self._reads_the_same)

    def check(self) -> None:
        """Raise SourceFileError if the file's size or time of modification changed."""
        if (now := self._now()) != self._state:
            was, size = self._state[0], now[0]
            changed = f"it has {size} bytes, and had {was}" if size != was else "it was written"
            raise SourceFileError(
                f"{self.path} changed while weights stayed in it ({changed}): what they were is lost. Load the model"
                " again, and write checkpoints to another path"
            )

    def _now(self) -> tuple[int, int]:
        """Return the file's size and time of modification."""
        status = os.fstat(self.fd)
        return status.st_size, status.st_mtime_ns

    def _reads_the_same(self, direct: int) -> bool:
        """Whether a direct read of the first block has the bytes of a buffered one."""
        nbytes = min(BLOCK, self._state[0])
        with mmap.mmap(-1, BLOCK) as buffer, memoryview(buffer) as memory:
            return os.preadv(direct, [memory], 0) == nbytes and memory[:nbytes] == os.pread(self.fd, nbytes, 0)


def _identity(fd: int) -> tuple[str, str]:
    """Return the device and inode by which the kernel lists mappings of a file: `os.fstat` may have another device."""
    with mmap.mmap(fd, 1, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as page:
        address = torch.frombuffer(page, dtype=torch.uint8).data_ptr()
        return next((here.file for here in mappings() if here.begin <= address < here.end), ("", ""))


def _gone(path: str, why: str) -> SourceFileError:
    """Make the error of a file that cannot be opened again."""
    return SourceFileError(
        f"{path}, which weights were loaded from, cannot be opened again ({why}): leave it where it was while its"
        " weights stay there (host_budget), or load the model again"
    )
