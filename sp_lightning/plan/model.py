"""Models to plan for: made without weights, cut into units by the code that runs, and traced for a step.

Some have a name in plans: real modules of transformers of their published sizes.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..compat.tensors import IS_PARAMETER, consists_of_tensors, flattened, is_dtensor
from ..compat.torch import tree_leaves
from ..errors import OptionError, SuperpipelineError, UnsupportedError, users_line
from ..host.device import aligned
from ..options import check_choice
from ..stream.partition import FoundUnit, UnitSpec, partition
from ..stream.preparation import casts_of, choose_residents, sizes, slots
from ..stream.recompute import tensors_in
from .fakes import FakeTensors
from .trace import Trace, Visit

HALF = {"bf16": torch.bfloat16, "16": torch.float16}
ALIKE = 3  # blocks that run in the place of more that are alike


class PlannedModel:
    """A model that is measured without a device."""

    def __init__(
        self,
        source: nn.Module | Callable[..., nn.Module],
        batch: Any,
        *,
        precision: str,
        masters: bool,
        units: UnitSpec,
        resident: Any,
        wire_dtype: str,
        loss: Callable[[nn.Module, Any], Any] | None,
        name: str | None,
        optimizer: Any,
    ) -> None:
        if batch is None:
            raise OptionError(argument="batch", found=None, allowed="a batch as the module takes it, or a function")
        self.name = name or str(getattr(source, "__name__", type(source).__name__))
        self._mixed = precision.endswith("mixed")  # half precision is by autocast
        self._half = HALF.get(precision.split("-")[0])  # the half-precision type in which the run computes, if it does
        self._dtype = torch.float64 if precision == "64-true" else None if self._mixed else self._half
        self.tensors = FakeTensors(self._half if self._mixed else None)
        self._loss, self._batch = loss, batch() if callable(batch) else batch
        self.rows, named = rows_of(self._batch), self._batch if hasattr(self._batch, "keys") else {}
        self.tokens = named["input_ids"].shape[1] if "input_ids" in named else None  # in a row
        self.module = self._made(source)
        self.parameters = sum(parameter.numel() for parameter in self.module.parameters())
        self.trains = any(p.requires_grad for p in self.module.parameters())
        self.module.train(self.trains)
        self.trace = functools.cache(self._trace)
        with self.tensors.running(), refusing("the optimizer takes no step without data", "optimizer='AdamW'"):
            self.state_share = _state_share(optimizer, self.module) if self.trains else 0.0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings that tensors without data have no address
            self._cut(units, resident, wire_dtype, masters)

    # ---- making

    def _made(self, source: nn.Module | Callable[..., nn.Module]) -> nn.Module:
        """Copy the source module, or call the function that makes it, and replace its tensors by ones without data."""
        with refusing(
            "the model could not be made without data, or copied",
            "a function without arguments that makes it, or a module that is made",
        ):
            if isinstance(source, nn.Module):
                module = copy.deepcopy(source, {id(kept): kept for kept in (*source.parameters(), *source.buffers())})
            else:
                module = self._built(source)
        if not isinstance(module, nn.Module) or not any(True for _ in module.parameters()):
            raise OptionError(
                argument="module",
                found=type(module).__name__,
                allowed="a module with parameters, or a function that makes one",
            )
        if any(is_dtensor(parameter) for parameter in module.parameters()):
            raise UnsupportedError(
                "layers that are cut across devices cannot be planned yet: plan the whole model, of which each device "
                "holds its share of the window and of the gradients"
            )
        self._replace_tensors(module)
        return module

    def _built(self, source: Callable[..., nn.Module]) -> Any:
        """Call the function that makes the module, on tensors without data; if that fails, on the meta device."""
        with contextlib.suppress(Exception), self.tensors.running():
            return source()
        with torch.device("meta"):
            return source()

    def _replace_tensors(self, module: nn.Module) -> None:
        """Replace a module's parameters and buffers by tensors without data; shared ones stay shared."""
        made: dict[int, tuple[Tensor, Tensor]] = {}  # with the replaced tensors, so that no id is used twice
        for child in list(module.modules()):
            for name, tensor in (*child._parameters.items(), *child._buffers.items()):
                if tensor is not None:
                    _, new = made.setdefault(id(tensor), (tensor, self._like(tensor)))
                    setattr(child, name, new)

    def _like(self, tensor: Tensor) -> Tensor:
        """Return a tensor or parameter like this one, in the type in which the run computes.

        It is without data, or has values if it is small and of integers. One that consists of several keeps their
        types.
        """
        if consists_of_tensors(tensor):
            form, parts = flattened(tensor)
            made: Tensor = form.whole((self.tensors.adopt(part) for _, part in parts), torch.device("cpu"))
            vars(made)[IS_PARAMETER] = True
            return made.requires_grad_(tensor.requires_grad)
        like = self.tensors.adopt(tensor, self._dtype if tensor.is_floating_point() else None)
        is_new = like is not tensor and isinstance(tensor, nn.Parameter)
        return nn.Parameter(like, tensor.requires_grad) if is_new else like

    def _cut(self, classes: UnitSpec, resident: Any, wire_dtype: str, masters: bool) -> None:
        """Cut the module into units, and make weights narrow that travel in half precision.

        Units that ``resident`` chooses count as the resident rest.
        """
        cut = partition(self.module, list(classes) if isinstance(classes, tuple) else classes)
        first = choose_residents(cut, slots(self.module), 0 if resident == "auto" else resident)
        self.units = [replace(unit, resident=True) if unit in first else unit for unit in cut]
        casts = casts_of(self.module, self._half if self._mixed and wire_dtype == "auto" else None)
        narrow = [p for unit in self.units if not unit.resident for _, p in unit.params if id(p) in casts]
        for parameter in narrow:
            parameter.data = self.tensors.adopt(parameter.detach(), self._half)
        wide = (p for p in self.module.parameters() if p.is_floating_point()) if masters else narrow
        self.wide = frozenset(map(id, wide))  # ids of weights that are FP32 on the host alone
        cast = [sum(p.numel() for _, p in unit.params if p.requires_grad and id(p) in self.wide) for unit in self.units]
        self.sizes = [
            replace(size, cast=count)
            for size, count in zip(sizes(self.units, lambda p: p.dtype, True), cast, strict=True)
        ]

    # ---- a trace

    @functools.cached_property
    def _stack(self) -> tuple[nn.ModuleList, list[int]]:
        """The longest list of like blocks, and their units; raise ValueError if none has more than three."""
        return _longest_stack(self.module, self.units)

    def _trace(self, activations: str, rows: int) -> Trace:
        """Trace a step with a policy on a batch of so many rows; of many like blocks three run, if possible."""
        with contextlib.suppress(Exception), _fewer_blocks(*self._stack) as (ran, every):
            found = self._traced(activations, rows)
            found.visits = _repeated(found.visits, ran, every)
            return found
        with refusing(
            f"{self.name} does not run without a Trainer and without data",
            "another batch, or loss=, a function that takes the module and a batch and returns the loss",
        ):
            return self._traced(activations, rows)

    def _traced(self, activations: str, rows: int) -> Trace:
        """Run a step on a batch of so many rows without data, and return its trace."""
        batch = with_tensors(with_rows(self._batch, self.rows, rows), self._like)
        found = Trace(self.tensors, self.units, self.wide, activations)
        with self.tensors.running(found.observe), torch.set_grad_enabled(self.trains):
            found.run(self.module, batch, functools.partial(self._step, batch))
        return found

    def _step(self, batch: Any) -> Any:
        """Run the user's loss, training_step or forward on a batch, and return its output."""
        if self._loss is not None:
            return self._loss(self.module, batch)
        step = getattr(self.module, "training_step", None)
        if step is not None and self.trains:
            return step(*(batch, 0)[: len(inspect.signature(step).parameters)])
        if hasattr(batch, "keys"):
            return self.module(**batch)
        return self.module(*batch) if isinstance(batch, list | tuple) else self.module(batch)

    def host_nbytes(self, parameter: Tensor) -> int:
        """Return the bytes of a weight in host memory, where it may be FP32 that is not so on the device."""
        return aligned(4 * parameter.numel() if id(parameter) in self.wide else parameter.nbytes)


@contextlib.contextmanager
def refusing(what: str, instead: str) -> Iterator[None]:
    """Turn errors of the user's code in this context into an UnsupportedError that says what to pass ``instead``."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # nothing is trained here
            yield
    except SuperpipelineError:
        raise
    except Exception as error:
        said = f"{users_line(error)}{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise UnsupportedError(f"{what}: {said}; pass {instead}") from error


def rows_of(batch: Any) -> int:
    """Return the number of rows of a batch: the most frequent first dimension of its tensors."""
    sizes = Counter(tensor.shape[0] for tensor in tensors_in(batch) if tensor.dim())
    return sizes.most_common(1)[0][0] if sizes else 1


def with_rows(batch: Any, rows: int, wanted: int) -> Any:
    """Return a batch with ``wanted`` rows, made of its own, repeated or cut off."""

    def repeated(tensor: Tensor) -> Tensor:
        return torch.cat([tensor] * -(-wanted // rows))[:wanted] if tensor.dim() and len(tensor) == rows else tensor

    return batch if rows == wanted else with_tensors(batch, repeated)


def with_tensors(tree: Any, function: Callable[[Tensor], Any]) -> Any:
    """Copy a batch, and replace each of its tensors by ``function`` of it."""
    return copy.deepcopy(tree, {id(tensor): function(tensor) for tensor in tensors_in(tree)})


# ---- the optimizer's state


def _state_share(optimizer: Any, module: nn.Module) -> float:
    """Return an optimizer's bytes of state for each byte of trained weights, by stepping one weight of each shape.

    Args:
        optimizer: A name, a class, a function of parameters, or None for the module's own, or else AdamW.
        module: The module, of which something trains.
    """
    trained = [p for p in module.parameters() if p.requires_grad]
    if optimizer is None and hasattr(module, "configure_optimizers"):
        made = module.configure_optimizers()  # type: ignore[operator]
    else:
        made = (optimizer if callable(optimizer) else _optimizer_named(optimizer or "AdamW"))(trained)
    optimizers = [one for one in tree_leaves(made) if isinstance(one, Optimizer)]
    return sum(map(_state_nbytes, optimizers)) / sum(p.nbytes for p in trained)


def _optimizer_named(name: str) -> Any:
    """Return the class of ``torch.optim`` with this name, in upper or lower case."""
    kinds = {key.lower(): kind for key, kind in vars(torch.optim).items() if isinstance(kind, type)}
    if name.lower() not in kinds:
        raise OptionError(
            argument="optimizer",
            found=name,
            allowed=f"one of {', '.join(kind.__name__ for kind in kinds.values())}; or a class or a function of "
            "parameters",
        )
    return kinds[name.lower()]


def _state_nbytes(optimizer: Optimizer) -> int:
    """Return the bytes of an optimizer's state, by stepping one weight of each shape. Replaces its parameters."""
    stepped: list[tuple[nn.Parameter, int]] = []
    for group in optimizer.param_groups:
        alike = Counter((p.shape, p.dtype) for p in group["params"] if p.requires_grad)
        group["params"] = [nn.Parameter(torch.empty(shape, dtype=dtype)) for shape, dtype in alike]
        stepped += zip(group["params"], alike.values(), strict=True)
    for weight, _ in stepped:
        weight.grad = torch.empty_like(weight)
    type(optimizer).step(optimizer)
    states = [(value, count) for weight, count in stepped for value in optimizer.state[weight].values()]
    return sum(count * value.nbytes for value, count in states if isinstance(value, Tensor) and value.dim())


# ---- of many blocks that are alike three run; the middle one's visits stand for those of all others


def _longest_stack(module: nn.Module, units: Sequence[FoundUnit]) -> tuple[nn.ModuleList, list[int]]:
    """Return the longest list of like blocks, and the indices of their units.

    Raises ValueError if no list has more than three like blocks.
    """
    places = {id(inner): unit.index for unit in units if len(unit.modules) == 1 for _, inner in unit.modules}
    lists = [child for child in module.modules() if isinstance(child, nn.ModuleList) and len(child) > ALIKE]
    streamed = [one for one in lists if all(id(block) in places for block in one)]
    stack = max((one for one in streamed if len(set(map(_form, one))) == 1), key=len)
    return stack, [places[id(block)] for block in stack]


@contextlib.contextmanager
def _fewer_blocks(stack: nn.ModuleList, every: list[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Cut a list of like blocks to three in this context; yield the unit indices of the three, and of all."""
    rest = list(stack[ALIKE:])
    del stack[ALIKE:]
    try:
        yield every[:ALIKE], every
    finally:
        stack.extend(rest)


def _form(block: nn.Module) -> Any:
    """Return a key that like blocks have in common: their modules as text, and their weights' shapes and types."""
    return str(block), *((p.shape, p.dtype, p.requires_grad) for p in block.parameters())


def _repeated(visits: list[Visit], ran: list[int], every: list[int]) -> list[Visit]:
    """Repeat the middle block's visits for the blocks that were left out; raise LookupError if they could differ."""
    first, middle, last = ran
    order = [visit.unit for visit in visits]
    between = [{order[place - 1], *order[place + 1 : place + 2]} for place, unit in enumerate(order) if unit == middle]
    grown = sum(visit.grown for visit in visits if visit.unit == middle)  # a cache, which goes with the output
    if grown or not between or any(neighbours != {first, last} for neighbours in between):
        raise LookupError
    found = []
    for visit in visits:
        around = tuple(every[-1] if index == last else index for index in visit.in_use)
        alike = every[1:-1] if visit.unit == middle else [every[-1] if visit.unit == last else visit.unit]
        found += [replace(visit, unit=unit, in_use=around) for unit in (reversed(alike) if visit.backward else alike)]
    return found


# ---- models that have a name

TOKENS = 2048  # tokens in a row, by default
IMAGE = 224  # height and width of an image, if the configuration has none
BY_PYTHON = "sp_lightning.plan(make_model, batch) plans others, by Python"

# A configuration's class in transformers, without "Config", the model's class, and the sizes of the configuration.
Listed = tuple[str, str, dict[str, Any]]


def _decoder(kind: str, hidden: int, layers: int, heads: int, keys: int, mlp: int, words: int, **more: Any) -> Listed:
    """Return a decoder-only language model of these sizes, as transformers' configuration names them."""
    sizes = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "intermediate_size": mlp,
        "vocab_size": words,
        "max_position_embeddings": 131072,
    }
    return kind, f"{kind}ForCausalLM", {"use_cache": False, "tie_word_embeddings": False, **sizes, **more}


# Widths and depths of the models' published config.json files.
LISTED = {
    "llama-1b": _decoder("Llama", 2048, 16, 32, 8, 8192, 128256, tie_word_embeddings=True),
    "llama-3b": _decoder("Llama", 3072, 28, 24, 8, 8192, 128256, tie_word_embeddings=True),
    "llama-8b": _decoder("Llama", 4096, 32, 32, 8, 14336, 128256),
    "llama-70b": _decoder("Llama", 8192, 80, 64, 8, 28672, 128256),
    "qwen3-14b": _decoder("Qwen3", 5120, 40, 40, 8, 17408, 151936, head_dim=128),
    "qwen3-32b": _decoder("Qwen3", 5120, 64, 64, 8, 25600, 151936, head_dim=128),
    "mixtral-8x7b": _decoder("Mixtral", 4096, 32, 32, 8, 14336, 32000),
    "vit-h": (
        "ViT",
        "ViTForImageClassification",
        {
            "hidden_size": 1280,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "intermediate_size": 5120,
            "patch_size": 14,
            "num_labels": 1000,
        },
    ),
}


def kind_of(name: str) -> tuple[Any, Any]:
    """Return a listed model's class in transformers, and its configuration."""
    check_choice("module", name, tuple(LISTED))
    kind, model, sizes = LISTED[name]
    module = importlib.import_module(f"transformers.models.{kind.lower()}.modeling_{kind.lower()}")
    return getattr(module, model), getattr(module, f"{kind}Config")(**sizes)


def made(kind: Any, config: Any) -> Any:
    """Make a model of transformers, without initial values."""
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model = kind(config)
    model.tie_weights()  # which is skipped with the initial values
    return model


def made_with_adapters(kind: Any, config: Any, rank: int) -> Any:
    """Make a model of transformers that is frozen, with low-rank adapters beside its linear layers."""
    from peft import LoraConfig, get_peft_model

    with torch.device("meta"):
        adapters = LoraConfig(r=rank, target_modules="all-linear")
        return get_peft_model(made(kind, config), adapters, low_cpu_mem_usage=True)


def batch_of(kind: Any, config: Any, rows: int, tokens: int | None = None) -> dict[str, torch.Tensor]:
    """Make a batch for a model: token ids, with labels for a language model, or images."""
    if kind.main_input_name == "pixel_values":
        if tokens is not None:
            raise OptionError(argument="seq", found=tokens, allowed="left out for a model that takes images")
        size = getattr(config, "image_size", IMAGE)
        height, width = (size, size) if isinstance(size, int) else size
        return {"pixel_values": torch.zeros(rows, getattr(config, "num_channels", 3), height, width)}
    if kind.main_input_name != "input_ids":
        raise OptionError(argument="model", found=kind.__name__, allowed=f"a model of texts or images ({BY_PYTHON})")
    texts = torch.ones(rows, tokens or TOKENS, dtype=torch.long)
    predicts = any(head in kind.__name__ for head in ("LM", "Generation"))
    return {"input_ids": texts} | ({"labels": texts} if predicts else {})
