"""A plan says which weights stay in files, what a step reads from them, to the byte, and what is left in memory."""

import in_files
import pytest
import torch
from torch import nn

import sp_lightning
from sp_lightning.plan import plan
from sp_lightning.plan.host import OnDisk


class Adapted(nn.Module):
    """A frozen layer with a small one beside it that trains."""

    def __init__(self, width):
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.adapter = nn.Linear(width, width, bias=False)

    def forward(self, x):
        return torch.tanh(self.base(x)) + self.adapter(x)


def model(place=None):
    torch.manual_seed(0)
    frozen = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()).requires_grad_(False) for _ in range(6)]
    layers = [nn.Linear(64, 64), *frozen, *(Adapted(64) for _ in range(6)), nn.Linear(64, 5)]
    net = nn.Sequential(*layers)
    if place is not None:
        in_files.put(net, str(place))
    return net


UNITS = ["Sequential", "Adapted"]


def step(net, x):
    net(x).square().mean().backward()


def take_step(handle, optimizer):
    """All of it: transfers of what is deferred would count for the next step."""
    optimizer.step()
    optimizer.zero_grad()
    handle.finish_step()


def planned(net, **options):
    return plan(net, torch.ones(4, 64), machine="rtx4090", device="cpu", units=UNITS, transfer=1, **options)


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "RMSprop"])
@pytest.mark.few(1)
def test_a_step_moves_the_state_that_the_plan_says_to_the_byte(kind, device, tmp_path):
    options = {"window": 2, "host_budget": "0B", "disk": str(tmp_path), "wire_dtype": "as-is"}
    net = model(tmp_path)
    expected = planned(net, optimizer=kind, **options)
    with sp_lightning.stream(net, device, units=UNITS, transfer=1, **options) as handle:
        optimizer = getattr(torch.optim, kind)([p for p in net.parameters() if p.requires_grad])
        moved = []
        for _ in range(4):
            before = handle.stats()
            step(net, torch.ones(4, 64, device=device))
            take_step(handle, optimizer)
            after = handle.stats()
            moved.append(after["disk_written"] - before["disk_written"])
        assert handle.storage.ring_nbytes <= expected.host.ring
    assert moved[-1] == moved[-2] == expected.written
    state = {"AdamW": 2, "SGD": 0, "RMSprop": 1}[kind] * sum(p.nbytes for p in net.parameters() if p.requires_grad)
    beside_files = sum(p.nbytes for layer in net if type(layer) is Adapted for p in layer.adapter.parameters())
    weights = sum(p.nbytes for p in net.parameters() if p.requires_grad) - beside_files
    gradients = weights + beside_files
    assert expected.written == state + weights + gradients
    assert (expected.host.optimizer, expected.host.gradients, expected.host.weights) == (0, 0, beside_files)


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
@pytest.mark.seldom
def test_a_step_moves_the_master_weights_that_the_plan_says_to_the_byte(kind, device, tmp_path):
    options = {"window": 2, "host_budget": "0B", "disk": str(tmp_path), "master_weights": True}
    net = model().requires_grad_(True)
    expected = planned(net, optimizer=kind, precision="bf16-true", **options)
    with sp_lightning.stream(net, device, units=UNITS, transfer=1, **options) as handle:
        optimizer = getattr(torch.optim, kind)(net.parameters())
        moved = []
        for _ in range(4):
            before = handle.stats()
            step(net, torch.ones(4, 64, device=device, dtype=torch.bfloat16))
            take_step(handle, optimizer)
            after = handle.stats()
            moved.append(after["disk_written"] - before["disk_written"])
    assert moved[-1] == moved[-2] == expected.written
    assert expected.written == (4.5 if kind == "AdamW" else 2.5) * sum(p.nbytes for p in net.parameters())
    assert expected.host.weights == expected.host.gradients == expected.host.wire == 0


def test_without_a_budget_nothing_is_on_disk(tmp_path):
    found = planned(model(tmp_path))
    assert found.disk == OnDisk() and found.host.ring == 0 and found.notes == ()
    assert "(on disk)" not in str(found) and "Wear" not in str(found)


def test_a_model_that_is_only_planned_is_taken_to_be_in_files():
    found = planned(model, host_budget="0B")
    assert found.disk.weights > 0
    assert any("taken to be in local files" in note for note in found.notes)
