"""The only place that knows an accelerator API exists: streams, events, pinned memory, memory figures.

Every backend that ``torch.accelerator`` serves is used through it; the CPU is a device whose streams are always idle.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Any

import torch

from .errors import OptionError, UnsupportedError
from .host import host_memory

log = logging.getLogger(__name__)


class _IdleEvent:
    """What an idle stream has recorded: always reached."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


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
    """Refuses what holds no data of its own."""
    if device.type == "mps":
        raise UnsupportedError(
            "device 'mps' shares its memory with the host, so there is nothing to stream; "
            "use Lightning's default strategy (strategy='auto')"
        )
    if device.type == "meta":
        raise UnsupportedError("device 'meta' holds no data; pass the device that computes, such as 'cuda'")


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
    refusal = OptionError(argument="device", found=name, allowed="one of " + ", ".join(map(repr, found)))
    try:
        device = torch.device(name)
    except RuntimeError:
        raise refusal from None
    check_supported(device)
    if device.type != "cpu" and f"{device.type}:{device.index or 0}" not in found:
        raise refusal
    return device


class Device:
    """A compute device with a stream for copies up, one for copies down, and the caller's own for compute."""

    def __init__(self, device: torch.device | str | int) -> None:
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
        self._can_pin = not self.is_host
        self._streamed_nbytes = 0
        self._streamed_peak = 0

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

    # ---- memory

    def host_bytes(self, nbytes: int, pinned: bool = True) -> torch.Tensor:
        """A flat host buffer, page-locked where the device copies from it asynchronously."""
        with torch.inference_mode(False):
            if pinned and self._can_pin:
                try:
                    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
                except RuntimeError as error:
                    self._can_pin = False  # asked again, it might refuse every time, and slowly
                    log.warning(
                        "superpipeline: %d bytes of host memory could not be page-locked (%s); "
                        "copies go through pageable memory from here on: slower, and not beside compute",
                        nbytes,
                        error,
                    )
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

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
        return self._streamed_peak if self.is_host else torch.accelerator.max_memory_allocated(self.torch_device)

    def lockable(self, most: int, block: int = 64 << 20) -> int | None:
        """How much of so many bytes could be page-locked, tried block by block; None where nothing is page-locked."""
        if self.is_host:
            return None
        blocks: list[torch.Tensor] = []
        with contextlib.suppress(RuntimeError):
            while len(blocks) * block < most:
                blocks.append(torch.empty(block, dtype=torch.uint8, pin_memory=True))
        return len(blocks) * block

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
        free, total = torch.accelerator.get_memory_info(self.torch_device)
        unused = torch.accelerator.memory_reserved(self.torch_device) - torch.accelerator.memory_allocated(
            self.torch_device
        )
        return min(free + unused, total), total

    def memory_headroom(self) -> int | None:
        """Bytes that were free even when most was allocated; None where the device is the host."""
        if self.is_host:
            return None
        free, total = torch.accelerator.get_memory_info(self.torch_device)
        reserved = torch.accelerator.memory_reserved(self.torch_device)
        return min(free + reserved, total) - torch.accelerator.max_memory_allocated(self.torch_device)

    def reset_memory_peak(self) -> None:
        """The peak counts from here on."""
        self._streamed_peak = self._streamed_nbytes
        if not self.is_host:
            torch.accelerator.reset_peak_memory_stats(self.torch_device)

    def synchronize(self) -> None:
        """The host waits for all that is queued on the device."""
        if not self.is_host:
            torch.accelerator.synchronize(self.torch_device)


def _accelerator_type() -> str:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        raise UnsupportedError("a device index was given, but this machine has no accelerator; pass 'cpu'")
    return accelerator.type
