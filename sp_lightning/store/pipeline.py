"""The pipeline between files and memory: page-locked buffers, a thread that reads and a thread that writes.

1. Each thread does what it was given in its order.
2. A buffer is filled again once the device, the work or the writer has read it, also after an error.
3. No forked process gets the buffers: the kernel might give a child the page into which a read is under way, and the
   parent a copy without what is read.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.telemetry import Counters
from ..host.device import Arrival, Device
from ..host.staging import StagedCopy
from .direct import BLOCK, DirectFile, blocks

MOST = 64 << 20  # bytes of a buffer: threads wait in the kernel so long that one in Python does not delay them
LEAST = 16 << 20
COUNT = 5  # buffers that are read into: one works, one is written, the others are read ahead
GAP = 1 << 20  # bytes between two ranges of a file that cost less to read than a read of its own


class Buffer(NamedTuple):
    """A buffer, as a tensor of bytes and as memory to read into."""

    flat: Tensor
    memory: memoryview


class FileRange(NamedTuple):
    """A range of a file, and the place of its bytes in memory."""

    file: DirectFile
    offset: int
    nbytes: int
    at: int


class Piece:
    """Ranges of a file that are read at once."""

    def __init__(self, file: DirectFile, begin: int) -> None:
        self.file, self.begin, self.end = file, begin, begin
        self.parts: list[tuple[int, int, int]] = []  # first byte in the piece, bytes, and place in memory

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


def pieces_of(ranges: Iterable[FileRange], most: int) -> list[Piece]:
    """Cut ranges into pieces of at most this many bytes; ranges that lie side by side are read together."""
    pieces: list[Piece] = []
    for file, offset, nbytes, at in sorted(ranges, key=lambda one: (one.file.path, one.offset)):
        while nbytes:
            last = pieces[-1] if pieces and pieces[-1].file is file else None
            if last is None or not 0 <= offset - last.end <= GAP or offset - last.begin >= most:
                last = Piece(file, offset // BLOCK * BLOCK)
                pieces.append(last)
            taken = min(nbytes, last.begin + most - offset)
            last.parts.append((offset - last.begin, taken, at))
            last.end = offset + taken
            offset, at, nbytes = offset + taken, at + taken, nbytes - taken
    return pieces


class FileFill(StagedCopy):
    """The end of a fill of the device's memory from files."""

    def __init__(self, counters: Counters) -> None:
        super().__init__()
        self._counters = counters

    def wait(self, stream: Any) -> None:
        if not self.queued.done():
            with self._counters.stall("disk"):
                self.queued.exception()
        super().wait(stream)

    def fail(self, error: BaseException) -> None:
        """Raise this error in callers that need the device's bytes; the host's are read no more."""
        if not self.queued.done():
            self.queued.set_exception(error)
        if not self.done.done():
            self.done.set_result(None)


class Pipeline:
    """The buffers and the threads."""

    def __init__(self, device: Device, nbytes: int) -> None:
        """Allocate buffers of this many bytes."""
        self.nbytes = blocks(nbytes)
        self._device, self._counters = device, device.counters
        self._stream = device.new_stream()
        self._buffers = [self._allocate() for _ in range(COUNT)]
        self._free: queue.SimpleQueue[tuple[Buffer, Any]] = queue.SimpleQueue()  # each with the event of its last use
        for buffer in self._buffers:
            self._free.put((buffer, None))
        self._reader = ThreadPoolExecutor(1, "superpipeline-read", self._begin_thread)

    def _allocate(self) -> Buffer:
        flat = self._device.buffer(self.nbytes, BLOCK)
        return Buffer(flat, memoryview((ctypes.c_uint8 * self.nbytes).from_address(flat.data_ptr())).cast("B"))

    def _begin_thread(self) -> None:
        if not self._device.is_host:
            torch.accelerator.set_stream(self._stream)

    def close(self) -> None:
        """End the threads, after what they were given."""
        self._reader.shutdown()

    # ---- up

    def send_up(
        self, flat: Tensor, pieces: Sequence[Piece], files: Sequence[DirectFile], before: Arrival, name: str
    ) -> FileFill:
        """Start to read pieces into a unit's memory on the device, behind what the up stream has queued.

        Args:
            flat: The memory.
            pieces: What is read.
            files: All files whose bytes the memory has, which are checked after the last read.
            before: The copy of the rest, of which the returned one is the end as well.
            name: The unit's.
        """
        fill, begin = FileFill(self._counters), self._device.up.record_event()
        self._counters.disk_read += sum(piece.nbytes for piece in pieces)
        timed = [self._counters.listener.work("disk in", name, "weights", piece.nbytes) for piece in pieces]

        def work() -> None:
            try:
                self._stream.wait_event(begin)
                for piece, recorded in zip(pieces, timed, strict=True):
                    with torch.no_grad(), self._lent() as buffer:
                        with recorded:
                            piece.file.read(buffer.memory, piece.begin, piece.nbytes)
                        for first, nbytes, at in piece.parts:
                            flat[at : at + nbytes].copy_(buffer.flat[first : first + nbytes], non_blocking=True)
                for file in files:
                    file.check()
                before.wait(self._stream)
                fill.queued.set_result(self._stream.record_event())
                before.synchronize()
                fill.done.set_result(None)
            except BaseException as error:
                with contextlib.suppress(RuntimeError):  # the device's own error, which each wait for it raises
                    self._stream.synchronize()
                fill.fail(error)

        self._reader.submit(work)
        return fill

    @contextlib.contextmanager
    def _lent(self) -> Iterator[Buffer]:
        """Lend a buffer to the reader, which is free again once the device has read it."""
        buffer = self._take()
        try:
            yield buffer
        finally:
            self._free.put((buffer, self._stream.record_event()))

    def _take(self) -> Buffer:
        buffer, used = self._free.get()
        if used is not None:
            used.synchronize()
        return buffer
