"""Blocks of host memory in which offloaded activations wait for backward; the first of them go to a scratch file.

1. What autograd saves is laid side by side into *blocks* of equal size, in the order in which it is saved; a tensor may
   lie in several. Blocks are numbered: backward needs the highest number first.
2. A limited number of blocks has memory at a time. One that needs some takes that of the block which backward, if it
   went on from here, would need last: in forward the first, in backward of a graph that is kept the one before.
3. A block is written once, when nothing more is laid into it and all of it has come down, ahead of the moment at which
   its memory is needed. Its memory is free after that. A block that came back is not written again.
4. Blocks come back in backward's order as soon as memory is free for them, and not only when they are needed.
5. A block ends with the last tensor in it, whoever lets go of that, and when: also in the middle of a garbage
   collection. Its memory and its range of the file then are another one's, after all copies that are under way there.
6. A read or write that failed is the error of whoever waits for it. The block is where it was, and may be moved again.
7. The file is made when the first block goes there. It ends with the run: until then its ranges are used again.
8. Forward and backward act here, one at a time (engine.py). Threads that read and write touch nothing but the bytes of
   their block.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.telemetry import Counters
from ..core.unit_numbers import aligned
from ..errors import UnsupportedError
from ..memory.device import Device
from ..memory.staging import AllCopies, Arrival
from .direct_file import blocks
from .direct_ring import READERS, Buffer, aligned_buffer, keep_from_forks
from .scratch_file import ScratchFile

BLOCK_NBYTES = 64 << 20
SMALLEST = 1 << 16
PART_OF_BUDGET = 32  # of which a block is at most one
LEAST = 6  # blocks with memory
BEHIND = 2  # that are written before others need their memory


def block_nbytes(budget: int) -> int:
    """Return the bytes of a block in a run with this budget of host memory; "0B" is as little as can be had."""
    return max(SMALLEST, min(BLOCK_NBYTES, blocks(budget // PART_OF_BUDGET))) if budget > 0 else BLOCK_NBYTES


def least_nbytes(budget: int) -> int:
    """Return the bytes of memory that blocks have at least."""
    return LEAST * block_nbytes(budget)


def written_nbytes(saved: int, size: int, room: int) -> int:
    """Return how many of these saved bytes a step writes, in blocks of this size with room for ``room`` bytes."""
    return min(saved, size * max(0, -(-saved // size) - max(LEAST, room // size) + BEHIND))


def in_memory_nbytes(saved: int, size: int, room: int) -> int:
    """Return the most bytes of memory that blocks of this size have for these saved bytes."""
    return size * min(-(-saved // size), max(LEAST, room // size))


@dataclass(eq=False)
class _Memory:
    """The memory of a block."""

    buffer: Buffer
    copies: list[Arrival] = field(default_factory=list)  # from and to it


@dataclass(eq=False)
class _Block:
    """Bytes that were saved one after the other, in memory, in the file, or in both."""

    number: int
    memory: _Memory | None
    free: deque[_Memory]  # where memory and range go in the end (Rule 5)
    unused: deque[Tensor]
    used: int = 0  # bytes
    range: Tensor | None = None  # of the file, as a tensor over it
    written: Future[None] | None = None  # until it was waited for
    read: Future[None] | None = None

    def __del__(self) -> None:
        if self.memory is not None:
            self.free.append(self.memory)
        if self.range is not None:
            self.unused.append(self.range)


class _PartOfBlock(NamedTuple):
    """A part of a saved tensor in a block."""

    block: _Block
    at: int
    nbytes: int


class PlaceInBlocks:
    """The place of a saved tensor's bytes, in one block or several."""

    def __init__(self, store: ActivationBlocks, parts: Sequence[_PartOfBlock], arrived: Arrival) -> None:
        self._store, self._parts, self.arrived = store, parts, arrived

    @property
    def is_near(self) -> bool:
        """Whether all of it is in memory."""
        return all(part.block.memory is not None and part.block.read is None for part in self._parts)

    def send(self, target: Tensor) -> Arrival:
        """Start the copy of the bytes to a row on the device."""
        return self._store.send(self._parts, target, self.arrived)


class ActivationBlocks:
    """The blocks, their memory, and the threads that read and write them."""

    def __init__(
        self, make_file: Callable[[], ScratchFile], device: Device, counters: Counters, nbytes: int, room: int
    ) -> None:
        """Make blocks of this many bytes, of which as many have memory as there is room for (Rule 2)."""
        self._make_file, self._device, self._counters, self._block_nbytes = make_file, device, counters, nbytes
        self.resize(room)
        self._threads: ThreadPoolExecutor | None = None
        self._blocks: weakref.WeakValueDictionary[int, _Block] = weakref.WeakValueDictionary()
        self._open: Callable[[], _Block | None] = lambda: None  # into which the next tensor is laid, if it is there
        self._next = 0  # number
        # Numbers of the others, in order, as long as nobody noticed that they ended.
        self._in_memory: list[int] = []
        self._on_disk: list[int] = []
        self._all: list[_Memory] = []
        self._free: deque[_Memory] = deque()
        self._unused: deque[Tensor] = deque()  # ranges of the file
        self._closed = False

    def resize(self, room: int) -> None:
        """Have memory for as many blocks as there is room for from now on; none is given back."""
        self._most = max(LEAST, room // self._block_nbytes)

    @property
    def host_nbytes(self) -> int:
        """Bytes of memory of all blocks."""
        return sum(memory.buffer.flat.nbytes for memory in self._all)

    def receive(self, source: Tensor) -> PlaceInBlocks:
        """Start the copy of a row of bytes on the device into the next blocks."""
        parts: list[_PartOfBlock] = []
        arrivals: list[Arrival] = []
        try:
            done = 0
            while done < source.nbytes:
                block = self._with_room()
                assert block.memory is not None
                at, nbytes = block.used, min(source.nbytes - done, self._block_nbytes - block.used)
                place = block.memory.buffer.flat[at : at + nbytes]
                under_way = self._counters.listener.work("down", "", "activations", nbytes)
                arrivals.append(self._device.send_down([(place, source[done : done + nbytes])], under_way))
                block.memory.copies.append(arrivals[-1])
                parts.append(_PartOfBlock(block, at, nbytes))
                block.used += aligned(nbytes)
                done += nbytes
        except BaseException:
            for arrival in arrivals:
                arrival.synchronize()  # they read memory that the caller is about to give up
            raise
        return PlaceInBlocks(self, parts, AllCopies(arrivals))

    def send(self, parts: Sequence[_PartOfBlock], target: Tensor, arrived: Arrival) -> Arrival:
        """Start the copy of a saved tensor's parts to a row of bytes on the device."""
        sent: list[Arrival] = []
        end = target.nbytes
        try:
            for block, at, nbytes in reversed(parts):
                memory = self._bring(block)
                under_way = self._counters.listener.work("up", "", "activations", nbytes)
                copies = [(target[end - nbytes : end], memory.buffer.flat[at : at + nbytes])]
                sent.append(self._device.send_up(copies, under_way, after=arrived))
                memory.copies.append(sent[-1])
                end -= nbytes
        except BaseException:
            AllCopies(sent).wait(self._device.compute)  # they write to memory that the caller is about to give up
            raise
        return AllCopies(sent)

    def free_unused(self) -> None:
        """Free the memory that no block has."""
        while self._free:
            memory = self._free.popleft()
            keep_from_forks(memory.buffer.flat, False)
            self._all.remove(memory)

    def close(self) -> None:
        """End the threads and close the file; what is in memory may still be sent. Safe twice."""
        self._closed = True
        if self._threads is not None:
            self._threads.shutdown()
        for memory in self._all:
            keep_from_forks(memory.buffer.flat, False)
        self._all.clear()
        self._free.clear()
        self._unused.clear()
        if "_scratch" in vars(self):
            self._scratch.close()

    # ---- memory (Rule 2)

    def _with_room(self) -> _Block:
        """Return the block into which the next bytes are laid."""
        block = self._open()
        if block is None or block.used >= self._block_nbytes:
            if block is not None:
                self._in_memory.append(block.number)  # no other one has a higher one
                self._open = lambda: None
            memory = self._take(self._next)
            for copy in memory.copies:
                copy.wait(self._device.down)
            memory.copies.clear()
            self._blocks[self._next] = block = _Block(self._next, memory, self._free, self._unused)
            self._open = weakref.ref(block)
            self._next += 1
            self._write_ahead()
        return block

    def _take(self, number: int) -> _Memory:
        """Take memory for the block of this number, from another one if need be."""
        while not self._free:
            block = self._needed_last(number) if len(self._all) >= self._most else None
            if block is None:
                return self._more()
            self._put_away(block)
        return self._free.popleft()

    def _more(self) -> _Memory:
        memory = _Memory(aligned_buffer(self._device, self._block_nbytes, self._device.slab))
        self._all.append(memory)
        return memory

    def _needed_last(self, number: int) -> _Block | None:
        """Return the block with memory that backward, from the block of this number on, needs last."""
        self._in_memory = [one for one in self._in_memory if one in self._blocks]
        behind = bisect.bisect_right(self._in_memory, number)
        for one in (*self._in_memory[behind:], *self._in_memory[:behind]):
            block = self._blocks.get(one)
            if block is not None and one != number:
                return block
        return None

    def _put_away(self, block: _Block) -> None:
        """Have the memory of a block free, once its bytes are in the file (Rule 3)."""
        if block.range is None:
            self._write(block)
        if block.written is not None and (error := self._end_of(block.written)) is not None:
            if block.range is not None:
                self._unused.append(block.range)
            block.range = block.written = None
            raise error
        block.written = None
        if block.read is not None:
            self._end_of(block.read)  # whatever comes of it: the file has the bytes
        self._let_go(block)

    def _let_go(self, block: _Block) -> None:
        """Have a block on the disk alone; nothing reads or writes its memory any more but copies."""
        assert block.memory is not None
        self._in_memory.remove(block.number)
        bisect.insort(self._on_disk, block.number)
        memory, block.memory, block.read = block.memory, None, None
        self._free.append(memory)

    # ---- the disk (Rules 3 and 4)

    def _write_ahead(self) -> None:
        """Begin to write the first blocks, so that memory is free, or about to be, when the next one needs it."""
        soon = BEHIND - len(self._free) - max(0, self._most - len(self._all))
        self._in_memory = [one for one in self._in_memory if one in self._blocks]
        for one in self._in_memory[: max(0, soon)]:
            block = self._blocks.get(one)
            if block is not None and block.range is None:
                self._write(block)

    def _write(self, block: _Block) -> None:
        if not self._unused:
            self._unused.extend(
                self._scratch.tensors([torch.empty(self._block_nbytes, dtype=torch.uint8, device="meta")])
            )
        assert block.memory is not None
        block.range, nbytes = self._unused.popleft(), blocks(block.used)
        under_way = self._counters.listener.work("disk out", "", "activations", nbytes)
        memory, copies = block.memory.buffer.memory, list(block.memory.copies)
        file, begin = self._scratch, self._begin_of(block)

        def write(_block: _Block) -> None:  # which lives until then
            for copy in copies:
                copy.synchronize()
            with under_way:
                file.write(memory, begin, nbytes)

        block.written = self._pool().submit(write, block)
        self._counters.disk_written += nbytes

    def _bring(self, block: _Block) -> _Memory:
        """Return the memory of a block, with its bytes; have those that follow in backward come too."""
        if block.memory is None:
            if self._closed:
                raise UnsupportedError(
                    "a graph that was made while a module was streamed is used after streaming ended, by close() or "
                    "because the module's parameters changed: run its backward before that"
                )
            self._read(block, self._take(block.number))
        self._read_ahead(block.number)
        if block.read is not None:
            error = self._end_of(block.read)
            if error is not None:
                self._let_go(block)
                raise error
            block.read = None
        assert block.memory is not None
        return block.memory

    def _read_ahead(self, number: int) -> None:
        """Begin to read the next blocks before this one, as far as there is memory for them."""
        at = bisect.bisect_left(self._on_disk, number) - 1
        while at >= 0 and not self._closed:
            block = self._blocks.get(self._on_disk[at])
            if block is None:
                del self._on_disk[at]
            else:
                memory = self._take_if_free(number)
                if memory is None:
                    break
                self._read(block, memory)
            at -= 1

    def _take_if_free(self, number: int) -> _Memory | None:
        """Take memory for which nobody waits: that of no block, or of one that backward passed and the file has."""
        if not self._free and len(self._all) < self._most:
            return self._more()
        if not self._free:
            block = self._needed_last(number)
            if block is None or block.number < number or block.range is None or block.written or block.read:
                return None
            self._let_go(block)
        return self._free.popleft()

    def _read(self, block: _Block, memory: _Memory) -> None:
        self._on_disk.remove(block.number)
        bisect.insort(self._in_memory, block.number)
        copies, memory.copies = memory.copies, []
        block.memory, nbytes = memory, blocks(block.used)
        under_way = self._counters.listener.work("disk in", "", "activations", nbytes)
        file, begin = self._scratch, self._begin_of(block)

        def read(_block: _Block) -> None:  # which lives until then
            for copy in copies:
                copy.synchronize()
            with under_way:
                file.read(memory.buffer.memory, begin, nbytes)

        block.read = self._pool().submit(read, block)
        self._counters.disk_read += nbytes

    def _begin_of(self, block: _Block) -> int:
        """Return where in the file the range of a block begins."""
        assert block.range is not None
        place = self._scratch.place_of(block.range)
        assert place is not None
        return place.offset

    @functools.cached_property
    def _scratch(self) -> ScratchFile:
        return self._make_file()

    def _pool(self) -> ThreadPoolExecutor:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(READERS, "superpipeline-activations")
        return self._threads

    def _end_of(self, moved: Future[None]) -> BaseException | None:
        """Wait for a read or a write, and return its error, if it failed."""
        with contextlib.nullcontext() if moved.done() else self._counters.stall("disk"):
            error = moved.exception()
        if error is not None:
            traceback.clear_frames(error.__traceback__)  # whoever keeps it would keep the block
        return error
