"""Try windows, transfers, batches and policies for a model, in numbers, and choose.

1. Nothing here is a rule of thumb about models: a training step is traced on tensors without data (traced_model.py),
   and its visits go through the runtime's own schedule, for bytes (`StepTrace.peak`) and for time (simulation.py).
2. The device's context, and what its allocator wastes, are a reserve that is assumed, not measured (`RESERVE`).
3. Bytes and time are linear in a batch's rows: straight lines through two traces, of the batch and of twice its rows.
4. Of the windows and transfers that fit, the smallest of the fastest is chosen: for the run, and anew for each change
   to it, so that a change takes what a plan with it says. Where none fits, bytes are those of the smallest one, and
   times those of the one that would be chosen with enough memory. A memory budget limits the window as it does in a
   run (window_choice.py, Rule 1), with the same errors.
5. With several devices a batch, a window and bytes on the device are one rank's; the host's bytes are those of all
   ranks together (unit_numbers.py, Rule 5), and they share its bandwidth (simulation.py, Rule 8).
6. Where layers are cut into shards (tensor parallelism), a batch, a window and bytes on the device are one rank's, too;
   the host's are those of all ranks: groups with different shards share nothing. An optimizer that has shards steps
   after backward, on every rank all that it has, and keeps state of its own there (sharded.py, Rule 4).
7. With several machines all figures but speeds are those of one of them, and each has these devices. They sum gradients
   once in a step, over a network of the speed that was given (simulation.py, Rule 11).
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import gc
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch

from ..compat.kernels import has_chunked_loss
from ..core import remedies
from ..core.machine import NARROW, Machine
from ..core.remedies import HostRemedy, Remedy
from ..core.schedule import Schedule
from ..core.simulation import Simulation, floor, simulate
from ..core.unit_numbers import HostBytes, UnitNumbers, stepped_on_device
from ..core.window_choice import first_window
from ..errors import OptionError, SuperpipelineError
from ..optim.device_step import device_nbytes, whole_nbytes
from ..options import Options
from ..runtime.preflight import finer_classes
from ..tracing.answers import Answers
from ..tracing.step_trace import GRADIENTS, KEPT, OUTSIDE, WINDOW, WORKING, StepTrace
from .forecast import MANY, SLOW, Change, LockstepPlan, Plan, RunTimes, SweepPoint, mean_s
from .listed_model import ListedModel
from .planned_calls import plan_calls
from .planned_model import PlannedModel, Requirements, is_cut, states_of
from .settings import ON_DEVICE, PlannedMachine, PlannedRun
from .traced_model import TracedModel, mesh_of
from .workloads import WORKLOADS, Workload, listed

RESERVE = {"cuda": (2**29, 0.04)}  # bytes of a context, and the share of the rest that an allocator wastes
RESERVED = "reserve"
OF_STEPS = "optimizer"  # the buffers of steps on the device
WINDOWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)
TRANSFERS = (1, 2, 4)
MOST_ROWS = 2**30
ENOUGH = 3  # changes that fit: no more are searched for
COPIES = 8  # of logits in FP32, at most, that all logits take: less is not worth another dry run
NEAR = 1.6  # times the available memory: windows that take more are left out
EQUAL = 1.02  # ratio of step times below which they count as equal (Rule 4)
# How many times as long as by its bytes a step of these takes on the host: they run in many kernels, without a
# compiled step (python benchmarks/small_state.py, on two cores).
PACE = {"Adafactor": 40, "AdamW8bit": 70}
ADAMW_WORDS = 7  # that AdamW reads and writes per parameter: a machine's optimizer bytes refer to them


def make_plan(module: Any, batch: Any, run: PlannedRun, machine: PlannedMachine, name: str | None) -> Plan:
    """Make the plan of a run of this module or workload, or of the workload of this name, on this machine."""
    run = run.within_host(machine.profile.host_nbytes - machine.headroom_nbytes)
    with contextlib.ExitStack() as stack:
        mesh = stack.enter_context(mesh_of(run.tensor_parallel_size)) if run.tensor_parallel_size else None
        source = _source(module, batch, run, machine.target, mesh)
        source.name = name or source.name
        if run.loss == "chunked":
            source = _in_chunks(source, run.options, machine.profile)
        stack.enter_context(_no_collections())
        planner = _Planner(source, run, machine)
        found = planner.plan()
        moves = any(cost.disk_nbytes or cost.state_read_nbytes for cost in planner.needs.costs)
        moves = moves or planner.needs.activations_on_disk > 0
        moves = moves or any(change.written_nbytes for change in found.host_changes)
        if not (machine.is_disk_assumed and moves):
            return found
        read, written = machine.profile.disk_bytes_per_s / 1e9, machine.profile.disk_out_bytes_per_s / 1e9
        assumed = f"the disk's speed is assumed, not measured: {read:g} GB/s read, {written:g} written"
        return replace(found, notes=(*found.notes, f"{assumed} (disk_speed; doctor --disk measures)"))


def _source(module: Any, batch: Any, run: PlannedRun, target: str, mesh: Any) -> PlannedModel:
    """Return the model to plan for: a workload, by its name too, or a module."""
    if isinstance(module, str):
        found = listed(module)
        if found is None:
            raise OptionError(argument="module", found=module, allowed="a module, or one of " + ", ".join(WORKLOADS))
        module = found
    if not isinstance(module, Workload):
        does = run.answers or run.own_loss
        how = run.precision, run.optimizer, target, does, run.predict_at_once, run.sharing, mesh
        return TracedModel(module, batch, *how)
    if mesh is not None:
        allowed = "left out for a workload, whose layers are listed whole (give a module, or a function that makes one)"
        raise OptionError(argument="tensor_parallel_size", found=run.tensor_parallel_size, allowed=allowed)
    if run.own_loss is not None:
        allowed = "None for a workload, whose numbers are listed (give a module, or a function that makes one)"
        raise OptionError(argument="loss", found=run.own_loss, allowed=allowed)
    if run.answers is not None:
        allowed = "left out for a workload (give a module, or a function that makes one)"
        raise OptionError(argument="answer", found=run.answers.tokens, allowed=allowed)
    rows = 8 * 2048 if batch is None else batch
    return ListedModel(module, rows, run.options, run.precision, run.optimizer, sharing=run.sharing)


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Leave cycles where they are: to look for them among all that was imported takes a fifth of a plan's time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _in_chunks(source: PlannedModel, options: Options, machine: Machine) -> PlannedModel:
    """Return the model with its loss in chunks."""
    source.needs(options, machine)  # which finds out whether there can be one
    found = source.in_chunks()
    if found is None:
        why = f"the loss of {source.name} is more than the cross entropy of what one linear layer makes"
        if not has_chunked_loss:
            why = f"torch {torch.__version__} computes none in chunks, torch 2.15 does"
        raise OptionError(argument="loss", found="chunked", allowed=f"'full': {why}")
    found.name = source.name
    return found


# ---- deciding


class _Planner:
    """Tries windows, transfers and other changes for one model."""

    def __init__(self, source: PlannedModel, run: PlannedRun, machine: PlannedMachine) -> None:
        self.source = source
        self.run = run
        self.options = run.options
        self.target = machine.target
        self.profile = machine.profile
        self.needs = source.needs(self.options, self.profile)
        self.optimizer = run.optimizer_name or source.optimizer
        trace = self.needs.trace
        self.shards = run.shards_among(1 if trace is None else trace.shards)  # Rule 6
        machine.check_mesh(self.shards)
        self.ranks = max(run.devices, self.shards)
        self.trains_shards = trace is not None and trace.trains_shards
        if run.sharing.divides_state and not is_cut(self.optimizer):
            allowed = f"False with {self.optimizer}, which each machine steps as a whole"
            raise OptionError(argument="divide_state", found=True, allowed=allowed)
        self.machine = self._stepping(source.states(), self.optimizer)
        self.available = self.profile.device_nbytes
        self.headroom = machine.headroom_nbytes
        host_nbytes = self.profile.host_nbytes
        self.host_available = int(min(host_nbytes - self.headroom, self.options.host_limit))
        self.tried = _Sizes(self, self.options, self.needs, self.machine)

    def _host(self, source: PlannedModel, options: Options, needs: Requirements) -> HostBytes:
        return self._of_ranks(self._host_of_one(source, options, needs), needs, self.optimizer, options)

    def _host_of_one(self, source: PlannedModel, options: Options, needs: Requirements) -> HostBytes:
        host = source.host(options, needs)
        weights = host.weights + needs.weights_on_disk  # a copy is in memory
        trained = host.gradients + needs.gradients_on_disk
        return replace(host, copies=self.run.copies * weights + self.run.trained_copies * trained)

    def _of_ranks(
        self, host: HostBytes, needs: Requirements, optimizer: str, options: Options | None = None
    ) -> HostBytes:
        """Return the host memory of all ranks, from that of one (Rule 5)."""
        under_way = self.run.sharing.ahead * max((cost.down_nbytes for cost in needs.costs), default=0)
        messages = self.run.sharing.messages(max((cost.gradient_nbytes for cost in needs.costs), default=0))
        cut = is_cut(optimizer) and not self.trains_shards
        chosen = options or self.options
        if self._stays_narrow(optimizer, chosen) and chosen.host_budget is None:  # which has room for what code reads
            came = sum(cost.down_nbytes for cost in needs.costs)
            host = replace(host, gradients=host.gradients * came // max(1, sum(c.gradient_nbytes for c in needs.costs)))
        replicas = self.ranks // self.shards
        host = self.run.sharing.with_share(host)
        return host.of_ranks(replicas, under_way, self.run.own_gradients, cut, messages).times(self.shards)

    def _stays_narrow(self, optimizer: str, options: Options) -> bool:
        """Whether gradients stay on the host in the type in which they come down (gradients/slab.py, Rule 3)."""
        run = self.run
        steps_here = options.optimizer_device == "host" and not options.fused_optimizer and not options.spills
        alone = self.ranks == run.nodes == 1 and not run.own_gradients
        return steps_here and alone and run.precision.startswith("bf16") and is_cut(optimizer)

    def _stepping(self, states: float, optimizer: str, options: Options | None = None) -> Machine:
        """Return the machine with the bytes that an optimizer with this state reads and writes per parameter."""
        pace, words = PACE.get(optimizer, 1), 3 + 2 * states
        at_once = self.ranks if self.trains_shards else self.shards  # ranks that step by themselves, beside each other
        stays_narrow = self._stays_narrow(optimizer, options or self.options)
        steps = at_once / (self.run.nodes_of_steps if self.run.sharing.divides_state else 1)
        cast = NARROW if stays_narrow else self.profile.cast_bytes_per_parameter
        return replace(
            self.profile,
            dram_bytes_per_s=self.profile.dram_bytes_per_s / pace,
            optimizer_bytes_per_parameter=steps * self.profile.optimizer_bytes_per_parameter * words / ADAMW_WORDS,
            cast_bytes_per_parameter=at_once * cast / pace,
            added_bytes_per_parameter=at_once * self.profile.optimizer_bytes_per_parameter * 3 / ADAMW_WORDS / pace,
        )

    def plan(self) -> Plan:
        chosen, paced = self.tried.sizes()
        largest_batch = self._largest_batch()
        trained = sum(cost.parameters for cost in self.needs.costs)
        trace, reading = self.needs.trace, self.needs.reading
        return Plan(
            model=self.source.name,
            parameters=trained if trace is None else trace.parameters,
            trained=trained,
            rows=self.source.rows,
            counted=self.source.counted,
            precision=self.run.precision,
            weights_dtype=_own_dtype(trace, self.run.precision),
            machine=self.machine,
            options=self.options,
            window=chosen.window,
            transfer=chosen.transfer,
            units=tuple(cost.name for cost in self.needs.streamed),
            device_terms=self.terms(self.tried.needs, *chosen),
            host=self._host(self.source, self.options, self.needs),
            available=self.available,
            simulation=self.tried.simulated(chosen),
            largest_window=self.tried.largest_window(),
            largest_batch=largest_batch,
            sweep=tuple(self.tried.sweep()),
            changes=tuple(self._changes(chosen, largest_batch)),
            host_changes=tuple(self._host_changes(self.tried.batch_s(paced))),
            notes=tuple(dict.fromkeys(self.source.notes)),
            flops=sum(cost.forward_flops + cost.backward_flops for cost in self.needs.costs),
            headroom=self.headroom,
            devices=self.ranks,
            nodes=self.run.nodes,
            accumulating_s=self.tried.accumulating_s(chosen),
            accumulate=self.run.accumulate,
            answer=self.source.answers.tokens if self.source.answers else 0,
            reading_s=self._reading_s(reading, chosen),
            with_memory=RunTimes(*self.tried.times(paced), self._reading_s(reading, paced)),
            on_disk=self.needs.on_disk,
            gradients_on_disk=self.needs.gradients_on_disk,
            lockstep=tuple(self._lockstep()),
            before_s=self.tried.before_s(chosen),
            before_floor_s=self.tried.before_floor_s(chosen.window),
            shards=self.shards,
            mesh_nbytes=int(sum(cost.forward_mesh + cost.backward_mesh for cost in self.needs.costs)),
        )

    def _lockstep(self) -> Iterator[LockstepPlan]:
        """Yield what calls in lockstep take, with each place of their caches."""
        calls, answers = self.run.calls, self.source.answers
        if calls is None or answers is None:
            return
        assert isinstance(self.source, TracedModel)
        for cache in ("device", "host"):
            source = self.source if cache == answers.cache else self.source.with_answers(Answers(answers.tokens, cache))
            try:
                needs = source.needs(self.options, self.machine)
            except SuperpipelineError:
                continue  # the cache cannot wait there
            yield plan_calls(
                calls,
                needs,
                rows=self.source.rows,
                cache=cache,
                available=self.available,
                reserving=self._reserving,
                simulated=self._simulated_calls,
                window=self.options.window,
            )

    def _simulated_calls(self, needs: Requirements, sizes: tuple[int, int]) -> Simulation:
        return self.simulated(needs, Pair(*sizes), self.machine)

    def _reading_s(self, reading: Requirements | None, sizes: Pair) -> float:
        return 0.0 if reading is None else _Sizes(self, self.options, reading, self.machine).simulated(sizes).step_s

    def terms(self, needs: Requirements, window: int, transfer: int) -> dict[str, int]:
        """Return the bytes on the device, by term, with what is reserved."""
        peak = needs.peak(window, transfer)
        # After backward its first units are left in the window, and nothing else of it.
        left = sum(cost.up_nbytes for cost in needs.streamed[:window])
        gone = max(0, sum(peak.get(name, 0) for name in (WINDOW, KEPT, WORKING, OUTSIDE, GRADIENTS)) - left)
        return self._reserving({**peak, OF_STEPS: needs.steps_nbytes + max(0, needs.whole_nbytes - gone)})

    def stepping_there(self, needs: Requirements, options: Options) -> Requirements:
        """Return the needs with what goes up and comes down for steps, if these options have the device step.

        Where machines have shares of the state, they have the new weights that are sent.
        """
        if self.run.sharing.divides_state:
            return replace(needs, costs=[replace(cost, new_nbytes=cost.gradient_nbytes) for cost in needs.costs])
        if options.optimizer_device == "host" or self.source.answers is not None:
            return needs
        elements = sum(cost.parameters for cost in needs.costs)
        gradients = self.source.host(options, needs).gradients + needs.gradients_on_disk
        width = gradients / max(1, elements)  # bytes of an element
        costs = stepped_on_device(needs.costs, self.source.states(), width)
        if self.run.reads_after_backward:
            costs = [
                replace(c, step_up_nbytes=c.step_up_nbytes + int(width * c.parameters * c.stepped * bool(c.trained)))
                for c in costs
            ]
        largest = int(width * max(cost.largest for cost in costs))
        moved = sum(cost.step_up_nbytes for cost in costs)
        whole = whole_nbytes(moved, self.optimizer, largest)
        return replace(needs, costs=costs, steps_nbytes=device_nbytes(moved), whole_nbytes=whole)

    def _reserving(self, peak: Mapping[str, int]) -> dict[str, int]:
        terms = {name: nbytes for name, nbytes in peak.items() if nbytes}
        fixed, share = RESERVE.get(self.target, (0, 0.0))
        reserve = fixed + int(share * sum(terms.values()))
        return terms | ({RESERVED: reserve} if reserve else {})

    def simulated(self, needs: Requirements, sizes: Pair, machine: Machine, sums: bool = True) -> Simulation:
        """Simulate a step with these needs; ``sums``: whether machines sum their gradients after it."""
        overlap = self.options.optimizer_overlap
        return simulate(
            needs.costs,
            Schedule([cost.up_nbytes for cost in needs.costs], *sizes),
            machine,
            optimizer_overlap=overlap and self.shards == 1,
            steps_into_forward=overlap and not self.trains_shards,
            works=needs.works,
            ranks=self.ranks,
            nodes=self.run.nodes_of_steps if sums else 1,
            after_backward=self._read_after_backward(needs, machine) if sums else (),
        )

    def _read_after_backward(self, needs: Requirements, machine: Machine) -> list[int]:
        """Return the bytes of each unit's gradients that the host reads or writes between backward and the steps."""
        times: float = self.run.reads_after_backward
        if not times:
            return []
        if self.options.optimizer_device == "device":
            return [0] * len(needs.costs)  # they go up once more (`stepping_there`)
        times *= machine.dram_bytes_per_s / self.profile.dram_bytes_per_s  # which a slow optimizer does not reach
        narrow = self._stays_narrow(self.optimizer, self.options)
        return [int(times * c.stepped * (c.down_nbytes if narrow else c.gradient_nbytes)) for c in needs.costs]

    def floor_s(self, needs: Requirements, window: int, machine: Machine, sums: bool = True) -> float:
        """Return the lower bound of the time of a step with these needs."""
        nodes = self.run.nodes_of_steps if sums else 1
        return floor(needs.costs, window, machine, False, self.ranks, nodes).seconds

    @property
    def accumulating(self) -> Machine:
        """The machine where gradients are only added to those of earlier batches.

        As much memory is read and written as by an optimizer without state.
        """
        return self._stepping(0, "")

    # ---- other batches (Rule 3)

    def _with_rows(self, rows: int, source: PlannedModel | None = None) -> Requirements | None:
        return (source or self.source).with_rows(rows, self.options, self.machine)

    def _largest_batch(self, source: PlannedModel | None = None) -> int | None:
        def fits(rows: int) -> bool:
            needs = self._with_rows(rows, source)
            if needs is None or self._host_is_short(self.options, needs, source or self.source):
                return False
            return _Sizes(self, self.options, needs, self.machine).least <= self.available

        if self._with_rows(1, source) is None:
            return None
        low, high = 0, 1
        while high < MOST_ROWS and fits(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def _host_is_short(self, options: Options, needs: Requirements, source: PlannedModel) -> bool:
        """Whether these needs exceed both the host's memory and the plan's own needs, as offloading more may."""
        nbytes = self._host(source, options, needs).total
        return nbytes > max(self.host_available, self._host(self.source, self.options, self.needs).total)

    # ---- changes

    def _changes(self, chosen: Pair, largest_batch: int | None) -> list[Change]:
        changes = [*self._other_windows(chosen), *self._other_steps()]
        changes += self._other_batches(largest_batch)
        changes += self._other_policies() if self.source.answers is None else self._other_cache()
        if self.tried.nbytes(chosen) > self.available:
            rescues = self._rescues()
            while sum(change.nbytes <= self.available for change in changes) < ENOUGH:
                change = next(rescues, None)
                if change is None:
                    break
                changes.append(change)

        def cost(change: Change) -> tuple[bool, float]:
            return change.nbytes > self.available, change.batch_s(self.run.accumulate) / change.samples

        first = list(self._loss_in_chunks(chosen))
        if first and first[0].nbytes > self.available:
            return sorted([*first, *changes], key=cost)
        return first + sorted(changes, key=cost)

    def _loss_in_chunks(self, chosen: Pair) -> Iterator[Change]:
        """Yield the loss in chunks where logits are the largest term: larger than any that is left without them."""
        given = sum(self.needs.peak(*chosen).values())
        source = self.source.in_chunks() if COPIES * self.source.logits_nbytes > given else None
        if source is None:
            return
        try:
            needs = source.needs(self.options, self.machine)
        except SuperpipelineError:
            return  # the model cannot run that way
        terms = needs.peak(*chosen).values()
        if given - sum(terms) > max(terms):
            yield self._change(remedies.LOSS_IN_CHUNKS.what, needs)

    def _other_windows(self, chosen: Pair) -> Iterable[Change]:
        if chosen.window > 1:
            window, transfer = self.tried.largest_window(chosen.window - 1) or 1, self.options.transfer
            remedy = remedies.window(window)
            transfer = transfer if transfer == "auto" else min(transfer, window)
            options = replace(self.options, **remedy.options, transfer=transfer)
            yield self._change(remedy.what, self.needs, options)

    def _other_steps(self) -> Iterator[Change]:
        """Yield the other place where the optimizer can step, if the run is faster with it."""
        if self.source.answers is not None or self.ranks * self.run.nodes > 1 or self.target == "cpu":
            return
        place = "host" if self.options.optimizer_device == "device" else "device"
        remedy = remedies.OPTIMIZER_DEVICE[place]
        try:
            options = replace(self.options, **remedy.options)
        except OptionError:
            return  # not with the others
        if place == "device" and self.optimizer and self.optimizer not in ON_DEVICE:
            return
        machine = self._stepping(self.source.states(), self.optimizer, options)
        now, other = self.tried.batch_s(self.tried.sizes()[1]), _Sizes(self, options, self.needs, machine)
        if EQUAL * other.floor_s(other.most) > now:
            return  # with any sizes
        change = self._change(remedy.what, self.needs, options, machine)
        if EQUAL * change.batch_s(self.run.accumulate) < now:
            yield change

    def _other_batches(self, largest: int | None) -> Iterable[Change]:
        given = self.source.rows
        fewer = given // 2 if largest is None or largest >= given else largest
        for rows in {2 * given, fewer} - {0}:
            needs = self._with_rows(rows)
            if needs is not None and not self._host_is_short(self.options, needs, self.source):
                change = self._change(f"a batch of {rows} {self.source.counted}", needs)
                yield replace(change, samples=rows / given)

    def _other_cache(self) -> Iterable[Change]:
        """Yield the other place where keys and values can wait, with this batch and the largest that then fits."""
        assert isinstance(self.source, TracedModel) and self.source.answers is not None
        tokens, cache = self.source.answers.tokens, self.source.answers.cache
        place = "device" if cache == "host" else "host"
        what, source = remedies.CACHE[place].what, self.source.with_answers(Answers(tokens, place))
        try:
            batches = [self.source.rows, self._largest_batch(source) or 0]
        except SuperpipelineError:
            return  # the cache cannot wait there
        for rows in dict.fromkeys(filter(None, batches)):
            needs = self._with_rows(rows, source)
            if needs is not None and not self._host_is_short(self.options, needs, source):
                named = what if rows == self.source.rows else f"{what} and a batch of {rows} rows"
                yield replace(self._change(named, needs), samples=rows / self.source.rows)

    def _other_policies(self) -> Iterable[Change]:
        """Yield the policy to try next: one that leaves less on the device or, for "offload", recomputes instead."""
        for remedy in remedies.activations(self.options.activations):
            yield from self._changed(remedy)

    def _rescues(self) -> Iterator[Change]:
        """Yield further changes that free device memory, one at a time: each takes another dry run."""
        trains, keeps = self.source.answers is None, self.options.activations == "keep"
        further = remedies.activations("recompute") if trains and keeps else []
        classes = finer_classes(self.needs.trace.units) if self.needs.trace is not None else []
        for remedy in (*further, *remedies.smaller_units(classes)):
            yield from self._changed(remedy)
        # Under autocast most weights travel in half precision already: not worth a dry run.
        worth = self.run.precision == "32-true" or isinstance(self.source, ListedModel)
        half = self.source.in_half() if worth else None
        for remedy in remedies.half_precision(half is not None):
            yield from self._changed(remedy, half)

    def _changed(self, remedy: Remedy, source: PlannedModel | None = None) -> Iterator[Change]:
        if isinstance(self.source, ListedModel) and remedy.options.get("activations") not in ("keep", "recompute"):
            return
        source, changed = source or self.source, replace(self.options, **remedy.options)
        try:
            needs = source.needs(changed, self.machine)
        except SuperpipelineError:
            return  # the model cannot run that way
        if self._host_is_short(changed, needs, source):
            return
        yield self._change(remedy.what, needs, changed)

    def _host_changes(self, batch_s: float) -> Iterator[Change]:
        """Yield changes that free host memory, if the host has too little: last those that train few weights."""
        host = self._host(self.source, self.options, self.needs)
        if host.total <= self.host_available or self.source.answers is not None:
            return
        half = self.source.in_half()
        found: list[tuple[bool, bool, Change]] = []
        for remedy in remedies.host(
            half=half is None and not self.options.master_weights,
            wires=self.options.wire_dtype == "auto" and not self.options.master_weights and host.wire > 0,
            activations=self.options.activations,
            optimizer=self.optimizer,
            masters=self.options.master_weights,
        ):
            change = self._host_change(remedy, (half or self.source) if remedy.half else self.source)
            if change is not None and (change.host_nbytes or 0) < host.total:
                found.append((remedy.adapters, change.batch_s(self.run.accumulate) > SLOW * batch_s, change))
        yield from (change for *_, change in sorted(found, key=lambda item: item[:2]))

    def _host_change(self, remedy: HostRemedy, source: PlannedModel) -> Change | None:
        """Return the change that a remedy leads to; with recomputation if it does not fit on the device otherwise."""
        given = {"master_weights": False, **remedy.options} if remedy.half else remedy.options
        try:
            changed = replace(self.run, options=replace(self.options, **given)).within_host(self.host_available).options
            changed.check_devices(self.ranks, self.run.nodes)
        except OptionError:
            return None  # not with the others
        further = [{}, *(other.options for other in remedies.activations(changed.activations))]
        found: tuple[Options, Requirements, bool] | None = None
        nbytes = 0
        for options in further:
            if options.get("activations", "recompute") != "recompute" or (found and nbytes <= self.available):
                continue
            try:
                tried = replace(changed, **options)
                needs = source.needs(tried, self.machine)
            except SuperpipelineError:
                continue  # the model cannot run that way
            needs = _frozen(needs, remedies.ADAPTED, remedy.base_bits) if remedy.adapters else needs
            found, nbytes = (tried, needs, bool(options)), _Sizes(self, tried, needs, self.machine).least
        return None if found is None else self._of_host(remedy, source, *found)

    def _of_host(
        self,
        remedy: HostRemedy,
        source: PlannedModel,
        options: Options,
        needs: Requirements,
        recomputes: bool,
    ) -> Change:
        host, states, optimizer = self._host_of_one(source, options, needs), source.states(), self.optimizer
        if remedy.optimizer is not None:
            optimizer = remedy.optimizer
            units = () if needs.trace is None else needs.trace.units
            of_units = [parameter for unit in units for _, parameter in unit.params]
            states = states_of(optimizer, None, torch.bfloat16 if remedy.half else torch.float32, of_units)
            trained = max(1, sum(cost.parameters for cost in needs.costs))
            stepped = sum(cost.parameters * cost.stepped for cost in needs.costs) / trained
            host = replace(host, optimizer=int(states * stepped * host.gradients))
        if remedy.adapters:
            share = remedies.ADAPTED
            host = replace(
                host,
                weights=host.weights * remedy.base_bits // 16,
                gradients=int(share * host.gradients),
                optimizer=int(share * host.optimizer),
                copies=int(share * host.copies),
            )
        what = remedy.what + " and activations='recompute'" * recomputes
        how = remedy.how + " --trainer.strategy.activations recompute" * recomputes
        host_nbytes = self._of_ranks(host, needs, optimizer, options).total
        change = self._change(
            what,
            needs,
            options,
            self._stepping(states, optimizer, options),
            steps=remedy.optimizer is not None or remedy.has_disk,
        )
        return replace(change, host_nbytes=host_nbytes, bits=remedy.bits, how=how)

    def _change(
        self,
        what: str,
        needs: Requirements,
        options: Options | None = None,
        machine: Machine | None = None,
        steps: bool = False,  # whether it changes the optimizer's step: that of an accumulated batch is told too
    ) -> Change:
        """Return the change to these needs and options: with the bytes and times that they lead to (Rule 4)."""
        run = _Sizes(self, options or self.options, needs, machine or self.machine)
        sizes, paced = run.sizes()
        accumulating_s = run.accumulating_s(paced) if self.run.accumulate > 1 else None
        step_s, many_s = run.step_s(paced), None
        if steps and self.run.accumulate == 1:
            many = _Sizes(self, options or self.options, needs, machine or self.machine, MANY)
            many_s = many.batch_s(many.sizes()[1])
        had = self.needs.on_disk + self.needs.activations_on_disk
        of_each = needs.gradients_on_disk + needs.activations_on_disk
        last = needs.on_disk + needs.activations_on_disk
        written = 0 if had else last + (self.run.accumulate - 1) * of_each
        return Change(
            what,
            run.nbytes(sizes),
            step_s,
            *sizes,
            accumulating_s=accumulating_s,
            many_s=many_s,
            written_nbytes=written,
        )


class Pair(NamedTuple):
    """A window and a transfer."""

    window: int
    transfer: int


class _Sizes:
    """The windows and transfers of a run, with the bytes and times that they lead to, each computed once (Rule 4)."""

    def __init__(
        self,
        planner: _Planner,
        options: Options,
        needs: Requirements,
        machine: Machine,
        accumulate: int | None = None,  # batches, if not the planner's
    ) -> None:
        self._planner = planner
        self._options = options
        self.needs = planner.stepping_there(needs, options)
        self._machine = machine
        self._nbytes: dict[Pair, int] = {}
        self._simulated: dict[Pair, Simulation] = {}
        self._accumulating_s: dict[Pair, float] = {}
        self._before_s: dict[Pair, float] = {}
        self._accumulate = planner.run.accumulate if accumulate is None else accumulate

    @functools.cached_property
    def most(self) -> int:
        """The largest window to try: all units or, with a memory budget, the window that a run begins with."""
        if self._options.memory_budget is None:
            return max(1, len(self.needs.streamed))
        streamed = [size for size in self.needs.sizes if not size.resident]
        root = sum(size.up_nbytes for size in self.needs.sizes if size.resident)
        return first_window(self._options, streamed, root, on_host=False)

    @functools.cached_property
    def smallest(self) -> Pair:
        """The sizes with the fewest bytes that the options allow."""
        return min(self._allowed, key=lambda pair: (self.nbytes(pair), pair))

    @property
    def least(self) -> int:
        """The fewest bytes that the run takes on the device."""
        return self.nbytes(self.smallest)

    @functools.cached_property
    def _allowed(self) -> list[Pair]:
        """All sizes that the options allow, those that are tried."""
        windows = self._given("window") or {min(window, self.most) for window in (*WINDOWS, self.most)}
        return self._pairs(windows)

    def _pairs(self, windows: Iterable[int]) -> list[Pair]:
        transfers = self._given("transfer") or set(TRANSFERS)
        return sorted({Pair(window, min(transfer, window)) for window in windows for transfer in transfers})

    def _given(self, name: Literal["window", "transfer"]) -> set[int]:
        value = getattr(self._options, name)
        return set() if value == "auto" else {min(value, self.most)}

    def nbytes(self, sizes: Pair) -> int:
        if sizes not in self._nbytes:
            self._nbytes[sizes] = sum(self._planner.terms(self.needs, *sizes).values())
        return self._nbytes[sizes]

    def simulated(self, sizes: Pair) -> Simulation:
        if sizes not in self._simulated:
            self._simulated[sizes] = self._planner.simulated(self.needs, sizes, self._machine)
        return self._simulated[sizes]

    @functools.cached_property
    def _adding(self) -> Requirements:
        """The needs of a batch whose gradients are only added to those before it, by the host: no state moves."""

        def adding(cost: UnitNumbers) -> UnitNumbers:
            moved = cost.gradients_on_disk
            return replace(
                cost, state_read_nbytes=moved, state_written_nbytes=moved, step_up_nbytes=0, step_down_nbytes=0
            )

        return replace(self.needs, costs=list(map(adding, self.needs.costs)))

    def accumulating_s(self, sizes: Pair) -> float:
        """Return the time of a batch whose gradients are only added to those before it."""
        if sizes not in self._accumulating_s:
            found = self._planner.simulated(self._adding, sizes, self._planner.accumulating, sums=False)
            self._accumulating_s[sizes] = found.step_s + self.before_s(sizes)
        return self._accumulating_s[sizes]

    def before_s(self, sizes: Pair) -> float:
        """Return the time of the passes before a batch's step (planned_model.py, Rule 5)."""
        if sizes not in self._before_s:
            simulated = functools.partial(self._planner.simulated, sizes=sizes, machine=self._machine, sums=False)
            self._before_s[sizes] = sum(simulated(needs).step_s * times for needs, times in self.needs.before)
        return self._before_s[sizes]

    def before_floor_s(self, window: int) -> float:
        """Return the lower bound of that time."""
        floor_s = functools.partial(self._planner.floor_s, window=window, machine=self._machine, sums=False)
        return sum(floor_s(needs) * times for needs, times in self.needs.before)

    def step_s(self, sizes: Pair) -> float:
        """Return the time of a batch with an optimizer step after it."""
        return self.simulated(sizes).step_s + self.before_s(sizes)

    def times(self, sizes: Pair) -> tuple[float, float]:
        """Return the time of a batch with an optimizer step after it, and of a batch without one."""
        return self.step_s(sizes), self.accumulating_s(sizes)

    def batch_s(self, sizes: Pair) -> float:
        """Return the mean time of a batch of the run."""
        count, step_s = self._accumulate, self.step_s(sizes)
        return step_s if count == 1 else mean_s(step_s, self.accumulating_s(sizes), count)

    def sizes(self) -> tuple[Pair, Pair]:
        """Return the sizes to plan bytes with, and those to plan times with: the same ones, if any fit."""
        fitting = [pair for pair in self._allowed if self.nbytes(pair) <= self._planner.available]
        chosen = self._fastest(fitting or self._allowed)
        return chosen if fitting else self.smallest, chosen

    def _fastest(self, fitting: list[Pair]) -> Pair:
        """Choose the smallest of the fastest sizes.

        A larger window is taken to be no slower. What is as fast as the lower bound is not compared with others.
        """
        windows = sorted({pair.window for pair in fitting})
        least = min(map(self.nbytes, fitting))
        smallest = min((pair for pair in fitting if self.nbytes(pair) == least), key=self.batch_s)
        if self.batch_s(smallest) <= EQUAL * self.floor_s(windows[-1]):
            return smallest

        def fastest_s(window: int) -> float:
            return min(self.batch_s(pair) for pair in fitting if pair.window == window)

        enough = EQUAL * fastest_s(windows[-1])
        place = bisect.bisect_left(windows, True, hi=len(windows) - 1, key=lambda window: fastest_s(window) <= enough)
        fast = [pair for pair in fitting if pair.window == windows[place] and self.batch_s(pair) <= enough]
        return min(fast, key=lambda pair: (self.nbytes(pair), self.batch_s(pair)))

    def floor_s(self, window: int) -> float:
        planner, count = self._planner, self._accumulate
        before_s = self.before_floor_s(window)
        step_s = planner.floor_s(self.needs, window, self._machine)
        if count == 1:
            return step_s + before_s
        adding_s = planner.floor_s(self._adding, window, planner.accumulating, sums=False)
        return mean_s(step_s, adding_s, count) + before_s

    def sweep(self) -> list[SweepPoint]:
        """List the sizes to show: those that fit or nearly do, and what was given."""
        wanted = self._given("window")
        windows = {min(window, self.most) for window in (*WINDOWS, self.most)} | wanted
        pairs = self._pairs(windows)
        most = max(NEAR * self._planner.available, 1.2 * min(map(self.nbytes, pairs)))
        return [
            SweepPoint(*pair, self.nbytes(pair), self.step_s(pair))
            for pair in pairs
            if self.nbytes(pair) <= most or pair.window in wanted
        ]

    def largest_window(self, most: int | None = None) -> int:
        """Return the largest window that fits, of at most `most` units; 0 if none does."""
        fits = 0
        low, high = 1, self.most if most is None else most
        while low <= high:
            middle = (low + high) // 2
            if self.nbytes(Pair(middle, 1)) <= self._planner.available:
                fits, low = middle, middle + 1
            else:
                high = middle - 1
        return fits


def _own_dtype(trace: StepTrace | None, precision: str) -> str:
    """Name the type of most weights where the precision leaves them in it and is named after FP32; empty for FP32."""
    sizes: Counter[torch.dtype] = Counter()
    for unit in trace.units if trace is not None and precision == "32-true" else ():
        for _, parameter in unit.params:
            sizes[parameter.dtype] += parameter.is_floating_point() * parameter.nbytes
    ((most, _),) = sizes.most_common(1) or [(torch.float32, 0)]
    return "" if most == torch.float32 else str(most).removeprefix("torch.")


def _frozen(needs: Requirements, share: float, bits: int) -> Requirements:
    """Return the requirements if this share of the weights is trained, beside frozen ones of this many bits.

    Backward leaves out the products that make gradients of weights, which are as many as forward's.
    """

    def cost(one: UnitNumbers) -> UnitNumbers:
        return replace(
            one,
            up_nbytes=one.up_nbytes * bits // 16,
            down_nbytes=int(share * one.down_nbytes),
            parameters=int(share * one.parameters),
            cast=int(share * one.cast),
            stepped=1.0,
            backward_flops=max(one.backward_flops - one.forward_flops, one.backward_flops / 2),
        )

    costs = [cost(one) for one in needs.costs]
    pairs = zip(needs.costs, costs, strict=True)
    parts = [new.backward_flops / one.backward_flops if one.backward_flops else 1.0 for one, new in pairs]
    works = [replace(work, flops=work.flops * parts[work.unit]) if work.sends else work for work in needs.works]
    return replace(needs, costs=costs, works=works)
