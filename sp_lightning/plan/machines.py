"""Machines to plan for, and how long a step takes on one. host/rates.py measures the machine at hand.

A listed machine has its vendors' peaks times the shares that long-running work is assumed to reach, stated once below.

Of the time four lanes decide: compute, copies from host to device, copies from device to host, and the cores, which
move bytes in the host's memory. Copies take what they need of that memory; the cores get what is left, as far as they
can use it. A disk and a network have lanes of their own. A step is a forward and a backward, in each of which the
busiest lane decides, and what nothing runs beside: the first unit, whose gradients come last and which is needed
first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

GIB = 2**30

# Assumed shares of the peaks.
SUSTAINED_FLOPS = 0.7  # of dense products in half precision with FP32 accumulation
SUSTAINED_DEVICE = 0.8  # of the device's memory
SUSTAINED_HOST = 0.7  # of one socket's memory channels
DUPLEX = 0.85  # of a link's rate, in each direction while both run; 0.5 on some hosts
CORE = 10e9  # bytes/s that one core reads and writes in a step, until the channels are the limit
GEN4, GEN5 = 25e9, 55e9  # bytes/s of page-locked copies over 16 lanes of PCIe, in one direction


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One device, its link to the host, and the host's memory. Rates are sustained, in bytes or FLOP per second."""

    name: str
    device_type: str = "cuda"  # whose driver's memory counts
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
    disk_duplex: float = 0.75  # share of these in each direction while both run
    network_bytes_per_s: float = 1.1e9  # to other hosts, while as many come from them: a line of 10 Gb/s


@dataclass(frozen=True, kw_only=True)
class Reached:
    """The rates that a step reaches on a machine, fitted to measured steps by benchmarks/fit_lanes.py."""

    matrix: float = 0.752  # share of the rate of large products: a model's are smaller, and attention is slower
    step: float = 0.737  # share of a plain pass's rate that cores reach in a step: it divides, and has seven arrays
    down_cost: float = 1.33  # bytes of host memory that a byte to the host moves: its line is claimed, then written


REACHED = Reached()


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
    """Make a machine from its vendors' peaks in TFLOP/s and GB/s; ``cores`` are those of a virtual machine."""
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


# GB/s of hosts' memory: two channels of DDR4-3200, DDR5-5600, a laptop's DDR5-4800; eight channels of DDR4-3200.
DDR4, DDR5, LAPTOP, SERVER = 51.2, 89.6, 76.8, 204.8

# Peaks are the vendors': data sheets of servers' cards, architecture whitepapers (rtx3060, rtx4090, rtx5090), and for
# other GeForce cards CUDA cores and boost clock of the specification pages (2 FLOP a clock and core, and 4 by the
# tensor cores beside it), of laptops the middle of the range. Hosts are typical ones with one active device; those of
# clouds have the instance type's cores, half of its vCPUs.
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
        # half a link has 8 lanes
        _listed("rtx3070", 40.6, 20.3, 448, 8 * GIB, GEN4, DDR4, 32 * GIB),
        _listed("rtx4060", 30.2, 15.1, 272, 8 * GIB, GEN4 / 2, DDR5, 32 * GIB),
        _listed("rtx4060-laptop", 23.6, 11.8, 256, 8 * GIB, GEN4 / 2, LAPTOP, 16 * GIB),
        _listed("rtx4070-laptop", 31.3, 15.7, 256, 8 * GIB, GEN4 / 2, LAPTOP, 32 * GIB),
        _listed("rtx4070", 58.3, 29.1, 504, 12 * GIB, GEN4, DDR5, 64 * GIB),
        _listed("rtx5070", 61.7, 30.9, 672, 12 * GIB, GEN5, DDR5, 64 * GIB),
        _listed("rtx4080-laptop", 53.7, 26.9, 432, 12 * GIB, GEN4, LAPTOP, 32 * GIB),
        _listed("rtx4060ti-16gb", 44.1, 22.1, 288, 16 * GIB, GEN4 / 2, DDR5, 64 * GIB),
        _listed("rtx4080", 97.5, 48.7, 716.8, 16 * GIB, GEN4, DDR5, 64 * GIB),
        _listed("rtx5060ti-16gb", 47.4, 23.7, 448, 16 * GIB, GEN5 / 2, DDR5, 64 * GIB),
        _listed("rtx5080", 113, 56.3, 960, 16 * GIB, GEN5, DDR5, 64 * GIB),
        _listed("rtx4090-laptop", 68.1, 34, 576, 16 * GIB, GEN4, LAPTOP, 64 * GIB),
        _listed("rtx3090", 71.2, 35.6, 936, 24 * GIB, GEN4, DDR4, 128 * GIB),
        # one card by the hour: as the first group, and cores
        _listed("aws-g5.4xlarge", 70, 35, 600, 24 * GIB, GEN4, SERVER, 64 * GIB, 8),
        _listed("aws-g6e.4xlarge", 362, 91.6, 864, 48 * GIB, GEN4, SERVER, 128 * GIB, 8),
        _listed("gcp-g2-standard-16", 121, 30.3, 300, 24 * GIB, GEN4, SERVER, 64 * GIB, 8),
        _listed("gcp-a2-highgpu-1g", 312, 19.5, 1555, 40 * GIB, GEN4, SERVER, 85e9, 6),
        _listed("lambda-1x-a10", 125, 31.2, 600, 24 * GIB, GEN4, SERVER, 200 * GIB, 15),
        _listed("lambda-1x-h100", 756, 51, 2000, 80 * GIB, GEN5, 307.2, 200 * GIB, 13),
    )
}


# ---- time

COMPUTE, UP, DOWN, CORES = "compute", "host to device", "device to host", "host memory"  # all ranks'
READ, WRITE, NETWORK = "disk read", "disk write", "network"


@dataclass(kw_only=True)
class Work:
    """The work of a part of a step, by lane."""

    flops: float = 0.0  # products in half precision
    fp32_flops: float = 0.0
    moved: float = 0.0  # bytes of device memory that all but products read and write
    up: int = 0  # bytes
    down: int = 0
    read: float = 0.0  # bytes of the disk
    written: float = 0.0
    sent: float = 0.0  # bytes that each host sends the others
    cores: float = 0.0  # bytes of host memory that the cores move

    def __add__(self, other: Work) -> Work:
        """Return the sum of this work and another's, lane by lane."""
        theirs = vars(other)
        return Work(**{lane: own + theirs[lane] for lane, own in vars(self).items()})


def step_cost(parameters: float, states: float = 2, on_device: bool = False) -> Work:
    """Return what an optimizer step of so many parameters moves.

    Args:
        parameters: Parameters that are on the host.
        states: States that the optimizer keeps for each parameter: AdamW has two.
        on_device: Whether they are stepped on the device.
    """
    read, written = 4 * (2 + states) * parameters, 4 * (1 + states) * parameters  # all; all but the gradient
    if on_device:
        return Work(moved=read + written, up=int(written), down=int(written))
    return Work(cores=read + written)  # in half precision, too: a narrower gradient, and a copy that travels


def step_time(
    forward: Work,
    backward: Work,
    step: Work,
    first: Work,
    first_step: Work,
    machine: Machine,
    *,
    alone: bool = False,
    clip: bool = False,
    accumulate: int = 1,
    overlaps: bool = True,
    summed: int = 0,
    ranks: int = 1,
    reached: Reached = REACHED,
) -> tuple[float, dict[str, float]]:
    """Return the seconds of a step, and those for which each lane is busy, from the work of its parts.

    Args:
        forward: Of a forward.
        backward: Of a backward: also gradients that come down, and sums of several batches' gradients.
        step: Of the optimizer.
        first: Of the first unit that travels, which the others leave out: its load and its gradients.
        first_step: Of the optimizer, for the first unit.
        machine: The machine.
        alone: Whether one unit is on the device at a time, so that copies do not run beside compute.
        clip: Whether gradients are clipped by norm: steps begin when the last gradient is there.
        accumulate: Batches whose gradients are added up for a step.
        overlaps: Whether steps run beside compute.
        summed: Bytes of sums of gradients that go to the device for their norms.
        ranks: Devices on this host, which share its memory and cores.
        reached: The rates that a step reaches on any machine.
    """

    def seconds(work: Work) -> float:
        """Return the seconds that this work takes with all lanes side by side."""
        lanes = _lanes(work, machine, reached, ranks)
        link = _both_ways(lanes[UP], lanes[DOWN], machine.duplex)
        disk = _both_ways(lanes[READ], lanes[WRITE], machine.disk_duplex)
        return max(lanes[COMPUTE] + (link if alone else 0), link, disk, lanes[CORES], lanes[NETWORK])

    back = seconds(backward)
    sweep = seconds(forward) + back
    serial = seconds(replace(first, up=0, cores=0)) + seconds(Work(up=first.up)) + seconds(Work(cores=first.cores))
    if not overlaps:
        last = sweep + seconds(step)
    elif clip:
        last = seconds(forward + step) + back
    else:
        last = max(sweep, seconds(forward + backward + step))
    whole = sum([forward, backward, first] * accumulate, step + first_step)
    taken = (accumulate - 1) * sweep + last + accumulate * serial + seconds(first_step) + seconds(Work(up=summed))
    return taken, _lanes(whole, machine, reached, ranks)


def _lanes(work: Work, machine: Machine, reached: Reached, ranks: int) -> dict[str, float]:
    """Return the seconds for which each lane of a machine is busy with this work, whose copies each rank makes."""
    # Gradients of several devices are read once more, to be summed.
    copied = ranks * (work.up + work.down * reached.down_cost * (2 if ranks > 1 else 1))
    stepped = work.cores / (reached.step * machine.cores_bytes_per_s)
    products = work.flops / machine.flops_per_s + work.fp32_flops / (machine.fp32_flops_per_s or machine.flops_per_s)
    return {
        COMPUTE: products / reached.matrix + work.moved / machine.device_bytes_per_s,
        UP: work.up / machine.up_bytes_per_s,
        DOWN: work.down / machine.down_bytes_per_s,
        CORES: max(stepped, (copied + work.cores) / machine.host_bytes_per_s),
        READ: work.read / machine.disk_bytes_per_s,
        WRITE: work.written / machine.disk_out_bytes_per_s,
        NETWORK: work.sent / machine.network_bytes_per_s,
    }


def _both_ways(one: float, other: float, duplex: float) -> float:
    """Return how long copies in two directions take, each at the share ``duplex`` of its rate while both run."""
    return min(one, other) / duplex + abs(one - other)
