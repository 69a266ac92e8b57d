"""Copies between unlocked host memory and a device, in pieces, through a ring of small page-locked buffers.

A device copies by itself only from and to page-locked memory; a copy of other memory would block the calling thread. So
a thread for each direction moves the bytes between that memory and the buffers.

- Copies begin in the order in which they are submitted, on a stream of the ring's own, each behind the event that it
  was submitted with: not behind what the device's copy stream gets later, which may wait for readers of these bytes.
- A copy is on that stream only when the thread has queued it: a stream that is to wait for it waits for that first.
- A buffer is written again only after the device read it (up), or after the thread emptied it (down).
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor


class StagedCopy:
    """The end of a copy that a ring's thread makes."""

    def __init__(self) -> None:
        self.queued: Future[Any] = Future()  # an event on the ring's stream, once it is recorded
        self.done: Future[None] = Future()  # done once the host's bytes were read, or have arrived

    def wait(self, stream: Any) -> None:
        """Make work that a stream gets from now on run after the copy. Blocks until the copy is queued."""
        stream.wait_event(self.queued.result())

    def synchronize(self) -> None:
        """Block until the host's bytes were read, or have arrived."""
        self.done.result()

    def fail(self, error: BaseException) -> None:
        """Raise this error in every caller that waits for the copy."""
        for milestone in (self.queued, self.done):
            if not milestone.done():
                milestone.set_exception(error)


class StagingRing:
    """The buffers of one direction, and the thread that uses them."""

    def __init__(self, stream: Any, buffers: Sequence[Tensor], name: str) -> None:
        self._stream, self._buffers = stream, buffers
        self._read: list[Any] = [None] * len(buffers)  # for each buffer the event after which it may be written
        self._next = 0
        self._thread = ThreadPoolExecutor(1, f"superpipeline-{name}")

    def up(self, begin: Any, target: Tensor, source: Tensor, after: Any, recorded: Any) -> StagedCopy:
        """Start a copy to the device.

        Args:
            begin: An event after which the device's memory may be written.
            target: The bytes on the device.
            source: The bytes on the host.
            after: The copy from the device that brings the host's bytes; None if they have arrived.
            recorded: The recorder's context, in which the copy is made.
        """
        return self._submit(begin, recorded, lambda staged: self._up(target, source, after))

    def down(self, begin: Any, target: Tensor, source: Tensor, recorded: Any) -> StagedCopy:
        """Start a copy to the host, of memory that may be read after the event ``begin``."""
        return self._submit(begin, recorded, lambda staged: self._down(staged, target, source))

    def close(self) -> None:
        """End the thread, after the copies that were submitted."""
        self._thread.shutdown()

    def _submit(self, begin: Any, recorded: Any, work: Callable[[StagedCopy], Any]) -> StagedCopy:
        """Hand a copy to the thread, and return its end."""
        staged = StagedCopy()
        self._thread.submit(self._run, staged, begin, recorded, work)
        return staged

    # ---- on the thread

    def _run(self, staged: StagedCopy, begin: Any, recorded: Any, work: Callable[[StagedCopy], Any]) -> None:
        """Run one copy behind its event, and complete its end or fail it. Runs on the thread."""
        try:
            torch.accelerator.set_stream(self._stream)
            self._stream.wait_event(begin)
            with torch.no_grad(), recorded:
                queued = work(staged)
            if not staged.queued.done():
                staged.queued.set_result(queued)
            staged.done.set_result(None)
        except BaseException as error:
            with contextlib.suppress(RuntimeError):  # of the device; every later wait for the device raises it
                self._stream.synchronize()
            staged.fail(error)

    def _up(self, target: Tensor, source: Tensor, after: Any) -> Any:
        """Copy host memory to the device through the buffers; return an event of the last copy."""
        if after is not None:
            after.synchronize()
        for there, here in self._pieces(target, source):
            buffer = self._next_buffer(len(here))
            if self._read[self._next] is not None:
                self._read[self._next].synchronize()
            buffer.copy_(here)
            there.copy_(buffer, non_blocking=True)
            self._read[self._next] = self._stream.record_event()
        return self._stream.record_event()

    def _down(self, staged: StagedCopy, target: Tensor, source: Tensor) -> Any:
        """Copy device memory to the host through the buffers; return an event after which the device memory is free."""
        under_way: collections.deque[tuple[Tensor, Tensor, Any]] = collections.deque()
        for here, there in self._pieces(target, source):
            if len(under_way) == len(self._buffers):
                _empty_buffer(*under_way.popleft())
            buffer = self._next_buffer(len(there))
            buffer.copy_(there, non_blocking=True)
            under_way.append((here, buffer, self._stream.record_event()))
        queued = self._stream.record_event()
        staged.queued.set_result(queued)
        for piece in under_way:
            _empty_buffer(*piece)
        return queued

    def _pieces(self, target: Tensor, source: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Cut a copy's target and source into pairs of chunks as long as a buffer."""
        size = len(self._buffers[0])
        starts = range(0, len(source), size)
        return [(target[begin : begin + size], source[begin : begin + size]) for begin in starts]

    def _next_buffer(self, nbytes: int) -> Tensor:
        """Move on to the next buffer of the ring, and return its first nbytes."""
        self._next = (self._next + 1) % len(self._buffers)
        return self._buffers[self._next][:nbytes]


def _empty_buffer(target: Tensor, buffer: Tensor, arrived: Any) -> None:
    """Copy a buffer to host memory once the device has filled the buffer. Blocks."""
    arrived.synchronize()
    target.copy_(buffer)
