"""Copies between host memory that is not page-locked and a device, in pieces, through page-locked staging buffers.

A device copies by itself only from and to page-locked memory. With any other the calling thread would stand still, so
a thread for each direction carries the bytes between there and a ring of small buffers, from and to which the device
copies by itself.

1. What is submitted begins in order, and nothing on the device waits for what is not queued yet: the caller queues all
   that a copy has to wait for before it submits the copy.
2. On its stream a copy exists only when the thread came to it. Who lets a stream wait for it waits for that first.
3. A buffer is written again only after the device read it (up), or after the thread has carried it on (down).
4. A thread never waits for the other one, but for what came down before it goes up again.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

Around = AbstractContextManager[None]
Copies = Sequence[tuple[Tensor, Tensor]]  # (to, from), rows of bytes of equal length


class Arrival(Protocol):
    """The end of a copy: an event on its stream, or what stands for one that will be recorded there."""

    def wait(self, stream: Any) -> None:
        """What is queued on this stream from here on runs after the copy."""

    def synchronize(self) -> None:
        """The host bytes may be written (copied up) or read (copied down)."""

    def query(self) -> bool:
        """Whether they may be now."""


class StagedCopy:
    """The arrival of a copy that a thread makes (Rule 2)."""

    def __init__(self) -> None:
        self.on_device: Future[Any] = Future()  # an event, once it is recorded
        self.on_host: Future[None] = Future()

    def wait(self, stream: Any) -> None:
        stream.wait_event(self.on_device.result())

    def synchronize(self) -> None:
        self.on_host.result()

    def query(self) -> bool:
        return self.on_host.done()

    def fail(self, error: BaseException) -> None:
        """Who waits is told."""
        for milestone in (self.on_device, self.on_host):
            if not milestone.done():
                milestone.set_exception(error)


class StagingRing:
    """Staging buffers of one direction, and the thread that serves them."""

    def __init__(self, stream: Any, buffers: Sequence[Tensor], name: str) -> None:
        self._stream = stream
        self._buffers = buffers
        self._read: list[Any] = [None] * len(buffers)  # events after which each may be written (Rule 3)
        self._next = 0
        self._thread = ThreadPoolExecutor(1, f"superpipeline-{name}")

    def up(self, copies: Copies, around: Around, plainly: Copies = (), after: Arrival | None = None) -> StagedCopy:
        """Starts copies to the device.

        Args:
            copies: What to copy.
            around: Entered before the first of them is queued, left after the last.
            plainly: What is not to be cut: any tensors of equal shape.
            after: What brings the host bytes.
        """
        return self._submit(lambda staged: self._up(staged, copies, around, plainly, after))

    def down(self, copies: Copies, around: Around) -> StagedCopy:
        """Starts copies to the host."""
        return self._submit(lambda staged: self._down(staged, copies, around))

    def close(self) -> None:
        """Ends the thread, after what was submitted."""
        self._thread.shutdown()

    def _submit(self, work: Callable[[StagedCopy], None]) -> StagedCopy:
        staged = StagedCopy()
        self._thread.submit(self._run, staged, work)
        return staged

    # ---- on the thread

    def _run(self, staged: StagedCopy, work: Callable[[StagedCopy], None]) -> None:
        try:
            torch.accelerator.set_stream(self._stream)  # not entered: that may be the case on another thread, too
            with torch.no_grad():
                work(staged)
        except BaseException as error:
            staged.fail(error)

    def _up(self, staged: StagedCopy, copies: Copies, around: Around, plainly: Copies, after: Arrival | None) -> None:
        if after is not None:
            after.synchronize()
        with around:
            for target, source in self._pieces(copies):
                buffer = self._take(len(source))
                if self._read[self._next] is not None:
                    self._read[self._next].synchronize()
                buffer.copy_(source)
                target.copy_(buffer, non_blocking=True)
                self._read[self._next] = self._stream.record_event()
            for target, source in plainly:
                target.copy_(source)
        staged.on_device.set_result(self._stream.record_event())
        staged.on_host.set_result(None)

    def _down(self, staged: StagedCopy, copies: Copies, around: Around) -> None:
        under_way: collections.deque[tuple[Tensor, Tensor, Any]] = collections.deque()
        with around:
            for target, source in self._pieces(copies):
                if len(under_way) == len(self._buffers):
                    self._carry(*under_way.popleft())
                buffer = self._take(len(source))
                buffer.copy_(source, non_blocking=True)
                under_way.append((target, buffer, self._stream.record_event()))
        staged.on_device.set_result(self._stream.record_event())
        for piece in under_way:
            self._carry(*piece)
        staged.on_host.set_result(None)

    @staticmethod
    def _carry(target: Tensor, buffer: Tensor, there: Any) -> None:
        there.synchronize()
        target.copy_(buffer)

    def _pieces(self, copies: Copies) -> list[tuple[Tensor, Tensor]]:
        size = len(self._buffers[0])
        return [
            (target[begin : begin + size], source[begin : begin + size])
            for target, source in copies
            for begin in range(0, len(source), size)
        ]

    def _take(self, nbytes: int) -> Tensor:
        self._next = (self._next + 1) % len(self._buffers)
        return self._buffers[self._next][:nbytes]
