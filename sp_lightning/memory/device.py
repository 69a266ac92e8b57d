"""Streams, events, page-locked memory, copies and memory figures: the only file that knows an accelerator's API.

1. Every backend that ``torch.accelerator`` serves is used through it. The CPU is a device whose streams are always
   idle, and which needs no page-locked memory.
2. Host memory that stays (`slab`) is our own if the device can register it (pinned.py): exact, locked once. For other
   devices torch allocates it. Host memory that comes and goes (`passing`) is always torch's, which caches it.
3. Once memory could not be locked, no more is: each attempt might be refused, and slowly. Every copy from or to memory
   that is not locked goes through a ring of staging buffers (staging.py).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..compat.kernels import memory_figures
from ..errors import HostMemoryError, SuperpipelineError, UnsupportedError
from ..host import malloc
from ..host.device import check_supported
from ..host.machine import host_memory, lock_limit
from ..host.unit_numbers import aligned
from ..options import HostMemory, format_bytes
from .pinned import HostAllocator, PageLock
from .staging import Around, Arrival, Copies, StagingRing

log = logging.getLogger(__name__)

_device_of: Any = Tensor.device.__get__  # whatever the tensor's class answers

STAGING_NBYTES = 16 << 20  # long enough for the link to reach its speed
STAGING_COUNT = 2  # in each direction: one is filled while the other is emptied


def numbered(device: torch.device) -> torch.device:
    """Return the device with its number, or the current one's; the CPU without, as tensors there show it."""
    if device.type == "cpu":
        return torch.device("cpu")
    return device if device.index is not None else torch.device(device.type, torch.accelerator.current_device_index())


class DeviceMemoryError(SuperpipelineError, torch.OutOfMemoryError):
    """The device ran out of memory in the model's own code: torch's message, with options that would fit."""


class _IdleEvent:
    """An event of an idle stream: it has always happened."""

    def wait(self, stream: Any) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        return True


class _HostMoment:
    """A timed event of an idle stream: it happens when it is made."""

    def __init__(self) -> None:
        self.seconds = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: _HostMoment) -> float:
        return (later.seconds - self.seconds) * 1e3


class _IdleStream(contextlib.nullcontext[None]):
    """The CPU's stream: work is done when it is issued, so every order is kept without waiting."""

    def record_event(self) -> _IdleEvent:
        return _IdleEvent()

    def wait_event(self, event: _IdleEvent) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""


class CudaPageLock:
    """Page locks by CUDA or HIP, which then copy from and to that host memory by themselves."""

    PORTABLE = 1  # locked for all devices

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def lock(self, address: int, nbytes: int) -> None:
        # On a thread of its own: CUDA stores an error for the thread that caused it, and torch would raise it there at
        # the next kernel.
        with ThreadPoolExecutor(1, "superpipeline-lock") as thread:
            thread.submit(self._lock, address, nbytes).result()

    def _lock(self, address: int, nbytes: int) -> None:
        cudart = _cudart()
        with torch.cuda.device(self._device):
            _check(cudart, cudart.cudaHostRegister(address, nbytes, self.PORTABLE))

    def unlock(self, address: int) -> None:
        try:
            torch.cuda.synchronize(self._device)  # torch does not track this memory: its copies may still run
            cudart = _cudart()
            _check(cudart, cudart.cudaHostUnregister(address))
        except Exception as error:  # the device is unusable, and the process about to end
            log.debug("superpipeline: host memory could not be unlocked: %s", error)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _check(cudart: Any, error: Any) -> None:
    if int(error):
        raise RuntimeError(f"CUDA error {int(error)}: {cudart.cudaGetErrorString(error)}")


def page_lock(device: torch.device) -> PageLock | None:
    """Return the page lock of this device; None if it cannot register memory that torch did not allocate."""
    return CudaPageLock(device) if device.type == "cuda" else None


@contextlib.contextmanager
def _in_order(own: Any, stream: Any) -> Iterator[None]:
    stream.wait_event(own.record_event())
    try:
        with stream:
            yield
    finally:
        own.wait_event(stream.record_event())


class _Rings(NamedTuple):
    """The staging rings of a device, one in each direction."""

    up: StagingRing
    down: StagingRing
    nbytes: int


class Device:
    """A compute device with a stream for copies up, one for copies down, and the caller's stream for compute."""

    function_modes = dispatch_modes = 0  # torch's modes that make this device, if it is not a real one
    is_real = True  # whether it is of the kind that it says, and other ranks have such a device too

    def __init__(self, device: torch.device | str | int, host_memory: HostMemory = "auto") -> None:
        found = torch.device(device) if not isinstance(device, int) else torch.device(_accelerator_type(), device)
        check_supported(found)
        self.is_host = found.type == "cpu"
        self.torch_device = found = numbered(found)
        self.up, self.down = self.new_stream(), self.new_stream()
        # Says whether the calling thread's work is recorded in a graph, if this device has such; asked at each visit.
        self.is_capturing = torch.cuda.is_current_stream_capturing if found.type == "cuda" else None
        self._idle = _IdleStream()
        self._clock: Any = None  # an idle stream, made when it is first needed
        self._host_memory = host_memory
        self._can_pin = not self.is_host and host_memory != "pageable"
        self._refusal = "host_memory='pageable'"  # why memory is not locked
        self._slabs = HostAllocator()
        self._lock = page_lock(found)
        self._locked_nbytes = 0
        self._largest_slab = 0
        self._rings: _Rings | None = None
        self._streamed_nbytes = 0
        self._streamed_peak = 0
        self.make_room: Callable[[], bool] | None = None  # frees units that need not be resident; whether it freed any

    @property
    def compute(self) -> Any:
        """The stream on which the calling thread launches kernels."""
        return self._idle if self.is_host else torch.accelerator.current_stream(self.torch_device)

    def on(self, stream: Any) -> AbstractContextManager[None]:
        """Return a context in which the calling thread launches kernels on this stream, in order with its own one."""
        return contextlib.nullcontext() if stream == (own := self.compute) else _in_order(own, stream)

    def moment(self, stream: Any) -> Any:
        """Record a timed event on the stream; it has its time once its ``query()`` is True."""
        if self.is_host:
            return _HostMoment()
        event = torch.Event(self.torch_device, enable_timing=True)
        event.record(stream)
        return event

    def new_stream(self) -> Any:
        """Make a stream of the device."""
        return _IdleStream() if self.is_host else torch.Stream(device=self.torch_device)

    def both_clocks(self) -> tuple[Any, float]:
        """Read both clocks at one moment: an event, on a stream that is always idle, and the host's seconds."""
        if self.is_host:
            now = _HostMoment()
            return now, now.seconds
        if self._clock is None:
            self._clock = self.new_stream()
        before = time.perf_counter()
        event = self.moment(self._clock)
        return event, (before + time.perf_counter()) / 2

    # ---- host memory

    def slab(self, nbytes: int) -> Tensor:
        """Allocate a flat host buffer that stays, page-locked if that is possible (Rules 2 and 3)."""
        self._largest_slab = max(self._largest_slab, nbytes)
        if self._can_pin:
            try:
                flat = self._slabs.locked(nbytes, self._lock) if self._lock is not None else _locked_by_torch(nbytes)
                self._locked_nbytes += nbytes
                return flat
            except (RuntimeError, OSError) as error:
                self._stop_locking(nbytes, error)
        try:
            return self._slabs.plain(nbytes)
        except OSError as error:
            memory = host_memory()
            raise HostMemoryError(
                f"cannot allocate {format_bytes(nbytes)} of host memory ({error}): {format_bytes(memory.free)} of "
                f"{format_bytes(memory.total)} are free; train fewer parameters, or close other programs"
            ) from error

    def lock(self, flat: Tensor) -> Callable[[], object] | None:
        """Page-lock memory of the ranks (Rule 3), if this device can; return what unlocks it before it is unmapped."""
        self._largest_slab = max(self._largest_slab, flat.nbytes)
        if self._can_pin and self._lock is not None:
            try:
                unlock = self._slabs.lock(flat, self._lock)
                self._locked_nbytes += flat.nbytes
                return unlock
            except (RuntimeError, OSError) as error:
                self._stop_locking(flat.nbytes, error)
        return None

    def passing(self, nbytes: int) -> Tensor:
        """Allocate a flat host buffer that comes and goes, page-locked if that is possible (Rules 2 and 3)."""
        if self._can_pin:
            try:
                return _locked_by_torch(nbytes)
            except RuntimeError as error:
                self._stop_locking(nbytes, error)
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Cast a weight on the device."""
        return weight.to(dtype)

    def copied_to_host(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor in host memory; wait for its bytes."""
        return tensor.to("cpu", copy=True)

    def host_empty(self, like: Tensor) -> Tensor:
        """Allocate a tensor in host memory with the type, the shape and the strides of ``like``.

        A large one is mapped by itself: the system has its memory again as soon as it is dropped (malloc.py).
        """
        with torch.inference_mode(False), torch.no_grad():
            nbytes = (
                torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
                .untyped_storage()
                .nbytes()
            )
            large = nbytes >= malloc.MIB
            flat = self._slabs.plain(nbytes) if large else torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            empty = torch.empty(0, dtype=like.dtype, device="cpu")
            return empty.set_(flat.untyped_storage(), 0, like.shape, like.stride())

    def _stop_locking(self, nbytes: int, error: Exception) -> None:
        """Lock no more memory (Rule 3), which is an error if the user requires it."""
        self._refusal = (
            f"{format_bytes(nbytes)} of host memory could not be page-locked after "
            f"{format_bytes(self._locked_nbytes)} were ({error})"
        )
        if self._host_memory == "pinned":
            memory, limit = host_memory(), lock_limit()
            raise HostMemoryError(
                f"host_memory='pinned': {self._refusal}; {format_bytes(memory.free)} of {format_bytes(memory.total)} "
                f"are free, and ulimit -l is {'unlimited' if limit is None else format_bytes(limit)}. Free host memory "
                "or raise the limit; or set host_memory='auto', which copies through a small page-locked ring"
            ) from error
        self._can_pin = False

    @property
    def ring_nbytes(self) -> int:
        """Bytes of all staging buffers."""
        return 0 if self._rings is None else self._rings.nbytes

    def _ring(self) -> _Rings:
        """Return the staging rings, which are made, and logged, when a copy first needs them (Rule 3)."""
        if self._rings is None:
            nbytes = min(STAGING_NBYTES, aligned(max(self._largest_slab, 1)))
            buffers = [self.staging(nbytes) for _ in range(2 * STAGING_COUNT)]
            up = StagingRing(self.new_stream(), buffers[:STAGING_COUNT], "up")
            down = StagingRing(self.new_stream(), buffers[STAGING_COUNT:], "down")
            self._rings = _Rings(up, down, sum(buffer.nbytes for buffer in buffers))
            log.log(
                logging.INFO if self._host_memory == "pageable" else logging.WARNING,
                "superpipeline: %s: copies go through %d staging buffers of %s in each direction, which costs a thread "
                "and one more copy of all bytes on the host (now at %.1f GB/s)",
                self._refusal,
                STAGING_COUNT,
                format_bytes(nbytes),
                _copy_speed(buffers),
            )
        return self._rings

    def staging(self, nbytes: int) -> Tensor:
        try:
            return self._slabs.locked(nbytes, self._lock) if self._lock is not None else _locked_by_torch(nbytes)
        except (RuntimeError, OSError):  # slower still, but correct: the ring's thread waits for the device's copies
            return self._slabs.plain(nbytes)

    def close(self) -> None:
        """Unlock all slabs, which remain as ordinary memory, and end the staging rings; no copy may be under way.

        Safe twice; the next copy makes new rings if it needs them.
        """
        rings, self._rings = self._rings, None
        if rings is not None:
            rings.up.close()
            rings.down.close()
        self._slabs.unlock()
        self._locked_nbytes = 0

    # ---- copies

    def send_up(self, copies: Copies, around: Around, uncut: Copies = (), after: Arrival | None = None) -> Arrival:
        """Start copies of bytes to the device, on the up stream.

        Args:
            copies: Pairs of a target on the device and a source on the host.
            around: Entered before the first copy is queued, left after the last.
            uncut: Pairs of tensors of equal shape, in any memory, that are copied after the others.
            after: The copy down that brings the host bytes.
        """
        if not all(self._by_itself(source) for _, source in copies):
            return self._ring().up.up(self.up.record_event(), copies, around, uncut, after)
        if after is not None:
            after.wait(self.up)
        with self.up, around:
            for target, source in copies:
                target.copy_(source, non_blocking=True)
            for target, source in uncut:
                target.copy_(source)
            arrival: Arrival = self.up.record_event()
        return arrival

    def send_down(self, copies: Copies, around: Around) -> Arrival:
        """Start copies of bytes to the host, on the down stream."""
        if not all(self._by_itself(target) for target, _ in copies):
            return self._ring().down.down(self.down.record_event(), copies, around)
        with self.down, around:
            for target, source in copies:
                target.copy_(source, non_blocking=True)
            arrival: Arrival = self.down.record_event()
        return arrival

    def finish_copies(self) -> None:
        """Wait for all copies that were started."""
        for ring in () if self._rings is None else (self._rings.up, self._rings.down):
            ring.finish()
        self.up.synchronize()
        self.down.synchronize()

    def _by_itself(self, host: Tensor) -> bool:
        """Whether the device copies from and to this host memory without blocking the caller."""
        return self.is_host or host.is_pinned()

    # ---- memory of the device

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is on this device."""
        return bool(_device_of(tensor) == self.torch_device)

    def device_bytes(self, nbytes: int) -> torch.Tensor:
        """Make a flat device buffer that has no memory until its storage grows (`grow`)."""
        with torch.inference_mode(False):
            flat = torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)
        flat.untyped_storage().resize_(0)
        return flat

    def grow(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Allocate an empty storage's memory, on the current stream."""
        storage.resize_(nbytes)
        self.count(nbytes)

    def claim(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Allocate an empty storage's memory as `grow` does; if the device is full, evict units and try again."""
        try:
            self.grow(storage, nbytes)
        except torch.OutOfMemoryError:
            if self.make_room is None or not self.make_room():
                raise
            self.grow(storage, nbytes)

    def shrink(self, storage: torch.UntypedStorage) -> None:
        """Free a storage's memory, on the current stream; its aliases must not be used until it grows again."""
        self.count(-storage.nbytes())
        storage.resize_(0)

    def count(self, nbytes: int) -> None:
        """Count device bytes that streaming allocated, or freed if negative: the CPU has no figures of its own."""
        self._streamed_nbytes += nbytes
        self._streamed_peak = max(self._streamed_peak, self._streamed_nbytes)

    def memory_peak(self) -> int:
        """Return the peak of the bytes allocated on the device; on the CPU, of those that streaming allocated."""
        return self._streamed_peak if self.is_host else self._allocated("peak")

    def lockable(self, most: int, block: int = 64 << 20) -> int | None:
        """Try how many of ``most`` bytes can be page-locked, block by block; None where nothing is page-locked."""
        if self.is_host:
            return None
        blocks: list[torch.Tensor] = []
        with contextlib.suppress(RuntimeError):
            while len(blocks) * block < most:
                blocks.append(torch.empty(block, dtype=torch.uint8, device="cpu", pin_memory=True))
        return min(len(blocks) * block, most)

    @property
    def name(self) -> str:
        """The vendor's name of the device if that is known, otherwise its type."""
        module = torch.get_device_module(self.torch_device)
        known = getattr(module, "get_device_name", None)
        return str(known(self.torch_device)) if known is not None else self.torch_device.type

    def memory(self) -> tuple[int, int]:
        """Return the free bytes, the allocator's cached ones included, and the total."""
        if self.is_host:
            host = host_memory()
            return host.free, host.total
        total = torch.accelerator.get_memory_info(self.torch_device)[1]
        return max(0, self.memory_capacity() - torch.accelerator.memory_allocated(self.torch_device)), total

    def memory_allocated(self) -> int:
        """Return the bytes in use now: called at every visit, and ten times cheaper without the other figures."""
        if self.is_host:
            return self._streamed_nbytes
        return self._allocated("current")

    def _allocated(self, when: str) -> int:
        figures = memory_figures(self.torch_device.index)
        return int(figures["allocated_bytes"]["all"][when])

    def memory_capacity(self) -> int:
        """Return how many bytes this process has or could allocate."""
        if self.is_host:
            return self.memory()[0]
        free, total = torch.accelerator.get_memory_info(self.torch_device)
        return min(free + torch.accelerator.memory_reserved(self.torch_device), self._limit(total))

    def _limit(self, total: int) -> int:
        """Return how many of ``total`` bytes this process's allocator may take."""
        share = getattr(torch.get_device_module(self.torch_device), "get_per_process_memory_fraction", None)
        with contextlib.suppress(RuntimeError):  # of an allocator without limits
            return total if share is None else int(total * share(self.torch_device))
        return total

    def memory_retries(self) -> int:
        """Return how often the allocator had to return its cached memory to the device and try again."""
        if self.is_host:
            return 0
        return int(torch.accelerator.memory_stats(self.torch_device).get("num_alloc_retries", 0))

    def reset_memory_peak(self) -> None:
        """Restart the peak of allocated bytes from what is allocated now."""
        self._streamed_peak = self._streamed_nbytes
        if not self.is_host:
            torch.accelerator.reset_peak_memory_stats(self.torch_device)

    def free_cached(self) -> None:
        """Return the allocator's unused memory to the device."""
        if not self.is_host:
            torch.accelerator.empty_cache()

    def synchronize(self) -> None:
        """Wait for all work queued on the device."""
        if not self.is_host:
            torch.accelerator.synchronize(self.torch_device)


def _locked_by_torch(nbytes: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def _copy_speed(buffers: list[Tensor]) -> float:
    """Measure the speed of one copy between two host buffers, in GB/s."""
    begin = time.perf_counter()
    buffers[0].copy_(buffers[1])
    return buffers[0].nbytes / 1e9 / max(time.perf_counter() - begin, 1e-9)


def _accelerator_type() -> str:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        raise UnsupportedError("a device index was given, but this machine has no accelerator; pass 'cpu'")
    return accelerator.type
