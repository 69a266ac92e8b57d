"""Weights that travel in autocast's type: whatever reads them finds what a plain run has, on both cores.

A weight that qualified in the first step may be read in any other way in a later one: each way is a test here.
"""

from __future__ import annotations

import contextlib
import copy
import functools

import pytest
import side_by_side
import torch
import torch.nn.functional as F
from side_by_side import inputs, sgd, squares
from torch import nn
from torch.utils.checkpoint import checkpoint

import models
import parity

check = functools.partial(side_by_side.check, wire_dtype="auto")

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


@parity.product(activations=["keep", "recompute", "offload"], accumulate=[1, 3], device=parity.DEVICES)
@pytest.mark.few(1)
def test_training_is_exact(device, activations, accumulate):
    check(layers, training(accumulate=accumulate), device, window=2, activations=activations)


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

    check(convolutions, run, device)


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
    check(layers, training(READS[name]), device, window=1, activations=activations)


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


def penalty(net):
    return sum(p.square().sum() for p in net.parameters())


def test_a_penalty_from_the_first_step_on_is_exact(device):
    def run(net, device):
        for x in inputs(device, 3):
            with autocast(device):
                loss = during(before=penalty)(net, x)
            loss.backward()
            yield loss, [p.grad for p in net.parameters()]
            net.zero_grad()

    check(looking, run, device)


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


def test_hooks_on_parameters_get_gradients_as_they_are(device):
    def run(net, device):
        seen = []
        for name, p in net.named_parameters():
            p.register_hook(lambda grad, name=name: seen.append((name, grad.dtype, grad.clone())))
        yield from training()(net, device)
        yield [[name, dtype, grad] for name, dtype, grad in sorted(seen, key=lambda entry: entry[0])]

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


@pytest.mark.xfail(reason="a graph refers to the weight that the host cast, where a plain run's has a cast of its own")
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


FAKES = "dynamo makes fake tensors of leaves, which lend themselves"


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("whole", [pytest.param(True, marks=pytest.mark.xfail(reason=FAKES)), False])
@pytest.mark.few(1)
def test_what_is_compiled_inside_a_unit_finds_layers_as_they_are(whole, activations):
    torch.compiler.reset()
    check(models.stack_of(lambda: Compiling(whole)), training(), torch.device("cpu"), activations=activations)
