"""``compile_units``: one graph for each class of unit, with the bits of blocks that the user compiles."""

import pytest
import torch
import torch._dynamo as dynamo
from torch import nn

import sp_lightning


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def losses(net, steps=3):
    optimizer, found = torch.optim.SGD(net.parameters(), 0.1), []
    for step in range(steps):
        loss = net(torch.randn(4, 16, generator=torch.Generator().manual_seed(step))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def stack():
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(5)))


@pytest.fixture
def fresh_dynamo():
    dynamo.reset()
    dynamo.utils.counters.clear()
    yield
    dynamo.reset()


@pytest.mark.slow
def test_units_are_compiled_once_for_their_class_without_a_break(fresh_dynamo):
    plain = stack()
    for block in plain:
        block.compile()
    expected, graphs = losses(plain), dynamo.utils.counters["stats"]["unique_graphs"]
    dynamo.reset()
    dynamo.utils.counters.clear()
    net = stack()
    with (
        dynamo.config.patch(suppress_errors=False),
        sp_lightning.stream(net, "cpu", window=2, units=["Block"], compile_units=True),
    ):
        assert losses(net) == expected
    assert dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    assert not dynamo.utils.counters["graph_break"]
