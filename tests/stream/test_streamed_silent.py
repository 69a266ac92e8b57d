"""What used to differ silently between a plain run and a streamed one: each is the same now, or stated here."""

import contextlib
import random

import pytest
import torch
from often import often
from stream_programs import Block, Net, cases, check, collected, streamed
from torch import nn

PROGRAMS = []
program = collected(PROGRAMS)


@program(Net, "keep", "recompute")
def aliases_are_written_after_each_step(run, model):
    """An average of two weights, by views that were taken once."""
    optimizer = run.adamw(model.parameters())
    views = [(p.data, q.data) for p, q in zip(model.blocks[0].parameters(), model.blocks[3].parameters(), strict=True)]

    def step(model, optimizer, i):
        loss = run.step(model, optimizer, i)
        for one, other in views:
            one.lerp_(other, 0.1)
        return loss

    return run.loop(model, step, optimizer)


class Named(Block):
    """A block that finds its weights in dicts and lists of the user's."""

    def __init__(self):
        super().__init__()
        self.names = {weight: name for name, weight in self.named_parameters()}

    def forward(self, x):
        assert self.up.weight in self.names and self.names[self.down.bias] == "down.bias"
        known = [self.names[weight] for weight in self.parameters()]
        return super().forward(x) * len(known)


@program(lambda: Net(Named, 2), "keep", "recompute")
def weights_are_keys_in_their_forward(run, model):
    return run.loop(model)


class TwiceRead(nn.Module):
    """A weight that travels in autocast's type, read twice in one call, and once by another module."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, x):
        first = nn.functional.linear(x, self.inner.weight)
        return first + nn.functional.linear(first.relu(), self.inner.weight) + self.inner(x)


@program(lambda: Net(TwiceRead, 3), "keep", "recompute", wire=torch.bfloat16)
def a_narrow_weight_is_read_twice(run, model):
    def step(model, optimizer, i):
        with torch.autocast(run.device.type, torch.bfloat16, cache_enabled=False):
            loss = model(run.x(i)).square().mean()
        return run.train(loss, optimizer)

    return run.loop(model, step)


class Random(Block):
    def forward(self, x):
        import numpy

        return super().forward(x) * (1 + random.random()) * (1 + float(numpy.random.rand()))


@program(lambda: Net(Random, 3), "keep", "recompute")
def numbers_of_python_and_numpy_in_a_forward(run, model):
    import numpy

    random.seed(3)
    numpy.random.seed(3)
    return [*run.loop(model), random.random(), float(numpy.random.rand())]


class Scaling(Block):
    """A block that reads the gradients that earlier backwards left."""

    def forward(self, x):
        grads = [weight.grad for weight in self.parameters() if weight.grad is not None]
        return super().forward(x) / (1 + sum(grad.norm() for grad in grads))


@program(lambda: Net(Scaling, 3), "keep", "recompute", "offload")
def gradients_are_read_in_their_forward(run, model):
    optimizer = run.adamw(model.parameters())

    def step(model, optimizer, i):
        loss = model(run.x(i)).square().mean()
        loss.backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return run.loop(model, step, optimizer)


def scale_data(weight):
    weight.data.mul_(0.9)


def give_data(weight):
    weight.data = weight.data * 0.9


CAPTURED = {
    "copy_": lambda weight: weight.copy_(weight * 0.9),
    "detach": lambda weight: weight.detach().mul_(0.9),
    "data": scale_data,
    "given": give_data,
}


def captured(kind):
    """Make a program in which a hook inside a unit writes its weight, which it knows from before the stream."""

    @program(Net, "keep", "offload")
    def written(run, model):
        weight = model.blocks[1].up.weight

        @torch.no_grad()
        def hook(layer, args):
            CAPTURED[kind](weight)

        model.blocks[1].up.register_forward_pre_hook(hook)
        return run.loop(model)

    written.__name__ = f"hook_writes_by_{kind}"


for kind in CAPTURED:
    captured(kind)


@pytest.mark.parametrize("device", often(["simgpu", "cpu"]))
@pytest.mark.parametrize("program, policy", cases(PROGRAMS))
@pytest.mark.simgpu
def test_it_is_the_same_now(program, policy, device):
    check(program, device, policy)


def test_identity_in_a_forward_is_that_of_the_device_s_tensor():
    """`is` compares with the tensor on the device, as under FSDP2; `==`, `in` and keys find the parameter."""
    found = []

    class Asking(Block):
        def forward(self, x):
            found.append((self.up.weight is kept[0], self.up.weight in kept))
            return super().forward(x)

    model = Net(Asking, 1)
    kept = [model.blocks[0].up.weight]
    with streamed(model, "cpu"), contextlib.suppress(RuntimeError):
        model(torch.ones(4, 8))
    assert found == [(False, True)]
