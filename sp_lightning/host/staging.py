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
import itertools
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor


class StagedCopy:
    """The end of a copy that a ring's thread makes."""

    def __init__(self) -> None:
        self.queued: Future[Any] = Future()  # an event on the ring's stream, once it is recorded
        self.done: Future[None] = Future()  # done once the host's bytes were read, or have arrived

    def wait(self, stream: Any) -> None:
        """Make later work on a stream wait for the copy. Blocks until the copy is queued."""
        stream.wait_event(self.queued.result())

    def synchronize(self) -> None:
        """Block until the host's bytes were read, or have arrived."""
        self.done.result()

    def fail(self, error: BaseException) -> None:
        """Make `wait` and `synchronize` raise this error in every caller."""
        for milestone in (self.queued, self.done):
            if not milestone.done():
                milestone.set_exception(error)


class StagingRing:
    """The page-locked buffers for copies in one direction, and the thread that makes these copies."""

    def __init__(self, stream: Any, buffers: Sequence[Tensor], name: str) -> None:
        self._stream, self._buffers = stream, buffers
        self._turns = itertools.cycle(range(len(buffers)))
        self._read = [stream.record_event() for _ in buffers]  # after which each buffer may be written again
        self._thread = ThreadPoolExecutor(1, f"superpipeline-{name}", torch.accelerator.set_stream, (stream,))

    def copy(
        self,
        begin: Any,
        target: Tensor,
        source: Tensor,
        recorded: AbstractContextManager[None],
        after: Any = None,
    ) -> StagedCopy:
        """Start a copy between host and device, and return its end.

        Args:
            begin: An event after which the device's memory may be written, or read.
            target: Flat bytes on the device or on the host.
            source: Flat bytes on the other one.
            recorded: The recorder's context, in which the copy is made.
            after: The copy from the device that brings the host's bytes; None if they have arrived.
        """
        staged = StagedCopy()
        self._thread.submit(self._run, staged, begin, target, source, recorded, after)
        return staged

    def close(self) -> None:
        """End the thread, after the copies that were submitted."""
        self._thread.shutdown()

    # ---- on the thread

    def _run(
        self,
        staged: StagedCopy,
        begin: Any,
        target: Tensor,
        source: Tensor,
        recorded: AbstractContextManager[None],
        after: Any,
    ) -> None:
        """Make one copy after the event ``begin``; then complete ``staged``, or fail it. Runs on the ring's thread."""
        nbytes = len(self._buffers[0])
        pieces = zip(torch.split(target, nbytes), torch.split(source, nbytes), strict=True)
        try:
            self._stream.wait_event(begin)
            if after is not None:
                after.synchronize()
            with torch.no_grad(), recorded:
                (self._down if source.device == self._stream.device else self._up)(staged, pieces)
            staged.done.set_result(None)
        except BaseException as error:
            with contextlib.suppress(RuntimeError):  # of the device; every later wait for the device raises it
                self._stream.synchronize()
            staged.fail(error)

    def _up(self, staged: StagedCopy, pieces: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Copy pieces of host memory to the device through the buffers."""
        for there, here in pieces:
            turn = next(self._turns)
            buffer = self._buffers[turn][: len(here)]
            self._read[turn].synchronize()
            buffer.copy_(here)
            there.copy_(buffer, non_blocking=True)
            self._read[turn] = self._stream.record_event()
        staged.queued.set_result(self._stream.record_event())

    def _down(self, staged: StagedCopy, pieces: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Copy pieces of device memory to the host: one buffer is filled as one is emptied. Blocks until all came."""
        under_way: collections.deque[tuple[Tensor, Tensor, Any]] = collections.deque()
        for here, there in pieces:
            if len(under_way) == len(self._buffers):
                _empty_buffer(*under_way.popleft())
            buffer = self._buffers[next(self._turns)][: len(there)]
            buffer.copy_(there, non_blocking=True)
            under_way.append((here, buffer, self._stream.record_event()))
        staged.queued.set_result(self._stream.record_event())
        for piece in under_way:
            _empty_buffer(*piece)


def _empty_buffer(target: Tensor, buffer: Tensor, arrived: Any) -> None:
    """Copy a buffer to host memory once the device has filled the buffer. Blocks."""
    arrived.synchronize()
    target.copy_(buffer)
