"""The pipeline between files and memory: page-locked buffers, a thread that reads and a thread that writes.

- A window is a list of ranges of tensors that are worked on together, those of the scratch file in a buffer.

- Each thread does what it was given in its order. The buffers of a window go from the reader to the work, and from
  there to the writer. What the writer brings from the device has a buffer of its own: it waits for no other thread.
- A buffer is filled again once the device, the work or the writer has read it, also after an error.
- No forked process gets the buffers: the kernel might give a child the page into which a read is under way, and the
  parent a copy without what is read.
"""

from __future__ import annotations

import collections
import contextlib
import queue
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..host.device import Arrival, Counters, Device
from ..host.staging import StagedCopy
from .files import BLOCK, DirectFile, blocks
from .scratch import ScratchFile

MOST = 64 << 20  # bytes of a buffer: reads so long that other threads of Python do not delay the next one
LEAST = 16 << 20  # bytes of a buffer under a small budget
SMALLEST = 1 << 17  # bytes of a buffer where all units are smaller
COUNT = 5  # buffers that are read into: one works, one is written, the others are read ahead
BUFFERS = COUNT + 1  # the last one is filled from the device, and written


def buffer_nbytes(budget: int, largest: int) -> int:
    """Choose the bytes of a buffer, for a budget of host memory and the largest unit."""
    return blocks(min(MOST, max(LEAST, budget // 64), max(largest, SMALLEST)))


@dataclass
class ElementSpan:
    """A range of a tensor's elements in the order of memory."""

    tensor: Tensor | None  # None: room for a tensor that the work makes, and assigns here to have it written
    dtype: torch.dtype
    start: int
    stop: int
    is_written: bool = True
    here: Any = None  # the elements as a tensor in memory, while the window is worked on
    memory: memoryview | None = None  # the elements in a buffer; None: the tensor is in memory

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * self.dtype.itemsize


W = TypeVar("W", bound=list[ElementSpan])


def elements_of(tensor: Tensor, start: int, stop: int) -> Tensor:
    """Return a range of a tensor's elements, in the order of memory, over the same bytes."""
    return tensor.as_strided((stop - start,), (1,), tensor.storage_offset() + start)


def cut(count: int, types: Sequence[torch.dtype], room: int) -> Iterator[tuple[int, int]]:
    """Cut elements into ranges that start at whole blocks and fit ``room`` bytes in tensors of all these types."""
    each, step = sum(dtype.itemsize for dtype in types), BLOCK // min(dtype.itemsize for dtype in types)
    size = max((room - len(types) * BLOCK) // each // step, 1) * step
    for start in range(0, count, size):
        yield start, min(start + size, count)


class FileFill(StagedCopy):
    """The end of a copy from files to the device's memory."""

    def __init__(self, counters: Counters) -> None:
        super().__init__()
        self._counters = counters

    def wait(self, stream: Any) -> None:
        """Make later work on a stream wait for the fill. Blocks until the reader has queued the copies of the fill."""
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
        self._free: queue.SimpleQueue[tuple[Tensor, Any]] = queue.SimpleQueue()  # each with the event of its last use
        for _ in range(COUNT):
            self._free.put((device.buffer(self.nbytes, BLOCK), None))
        self._down = device.buffer(self.nbytes, BLOCK)
        self._reader = ThreadPoolExecutor(1, "superpipeline-read")
        self._writer = ThreadPoolExecutor(1, "superpipeline-write")

    def close(self) -> None:
        """Wait for all reads and writes that were submitted, and end the threads."""
        self._reader.shutdown()
        self._writer.shutdown()

    def _start(
        self, thread: ThreadPoolExecutor, stream: Any, begin: Any, end: StagedCopy, work: Callable[[], None]
    ) -> None:
        """Run ``work`` on a thread and a stream, after the event ``begin``; then complete ``end``, or fail it."""

        def run() -> None:
            try:
                with torch.no_grad(), stream:
                    stream.wait_event(begin)
                    work()
                end.done.set_result(None)
            except BaseException as error:
                with contextlib.suppress(RuntimeError):  # of the device; every later wait for the device raises it
                    stream.synchronize()
                end.fail(error)

        thread.submit(run)

    # ---- up

    def send_up(self, flat: Tensor, weights: Sequence[Any], others: Sequence[Arrival], name: str) -> FileFill:
        """Start to read weights into a unit's memory on the device, behind what the up stream has queued.

        Return the end.

        Args:
            flat: The unit's memory on the device.
            weights: The weights that are in files, which are checked after the last read.
            others: Copies of the unit's other bytes, which have ended, too, at the end that is returned.
            name: The unit's name, for the recorder.
        """
        fill, begin = FileFill(self._counters), self._device.up.record_event()
        self._counters.nbytes["up"] += sum(weight.nbytes for weight in weights)

        def work() -> None:
            """Read the weights, and copy them to the device. Runs on the reader's thread."""
            for weight in weights:
                self._send_weight_up(flat[weight.at : weight.at + weight.nbytes], weight.place, name)
            for file in {weight.place.file for weight in weights}:
                file.check()
            for other in others:
                other.wait(self._stream)
            fill.queued.set_result(self._stream.record_event())
            for other in others:
                other.synchronize()

        self._start(self._reader, self._stream, begin, fill, work)
        return fill

    def _send_weight_up(self, target: Tensor, place: Any, name: str) -> None:
        """Read a weight from its file into one buffer after the other, and copy each to the device."""
        first = 0
        while first < len(target):
            before = (place.offset + first) % BLOCK  # bytes: reads begin with a block
            taken = min(len(target) - first, self.nbytes - before)
            buffer = self._take_buffer()
            try:
                with self._counters.record("disk in", name, "weights", taken):
                    place.file.read(buffer.numpy().data, place.offset + first - before, before + taken)
                target[first : first + taken].copy_(buffer[before : before + taken], non_blocking=True)
            finally:
                self._free.put((buffer, self._stream.record_event()))
            first += taken

    def _take_buffer(self) -> Tensor:
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
            """Copy device memory to the buffer, piece by piece, and write each. Runs on the writer's thread."""
            try:
                with recorded:
                    for first in range(0, len(there), self.nbytes):
                        part = there[first : first + self.nbytes]
                        self._down[: len(part)].copy_(part)
                        file.write(self._down.numpy().data, offset + first, blocks(len(part)))
            finally:  # also after an error, nothing reads the device's memory any more
                copied.queued.set_result(self._down_stream.record_event())

        self._start(self._writer, self._down_stream, begin, copied, work)
        return copied

    # ---- windows

    def windows(self, file: ScratchFile, todo: Iterable[W]) -> Generator[W, None, None]:
        """Yield each window with its elements in memory; write it back when the next one is asked for.

        Windows after it are read meanwhile. All are written at the end. The caller closes this generator, also after an
        error of its own: then all buffers are free, and no transfer is under way.
        """
        ahead: collections.deque[tuple[W, Future[Tensor]]] = collections.deque()
        writes: list[Future[None]] = []
        following = iter(todo)
        try:
            while True:
                while len(ahead) < COUNT - 1 and (window := next(following, None)) is not None:
                    ahead.append((window, self._reader.submit(self._read_window, file, window)))
                if not ahead:
                    break
                window, read = ahead[0]
                buffer = read.result()
                yield window
                ahead.popleft()
                writes.append(self._writer.submit(self._write_window, file, window, buffer))
            for write in writes:
                write.result()
        except BaseException:
            futures.wait(writes)
            for _, read in ahead:
                if read.exception() is None:
                    self._free.put((read.result(), None))
            raise

    def _read_window(self, file: ScratchFile, window: list[ElementSpan]) -> Tensor:
        """Read the window's elements in the file into a buffer, and return the buffer. Runs on the reader's thread."""
        buffer, end = self._take_buffer(), 0
        try:
            for span in window:
                offset = None if span.tensor is None else file.offset_of(span.tensor)
                if span.tensor is not None and offset is None:
                    span.here = elements_of(span.tensor, span.start, span.stop)
                    continue
                span.here = buffer[end : end + span.nbytes].view(span.dtype)
                span.memory = buffer[end:].numpy().data
                end += blocks(span.nbytes)
                if offset is not None:
                    with self._counters.record("disk in", "", "state", span.nbytes):
                        file.read(span.memory, offset + span.start * span.dtype.itemsize, span.nbytes)
        except BaseException:
            self._free.put((buffer, None))
            raise
        return buffer

    def _write_window(self, file: ScratchFile, window: list[ElementSpan], buffer: Tensor) -> None:
        """Write a window's elements from a buffer to the file, and free the buffer. Runs on the writer's thread."""
        try:
            for span in window:
                offset = None if span.tensor is None else file.offset_of(span.tensor)
                if offset is not None and span.memory is not None and span.is_written:
                    with self._counters.record("disk out", "", "state", span.nbytes):
                        file.write(span.memory, offset + span.start * span.dtype.itemsize, blocks(span.nbytes))
        finally:
            self._free.put((buffer, None))
