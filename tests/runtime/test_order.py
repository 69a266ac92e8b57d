"""When things happen: gradients leave as soon as they are made, and the next unit comes while one computes."""

from __future__ import annotations

import contextlib
import itertools
import time

import pytest
import torch
from side_by_side import sgd, squares
from torch import nn

import models
import simgpu
import sp_lightning

DEVICE = torch.device("simgpu", 0)
BLOCKS = 8
BACKWARD = [f"{what} {index}" for index in reversed(range(BLOCKS)) for what in ("block", "gradients")]


class Distinct(nn.Module):
    """Its width, and so the bytes of all that it does, tells which block it is."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.hidden = 512 + 16 * index
        self.down = nn.Linear(models.WIDTH, self.hidden)
        self.up = nn.Linear(self.hidden, models.WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.up(self.down(x).relu())


@contextlib.contextmanager
def streaming(device=DEVICE, **options):
    """A stack of such blocks that has learned its order; operators that are called for the first time would wait."""
    torch.manual_seed(0)
    net = models.Stack(Distinct(index) for index in range(BLOCKS))
    with sp_lightning.stream(net, device, **options) as handle:
        x = models.vectors(0)[0].to(device)
        for _ in range(2):
            train(net, x)
            with torch.no_grad():
                net(x)
        yield net, handle, x


def train(net, x):
    optimizer = sgd(net)
    squares(net, x).backward()
    optimizer.step()
    optimizer.zero_grad()


def without_repeats(events):
    return [event for event, _ in itertools.groupby(events)]


# --- Gradients


@pytest.mark.parametrize("window", [1, 2, BLOCKS])
@pytest.mark.parametrize("activations", ["keep", "recompute", "offload"])
def test_gradients_of_a_block_are_there_before_the_next_block_begins_its_backward(window, activations):
    events = []  # on the CPU, where autograd has one thread; else another one accumulates what has come down

    def say_when_backward_arrives(index):
        def hook(_block, _inputs, output):
            output.register_hook(lambda _: events.append(f"block {index}"))

        return hook

    with streaming("cpu", window=window, activations=activations) as (net, _, x):
        for index, block in enumerate(net.blocks):
            block.register_forward_hook(say_when_backward_arrives(index))
            for parameter in block.parameters():
                parameter.register_hook(lambda _, index=index: events.append(f"gradients {index}"))
        squares(net, x).backward()
    assert without_repeats(events) == BACKWARD


@pytest.mark.parametrize("window", [1, 2, BLOCKS])
@pytest.mark.parametrize("activations", ["keep", "recompute", "offload"])
@pytest.mark.few(1)
def test_the_device_packs_gradients_of_a_block_before_the_backward_of_the_next(window, activations):
    with streaming(window=window, activations=activations) as (net, _, x):
        loss = squares(net, x)
        with simgpu.trace() as traced:
            loss.backward()
        events = {}
        for index, block in enumerate(net.blocks):
            events["aten::threshold_backward", 3 * 4 * models.BATCH * block.hidden] = f"block {index}"
            events["copy D2D", 4 * block.up.weight.numel()] = f"gradients {index}"
    assert without_repeats(events[op[1:3]] for op in traced if op[1:3] in events) == BACKWARD


def test_gradients_of_a_block_are_gone_before_those_of_the_next_are_packed():
    with streaming(window=2) as (net, _, x):
        loss = squares(net, x)
        simgpu.config.d2h_us = 2000  # as slow as that, backward would be over before they are down
        with simgpu.trace() as traced:
            loss.backward()
        size = 4 * net.blocks[0].up.weight.numel()  # of the smallest
    names = {"copy D2D": "pack", "copy D2H": "send"}
    events = [names[op.name] for op in traced if op.nbytes >= size and op.name in names]
    assert without_repeats(events) == ["pack", "send"] * BLOCKS


@pytest.mark.parametrize("window", [1, 2, 4])
@pytest.mark.few(1)
def test_gradients_never_pile_up_on_the_device(window):
    with streaming(window=window, activations="recompute") as (net, handle, x):
        squares(net, x).backward()
        torch.accelerator.reset_peak_memory_stats()
        squares(net, x).backward()
        peak = torch.accelerator.max_memory_allocated()
        block = max(unit.nbytes for unit in handle.units if not unit.resident)
        root = handle.stats()["resident_root_bytes"]
    assert peak < (window + 2) * block + 2 * root + block / 2  # activations are less than the half of a block


# --- Prefetch


def wait_until_there(unit):
    """Whether a unit's bytes arrive, while nothing else goes on."""
    patience = time.monotonic() + 10
    while time.monotonic() < patience:
        if unit.store.on_device.is_loaded and unit.store.on_device.ready.query():
            return True
        time.sleep(0.001)
    return False


@pytest.mark.parametrize("window", [2, 3])
@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad])
def test_the_next_unit_comes_up_while_the_forward_of_one_computes(window, context):
    came = []
    with streaming(window=window) as (net, handle, x), context():
        for block, following in zip(net.blocks[:-1], handle.engine.units[1:], strict=False):

            def wait_inside(*_, following=following):
                with simgpu.hold():
                    came.append(wait_until_there(following))

            block.up.register_forward_pre_hook(wait_inside)
        net(x)
    assert came == [True] * (BLOCKS - 1)


@pytest.mark.parametrize("window", [2, 3])
def test_the_next_unit_comes_up_while_the_backward_of_one_computes(window):
    came = []
    with streaming(window=window) as (net, handle, x):
        for block, following in zip(net.blocks[1:], handle.engine.units, strict=False):

            def wait_inside(_gradient, following=following):
                with simgpu.hold():
                    came.append(wait_until_there(following))

            block.down.register_forward_hook(lambda _m, _i, out, wait=wait_inside: out.register_hook(wait) and None)
        squares(net, x).backward()
    assert came == [True] * (BLOCKS - 1)


def test_with_a_window_of_one_nothing_comes_before_its_place_is_free():
    with streaming(window=1) as (net, handle, x):
        resident = []
        for block in net.blocks:
            block.register_forward_hook(
                lambda *_: resident.append(sum(unit.store.on_device.is_loaded for unit in handle.engine.units))
            )
        squares(net, x).backward()
    assert resident == [2] * BLOCKS  # the block and the resident rest
