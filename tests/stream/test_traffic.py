"""What travels between host and device, counted and seen on the device: as much as the schedule says, and no more."""

from __future__ import annotations

import contextlib

import pytest
import torch
from often import often
from side_by_side import sgd, squares

import models
import sp_lightning
from sp_lightning.host.device import aligned

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
    return {name: after[name] - before[name] for name in ("fetches", "bytes_up", "bytes_down")}


def blocks_of(handle):
    return [unit for unit in handle.units if not unit.is_held]


# --- Up


@pytest.mark.parametrize("window", often([3, 1, BLOCKS]))
def test_a_training_step_fetches_each_unit_twice_less_the_window(device, window):
    with streaming(uniform, device, window=window) as (net, handle):
        train(net, device, steps=2)
        step = added(handle, lambda: train(net, device))
    assert step["fetches"] == 2 * BLOCKS - window
    assert step["bytes_up"] == (2 * BLOCKS - window) * handle.units[0].nbytes


@pytest.mark.parametrize("window", often([2, 1, BLOCKS]))
def test_what_is_resident_stays_between_micro_batches(device, window):
    with streaming(uniform, device, window=window) as (net, handle):
        train(net, device, stepping=False)
        step = added(handle, lambda: train(net, device, stepping=False))
    # Forward begins with the units with which backward ended; with one place, the turn is the only unit visited twice.
    assert step["fetches"] == 2 * (BLOCKS - window)


# --- Down


def test_a_frozen_prefix_sends_no_gradients_and_skips_backward(device):
    with streaming(models.frozen_prefix, device, window=1) as (net, handle):
        train(net, device)
        step = added(handle, lambda: train(net, device))
        least, most = (sum(aligned(p.nbytes) for p in of.parameters() if p.requires_grad) for of in (net.blocks, net))
        assert least <= step["bytes_down"] <= most
        # Forward fetches four blocks; backward has the last one, fetches the third, and needs no other.
        assert step["bytes_up"] == (len(blocks_of(handle)) + 1) * blocks_of(handle)[0].nbytes


@pytest.mark.simgpu
@pytest.mark.parametrize("window", often([1, 2, 4]))
def test_gradients_never_pile_up_on_the_device(window):
    device = torch.device("simgpu", 0)
    with streaming(models.stack_of(Wide, BLOCKS), device, window=window, activations="recompute") as (net, handle):
        train(net, device, stepping=False, steps=3)
        torch.accelerator.reset_peak_memory_stats()
        train(net, device, stepping=False)
        peak = torch.accelerator.max_memory_allocated()
        block = max(unit.nbytes for unit in blocks_of(handle))
        root = handle.stats()["resident_root_bytes"]
    assert peak < (window + 4) * block + 2 * root + block / 2  # activations are less than the half of a block


@pytest.mark.simgpu
def test_a_backward_leaves_nothing_on_the_device():
    device = torch.device("simgpu", 0)
    with streaming(models.stack_of(Wide, 4), device, window=1) as (net, _):
        seen = []
        net.blocks[1].register_forward_pre_hook(lambda *_: seen.append(torch.accelerator.memory_allocated()))
        for _ in range(3):
            train(net, device, stepping=False)
            net.zero_grad()
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.simgpu
def test_what_went_down_is_gone_before_it_comes_back():
    made, nbytes = torch.nn.Sequential(*(Saving() for _ in range(4))), 4 * 2**18
    with sp_lightning.stream(made, "simgpu", window=1, units=["Saving"], activations="offload") as handle:
        made(torch.ones(2**12, 64)).sum().backward()
        # Results that two units saved, four each: what comes back, and what comes next. Then what compute makes.
        assert handle.stats()["device_peak"] < (2 * 4 + 5) * nbytes


class Saving(torch.nn.Module):
    """A module that saves three results as large as its own."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Tanh())

    def forward(self, x):
        return x + self.inner(x).sin()


class Wide(models.Block):
    """A block whose weights are larger than what it saves."""

    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(models.WIDTH, 512), torch.nn.Linear(512, models.WIDTH)
