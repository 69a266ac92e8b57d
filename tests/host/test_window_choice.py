"""``window="auto"`` and ``transfer="auto"``: decisions from made-up numbers, and runs on the simulated accelerator."""

import importlib.util
import logging

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import sp_lightning
from sp_lightning.host.device import DeviceMemoryError
from sp_lightning.host.window_choice import (
    DeviceBudget,
    UnitNumbers,
)

simgpu = pytest.importorskip("simgpu")
SIMGPU = torch.device("simgpu", 0)
KIB, MIB = 2**10, 2**20


def units(*sizes):
    return [UnitNumbers(f"unit {i}", size, size) for i, size in enumerate(sizes)]


# ---- decisions


def test_the_largest_window_leaves_the_reserve_and_what_others_took():
    memory = DeviceBudget(capacity=1000, others=400)
    assert memory.reserve == 50
    assert memory.most(units(*[100] * 8)) == 5  # of 550 bytes
    assert memory.most(units(*[10] * 8)) == 8
    assert DeviceBudget(capacity=100, others=100).most(units(10, 10)) == 1  # without one unit nothing runs


# ---- runs by hand


WIDTH = 256
UNIT = WIDTH * WIDTH * 4


class Wide(nn.Module):
    """A block that saves as many activations as its input has rows."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return torch.tanh(self.linear(x))


def train(net, handle, rows, seen=None):
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    for count in rows:
        net(torch.ones(count, WIDTH, device=SIMGPU)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if seen is not None:
            seen.append(handle.stats()["window"])


def stack(count=8):
    torch.manual_seed(0)
    return nn.Sequential(*(Wide() for _ in range(count)))


def streamed(rows, capacity=None, **options):
    """The windows after each step."""
    net, seen = stack(), []
    if capacity is not None:
        simgpu.config.capacity = torch.accelerator.memory_allocated() + capacity
    with sp_lightning.stream(net, SIMGPU, units=["Wide"], **options) as handle:
        train(net, handle, rows, seen)
    return seen


def test_it_starts_from_one_unit_and_grows_fourfold_at_most():
    assert streamed([64] * 4)[:3] == [1, 4, 8]


def test_of_a_plan_it_starts_from_as_much_as_fits():
    simgpu.config.capacity = torch.accelerator.memory_allocated() + 6 * UNIT
    with sp_lightning.stream(stack(), SIMGPU, units=["Wide"]) as handle:
        handle.resume({"window": 8, "transfer": 4, "others_nbytes": 3 * UNIT}, "as planned")
        assert (handle.stats()["window"], handle.stats()["transfer"]) == (2, 2)


# ---- the model's own code runs out of memory


class Sudden(nn.Module):
    """Takes a lot at once, in forward or in backward, as logits do."""

    def __init__(self, nbytes, backward=False):
        super().__init__()
        self.nbytes, self.backward = nbytes, backward

    def forward(self, x):
        if self.backward and x.requires_grad:
            x.register_hook(lambda grad: self._take() and None)
        elif not self.backward:
            self._take()
        return x

    def _take(self):
        return torch.empty(self.nbytes, dtype=torch.uint8, device=SIMGPU)


def test_what_no_pass_showed_beforehand_is_an_error_that_says_what_makes_room():
    net = nn.Sequential(stack(), Sudden(0))
    with sp_lightning.stream(net, SIMGPU, units=["Wide"], window=2) as handle:
        train(net, handle, [64] * 7)
        simgpu.config.capacity = torch.accelerator.memory_allocated() + 4 * UNIT
        net[1].nbytes = 100 * UNIT
        said = (
            r"out of memory.*\nsuperpipeline: of [\d.]+ MiB on simgpu:0, the window of 2 took [\d.]+ KiB, and "
            r"activations, gradients, buffers and all else [\d.]+ KiB; to make room: activations='recompute' "
            r"\(each forward runs twice.*\); window=1 \(.*\); batches of half the size and"
        )
        with pytest.raises(DeviceMemoryError, match=said):
            train(net, handle, [64])


# ---- checkpoints


class Stack(L.LightningModule):
    def __init__(self, net=None):
        super().__init__()
        self.net = net or stack()

    def training_step(self, batch, _):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


def test_in_backward_it_is_the_same_error():
    simgpu.config.capacity = torch.accelerator.memory_allocated() + 20 * UNIT
    with pytest.raises(DeviceMemoryError, match=r"the window of 1 took .* to make room: activations='recompute'"):
        fit(1, net=nn.Sequential(stack(), Sudden(100 * UNIT, backward=True)))


def fit(steps, device="simgpu", ckpt_path=None, net=None, **options):
    importlib.import_module("simgpu.lightning")
    strategy = sp_lightning.SuperpipelineStrategy(units=["Wide"], **options)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = L.Trainer(accelerator=device, devices=1, strategy=strategy, max_steps=steps, **quiet)
    trainer.fit(Stack(net), DataLoader([torch.ones(16, WIDTH)] * 20, batch_size=None), ckpt_path=ckpt_path)
    return trainer


def test_a_resumed_run_starts_from_what_was_chosen(caplog):
    first = fit(3)
    first.save_checkpoint("auto.ckpt")
    chosen = first.strategy.handle.stats()["window"]
    assert chosen == 8
    with caplog.at_level(logging.INFO, "sp_lightning"):
        resumed = fit(4, ckpt_path="auto.ckpt")
    assert "window 1 -> 8: as in the run that is resumed" in caplog.text
    assert resumed.strategy.handle.stats()["window"] == 8


def test_a_fixed_window_is_not_resumed_and_leaves_nothing_in_the_checkpoint():
    fit(3).save_checkpoint("auto.ckpt")
    fixed = fit(4, ckpt_path="auto.ckpt", window=2, transfer=1)
    assert fixed.strategy.handle.stats()["window"] == 2
    fixed.save_checkpoint("fixed.ckpt")
    assert "SuperpipelineCallback" not in str(torch.load("fixed.ckpt")["callbacks"])


# ---- against a sweep
