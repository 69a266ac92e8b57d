"""Choose the window, and the changes to offer: each is a plan of its own, made by the same code."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ..errors import SuperpipelineError
from ..options import Options
from ..store.placement import UnitBytes
from .host import OnDisk, placed
from .model import PlannedModel
from .report import Change, Job, Plan
from .step import GRADIENTS, ROOT, WINDOW, Run, StepTime, Sweep, step_cost, step_time, sweep
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


class Planner:
    """Plans jobs for one model, which is made once for each precision."""

    def __init__(self, source: Any, batch: Any, **how: Any) -> None:
        self._make = functools.cache(functools.partial(PlannedModel, source, batch, **how))

    def plan(self, job: Job) -> Plan:
        """Plan a job, and offer changes that make it fit or make it faster."""
        plan = self.size(job)
        changes, tried = self._changes(plan)
        return replace(plan, changes=tuple(changes), tried=tuple(tried))

    def size(self, job: Job) -> Plan:
        """Plan a job with the smallest window that fits and is as fast as the largest, or else with the smallest."""
        options = job.options
        model = self._make(precision=job.precision, masters=options.master_weights)
        rows = max(1, round(model.rows * job.scale))
        found = model.trace(options.units, options.resident, options.wire_dtype, options.activations, rows)
        streamed = [size for size in found.setting.sizes if not size.resident]
        most = max(1, len(streamed))
        windows = [options.window] if options.window != "auto" else [*WINDOWS, most]
        windows = sorted({min(window, most) for window in windows})
        swept = functools.cache(lambda window: sweep(found, window, _transfer(options, window)))
        terms = functools.cache(lambda window: _device_terms(job, found, swept(window), model.state_share))
        largest = next((window for window in reversed(windows) if _fits(terms(window), job)), windows[0])
        host, disk = _host_terms(job, found, model, swept(largest))
        times = functools.cache(lambda window: _timed(job, found, swept(window), disk, model.state_share))
        enough = EQUAL * times(largest).seconds  # a larger window takes no longer
        window = next(window for window in windows if window == largest or times(window).seconds <= enough)
        return Plan(
            job=job,
            model=model.name,
            parameters=sum(parameter.numel() for parameter in model.module.parameters()),
            trained=sum(size.parameters for size in found.setting.sizes),
            rows=rows,
            window=window,
            transfer=_transfer(options, window),
            units=tuple(size.name for size in streamed),
            device_terms={name: nbytes for name, nbytes in terms(window).items() if nbytes},
            host_terms={name: nbytes for name, nbytes in host.items() if nbytes},
            disk=disk,
            bytes_up=swept(window).up,
            fits_device=_fits(terms(window), job),
            time=times(window),
        )

    # ---- changes

    def _changes(self, plan: Plan) -> tuple[list[Change], list[str]]:
        """Return up to three changes that make a run fit or, if it fits, faster; and all changes that it tried."""
        found, tried = list[Change](), list[str]()
        least = replace(plan.job, scale=plan.job.scale / plan.rows).with_options(activations=[*LESS][-1])
        can_fit = not plan.fits_device and (smallest := self._tried(least)) is not None and smallest.fits_device
        rows = plan.rows if can_fit else 1
        parts = sorted({2**power for power in range(rows.bit_length()) if rows % 2**power == 0} | {rows})
        for what, cost, job in _that_may_be_faster(plan) if plan.fits else _that_may_fit(plan, parts):
            tried.append(what)
            sized = self._tried(job)
            if sized is None:
                continue
            slower = plan.speed()["rows_per_s"] / sized.speed()["rows_per_s"]
            if sized.fits and (not plan.fits or slower < 1 / EQUAL):
                found.append(Change(what, cost, sized.device_nbytes, sized.host_nbytes, sized.step_s, slower))
            if len(found) == OFFERED:
                break
        return sorted(found, key=lambda one: one.slower) if plan.fits else found, tried

    def _tried(self, job: Job) -> Plan | None:
        """Plan a job with a change; return None if its options do not go together, or the model cannot run that way."""
        try:
            return self.size(job)
        except SuperpipelineError:
            return None


def _that_may_be_faster(plan: Plan) -> Iterator[tuple[str, str, Job]]:
    """Yield changes that may make a run faster that fits: what to type, what it costs, and the job with it."""
    job = plan.job
    yield _batch_of(2 * plan.rows), "", replace(job, scale=2 * job.scale)
    if plan.trained:
        for policy, cost in ({"keep": "more bytes on the device"} | LESS).items():
            if policy != job.options.activations:
                yield f"activations={policy!r}", cost, job.with_options(activations=policy)


def _that_may_fit(plan: Plan, parts: list[int]) -> Iterator[tuple[str, str, Job]]:
    """Yield changes that may make a run fit: what to type, what it costs, and the job; first those that change no bits.

    A batch is divided into each of these numbers of ``parts``, and as many more are then accumulated for a step.
    """
    job, options, trains = plan.job, plan.job.options, plan.trained > 0
    if options.window != "auto":
        yield "window='auto'", "", job.with_options(window="auto", transfer="auto")
    if options.optimizer_device == "device":
        yield "optimizer_device='host'", "", job.with_options(optimizer_device="host")
    precisions = [("", "", job)]
    if trains and not job.precision.endswith("16-true"):
        half = replace(job, precision="bf16-true")
        masters = half.with_options(master_weights=True)
        precisions += [("precision='bf16-true', master_weights=True", "computed in bf16, stepped in FP32", masters)]
        precisions += [("precision='bf16-true'", "weights and state are rounded to bf16", half)]
    policies: dict[Any, str] = {options.activations: ""}
    if not plan.fits_device:
        policies |= {policy: cost for policy, cost in LESS.items() if policy != options.activations}
    disks = [""] if plan.fits_host or not trains or options.spills else ["", "FOLDER"]
    for named, rounding, base in precisions:
        for count in parts[:1] if named else parts:
            batch, smaller = "", replace(base, scale=base.scale / count)
            if count > 1:
                batch = _batch_of(plan.rows // count)
            if count > 1 and trains:
                smaller = replace(smaller, accumulate=base.accumulate * count)
                batch += f", accumulate={smaller.accumulate}"
            for disk in disks:
                for less, cost in policies.items():
                    what = [named, batch, f"activations={less!r}" if cost else "", f"disk={disk}" if disk else ""]
                    costs = [rounding, cost, "state is read and written each step" if disk else ""]
                    changed = smaller.with_options(activations=less, disk=disk or options.disk)
                    if any(what):
                        yield ", ".join(filter(None, what)), ", ".join(filter(None, costs)), changed


def _batch_of(rows: int) -> str:
    return f"a batch of {rows} row{'s' * (rows > 1)}"


# ---- bytes


def _device_terms(job: Job, found: Trace, swept: Sweep, share: float) -> dict[str, int]:
    """Return the device's bytes by term: those of the visits, and the optimizer's, workspaces and a reserve."""
    sizes = found.setting.sizes
    state = share * sum(size.down_nbytes for size in sizes if size.resident)
    if job.options.optimizer_device == "device":  # weights, gradients and state of two units are there at a time
        state += 2 * 4 * max(size.parameters for size in sizes) * (2 + share)
    terms = swept.terms | {"optimizer": int(state), "workspaces": WORKSPACES.get(job.target, 0)}
    fixed, wasted = RESERVE.get(job.target, (0, 0.0))
    return terms | {"reserve": fixed + int(wasted * sum(terms.values()))}


def _host_terms(job: Job, found: Trace, model: PlannedModel, swept: Sweep) -> tuple[dict[str, int], OnDisk]:
    """Return the host memory by term that the devices of a machine share, and the bytes in files."""
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
    beside = {"activations": job.devices * sum(visit.work.down for visit in found.visits)}
    beside["copies"] = job.copies * sum(one.frozen + one.weights for one in of_units)
    budget = job.host_available if options.host_budget is None else options.host_budget
    terms, disk = placed(of_units, budget if options.uses_files else None, options.spills, swept.loads_each)
    return terms | beside, disk


# ---- time


def _timed(job: Job, found: Trace, swept: Sweep, disk: OnDisk, share: float) -> StepTime:
    """Add up the work of a step's parts, from its trace and its loads, and return the time of the step."""
    works, sizes = {False: Work(), True: Work()}, found.setting.sizes
    for visit in found.visits:
        works[visit.backward] = works[visit.backward].plus(visit.work)
    step, of_first = Work(read=disk.read, written=disk.written), Work()
    for backward, loads in swept.loads.items():
        works[backward].up += sum(sizes[index].up_nbytes for index in loads)
    for index, size in enumerate(sizes):
        if size.resident:
            step.moved += 4 * (3 + 2 * share) * size.parameters
            continue
        sent = (job.nodes - 1) * (size.down_nbytes + 2 * size.cast)  # a machine has a part for each of its devices
        work = Work(sent=sent, trained=size.parameters, cast=size.cast)
        if index in swept.loads[False][:1]:
            works[False].up -= size.up_nbytes
            of_first = work.plus(Work(up=size.up_nbytes, down=size.down_nbytes))
        else:
            step = step.plus(work)
            works[True].down += size.down_nbytes
    run = Run(
        cost=step_cost(share, on_device=job.options.optimizer_device == "device"),
        alone=swept.window <= swept.transfer,
        clip=job.clip,
        accumulate=job.accumulate,
        summed=sum(size.down_nbytes + 2 * size.cast for size in sizes if not size.resident),
        overlap="forward" if job.options.optimizer_overlap else "none",
        ranks=job.devices,
    )
    return step_time(works[False], works[True], step, of_first, job.machine, run)


def _transfer(options: Options, window: int) -> int:
    """Return the units exchanged at a time with this window; "auto" is 1."""
    return 1 if options.transfer == "auto" else min(options.transfer, window)


def _fits(terms: dict[str, int], job: Job) -> bool:
    """Whether the device has room for all terms, and ``memory_budget`` for weights and gradients."""
    budget, weights = job.options.memory_budget, sum(terms[name] for name in (WINDOW, ROOT, GRADIENTS))
    return sum(terms.values()) <= job.machine.device_nbytes and (budget is None or weights <= budget)
