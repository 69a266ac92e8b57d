"""Source files: where on disk the bytes of frozen weights are, and reads of them past the page cache.

- The kernel says which file has a tensor's bytes: those of a private mapping (``/proc/self/maps``) none of whose pages
  was written (``/proc/self/pagemap``). How the file was loaded does not matter, nor does its format.
- The parameter stays what its loader made it: a tensor over the mapping. Once a page of it was written, the memory has
  its bytes, and the file no longer.
- A file has to stay what it was when streaming began: its size and its time of modification are compared after each
  fill. A file that another one replaced (``os.replace``) stays open, and what it was.
- A network filesystem may show a change of a file late, or not at all: weights are not left there.
"""

from __future__ import annotations

import bisect
import functools
import logging
import mmap
import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import SourceFileError
from ..host.device import dense_strides
from ..host.machine import Mapping, mappings
from .direct import BLOCK, IN_MEMORY, DirectFile, mount_of

log = logging.getLogger(__name__)

PAGE = mmap.PAGESIZE
# The highest byte of a page's entry in pagemap. A page that is present or swapped out, and no file's, was written.
_PRESENT, _SWAPPED, _OF_A_FILE = 0x80, 0x40, 0x20
_UNWRITTEN = bytes(byte for byte in range(256) if byte & _OF_A_FILE or not byte & (_PRESENT | _SWAPPED))
_ENTRY = 8  # bytes of a page's entry


class Found(NamedTuple):
    """The place of a tensor's bytes in the mapping of a file."""

    mapping: Mapping
    offset: int


def find(tensors: Iterable[Tensor]) -> dict[int, Found]:
    """Map the ids of tensors to the places of their bytes in local files; leave out tensors that are in none."""
    there = mappings()
    begins = [mapping.begin for mapping in there]
    found: dict[int, Found] = {}
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
        if is_local(mapping.path) and not written([(address, data.nbytes)]):
            found[id(tensor)] = Found(mapping, mapping.offset + address - mapping.begin)
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


def written(ranges: Sequence[tuple[int, int]]) -> list[int]:
    """Return the numbers of the address ranges that have a page this process has written to."""
    found = []
    pages = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    try:
        for number, (address, nbytes) in enumerate(ranges):
            first, end = address // PAGE * _ENTRY, -(-(address + nbytes) // PAGE) * _ENTRY
            while first < end:
                entries = os.pread(pages, end - first, first)
                if entries[_ENTRY - 1 :: _ENTRY].translate(None, _UNWRITTEN):
                    found.append(number)
                    break
                first += len(entries)
    finally:
        os.close(pages)
    return found


class SourceFile(DirectFile):
    """A file on disk that frozen weights are read from during the run."""

    def __init__(self, mapping: Mapping) -> None:
        """Open the file of a mapping; raise SourceFileError if its path leads to another file by now."""
        try:
            fd = os.open(mapping.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise _gone(mapping.path, str(error.strerror)) from error
        super().__init__(mapping.path, fd, mount_of(fd).kind)
        self._state = self._now()
        try:
            if _identity(fd) != mapping.file:
                raise _gone(mapping.path, "another file has its name by now")
            if self.filesystem not in IN_MEMORY:
                self.open_directly(os.O_RDONLY, self._reads_the_same)
        except BaseException:
            self.close()
            raise

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
