"""Loops with Fabric on each rank: under DDP, or under the strategy (processes.py, Rule 1)."""

from __future__ import annotations

import copy
import importlib
import os
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
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
    """Blocks with a batch norm, dropout and a part that a rank may skip."""

    def __init__(self, width: int = 16, out: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Tanh()) for _ in range(4)
        )
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(width, out)

    def forward(self, x: Tensor, skipped: int | None = None) -> Tensor:
        for number, block in enumerate(self.blocks):
            if number != skipped:
                x = block(x)
        return self.head(self.dropout(x))


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01, foreach=False)


def batches(fabric: Fabric, shuffle: bool = False) -> Any:
    """This rank's share, by Fabric's own sampler."""
    rows = torch.randn(DATA, 16, generator=torch.Generator().manual_seed(7))
    return fabric.setup_dataloaders(torch.utils.data.DataLoader(rows, batch_size=4, shuffle=shuffle))


def ends(*modules: nn.Module) -> list[Any]:
    parameters = [[p.detach().clone() for p in module.parameters()] for module in modules]
    return [parameters, [[b.clone() for b in module.buffers()] for module in modules]]


def state_of(fabric: Fabric, optimizer: Any) -> Any:
    return optimizer.state_dict()["state"]


def plainly(fabric: Fabric) -> Iterator[Any]:
    """Skips blocks, evaluates, clips, and writes to gradients and weights."""
    net = Net()
    net, optimizer = fabric.setup(net, adamw(net))
    for step, x in enumerate(batches(fabric, shuffle=True)):
        loss = net(x, 1 + (fabric.global_rank + step) % 3).square().mean()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        fabric.backward(loss)
        yield loss, fabric.all_reduce(loss.detach().clone())
        yield [p.grad for p in net.parameters()]
        fabric.clip_gradients(net, optimizer, **({"max_norm": 0.1} if step % 2 else {"clip_val": 0.01}))
        optimizer.step()
        net.eval()
        with torch.no_grad():
            yield net(x)
            next(net.parameters()).mul_(0.99)
            if fabric.is_global_zero:  # alone
                net.module(x)
        net.train()
    yield ends(net), state_of(fabric, optimizer), fabric.all_gather(loss.detach())


def accumulating(fabric: Fabric) -> Iterator[Any]:
    """Accumulates three of four batches; sometimes only the forward, or only the backward, is in the context for it."""
    net = fabric.setup_module(Net())
    optimizer = fabric.setup_optimizers(adamw(net))
    for step, x in enumerate(batches(fabric)):
        torch.manual_seed(100 + step)  # of the device, whose generator has drawn other numbers than the CPU's
        waits = step % 4 != 3
        with fabric.no_backward_sync(net, enabled=waits and step != 4):
            loss = net(x).square().mean()
        with fabric.no_backward_sync(net, enabled=waits and step not in (2, 5)):
            fabric.backward(loss / 4)
        yield loss, [p.grad for p in net.parameters()]
        if step % 4 == 3:
            fabric.clip_gradients(net, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
    yield ends(net), state_of(fabric, optimizer)


def gan(fabric: Fabric) -> Iterator[Any]:
    """Trains two modules in turn, each with an optimizer of its own."""
    generator, critic = Net(out=16), Net(out=1)
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
    net = Net()
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


def keeping(fabric: Fabric) -> Iterator[Any]:
    """Loads a checkpoint over state that it edited and keeps, and later goes on from what it kept."""
    net = Net()
    net, optimizer = fabric.setup(net, adamw(net))
    path = os.path.join(fabric.broadcast(tempfile.mkdtemp() if fabric.is_global_zero else None), "saved.ckpt")
    kept: Any = {}
    for step, x in enumerate(list(batches(fabric)) * 2):
        loss = net(x).square().mean()
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        yield loss
        if step == 1:
            fabric.save(path, {"net": net, "optimizer": optimizer})
        if step in (2, 4):
            for state in optimizer.state.values():
                state["exp_avg"].mul_(0.5)
            kept = optimizer.state_dict() if step == 2 else {}
            fabric.load(path, {"net": net, "optimizer": optimizer})
            yield kept, optimizer.state_dict()
        if step == 3:
            yield kept
            optimizer.load_state_dict(kept)
    yield ends(net), state_of(fabric, optimizer)


def moving(fabric: Fabric) -> Iterator[Any]:
    """Trains with modules of each rank's own, and later with one of them on all ranks."""
    torch.manual_seed(50 + fabric.global_rank)
    teacher, own, later = (fabric.to_device(Net()) for _ in range(3))
    teacher.eval().requires_grad_(False)
    net = Net()
    net, optimizer = fabric.setup(net, adamw(net))
    of_own = fabric.setup_optimizers(adamw(own))
    data = list(batches(fabric))
    for step, x in enumerate(data):
        torch.manual_seed(100 + step)
        loss = (net(x) - teacher(x)).square().mean() + own(x).square().mean()
        fabric.backward(loss)
        yield loss, [p.grad for p in net.parameters()], [p.grad for p in own.parameters()]
        for one in (optimizer, of_own):
            one.step()
            one.zero_grad()
        if step == 1 and fabric.is_global_zero:  # alone
            torch.manual_seed(7)
            with torch.no_grad():
                yield fabric.to_device(Net().eval())(x)
    yield ends(net, teacher, own), state_of(fabric, optimizer), of_own.state_dict()["state"]
    later, optimizer = fabric.setup(later, adamw(later), move_to_device=False)
    for step, x in enumerate(data):
        torch.manual_seed(100 + step)
        fabric.backward(later(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    yield ends(later), state_of(fabric, optimizer)


def stepping_together(fabric: Fabric) -> Iterator[Any]:
    """Steps a module of all ranks by one optimizer with modules of each rank's own, moved before it and after it."""
    torch.manual_seed(50 + fabric.global_rank)
    teacher, before, after = Net().eval().requires_grad_(False), Net(), Net()
    torch.manual_seed(5)
    net = Net()
    every = nn.ModuleList([teacher, before, net, after])
    for module in (teacher, before):
        fabric.to_device(module)
    wrapped = fabric.setup_module(net)
    fabric.to_device(after)
    optimizer = fabric.setup_optimizers(adamw(every))
    seen = []
    optimizer.optimizer.register_step_post_hook(lambda *_: seen.append([p.detach().clone() for p in net.parameters()]))
    for step, x in enumerate(batches(fabric)):
        torch.manual_seed(100 + step)
        loss = (wrapped(x) - teacher(x)).square().mean() + (before(x) * after(x)).square().mean()
        fabric.backward(loss)
        if step % 2:
            nn.utils.clip_grad_norm_(net.parameters(), 0.01)
        yield loss, [p.grad for module in (before, net, after) for p in module.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    yield seen, ends(net, before, after), optimizer.state_dict()["state"]
    teams = [handle.team for handle in getattr(fabric.strategy, "handles", ()) if handle.team.size > 1]
    yield all(team.owners._slabs.get(optimizer.optimizer) for team in teams)  # ranks share the state


def in_phases(fabric: Fabric) -> Iterator[Any]:
    """Trains, makes the module plain, and sets it up once more, beside another one."""
    nets = [Net()]
    for _ in range(2):
        together = [fabric.setup(net, adamw(net)) for net in nets]
        for step, x in enumerate(batches(fabric)):
            torch.manual_seed(100 + step)
            for net, optimizer in together:
                loss = net(x).square().mean()
                fabric.backward(loss)
                yield loss, fabric.all_reduce(loss.detach().clone())
                optimizer.step()
                optimizer.zero_grad()
        yield ends(*nets), [state_of(fabric, optimizer) for _, optimizer in together]
        fabric.strategy.teardown()
        fabric.barrier()
        torch.manual_seed(50 + fabric.global_rank)
        nets.append(Net())


def loading_others(fabric: Fabric) -> None:
    """Load other state on each rank."""
    net = Net()
    net, optimizer = fabric.setup(net, adamw(net))
    fabric.backward(net(torch.ones(4, 16)).square().mean())
    optimizer.step()
    path = os.path.join(tempfile.mkdtemp(), "saved.ckpt")
    state = optimizer.state_dict()
    state["state"][0]["exp_avg"] = state["state"][0]["exp_avg"] + fabric.global_rank
    torch.save({"optimizer": state}, path)
    fabric.load(path, {"optimizer": optimizer})


def slow_gan(options: dict[str, Any] | None, accelerator: str = "cpu") -> parity.Record:
    """Record the GAN where the last rank's gradients come down so slowly that it is in the next module by then."""
    if options is None:
        return record("gan", None)
    import simgpu

    before = simgpu.config.d2h_gbps
    try:
        if int(os.environ["LOCAL_RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
            simgpu.config.d2h_gbps = 1e-4
        return record("gan", options | {"timeout": timedelta(seconds=60)}, accelerator)
    finally:
        simgpu.config.d2h_gbps = before


def refused(what: str) -> str:
    """Do on each rank what is refused; return the error as "type: message"."""
    strategy = sp_lightning.SuperpipelineFabricStrategy(window=1)
    fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=strategy)
    fabric.launch()
    first, second = fabric.setup_module(Net()), fabric.setup_module(Net())
    moved = fabric.to_device(Net())
    x = torch.zeros(4, 16)
    try:
        if what == "copy":
            copy.deepcopy(first)(x)
        elif what == "optimizer":
            optimizer = fabric.setup_optimizers(torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1))
            fabric.backward(first(x).sum() + second(x).sum())
            optimizer.step()
        elif what == "part":
            fabric.setup_module(moved.blocks)
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        strategy.teardown()


LOOPS: dict[str, Loop] = {
    loop.__name__: loop
    for loop in (plainly, accumulating, gan, resuming, keeping, moving, stepping_together, in_phases)
}


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
