"""The pipeline between files and memory: page-locked buffers, a thread that reads and a thread that writes.

- Each thread does what it was given in its order. The buffers of a window go from the reader to the work, and from
  there to the writer. What the writer brings from the device has buffers of its own: it waits for no other thread.
- A buffer is filled again once the device, the work or the writer has read it, also after an error.
- No forked process gets the buffers: the kernel might give a child the page into which a read is under way, and the
  parent a copy without what is read.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import queue
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..host.device import Arrival, Counters, Device
from ..host.staging import StagedCopy
from .direct import BLOCK, DirectFile, FileRange, blocks
from .scratch import ScratchFile
from .spans import SpanBatch

MOST = 64 << 20  # bytes of a buffer: reads so long that other threads of Python do not delay the next one
LEAST = 16 << 20  # bytes of a buffer under a small budget
SMALLEST = 1 << 17  # bytes of a buffer where all units are smaller
COUNT = 5  # buffers that are read into: one works, one is written, the others are read ahead
DOWN = 2  # buffers that the writer fills from the device: one is filled while the other is written
BUFFERS = COUNT + DOWN
GAP = 1 << 20  # bytes between two ranges of a file: reading these costs less than a second read


def buffer_nbytes(budget: int, largest: int) -> int:
    """Choose the bytes of a buffer, for a budget of host memory and the largest unit."""
    return blocks(min(MOST, max(LEAST, budget // 64), max(largest, SMALLEST)))


class Buffer(NamedTuple):
    """A page-locked buffer, as a tensor of bytes and as memory to read into."""

    flat: Tensor
    memory: memoryview


W = TypeVar("W", bound=SpanBatch)


class Piece:
    """One read of a file, and the ranges whose bytes it has."""

    def __init__(self, file: DirectFile, begin: int) -> None:
        self.file, self.begin, self.end = file, begin, begin
        self.parts: list[tuple[int, int, int]] = []  # first byte in the piece, bytes, and place in memory

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


def pieces_of(ranges: Iterable[FileRange], most: int) -> list[Piece]:
    """Join ranges of files that lie side by side, and cut them into reads of at most ``most`` bytes."""
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
    """The end of a copy from files to the device's memory."""

    def __init__(self, counters: Counters) -> None:
        super().__init__()
        self._counters = counters

    def wait(self, stream: Any) -> None:
        """Make work that a stream gets from now on run after the fill. Blocks until the reader queued its copies."""
        if not self.queued.done():
            with self._counters.stall("disk"):
                self.queued.exception()
        super().wait(stream)

    def fail(self, error: BaseException) -> None:
        """Make waits for the device's bytes raise this error, and waits for the host's bytes end."""
        if not self.queued.done():
            self.queued.set_exception(error)
        if not self.done.done():
            self.done.set_result(None)


class Pipeline:
    """Page-locked buffers, a thread that reads files into them, and a thread that writes them to files."""

    def __init__(self, device: Device, nbytes: int) -> None:
        """Allocate buffers of this many bytes each, and start the threads."""
        self.nbytes = blocks(nbytes)
        self._device, self._counters = device, device.counters
        self._stream, self._down_stream = device.new_stream(), device.new_stream()
        self._free: queue.SimpleQueue[tuple[Buffer, Any]] = queue.SimpleQueue()  # each with the event of its last use
        for _ in range(COUNT):
            self._free.put((self._allocate(), None))
        self._down = [self._allocate() for _ in range(DOWN)]
        self._reader = ThreadPoolExecutor(1, "superpipeline-read", self._begin_thread, (self._stream,))
        self._writer = ThreadPoolExecutor(1, "superpipeline-write", self._begin_thread, (self._down_stream,))

    def _allocate(self) -> Buffer:
        """Allocate a buffer that begins at a multiple of BLOCK."""
        flat = self._device.buffer(self.nbytes, BLOCK)
        return Buffer(flat, memoryview((ctypes.c_uint8 * self.nbytes).from_address(flat.data_ptr())).cast("B"))

    def _begin_thread(self, stream: Any) -> None:
        """Make a stream the current one of the calling thread."""
        if not self._device.is_host:
            torch.accelerator.set_stream(stream)

    def close(self) -> None:
        """Wait for all reads and writes that were submitted, and end the threads."""
        self._reader.shutdown()
        self._writer.shutdown()

    # ---- up

    def send_up(
        self, flat: Tensor, pieces: Sequence[Piece], files: Sequence[DirectFile], others: Sequence[Arrival], name: str
    ) -> FileFill:
        """Start to read files into a unit's memory on the device, behind what the up stream has queued; return the end.

        Args:
            flat: The unit's memory on the device.
            pieces: The reads.
            files: All files that are read, which are checked after the last read.
            others: Copies of the unit's other bytes, which have ended, too, at the end that is returned.
            name: The unit's name, for the recorder.
        """
        fill, begin = FileFill(self._counters), self._device.up.record_event()
        self._counters.nbytes["up"] += sum(nbytes for piece in pieces for _, nbytes, _ in piece.parts)
        timed = [self._counters.record("disk in", name, "weights", piece.nbytes) for piece in pieces]

        def work() -> None:
            """Read each piece into a buffer, and copy it to the device. Runs on the reader's thread."""
            try:
                self._stream.wait_event(begin)
                for piece, recorded in zip(pieces, timed, strict=True):
                    with torch.no_grad(), self._lend_buffer() as buffer:
                        with recorded:
                            piece.file.read(buffer.memory, piece.begin, piece.nbytes)
                        for first, nbytes, at in piece.parts:
                            flat[at : at + nbytes].copy_(buffer.flat[first : first + nbytes], non_blocking=True)
                for file in files:
                    file.check()
                for other in others:
                    other.wait(self._stream)
                fill.queued.set_result(self._stream.record_event())
                for other in others:
                    other.synchronize()
                fill.done.set_result(None)
            except BaseException as error:
                with contextlib.suppress(RuntimeError):  # of the device; every later wait for the device raises it
                    self._stream.synchronize()
                fill.fail(error)

        self._reader.submit(work)
        return fill

    @contextlib.contextmanager
    def _lend_buffer(self) -> Iterator[Buffer]:
        """Lend a buffer in this context; it is free again once the device has read it. Blocks until one is free."""
        buffer = self._take_buffer()
        try:
            yield buffer
        finally:
            self._free.put((buffer, self._stream.record_event()))

    def _take_buffer(self) -> Buffer:
        """Take a free buffer, once its last copy has ended. Blocks until there is one."""
        buffer, used = self._free.get()
        if used is not None:
            used.synchronize()
        return buffer

    # ---- down

    def send_down(self, file: DirectFile, offset: int, there: Tensor, unit: str, phase: str) -> StagedCopy:
        """Start to write device memory to a range of a file, behind what the down stream has queued; return the end."""
        copied, begin = StagedCopy(), self._device.down.record_event()
        recorded = self._counters.record("down", unit, phase, there.nbytes)
        self._counters.nbytes["disk out"] += there.nbytes

        def work() -> None:
            """Copy device memory to a buffer while another is written. Runs on the writer's thread."""
            under_way: collections.deque[tuple[int, Any, int, int]] = collections.deque()

            def write() -> None:
                """Write the buffer that was filled first to the file."""
                number, arrived, first, nbytes = under_way.popleft()
                arrived.synchronize()
                file.write(self._down[number].memory, offset + first, blocks(nbytes))

            try:
                self._down_stream.wait_event(begin)
                with torch.no_grad(), recorded:
                    for number, first in enumerate(range(0, len(there), self.nbytes)):
                        if len(under_way) == DOWN:
                            write()
                        part = there[first : first + self.nbytes]
                        self._down[number % DOWN].flat[: len(part)].copy_(part, non_blocking=True)
                        under_way.append((number % DOWN, self._down_stream.record_event(), first, len(part)))
                    copied.queued.set_result(self._down_stream.record_event())
                    while under_way:
                        write()
                copied.done.set_result(None)
            except BaseException as error:
                with contextlib.suppress(RuntimeError):  # of the device; every later wait for the device raises it
                    self._down_stream.synchronize()
                if not copied.queued.done():  # nothing reads the device's memory any more
                    copied.queued.set_result(self._down_stream.record_event())
                copied.fail(error)

        self._writer.submit(work)
        return copied

    # ---- windows

    def windows(self, file: ScratchFile, todo: Iterable[W]) -> Generator[W, None, None]:
        """Yield each window with its spans read from the file; write it back when the next one is asked for.

        Windows after it are read meanwhile. All are written at the end. The caller closes this generator, also after an
        error of its own: then all buffers are free, and no transfer is under way.
        """
        ahead: collections.deque[tuple[W, Future[Buffer]]] = collections.deque()
        writes: collections.deque[Future[None]] = collections.deque()
        following = iter(todo)
        try:
            while True:
                while len(ahead) < COUNT - 1 and (window := next(following, None)) is not None:
                    window.place(file)
                    ahead.append((window, self._reader.submit(self._read_window, window.ranges(file, False))))
                if not ahead:
                    break
                window, read = ahead[0]
                window.show(read.result().flat)
                yield window
                ahead.popleft()
                writes.append(self._writer.submit(self._write_window, read.result(), window.ranges(file, True)))
                while writes and writes[0].done():
                    writes.popleft().result()
            while writes:
                writes.popleft().result()
        except BaseException:
            futures.wait(writes)
            for _, read in ahead:
                if read.exception() is None:
                    self._free.put((read.result(), None))
            raise

    def _read_window(self, ranges: list[FileRange]) -> Buffer:
        """Read ranges of a file into a buffer, and return the buffer. Runs on the reader's thread."""
        buffer = self._take_buffer()
        try:
            for file, offset, nbytes, at in ranges:
                with self._counters.record("disk in", "", "state", nbytes):
                    file.read(buffer.memory[at:], offset, nbytes)
        except BaseException:
            self._free.put((buffer, None))
            raise
        return buffer

    def _write_window(self, buffer: Buffer, ranges: list[FileRange]) -> None:
        """Write a buffer to ranges of a file, and free the buffer. Runs on the writer's thread."""
        try:
            for file, offset, nbytes, at in ranges:
                with self._counters.record("disk out", "", "state", nbytes):
                    file.write(buffer.memory[at:], offset, blocks(nbytes))
        finally:
            self._free.put((buffer, None))
