"""The scratch file: tensors on a local disk that any code may use, and whose bytes move past the page cache.

- It has no name (O_TMPFILE): however the process ends, its space is free again. It is no checkpoint.
- Its tensors lie over one shared mapping and are right at any time, by page faults. The pipeline moves the same ranges
  directly. The kernel keeps the two equal: a direct read writes dirty pages out first, a direct write drops cached
  ones. A trial finds out whether this filesystem does; where it does not, both go through the page cache.
- A range has whole blocks of its own, allocated before it has bytes: a write never finds the disk full. It is free for
  another tensor once nothing refers to its storage. The file lives as long as any of its tensors.
- A forked process has neither the mapping nor the descriptors: what it wrote would be the parent's weights. A read of
  a tensor there is an error.
- Refused are files in memory, and on a network filesystem.
"""

from __future__ import annotations

import collections
import ctypes
import errno
import mmap
import os
import threading
import weakref
from typing import Any

import torch
from torch import Tensor

from ..compat.torch import forbid_access, storage_id
from ..errors import DiskError, OptionError
from ..host.device import dense_strides
from ..host.memory import keep_from_forks
from ..options import format_both
from .files import BLOCK, IN_MEMORY, DirectFile, Mount, blocks, mount_of

LARGEST = 8 << 40  # bytes of the file: some filesystems have none much larger
ALLOWED = "a folder on a local disk of this machine"
FORKED = "this tensor lies in the scratch file, which a forked process does not have: start the process by 'spawn'"

files: weakref.WeakValueDictionary[str, ScratchFile] = weakref.WeakValueDictionary()  # by their folders


def scratch_in(folder: str, nbytes: int) -> ScratchFile:
    """Return the scratch file of a folder, with at least nbytes of disk space reserved for new tensors.

    Reuse the folder's file while an earlier run's tensors keep it alive; create one otherwise.
    """
    file = files.get(folder)
    if file is None:
        file = files[folder] = ScratchFile(folder)
    free = list(file._free.items())  # any thread may free a tensor
    file.allocate(nbytes - sum(size * len(places) for size, places in free))
    return file


class ScratchFile(DirectFile):
    """A nameless file on a local disk, whose ranges are the memory of tensors."""

    outcome = f"Check the disk, or name another one, and {DiskError.GO_ON}"

    def __init__(self, folder: str) -> None:
        """Create and map the file; raise OptionError where its folder cannot hold it."""
        self.folder = folder
        self._end = self._allocated = 0  # bytes that tensors have taken, and bytes that the disk has allocated
        self._free: dict[int, list[int]] = collections.defaultdict(list)  # offsets of ranges, by their bytes
        self._storages: dict[int, int] = {}  # ids of the storages of live tensors, by their offsets
        self._taking = threading.RLock()  # backward, the steps thread, and streams with the same folder take ranges
        try:
            fd = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
            super().__init__(f"the scratch file in {folder}", fd, mount_of(folder).kind)
            status = os.fstatvfs(fd)
            nbytes = min(status.f_bavail * status.f_frsize // BLOCK * BLOCK, LARGEST)
            os.ftruncate(fd, nbytes)  # takes nothing of the disk
        except OSError as error:
            allowed = f"{ALLOWED} that takes a nameless file as large as what is free, as ulimit -f permits"
            allowed += f" ({error.strerror})"
            raise OptionError(argument="disk", found=folder, allowed=allowed) from error
        with torch.inference_mode(False):
            whole: Any = torch.UntypedStorage.from_file(f"/proc/self/fd/{fd}", True, nbytes)
            self._flat = torch.empty(0, dtype=torch.uint8, device="cpu").set_(whole)
        keep_from_forks(self._flat)
        self.allocate(BLOCK)
        self.open_directly(os.O_RDWR, self._both_ways_are_equal)

    def allocate(self, nbytes: int) -> None:
        """Allocate disk space for nbytes behind the ranges that were taken; raise DiskError if the disk is full."""
        status = os.fstatvfs(self.fd)
        there, needed = status.f_bavail * status.f_frsize, self._end + nbytes - self._allocated
        if needed <= 0:
            return
        end = self._allocated + needed
        try:
            if needed > there or end > len(self._flat):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.posix_fallocate(self.fd, self._allocated, needed)
        except OSError as error:
            texts = format_both(needed, there)
            raise DiskError(
                path=self.folder,
                offset=self._allocated,
                errno=error.errno or errno.EIO,
                writes=True,
                outcome=f"What exceeds host_budget needs {texts[0]} more there, and {texts[1]} are free: nothing was"
                " stepped. Name another disk, free some, or raise host_budget",
            ) from error
        self._allocated = end

    def take(self, like: Tensor) -> Tensor:
        """Return a new, uninitialized, dense tensor in the file, with the shape and dtype of ``like``."""
        size = blocks(max(like.nbytes, 1))
        with self._taking:
            if free := self._free[size]:
                offset = free.pop()
            else:
                offset = self._end
                self.allocate(size)
                self._end += size
        with torch.inference_mode(False):
            memory = (ctypes.c_uint8 * size).from_address(self._flat.data_ptr() + offset)
            weakref.finalize(memory, self._release, offset, size).atexit = False  # keeps the file alive until then
            storage = torch.frombuffer(memory, dtype=torch.uint8, count=max(like.nbytes, 1)).untyped_storage()
            self._storages[offset] = storage_id(storage)
            return torch.empty(0, dtype=like.dtype, device="cpu").set_(storage, 0, like.shape, dense_strides(like))

    def _release(self, offset: int, size: int) -> None:
        """Mark a range as free, once nothing refers to its storage. May run on any thread."""
        del self._storages[offset]
        self._free[size].append(offset)

    def offset_of(self, tensor: Tensor) -> int | None:
        """Return the file offset of a dense tensor that begins at a block of the file; None for any other tensor."""
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            return None
        return self.offset_at(tensor.data_ptr()) if tensor.stride() == dense_strides(tensor) else None

    def offset_at(self, address: int) -> int | None:
        """Return the file offset of an address at which one of the file's mapped blocks begins; None for any other."""
        offset = address - self._flat.data_ptr()
        return offset if 0 <= offset < self._end and offset % BLOCK == 0 else None

    def forget(self) -> None:
        """Make each access to the file's tensors an error, and close the file, in a forked process."""
        for storage in self._storages.values():
            forbid_access(storage, FORKED)
        self.close()

    def _both_ways_are_equal(self, direct: int) -> bool:
        """Whether direct transfers and the mapping see each other's writes, by a trial."""
        mapped = self._flat[:BLOCK].fill_(1)
        with mmap.mmap(-1, BLOCK) as memory:
            if os.preadv(direct, [memory], 0) != BLOCK or memory[:] != bytes([1]) * BLOCK:
                return False
            memory[:] = bytes([2]) * BLOCK
            return os.pwritev(direct, [memory], 0) == BLOCK and bool((mapped == 2).all())


def _forget_all() -> None:
    """Forget all scratch files, in a forked process."""
    for file in list(files.values()):
        file.forget()
    files.clear()


os.register_at_fork(after_in_child=_forget_all)


def check_folder(folder: str) -> None:
    """Raise OptionError if a folder cannot hold a scratch file."""
    if not os.path.isdir(folder):
        raise OptionError(argument="disk", found=folder, allowed=f"{ALLOWED}; there is no such folder")
    mount = mount_of(folder)
    if elsewhere := no_local_disk(mount):
        allowed = f"{ALLOWED}; this one is on {mount.kind}, {elsewhere}"
        raise OptionError(argument="disk", found=folder, allowed=allowed)


def no_local_disk(mount: Mount) -> str:
    """Describe a mount that is on no local disk; "" for one that is."""
    if mount.kind in IN_MEMORY:
        return "a filesystem in memory"
    return "a network filesystem, or one that is not known to be local" if mount.is_remote else ""
