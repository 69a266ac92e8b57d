"""The only place that knows an accelerator API exists: streams, events, page-locked memory, copies, memory figures.

1. Every backend that ``torch.accelerator`` serves is used through it; the CPU is a device whose streams are always
   idle, and which needs no page-locked memory.
2. Host memory that stays (`slab`) is our own where the device can be told of it (pinned.py): exact, locked once. Other
   devices' comes from torch, and so does what comes and goes (`passing`): torch keeps it for the next time.
3. Once memory could not be locked no more is: it might be refused every time, and slowly. Copies from and to memory
   that is not locked go through a ring of staging buffers (staging.py), whichever memory that is.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.host import host_memory, lock_limit
from ..errors import HostMemoryError, OptionError, SuperpipelineError, UnsupportedError
from ..options import HostMemory, format_bytes
from .layout import aligned
from .pinned import HostAllocator, PageLock
from .staging import Around, Arrival, Copies, StagingRing

log = logging.getLogger(__name__)

STAGING_NBYTES = 16 << 20  # long enough for the link to reach its speed
STAGING_COUNT = 2  # in each direction: one is filled while the other is emptied


class DeviceMemoryError(SuperpipelineError, torch.OutOfMemoryError):
    """The device ran out of memory in the model's own code; torch's message, and what would make room."""


class _IdleEvent:
    """What an idle stream has recorded: always reached."""

    def wait(self, stream: Any) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        return True


class _HostMoment:
    """A moment of an idle stream: now."""

    def __init__(self) -> None:
        self.seconds = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: _HostMoment) -> float:
        return (later.seconds - self.seconds) * 1e3


class _IdleStream(contextlib.nullcontext[None]):
    """The CPU's stream: work is done when it is issued, so every order holds by itself."""

    def record_event(self) -> _IdleEvent:
        return _IdleEvent()

    def wait_event(self, event: _IdleEvent) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


def check_supported(device: torch.device) -> None:
    """Refuses what holds no data of its own, and what is not here."""
    if device.type == "mps":
        raise UnsupportedError(
            "device 'mps' shares its memory with the host, so there is nothing to stream; "
            "use Lightning's default strategy (strategy='auto')"
        )
    if device.type == "meta":
        raise UnsupportedError("device 'meta' holds no data; pass the device that computes, such as 'cuda'")
    if device.type != "cpu" and device.type not in {name.partition(":")[0] for name in available()}:
        raise _refused(str(device))


def available() -> list[str]:
    """Names of the devices that can compute here, accelerators first."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count() if accelerator is not None else 0
    return [f"{accelerator.type}:{index}" for index in range(count) if accelerator is not None] + ["cpu"]


def find(name: str | None = None) -> torch.device:
    """The device of that name; without one the first accelerator, or the CPU where there is none."""
    found = available()
    if name is None:
        return torch.device(found[0])
    try:
        device = torch.device(name)
    except RuntimeError:
        raise _refused(name) from None
    check_supported(device)
    if device.type != "cpu" and f"{device.type}:{device.index or 0}" not in found:
        raise _refused(name)
    return device


def _refused(name: str) -> OptionError:
    return OptionError(argument="device", found=name, allowed="one of " + ", ".join(map(repr, available())))


class CudaPageLock:
    """Host memory that CUDA, or HIP, is told of."""

    PORTABLE = 1  # locked for all devices

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def lock(self, address: int, nbytes: int) -> None:
        # On a thread of its own: CUDA keeps an error for the thread that made it, and torch would raise it there at the
        # next kernel, whatever that is.
        with ThreadPoolExecutor(1, "superpipeline-lock") as thread:
            thread.submit(self._lock, address, nbytes).result()

    def _lock(self, address: int, nbytes: int) -> None:
        cudart = _cudart()
        with torch.cuda.device(self._device):
            _check(cudart, cudart.cudaHostRegister(address, nbytes, self.PORTABLE))

    def unlock(self, address: int) -> None:
        try:
            torch.cuda.synchronize(self._device)  # torch does not know of this memory, and lets it go under its copies
            cudart = _cudart()
            _check(cudart, cudart.cudaHostUnregister(address))
        except Exception as error:  # the device is beyond use, and its process near its end
            log.debug("superpipeline: host memory could not be unlocked: %s", error)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _check(cudart: Any, error: Any) -> None:
    if int(error):
        raise RuntimeError(f"CUDA error {int(error)}: {cudart.cudaGetErrorString(error)}")


def page_lock(device: torch.device) -> PageLock | None:
    """How this device is told of memory that torch did not lock; None where it can not be."""
    return CudaPageLock(device) if device.type == "cuda" else None


class _Rings(NamedTuple):
    """One in each direction."""

    up: StagingRing
    down: StagingRing
    nbytes: int


class Device:
    """A compute device with a stream for copies up, one for copies down, and the caller's own for compute."""

    def __init__(self, device: torch.device | str | int, host_memory: HostMemory = "auto") -> None:
        found = torch.device(device) if not isinstance(device, int) else torch.device(_accelerator_type(), device)
        check_supported(found)
        self.is_host = found.type == "cpu"
        if not self.is_host and found.index is None:
            found = torch.device(found.type, torch.accelerator.current_device_index())  # type: ignore[unreachable]
        self.torch_device = found
        self.up: Any = _IdleStream() if self.is_host else torch.Stream(device=found)
        self.down: Any = _IdleStream() if self.is_host else torch.Stream(device=found)
        self._idle = _IdleStream()
        self._clock: Any = None  # made when it is first needed: an idle stream
        self._host_memory = host_memory
        self._can_pin = not self.is_host and host_memory != "pageable"
        self._refusal = "host_memory='pageable'"  # why there are rings
        self._slabs = HostAllocator()
        self._lock = page_lock(found)
        self._locked_nbytes = 0
        self._largest_slab = 0
        self._rings: _Rings | None = None
        self._streamed_nbytes = 0
        self._streamed_peak = 0
        self.make_room: Callable[[], bool] | None = None  # who streams can free what need not be here

    @property
    def compute(self) -> Any:
        """The stream on which the calling thread launches kernels."""
        return self._idle if self.is_host else torch.accelerator.current_stream(self.torch_device)

    def moment(self, stream: Any) -> Any:
        """An event that knows when the stream arrived there, once ``query()`` says that it has."""
        if self.is_host:
            return _HostMoment()
        event = torch.Event(self.torch_device, enable_timing=True)
        event.record(stream)
        return event

    def both_clocks(self) -> tuple[Any, float]:
        """The same moment as an event and in the host's seconds: nothing else is ever queued on its stream."""
        if self.is_host:
            now = _HostMoment()
            return now, now.seconds
        if self._clock is None:
            self._clock = torch.Stream(device=self.torch_device)
        before = time.perf_counter()
        event = self.moment(self._clock)
        return event, (before + time.perf_counter()) / 2

    # ---- host memory

    def slab(self, nbytes: int) -> Tensor:
        """A flat host buffer that stays, page-locked where the device copies from it by itself (Rule 2)."""
        self._largest_slab = max(self._largest_slab, nbytes)
        if self._can_pin:
            try:
                flat = self._slabs.locked(nbytes, self._lock) if self._lock is not None else _locked_by_torch(nbytes)
                self._locked_nbytes += nbytes
                return flat
            except (RuntimeError, OSError) as error:
                self._lock_no_more(nbytes, error)
        try:
            return self._slabs.plain(nbytes)
        except OSError as error:
            memory = host_memory()
            raise HostMemoryError(
                f"{format_bytes(nbytes)} of host memory are not to be had ({error}): {format_bytes(memory.free)} of "
                f"{format_bytes(memory.total)} are free; train fewer parameters, or close what else runs"
            ) from error

    def passing(self, nbytes: int) -> Tensor:
        """A flat host buffer that comes and goes, page-locked like a slab."""
        if self._can_pin:
            try:
                return _locked_by_torch(nbytes)
            except RuntimeError as error:
                self._lock_no_more(nbytes, error)
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def _lock_no_more(self, nbytes: int, error: Exception) -> None:
        """Rule 3."""
        self._refusal = (
            f"{format_bytes(nbytes)} of host memory could not be page-locked, "
            f"after {format_bytes(self._locked_nbytes)} that were ({error})"
        )
        if self._host_memory == "pinned":
            memory, limit = host_memory(), lock_limit()
            raise HostMemoryError(
                f"host_memory='pinned': {self._refusal}; {format_bytes(memory.free)} of {format_bytes(memory.total)} "
                f"are free, and ulimit -l is {'unlimited' if limit is None else format_bytes(limit)}. Free host memory "
                "or raise the limit; or leave host_memory to 'auto', which copies through a small page-locked ring"
            ) from error
        self._can_pin = False

    @property
    def ring_nbytes(self) -> int:
        """Bytes of staging buffers."""
        return 0 if self._rings is None else self._rings.nbytes

    def _ring(self) -> _Rings:
        """Made when something has to go through them (Rule 3), which is said once."""
        if self._rings is None:
            nbytes = min(STAGING_NBYTES, aligned(max(self._largest_slab, 1)))
            buffers = [self._staging(nbytes) for _ in range(2 * STAGING_COUNT)]
            up = StagingRing(self.up, buffers[:STAGING_COUNT], "up")
            down = StagingRing(self.down, buffers[STAGING_COUNT:], "down")
            self._rings = _Rings(up, down, sum(buffer.nbytes for buffer in buffers))
            log.log(
                logging.INFO if self._host_memory == "pageable" else logging.WARNING,
                "superpipeline: %s: copies go through %d staging buffers of %s in each direction, which costs a thread "
                "and one more copy on the host for all that travels (now at %.1f GB/s)",
                self._refusal,
                STAGING_COUNT,
                format_bytes(nbytes),
                _copy_speed(buffers),
            )
        return self._rings

    def _staging(self, nbytes: int) -> Tensor:
        try:
            return self._slabs.locked(nbytes, self._lock) if self._lock is not None else _locked_by_torch(nbytes)
        except (RuntimeError, OSError):  # slower still, but right: the thread waits where others would
            return self._slabs.plain(nbytes)

    def close(self) -> None:
        """What remains of slabs is ordinary memory; nothing may be under way. Safe twice: the next copy begins anew."""
        rings, self._rings = self._rings, None
        if rings is not None:
            rings.up.close()
            rings.down.close()
        self._slabs.unlock()
        self._locked_nbytes = 0

    # ---- copies

    def send_up(self, copies: Copies, around: Around, moved: Copies = (), after: Arrival | None = None) -> Arrival:
        """Starts copies of bytes to the device, on the up stream.

        Args:
            copies: Where to on the device, and from where on the host.
            around: Entered before the first is queued, left after the last.
            moved: Single tensors that are copied after them, in whatever memory they are.
            after: The copy down that brings the host bytes.
        """
        if not all(self._by_itself(source) for _, source in copies):
            return self._ring().up.up(copies, around, moved, after)
        if after is not None:
            after.wait(self.up)
        with self.up, around:
            for target, source in copies:
                target.copy_(source, non_blocking=True)
            for one, other in moved:
                one.copy_(other)
            arrival: Arrival = self.up.record_event()
        return arrival

    def send_down(self, copies: Copies, around: Around) -> Arrival:
        """Starts copies of bytes to the host, on the down stream."""
        if not all(self._by_itself(target) for target, _ in copies):
            return self._ring().down.down(copies, around)
        with self.down, around:
            for target, source in copies:
                target.copy_(source, non_blocking=True)
            arrival: Arrival = self.down.record_event()
        return arrival

    def _by_itself(self, host: Tensor) -> bool:
        """Whether the device copies from and to this memory while the caller goes on."""
        return self.is_host or host.is_pinned()

    # ---- memory of the device

    def device_bytes(self, nbytes: int) -> torch.Tensor:
        """A flat device buffer of which, for now, only the description exists: its storage is empty."""
        with torch.inference_mode(False):
            flat = torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)
        flat.untyped_storage().resize_(0)
        return flat

    def grow(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Gives an empty storage its memory, on the current stream."""
        storage.resize_(nbytes)
        self.count(nbytes)

    def claim(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """The same; where the device is full, after who streams made room."""
        try:
            self.grow(storage, nbytes)
        except torch.OutOfMemoryError:
            if self.make_room is None or not self.make_room():
                raise
            self.grow(storage, nbytes)

    def shrink(self, storage: torch.UntypedStorage) -> None:
        """Frees a storage's memory, on the current stream; whoever aliases it must not touch it until it grows."""
        self.count(-storage.nbytes())
        storage.resize_(0)

    def count(self, nbytes: int) -> None:
        """Bytes that streaming took, or gave back: the CPU keeps no figures of its own."""
        self._streamed_nbytes += nbytes
        self._streamed_peak = max(self._streamed_peak, self._streamed_nbytes)

    def memory_peak(self) -> int:
        """Most bytes that were allocated on the device; on the CPU, most bytes that streaming held."""
        return self._streamed_peak if self.is_host else self._allocated("peak")

    def lockable(self, most: int, block: int = 64 << 20) -> int | None:
        """How much of so many bytes could be page-locked, tried block by block; None where nothing is page-locked."""
        if self.is_host:
            return None
        blocks: list[torch.Tensor] = []
        with contextlib.suppress(RuntimeError):
            while len(blocks) * block < most:
                blocks.append(torch.empty(block, dtype=torch.uint8, device="cpu", pin_memory=True))
        return min(len(blocks) * block, most)

    @property
    def name(self) -> str:
        """As its vendor calls it, where that is known."""
        module = torch.get_device_module(self.torch_device)
        known = getattr(module, "get_device_name", None)
        return str(known(self.torch_device)) if known is not None else self.torch_device.type

    def memory(self) -> tuple[int, int]:
        """Bytes that are free, cached ones of the allocator included, and bytes that there are."""
        if self.is_host:
            host = host_memory()
            return host.free, host.total
        total = torch.accelerator.get_memory_info(self.torch_device)[1]
        return max(0, self.memory_capacity() - torch.accelerator.memory_allocated(self.torch_device)), total

    def memory_allocated(self) -> int:
        """Bytes in use now; asked at every visit, and ten times cheaper without the other figures."""
        if self.is_host:
            return self._streamed_nbytes
        return self._allocated("current")

    def _allocated(self, when: str) -> int:
        figures = torch._C._accelerator_getDeviceStats(self.torch_device.index)
        return int(figures["allocated_bytes"]["all"][when])

    def memory_capacity(self) -> int:
        """Bytes that this process has or could have."""
        if self.is_host:
            return self.memory()[0]
        free, total = torch.accelerator.get_memory_info(self.torch_device)
        return min(free + torch.accelerator.memory_reserved(self.torch_device), self._limit(total))

    def _limit(self, total: int) -> int:
        """Bytes of so many that this process's allocator may take."""
        share = getattr(torch.get_device_module(self.torch_device), "get_per_process_memory_fraction", None)
        with contextlib.suppress(RuntimeError):  # of an allocator that knows no limit
            return total if share is None else int(total * share(self.torch_device))
        return total

    def memory_retries(self) -> int:
        """How often the allocator had to give what it keeps for later back to the device."""
        if self.is_host:
            return 0
        return int(torch.accelerator.memory_stats(self.torch_device).get("num_alloc_retries", 0))

    def reset_memory_peak(self) -> None:
        """The peak counts from here on."""
        self._streamed_peak = self._streamed_nbytes
        if not self.is_host:
            torch.accelerator.reset_peak_memory_stats(self.torch_device)

    def allocator_peaks(self) -> dict[str, int | None]:
        """Most bytes that were given out, and that were held for that; None on the CPU, which keeps no figures."""
        if self.is_host:
            return {"allocated_peak": None, "reserved_peak": None}
        return {
            "allocated_peak": torch.accelerator.max_memory_allocated(self.torch_device),
            "reserved_peak": torch.accelerator.max_memory_reserved(self.torch_device),
        }

    def free_cached(self) -> None:
        """Gives back what the allocator holds and nobody uses."""
        if not self.is_host:
            torch.accelerator.empty_cache()

    def limit_memory(self, nbytes: int) -> None:
        """From here on this process's allocator is refused more than that."""
        limit = getattr(torch.get_device_module(self.torch_device), "set_per_process_memory_fraction", None)
        if limit is None:
            raise UnsupportedError(f"the allocator of device '{self.torch_device.type}' knows no limit")
        limit(min(1.0, nbytes / self.memory()[1]), self.torch_device)

    def synchronize(self) -> None:
        """The host waits for all that is queued on the device."""
        if not self.is_host:
            torch.accelerator.synchronize(self.torch_device)


# What torch chooses kernels by, and contexts set for a while: how it is asked for, and how it is set.
_CHOICES: list[tuple[Callable[[], Any], Callable[[Any], object]]] = [
    (torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
    (torch._C._get_mem_efficient_sdp_enabled, torch._C._set_sdp_use_mem_efficient),
    (torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
    (torch._C._get_cudnn_sdp_enabled, torch._C._set_sdp_use_cudnn),
    (torch._C._get_overrideable_sdp_enabled, torch._C._set_sdp_use_overrideable),
    (torch._C._get_sdp_priority_order, torch._C._set_sdp_priority_order),
    (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    (torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark),
    (torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic),
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
]


def kernel_choices() -> list[Any]:
    """What kernels are chosen by now (`torch.nn.attention.sdpa_kernel`, `torch.backends.cudnn.flags`)."""
    return [ask() for ask, _ in _CHOICES]


def choose_kernels(choices: list[Any]) -> None:
    """They are chosen by this from now on."""
    for (ask, choose), choice in zip(_CHOICES, choices, strict=True):
        if ask() != choice:
            choose(choice)


def _locked_by_torch(nbytes: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def _copy_speed(buffers: list[Tensor]) -> float:
    """Of the host between two buffers, in GB/s."""
    begin = time.perf_counter()
    buffers[0].copy_(buffers[1])
    return buffers[0].nbytes / 1e9 / max(time.perf_counter() - begin, 1e-9)


def _accelerator_type() -> str:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        raise UnsupportedError("a device index was given, but this machine has no accelerator; pass 'cpu'")
    return accelerator.type
