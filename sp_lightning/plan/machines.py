"""Machines to plan for: listed ones, and ones that differ from them. `measure.here` measures the one at hand.

A listed machine has its vendors' peaks times the shares that long-running work is assumed to reach, stated once below.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

from ..errors import OptionError
from ..options import is_int, parse_bytes

GIB = 2**30

# Assumed shares of the peaks.
SUSTAINED_FLOPS = 0.7  # of dense products in half precision with FP32 accumulation
SUSTAINED_DEVICE = 0.8  # of the device's memory
SUSTAINED_HOST = 0.7  # of one socket's memory channels
DUPLEX = 0.85  # of a link, in each direction while both run; 0.5 on some hosts
SUSTAINED_NETWORK = 0.9  # of a line that gloo fills (benchmarks/NOTES.md)

CORE = 10e9  # bytes/s that one core reads and writes in a step, until the channels are the limit
RAIL = 0.4e9  # bytes/s that each device's process sends to other hosts by gloo, while as many come (NOTES.md)
GENERATIONS = {3: 12e9, 4: 25e9, 5: 55e9}  # bytes/s of page-locked copies over 16 lanes of PCIe, in one direction
LANES = 16
GEN4, GEN5 = GENERATIONS[4], GENERATIONS[5]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One device, its link to the host, and the host's memory. Rates are sustained, in bytes or FLOP per second."""

    name: str
    flops_per_s: float  # of large matrix products in half precision
    fp32_flops_per_s: float | None = None  # None: as in half precision
    device_bytes_per_s: float = math.inf  # of device memory, read and written
    up_bytes_per_s: float  # host to device, alone
    down_bytes_per_s: float  # device to host, alone
    duplex: float = DUPLEX  # share of that in each direction while both run
    host_bytes_per_s: float  # of host memory, for copies and cores together
    cores_bytes_per_s: float  # of host memory, for the cores alone, in a plain pass over large arrays
    device_nbytes: int
    host_nbytes: int
    disk_bytes_per_s: float = 7e9  # read: a local drive on four lanes of PCIe 4
    disk_out_bytes_per_s: float = 5e9  # written
    disk_duplex: float = 0.75  # as `duplex`
    network_bytes_per_s: float = math.inf  # to other hosts, while as many come; inf: not known


@dataclass(frozen=True, kw_only=True)
class Reached:
    """The rates that a step reaches on a machine, fitted to measured steps by benchmarks/fit_lanes.py."""

    matrix: float = 0.752  # share of the rate of large products: a model's are smaller, and attention is slower
    step: float = 0.737  # share of a plain pass's rate that cores reach in a step: it divides, and has seven arrays
    down_cost: float = 1.33  # bytes of host memory that a byte to the host moves: its line is claimed, then written
    one_core: float = 12e9  # bytes/s of a norm, which torch computes on one core


REACHED = Reached()


def machine_named(name: str) -> Machine:
    """Return a listed machine."""
    if name not in MACHINES:
        raise OptionError(argument="machine", found=name, allowed=f"'here' or one of {', '.join(MACHINES)}")
    return MACHINES[name]


def changed(
    machine: Machine,
    *,
    device_memory: int | None = None,
    host_memory: int | None = None,
    link: str | float | None = None,
    cores: int | None = None,
    disk_speed: str | None = None,
    network: str | None = None,
    devices: int = 1,
) -> Machine:
    """Return a machine that differs in what is given.

    Args:
        machine: Any machine.
        device_memory: Bytes.
        host_memory: Bytes.
        link: A PCIe generation and its lanes such as "gen4x8", or bytes per second such as "12GB".
        cores: Cores that step the optimizer. They may move fewer bytes than the memory channels do.
        disk_speed: Bytes per second read and written, such as "7GB,5GB", and the share of that in each direction while
            both run as in "7GB,5GB,0.75".
        network: A line in bits per second such as "100Gb", or measured bytes per second such as "1.9GB".
        devices: Devices of this host, each with a process that sends over the network.
    """
    given = {"device_nbytes": device_memory, "host_nbytes": host_memory}
    changes: dict[str, Any] = {name: nbytes for name, nbytes in given.items() if nbytes is not None}
    if link is not None:
        changes["up_bytes_per_s"] = changes["down_bytes_per_s"] = _link(link)
    if cores is not None:
        if not is_int(cores) or cores < 1:
            raise OptionError(argument="cores", found=cores, allowed="an int >= 1")
        changes["cores_bytes_per_s"] = min(machine.cores_bytes_per_s, cores * CORE)
    if disk_speed is not None:
        changes |= _disk(disk_speed, machine.disk_duplex)
    if network is not None:
        changes["network_bytes_per_s"] = _network(network, devices)
    return replace(machine, **changes)


def _rate(text: str, argument: str) -> float:
    return float(parse_bytes(text.strip().removesuffix("/s"), argument))


def _link(link: str | float) -> float:
    allowed = 'a PCIe generation and its lanes such as "gen4x8", or bytes per second such as "12GB"'
    if isinstance(link, str):
        match = re.fullmatch(r"(?:gen|pcie)?\s*([345])(?:\.0)?\s*x\s*(1|2|4|8|16)", link.strip().lower())
        if match is not None:
            return GENERATIONS[int(match[1])] * int(match[2]) / LANES
        try:
            link = _rate(link, "link")
        except OptionError:
            raise OptionError(argument="link", found=link, allowed=allowed) from None
    if isinstance(link, bool) or not isinstance(link, int | float) or link <= 0:
        raise OptionError(argument="link", found=link, allowed=allowed)
    return float(link)


def _disk(speed: str, duplex: float) -> dict[str, float]:
    allowed = 'bytes per second read and written, such as "7GB,5GB", and a share from 0.5 to 1 as in "7GB,5GB,0.75"'
    try:
        read, written, *share = speed.split(",")
        rates = {"disk_bytes_per_s": _rate(read, "disk_speed"), "disk_out_bytes_per_s": _rate(written, "disk_speed")}
        (duplex,) = [float(text) for text in share] or [duplex]
    except ValueError:  # such as an OptionError
        raise OptionError(argument="disk_speed", found=speed, allowed=allowed) from None
    if min(rates.values()) <= 0 or not 0.5 <= duplex <= 1:
        raise OptionError(argument="disk_speed", found=speed, allowed=allowed)
    return rates | {"disk_duplex": duplex}


def _network(network: str, devices: int) -> float:
    line = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([MG])(?:b|bit)(?:/s|ps)?\s*", network)
    try:
        if line is None:
            rate = _rate(network, "network")
        else:
            bits = float(line[1]) * {"M": 1e6, "G": 1e9}[line[2]]
            rate = min(SUSTAINED_NETWORK * bits / 8, devices * RAIL)
    except OptionError:
        rate = 0.0
    if rate <= 0:
        allowed = 'the line in bits per second such as "100Gb", or measured bytes per second such as "1.9GB"'
        raise OptionError(argument="network", found=network, allowed=allowed)
    return rate


# ---- the list


def _listed(
    name: str,
    tera: float,
    fp32_tera: float,
    device_giga: float,
    device_nbytes: float,
    link: float,
    host_giga: float,
    host_nbytes: float,
    cores: int | None = None,
) -> Machine:
    """Make a listed machine from its peaks in TFLOP/s and GB/s, and a virtual one's share of a server's cores."""
    host = host_giga * 1e9 * SUSTAINED_HOST
    return Machine(
        name=name,
        flops_per_s=tera * 1e12 * SUSTAINED_FLOPS,
        fp32_flops_per_s=fp32_tera * 1e12 * SUSTAINED_FLOPS,
        device_bytes_per_s=device_giga * 1e9 * SUSTAINED_DEVICE,
        up_bytes_per_s=link,
        down_bytes_per_s=link,
        host_bytes_per_s=host,
        cores_bytes_per_s=min(host, cores * CORE) if cores else host,
        device_nbytes=int(device_nbytes),
        host_nbytes=int(host_nbytes),
    )


def _geforce(
    name: str,
    cuda_cores: int,
    gigahertz: float,
    device_giga: float,
    device_nbytes: float,
    link: float,
    host_giga: float,
    host_nbytes: float,
) -> Machine:
    """Make a machine with a GeForce card.

    A CUDA core does 2 FLOP per clock, and the tensor cores beside it 4, dense with FP32 accumulation.
    """
    fp32_tera = 2 * cuda_cores * gigahertz / 1e3
    return _listed(name, 2 * fp32_tera, fp32_tera, device_giga, device_nbytes, link, host_giga, host_nbytes)


# GB/s of hosts' memory: two channels of DDR4-3200, DDR5-5600, a laptop's DDR5-4800; eight channels of DDR4-3200.
DDR4, DDR5, LAPTOP, SERVER = 51.2, 89.6, 76.8, 204.8

# Peaks are the vendors': data sheets of servers' cards, architecture whitepapers (rtx3060, rtx4090, rtx5090), and for
# other GeForce cards CUDA cores and boost clock of the specification pages, of laptops the middle of the range. Hosts
# are typical ones with one active device; those of clouds have the instance type's cores, half of its vCPUs.
MACHINES = {
    machine.name: machine
    for machine in (
        # name, TFLOP/s, in FP32, GB/s and bytes of the device, link, GB/s and bytes of the host
        _listed("rtx3060", 25.5, 12.7, 360, 12 * GIB, GEN4, DDR4, 64 * GIB),
        _listed("rtx4090", 165.2, 82.6, 1008, 24 * GIB, GEN4, DDR5, 128 * GIB),
        _listed("rtx5090", 209.5, 104.8, 1792, 32 * GIB, GEN5, 102.4, 192 * GIB),
        _listed("a100", 312, 19.5, 2039, 80 * GIB, GEN4, SERVER, 1024 * GIB),
        _listed("h100", 989.4, 66.9, 3350, 80 * GIB, GEN5, 307.2, 2048 * GIB),
        _listed("h200", 989.4, 66.9, 4800, 141e9, GEN5, 358.4, 2048 * GIB),
        _listed("mi300x", 1307.4, 163.4, 5300, 192e9, GEN5, 460.8, 2048 * GIB),
        # name, CUDA cores, GHz, then as above; half a link has 8 lanes
        _geforce("rtx3070", 5888, 1.725, 448, 8 * GIB, GEN4, DDR4, 32 * GIB),
        _geforce("rtx4060", 3072, 2.46, 272, 8 * GIB, GEN4 / 2, DDR5, 32 * GIB),
        _geforce("rtx4060-laptop", 3072, 1.92, 256, 8 * GIB, GEN4 / 2, LAPTOP, 16 * GIB),
        _geforce("rtx4070-laptop", 4608, 1.70, 256, 8 * GIB, GEN4 / 2, LAPTOP, 32 * GIB),
        _geforce("rtx4070", 5888, 2.475, 504, 12 * GIB, GEN4, DDR5, 64 * GIB),
        _geforce("rtx5070", 6144, 2.512, 672, 12 * GIB, GEN5, DDR5, 64 * GIB),
        _geforce("rtx4080-laptop", 7424, 1.81, 432, 12 * GIB, GEN4, LAPTOP, 32 * GIB),
        _geforce("rtx4060ti-16gb", 4352, 2.535, 288, 16 * GIB, GEN4 / 2, DDR5, 64 * GIB),
        _geforce("rtx4080", 9728, 2.505, 716.8, 16 * GIB, GEN4, DDR5, 64 * GIB),
        _geforce("rtx5060ti-16gb", 4608, 2.572, 448, 16 * GIB, GEN5 / 2, DDR5, 64 * GIB),
        _geforce("rtx5080", 10752, 2.617, 960, 16 * GIB, GEN5, DDR5, 64 * GIB),
        _geforce("rtx4090-laptop", 9728, 1.75, 576, 16 * GIB, GEN4, LAPTOP, 64 * GIB),
        _geforce("rtx3090", 10496, 1.695, 936, 24 * GIB, GEN4, DDR4, 128 * GIB),
        # one card by the hour: as the first group, and cores
        _listed("aws-g5.4xlarge", 70, 35, 600, 24 * GIB, GEN4, SERVER, 64 * GIB, 8),
        _listed("aws-g6e.4xlarge", 362, 91.6, 864, 48 * GIB, GEN4, SERVER, 128 * GIB, 8),
        _listed("gcp-g2-standard-16", 121, 30.3, 300, 24 * GIB, GEN4, SERVER, 64 * GIB, 8),
        _listed("gcp-a2-highgpu-1g", 312, 19.5, 1555, 40 * GIB, GEN4, SERVER, 85e9, 6),
        _listed("lambda-1x-a10", 125, 31.2, 600, 24 * GIB, GEN4, SERVER, 200 * GIB, 15),
        _listed("lambda-1x-h100", 756, 51, 2000, 80 * GIB, GEN5, 307.2, 200 * GIB, 13),
    )
}
