"""Machines to plan for: listed ones, changed ones, and the one at hand, measured."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One device, its link to the host, and the host's memory. Rates are sustained, in bytes or FLOP per second."""

    name: str
    flops_per_s: float  # of matrix products in half precision
    fp32_flops_per_s: float | None = None  # None: as in half precision
    device_bytes_per_s: float = math.inf  # of device memory, read and written
    up_bytes_per_s: float  # host to device, alone
    down_bytes_per_s: float  # device to host, alone
    duplex: float = 0.85  # share of that in each direction while both run
    host_bytes_per_s: float  # of host memory, for copies and cores together
    cores_bytes_per_s: float  # of host memory, for the cores alone
    device_nbytes: int
    host_nbytes: int
    disk_bytes_per_s: float = 7e9  # read
    disk_out_bytes_per_s: float = 5e9  # written
    disk_duplex: float = 0.75
    network_bytes_per_s: float = math.inf  # to other hosts, while as many come
    mesh_bytes_per_s: float = math.inf  # to devices with other shards, while as many come
