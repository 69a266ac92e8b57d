"""Choose the window, and the changes to offer: each is a plan of its own, made by the same code."""

from __future__ import annotations

import bisect
import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..compat.tensors import without_ranks
from ..core import remedies
from ..core.unit_numbers import HostBytes, HostSharing
from ..core.window_choice import first_window
from ..errors import OptionError, SuperpipelineError, UnsupportedError
from ..optim.device_step import device_nbytes
from ..options import Options
from ..runtime.preflight import finer_classes
from ..wholes.sharded import shards_of
from . import listed
from .host import CUT, OnDisk, State, host_of, state_of
from .lanes import Run, StepTime, UnitWork, step_cost, step_time
from .machines import Machine
from .model import KEPT, Answers, PlannedModel
from .report import Change, Plan
from .trace import Trace, Visit

# Two of cuBLAS, of the threads of forward and backward: torch allocates 8.125 MiB each, and 32 MiB on Hopper.
WORKSPACES = {"cuda": 2 * 8 * 2**20 + 2**18}
RESERVE = {"cuda": (2**29, 0.04)}  # bytes of a context, and the share of the rest that an allocator wastes
WINDOWS = 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96
EQUAL = 1.02  # ratio of times below which they count as equal
OFFERED = 3  # changes
MOST_ROWS = 2**30


CACHE = "keys and values"
NOT_CUT = (
    "left out for a module none of whose parameters is a DTensor: have a function that takes the mesh call "
    "parallelize_module(..., mesh, plan), or configure_model with self.device_mesh['tensor_parallel']"
)


def prepared(module: Any, batch: Any, name: str | None) -> tuple[Any, Any, str | None]:
    """Return the module, or the function that makes it, a batch, and a name; look up a listed name."""
    if not isinstance(module, str):
        return module, batch, name
    found = listed.find(module)
    if found is None:
        allowed = f"a module, a function that makes one, or one of {', '.join(listed.LISTED)}{listed.near(module)}"
        raise OptionError(argument="module", found=module, allowed=allowed)
    if batch is None or isinstance(batch, int):
        batch = listed.batch_of(found, batch or listed.ROWS, None)
    return listed.maker(found), batch, name or listed.SAME.get(module, module)


@contextlib.contextmanager
def mesh_of(shards: int | None) -> Iterator[Any]:
    """Make a mesh of as many devices with shards of one layer; this process is its first rank, without any other."""
    if shards is None:
        yield None
        return
    if torch.distributed.is_initialized():
        allowed = "left out in a process of a group, whose modules are cut: plan one of them"
        raise OptionError(argument="tensor_parallel_size", found=shards, allowed=allowed)
    from torch.distributed.device_mesh import init_device_mesh  # other plans need nothing of it

    with without_ranks(shards):
        yield init_device_mesh("cpu", (1, shards), mesh_dim_names=("data_parallel", "tensor_parallel"))


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run to plan. The arguments are those of `sp_lightning.plan`."""

    options: Options
    precision: str
    optimizer: Any
    answers: Answers | None
    accumulate: int
    clip: bool
    copies: int
    trained_copies: int
    devices: int
    nodes: int
    sharing: HostSharing
    machine: Machine
    target: str
    headroom: int
    rows: int | None = None  # of the batch, where it is another one

    @property
    def host_available(self) -> int:
        """Bytes of host memory that the run may have."""
        return int(min(self.machine.host_nbytes - self.headroom, self.options.host_limit))

    def within_host(self) -> Job:
        """Return the job with a host budget of all that is there, if it has a disk and no other budget."""
        if not self.options.takes_what_is_free:
            return self
        left = max(1, self.machine.host_nbytes - self.headroom)
        return replace(self, options=replace(self.options, host_budget=left))


@dataclass(frozen=True)
class Sized:
    """The needs and the time of a job with one window."""

    window: int
    transfer: int
    terms: dict[str, int]
    host: HostBytes
    disk: OnDisk
    time: StepTime
    reading: StepTime | None = None

    @property
    def nbytes(self) -> int:
        return sum(self.terms.values())


class Planner:
    """Plans jobs for one model, which is made and traced once for each precision."""

    def __init__(self, source: Any, batch: Any, **how: Any) -> None:
        self._source = source
        self._batch = batch
        self._how = how
        self._models: dict[tuple[str, bool, Answers | None], PlannedModel] = {}
        self._states: dict[Any, State] = {}

    def shards(self, precision: str, options: Options, asked: int | None, devices: int) -> int:
        """Return among how many devices the model's layers are cut; raise OptionError if it was to be otherwise."""
        model = self._made(precision, options.master_weights, self._how["answers"])
        found = shards_of(model.module)
        if asked not in (None, found):
            allowed = f"{found}, among which the module's layers are cut" if found > 1 else NOT_CUT
            raise OptionError(argument="tensor_parallel_size", found=asked, allowed=allowed)
        if devices > 1 and devices % found:
            allowed = f"a multiple of {found}, among which the module's layers are cut, or left out"
            raise OptionError(argument="devices", found=devices, allowed=allowed)
        return found

    def plan(self, job: Job, shards: int = 1) -> Plan:
        """Plan a job."""
        job = job.within_host()
        model = self._model(job)
        sized, fits = self.size(job)
        sizes = model.sizes(job.options)
        units = model.units_of(job.options)
        plan = Plan(
            model=model.name,
            parameters=sum(unit.numel for unit in units),
            trained=sum(size.parameters for size in sizes),
            rows=model.rows,
            precision=job.precision,
            machine=job.machine,
            options=job.options,
            window=sized.window,
            transfer=sized.transfer,
            units=tuple(size.name for size in sizes if not size.resident),
            device_terms={name: nbytes for name, nbytes in sized.terms.items() if nbytes},
            host=sized.host,
            disk=sized.disk,
            available=job.machine.device_nbytes,
            host_available=job.host_available,
            headroom=job.headroom,
            time=sized.time,
            reading_s=sized.reading.seconds if sized.reading else 0.0,
            answer=job.answers.tokens if job.answers else 0,
            accumulate=job.accumulate,
            devices=job.devices,
            nodes=job.nodes,
            shards=shards,
            largest_batch=self._largest_batch(job),
            changes=(),
            notes=(),
        )
        assert fits is plan.fits
        changes = tuple(self._changes(job, plan))
        return replace(plan, changes=changes, notes=tuple(model.notes))

    def _model(self, job: Job) -> PlannedModel:
        return self._made(job.precision, job.options.master_weights, job.answers)

    def _made(self, precision: str, masters: bool, answers: Answers | None) -> PlannedModel:
        key = precision, masters, answers
        if key not in self._models:
            how = {**self._how, "precision": precision, "masters": masters, "answers": answers}
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

    # ---- bytes

    def size(self, job: Job) -> tuple[Sized, bool]:
        """Return the smallest window that fits and is as fast as the largest, or else the smallest; and if it fits."""
        model, options = self._model(job), job.options
        sizes = model.sizes(options)
        streamed = [size for size in sizes if not size.resident]
        root = sum(size.up_nbytes for size in sizes if size.resident)
        most = max(1, len(streamed))
        if options.memory_budget is not None:
            most = first_window(options, streamed, root, on_host=False)
        given = {min(options.window, most)} if options.window != "auto" else set()
        windows = sorted(given or {min(window, most) for window in (*WINDOWS, most)})
        fitting = [window for window in windows if self._nbytes(job, window) <= job.machine.device_nbytes]
        host, disk = self._host(job)
        fits = bool(fitting) and host.total <= job.host_available
        works = self._works(job, self._trace(job), disk)
        tried = fitting or windows[:1]
        timed = functools.cache(lambda window: self._timed(job, window, works))
        enough = EQUAL * timed(tried[-1]).seconds  # a larger window takes no longer
        window = tried[bisect.bisect_left(tried, True, key=lambda window: timed(window).seconds <= enough)]
        time = timed(window)
        reads = self._works(job, model.later(options), disk) if job.answers else None
        reading = self._timed(job, window, reads) if reads else None
        transfer = self._transfer(job, window)
        return Sized(window, transfer, self._terms(job, window), host, disk, time, reading), fits

    def _transfer(self, job: Job, window: int) -> int:
        return 1 if job.options.transfer == "auto" else min(job.options.transfer, window)

    def _trace(self, job: Job) -> Trace:
        model = self._model(job)
        tokens = job.answers.tokens if job.answers else 0
        one = model.later(job.options, tokens=tokens)
        if job.rows is None or job.rows == model.rows:
            return one
        other = one.between(model.later(job.options, scale=2, tokens=tokens), job.rows / model.rows - 1)
        if other is None:
            raise UnsupportedError("a batch of twice the rows takes other steps, so other batches are unknown")
        return other

    def _terms(self, job: Job, window: int) -> dict[str, int]:
        model = self._model(job)
        at = self._trace(job) if job.rows is not None or job.answers else None
        terms = model.peak(job.options, window, self._transfer(job, window), at)
        if job.answers:
            assert at is not None
            reading = model.later(job.options)
            read = model.peak(job.options, window, self._transfer(job, window), reading)
            passes = (_with_cache(read, reading.cache), _with_cache(terms, at.cache))
            terms = max(passes, key=lambda found: sum(found.values()))
            if job.answers.cache == "host":  # all but the layer that computes, and the next one
                layers = sum(not size.resident for size in model.sizes(job.options))
                terms[CACHE] = terms[CACHE] * min(2, layers) // max(1, layers)
        elif job.options.optimizer_device == "device":
            trained = sum(size.parameters for size in model.sizes(job.options))
            width = 4 if job.options.master_weights or not job.precision.endswith("16-true") else 2
            terms["optimizer"] = device_nbytes(int(width * trained * (2 + self._state(job).share)))
        terms["workspaces"] = WORKSPACES.get(job.target, 0)
        fixed, share = RESERVE.get(job.target, (0, 0.0))
        reserve = fixed + int(share * sum(terms.values()))
        return {**terms, "reserve": reserve} if reserve else terms

    def _nbytes(self, job: Job, window: int) -> int:
        return sum(self._terms(job, window).values())

    def _host(self, job: Job) -> tuple[HostBytes, OnDisk]:
        """Return the host memory of all ranks of a machine, which share it, and what each has on the disk."""
        model, state = self._model(job), self._state(job)
        sizes = model.sizes(job.options)
        one, disk = host_of(model, job.options, state, job.sharing, self._stays_narrow(job, state))
        weights = one.weights + disk.weights
        one = replace(one, copies=job.copies * weights + job.trained_copies * one.gradients)
        largest = max((size.down_nbytes for size in sizes), default=0)
        messages = job.sharing.messages(max((size.gradient_nbytes for size in sizes), default=0))
        one = job.sharing.with_share(one)
        shares_state = state.name in CUT or not state.name
        together = one.of_ranks(
            job.sharing.ranks, job.sharing.ahead * largest, job.sharing.own_gradients, shares_state, messages
        )
        return together.times(max(1, job.devices // job.sharing.ranks)), disk

    def _stays_narrow(self, job: Job, state: State) -> bool:
        """Whether gradients stay on the host in the type in which they come down (gradients/slab.py, Rule 3)."""
        options = job.options
        steps_here = options.optimizer_device == "host" and not options.fused_optimizer and not options.spills
        alone = job.devices == job.nodes == 1 and not job.sharing.own_gradients and options.host_budget is None
        return steps_here and alone and job.precision.startswith("bf16") and state.name in CUT

    # ---- time

    def _timed(self, job: Job, window: int, works: list[UnitWork]) -> StepTime:
        options, state = job.options, self._state(job)
        on_device = options.optimizer_device == "device"
        run = Run(
            cost=step_cost(state.share, fused=bool(options.fused_optimizer), on_device=on_device),
            window=window,
            transfer=self._transfer(job, window),
            inference=job.answers is not None,
            clip=job.clip,
            accumulate=job.accumulate,
            optimizer_device=options.optimizer_device,
            overlap="forward" if options.optimizer_overlap else "none",
            ranks=job.devices,
        )
        return step_time(works, job.machine, run)

    def _works(self, job: Job, found: Trace, disk: OnDisk) -> list[UnitWork]:
        model = self._model(job)
        sizes, units, state = model.sizes(job.options), model.units_of(job.options), self._state(job)
        first = next((unit.index for unit in units if not unit.resident), 0)
        visits = [replace(v, unit=first) if v.unit is None else v for v in found.visits]
        forward = [visit for visit in visits if not visit.backward and visit.unit is not None]
        left = list(reversed(forward))
        returned: dict[int, list[Visit]] = {}
        for visit in (v for v in visits if v.backward):
            use = next((one for one in left if one.unit == visit.unit), None)
            if use is None:
                use = next(one for one in forward if one.unit == visit.unit)
            else:
                left.remove(use)
            returned.setdefault(id(use), []).append(visit)
        works = []
        hosts = job.nodes if not job.answers else 1
        for visit in forward:
            assert visit.unit is not None
            size, index = sizes[visit.unit], visit.unit
            back = [visit.gradient, *(v.gradient for v in returned.get(id(visit), []))]
            stepped = [p for _, p in units[index].params if p.requires_grad]
            stepped = [p for p in stepped if state.stepped is None or id(p) in state.stepped]
            steps = sum(p.numel() for p in stepped)
            works.append(
                UnitWork(
                    name=size.name,
                    trained=steps,
                    cast=min(size.cast, steps),
                    forward_flops=visit.forward.flops,
                    backward_flops=sum(work.flops for work in back),
                    forward_fp32_flops=visit.forward.fp32_flops,
                    backward_fp32_flops=sum(work.fp32_flops for work in back),
                    forward_moved=visit.forward.moved,
                    backward_moved=sum(work.moved for work in back),
                    up_nbytes=0 if size.resident else size.up_nbytes,
                    down_nbytes=size.down_nbytes,
                    kept_nbytes=visit.down,
                    resident=size.resident,
                    mesh_nbytes=visit.forward.mesh,
                    file_nbytes=disk.loaded.get(index, 0),
                    kept_on_disk=disk.activations * visit.down // max(1, sum(v.down for v in forward)),
                    state_read_nbytes=disk.read.get(index, 0),
                    state_written_nbytes=disk.written.get(index, 0),
                    sums_nbytes=(hosts - 1) * size.gradient_nbytes / hosts * 2,
                    weights_nbytes=(hosts - 1) * size.gradient_nbytes / hosts * job.options.divide_state,
                )
            )
        return works + self._root(job, works)

    def _root(self, job: Job, works: Sequence[UnitWork]) -> list[UnitWork]:
        """Return the resident rest, which the host steps: its gradients come down, and its weights go up."""
        sizes = self._model(job).sizes(job.options)
        return [
            UnitWork(name=s.name, trained=s.parameters, cast=s.cast, up_nbytes=s.up_nbytes, down_nbytes=s.down_nbytes)
            for s in sizes
            if s.resident and s.parameters and not job.answers
        ]

    # ---- changes

    def _largest_batch(self, job: Job) -> int | None:
        available, window = job.machine.device_nbytes, 1
        if job.options.window != "auto":
            window = job.options.window

        def fits(rows: int) -> bool:
            return self._nbytes(replace(job, rows=rows), window) <= available

        try:
            fits(1)
        except SuperpipelineError:
            return None
        low, high = 0, 1
        while high < MOST_ROWS and fits(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def _changes(self, job: Job, plan: Plan) -> Iterator[Change]:
        """Yield the changes that make room or, where there is room, a sample faster: the first three."""
        found = []
        for what, cost, changed, optimizer in self._candidates(job, plan):
            try:
                job_now = replace(changed, optimizer=optimizer or changed.optimizer).within_host()
                sized, fits = self.size(job_now)
            except SuperpipelineError:
                continue  # not with the others, or the model cannot run that way
            samples = (job_now.rows or plan.rows) / plan.rows
            change = Change(what, cost, sized.nbytes, sized.host.total, sized.time.seconds, samples, sized.window)
            if fits and (not plan.fits or change.cost(plan) < 1 / EQUAL):
                found.append(change)
            if not plan.fits and len(found) == OFFERED:
                break
        yield from (found if not plan.fits else sorted(found, key=lambda one: one.cost(plan)))[:OFFERED]

    def _candidates(self, job: Job, plan: Plan) -> Iterator[tuple[str, str, Job, str | None]]:
        """Yield changes: what to type, what it costs, the job with it, and another optimizer, if it has one."""
        options, model = job.options, self._model(job)
        trains = job.answers is None

        def with_options(given: Any) -> Job:
            return replace(job, options=replace(options, **given))

        if not plan.fits_host and trains:
            yield from self._host_candidates(job)
            return
        if job.answers and job.answers.cache == "device":
            yield "cache='host'", remedies.CACHE["host"].cost, replace(job, answers=Answers(plan.answer, "host")), None
        policies = remedies.activations(options.activations)
        if options.activations == "keep":
            policies += remedies.activations("recompute")
        for remedy in policies if trains and not plan.fits else ():
            yield remedy.what, remedy.cost, with_options(remedy.options), None
        rows = plan.largest_batch
        if rows and rows < plan.rows:
            yield f"a batch of {rows} rows", "", replace(job, rows=rows), None
        if plan.fits:
            if rows and rows >= 2 * plan.rows:
                yield f"a batch of {2 * plan.rows} rows", "", replace(job, rows=2 * plan.rows), None
            place = "device" if options.optimizer_device == "host" else "host"
            remedy = remedies.OPTIMIZER_DEVICE[place]
            if trains and job.devices * job.nodes == 1 and job.target != "cpu" and self._state(job).name in CUT:
                yield remedy.what, remedy.cost, self._or_same(job, remedy.options), None
            if options.activations != "keep":
                yield "activations='keep'", "more bytes on the device", with_options({"activations": "keep"}), None
            return
        for remedy in remedies.smaller_units(finer_classes(model.units_of(options))):
            yield remedy.what, remedy.cost, with_options({**remedy.options}), None
        if trains and job.precision == "32-true":
            yield (
                "precision='bf16-true' and master_weights=True",
                "computed in bf16, stepped in FP32",
                replace(job, precision="bf16-true", options=replace(options, master_weights=True)),
                None,
            )

    @staticmethod
    def _or_same(job: Job, given: Any) -> Job:
        try:
            return replace(job, options=replace(job.options, **given))
        except OptionError:
            return job  # not with the others

    def _host_candidates(self, job: Job) -> Iterator[tuple[str, str, Job, str | None]]:
        options = job.options
        half = job.precision.endswith("16-true")
        for remedy in remedies.host(
            half=half and not options.master_weights,
            wires=options.may_cast and job.precision.endswith("mixed"),
            activations=options.activations,
            optimizer=self._state(job).name,
            masters=options.master_weights,
        ):
            if remedy.adapters:
                continue  # another model
            given = {"master_weights": False, **remedy.options} if remedy.half else remedy.options
            changed = replace(self._or_same(job, given), precision="bf16-true" if remedy.half else job.precision)
            yield remedy.what, f"{remedy.bits}: {remedy.how}", changed, remedy.optimizer


def _with_cache(terms: dict[str, int], cache: int) -> dict[str, int]:
    """Name what a pass keeps of keys and values."""
    moved = min(cache, terms[KEPT])
    return {**terms, KEPT: terms[KEPT] - moved, CACHE: moved}
