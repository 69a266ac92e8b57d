"""A model to plan for: made without weights, cut into units by the code that runs, and measured by traces of a step.

1. What a trace cannot do is a note: a training_step that needs its Trainer is replaced by ``forward``; a model that
   depends on values that it computes runs on the CPU, with data, if it is small enough.
2. Under autocast weights that are cast and not used otherwise travel in autocast's type (autocast_weights.py). The
   first trace finds them. In a run's first step they travel as they are, in half the window, and are cast one by one.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..compat.modules import set_device_mesh
from ..compat.tensors import IS_PARAMETER, consists_of_tensors, flattened, is_dtensor
from ..core.schedule import Schedule
from ..core.unit_numbers import UnitNumbers, aligned
from ..errors import OptionError, SuperpipelineError, UnsupportedError
from ..memory.partition import Unit, partition
from ..options import Options, format_bytes
from .fakes import UNKNOWN, FakeTensors, building, mapped
from .trace import Trace, tensors_in, trace

HALF = {"bf16": torch.bfloat16, "16": torch.float16}
LARGEST_REAL = 2**30  # bytes of weights of a model that may run on the CPU with data
KEEPS_MORE = "update_conv_state", "update_indexer"  # of a cache's layers that cannot wait on the host
PASSES = 3  # over the units: from the third on all are alike
PACKAGE = Path(__file__).parents[1]

# What bytes on the device are for.
WINDOW, ROOT, KEPT, WORKING, GRADIENTS = (
    *("window", "resident root", "kept for backward", "activations of one unit"),
    "gradient buffers",
)


@dataclass(frozen=True)
class Answers:
    """Tokens that a model generates for each row, and where its keys and values wait: "device" or "host"."""

    tokens: int
    cache: str = "device"


class PlannedModel:
    """A model that is measured without a device."""

    def __init__(
        self,
        module: Any,
        batch: Any,
        *,
        precision: str,
        target: str,
        loss: Callable[[nn.Module, Any], Any] | None,
        answers: Answers | None,
        masters: bool = False,
        mesh: Any = None,
        name: str | None = None,
    ) -> None:
        if batch is None:
            raise OptionError(argument="batch", found=None, allowed="a batch as the module takes it, or a function")
        self.notes: list[str] = []
        self.answers = answers
        self._source = module
        self._batch = batch() if callable(batch) else batch
        self.rows = _rows(self._batch)
        self._precision = precision
        self._target = target
        self._loss = loss
        self._masters = masters and self.half is not None  # weights are FP32 on the host, and half precision here
        self._mesh = mesh
        self._forward = False  # forward replaces training_step
        self._stepped = False  # a whole step was traced, and decided that
        self._narrow: frozenset[int] = frozenset()
        self._traces: dict[Any, Trace] = {}
        self._sizes: dict[Any, list[UnitNumbers]] = {}
        self._begin(real=False)
        own = type(module).__name__ if isinstance(module, nn.Module) else getattr(module, "__name__", "model")
        self.name: str = name or own

    @property
    def half(self) -> torch.dtype | None:
        """The half-precision type in which the run computes, if it does."""
        return HALF.get(self._precision.split("-")[0])

    @property
    def mixed(self) -> bool:
        """Whether the run computes under autocast."""
        return self._precision.endswith("mixed")

    def note(self, text: str) -> None:
        """Add a note to the plan, once."""
        if text not in self.notes:
            self.notes.append(text)

    # ---- making

    def _begin(self, real: bool) -> None:
        self._real = real
        self.tensors = FakeTensors(self._target, self.half if self.mixed else None, real)
        with self.tensors, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.module = self._made()
        if not any(True for _ in self.module.parameters()):
            raise OptionError(argument="module", found=type(self.module).__name__, allowed="a module with parameters")
        if any(is_dtensor(parameter) for parameter in self.module.parameters()):
            raise UnsupportedError(
                "layers that are cut across devices cannot be planned yet: plan the whole model, of which each device "
                "holds its share of the window and of the gradients"
            )
        self._traces = {}
        self._sizes = {}

    def _made(self) -> nn.Module:
        if isinstance(self._source, nn.Module):
            module = self._cut(lambda: _copied(self._source, self.tensors))
        else:
            try:
                with building(self.tensors):
                    module = self._cut(self._source)
            except SuperpipelineError:
                raise
            except Exception as error:
                raise UnsupportedError(f"the model could not be made: {_in_a_line(error)}") from error
            if not isinstance(module, nn.Module):
                raise OptionError(argument="module", found=module, allowed="a module, or a function that makes one")
        if self._precision.endswith("true"):
            dtype = self.half or (torch.float64 if self._precision == "64-true" else None)
            if dtype is not None:
                _convert(module, dtype, self._masters)
        made: nn.Module = module.eval().requires_grad_(False) if self.answers else module.train()
        return made

    def _cut(self, make: Callable[..., Any]) -> Any:
        """Make a module; give it, or the function that makes it, the mesh among whose devices it cuts its layers."""
        if self._mesh is None:
            return make()
        takes = [one for one in inspect.signature(make).parameters.values() if one.default is one.empty]
        made = make(self._mesh["tensor_parallel"]) if takes else make()
        if hasattr(made, "configure_model"):
            set_device_mesh(made, self._mesh)
            made.configure_model()
        return made

    @functools.lru_cache(maxsize=8)  # noqa: B019  # a model lives as long as its plan is made
    def units(self, spec: Any = "auto") -> list[Unit]:
        """Cut the module into units."""
        return partition(self.module, list(spec) if isinstance(spec, tuple) else spec)

    def units_of(self, options: Options) -> list[Unit]:
        """Cut the module as the options say."""
        return self.units(tuple(options.units) if isinstance(options.units, list) else options.units)

    # ---- traces

    def begins(self, options: Options) -> None:
        """Find out, from a forward alone, which weights travel cast after a run's first step."""
        if self.mixed and options.may_cast:
            self._trace(options, "keep", first=True)

    def later(self, options: Options, scale: int = 1, activations: str | None = None, tokens: int = 0) -> Trace:
        """Return the trace of any later step, of ``scale`` times the rows."""
        self.begins(options)
        return self._trace(options, activations or options.activations, scale=scale, tokens=tokens)

    def travels_as(self, parameter: Tensor, options: Options) -> torch.dtype:
        """Return the type of a weight on the device; call after `begins`."""
        casts = self.mixed and id(parameter) in self._narrow and options.may_cast
        if casts or (self._masters and parameter.dtype is torch.float32):
            assert self.half is not None
            return self.half
        return parameter.dtype

    def _trace(
        self, options: Options, activations: str, *, first: bool = False, scale: int = 1, tokens: int = 0
    ) -> Trace:
        may_cast = self.mixed and options.may_cast
        key = activations, str(options.units), scale, tokens, may_cast, first and may_cast
        if key not in self._traces:
            found = self._found(options, activations, scale, tokens, first)
            if first and may_cast:
                self._narrow = found.narrow
            self._traces[key] = found
        return self._traces[key]

    def _found(self, options: Options, activations: str, scale: int, tokens: int, first: bool) -> Trace:
        """Trace a step in the plainest way that works; the first trace decides the way of all others."""
        why: Exception | None = None
        while True:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # nothing is trained here
                    found = self._traced(options, activations, scale, tokens, first)
                self._stepped = not first
                return found
            except SuperpipelineError:
                raise
            except UNKNOWN as error:
                self._run_with_data(error)
            except Exception as error:
                why = why or error
                trainable = hasattr(self.module, "training_step") and self._loss is None and not self.answers
                if self._forward or self._stepped or not trainable:
                    raise UnsupportedError(
                        f"{self.name} does not run without a Trainer and without data: {_in_a_line(why)}; pass another "
                        "batch (--data), or loss=, a function that takes the module and a batch and returns the loss"
                    ) from error
                self._forward = True
                self.notes.append(
                    f"training_step was not measured, because it needs more than a batch ({_in_a_line(error)}): "
                    "forward, and backward from all its outputs, were measured instead"
                )

    def _run_with_data(self, error: Exception) -> None:
        """Make the model once more, with data, because it depends on values that it computes (Rule 1)."""
        nbytes = sum(parameter.nbytes for parameter in self.module.parameters())
        given = isinstance(self._source, nn.Module) and any(p.is_meta for p in self._source.parameters())
        if self._real or nbytes > LARGEST_REAL or given:
            raise UnsupportedError(
                f"{self.name} depends on values that it computes ({_in_a_line(error)}), and {format_bytes(nbytes)} of "
                f"weights are more than the {format_bytes(LARGEST_REAL)} that may run on the CPU instead, or have no "
                "values: plan with fewer layers, or pass loss=, a function of module and batch without those values"
            ) from error
        self.notes.append("the model depends on values that it computes: measured on the CPU, with data")
        self._begin(real=True)
        self.units.cache_clear()

    def _traced(self, options: Options, activations: str, scale: int, tokens: int, first: bool) -> Trace:
        cast = self._masters or (self.mixed and options.may_cast and not first)
        units = self.units_of(options)
        with self.tensors, self._cast_weights(units, cast) as units:
            batch = mapped_in(self._batch, functools.partial(self._given, scale=scale, tokens=tokens))
            if not self.answers:
                run = functools.partial(self._step, batch)
                return trace(self.module, units, batch, run, self.tensors, activations=activations, backward=not first)
            past = None
            if tokens > 1:
                past = self._prompt(batch, None).past_key_values
                one = torch.ones(self.rows * scale, 1, dtype=torch.long)
                batch = {"input_ids": one}
            return trace(
                self.module, units, batch, lambda: self._prompt(batch, past), self.tensors, backward=False, grad=False
            )

    def _given(self, tensor: Tensor, scale: int, tokens: int) -> Tensor:
        """Return a tensor of the batch without data, with ``scale`` times the rows, and longer prompts."""
        fits = tensor.dim() and tensor.shape[0] and tensor.shape[0] % self.rows == 0
        if scale > 1 and fits:
            tensor = torch.cat([tensor] * scale)
        if tokens > 1 and tensor.dim() > 1:
            tensor = torch.cat([tensor, tensor[:, :1].expand(-1, tokens - 1)], 1)
        dtype = None if self.mixed or not self._precision.endswith("true") else self.half
        tensor = self.tensors.adopt(tensor)
        return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

    @contextlib.contextmanager
    def _cast_weights(self, units: list[Unit], cast: bool) -> Any:
        """Give weights that travel in autocast's type that type, in this context (Rule 2)."""
        every = [p for unit in units for _, p in unit.params] if cast else []
        changed = [(p, p.data) for p in every if id(p) in self._narrow or (self._masters and p.is_floating_point())]
        for parameter, data in changed:
            parameter.data = torch.empty_strided(data.shape, data.stride(), dtype=self.half)
        try:
            yield units
        finally:
            for parameter, data in changed:
                parameter.grad = None
                parameter.data = data

    def _prompt(self, batch: Any, past: Any) -> Any:
        model = next((m for m in self.module.modules() if hasattr(m, "generate")), None)
        if model is None:
            assert self.answers is not None
            allowed = f"left out: {self.name} is no decoder of transformers that continues texts"
            raise OptionError(argument="answer", found=self.answers.tokens, allowed=allowed)
        if self.answers and self.answers.cache == "host":
            _check_cache(model.config)
        kept = {name: value for name, value in batch.items() if name != "labels"}
        with torch.no_grad():
            return model(**kept, past_key_values=past, use_cache=True, logits_to_keep=1)

    def _step(self, batch: Any) -> Any:
        if self._loss is not None:
            return self._loss(self.module, batch)
        step = getattr(self.module, "training_step", None)
        if step is not None and not self._forward:
            return step(*(batch, 0)[: len(inspect.signature(step).parameters)])
        if hasattr(batch, "keys"):
            return self.module(**batch)
        return self.module(*batch) if isinstance(batch, list | tuple) else self.module(batch)

    # ---- bytes on the device

    def sizes(self, options: Options, first: bool = False) -> list[UnitNumbers]:
        """List the bytes of the units on the device: in the first step, or later."""
        self.begins(options)  # which finds out what travels cast
        key = str(options.units), options.may_cast, first
        if key in self._sizes:
            return self._sizes[key]
        found = self._sizes[key] = []
        for unit in self.units_of(options):
            types = [p.dtype if first and not self._masters else self.travels_as(p, options) for _, p in unit.params]
            pairs = [(p, aligned(p.numel() * dtype.itemsize), dtype) for (_, p), dtype in zip(unit.params, types)]  # noqa: B905  # made of it
            trained = [(p, nbytes, dtype) for p, nbytes, dtype in pairs if p.requires_grad]
            found.append(
                UnitNumbers(
                    unit.name,
                    sum(nbytes for _, nbytes, _ in pairs),
                    sum(nbytes for _, nbytes, _ in trained),
                    sum(p.numel() for p, _, _ in trained),
                    resident=unit.resident,
                    cast=sum(p.numel() for p, _, dtype in trained if dtype is not p.dtype),
                )
            )
        return found

    def peak(self, options: Options, window: int, transfer: int, at: Trace | None = None) -> dict[str, int]:
        """Return the bytes on the device by term, at a step's fullest moment; ``at``: of another batch."""
        sizes = self.sizes(options)
        most = peak_of(at or self.later(options), self.units_of(options), sizes, window, transfer)
        first = self.sizes(options, first=True)
        if at is None and first != sizes and not self._masters:
            begun = peak_of(self._with_casts(options), self.units_of(options), first, max(1, window // 2), transfer)
            most = max(most, begun, key=lambda terms: sum(terms.values()))
        return most

    def _with_casts(self, options: Options) -> Trace:
        """Return the trace of a run's first step: one weight at a time is cast on the device."""
        found = self.later(options)
        casts = [
            max((p.numel() * p.itemsize // 2 for _, p in unit.params if id(p) in self._narrow), default=0)
            for unit in self.units_of(options)
        ]
        packed = [size.down_nbytes for size in self.sizes(options)]  # when no cast is there
        visits = [
            v if v.unit is None else replace(v, peak=v.peak + max(0, casts[v.unit] - packed[v.unit] * v.backward))
            for v in found.visits
        ]
        return replace(found, visits=tuple(visits))


def peak_of(found: Trace, units: list[Unit], sizes: list[UnitNumbers], window: int, transfer: int) -> dict[str, int]:
    """Return the bytes at the fullest moment of a step that the run's own schedule takes through these visits."""
    transfer = min(transfer, window)
    nbytes = tuple(size.up_nbytes for size in sizes)
    trained = tuple(unit.index for unit in units if unit.trainable)
    visited = tuple((visit.unit, visit.in_use) for visit in found.visits)
    resident = _resident_nbytes(nbytes, trained, visited, window, transfer)
    visits = found.visits * PASSES
    at = max(range(len(visits)), key=lambda place: resident[place] + visits[place].peak)
    visit = visits[at]
    beside = visit.peak - visit.gradients
    kept = min(visit.before, beside)
    return {
        WINDOW: resident[at],
        ROOT: sum(size.up_nbytes for size in sizes if size.resident),
        "batch": found.batch,
        "buffers": found.buffers,
        KEPT: kept,
        WORKING: beside - kept,
        GRADIENTS: visit.gradients,
    }


@functools.lru_cache(maxsize=512)
def _resident_nbytes(
    nbytes: tuple[int, ...],
    trained: tuple[int, ...],
    visits: tuple[tuple[int | None, tuple[int, ...]], ...],
    window: int,
    transfer: int,
) -> list[int]:
    """Return the bytes of streamed weights on the device in each visit of the passes."""
    schedule, found = Schedule(nbytes, window, transfer), []
    order = [unit for unit, _ in visits if unit is not None]
    for number in range(PASSES):
        schedule.invalidate(trained)
        schedule.begin(order if number else ())
        for unit, in_use in visits:
            if unit is not None:
                schedule.visit(unit, in_use)
            found.append(schedule.resident_nbytes)
    return found


def mapped_in(tree: Any, function: Callable[[Tensor], Any]) -> Any:
    """Apply a function to the tensors in a batch."""
    if isinstance(tree, list | tuple | dict | Tensor) and type(tree) in (list, tuple, dict, Tensor):
        return mapped(Tensor, function, tree)
    if hasattr(tree, "items"):
        return type(tree)({name: mapped_in(value, function) for name, value in tree.items()})
    if hasattr(tree, "_fields"):
        return type(tree)(*(mapped_in(value, function) for value in tree))
    if hasattr(tree, "__dataclass_fields__"):
        made = copy.copy(tree)
        for name, value in vars(tree).items():
            object.__setattr__(made, name, mapped_in(value, function))
        return made
    return tree


def _rows(batch: Any) -> int:
    sizes = Counter(tensor.shape[0] for tensor in tensors_in(batch) if tensor.dim())
    return sizes.most_common(1)[0][0] if sizes else 1


def _in_a_line(error: Exception) -> str:
    """Describe an error with the last line of the user's code that led to it: one outside of installed packages."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not Path(frame.filename).is_relative_to(PACKAGE)]
    places = [f"{frame.filename}:{frame.lineno}" for frame in own if "site-packages" not in frame.filename]
    return ": ".join([*places[-1:], type(error).__name__, *str(error).splitlines()[:1]])


def _convert(module: nn.Module, dtype: torch.dtype, masters: bool) -> None:
    """Convert a module as the precision plugin does; with master weights, parameters are FP32 on the host."""
    for child in module.modules():
        for name, buffer in child._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                child._buffers[name] = buffer.to(dtype)
    for parameter in module.parameters():
        if is_dtensor(parameter):
            torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad))  # type: ignore[no-untyped-call]
        elif parameter.is_floating_point() and not consists_of_tensors(parameter):
            parameter.data = parameter.data.to(torch.float32 if masters else dtype)


def _copied(module: nn.Module, tensors: FakeTensors) -> nn.Module:
    """Copy a module to tensors of this kind; the module itself is not changed."""
    memo: dict[int, Any] = {}
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
            f"{type(module).__name__} cannot be copied ({type(error).__name__}: {error}); pass a function without "
            "arguments that makes it"
        ) from error


def _check_cache(config: Any) -> None:
    """Raise an error for layers that keep more than keys and values, which alone can wait on the host."""
    from transformers import DynamicCache

    layers = DynamicCache(config=config).layers
    if any(hasattr(layer, name) for layer in layers for name in KEEPS_MORE):
        raise OptionError(argument="cache", found="host", allowed="'device': the layers keep more than keys and values")
