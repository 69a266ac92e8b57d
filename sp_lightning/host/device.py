"""Streams, events, page-locked memory and copies: the only file that knows an accelerator's API.

Every backend that ``torch.accelerator`` serves is used through it. The CPU is a device whose streams are always idle,
and which needs no page-locked memory.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from ..compat.torch import memory_figures
from ..errors import DiskError, HostMemoryError, OptionError, SuperpipelineError, UnsupportedError
from ..options import HostMemory, format_bytes
from . import memory
from .machine import host_memory, lock_limit
from .memory import PageLock, Slabs, keep_from_forks
from .staging import StagingRing
from .telemetry import NOT_RECORDED, Lane

log = logging.getLogger(__name__)

ALIGNMENT = 512  # bytes: torch's allocators align so, and kernels are chosen by the alignment of pointers
STAGING_NBYTES = 16 << 20  # bytes of a staging buffer: enough for the link to reach its speed
STAGING_COUNT = 2  # staging buffers in each direction: one is filled while the other is emptied


def aligned(nbytes: int) -> int:
    """Round a number of bytes up to a multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class DeviceMemoryError(SuperpipelineError, torch.OutOfMemoryError):
    """The device has no memory for a unit that is needed now."""


class Arrival(Protocol):
    """The end of a copy that may still be running."""

    def wait(self, stream: Any) -> None:
        """Make later work on this stream wait for the copy. May block the host until the copy is queued."""

    def synchronize(self) -> None:
        """Block until the host may write the bytes that went to the device, or read those that came from it."""


class IdleEvent:
    """An event of an idle stream: it has always happened."""

    def wait(self, stream: Any) -> None:
        """Do nothing: an idle stream has no work to wait for."""

    def synchronize(self) -> None:
        """Do nothing: an idle stream has no work to wait for."""


class IdleStream(contextlib.nullcontext[None]):
    """The CPU's stream: work is done when it is issued."""

    record_event = IdleEvent

    def wait_event(self, event: IdleEvent) -> None:
        """Do nothing: an idle stream has no work to order."""

    def synchronize(self) -> None:
        """Do nothing: an idle stream has no work to wait for."""


class CudaPageLock:
    """Page locks by CUDA or HIP, which then copy from and to that host memory by themselves."""

    PORTABLE = 1  # locked for all devices

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def lock(self, address: int, nbytes: int) -> None:
        """Page-lock host memory for all devices; raise RuntimeError if CUDA refuses."""
        # On a thread of its own: CUDA keeps an error for the thread that caused it, where torch raises it at the next
        # kernel.
        with ThreadPoolExecutor(1, "superpipeline-lock") as thread:
            thread.submit(self._lock, address, nbytes).result()

    def _lock(self, address: int, nbytes: int) -> None:
        """Register host memory with CUDA on the calling thread."""
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device):
            torch.cuda.check_error(cudart.cudaHostRegister(address, nbytes, self.PORTABLE))

    def unlock(self, address: int) -> None:
        """Unlock host memory once the device has done all its work. Blocks; logs an error instead of raising."""
        try:
            torch.cuda.synchronize(self._device)  # torch does not track this memory: its copies may still run
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(address))  # type: ignore[no-untyped-call]
        except Exception as error:  # the device is unusable by now, and the process about to end
            log.debug("superpipeline: host memory could not be unlocked: %s", error)


def page_lock(device: torch.device) -> PageLock | None:
    """Return the page lock of a device; None if the device cannot register memory that torch did not allocate."""
    return CudaPageLock(device) if device.type == "cuda" else None


def available() -> list[str]:
    """List the names of the devices that can compute here, accelerators first."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    count = 0 if accelerator is None else torch.accelerator.device_count()
    return [f"{accelerator.type}:{index}" for index in range(count) if accelerator is not None] + ["cpu"]


def find(name: str | None = None) -> torch.device:
    """Return the device of a name, or raise; without a name return the first accelerator, else the CPU."""
    try:
        device = torch.device(available()[0] if name is None else name)
    except RuntimeError:
        raise _refused(str(name)) from None
    check_supported(device)
    return device


def numbered(device: torch.device) -> torch.device:
    """Return a device with an index, such as "cuda:0" for "cuda"; the CPU stays without one, as its tensors show."""
    if device.type == "cpu":
        return torch.device("cpu")
    return device if device.index is not None else torch.device(device.type, torch.accelerator.current_device_index())


def check_supported(device: torch.device) -> None:
    """Raise if a device has no memory of its own, holds no data, or is not available here."""
    if device.type == "mps":
        raise UnsupportedError(
            "device 'mps' shares its memory with the host, so there is nothing to stream: use Lightning's default"
            " strategy (strategy='auto')"
        )
    if device.type == "meta":
        raise UnsupportedError("device 'meta' holds no data: pass the device that computes, such as 'cuda'")
    if device.type != "cpu" and f"{device.type}:{device.index or 0}" not in available():
        raise _refused(str(device))


def _refused(name: str) -> OptionError:
    """Make the OptionError for a device that is not available, naming those that are."""
    return OptionError(argument="device", found=name, allowed="one of " + ", ".join(map(repr, available())))


class Counters:
    """Counts since streaming began, and the recorder that is told of each piece of work."""

    def __init__(self) -> None:
        self.nbytes: collections.Counter[Lane] = collections.Counter()  # that each lane moved
        self.fetches = self.evictions = self.surprises = 0
        self.stepped_ahead = self.held_steps = 0
        self.listener: Any = None  # a recorder (recorder.py) while there is one

    def record(self, lane: Lane, unit: str, phase: str, nbytes: int = 0) -> AbstractContextManager[None]:
        """Count the bytes that a lane moves, and return a context in which the recorder times the work."""
        self.nbytes[lane] += nbytes
        return NOT_RECORDED if self.listener is None else self.listener.work(lane, unit, phase, nbytes)

    def stall(self, cause: str) -> AbstractContextManager[None]:
        """Return a context in which the recorder times a wait of the host."""
        return NOT_RECORDED if self.listener is None else self.listener.work("host", stall=cause)


class Device:
    """A compute device with a stream for copies up, one for copies down, and the caller's stream for compute."""

    def __init__(
        self, device: torch.device | str, host_memory: HostMemory = "auto", slabs: Slabs | None = None
    ) -> None:
        found = torch.device(device)
        check_supported(found)
        self.is_host = found.type == "cpu"
        self.torch_device = numbered(found)
        self.up, self.down = self.new_stream(), self.new_stream()
        # Returns the stream on which the calling thread launches kernels; called for each gradient, so it is C code.
        self.current_stream: Callable[[], Any] = (
            itertools.repeat(IdleStream()).__next__
            if self.is_host
            else functools.partial(torch.accelerator.current_stream, self.torch_device)
        )
        # Whether the calling thread's work is recorded in a graph; asked at each visit.
        self.is_capturing: Callable[[], bool] = (
            torch.cuda.is_current_stream_capturing if found.type == "cuda" else itertools.repeat(False).__next__
        )
        self._host_memory = host_memory
        self._can_lock = not self.is_host and host_memory != "pageable"
        self._refusal = "host_memory='pageable'"  # why memory is not locked
        self.slabs, self._lock = slabs or Slabs(), page_lock(self.torch_device)
        self._locked_nbytes = 0
        self._rings: list[StagingRing] = []  # one to the device, and one to the host
        self.counters = Counters()

    def new_stream(self) -> Any:
        """Create a stream on this device."""
        return IdleStream() if self.is_host else torch.Stream(device=self.torch_device)

    @functools.cached_property
    def rounds_factors(self) -> bool:
        """Whether this device rounds a 0-dim tensor to the type of the narrower tensor that it multiplies."""
        narrow = torch.tensor([1 + 2**-7], dtype=torch.bfloat16, device=self.torch_device)
        return bool(narrow.clone().mul_(torch.tensor(1 + 2**-8, device=self.torch_device)).eq(narrow))

    def synchronize(self) -> None:
        """Block until the device has done all its work."""
        if not self.is_host:
            torch.accelerator.synchronize(self.torch_device)

    # ---- memory

    def slab(self, nbytes: int) -> Tensor:
        """Allocate a slab: flat host memory that stays, page-locked if possible.

        After a first refusal no more memory is locked, as each attempt might be refused slowly. Copies of unlocked
        memory go through staging buffers.
        """
        if self._can_lock:
            try:
                flat = self.slabs.locked(nbytes, self._lock)
                self._locked_nbytes += nbytes
                return flat
            except (RuntimeError, OSError) as error:
                self._stop_locking(nbytes, error)
        try:
            return self.slabs.plain(nbytes)
        except OSError as error:
            memory = host_memory()
            raise HostMemoryError(
                f"cannot allocate {format_bytes(nbytes)} of host memory ({error}): {format_bytes(memory.free)} of"
                f" {format_bytes(memory.total)} are free; train fewer parameters, or close other programs"
            ) from error

    def buffer(self, nbytes: int, alignment: int) -> Tensor:
        """Allocate flat host memory at an aligned address, page-locked if possible. No forked process gets it."""
        flat = self.slab(nbytes + alignment)
        buffer = flat[-flat.data_ptr() % alignment :][:nbytes]
        keep_from_forks(buffer)
        return buffer

    @property
    def hides_slabs(self) -> bool:
        """Whether a forked process does not have the slabs."""
        return self.slabs.are_hidden or (self._lock is not None and self._locked_nbytes > 0)

    def passing(self, nbytes: int) -> Tensor:
        """Allocate short-lived flat host memory, page-locked if possible; it lives until its copies are done."""
        if self._can_lock:
            try:
                return memory.locked_by_torch(nbytes)
            except RuntimeError as error:
                self._stop_locking(nbytes, error)
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def _stop_locking(self, nbytes: int, error: Exception) -> None:
        """Lock no more memory after this refusal; raise HostMemoryError if the user set host_memory='pinned'."""
        self._refusal = (
            f"{format_bytes(nbytes)} of host memory could not be page-locked after"
            f" {format_bytes(self._locked_nbytes)} were ({error})"
        )
        if self._host_memory == "pinned":
            memory, limit = host_memory(), lock_limit()
            raise HostMemoryError(
                f"host_memory='pinned': {self._refusal}; {format_bytes(memory.free)} of {format_bytes(memory.total)}"
                f" are free, and ulimit -l is {'unlimited' if limit is None else format_bytes(limit)}. Free host memory"
                " or raise the limit; or set host_memory='auto', which copies through a small page-locked ring"
            ) from error
        self._can_lock = False

    def empty(self, nbytes: int) -> Tensor:
        """Allocate flat device memory on the current stream."""
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def keep_for(self, tensor: Tensor, stream: Any) -> None:
        """Keep the allocator from reusing a tensor's device memory until the work queued on this stream is done."""
        if not self.is_host:
            tensor.record_stream(stream)

    def close(self) -> None:
        """Unlock all slabs, which remain usable, and end the staging rings. A second call does nothing."""
        while self._rings:
            self._rings.pop().close()
        self.slabs.unlock_all()

    # ---- figures

    def memory_allocated(self) -> int:
        """Return the bytes in use on the device; 0 on the CPU."""
        return self._memory("current")

    def memory_peak(self) -> int:
        """Return the peak of the bytes in use on the device; 0 on the CPU."""
        return self._memory("peak")

    def _memory(self, when: str) -> int:
        """Return the "current" or "peak" bytes in use on the device; 0 on the CPU."""
        return 0 if self.is_host else int(memory_figures(self.torch_device.index)["allocated_bytes"]["all"][when])

    def reset_memory_peak(self) -> None:
        """Restart the peak of the bytes in use from what is in use now."""
        if not self.is_host:
            torch.accelerator.reset_peak_memory_stats(self.torch_device)

    def memory_capacity(self) -> int:
        """Return how many bytes this process has or could allocate on the device."""
        if self.is_host:
            return host_memory().free
        free, total = torch.accelerator.get_memory_info(self.torch_device)
        share = getattr(torch.get_device_module(self.torch_device), "get_per_process_memory_fraction", None)
        with contextlib.suppress(RuntimeError):  # of an allocator without limits
            total = total if share is None else int(total * share(self.torch_device))
        return int(min(free + torch.accelerator.memory_reserved(self.torch_device), total))

    def moment(self, stream: Any) -> Any:
        """Record a timed event on a stream and return it; on the CPU return the host clock's seconds instead."""
        if self.is_host:
            return time.perf_counter()
        event = torch.Event(self.torch_device, enable_timing=True)
        event.record(stream)
        return event

    # ---- copies

    def send_up(
        self, target: Tensor, source: Tensor, unit: str = "", phase: str = "", after: Arrival | None = None
    ) -> Arrival:
        """Start a host-to-device copy behind what is on the up stream and the copy ``after``, and return its end.

        The copy is counted, and recorded as one of this unit and phase (`telemetry.Span`).
        """
        return self._send("up", self.up, source, target, source, after, unit, phase)

    def send_down(self, target: Tensor, source: Tensor, unit: str = "", phase: str = "") -> Arrival:
        """Start a device-to-host copy behind what is on the down stream, and return its end. Counted as `send_up`."""
        return self._send("down", self.down, target, target, source, None, unit, phase)

    def _send(
        self,
        lane: Lane,
        stream: Any,
        host: Tensor,
        target: Tensor,
        source: Tensor,
        after: Arrival | None,
        unit: str,
        phase: str,
    ) -> Arrival:
        """Start a copy on a stream, or through a ring if the device would block the caller for this host memory."""
        recorded = self.counters.record(lane, unit, phase, source.nbytes)
        if not (self.is_host or not host.nbytes or host.is_pinned()):
            ring = self._staging()[lane == "down"]
            return ring.copy(stream.record_event(), target, source, recorded, after)
        if after is not None:
            after.wait(stream)
        with stream, recorded:
            target.copy_(source, non_blocking=True)
            arrival: Arrival = stream.record_event()
        return arrival

    def after_compute(self, stream: Any) -> None:
        """Make later work on a copy stream wait for all work that the compute stream has now."""
        stream.wait_event(self.current_stream().record_event())

    def _staging(self) -> list[StagingRing]:
        """Return the staging rings, which are made when a copy first needs them."""
        if not self._rings:
            for name in ("up", "down"):
                buffers = [self._staging_buffer(STAGING_NBYTES) for _ in range(STAGING_COUNT)]
                self._rings.append(StagingRing(self.new_stream(), buffers, name))
            log.log(
                logging.INFO if self._host_memory == "pageable" else logging.WARNING,
                "superpipeline: %s: copies go through %d staging buffers of %s in each direction, which costs a thread"
                " and one more copy in host memory",
                self._refusal,
                STAGING_COUNT,
                format_bytes(STAGING_NBYTES),
            )
        return self._rings

    def _staging_buffer(self, nbytes: int) -> Tensor:
        """Allocate a staging buffer, page-locked if possible."""
        try:
            return memory.locked_by_torch(nbytes)
        except RuntimeError:  # then copies block the ring's thread instead of the caller's
            return self.slabs.plain(nbytes)


class Ring:
    """Device memory that device-to-host copies still read: the last few allocations, however far the host runs ahead.

    Before older memory is let go of, its stream waits for the copies; the host waits in `close` alone.
    """

    def __init__(self, depth: int = 2) -> None:
        self._depth = depth
        self._held: collections.deque[tuple[Any, Sequence[Arrival], Any]] = collections.deque()

    def hold(self, memory: Any, copies: Sequence[Arrival], home: Any) -> None:
        """Keep device memory of the stream ``home`` while copies read it; let go of the oldest beyond the depth."""
        self._held.append((memory, copies, home))
        self.let_go(self._depth)

    def let_go(self, left: int = 0) -> None:
        """Let go of all but the last ``left`` allocations; the streams that allocated them wait for the copies."""
        while len(self._held) > left:
            _, copies, stream = self._held.popleft()
            for copied in copies:
                copied.wait(stream)

    def close(self) -> None:
        """Block until all copies are done, and release all memory."""
        while self._held:
            for copied in self._held.popleft()[1]:
                with contextlib.suppress(DiskError):  # which a step with the gradient raises
                    copied.synchronize()


def dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor, made dense in the same order of dimensions where it has gaps or overlaps."""
    return torch.empty_like(tensor, device="meta").stride()
