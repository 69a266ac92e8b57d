"""Plan jobs: choose the window, and the changes to offer, each of which is a plan of its own.

A plan has the answers, as numbers and as text.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from ..errors import SuperpipelineError
from ..host.machine import headroom
from ..host.room import UnitNumbers
from ..options import Options, format_bytes, format_seconds
from ..store.placement import UnitBytes, choose
from ..stream.partition import FoundUnit
from .machines import GIB, Machine, Work, step_cost, step_time
from .model import PlannedModel
from .trace import GRADIENTS, ROOT, WINDOW, Loads, Trace, sweep

# By device type: bytes of two workspaces of cuBLAS, of the threads of forward and backward (torch allocates 8.125 MiB
# each, and 32 MiB on Hopper), of a context, and the share of the rest that an allocator wastes.
DRIVERS = {"cuda": (2 * 8 * 2**20 + 2**18, 2**29, 0.04)}
WINDOWS = 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96
EQUAL = 1.02  # ratio of times below which they count as equal
OFFERED = 3  # changes
BUDGETED = 0.9  # share of the host's memory that is offered as host_budget; activations take some beside it
LESS = "recompute", "offload", "recompute+offload"  # policies that leave less on the device than "keep"
COSTS: dict[Any, str] = {  # what a change does to the numbers, or to a step
    "host_budget": "frozen weights are read from their files",
    ("activations", "keep"): "more bytes on the device",
    ("activations", "recompute"): "each forward runs twice",
    ("activations", "offload"): "what units save goes to the host and comes back",
    ("activations", "recompute+offload"): "each forward runs twice, and inputs of units go to the host and come back",
    ("disk", "FOLDER"): "what memory lacks is read each step, and written if it trains",
    ("precision", "bf16-true"): "rounded to bf16",
    ("master_weights", True): "but stepped in FP32",
}

Changes = dict[str, Any]  # arguments of a job, or options of the strategy, by name


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run to plan. The arguments are those of `sp_lightning.plan`."""

    options: Options
    precision: str
    machine: Machine
    accumulate: int = 1
    clip: bool = False
    copies: int = 0
    devices: int = 1
    nodes: int = 1
    rows: int | None = None  # of the batch; None: as it was given

    @property
    def host_available(self) -> int:
        """Bytes of host memory that the run may have."""
        return int(min(self.machine.host_nbytes - headroom(self.machine.host_nbytes), self.options.host_limit))

    def changed(self, **changes: Any) -> Job:
        """Return this job with other arguments, or other options of the strategy, by name."""
        options = {one.name: changes.pop(one.name) for one in fields(Options) if one.name in changes}
        return replace(self, options=replace(self.options, **options), **changes)


@dataclass(frozen=True)
class Change:
    """A change to the run, and its price."""

    what: str
    cost: str  # what it does to the numbers
    device_nbytes: int
    host_nbytes: int
    step_s: float
    slower: float  # how many times as long a sample takes

    def __str__(self) -> str:
        cost = f"; {self.cost}" if self.cost else ""
        return (
            f"{self.what} ({format_bytes(self.device_nbytes)} on the device, {format_bytes(self.host_nbytes)} on the "
            f"host, {format_seconds(self.step_s)} a step, {self.slower:.2f} times as long per sample{cost})"
        )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The needs of a run, the time of its steps, and what to change. Bytes on the device are each device's."""

    job: Job
    model: str
    parameters: int
    trained: int
    rows: int
    tokens: int | None  # in a row, if it consists of tokens
    window: int
    transfer: int
    units: tuple[str, ...]  # names of the units that stream
    device_terms: dict[str, int]
    host_terms: dict[str, int]
    disk: dict[str, int]  # bytes in files, and what a step reads and writes of them
    step_s: float
    lanes: dict[str, float]  # seconds for which each lane is busy in a step
    changes: tuple[Change, ...] = ()
    tried: tuple[str, ...] = ()  # all changes that were planned, useful or not

    @property
    def device_nbytes(self) -> int:
        """Bytes on the device at the fullest moment of a step."""
        return sum(self.device_terms.values())

    @property
    def host_nbytes(self) -> int:
        """Bytes of host memory."""
        return sum(self.host_terms.values())

    @property
    def budgeted(self) -> dict[str, int]:
        """The bytes by term that ``memory_budget`` bounds."""
        return {name: self.device_terms.get(name, 0) for name in (WINDOW, ROOT, GRADIENTS)}

    @property
    def fits_device(self) -> bool:
        """Whether the device has room for all terms, and ``memory_budget`` for weights and gradients."""
        budget = self.job.options.memory_budget
        is_within = budget is None or sum(self.budgeted.values()) <= budget
        return is_within and self.device_nbytes <= self.job.machine.device_nbytes

    @property
    def fits_host(self) -> bool:
        """Whether the host has room."""
        return self.host_nbytes <= self.job.host_available

    @property
    def fits(self) -> bool:
        """Whether the run fits."""
        return self.fits_device and self.fits_host

    @property
    def bound_by(self) -> str:
        """The lane that is busiest in a step."""
        return max(self.lanes, key=self.lanes.__getitem__)

    @property
    def speed(self) -> dict[str, float]:
        """The rows per second of all devices and, where they consist of tokens, the tokens per second."""
        rows = self.rows * self.job.accumulate * self.job.devices * self.job.nodes / self.step_s
        return {"rows_per_s": rows} | ({"tokens_per_s": rows * self.tokens} if self.tokens else {})

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as a dict of plain values."""
        computed = "device_nbytes", "host_nbytes", "fits_device", "fits_host", "fits", "bound_by", "speed"
        return asdict(self) | {name: getattr(self, name) for name in computed}

    def __str__(self) -> str:
        """Return the plan as the command prints it."""
        job, machine = self.job, self.job.machine
        several = f"{job.nodes} machines with " * (job.nodes > 1) + f"{job.devices} x " * (job.devices > 1)
        is_full = self.device_nbytes > machine.device_nbytes
        device = ("on the device", self.device_terms) if is_full else ("within memory_budget", self.budgeted)
        short = [] if self.fits_device else [_shortage(*device)]
        short += [] if self.fits_host else [_shortage("on the host", self.host_terms)]
        fits = f"DOES NOT FIT: {'; '.join(short)}" if short else "fits"
        lines = [
            f"{self.model}: {_count(self.parameters)} parameters, of which {_count(self.trained)} train, batch of "
            f"{self.rows} rows, {job.precision}, "
            f"activations {job.options.activations!r}",
            f"on {several}{machine.name}: window {self.window} of {len(self.units)} units, transfer "
            f"{self.transfer}: {format_bytes(self.device_nbytes)} of {format_bytes(job.machine.device_nbytes)} on the "
            f"device, {format_bytes(self.host_nbytes)} of {format_bytes(job.host_available)} on the host: {fits}",
        ]
        disk = self.disk if self.disk["there"] else {}
        read, written = (format_bytes(int(rate)) for rate in (machine.disk_bytes_per_s, machine.disk_out_bytes_per_s))
        in_files = f"Disk, in a step ({read} read, {written} written a second)"
        for title, terms in (("Device", self.device_terms), ("Host", self.host_terms), (in_files, disk)):
            shown = [f"  {name:24}{format_bytes(nbytes):>12}" for name, nbytes in terms.items()]
            lines += ["", f"{title}:", *shown] if shown else []
        busy = ", ".join(f"{lane} {format_seconds(seconds)}" for lane, seconds in self.lanes.items() if seconds)
        digits = {name.split("_")[0]: float(f"{value:.3g}") for name, value in self.speed.items()}
        speed = ", ".join(f"{value:,.10g} {name}" for name, value in digits.items())
        hours = f"; 10 M tokens take {1e7 / self.speed['tokens_per_s'] / 3600:.2g} h" if self.tokens else ""
        lines += [
            "",
            f"A step takes {format_seconds(self.step_s)}, bound by {self.bound_by} (busy: {busy})",
            f"Speed{'' if self.fits else ', if it fitted'}: {speed} a second{hours}",
        ]
        nothing = f"None of these {'fits and is faster' if self.fits else 'would fit'}: {'; '.join(self.tried)}"
        title = "Change:" if self.fits else "Would fit:"
        lines += [title, *(f"- {change}" for change in self.changes)] if self.changes else [nothing]
        return "\n".join(lines)


def _shortage(place: str, terms: dict[str, int]) -> str:
    """Say which term is largest in a place that lacks room."""
    worst = max(terms, key=terms.__getitem__)
    return f"{place}, most for {worst}, {format_bytes(terms[worst])}"


def _count(parameters: int) -> str:
    """Format a number of parameters: "8.03e9", "42.1e6"."""
    return f"{parameters / 1e9:.3g}e9" if parameters >= 1e8 else f"{parameters / 1e6:.3g}e6"


class Planner:
    """Plans jobs for one model, which is made once for each precision."""

    def __init__(self, source: Any, batch: Any, **how: Any) -> None:
        self._make = functools.cache(functools.partial(PlannedModel, source, batch, **how))

    def plan(self, job: Job) -> Plan:
        """Plan a job, and offer up to three changes that make it fit or, if it fits, faster."""
        plan, found, tried = self.size(job), list[Change](), list[str]()
        policies = _other_policies(plan, ("keep", *LESS) if plan.trained else ())
        for changes in [{"rows": 2 * plan.rows}, *policies] if plan.fits else self._that_may_fit(plan):
            tried.append(", ".join(itertools.starmap(_typed, changes.items())))
            sized = self._tried(job, changes)
            if sized is None or not sized.fits:
                continue
            slower = plan.speed["rows_per_s"] / sized.speed["rows_per_s"]
            if not plan.fits or slower < 1 / EQUAL:
                cost = ", ".join(COSTS[key] for one in changes.items() for key in (one, one[0]) if key in COSTS)
                found.append(Change(tried[-1], cost, sized.device_nbytes, sized.host_nbytes, sized.step_s, slower))
            if len(found) == OFFERED:
                break
        best = sorted(found, key=operator.attrgetter("slower")) if plan.fits else found
        return replace(plan, changes=tuple(best), tried=tuple(tried))

    def size(self, job: Job) -> Plan:
        """Plan a job with the smallest window that fits and is as fast as the largest, or else with the smallest."""
        options = job.options
        model = self._make(
            precision=job.precision,
            masters=options.master_weights,
            units=options.units,
            resident=options.resident,
            wire_dtype=options.wire_dtype,
        )
        rows = job.rows or model.rows
        found = model.trace(options.activations, rows)
        most = max(1, sum(not size.resident for size in model.sizes))
        wanted = [*WINDOWS, most] if options.window == "auto" else [options.window]
        windows = sorted({min(window, most) for window in wanted})
        units = [_on_host(job, model, unit, size) for unit, size in zip(model.units, model.sizes, strict=True)]
        plan = functools.cache(functools.partial(_planned, job, model, found, units, rows))
        largest = next((plan(window) for window in reversed(windows) if plan(window).fits_device), plan(windows[0]))
        return next(plan(window) for window in windows if plan(window).step_s <= EQUAL * largest.step_s)

    def _tried(self, job: Job, changes: Changes) -> Plan | None:
        """Plan a job with changes; return None if options do not go together, or the model cannot run that way."""
        try:
            return self.size(job.changed(**changes))
        except SuperpipelineError:
            return None

    def _that_may_fit(self, plan: Plan) -> Iterator[Changes]:
        """Yield changes that may make a run fit; first those that change no bits.

        A batch is divided into equal parts, of which as many more are then accumulated for a step, if one row fits.
        """
        job, options, trains = plan.job, plan.job.options, plan.trained > 0
        if options.window != "auto":
            yield {"window": "auto"}
        if options.optimizer_device == "device":
            yield {"optimizer_device": "host"}
        batches, disks, policies, halves = [Changes()], [Changes()], [Changes()], list[Changes]()
        if trains and not job.precision.endswith("16-true"):
            halves += {"precision": "bf16-true", "master_weights": True}, {"precision": "bf16-true"}
        if plan.trained < plan.parameters and not plan.fits_host and options.host_budget is None:
            disks.append({"host_budget": f"{int(BUDGETED * job.host_available / GIB)}GiB"})
        if trains and not plan.fits_host and not options.spills and job.devices * job.nodes == 1:
            disks.append({"disk": "FOLDER"})
        if not plan.fits_device:
            policies += _other_policies(plan, LESS)
            least = self._tried(job, {"rows": 1, "activations": LESS[-1]})
            if least is not None and least.fits_device:
                divisors = [parts for parts in range(2, plan.rows + 1) if plan.rows % parts == 0]
                more = [{"accumulate": job.accumulate * parts} if trains else {} for parts in divisors]
                batches += [{"rows": plan.rows // parts, **one} for parts, one in zip(divisors, more, strict=True)]
        every = *itertools.product(batches, disks, policies), *itertools.product(halves, disks, policies)
        for chosen in every[1:]:  # the first is the job as it is
            yield functools.reduce(operator.or_, chosen)


def _other_policies(plan: Plan, policies: Iterable[str]) -> list[Changes]:
    """Return changes to these policies for activations, but for the one that is planned."""
    return [{"activations": policy} for policy in policies if policy != plan.job.options.activations]


def _typed(name: str, value: Any) -> str:
    """Return a change as a user would type it."""
    return f"a batch of {value} row{'s' * (value > 1)}" if name == "rows" else f"{name}={value!r}"


# ---- a plan


def _planned(job: Job, model: PlannedModel, found: Trace, units: list[UnitBytes], rows: int, window: int) -> Plan:
    """Plan a job with one window."""
    options, sizes = job.options, model.sizes
    transfer = 1 if options.transfer == "auto" else min(options.transfer, window)
    on_device, loads = sweep(found, sizes, window, transfer)
    host, disk = _host_terms(job, model, found, units, loads)
    step_s, lanes = _timed(job, model, found, loads, disk, window <= transfer)
    return Plan(
        job=job,
        model=model.name,
        parameters=model.parameters,
        trained=sum(size.parameters for size in sizes),
        rows=rows,
        tokens=model.tokens,
        window=window,
        transfer=transfer,
        units=tuple(size.name for size in sizes if not size.resident),
        device_terms={name: nbytes for name, nbytes in _device_terms(job, model, on_device).items() if nbytes},
        host_terms={name: nbytes for name, nbytes in host.items() if nbytes},
        disk=disk,
        step_s=step_s,
        lanes=lanes,
    )


def _device_terms(job: Job, model: PlannedModel, terms: dict[str, int]) -> dict[str, int]:
    """Return the device's bytes by term: those of the visits, and the optimizer's, workspaces and a reserve."""
    state = model.state_share * sum(size.down_nbytes for size in model.sizes if size.resident)
    if job.options.optimizer_device == "device":  # weights, gradients and state of two units are there at a time
        state += 2 * 4 * max(size.parameters for size in model.sizes) * (2 + model.state_share)
    workspaces, context, wasted = DRIVERS.get(job.machine.device_type, (0, 0, 0.0))
    terms = terms | {"optimizer": int(state), "workspaces": workspaces}
    return terms | {"reserve": context + int(wasted * sum(terms.values()))}


def _on_host(job: Job, model: PlannedModel, unit: FoundUnit, size: UnitNumbers) -> UnitBytes:
    """Return a unit's bytes on the host: of weights, gradients, state, and copies that travel."""
    own = job.devices * (job.devices > 1)  # each device has sums of several batches
    is_there = size.resident and not job.options.master_weights  # on the device, where its weights are stepped
    held = [p for _, p in unit.params if not is_there or id(p) in unit.parts]
    weights = sum(model.host_nbytes(p) for p in held if p.requires_grad)
    return UnitBytes(
        frozen=sum(model.host_nbytes(p) for p in held) - weights,
        state=int(model.state_share * weights),
        weights=weights,
        gradients=size.down_nbytes * bool(weights) if job.accumulate == 1 else (1 + own) * weights,
        fixed=sum(2 * p.numel() for _, p in unit.params if id(p) in model.wide),
    )


def _host_terms(
    job: Job, model: PlannedModel, found: Trace, units: list[UnitBytes], loads: Loads
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the host memory by term that the devices of a machine share, and the bytes in files.

    What of weights, gradients and state is in files is decided as in a run.
    """
    options = job.options
    budget = job.host_available if options.host_budget is None else options.host_budget
    placed = choose(units, budget if options.uses_files else sum(map(sum, units)), options.spills, 0)
    left = placed.by_term
    frozen = sum(one.frozen for one in units) - left["frozen"]
    each = sum(map(len, loads.values())) / max(1, sum(not size.resident for size in model.sizes))  # loads of a unit
    terms = {
        "weights": left["frozen"] + left["weights"],
        "wire copies": left["fixed"],
        "gradients": left["gradients"],
        "optimizer": left["state"],
        "activations": job.devices * sum(visit.work.down for visit in found.visits),
        "copies": job.copies * sum(one.frozen + one.weights for one in units),
    }
    return terms, {"there": placed.disk + frozen, "read": placed.disk + int(each * frozen), "written": placed.disk}


def _timed(
    job: Job, model: PlannedModel, found: Trace, loads: Loads, disk: dict[str, int], alone: bool
) -> tuple[float, dict[str, float]]:
    """Add up the work of a step's parts, from its trace and its loads, and return `step_time` of it."""
    sizes, share, on_device = model.sizes, model.state_share, job.options.optimizer_device == "device"
    forward, backward = (
        sum(
            (visit.work for visit in found.visits if visit.backward == late),
            Work(up=sum(sizes[index].up_nbytes for index in some)),
        )
        for late, some in ((False, loads[False][1:]), (True, loads[True]))  # nothing runs beside the first load
    )
    step, first, first_step = Work(read=disk["read"], written=disk["written"]), Work(), Work()
    for index, size in enumerate(sizes):
        if size.resident:
            step.moved += 4 * (3 + 2 * share) * size.parameters
            continue
        sent = (job.nodes - 1) * (size.down_nbytes + 2 * size.cast)  # a machine has a part for each of its devices
        added = 12 * size.parameters - 2 * size.cast  # a gradient as it came down, to a sum in FP32
        gradients = Work(down=size.down_nbytes, cores=added * (job.accumulate > 1))
        stepped = step_cost(size.parameters, share, on_device)
        if index in loads[False][:1]:
            first, first_step = gradients + Work(up=size.up_nbytes, sent=sent), stepped
        else:
            backward += gradients
            step += stepped + Work(sent=sent)
    norms = sum(size.down_nbytes + 2 * size.cast for size in sizes if not size.resident)  # of sums in FP32
    return step_time(
        forward,
        backward,
        step,
        first,
        first_step,
        job.machine,
        alone=alone,
        clip=job.clip,
        accumulate=job.accumulate,
        overlaps=job.options.optimizer_overlap,
        summed=norms if job.clip and job.accumulate > 1 else 0,
        ranks=job.devices,
    )
