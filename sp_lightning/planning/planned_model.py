"""A model to plan for: what its units cost, and what it needs on the device and on the host.

1. A module is measured by a dry run (dry_run.py). ``notes`` report what a dry run cannot do: a training_step that needs
   its Trainer is replaced by ``forward``; a model whose control flow depends on values that it computes runs on the
   CPU, with data, if it is small enough.
2. A workload's numbers are listed (workloads.py).
3. The loss of a language model of transformers may be in chunks, if the dry run saw that it is nothing else than the
   cross entropy of what its head, one linear layer, makes of what its base model returns.
4. Listed numbers agree with a dry run of the same model within a tenth, by a test: in half precision and under
   autocast. In FP32 attention saves its scores, too, whose bytes depend on the length of a row and are not listed.
5. With a host budget, frozen weights stay in files as in a run (disk/placement.py). Of a module that has its weights,
   those that are in files can; of any other, all frozen ones, which are taken to be in files in the type planned. With
   a disk the optimizer's state goes there as in a run, where it is taken to be AdamW's until it is there, and then
   weights. Of those that may come to travel in autocast's type, the dry run finds out which do.
6. Of a model that answers nothing is trained. A step is the pass in the middle of an answer: a token for each row.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import pathlib
import traceback
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from ..autograd.saved_tensors import tensors_in
from ..compat.kernels import has_chunked_loss
from ..compat.tensors import storage_id, without_dispatch_modes, without_function_modes
from ..core.host_bytes import STATES, HostBytes, UnitHostBytes, host_bytes
from ..core.machine import Machine
from ..core.remedies import STATE_NBYTES
from ..core.simulation import SimulatedVisit, UnitCost
from ..core.window_choice import UnitBytes
from ..disk import state_ring
from ..disk.direct_ring import BUFFERS, PIECE
from ..disk.placement import Budgeted, UnitPlacement, choose, may_move, within
from ..errors import OptionError, SuperpipelineError, UnsupportedError
from ..memory.partition import Unit
from ..options import Options, format_bytes
from .dry_run import Answers, RealTensors, Runner, dry_run, generating
from .fake_tensors import FakeTensors, Unknown
from .step_trace import GRADIENTS, KEPT, ROOT, WINDOW, WORKING, StepTrace
from .workloads import Workload, WorkloadPart

PACKAGE = pathlib.Path(__file__).parents[1]
LARGEST_REAL = 2**30  # bytes of weights of a model that may run on the CPU with data (Rule 1)
HALF = {"bf16": torch.bfloat16, "16": torch.float16}
HALF_BYTES = 2
# What a listed model's activations take, as multiples of what they would in half precision alone: norms and sums of
# blocks compute in FP32. Of a head's logits there are a copy in FP32, its softmax and gradients, by the loss (Rule 3).
SAVED = {"half": 1.09, "mixed": 1.4, "full": 2.17}
INPUTS = {"half": 1, "mixed": 2, "full": 2}
LOSS = 2
BACKWARD = 1.2  # of a recomputed unit's activations, with their gradients


@dataclass(frozen=True)
class Requirements:
    """The needs of a step: what does not depend on window and transfer, and the device's peak, which does."""

    costs: list[UnitCost]  # in the order of their first visits, resident ones last
    works: list[SimulatedVisit]
    peak: Callable[[int, int], dict[str, int]]  # of a window and a transfer: the device's bytes, by term
    sizes: Sequence[UnitBytes]  # of all units, as a run knows them when it begins
    trace: StepTrace | None = None  # None for a workload
    weights_on_disk: int = 0  # bytes, in files or in the scratch file
    reading: Requirements | None = None  # of the pass that reads the prompts, if the model answers (Rule 6)

    @property
    def on_disk(self) -> int:
        """Bytes of state, and of weights that train, on a disk: read and written once in a step."""
        return sum(cost.state_read_nbytes for cost in self.costs)

    @property
    def streamed(self) -> list[UnitCost]:
        return [cost for cost in self.costs if not cost.resident]


class PlannedModel(ABC):
    """A model to plan for."""

    name: str
    rows: int
    counted = "rows"  # what `rows` counts
    optimizer = ""  # class name of the module's own first optimizer, once it was made
    notes: list[str]

    @abstractmethod
    def needs(self, options: Options, machine: Machine) -> Requirements:
        """Return the requirements of a step with the given batch."""

    @abstractmethod
    def with_rows(self, rows: int, options: Options, machine: Machine) -> Requirements | None:
        """Return the requirements with another number of rows; None if they are unknown."""

    @abstractmethod
    def host(self, options: Options, needs: Requirements) -> HostBytes:
        """Return the host memory that a run takes."""

    def states(self) -> float:
        """Return how many tensors of a parameter's size the optimizer stores for it."""
        return STATES["AdamW"]

    def in_half(self) -> PlannedModel | None:
        """Return the same model computed in half precision; None unless it is a module that computes in FP32."""
        return None

    @property
    def logits_nbytes(self) -> int:
        """Lower bound of the bytes of logits that a loss in chunks would not have; 0 if there can be none (Rule 3)."""
        return 0

    def in_chunks(self) -> PlannedModel | None:
        """Return the same model with its loss in chunks; None if there can be none."""
        return None

    @property
    def answers(self) -> Answers | None:
        """Tokens that the model generates, if it is not trained (Rule 6)."""
        return None


class TracedModel(PlannedModel):
    """A module, measured by a dry run."""

    def __init__(
        self, module: Any, batch: Any, precision: str, optimizer: Any, target: str, loss: Runner | Answers | None
    ) -> None:
        if batch is None:
            raise OptionError(argument="batch", found=None, allowed="a batch as the module takes it, or a function")
        self._given = (module, precision, optimizer, target, loss)
        self._module = module
        self._batch = batch() if callable(batch) else batch
        self._precision = precision
        self._optimizer = optimizer
        self._target = target
        self._loss = loss
        self._lines: dict[Options, tuple[StepTrace, StepTrace] | None] = {}
        self._traces: dict[tuple[Options, int], StepTrace] = {}
        self._states: float | None = None
        self._nbytes = 0  # of weights; known once the module was made
        self._real = False  # whether the model has to run with data
        self._forward = False  # whether forward replaces training_step
        self._made_class: Any = None  # class of the module that was made, if one was
        self._logits_nbytes = 0
        self.rows = _rows(self._batch)
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
        return self._needs(line[0].between(line[1], rows / self.rows - 1), options, machine)

    def _line(self, options: Options) -> tuple[StepTrace, StepTrace] | None:
        one = self._trace(options, 1)
        try:
            two = self._trace(options, 2)
        except SuperpipelineError:
            self.notes.append("a batch of twice the rows could not be measured, so the largest batch is unknown")
            return None
        if not one.is_like(two):  # the first step of a process may make what later ones find
            one = self._traces[options, 1] = self._find_trace(options, 1)
        return (one, two) if one.is_like(two) else None

    def _needs(self, trace: StepTrace, options: Options, machine: Machine) -> Requirements:
        in_files, placed = self._placed(trace, options)
        filed = {index: sum(of_unit.values()) for index, of_unit in in_files.items()}
        moved = {index: self._may_move(trace, index, options) for index in placed.masters}
        trained = [
            sum(p.nbytes for _, p in unit.params if p.requires_grad and p.dim()) if placed.on_disk else 0
            for unit in trace.units
        ]
        stepped = {index: sum(p.nbytes for p in of_unit if p.requires_grad) for index, of_unit in moved.items()}
        as_it_is = {index: sum(p.nbytes for p in of_unit if id(p) in trace.uncast) for index, of_unit in moved.items()}
        read = {unit.name: filed.get(unit.index, 0) + as_it_is.get(unit.index, 0) for unit in trace.units}
        on_disk = sum(filed.values()) + sum(p.nbytes for of_unit in moved.values() for p in of_unit)

        def of(part: StepTrace) -> Requirements:
            costs, works = _costs(part, options, machine)
            costs = [replace(cost, disk_nbytes=read.get(cost.name, 0)) for cost in costs]
            costs = _with_moved(costs, [unit.name for unit in trace.units], placed, trained, stepped, self.states())
            return Requirements(costs, works, trace.peak, trace.sizes, trace, weights_on_disk=on_disk)

        if not trace.passes:
            return of(trace)
        return replace(of(trace.of_pass(1)), reading=of(trace.of_pass(0)))  # Rule 6

    def _placed(self, trace: StepTrace, options: Options) -> tuple[dict[int, dict[int, int]], Budgeted]:
        """Return the bytes of weights that stay in files, and what is where (Rule 5).

        The former are by the indices of units and the ids of parameters.
        """
        if options.host_budget is None:
            return {}, Budgeted(units=[], host=HostBytes(), in_files=0)
        filed = [self._filed(unit) for unit in trace.units]
        everything = {key: nbytes for unit in filed for key, nbytes in unit.items()}
        dtype = self._half() if options.master_weights else None
        may_cast = self._precision.endswith("mixed") and options.may_cast and dtype is None
        spills, trains = options.disk is not None, self.answers is None
        budget, known = options.host_budget, trace.castable
        placed = choose(trace.units, everything, budget, dtype, may_cast, trains=trains, spills=spills, castable=known)
        if placed.units and self._names_in_files is None:
            self.notes.append("frozen weights are taken to be in local files as they are")
        return {index: filed[index] for index in placed.units}, placed

    def _may_move(self, trace: StepTrace, index: int, options: Options) -> list[Tensor]:
        """List a unit's FP32 weights that can be on disk (Rule 5)."""
        parameters = [parameter for _, parameter in trace.units[index].params]
        return may_move(parameters, self._half() if options.master_weights else None, trace.castable)

    def _filed(self, unit: Unit) -> dict[int, int]:
        """Return the bytes of a unit's weights that can stay in files, by the ids of parameters (Rule 5)."""
        names = self._names_in_files
        frozen = ((name, p) for name, p in unit.params if not p.requires_grad)
        return {id(p): p.nbytes for name, p in frozen if names is None or name in names}

    @functools.cached_property
    def _names_in_files(self) -> set[str] | None:
        """The names of the weights that are in files; None if there is no telling."""
        if not isinstance(self._module, nn.Module) or any(p.is_meta for p in self._module.parameters()):
            return None
        from ..disk.source_files import find

        found = find(self._module.parameters())
        return {name for name, parameter in self._module.named_parameters() if id(parameter) in found}

    def host(self, options: Options, needs: Requirements) -> HostBytes:
        assert needs.trace is not None
        trace = needs.trace
        in_files, placed = self._placed(trace, options)
        units = []
        for unit, wire, frozen_wire in zip(trace.units, trace.wire_nbytes, trace.frozen_wire_nbytes, strict=True):
            filed = in_files.get(unit.index, {})
            kept = UnitHostBytes.of([p for _, p in unit.params if id(p) not in filed])
            units.append(replace(kept, wire=wire - bool(filed) * frozen_wire))
        if trace.passes:  # the last one has the longest cache
            waiting = sum(visit.stowed_nbytes for visit in trace.of_pass(2).visits)
            return replace(host_bytes(units, ring=placed.host.ring), keys_and_values=waiting)
        stowed = sum(work.stowed_nbytes for work in needs.works)
        host = host_bytes(units, states=self.states(), activations=stowed, ring=placed.host.ring)
        return without_disk(host, placed, units, self.states())

    def states(self) -> float:
        assert self._states is not None
        return self._states

    def in_half(self) -> PlannedModel | None:
        module, precision, *others = self._given
        single = precision == "32-true" or precision.endswith("mixed")
        return TracedModel(module, self._batch, "bf16-true", *others) if single else None

    @property
    def logits_nbytes(self) -> int:
        return self._logits_nbytes if has_chunked_loss else 0

    def in_chunks(self) -> PlannedModel | None:
        if not self.logits_nbytes:
            return None
        module, precision, optimizer, target, _ = self._given
        return TracedModel(module, self._batch, precision, optimizer, target, _loss_in_chunks)

    @property
    def answers(self) -> Answers | None:
        return self._loss if isinstance(self._loss, Answers) else None

    def with_answers(self, answers: Answers) -> TracedModel:
        """Return the same model that generates something else."""
        module, precision, optimizer, target, _ = self._given
        return TracedModel(module, self._batch, precision, optimizer, target, answers)

    def _half(self) -> torch.dtype | None:
        return half_of(self._precision)

    def _trace(self, options: Options, scale: int) -> StepTrace:
        if (options, scale) not in self._traces:
            self._traces[options, scale] = self._find_trace(options, scale)
        return self._traces[options, scale]

    def _find_trace(self, options: Options, scale: int) -> StepTrace:
        """Trace a step in the plainest way that works; the first trace decides the way of all others (Rule 1)."""
        batch = _scaled(self._batch, self.rows, scale)
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
                self._real = True
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
        self._made_class = type(module)
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
            return dry_run(module, adopted, run, options, tensors, compute_dtype)

    @contextlib.contextmanager
    def _seeing_logits(self, module: nn.Module) -> Iterator[None]:
        """Find out, within this context, whether the loss may be in chunks (Rule 3)."""
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
                made = self._module()
            except SuperpipelineError:
                raise
            except Exception as error:
                raise UnsupportedError(f"{self.name} could not be made: {_in_a_line(error)}") from error
            finally:
                tensors.building = False
            if not isinstance(made, nn.Module):
                raise OptionError(argument="module", found=made, allowed="a module, or a function that makes one")
            return made
        return _copied(self._module, tensors)

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
                return _mean_states(made)
            widest = max(module.parameters(), key=lambda parameter: parameter.numel())
            return states_of(self._optimizer, module, widest.dtype)
        except OptionError:
            raise
        except Exception as error:
            self.notes.append(
                f"the module's own optimizer could not be made ({_in_a_line(error)}): planned with AdamW's state"
            )
            return STATES["AdamW"]


class ListedModel(PlannedModel):
    """A workload, by its listed numbers, which are for half precision."""

    counted = "tokens"

    def __init__(
        self,
        workload: Workload,
        tokens: int,
        options: Options,
        precision: str = "32-true",
        optimizer: Any = None,
        chunked: bool = False,
    ) -> None:
        if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
            raise OptionError(argument="batch", found=tokens, allowed="the number of tokens of a workload's batch")
        if options.activations not in ("keep", "recompute"):
            found, allowed = options.activations, "'keep' or 'recompute' for a workload, which lists nothing else"
            raise OptionError(argument="activations", found=found, allowed=allowed)
        if options.units != "auto":
            allowed = "'auto' for a workload, which lists its units (name them with its config.json as the model)"
            raise OptionError(argument="units", found=options.units, allowed=allowed)
        check_master_weights(options, precision)
        self._workload = workload
        self._chunked = chunked
        self._precision = precision
        self._optimizer = optimizer
        dtype = torch.bfloat16 if self._host_width(options) == HALF_BYTES else torch.float32
        self._states = states_of(optimizer, None, dtype)
        self.rows = tokens
        self.name = workload.name
        scores = ": in FP32 they take more (plan the model's config.json)" if self._kind() == "full" else ""
        self.notes = [f"planned from listed numbers, in which attention's scores are not saved{scores}"]

    def _kind(self) -> str:
        """Return the kind of precision: "mixed", "half", or "full", whose activations are FP32 or wider."""
        return "mixed" if self._precision.endswith("mixed") else "half" if half_of(self._precision) else "full"

    def _host_width(self, options: Options) -> int:
        """Return the bytes of a weight on the host."""
        if self._precision == "64-true":
            return 8
        return HALF_BYTES if self._kind() == "half" and not options.master_weights else 4

    def _wire_width(self, part: WorkloadPart, options: Options) -> int:
        """Return the bytes of a weight on its way: tables that are looked up are never cast by autocast."""
        casts = self._kind() == "mixed" and options.wire_dtype == "auto" and not options.compile_units
        if options.master_weights or (casts and part.active):
            return HALF_BYTES
        return self._host_width(options)

    def needs(self, options: Options, machine: Machine) -> Requirements:
        return self.with_rows(self.rows, options, machine)

    def with_rows(self, rows: int, options: Options, machine: Machine) -> Requirements:
        recompute = options.activations == "recompute"
        kind = self._kind()
        slower = machine.flops_per_s / (machine.fp32_flops_per_s or machine.flops_per_s) if kind == "full" else 1.0
        parts = sorted(self._workload.parts, key=lambda part: part.resident)  # a stable order
        plain = {cost.name: cost for cost in self._workload.units(rows, chunked=self._chunked)}
        costs = []
        for part in parts:
            cost, wire = plain[part.name], self._wire_width(part, options)
            forward = slower * cost.forward_flops
            again = recompute and not (self._chunked and part.vocabulary)  # what is in chunks is made again anyway
            costs.append(
                replace(
                    cost,
                    up_nbytes=part.parameters * wire,
                    down_nbytes=part.parameters * wire,
                    cast=part.parameters * (wire != self._host_width(options)),
                    forward_flops=forward,
                    backward_flops=slower * cost.backward_flops + again * forward,
                    activation_nbytes=round(SAVED[kind] * cost.activation_nbytes),
                    input_nbytes=round(INPUTS[kind] * cost.input_nbytes),
                )
            )
        first = HALF_BYTES if options.master_weights else self._host_width(options)  # bytes in the first step
        device = {part.name: part.parameters * first for part in parts}
        later = {cost.name: cost.up_nbytes for cost in costs}  # and of gradients, in the first step too

        turns, kept = [], 0  # places of units in `costs`, with what is on the device beside weights at their turn
        for turn, cost in enumerate(costs):
            working, gradient = 0, later[cost.name]
            if _feeds_the_loss(cost):
                of_loss = plain[cost.name].activation_nbytes
                turns.append((turn, {KEPT: kept, WORKING: of_loss if self._chunked else LOSS * of_loss}))
                gradient = device[cost.name] if self._chunked else gradient  # of a weight that the loss itself casts
            else:
                kept += cost.input_nbytes if recompute else cost.activation_nbytes
                working = recompute * round(BACKWARD * cost.activation_nbytes)
            turns.append((turn, {KEPT: kept, WORKING: working, GRADIENTS: 2 * gradient}))

        def step(nbytes: Mapping[str, int], window: int) -> dict[str, int]:
            """Return the peak of a step with these bytes of each unit's weights."""
            fullest = _fullest(tuple(nbytes[cost.name] for cost in costs if not cost.resident), window)
            weights = [*fullest, *(max(fullest) for cost in costs if cost.resident)]
            root = sum(nbytes[cost.name] for cost in costs if cost.resident)
            found = ({WINDOW: weights[turn], ROOT: root} | beside for turn, beside in turns)
            return max(found, key=lambda terms: sum(terms.values()))

        def peak(window: int, transfer: int) -> dict[str, int]:
            if device == later:
                return step(device, window)
            narrow = step(device, max(1, window // 2))  # window.py, Rule 4
            return max(step(later, window), narrow, key=lambda terms: sum(terms.values()))

        sizes = [UnitBytes(c.name, device[c.name], device[c.name], c.resident, c.parameters) for c in costs]
        width, whole = self._host_width(options), self._workload.parts
        trained = [part.parameters * width for part in whole]
        placed, names = self._placed(options), [part.name for part in whole]
        costs = _with_moved(costs, names, placed, trained, placed.masters, self._states)
        return Requirements(costs, _sweep(costs), peak, sizes, weights_on_disk=sum(placed.masters.values()))

    @property
    def logits_nbytes(self) -> int:
        vocabularies = (part.vocabulary for part in self._workload.parts if has_chunked_loss and not self._chunked)
        return 4 * self.rows * sum(vocabularies)

    def in_chunks(self) -> PlannedModel | None:
        if not self.logits_nbytes:
            return None
        return ListedModel(self._workload, self.rows, Options(), self._precision, self._optimizer, True)

    def host(self, options: Options, needs: Requirements) -> HostBytes:
        units, placed = self._units(options), self._placed(options)
        host = host_bytes(units, states=self._states, ring=placed.host.ring)
        return without_disk(host, placed, units, self._states)

    def _units(self, options: Options) -> list[UnitHostBytes]:
        """List the host memory of the parts."""
        width, units = self._host_width(options), []
        for part in self._workload.parts:
            nbytes, wire = part.parameters * width, self._wire_width(part, options)
            units.append(UnitHostBytes(weights=nbytes, wire=part.parameters * wire * (wire != width), trained=nbytes))
        return units

    def _placed(self, options: Options) -> Budgeted:
        """Choose what is on the disk, of a workload whose weights all train (Rule 5)."""
        units = self._units(options)
        whole = host_bytes(units, states=STATES["AdamW"])
        placements = [
            UnitPlacement(
                whole=unit,
                kept=unit,
                in_files=0,
                state=STATES["AdamW"] * unit.trained,
                masters=unit.weights if unit.wire else 0,
            )
            for unit in units
        ]
        read = 0 if options.master_weights else max(placement.masters for placement in placements)
        budget, spills = options.host_budget, options.disk is not None
        return within(
            placements, whole.total if budget is None else budget, whole, 0, spills, BUFFERS * min(PIECE, read)
        )

    def states(self) -> float:
        return self._states

    def in_half(self) -> PlannedModel | None:
        if half_of(self._precision) and not self._precision.endswith("mixed"):
            return None
        return ListedModel(self._workload, self.rows, Options(), "bf16-true", self._optimizer, self._chunked)


@functools.lru_cache
def _fullest(sizes: tuple[int, ...], window: int) -> list[int]:
    """Return, for each unit, the bytes of the largest window that it is in: a window has neighbours."""
    window = min(window, len(sizes))
    sums = [sum(sizes[first : first + window]) for first in range(len(sizes) - window + 1)]
    return [max(sums[max(0, place - window + 1) : place + 1]) for place in range(len(sizes))]


def _feeds_the_loss(cost: UnitCost) -> bool:
    """Whether a listed unit is the head, whose outputs are larger than a block's."""
    return cost.name.startswith("head")


def _sweep(costs: Sequence[UnitCost]) -> list[SimulatedVisit]:
    """List a plain step's visits: forward over all units, what is resident, then backward in reverse order."""
    streamed = [index for index, cost in enumerate(costs) if not cost.resident]
    roots = [index for index, cost in enumerate(costs) if cost.resident]
    extra = sum(costs[index].forward_flops for index in roots)
    backward_extra = sum(costs[index].backward_flops for index in roots)
    works = [SimulatedVisit(index, costs[index].forward_flops) for index in streamed]
    works[-1] = replace(works[-1], flops=works[-1].flops + extra + backward_extra)
    for index in reversed(streamed):
        cost = costs[index]
        works.append(SimulatedVisit(index, cost.backward_flops, sends=(index,) if cost.trained else ()))
    trained_roots = tuple(index for index in roots if costs[index].trained)
    works[-1] = replace(works[-1], sends=(*works[-1].sends, *trained_roots))
    return works


def _costs(trace: StepTrace, options: Options, machine: Machine) -> tuple[list[UnitCost], list[SimulatedVisit]]:
    """Turn a trace into the simulation's costs and visits, with units in the order of their first visits."""
    order = list(dict.fromkeys(trace.order))
    order += [unit.index for unit in trace.units if unit.index not in order]
    place = {index: position for position, index in enumerate(order)}
    ratio = machine.flops_per_s / (machine.fp32_flops_per_s or machine.flops_per_s)
    forward: dict[int, float] = {}
    backward: dict[int, float] = {}
    works: list[SimulatedVisit] = []
    first = order[0]
    for visit in trace.visits:
        index = first if visit.unit is None else visit.unit
        flops = visit.flops + ratio * visit.fp32_flops
        flops_of = backward if visit.backward else forward
        flops_of[index] = flops_of.get(index, 0.0) + flops
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
            )
        )
    costs = []
    for index in order:
        size = trace.wire[index]
        costs.append(
            UnitCost(
                name=size.name,
                up_nbytes=size.nbytes,
                down_nbytes=size.gradient_nbytes,
                parameters=size.trained,
                cast=size.cast,
                forward_flops=forward.get(index, 0.0),
                backward_flops=backward.get(index, 0.0),
                resident=size.resident,
            )
        )
    return costs, works


def half_of(precision: str) -> torch.dtype | None:
    """Return the half-precision type in which such a run computes, if it does."""
    return HALF.get(precision.split("-")[0])


def check_master_weights(options: Options, precision: str) -> None:
    """Raise OptionError if master weights are asked for without a precision that has them."""
    if options.master_weights and (half_of(precision) is None or precision.endswith("mixed")):
        allowed = "'bf16-true' or '16-true' with master_weights=True"
        raise OptionError(argument="precision", found=precision, allowed=allowed)


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
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.float32 if only_buffers else dtype)


def _copied(module: nn.Module, tensors: FakeTensors | RealTensors) -> nn.Module:
    """Copy a module to tensors of this kind; the module itself is not changed."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        with torch.no_grad():
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


QUANTIZED = ("AdamW8bit",)  # optimizers of bitsandbytes: a name does not need it installed


def _with_moved(
    costs: Sequence[UnitCost],
    names: Sequence[str],
    placed: Budgeted,
    trained: Sequence[int],
    stepped: Mapping[int, int],
    states: float,
) -> list[UnitCost]:
    """Return the costs with the bytes that a step of each unit reads from the disk and writes there (Rule 5).

    Args:
        costs: Of units, by their names.
        names: Of all units, as `placed` counts them.
        placed: What is where.
        trained: Bytes of each unit's weights that train.
        stepped: Bytes of those that are on the disk, by unit.
        states: State tensors per parameter.
    """
    moved = dict.fromkeys(names, 0)
    for index in placed.spilled:
        moved[names[index]] += whole_states(states) * trained[index]
    for index, nbytes in stepped.items():
        moved[names[index]] += nbytes
    of_each = ((cost, moved.get(cost.name, 0)) for cost in costs)
    return [replace(cost, state_read_nbytes=nbytes, state_written_nbytes=nbytes) for cost, nbytes in of_each]


def whole_states(states: float) -> int:
    """Count the state tensors of a parameter's shape, which can be on disk; an optimizer's others stay in memory."""
    return int(states + 1e-3)


def without_disk(host: HostBytes, placed: Budgeted, units: Sequence[UnitHostBytes], states: float) -> HostBytes:
    """Return the host memory of a run less what is on the disk (Rule 5)."""
    state = whole_states(states) * sum(units[index].trained for index in placed.spilled)
    weights = sum(placed.masters.values())
    ring = 0 if state + weights or not placed.spilled else state_ring.BUFFERS * placed.buffer  # made when it is used
    return replace(host, weights=host.weights - weights, optimizer=host.optimizer - state, ring=host.ring - ring)


def states_of(optimizer: Any, module: nn.Module | None, dtype: torch.dtype = torch.float32) -> float:
    """Count the tensors that an optimizer stores per parameter, in its size and type, by stepping one parameter.

    Args:
        optimizer: A name, a class, a function of parameters, or None for the module's own.
        module: The module whose own optimizer counts.
        dtype: The parameters' type.
    """
    if isinstance(optimizer, str):
        names = {name.lower(): name for name in (*STATES, "Adafactor", *QUANTIZED)}
        if optimizer.lower() not in names:
            allowed = f"one of {', '.join(names.values())}, a class or a function of parameters"
            raise OptionError(argument="optimizer", found=optimizer, allowed=allowed)
        name = names[optimizer.lower()]
        if name in QUANTIZED:
            return STATE_NBYTES[name] / dtype.itemsize
        optimizer = getattr(torch.optim, name)
    if optimizer is None:
        configure = getattr(module, "configure_optimizers", None)
        if configure is None:
            return STATES["AdamW"]
        return _mean_states(list(optimizers_in(configure())))
    with torch.random.fork_rng(devices=[]):
        return _count_stored(optimizer)


def _mean_states(optimizers: Sequence[torch.optim.Optimizer]) -> float:
    """Average the count over several optimizers, by the number of parameters that each trains."""
    parameters, stored = 0, 0.0
    with torch.random.fork_rng(devices=[]):
        for made in optimizers:
            trained = {p for group in made.param_groups for p in group["params"] if p.requires_grad}
            count = sum(parameter.numel() for parameter in trained)
            parameters += count
            stored += count * _count_stored(functools.partial(type(made), **_arguments(made)))
    return stored / max(1, parameters)


def _arguments(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the defaults that are arguments of the optimizer's class: some classes add others."""
    takes = inspect.signature(type(optimizer)).parameters
    return {name: value for name, value in optimizer.defaults.items() if name in takes}


def optimizers_in(found: Any) -> Iterator[torch.optim.Optimizer]:
    """Yield the optimizers in what ``configure_optimizers`` returned."""
    if isinstance(found, torch.optim.Optimizer):
        yield found
    elif isinstance(found, dict):
        yield from optimizers_in(found.get("optimizer"))
    elif isinstance(found, list | tuple):
        for item in found:
            yield from optimizers_in(item)


def _count_stored(make: Callable[[Any], torch.optim.Optimizer]) -> float:
    with without_function_modes(), without_dispatch_modes(), torch.enable_grad():
        parameter = nn.Parameter(torch.ones(64, 64))
        parameter.grad = torch.ones(64, 64)
        optimizer = make([parameter])
        optimizer.step()
        stored = sum(value.nbytes for value in optimizer.state[parameter].values() if isinstance(value, Tensor))
    return stored // 64 * 64 / parameter.nbytes  # without the step counter


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
