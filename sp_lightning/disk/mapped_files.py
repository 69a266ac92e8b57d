"""The files that are open and have a mapping, over which tensors lie.

Through a mapping every page has to be faulted in, which takes several times the disk's time and fills the page cache.
Whoever needs many of a tensor's bytes looks here for the file that has them, and reads it directly.
"""

from __future__ import annotations

import weakref
from typing import Protocol

from torch import Tensor


class MappedFile(Protocol):
    """An open file with a mapping of the whole of it."""

    path: str
    flat: Tensor  # the mapping, as bytes

    def has(self, offset: int, nbytes: int) -> bool:
        """Whether the file has what tensors over these bytes of the mapping show."""

    def read(self, memory: memoryview, begin: int, nbytes: int) -> None:
        """Read bytes from a multiple of BLOCK on into memory that has room for whole blocks."""


OPEN: weakref.WeakSet[MappedFile] = weakref.WeakSet()


def find(address: int, nbytes: int) -> tuple[MappedFile, int] | None:
    """Find the open file that has the bytes at this address, and where in it; None if there is none."""
    for file in OPEN:
        offset = address - file.flat.data_ptr()
        if offset >= 0 and offset + nbytes <= file.flat.nbytes and file.has(offset, nbytes):
            return file, offset
    return None
