"""Source files: where on disk the bytes of weights are, and reads of them past the page cache.

1. The kernel says which file has a tensor's bytes: those of a private mapping (``/proc/self/maps``) none of whose pages
   was written (``/proc/self/pagemap``). How the file was loaded does not matter, nor does its format.
2. A weight that stays in its file lies over a mapping of ours, private too, of the same file. So nothing else is over
   its bytes, as after the copy into a slab. The kernel's device and inode of both mappings must be the same, else the
   path leads to another file by now.
3. As long as no page of a weight was written, the file has its bytes. Once one was, whoever wrote it, the weight's
   memory has them, and the pages next to it are still right as well.
4. A file has to stay what it was when its weights were loaded: its size and its time of modification are compared
   after the last read of each fill. A file that another one replaced (``os.replace``) stays open, and what it was. When
   a run ends, or makes its units anew, one descriptor of the file is *left* for as long as anything lies over our
   mapping: through it the file is opened again, whatever its name leads to by then, and has to be what it was.
5. A network filesystem may show a change of a file late, or not at all: weights are not left there.
"""

from __future__ import annotations

import bisect
import mmap
import os
import sys
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.host import Mapping, mappings
from ..errors import OptionError, SourceFileError
from ..memory.layout import is_dense
from ..memory.watched_parameters import true_data
from .direct_file import BLOCK, IN_MEMORY, OPEN, DirectFile, FileRange, mount_of

PAGE = mmap.PAGESIZE

# The highest byte of a page's entry in pagemap. A page that is present or swapped out, and no file's, was written.
_PRESENT, _SWAPPED, _OF_A_FILE = 0x80, 0x40, 0x20
_UNWRITTEN = bytes(byte for byte in range(256) if byte & _OF_A_FILE or not byte & (_PRESENT | _SWAPPED))
_ENTRY = 8  # bytes of a page's entry


@dataclass(frozen=True)
class Found:
    """The place of a tensor's bytes in the mapping of a file (Rule 1)."""

    mapping: Mapping
    offset: int
    nbytes: int

    @property
    def place(self) -> tuple[object, ...]:
        """Where it is, in terms that are the same in another process."""
        return self.mapping.file, self.offset, self.nbytes


@dataclass(frozen=True)
class Place(FileRange):
    """The place of a weight that stays in its file (Rule 2)."""

    file: SourceFile

    @property
    def address(self) -> int:
        """The address of the first byte, in our mapping."""
        return self.file.flat.data_ptr() + self.offset


def check_available(budget: object) -> None:
    """Refuse ``host_budget`` on systems whose kernel does not say where bytes are."""
    if not sys.platform.startswith("linux"):
        raise OptionError(argument="host_budget", found=budget, allowed="None on this system: it needs Linux")


def find(tensors: Iterable[Tensor]) -> dict[int, Found]:
    """Find, by the ids of these tensors, where in files their bytes are; those that are in no file are left out."""
    there = mappings()
    begins = [mapping.begin for mapping in there]
    found = {}
    for tensor in tensors:
        if tensor.is_meta or tensor.layout is not torch.strided or not tensor.nbytes:
            continue
        data = true_data(tensor)
        if not is_dense(data) or data.is_conj() or data.is_neg():
            continue
        address = data.data_ptr()
        mapping = there[bisect.bisect_right(begins, address) - 1]
        inside = mapping.begin <= address and address + tensor.nbytes <= mapping.end
        if inside and not written([(address, tensor.nbytes)]):
            found[id(tensor)] = Found(mapping, mapping.offset + address - mapping.begin, tensor.nbytes)
    return found


def written(ranges: Sequence[tuple[int, int]]) -> list[int]:
    """Find which of these ranges, each an address and a number of bytes, have a page that was written (Rule 3)."""
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


class LeftFile(NamedTuple):
    """A file that was closed while weights lay over our mapping of it (Rule 4)."""

    fd: int
    path: str
    state: tuple[int, int]  # size and time of modification


class SourceFile(DirectFile):
    """A file that weights stay in."""

    def __init__(self, path: str, left: LeftFile | None = None) -> None:
        """Open a file, or once more one that was left."""
        path, again = (path, path) if left is None else (left.path, f"/proc/self/fd/{left.fd}")
        try:
            fd = os.open(again, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise SourceFileError(
                f"{path}, which weights were loaded from, cannot be opened again ({error.strerror}): leave it where "
                "it was while its weights stay there (host_budget), or load the model again"
            ) from error
        super().__init__(path, fd, mount_of(fd).kind, "its weights are read")
        self._state = self._now() if left is None else left.state
        self.nbytes = self._state[0]
        try:
            self.check()
            with torch.inference_mode(False):
                storage = torch.UntypedStorage.from_file(f"/proc/self/fd/{fd}", False, self.nbytes)
                assert isinstance(storage, torch.UntypedStorage)
                self.flat = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
            address = self.flat.data_ptr()
            self.identity = next(here.file for here in mappings() if here.begin <= address < here.end)  # Rule 2
            if self.filesystem not in IN_MEMORY:
                self._open_directly(os.O_RDONLY, self._reads_the_same)
        except BaseException:
            super().close()
            raise
        OPEN.add(self)

    def close(self) -> None:
        """Close the file, but for what is left of it (Rule 4). Safe twice."""
        fd, self._fd = self._fd, None
        super().close()
        if fd is not None:
            address, left = self.flat.data_ptr(), LeftFile(fd, self.path, self._state)
            LEFT[address] = left
            weakref.finalize(self.flat.untyped_storage(), _let_go, address, left).atexit = False

    def offset_of(self, address: int, nbytes: int) -> int | None:
        """Return where in the file the bytes at this address of our mapping are.

        None if they are not there, or a page of them was written (Rule 3). Raise if the file changed.
        """
        offset = address - self.flat.data_ptr()
        if not 0 <= offset <= self.nbytes - nbytes:
            return None
        self.check()
        return None if written([(address, nbytes)]) else offset

    def check(self) -> None:
        """Raise if the file changed since its weights were loaded (Rule 4)."""
        now = self._now()
        if now != self._state:
            was, size = self.nbytes, now[0]
            changed = f"it has {size} bytes, and had {was}" if size != was else "it was written"
            raise SourceFileError(
                f"{self.path} changed while weights stayed in it ({changed}): what they were is lost. Load the "
                "model again, and write checkpoints to another path"
            )

    def bytes_of(self, offset: int, nbytes: int) -> Tensor:
        """Read bytes from anywhere in the file into ordinary memory."""
        first = offset // BLOCK * BLOCK
        buffer = mmap.mmap(-1, -(-(offset + nbytes - first) // BLOCK) * BLOCK)
        self.read(memoryview(buffer), first, offset + nbytes - first)
        return torch.frombuffer(buffer, dtype=torch.uint8)[offset - first : offset - first + nbytes]

    # ---- details

    def _now(self) -> tuple[int, int]:
        assert self._fd is not None
        status = os.fstat(self._fd)
        return status.st_size, status.st_mtime_ns

    def _reads_the_same(self, direct: int) -> bool:
        assert self._fd is not None
        nbytes = min(BLOCK, self.nbytes)
        with mmap.mmap(-1, BLOCK) as buffer, memoryview(buffer) as memory:
            return os.preadv(direct, [memory], 0) == nbytes and memory[:nbytes] == os.pread(self._fd, nbytes, 0)


def _let_go(address: int, left: LeftFile) -> None:
    """Close what was left of a file whose mapping ends."""
    if LEFT.get(address) is left:
        del LEFT[address]
    os.close(left.fd)


LEFT: dict[int, LeftFile] = {}  # by the addresses of our mappings
