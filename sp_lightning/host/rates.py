"""Measure the machine at hand: its device, its link, and its host's memory.

1. Arrays are larger than the last caches; smaller ones measure the cache.
2. Every rate is measured twice. Two that differ by more than `NOISE` are refused: something else uses the machine.
3. Work is queued until launches and the clock's resolution are negligible, and both ends wait for the device.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import MeasurementError
from .device import Device
from .machine import host_memory

NOISE = 0.15  # by which two measurements may differ
ARRAYS = 1 << 30  # bytes of arrays in host memory, at most an eighth of what is free
SHORTEST_S = 0.05  # seconds of the shortest measurement
BESIDE = 8  # passes of the cores over their arrays while copies run


def measured(device: torch.device | str, dtype: torch.dtype, down_cost: float = 1.0) -> dict[str, Any]:
    """Measure this machine, in about two seconds; raise MeasurementError if other work disturbs that.

    The figures are bytes, and bytes or FLOP a second, by the names that `sp_lightning.plan.machines.Machine` has.

    Args:
        device: The device that computes.
        dtype: The type in which it computes.
        down_cost: Bytes of host memory that a byte from the device moves.
    """
    with contextlib.closing(Device(device)) as at:
        memory = host_memory()
        nbytes = min(ARRAYS, memory.free // 8)
        one, two = (torch.zeros(nbytes // 8, device="cpu") for _ in range(2))

        def on_cores() -> None:
            """Add one array in host memory to another, on the cores."""
            one.add_(two)  # both are read, one is written

        touched = 3 * one.nbytes
        cores = _twice("the host's memory", lambda: touched / _seconds(at, on_cores))
        copies = _Copies(at, min(nbytes, at.memory_capacity() // 8))
        up = _twice("copies to the device", lambda: copies.nbytes / _seconds(at, copies.up))
        down = _twice("copies to the host", lambda: copies.nbytes / _seconds(at, copies.down))
        duplex, together, device_rate, total = 1.0, cores, cores, memory.total
        if not at.is_host:  # where copies run beside other work
            both = _twice("copies both ways", lambda: copies.nbytes / _seconds(at, copies.both))
            duplex = min(1.0, both / min(up, down))
            together = _twice("copies beside the cores", lambda: _together(at, copies, on_cores, touched, down_cost))
            values = torch.zeros(at.memory_capacity() // 64, device=at.torch_device)  # a sixteenth of what is free
            moved = 2 * values.nbytes
            device_rate = _twice("the device's memory", lambda: moved / _seconds(at, lambda: values.add_(1)))
            total = torch.accelerator.get_memory_info(at.torch_device)[1]
        return {
            "flops_per_s": _products(at, dtype),
            "device_bytes_per_s": device_rate,
            "up_bytes_per_s": up,
            "down_bytes_per_s": down,
            "duplex": duplex,  # rate of each direction while both run, as a share of the slower one's alone
            "host_bytes_per_s": max(together, cores),  # by the cores and copies together
            "cores_bytes_per_s": cores,  # by the cores alone
            "device_nbytes": total,
            "host_nbytes": memory.total,
        }


def _twice(what: str, rate: Callable[[], float]) -> float:
    """Measure a rate twice, and return the higher one; raise MeasurementError if they differ by more than NOISE."""
    one, two = rate(), rate()
    if abs(one - two) > NOISE * min(one, two):
        raise MeasurementError(
            f"{what} reached {one:.3g} and then {two:.3g} a second, which differ by more than {NOISE:.0%}: stop what "
            "else runs on this machine and measure again, or plan for a listed machine"
        )
    return max(one, two)


def _seconds(at: Device, work: Callable[[], object]) -> float:
    """Measure the seconds of one call of asynchronous work: the best of several runs of many calls each."""
    calls, taken = 1, _timed(at, work, 1)  # a first call, which warms up
    while taken < SHORTEST_S:
        calls = max(2 * calls, round(calls * SHORTEST_S / max(taken, 1e-6)))
        taken = _timed(at, work, calls)
    return min(taken, *(_timed(at, work, calls) for _ in range(3))) / calls


def _timed(at: Device, work: Callable[[], object], calls: int) -> float:
    """Return the seconds that ``calls`` calls of ``work`` take, with the device idle before and after. Blocks."""
    at.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        work()
    at.synchronize()
    return time.perf_counter() - begin


class _Copies:
    """Copies of this many bytes to the device and to the host, each on a stream of its own."""

    def __init__(self, at: Device, nbytes: int) -> None:
        self.nbytes, self._at = nbytes, at
        self._host = [at.slab(nbytes).fill_(1) for _ in range(2)]
        self._device = [torch.zeros(nbytes, dtype=torch.uint8, device=at.torch_device) for _ in range(2)]
        at.synchronize()  # the streams of the copies do not wait for the zeros

    def up(self) -> None:
        """Start a copy to the device."""
        with self._at.up:
            self._device[0].copy_(self._host[0], non_blocking=True)

    def down(self) -> None:
        """Start a copy to the host."""
        with self._at.down:
            self._host[1].copy_(self._device[1], non_blocking=True)

    def both(self) -> None:
        """Start a copy in each direction."""
        self.up()
        self.down()


def _together(at: Device, copies: _Copies, on_cores: Callable[[], None], nbytes: int, down_cost: float) -> float:
    """Return host memory traffic in bytes a second while copies in both directions and work of the cores overlap."""
    rounds = 1 + round(BESIDE * _timed(at, on_cores, 1) / _timed(at, copies.both, 1))
    begin, passes = time.perf_counter(), 0
    for _ in range(rounds):
        copies.both()
    ends = [at.moment(at.up), at.moment(at.down)]
    while not all(end.query() for end in ends):
        on_cores()
        passes += 1
    at.synchronize()
    moved = passes * nbytes + rounds * copies.nbytes * (1 + down_cost)
    return moved / (time.perf_counter() - begin)


def _products(at: Device, dtype: torch.dtype) -> float:
    """Measure the FLOP a second of an MLP's products of random matrices, wide enough to keep the device busy."""
    draw, width = torch.Generator().manual_seed(0), 128  # random: some devices are faster with zeros

    def mlp() -> Callable[[], Tensor]:
        """Return a function that computes the MLP's two products on random numbers."""
        line = (torch.randn(4 * width, device="cpu", generator=draw) / width**0.5).to(at.torch_device, dtype)
        sides = (width, width), (width, 4 * width), (4 * width, width)
        tokens, wide, narrow = (line[:columns].repeat(rows, 1) for rows, columns in sides)
        return lambda: tokens @ wide @ narrow

    while _timed(at, mlp(), 2) < SHORTEST_S / 5 and 160 * width**2 * dtype.itemsize < at.memory_capacity():
        width *= 2
    return _twice("products", lambda: 16 * width**3 / _seconds(at, mlp()))
