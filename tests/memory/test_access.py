"""What works on gradients or reads host bytes is in the ledger while it does, and who asks waits for nothing else."""

from __future__ import annotations

import pytest
import torch
from side_by_side import blocks, inputs, squares

import sp_lightning


@pytest.fixture
def streamed(device):
    """A streamed net, the first weight of a block, what is entered in the ledger, and a loss."""
    net = blocks()
    with sp_lightning.stream(net, device, window=1) as handle:
        yield handle, net.blocks[0], handle.engine.access.gradients, squares(net, next(inputs(device)))


def test_a_backward_is_entered_until_its_end(streamed):
    _, block, entered, loss = streamed
    seen = []
    block.up.weight.register_hook(lambda _: seen.append(len(entered)))
    assert not entered
    loss.backward()
    assert seen == [1] and not entered


def test_a_backward_that_failed_is_entered_until_the_next_forward(streamed):
    handle, block, entered, loss = streamed

    def fail(*_):
        raise ZeroDivisionError

    hook = block.up.weight.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    hook.remove()
    assert len(entered) == 1
    handle.module(next(inputs(loss.device)))
    assert not entered


def test_a_fill_is_entered_until_user_code_goes_on(streamed):
    handle, block, _, loss = streamed
    fills, seen = handle.engine.access.fills, []
    assert not fills
    block.up.weight.register_hook(lambda _: seen.append(len(fills)))
    loss.backward()
    assert seen[0] > 0 and not fills


@pytest.mark.parametrize("device", ["simgpu"], indirect=True)  # where the CPU computes, nothing is given to user code
def test_no_fill_is_under_way_once_user_code_has_read_a_weight_on_the_device(device):
    net = blocks()
    with sp_lightning.stream(net, device, window=2) as handle, torch.no_grad():
        net(next(inputs(device)))
        fetches = handle.stats()["fetches"]
        assert (net.blocks[1].up.weight + torch.ones((), device=device)).device == device
        assert handle.stats()["fetches"] > fetches and not handle.engine.access.fills
