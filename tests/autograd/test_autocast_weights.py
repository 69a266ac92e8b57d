"""``wire_dtype``: under autocast what only a layer's own forward sees travels in autocast's type; nothing else changes.

A weight that qualified in the first step may be read in any other way in a later one: each way is a test here.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from refusals import refusal
from side_by_side import check, fit, inputs, sgd, squares
from torch import nn
from torch.utils.checkpoint import checkpoint

import models
import parity
import sp_lightning
from sp_lightning.core.unit_numbers import ALIGNMENT, aligned
from sp_lightning.errors import ExactnessError
from sp_lightning.gradients.slab import GradientSlot, runs_to_widen, widened
from sp_lightning.memory.host_copy import HostCopy
from sp_lightning.optim import native

LATE = 3  # the first step that is not like those before


class Layer(nn.Module):
    """A block whose linear layer is all that has parameters, and whose forward can be exchanged."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(models.WIDTH, models.WIDTH, bias=False)
        self.other = None

    def forward(self, x):
        return torch.tanh(self.other(self.linear, x) if self.other is not None else self.linear(x))


layers = models.stack_of(Layer)


def autocast(device, **options):
    return torch.autocast(device.type, **{"dtype": torch.bfloat16, "cache_enabled": False} | options)


def training(other=None, loss=squares, around=contextlib.nullcontext, steps=LATE + 3, accumulate=1, first=LATE):
    """Trains under autocast. From step `first` on, every other step, a block runs `other`; `around` is entered, too."""

    def run(net, device):
        optimizer = sgd(net)
        for step, x in enumerate(inputs(device, steps)):
            late = step >= first and (step - first) % 2 == 0
            net.blocks[1].other = other if late else None
            for _ in range(accumulate):
                with around() if late else contextlib.nullcontext(), autocast(device):
                    value = (loss if late else squares)(net, x)
                value.backward()
                yield value
            yield [p.grad for p in net.parameters()]
            optimizer.step()
            optimizer.zero_grad()

    return run


def travelling(handle):
    """The names of what travels in another type than it has."""
    return {unit.names[index] for unit in (each.store for each in handle.engine.units) for index in unit.autocast}


def stepped(net, device, steps=2, **how):
    for _ in training(steps=steps, **how)(net, device):
        pass


# --- What travels


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
@pytest.mark.few(1)
def test_from_the_second_step_on_linear_weights_take_half_the_bytes_both_ways(device, precision):
    def moved(wire_dtype):
        net = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(4))  # 2048 bytes in half the type: no gaps
        net.forward = lambda x: functools.reduce(lambda x, layer: layer(x), net, x)
        with sp_lightning.stream(net, device, window=1, units=["Linear"], wire_dtype=wire_dtype) as handle:
            for _ in range(3):
                before = handle.stats()
                with autocast(device, dtype=precision):
                    squares(net, torch.ones(8, 32, device=device)).backward()
                sgd(net).step()
            return [handle.stats()[way] - before[way] for way in ("bytes_up", "bytes_down")]

    assert moved("as-is") == [7 * 4096, 4 * 4096]  # the fourth is there when backward begins
    assert moved("auto") == [7 * 2048, 4 * 2048]


def test_without_autocast_and_with_as_is_nothing_is_converted(device):
    for how, options in ((contextlib.nullcontext, {}), (lambda: autocast(device), {"wire_dtype": "as-is"})):
        net = layers()
        with sp_lightning.stream(net, device, window=1, **options) as handle:
            for x in inputs(device, 3):
                with how():
                    squares(net, x).backward()
            assert not travelling(handle)


@parity.product(activations=["keep", "recompute", "offload"], accumulate=[1, 3], device=parity.DEVICES)
@pytest.mark.few(1)
def test_training_is_exact(device, activations, accumulate):
    check(layers, training(accumulate=accumulate), device, window=2, activations=activations)


def earlier(net):
    """Give all parameters a gradient, as an earlier backward may have left one."""
    for p in net.parameters():
        p.grad = torch.arange(p.numel(), dtype=torch.float32).sin().reshape(p.shape).to(p.device)


@pytest.mark.parametrize("activations", ["keep", "recompute", "offload"])
@pytest.mark.parametrize("forwards", [2, 3])
@pytest.mark.few(2)
def test_several_forwards_of_one_backward_are_added_to_an_earlier_gradient_together(device, forwards, activations):
    """From the second forward on a weight could travel in another type, and its gradients would come in two parts."""

    def run(net, device):
        for _ in range(2):
            earlier(net)
            with autocast(device):
                value = sum(squares(net, x) for x in inputs(device, forwards))
            value.backward()
            yield value
            yield [p.grad for p in net.parameters()]

    check(layers, run, device, window=2, activations=activations)


@pytest.mark.parametrize("ends", [lambda values: sum(values).backward(), list.clear], ids=["backward", "dropped"])
def test_a_weight_travels_in_autocast_s_type_once_no_graph_waits_for_its_backward(device, ends):
    net = layers()
    with sp_lightning.stream(net, device, window=2) as handle:
        values, seen = [], []
        for x in inputs(device, 4):
            with autocast(device):
                values.append(squares(net, x))
            seen.append(bool(travelling(handle)))
            if len(seen) == 3:
                ends(values)
    assert seen == [False, False, False, True]


def test_weights_that_are_not_trained_travel_cast_too(device):
    def frozen():
        net = layers()
        for block in net.blocks[::2]:
            block.requires_grad_(False)
        return net

    check(frozen, training(), device)
    net = frozen()
    with sp_lightning.stream(net, device, window=1) as handle:
        stepped(net, device)
        assert {f"blocks.{index}.linear.weight" for index in range(4)} <= travelling(handle)


def test_convolutions_keep_their_memory_format(device):
    def convolutions():
        net = nn.Sequential(*(nn.Sequential(nn.Conv2d(3, 3, 3), nn.ReLU()) for _ in range(4)))
        return net.to(memory_format=torch.channels_last)

    def run(net, device):
        for index in range(4):
            with autocast(device):
                loss = net(models.images(index)[0].to(device)).square().mean()
            loss.backward()
            yield loss
        if hasattr(net.forward, "steps"):
            assert len(travelling(net.forward.steps)) == 4

    check(convolutions, run, device)


def test_evaluation_is_cast_as_well(device):
    net = layers()
    with sp_lightning.stream(net, device, window=1) as handle, torch.no_grad(), autocast(device):
        for x in inputs(device, 2):
            net(x)
        assert len(travelling(handle)) == 6


def test_gradients_that_are_enabled_where_inference_mode_makes_none(device):
    net = layers()
    with sp_lightning.stream(net, device, window=1) as handle, torch.inference_mode(), autocast(device):
        for x in inputs(device, 3):
            with torch.enable_grad():
                assert not net(x).requires_grad
        assert len(travelling(handle)) == 6


def test_a_new_kind_of_pass_that_makes_gradients_is_recorded_first(device):
    net = layers()
    x = next(inputs(device, 1))
    with sp_lightning.stream(net, device, window=1) as handle:
        net.eval()
        with torch.no_grad(), autocast(device):
            net(x), net(x)
        assert len(travelling(handle)) == 6
        net.train()
        with autocast(device):
            squares(net, x).backward()
            assert not travelling(handle)
            squares(net, x).backward()
            assert len(travelling(handle)) == 6


class Skipping(models.Stack):
    skipped = None

    def run(self, x):
        for index, block in enumerate(self.blocks):
            x = x if index == self.skipped else block(x)
        return x


def test_a_unit_that_is_fetched_with_its_new_types_and_then_not_visited(device):
    def run(net, device):
        for step, x in enumerate(inputs(device, 4)):
            net.skipped = 2 if step == 1 else None
            with autocast(device):
                loss = squares(net, x)
            loss.backward()
            yield loss, [p.grad for p in net.parameters()]

    check(lambda: Skipping(Layer() for _ in range(4)), run, device, window=2)


# --- What code elsewhere uses, and only casts


class Scored(nn.Module):
    """Blocks and a head that is never called: the loss is handed its weight."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(12, models.WIDTH), Layer(), Layer(), Layer())
        self.head = nn.Linear(models.WIDTH, 64, bias=False)
        self.score = None

    def forward(self, x):
        return self.score(self.head, self.blocks(x)).float()


def cross_entropy(options):
    def score(head, x):
        targets = torch.arange(len(x), device=x.device) % 64
        weight = head.weight.to(torch.bfloat16)
        return F.linear_cross_entropy(x.to(torch.bfloat16), weight, targets, options=options, reduction="none")

    return score


def no_longer(head, x):
    """A cast's result is a copy: what is written to it does not reach the weight."""
    with torch.no_grad():
        zeros = head.weight.bfloat16().mul_(0)
    return F.linear(x, head.weight) + zeros.sum()


CASTING = {
    "linear": lambda head, x: F.linear(x, head.weight),
    "to": lambda head, x: x.bfloat16() @ head.weight.to(torch.bfloat16).t(),
    "to_by_name": lambda head, x: x.bfloat16() @ head.weight.to(dtype=torch.bfloat16).t(),
    "bfloat16": lambda head, x: x.bfloat16() @ head.weight.bfloat16().t(),
    "matmul": lambda head, x: x.new_ones(len(x), 64) @ head.weight * x.sum(),
    "convolution": lambda head, x: F.conv1d(x[..., None].float(), head.weight.bfloat16()[..., None]),
    "written": no_longer,
}
if hasattr(nn, "LinearCrossEntropyOptions"):
    CASTING["full_loss"] = cross_entropy(None)
    CASTING["chunked_loss"] = cross_entropy(nn.LinearCrossEntropyOptions(batch_chunk_size=2, chunking_method=None))


def scoring(scores, accumulate=1, around=autocast):
    """Trains with each of these in turn."""

    def run(net, device):
        optimizer = sgd(net)
        for score, x in zip(scores, inputs(device, len(scores)), strict=True):
            net.score = score
            for _ in range(accumulate):
                with around(device):
                    loss = net(x).square().mean()
                loss.backward()
                yield loss
            yield [p.grad for p in net.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        net.score = scores[0]
        with torch.no_grad(), around(device):
            yield net(x)

    return run


@parity.product(activations=["keep", "recompute"], name=list(CASTING), device=parity.DEVICES)
@pytest.mark.few(1)
def test_a_weight_that_other_code_only_casts_is_exact(device, name, activations):
    check(Scored, scoring([CASTING[name]] * 4, accumulate=2), device, activations=activations)


@parity.product(late=["a norm", "both ways", *CASTING], first=["linear", "to"], device=parity.DEVICES)
@pytest.mark.few(4)
def test_a_weight_that_other_code_uses_in_another_way_later_is_exact(device, first, late):
    scores = CASTING | {
        "a norm": lambda head, x: head(x) * head.weight.detach().norm(),
        "both ways": lambda head, x: head(x) + CASTING["to"](head, x) + CASTING["linear"](head, x),
    }
    check(Scored, scoring([*[CASTING[first]] * 3, scores[late], CASTING[first]]), device)


@parity.product(activations=["keep", "recompute"], order=[1, -1], name=list(CASTING), device=parity.DEVICES)
@pytest.mark.few(2)
def test_a_weight_that_its_layer_and_other_code_use_is_exact_from_the_first_step_on(device, name, order, activations):
    ways = [lambda head, x: head(x).float(), lambda head, x: CASTING[name](head, x).float()][::order]

    def both(head, x):
        one, other = (way(head, x) for way in ways)
        return one.mean() + other.square().mean()

    check(Scored, scoring([both] * 3, accumulate=2), device, activations=activations)


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", sorted({"linear", "to", "bfloat16", "chunked_loss"} & CASTING.keys()))
@pytest.mark.few(2)
def test_a_weight_that_other_code_only_casts_travels_like_one_that_its_layer_uses(device, name, precision):
    """The layer's own forward decides what goes up and, from the second step on, down; the loss must not need more."""
    if precision is torch.float16 and name != "linear":
        pytest.skip("casts to another type")

    def moved(score):
        net = Scored()
        with sp_lightning.stream(net, device, window=1) as handle:
            for steps in (1, 3):
                first = handle.stats()["bytes_down"]
                for _ in scoring([score] * steps, around=lambda device: autocast(device, dtype=precision))(net, device):
                    pass
            assert "head.weight" in travelling(handle)
            return handle.stats()["bytes_up"], handle.stats()["bytes_down"] - first

    own, other = moved(lambda head, x: head(x)), moved(CASTING[name])
    assert other == own


@pytest.mark.parametrize(
    "read",
    [
        lambda head, x: x.bfloat16() @ head.weight.to(torch.bfloat16, memory_format=torch.contiguous_format).t(),
        lambda head, x: x @ head.weight.t(),
        lambda head, x: F.linear(x, head.weight) + head.weight.sum(),
        lambda head, x: F.linear(x, head.weight) + F.linear(x, head.weight),
        lambda head, x: x.half() @ head.weight.half().t(),
    ],
)
@pytest.mark.few(2)
def test_a_weight_that_other_code_uses_otherwise_travels_as_it_is(device, read):
    if device.type == "cpu" and not torch.backends.mkldnn.is_available():
        pytest.skip("the CPU has no FP16 kernel for its backward")
    check(Scored, scoring([read] * 3), device)
    net = Scored()
    with sp_lightning.stream(net, device, window=1) as handle:
        for _ in scoring([read] * 3)(net, device):
            pass
        assert "head.weight" not in travelling(handle)


def test_functions_that_autocast_casts_for_are_these(device):
    from sp_lightning.autograd.autocast_weights import CAST_FOR

    x, matrix = torch.ones(2, 2, device=device), torch.ones(2, 2, device=device)
    for function in CAST_FOR:
        name = function.__name__
        dims = int(name[-2]) if name.startswith("conv") else 0
        arguments = [torch.ones([2] * (2 + dims), device=device)] * 2 if dims else [x, matrix]
        with autocast(device):
            made = function(x, *arguments) if name == "addmm" else function(*arguments)
        assert made.dtype is torch.bfloat16, name


# --- What is read in another way, later


def checkpointed(**options):
    return lambda linear, x: checkpoint(linear, x, **options)


def reads_type(linear, x):
    return linear(x.to(linear.weight.dtype))


def outside(linear, x):
    with torch.autocast(x.device.type, enabled=False):
        return linear(x.float())


def as_half(linear, x):
    with torch.autocast(x.device.type, dtype=torch.float16):
        return linear(x)


def hooked(linear, x):
    handle = linear.register_forward_pre_hook(lambda module, args: (args[0] * module.weight.detach().norm(),))
    try:
        return linear(x)
    finally:
        handle.remove()


class Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x.float() @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad = grad.float()
        return grad @ weight.t(), x.float().t() @ grad


READS = {
    "of_its_type": reads_type,
    "twice": lambda linear, x: linear(linear(x)),
    "three_times": lambda linear, x: linear(linear(linear(x))),
    "as_an_argument": lambda linear, x: F.linear(x, linear.weight),
    "by_another_operator": lambda linear, x: x.float() @ linear.weight,
    "converted": lambda linear, x: x @ linear.weight.float().to(x.dtype),
    "by_a_function_of_its_own": lambda linear, x: Rotate.apply(x, linear.weight),
    "in_a_regularised_layer": lambda linear, x: linear(x) * linear.weight.detach().norm(),
    "by_a_hook": hooked,
    "from_its_parameters": lambda linear, x: linear(x) + sum(p.detach().sum() for p in linear.parameters()),
    "from_its_state": lambda linear, x: linear(x) + linear.state_dict()["weight"].sum(),
    "in_its_data": lambda linear, x: linear(x) + linear.weight.data.sum(),
    "by_name": lambda linear, x: linear(input=x),
    "outside_autocast": outside,
    "in_another_type": as_half,
    "in_a_copy": lambda linear, x: linear(x) + copy.deepcopy(linear)(x).detach(),
    "in_a_functional_call": lambda linear, x: torch.func.functional_call(linear, {"weight": linear.weight * 2}, (x,)),
    "mapped": lambda linear, x: torch.func.vmap(linear)(x),
    "checkpointed": checkpointed(use_reentrant=False),
    "checkpointed_reentrant": checkpointed(use_reentrant=True),
    "not_at_all": lambda linear, x: x,
}


@parity.product(activations=["keep", "recompute"], name=list(READS), device=parity.DEVICES)
@pytest.mark.few(2)
def test_a_late_read_is_exact(device, name, activations):
    if name == "in_another_type" and device.type == "cpu":
        pytest.skip("the CPU has no FP16 kernel for its backward") if not torch.backends.mkldnn.is_available() else None
    stats = check(layers, training(READS[name]), device, window=1, activations=activations)
    assert stats["bytes_up"] > 0


@pytest.mark.parametrize("read", ["by_another_operator", "of_its_type", "twice", "outside_autocast"])
@pytest.mark.few(2)
def test_a_weight_that_was_read_otherwise_travels_as_it_is_from_then_on(device, read):
    net = layers()
    with sp_lightning.stream(net, device, window=1) as handle:
        stepped(net, device, LATE)
        assert "blocks.1.linear.weight" in travelling(handle)
        stepped(net, device, LATE + 4, other=READS[read])
        assert len(travelling(handle)) == 5 and "blocks.1.linear.weight" not in travelling(handle)


class Looking(models.Stack):
    """Does something with all weights in front of its forward, or behind it, and adds it to what it returns."""

    before = after = None

    def forward(self, x):
        before = self.before(self) if self.before else 0
        y = super().forward(x)
        return y + before + (self.after(self) if self.after else 0)


def looking():
    return Looking(Layer() for _ in range(4))


def during(**how):
    def loss(net, x):
        vars(net).update(how)
        try:
            return squares(net, x)
        finally:
            for name in how:
                del vars(net)[name]

    return loss


def norms(net):
    return sum(p.norm().item() for p in net.parameters())


def shrink(net):
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(0.5)
    return 0


def penalty(net):
    return sum(p.square().sum() for p in net.parameters())


@pytest.mark.parametrize("when", ["before", "after"])
@refusal(
    "under autocast, in a later step than the first: a loss begins to depend on a layer's weight "
    "beside the layer itself, or a layer begins to run several times with autocast off",
    ExactnessError,
    '`wire_dtype="as-is"`',
)
@pytest.mark.few(1)
def test_a_late_look_at_all_weights_is_exact_and_in_the_loss_it_is_refused(device, when):
    check(looking, training(loss=during(**{when: norms})), device)
    refused(
        device,
        r'through its layer, and also through another read.*wire_dtype="as-is"',
        make=looking,
        loss=during(**{when: penalty}),
    )


def test_a_penalty_from_the_first_step_on_is_exact(device):
    def run(net, device):
        for x in inputs(device, 3):
            with autocast(device):
                loss = during(before=penalty)(net, x)
            loss.backward()
            yield loss, [p.grad for p in net.parameters()]
            net.zero_grad()

    check(looking, run, device)


def test_weights_that_are_written_late_before_forward_are_exact(device):
    check(looking, training(loss=during(before=shrink)), device)


def two_losses(net, x):
    return squares(net, x) + squares(net, 2 * x) + squares(net, 3 * x)


def penalised(net, x):
    x = x.requires_grad_()
    loss = squares(net, x)
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + grad.square().sum()


def penalised_alone(net, x):
    loss = squares(net, x)
    weights = [p for p in net.parameters() if p.dim() > 1]
    return sum(g.square().sum() for g in torch.autograd.grad(loss, weights, create_graph=True))


def twice_backward(net, x):
    loss = squares(net, x)
    loss.backward(retain_graph=True)
    return loss * 2


def evaluated_between(net, x):
    with torch.no_grad():
        net(x)
    with torch.inference_mode():
        net(x)
    return squares(net, x)


LOSSES = [two_losses, penalised, penalised_alone, twice_backward, evaluated_between]


@parity.product(window=[1, 4], loss=LOSSES, device=parity.DEVICES)
@pytest.mark.few(2)
def test_a_late_loss_of_another_kind_is_exact(device, loss, window):
    check(layers, training(loss=loss), device, window=window)


@parity.product(
    activations=["keep", "recompute", "recompute+offload"],
    names=["", "blocks.1"],
    first=[0, LATE],
    device=parity.DEVICES,
)
@pytest.mark.few(2)
def test_a_call_with_other_tensors_in_the_places_of_weights_uses_these(device, first, names, activations):
    def run(net, device):
        optimizer = sgd(net)
        for step, x in enumerate(inputs(device, LATE + 4)):
            if substituted := step >= first and step % 2 == first % 2:
                others = {name: torch.full_like(p, 0.01).to(device) for name, p in net.named_parameters()}
                others = {name: other.requires_grad_() for name, other in others.items() if names in name}
            with autocast(device):
                y = torch.func.functional_call(net, others, (x,)) if substituted else net(x)
                loss = y.float().square().mean()
            loss.backward()
            yield (
                loss,
                [p.grad for p in net.parameters()],
                [other.grad for other in others.values()] if substituted else [],
            )
            optimizer.step()
            optimizer.zero_grad()

    check(layers, run, device, activations=activations)


class Counting(torch.overrides.TorchFunctionMode):
    """Computes from what it sees."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is F.linear:
            return result * (1 + (args[1].dtype is torch.float32))
        return result


def test_a_late_function_mode_sees_the_weight_as_it_is(device):
    check(layers, training(around=Counting), device)


def test_hooks_on_parameters_get_gradients_as_they_are(device):
    def run(net, device):
        seen = []
        for name, p in net.named_parameters():
            p.register_hook(lambda grad, name=name: seen.append((name, grad.dtype, grad.clone())))
        yield from training()(net, device)
        yield [[name, dtype, grad] for name, dtype, grad in sorted(seen, key=lambda entry: entry[0])]

    check(layers, run, device)


def test_a_weight_that_is_frozen_and_thawed_between_steps(device):
    def run(net, device):
        for index, x in enumerate(inputs(device, 6)):
            net.blocks[2].linear.requires_grad_(index % 2 == 0)
            with autocast(device):
                loss = squares(net, x)
            loss.backward()
            yield loss, [p.grad for p in net.parameters()]

    check(layers, run, device)


def test_data_that_is_read_between_forward_and_backward_changes_nothing(device):
    def run(net, device):
        for x in inputs(device, 4):
            with autocast(device):
                loss = squares(net, x)
            [p.data.norm() for p in net.parameters()]
            loss.backward()
            yield loss, [p.grad for p in net.parameters()]

    check(layers, run, device)


def test_a_clamp_through_data_between_steps_is_seen(device):
    def run(net, device):
        for x in inputs(device, 4):
            with autocast(device):
                loss = squares(net, x)
            loss.backward()
            yield loss
            for p in net.parameters():
                p.data.clamp_(-0.02, 0.02)

    check(layers, run, device, window=6)


class Fitted(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = layers()

    def training_step(self, batch, batch_index):
        return squares(self.net, batch[0])

    def configure_optimizers(self):
        return sgd(self)


@pytest.mark.parametrize("runs_on", [False, True])
def test_weights_are_cast_by_the_thread_that_stepped_them_once_for_each_step(device, runs_on, monkeypatch):
    def fill(store, *held):
        casts.append(threading.current_thread() is not threading.main_thread())
        fill_wire(store, *held)

    casts, fill_wire = [], HostCopy._fill_wire
    monkeypatch.setattr(HostCopy, "_fill_wire", fill)
    strategy = sp_lightning.SuperpipelineStrategy(window=1, device=device)
    monkeypatch.setattr(strategy, "_may_step_ahead", lambda _: not runs_on)
    monkeypatch.setattr(strategy, "_may_hold", lambda: runs_on)
    fit(Fitted, strategy, device, precision="bf16-mixed", max_steps=5)
    assert casts == [False] * 6 + [True] * 6 * 4  # a stem, four blocks and a head, from the second step on


def test_what_is_written_while_the_thread_casts_is_cast_again(device, monkeypatch):
    def fill(store, *held):
        fill_wire(store, *held)
        halve(store.params[0])

    def halve(weight):
        weight.data.mul_(0.5)

    net, x, fill_wire = layers(), next(inputs(device)), HostCopy._fill_wire
    with sp_lightning.stream(net, device, window=1) as handle:
        stepped(net, device)
        store = handle.engine.unit_of(net.blocks[1].linear.weight).store
        with monkeypatch.context() as patch:
            patch.setattr(HostCopy, "_fill_wire", fill)
            store.after_step()
        with autocast(device), torch.no_grad():
            streamed = net(x)
    with autocast(device), torch.no_grad():
        assert net.to(device)(x).equal(streamed)


def write_in_place(weight):
    with torch.no_grad():
        weight.mul_(2)


def write_unseen(weight):
    weight.data.mul_(2)


def replace(weight):
    weight.data = weight.data * 2


def write_a_neighbour(weight):
    with torch.no_grad():
        weight.mul_(2 if weight.dim() == 1 else 1)


@parity.product(
    first=[0, LATE],
    change=[write_in_place, write_unseen, replace, write_a_neighbour],
    activations=["keep", "offload"],
    device=parity.DEVICES,
)
@pytest.mark.few(2)
def test_a_weight_that_changes_between_forward_and_backward_is_exact(device, change, activations, first):
    def loss(net, x):
        value = squares(net, x)
        for weight in net.parameters():
            change(weight)
        return value

    check(layers, training(loss=loss, first=first), device, window=2, activations=activations)


def test_a_view_that_writes_weights_unseen_between_forward_and_backward_is_exact(device):
    def run(net, device):
        views = [p.data for p in net.parameters()]  # kept: no write through them is announced
        optimizer = sgd(net)
        for x in inputs(device, 3):
            with autocast(device):
                value = squares(net, x)
            for view in views:
                view.mul_(2)
            value.backward()
            yield [p.grad for p in net.parameters()]
            optimizer.step()
            optimizer.zero_grad()

    check(layers, run, device)


def read_after(linear, x):
    y = linear(x) + linear(-2 * x)
    return y + linear.weight.exp().mean() + (linear.weight * 0.3).sum() + linear(3 * x)


def read_between(linear, x):
    return linear(linear(x) * linear.weight.sum()) - F.linear(x, linear.weight * 2)


@parity.product(other=[read_after, read_between], activations=["keep", "recompute", "offload"], device=parity.DEVICES)
@pytest.mark.few(1)
def test_a_weight_that_is_also_read_as_it_is_from_the_first_step_on_is_exact(device, other, activations):
    check(layers, training(other, first=0), device, window=2, activations=activations)


def test_a_graph_that_lives_on_past_the_first_step_is_exact(device):
    def run(net, device):
        optimizer, older = sgd(net), None
        for x in inputs(device, 5):
            with autocast(device):
                value = squares(net, x)
            if older is not None:
                older.backward()  # made before the optimizer wrote all weights
            value.backward(retain_graph=True)
            yield [p.grad for p in net.parameters()]
            optimizer.step()
            optimizer.zero_grad()
            older = value

    check(lambda: nn.Sequential(*(nn.Linear(12, 12, bias=False) for _ in range(3))), run, device, units=["Linear"])


@pytest.mark.few(1)
def test_a_forward_without_gradients_between_forward_and_backward_of_the_first_step_is_exact(device):
    def loss(net, x):
        value = squares(net, x)
        with torch.no_grad():
            net(x)
        return value

    check(layers, training(loss=loss, first=0), device)


@pytest.mark.parametrize("change", [write_in_place, write_unseen, replace])
@pytest.mark.few(2)
def test_a_unit_cannot_be_recomputed_with_other_bytes_than_travelled(device, change):
    def loss(net, x):
        value = squares(net, x)
        change(net.blocks[1].linear.weight)
        return value

    with pytest.raises(ExactnessError, match=r"a weight of blocks\.1.* was changed after its forward"):
        net = layers()
        with sp_lightning.stream(net, device, window=1, activations="recompute"):
            stepped(net, device, LATE + 2, loss=loss)


def test_bytes_that_a_kept_graph_needs_outlive_the_optimizer_s_step(device):
    def run(net, device):
        optimizer = sgd(net)
        for x in inputs(device, 5):
            optimizer.zero_grad()
            with autocast(device):
                value = squares(net, x)
            for _ in range(2):  # the second one with weights that the optimizer wrote
                value.backward(retain_graph=True)
                yield [p.grad for p in net.parameters()]
                optimizer.step()
            del value  # types change where no graph remembers them

    def make():
        return nn.Sequential(*(nn.Linear(12, 12, bias=False) for _ in range(3)))

    check(make, run, device, units=["Linear"])


# --- What can not be exact is refused


def refused(device, match, make=layers, **how):
    net = make()
    with sp_lightning.stream(net, device, window=1), pytest.raises(ExactnessError, match=match):
        stepped(net, device, LATE + 2, **how)


def write(linear, x):
    linear.weight.data.mul_(0.5)
    return linear(x)


class Halved(Layer):
    """Has a second weight, which no graph saves."""

    def __init__(self):
        super().__init__()
        self.average = nn.Linear(models.WIDTH, models.WIDTH, bias=False).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            target = self.average(x)
        return super().forward(x) - target


@pytest.mark.few(1)
def test_between_forward_and_backward_a_weight_may_be_written_that_is_not_saved_but_has_such_neighbours(device):
    def run(net, device):
        for x in inputs(device, 5):
            with autocast(device):
                loss = squares(net, x)
            with torch.no_grad():
                for block in net.blocks:
                    block.average.weight.lerp_(block.linear.weight, 0.1)
            loss.backward()
            yield loss, [p.grad for p in net.parameters()]

    check(models.stack_of(Halved), run, device)


class Decaying(models.Stack):
    """Writes to the weights of all blocks before the first of them runs, when some are on the device already."""

    def run(self, x):
        for block in self.blocks:
            block.linear.weight.data = block.linear.weight.data * 0.9
        return super().run(x)


@pytest.mark.few(1)
def test_units_that_are_written_when_they_were_fetched_with_new_types_and_not_visited_yet(device):
    check(lambda: Decaying(Layer() for _ in range(4)), training(), device, window=3)


@pytest.mark.few(1)
def test_a_weight_that_its_forward_begins_to_write_is_exact_unless_it_runs_again(device):
    check(layers, training(write), device)
    net = layers()
    with (
        sp_lightning.stream(net, device, activations="recompute") as _,
        pytest.raises(ExactnessError, match=r'has to run again.*wire_dtype="as-is"'),
    ):
        stepped(net, device, LATE + 2, other=write)


def test_a_hook_on_the_weight_inside_its_unit_is_an_error(device):
    def hook(linear, x):
        linear.weight.register_hook(lambda grad: grad * 2)
        return linear(x)

    refused(device, r'hook was registered.*wire_dtype="as-is"', other=hook)


@pytest.mark.parametrize("view", [lambda weight: weight, lambda weight: weight.detach().t()])
def test_references_to_weights_that_are_kept_see_each_step(view, device):
    def run(net, device):
        kept = []

        def keep(linear, x):
            kept.append(view(linear.weight))
            return linear(x)

        for value in training(keep, steps=LATE + 4)(net, device):
            yield value, [one.detach().clone() for one in kept]
        yield kept

    check(layers, run, device)


def test_other_data_for_a_weight_of_which_a_view_is_kept_is_an_error(device):
    kept, net = [], layers()

    def keep(linear, x):
        kept.append(linear.weight.detach().t())
        return linear(x)

    with sp_lightning.stream(net, device, window=1):
        stepped(net, device, LATE + 1, other=keep)
        net.blocks[1].linear.weight.data = net.blocks[1].linear.weight.data * 2
        with pytest.raises(ExactnessError, match=r'reference to blocks\.1\.linear\.weight was kept.*"as-is"'):
            stepped(net, device, 1)


# --- Compiled code


class Compiling(models.Block):
    """Compiles a part of its forward: one that runs layers, or one that only computes."""

    def __init__(self, whole):
        super().__init__()
        self.middle = torch.compile(self.layers if whole else F.gelu, backend="aot_eager", fullgraph=True)
        self.whole = whole

    def layers(self, x):
        return self.down(F.gelu(self.up(x)))

    def forward(self, x):
        x = self.norm(x)
        return self.middle(x) if self.whole else self.down(self.middle(self.up(x)))


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.few(1)
def test_what_is_compiled_inside_a_unit_finds_layers_as_they_are(whole, activations):
    torch.compiler.reset()
    check(models.stack_of(lambda: Compiling(whole)), training(), torch.device("cpu"), activations=activations)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.few(1)
def test_only_what_is_compiled_with_its_layers_ends_it(whole):
    torch.compiler.reset()
    net = models.stack_of(lambda: Compiling(whole))()
    with sp_lightning.stream(net, "cpu", window=1) as handle:
        stepped(net, torch.device("cpu"), 3)
        cast = {name for name in travelling(handle) if name.startswith("blocks.")}
    assert cast == set() if whole else {f"blocks.{i}.{layer}.weight" for i in (1, 2, 3) for layer in ("up", "down")}


def test_what_is_compiled_later_reads_weights_as_they_are():
    def run(net, device):
        yield from training()(net, device)
        for block in net.blocks:
            block.compile(backend="eager")
        yield from training()(net, device)

    torch.compiler.reset()
    check(layers, run, torch.device("cpu"))


# --- Widening


def halves(count, dtype):
    """Make numbers of any bits; of NaNs in FP16 torch makes several, depending on where in a tensor they lie."""
    numbers = torch.randint(-(1 << 15), 1 << 15, (count,), dtype=torch.int16).view(dtype)
    return numbers.masked_fill_(numbers.isnan(), 0) if dtype is torch.float16 else numbers


def in_a_room(numbers, ahead=0):
    """Lay numbers into the second half of a room, or so far behind it; return them and the room."""
    count = len(numbers)
    storage = torch.empty(4 * (count + ahead) + 4).untyped_storage()
    narrow = torch.empty(0, dtype=numbers.dtype).set_(storage, count + ahead, (count,), (1,))
    return narrow.copy_(numbers), torch.empty(0).set_(storage, 0, (count,), (1,))


@pytest.mark.parametrize("count", [0, 1, 5, 4096, 100_001])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_gradient_is_widened_in_the_room_whose_second_half_it_takes(count, dtype):
    numbers = halves(count, dtype)
    narrow, room = in_a_room(numbers)
    assert torch.equal(widened(narrow, room).view(torch.int32), numbers.float().view(torch.int32))


@pytest.fixture(scope="module")
def library():
    """Compiled code that has been compared."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])
    native.LIBRARY.steps(optimizer, optimizer.param_groups[0])
    native.LIBRARY.wait()
    if native.LIBRARY.failure:
        pytest.skip(native.LIBRARY.failure)
    return native.LIBRARY


@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count, ahead", [(1, 0), (31, 0), (16384, 0), (100_001, 0), (300_000, 70_001), (1 << 20, 0)])
def test_compiled_code_widens_as_torch_does_with_any_number_of_threads(
    library, monkeypatch, count, ahead, dtype, threads
):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    numbers = halves(count, dtype)
    for past_the_cache in (False, True, True):
        monkeypatch.setattr(native, "PAST_THE_CACHE", 0 if past_the_cache else count + 1)
        narrow, room = in_a_room(numbers, ahead)
        version = room._version
        assert library.widen(narrow, room)
        assert room._version > version
        assert torch.equal(room.view(torch.int32), numbers.float().view(torch.int32))


def test_compiled_code_does_not_widen_over_what_it_has_not_read(library):
    """Where the memory does not lie as it should, it refuses; other types and NaNs in FP16 are torch's as well."""
    room = torch.zeros(100)
    narrow = room.view(torch.bfloat16)[99:199]
    assert not library.widen(narrow, room)
    assert not library.widen(narrow[:0], room[:0])
    assert not library.widen(torch.zeros(4, dtype=torch.float64), room[:4])
    half = room.view(torch.float16)[100:]
    half[70] = float("nan")
    assert not library.widen(half, room)
    half[70] = 0
    assert not room.any()


def test_wrong_widening_is_never_used(library, monkeypatch):
    code = library._code
    assert native._widens(code, torch.bfloat16)
    monkeypatch.setattr(native, "WIRES", {torch.bfloat16: 2})  # the number of the other type
    assert not native._widens(code, torch.bfloat16)


def slots_of(sizes, dtypes, flat):
    """Lay out slots as a slab does, without padding but to its alignment."""
    narrow = sum(aligned(2 * size) for size in sizes)
    first = 0
    for size, dtype in zip(sizes, dtypes, strict=True):
        at = narrow + first
        wide = flat[2 * first : 2 * first + 4 * size].view(torch.float32)
        yield GradientSlot(flat[at : at + 2 * size].view(dtype), flat, at, wide, 2 * first)
        first += aligned(2 * size)


@pytest.mark.parametrize("missing", [None, 0, 1, 3])
def test_gradients_side_by_side_are_widened_together(missing):
    """All of one type; what lies between those that are widened is not written."""
    sizes, half = [300, 1, 70_000, 128, 5], torch.bfloat16
    dtypes = [half, half, half, torch.float16, torch.float16]
    flat = torch.zeros(4 * sum(sizes) + 10 * ALIGNMENT, dtype=torch.uint8)
    slots = list(slots_of(sizes, dtypes, flat))
    expected = [halves(size, dtype) for size, dtype in zip(sizes, dtypes, strict=True)]
    for slot, numbers in zip(slots, expected, strict=True):
        slot.tensor.copy_(numbers)
    widening = [index for index in range(len(slots)) if index != missing]
    runs = list(runs_to_widen(slots[index] for index in widening))
    assert len(runs) == {None: 2, 0: 2, 1: 3, 3: 2}[missing]
    for narrow, wide in runs:
        widened(narrow, wide)
    for index in widening:
        assert torch.equal(slots[index].wide_view.view(torch.int32), expected[index].float().view(torch.int32))


def test_a_bad_value_is_refused():
    with pytest.raises(sp_lightning.errors.OptionError, match=r"wire_dtype must be one of 'auto', 'as-is', got 'bf16'"):
        sp_lightning.SuperpipelineStrategy(wire_dtype="bf16")


class ScalingLayer(Layer):
    """Writes a weight of its own in forward, beside one that travels cast."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(models.WIDTH))

    def forward(self, x):
        with torch.no_grad():
            self.scale.mul_(0.9)
        return super().forward(x) * self.scale


def test_what_a_forward_wrote_travels_to_its_backward_beside_what_travels_cast(device):
    stats = check(models.stack_of(ScalingLayer), training(), device)
    assert stats["writebacks"] == 4 * (LATE + 3)
