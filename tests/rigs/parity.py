"""The only comparer: trains a module under two strategies and names the first difference, in time order.

`record` runs one real Trainer and keeps what the run leaves, `compare` sets two records side by side, `check` does both
for a case of the zoo, plain Lightning first and the streaming strategy after it: never interleaved, which would hide
races. `pairwise` covers the pairs of a product of settings with few rows, and `product` is a test's product of which
the default run takes that cover.

How a run is observed without changing it:

1. Nothing is a callback or an override in the module, or comes between backward and the step. A strategy may keep to
   a slower order when user code could look at a parameter or a gradient, and that order is not the one to test. Only
   `see="backward"` adds a callback, which asks for exactly that order.
2. Values are cloned where they are, in the order of the current stream, and go to the CPU after the fit. A copy to the
   host during the fit would make the host wait, and stand in for a wait that the strategy forgot.
3. Gradients and parameters of a batch are read as late as they live: before the next backward or `zero_grad`. By then
   every promise about them is due, and with accumulation each micro-batch is still seen by itself.
4. The device's generator is read after the fit only: reading it waits for the device.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import functools
import importlib
import itertools
import os
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple
from unittest import mock

import lightning as L
import numpy
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from torch import Tensor

import models

See = Literal["step", "backward"]
QUIET = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


class Difference(AssertionError):
    """Two runs differ; the message says first where."""


class Entry(NamedTuple):
    """One observed value: `where` in the run ("batch 2"), `what` it is ("gradient of net.head.weight")."""

    where: str
    what: str
    value: Any


@dataclasses.dataclass
class Record:
    """Everything a run leaves, in time order, on the CPU. `telemetry` is the strategy's own and is not compared."""

    entries: list[Entry]
    telemetry: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.entries = [e._replace(value=e.value.cpu()) if isinstance(e.value, Tensor) else e for e in self.entries]

    def __getitem__(self, key: tuple[str, str]) -> Any:
        return next(entry.value for entry in self.entries if (entry.where, entry.what) == key)


# --- Running


def record(
    make_module: Callable[[], L.LightningModule],
    strategy: Strategy,
    *,
    accelerator: str = "cpu",
    precision: str = "32-true",
    accumulate: int = 1,
    clip: tuple[Literal["norm", "value"], float] | None = None,
    batches: int = 4,
    epochs: int = 1,
    callbacks: Sequence[L.Callback] = (),
    see: See = "step",
    make_loader: Callable[[int], Iterable[Any]] | None = None,
    **trainer_options: Any,
) -> Record:
    """Fits, validates and predicts with a real Trainer and keeps what the run leaves; no file is left behind.

    Args:
        make_module: Builds the module; the seed is set before it, and again before the fit.
        strategy: A strategy of its own for this run, with its device.
        clip: Algorithm and value of gradient clipping.
        batches: Training batches per epoch. Validation and prediction run over two each.
        see: "backward" keeps gradients after each backward too, as a callback that overrides `on_after_backward` sees
            them. "step" keeps them only as the optimizer left them, and adds no callback to the run.
        make_loader: Number of batches -> data; the module's own case if None.
        trainer_options: Arguments of the Trainer, stronger than those given here.
    """
    # Both the seed and what deterministic kernels need travel in environment variables.
    with tempfile.TemporaryDirectory() as root, mock.patch.dict(os.environ), deterministic_kernels(accelerator):
        L.seed_everything(0, verbose=False)
        module = make_module()
        make_loader = make_loader or functools.partial(models.loader, module.case)
        observer = Observer(module)
        options = {
            "precision": precision,
            "max_epochs": epochs,
            "accumulate_grad_batches": accumulate,
            "gradient_clip_algorithm": clip and clip[0],
            "gradient_clip_val": clip and clip[1],
            "callbacks": [*callbacks, *([GradientsAfterBackward(observer)] if see == "backward" else [])],
            "default_root_dir": root,
        }
        trainer = make_trainer(strategy, accelerator, **(options | trainer_options))
        L.seed_everything(1, verbose=False)
        with observer.watching(trainer):
            trainer.fit(module, make_loader(batches), make_loader(2))
        observer.add_result(trainer)
        observer.add_predictions(trainer.predict(module, make_loader(2)))
        return observer.record()


def make_trainer(strategy: Any, accelerator: str = "cpu", **options: Any) -> L.Trainer:
    """Make a Trainer of one device that writes and shows nothing, unless these options say otherwise."""
    if accelerator == "simgpu":
        importlib.import_module("simgpu.lightning")
    options = {"devices": 1, **QUIET, **options}
    return L.Trainer(strategy=strategy, accelerator=accelerator, **options)


@contextlib.contextmanager
def deterministic_kernels(accelerator: str) -> Iterator[None]:
    """On a GPU, kernels that sum with atomics give other bits from run to run; the CPU's and simgpu's never do."""
    if accelerator != "cuda":
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


class Moment:
    """What was seen of one batch, or of one other part of a run."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.values: list[tuple[str, Any]] = []
        self.readings = 0

    def add(self, what: str, value: Any) -> None:
        self.values += [(what + path, keep(leaf)) for path, leaf in leaves(value)]


class Observer:
    """Sees a fit from beside it, by standing in front of a few functions of torch and of the strategy."""

    def __init__(self, module: L.LightningModule) -> None:
        self.module = module
        self.moments: list[Moment] = []
        self.telemetry: dict[str, Any] = {}
        self.batch: Moment | None = None  # the batch in progress
        self.with_gradients: Moment | None = None  # whose gradients nobody has read yet
        self.with_parameters: list[Moment] = []  # batches whose parameters nobody has read yet
        self.counts: collections.Counter[str] = collections.Counter()

    def begin(self, where: str) -> Moment:
        moment = Moment(where)
        self.moments.append(moment)
        return moment

    def count(self, what: str) -> int:
        self.counts[what] += 1
        return self.counts[what] - 1

    @contextlib.contextmanager
    def watching(self, trainer: L.Trainer) -> Iterator[None]:
        strategy = trainer.strategy
        seen = {
            (strategy, "training_step"): functools.partial(self.see_training_step, trainer),
            (strategy, "validation_step"): self.see_validation_step,
            (strategy, "on_validation_end"): functools.partial(self.see_validation_end, trainer),
            (strategy, "on_train_end"): functools.partial(self.see_train_end, strategy),
            (torch.autograd, "backward"): self.see_backward,
            (torch.autograd, "grad"): self.see_backward,
            (type(strategy), "backward"): self.see_change,  # in front of the object's it would count as an override
            (torch.optim.Optimizer, "zero_grad"): self.see_change,
            (torch.nn.Module, "zero_grad"): self.see_change,
        }
        with contextlib.ExitStack() as patches:
            for (owner, name), see in seen.items():
                original = getattr(owner, name)
                patches.enter_context(mock.patch.object(owner, name, in_front_of(original, see)))
            yield

    def see_training_step(self, trainer: L.Trainer, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.finish_batch()
        where = f"batch {trainer.fit_loop.epoch_loop.total_batch_idx}"
        call = self.count(where)  # an optimizer such as LBFGS calls it several times
        self.batch = self.begin(f"{where}, call {call + 1}" if call else where)
        self.with_parameters.append(self.batch)
        output = original(*args, **kwargs)
        self.batch.add("RNG state after training_step of ", host_rng_states())
        self.batch.add("loss" if isinstance(output, Tensor) else "output", output)
        return output

    def see_backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch._C._current_graph_task_id() != -1:  # within a backward, as recomputation calls it: not a new one
            return original(*args, **kwargs)
        self.read()
        result = original(*args, **kwargs)
        self.with_gradients = self.batch
        return result

    def see_change(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.read()
        return original(*args, **kwargs)

    def see_validation_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.finish_batch()
        output = original(*args, **kwargs)
        self.begin(f"validation batch {self.count('validation batch')}").add("output", output)
        return output

    def see_validation_end(self, trainer: L.Trainer, original: Callable[..., Any]) -> Any:
        self.begin(f"validation {self.count('validation')}").add("metric ", dict(trainer.callback_metrics))
        return original()

    def see_train_end(self, strategy: Strategy, original: Callable[..., Any]) -> Any:
        result = original()
        self.finish_batch()
        self.read()
        if hasattr(strategy, "handle"):
            self.telemetry = copy.deepcopy(strategy.handle.stats())
        return result

    def finish_batch(self) -> None:
        """Buffers and generators, as the batch before left them."""
        if self.batch is not None:
            self.batch.add("buffer ", dict(self.module.named_buffers()))
            self.batch.add("RNG state at the end of ", host_rng_states())
            self.batch = None

    def read(self) -> None:
        """Gradients and parameters that are about to change, or to be forgotten."""
        if (moment := self.with_gradients) is not None:
            moment.readings += 1
            reading = f" (reading {moment.readings})" if moment.readings > 1 else ""
            self.add_gradients(moment, "gradient", reading)
            self.with_gradients = None
        for moment in self.with_parameters:
            if moment is not self.batch:
                moment.add("parameter ", dict(self.module.named_parameters()))
        self.with_parameters = [moment for moment in self.with_parameters if moment is self.batch]

    def add_gradients(self, moment: Moment, what: str, suffix: str = "") -> None:
        for name, parameter in self.module.named_parameters():
            moment.add(f"{what} of {name}{suffix}", parameter.grad)

    def add_result(self, trainer: L.Trainer) -> None:
        """What is there after the fit, when the strategy has taken itself down."""
        after = self.begin("after fit")
        after.add("parameter ", dict(self.module.named_parameters()))
        after.add("buffer ", dict(self.module.named_buffers()))
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        for index, optimizer in enumerate(trainer.optimizers):
            after.add(f"optimizer {index}: ", named_state(optimizer, names))
        after.add("precision ", trainer.precision_plugin.state_dict())
        after.add("RNG state of ", host_rng_states() | device_rng_state(trainer.strategy.root_device))

    def add_predictions(self, predictions: Any) -> None:
        for index, prediction in enumerate(predictions or ()):
            self.begin(f"prediction {index}").add("output", prediction)

    def record(self) -> Record:
        entries = [Entry(moment.where, what, value) for moment in self.moments for what, value in moment.values]
        return Record(entries, self.telemetry)


class GradientsAfterBackward(L.Callback):
    def __init__(self, observer: Observer) -> None:
        self.observer = observer

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert self.observer.batch is not None
        self.observer.add_gradients(self.observer.batch, "gradient after backward")


def in_front_of(original: Callable[..., Any], see: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return see(original, *args, **kwargs)

    return call


def keep(value: Any) -> Any:
    """A copy, made behind the back of whoever watches for aliases of weights: through one they could be written."""
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    if value.layout is torch.strided:
        value.data_ptr()  # waits for a step that still writes there
    with torch._C.DisableTorchFunctionSubclass():
        return value.detach().clone()


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Tensors and plain values of a nested value, each with its path."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    if hasattr(type(value), "__tensor_flatten__"):
        value = {name: getattr(value, name) for name in value.__tensor_flatten__()[0]}
    if not isinstance(value, dict):
        yield path, value
        return
    for key, item in value.items():
        yield from leaves(item, f"{path}.{key}" if path else str(key))


def named_state(optimizer: torch.optim.Optimizer, names: dict[Tensor, str]) -> dict[str, Any]:
    """An optimizer's state_dict by parameter name, in the order of its groups.

    The order in which state came into being is left out: it is the order in which parameters were stepped.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    contents = optimizer.state_dict()
    named: dict[str, Any] = {}
    for index, parameter in enumerate(parameters):
        for key, value in contents["state"].get(index, {}).items():
            named[f"{key} of {names[parameter]}"] = value
    known = range(len(parameters))
    named["state"] = {key: value for key, value in contents["state"].items() if key not in known}
    named["group"] = contents["param_groups"]
    return named


def host_rng_states() -> dict[str, Tensor]:
    _, keys, position, has_gauss, gauss = numpy.random.get_state()
    numpy_state = torch.tensor([*keys.tolist(), position, has_gauss, gauss], dtype=torch.float64)
    _, python_keys, python_gauss = random.getstate()
    python_state = torch.tensor([*python_keys, python_gauss or 0.0], dtype=torch.float64)
    return {"torch": torch.get_rng_state(), "python": python_state, "numpy": numpy_state}


def device_rng_state(device: torch.device) -> dict[str, Tensor]:
    return {} if device.type == "cpu" else {device.type: torch.get_device_module(device).get_rng_state()}


# --- Comparing


def compare(expected: Record, actual: Record) -> None:
    """Raises Difference with the first difference in time order.

    Tensors are compared as integers: NaN equals the same NaN, and -0.0 is not 0.0. Names, their order, shape, dtype,
    and None instead of a tensor count, too.
    """
    for ours, theirs in itertools.zip_longest(actual.entries, expected.entries):
        if ours is not None and theirs is not None and ours[:2] == theirs[:2]:
            if found := difference(theirs.value, ours.value):
                raise Difference(f"{theirs.where}: {theirs.what}: {found}")
        else:
            raise Difference(misplaced(expected, actual, theirs, ours))


def seen(where: str, value: Any, path: str = "") -> list[Entry]:
    """A nested value as it is now."""
    return [Entry(where, at, keep(leaf)) for at, leaf in leaves(value, path)]


def assert_same(expected: Any, actual: Any) -> None:
    """Raise Difference at the first difference of two nested values, wherever their tensors are."""
    compare(Record(seen("", expected)), Record(seen("", actual)))


def misplaced(expected: Record, actual: Record, theirs: Entry | None, ours: Entry | None) -> str:
    if theirs is not None and theirs[:2] not in {entry[:2] for entry in actual.entries}:
        return f"{theirs.where}: {theirs.what}: missing"
    if ours is not None and ours[:2] not in {entry[:2] for entry in expected.entries}:
        return f"{ours.where}: {ours.what}: not expected"
    wanted, found = theirs or ours, ours or theirs
    assert wanted is not None and found is not None
    return f"{wanted.where}: {wanted.what}: another order, found {found.where}: {found.what}"


def difference(expected: Any, actual: Any) -> str | None:
    """How two values differ, or None."""
    if not (isinstance(expected, Tensor) and isinstance(actual, Tensor)):
        return None if same_plain(expected, actual) else f"{described(expected)} != {described(actual)}"
    for aspect in ("dtype", "shape", "layout"):
        one, other = getattr(expected, aspect), getattr(actual, aspect)
        if one != other:
            one, other = (tuple(one), tuple(other)) if aspect == "shape" else (one, other)
            return f"{aspect} {one} != {other}"
    if expected.layout == torch.sparse_coo:
        parts = [(t._indices(), t._values()) for t in (expected, actual)]
        return difference(parts[0][0], parts[1][0]) or difference(parts[0][1], parts[1][1])
    if expected.is_complex():
        return difference(*(torch.view_as_real(tensor.resolve_conj()) for tensor in (expected, actual)))
    wrong = bits(expected) != bits(actual)
    return described_difference(expected, actual, wrong) if wrong.any() else None


def same_plain(expected: Any, actual: Any) -> bool:
    if type(expected) is not type(actual):
        return False
    if not isinstance(expected, float):
        return expected == actual
    return repr(expected) == repr(actual)  # which tells -0.0 from 0.0, and lets NaN equal NaN


def described(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def bits(tensor: Tensor) -> Tensor:
    """The elements' bit patterns, as signed integers of the same size."""
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(integer)


def described_difference(expected: Tensor, actual: Tensor, wrong: Tensor) -> str:
    index = tuple(wrong.nonzero()[0].tolist())
    shown = f"{number(expected[index])} != {number(actual[index])} ({distance(expected[index], actual[index])})"
    if expected.numel() > 1:
        shown = f"{int(wrong.sum())} of {wrong.numel()} elements differ, first at {index}: {shown}"
    return shown


def number(element: Tensor) -> str:
    """The value with all its digits."""
    if not element.is_floating_point():
        return str(element.item())
    return f"{element.item():.{17 if element.dtype == torch.float64 else 9}g}"


def distance(expected: Tensor, actual: Tensor) -> str:
    """How many representable numbers lie between the two; for what is not finite, the bits themselves."""
    one, other = int(bits(expected)), int(bits(actual))
    if not expected.is_floating_point():
        return f"off by {int(actual) - int(expected)}"
    if not (expected.isfinite() and actual.isfinite()):
        mask = 2 ** (8 * expected.element_size()) - 1
        return f"bits {one & mask:#x} != {other & mask:#x}"
    lowest = -(2 ** (8 * expected.element_size() - 1))  # the bits of -0.0: numbers below zero count down from there
    return f"ulp {abs((one if one >= 0 else lowest - one) - (other if other >= 0 else lowest - other))}"


# --- The two sides


def device_of(accelerator: str) -> torch.device:
    return torch.device("cpu") if accelerator == "cpu" else torch.device(accelerator, 0)


def plain_strategy(accelerator: str) -> Strategy:
    return SingleDeviceStrategy(device=device_of(accelerator))


def streaming_strategy(accelerator: str, **options: Any) -> Strategy:
    import sp_lightning

    return sp_lightning.SuperpipelineStrategy(**options)


def check(
    case: models.Case,
    strategy_options: dict[str, Any],
    *,
    accelerator: str = "cpu",
    optimizer: str = "adamw",
    kind: Callable[..., models.ZooModule] = models.ZooModule,
    **options: Any,
) -> dict[str, Any]:
    """Trains the case plainly, then streaming, compares the two, and returns the streaming run's telemetry.

    Args:
        strategy_options: Arguments of the SuperpipelineStrategy.
        kind: Makes each of the two runs' modules, of the case and with the optimizer's name.
        options: Further arguments of `record`.
    """

    def run(strategy: Strategy) -> Record:
        make_module = functools.partial(kind, case, optimizer=optimizer)
        return record(make_module, strategy, accelerator=accelerator, **options)

    expected = run(plain_strategy(accelerator))
    actual = run(streaming_strategy(accelerator, **strategy_options))
    compare(expected, actual)
    return actual.telemetry


# --- Choosing settings


def pairwise(**axes: Sequence[Any]) -> list[dict[str, Any]]:
    """Few rows of the product of these axes in which every pair of values of two axes occurs; always the same rows."""
    sizes = [len(values) for values in axes.values()]
    if not all(sizes):
        return []
    if len(sizes) == 1:
        return [{name: value} for name, values in axes.items() for value in values]
    # Insertion order: each row starts from the oldest pair that no row has yet.
    missing = dict.fromkeys(
        ((one, i), (other, j))
        for one, other in itertools.combinations(range(len(sizes)), 2)
        for i, j in itertools.product(range(sizes[one]), range(sizes[other]))
    )
    rows = []
    while missing:
        row = dict(next(iter(missing)))
        for axis in range(len(sizes)):
            if axis not in row:
                row[axis] = max(range(sizes[axis]), key=lambda i: pairs_with(missing, row, axis, i))
        rows.append({name: values[row[axis]] for axis, (name, values) in enumerate(axes.items())})
        for pair in itertools.combinations(sorted(row.items()), 2):
            missing.pop(pair, None)
    return rows


DEVICES = ["cpu", "simgpu"]  # as the fixture `device` takes them


def product(*daily: tuple[Any, ...], **axes: Sequence[Any]) -> Any:
    """Parametrize a test with a product of values: the default run takes these rows, or the last one; the rest is slow.

    The axis `device`, of `DEVICES`, is the fixture's.
    """
    import pytest

    rows: list[Any] = []
    every = list(itertools.product(*axes.values()))
    cover = daily or every[-1:]
    for row in every:
        on_simgpu = dict(zip(axes, row, strict=True)).get("device") == "simgpu"
        marks = [pytest.mark.simgpu] * on_simgpu + [pytest.mark.slow] * (row not in cover)
        rows.append(pytest.param(*row, marks=marks) if marks else row)
    return pytest.mark.parametrize(list(axes), rows, indirect=[name for name in axes if name == "device"])


def pairs_with(missing: dict[Any, None], row: dict[int, int], axis: int, value: int) -> int:
    """How many missing pairs this value makes with what the row has already."""
    return sum(tuple(sorted([(axis, value), item])) in missing for item in row.items())
