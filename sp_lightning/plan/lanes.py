"""Compute how long a step takes, from lanes that run side by side on a machine.

Four lanes matter: compute, copies from host to device, copies from device to host, and the cores, which move bytes in
the host's memory. Copies take what they need of that memory; the cores get what is left, as far as they can use it.
A disk and a network have lanes of their own. `_Step` lists the work of a step, `_Lanes` finds when each piece ends.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from .machines import REACHED, Machine, Reached

COMPUTE, UP, DOWN, CORES = "compute", "host to device", "device to host", "host memory"
READ, WRITE, NETWORK = "disk read", "disk write", "network"

STEPS, FIRST = 5, 2  # simulated steps, and those that only fill the lanes
INSTANT = 1e-12  # seconds that count as none
LEAST = 0.05  # share of the host's memory that cores keep beside copies


class Bytes(NamedTuple):
    """Bytes for each parameter that travels in half precision, and for each other one."""

    half: float = 0.0
    full: float = 0.0


NOTHING = Bytes()


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Bytes of memory that a step costs for each parameter, by kind of pass over them."""

    landed: Bytes = NOTHING  # by the cores, when gradients are down
    added: Bytes = NOTHING  # the same where gradients of several batches are added
    norm: Bytes = NOTHING  # then, if gradients are clipped, by all cores
    norm_by_one: Bytes = NOTHING  # the same by one core
    norm_up: float = 0.0  # that go up for a norm on the device
    scaled: Bytes = NOTHING  # by the cores, for the factor of clipping
    stepped: Bytes = NOTHING  # by the cores, until weights may go up again
    later: Bytes = NOTHING  # the rest of the step, which the next forward does not wait for
    on_device: float = 0.0  # of device memory, for a step there
    up: float = 0.0  # that go up for a step on the device
    down: float = 0.0  # that come down after it


def step_cost(states: float = 2, *, fused: bool = False, on_device: bool = False) -> StepCost:
    """Return what a step of today's runtime costs.

    Args:
        states: States that the optimizer keeps for each parameter: AdamW has two.
        fused: Steps are those of torch's fused kernels, as Hugging Face's Trainer has them by default. They take
            gradients in FP32 and write no wire copies, so gradients are widened before, and weights cast after.
        on_device: Units of the host are stepped on the device.
    """
    read, written = 4 * (2 + states), 4 * (1 + states)  # weight, gradient and states; all but the gradient
    step = read + written
    cost = StepCost(
        added=Bytes(18, 18),  # a fresh copy in FP32, then a sum
        norm=Bytes(2, 0),
        norm_by_one=Bytes(0, 4),
        scaled=Bytes(0, 8),
        stepped=Bytes(step, step),  # half: two bytes less of the gradient, two more for the wire copy
        on_device=step,
    )
    widened = replace(cost, landed=Bytes(2 + 4, 0), norm=Bytes(4, 0), scaled=Bytes(8, 8))
    if on_device:
        return replace(widened, norm=NOTHING, norm_by_one=NOTHING, norm_up=4, up=read, down=written)
    return replace(widened, stepped=Bytes(step + 4 + 2, step)) if fused else cost


@dataclass(frozen=True, kw_only=True)
class UnitWork:
    """A use of a unit in a step: its work and its bytes.

    A unit that is used twice in a forward, such as a tied table, is listed twice under one name. The bytes of its
    loads, gradients and steps are the unit's, and equal in both.
    """

    name: str
    trained: int = 0  # parameters that a step changes
    cast: int = 0  # of those, the ones that are FP32 on the host and travel in half precision
    forward_flops: float = 0.0  # of products in half precision
    backward_flops: float = 0.0  # with the forward that recomputation repeats, as all of backward's work
    forward_fp32_flops: float = 0.0  # of products in FP32
    backward_fp32_flops: float = 0.0
    forward_moved: float = 0.0  # bytes of device memory that all but matrix products read and write
    backward_moved: float = 0.0
    up_nbytes: int = 0  # of each load
    down_nbytes: int = 0  # of its gradients; 0: frozen
    kept_nbytes: int = 0  # activations that go down in forward and come up again before backward
    resident: bool = False  # never leaves the device, and is stepped there
    mesh_nbytes: float = 0.0  # that devices with other shards of it send each other, in forward and again in backward
    file_nbytes: int = 0  # of each load, those that are read from files
    kept_on_disk: int = 0  # of the kept activations, those that are written to the disk and read again
    state_read_nbytes: int = 0  # from the disk, for its step
    state_written_nbytes: int = 0
    sums_nbytes: float = 0.0  # that each host sends the others to sum its gradients
    weights_nbytes: float = 0.0  # that each host sends the others once it has stepped them

    def parameter_bytes(self, cost: Bytes) -> float:
        """Return the bytes that a pass over its trained parameters costs."""
        return self.cast * cost.half + (self.trained - self.cast) * cost.full


@dataclass(frozen=True, kw_only=True)
class Run:
    """The choices that decide the order of work in a step."""

    cost: StepCost
    window: int  # units on the device
    transfer: int = 1  # units exchanged at a time
    inference: bool = False
    clip: bool = False  # by norm: steps begin when the last gradient is there
    accumulate: int = 1  # batches in a step; the time is that of all of them
    optimizer_device: Literal["host", "device"] = "host"
    overlap: Literal["none", "backward", "forward"] = "forward"  # how far steps run beside compute
    ranks: int = 1  # devices on this host, which share its memory and cores


@dataclass(frozen=True)
class StepTime:
    """The time of a step, the lane that was busiest in it, and the seconds for which each lane was busy."""

    seconds: float
    bound_by: str
    lanes: dict[str, float]


def step_time(units: Sequence[UnitWork], machine: Machine, run: Run, reached: Reached = REACHED) -> StepTime:
    """Compute the time of a step over these uses of units, in the order of forward."""
    lanes = _Lanes(machine, run.ranks, reached)
    step = _Step(units, machine, run, reached, lanes)
    begins = [step.issue() for _ in range(STEPS)]
    lanes.work_off()
    begin, end, count = begins[FIRST].end, begins[-1].end, len(begins) - 1 - FIRST
    busy = {lane: seconds / count for lane, seconds in lanes.busy_s(begin, end).items()}
    return StepTime((end - begin) / count, max(busy, key=busy.__getitem__, default=COMPUTE), busy)


# ---- the work of a step, and what each piece of it waits for


class _Step:
    """Issues the work of consecutive steps.

    1. Compute is a chain of visits. A visit waits for its unit's load; loads come one after the other. A load waits for
       its unit's last step, and for the last visit of the unit whose place it takes: the one that is visited latest.
    2. A gradient goes down after its unit's last visit of backward. The visit after the next one waits until it has
       landed: there is one buffer. Then its unit is stepped; if gradients are clipped, all units are, at the end.
    3. The cores turn to the unit that the next forward needs first.
    """

    def __init__(self, units: Sequence[UnitWork], machine: Machine, run: Run, reached: Reached, lanes: _Lanes) -> None:
        self._machine, self._run, self._reached, self._lanes = machine, run, reached, lanes
        self._visits = [(unit, False) for unit in units]
        if not run.inference:
            self._visits += [(unit, True) for unit in reversed(units)]
        self._uses: dict[str, list[int]] = {}  # places of a unit's visits in a pass
        for place, (unit, _) in enumerate(self._visits):
            self._uses.setdefault(unit.name, []).append(place)
        self._sends = [
            bool(unit.trained and is_backward and self._uses[unit.name][-1] == place)
            for place, (unit, is_backward) in enumerate(self._visits)
        ]
        self._landing = run.cost.added if run.accumulate > 1 else run.cost.landed
        self._held: dict[str, list[_Task]] = {}  # the units in the window: their loads
        self._free: list[_Task | None] = [None] * max(1, run.window - run.transfer + 1)  # the last visit in each place
        self._visited: dict[str, _Task] = {}
        self._stepped: dict[str, _Task] = {}  # weights may go up again
        self._over: dict[str, _Task] = {}  # the gradient's memory may be written again
        self._computed: _Task | None = None  # the last visit
        self._before: _Task | None = None  # the one before that
        self._loaded: _Task | None = None

    def issue(self) -> _Task:
        """Issue the work of a step, and return the piece that ends when the step begins."""
        begin = self._compute(0.0, [])
        for batch in range(1, self._run.accumulate + 1):
            self._sweep(is_last=batch == self._run.accumulate)
        if self._run.overlap != "forward":
            self._compute(0.0, list(self._over.values()))
        return begin

    def _sweep(self, is_last: bool) -> None:
        """Issue a forward and its backward."""
        run = self._run
        beside = is_last and not run.clip and run.overlap != "none"
        sent: list[tuple[UnitWork, _Task]] = []
        kept: list[_Task] = []
        for place, (unit, is_backward) in enumerate(self._visits):
            needs = self._load(unit, place)
            if is_backward and unit.kept_nbytes:
                needs.append(self._bring_back(unit, kept.pop()))
            if len(sent) > 1 and self._sends[place - 1]:
                needs.append(sent[-2][1])
            computed = self._visited[unit.name] = self._compute(self._seconds(unit, is_backward), needs)
            if unit.kept_nbytes and not is_backward and not run.inference:
                kept.append(self._put_aside(unit, computed))
            if self._sends[place]:
                sent.append((unit, self._send(unit, computed)))
                if is_last:
                    self._leave(unit.name)
                if beside:
                    self._optimize(unit, sent[-1][1], unit.parameter_bytes(self._landing))
        if sent and not beside:
            self._end_backward(sent, is_last)

    def _end_backward(self, sent: list[tuple[UnitWork, _Task]], is_last: bool) -> None:
        """Issue what the calling thread does once all gradients are down, and the steps that wait for it."""
        cost, on_host = self._run.cost, [unit for unit, _ in sent if not unit.resident]
        nbytes = sum(unit.parameter_bytes(self._landing) for unit in on_host)
        ready = self._lanes.add(CORES, nbytes, *(task for _, task in sent))
        if is_last and self._run.clip:
            by_one = sum(unit.parameter_bytes(cost.norm_by_one) for unit in on_host) / self._reached.one_core
            nbytes = sum(unit.parameter_bytes(each) for unit in on_host for each in (cost.norm, cost.scaled))
            ready = self._lanes.add(UP, cost.norm_up * sum(unit.trained for unit in on_host), ready)
            ready = self._lanes.add(CORES, nbytes + by_one * self._lanes.cores_bytes_per_s, ready)
        self._compute(0.0, [ready])
        if is_last:
            for unit, _ in reversed(sent):
                self._optimize(unit, ready)

    def _load(self, unit: UnitWork, place: int) -> list[_Task]:
        """Issue a load of a unit that is not in the window; return what a visit of it waits for."""
        if unit.resident:
            return [task for task in (self._stepped.get(unit.name),) if task]
        if unit.name not in self._held:
            recent = self._visits[place - 1][0].name
            others = [name for name in self._held if name != recent]
            if others and self._free in ([], [self._computed]):  # no place, or one that was left a moment ago
                self._leave(max(others, key=lambda name: self._next_use(name, place)))
            elif not self._free:
                self._leave(recent)
            left = min(self._free, key=lambda task: task.key[1] if task else -1)
            self._free.remove(left)
            waits = [left, self._stepped.get(unit.name)]
            self._loaded = self._lanes.add(UP, unit.up_nbytes, self._loaded, *waits)
            self._held[unit.name] = [self._loaded]
            if unit.file_nbytes:
                self._held[unit.name].append(self._lanes.add(READ, unit.file_nbytes, *waits))
        return self._held[unit.name]

    def _next_use(self, name: str, place: int) -> int:
        later = [use for use in self._uses[name] if use > place]
        return later[0] if later else self._uses[name][0] + len(self._visits)

    def _leave(self, name: str) -> None:
        """Free a unit's place in the window, once its last visit is over."""
        if self._held.pop(name, None):
            self._free.append(self._visited[name])

    def _compute(self, seconds: float, needs: Sequence[_Task | None]) -> _Task:
        computed = self._lanes.add(COMPUTE, seconds, self._computed, *needs)
        self._before, self._computed = self._computed, computed
        return computed

    def _seconds(self, unit: UnitWork, is_backward: bool) -> float:
        """Return the seconds of a visit's compute: of its products, and of what lies between them."""
        machine = self._machine
        work = unit.forward_flops, unit.forward_fp32_flops, unit.forward_moved
        if is_backward:
            work = unit.backward_flops, unit.backward_fp32_flops, unit.backward_moved
        flops, fp32_flops, moved = work
        products = flops / machine.flops_per_s + fp32_flops / (machine.fp32_flops_per_s or machine.flops_per_s)
        mesh = unit.mesh_nbytes / machine.mesh_bytes_per_s
        return products / self._reached.matrix + moved / machine.device_bytes_per_s + mesh

    def _put_aside(self, unit: UnitWork, computed: _Task) -> _Task:
        sent = self._lanes.add(DOWN, unit.kept_nbytes, computed)
        return self._lanes.add(WRITE, unit.kept_on_disk, sent) if unit.kept_on_disk else sent

    def _bring_back(self, unit: UnitWork, sent: _Task) -> _Task:
        """Issue the way back of activations, which begins one visit before they are needed."""
        read = self._lanes.add(READ, unit.kept_on_disk, sent, self._before) if unit.kept_on_disk else sent
        return self._lanes.add(UP, unit.kept_nbytes, read, self._before)

    def _send(self, unit: UnitWork, computed: _Task) -> _Task:
        """Issue the way of a unit's gradients to where it is stepped."""
        if unit.resident:
            return computed
        sent = self._lanes.add(DOWN, unit.down_nbytes, computed, self._over.get(unit.name))
        return self._lanes.add(NETWORK, unit.sums_nbytes, sent) if unit.sums_nbytes else sent

    def _optimize(self, unit: UnitWork, after: _Task, more_nbytes: float = 0.0) -> None:
        """Issue a unit's step, and this much of the cores' work before it."""
        cost, lanes, name = self._run.cost, self._lanes, unit.name
        urgency = self._uses[name][0]
        on_device = unit.trained * cost.on_device / self._machine.device_bytes_per_s
        if unit.state_read_nbytes:
            after = lanes.add(READ, unit.state_read_nbytes, after)
        if unit.resident:
            stepped = over = lanes.add(COMPUTE, on_device, after)
        elif self._run.optimizer_device == "device":
            came = lanes.add(UP, unit.trained * cost.up, after)
            stepped = over = lanes.add(DOWN, unit.trained * cost.down, lanes.add(COMPUTE, on_device, came))
        else:
            stepped = over = lanes.add(CORES, more_nbytes + unit.parameter_bytes(cost.stepped), after, urgency=urgency)
            if nbytes := unit.parameter_bytes(cost.later):
                over = lanes.add(CORES, nbytes, stepped, urgency=2 * len(self._visits) - urgency)
        if unit.state_written_nbytes:
            over = lanes.add(WRITE, unit.state_written_nbytes, over)
        if unit.weights_nbytes:
            stepped = lanes.add(NETWORK, unit.weights_nbytes, stepped)
        self._stepped[name], self._over[name] = stepped, over


# ---- when each piece of work ends


class _Task:
    """A piece of work for a lane."""

    __slots__ = ("end", "key", "lane", "left", "then", "waits")

    def __init__(self, lane: str, work: float, key: tuple[float, int]) -> None:
        self.lane, self.left, self.key = lane, work, key
        self.waits = 0  # how many pieces it waits for
        self.then: list[_Task] = []  # those that wait for it
        self.end = 0.0

    def __lt__(self, other: _Task) -> bool:
        return self.key < other.key


class _Lanes:
    """The lanes of a machine. Each works at the most urgent piece of those that wait for nothing."""

    def __init__(self, machine: Machine, ranks: int, reached: Reached) -> None:
        self._machine, self._ranks, self._down_cost = machine, ranks, reached.down_cost
        self.cores_bytes_per_s = reached.step * machine.cores_bytes_per_s
        self._ready: dict[str, list[_Task]] = {lane: [] for lane in (COMPUTE, UP, DOWN, CORES, READ, WRITE, NETWORK)}
        self._number = itertools.count()
        self._spans: list[tuple[float, float, tuple[str, ...]]] = []  # from, to, busy lanes

    def add(self, lane: str, work: float, *after: _Task | None, urgency: float = 0) -> _Task:
        """Add a piece of work, in seconds of compute or in bytes."""
        task = _Task(lane, work, (urgency, next(self._number)))
        for other in {*after}:
            if other is not None:
                task.waits += 1
                other.then.append(task)
        if not task.waits:
            heapq.heappush(self._ready[lane], task)
        return task

    def work_off(self) -> None:
        """Find when each piece ends."""
        now = 0.0
        ended: list[_Task] = []
        while busy := tuple(lane for lane, ready in self._ready.items() if ready):
            rates = self._rates(busy)
            tasks = [self._ready[lane][0] for lane in busy]
            span = min(task.left / rate for task, rate in zip(tasks, rates, strict=True))
            self._spans.append((now, now + span, busy))
            now += span
            for task, rate in zip(tasks, rates, strict=True):
                task.left -= span * rate
            for task in [task for task, rate in zip(tasks, rates, strict=True) if task.left <= rate * INSTANT]:
                heapq.heappop(self._ready[task.lane])
                task.end = now
                ended.append(task)
            while ended:
                for other in ended.pop().then:
                    other.waits -= 1
                    if not other.waits:
                        heapq.heappush(self._ready[other.lane], other)

    def busy_s(self, begin: float, end: float) -> dict[str, float]:
        """Return the seconds for which each lane was busy between two times."""
        busy = dict.fromkeys(self._ready, 0.0)
        for start, stop, lanes in self._spans:
            for lane in lanes:
                busy[lane] += max(0.0, min(stop, end) - max(start, begin))
        return {lane: seconds for lane, seconds in busy.items() if seconds}

    @functools.cached_property
    def _rates(self) -> Callable[[tuple[str, ...]], list[float]]:
        return functools.cache(self._shared)

    def _shared(self, busy: tuple[str, ...]) -> list[float]:
        """Return the rate of each of these lanes while all of them are busy."""
        machine = self._machine
        duplex = machine.duplex if UP in busy and DOWN in busy else 1.0
        disk_duplex = machine.disk_duplex if READ in busy and WRITE in busy else 1.0
        rates = {
            COMPUTE: 1.0,
            UP: machine.up_bytes_per_s * duplex,
            DOWN: machine.down_bytes_per_s * duplex,
            CORES: self.cores_bytes_per_s,
            READ: machine.disk_bytes_per_s * disk_duplex,
            WRITE: machine.disk_out_bytes_per_s * disk_duplex,
            NETWORK: machine.network_bytes_per_s,
        }
        sums = 2 if self._ranks > 1 else 1  # gradients of several devices are read once more, to be summed
        taken = self._ranks * ((UP in busy) * rates[UP] + (DOWN in busy) * rates[DOWN] * self._down_cost * sums)
        host = machine.host_bytes_per_s
        left = LEAST * host if CORES in busy else 0.0
        slower = min(1.0, (host - left) / taken) if taken else 1.0
        rates[UP] *= slower
        rates[DOWN] *= slower
        rates[CORES] = min(rates[CORES], host - taken * slower)
        return [rates[lane] for lane in busy]
