"""Training through a window is plain training, bit for bit, and what it moves is what the schedule says.

Each cell trains, validates and predicts plainly and then streaming, and compares all that the two runs leave
(parity.py), with the race checker on; the ledger of what moved is checked in the same run (traffic.py). The default run
takes a cover of all pairs of settings over the whole zoo; the products of which it is a cover are marked slow.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import time
from typing import Any, NamedTuple

import pytest
import torch
import traffic

import models
import parity
from sp_lightning import errors

WINDOWS = {"1": 1, "2": 2, "all": 64}
ACTIVATIONS = ["keep", "recompute", "offload"]
ACCELERATORS = ["simgpu", "cpu"]
STEPS_TOO = "simgpu, which steps too"  # with optimizer_device="device"
PRECISIONS = ["32-true", "bf16-mixed", "bf16-true", "16-mixed", "64-true"]
ACCUMULATE = [1, 3]
CLIP = [None, ("norm", 0.5), ("value", 0.01)]
OPTIMIZERS = ["sgd", "adamw", "adafactor"]


class Settings(NamedTuple):
    """What the plain and the streaming run of a cell share."""

    case: str
    accelerator: str
    precision: str = "32-true"
    accumulate: int = 1
    clip: tuple[str, float] | None = None
    optimizer: str = "adamw"


class Cell(NamedTuple):
    """One comparison."""

    settings: Settings
    window: str
    activations: str
    overlap: bool = True
    optimizer_device: str = "host"

    def __str__(self) -> str:
        algorithm = self.settings.clip and f"clip-{self.settings.clip[0]}"
        return "-".join(str(part) for part in (*self.settings._replace(clip=algorithm), *self[1:]))


def check(cell: Cell) -> traffic.Ledger:
    """Compares the two runs of a cell; gives what the streaming one moved."""
    case = models.case(cell.settings.case)
    for library in case.tags & {"transformers", "torchvision"}:
        pytest.importorskip(library)
    if case.name == "transformer_encoder" and cell.settings.precision.endswith("-mixed"):
        with torch.autocast(cell.settings.accelerator, dtype=torch.bfloat16):
            if cell.settings.accelerator != "cpu" and not torch.is_autocast_enabled():
                pytest.skip("this torch asks for CUDA's autocast before its encoder's fast path, and fails plainly")
    expected, gradient_nbytes = plain(cell.settings)
    ledger = traffic.Ledger()
    options = {
        "window": WINDOWS[cell.window],
        "activations": cell.activations,
        "optimizer_overlap": cell.overlap,
        "optimizer_device": cell.optimizer_device,
    }
    with ledger.listening():
        actual = record(cell.settings, parity.streaming_strategy(cell.settings.accelerator, **options))
    parity.compare(expected, actual)
    traffic.assert_streamed(ledger, gradient_nbytes, "writes" in case.tags)
    return ledger


@functools.lru_cache(maxsize=1)
def plain(settings: Settings) -> tuple[parity.Record, list[int]]:
    """The plain run, which the cells that differ in streaming alone share."""
    counter = traffic.GradientBytes()
    return record(settings, parity.plain_strategy(settings.accelerator), counter), counter.by_batch


def record(settings: Settings, strategy: Any, *callbacks: Any) -> parity.Record:
    case, accelerator, precision, accumulate, clip, optimizer = settings
    return parity.record(
        functools.partial(models.ZooModule, models.case(case), optimizer=optimizer),
        strategy,
        accelerator=accelerator,
        precision=precision,
        accumulate=accumulate,
        clip=clip,
        callbacks=callbacks,
    )


def parameters(cells: list[Cell], often: list[Cell] | None = None) -> Any:
    """Cells that share a plain run come one after the other; they say what they need. All but `often` are slow."""
    return [
        pytest.param(
            cell,
            id=str(cell),
            marks=[pytest.mark.simgpu] * (cell.settings.accelerator == "simgpu")
            + [pytest.mark.slow] * (often is not None and cell not in often),
        )
        for cell in dict.fromkeys(sorted(cells, key=lambda cell: str(cell.settings)))
    ]


# --- The cover


AXES = {
    "case": list(models.ZOO),
    "precision": PRECISIONS,
    "window": list(WINDOWS),
    "activations": ACTIVATIONS,
    "clip": CLIP,
    "optimizer": OPTIMIZERS,
    "accumulate": ACCUMULATE,
    "accelerator": [*ACCELERATORS, STEPS_TOO],
    "overlap": [True, False],
}
TWO_AXES = {  # of two optimizers that are stepped by hand: Lightning neither clips nor accumulates for them
    "case": ["mlp", "tied_embedding", "frozen_prefix", "mixture_of_experts", "checkpoint", "llama"],
    **{name: AXES[name] for name in ("precision", "window", "activations", "accelerator")},
}


def cells_of(window: str, activations: str, overlap: bool = True, **settings: Any) -> list[Cell]:
    """One cell; two for what Lightning does not have, FP16 autocast on the CPU, as its other pairs are needed."""
    steps = "device" if settings["accelerator"] == STEPS_TOO else "host"
    settings["accelerator"] = settings["accelerator"].partition(",")[0]
    legal = [settings]
    if settings["precision"] == "16-mixed" and settings["accelerator"] == "cpu":
        legal = [settings | {"accelerator": "simgpu"}, settings | {"precision": "32-true"}]
    return [Cell(Settings(**one), window, activations, overlap, steps) for one in legal]


def cells(rows: list[dict[str, Any]], **also: Any) -> list[Cell]:
    return [cell for row in rows for cell in cells_of(**row, **also)]


COVER = cells(parity.pairwise(**AXES))
OFTEN = cells(parity.each_value(**AXES))
TWO = cells(parity.pairwise(**TWO_AXES), optimizer="two")
TWO_OFTEN = cells(parity.each_value(**TWO_AXES), optimizer="two")


@pytest.mark.parametrize("cell", parameters(COVER + OFTEN, OFTEN))
@pytest.mark.few(17)
def test_streaming_is_exact_in_a_cover_of_all_pairs_of_settings(cell):
    check(cell)


@pytest.mark.parametrize("cell", parameters(TWO + TWO_OFTEN, TWO_OFTEN))
@pytest.mark.few(1)
def test_streaming_is_exact_with_two_optimizers_that_are_stepped_by_hand(cell):
    check(cell)


def test_the_cover_has_every_pair_that_exists():
    rows = [cell.settings._asdict() | cell._asdict() for cell in COVER]
    for row in rows:
        del row["settings"]
    values = {axis: {row[axis] for row in rows} for axis in rows[0]}
    for one in values:
        for other in values:
            missing = {(a, b) for a in values[one] for b in values[other]} - {(row[one], row[other]) for row in rows}
            none = {("cpu", "16-mixed"), ("16-mixed", "cpu"), ("cpu", "device"), ("device", "cpu")}
            assert one == other or missing <= none, (one, other)


@pytest.mark.simgpu
@pytest.mark.parametrize("case", ["mlp", "llama", "adapters", "checkpoint", "uneven_convnet"])
@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.few(1)
def test_under_autocast_each_layer_that_is_run_once_comes_to_travel_in_its_type(case, activations):
    ledger = check(Cell(Settings(case, "simgpu", "bf16-mixed", accumulate=3), "2", activations))
    passes = itertools.chain.from_iterable(ledger.passes.values())
    last = [recorded for recorded in passes if recorded.kind == "train"][-1]
    layers = torch.nn.Linear | torch.nn.Conv2d
    weights = {f"net.{name}.weight" for name, m in models.case(case).make().named_modules() if isinstance(m, layers)}
    assert {name for name, share in last.share.items() if share == 0.5} == weights & set(last.share)


# --- The products


def every_model() -> list[Cell]:
    settings = itertools.starmap(Settings, itertools.product(models.ZOO, ACCELERATORS))
    return [Cell(*of) for of in itertools.product(settings, WINDOWS, ACTIVATIONS)]


def every_setting() -> list[Cell]:
    product = itertools.product(("tied_embedding", "mixture_of_experts"), PRECISIONS, ACCUMULATE, CLIP, OPTIMIZERS)
    settings = [Settings(case, "simgpu", *rest) for case, *rest in product]
    return [Cell(*of) for of in itertools.product(settings, WINDOWS, ACTIVATIONS)]


def every_model_under_autocast() -> list[Cell]:
    product = itertools.product(models.ZOO, ACCELERATORS, ("bf16-mixed",), ACCUMULATE)
    settings = list(itertools.starmap(Settings, product))
    return [Cell(*of) for of in itertools.product(settings, ("1", "2"), ACTIVATIONS)]


@pytest.mark.slow
@pytest.mark.parametrize("cell", parameters(every_model_under_autocast()))
def test_streaming_is_exact_for_every_model_under_autocast(cell):
    check(cell)


@pytest.mark.slow
@pytest.mark.parametrize("cell", parameters(every_model()))
def test_streaming_is_exact_for_every_model(cell):
    check(cell)


@pytest.mark.slow
@pytest.mark.parametrize("cell", parameters(every_setting()))
def test_streaming_is_exact_in_every_setting(cell):
    check(cell)


# --- What is not exact is refused


def refused(overlap, match):
    """With an error while units are stepped ahead; without that it is exact."""
    return pytest.raises(errors.ExactnessError, match=match) if overlap else contextlib.nullcontext()


class Returning(models.Stack):
    """Comes back to a block in backward, for a weight used detached, but not in the first steps."""

    steps = 0

    def run(self, x):
        self.steps += self.training
        return super().run(self.blocks[2](x, detached=True) if self.steps > 2 else x)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.few(1)
def test_a_backward_that_comes_back_to_a_unit_that_was_stepped_is_an_error(device, overlap):
    case = models.case("detached_weight")
    case = dataclasses.replace(case, make=lambda: Returning(models.DetachableBlock() for _ in range(4)))
    options = {"window": 1, "optimizer_overlap": overlap}
    with refused(overlap, r"came back to net\.blocks\.2 .* set optimizer_overlap=False"):
        parity.check(case, options, accelerator=device.type)


class Looked(models.Stack):
    """Gradients of an early block depend on a late one's weight, which somebody looks at in backward."""

    def __init__(self, where, look, since=0):
        super().__init__(models.Block() for _ in range(4))
        weight, batches = self.blocks[3].up.weight, itertools.count()

        def looked():
            return float(look(weight)) if next(batches) >= since else 0.0

        early = self.blocks[0]
        if where == "tensor":
            early.up.weight.register_hook(lambda grad: grad + looked())
        elif where == "leaf":
            early.up.weight.register_post_accumulate_grad_hook(lambda host: setattr(host, "grad", host.grad + looked()))
        else:
            early.register_full_backward_hook(lambda _, into, out: (into[0] + looked(),))


LOOKS = {
    "detached": lambda weight: weight.detach().sum(),
    "data": lambda weight: weight.data.sum(),
    "itself": lambda weight: weight.sum(),
    "element": lambda weight: weight[0, 0].item(),
    "copy": lambda weight: copy.deepcopy(weight).data.sum(),
}


@pytest.mark.parametrize(
    ("where", "look"), [*(("tensor", look) for look in LOOKS), ("leaf", "data"), ("module", "data")]
)
@pytest.mark.few(1)
def test_a_hook_in_backward_sees_weights_that_are_not_stepped(where, look, device):
    case = dataclasses.replace(models.case("mlp"), make=lambda: Looked(where, LOOKS[look]))
    parity.check(case, {"window": 2}, accelerator=device.type)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.few(1)
def test_a_hook_that_begins_to_look_at_a_weight_that_was_stepped_is_an_error(overlap, device):
    case = dataclasses.replace(models.case("mlp"), make=lambda: Looked("tensor", LOOKS["data"], since=2))
    options = {"window": 2, "optimizer_overlap": overlap}
    with refused(overlap, r"net\.blocks\.3 .* nor a hook that reads weights"):
        parity.check(case, options, accelerator=device.type)


HALVES = {
    "itself": lambda grad: grad.mul_(0.5),
    "data": lambda grad: grad.data.mul_(0.5),
    "a row's data": lambda grad: grad[0].data.mul_(0.5),
    "nothing": lambda grad: grad.norm(),
}


class Changed(models.Stack):
    """A hook of an early block halves the gradient of a late one's weight, which is complete by then."""

    def __init__(self, where, since=0, by="itself"):
        super().__init__(models.Block() for _ in range(4))
        weight, batches, early = self.blocks[3].up.weight, itertools.count(), self.blocks[0].up

        def halve(*_):
            if next(batches) >= since:
                HALVES[by](weight.grad)

        def halve_at_the_end(*_):
            torch.autograd.Variable._execution_engine.queue_callback(halve)

        if where == "leaf":
            early.weight.register_post_accumulate_grad_hook(halve)
        elif where == "module":
            early.register_full_backward_hook(halve)
        elif where == "at the end of the first":
            self.head.register_full_backward_hook(halve_at_the_end)
        else:
            early.weight.register_hook(halve if where == "tensor" else halve_at_the_end)


@pytest.mark.parametrize("by", HALVES)
@pytest.mark.parametrize("where", ["tensor", "leaf", "module", "at the end of the first", "at the end of the last"])
@pytest.mark.few(2)
def test_a_gradient_that_a_hook_in_backward_changes_is_stepped_with_as_it_is_then(where, by, device):
    case = dataclasses.replace(models.case("mlp"), make=lambda: Changed(where, by=by))
    parity.check(case, {"window": 2}, accelerator=device.type)


@pytest.mark.parametrize("where", ["module", "at the end of the last"])
@pytest.mark.parametrize("by", HALVES)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.few(2)
def test_a_hook_that_begins_to_change_a_gradient_that_was_stepped_with_is_an_error(overlap, by, where, device):
    case = dataclasses.replace(models.case("mlp"), make=lambda: Changed(where, since=2, by=by))
    options = {"window": 2, "optimizer_overlap": overlap}
    with refused(overlap and by != "nothing", r"net\.blocks\.3 .* or changes gradients"):
        parity.check(case, options, accelerator=device.type)


class Kept(models.Stack):
    """Keeps a late gradient, or its data, in the backward of one batch, and halves it in that of the next one."""

    def __init__(self, keep):
        super().__init__(models.Block() for _ in range(4))
        weight, kept = self.blocks[3].up.weight, []

        def keep_or_halve(*_):
            if kept:
                kept.pop().mul_(0.5)
            else:
                kept.append(keep(weight.grad))

        self.blocks[0].up.register_full_backward_hook(keep_or_halve)


@pytest.mark.parametrize("keep", [lambda grad: grad, lambda grad: grad.data], ids=["itself", "data"])
@pytest.mark.few(1)
def test_a_gradient_that_was_kept_from_an_earlier_batch_is_stepped_with_as_a_hook_leaves_it(keep, device):
    case = dataclasses.replace(models.case("mlp"), make=lambda: Kept(keep))
    parity.check(case, {"window": 2}, accelerator=device.type, accumulate=2)


class Square(torch.autograd.Function):
    """Not seen by torch's function dispatch: on the CPU it leads from a host parameter into the loss."""

    @staticmethod
    def forward(ctx, weight):
        ctx.save_for_backward(weight)
        return weight.square().sum()

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


def test_a_gradient_that_comes_past_the_units_is_stepped_with():
    def loss(net, batch):
        return models.classification(net, batch) + 0.1 * sum(Square.apply(block.up.weight) for block in net.blocks)

    case = dataclasses.replace(models.case("mlp"), make=models.stack_of(models.Block), loss=loss)
    parity.check(case, {"window": 2}, accelerator="cpu")


@pytest.mark.few(1)
def test_a_hook_inside_a_unit_that_asks_for_a_gradient_there_is_an_error(device):
    def make():
        net = models.stack_of(models.Block)()
        net.blocks[2].down.register_full_backward_hook(lambda layer, *_: print(layer.weight.grad))
        return net

    case = dataclasses.replace(models.case("mlp"), make=make)
    with pytest.raises(errors.ExactnessError, match=r"down\.weight .* inside net\.blocks\.2, .* arrive together"):
        parity.check(case, {"window": 2}, accelerator=device.type)


@pytest.mark.simgpu
@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.few(1)
def test_a_hook_of_a_module_that_asks_for_a_gradient_that_has_hooks_is_an_error(register):
    """The host's thread runs these, and the other one would find the gradient or none."""

    def make():
        net = models.stack_of(models.Block)()
        getattr(net.blocks[2].up.weight, register)(lambda grad: None)
        net.blocks[1].register_full_backward_pre_hook(lambda *_: print(net.blocks[2].up.weight.grad))
        return net

    case = dataclasses.replace(models.case("mlp"), make=make)
    with pytest.raises(
        errors.ExactnessError, match=r"blocks\.2\.up\.weight was read .* another thread calls the hooks"
    ):
        parity.check(case, {"window": 2}, accelerator="simgpu")


@pytest.mark.simgpu
def test_a_hook_on_a_weight_that_asks_for_a_gradient_that_has_come_meanwhile_is_an_error():
    """A plain run's backward waits for the hook."""

    def make():
        net = models.stack_of(models.Block)()
        early, late = net.blocks[0].up.weight, net.blocks[2].up.weight

        def read(_):
            time.sleep(0.2)
            print(early.grad)

        late.register_post_accumulate_grad_hook(read)
        return net

    case = dataclasses.replace(models.case("mlp"), make=make)
    with pytest.raises(errors.ExactnessError, match=r"blocks\.0\.up\.weight was read in a hook on net\.blocks\.2\.up"):
        parity.check(case, {"window": 2}, accelerator="simgpu")


@pytest.mark.parametrize("read_by", ["its own hook", "a hook on another weight"])
@pytest.mark.few(1)
def test_a_hook_on_a_weight_may_ask_for_gradients_that_have_hooks(read_by, device):
    seen = []

    def make():
        net = models.stack_of(models.Block)()
        weight, other = net.blocks[2].up.weight, net.blocks[1].down.weight
        weight.register_post_accumulate_grad_hook(lambda p: None)
        reader = weight if read_by == "its own hook" else other
        reader.register_post_accumulate_grad_hook(lambda p: seen.append(weight.grad.sum().item()))
        return net

    parity.check(dataclasses.replace(models.case("mlp"), make=make), {"window": 2}, accelerator=device.type)
    assert seen[: len(seen) // 2] == seen[len(seen) // 2 :]


@pytest.mark.few(1)
def test_a_hook_inside_a_unit_may_ask_for_gradients_of_what_does_not_train(device):
    seen = []

    def make():
        net = models.stack_of(models.Block)()
        net.blocks[2].requires_grad_(False)
        net.blocks[1].up.requires_grad_(False)
        frozen = [p for p in net.parameters() if not p.requires_grad]
        net.blocks[1].down.register_full_backward_hook(lambda *_: seen.append([p.grad for p in frozen]))
        return net

    parity.check(dataclasses.replace(models.case("mlp"), make=make), {"window": 2}, accelerator=device.type)
    assert seen and {grad for found in seen for grad in found} == {None}


class Slowing(models.ZooModule):
    """A hook changes the rate in the middle of a backward."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        slower = lambda grad: optimizer.param_groups[0].update(lr=optimizer.param_groups[0]["lr"] / 2)  # noqa: E731
        self.net.blocks[0].up.weight.register_hook(slower)
        return optimizer


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.few(1)
def test_a_hook_that_changes_the_optimizers_options_is_an_error(overlap, device):
    def run(strategy):
        return parity.record(lambda: Slowing(models.case("mlp")), strategy, accelerator=device.type)

    expected = run(parity.plain_strategy(device.type))
    with refused(overlap, "options were changed in backward"):
        options = {"window": 2, "optimizer_overlap": overlap}
        parity.compare(expected, run(parity.streaming_strategy(device.type, **options)))
