"""Streams, events and copies: the only file that knows an accelerator's API.

Every backend that ``torch.accelerator`` serves is used through it. The CPU is a device whose streams are always idle.
"""

from __future__ import annotations

import collections
import contextlib
from typing import Any, Protocol

import torch
from torch import Tensor

ALIGNMENT = 512  # bytes: torch's allocators align so, and kernels are chosen by the alignment of pointers


def aligned(nbytes: int) -> int:
    """Round bytes up to the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Arrival(Protocol):
    """The end of a copy."""

    def wait(self, stream: Any) -> None:
        """Make what is queued on this stream from here on run after the copy."""

    def synchronize(self) -> None:
        """Wait until the copy is done."""


class IdleEvent:
    """An event of an idle stream: it has always happened."""

    def wait(self, stream: Any) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""


class IdleStream(contextlib.nullcontext[None]):
    """The CPU's stream: work is done when it is issued."""

    def record_event(self) -> IdleEvent:
        return IdleEvent()

    def wait_event(self, event: IdleEvent) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""


class Device:
    """A compute device with a stream for copies up, one for copies down, and the caller's stream for compute."""

    def __init__(self, device: torch.device | str) -> None:
        found = torch.device(device)
        self.is_host = found.type == "cpu"
        has_number = self.is_host or found.index is not None
        self.torch_device = found if has_number else torch.device(found.type, torch.accelerator.current_device_index())
        self.up, self.down = self._new_stream(), self._new_stream()
        self._idle = IdleStream()

    def _new_stream(self) -> Any:
        return IdleStream() if self.is_host else torch.Stream(device=self.torch_device)

    @property
    def compute(self) -> Any:
        """The stream on which the calling thread launches kernels."""
        return self._idle if self.is_host else torch.accelerator.current_stream(self.torch_device)

    def synchronize(self) -> None:
        """Wait for what the calling thread's stream has queued."""
        self.compute.synchronize()

    # ---- memory

    def slab(self, nbytes: int) -> Tensor:
        """Allocate flat host memory that stays, from which the device copies by itself."""
        return self.passing(nbytes)

    def passing(self, nbytes: int) -> Tensor:
        """Allocate flat host memory that comes and goes; it is kept until the device's copies are done."""
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=not self.is_host)

    def empty(self, nbytes: int) -> Tensor:
        """Allocate flat device memory on the current stream."""
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def keep_for(self, tensor: Tensor, stream: Any) -> None:
        """Keep a tensor's memory until the work that is queued on this stream is done."""
        if not self.is_host:
            tensor.record_stream(stream)

    # ---- copies

    def send_up(self, target: Tensor, source: Tensor) -> Arrival:
        """Start a copy of bytes to the device, behind what the up stream has queued."""
        with self.up:
            target.copy_(source, non_blocking=True)
            arrival: Arrival = self.up.record_event()
        return arrival

    def send_down(self, target: Tensor, source: Tensor) -> Arrival:
        """Start a copy of bytes to the host, behind what the down stream has queued."""
        with self.down:
            target.copy_(source, non_blocking=True)
            arrival: Arrival = self.down.record_event()
        return arrival

    def after_compute(self, stream: Any) -> None:
        """Make what is queued on a copy stream from here on run after what compute has queued."""
        stream.wait_event(self.compute.record_event())


class Ring:
    """Compute's memory that copies down still read: the last few, however far the host runs ahead of the device.

    Before older memory is let go of, the stream that allocated it waits for the copy; the host never does.
    """

    def __init__(self, depth: int = 2) -> None:
        self._depth = depth
        self._held: collections.deque[tuple[Any, Arrival, Any]] = collections.deque()

    def hold(self, memory: Any, copied: Arrival, home: Any) -> None:
        """Keep memory of the stream ``home`` until it may be used again after this copy."""
        self._held.append((memory, copied, home))
        while len(self._held) > self._depth:
            _, oldest, stream = self._held.popleft()
            oldest.wait(stream)


def dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor without gaps or overlaps, otherwise those of a contiguous one."""
    return torch.empty_like(tensor, device="meta").stride()
