"""Copies between unlocked host memory and a device, in pieces, through page-locked staging buffers.

A device copies by itself only from and to page-locked memory. A copy of other memory would block the calling thread.
So a thread for each direction moves the bytes between that memory and a ring of small page-locked buffers, from and to
which the device copies by itself.

1. Copies begin in the order in which they are submitted, on a stream that is the ring's own. A copy waits for what is
   on the device's stream when it is submitted. What comes there before the thread queues the copy may wait for readers
   of its bytes, so a copy that waited for that as well would run after compute in place of beside it. The caller queues
   all work that a copy has to wait for before it submits the copy: nothing on the device waits for what is not queued.
2. A copy is on its stream only when the thread has queued it there. Making a stream wait for it waits for that first.
   Where it failed, what was queued of it has ended.
3. A buffer is written again only after the device read it (up), or after the thread emptied it (down).
4. A thread waits for the other one only if bytes have to come down before they go up again.
5. Who waited for a copy may count the references to its bytes at once. So a thread says that a copy ended, and for host
   bytes that they are there, when nothing on it refers to a tensor over them any more.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

Around = AbstractContextManager[None]
Copies = Sequence[tuple[Tensor, Tensor]]  # (to, from), rows of bytes of equal length


class Arrival(Protocol):
    """The end of a copy: an event on its stream, or an object for one that will be recorded there."""

    def wait(self, stream: Any) -> None:
        """Make work that is queued on this stream from here on run after the copy."""

    def synchronize(self) -> None:
        """Wait until the host bytes may be written (copied up) or read (copied down)."""

    def query(self) -> bool:
        """Whether the host bytes may be written or read now."""


class StagedCopy:
    """The end of a copy that a ring's thread makes (Rule 2)."""

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
        """Raise this error in every caller that waits for the copy."""
        for milestone in (self.on_device, self.on_host):
            if not milestone.done():
                milestone.set_exception(error)


class StagingRing:
    """The staging buffers of one direction, and the thread that uses them."""

    def __init__(self, stream: Any, buffers: Sequence[Tensor], name: str) -> None:
        self._stream = stream
        self._buffers = buffers
        self._read: list[Any] = [None] * len(buffers)  # events after which each may be written (Rule 3)
        self._next = 0
        self._thread = ThreadPoolExecutor(1, f"superpipeline-{name}")

    def up(
        self, begin: Any, copies: Copies, around: Around, uncut: Copies = (), after: Arrival | None = None
    ) -> StagedCopy:
        """Start copies to the device.

        Args:
            begin: An event after which the device's memory may be written (Rule 1).
            copies: The copies to make in pieces.
            around: Entered before the first copy is queued, left after the last.
            uncut: Pairs of tensors of equal shape that are copied in one piece, without a buffer.
            after: The copy down that brings the host bytes.
        """
        return self._submit(begin, lambda _: self._up(copies, around, uncut, after))

    def down(self, begin: Any, copies: Copies, around: Around) -> StagedCopy:
        """Start copies to the host, of memory that may be read after the event ``begin`` (Rule 1)."""
        return self._submit(begin, lambda staged: self._down(staged, copies, around))

    def finish(self) -> None:
        """Wait for all copies that were submitted."""
        self._thread.submit(self._stream.synchronize).result()

    def close(self) -> None:
        """End the thread, after the copies that were submitted."""
        self._thread.shutdown()

    def _submit(self, begin: Any, work: Callable[[StagedCopy], Any]) -> StagedCopy:
        staged = StagedCopy()
        self._thread.submit(self._run, staged, begin, [work])
        return staged

    # ---- on the thread

    def _run(self, staged: StagedCopy, begin: Any, works: list[Callable[[StagedCopy], Any]]) -> None:
        try:
            torch.accelerator.set_stream(self._stream)  # not entered as a context: another thread may be in that
            self._stream.wait_event(begin)
            with torch.no_grad():
                queued = works.pop()(staged)  # which ends with all that it refers to (Rule 5)
            if not staged.on_device.done():
                staged.on_device.set_result(queued)
            staged.on_host.set_result(None)
        except BaseException as error:
            with contextlib.suppress(RuntimeError):  # the device's own error, which whoever waits for it raises
                self._stream.synchronize()
            staged.fail(error)

    def _up(self, copies: Copies, around: Around, uncut: Copies, after: Arrival | None) -> Any:
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
            for target, source in uncut:
                target.copy_(source)
        return self._stream.record_event()

    def _down(self, staged: StagedCopy, copies: Copies, around: Around) -> Any:
        under_way: collections.deque[tuple[Tensor, Tensor, Any]] = collections.deque()
        with around:
            for target, source in self._pieces(copies):
                if len(under_way) == len(self._buffers):
                    self._carry(*under_way.popleft())
                buffer = self._take(len(source))
                buffer.copy_(source, non_blocking=True)
                under_way.append((target, buffer, self._stream.record_event()))
        queued = self._stream.record_event()
        staged.on_device.set_result(queued)
        for piece in under_way:
            self._carry(*piece)
        return queued

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
