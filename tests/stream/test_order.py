"""When things happen: gradients leave as soon as they are made, and the next unit comes while one computes."""

from __future__ import annotations

import contextlib

import pytest
import torch
from often import often
from side_by_side import sgd, squares
from torch import nn

import models
import sp_lightning

DEVICE = torch.device("simgpu", 0)
BLOCKS = 8


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


# --- Gradients


@pytest.mark.parametrize("window", often([1, 2, 4]))
def test_gradients_never_pile_up_on_the_device(window):
    with streaming(window=window, activations="recompute") as (net, handle, x):
        squares(net, x).backward()
        torch.accelerator.reset_peak_memory_stats()
        squares(net, x).backward()
        peak = torch.accelerator.max_memory_allocated()
        block = max(unit.nbytes for unit in handle.units if not unit.is_held)
        root = handle.stats()["resident_root_bytes"]
    assert peak < (window + 4) * block + 2 * root + block / 2  # activations are less than the half of a block


# --- Prefetch
