"""The files that are open and have mappings, over which tensors lie.

Through a mapping every page has to be faulted in, which takes several times the disk's time and fills the page cache.
Whoever needs many of a tensor's bytes looks here for the file that has them, and reads it directly.
"""

from __future__ import annotations

import weakref
from typing import Protocol


class MappedFile(Protocol):
    """An open file with mappings."""

    def offset_of(self, address: int, nbytes: int) -> int | None:
        """Return where in the file the bytes at this address are; None if they are not there."""

    def read(self, memory: memoryview, begin: int, nbytes: int) -> None:
        """Read bytes from a multiple of BLOCK on into memory that has room for whole blocks."""


OPEN: weakref.WeakSet[MappedFile] = weakref.WeakSet()


def find(address: int, nbytes: int) -> tuple[MappedFile, int] | None:
    """Find the open file that has the bytes at this address, and where in it; None if there is none."""
    for file in OPEN:
        offset = file.offset_of(address, nbytes)
        if offset is not None:
            return file, offset
    return None
