"""A step of a run, from its trace: what is on the device at each moment, and how long the step takes.

Of the time four lanes decide: compute, copies from host to device, copies from device to host, and the cores, which
move bytes in the host's memory. Copies take what they need of that memory; the cores get what is left, as far as they
can use it. A disk and a network have lanes of their own. A step is a forward and a backward, in each of which the
busiest lane decides, and what nothing runs beside: the first unit, whose gradients come last and which is needed
first.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from ..stream.schedule import Schedule
from .machines import REACHED, Machine, Reached
from .trace import Trace, Work

# What bytes on the device are for.
WINDOW, ROOT, KEPT, WORKING = "window", "resident root", "kept for backward", "activations of one unit"
GRADIENTS = "gradient buffers"
PASSES = 3  # over the units: from the third on all are alike
RING = 2  # units whose gradients, or activations, are on their way down while others compute


class Sweep(NamedTuple):
    """The bytes on the device by term at a step's fullest moment, and its loads in forward and in backward."""

    window: int
    transfer: int
    terms: dict[str, int]
    loads: dict[bool, list[int]]
    up: int  # bytes of these loads
    loads_each: float  # how often a unit is loaded


def sweep(found: Trace, window: int, transfer: int) -> Sweep:
    """Simulate the run's loads and evictions over the visits of a step; return its fullest moment, and its loads."""
    sizes = found.setting.sizes
    schedule = Schedule([size.up_nbytes for size in sizes], window, min(transfer, window))
    trained = [index for index, size in enumerate(sizes) if size.trained]
    order = [visit.unit for visit in found.visits if visit.unit is not None]
    coming = [0]  # by visit: bytes of activations that come up for the next one that needs any
    for visit in reversed(found.visits):
        coming.insert(0, visit.work.up or coming[0])
    packs, leaving = deque[int](maxlen=RING), deque[int](maxlen=RING)
    terms, loads = dict[str, int](), dict[bool, list[int]]()
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
    root, every = sum(size.up_nbytes for size in sizes if size.resident), [*loads[False], *loads[True]]
    terms |= {ROOT: root, "batch": found.batch, "buffers": found.buffers}
    each = len(every) / max(1, sum(not size.resident for size in sizes))
    return Sweep(window, transfer, terms, loads, sum(sizes[index].up_nbytes for index in every), each)


# ---- time

COMPUTE, UP, DOWN, CORES = "compute", "host to device", "device to host", "host memory"
READ, WRITE, NETWORK = "disk read", "disk write", "network"


class Bytes(NamedTuple):
    """Bytes for each parameter that travels in half precision, and for each other one."""

    half: float = 0.0
    full: float = 0.0

    def of(self, work: Work) -> float:
        """Return the bytes of one pass over the parameters that this work trains."""
        return work.cast * self.half + (work.trained - work.cast) * self.full


NO_BYTES = Bytes()


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Bytes of memory that a step costs for each parameter, by kind of pass over them."""

    added: Bytes = NO_BYTES  # moved by the cores, where gradients of several batches are added
    stepped: Bytes = NO_BYTES  # moved by the cores in the step itself
    on_device: float = 0.0  # device memory that a step on the device moves
    up: float = 0.0  # bytes that go up for a step on the device
    down: float = 0.0  # bytes that come down after a step on the device


def step_cost(states: float = 2, *, on_device: bool = False) -> StepCost:
    """Return the bytes of memory that an optimizer step moves for each parameter.

    Args:
        states: States that the optimizer keeps for each parameter: AdamW has two.
        on_device: Whether units whose weights are on the host are stepped on the device.
    """
    read, written = 4 * (2 + states), 4 * (1 + states)  # weight, gradient and states; all but the gradient
    step = read + written
    added = Bytes(2 + 8, 4 + 8)  # a gradient as it came down, to a sum in FP32
    if on_device:
        return StepCost(added=added, on_device=step, up=written, down=written)
    return StepCost(added=added, stepped=Bytes(step, step))  # half: a narrower gradient, and a copy that travels


@dataclass(frozen=True, kw_only=True)
class Run:
    """The choices that decide what runs beside what in a step."""

    cost: StepCost
    alone: bool = False  # one unit is on the device at a time, so copies do not run beside compute
    clip: bool = False  # clipped by norm, steps begin when the last gradient is there
    accumulate: int = 1  # batches whose gradients are added up for a step
    overlap: Literal["none", "forward"] = "forward"  # how far steps run beside compute
    summed: int = 0  # bytes of sums of gradients, whose norms are taken on the device
    ranks: int = 1  # devices on this host, which share its memory and cores


@dataclass(frozen=True)
class StepTime:
    """The time of a step, the lane that was busiest in it, and the seconds for which each lane was busy."""

    seconds: float
    bound_by: str
    lanes: dict[str, float]


def step_time(
    forward: Work, backward: Work, step: Work, first: Work, machine: Machine, run: Run, reached: Reached = REACHED
) -> StepTime:
    """Compute the time of a step from the work of its parts.

    Args:
        forward: Of a forward.
        backward: Of a backward, gradients that come down among it.
        step: Of the optimizer: trained parameters, and what it moves for them.
        first: Of the first unit that travels, which the others leave out: its load, its gradients, its parameters.
        machine: The machine.
        run: What runs beside what.
        reached: The rates that a step reaches on any machine.
    """
    cost, rates = run.cost, _Rates(machine, run, reached)
    seconds = rates.seconds
    step, first = (
        one.plus(
            Work(up=int(cost.up * one.trained), down=int(cost.down * one.trained), moved=cost.on_device * one.trained)
        )
        for one in (step, first)
    )
    added, added_first = (cost.added.of(one) if run.accumulate > 1 else 0.0 for one in (step, first))
    back = seconds(backward, added)  # where gradients are added as they come
    sweep, stepped = seconds(forward) + back, cost.stepped.of(step)
    alone = seconds(replace(first, up=0)) + seconds(Work(up=first.up)) + added_first / rates.cores
    serial = cost.stepped.of(first) / rates.cores
    if run.clip:
        serial += seconds(Work(up=run.summed)) if run.accumulate > 1 else 0.0
        beside = seconds(forward.plus(step), stepped) + back
    else:
        beside = max(sweep, seconds(forward.plus(backward).plus(step), added + stepped))
    if run.overlap == "none":
        beside = sweep + seconds(step, stepped)
    more = (run.accumulate - 1) * (sweep + alone)
    whole = forward.plus(backward).plus(Work(up=first.up, down=first.down)).times(run.accumulate).plus(step)
    busy = rates.lanes(whole, stepped + cost.stepped.of(first) + run.accumulate * (added + added_first))
    return StepTime(more + beside + alone + serial, max(busy, key=busy.__getitem__), busy)


class _Rates:
    """The rates of a machine in a run."""

    def __init__(self, machine: Machine, run: Run, reached: Reached) -> None:
        self._machine, self._run, self._reached = machine, run, reached
        self.cores = reached.step * machine.cores_bytes_per_s

    def lanes(self, work: Work, on_cores: float) -> dict[str, float]:
        """Return the seconds for which each lane is busy with this work; the cores move ``on_cores`` bytes."""
        machine = self._machine
        products = work.flops / machine.flops_per_s + work.fp32_flops / (
            machine.fp32_flops_per_s or machine.flops_per_s
        )
        return {
            COMPUTE: products / self._reached.matrix + work.moved / machine.device_bytes_per_s,
            UP: work.up / machine.up_bytes_per_s,
            DOWN: work.down / machine.down_bytes_per_s,
            CORES: on_cores / self.cores,
            READ: work.read / machine.disk_bytes_per_s,
            WRITE: work.written / machine.disk_out_bytes_per_s,
            NETWORK: work.sent / machine.network_bytes_per_s,
        }

    def seconds(self, work: Work, on_cores: float = 0.0) -> float:
        """Return the seconds that this work takes with all lanes side by side; the cores move ``on_cores`` bytes."""
        lanes, machine, ranks = self.lanes(work, on_cores), self._machine, self._run.ranks
        link = _both_ways(lanes[UP], lanes[DOWN], machine.duplex)
        disk = _both_ways(lanes[READ], lanes[WRITE], machine.disk_duplex)
        sums = 2 if ranks > 1 else 1  # gradients of several devices are read once more, to be summed
        copied = ranks * (work.up + work.down * self._reached.down_cost * sums)
        memory = max(lanes[CORES], (copied + on_cores) / machine.host_bytes_per_s)
        compute = lanes[COMPUTE] + (link if self._run.alone else 0)
        return max(compute, link, disk, memory, lanes[NETWORK])


def _both_ways(one: float, other: float, duplex: float) -> float:
    """Return how long copies in two directions take, each at the share ``duplex`` of its rate while both run."""
    return min(one, other) / duplex + abs(one - other)
