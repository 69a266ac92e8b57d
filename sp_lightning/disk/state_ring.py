"""The ring of buffers through which optimizer state comes from the scratch file and goes back, portion by portion.

1. A *portion* is a set of ranges of the file that are in one buffer together. Portions are read ahead of the one that
   is stepped and written behind it, by threads that wait in the kernel for reads and writes of MiBs.
2. A buffer is taken again only after what it had was written. What was written is on the disk when `drain` returns, or
   one of its writes raised.
3. After an error the ring is as it was before: `recover` waits for all that is under way.
4. All buffers lie side by side: as one they hold what is too large for a buffer and cannot be cut, one at a time.
5. No forked process gets the buffers (direct_ring.py, Rule 6).
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from torch import Tensor

from ..core.telemetry import Counters, Lane
from ..memory.pinned import HostAllocator
from .direct_file import blocks
from .direct_ring import Buffer, buffer_over, keep_from_forks
from .scratch_file import ScratchFile

Item = TypeVar("Item")
BUFFER = 64 << 20  # bytes
SMALLEST = 1 << 16
BUFFERS = 6
READERS, WRITERS = 4, 3
AHEAD = 5  # portions that are read before they are stepped; the other is stepped or written


def buffer_nbytes(state: int) -> int:
    """Return the bytes of a buffer for portions of so much state."""
    return max(SMALLEST, min(BUFFER, blocks(state)))


class BlockRun(NamedTuple):
    """A range of the file, in whole blocks, and its first byte in a buffer."""

    offset: int
    at: int
    nbytes: int


def as_few_runs(runs: Iterable[BlockRun]) -> list[BlockRun]:
    """Join runs that lie side by side both in the file and in the buffer; leave out empty ones."""
    joined: list[BlockRun] = []
    for run in runs:
        last = joined[-1] if joined else None
        if last is not None and (last.offset + last.nbytes, last.at + last.nbytes) == (run.offset, run.at):
            joined[-1] = last._replace(nbytes=last.nbytes + run.nbytes)
        elif run.nbytes:
            joined.append(run)
    return joined


def cut(runs: Iterable[BlockRun], most: int) -> Iterator[BlockRun]:
    """Cut runs into pieces of at most this many bytes, so that several threads move them."""
    for offset, at, nbytes in runs:
        for begin in range(0, nbytes, most):
            yield BlockRun(offset + begin, at + begin, min(most, nbytes - begin))


class StateRing:
    """The buffers, and the threads that read and write them."""

    def __init__(
        self, file: ScratchFile, nbytes: int, counters: Counters, allocate: Callable[[int], Tensor] | None = None
    ) -> None:
        """Allocate buffers of this many bytes each, from memory whose pages begin at multiples of BLOCK."""
        self._file = file
        self._counters = counters
        memory = (allocate or HostAllocator().plain)(BUFFERS * blocks(nbytes))
        self._whole = buffer_over(memory)
        self._buffers = [buffer_over(buffer) for buffer in memory.split(blocks(nbytes))]  # type: ignore[no-untyped-call]
        self._free = deque(self._buffers)
        self._written: deque[tuple[Buffer, list[Future[None]]]] = deque()  # in the order of their writes
        self._readers = ThreadPoolExecutor(READERS, "superpipeline-state-read")
        self._writers = ThreadPoolExecutor(WRITERS, "superpipeline-state-write")

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return self._whole.flat.nbytes

    @property
    def buffer_nbytes(self) -> int:
        """Bytes of one buffer."""
        return self._buffers[0].flat.nbytes

    def take(self) -> Buffer:
        """Take a buffer; wait for the oldest write if all are in use (Rule 2)."""
        if not self._free:
            self._end_write()
        return self._free.popleft()

    def read(self, buffer: Buffer, runs: Sequence[BlockRun]) -> list[Future[None]]:
        """Begin to read these runs into a buffer."""
        return [self._begin(self._readers, "disk in", self._file.read, buffer, run) for run in runs]

    def write(self, buffer: Buffer, runs: Sequence[BlockRun]) -> None:
        """Begin to write these runs of a buffer, which is free after that."""
        writes = [self._begin(self._writers, "disk out", self._file.write, buffer, run) for run in runs]
        self._written.append((buffer, writes))

    def _begin(
        self, threads: ThreadPoolExecutor, lane: Lane, move: Callable[..., None], buffer: Buffer, run: BlockRun
    ) -> Future[None]:
        under_way = self._counters.listener.work(lane, "", "state", run.nbytes)

        def transfer() -> None:
            with under_way:
                move(buffer.memory[run.at :], run.offset, run.nbytes)

        return threads.submit(transfer)

    def wait(self, transfers: Iterable[Future[None]]) -> None:
        """Wait for transfers, and raise what one of them raised."""
        with self._counters.stall("disk"):
            for transfer in transfers:
                transfer.result()

    def drain(self) -> None:
        """Wait until all is written (Rule 2)."""
        for _ in range(len(self._written)):
            self._end_write()

    def _end_write(self) -> None:
        """Wait for the oldest write; its buffer is free then."""
        buffer, writes = self._written[0]
        self.wait(writes)
        self._written.popleft()
        self._free.append(buffer)

    def portions(
        self, runs_of: Iterable[tuple[Item, Sequence[BlockRun]]]
    ) -> Generator[tuple[Item, Buffer], None, None]:
        """Yield each item with a buffer that has its runs, reading those of the next ones meanwhile.

        The caller writes each buffer before it takes the next, and closes this generator, also after an error. All is
        written when the last one was taken.
        """
        todo, ahead = iter(runs_of), deque[tuple[Item, Buffer, list[Future[None]]]]()
        try:
            while True:
                while len(ahead) < AHEAD and (following := next(todo, None)) is not None:
                    buffer = self.take()
                    ahead.append((following[0], buffer, self.read(buffer, following[1])))
                if not ahead:
                    break
                item, buffer, reads = ahead[0]
                self.wait(reads)
                yield item, buffer
                ahead.popleft()
            self.drain()
        except BaseException:
            self.recover(read for *_, reads in ahead for read in reads)
            raise

    @contextlib.contextmanager
    def as_one(self, read: Sequence[BlockRun], written: Sequence[BlockRun]) -> Generator[Buffer, None, None]:
        """Lend all buffers as one, with what is read into it, and write it in the end. Nothing else is under way."""
        under_way: list[Future[None]] = []
        try:
            under_way += self.read(self._whole, list(cut(read, self.buffer_nbytes)))
            self.wait(under_way)
            yield self._whole
            write, runs = self._file.write, cut(written, self.buffer_nbytes)
            under_way += [self._begin(self._writers, "disk out", write, self._whole, run) for run in runs]
            self.wait(under_way)
        except BaseException:
            self.recover(under_way)
            raise

    def recover(self, reads: Iterable[Future[None]] = ()) -> None:
        """Wait for all that is under way, whatever comes of it, and have all buffers free (Rule 3)."""
        transfers = [*reads, *(write for _, writes in self._written for write in writes)]
        for transfer in transfers:
            with contextlib.suppress(BaseException):
                transfer.exception()
        self._written.clear()
        self._free = deque(self._buffers)

    def close(self) -> None:
        """End the threads and free the buffers."""
        self._readers.shutdown()
        self._writers.shutdown()
        keep_from_forks(self._whole.flat, False)
