"""Loops with Fabric on each rank: under DDP, or under the strategy (processes.py, Rule 1)."""

from __future__ import annotations

import copy
import importlib
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pretended_nodes
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from ranked_runs import simulated
from torch import Tensor, nn

import parity
import sp_lightning

STEPS = 4
DATA = 4 * STEPS * 4  # rows: a batch of 4 on each of up to 4 ranks
Loop = Callable[[Fabric], Iterator[Any]]


class Net(nn.Module):
    """Blocks with a batch norm, of which one may be skipped, and perhaps dropout."""

    def __init__(self, width: int = 16, out: int = 8, drop: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Tanh()) for _ in range(4)
        )
        self.dropout = nn.Dropout(drop)
        self.head = nn.Linear(width, out)

    def forward(self, x: Tensor, skipped: int | None = None) -> Tensor:
        for number, block in enumerate(self.blocks):
            if number != skipped:
                x = block(x)
        return self.head(self.dropout(x))


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01, foreach=False)


def batches(fabric: Fabric) -> Any:
    """This rank's share, by Fabric's own sampler."""
    rows = torch.randn(DATA, 16, generator=torch.Generator().manual_seed(7))
    return fabric.setup_dataloaders(torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True))


def ends(*modules: nn.Module) -> list[Any]:
    parameters = [[p.detach().clone() for p in module.parameters()] for module in modules]
    return [parameters, [[b.clone() for b in module.buffers()] for module in modules]]


def state_of(fabric: Fabric, optimizer: Any) -> Any:
    return optimizer.state_dict()["state"]


def gan(fabric: Fabric) -> Iterator[Any]:
    """Trains two modules in turn, each with an optimizer of its own."""
    generator, critic = Net(out=16, drop=0.2), Net(out=1, drop=0.2)
    generator, of_generator = fabric.setup(generator, adamw(generator))
    critic, of_critic = fabric.setup(critic, adamw(critic))
    for step, x in enumerate(batches(fabric)):
        torch.manual_seed(100 + step)
        made = generator(torch.randn_like(x))
        of_critic.zero_grad()
        real = critic(x).square().mean()
        fabric.backward(real)
        fake = (critic(made.detach()) - 1).square().mean()
        fabric.backward(fake)
        yield real, fake, [p.grad for p in critic.parameters()]
        of_critic.step()
        of_generator.zero_grad()
        fooled = critic(made).square().mean()
        fabric.backward(fooled)
        yield fooled, [p.grad for p in generator.parameters()], [p.grad for p in critic.parameters()]
        of_generator.step()
    yield ends(generator, critic), state_of(fabric, of_generator), state_of(fabric, of_critic)


def resuming(fabric: Fabric) -> Iterator[Any]:
    """Saves after some steps, goes on, and trains again from there."""
    net = Net(drop=0.2)
    net, optimizer = fabric.setup(net, adamw(net))
    folder = fabric.broadcast(tempfile.mkdtemp() if fabric.is_global_zero else None)
    data = list(batches(fabric))
    state = {"net": net, "optimizer": optimizer, "step": 0}

    def steps(several: list[Tensor]) -> Iterator[Any]:
        for x in several:
            loss = net(x).square().mean()
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
            yield loss

    yield from steps(data[:2])
    fabric.save(os.path.join(folder, "saved.ckpt"), state)
    saved = torch.load(os.path.join(folder, "saved.ckpt"), weights_only=False)["net"]
    yield sorted(saved)
    fabric.save(os.path.join(folder, "weights.ckpt"), saved)
    fabric.load_raw(os.path.join(folder, "weights.ckpt"), net)
    fabric.save(
        os.path.join(folder, "raw.ckpt"), torch.load(os.path.join(folder, "saved.ckpt"), weights_only=False)["net"]
    )
    fabric.load_raw(os.path.join(folder, "raw.ckpt"), net)
    yield from steps(data[2:4])
    fabric.load(os.path.join(folder, "saved.ckpt"), state)
    yield ends(net), state_of(fabric, optimizer)
    torch.manual_seed(3)
    yield from steps(data[2:])
    yield ends(net), state_of(fabric, optimizer)


def refused() -> str:
    """Call a copy of what streams, which is refused; return the error as "type: message"."""
    strategy = sp_lightning.SuperpipelineFabricStrategy(window=1)
    fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=strategy)
    fabric.launch()
    net = fabric.setup_module(Net())
    try:
        copy.deepcopy(net)(torch.zeros(4, 16))
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        strategy.teardown()


LOOPS: dict[str, Loop] = {loop.__name__: loop for loop in (gan, resuming)}


class TreeDDP(DDPStrategy):
    """DDP that adds the gradients of more than two ranks as a tree."""

    def setup_module(self, module: nn.Module) -> nn.parallel.DistributedDataParallel:
        made = super().setup_module(module)
        if self.world_size > 2:
            made.register_comm_hook(None, sp_lightning.tree_hook)
        return made


def record(
    loop: str, options: dict[str, Any] | None, accelerator: str = "cpu", precision: str = "32-true"
) -> parity.Record:
    """Record what a loop yields on this rank: under DDP if there are no options, else with these."""
    size, nodes = int(os.environ["WORLD_SIZE"]), pretended_nodes.count()
    strategy: Any = TreeDDP(find_unused_parameters=True)
    if options is not None:
        strategy = sp_lightning.SuperpipelineFabricStrategy(**options)
    else:
        accelerator = "cpu"
    with simulated(accelerator):
        kind: Any = accelerator
        if accelerator == "simgpu":
            kind = importlib.import_module("simgpu.lightning").SimGPUAccelerator()
        fabric = Fabric(
            accelerator=kind, devices=size // nodes, num_nodes=nodes, strategy=strategy, precision=precision
        )
        fabric.launch()
        fabric.seed_everything(5, verbose=False)
        entries = []
        for index, value in enumerate(LOOPS[loop](fabric)):
            entries += [
                parity.Entry(f"yield {index}", path, parity.keep(leaf)) for path, leaf in parity.leaves(value, "value ")
            ]
        if options is not None:
            strategy.teardown()
    host = [e._replace(value=e.value.cpu() if isinstance(e.value, Tensor) else e.value) for e in entries]
    return parity.Record(host)


def accumulated_around_parts() -> list[Tensor]:
    """Gradients of two modules that stream by themselves, of a backward without exchange of the module around both."""
    fabric = Fabric(strategy="superpipeline", accelerator="cpu", devices=2)
    fabric.launch()
    parts = [Net(out=16), Net()]
    for part in parts:
        fabric.setup_module(part)
    around = fabric.setup_module(nn.Sequential(*parts))
    with fabric.no_backward_sync(around):
        fabric.backward(around(torch.randn(4, 16, generator=torch.Generator().manual_seed(fabric.global_rank))).sum())
    gradients = [part.blocks[0][0].weight.grad.clone() for part in parts]
    fabric.strategy.teardown()
    return gradients
