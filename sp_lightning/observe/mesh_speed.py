"""The speed of the link between the devices of a machine, as collectives of layers that are cut across them find it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

NBYTES = 32 << 20  # of a sum: as of a large layer's output
FIRST = 2  # sums from whose rate the others are counted


@dataclass(frozen=True, kw_only=True)
class MeshSpeed:
    """The bytes per second that each device of a machine sends in sums among all of them, while as many come."""

    devices: int
    bytes_per_s: float  # of the slowest one, for which the others wait


def measure_mesh(device: torch.device, seconds: float) -> MeshSpeed | None:
    """Measure for about ``seconds``; every rank of the default group calls this, with its device.

    None: each machine has one process, or not each process a device.
    """
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    there: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(there, device.type == "cpu" or torch.accelerator.device_count() >= devices)
    if devices == 1 or not all(there):
        return None
    group, _ = dist.new_subgroups(devices)
    part = torch.zeros(NBYTES, dtype=torch.uint8, device=device)

    def sums_s(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            dist.all_reduce(part, group=group)
        int(part[0])  # waits for the device
        return time.perf_counter() - began

    sums_s(1)  # which connects
    counts: list[Any] = [None] * devices
    dist.all_gather_object(counts, max(1, round(seconds * FIRST / sums_s(FIRST))), group)
    sent = min(counts) * 2 * (devices - 1) / devices * NBYTES
    rates: list[Any] = [None] * devices
    dist.all_gather_object(rates, sent / sums_s(min(counts)), group)
    return MeshSpeed(devices=devices, bytes_per_s=min(rates))
