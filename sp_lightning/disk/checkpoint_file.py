"""The large tensors of a checkpoint, written past the page cache, and read past it where they are in files themselves.

1. torch writes the file's structure: headers, the pickled objects, small storages. In place of a large storage it
   leaves a hole, into which this file copies the bytes. The result is what ``torch.save`` writes, to the byte.
2. A storage is copied in pieces, each by a thread with a buffer of its own. The whole blocks of a piece go to the disk
   directly. The bytes before and after them share a block with torch's structure: they go through the page cache, as
   that does, so that no block is written both ways.
3. What lies over the mapping of an open file is read from that file (direct_file.py).
4. A zip file has a checksum of each entry twice, behind the entry's bytes and in the directory at the end, and torch
   adds a fingerprint of all. It does not see the bytes of a hole, whose checksum it takes for 0: all three are replaced
   once all pieces are written.
5. A write is complete or an OSError. After the first error no further piece is begun.
6. Storages that somebody keeps as they are may be copied later, on another thread, in the order of their keepers. All
   others are in the file before `CopiesToFile.settle` returns.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import queue
import struct
import zipfile
import zlib
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Any, NamedTuple, Protocol

import torch

from ..compat.serialization import FINGERPRINT, save_with_holes, with_fingerprint
from ..memory.pinned import HostAllocator, libc
from .direct_file import BLOCK, DIRECT, REFUSALS, DirectFile, holder
from .direct_ring import Buffer, buffer_over

LARGE = 1 << 20  # bytes: smaller storages are written by torch
PIECE = 16 << 20  # bytes
WRITERS = 4

# The zip format: where numbers are in its headers.
_NAME_AND_EXTRA, _HEADER = 26, 30  # of an entry
_DESCRIPTOR, _SUM_IN_DESCRIPTOR = b"PK\x07\x08", 4  # behind an entry's bytes
_SUM_IN_DIRECTORY, _LENGTHS_IN_DIRECTORY, _IN_DIRECTORY = 16, 28, 46

_ONE, _BYTE, _POLYNOMIAL = 1 << 31, 1 << 23, 0xEDB88320  # x**0, x**8 and CRC-32's polynomial, the highest bit first


class Hole(NamedTuple):
    """A storage's place in the file, and the copies into it."""

    header: int  # the first byte of the entry
    begin: int  # the first byte of the storage
    address: int  # of the storage, which lives as long as its copies: it may be a copy of a device's
    nbytes: int
    source: tuple[DirectFile, int] | None
    pieces: list[tuple[int, Future[int]]]  # bytes of each, and its checksum

    def checksum(self) -> int:
        """Wait for the copies and return the checksum of all bytes."""
        total = 0
        for nbytes, checksum in self.pieces:
            total = joined(total, checksum.result(), nbytes)
        if self.source is not None:
            self.source[0].offset_of(self.address, self.nbytes)  # raises if the file changed
        return total


class Keeper(Protocol):
    """The owner of a storage that stays as it is until it is in the file (Rule 6)."""

    place: tuple[int, int]  # in the order in which storages are copied

    def copied(self) -> None:
        """Let the storage go: its bytes are in the file; raise an error if they may be others than when it was kept."""


def save(checkpoint: Any, file: IO[bytes]) -> None:
    """Write a checkpoint into a new file, which is open for reading and writing, as ``torch.save`` does."""
    with contextlib.closing(CopiesToFile(file, {})) as copies:
        copies.begin(checkpoint)
        copies.finish()


class CopiesToFile:
    """The copies of large storages into the holes of a file."""

    def __init__(self, file: IO[bytes], keepers: Mapping[tuple[int, int], Keeper]) -> None:
        """Copy storages with these addresses and bytes later, and all others at once (Rule 6)."""
        self._file = file
        self._keepers = keepers
        self._later: list[tuple[Keeper, Hole]] = []
        self._let_go: list[Future[None]] = []
        self._fd = file.fileno()
        self._direct = self._opened_directly()
        self._holes: list[Hole] = []
        self._failed = False
        self._threads = ThreadPoolExecutor(WRITERS, "superpipeline-save")
        self._free: queue.SimpleQueue[Buffer] = queue.SimpleQueue()
        for _ in range(WRITERS):
            self._free.put(buffer_over(HostAllocator().plain(PIECE + 2 * BLOCK)))

    def begin(self, checkpoint: Any) -> None:
        """Have torch write a checkpoint's structure, and begin to copy its large storages."""
        save_with_holes(checkpoint, self._file, LARGE, self._fill)

    def settle(self) -> list[Keeper]:
        """Wait for the copies that have begun; return the keepers of what is copied later."""
        for hole in self._holes:
            for _, copied in hole.pieces:
                copied.result()
        self._later.sort(key=lambda later: later[0].place)
        return [keeper for keeper, _ in self._later]

    def _fill(self, header: int, storage: torch.UntypedStorage) -> None:
        """Begin to copy a storage into the hole of the entry whose header is at this byte of the file."""
        self._file.flush()
        begin, nbytes = self._begin_of(header), storage.nbytes()
        self._reserve(begin, nbytes)
        address = storage.data_ptr()
        hole = Hole(header, begin, address, nbytes, holder(address, nbytes), [])
        self._holes.append(hole)
        if (keeper := self._keepers.get((address, nbytes))) is not None:
            self._later.append((keeper, hole))
        else:
            self._begin_pieces(hole, storage)

    def _begin_pieces(self, hole: Hole, owner: object) -> None:
        """Begin to copy a storage piece by piece; ``owner`` has its memory live until then."""
        at = 0
        while at < hole.nbytes and not self._failed:
            size = min(hole.nbytes - at, PIECE - (hole.begin + at) % PIECE)
            copied = self._threads.submit(self._copy, self._free.get(), hole, owner, at, size)
            hole.pieces.append((size, copied))
            at += size

    def copy_later(self) -> None:
        """Copy what keepers keep, in their order."""
        for keeper, hole in self._later:
            if self._failed:
                break
            self._begin_pieces(hole, keeper)
            self._let_go.append(self._threads.submit(self._end, keeper, hole))  # behind its pieces in the queue

    def _reserve(self, begin: int, nbytes: int) -> None:
        """Reserve a range, where the filesystem does such a thing: C's and Python's own call would write all of it."""
        if libc().fallocate(self._fd, 0, begin, nbytes):
            number = ctypes.get_errno()
            if number not in (*REFUSALS, errno.ENOSYS, errno.EINTR):
                raise OSError(number, os.strerror(number))

    def finish(self) -> None:
        """Wait for all copies, and write what torch could not know: checksums and fingerprint (Rule 4)."""
        for ended in self._let_go:
            ended.result()
        holes = {hole.header: hole for hole in self._holes}
        checksums: list[int] = []
        with zipfile.ZipFile(self._file) as archive:
            at = archive.start_dir
            for entry in archive.infolist():
                if entry.header_offset in holes:
                    checksums.append(holes[entry.header_offset].checksum())
                    self._check_in(entry, at, checksums[-1])
                elif entry.filename.endswith(FINGERPRINT):
                    content = with_fingerprint(archive.read(entry), checksums)
                    self._write(memoryview(content), self._begin_of(entry.header_offset))
                    self._check_in(entry, at, zlib.crc32(content))
                elif entry.file_size:
                    checksums.append(entry.CRC)
                lengths = os.pread(self._fd, 6, at + _LENGTHS_IN_DIRECTORY)
                at += _IN_DIRECTORY + sum(struct.unpack("<HHH", lengths))

    def _check_in(self, entry: zipfile.ZipInfo, in_directory: int, checksum: int) -> None:
        """Write the checksum of an entry behind its bytes, and into the directory."""
        behind = self._begin_of(entry.header_offset) + entry.file_size
        assert os.pread(self._fd, 4, behind) == _DESCRIPTOR
        for at in (behind + _SUM_IN_DESCRIPTOR, in_directory + _SUM_IN_DIRECTORY):
            self._write(memoryview(struct.pack("<I", checksum)), at)

    def _begin_of(self, header: int) -> int:
        """Return where in the file the bytes of the entry begin that has its header here."""
        name, extra = struct.unpack("<HH", os.pread(self._fd, 4, header + _NAME_AND_EXTRA))
        return header + _HEADER + int(name) + int(extra)

    def close(self) -> None:
        """End the threads."""
        self._failed = True
        self._threads.shutdown(cancel_futures=True)
        if self._direct is not None:
            os.close(self._direct)

    # ---- on the threads

    def _end(self, keeper: Keeper, hole: Hole) -> None:
        """Wait for the pieces of a storage, which have begun, and let it go."""
        try:
            for _, copied in hole.pieces:
                copied.result()
            keeper.copied()
        except BaseException:
            self._failed = True
            raise

    def _copy(self, buffer: Buffer, hole: Hole, owner: object, at: int, nbytes: int) -> int:
        """Copy a piece of a storage and return its checksum; the buffer's blocks are those of the file."""
        try:
            if self._failed:
                return 0
            first = (hole.begin + at) % BLOCK
            start = buffer.flat.data_ptr()
            if hole.source is None:
                ctypes.memmove(start + first, hole.address + at, nbytes)
            else:
                file, offset = hole.source
                shift = (offset + at) % BLOCK
                file.read(buffer.memory, offset + at - shift, shift + nbytes)
                if shift != first:
                    ctypes.memmove(start + first, start + shift, nbytes)
            piece = buffer.memory[first : first + nbytes]
            self._write(piece, hole.begin + at)
            return zlib.crc32(piece)
        except BaseException:
            self._failed = True
            raise
        finally:
            self._free.put(buffer)

    def _write(self, memory: memoryview, at: int) -> None:
        """Write bytes at a place of the file, whole blocks directly (Rule 2)."""
        end = at + len(memory)
        first, last = min(-(-at // BLOCK) * BLOCK, end), end // BLOCK * BLOCK
        done = 0
        while at + done < end:
            here = at + done
            direct = self._direct if first <= here < last and here % BLOCK == 0 else None
            until = end if direct is None and here >= first else last if direct is not None else first
            try:
                done += os.pwrite(self._fd if direct is None else direct, memory[done : until - at], here)
            except OSError as error:
                if direct is None or error.errno not in REFUSALS:
                    raise
                self._direct = None

    def _opened_directly(self) -> int | None:
        try:
            return os.open(f"/proc/self/fd/{self._fd}", os.O_WRONLY | os.O_CLOEXEC | DIRECT)
        except OSError:  # the filesystem has no direct writes
            return None


def joined(first: int, second: int, nbytes: int) -> int:
    """Compute the CRC-32 of bytes followed by others, from those of both and the number of the others."""
    shift, power = _ONE, _BYTE
    while nbytes:
        if nbytes & 1:
            shift = _product(shift, power)
        power = _product(power, power)
        nbytes >>= 1
    return _product(shift, first) ^ second


def _product(one: int, other: int) -> int:
    """Multiply two polynomials modulo that of CRC-32."""
    product = 0
    for bit in range(31, -1, -1):
        if one >> bit & 1:
            product ^= other
        other = other >> 1 ^ (_POLYNOMIAL if other & 1 else 0)
    return product
