"""Who looks at an optimizer's state in backward sees what a plain run shows there, or an error."""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging

import lightning as L
import pytest
import torch
from refusals import refusal
from side_by_side import StepsAtOnce, blocks, fit, squares

import parity
import sp_lightning
from sp_lightning import errors
from sp_lightning.compat.references import are_tensors_of_entry_shared

SAID = "the optimizer steps after backward, as "


def adamw(net):
    return torch.optim.AdamW(net.parameters(), lr=0.05, foreach=False)


def momentum(net):
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, foreach=False)


def rprop(net):
    return torch.optim.Rprop(net.parameters(), lr=0.05, foreach=False)


def with_a_scheduler(net):
    optimizer = adamw(net)
    return {
        "optimizer": optimizer,
        "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), "interval": "step"},
    }


def with_a_hook_on_its_state_dict(net):
    optimizer = adamw(net)
    optimizer.register_state_dict_post_hook(lambda self, found: {**found, "states": len(self.state)})
    return optimizer


class Passing(torch.autograd.Function):
    """Calls something in backward."""

    @staticmethod
    def forward(ctx, x, call):
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.call()
        return grad, None


class Net(L.LightningModule):
    """Looks at its optimizer's state in the backward of a block, from some batch on."""

    def __init__(self, make_optimizer=adamw, look=None, where="tensor", block=0, since=0):
        super().__init__()
        self.net, self.make_optimizer, self.look = blocks(), make_optimizer, look
        self.batches = itertools.count()
        self.since = since
        block = self.net.blocks[block]
        if where == "tensor":
            block.up.weight.register_hook(self.looked)
        elif where == "leaf":
            block.up.weight.register_post_accumulate_grad_hook(self.looked)
        elif where == "end":
            block.up.weight.register_hook(
                lambda _: torch.autograd.Variable._execution_engine.queue_callback(self.looked)
            )
        elif where == "inside":
            block.up.register_forward_hook(lambda *args: args[2].register_hook(self.looked) and None)
        elif where == "module":
            block.register_full_backward_hook(self.looked)
        else:
            block.register_forward_pre_hook(lambda _, args: (Passing.apply(args[0], self.looked), *args[1:]))

    def looked(self, *_):
        if self.look is not None and next(self.batches) >= self.since:
            self.losses.append(numbers(self.look(self)))

    def training_step(self, batch, batch_idx):
        return squares(self.net, batch[0])

    def configure_optimizers(self):
        return self.make_optimizer(self.net)


def numbers(seen):
    return [value.sum().item() if isinstance(value, torch.Tensor) else value for _, value in parity.leaves(seen)]


def compare(device, make, options=None, holds=False, **settings):
    """A plain fit and a streaming one; gives the latter's figures."""
    settings = {"callbacks": [] if holds else [StepsAtOnce()], **settings}
    expected = fit(make, None, device, **settings)
    strategy = sp_lightning.SuperpipelineStrategy(device=device, **{"window": 2, **(options or {})})
    actual = fit(make, strategy, device, **settings)
    assert actual.losses == expected.losses
    one, other = (module.trainer.optimizers[0].state_dict()["state"] for module in (actual, expected))
    assert numbers(one) == numbers(other)
    assert numbers(actual.state_dict()) == numbers(expected.state_dict())
    assert_nothing_withheld(actual.trainer.optimizers[0])
    return strategy.handle.stats()


def assert_nothing_withheld(optimizer):
    assert "state" in vars(optimizer) and not hasattr(torch.optim.Optimizer, "__getattr__")


def optimizer_of(module):
    return module.trainer.optimizers[0]


def last_weight(module):
    return module.net.blocks[3].up.weight


LOOKS = {
    "a weight's": lambda module: dict(optimizer_of(module).state[last_weight(module)]),
    "all": lambda module: [dict(state) for state in optimizer_of(module).state.values()],
    "how many": lambda module: len(optimizer_of(module).state),
    "state_dict": lambda module: optimizer_of(module).state_dict()["state"],
    "deepcopy": lambda module: list(copy.deepcopy(optimizer_of(module)).state.values()),
    "Lightning's": lambda module: dict(module.optimizers().state.get(last_weight(module), {})),
}


@parity.product(
    make_optimizer=[adamw, momentum, rprop, with_a_scheduler, with_a_hook_on_its_state_dict],
    look=["a weight's", "state_dict"],
    holds=[True, False],
    device=parity.DEVICES,
)
@pytest.mark.few(2)
def test_a_hook_in_backward_sees_state_of_before_the_step(make_optimizer, look, holds, device):
    compare(device, lambda: Net(make_optimizer, LOOKS[look]), holds=holds)


@parity.product(where=["leaf", "module", "function", "end"], look=list(LOOKS), device=parity.DEVICES)
@pytest.mark.few(2)
def test_so_does_whatever_else_runs_there(where, look, device):
    compare(device, lambda: Net(adamw, LOOKS[look], where))


@pytest.mark.few(1)
def test_with_accumulation_too(device):
    compare(device, lambda: Net(adamw, LOOKS["all"]), accumulate_grad_batches=2, max_epochs=2)


@pytest.mark.few(1)
def test_then_units_are_not_stepped_ahead_and_that_is_said_once(device, caplog):
    with caplog.at_level(logging.INFO, "sp_lightning"):
        stats = compare(device, lambda: Net(adamw, LOOKS["all"]), max_epochs=2, max_steps=8)
    assert stats["stepped_ahead"] == 0
    assert sum(SAID + "code in backward reads its state" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.few(1)
def test_where_nobody_looks_they_are(device):
    """All but one that has a hook."""
    assert compare(device, Net)["stepped_ahead"] == 3 * 27


@parity.product(overlap=[True, False], look=list(LOOKS), device=parity.DEVICES)
@refusal(
    "a hook in backward begins to read the optimizer's state when units were stepped already",
    errors.ExactnessError,
    "`optimizer_overlap=False`",
)
@pytest.mark.few(1)
def test_who_begins_to_look_when_units_are_stepped_is_told_so_by_an_error(look, overlap, device):
    options, modules = {"optimizer_overlap": overlap}, []
    match = r"read the optimizer's state .* stepped net\.blocks\.3, .* set optimizer_overlap=False"
    with pytest.raises(errors.ExactnessError, match=match) if overlap else contextlib.nullcontext():
        compare(device, lambda: modules.append(Net(adamw, LOOKS[look], since=2)) or modules[-1], options)
    assert_nothing_withheld(optimizer_of(modules[-1]))


@pytest.mark.few(1)
def test_who_begins_to_look_before_that_gets_what_he_asks_for(device, caplog):
    """And nothing is stepped ahead from then on."""
    with caplog.at_level(logging.INFO, "sp_lightning"):
        stats = compare(device, lambda: Net(adamw, LOOKS["all"], "inside", block=3, since=2), max_epochs=2, max_steps=8)
    assert stats["stepped_ahead"] == 28 and SAID + "code in backward reads its state" in caplog.text


class Checkpointed(Net):
    """As a whole: its forward runs once more inside backward, before any gradient is there."""

    def forward(self, x):
        return squares(self.net, x)

    def training_step(self, batch, batch_idx):
        return torch.utils.checkpoint.checkpoint(self, batch[0].requires_grad_(), use_reentrant=False)


@pytest.mark.parametrize("look, ahead", [(None, 3 * 27), ("all", 0)])
@pytest.mark.few(1)
def test_where_forward_runs_once_more_it_is_the_same(look, ahead, device):
    assert compare(device, lambda: Checkpointed(adamw, LOOKS.get(look)))["stepped_ahead"] == ahead


KEPT = {
    "the state": lambda optimizer, weight: optimizer.state,
    "a weight's": lambda optimizer, weight: optimizer.state[weight],
    "a tensor": lambda optimizer, weight: optimizer.state[weight]["exp_avg"],
    "a view": lambda optimizer, weight: optimizer.state[weight]["exp_avg"].view(-1),
    "state_dict": lambda optimizer, weight: optimizer.state_dict(),
}


class Keeps(Net):
    """What a hook in backward looks at."""

    def __init__(self, keep):
        super().__init__(adamw, lambda module: copy.deepcopy(module.kept), since=1)
        self.keep = keep

    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            self.kept = self.keep(optimizer_of(self), last_weight(self))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("keep", KEPT)
@pytest.mark.few(1)
def test_what_somebody_refers_to_is_not_stepped_ahead_and_all_else_is(keep, device):
    stats = compare(device, lambda: Keeps(KEPT[keep]))
    assert stats["stepped_ahead"] == (0 if keep in ("the state", "state_dict") else 3 * 26)


class Shares(Net):
    """Two weights count their steps together."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            state = optimizer_of(self).state
            state[last_weight(self)]["step"] = state[self.net.blocks[1].up.weight]["step"]
        return super().training_step(batch, batch_idx)


@pytest.mark.few(1)
def test_what_is_part_of_the_state_of_two_is_stepped_in_their_order(device):
    assert compare(device, Shares)["stepped_ahead"] == 3 * 25


def test_a_tensor_whose_references_can_not_be_counted_counts_as_kept():
    parameter = torch.zeros(1)
    assert not are_tensors_of_entry_shared({parameter: {"momentum": torch.zeros(1), "note": "mine"}}, parameter)
    assert are_tensors_of_entry_shared({parameter: {"momentum": torch.zeros(1).to_sparse()}}, parameter)


def test_that_somebody_refers_to_the_state_is_said(caplog):
    with caplog.at_level(logging.INFO, "sp_lightning"):
        compare(torch.device("cpu"), lambda: Keeps(KEPT["the state"]))
    assert SAID + "somebody else refers to the optimizer's state" in caplog.text


@pytest.mark.few(1)
def test_a_checkpoint_saved_after_a_later_backward_is_the_plain_runs(device, tmp_path):
    class Saves(L.Callback):
        def __init__(self, name):
            self.name = name

        def on_after_backward(self, trainer, module):
            if trainer.global_step == 2:
                trainer.save_checkpoint(tmp_path / self.name)

    def begin(self, trainer, module, batch, batch_idx):
        if batch_idx == 2:
            trainer.callbacks.append(Saves(self.name))

    for name, strategy in [("plain", None), ("streamed", sp_lightning.SuperpipelineStrategy(window=2, device=device))]:
        adds = L.Callback()
        adds.name, adds.on_train_batch_start = name, begin.__get__(adds)
        fit(lambda: Net(with_a_hook_on_its_state_dict), strategy, device, callbacks=[adds, StepsAtOnce()])
    one, other = (torch.load(tmp_path / name, weights_only=False) for name in ("plain", "streamed"))
    for key in ("state_dict", "optimizer_states"):
        assert numbers(one[key]) == numbers(other[key])
    assert strategy.handle.stats()["stepped_ahead"] > 0


def test_a_backward_that_fails_leaves_nothing_withheld(device):
    class Fails(Net):
        def looked(self, *_):
            if next(self.batches) == 2:
                raise ValueError("in backward")

    modules = []
    with pytest.raises(ValueError, match="in backward"):
        fit(lambda: modules.append(Fails()) or modules[0], sp_lightning.SuperpipelineStrategy(device=device), device)
    assert_nothing_withheld(optimizer_of(modules[0]))
