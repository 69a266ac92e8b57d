"""The ring of page-locked buffers through which weights go up from their files.

1. A unit's weights are read in *pieces*: ranges of a file of at most `PIECE` bytes, each with the parts of weights that
   are in it. Weights that are less than `GAP` bytes apart in the file are read together. Where a weight is cut, it is
   cut between two of its elements.
2. Fills are made in the order in which they are submitted. One thread takes a buffer for each piece, others read the
   pieces, and one sends what was read to the device, piece by piece. So the disk is read ahead of the link, and for the
   next fill before the one before it is done.
3. A buffer is read into again only after the device, or the copy on the CPU, has read it, and after its own read ended,
   also if the fill failed.
4. A weight that travels in another type is converted on the way, in a buffer of its own.
5. Threads wait in the kernel for reads of tens of MiB: with less, each would have to wait for a Python thread that
   computes, too.
6. No forked process gets the buffers: the kernel might give a child the page into which a read is under way, and the
   parent a copy without what is read.
7. A write to host memory may begin while a source file is read: what is read does not change by it. So the copies from
   memory come first, and nobody who is about to write waits for the disk. Where weights lie over the file (the scratch
   file), it may begin once the file was read.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import queue
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.telemetry import Counters
from ..memory.device import Device
from ..memory.pinned import libc
from ..memory.staging import Around, Copies, StagedCopy
from .direct_file import BLOCK, DirectFile, FileRange, blocks

PIECE = 64 << 20  # bytes
GAP = 1 << 20  # bytes between two weights that cost less to read than a read of its own
BUFFERS = 6
READERS = 3


class WeightPart(NamedTuple):
    """A range of a weight's bytes in a piece."""

    weight: int  # its index in the unit
    at: int  # the first byte, in the piece
    within: int  # the same byte, in the weight
    nbytes: int


@dataclass
class Piece:
    """A range of a file that is read at once (Rule 1)."""

    file: DirectFile
    begin: int  # a multiple of BLOCK
    nbytes: int = 0  # as far as its parts go
    parts: list[WeightPart] = field(default_factory=list)


class Target(NamedTuple):
    """A part of a weight in a piece, and its place on the device."""

    at: int  # the first byte, in the piece
    nbytes: int
    place: Tensor  # bytes
    converted: tuple[torch.dtype, torch.dtype] | None  # from which type, into which (Rule 4)


Job = tuple[Piece, list[Target]]


def pieces(places: Iterable[tuple[int, FileRange, int]], most: int = PIECE, gap: int = GAP) -> list[Piece]:
    """Cut the places of weights into pieces (Rule 1). Each has the weight's index and the bytes of an element."""
    cut: list[Piece] = []
    for index, place, itemsize in sorted(places, key=lambda item: (item[1].file.path, item[1].offset)):
        within = 0
        while within < place.nbytes:
            at = place.offset + within
            piece = cut[-1] if cut else None
            if piece is None or piece.file is not place.file or not 0 <= at - piece.begin - piece.nbytes <= gap:
                piece = None
            room = 0 if piece is None else piece.begin + most - at
            nbytes = _whole(min(place.nbytes - within, room), place.nbytes - within, itemsize)
            if piece is None or nbytes <= 0:
                piece = Piece(place.file, at // BLOCK * BLOCK)
                cut.append(piece)
                room = piece.begin + most - at
                nbytes = _whole(min(place.nbytes - within, room), place.nbytes - within, itemsize)
            piece.parts.append(WeightPart(index, at - piece.begin, within, nbytes))
            piece.nbytes = at - piece.begin + nbytes
            within += nbytes
    return cut


def _whole(nbytes: int, left: int, itemsize: int) -> int:
    """Round down to whole elements, unless nothing is left."""
    return nbytes if nbytes == left else nbytes // itemsize * itemsize


class Buffer(NamedTuple):
    """A buffer of the ring, as a tensor and as memory to read into."""

    flat: Tensor
    memory: memoryview


class FileFill(StagedCopy):
    """The end of a fill from files."""

    def __init__(self, counters: Counters) -> None:
        super().__init__()
        self._counters = counters
        self._reads: queue.SimpleQueue[tuple[list[Target], Buffer, Future[None]] | None] = queue.SimpleQueue()
        self._all_came = False
        self.reading = self._reads.put

    def wait(self, stream: Any) -> None:
        if not self.on_device.done():
            with self._counters.stall("disk"):
                self.on_device.exception()
        super().wait(stream)

    def reads(self) -> Iterator[tuple[list[Target], Buffer, Future[None]]]:
        """Yield the reads in their order, as they begin; a later call goes on where an earlier one stopped."""
        while not self._all_came:
            read = self._reads.get()
            if read is None:
                self._all_came = True
            else:
                yield read


class DirectRing:
    """The buffers, and the threads that use them."""

    def __init__(self, device: Device, nbytes: int) -> None:
        """Allocate buffers for pieces of at most this many bytes."""
        self._device = device
        self._threads = ThreadPoolExecutor(READERS, "superpipeline-read")
        self._order = ThreadPoolExecutor(1, "superpipeline-disk")
        self._sender = ThreadPoolExecutor(1, "superpipeline-disk-up")
        self._stream = device.new_stream()
        self._buffers = [aligned_buffer(device, nbytes) for _ in range(BUFFERS)]
        self._free: queue.SimpleQueue[tuple[Buffer, Any]] = queue.SimpleQueue()  # each with what has to happen first
        for buffer in self._buffers:
            self._free.put((buffer, None))
        self._converted: Buffer | None = None  # made when a weight is converted for the first time
        self._convert_after: Any = None  # the copy that reads that buffer

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.flat.nbytes for buffer in self._all())

    def fill(
        self,
        counters: Counters,
        copies: Copies,
        jobs: Sequence[Job],
        around: Around,
        files: Sequence[DirectFile],
        unit: str = "",
        writable: bool = False,
    ) -> FileFill:
        """Start copies from memory and from files to the device.

        Host memory may be written as soon as the copies from memory are made, and the files were read if they are
        `writable` (Rule 7).

        Args:
            counters: They count what the host waits for the disk.
            copies: Pairs of a target on the device and a source in any memory, of equal shape.
            jobs: The pieces to read, with their targets.
            around: Entered before the first copy is queued, left after the last.
            files: All files that have any of these bytes (source_files.py, Rule 4).
            unit: The name of what is filled.
            writable: A write to host memory may change what is read from the files.
        """
        fill = FileFill(counters)
        timed = [counters.listener.work("disk in", unit, "weights", piece.nbytes) for piece, _ in jobs]
        self._order.submit(self._read, fill, jobs, timed)
        self._sender.submit(self._send, fill, self._device.up.record_event(), list(copies), around, files, writable)
        return fill

    def close(self) -> None:
        """End the threads, after the fills that were submitted, and free the buffers."""
        for pool in (self._order, self._threads, self._sender):
            pool.shutdown()
        for buffer in self._all():
            keep_from_forks(buffer.flat, False)

    def _all(self) -> list[Buffer]:
        return self._buffers + ([] if self._converted is None else [self._converted])

    # ---- on the threads

    def _read(self, fill: FileFill, jobs: Sequence[Job], timed: Sequence[AbstractContextManager[None]]) -> None:
        def read(piece: Piece, memory: memoryview, under_way: AbstractContextManager[None]) -> None:
            with under_way:
                piece.file.read(memory, piece.begin, piece.nbytes)

        for (piece, targets), under_way in zip(jobs, timed, strict=True):
            if fill.on_device.done():  # it failed
                break
            buffer, after = self._free.get()
            try:
                if after is not None:
                    after.synchronize()
                begun = self._threads.submit(read, piece, buffer.memory, under_way)
            except BaseException as error:  # for the thread that sends, which alone ends a fill
                begun = Future()
                begun.set_exception(error)
            fill.reading((targets, buffer, begun))
        fill.reading(None)

    def _send(
        self,
        fill: FileFill,
        begin: Any,
        copies: list[tuple[Tensor, Tensor]],
        around: Around,
        files: Sequence[DirectFile],
        writable: bool,
    ) -> None:
        try:
            if not self._device.is_host:
                torch.accelerator.set_stream(self._stream)
            self._stream.wait_event(begin)
            with torch.no_grad():
                with around:
                    if _queue(copies):
                        self._stream.record_event().synchronize()
                    if not writable:
                        fill.on_host.set_result(None)
                    for targets, buffer, read in fill.reads():
                        with self._lent(buffer, read):
                            read.result()
                            for part in targets:
                                self._copy(part, buffer)
                    if writable:
                        fill.on_host.set_result(None)
                for file in files:
                    file.check()
            fill.on_device.set_result(self._stream.record_event())
        except BaseException as error:
            with contextlib.suppress(RuntimeError):  # the device's own error, which whoever waits for it raises
                self._stream.synchronize()
            fill.fail(error)
            for _, buffer, read in fill.reads():
                with self._lent(buffer, read):
                    pass

    @contextlib.contextmanager
    def _lent(self, buffer: Buffer, read: Future[None]) -> Iterator[None]:
        """Give a buffer back when this context ends (Rule 3)."""
        try:
            yield
        finally:
            read.exception()
            self._free.put((buffer, self._stream.record_event()))

    def _copy(self, target: Target, buffer: Buffer) -> None:
        source = buffer.flat[target.at : target.at + target.nbytes]
        if target.converted is None:
            target.place.copy_(source, non_blocking=True)
        else:
            target.place.copy_(self._convert(source, *target.converted), non_blocking=True)
            self._convert_after = self._stream.record_event()

    def _convert(self, source: Tensor, given: torch.dtype, wanted: torch.dtype) -> Tensor:
        """Convert bytes of one type into bytes of another (Rule 4); in a file elements may begin at any byte."""
        if self._convert_after is not None:
            self._convert_after.synchronize()
        if source.data_ptr() % given.itemsize:
            source = source.clone()
        if self._converted is None:
            self._converted = aligned_buffer(self._device, self._buffers[0].flat.nbytes)
        converted = self._converted.flat[: source.nbytes // given.itemsize * wanted.itemsize]
        converted.view(wanted).copy_(source.view(given))
        return converted


def _queue(copies: list[tuple[Tensor, Tensor]]) -> bool:
    """Queue copies and return whether there were any; the list is empty then.

    Who waited for a fill may count the references to its bytes at once (staging.py, Rule 5).
    """
    found = bool(copies)
    for target, source in copies:
        target.copy_(source, non_blocking=True)
    copies.clear()
    return found


def aligned_buffer(device: Device, nbytes: int, allocate: Callable[[int], Tensor] | None = None) -> Buffer:
    """Allocate a buffer (Rule 6), as staging buffers are if nothing else is given."""
    nbytes = blocks(nbytes)
    whole = (allocate or device.staging)(nbytes + BLOCK)
    first = -whole.data_ptr() % BLOCK
    return buffer_over(whole[first : first + nbytes])


def buffer_over(flat: Tensor) -> Buffer:
    """Make a buffer of memory that begins at a multiple of BLOCK; forked processes do not get it (Rule 6)."""
    keep_from_forks(flat, True)
    return Buffer(flat, memoryview((ctypes.c_uint8 * flat.nbytes).from_address(flat.data_ptr())).cast("B"))


def keep_from_forks(flat: Tensor, kept: bool) -> None:
    """Keep memory from forked processes, or let them have it again."""
    libc().madvise(flat.data_ptr(), flat.nbytes, mmap.MADV_DONTFORK if kept else mmap.MADV_DOFORK)
