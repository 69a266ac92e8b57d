"""Choose the window, and the changes to offer: each is a plan of its own, made by the same code."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ..errors import SuperpipelineError
from ..host.unit_numbers import UnitNumbers
from ..options import Options
from ..store.placement import UnitBytes
from .host import OnDisk, State, placed
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
LESS = {"recompute": "each forward runs twice", "recompute+offload": "inputs of units go to the host and come back"}


class Planner:
    """Plans jobs for one model, which is made once for each precision."""

    def __init__(self, source: Any, batch: Any, **how: Any) -> None:
        self._make = functools.cache(functools.partial(PlannedModel, source, batch, **how))

    def plan(self, job: Job) -> Plan:
        """Plan a job, and what to change."""
        plan = self.size(job)
        return replace(plan, changes=tuple(self._changes(plan)))

    def size(self, job: Job) -> Plan:
        """Plan a job with the smallest window that fits and is as fast as the largest, or else with the smallest."""
        model, options = self._model(job), job.options
        rows = max(1, int(model.rows * job.scale))
        found = model.trace(options.units, options.resident, options.wire_dtype, options.activations, rows)
        sizes = model.sizes(found.setting)
        most = max(1, sum(not size.resident for size in sizes))
        windows = [options.window] if options.window != "auto" else [*WINDOWS, most]
        windows = sorted({min(window, most) for window in windows})
        swept = {window: sweep(found, sizes, window, _transfer(options, window)) for window in windows}
        terms = {window: self._device(job, one, sizes) for window, one in swept.items()}
        fitting = [window for window in windows if _fits(terms[window], job)]
        tried = fitting or windows[:1]
        host, disk = self._host(job, found, sizes, swept[tried[-1]])
        times = {window: self._timed(job, window, swept[window], found, sizes, disk) for window in tried}
        enough = EQUAL * times[tried[-1]].seconds  # a larger window takes no longer
        window = next(window for window in tried if times[window].seconds <= enough)
        return Plan(
            job=job,
            model=model.name,
            parameters=sum(unit.numel for unit in found.setting.units),
            trained=sum(size.parameters for size in sizes),
            rows=rows,
            window=window,
            transfer=_transfer(options, window),
            units=tuple(size.name for size in sizes if not size.resident),
            device_terms={name: nbytes for name, nbytes in terms[window].items() if nbytes},
            host_terms={name: nbytes for name, nbytes in host.items() if nbytes},
            disk=disk,
            bytes_up=swept[window].up,
            fits_device=bool(fitting),
            time=times[window],
        )

    def _model(self, job: Job) -> PlannedModel:
        return self._make(precision=job.precision, masters=job.options.master_weights)

    def _state(self, job: Job) -> State:
        return self._model(job).state(job.optimizer)

    # ---- bytes

    def _device(self, job: Job, swept: Sweep, sizes: list[UnitNumbers]) -> dict[str, int]:
        """Complete the terms of a step with those that do not depend on its visits."""
        share, stepped = self._state(job).share, sum(size.down_nbytes for size in sizes if size.resident)
        state = int(share * stepped)
        if job.options.optimizer_device == "device":  # weights, gradients and state of two units are there at a time
            state += int(2 * 4 * max(size.parameters for size in sizes) * (2 + share))
        terms = swept.terms | {"optimizer": state, "workspaces": WORKSPACES.get(job.target, 0)}
        fixed, wasted = RESERVE.get(job.target, (0, 0.0))
        return terms | {"reserve": fixed + int(wasted * sum(terms.values()))}

    def _host(self, job: Job, found: Trace, sizes: list[UnitNumbers], swept: Sweep) -> tuple[dict[str, int], OnDisk]:
        """Return the host memory of all devices of a machine, which share it, and what is in files."""
        model, options, state = self._model(job), job.options, self._state(job)
        of_units = []
        own = job.devices * (job.devices > 1)  # sums that each device has of several batches
        for unit, size in zip(found.setting.units, sizes, strict=True):
            on_device = size.resident and not options.master_weights  # where its weights are, and are stepped
            held = unit.parts if on_device else {id(p) for _, p in unit.params}
            host = {id(p): model.host_nbytes(p) * (id(p) in held) for _, p in unit.params}
            trained = [id(p) for _, p in unit.params if p.requires_grad]
            weights, stepped = (
                sum(host[key] for key in some) for some in (trained, state.stepped.intersection(trained))
            )
            of_units.append(
                UnitBytes(
                    frozen=sum(host.values()) - weights,
                    state=int(state.share * stepped),
                    weights=weights,
                    gradients=size.down_nbytes * bool(weights) if job.accumulate == 1 else (1 + own) * weights,
                    fixed=sum(
                        2 * p.numel()
                        for _, p in unit.params
                        if id(p) in found.setting.narrow or (model.masters and p.is_floating_point())
                    ),
                )
            )
        beside = {"activations": job.devices * sum(visit.work.down for visit in found.visits)}
        beside["copies"] = job.copies * sum(one.frozen + one.weights for one in of_units)
        budget = job.host_available if options.host_budget is None else options.host_budget
        terms, disk = placed(of_units, budget if options.uses_files else None, options.spills, swept.loads_each)
        return terms | beside, disk

    # ---- time

    def _timed(
        self, job: Job, window: int, swept: Sweep, found: Trace, sizes: list[UnitNumbers], disk: OnDisk
    ) -> StepTime:
        options, on_device = job.options, job.options.optimizer_device == "device"
        run = Run(
            cost=step_cost(self._state(job).share, on_device=on_device),
            alone=window <= _transfer(options, window),
            clip=job.clip,
            accumulate=job.accumulate,
            overlap="forward" if options.optimizer_overlap else "none",
            ranks=job.devices,
        )
        return step_time(*self._works(job, swept, found, sizes, disk), job.machine, run)

    def _works(
        self, job: Job, swept: Sweep, found: Trace, sizes: list[UnitNumbers], disk: OnDisk
    ) -> tuple[Work, Work, Work, Work]:
        """Return the work of a forward, a backward, a step, and what of these has to do with the first unit."""
        works, stepped = {False: Work(), True: Work()}, self._state(job).stepped
        for visit in found.visits:
            works[visit.backward] = works[visit.backward].plus(visit.work)
        for backward, loads in swept.loads.items():
            works[backward] = works[backward].plus(Work(up=sum(sizes[index].up_nbytes for index in loads)))
        step, of_first = Work(read=disk.read, written=disk.written), Work()
        for index, (unit, size) in enumerate(zip(found.setting.units, sizes, strict=True)):
            count = sum(p.numel() for _, p in unit.params if p.requires_grad and id(p) in stepped)
            if size.resident:
                step = step.plus(Work(moved=4 * (3 + 2 * self._state(job).share) * count))
                continue
            sent = (job.nodes - 1) / job.nodes * (size.down_nbytes + 2 * size.cast) * 2
            work = Work(sent=sent, trained=count, cast=min(size.cast, count))
            if index in swept.loads[False][:1]:
                works[False] = works[False].plus(Work(up=-size.up_nbytes))
                of_first = work.plus(Work(up=size.up_nbytes, down=size.down_nbytes))
            else:
                step = step.plus(work)
                works[True] = works[True].plus(Work(down=size.down_nbytes))
        return works[False], works[True], step, of_first

    # ---- changes

    def _changes(self, plan: Plan) -> list[Change]:
        """Return the changes that make a run fit, in their order, or where it fits those that are faster."""
        found: list[Change] = []
        for what, cost, job in self._candidates(plan):
            try:
                sized = self.size(job)
            except SuperpipelineError:
                continue  # not with the others, or the model cannot run that way
            slower = sized.step_s * plan.rows / sized.rows / plan.step_s
            if sized.fits and (not plan.fits or slower < 1 / EQUAL):
                found.append(Change(what, cost, sized.device_nbytes, sized.host_nbytes, sized.step_s, slower))
            if len(found) == OFFERED:
                break
        return sorted(found, key=lambda one: one.slower) if plan.fits else found

    @staticmethod
    def _candidates(plan: Plan) -> Iterator[tuple[str, str, Job]]:
        """Yield changes: what to type, what it costs, and the job with it; those that change no bits come first."""
        job, trains = plan.job, plan.trained > 0
        if plan.fits:
            yield f"a batch of {2 * plan.rows} rows", "", replace(job, scale=2 * job.scale)
            yield "activations='keep'", "more bytes on the device", job.with_options(activations="keep")
        elif not plan.fits_device:
            for policy, cost in LESS.items():
                yield f"activations={policy!r}", cost, job.with_options(activations=policy)
            yield f"a batch of {plan.rows // 2} rows", "", replace(job, scale=job.scale / 2)
        elif trains:
            yield "disk=FOLDER", "state is read and written each step", job.with_options(disk="FOLDER")
        if not plan.fits and trains and not job.precision.endswith("16-true"):
            half = replace(job, precision="bf16-true")
            masters = half.with_options(master_weights=True)
            yield "precision='bf16-true', master_weights=True", "computed in bf16, stepped in FP32", masters
            yield "precision='bf16-true'", "weights and state are rounded to bf16", half


def _transfer(options: Options, window: int) -> int:
    return 1 if options.transfer == "auto" else min(options.transfer, window)


def _fits(terms: dict[str, int], job: Job) -> bool:
    """Whether the device, and the budget for weights and gradients, have room."""
    budget, weights = job.options.memory_budget, sum(terms[name] for name in (WINDOW, ROOT, GRADIENTS))
    return sum(terms.values()) <= job.machine.device_nbytes and (budget is None or weights <= budget)
