"""The speeds and sizes of a machine that planning needs, and profiles of well-known machines.

Profiles are datasheet peaks times the fraction that long-running work is assumed to reach, stated once below. Use them
to plan for a machine that is not at hand. Measure a machine that is: hosts differ more than devices do.

1. ``MACHINES`` are those that docs/simulation.md compares; ``PROFILES`` has them and all others that a plan knows.
2. A part of the host's memory is the system's (`headroom`): a run that would take all but that does not fit.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from ..errors import OptionError
from ..options import parse_bytes

GIB = 2**30

# Assumed shares of the peaks.
SUSTAINED_FLOPS = 0.7  # of dense bf16 with FP32 accumulation, in matrix products alone
SUSTAINED_DEVICE = (
    0.8  # of the device's memory, in products of large matrices with few rows, and in all that lies between
)
SUSTAINED_DRAM = 0.7  # of one socket's memory channels, read and written by the optimizer and by copies
DUPLEX = 0.85  # of its bandwidth, in each direction while both run; 0.5 on some hosts

# A local drive on four lanes of PCIe 4, in large pieces: bytes/s read, bytes/s written, the share of that in each
# direction while both run (assumed: some drives share one pipe, 0.5), and bytes that it may be written in its life.
DISK_READ, DISK_WRITE, DISK_DUPLEX = 7e9, 5e9, 0.75
ENDURANCE = 1200e12  # the rating of a consumer drive of 2 TB

# Of sums between machines, which gloo carries (benchmarks/NOTES.md): the share of a line that it fills where the line
# is the limit, and bytes/s that each device's process sends where the process is, while it receives as many.
SUSTAINED_NETWORK = 0.9
RAIL = 0.4e9

CORE_DRAM = 10e9  # bytes/s that one core reads and writes in an optimizer's step, until the channels are the limit

# Bytes of the host's memory that a step of AdamW moves there for a weight in FP32: it reads the weight, two moments and
# the gradient, and writes all but that. Copies of weights up read what they copy, those of gradients down write it
# (simulation.py, Rule 8).
STEPPED = 4 * 4 + 3 * 4
# A gradient that is only added to that of earlier batches is read, as what it is added to is, and that is written.
ADDED = 4 * 2 + 4
# The same beside the step, for a weight that travels in half precision: its gradient is read, and written in FP32; its
# wire copy is written. Both are written past the cache (optimizer.cpp), so their lines are not read before.
WIDENED = 2 + 4
WIRED = 2
# Of a gradient that is widened as it is stepped (gradients/slab.py, Rule 3) the step reads 2 bytes in the place of 4.
NARROW = 2 - 4 + WIRED

# Page-locked copies over 16 lanes, of 15.8, 31.5 and 63.0 GB/s per direction on the wire (8 to 32 GT/s, 128b/130b).
GEN3 = 12e9
GEN4 = 25e9
GEN5 = 55e9
LANES = 16
GENERATIONS = {3: GEN3, 4: GEN4, 5: GEN5}

# The system's share of host memory: desktop, drivers, the interpreter with its libraries, and the page cache (Rule 2).
SYSTEM_SHARE = 0.1
SYSTEM_LEAST, SYSTEM_MOST = 4 * GIB, 32 * GIB
SMALL_HOST_SHARE = 0.25  # the most that is taken of a small host


@dataclass(frozen=True)
class Machine:
    """One device, its link to the host, and the host memory in which its optimizer works."""

    name: str
    flops_per_s: float  # sustained
    up_bytes_per_s: float  # host to device, alone
    down_bytes_per_s: float  # device to host, alone
    duplex: float  # the share of that in each direction while both run: 1 is full duplex, 0.5 a shared wire
    dram_bytes_per_s: float  # for the optimizer, by all cores
    device_nbytes: int
    host_nbytes: int
    optimizer_bytes_per_parameter: float = STEPPED
    cast_bytes_per_parameter: float = WIDENED + WIRED  # beside a step of any optimizer
    fp32_flops_per_s: float | None = None  # sustained, of FP32 that stays FP32; None: the same as in half precision
    disk_bytes_per_s: float = DISK_READ
    disk_out_bytes_per_s: float = DISK_WRITE  # sustained
    disk_duplex: float = DISK_DUPLEX  # as `duplex`
    device_bytes_per_s: float = math.inf  # of its memory, read and written; inf: not known
    network_bytes_per_s: float = math.inf  # to other machines, while as many come from them; inf: not known
    mesh_bytes_per_s: float = (
        math.inf
    )  # from each device to those with other shards, while as many come; inf: not known
    host_bytes_per_s: float = (
        math.inf
    )  # of the host's memory, for the optimizer and all copies together; inf: not known
    added_bytes_per_parameter: float = ADDED  # of gradients that no optimizer has: they only add up

    def compute_s(
        self, flops: float, moved_nbytes: float, mesh_nbytes: float = 0.0, other_nbytes: float = 0.0
    ) -> float:
        """Return the seconds in which the device computes.

        Args:
            flops: Of products.
            moved_nbytes: Bytes that products read and write, while they compute: whichever takes longer.
            mesh_nbytes: Bytes that go to devices that have other shards of its layers, while it waits.
            other_nbytes: Bytes that all else reads and writes, before and after the products.
        """
        products = max(flops / self.flops_per_s, moved_nbytes / self.device_bytes_per_s)
        return products + other_nbytes / self.device_bytes_per_s + mesh_nbytes / self.mesh_bytes_per_s

    def disk_s(self, read_nbytes: int, written_nbytes: int) -> float:
        """Return the seconds in which the disk can read and write these bytes, at best at once."""
        reads, writes = read_nbytes / self.disk_bytes_per_s, written_nbytes / self.disk_out_bytes_per_s
        return max(reads, writes) + min(reads, writes) * (1 / self.disk_duplex - 1)


def headroom(host_nbytes: int) -> int:
    """Return the bytes of host memory that are left to the system (Rule 2)."""
    usual = min(max(int(SYSTEM_SHARE * host_nbytes), SYSTEM_LEAST), SYSTEM_MOST)
    return min(usual, int(SMALL_HOST_SHARE * host_nbytes))


def with_cores(machine: Machine, cores: int) -> Machine:
    """Return the machine with an optimizer that has this many cores: they may move fewer bytes than the channels do."""
    if isinstance(cores, bool) or not isinstance(cores, int) or cores < 1:
        raise OptionError(argument="cores", found=cores, allowed="an int >= 1")
    return replace(machine, dram_bytes_per_s=min(machine.dram_bytes_per_s, cores * CORE_DRAM))


def with_link(machine: Machine, link: str | float) -> Machine:
    """Return the machine with another link: "gen4x8" (PCIe 4 with 8 lanes), or bytes per second such as "12GB"."""
    rate = link_bytes_per_s(link)
    return replace(machine, up_bytes_per_s=rate, down_bytes_per_s=rate)


def with_disk(machine: Machine, speed: str) -> Machine:
    """Return the machine with another disk: bytes per second that it reads and writes, such as "7GB,1.5GB".

    A third number is the share of that which each direction keeps while both run, such as "7GB,1.5GB,0.5".
    """
    allowed = 'bytes per second read and written, such as "7GB,5GB", and a share from 0.5 to 1 as in "7GB,5GB,0.75"'
    given = [part.strip().removesuffix("/s") for part in speed.split(",")]
    try:
        read, written = (float(parse_bytes(rate, "disk_speed")) for rate in given[:2])
        duplex = float(given[2]) if len(given) > 2 else machine.disk_duplex
    except ValueError:  # such as an OptionError
        read = written = duplex = 0.0
    if min(read, written) <= 0 or not 0.5 <= duplex <= 1 or len(given) > 3:
        raise OptionError(argument="disk_speed", found=speed, allowed=allowed)
    return replace(machine, disk_bytes_per_s=read, disk_out_bytes_per_s=written, disk_duplex=duplex)


def with_network(machine: Machine, network: str, devices: int) -> Machine:
    """Return the machine with a network, over which a process for each of these devices sends.

    A line such as "100Gb" (bits per second) is never filled; bytes per second such as "1.9GB" are taken as measured.
    """
    allowed = 'the line in bits per second such as "100Gb", or measured bytes per second such as "1.9GB"'
    line = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([MG])(?:b|bit)(?:/s|ps)?\s*", network)
    if line is not None:
        bits = float(line[1]) * {"M": 1e6, "G": 1e9}[line[2]]
        rate = min(SUSTAINED_NETWORK * bits / 8, devices * RAIL)
    else:
        try:
            rate = float(parse_bytes(network.strip().removesuffix("/s"), "network"))
        except OptionError:
            rate = 0.0
    if rate <= 0:
        raise OptionError(argument="network", found=network, allowed=allowed)
    return replace(machine, network_bytes_per_s=rate)


def with_mesh(machine: Machine, mesh_link: str | float | None) -> Machine:
    """Return the machine with this link (None: the one to the host) between devices that have shards of one layer."""
    to_host = min(machine.up_bytes_per_s, machine.down_bytes_per_s)
    rate = to_host if mesh_link is None else link_bytes_per_s(mesh_link, "mesh_link")
    return replace(machine, mesh_bytes_per_s=rate)


def link_bytes_per_s(link: str | float, argument: str = "link") -> float:
    """Parse a link into the bytes per second that page-locked copies reach in one direction."""
    allowed = 'a PCIe generation and its lanes such as "gen4x8", or bytes per second such as "12GB"'
    if isinstance(link, str):
        match = re.fullmatch(r"(?:gen|pcie)?\s*([345])(?:\.0)?\s*x\s*(\d+)", link.strip().lower())
        if match is not None and int(match[2]) in (1, 2, 4, 8, 16):
            return GENERATIONS[int(match[1])] * int(match[2]) / LANES
        try:
            link = parse_bytes(link.strip().removesuffix("/s"), argument)
        except OptionError:
            raise OptionError(argument=argument, found=link, allowed=allowed) from None
    if isinstance(link, bool) or not isinstance(link, int | float) or link <= 0:
        raise OptionError(argument=argument, found=link, allowed=allowed)
    return float(link)


def _profile(
    name: str,
    peak_flops: float,
    peak_fp32: float,
    link: float,
    peak_dram: float,
    peak_device: float,
    device_nbytes: float,
    host_nbytes: int,
) -> Machine:
    return Machine(
        name=name,
        flops_per_s=peak_flops * SUSTAINED_FLOPS,
        up_bytes_per_s=link,
        down_bytes_per_s=link,
        duplex=DUPLEX,
        dram_bytes_per_s=peak_dram * SUSTAINED_DRAM,
        device_nbytes=int(device_nbytes),
        host_nbytes=host_nbytes,
        fp32_flops_per_s=peak_fp32 * SUSTAINED_FLOPS,
        device_bytes_per_s=peak_device * SUSTAINED_DEVICE,
        host_bytes_per_s=peak_dram * SUSTAINED_DRAM,
    )


# Peaks are the vendors': dense bf16 tensor operations with FP32 accumulation, without sparsity; then FP32 outside of
# tensor cores, as torch multiplies it by default; the bandwidth of the device's memory is theirs, too. Hosts are
# typical ones, with one active device on a socket of its own. Several devices of a plan (`simulate(ranks=...)`) share
# all of it.
MACHINES = {
    machine.name: machine
    for machine in (
        # NVIDIA Ampere GA102 GPU architecture whitepaper: 128 FLOP per tensor core and clock. 112 tensor cores, 3584
        # CUDA cores, 1.777 GHz, 12 GB. Two channels of DDR4-3200: 51.2 GB/s.
        _profile("rtx3060", 25.5e12, 12.7e12, GEN4, 51.2e9, 360e9, 12 * GIB, 64 * GIB),
        # NVIDIA Ada GPU architecture whitepaper: 165.2 TFLOP/s, 24 GB. Two channels of DDR5-5600: 89.6 GB/s.
        _profile("rtx4090", 165.2e12, 82.6e12, GEN4, 89.6e9, 1008e9, 24 * GIB, 128 * GIB),
        # NVIDIA RTX Blackwell GPU architecture whitepaper: 209.5 TFLOP/s, 32 GB. Two channels of DDR5-6400: 102.4 GB/s.
        _profile("rtx5090", 209.5e12, 104.8e12, GEN5, 102.4e9, 1792e9, 32 * GIB, 192 * GIB),
        # NVIDIA A100 80GB SXM datasheet: 312 TFLOP/s. EPYC 7003, eight channels of DDR4-3200: 204.8 GB/s.
        _profile("a100", 312e12, 19.5e12, GEN4, 204.8e9, 2039e9, 80 * GIB, 1024 * GIB),
        # NVIDIA H100 SXM datasheet: 989.4 TFLOP/s, 80 GB. Xeon 8480C, eight channels of DDR5-4800: 307.2 GB/s.
        _profile("h100", 989.4e12, 66.9e12, GEN5, 307.2e9, 3350e9, 80 * GIB, 2048 * GIB),
        # NVIDIA H200 SXM datasheet: 989.4 TFLOP/s, 141 GB. Xeon 8580, eight channels of DDR5-5600: 358.4 GB/s.
        _profile("h200", 989.4e12, 66.9e12, GEN5, 358.4e9, 4800e9, 141e9, 2048 * GIB),
        # AMD Instinct MI300X data sheet: 1307.4 TFLOP/s, 192 GB. EPYC 9004, twelve channels of DDR5-4800: 460.8 GB/s.
        _profile("mi300x", 1307.4e12, 163.4e12, GEN5, 460.8e9, 5300e9, 192e9, 2048 * GIB),
    )
}


def _geforce(
    name: str,
    cores: int,
    clock: float,
    link: float,
    peak_dram: float,
    peak_device: float,
    device_nbytes: float,
    host_nbytes: int,
) -> Machine:
    """Make the profile of a GeForce card from its CUDA cores and its boost clock.

    A CUDA core does 2 FLOP per clock, and the tensor cores beside it 4, dense bf16 with FP32 accumulation.
    """
    fp32 = 2 * cores * clock
    return _profile(name, 2 * fp32, fp32, link, peak_dram, peak_device, device_nbytes, host_nbytes)


def _rented(
    name: str,
    peak_flops: float,
    peak_fp32: float,
    link: float,
    peak_device: float,
    device_nbytes: float,
    host_nbytes: int,
    cores: int,
    peak_dram: float = 204.8e9,
) -> Machine:
    """Make the profile of a virtual machine, which has some cores of a server with this memory bandwidth."""
    machine = _profile(name, peak_flops, peak_fp32, link, peak_dram, peak_device, device_nbytes, host_nbytes)
    return with_cores(machine, cores)


# Cards as people have them. Cores and boost clocks are those of the vendor's specification pages (of laptops, whose
# clocks depend on the maker: the middle of the range), lanes and memory too. Hosts are typical ones: desktops with two
# channels of DDR4-3200 (51.2 GB/s) or DDR5-5600 (89.6 GB/s), laptops with DDR5-4800 (76.8 GB/s).
_DDR4, _DDR5, _LAPTOP = 51.2e9, 89.6e9, 76.8e9
_CARDS = (
    # 8 GB
    _geforce("rtx3070", 5888, 1.725e9, GEN4, _DDR4, 448e9, 8 * GIB, 32 * GIB),
    _geforce("rtx4060", 3072, 2.46e9, GEN4 / 2, _DDR5, 272e9, 8 * GIB, 32 * GIB),  # 8 lanes
    _geforce("rtx4060-laptop", 3072, 1.92e9, GEN4 / 2, _LAPTOP, 256e9, 8 * GIB, 16 * GIB),  # 8 lanes
    _geforce("rtx4070-laptop", 4608, 1.70e9, GEN4 / 2, _LAPTOP, 256e9, 8 * GIB, 32 * GIB),  # 8 lanes
    # 12 GB
    _geforce("rtx4070", 5888, 2.475e9, GEN4, _DDR5, 504e9, 12 * GIB, 64 * GIB),
    _geforce("rtx5070", 6144, 2.512e9, GEN5, _DDR5, 672e9, 12 * GIB, 64 * GIB),
    _geforce("rtx4080-laptop", 7424, 1.81e9, GEN4, _LAPTOP, 432e9, 12 * GIB, 32 * GIB),
    # 16 GB
    _geforce("rtx4060ti-16gb", 4352, 2.535e9, GEN4 / 2, _DDR5, 288e9, 16 * GIB, 64 * GIB),  # 8 lanes
    _geforce("rtx4080", 9728, 2.505e9, GEN4, _DDR5, 716.8e9, 16 * GIB, 64 * GIB),
    _geforce("rtx5060ti-16gb", 4608, 2.572e9, GEN5 / 2, _DDR5, 448e9, 16 * GIB, 64 * GIB),  # 8 lanes
    _geforce("rtx5080", 10752, 2.617e9, GEN5, _DDR5, 960e9, 16 * GIB, 64 * GIB),
    _geforce("rtx4090-laptop", 9728, 1.75e9, GEN4, _LAPTOP, 576e9, 16 * GIB, 64 * GIB),
    # 24 GB
    _geforce("rtx3090", 10496, 1.695e9, GEN4, _DDR4, 936e9, 24 * GIB, 128 * GIB),
)

# What clouds rent by the hour, with one card: cores are half of the vCPUs, which are hardware threads. Peaks are the
# cards' data sheets' (dense bf16, FP32), cores and memory the pages of the instance types; eight memory channels.
_RENTED = (
    # AWS g5.4xlarge: A10G, 70 and 35 TFLOP/s; 16 vCPUs, 64 GiB.
    _rented("aws-g5.4xlarge", 70e12, 35e12, GEN4, 600e9, 24 * GIB, 64 * GIB, 8),
    # AWS g6e.4xlarge: L40S, 362 and 91.6 TFLOP/s; 16 vCPUs, 128 GiB.
    _rented("aws-g6e.4xlarge", 362e12, 91.6e12, GEN4, 864e9, 48 * GIB, 128 * GIB, 8),
    # Google Cloud g2-standard-16: L4, 121 and 30.3 TFLOP/s; 16 vCPUs, 64 GB.
    _rented("gcp-g2-standard-16", 121e12, 30.3e12, GEN4, 300e9, 24 * GIB, 64 * GIB, 8),
    # Google Cloud a2-highgpu-1g: A100, 312 and 19.5 TFLOP/s, 40 GB; 12 vCPUs, 85 GB.
    _rented("gcp-a2-highgpu-1g", 312e12, 19.5e12, GEN4, 1555e9, 40 * GIB, int(85e9), 6),
    # Lambda gpu_1x_a10: A10, 125 and 31.2 TFLOP/s; 30 vCPUs, 200 GiB.
    _rented("lambda-1x-a10", 125e12, 31.2e12, GEN4, 600e9, 24 * GIB, 200 * GIB, 15),
    # Lambda gpu_1x_h100_pcie: H100 PCIe, 756 and 51 TFLOP/s, 80 GB; 26 vCPUs, 200 GiB.
    _rented("lambda-1x-h100", 756e12, 51e12, GEN5, 2000e9, 80 * GIB, 200 * GIB, 13, 307.2e9),
)

PROFILES = MACHINES | {machine.name: machine for machine in (*_CARDS, *_RENTED)}
