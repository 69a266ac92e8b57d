"""What travels between host and device, counted and seen on the device: as much as the schedule says, and no more.

The ledger (traffic.py) checks this for every cell of test_exactness.py, too.
"""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from side_by_side import sgd, squares
from torch import nn

import models
import sp_lightning
from sp_lightning.memory import layout

BLOCKS = 8
uniform = models.stack_of(models.Block, BLOCKS)  # and a small stem and head, which are resident


@contextlib.contextmanager
def streaming(make, device, **options):
    torch.manual_seed(0)
    module = make()
    with sp_lightning.stream(module, device, **options) as handle:
        yield module, handle


def train(module, device, loss=squares, stepping=True, steps=1):
    """Steps of training on the same batch, which is on the device already; the loss stays there."""
    x = models.vectors(0)[0].to(device)
    optimizer = sgd(module)
    for _ in range(steps):
        if stepping:
            optimizer.zero_grad()
        loss(module, x).backward()
        if stepping:
            optimizer.step()


def added(handle, run):
    """What the counters gained while `run` ran."""
    before = handle.stats()
    run()
    after = handle.stats()
    return {name: after[name] - before[name] for name in ("fetches", "bytes_up", "bytes_down", "bytes_written_back")}


def blocks_of(handle):
    return [unit for unit in handle.units if not unit.resident]


def gradient_nbytes(parameters):
    return sum(p.grad.numel() * p.grad.element_size() for p in parameters if p.grad is not None)


# --- Up


@pytest.mark.parametrize("window", range(1, BLOCKS + 1))
@pytest.mark.few(3)
def test_a_training_step_fetches_each_unit_twice_less_the_window_and_the_root_once(device, window):
    with streaming(uniform, device, window=window) as (net, handle):
        train(net, device, steps=2)
        step = added(handle, lambda: train(net, device))
        block, root = handle.units[0].nbytes, handle.units[-1].nbytes
    assert step["fetches"] == 2 * BLOCKS - window + 1
    assert step["bytes_up"] == (2 * BLOCKS - window) * block + root


@pytest.mark.parametrize("window", [1, 2, 5, BLOCKS])
@pytest.mark.few(3)
def test_what_is_resident_stays_between_micro_batches(device, window):
    with streaming(uniform, device, window=window) as (net, handle):
        train(net, device, stepping=False)
        step = added(handle, lambda: train(net, device, stepping=False))
    # Forward begins with the units with which backward ended; with one place, the turn is the only unit visited twice.
    assert step["fetches"] == 2 * (BLOCKS - window)


# --- Down


def test_gradients_that_exist_come_down_once(device):
    with streaming(uniform, device, window=2) as (net, handle):
        step = added(handle, lambda: train(net, device))
        assert step["bytes_down"] == gradient_nbytes(net.parameters()) == sum(4 * p.numel() for p in net.parameters())


def test_frozen_units_send_no_gradients_and_a_frozen_prefix_is_not_fetched_for_backward(device):
    with streaming(models.frozen_prefix, device, window=1) as (net, handle):
        train(net, device)
        step = added(handle, lambda: train(net, device))
        trainable = [p for p in net.parameters() if p.requires_grad]
        assert step["bytes_down"] == sum(4 * p.numel() for p in trainable)
        frozen = [unit for unit in blocks_of(handle) if not unit.trainable]
        root, block = handle.units[-1], blocks_of(handle)[0]
        assert len(frozen) == 2 and root.resident
        # Forward fetches four blocks; backward has the last one, fetches the third, and needs no other.
        stepped = (len(blocks_of(handle)) + 1) * block.nbytes + root.nbytes
        assert step["bytes_up"] == stepped


@pytest.mark.parametrize("block", [models.RescalingBlock, models.DataRescalingBlock])
def test_weights_come_down_only_where_the_model_wrote_them(device, block):
    with streaming(models.stack_of(block, 4), device, window=1) as (net, handle):
        step = added(handle, lambda: train(net, device))
        assert step["bytes_written_back"] == 4 * 4 * net.blocks[0].weight.numel()
        assert step["bytes_down"] == gradient_nbytes(net.parameters())


class Shifted(models.Stack):
    """Blocks within a module that has a weight of its own, whose unit is visited as long as they run."""

    def __init__(self, blocks):
        super().__init__(blocks)
        self.shift = nn.Parameter(torch.zeros(models.WIDTH))

    def run(self, x):
        return super().run(x + self.shift)


class InParts(models.Stack):
    """Calls what its blocks consist of, as models do that run two towers side by side."""

    def run(self, x):
        for block in self.blocks:
            x = x + block.down(block.up(x))
        return x


@pytest.mark.parametrize("activations", ["keep", "recompute", "offload"])
@pytest.mark.parametrize("kind", [models.Stack, Shifted, InParts])
def test_activations_that_an_option_does_not_reach_are_named_once(kind, activations, device, caplog):
    make = functools.partial(kind, [models.Block() for _ in range(4)])
    with streaming(make, device, activations=activations, units=["Block"]) as (net, _), torch.no_grad():
        net(models.vectors(0)[0].to(device))  # nothing is saved here
        with torch.enable_grad():
            train(net, device, steps=3)
    said = [message for message in caplog.messages if "does not reach" in message]
    if kind is InParts and activations != "keep":
        assert [message.split(", because")[0] for message in said] == [
            f"superpipeline: activations={activations!r} does not reach blocks.0 and 3 more"
        ]
    else:
        assert said == []


# --- As the device saw it


def copies(traced):
    """Bytes copied up and down."""
    return [sum(op.nbytes for op in traced if op.name == f"copy {way}") for way in ("H2D", "D2H")]


@pytest.mark.simgpu
@pytest.mark.parametrize("name", ["mlp", "tied_embedding", "adapters", "dropout", "spectral_norm"])
@pytest.mark.parametrize("activations", ["keep", "recompute", "offload"])
def test_no_byte_crosses_that_is_not_counted(name, activations):
    import simgpu

    case, device = models.case(name), torch.device("simgpu", 0)
    with streaming(case.make, device, window=2, activations=activations) as (net, handle):
        batch = torch.utils._pytree.tree_map(lambda tensor: tensor.to(device), case.batch(0))
        before = handle.stats()
        with simgpu.trace() as traced:
            case.loss(net, batch).backward()
        after = handle.stats()
        moved = {key: after[key] - before[key] for key in before if key.startswith("bytes_")}
        gaps = layout.ALIGNMENT * sum(p.grad is not None for p in net.parameters())  # gradients come down as one
    up, down = copies(traced)
    assert up == moved["bytes_up"] + moved["bytes_brought_back"]
    assert 0 <= down - moved["bytes_down"] - moved["bytes_offloaded"] < gaps
    assert moved["bytes_down"] == gradient_nbytes(net.parameters())
    assert bool(moved["bytes_offloaded"]) == (activations == "offload")


# --- The ledger sees what is not as it should be
