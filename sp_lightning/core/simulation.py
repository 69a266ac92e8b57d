"""Predict how long a step takes, without a device: the runtime's own schedule against a model of a machine.

1. Work is issued in the order in which the runtime's calling thread issues it, by the same ``Schedule``. As in the
   runtime, no decision depends on time, so all work of several steps is issued first and timed afterwards.
2. Four lanes run side by side: the way up, compute, the way down, and the host thread that steps the optimizer; two
   more for a disk, which is read and written; and one for the network. A task starts as soon as everything it waits
   for has ended and its lane is free; lanes keep the order of issue.
3. Up: after a unit was evicted, every later load waits for the compute issued before it (device_copy.py, Rule 2).
4. Compute: a visit waits for its unit's bytes. Packing a unit's gradients waits until the ones packed before are down
   (way_down.py, Rule 3); then follow the copy down of the packed ones and the unit's step.
5. The next step begins when the whole optimizer step is done. With ``steps_into_forward`` only a unit's load waits, for
   that unit's own step. The host then first steps the unit whose gradients arrived last, because forward needs it
   first, and turns to a more urgent unit between the pieces of another one. Gradients that are clipped or unscaled are
   final after backward: the calling thread reads them once more then, and all units are stepped after that.
6. Each direction of the link is slowed down by the machine's duplex factor while the other one runs; so is each of the
   disk's.
7. Units that stay on the device are loaded on demand, at their first visit after a step changed them.
8. The optimizer and the copies share the host's memory. A copy up reads it, a copy down writes it; the optimizer takes
   as much of the bandwidth as the cores can. What runs at a time and would take more than there is is slowed down, each
   by the same factor. Several ranks, one for each device, do the same at the same time, so one rank's lanes are
   simulated: each rank's copies take their share, gradients that are down are read once more, by the owner of the sum,
   and the ranks cut the optimizer's work.
9. What is read from files goes up while more is read: a load is over when both lanes are done. State on the disk is
   read, stepped and written in pieces, one after the other; the unit is stepped when all are written, because the
   buffers between the lanes are small. Weights are read first.
10. Where the device steps, a unit's weights, gradients and state go up in pieces and come down stepped. They have
   streams of their own, and move while the copies of units and of gradients, in their order, have to wait. State on
   the disk comes and goes beside that, but one piece has to be down before the next one goes up.
11. With several machines each sends every other one that one's share of its sum of a unit's gradients, once they are
   down, and then the sum of all machines' of its own share; units follow in the order in which they come. As many bytes
   come from each meanwhile. Backward ends when all have come (exchange.py, Rule 11). Where each steps a share, its new
   weights cross after that, and the unit is stepped when all have come (new_weights.py, Rule 5).
12. Where layers are cut into shards (tensor parallelism), their collectives are part of compute, which waits for them:
   each rank sends as many bytes as in a ring, at the speed of the link between these devices.
13. Products take the time of their arithmetic or, if that is longer, of the memory that they read and write: of all
    products of a visit together. What lies between them (norms, casts, sums) takes that of the memory that it moves.
14. Activations that go on to the disk are written when they are down, and the next ones go down only then: the memory
   between is small. They are read while the visit before them computes, and go up from there.

The measured time is that from the begin of a step's first forward to the begin of the next one's, after steps that are
not counted.

Not modelled: launches, what disks and the network take of the host's memory, threads that hinder each other, the
competition of collectives with the copies to and from the host, memory that the device allocator wastes.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from ..errors import OptionError
from .event_loop import InOrder, LaneName, NewestFirst, StateBeside, Task, WeightsFirst, run
from .machine import Machine
from .schedule import Schedule
from .telemetry import Span
from .unit_numbers import UnitNumbers

Activations = Literal["keep", "recompute"]
LANES: tuple[LaneName, ...] = get_args(LaneName)
WAITS: dict[LaneName, str] = {"up": "weights", "down": "gradients", "optimizer": "optimizer"}  # stalls, by lane
NETWORK: dict[LaneName, str] = {"network": "network"}
ON_DISK: dict[LaneName, str] = {"disk in": "disk", "disk out": "disk"}
ON_LINK: tuple[LaneName, LaneName] = ("up", "down")

PARTS = 4  # pieces of a unit's step, between which the host or the device can turn to a more urgent unit
STEPS = 4  # simulated steps: the first ones fill the pipeline, the time between the last two counts


@dataclass(frozen=True)
class SimulatedVisit:
    """The compute from one visit to the next and the copies it starts, for a step that is not a plain sweep."""

    unit: int  # the visited one
    flops: float
    in_use: tuple[int, ...] = ()  # units whose visits go on meanwhile
    sends: tuple[int, ...] = ()  # units whose gradients are complete after this visit
    stowed_nbytes: int = 0  # of activations that go to the host after this visit
    fetched_nbytes: int = 0  # of activations that come back before this visit
    nbytes: int = 0  # on the device beside weights
    moved_nbytes: float = 0.0  # of the device's memory, that products read and write
    mesh_nbytes: float = 0.0  # sent to devices with other shards (Rule 12)
    other_nbytes: float = 0.0  # of the device's memory, that all else reads and writes (Rule 13)
    written_nbytes: int = 0  # of the stowed activations, those that go on to the disk (Rule 14)
    read_nbytes: int = 0  # of those that come back, those that are on the disk

    def seconds(self, machine: Machine) -> float:
        """Return the seconds of its compute."""
        return machine.compute_s(self.flops, self.moved_nbytes, self.mesh_nbytes, self.other_nbytes)


@dataclass(frozen=True)
class LowerBound:
    """Lower bound of a step's time, from the seconds of each lane.

    The first visited unit's gradient, step and load are counted apart: nothing can run beside them.
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
    disk_forward: float  # of what is read from files
    disk_backward: float
    disk: float  # of all but the first unit's step, in both directions
    duplex: float
    chain: float  # the longest chain of work that the order of units makes sequential; no step can be shorter
    link: float = 0.0  # of all copies, with those of a step on the device, but for the first unit's
    host: float = 0.0  # of the host's memory: all that is read and written there in a step
    network: float = 0.0  # of all but the first unit's sums
    first_network: float = 0.0  # of the first one's sums and new weights
    new_weights: float = 0.0  # of all but the first unit's

    @property
    def forward(self) -> float:
        """Forward's part of the bound."""
        return max(self.compute_forward, self.up_forward, self.disk_forward)

    @property
    def link_backward(self) -> float:
        """The link's seconds in backward: both directions at once, slowed down, then the rest of the longer one."""
        return max(self.up_backward, self.down) + min(self.up_backward, self.down) * (1 / self.duplex - 1)

    @property
    def backward(self) -> float:
        """Backward's part of the bound."""
        return max(self.compute_backward, self.link_backward, self.disk_backward)

    @property
    def seconds(self) -> float:
        """The lower bound, with as much of the optimizer moved into forward as helps."""
        return max(self._of_one, self.host)

    @property
    def _of_one(self) -> float:
        longest = max(self.forward + self.backward, self.optimizer, self.disk, self.link)
        apart = self.first_network + self.first_step + self.first_up
        return max(max(longest + self.first_down, self.network) + apart, self._crossing)

    @property
    def _crossing(self) -> float:
        return self.network + self.first_network + self.new_weights

    @property
    def bound(self) -> float:
        """The busiest lane's seconds with all others beside it: a lower bound that cannot be reached."""
        return max(
            self.compute_forward + self.compute_backward,
            self.up_forward + self.up_backward + self.first_up,
            self.down + self.first_down,
            self.optimizer + self.first_step,
            self.disk,
            self.link,
            self.host,
            self._crossing,
        )

    @property
    def binds(self) -> str:
        """Part that sets the lower bound.

        "compute", "link", "disk", "optimizer" or "host memory"; with several machines "network".
        """
        if self.host > self._of_one:
            return "host memory"
        beside = {"disk": self.disk, "optimizer": self.optimizer, "link": self.link}
        beside["network"] = self.network + self.new_weights
        longest = max(beside, key=beside.__getitem__)
        if beside[longest] > self.forward + self.backward:
            return longest
        compute = (self.compute_forward, self.compute_backward)
        if compute == (self.forward, self.backward):
            return "compute"
        files = (self.disk_forward == self.forward, self.disk_backward == self.backward)
        return "disk" if any(files) and max(self.disk_forward, self.disk_backward) else "link"


@dataclass(frozen=True)
class Simulation:
    """One simulated step among equal ones."""

    step_s: float
    compute_s: float
    stall_s: dict[str, float]  # seconds in which compute was idle, by the lane for which it waited
    peak_nbytes: int  # on the device: weights, gradients and activations
    timeline: list[Span]  # from the first forward's begin; starts are negative for work under way by then
    waits: list[Span]  # of compute
    floor: LowerBound
    disk_nbytes: int = 0  # read from files
    state_read_nbytes: int = 0  # from the disk, for the optimizer
    state_written_nbytes: int = 0
    activations_on_disk: int = 0  # bytes, written in forward and read in backward

    @property
    def merit(self) -> float:
        """The lower bound's share of the step's time."""
        return self.floor.seconds / self.step_s


def simulate(
    units: Sequence[UnitNumbers],
    schedule: Schedule,
    machine: Machine,
    *,
    activations: Activations = "keep",
    optimizer_overlap: bool = True,
    steps_into_forward: bool = False,
    works: Sequence[SimulatedVisit] = (),
    ranks: int = 1,
    nodes: int = 1,
    after_backward: Sequence[int] = (),
) -> Simulation:
    """Simulate a training step over these units on that machine.

    Args:
        units: In the order of forward.
        schedule: A schedule of these units' ``up_nbytes``, which the simulation uses up.
        machine: A profile (`machine.MACHINES`), or measured numbers.
        activations: Whether activations are kept or recomputed.
        optimizer_overlap: Units are stepped while backward runs, otherwise after it, as with several machines.
        steps_into_forward: Units may be stepped while the next forward runs (Rule 5).
        works: The step's visits, with the costs of ``activations`` included; by default forward over all units and
            then backward in reverse.
        ranks: How many of the machine's devices do the same at the same time, and share its memory (Rule 8).
        nodes: How many such machines sum their gradients (Rule 11).
        after_backward: Bytes of host memory that are read or written for each unit's gradients between backward and the
            steps, as for the norm by which they are clipped (Rule 5); by default none are.
    """
    if not units:
        raise OptionError(argument="units", found=len(units), allowed="at least one unit")
    if activations not in ("keep", "recompute"):
        raise OptionError(argument="activations", found=activations, allowed="'keep' or 'recompute'")
    recompute = activations == "recompute"
    host = _Host(
        units, schedule, machine, recompute, optimizer_overlap, steps_into_forward, works, nodes, after_backward
    )
    starts, read = [], [0]
    for _ in range(STEPS):
        starts.append(host.step())
        read.append(host.disk_nbytes)
    run(host.lanes, _rates(machine, ranks, any(unit.step_up_nbytes for unit in units)))
    begin, end = starts[-2].start, starts[-1].start
    waits = _waits([task for task in host.tasks if task.lane == "compute"], units, begin, end)
    lanes: dict[str, str] = {str(lane): cause for lane, cause in WAITS.items()}
    if any(task.lane in ON_DISK for task in host.tasks):
        lanes["disk"] = "disk"
    if any(task.lane in NETWORK for task in host.tasks):
        lanes |= {str(lane): cause for lane, cause in NETWORK.items()}
    return Simulation(
        step_s=end - begin,
        compute_s=math.fsum(task.work for task in host.tasks if task.lane == "compute" and begin <= task.start < end),
        stall_s={
            lane: math.fsum(wait.seconds for wait in waits if wait.stall == cause) for lane, cause in lanes.items()
        },
        peak_nbytes=host.peak,
        timeline=_timeline(host.tasks, units, begin, end),
        waits=waits,
        floor=floor(units, schedule.window, machine, recompute, ranks, nodes),
        disk_nbytes=read[-1] - read[-2],
        state_read_nbytes=sum(unit.state_read_nbytes for unit in units if unit.trained),
        state_written_nbytes=sum(unit.state_written_nbytes for unit in units if unit.trained),
        activations_on_disk=sum(work.written_nbytes for work in works),
    )


def _rates(
    machine: Machine, ranks: int, steps_on_device: bool
) -> Callable[[Collection[LaneName]], dict[LaneName, float]]:
    """Return a function of the lanes that are busy: the part of its own speed at which each works (Rules 6 and 8)."""
    shares: dict[LaneName, float] = {}  # of the host's memory that a lane of all ranks takes at its own speed
    if machine.host_bytes_per_s < math.inf:
        shares["up"] = ranks * machine.up_bytes_per_s / machine.host_bytes_per_s
        shares["down"] = ranks * accesses_down(ranks) * machine.down_bytes_per_s / machine.host_bytes_per_s
        shares["optimizer"] = 0.0 if steps_on_device else min(1.0, machine.dram_bytes_per_s / machine.host_bytes_per_s)

    both: list[tuple[tuple[LaneName, LaneName], float]]
    both = [(("up", "down"), machine.duplex), (("disk in", "disk out"), machine.disk_duplex)]

    @functools.cache
    def rates(busy: tuple[LaneName, ...]) -> dict[LaneName, float]:
        found = dict.fromkeys(busy, 1.0)
        for ways, share in both:
            if all(way in busy for way in ways):
                found |= dict.fromkeys(ways, share)
        taken = sum(found[name] * shares.get(name, 0.0) for name in busy)
        return found if taken <= 1 else {name: found[name] / (taken if shares.get(name) else 1.0) for name in busy}

    return lambda busy: rates(tuple(busy))


def accesses_down(ranks: int) -> int:
    """Return how often a byte of a gradient is moved in the host's memory until the optimizer reads it (Rule 8)."""
    return 2 if ranks > 1 else 1


def host_s(units: Iterable[UnitNumbers], ups: float, downs: float, machine: Machine, ranks: int) -> float:
    """Return the seconds in which the host's memory moves these copies, and what the host's steps of units move."""
    stepped = math.fsum(0.0 if unit.step_up_nbytes else unit.step_in_memory_s(machine) for unit in units)
    copied = ranks * (ups + accesses_down(ranks) * downs)
    return (copied + stepped * min(machine.dram_bytes_per_s, machine.host_bytes_per_s)) / machine.host_bytes_per_s


def has_backward(units: Sequence[UnitNumbers]) -> bool:
    """Whether a step over these units has a backward; passes without one follow each other as a ring (window.py)."""
    return any(unit.trained or unit.backward_flops for unit in units)


def floor(
    units: Sequence[UnitNumbers], window: int, machine: Machine, recompute: bool, ranks: int = 1, nodes: int = 1
) -> LowerBound:
    """Compute the lower bound of a step over these units."""
    first, rest = units[0], units[1:]
    streamed = [unit for unit in units if not unit.resident]
    last = len(streamed) - window if has_backward(units) else 0
    again = streamed[: max(0, last)]  # loaded again in backward, if there is one; the others are still resident
    stay = streamed[:window]  # still resident from the last backward, unless they were stepped
    come = [unit for unit in rest if unit.trained or not (unit.resident or unit in stay)]
    forward = math.fsum(unit.forward_s(machine) for unit in units)
    backward = math.fsum(unit.backward_s(machine) for unit in units) + recompute * forward
    ups = sum(unit.up_nbytes for unit in (*come, *again)) + sum(unit.trained * unit.step_up_nbytes for unit in rest)
    downs = sum(unit.down_nbytes + unit.trained * unit.step_down_nbytes for unit in rest)
    return LowerBound(
        compute_forward=forward,
        compute_backward=backward,
        up_forward=sum(unit.up_nbytes for unit in come) / machine.up_bytes_per_s,
        up_backward=sum(unit.up_nbytes for unit in again) / machine.up_bytes_per_s,
        down=sum(unit.down_nbytes for unit in rest) / machine.down_bytes_per_s,
        optimizer=math.fsum(unit.step_in_memory_s(machine) for unit in rest),
        first_down=first.down_nbytes / machine.down_bytes_per_s,
        first_step=first.step_s(machine),
        first_up=first.trained * first.up_s(machine),
        disk_forward=sum(unit.disk_nbytes for unit in come) / machine.disk_bytes_per_s,
        disk_backward=sum(unit.disk_nbytes for unit in again) / machine.disk_bytes_per_s,
        disk=machine.disk_s(
            sum(unit.disk_nbytes for unit in (*come, *again)) + sum(u.trained * u.state_read_nbytes for u in rest),
            sum(unit.trained * unit.state_written_nbytes for unit in rest),
        ),
        duplex=machine.duplex,
        chain=max(_chain(units, machine, recompute, nodes), _apart(units, window, machine, recompute, ranks)),
        link=both_ways(ups, downs, machine) * any(unit.step_up_nbytes for unit in units),
        network=sum(_network_s(unit, machine, nodes) for unit in rest),
        first_network=_network_s(first, machine, nodes) + _weights_s(first, machine, nodes),
        new_weights=sum(_weights_s(unit, machine, nodes) for unit in rest),
        host=host_s(
            units,
            ups + first.trained * (first.up_nbytes + first.step_up_nbytes),
            downs + first.down_nbytes + first.trained * first.step_down_nbytes,
            machine,
            ranks,
        ),
    )


def both_ways(up_nbytes: float, down_nbytes: float, machine: Machine) -> float:
    """Return the seconds of copies in both directions at once."""
    up, down = up_nbytes / machine.up_bytes_per_s, down_nbytes / machine.down_bytes_per_s
    return max(up, down) + min(up, down) * (1 / machine.duplex - 1)


def _apart(units: Sequence[UnitNumbers], window: int, machine: Machine, recompute: bool, ranks: int) -> float:
    """Compute the longest sum of compute and of copies that cannot run beside it, in seconds.

    From a streamed unit's forward to the end of its backward it computes, and the units behind it. Beside that the link
    moves what is theirs, and brings earlier units for their backward, as many as the window has room for beside the
    unit. All other copies of it and of earlier units are over by then, or begin later, and so do their steps: all that
    takes the time of the host's memory.
    """
    if not has_backward(units):
        return 0.0
    left = math.fsum(unit.forward_s(machine) * (1 + recompute) + unit.backward_s(machine) for unit in units)
    longest, up, down = 0.0, 0.0, 0.0
    stepped: list[UnitNumbers] = []
    earlier = deque[int]()  # bytes that the last units loaded again have
    for unit in units:
        if unit.trained:
            up += unit.up_nbytes + unit.step_up_nbytes
            down += unit.down_nbytes + unit.step_down_nbytes
            stepped.append(unit)
        if not unit.resident:
            host = host_s(stepped, up, down, machine, ranks)
            longest = max(longest, left + max(both_ways(up, down, machine), host))
            earlier.append(unit.up_nbytes)
            if len(earlier) >= window:
                up += earlier.popleft()
        left -= unit.forward_s(machine) * (1 + recompute) + unit.backward_s(machine)
    return longest


def _network_s(unit: UnitNumbers, machine: Machine, nodes: int) -> float:
    """Return the seconds in which a machine sends the others their shares of a unit's sums, and then its own share."""
    return 2 * (nodes - 1) / nodes * unit.gradient_nbytes * unit.trained / machine.network_bytes_per_s


def _weights_s(unit: UnitNumbers, machine: Machine, nodes: int) -> float:
    """Return the seconds in which a machine sends the others the weights of a unit that it has stepped."""
    return (nodes - 1) / nodes * unit.new_nbytes * unit.trained / machine.network_bytes_per_s


def _chain(units: Sequence[UnitNumbers], machine: Machine, recompute: bool, nodes: int) -> float:
    """Compute the longest chain of work through any unit, in seconds.

    Such a chain is: backward from the last unit to this one, the copy of its gradients, their way to other machines,
    the steps of all units up to it, the shortest of the ways of new weights to other machines and to the device, and
    forward from this unit to the last.
    """
    computes = [(1 + recompute) * unit.forward_s(machine) + unit.backward_s(machine) for unit in units]
    longest = left = math.fsum(computes)
    steps, up = 0.0, math.inf
    for unit, own in zip(units, computes, strict=True):
        if unit.trained:
            steps += max(unit.step_in_memory_s(machine), unit.step_copies_s(machine))
            up = min(up, unit.up_s(machine) + _weights_s(unit, machine, nodes))
            sums = unit.down_nbytes / machine.down_bytes_per_s + _network_s(unit, machine, nodes)
            longest = max(longest, left + sums + steps + up)
        left -= own
    return longest


# ---- issuing


class _Host:
    """The calling thread, which issues the work of consecutive steps as it does in the runtime (Rule 1)."""

    def __init__(
        self,
        units: Sequence[UnitNumbers],
        schedule: Schedule,
        machine: Machine,
        recompute: bool,
        overlap: bool,
        into_forward: bool,
        works: Sequence[SimulatedVisit],
        nodes: int,
        after_backward: Sequence[int],
    ) -> None:
        self.tasks: list[Task] = []
        self.lanes = {name: InOrder() for name in LANES}
        if into_forward:
            self.lanes["optimizer"] = NewestFirst()
        self.lanes |= {name: WeightsFirst(newest_state_first=into_forward) for name in ON_DISK}
        if any(unit.step_up_nbytes for unit in units):
            self.lanes |= {name: StateBeside(newest_state_first=into_forward) for name in ON_LINK}
        self._units = units
        self._residents = [index for index, unit in enumerate(units) if unit.resident]
        self._has_backward = not works or has_backward(units)
        self._works = works
        self._schedule = schedule
        self._machine = machine
        self._nodes = nodes
        self._recompute = recompute
        self._overlap = overlap and not after_backward
        self._after_backward = after_backward
        self._into_forward = into_forward
        self._order: list[int] = []
        self._last: int | None = None  # the unit visited last
        self._ready: dict[int, Task] = {}  # the last load of each unit
        self._read: dict[int, Task] = {}  # the last reading of each unit's files
        self._stepped: dict[int, Task] = {}  # the last step of each unit, or of its last piece, written if on disk
        self._arrived: list[tuple[int, Task]] = []  # gradients of units to step after backward
        self._begin: Task | None = None  # for which all work of the step waits (Rule 5)
        self._reader: Task | None = None  # the compute after which the next load may start (Rule 3)
        self._computing: Task | None = None  # issued last
        self._sending: Task | None = None  # the copy of gradients whose packed buffer still takes memory
        self._crossing: Task | None = None  # the sums that are sent last
        self._stowing: Task | None = None  # the copy of activations to the host under way
        self._writing: Task | None = None  # of activations to the disk, issued last
        self._before: Task | None = None  # compute of the visit before the last one
        self._resident_nbytes = sum(unit.up_nbytes for unit in units if unit.resident)
        self._saved_nbytes = 0
        self._packed_nbytes = 0
        self.peak = 0
        self.disk_nbytes = 0  # read so far
        schedule.invalidate()

    def step(self) -> Task:
        """Issue one step; return its first compute."""
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
        for index in self._residents:
            self._visit(index)
        self._visit(work.unit, work.in_use)
        back = None
        if work.fetched_nbytes:
            seconds, read = work.fetched_nbytes / self._machine.up_bytes_per_s, None
            if work.read_nbytes:
                after = [self._before, self._writing]
                reading_s = work.read_nbytes / self._machine.disk_bytes_per_s
                read = self._issue("disk in", work.unit, reading_s, after, "activations")
            back = self._issue("up", work.unit, seconds, [self._computing, read])  # whose memory it takes
        self._before = self._computing
        task = self._compute(work.unit, work.seconds(self._machine), back)
        self.peak = max(self.peak, self._resident_nbytes + self._schedule.resident_nbytes + work.nbytes)
        self._stow(work)
        for sent in work.sends:
            self._send(sent)
        return task

    def _stow(self, work: SimulatedVisit) -> None:
        """Issue the offload of saved activations; their memory is freed after the next unit (offload.py, Rule 2)."""
        if self._stowing is not None:
            self._computing = self._issue("compute", work.unit, 0.0, [self._stowing])
            self._stowing = None
        if work.stowed_nbytes:
            seconds = work.stowed_nbytes / self._machine.down_bytes_per_s
            self._stowing = self._issue("down", work.unit, seconds, [self._computing, self._writing])
        if work.written_nbytes:
            seconds = work.written_nbytes / self._machine.disk_out_bytes_per_s
            self._writing = self._issue("disk out", work.unit, seconds, [self._stowing], "activations")

    def _open(self) -> None:
        stale = [unit for unit in self._schedule.resident if self._is_stale(unit)]
        if self._schedule.invalidate(stale):
            self._reader = self._computing
        self._schedule.begin(self._order, wrap=not self._has_backward)
        self._order, self._last = [], None

    def _close(self) -> None:
        self._free_packed()
        if self._crossing is not None:
            self._computing = self._issue("compute", self._crossing.unit, 0.0, [self._crossing])
            self._crossing = None
        if self._after_backward:
            read: list[Task | None] = [sent for _, sent in self._arrived]
            for unit, _ in self._arrived:
                seconds = self._after_backward[unit] / self._machine.dram_bytes_per_s
                read = [self._issue("optimizer", unit, seconds, read)]
            self._computing = self._issue("compute", 0, 0.0, read)
        for unit, sent in self._arrived:
            self._step(unit, [sent, self._computing])
        self._arrived = []
        for index, one in enumerate(self._units):
            if crosses := _weights_s(one, self._machine, self._nodes):
                after = [self._stepped.get(index), self._computing]
                self._stepped[index] = self._issue("network", index, crosses, after, "weights")
        if not self._into_forward and self._stepped:
            self._begin = self._issue("optimizer", 0, 0.0, list(self._stepped.values()))  # the end of all

    def _forward(self, index: int) -> Task:
        unit = self._units[index]
        self._visit(index)
        task = self._compute(index, unit.forward_s(self._machine))
        self._observe(unit.activation_nbytes)
        self._saved_nbytes += unit.input_nbytes if self._recompute else unit.activation_nbytes
        return task

    def _backward(self, index: int) -> None:
        unit = self._units[index]
        self._visit(index)
        self._compute(index, unit.backward_s(self._machine) + self._recompute * unit.forward_s(self._machine))
        self._observe(unit.down_nbytes + self._recompute * unit.activation_nbytes)
        self._saved_nbytes -= unit.input_nbytes if self._recompute else unit.activation_nbytes
        if unit.trained:
            self._free_packed()
            self._observe(2 * unit.down_nbytes)  # as autograd made them, and packed
            self._send(index)

    def _visit(self, index: int, in_use: tuple[int, ...] = ()) -> None:
        if self._units[index].resident:
            if self._is_stale(index):
                self._reader = self._computing
                self._load(index)
        elif index != self._last:
            decision = self._schedule.visit(index, in_use)
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
        unit, after = self._units[index], [self._begin, self._reader, stepped]
        if unit.disk_nbytes:
            self.disk_nbytes += unit.disk_nbytes
            seconds = unit.disk_nbytes / self._machine.disk_bytes_per_s
            self._read[index] = self._issue("disk in", index, seconds, after, "weights")
        self._ready[index] = self._issue("up", index, unit.up_nbytes / self._machine.up_bytes_per_s, after)

    def _compute(self, index: int, seconds: float, back: Task | None = None) -> Task:
        after = [self._begin, self._ready[index], self._read.get(index), back]
        self._computing = self._issue("compute", index, seconds, after)
        return self._computing

    def _send(self, index: int) -> None:
        self._free_packed()
        nbytes = self._units[index].down_nbytes
        self._sending = self._issue("down", index, nbytes / self._machine.down_bytes_per_s, [self._computing])
        self._packed_nbytes = nbytes
        if self._nodes > 1:
            crosses = _network_s(self._units[index], self._machine, self._nodes)
            self._crossing = self._issue("network", index, crosses, [self._sending])
        if self._overlap:
            self._step(index, [self._crossing or self._sending])
        else:
            self._arrived.append((index, self._sending))

    def _free_packed(self) -> None:
        if self._sending is not None:
            self._computing = self._issue("compute", self._sending.unit, 0.0, [self._sending])
            self._sending, self._packed_nbytes = None, 0

    def _step(self, index: int, after: list[Task | None]) -> None:
        unit, machine = self._units[index], self._machine
        on_disk = bool(unit.state_read_nbytes or unit.state_written_nbytes)
        read = written = ended = None
        parts = PARTS if self._into_forward or on_disk or unit.step_up_nbytes else 1
        work = unit.step_in_memory_s(machine) / parts
        reads = unit.state_read_nbytes / machine.disk_bytes_per_s / parts
        writes = unit.state_written_nbytes / machine.disk_out_bytes_per_s / parts
        ups = unit.step_up_nbytes / machine.up_bytes_per_s / parts
        downs = unit.step_down_nbytes / machine.down_bytes_per_s / parts
        for _ in range(parts):
            if on_disk:
                read = self._issue("disk in", index, reads, after if read is None else [read], "state")
            if unit.step_up_nbytes:
                came = self._issue("up", index, ups, [*after, read], "state")
                stepped = self._issue("optimizer", index, work, [came])
                ended = self._issue("down", index, downs, [stepped, ended], "state")
            else:
                came = ended = self._issue("optimizer", index, work, [*after, read])
            after = [ended if on_disk else came]
            if on_disk:
                written = self._issue("disk out", index, writes, [ended, written], "state")
            self._stepped[index] = written or ended

    def _issue(self, lane: LaneName, unit: int, work: float, after: list[Task | None], phase: str = "") -> Task:
        earlier = [task for task in after if task is not None]
        if len(earlier) > 1:
            earlier = list({*earlier})
        task = Task(lane, unit, work, len(self.tasks), phase, len(earlier), left=work)
        for other in earlier:
            other.then.append(task)
        self.tasks.append(task)
        self.lanes[lane].add(task)
        return task

    def _observe(self, nbytes: int) -> None:
        """Note that this many more bytes are on the device for a moment."""
        used = self._resident_nbytes + self._schedule.resident_nbytes + self._saved_nbytes + self._packed_nbytes
        self.peak = max(self.peak, used + nbytes)


# ---- reading


def _waits(computes: list[Task], units: Sequence[UnitNumbers], begin: float, end: float) -> list[Span]:
    """List compute's idle times, each with the lane whose work it waited for."""
    waits = []
    for before, task in itertools.pairwise(computes):
        if begin < task.start <= end:
            waiting: Task = task
            while waiting.start > before.end and waiting.blocker is not None:
                cause = waiting.blocker
                since = max(cause.start, before.end)
                name = units[cause.unit].name
                on_device = cause.phase == "state" and cause.lane in ON_LINK
                stall = WAITS["optimizer"] if on_device else (WAITS | ON_DISK | NETWORK)[cause.lane]
                waits.append(Span("compute", name, since - begin, waiting.start - begin, stall=stall))
                waiting = cause
    return sorted(waits, key=lambda span: span.start)


def _timeline(tasks: list[Task], units: Sequence[UnitNumbers], begin: float, end: float) -> list[Span]:
    """List the work that ended within the step; consecutive pieces of one unit's step and state are one span."""
    spans: dict[LaneName, list[Span]] = {}
    for task in sorted(tasks, key=lambda task: (task.start, task.number)):
        if begin < task.end <= end and task.end > task.start:
            lane = spans.setdefault(task.lane, [])
            span = Span(task.lane, units[task.unit].name, task.start - begin, task.end - begin, task.phase)
            in_pieces = task.lane == "optimizer" or task.lane in ON_DISK or task.phase == "state"
            if (
                in_pieces
                and lane
                and (lane[-1].unit, lane[-1].phase, lane[-1].end) == (span.unit, span.phase, span.start)
            ):
                span = lane.pop()._replace(end=span.end)
            lane.append(span)
    return sorted(itertools.chain(*spans.values()), key=lambda span: (span.start, LANES.index(span.lane)))
