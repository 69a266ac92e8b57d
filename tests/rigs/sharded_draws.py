"""Random numbers for DTensors on each rank of a test: drawn on the device of a plain run, and while they are streamed.

A simulated device's generator has no offset, by which torch gives each shard numbers of its own on CUDA: `Draws` has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import sharded
import torch
import torch.distributed.tensor._random as dtensor_random
from torch import Tensor, nn

import sp_lightning
from sp_lightning.stream.wholes import registering_on_host


class Draws(dtensor_random.OffsetBasedRNGTracker):
    """torch's own draws for shards, whose generator is a seed and an offset."""

    def __init__(self, mesh: Any) -> None:
        self.state = torch.tensor([7, 0]).view(torch.uint8)
        super().__init__(mesh, run_state_sync=False)
        self._device_handle = self

    def _get_device_state(self) -> Tensor:
        return self.state

    def _set_device_state(self, state: Tensor) -> None:
        self.state = state.clone()

    def set_rng_state(self, state: Tensor) -> None:
        seed, offset = state.view(torch.int64).tolist()
        torch.get_device_module("simgpu").manual_seed(1009 * seed + offset)


class Noisy(torch.optim.SGD):
    """Adds noise to what it steps."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(torch.randn_like(parameter), alpha=0.01)


@torch.no_grad()  # while it runs
def draw(model: Any) -> Iterator[str]:
    """Draw numbers into weights, and of their shape, in one way after the other."""
    cut, whole = model[1].up, model[1].norm
    nn.init.normal_(cut.weight, 0.0, 0.1)
    nn.init.uniform_(whole.weight)
    yield "initialised"
    nn.init.trunc_normal_(cut.weight)
    yield "truncated"
    cut.reset_parameters()
    yield "reset"
    cut.weight.normal_()
    cut.weight.bernoulli_(0.5)
    whole.weight.uniform_(-1, 1)
    yield "in place"
    cut.weight.add_(torch.randn_like(cut.weight))
    whole.weight.mul_(torch.rand_like(whole.weight))
    yield "alike"
    cut.weight.copy_(nn.functional.dropout(cut.weight, 0.5, training=True))
    yield "dropped"
    cut.weight[:, :3].normal_()
    yield "view"
    cut.weight.data.normal_()
    whole.weight.data.uniform_()
    yield "data"


def run(streams: bool) -> dict[str, Any]:
    """Draw numbers, train between them, and return what is seen."""
    _, mesh, device = sharded.begin(True)
    model, found = sharded.made("in sequence", mesh), {}
    if not streams:
        model.to(device)
    torch.manual_seed(0)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(dtensor_random, "_rng_tracker", Draws(mesh)))
        if streams:
            stack.enter_context(sp_lightning.stream(model, device, window=1))
        optimizer = Noisy(model.parameters(), 1e-2)
        for name in draw(model):
            model(torch.arange(24, device=device).view(3, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            for key, parameter in model.named_parameters():
                found.update(sharded.seen(f"{name}: {key}", parameter))
            found[f"{name}: state"] = dtensor_random._rng_tracker.state.clone()  # type: ignore[union-attr]
    return found


def initialised(on_host: bool) -> dict[str, Any]:
    """Draw the weights of a module whose layers are cut already, as in `configure_model`."""
    _, mesh, device = sharded.begin(True)
    torch.manual_seed(0)
    with mock.patch.object(dtensor_random, "_rng_tracker", Draws(mesh)):
        with registering_on_host() if on_host else contextlib.nullcontext():
            model = sharded.made("in sequence", mesh)
            for parameter in model.parameters():
                assert sharded.local(parameter).device == (sharded.HOST if on_host else device)
                nn.init.normal_(parameter)
        return dict(sharded.seen("state_dict", model.state_dict()))


def compare_initialised() -> tuple[list[str], int]:
    """Return the names of weights that differ where shards stay on the host, and how many there are."""
    expected = initialised(False)
    return sharded.difference(expected, initialised(True)), len(expected)


def compare() -> tuple[list[str], int]:
    """Return the names of what differs between a plain run and a streamed one, and how much was seen."""
    expected = run(False)
    return sharded.difference(expected, run(True)), len(expected)
