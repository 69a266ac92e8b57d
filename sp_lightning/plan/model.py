"""A model to plan for: made without weights, cut into units by the code that runs, and measured by a trace of a step.

What a trace cannot do is a note: a training_step that needs its Trainer is replaced by ``forward``.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..compat.tensors import IS_PARAMETER, consists_of_tensors, flattened, is_dtensor
from ..core.unit_numbers import UnitNumbers, aligned
from ..errors import OptionError, SuperpipelineError, UnsupportedError
from ..memory.partition import Unit, partition
from ..options import Options
from .fakes import FakeTensors
from .trace import Trace, tensors_in, trace

HALF = {"bf16": torch.bfloat16, "16": torch.float16}
KEEPS_MORE = "update_conv_state", "update_indexer"  # of a cache's layers that cannot wait on the host
PACKAGE = Path(__file__).parents[1]


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
        name: str | None = None,
    ) -> None:
        if batch is None:
            raise OptionError(argument="batch", found=None, allowed="a batch as the module takes it, or a function")
        self.notes: list[str] = []
        self.answers = answers
        self.half = HALF.get(precision.split("-")[0])  # the half-precision type in which the run computes, if it does
        self.mixed = precision.endswith("mixed")  # by autocast
        self.masters = masters and self.half is not None  # weights are FP32 on the host, and half precision here
        self._dtype = torch.float64 if precision == "64-true" else None if self.mixed else self.half
        self._source, self._loss = module, loss
        self._batch = batch() if callable(batch) else batch
        sizes = Counter(tensor.shape[0] for tensor in tensors_in(self._batch) if tensor.dim())
        self.rows = sizes.most_common(1)[0][0] if sizes else 1
        self._forward = False  # forward replaces training_step
        self.tensors = FakeTensors(target, self.half if self.mixed else None)
        self._traces: dict[Any, Trace] = {}
        self.module = self._begin()
        self.units = functools.cache(self._units)
        self.name = name or str(getattr(module, "__name__", type(module).__name__))

    def note(self, text: str) -> None:
        """Add a note to the plan, once."""
        if text not in self.notes:
            self.notes.append(text)

    # ---- making

    def _begin(self) -> nn.Module:
        """Make the model, and put tensors for a trace in the place of its own."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = self._made()
        if not any(True for _ in module.parameters()):
            raise OptionError(argument="module", found=type(module).__name__, allowed="a module with parameters")
        if any(is_dtensor(parameter) for parameter in module.parameters()):
            raise UnsupportedError(
                "layers that are cut across devices cannot be planned yet: plan the whole model, of which each device "
                "holds its share of the window and of the gradients"
            )
        self._replace_tensors(module)
        made: nn.Module = module.eval().requires_grad_(False) if self.answers else module.train()
        return made

    def _made(self) -> nn.Module:
        """Make the module with tensors for a trace or, if it changes its own in ways that these refuse, on meta."""
        if isinstance(self._source, nn.Module):
            tensors = [*self._source.parameters(), *self._source.buffers()]
            kept = {id(tensor): tensor for tensor in tensors}
            copied: nn.Module = _tried(functools.partial(copy.deepcopy, self._source, kept))
            return copied
        self.tensors.building = True
        try:
            with self.tensors:
                module = self._source()
        except SuperpipelineError:
            raise
        except Exception:
            with torch.device("meta"):
                module = _tried(self._source)
        finally:
            self.tensors.building = False
        if not isinstance(module, nn.Module):
            raise OptionError(argument="module", found=module, allowed="a module, or a function that makes one")
        return module

    def _replace_tensors(self, module: nn.Module) -> None:
        """Put tensors like them in the place of a module's parameters and buffers, also in its optimizers."""
        made: dict[int, tuple[Tensor, Tensor]] = {}  # with those that they replace, whose ids stay theirs
        for child in list(module.modules()):
            for name, tensor in (*child._parameters.items(), *child._buffers.items()):
                if tensor is not None:
                    _, new = made.setdefault(id(tensor), (tensor, self._like(tensor)))
                    setattr(child, name, new)
        own = {} if isinstance(self._source, nn.Module) else vars(module)  # what was put there with the module
        for optimizer in optimizers_in(own.get("configure_optimizers", tuple)()):
            for group in optimizer.param_groups:
                group["params"] = [made.get(id(p), (p, p))[1] for p in group["params"]]

    def _like(self, tensor: Tensor) -> Tensor:
        is_parameter, dtype = isinstance(tensor, nn.Parameter), None
        if consists_of_tensors(tensor):
            form, parts = flattened(tensor)
            made: Tensor = form.whole((self.tensors.adopt(part) for _, part in parts), torch.device("cpu"))
            vars(made)[IS_PARAMETER] = True
            return made.requires_grad_(tensor.requires_grad)
        if self._dtype is not None and tensor.is_floating_point():
            dtype = torch.float32 if self.masters and is_parameter else self._dtype
        like = self.tensors.adopt(tensor.detach(), dtype)
        return nn.Parameter(like, tensor.requires_grad) if is_parameter else like

    def _units(self, spec: Any) -> list[Unit]:
        return partition(self.module, list(spec) if isinstance(spec, tuple) else spec)

    def units_of(self, options: Options) -> list[Unit]:
        """Cut the module as the options say."""
        return self.units(options.units)

    # ---- traces

    def trace(self, options: Options, scale: int = 1, tokens: int = 0) -> Trace:
        """Return the trace of a step of ``scale`` times the rows, or of the last of an answer's ``tokens``."""
        key = str(options.units), options.may_cast, scale, tokens
        if key not in self._traces:
            self._traces[key] = self._found(options, scale, tokens)
        return self._traces[key]

    def travels_as(self, parameter: Tensor, options: Options) -> torch.dtype:
        """Return the type of a weight on the device, after a run's first step."""
        casts = self.mixed and options.may_cast and id(parameter) in self.trace(options).narrow
        if casts or (self.masters and parameter.dtype is torch.float32):
            assert self.half is not None
            return self.half
        return parameter.dtype

    def _found(self, options: Options, scale: int, tokens: int) -> Trace:
        """Trace a step in the plainest way that works; the first trace decides the way of all others."""
        while True:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # nothing is trained here
                    return self._traced(options, scale, tokens)
            except SuperpipelineError:
                raise
            except Exception as error:
                self._run_forward(error)

    def _run_forward(self, error: Exception) -> None:
        """Replace a training_step that cannot run here by forward."""
        if self._forward or self._traces or self._loss or self.answers or not hasattr(self.module, "training_step"):
            raise UnsupportedError(
                f"{self.name} does not run without a Trainer and without data: {_in_a_line(error)}; pass another "
                "batch (--data), or loss=, a function that takes the module and a batch and returns the loss"
            ) from error
        self._forward = True
        self.note(
            f"training_step was not measured, because it needs more than a batch ({_in_a_line(error)}): "
            "forward, and backward from all its outputs, were measured instead"
        )

    def _traced(self, options: Options, scale: int, tokens: int) -> Trace:
        with self.tensors, self._in_half():
            batch = with_tensors(self._batch, functools.partial(self._given, scale=scale, tokens=tokens))
            run, past = functools.partial(self._step, batch), None
            if self.answers and tokens > 1:
                past = self._prompt(batch, None).past_key_values
                batch = {"input_ids": torch.ones(self.rows * scale, 1, dtype=torch.long)}
            if self.answers:
                run = functools.partial(self._prompt, batch, past)
            units, trains = self.units_of(options), not self.answers
            may_cast = self.mixed and options.may_cast
            return trace(self.module, units, batch, run, self.tensors, trains=trains, may_cast=may_cast)

    def _given(self, tensor: Tensor, scale: int, tokens: int) -> Tensor:
        """Return a tensor of the batch without data, with ``scale`` times the rows, and longer prompts."""
        if scale > 1 and tensor.dim() and tensor.shape[0] and tensor.shape[0] % self.rows == 0:
            tensor = torch.cat([tensor] * scale)
        if tokens > 1 and tensor.dim() > 1:
            tensor = torch.cat([tensor, tensor[:, :1].expand(-1, tokens - 1)], 1)
        return self.tensors.adopt(tensor, self._dtype if tensor.is_floating_point() else None)

    @contextlib.contextmanager
    def _in_half(self) -> Iterator[None]:
        """Give weights that are FP32 on the host alone the type that they have on the device, in this context."""
        changed = [(p, p.data) for p in self.module.parameters() if self.masters and p.dtype is torch.float32]
        for parameter, data in changed:
            parameter.data = torch.empty_strided(data.shape, data.stride(), dtype=self.half)
        try:
            yield
        finally:
            for parameter, data in changed:
                parameter.data = data

    def _prompt(self, batch: Any, past: Any) -> Any:
        """Run the decoder on a prompt, or on its next token."""
        assert self.answers is not None
        model = next((m for m in self.module.modules() if hasattr(m, "generate")), None)
        if model is None:
            allowed = f"left out: {self.name} is no decoder of transformers that continues texts"
            raise OptionError(argument="answer", found=self.answers.tokens, allowed=allowed)
        if self.answers.cache == "host":
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
        found = []
        for unit in self.units_of(options):
            types = [p.dtype if first and not self.masters else self.travels_as(p, options) for _, p in unit.params]
            each = [(p, aligned(p.numel() * t.itemsize), t) for (_, p), t in zip(unit.params, types, strict=True)]
            trained = [one for one in each if one[0].requires_grad]
            found.append(
                UnitNumbers(
                    unit.name,
                    sum(nbytes for _, nbytes, _ in each),
                    sum(nbytes for _, nbytes, _ in trained),
                    sum(p.numel() for p, _, _ in trained),
                    resident=unit.resident,
                    cast=sum(p.numel() for p, _, dtype in trained if dtype is not p.dtype),
                )
            )
        return found

    def casts(self, options: Options) -> list[int]:
        """List the bytes of each unit's largest cast: a run's first step casts weights one by one on the device."""
        narrow = self.trace(options).narrow
        of_units = [[p.nbytes // 2 for _, p in unit.params if id(p) in narrow] for unit in self.units_of(options)]
        return [max(nbytes, default=0) for nbytes in of_units]


def optimizers_in(found: Any) -> Iterator[torch.optim.Optimizer]:
    """Yield the optimizers in what ``configure_optimizers`` returned."""
    if isinstance(found, torch.optim.Optimizer):
        yield found
    elif isinstance(found, dict):
        yield from optimizers_in(found.get("optimizer"))
    elif isinstance(found, list | tuple):
        for item in found:
            yield from optimizers_in(item)


def with_tensors(tree: Any, function: Callable[[Tensor], Any]) -> Any:
    """Copy a batch, with other tensors."""
    return copy.deepcopy(tree, {id(tensor): function(tensor) for tensor in tensors_in(tree)})


def _tried(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except SuperpipelineError:
        raise
    except Exception as error:
        raise UnsupportedError(
            f"the model could not be made without data, or copied: {_in_a_line(error)}; pass a function without "
            "arguments that makes it, or a module that is made"
        ) from error


def _in_a_line(error: Exception) -> str:
    """Describe an error with the last line of the user's code that led to it: one outside of installed packages."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not Path(frame.filename).is_relative_to(PACKAGE)]
    places = [f"{frame.filename}:{frame.lineno}" for frame in own if "site-packages" not in frame.filename]
    return ": ".join([*places[-1:], type(error).__name__, *str(error).splitlines()[:1]])


def _check_cache(config: Any) -> None:
    """Raise an error for layers that keep more than keys and values, which alone can wait on the host."""
    from transformers import DynamicCache

    layers = DynamicCache(config=config).layers
    if any(hasattr(layer, name) for layer in layers for name in KEEPS_MORE):
        raise OptionError(argument="cache", found="host", allowed="'device': the layers keep more than keys and values")
