"""The machine at hand, in the numbers that planning needs: what a profile assumes, measured.

1. Work is queued until it takes long enough for launches and the clock to be nothing; both ends of a measurement wait
   for the device. The best of several counts, after one that does not: whatever else runs only ever adds time.
2. Sizes grow until a single piece of work takes long enough, and stay within a share of the memory that is free.
3. Nothing of the user's changes: random numbers come from a generator of our own, what was allocated is freed.
4. On the CPU, links are copies from memory to memory on the calling thread: they run one after the other.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.host import host_memory
from ..core.machine import Machine
from ..memory.device import Device
from ..optim.pieces import FEWEST_PIECES, fuse, step_in_pieces

MIB = 2**20
FIRST_COPY = 16 * MIB
LEAST_COPY = 4096
MEMORY_SHARE = 8  # measuring takes at most this part of what is free
PIECE = 1 << 17  # elements, as in step_in_pieces


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    shortest_s: float  # a count
    patience_s: float  # for all counts of a measurement
    largest_nbytes: int


GLANCE = Effort(0.001, 0, 32 * MIB)
QUICK = Effort(0.006, 0.2, 128 * MIB)
THOROUGH = Effort(0.05, 2, 1024 * MIB)


class LinkSpeed(NamedTuple):
    """Between host and device."""

    up_bytes_per_s: float
    down_bytes_per_s: float
    duplex: float  # what each direction keeps while both run


def measure(device: torch.device | str | int, effort: Effort = QUICK, dtype: torch.dtype = torch.bfloat16) -> Machine:
    """The machine at hand as a profile: a second or three, or about ten times that if it is to be ``THOROUGH``.

    Takes an eighth of the free memory at most, for as long as it measures.

    Args:
        device: That computes.
        effort: A quick one is good to about a tenth on an idle machine.
        dtype: In which the model computes; what is measured holds for it alone.
    """
    seam = Device(device)
    link, dram, parameters_per_s = measure_link(seam, effort), measure_dram(effort), measure_optimizer(effort=effort)
    return replace(
        _without_compute(seam, link, parameters_per_s),
        flops_per_s=measure_flops(seam, dtype, effort),
        dram_bytes_per_s=dram,
        optimizer_bytes_per_parameter=dram / parameters_per_s,
    )


def measure_quickly(device: torch.device | str | int) -> Machine:
    """The same without compute, in a tenth of a second or two: what can be known where a user waits."""
    seam = Device(device)
    try:
        return _without_compute(seam, measure_link(seam, GLANCE), measure_optimizer(effort=GLANCE))
    finally:
        seam.close()
        seam.free_cached()


def _without_compute(seam: Device, link: LinkSpeed, parameters_per_s: float) -> Machine:
    return Machine(
        name="here",
        flops_per_s=math.inf,
        up_bytes_per_s=link.up_bytes_per_s,
        down_bytes_per_s=link.down_bytes_per_s,
        duplex=link.duplex,
        dram_bytes_per_s=parameters_per_s,
        device_nbytes=seam.memory()[1],
        host_nbytes=host_memory().total,
        optimizer_bytes_per_parameter=1,
    )


def measure_flops(device: Device, dtype: torch.dtype, effort: Effort = QUICK) -> float:
    """Floating-point operations per second of a transformer's MLP, forward and backward, with what surrounds it."""
    largest = _largest(device.memory()[0], effort)
    work, width = _mlp(device, dtype, 128), 128
    while _probed(device, work) < effort.shortest_s and 64 * (2 * width) ** 2 <= largest:
        work, width = _mlp(device, dtype, 2 * width), 2 * width
    return 48 * width**3 / _seconds(device, work, effort)


def measure_link(device: Device, effort: Effort = QUICK) -> LinkSpeed:
    """Bytes per second to and from the device, from page-locked memory where there is any; and both at once."""
    limit = min(_largest(device.memory()[0], effort), _largest(host_memory().free, effort))
    ways = _Ways(device, max(LEAST_COPY, min(FIRST_COPY, limit)))
    while min(_probed(device, ways.up), _probed(device, ways.down)) < effort.shortest_s and 4 * ways.nbytes <= limit:
        ways = _Ways(device, 4 * ways.nbytes)
    up, down = _seconds(device, ways.up, effort), _seconds(device, ways.down, effort)
    shorter = min(up, down)
    ups, downs = round(4 * down / shorter), round(4 * up / shorter)  # which take equally long alone

    def both() -> None:
        for index in range(max(ups, downs)):
            for way, count in ((ways.up, ups), (ways.down, downs)):
                if (index + 1) * count // max(ups, downs) > index * count // max(ups, downs):
                    way()

    alone = max(ups * up, downs * down)
    together = _seconds(device, both, effort)
    return LinkSpeed(ways.nbytes / up, ways.nbytes / down, min(1.0, alone / together))


def measure_dram(effort: Effort = QUICK) -> float:
    """Bytes per second that torch's threads read and write in host memory."""
    nbytes = min(4 * effort.largest_nbytes, host_memory().free // MEMORY_SHARE)  # beyond every cache
    values = torch.zeros(nbytes // 4, device="cpu")
    return 2 * nbytes / _seconds(Device("cpu"), lambda: values.add_(1), effort)


def measure_optimizer(fused: bool = False, effort: Effort = QUICK) -> float:
    """Parameters per second of an FP32 AdamW step on the host, as the library runs it."""
    numel = max(effort.largest_nbytes // 8, FEWEST_PIECES * PIECE * torch.get_num_threads())
    numel = min(numel, host_memory().free // MEMORY_SHARE // 16)
    weight = torch.nn.Parameter(torch.ones(numel, device="cpu"))
    weight.grad = torch.full((numel,), 1e-3, device="cpu")
    optimizer = torch.optim.AdamW([weight])
    shadow = fuse(optimizer) if fused else step_in_pieces(optimizer)
    assert shadow is not None
    try:
        return numel / _seconds(Device("cpu"), optimizer.step, effort)
    finally:
        shadow.close()


# ---- work


class _Ways:
    """Copies of so many bytes, each on its stream."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self.nbytes = nbytes
        self._device = device
        self._hosts = [device.slab(nbytes) for _ in range(2)]
        self._devices = [torch.zeros(nbytes, dtype=torch.uint8, device=device.torch_device) for _ in range(2)]
        for host in self._hosts:
            host.fill_(1)
        device.synchronize()  # the streams of the copies did not wait for the zeros

    def up(self) -> None:
        with self._device.up:
            self._devices[0].copy_(self._hosts[0], non_blocking=True)

    def down(self) -> None:
        with self._device.down:
            self._hosts[1].copy_(self._devices[1], non_blocking=True)


def _mlp(device: Device, dtype: torch.dtype, width: int) -> Callable[[], None]:
    """Norm, two products of 4 * width * width with GELU between, and the sum with what came in; for `width` tokens."""
    with torch.inference_mode(False), torch.enable_grad():
        up, down, tokens = (
            _noise(shape, device, dtype).requires_grad_()
            for shape in ((4 * width, width), (width, 4 * width), (width, width))
        )
    seed = torch.ones_like(tokens)

    def work() -> None:
        with torch.inference_mode(False), torch.enable_grad():
            normed = torch.nn.functional.layer_norm(tokens, (width,))
            out = tokens + torch.nn.functional.gelu(normed @ up.T) @ down.T
            torch.autograd.grad(out, (up, down, tokens), seed)

    return work


def _noise(shape: tuple[int, int], device: Device, dtype: torch.dtype) -> Tensor:
    """Not zeros: some devices run faster on those."""
    line = torch.randn(shape[1], generator=torch.Generator().manual_seed(0)) / shape[1] ** 0.5
    return torch.ones(shape[0], 1, device=device.torch_device, dtype=dtype).mul(line.to(device.torch_device, dtype))


# ---- timing


def _seconds(device: Device, work: Callable[[], Any], effort: Effort) -> float:
    """Of one call (Rule 1)."""
    best = _probed(device, work)
    deadline = time.perf_counter() + effort.patience_s
    while time.perf_counter() < deadline:
        best = min(best, _timed(device, work, max(1, round(effort.shortest_s / max(best, 1e-9)))))
    return best


def _probed(device: Device, work: Callable[[], Any]) -> float:
    """Of one call, roughly."""
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
