"""Loops by Fabric over layers that are cut, under Lightning's ModelParallelStrategy and streamed.

One loop serves both strategies. It returns what can be seen of it by name, as in sharded.py.
"""

from __future__ import annotations

import importlib
import os
from typing import Any
from unittest import mock

import lightning as L
import sharded
import torch
import torch.nn.functional as F
from lightning.fabric.strategies import ModelParallelStrategy
from ranked_runs import simulated
from torch import nn
from torch.distributed.fsdp import fully_shard

import sp_lightning


def strategy(options: dict[str, Any] | None, data: int, distributed: bool) -> Any:
    sizes: dict[str, Any] = {"data_parallel_size": data, "tensor_parallel_size": 2}
    sizes["save_distributed_checkpoint"] = distributed
    if options is None:
        return ModelParallelStrategy(lambda module, _: module, **sizes)
    return sp_lightning.SuperpipelineFabricStrategy(**{"window": 1} | options, **sizes)


class Loop:
    """A loop of a user's, who cuts the module by the strategy's mesh."""

    def __init__(self, fabric: L.Fabric, name: str, data: int, plain: bool) -> None:
        self.fabric, self.data = fabric, data
        self.found: dict[str, Any] = {}
        mesh: Any = fabric.strategy.device_mesh  # type: ignore[attr-defined]
        model: Any = sharded.made(name, mesh["tensor_parallel"])
        if plain and data > 1:
            for block in list(model)[1:5]:
                fully_shard(block, mesh=mesh["data_parallel"])
            fully_shard(model, mesh=mesh["data_parallel"])
        self.net, self.clips = model, data == 1 and all(isinstance(one, sharded.DTensor) for one in model.parameters())
        self.model: Any = fabric.setup_module(model)
        self.optimizer: Any = fabric.setup_optimizers(torch.optim.AdamW(self.model.parameters(), 1e-2, foreach=False))
        self.draw = torch.Generator().manual_seed(mesh["data_parallel"].get_local_rank())

    def see(self, name: str, value: Any) -> None:
        self.found.update(sharded.seen(name, value, self.data > 1))

    def look(self, at: str) -> None:
        for name, parameter in self.net.named_parameters():
            self.see(f"{at} {name}", parameter)
        for number, state in enumerate(self.optimizer.state.values()):
            self.see(f"{at} state {number}", dict(state))

    def step(self, at: str) -> None:
        batches = 1 if self.data > 1 else 2  # fully_shard and DDP add in another order
        for batch in range(batches):
            words = torch.randint(sharded.WORDS, (3, 8), generator=self.draw).to(self.fabric.device)
            with self.fabric.no_backward_sync(self.model, enabled=batch + 1 < batches):
                loss = F.cross_entropy(self.model(words).flatten(0, 1), words.flatten())
                self.fabric.backward(loss)
            self.see(f"{at}.{batch} loss", loss)
        if self.clips:  # torch mixes no others with DTensors, and fully_shard's norm is of more parts
            self.see(f"{at} norm", self.fabric.clip_gradients(self.model, self.optimizer, max_norm=0.1))
        for name, parameter in self.net.named_parameters():
            self.see(f"{at} gradient of {name}", parameter.grad)
        self.optimizer.step()
        self.optimizer.zero_grad()


def run(
    name: str,
    options: dict[str, Any] | None,
    folder: str,
    accelerator: str = "cpu",
    data: int = 1,
    distributed: bool = True,
    ckpt_path: str | None = None,
    saves: bool = True,
) -> dict[str, Any]:
    """Train, save, train on and go back to what was saved; or begin with what another run saved.

    ``saves``: the group of a simulated device has no backend for what checkpoints gather on the host.
    """
    sharded.begin(accelerator == "simgpu")
    with mock.patch.dict(os.environ), simulated(accelerator):
        kind: Any = accelerator
        if accelerator == "simgpu":
            kind = importlib.import_module("simgpu.lightning").SimGPUAccelerator()
        fabric = L.Fabric(strategy=strategy(options, data, distributed), accelerator=kind, devices=2 * data)
        fabric.launch()
        loop = Loop(fabric, name, data, options is None)
        state = {"model": loop.model, "optimizer": loop.optimizer, "step": 2}
        path = ckpt_path or os.path.join(folder, "saved")
        os.makedirs(folder, exist_ok=True)
        if ckpt_path is None:
            for number in range(2):
                loop.step(str(number))
                loop.look(str(number))
            if saves:
                fabric.save(path, state)
            loop.step("2")
        if saves:
            state["step"] = 0
            fabric.load(path, state)
        loop.see("loaded", state["step"])
        loop.look("loaded")
        loop.step("after")
        loop.look("after")
        if options is not None:
            assert sum(handle.stats()["fetches"] for handle in fabric.strategy.handles) > 0  # type: ignore[attr-defined]
            fabric.strategy.teardown()
    return loop.found


def refused(what: str) -> str:
    """Return the error of a setup."""
    sharded.begin(False)
    with mock.patch.dict(os.environ):
        fabric = L.Fabric(strategy=strategy({}, 1, True), accelerator="cpu", devices=2)
        fabric.launch()
        model: nn.Module = sharded.stack()
        if what == "fully sharded":
            mesh: Any = fabric.strategy.device_mesh  # type: ignore[attr-defined]
            model = fully_shard(sharded.made("in sequence", mesh["tensor_parallel"]), mesh=mesh["data_parallel"])
        return sharded.error_of(lambda: fabric.setup_module(model))
