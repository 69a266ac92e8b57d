"""Weights and gradients that user code writes outside of any forward: through views, storages and data.

In manual optimization the hooks around backward run inside of the training step, where a read of a weight is given its
stand-in: a view of that is written after the read's visit has ended.
"""

from __future__ import annotations

import lightning as L
import pytest
import torch
from side_by_side import blocks, check, fit, inputs, sgd, squares, training
from torch import nn

import models
import parity
import sp_lightning
from sp_lightning.errors import ExactnessError


def in_turns(p):
    p[0].mul_(0.5)
    p.mul_(0.9)
    p[0].mul_(0.5)


def by_item(p):
    p[..., -1] *= 0.5


def by_data_of_a_copy(p):
    p.view(-1)[0] = 0.25
    p.data[-1].add_(p.data[0])


WRITES = {
    "row": lambda p: p[0].mul_(0.5),
    "element": lambda p: p.view(-1)[0].fill_(0.25),
    "item": by_item,
    "whole": lambda p: p.mul_(0.9),
    "in turns": in_turns,
    "transposed": lambda p: p.t()[0].mul_(0.5),
    "narrow": lambda p: p.narrow(0, 0, 2).mul_(0.5),
    "chunk": lambda p: p.chunk(2)[0].mul_(0.5),
    "as_strided": lambda p: p.as_strided((2,), (1,)).mul_(0.5),
    "as_strided from its offset": lambda p: p.as_strided((2,), (1,), p.storage_offset() + 1).mul_(0.5),
    "detached": lambda p: p.detach()[0].mul_(0.5),
    "data of a view": lambda p: p[0].data.mul_(0.5),
    "view, then data": by_data_of_a_copy,
}
MOMENTS = ["training_step", "on_after_backward", "on_before_optimizer_step", "on_train_batch_start"]


class Writing(L.LightningModule):
    """Writes to a weight of a block, to one of the head and to a bias at one moment of each training step."""

    def __init__(self, write, moment, manual):
        super().__init__()
        self.net, self.write, self.automatic_optimization = blocks(), write, not manual
        if moment != "training_step":
            setattr(self, moment, lambda *_: self.edit())
        self.edits_at_end = moment == "training_step"

    def edit(self):
        parameters = dict(self.net.named_parameters())
        with torch.no_grad():
            for name in ("blocks.1.up.weight", "blocks.2.down.bias", "head.weight"):
                self.write(parameters[name])

    def training_step(self, batch, _):
        if self.edits_at_end and self.automatic_optimization:
            self.edit()
        loss = squares(self.net, batch[0])
        self.losses.append(loss.detach().cpu())
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        if self.edits_at_end:
            self.edit()
        optimizer.step()
        return None

    def configure_optimizers(self):
        return sgd(self)


@parity.product(
    write=list(WRITES),
    moment=MOMENTS,
    manual=[True, False],
    window=[1, 6],
    device=parity.DEVICES,
)
@pytest.mark.few(2)
def test_a_weight_that_is_written_through_a_view(write, moment, manual, window, device):
    compare(lambda: Writing(WRITES[write], moment, manual), device, window)


@parity.product(write=list(WRITES), moment=["training_step", "on_after_backward"], device=parity.DEVICES)
@pytest.mark.few(2)
def test_a_weight_that_travels_in_autocasts_type_and_is_written_through_a_view(write, moment, device):
    compare(lambda: Writing(WRITES[write], moment, manual=True), device, precision="bf16-mixed")


def test_a_view_that_is_written_in_the_closure_of_a_manual_step(device):
    compare(lambda: Writing(WRITES["row"], "on_before_optimizer_step", manual=True), device)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("window", [1, 6])
@pytest.mark.few(1)
def test_a_view_that_is_written_in_a_step_before_the_unit_is_recomputed(window, precision, device):
    def make():
        return Writing(WRITES["row"], "training_step", manual=False)

    compare(make, device, window, precision, activations="recompute", units=["Block", "Linear"])


def compare(make, device, window=1, precision="32-true", **options):
    """Trains plainly, then streamed."""
    expected = fit(make, None, device, precision=precision)
    strategy = sp_lightning.SuperpipelineStrategy(window=window, **options)
    module = fit(make, strategy, device, precision=precision)
    assert all(map(torch.equal, module.losses, expected.losses))
    for (name, p), q in zip(module.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(p.cpu(), q.cpu()), name


class Striding(models.Block):
    def forward(self, x):
        bias = self.up.bias
        return super().forward(x) + bias.as_strided((2, 2), (1, 1), bias.storage_offset() + self.beyond).sum()


def test_elements_of_a_weight_by_their_offset_inside_its_forward(device):
    Striding.beyond = 1
    check(models.stack_of(Striding), training(), device)
    Striding.beyond = -40
    net = models.stack_of(Striding)()
    with sp_lightning.stream(net, device), pytest.raises(ExactnessError, match="leave the offset out"):
        net(next(inputs(device)))


@pytest.mark.parametrize("window", [1, 6])
def test_a_weight_that_is_written_through_its_kept_storage(window):
    def run(net, device):
        weight = net.blocks[1].up.weight
        kept, form = weight.untyped_storage(), (weight.storage_offset(), weight.shape, weight.stride())
        for x in inputs(device):
            with torch.no_grad():
                yield net(x)
                torch.empty(0).set_(kept, *form).mul_(0.5)
                yield net(x)

    check(blocks, run, torch.device("cpu"), window=window)


def test_the_kept_storage_of_a_gradient_keeps_the_gradient(device):
    def run(net, device):
        for x in inputs(device):
            squares(net, x).backward()
            gradient = net.blocks[1].up.weight.grad
            kept, form = gradient.untyped_storage(), (gradient.storage_offset(), gradient.shape, gradient.stride())
            del gradient
            net.zero_grad()
            squares(net, 2 * x).backward()
            yield torch.empty(0, device=kept.device).set_(kept, *form).cpu()

    check(blocks, run, device)


def test_a_kept_storage_of_the_optimizers_state_is_seen_as_in_the_plain_run(device):
    def run(net, device):
        optimizer, kept = sgd(net), None
        for x in inputs(device, 4):
            optimizer.zero_grad()
            squares(net, x).backward()
            optimizer.step()
            if kept is not None:
                yield torch.empty(0, device=kept.device).set_(kept).cpu()
            kept = optimizer.state[net.head.bias]["momentum_buffer"].untyped_storage()

    check(blocks, run, device)


def replace(one, other):
    one.data = one.data * 0.99
    other.data = one.data


def replace_twice(one, other):
    replace(one, other)
    one.data = other.data.view_as(other)


def replace_all(one, other):
    weights = [one, other]
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(weights) * 0.99, weights)
    other.data = one.data


@pytest.mark.parametrize("share", [replace, replace_twice, replace_all])
@pytest.mark.parametrize(
    "names", [("blocks.1.norm.bias", "blocks.1.down.bias"), ("blocks.0.up.weight", "blocks.2.up.weight")]
)
@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.few(2)
def test_weights_that_are_given_the_data_of_one_that_was_replaced_stay_aliases(share, names, step, device):
    def run(net, device):
        optimizer = sgd(net)
        for index, x in enumerate(inputs(device)):
            if index == step:
                share(*map(net.get_parameter, names))
            optimizer.zero_grad()
            squares(net, x).backward()
            optimizer.step()
            yield net(x).detach()

    check(blocks, run, device)
