"""Training whose state, weights and gradients are in the scratch file has the bits of training in memory."""

import copy
import gc
import os

import pytest
import torch
from often import often
from stream_programs import Net, Program, check, stream
from torch import nn

from sp_lightning.store import pipeline, scratch, store

DEVICES = [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("simgpu", marks=pytest.mark.simgpu)]
OPTIMIZERS = {
    "adamw": torch.optim.AdamW,
    "fused": lambda params: torch.optim.AdamW(params, fused=True),
    "amsgrad": lambda params: torch.optim.Adam(params, amsgrad=True, weight_decay=0.1),
    "sgd": lambda params: torch.optim.SGD(params, 0.1),
    "momentum": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9, nesterov=True),
    "adagrad": torch.optim.Adagrad,
    "nadam": torch.optim.NAdam,
    "adafactor": torch.optim.Adafactor,
    "lists": lambda params: torch.optim.AdamW(params, foreach=True),
}


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch):
    """Each weight of a block needs several windows."""
    for name in ("MOST", "LEAST", "SMALLEST"):
        monkeypatch.setattr(pipeline, name, 1 << 16)


def net() -> nn.Module:
    return Net(block=Wide, count=3)


class Wide(nn.Module):
    """A block with weights of several windows, of one, and smaller than a block of the disk."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 400)
        self.down = nn.Linear(400, 32)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


def options(**more):
    return {"host_budget": 0, "disk": os.getcwd(), **more}


def loop(make, step=None, count=3):
    def train(run, model):
        return run.loop(model, step, run.noted(make(list(model.parameters()))), count)

    return train


def accumulated_and_clipped(run, model):
    def step(model, optimizer, i):
        for part in range(2):
            model(run.x(2 * i + part)).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return norm

    return run.loop(model, step)


def looked_at(run, model):
    """Reads and writes weights, gradients and state between steps, as callbacks do."""
    optimizer = run.adamw(model.parameters())
    found = []
    for i in range(3):
        model(run.x(i)).square().mean().backward()
        for param in model.parameters():
            param.grad.mul_(0.5)
        optimizer.step()
        found.append([p.grad.clone() for p in model.parameters()])
        optimizer.zero_grad()
        with torch.no_grad():
            model.blocks[1].up.weight.mul_(0.9)
            optimizer.state[model.blocks[1].up.weight]["exp_avg"].mul_(0.9)
        found.append([p.sum() for p in model.parameters()])
    return found


def resumed(run, model):
    """Goes on from state that was saved, in an optimizer that has other state."""
    optimizer = run.adamw(model.parameters())
    run.loop(model, optimizer=optimizer, count=2)
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    run.loop(model, optimizer=optimizer, count=2)
    kept = optimizer.state_dict()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    run.loop(model, optimizer=optimizer, count=2)
    return [entry["exp_avg"] for entry in kept["state"].values()]


@pytest.mark.parametrize("optimizer", often(OPTIMIZERS, "adamw", "adafactor"))
@pytest.mark.parametrize("device", DEVICES)
def test_optimizers(device, optimizer):
    check(Program(loop(OPTIMIZERS[optimizer]), net, options=options()), device)


@pytest.mark.parametrize("program", [accumulated_and_clipped, looked_at, resumed], ids=lambda program: program.__name__)
@pytest.mark.parametrize("device", DEVICES)
def test_programs(device, program):
    check(Program(program, net, options=options()), device, window=2)


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "adagrad"])
def test_state_leaves_memory_first_and_so_does_loaded_state(optimizer, monkeypatch):
    for name in ("MOST", "LEAST", "SMALLEST"):
        monkeypatch.setattr(pipeline, name, 1 << 14)
    monkeypatch.setattr(store, "BESIDE", 0)
    model = net()
    with stream(model, "cpu", window=1, **options(host_budget=900_000)) as handle:
        assert handle.store.placement.state and not handle.store.placement.weights
        optimizer = OPTIMIZERS[optimizer](model.parameters())
        for _ in range(2):
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            handle.loaded(optimizer)
        weights = [w for w in handle.weights if handle.store.has_state_of(w)]
        assert weights
        for weight in weights:
            entries = [e for e in optimizer.state[weight.host].values() if getattr(e, "shape", 0) == weight.host.shape]
            assert all(map(handle.store.is_filed, entries))
        assert not any(handle.store.is_filed(weight.value) for weight in weights)


def test_what_trains_is_in_the_file_and_the_file_ends_with_it():
    model = net()
    with stream(model, "cpu", window=1, **options()) as handle:
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        weight = model.blocks[0].up.weight
        state = optimizer.state[weight]
        assert all(handle.store.is_filed(tensor) for tensor in (weight.data, state["exp_avg"], state["exp_avg_sq"]))
        assert handle.store.is_filed(weight.grad.content.raw)
    folder = os.getcwd()
    assert folder in scratch.files
    del model, optimizer, weight, state, handle
    gc.collect()
    assert folder not in scratch.files
