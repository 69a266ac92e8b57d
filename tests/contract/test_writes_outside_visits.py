"""Weights that user code writes outside of any forward: whole ones, and parts of them through views, on both cores."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from cores import strategy
from side_by_side import blocks, fit, sgd, squares

import parity


def by_item(p):
    p[..., -1] *= 0.5


WRITES = {
    "row": lambda p: p[0].mul_(0.5),
    "element": lambda p: p.view(-1)[0].fill_(0.25),
    "item": by_item,
    "whole": lambda p: p.mul_(0.9),
    "transposed": lambda p: p.t()[0].mul_(0.5),
    "detached": lambda p: p.detach()[0].mul_(0.5),
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


def compare(make, device, window=1, precision="32-true"):
    """Trains plainly, then streamed."""
    expected = fit(make, None, device, precision=precision)
    module = fit(make, strategy(device, window=window), device, precision=precision)
    assert all(map(torch.equal, module.losses, expected.losses))
    for (name, p), q in zip(module.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(p.cpu(), q.cpu()), name
