"""Measurements of the machine at hand, as the profile that planning needs.

1. Work is queued until launches and the clock's resolution are negligible, and both ends of a measurement wait for the
   device. The best of several runs counts, after one that does not: other load only ever adds time.
2. Sizes grow until one piece of work takes long enough, and stay within a share of the free memory.
3. Nothing of the user's changes: random numbers come from a generator of this file's own, and all memory is freed.
4. On the CPU, links are copies from memory to memory on the calling thread: they run one after the other. The ways up
   of several ranks are copies by a thread each, which torch does not cut among more.
"""

from __future__ import annotations

import ctypes
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.host import host_memory
from ..core.machine import Machine
from ..memory.device import Device
from ..optim import native
from ..optim.pieces import FEWEST_PIECES, PIECE, fuse, step_in_pieces

MIB = 2**20
FIRST_COPY = 16 * MIB
LEAST_COPY = 4096
MEMORY_SHARE = 8  # measuring uses at most one part in so many of the free memory


@dataclass(frozen=True)
class Effort:
    """The time and memory to measure with."""

    shortest_s: float  # of one run
    patience_s: float  # for all runs of a measurement
    largest_nbytes: int


GLANCE = Effort(0.001, 0, 32 * MIB)
QUICK = Effort(0.006, 0.2, 128 * MIB)
THOROUGH = Effort(0.05, 2, 1024 * MIB)


class LinkSpeed(NamedTuple):
    """The speed of copies between host and device."""

    up_bytes_per_s: float
    down_bytes_per_s: float
    duplex: float  # the share of its speed that each direction has while both run


def measure(device: torch.device | str | int, effort: Effort = QUICK, dtype: torch.dtype = torch.bfloat16) -> Machine:
    """Measure the machine at hand as a profile.

    This takes one to three seconds, or about ten times that with ``THOROUGH``, and at most an eighth of the free memory
    meanwhile.

    Args:
        device: The device that computes.
        effort: The time to spend; ``QUICK`` is accurate to about 10 % on an idle machine.
        dtype: The type in which the model computes; the FLOP/s are measured for it alone.
    """
    here = Device(device)
    link, dram, parameters_per_s = measure_link(here, effort), measure_dram(effort), measure_optimizer(effort=effort)
    return replace(
        _without_compute(here, link, parameters_per_s),
        flops_per_s=measure_flops(here, dtype, effort),
        device_bytes_per_s=dram if here.is_host else measure_memory(here, effort),
        dram_bytes_per_s=dram,
        optimizer_bytes_per_parameter=dram / parameters_per_s,
        cast_bytes_per_parameter=Machine.cast_bytes_per_parameter,
        host_bytes_per_s=math.inf if here.is_host else max(dram, measure_host(here, effort)),
    )


def measure_quickly(device: torch.device | str | int) -> Machine:
    """Measure links and optimizer, but not compute, in 0.1 to 0.2 s: short enough while a user waits."""
    here = Device(device)
    try:
        return _without_compute(here, measure_link(here, GLANCE), measure_optimizer(effort=GLANCE))
    finally:
        here.close()
        here.free_cached()


def _without_compute(device: Device, link: LinkSpeed, parameters_per_s: float) -> Machine:
    return Machine(
        name="here",
        flops_per_s=math.inf,
        up_bytes_per_s=link.up_bytes_per_s,
        down_bytes_per_s=link.down_bytes_per_s,
        duplex=link.duplex,
        dram_bytes_per_s=parameters_per_s,
        device_nbytes=device.memory()[1],
        host_nbytes=host_memory().total,
        optimizer_bytes_per_parameter=1,
        cast_bytes_per_parameter=Machine.cast_bytes_per_parameter / Machine.optimizer_bytes_per_parameter,
    )


def best_of(one: Machine, other: Machine) -> Machine:
    """Return one machine that was measured twice with the better figure of each kind (Rule 1)."""
    rates = "flops_per_s up_bytes_per_s down_bytes_per_s duplex dram_bytes_per_s device_bytes_per_s host_bytes_per_s"
    best = {name: max(getattr(one, name), getattr(other, name)) for name in rates.split()}
    steps = max(each.dram_bytes_per_s / each.optimizer_bytes_per_parameter for each in (one, other))
    return replace(one, **best, optimizer_bytes_per_parameter=best["dram_bytes_per_s"] / steps)


def measure_flops(device: Device, dtype: torch.dtype, effort: Effort = QUICK) -> float:
    """Measure the FLOP/s of the products of a transformer's MLP, forward and backward."""
    largest = device.memory()[0] // MEMORY_SHARE  # on a fast device no less takes long enough (Rule 2)
    work, width = _mlp(device, dtype, 128), 128
    while _probed(device, work) < effort.shortest_s and 64 * (2 * width) ** 2 <= largest:
        work, width = _mlp(device, dtype, 2 * width), 2 * width
    return 48 * width**3 / _seconds(device, work, effort)


def measure_link(device: Device, effort: Effort = QUICK) -> LinkSpeed:
    """Measure bytes per second up, down and both ways at once, with page-locked memory where the device has it."""
    limit = min(_largest(device.memory()[0], effort), _largest(host_memory().free, effort))
    copies = _CopiesBothWays(device, max(LEAST_COPY, min(FIRST_COPY, limit)))
    while (
        min(_probed(device, copies.up), _probed(device, copies.down)) < effort.shortest_s and 4 * copies.nbytes <= limit
    ):
        copies = _CopiesBothWays(device, 4 * copies.nbytes)
    up, down = _seconds(device, copies.up, effort), _seconds(device, copies.down, effort)
    shorter = min(up, down)
    ups, downs = round(4 * down / shorter), round(4 * up / shorter)  # numbers of copies that take equally long alone

    def both() -> None:
        for index in range(max(ups, downs)):
            for copy, count in ((copies.up, ups), (copies.down, downs)):
                if (index + 1) * count // max(ups, downs) > index * count // max(ups, downs):
                    copy()

    alone = max(ups * up, downs * down)
    together = _seconds(device, both, effort)
    return LinkSpeed(copies.nbytes / up, copies.nbytes / down, min(1.0, alone / together))


def measure_ways_up(devices: Sequence[Device], effort: Effort = QUICK) -> float:
    """Measure what share of its speed a device's way up keeps while the ways up of all these devices run at once."""
    limit = min(_largest(device.memory()[0], effort) for device in devices)
    nbytes = max(LEAST_COPY, min(limit, _largest(host_memory().free, effort) // len(devices)))
    ways = [(device, _way_up(device, nbytes)) for device in devices]
    alone = [_seconds(device, way, effort) for device, way in ways]
    count = max(1, round(4 * effort.shortest_s / min(alone)))
    begun: list[float] = []
    begins = threading.Barrier(len(ways), lambda: begun.append(time.perf_counter()))

    def run(way: tuple[Device, Callable[[], Any]]) -> float:
        device, work = way
        begins.wait()
        for _ in range(count):
            work()
        device.synchronize()
        return time.perf_counter()

    together = math.inf  # from the moment in which all begin to the end of the last one
    deadline = time.perf_counter() + effort.patience_s
    with ThreadPoolExecutor(len(ways), "superpipeline-ways-up") as threads:
        while together == math.inf or time.perf_counter() < deadline:
            ends = list(threads.map(run, ways))
            together = min(together, max(ends) - begun[-1])
    return min(1.0, count * max(alone) / together)


def _way_up(device: Device, nbytes: int) -> Callable[[], Any]:
    """Return a copy up of this many bytes, without torch's own threads where the CPU computes (Rule 4)."""
    copies = _CopiesBothWays(device, nbytes)
    if not device.is_host:
        return copies.up
    target, source = copies.ends_up
    return lambda: ctypes.memmove(target.data_ptr(), source.data_ptr(), nbytes)


def measure_dram(effort: Effort = QUICK) -> float:
    """Measure the bytes per second that torch's threads read and write in host memory."""
    nbytes = min(4 * effort.largest_nbytes, host_memory().free // MEMORY_SHARE)  # beyond every cache
    values = torch.zeros(nbytes // 4, device="cpu")
    return 2 * nbytes / _seconds(Device("cpu"), lambda: values.add_(1), effort)


def measure_host(device: Device, effort: Effort = QUICK) -> float:
    """Measure the bytes per second of the host's memory while torch's threads and copies both ways use it at once."""
    limit = min(_largest(device.memory()[0], effort), _largest(host_memory().free, effort))
    copies = _CopiesBothWays(device, max(LEAST_COPY, limit))
    values = torch.zeros(limit // 4, device="cpu")

    def both(count: int) -> None:
        for _ in range(count):
            copies.up()
            copies.down()

    copied, added = _probed(device, lambda: both(1)), _probed(device, lambda: values.add_(1))
    longer = max(copied, added, effort.shortest_s)
    ups, adds = round(longer / copied), round(longer / added)

    def work() -> None:
        both(ups)  # which go on by themselves
        for _ in range(adds):
            values.add_(1)

    return (ups * 2 * copies.nbytes + adds * 2 * values.nbytes) / _seconds(device, work, effort)


def measure_memory(device: Device, effort: Effort = QUICK) -> float:
    """Measure the bytes per second that the device reads and writes in its memory."""
    limit = _largest(device.memory()[0], effort)
    values = torch.zeros(limit // 4, device=device.torch_device)
    return 2 * values.nbytes / _seconds(device, lambda: values.add_(1), effort)


def measure_optimizer(fused: bool = False, effort: Effort = QUICK) -> float:
    """Measure the parameters per second of an FP32 AdamW step on the host, as the library runs it."""
    numel = max(effort.largest_nbytes // 8, FEWEST_PIECES * PIECE * torch.get_num_threads())
    numel = min(numel, host_memory().free // MEMORY_SHARE // 16)
    weight = torch.nn.Parameter(torch.ones(numel, device="cpu"))
    weight.grad = torch.full((numel,), 1e-3, device="cpu")
    optimizer = torch.optim.AdamW([weight])
    shadow = fuse(optimizer) if fused else step_in_pieces(optimizer)
    assert shadow is not None
    try:
        for _ in range(2):  # the first makes the state, the second asks for compiled code
            optimizer.step()
        native.LIBRARY.wait()
        return numel / _seconds(Device("cpu"), optimizer.step, effort)
    finally:
        shadow.close()


def why_not_compiled() -> str:
    """Say why AdamW does not step in compiled code on the host, or nothing if it does. Waits for the compiler."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1, device="cpu"))])
    native.LIBRARY.steps(optimizer, optimizer.param_groups[0])
    native.LIBRARY.wait()
    return native.LIBRARY.why_not(optimizer, optimizer.param_groups[0])


# ---- work


class _CopiesBothWays:
    """A copy of this many bytes up, and one down, each on its stream."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self.nbytes = nbytes
        self._device = device
        self._hosts = [device.slab(nbytes) for _ in range(2)]
        self._devices = [torch.zeros(nbytes, dtype=torch.uint8, device=device.torch_device) for _ in range(2)]
        for host in self._hosts:
            host.fill_(1)
        device.synchronize()  # the streams of the copies did not wait for the zeros

    @property
    def ends_up(self) -> tuple[Tensor, Tensor]:
        """Where the copy up goes, and where it comes from."""
        return self._devices[0], self._hosts[0]

    def up(self) -> None:
        with self._device.up:
            self._devices[0].copy_(self._hosts[0], non_blocking=True)

    def down(self) -> None:
        with self._device.down:
            self._hosts[1].copy_(self._devices[1], non_blocking=True)


def _mlp(device: Device, dtype: torch.dtype, width: int) -> Callable[[], None]:
    """Make the products of an MLP for `width` tokens, two of 4 * width * width and those of their backward.

    What lies between the products in a model moves memory, for which a plan has a measurement of its own.
    """
    with torch.inference_mode(False), torch.enable_grad():
        up, down, tokens = (
            _noise(shape, device, dtype).requires_grad_()
            for shape in ((4 * width, width), (width, 4 * width), (width, width))
        )
    seed = torch.ones_like(tokens)

    def work() -> None:
        with torch.inference_mode(False), torch.enable_grad():
            torch.autograd.grad(tokens @ up.T @ down.T, (up, down, tokens), seed)

    return work


def _noise(shape: tuple[int, int], device: Device, dtype: torch.dtype) -> Tensor:
    """Make a tensor of random numbers: some devices compute faster with zeros."""
    line = torch.randn(shape[1], device="cpu", generator=torch.Generator().manual_seed(0)) / shape[1] ** 0.5
    return torch.ones(shape[0], 1, device=device.torch_device, dtype=dtype).mul(line.to(device.torch_device, dtype))


# ---- timing


def _seconds(device: Device, work: Callable[[], Any], effort: Effort) -> float:
    """Measure the seconds of one call (Rule 1)."""
    best = _probed(device, work)
    deadline = time.perf_counter() + effort.patience_s
    while time.perf_counter() < deadline:
        best = min(best, _timed(device, work, max(1, round(effort.shortest_s / max(best, 1e-9)))))
    return best


def _probed(device: Device, work: Callable[[], Any]) -> float:
    """Measure the seconds of one call roughly, from three calls."""
    work()
    return min(_timed(device, work, 1) for _ in range(3))


def _timed(device: Device, work: Callable[[], Any], count: int) -> float:
    device.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        work()
    device.synchronize()
    return (time.perf_counter() - begin) / count


def _largest(free: int, effort: Effort) -> int:
    return min(effort.largest_nbytes, free // MEMORY_SHARE)
