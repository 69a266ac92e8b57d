"""How long a step will take, before there is a device: the runtime's own schedule against a model of a machine.

1. Work is issued in the order in which the runtime's calling thread issues it, by the same ``Schedule``. As there, no
   decision depends on time, so all work of several steps is issued first and timed afterwards.
2. Four lanes run side by side: the way up, compute, the way down, and the host thread that steps the optimizer. A piece
   of work starts as soon as what it waits for has ended and its lane is free; lanes keep the order of issue.
3. Up: after a unit was evicted, everything that follows waits for what compute was given before (unit_store.py, Rule
   3).
4. Compute: a visit waits for its unit's bytes. Packing a unit's gradients waits until the ones packed before are down
   (gradients.py, Rule 3); the copy down of the packed ones follows, and then the unit's step.
5. The next step begins when the whole optimizer is through. With ``steps_into_forward`` only a unit's way up waits, for
   that unit's own step; then the host steps what arrived last first, as forward needs it first, and turns to what is
   more urgent between the pieces of a unit.
6. Each direction of the link is slowed down by the machine's duplex factor while the other one runs.
7. Units that stay on the device come up on demand, at their first visit after a step changed them.

What is measured is the time from the first forward's begin to the next step's, after steps that are not counted.

Not modelled: launches, the optimizer's and the links' competition for host memory, what the device allocator wastes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from ..errors import OptionError
from .lanes import InOrder, LaneName, NewestFirst, Task, run
from .machine import Machine
from .schedule import Schedule
from .spans import Span

Activations = Literal["keep", "recompute"]
LANES: tuple[LaneName, ...] = get_args(LaneName)
WAITS: dict[LaneName, str] = {"up": "weights", "down": "gradients", "optimizer": "optimizer"}  # what waits for a lane

PARTS = 4  # of a unit's step, between which the host turns to what is more urgent
STEPS = 4  # that are run: the first ones fill the pipeline, the time between the last two counts


@dataclass(frozen=True)
class UnitCost:
    """What one unit costs in one step."""

    name: str
    up_nbytes: int  # each time it is brought up
    down_nbytes: int  # its gradients; 0 for a frozen unit
    parameters: int  # that the optimizer steps
    forward_flops: float
    backward_flops: float  # without the forward that "recompute" repeats
    activation_nbytes: int = 0  # what autograd saves in it
    input_nbytes: int = 0  # what "recompute" keeps of that
    resident: bool = False  # stays on the device, outside the window

    @property
    def trained(self) -> bool:
        """Whether a step changes it."""
        return self.down_nbytes > 0


@dataclass(frozen=True)
class SimulatedVisit:
    """What compute does from one visit to the next, and what it sets going, for a step that is not a plain sweep."""

    unit: int  # that is visited
    flops: float
    held: tuple[int, ...] = ()  # units that are being visited meanwhile
    sends: tuple[int, ...] = ()  # units whose gradients are complete after it
    stowed_nbytes: int = 0  # activations that go to the host after it
    fetched_nbytes: int = 0  # and come back before it
    nbytes: int = 0  # on the device beside weights


@dataclass(frozen=True)
class LowerBound:
    """What a step has to do, in seconds of each lane.

    The first visited unit's gradient, step and way up are counted apart: nothing can run beside them.
    """

    compute_forward: float
    compute_backward: float
    up_forward: float
    up_backward: float
    down: float
    optimizer: float
    first_down: float
    first_step: float
    first_up: float
    duplex: float
    chain: float  # the longest one of work that the order of units puts one after the other; no step can be shorter

    @property
    def forward(self) -> float:
        """Forward's part."""
        return max(self.compute_forward, self.up_forward)

    @property
    def link_backward(self) -> float:
        """Both ways at once, at what each then has of the link, and what is left of the longer one alone."""
        return max(self.up_backward, self.down) + min(self.up_backward, self.down) * (1 / self.duplex - 1)

    @property
    def backward(self) -> float:
        """Backward's part."""
        return max(self.compute_backward, self.link_backward)

    @property
    def seconds(self) -> float:
        """The floor, with as much of the optimizer carried into forward as helps."""
        return max(self.forward + self.backward, self.optimizer) + self.first_down + self.first_step + self.first_up

    @property
    def bound(self) -> float:
        """The whole-step bound, which cannot be reached: one lane busy all the time, the others beside it."""
        return max(
            self.compute_forward + self.compute_backward,
            self.up_forward + self.up_backward + self.first_up,
            self.down + self.first_down,
            self.optimizer + self.first_step,
        )

    @property
    def binds(self) -> str:
        """What makes the floor as long as it is: "compute", "link" or "optimizer"."""
        if self.optimizer > self.forward + self.backward:
            return "optimizer"
        compute = (self.compute_forward, self.compute_backward)
        return "compute" if compute == (self.forward, self.backward) else "link"


@dataclass(frozen=True)
class Simulation:
    """One step among equal ones."""

    step_s: float
    compute_s: float
    stall_s: dict[str, float]  # in which compute was idle, by the lane that it was waiting for
    peak_nbytes: int  # on the device: weights, gradients and activations
    timeline: list[Span]  # since the first forward's begin; negative where it was under way by then
    waits: list[Span]  # of compute
    floor: LowerBound

    @property
    def merit(self) -> float:
        """floor / step."""
        return self.floor.seconds / self.step_s


def simulate(
    units: Sequence[UnitCost],
    schedule: Schedule,
    machine: Machine,
    *,
    activations: Activations = "keep",
    optimizer_overlap: bool = True,
    steps_into_forward: bool = False,
    works: Sequence[SimulatedVisit] = (),
) -> Simulation:
    """How a training step over these units would go on that machine.

    Args:
        units: In the order of forward.
        schedule: Of these units' ``up_nbytes``; it is used up.
        machine: A profile (`machine.MACHINES`), or measured numbers.
        activations: What becomes of what autograd saves.
        optimizer_overlap: Units are stepped while backward runs, otherwise after it.
        steps_into_forward: Units may be stepped while the next forward runs (Rule 5).
        works: What a step does, visit by visit, with what ``activations`` costs; by default forward over all units and
            backward the other way.
    """
    if not units:
        raise OptionError(argument="units", found=len(units), allowed="at least one unit")
    if activations not in ("keep", "recompute"):
        raise OptionError(argument="activations", found=activations, allowed="'keep' or 'recompute'")
    recompute = activations == "recompute"
    host = _Host(units, schedule, machine, recompute, optimizer_overlap, steps_into_forward, works)
    starts = [host.step() for _ in range(STEPS)]
    run(host.lanes, machine.duplex)
    begin, end = starts[-2].start, starts[-1].start
    waits = _waits([task for task in host.tasks if task.lane == "compute"], units, begin, end)
    return Simulation(
        step_s=end - begin,
        compute_s=math.fsum(task.work for task in host.tasks if task.lane == "compute" and begin <= task.start < end),
        stall_s={lane: math.fsum(wait.seconds for wait in waits if wait.stall == WAITS[lane]) for lane in WAITS},
        peak_nbytes=host.peak,
        timeline=_timeline(host.tasks, units, begin, end),
        waits=waits,
        floor=floor(units, schedule.window, machine, recompute),
    )


def floor(units: Sequence[UnitCost], window: int, machine: Machine, recompute: bool) -> LowerBound:
    """What a step over these units has to do."""
    first, rest = units[0], units[1:]
    streamed = [unit for unit in units if not unit.resident]
    again = streamed[: max(0, len(streamed) - window)]  # the others stay for backward
    stay = streamed[:window]  # from the last backward, unless they were stepped
    come = [unit for unit in rest if unit.trained or not (unit.resident or unit in stay)]
    forward = math.fsum(unit.forward_flops for unit in units)
    backward = math.fsum(unit.backward_flops for unit in units) + recompute * forward
    return LowerBound(
        compute_forward=forward / machine.flops_per_s,
        compute_backward=backward / machine.flops_per_s,
        up_forward=sum(unit.up_nbytes for unit in come) / machine.up_bytes_per_s,
        up_backward=sum(unit.up_nbytes for unit in again) / machine.up_bytes_per_s,
        down=sum(unit.down_nbytes for unit in rest) / machine.down_bytes_per_s,
        optimizer=math.fsum(_step_s(unit, machine) for unit in rest),
        first_down=first.down_nbytes / machine.down_bytes_per_s,
        first_step=_step_s(first, machine),
        first_up=first.trained * first.up_nbytes / machine.up_bytes_per_s,
        duplex=machine.duplex,
        chain=_chain(units, machine, recompute),
    )


def _chain(units: Sequence[UnitCost], machine: Machine, recompute: bool) -> float:
    """Of all units: backward from the last one to it, its way down, the step of it and of all before it, a way up,
    forward from it to the last one."""
    flops = [(1 + recompute) * unit.forward_flops + unit.backward_flops for unit in units]
    longest = left = math.fsum(flops) / machine.flops_per_s
    steps, up = 0.0, math.inf
    for unit, own in zip(units, flops, strict=True):
        if unit.trained:
            steps += _step_s(unit, machine)
            up = min(up, unit.up_nbytes / machine.up_bytes_per_s)
            longest = max(longest, left + unit.down_nbytes / machine.down_bytes_per_s + steps + up)
        left -= own / machine.flops_per_s
    return longest


def _step_s(unit: UnitCost, machine: Machine) -> float:
    return unit.trained * unit.parameters * machine.optimizer_bytes_per_parameter / machine.dram_bytes_per_s


# ---- issuing


class _Host:
    """Issues the work of consecutive steps as the runtime's calling thread does (Rule 1)."""

    def __init__(
        self,
        units: Sequence[UnitCost],
        schedule: Schedule,
        machine: Machine,
        recompute: bool,
        overlap: bool,
        into_forward: bool,
        works: Sequence[SimulatedVisit],
    ) -> None:
        self.tasks: list[Task] = []
        self.lanes = {name: InOrder() for name in LANES}
        if into_forward:
            self.lanes["optimizer"] = NewestFirst()
        self._units = units
        self._works = works
        self._schedule = schedule
        self._machine = machine
        self._recompute = recompute
        self._overlap = overlap
        self._into_forward = into_forward
        self._order: list[int] = []
        self._last: int | None = None  # the unit visited last
        self._ready: dict[int, Task] = {}  # the way up of what is on the device
        self._stepped: dict[int, Task] = {}  # what wrote the host bytes
        self._arrived: list[tuple[int, Task]] = []  # gradients that are to be stepped after backward
        self._begin: Task | None = None  # for which all work of the step waits (Rule 5)
        self._reader: Task | None = None  # the compute after which the next way up may start (Rule 3)
        self._computing: Task | None = None
        self._landing: Task | None = None  # whose packed buffer is held
        self._leaving: Task | None = None  # activations on their way down
        self._resident_nbytes = sum(unit.up_nbytes for unit in units if unit.resident)
        self._saved_nbytes = 0
        self._packed_nbytes = 0
        self.peak = 0
        schedule.invalidate()

    def step(self) -> Task:
        """One step; returns its first compute."""
        self._open()
        if self._works:
            first, *_ = [self._do(work) for work in self._works]
        else:
            count = len(self._units)
            first, *_ = [self._forward(unit) for unit in range(count)]
            for unit in reversed(range(count)):
                self._backward(unit)
        self._close()
        return first

    def _do(self, work: SimulatedVisit) -> Task:
        for index, unit in enumerate(self._units):
            if unit.resident:
                self._visit(index)
        self._visit(work.unit, work.held)
        back = None
        if work.fetched_nbytes:
            seconds = work.fetched_nbytes / self._machine.up_bytes_per_s
            back = self._issue("up", work.unit, seconds, [self._computing])  # whose memory it takes
        task = self._compute(work.unit, work.flops, back)
        self.peak = max(self.peak, self._resident_nbytes + self._schedule.resident_nbytes + work.nbytes)
        self._stow(work)
        for sent in work.sends:
            self._send(sent)
        return task

    def _stow(self, work: SimulatedVisit) -> None:
        """What a unit saved leaves; the memory is given back at the end of the next one (offload.py, Rule 2)."""
        if self._leaving is not None:
            self._computing = self._issue("compute", work.unit, 0.0, [self._leaving])
            self._leaving = None
        if work.stowed_nbytes:
            seconds = work.stowed_nbytes / self._machine.down_bytes_per_s
            self._leaving = self._issue("down", work.unit, seconds, [self._computing])

    def _open(self) -> None:
        stale = [unit for unit in self._schedule.resident if self._is_stale(unit)]
        if self._schedule.invalidate(stale):
            self._reader = self._computing
        self._schedule.begin(self._order)
        self._order, self._last = [], None

    def _close(self) -> None:
        self._let_go()
        for unit, landing in self._arrived:
            self._step(unit, [landing, self._computing])
        self._arrived = []
        if not self._into_forward and self._stepped:
            self._begin = max(self._stepped.values(), key=lambda task: task.number)

    def _forward(self, index: int) -> Task:
        unit = self._units[index]
        self._visit(index)
        task = self._compute(index, unit.forward_flops)
        self._observe(unit.activation_nbytes)
        self._saved_nbytes += unit.input_nbytes if self._recompute else unit.activation_nbytes
        return task

    def _backward(self, index: int) -> None:
        unit = self._units[index]
        self._visit(index)
        self._compute(index, unit.backward_flops + self._recompute * unit.forward_flops)
        self._observe(unit.down_nbytes + self._recompute * unit.activation_nbytes)
        self._saved_nbytes -= unit.input_nbytes if self._recompute else unit.activation_nbytes
        if unit.trained:
            self._let_go()
            self._observe(2 * unit.down_nbytes)  # as autograd made them, and packed
            self._send(index)

    def _visit(self, index: int, held: tuple[int, ...] = ()) -> None:
        if self._units[index].resident:
            if self._is_stale(index):
                self._reader = self._computing
                self._load(index)
        elif index != self._last:
            decision = self._schedule.visit(index, held)
            if decision.evict:
                self._reader = self._computing
            for unit in decision.load:
                self._load(unit)
            self._last = index
            self._order.append(index)

    def _is_stale(self, index: int) -> bool:
        ready, stepped = self._ready.get(index), self._stepped.get(index)
        return ready is None or (stepped is not None and stepped.number > ready.number)

    def _load(self, index: int) -> None:
        stepped = self._stepped.get(index) if self._into_forward else None
        work = self._units[index].up_nbytes / self._machine.up_bytes_per_s
        self._ready[index] = self._issue("up", index, work, [self._begin, self._reader, stepped])

    def _compute(self, index: int, flops: float, back: Task | None = None) -> Task:
        work = flops / self._machine.flops_per_s
        self._computing = self._issue("compute", index, work, [self._begin, self._ready[index], back])
        return self._computing

    def _send(self, index: int) -> None:
        self._let_go()
        nbytes = self._units[index].down_nbytes
        self._landing = self._issue("down", index, nbytes / self._machine.down_bytes_per_s, [self._computing])
        self._packed_nbytes = nbytes
        if self._overlap:
            self._step(index, [self._landing])
        else:
            self._arrived.append((index, self._landing))

    def _let_go(self) -> None:
        if self._landing is not None:
            self._computing = self._issue("compute", self._landing.unit, 0.0, [self._landing])
            self._landing, self._packed_nbytes = None, 0

    def _step(self, index: int, after: list[Task | None]) -> None:
        parts = PARTS if self._into_forward else 1
        work = _step_s(self._units[index], self._machine) / parts
        for _ in range(parts):
            self._stepped[index] = self._issue("optimizer", index, work, after)
            after = [self._stepped[index]]

    def _issue(self, lane: LaneName, unit: int, work: float, after: list[Task | None]) -> Task:
        earlier = {task for task in after if task is not None}
        task = Task(lane, unit, work, number=len(self.tasks), waits=len(earlier), left=work)
        for other in earlier:
            other.then.append(task)
        self.tasks.append(task)
        self.lanes[lane].add(task)
        return task

    def _observe(self, nbytes: int) -> None:
        """These bytes are on the device too, for a moment."""
        held = self._resident_nbytes + self._schedule.resident_nbytes + self._saved_nbytes + self._packed_nbytes
        self.peak = max(self.peak, held + nbytes)


# ---- reading


def _waits(computes: list[Task], units: Sequence[UnitCost], begin: float, end: float) -> list[Span]:
    """Compute's idle times by the lane that was busy with what it waited for."""
    waits = []
    for before, task in itertools.pairwise(computes):
        if begin < task.start <= end:
            waiting: Task = task
            while waiting.start > before.end and waiting.blocker is not None:
                cause = waiting.blocker
                since = max(cause.start, before.end)
                name = units[cause.unit].name
                waits.append(Span("compute", name, since - begin, waiting.start - begin, stall=WAITS[cause.lane]))
                waiting = cause
    return sorted(waits, key=lambda span: span.start)


def _timeline(tasks: list[Task], units: Sequence[UnitCost], begin: float, end: float) -> list[Span]:
    """The work that ended within the step; pieces that follow each other are one."""
    spans: dict[LaneName, list[Span]] = {}
    for task in sorted(tasks, key=lambda task: (task.start, task.number)):
        if begin < task.end <= end and task.end > task.start:
            lane = spans.setdefault(task.lane, [])
            span = Span(task.lane, units[task.unit].name, task.start - begin, task.end - begin)
            if task.lane == "optimizer" and lane and (lane[-1].unit, lane[-1].end) == (span.unit, span.start):
                span = lane.pop()._replace(end=span.end)
            lane.append(span)
    return sorted(itertools.chain(*spans.values()), key=lambda span: (span.start, LANES.index(span.lane)))
