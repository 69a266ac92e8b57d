"""Forwards inside of other phases of a step: each phase by itself is tested elsewhere."""

from __future__ import annotations

import pytest
import torch
from side_by_side import blocks, check, inputs, sgd, squares, training
from torch import nn
from torch.utils.checkpoint import checkpoint

import models
import parity


class Rolling(nn.Module):
    """Generates with its inner net, and is trained on what it generated."""

    def __init__(self):
        super().__init__()
        self.net = blocks()
        self.scale = nn.Parameter(torch.ones(models.CLASSES))

    def forward(self, x):
        return self.net(x) * self.scale

    def generate(self, x):
        for _ in range(2):
            x = x + self(x).mean() * self.scale.mean()
        return x


class Imagining(nn.Module):
    """A forward that generates, with gradients or without, before and after its own use of the same weights."""

    def __init__(self):
        super().__init__()
        self.inner = Rolling()

    def forward(self, x):
        first = self.inner(x)
        with torch.no_grad():
            told = self.inner.generate(x)
        imagined = self.inner.generate(x)
        return first * self.inner.scale + self.inner(told) + self.inner(imagined)


class Checkpointed(nn.Module):
    """A model with its own root in a checkpoint, and a layer of it beside."""

    def __init__(self):
        super().__init__()
        self.net = blocks()
        self.back = nn.Linear(models.CLASSES, models.FEATURES)

    def forward(self, x):
        return self.back(self.net(x))


def two_forwards(net, x):
    return (net(x).square() + net(x * 0.5).square()).mean()


def with_a_prediction(net, x):
    hidden = net(x)
    with torch.no_grad():
        target = net(x * 0.5)
    return (hidden - target).square().mean()


def with_a_gradient_of_the_input(net, x):
    x = x.detach().requires_grad_()
    (grad,) = torch.autograd.grad(net(x).square().mean(), x)
    return (net(x + grad).square()).mean()


def recomputed(reentrant):
    def loss(net, x):
        x = x.detach().requires_grad_()
        hidden = checkpoint(net, x, use_reentrant=reentrant)
        again = checkpoint(net, hidden, use_reentrant=reentrant)
        return net.back(net.net(again)).square().mean()

    return loss


LOSSES = {
    "a generate inside a step": (Imagining, squares),
    "two forwards before one backward": (blocks, two_forwards),
    "a prediction before a backward": (blocks, with_a_prediction),
    "autograd.grad before a backward": (blocks, with_a_gradient_of_the_input),
    "a forward of the whole in backward": (Checkpointed, recomputed(False)),
    "a forward of the whole in a reentrant backward": (Checkpointed, recomputed(True)),
}


def stepping(loss):
    """Trains with a closure."""

    def run(net, device):
        optimizer = sgd(net)
        for x in inputs(device):

            def closure(x=x):
                optimizer.zero_grad()
                value = loss(net, x)
                value.backward()
                return value

            yield optimizer.step(closure), [p.grad for p in net.parameters()]

    return run


@parity.product(window=[1, 3], how=[training, stepping], case=list(LOSSES), device=parity.DEVICES)
@pytest.mark.few(2)
def test_a_forward_inside_another_phase(device, case, how, window):
    make, loss = LOSSES[case]
    check(make, how(loss), device, window=window)


@parity.product(activations=["recompute", "offload"], case=list(LOSSES), device=parity.DEVICES)
@pytest.mark.few(1)
def test_a_forward_inside_another_phase_with_other_activations(device, case, activations):
    make, loss = LOSSES[case]
    check(make, training(loss), device, activations=activations)


@pytest.mark.few(1)
def test_predictions_between_accumulated_batches(device):
    def run(net, device):
        optimizer = sgd(net)
        for index, x in enumerate(inputs(device, 6)):
            loss = squares(net, x)
            with torch.no_grad():
                yield net(x * 0.5)
            loss.backward()
            with torch.no_grad():
                yield loss, net(x * 2)
            if index % 2:
                optimizer.step()
                optimizer.zero_grad()

    check(blocks, run, device)
