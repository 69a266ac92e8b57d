"""Model code that needs values, names devices, or counts its blocks is planned all the same."""

import lightning as L
import pytest
import torch
from torch import nn

from sp_lightning.plan import plan

BATCH = torch.ones(4, 8, dtype=torch.long)


class Words(L.LightningModule):
    """A net whose step moves tensors to its device, counts tokens, logs its loss and fills a table of positions."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def training_step(self, batch, index):
        tokens = batch.to(self.device)
        places = torch.zeros_like(tokens)
        places += torch.where(tokens > 0, (tokens.float() / 2).log().abs().long(), 1)
        hidden = self.table(tokens) + self.table(places)
        for number in range(6):
            hidden = self.blocks[number](hidden)
        loss = hidden[tokens > 0].square().sum() / (tokens != 0).sum().item()
        assert loss.item() == 1
        return loss


@pytest.mark.parametrize("on", ["cpu", "meta"])
def test_a_step_that_needs_values_and_names_its_device(on):
    with torch.device(on):
        module = Words()
    found = plan(module, BATCH, machine="rtx3060", optimizer="AdamW")
    assert found.trained == sum(parameter.numel() for parameter in module.parameters())
    assert len(found.units) == 7  # all blocks, though they are counted


def test_a_factory_is_planned_like_its_module():
    one, other = (plan(made, BATCH, machine="rtx3060", optimizer="AdamW") for made in (Words, Words()))
    assert one.device_terms == other.device_terms and one.step_s == other.step_s


def test_products_of_experts_that_autocast_leaves_run_in_fp32():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 8, 16))

        def forward(self, x):
            return nn.functional.grouped_mm(x, self.weight, offs=torch.tensor([3, 4], dtype=torch.int32))

    mixed, full = (plan(Experts(), torch.ones(4, 8), precision=one, machine="rtx3060") for one in ("bf16-mixed", 32))
    assert mixed.lanes == full.lanes and mixed.trained == 2 * 8 * 16


@pytest.mark.parametrize("activations", ["keep", "recompute", "offload", "recompute+offload"])
def test_of_blocks_that_are_alike_three_run(activations):
    ran = set()

    class Block(nn.Linear):
        def forward(self, x):
            ran.add(self)
            return super().forward(x).relu()

    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(64, 64)
            self.layers = nn.ModuleList(Block(64, 64) for _ in range(9))

        def forward(self, x):
            x = self.first(x)
            for layer in self.layers:
                x = layer(x)
            return x

    found = plan(Stack(), torch.ones(32, 64), activations=activations, machine="rtx3060", optimizer="SGD")
    assert len(found.units) == 10 and len(ran) == 3


class Thrice(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {"count": torch.zeros(()), "sums": torch.stack([p.grad] * 3)}


@pytest.mark.parametrize(("optimizer", "states"), [("SGD", 0), ("adamw", 2), (Thrice, 3), ("Adafactor", 1 / 64)])
def test_an_optimizer_s_state_is_what_a_step_of_it_makes(optimizer, states):
    make = lambda: nn.ModuleList([nn.Linear(128, 128, bias=False)])  # noqa: E731
    found = plan(make, torch.ones(4, 128), loss=lambda net, x: net[0](x).sum(), optimizer=optimizer, machine="rtx3060")
    assert found.host_terms.get("optimizer", 0) == pytest.approx(states * 128 * 128 * 4, rel=0.01)
