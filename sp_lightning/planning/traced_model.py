"""A module to plan for, measured by a dry run.

1. ``notes`` report what a dry run (dry_run.py) cannot do: a training_step that needs its Trainer is replaced by
   ``forward``; a model whose control flow depends on values that it computes runs on the CPU, with data, if it is small
   enough.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import pathlib
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from ..autograd.saved_tensors import tensors_in
from ..compat.kernels import has_chunked_loss
from ..compat.modules import set_device_mesh
from ..compat.tensors import IS_PARAMETER, consists_of_tensors, flattened, is_dtensor, storage_id, without_ranks
from ..core.machine import Machine
from ..core.simulation import SimulatedVisit
from ..core.unit_numbers import (
    ONE_PROCESS,
    STATES,
    HostBytes,
    HostSharing,
    UnitHostBytes,
    UnitNumbers,
    aligned,
    host_bytes,
)
from ..disk.activation_blocks import in_memory_nbytes, written_nbytes
from ..disk.placement import Budgeted, choose, may_move, may_travel
from ..errors import OptionError, SuperpipelineError, UnsupportedError
from ..memory.partition import Unit, partition
from ..options import Options, format_bytes
from ..tracing.answers import Answers, generating
from ..tracing.dry_run import RealTensors, Runner, dry_run
from ..tracing.fake_tensors import FakeTensors, Unknown
from ..tracing.step_trace import StepTrace
from ..wholes.sharded import has_shards, refuse
from .planned_calls import kept_by_a_call, of_calls
from .planned_model import (
    PlannedModel,
    Requirements,
    check_master_weights,
    half_of,
    mean_states,
    optimizers_in,
    states_of,
    whole_states,
    with_activations_on_disk,
    with_moved,
    without_disk,
)

DATA, TENSOR = "data_parallel", "tensor_parallel"  # the axes of a mesh, by Lightning's names
PACKAGE = pathlib.Path(__file__).parents[1]
NO_WORK = 0.0, 0.0, 0.0, 0.0
LARGEST_REAL = 2**30  # bytes of weights of a model that may run on the CPU with data (Rule 1)


@contextlib.contextmanager
def mesh_of(shards: int) -> Iterator[Any]:
    """Make a mesh of as many devices with shards of one layer; this process is its first rank, without any other."""
    if torch.distributed.is_initialized():
        allowed = "left out in a process of a group, whose modules are cut: plan one of them"
        raise OptionError(argument="tensor_parallel_size", found=shards, allowed=allowed)
    import_module("torch.distributed.tensor.parallel")
    with without_ranks(shards):
        yield mesh_in_context(shards)


def mesh_in_context(shards: int) -> Any:
    """Return that mesh once more, in the context of `mesh_of`."""
    from torch.distributed.device_mesh import init_device_mesh  # other plans need nothing of it

    return init_device_mesh("cpu", (1, shards), mesh_dim_names=(DATA, TENSOR))


class TracedModel(PlannedModel):
    """A module, measured by a dry run."""

    def __init__(
        self,
        module: Any,
        batch: Any,
        precision: str,
        optimizer: Any,
        target: str,
        loss: Runner | Answers | None,
        at_once: int = 1,
        sharing: HostSharing = ONE_PROCESS,
        mesh: Any = None,
    ) -> None:
        if batch is None:
            raise OptionError(argument="batch", found=None, allowed="a batch as the module takes it, or a function")
        self._module = module
        self._batch = batch() if callable(batch) else batch
        self._precision = precision
        self._optimizer = optimizer
        self._target = target
        self._loss = loss
        self._at_once = at_once  # batches that are answered in lockstep
        self._sharing = sharing
        self._mesh = mesh  # among whose devices the module cuts its layers while it is made
        self._lines: dict[Options, tuple[StepTrace, StepTrace] | None] = {}
        self._traces: dict[tuple[Options, int], StepTrace] = {}
        self._states: float | None = None
        self._names: set[str] | None = None  # of the weights that its own optimizer has; None: all that train
        self._nbytes = 0  # of weights; known once the module was made
        self._real = False  # whether the model has to run with data
        self._why = ""  # it has to
        self._forward = False  # whether forward replaces training_step
        self._made_class: Any = None  # class of the module that was made, if one was
        self._logits_nbytes = 0
        self._rows = _rows(self._batch)
        self.rows = at_once * self._rows
        self.notes: list[str] = []
        self.name = type(module).__name__ if isinstance(module, nn.Module) else getattr(module, "__name__", "model")

    def needs(self, options: Options, machine: Machine) -> Requirements:
        return self._needs(self._trace(options, 1), options, machine)

    def with_rows(self, rows: int, options: Options, machine: Machine) -> Requirements | None:
        """Return the requirements on the straight line through this batch and one of twice the rows."""
        if options not in self._lines:
            self._lines[options] = self._line(options)
        line = self._lines[options]
        if line is None:
            return None
        return self._needs(line[0].between(line[1], rows / self.rows - 1), options, machine, rows / self.rows)

    def _line(self, options: Options) -> tuple[StepTrace, StepTrace] | None:
        one = self._trace(options, 1)
        try:
            two = self._trace(options, 2)
        except SuperpipelineError:
            self.notes.append("a batch of twice the rows could not be measured, so the largest batch is unknown")
            return None
        if not one.is_like(two):  # the first step of a process may make what later ones find
            one = self._traces[options, 1] = self._find_trace(options, 1)
        return (one, two) if one.has_visits_of(two) else None

    def _needs(self, trace: StepTrace, options: Options, machine: Machine, share: float = 1) -> Requirements:
        """Return the requirements by a trace, which has ``share`` times the rows of the batch."""
        in_files, placed = self._placed(trace, options)
        filed = {index: sum(of_unit.values()) for index, of_unit in in_files.items()}
        moved = {index: self._may_move(trace, index, options) for index in placed.masters}
        travelling = {index: self._travelling(trace, index, options) for index in placed.travelling}
        steps = self._stepped(trace)
        train = [[p for _, p in unit.params if p.requires_grad and p.dim()] for unit in trace.units]
        trained = [sum(p.nbytes for p in of_unit) for of_unit in train]
        count = whole_states(self.movable_states(self._sharing, self._optimizer))
        state = [count * sum(p.nbytes for p in of_unit if id(p) in steps) for of_unit in train]
        there = {i: {*moved.get(i, ()), *travelling.get(i, ())} for i in (*moved, *travelling)}
        stepped = {index: sum(p.nbytes for p in of_unit if id(p) in steps) for index, of_unit in there.items()}
        wires = {i: sum(trace.narrow.get(id(p), 0) for p in ps) for i, ps in travelling.items() if stepped[i]}
        travels = {id(p) for of_unit in travelling.values() for p in of_unit} | trace.uncast
        as_it_is = {
            index: sum(trace.narrow.get(id(p), p.nbytes) for p in of_unit if id(p) in travels)
            for index, of_unit in there.items()
        }
        read = {unit.name: filed.get(unit.index, 0) + as_it_is.get(unit.index, 0) for unit in trace.units}
        on_disk = sum(filed.values()) + sum(p.nbytes for of_unit in there.values() for p in of_unit)

        def of(part: StepTrace) -> Requirements:
            costs, works = _costs(part, options, machine, steps)
            costs = [replace(cost, disk_nbytes=read.get(cost.name, 0)) for cost in costs]
            names = [unit.name for unit in trace.units]
            costs = with_moved(costs, names, placed, trained, stepped, wires, placed.gradients, state)
            if placed.room:
                written = written_nbytes(sum(work.stowed_nbytes for work in works), placed.block, placed.room)
                works = with_activations_on_disk(works, written)
            return Requirements(costs, works, trace.peak, trace.sizes, trace, weights_on_disk=on_disk)

        if trace.phases:
            *before, (step, _) = trace.of_phases()
            passes = tuple((_untrained(of(part)), times) for part, times in before if times)
            return replace(of(step), peak=trace.peak, before=passes)
        if not trace.passes:
            return of(trace)
        kept = {name: int(share * nbytes) for name, nbytes in kept_by_a_call(self._trace(options, 1)).items()}
        reading, each = (of_calls(of(trace.of_pass(number)), self._at_once, kept) for number in (0, 1))
        return replace(each, reading=reading)  # planned_model.py, Rule 4

    def _placed(self, trace: StepTrace, options: Options) -> tuple[dict[int, dict[int, int]], Budgeted]:
        """Return the bytes of weights that stay in files, and what is where (planned_model.py, Rule 3).

        The former are by the indices of units and the ids of parameters.
        """
        if options.host_budget is None:
            return {}, Budgeted(units=[], host=HostBytes(), in_files=0)
        filed = [self._filed(unit) for unit in trace.units]
        everything = {key: nbytes for unit in filed for key, nbytes in unit.items()}
        dtype = self._half() if options.master_weights else None
        may_cast = self._precision.endswith("mixed") and options.may_cast and dtype is None
        trains = self.answers is None
        spills = trains and options.spills
        budget, known = options.host_budget, trace.castable
        kinds = dtype, may_cast, trains, spills
        offloads = options.offloads
        placed = choose(
            trace.units, everything, budget, *kinds, castable=known, sharing=self._sharing, offloads=offloads
        )
        if placed.units and self._types_in_files is None:
            self.notes.append("frozen weights are taken to be in local files as they are")
        return {index: filed[index] for index in placed.units}, placed

    def _may_move(self, trace: StepTrace, index: int, options: Options) -> list[Tensor]:
        """List a unit's FP32 weights that can be on disk (planned_model.py, Rule 3)."""
        parameters = [parameter for _, parameter in trace.units[index].params]
        return may_move(parameters, self._half() if options.master_weights else None, trace.castable)

    def _travelling(self, trace: StepTrace, index: int, options: Options) -> list[Tensor]:
        """List a unit's weights that can travel from the disk."""
        parameters = [parameter for _, parameter in trace.units[index].params]
        moved = self._may_move(trace, index, options)
        return may_travel(parameters, moved, options.master_weights and self._half() is not None)

    def _stepped(self, trace: StepTrace) -> set[int]:
        """Return the ids of the weights that the optimizer steps; gradients of others only add up."""
        trained = ((name, p) for unit in trace.units for name, p in unit.params if p.requires_grad)
        return {id(p) for name, p in trained if self._names is None or name in self._names}

    def _filed(self, unit: Unit) -> dict[int, int]:
        """Return the bytes of a unit's weights that can stay in files, by the ids of parameters."""
        types = self._types_in_files  # a weight that was converted is in memory
        frozen = ((name, p) for name, p in unit.params if not p.requires_grad)
        return {id(p): p.nbytes for name, p in frozen if types is None or types.get(name) is p.dtype}

    @functools.cached_property
    def _types_in_files(self) -> dict[str, torch.dtype] | None:
        """The types that weights have in files, by name; None if there is no telling."""
        if not isinstance(self._module, nn.Module) or any(p.is_meta for p in self._module.parameters()):
            return None
        from ..disk.source_files import find

        named = [one for unit in partition(self._module) for one in unit.params]
        found = find(weight for _, weight in named)
        return {name: weight.dtype for name, weight in named if id(weight) in found}

    def host(self, options: Options, needs: Requirements) -> HostBytes:
        assert needs.trace is not None
        trace = needs.trace
        in_files, placed = self._placed(trace, options)
        ring = placed.host.ring // self._sharing.ranks  # of each
        units, stepped = [], self._stepped(trace)
        for unit, wire, frozen_wire in zip(trace.units, trace.wire_nbytes, trace.frozen_wire_nbytes, strict=True):
            filed = in_files.get(unit.index, {})
            kept = UnitHostBytes.of([p for _, p in unit.params if id(p) not in filed])
            unstepped = UnitHostBytes.of([p for _, p in unit.params if id(p) not in stepped]).trained
            if unit.index in placed.travelling:
                there = (trace.narrow.get(id(p), 0) for p in self._travelling(trace, unit.index, options))
                wire -= sum(map(aligned, there))
            units.append(replace(kept, wire=wire - bool(filed) * frozen_wire, unstepped=unstepped))
        if trace.passes:  # the last one has the longest cache
            waiting = self._at_once * sum(visit.stowed_nbytes for visit in trace.of_pass(2).visits)
            return replace(host_bytes(units, ring=ring), keys_and_values=waiting)
        stowed = sum(work.stowed_nbytes for work in needs.works)
        if placed.room:
            stowed = in_memory_nbytes(stowed, placed.block, placed.room)
        host = host_bytes(units, states=self.states(), activations=stowed, ring=ring)
        return without_disk(host, placed, units, self.movable_states(self._sharing, self._optimizer))

    def states(self) -> float:
        assert self._states is not None
        return self._states

    def in_half(self) -> PlannedModel | None:
        single = self._precision == "32-true" or self._precision.endswith("mixed")
        return self._with(precision="bf16-true") if single else None

    @property
    def logits_nbytes(self) -> int:
        return self._logits_nbytes if has_chunked_loss else 0

    def in_chunks(self) -> PlannedModel | None:
        if not self.logits_nbytes:
            return None
        return self._with(loss=_loss_in_chunks)

    @property
    def answers(self) -> Answers | None:
        return self._loss if isinstance(self._loss, Answers) else None

    def with_answers(self, answers: Answers) -> TracedModel:
        """Return the same model that generates something else."""
        return self._with(loss=answers)

    def _with(self, precision: str | None = None, loss: Runner | Answers | None = None) -> TracedModel:
        """Return the same model with another precision or another loss."""
        precision, loss = precision or self._precision, loss or self._loss
        how = self._optimizer, self._target, loss, self._at_once, self._sharing, self._mesh
        return TracedModel(self._module, self._batch, precision, *how)

    def _half(self) -> torch.dtype | None:
        return half_of(self._precision)

    def _trace(self, options: Options, scale: int) -> StepTrace:
        if (options, scale) not in self._traces:
            self._traces[options, scale] = self._find_trace(options, scale)
        return self._traces[options, scale]

    def _find_trace(self, options: Options, scale: int) -> StepTrace:
        """Trace a step in the plainest way that works; the first trace decides the way of all others (Rule 1)."""
        batch = _scaled(self._batch, self._rows, scale)
        first: Exception | None = None
        while True:
            try:
                return self._dry_run(options, batch)
            except Unknown as error:
                if self._real or self._traces:
                    raise
                if self._nbytes > LARGEST_REAL:
                    raise UnsupportedError(
                        f"{self.name} depends on values that it computes ({error}), and {format_bytes(self._nbytes)} "
                        f"of weights are more than the {format_bytes(LARGEST_REAL)} that may run on the CPU instead: "
                        "plan with fewer layers, or pass loss=, a function of module and batch without those values"
                    ) from error
                self._real, self._why = True, str(error)
                self.notes.append(
                    "the model depends on values that it computes: measured on the CPU, with data, by the CPU's kernels"
                )
            except SuperpipelineError:
                raise
            except Exception as error:
                first = first or error
                if self._forward or self._traces or self._loss is not None or not self._has_training_step():
                    raise UnsupportedError(
                        f"{self.name} does not run without a Trainer and without data: {_in_a_line(first)}; pass "
                        "another batch (--data), or loss=, a function that takes the module and a batch and returns "
                        "the loss"
                    ) from error
                self._forward = True
                self.notes.append(
                    f"training_step was not measured, because it needs more than a batch ({_in_a_line(error)}): "
                    "forward, and backward from all its outputs, were measured instead"
                )

    def _has_training_step(self) -> bool:
        return hasattr(type(self._module) if isinstance(self._module, nn.Module) else self._made_class, "training_step")

    def _dry_run(self, options: Options, batch: Any) -> StepTrace:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # nothing is trained here
            return self._run_in_context(options, batch)

    def _run_in_context(self, options: Options, batch: Any) -> StepTrace:
        mixed = self._precision.endswith("mixed")
        autocast = self._half() if mixed else None
        if self._real:
            with torch.autocast("cpu", dtype=autocast, enabled=mixed), torch.random.fork_rng(devices=[]):
                with (real := RealTensors()):
                    return self._run_on(real, batch, options)
        with (tensors := FakeTensors(self._target, autocast)):
            return self._run_on(tensors, batch, options)

    def _run_on(self, tensors: FakeTensors | RealTensors, batch: Any, options: Options) -> StepTrace:
        module = self._make(tensors)
        if self._real and any(parameter.is_meta for parameter in module.parameters()):
            raise UnsupportedError(
                f"{self.name} depends on values that it computes ({self._why}), and there are no weights to compute "
                "them from: plan its config (plan --model), or leave out what depends on them"
            )
        self._made_class = type(module)
        self._check_shards(module, options)
        self._nbytes = sum(parameter.nbytes for parameter in module.parameters())
        if not self._nbytes:
            raise OptionError(argument="module", found=type(module).__name__, allowed="a module with parameters")
        adopted = apply_to_collection(batch, Tensor, tensors.adopt)
        half = self._half()
        check_master_weights(options, self._precision)
        if self._precision.endswith("true"):
            dtype = half or (torch.float64 if self._precision == "64-true" else None)
            adopted = adopted if dtype is None else apply_to_collection(adopted, Tensor, _to(dtype))
            if dtype is not None:
                _convert(module, dtype, options.master_weights)
        if self.answers is None:
            module.train()
        elif generating(module.eval().requires_grad_(False)) is None:
            allowed = f"left out: {self.name} is no decoder of transformers that continues texts"
            raise OptionError(argument="answer", found=self.answers.tokens, allowed=allowed)
        if self._states is None:
            self._states = self._states_of_optimizer(module) if self.answers is None else 0.0
        compute_dtype = half if options.master_weights else None
        run = self.answers or self._runner(module)
        with self._seeing_logits(module) if run is _forward else contextlib.nullcontext():
            trace = dry_run(module, adopted, run, options, tensors, compute_dtype)
        for whole in (whole for unit in trace.units for whole in unit.wholes):
            whole.follow()  # a shard tells whether it trains, as in a run
        return trace

    def _check_shards(self, module: nn.Module, options: Options) -> None:
        """Raise if a module has DTensors that a run would refuse with these options."""
        name = next((name for name, parameter in module.named_parameters() if is_dtensor(parameter)), None)
        if name is None:
            return
        refuse(name, {"disk= or host_budget=": options.uses_files, "compile_units=True": options.compile_units})
        if self._real:
            raise UnsupportedError(
                f"{self.name} depends on values that it computes ({self._why}), and it has DTensors, whose values "
                "depend on other ranks: pass loss=, a function of module and batch without those values"
            )

    @contextlib.contextmanager
    def _seeing_logits(self, module: nn.Module) -> Iterator[None]:
        """Find out, within this context, whether the loss may be in chunks (planned_model.py, Rule 2)."""
        model, seen = _language_model(module), []
        if model is None or self._forward:
            yield
            return

        def base_ran(_module: Any, _args: Any, output: Any) -> None:
            seen.append(_storage(output[0]))

        def head_ran(_module: Any, args: Any, logits: Tensor) -> None:
            seen.extend((_storage(args[0]), _storage(logits)))

        def model_ran(_module: Any, _args: Any, output: Any) -> None:
            logits, node = getattr(output, "logits", None), getattr(getattr(output, "loss", None), "grad_fn", None)
            alone = node is not None and node.name().startswith("NllLoss")
            if alone and isinstance(logits, Tensor) and len(seen) == 3:
                base, given, made = seen
                self._logits_nbytes = 4 * logits.numel() * (given == base and made == _storage(logits))

        hooks = [
            model.base_model.register_forward_hook(base_ran),
            model.get_output_embeddings().register_forward_hook(head_ran),
            model.register_forward_hook(model_ran),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _make(self, tensors: FakeTensors | RealTensors) -> nn.Module:
        if not isinstance(self._module, nn.Module):
            tensors.building = True
            try:
                made = self._cut(self._module)
            except SuperpipelineError:
                raise
            except Exception as error:
                raise UnsupportedError(f"{self.name} could not be made: {_in_a_line(error)}") from error
            finally:
                tensors.building = False
            if not isinstance(made, nn.Module):
                raise OptionError(argument="module", found=made, allowed="a module, or a function that makes one")
            return made
        module: nn.Module = self._cut(lambda: _copied(self._module, tensors))
        return module

    def _cut(self, make: Callable[..., Any]) -> Any:
        """Make a module; give it, or the function that makes it, the mesh among whose devices it cuts its layers."""
        if self._mesh is None:
            return make()
        takes = [one for one in inspect.signature(make).parameters.values() if one.default is one.empty]
        made = make(self._mesh[TENSOR]) if takes else make()
        if hasattr(made, "configure_model"):
            set_device_mesh(made, self._mesh)
            made.configure_model()
        return made

    def _runner(self, module: nn.Module) -> Runner:
        if self._loss is not None:
            assert not isinstance(self._loss, Answers)
            return self._loss
        step = getattr(module, "training_step", None)
        if step is not None and not self._forward:
            takes = len(inspect.signature(step).parameters)
            return lambda _, batch: step(*(batch, 0)[:takes])
        return _forward

    def _states_of_optimizer(self, module: nn.Module) -> float:
        try:
            configure: Any = getattr(module, "configure_optimizers", None)
            if self._optimizer is None and configure is not None:
                made = list(optimizers_in(configure()))
                self.optimizer = type(made[0]).__name__ if made else ""
                known = {id(p) for one in made for group in one.param_groups for p in group["params"]}
                named = module.named_parameters(remove_duplicate=False)
                self._names = {name for name, p in named if id(p) in known} or None
                return mean_states(made)
            widest = max(module.parameters(), key=lambda parameter: parameter.numel())
            return states_of(self._optimizer, module, widest.dtype, list(module.parameters()))
        except OptionError:
            raise
        except Exception as error:
            self.notes.append(
                f"the module's own optimizer could not be made ({_in_a_line(error)}): planned with AdamW's state"
            )
            return STATES["AdamW"]


def _costs(
    trace: StepTrace, options: Options, machine: Machine, steps: set[int]
) -> tuple[list[UnitNumbers], list[SimulatedVisit]]:
    """Turn a trace into the simulation's costs and visits, with units in the order of their first visits.

    ``steps``: the ids of the weights that the optimizer steps.
    """
    order = list(dict.fromkeys(trace.order))
    order += [unit.index for unit in trace.units if unit.index not in order]
    place = {index: position for position, index in enumerate(order)}
    ratio = machine.flops_per_s / (machine.fp32_flops_per_s or machine.flops_per_s)
    # FLOPs, bytes that products move, bytes that go to devices with other shards, and bytes that all else moves
    forward: dict[int, tuple[float, ...]] = {}
    backward: dict[int, tuple[float, ...]] = {}
    works: list[SimulatedVisit] = []
    first = order[0]
    for visit in trace.visits:
        index = first if visit.unit is None else visit.unit
        flops = visit.flops + ratio * visit.fp32_flops
        of_units = backward if visit.backward else forward
        work = flops, visit.moved_nbytes, visit.mesh_nbytes, visit.other_nbytes
        of_units[index] = tuple(map(sum, zip(of_units.get(index, NO_WORK), work, strict=True)))
        if visit.unit is None and not flops and not visit.sends:
            continue
        works.append(
            SimulatedVisit(
                place[index],
                flops,
                tuple(place[unit] for unit in visit.in_use),
                tuple(place[unit] for unit in visit.sends),
                visit.stowed_nbytes,
                visit.fetched_nbytes,
                visit.nbytes,
                visit.moved_nbytes,
                visit.mesh_nbytes,
                visit.other_nbytes,
            )
        )
    in_step = {unit.index: [p.numel() for _, p in unit.params if id(p) in steps] for unit in trace.units}
    costs = [
        replace(
            trace.wire[index],
            largest=max(in_step[index], default=0),
            stepped=sum(in_step[index]) / max(1, trace.wire[index].parameters),
            forward_flops=forward.get(index, NO_WORK)[0],
            backward_flops=backward.get(index, NO_WORK)[0],
            forward_moved=forward.get(index, NO_WORK)[1],
            backward_moved=backward.get(index, NO_WORK)[1],
            forward_mesh=forward.get(index, NO_WORK)[2],
            backward_mesh=backward.get(index, NO_WORK)[2],
            forward_other=forward.get(index, NO_WORK)[3],
            backward_other=backward.get(index, NO_WORK)[3],
        )
        for index in order
    ]
    return costs, works


def _untrained(needs: Requirements) -> Requirements:
    """Return the needs of a pass that trains nothing."""
    none: dict[str, Any] = {"down_nbytes": 0, "parameters": 0, "state_read_nbytes": 0, "state_written_nbytes": 0}
    none["gradients_on_disk"] = 0
    return replace(needs, costs=[replace(cost, **none) for cost in needs.costs])


def _in_a_line(error: Exception) -> str:
    """Describe an error with the last line of the user's code that led to it: one outside of installed packages."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not pathlib.Path(frame.filename).is_relative_to(PACKAGE)]
    places = [f"{frame.filename}:{frame.lineno}" for frame in own if "site-packages" not in frame.filename]
    return ": ".join([*places[-1:], type(error).__name__, *str(error).splitlines()[:1]])


def _to(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor


def _convert(module: nn.Module, dtype: torch.dtype, only_buffers: bool) -> None:
    """Convert a module as the precision plugin does; with master weights, parameters become FP32."""
    for child in module.modules():
        for name, buffer in child._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                child._buffers[name] = buffer.to(dtype)
    for parameter in module.parameters():
        if is_dtensor(parameter):
            torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad))  # type: ignore[no-untyped-call]
        elif parameter.is_floating_point() and not consists_of_tensors(parameter):
            parameter.data = parameter.data.to(torch.float32 if only_buffers else dtype)


def _copied(module: nn.Module, tensors: FakeTensors | RealTensors) -> nn.Module:
    """Copy a module to tensors of this kind; the module itself is not changed."""
    memo: dict[int, Any] = {}
    replaced = [child for child in module.modules() if inspect.isfunction(vars(child).get("forward"))]
    if replaced and has_shards(module, True):
        raise UnsupportedError(
            f"{type(module).__name__} cannot be copied: transformers' tp_plan replaced the forward of "
            f"{len(replaced)} modules by functions that lead to the modules themselves; pass a function without "
            "arguments that makes it"
        )
    for parameter in module.parameters():
        with torch.no_grad():
            if consists_of_tensors(parameter):
                form, parts = flattened(parameter)
                made = form.whole((tensors.adopt(part) for _, part in parts), parameter.device)
                vars(made)[IS_PARAMETER] = True
                memo[id(parameter)] = made.requires_grad_(parameter.requires_grad)
                continue
            memo[id(parameter)] = nn.Parameter(tensors.adopt(parameter.detach()), parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = tensors.adopt(buffer.detach())
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise UnsupportedError(
            f"{type(module).__name__} cannot be copied ({type(error).__name__}: {error}); "
            "pass a function without arguments that makes it"
        ) from error


def _storage(tensor: Tensor) -> int:
    return storage_id(tensor.untyped_storage())


def _language_model(module: nn.Module) -> Any:
    """Return the language model of transformers in a module, if its head is one linear layer; else None."""
    for child in module.modules():
        if (head_of := getattr(child, "get_output_embeddings", None)) is not None:
            return child if type(head_of()) is nn.Linear and child.base_model is not child else None
    return None


def _loss_in_chunks(module: nn.Module, batch: Any) -> Tensor:
    """Compute the loss of next tokens in chunks of rows, as the recipes do (examples/common/loss.py)."""
    model = _language_model(module)
    head = model.get_output_embeddings()
    hidden = model.base_model(**{name: batch[name] for name in batch if name != "labels"}, use_cache=False)[0]
    labels = nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:].flatten()
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else hidden.dtype
    weight, bias = (
        each if each is None or each.dtype is dtype else each.to(dtype) for each in (head.weight, head.bias)
    )
    with torch.autocast("cpu", enabled=False):
        losses = nn.functional.linear_cross_entropy(
            *(hidden.flatten(0, 1).to(dtype), weight, labels),
            linear_bias=bias,
            reduction="none",
            options=nn.LinearCrossEntropyOptions(),
        )
    return losses.float().mean()


def _forward(module: nn.Module, batch: Any) -> Any:
    if hasattr(batch, "keys"):
        return module(**batch)
    return module(*batch) if isinstance(batch, list | tuple) else module(batch)


def _rows(batch: Any) -> int:
    sizes = Counter(tensor.shape[0] for tensor in tensors_in(batch) if tensor.dim())
    return sizes.most_common(1)[0][0] if sizes else 1


def _scaled(batch: Any, rows: int, scale: int) -> Any:
    """Return a batch of ``scale`` times the rows."""
    if scale == 1:
        return batch

    def repeated(tensor: Tensor) -> Tensor:
        fits = tensor.dim() and tensor.shape[0] and tensor.shape[0] % rows == 0
        return torch.cat([tensor] * scale) if fits else tensor

    return apply_to_collection(batch, Tensor, repeated)
