"""A step of a run, from its trace: what is on the device at each moment, and how long the step takes.

Of the time four lanes decide: compute, copies from host to device, copies from device to host, and the cores, which
move bytes in the host's memory. Copies take what they need of that memory; the cores get what is left, as far as they
can use it. A disk and a network have lanes of their own. A step is a forward and a backward, in each of which the
busiest lane decides, and what nothing runs beside: the first unit, whose gradients come last and which is needed
first.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from ..stream.schedule import Schedule
from .machines import REACHED, Machine, Reached
from .trace import Trace, Work

# What bytes on the device are for.
WINDOW, ROOT, KEPT, WORKING = "window", "resident root", "kept for backward", "activations of one unit"
GRADIENTS = "gradient buffers"
PASSES = 3  # over the units: from the third on all are alike
RING = 2  # units whose gradients, or activations, are on their way down while others compute


Loads = dict[bool, list[int]]  # indices of units that a step loads, by whether backward runs


def sweep(found: Trace, window: int, transfer: int) -> tuple[dict[str, int], Loads]:
    """Simulate the run's loads and evictions over the visits of a step.

    Returns the bytes on the device by term at its fullest moment, and its loads.
    """
    sizes = found.sizes
    schedule = Schedule([size.up_nbytes for size in sizes], window, min(transfer, window))
    trained = [index for index, size in enumerate(sizes) if size.down_nbytes]
    order = [visit.unit for visit in found.visits if visit.unit is not None]
    coming = [0]  # by visit: bytes of activations that come up for the next one that needs any
    for visit in reversed(found.visits):
        coming.insert(0, visit.work.up or coming[0])
    packs, leaving = deque[int](maxlen=RING), deque[int](maxlen=RING)
    terms, loads = dict[str, int](), Loads()
    for number in range(PASSES):
        schedule.invalidate(trained)
        packs.clear()
        schedule.begin(order if number else (), wrap=bool(number))
        there, loads = 0, {False: [], True: []}
        for visit, ahead in zip(found.visits, coming[1:], strict=True):
            if visit.unit is not None:
                loads[visit.backward] += schedule.visit(visit.unit, visit.in_use).load
            if visit.work.up:
                leaving.clear()
            beside = there + visit.peak + sum(leaving) + (ahead if visit.work.up else 0)
            kept = max(0, min(there + sum(leaving), beside))
            now = {WINDOW: schedule.loaded_nbytes, KEPT: kept, WORKING: beside - kept, GRADIENTS: sum(packs)}
            if sum(now.values()) > sum(terms.values()):
                terms = now
            there += visit.grown
            packs.extend(visit.packed)
            leaving.extend([visit.leaving] * bool(visit.leaving))
    root = sum(size.up_nbytes for size in sizes if size.resident)
    return terms | {ROOT: root, "batch": found.batch, "buffers": found.buffers}, loads


# ---- time

COMPUTE, UP, DOWN, CORES = "compute", "host to device", "device to host", "host memory"
READ, WRITE, NETWORK = "disk read", "disk write", "network"


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
        lanes = _lanes(work, machine, reached)
        link = _both_ways(lanes[UP], lanes[DOWN], machine.duplex)
        disk = _both_ways(lanes[READ], lanes[WRITE], machine.disk_duplex)
        sums = 2 if ranks > 1 else 1  # gradients of several devices are read once more, to be summed
        copied = ranks * (work.up + work.down * reached.down_cost * sums)
        memory = max(lanes[CORES], (copied + work.cores) / machine.host_bytes_per_s)
        compute = lanes[COMPUTE] + (link if alone else 0)
        return max(compute, link, disk, memory, lanes[NETWORK])

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
    return taken, _lanes(whole, machine, reached)


def _lanes(work: Work, machine: Machine, reached: Reached) -> dict[str, float]:
    """Return the seconds for which each lane of a machine is busy with this work."""
    products = work.flops / machine.flops_per_s + work.fp32_flops / (machine.fp32_flops_per_s or machine.flops_per_s)
    return {
        COMPUTE: products / reached.matrix + work.moved / machine.device_bytes_per_s,
        UP: work.up / machine.up_bytes_per_s,
        DOWN: work.down / machine.down_bytes_per_s,
        CORES: work.cores / (reached.step * machine.cores_bytes_per_s),
        READ: work.read / machine.disk_bytes_per_s,
        WRITE: work.written / machine.disk_out_bytes_per_s,
        NETWORK: work.sent / machine.network_bytes_per_s,
    }


def _both_ways(one: float, other: float, duplex: float) -> float:
    """Return how long copies in two directions take, each at the share ``duplex`` of its rate while both run."""
    return min(one, other) / duplex + abs(one - other)
