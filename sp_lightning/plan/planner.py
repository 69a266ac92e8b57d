"""Choose the window, and the changes to offer: each is a plan of its own, made by the same code."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..core import remedies
from ..core.unit_numbers import ONE_PROCESS, HostBytes, HostSharing
from ..core.window_choice import first_window
from ..errors import OptionError, SuperpipelineError, UnsupportedError
from ..optim.device_step import device_nbytes
from ..options import Options
from ..runtime.preflight import finer_classes
from .host import CUT, OnDisk, State, host_of, state_of
from .machines import Machine
from .model import Answers, PlannedModel
from .report import Change, Plan
from .step import KEPT, Run, StepTime, Sweep, Work, sent, step_cost, step_time, sweep
from .trace import Trace

# Two of cuBLAS, of the threads of forward and backward: torch allocates 8.125 MiB each, and 32 MiB on Hopper.
WORKSPACES = {"cuda": 2 * 8 * 2**20 + 2**18}
RESERVE = {"cuda": (2**29, 0.04)}  # bytes of a context, and the share of the rest that an allocator wastes
WINDOWS = 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96
EQUAL = 1.02  # ratio of times below which they count as equal
OFFERED = 3  # changes
MOST_ROWS = 2**30
CACHE = "keys and values"


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run to plan. The arguments are those of `sp_lightning.plan`."""

    options: Options
    precision: str
    machine: Machine
    target: str  # the device type whose kernels count
    headroom: int
    optimizer: Any = None
    answers: Answers | None = None
    accumulate: int = 1
    clip: bool = False
    copies: int = 0
    trained_copies: int = 0
    devices: int = 1
    nodes: int = 1
    sharing: HostSharing = ONE_PROCESS
    rows: int | None = None  # of the batch, where it is another one

    @property
    def host_available(self) -> int:
        """Bytes of host memory that the run may have."""
        return int(min(self.machine.host_nbytes - self.headroom, self.options.host_limit))

    def changed(self, precision: str | None = None, optimizer: Any = None, **options: Any) -> Job:
        """Return the job with other options."""
        changed = replace(self.options, **options)
        if changed.takes_what_is_free:
            changed = replace(changed, host_budget=max(1, self.machine.host_nbytes - self.headroom))
        given = {"precision": precision or self.precision, "optimizer": optimizer or self.optimizer}
        return replace(self, options=changed, **given)


class Planner:
    """Plans jobs for one model, which is made and traced once for each precision."""

    def __init__(self, source: Any, batch: Any, **how: Any) -> None:
        self._source, self._batch, self._how = source, batch, how
        self._models: dict[Any, PlannedModel] = {}
        self._states: dict[Any, State] = {}

    def plan(self, job: Job) -> Plan:
        """Plan a job, and what to change."""
        plan = replace(self.size(job.changed()), largest_batch=self._largest_batch(job))
        changes = tuple(self._changes(job.changed(), plan))
        return replace(plan, changes=changes, notes=tuple(self._model(job).notes))

    def _model(self, job: Job) -> PlannedModel:
        key = job.precision, job.options.master_weights, job.answers
        if key not in self._models:
            how = {**self._how, "precision": job.precision, "masters": key[1], "answers": job.answers}
            self._models[key] = PlannedModel(self._source, self._batch, **how)
        return self._models[key]

    def _state(self, job: Job) -> State:
        model = self._model(job)
        if job.answers:
            return State("", 0.0, frozenset())
        key = job.optimizer if isinstance(job.optimizer, str) else id(job.optimizer), id(model)
        if key not in self._states:
            try:
                with model.tensors:
                    self._states[key] = state_of(job.optimizer, model.module)
            except OptionError:
                raise
            except Exception as error:
                model.note(f"the optimizer could not be made ({error}): planned with AdamW's state")
                self._states[key] = State("AdamW", 2.0)
        return self._states[key]

    def _trace(self, job: Job) -> Trace:
        model = self._model(job)
        tokens = job.answers.tokens if job.answers else 0
        one = model.trace(job.options, tokens=tokens)
        if job.rows is None or job.rows == model.rows:
            return one
        other = one.between(model.trace(job.options, scale=2, tokens=tokens), job.rows / model.rows - 1)
        if other is None:
            raise UnsupportedError("a batch of twice the rows takes other steps, so other batches are unknown")
        return other

    # ---- bytes

    def size(self, job: Job) -> Plan:
        """Plan a job with the smallest window that fits and is as fast as the largest, or else with the smallest."""
        model, options = self._model(job), job.options
        host, disk = self._host(job)
        swept = functools.cache(lambda window: self._swept(job, window))
        timed = functools.cache(lambda window: self._timed(job, window, swept(window), self._trace(job), disk))
        windows = self._windows(job)
        fitting = [one for one in windows if sum(swept(one).terms.values()) <= job.machine.device_nbytes]
        tried = fitting or windows[:1]
        enough = EQUAL * timed(tried[-1]).seconds  # a larger window takes no longer
        window = tried[bisect.bisect_left(tried, True, key=lambda one: timed(one).seconds <= enough)]
        reading = self._timed(job, window, swept(window), model.trace(options), disk) if job.answers else None
        sizes, units = model.sizes(options), model.units_of(options)
        loads = [*swept(window).loads[False], *swept(window).loads[True]]
        resident = sum(size.down_nbytes for size in sizes if size.resident)  # as wide as its gradients
        return Plan(
            model=model.name,
            parameters=sum(unit.numel for unit in units),
            trained=sum(size.parameters for size in sizes),
            rows=job.rows or model.rows,
            precision=job.precision,
            machine=job.machine,
            options=options,
            window=window,
            transfer=self._transfer(job, window),
            units=tuple(size.name for size in sizes if not size.resident),
            device_terms={name: nbytes for name, nbytes in swept(window).terms.items() if nbytes},
            bytes_up=sum(sizes[index].up_nbytes for index in loads) + resident,
            loaded=sum(disk.loaded.get(index, 0) for index in loads),
            host=host,
            disk=disk,
            available=job.machine.device_nbytes,
            host_available=job.host_available,
            headroom=job.headroom,
            time=timed(window),
            reading_s=reading.seconds if reading else 0.0,
            answer=job.answers.tokens if job.answers else 0,
            accumulate=job.accumulate,
            devices=job.devices,
            nodes=job.nodes,
        )

    def _windows(self, job: Job) -> list[int]:
        """List the windows to try."""
        sizes, options = self._model(job).sizes(job.options), job.options
        streamed = [size for size in sizes if not size.resident]
        most = max(1, len(streamed))
        if options.window != "auto":
            return [min(options.window, most)]
        if options.memory_budget is not None:
            root = sum(size.up_nbytes for size in sizes if size.resident)
            most = first_window(options, streamed, root, on_host=False)
        return sorted({min(window, most) for window in (*WINDOWS, most)})

    @staticmethod
    def _transfer(job: Job, window: int) -> int:
        return 1 if job.options.transfer == "auto" else min(job.options.transfer, window)

    def _swept(self, job: Job, window: int) -> Sweep:
        """Take a step through the schedule, and complete its terms."""
        model, options, at = self._model(job), job.options, self._trace(job)
        sizes, how = model.sizes(options), (self._transfer(job, window), options.activations)
        result, terms = sweep(at, sizes, window, *how), dict[str, int]()
        if job.answers:
            reading = model.trace(options)
            read = sweep(reading, sizes, window, *how)
            passes = _with_cache(read.terms, reading.cache), _with_cache(result.terms, at.cache)
            terms = max(passes, key=lambda found: sum(found.values()))
            if job.answers.cache == "host":  # all but the layer that computes, and the next one
                layers = sum(not size.resident for size in sizes)
                terms[CACHE] = terms[CACHE] * min(2, layers) // max(1, layers)
        else:
            first = model.sizes(options, first=True)  # in a run's first step half the units are there, as they are
            begun = sweep(at, first, max(1, window // 2), *how, model.casts(options)) if first != sizes else result
            terms = max(result.terms, begun.terms, key=lambda found: sum(found.values()))
        if options.optimizer_device == "device" and not job.answers:
            trained = sum(size.parameters for size in sizes)
            width = 4 if options.master_weights or not job.precision.endswith("16-true") else 2
            terms["optimizer"] = device_nbytes(int(width * trained * (2 + self._state(job).share)))
        terms["workspaces"] = WORKSPACES.get(job.target, 0)
        fixed, share = RESERVE.get(job.target, (0, 0.0))
        terms["reserve"] = fixed + int(share * sum(terms.values()))
        return replace(result, terms=terms)

    def _host(self, job: Job) -> tuple[HostBytes, OnDisk]:
        """Return the host memory of all ranks of a machine, which share it, and what each has on the disk."""
        model, state, sharing = self._model(job), self._state(job), job.sharing
        options, sizes = job.options, model.sizes(job.options)
        # Gradients stay in the type in which they come down where one process steps them here (gradients/slab.py).
        alone = not sharing.several and not sharing.own_gradients and options.host_budget is None
        here = options.optimizer_device == "host" and not options.fused_optimizer and state.name in CUT
        one, disk = host_of(model, options, state, sharing, alone and here and job.precision.startswith("bf16"))
        weights = one.weights + disk.weights
        one = sharing.with_share(replace(one, copies=job.copies * weights + job.trained_copies * one.gradients))
        largest = max((size.down_nbytes for size in sizes), default=0)
        messages = sharing.messages(max((size.gradient_nbytes for size in sizes), default=0))
        shares_state = state.name in CUT or not state.name
        all_of_them = (sharing.ranks, sharing.ahead * largest, sharing.own_gradients, shares_state, messages)
        return one.of_ranks(*all_of_them).times(max(1, job.devices // sharing.ranks)), disk

    # ---- time

    def _timed(self, job: Job, window: int, swept: Sweep, found: Trace, disk: OnDisk) -> StepTime:
        options, state = job.options, self._state(job)
        run = Run(
            cost=step_cost(state.share, fused=options.fused_optimizer, on_device=options.optimizer_device == "device"),
            alone=window <= self._transfer(job, window),
            clip=job.clip,
            accumulate=job.accumulate,
            overlap="forward" if options.optimizer_overlap else "none",
            ranks=job.devices,
        )
        return step_time(*self._works(job, swept, found, disk), job.machine, run)

    def _works(self, job: Job, swept: Sweep, found: Trace, disk: OnDisk) -> tuple[Work, Work, Work, Work]:
        """Return the work of a forward, a backward, a step, and what of these has to do with the first unit."""
        model, options, state = self._model(job), job.options, self._state(job)
        sizes, units = model.sizes(options), model.units_of(options)
        stowed = sum(sent(visit, options.activations) for visit in found.visits)
        again = [v for v in found.visits if v.saved and not v.backward and "recompute" in options.activations]
        sweeps, steps = [], []
        for backward in (False, True):
            visits = [*(v for v in found.visits if v.backward is backward), *(again if backward else ())]
            sweeps.append(
                Work(
                    flops=sum(visit.flops for visit in visits),
                    fp32_flops=sum(visit.fp32_flops for visit in visits),
                    moved=sum(visit.moved for visit in visits),
                    up=sum(sizes[index].up_nbytes for index in swept.loads[backward]) + backward * stowed,
                    read=sum(disk.loaded.get(index, 0) for index in swept.loads[backward]),
                    down=(not backward) * stowed,
                )
            )
        hosts = job.nodes if not job.answers else 1
        for unit, size in zip(units, sizes, strict=True):
            trained = [p for _, p in unit.params if p.requires_grad]
            trained = [p for p in trained if state.stepped is None or id(p) in state.stepped]
            count = sum(p.numel() for p in trained)
            work = Work(
                up=size.down_nbytes if size.resident else 0,
                down=size.down_nbytes,
                read=disk.read.get(unit.index, 0),
                written=disk.written.get(unit.index, 0),
                sent=(hosts - 1) * size.gradient_nbytes / hosts * (2 + options.divide_state),
                trained=count,
                cast=min(size.cast, count),
            )
            steps.append(work)
        first = next((index for index in swept.loads[False] if not job.answers), None)
        forward, backward_work = sweeps
        down = sum(work.down for work in steps)
        if first is not None:
            down -= steps[first].down
            forward = replace(forward, up=forward.up - sizes[first].up_nbytes)
        of_first = Work() if first is None else replace(steps.pop(first), up=sizes[first].up_nbytes)
        step = functools.reduce(Work.plus, steps, Work())
        return forward, replace(backward_work, down=backward_work.down + down), replace(step, down=0), of_first

    # ---- changes

    def _largest_batch(self, job: Job) -> int | None:
        window = self._windows(job)[0]

        def fits(rows: int) -> bool:
            swept = self._swept(replace(job, rows=rows), window)
            return sum(swept.terms.values()) <= job.machine.device_nbytes

        try:
            high = next(1 << power for power in range(31) if power == 30 or not fits(1 << power))
        except SuperpipelineError:
            return None
        return bisect.bisect_left(range(high), True, key=lambda rows: rows > 0 and not fits(rows)) - 1

    def _changes(self, job: Job, plan: Plan) -> list[Change]:
        """Return the changes that make room or, where there is room, a sample faster: the first three."""
        found: list[Change] = []
        for what, detail, change in self._candidates(job, plan):
            try:
                sized = self.size(change())
            except SuperpipelineError:
                continue  # not with the others, or the model cannot run that way
            needs = sized.device_nbytes, sized.host.total, sized.step_s
            one = Change(what, detail, *needs, sized.rows / plan.rows, sized.window)
            if sized.fits and (not plan.fits or one.cost(plan) < 1 / EQUAL):
                found.append(one)
            if not plan.fits and len(found) == OFFERED:
                break
        return (found if not plan.fits else sorted(found, key=lambda one: one.cost(plan)))[:OFFERED]

    def _candidates(self, job: Job, plan: Plan) -> Iterator[tuple[str, str, Any]]:
        """Yield changes: what to type, what it costs, and what makes the job with it."""
        options, trains, rows = job.options, job.answers is None, plan.largest_batch
        of_options = []
        if not plan.fits_host and trains:
            yield from self._host_candidates(job)
            return
        if job.answers and job.answers.cache == "device":
            answers = Answers(plan.answer, "host")
            yield "cache='host'", remedies.CACHE["host"].cost, functools.partial(replace, job, answers=answers)
        if trains and not plan.fits:
            of_options += remedies.activations(options.activations)
            of_options += remedies.activations("recompute") if options.activations == "keep" else []
        elif trains and options.activations != "keep":
            yield "activations='keep'", "more bytes on the device", functools.partial(job.changed, activations="keep")
        if trains and plan.fits and job.devices * job.nodes == 1 and self._state(job).name in CUT:
            of_options.append(remedies.OPTIMIZER_DEVICE["device" if options.optimizer_device == "host" else "host"])
        if not plan.fits:
            of_options += remedies.smaller_units(finer_classes(self._model(job).units_of(options)))
        for remedy in of_options:
            yield remedy.what, remedy.cost, functools.partial(job.changed, **remedy.options)
        more = 2 * plan.rows if plan.fits else rows
        if rows and more and (rows >= more if plan.fits else rows < plan.rows):
            yield f"a batch of {more} rows", "", functools.partial(replace, job, rows=more)
        if trains and not plan.fits and job.precision == "32-true":
            changed = functools.partial(job.changed, precision="bf16-true", master_weights=True)
            yield "precision='bf16-true' and master_weights=True", "computed in bf16, stepped in FP32", changed

    def _host_candidates(self, job: Job) -> Iterator[tuple[str, str, Any]]:
        options = job.options
        half = job.precision.endswith("16-true")
        for remedy in remedies.host(
            half=half and not options.master_weights,
            wires=options.may_cast and job.precision.endswith("mixed"),
            activations=options.activations,
            optimizer=self._state(job).name,
            masters=options.master_weights,
        ):
            if not remedy.adapters:  # which are another model
                given = {"master_weights": False, **remedy.options} if remedy.half else remedy.options
                precision = "bf16-true" if remedy.half else None
                change = functools.partial(job.changed, precision, remedy.optimizer, **given)
                yield remedy.what, f"{remedy.bits}: {remedy.how}", change


def _with_cache(terms: dict[str, int], cache: float) -> dict[str, int]:
    """Name what a pass keeps of keys and values."""
    moved = min(int(cache), terms[KEPT])
    return {**terms, KEPT: terms[KEPT] - moved, CACHE: moved}
