"""`sp_lightning.stream`: a loop of the user's own, and what is there before, between and after its steps."""

from __future__ import annotations

import copy
import gc
import itertools
import logging
import time
import types

import pytest
import torch
from often import often
from side_by_side import assert_plain, blocks, check, inputs, sgd, squares
from stream_programs import streamed
from torch import nn

import models
import sp_lightning
from sp_lightning import errors


def train(net, device, steps=2):
    optimizer = sgd(net)
    for x in inputs(device, steps):
        optimizer.zero_grad()
        loss = squares(net, x)
        loss.backward()
        optimizer.step()
    return loss.item()


def used_bytes(device):
    return torch.accelerator.memory_allocated() if device.type == "simgpu" else 0


def test_parameters_are_the_same_host_objects_between_steps(device):
    net = blocks()
    before = dict(net.named_parameters())
    with streamed(net, device, window=2):
        train(net, device)
        after = dict(net.named_parameters())
        assert list(after) == list(before) and all(after[name] is before[name] for name in before)
        assert all(isinstance(p, nn.Parameter) and p.is_leaf and p.device.type == "cpu" for p in after.values())
        assert all(p.grad.device.type == "cpu" for p in after.values())


def test_a_closed_module_is_plain_trained_and_off_the_device(device):
    torch.manual_seed(0)
    net = models.stack_of(models.NormedBatchBlock)()
    plain = copy.deepcopy(net).to(device)
    train(plain, device)
    plain.to("cpu")
    before = used_bytes(device)
    handle = streamed(net, device, window=2)
    train(net, device)
    net.zero_grad()
    handle.close()
    del handle
    assert_plain(net)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(net.buffers(), plain.buffers(), strict=True))
    assert used_bytes(device) == before


class OnItsLayerBlock(models.Block):
    """Leaves its last graph at one of its layers."""

    def forward(self, x):
        self.up.last = self.up(self.norm(x))
        return x + self.down(self.up.last)


@pytest.mark.simgpu
# All but the first block keep their last graph; one that torch's checkpoint made leads to the module in any case.
@pytest.mark.parametrize(
    "activations, block",
    often(
        [
            ("recompute", models.Block),
            *itertools.product(["offload", "keep"], [models.Block, models.AuxiliaryBlock, OnItsLayerBlock]),
        ],
        ("recompute", models.Block),
        ("offload", OnItsLayerBlock),
    ),
)
@pytest.mark.parametrize("autocast", often([True, False]))
def test_no_host_memory_outlives_the_module(activations, block, autocast):
    import simgpu

    before = simgpu.pinned_bytes()[0]  # of whoever else is still alive
    net, device = models.stack_of(block)(), torch.device("simgpu", 0)
    handle = streamed(net, device, window=2, activations=activations)
    with torch.autocast("simgpu", torch.bfloat16, enabled=autocast):
        train(net, device)
    assert simgpu.pinned_bytes()[0] > before
    handle.close()
    del handle, net
    patience = time.monotonic() + 10  # autograd's own thread lets go of the last graph when it comes to it
    while gc.collect() or (simgpu.pinned_bytes()[0] > before and time.monotonic() < patience):
        time.sleep(0.01)
    assert simgpu.pinned_bytes()[0] <= before


def test_the_module_runs_plainly_afterwards_and_streams_again(device):
    torch.manual_seed(0)
    net = blocks()
    plain = copy.deepcopy(net).to(device)
    expected = [train(plain, device) for _ in range(3)]
    for index in (0, 2):
        with streamed(net, device, window=1):
            assert train(net, device) == expected[index]
        if index == 0:
            assert train(net.to(device), device) == expected[1]
            net.to("cpu")


def test_close_is_safe_twice_and_a_figure_can_be_read_after_it(device):
    net = blocks()
    handle = sp_lightning.stream(net, device, window=2)
    train(net, device)
    handle.close()
    handle.close()
    assert handle.closed and handle.stats()["fetches"] > 0
    assert_plain(net)


def test_a_wrong_option_leaves_a_plain_module(device):
    net = blocks()
    with pytest.raises(errors.OptionError, match=r"window must be an int >= 1 or 'auto', got 0"):
        sp_lightning.stream(net, device, window=0)
    assert_plain(net)


def test_nothing_is_logged_above_info(device, caplog):
    with (
        caplog.at_level(logging.DEBUG, logger="sp_lightning"),
        sp_lightning.stream(blocks(), device, window=2) as handle,
    ):
        train(handle.module, device)
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


def reading_the_head(self, x):
    """Without a call of the head, as a fused loss reads it."""
    return nn.functional.linear(self.run(self.stem(x)), self.head.weight, self.head.bias)


@pytest.mark.parametrize("wraps", [False, True])
def test_a_forward_that_is_set_while_it_streams_is_a_step(device, wraps):
    def run(net, device):
        before = net.forward
        net.forward = (lambda x: before(2 * x)) if wraps else types.MethodType(reading_the_head, net)
        optimizer = sgd(net)
        for x in inputs(device):
            loss = squares(net, x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss
        with torch.no_grad():
            yield net(x)
        net.forward = before

    check(blocks, run, device)
