"""Choose the window, and the changes to offer: each is a plan of its own, made by the same code."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from ..errors import SuperpipelineError
from ..store.placement import UnitBytes, choose
from .model import PlannedModel
from .report import Change, Job, Plan
from .step import Sweep, step_cost, step_time, sweep
from .trace import Trace, Work

# Two of cuBLAS, of the threads of forward and backward: torch allocates 8.125 MiB each, and 32 MiB on Hopper.
WORKSPACES = {"cuda": 2 * 8 * 2**20 + 2**18}
RESERVE = {"cuda": (2**29, 0.04)}  # bytes of a context, and the share of the rest that an allocator wastes
WINDOWS = 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96
EQUAL = 1.02  # ratio of times below which they count as equal
OFFERED = 3  # changes
LESS = {  # policies that leave less on the device than "keep", and what they cost
    "recompute": "each forward runs twice",
    "offload": "what units save goes to the host and comes back",
    "recompute+offload": "each forward runs twice, and inputs of units go to the host and come back",
}

Offer = tuple[str, str, dict[str, Any]]  # what to type, what it does to the numbers, and what of the job it changes
NO_OFFER: Offer = "", "", {}


class Planner:
    """Plans jobs for one model, which is made once for each precision."""

    def __init__(self, source: Any, batch: Any, **how: Any) -> None:
        self._make = functools.cache(functools.partial(PlannedModel, source, batch, **how))

    def plan(self, job: Job) -> Plan:
        """Plan a job, and offer up to three changes that make it fit or, if it fits, faster."""
        plan, found, tried = self.size(job), list[Change](), list[str]()
        for what, cost, changes in _that_may_be_faster(plan) if plan.fits else self._that_may_fit(plan):
            tried.append(what)
            sized = self._tried(plan, changes)
            if sized is None or not sized.fits:
                continue
            slower = plan.speed()["rows_per_s"] / sized.speed()["rows_per_s"]
            if not plan.fits or slower < 1 / EQUAL:
                found.append(Change(what, cost, sized.device_nbytes, sized.host_nbytes, sized.step_s, slower))
            if len(found) == OFFERED:
                break
        if plan.fits:
            found.sort(key=lambda change: change.slower)
        return replace(plan, changes=tuple(found), tried=tuple(tried))

    def size(self, job: Job) -> Plan:
        """Plan a job with the smallest window that fits and is as fast as the largest, or else with the smallest."""
        options = job.options
        model = self._make(precision=job.precision, masters=options.master_weights)
        rows = max(1, round(model.rows * job.scale))
        found = model.trace(options.units, options.resident, options.wire_dtype, options.activations, rows)
        most = max(1, sum(not size.resident for size in found.setting.sizes))
        wanted = [*WINDOWS, most] if options.window == "auto" else [options.window]
        windows = sorted({min(window, most) for window in wanted})
        plan = functools.cache(functools.partial(_planned, job, model, found, rows))
        largest = next((plan(window) for window in reversed(windows) if plan(window).fits_device), plan(windows[0]))
        return next(plan(window) for window in windows if plan(window).step_s <= EQUAL * largest.step_s)

    def _tried(self, plan: Plan, changes: dict[str, Any]) -> Plan | None:
        """Plan a job with changes; return None if options do not go together, or the model cannot run that way."""
        try:
            return self.size(plan.job.changed(**changes))
        except SuperpipelineError:
            return None

    def _that_may_fit(self, plan: Plan) -> Iterator[Offer]:
        """Yield changes that may make a run fit; first those that change no bits.

        A batch is divided into equal parts, of which as many more are then accumulated for a step, if one row fits.
        """
        job, options, trains, policies, batches = plan.job, plan.job.options, plan.trained > 0, [NO_OFFER], [NO_OFFER]
        if options.window != "auto":
            yield "window='auto'", "", {"window": "auto", "transfer": "auto"}
        if options.optimizer_device == "device":
            yield "optimizer_device='host'", "", {"optimizer_device": "host"}
        if not plan.fits_device:
            policies += _policies(LESS, options.activations)
            least = self._tried(plan, {"scale": job.scale / plan.rows, "activations": [*LESS][-1]})
            if least is not None and least.fits_device:
                batches += [_in_parts(plan, count) for count in _divisors(plan.rows)]
        disks = [NO_OFFER]
        if not plan.fits_host and trains and not options.spills:
            disks.append(("disk=FOLDER", "state is read and written each step", {"disk": "FOLDER"}))
        halves = list[Offer]()
        if trains and not job.precision.endswith("16-true"):
            half = {"precision": "bf16-true"}
            masters = half | {"master_weights": True}
            halves += [("precision='bf16-true', master_weights=True", "computed in bf16, stepped in FP32", masters)]
            halves += [("precision='bf16-true'", "weights and state are rounded to bf16", half)]
        yield from itertools.islice(_together(batches, disks, policies), 1, None)  # all but the job as it is
        yield from _together(halves, disks, policies)


def _that_may_be_faster(plan: Plan) -> Iterator[Offer]:
    """Yield changes that may make a run faster that fits."""
    yield _batch_of(2 * plan.rows), "", {"scale": 2 * plan.job.scale}
    if plan.trained:
        yield from _policies({"keep": "more bytes on the device"} | LESS, plan.job.options.activations)


def _policies(costs: dict[str, str], now: str) -> list[Offer]:
    """Return the changes to each of these policies for activations but the present one."""
    return [(f"activations={one!r}", cost, {"activations": one}) for one, cost in costs.items() if one != now]


def _in_parts(plan: Plan, count: int) -> Offer:
    """Return the change to a batch of so many equal parts; where weights train, they are accumulated."""
    batch, scale, accumulate = _batch_of(plan.rows // count), plan.job.scale / count, plan.job.accumulate * count
    if not plan.trained:
        return batch, "", {"scale": scale}
    return f"{batch}, accumulate={accumulate}", "", {"scale": scale, "accumulate": accumulate}


def _together(*alternatives: Iterable[Offer]) -> Iterator[Offer]:
    """Yield each combination of alternatives as one change; the last ones vary first."""
    for chosen in itertools.product(*alternatives):
        whats, costs, changes = zip(*chosen, strict=True)
        together = {name: value for one in changes for name, value in one.items()}
        yield ", ".join(filter(None, whats)), ", ".join(filter(None, costs)), together


def _divisors(rows: int) -> list[int]:
    """Return the numbers of parts into which a batch is divided: powers of two that divide it, and its rows."""
    return sorted({2**power for power in range(1, rows.bit_length()) if rows % 2**power == 0} | {rows})


def _batch_of(rows: int) -> str:
    return f"a batch of {rows} row{'s' * (rows > 1)}"


# ---- a plan


def _planned(job: Job, model: PlannedModel, found: Trace, rows: int, window: int) -> Plan:
    """Plan a job with one window."""
    options, sizes = job.options, found.setting.sizes
    transfer = 1 if options.transfer == "auto" else min(options.transfer, window)
    swept = sweep(found, window, transfer)
    host, disk = _host_terms(job, found, model, swept)
    step_s, lanes = _timed(job, found, swept, disk, model.state_share, window <= transfer)
    return Plan(
        job=job,
        model=model.name,
        parameters=sum(parameter.numel() for parameter in model.module.parameters()),
        trained=sum(size.parameters for size in sizes),
        rows=rows,
        window=window,
        transfer=transfer,
        units=tuple(size.name for size in sizes if not size.resident),
        device_terms={name: n for name, n in _device_terms(job, found, swept, model.state_share).items() if n},
        host_terms={name: nbytes for name, nbytes in host.items() if nbytes},
        disk=disk,
        step_s=step_s,
        lanes=lanes,
    )


def _device_terms(job: Job, found: Trace, swept: Sweep, share: float) -> dict[str, int]:
    """Return the device's bytes by term: those of the visits, and the optimizer's, workspaces and a reserve."""
    sizes = found.setting.sizes
    state = share * sum(size.down_nbytes for size in sizes if size.resident)
    if job.options.optimizer_device == "device":  # weights, gradients and state of two units are there at a time
        state += 2 * 4 * max(size.parameters for size in sizes) * (2 + share)
    terms = swept.terms | {"optimizer": int(state), "workspaces": WORKSPACES.get(job.target, 0)}
    fixed, wasted = RESERVE.get(job.target, (0, 0.0))
    return terms | {"reserve": fixed + int(wasted * sum(terms.values()))}


def _host_terms(job: Job, found: Trace, model: PlannedModel, swept: Sweep) -> tuple[dict[str, int], dict[str, int]]:
    """Return the host memory by term that the devices of a machine share, and the bytes in files.

    What of weights, gradients and state is in files is decided as in a run.
    """
    options, own = job.options, job.devices * (job.devices > 1)  # each device has sums of several batches
    units, sizes, narrow, *_ = found.setting
    of_units = []
    for unit, size in zip(units, sizes, strict=True):
        is_there = size.resident and not options.master_weights  # on the device, where its weights are stepped
        held = [p for _, p in unit.params if not is_there or id(p) in unit.parts]
        weights = sum(model.host_nbytes(p) for p in held if p.requires_grad)
        wires = [p for _, p in unit.params if id(p) in narrow or (model.masters and p.is_floating_point())]
        of_units.append(
            UnitBytes(
                frozen=sum(model.host_nbytes(p) for p in held) - weights,
                state=int(model.state_share * weights),
                weights=weights,
                gradients=size.down_nbytes * bool(weights) if job.accumulate == 1 else (1 + own) * weights,
                fixed=sum(2 * p.numel() for p in wires),
            )
        )
    budget = job.host_available if options.host_budget is None else options.host_budget
    placed = choose(of_units, budget if options.uses_files else sum(map(sum, of_units)), options.spills, 0)
    left = placed.by_term
    frozen = sum(one.frozen for one in of_units) - left["frozen"]
    loads = sum(map(len, swept.loads.values())) / max(1, sum(not size.resident for size in sizes))  # of each unit
    terms = {"weights": left["frozen"] + left["weights"], "wire copies": left["fixed"]}
    terms |= {"gradients": left["gradients"], "optimizer": left["state"]}
    terms["activations"] = job.devices * sum(visit.work.down for visit in found.visits)
    terms["copies"] = job.copies * sum(one.frozen + one.weights for one in of_units)
    return terms, {"there": placed.disk + frozen, "read": placed.disk + int(loads * frozen), "written": placed.disk}


def _timed(
    job: Job, found: Trace, swept: Sweep, disk: dict[str, int], share: float, alone: bool
) -> tuple[float, dict[str, float]]:
    """Add up the work of a step's parts, from its trace and its loads, and return `step_time` of it."""
    sizes, on_device = found.setting.sizes, job.options.optimizer_device == "device"
    loads = {late: [Work(up=sizes[index].up_nbytes) for index in swept.loads[late]] for late in (False, True)}
    forward, backward = (
        sum((visit.work for visit in found.visits if visit.backward == late), sum(loads[late], Work()))
        for late in (False, True)
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
        if index in swept.loads[False][:1]:
            forward.up -= size.up_nbytes
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
