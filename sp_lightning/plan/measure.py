"""Measure the machine at hand: its device, its link, and its host's memory.

1. Arrays have at least four times the bytes of the last cache; smaller ones measure the cache.
2. Every rate is measured twice. Two that differ by more than `NOISE` are refused: something else uses the machine.
3. Work is queued until launches and the clock's resolution are negligible, and both ends wait for the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.host import cache_nbytes, host_memory
from ..errors import HostMemoryError, MeasurementError
from ..memory.device import Device
from ..options import format_both
from .machines import REACHED, Machine

NOISE = 0.15
CACHES = 4
SHORTEST_S = 0.05  # of one measurement
BESIDE = 8  # passes of the cores beside copies


class Block(NamedTuple):
    """One block of the model that is planned for, to be timed on the device, and the work that a plan counts for it."""

    run: Callable[[], object]
    flops: float
    moved_nbytes: float


def here(device: torch.device | str | int, dtype: torch.dtype = torch.bfloat16, block: Block | None = None) -> Machine:
    """Measure the machine at hand; this takes about two seconds, and refuses to guess on one that is busy.

    Args:
        device: The device that computes.
        dtype: The type in which it computes.
        block: Its time replaces that of large products.
    """
    with _opened(device) as at:
        nbytes = CACHES * cache_nbytes()
        need, free = 5 * nbytes, host_memory().free
        if need > free:
            needs, available = format_both(need, free)
            raise HostMemoryError(f"measuring takes {needs} of host memory, but {available} are free: free some first")
        cores = _Cores(nbytes)
        cores_rate = _twice("the host's memory", lambda: cores.nbytes / _seconds(at, cores.run))
        copies = _Copies(at, min(nbytes, at.memory()[0] // 8))
        up = _twice("copies to the device", lambda: copies.nbytes / _seconds(at, copies.up))
        down = _twice("copies to the host", lambda: copies.nbytes / _seconds(at, copies.down))
        duplex, together = 1.0, cores_rate
        if not at.is_host:  # where copies run beside other work
            both = _twice("copies both ways", lambda: copies.nbytes / _seconds(at, copies.both))
            duplex = min(1.0, both / min(up, down))
            together = _twice("copies beside the cores", lambda: _together(at, copies, cores))
        device_rate = cores_rate if at.is_host else _twice("the device's memory", lambda: _device_memory(at))
        products = (lambda: _products(at, dtype)) if block is None else (lambda: _block(at, block, device_rate))
        return Machine(
            name="here",
            flops_per_s=_twice("products", products),
            device_bytes_per_s=device_rate,
            up_bytes_per_s=up,
            down_bytes_per_s=down,
            duplex=duplex,
            host_bytes_per_s=max(together, cores_rate),
            cores_bytes_per_s=cores_rate,
            device_nbytes=at.memory()[1],
            host_nbytes=host_memory().total,
        )


@contextmanager
def _opened(device: torch.device | str | int) -> Iterator[Device]:
    at = Device(device)
    try:
        yield at
    finally:
        at.close()
        at.free_cached()


def _twice(what: str, measure: Callable[[], float]) -> float:
    """Measure a rate twice and return the better one (Rule 2)."""
    one, two = measure(), measure()
    if abs(one - two) > NOISE * min(one, two):
        raise MeasurementError(
            f"{what} reached {one:.3g} and then {two:.3g} a second, which differ by more than {NOISE:.0%}: stop what "
            "else runs on this machine and measure again, or plan for a listed machine"
        )
    return max(one, two)


def _seconds(at: Device, work: Callable[[], object]) -> float:
    """Measure the seconds of one call of work that goes on by itself (Rule 3)."""
    calls, taken = 1, _timed(at, work, 1)  # which is not counted: it warms up
    while taken < SHORTEST_S:
        calls = max(2 * calls, round(calls * SHORTEST_S / max(taken, 1e-6)))
        taken = _timed(at, work, calls)
    return min(taken, *(_timed(at, work, calls) for _ in range(3))) / calls


def _timed(at: Device, work: Callable[[], object], calls: int) -> float:
    at.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        work()
    at.synchronize()
    return time.perf_counter() - begin


class _Cores:
    """A pass of torch's threads over two arrays."""

    def __init__(self, nbytes: int) -> None:
        self._one, self._two = (torch.zeros(nbytes // 8, device="cpu") for _ in range(2))
        self.nbytes = 3 * self._one.nbytes  # both are read, one is written

    def run(self) -> None:
        self._one.add_(self._two)


class _Copies:
    """Copies of this many bytes to the device and to the host, each on a stream of its own."""

    def __init__(self, at: Device, nbytes: int) -> None:
        self.nbytes, self._at = nbytes, at
        self._host = [at.slab(nbytes).fill_(1) for _ in range(2)]
        self._device = [torch.zeros(nbytes, dtype=torch.uint8, device=at.torch_device) for _ in range(2)]
        at.synchronize()  # the streams of the copies do not wait for the zeros

    def up(self) -> None:
        with self._at.up:
            self._device[0].copy_(self._host[0], non_blocking=True)

    def down(self) -> None:
        with self._at.down:
            self._host[1].copy_(self._device[1], non_blocking=True)

    def both(self) -> None:
        self.up()
        self.down()


def _together(at: Device, copies: _Copies, cores: _Cores) -> float:
    """Measure the bytes of host memory that copies both ways and the cores move a second at the same time."""
    rounds = 1 + round(BESIDE * _timed(at, cores.run, 1) / _timed(at, copies.both, 1))
    begin, passes = time.perf_counter(), 0
    for _ in range(rounds):
        copies.both()
    ends = [at.moment(at.up), at.moment(at.down)]
    while not all(end.query() for end in ends):
        cores.run()
        passes += 1
    at.synchronize()
    moved = passes * cores.nbytes + rounds * copies.nbytes * (1 + REACHED.down_cost)
    return moved / (time.perf_counter() - begin)


def _device_memory(at: Device) -> float:
    values = torch.zeros(at.memory()[0] // 64, device=at.torch_device)  # a sixteenth of what is free
    return 2 * values.nbytes / _seconds(at, lambda: values.add_(1))


def _products(at: Device, dtype: torch.dtype) -> float:
    """Measure the FLOP per second of the products of an MLP, as wide as the device needs to be busy."""
    width, work = 128, _mlp(at, dtype, 128)
    while _timed(at, work, 2) < SHORTEST_S / 5 and 40 * (2 * width) ** 2 * dtype.itemsize < at.memory()[0]:
        width, work = 2 * width, _mlp(at, dtype, 2 * width)
    return 16 * width**3 / _seconds(at, work)


def _mlp(at: Device, dtype: torch.dtype, width: int) -> Callable[[], Tensor]:
    shapes = (width, width), (width, 4 * width), (4 * width, width)
    tokens, wide, narrow = (_noise(at, shape, dtype) for shape in shapes)
    return lambda: tokens @ wide @ narrow


def _noise(at: Device, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Make a tensor of random numbers, with which some devices are slower than with zeros."""
    line = torch.randn(shape[1], device="cpu", generator=torch.Generator().manual_seed(0)) / shape[1] ** 0.5
    return torch.ones(shape, device=at.torch_device, dtype=dtype).mul_(line.to(at.torch_device, dtype))


def _block(at: Device, block: Block, device_bytes_per_s: float) -> float:
    """Measure the FLOP per second with which a plan takes a block's time."""
    seconds = _seconds(at, block.run)
    products = max(seconds - block.moved_nbytes / device_bytes_per_s, seconds / 4)
    return block.flops / products / REACHED.matrix
