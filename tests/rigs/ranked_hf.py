"""Runs of Hugging Face's Trainer, of TRL and of loops with accelerate on each rank: under DDP, or streamed.

As under torchrun (processes.py, Rule 1). The reference runs on the CPU, whose kernels the simulated device has.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranked_fabric import Net, adamw
from ranked_runs import simulated
from torch import Tensor, nn
from torch.utils.data import DataLoader

import parity

SIMULATED = "simgpu:0"


@contextlib.contextmanager
def place(device: str) -> Iterator[None]:
    """A rank's environment, with a process group for tensors of the device."""
    env = {"RANK": os.environ["LOCAL_RANK"], "LOCAL_WORLD_SIZE": os.environ["WORLD_SIZE"], "HF_HUB_OFFLINE": "1"}
    with pytest.MonkeyPatch.context() as patch, simulated(device):
        for name, value in {**env, "TOKENIZERS_PARALLELISM": "false", "WANDB_DISABLED": "true"}.items():
            patch.setenv(name, value)
        if device == "simgpu":
            patch.setenv("ACCELERATE_TORCH_DEVICE", SIMULATED)
        patch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
        patch.setattr("accelerate.accelerator.is_bf16_available", lambda *_, **__: True)
        if not dist.is_initialized():
            dist.init_process_group("cpu:gloo,simgpu:gloo")  # barriers of accelerate's name a device
        state = importlib.import_module("accelerate.state")
        state.AcceleratorState._reset_state(True)
        state.GradientState._reset_state()
        yield


def record(
    name: str, options: dict[str, Any] | None, accelerator: str = "cpu", folder: str = "", **settings: Any
) -> parity.Record:
    """Record what a run leaves on this rank: under DDP if there are no options, else with these."""
    with place("cpu" if options is None else accelerator):
        hf_runs = importlib.import_module("hf_runs")
        run = functools.partial(RUNS[name](), **settings)
        kind = "stock" if options is None else accelerator
        found, counted = hf_runs.record(run, pathlib.Path(folder) / kind, options)
        assert options is None or counted["handles"]
    return found


def trainer() -> Callable[..., Iterator[Any]]:
    return functools.partial(importlib.import_module("hf_runs").train, use_cpu=True)


def adapters() -> Callable[..., Iterator[Any]]:
    return functools.partial(trainer(), make=importlib.import_module("hf_runs").with_adapters)


def trl() -> Callable[..., Iterator[Any]]:
    return functools.partial(importlib.import_module("hf_trl").train, use_cpu=True)


def sentences() -> Callable[..., Iterator[Any]]:
    return functools.partial(importlib.import_module("hf_sentences").train, use_cpu=True)


def resuming() -> Callable[..., Iterator[Any]]:
    return resume_in_the_middle


def resume_in_the_middle(folder: pathlib.Path, **settings: Any) -> Iterator[Any]:
    """Train with checkpoints, then once more from the one in the middle."""
    run = functools.partial(trainer(), save_strategy="steps", save_steps=2, evaluates=False, num_train_epochs=2)
    for where, value in run(folder, **settings):
        if where == "fetches" or not where.startswith("checkpoint"):
            yield where, value
    for where, value in run(folder / "again", resume=str(folder / "checkpoint-2"), **settings):
        yield f"again: {where}", value if where != "fetches" else None


# ---- loops with accelerate


def batches() -> DataLoader[Tensor]:
    rows = torch.randn(64, 16, generator=torch.Generator().manual_seed(7))
    return DataLoader(list(rows), batch_size=4)


def accelerator(find_unused: bool = True, **settings: Any) -> Any:
    from accelerate import Accelerator, DistributedDataParallelKwargs

    ddp = DistributedDataParallelKwargs(find_unused_parameters=find_unused)
    return Accelerator(cpu=True, kwargs_handlers=[ddp], **settings)


def ends(*modules: nn.Module) -> list[Any]:
    return [{name: value.clone() for name, value in module.state_dict().items()} for module in modules]


def plainly(folder: pathlib.Path, **settings: Any) -> Iterator[Any]:
    """Skips blocks, evaluates, clips, and writes to weights; saves and loads its state."""
    run = accelerator(**settings)
    torch.manual_seed(1 + run.process_index)  # the first rank's weights and buffers count
    net = Net()
    net.blocks[0][1].running_mean.add_(run.process_index)
    model, optimizer, loader = run.prepare(net, adamw(net), batches())
    assert run.unwrap_model(model) is net
    yield "beginning", ends(net)
    for step, x in enumerate(loader):
        if step == 2:
            run.save_state(str(folder / "state"))
            run.wait_for_everyone()  # each rank writes a file of its own there
            yield "saved", sorted(path.name for path in (folder / "state").iterdir()) if run.is_main_process else []
        loss = model(x, 1 + (run.process_index + step) % 3).square().mean()
        run.backward(loss)
        yield f"gradients {step}", [p.grad for p in net.parameters()]
        norm = run.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            yield f"evaluated {step}", [run.gather(loss), norm, net(x), net(x)]
            next(net.parameters()).mul_(0.99)
            if run.is_main_process:  # alone
                net(x)
        model.train()
    run.wait_for_everyone()
    run.load_state(str(folder / "state"))
    yield "loaded", [ends(net), optimizer.state_dict()["state"]]
    for x in loader:
        run.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    yield "ends", [ends(net), optimizer.state_dict()["state"]]


def accumulating(folder: pathlib.Path, **settings: Any) -> Iterator[Any]:
    """Accumulates as accelerate does."""
    run = accelerator(find_unused=False, gradient_accumulation_steps=3, **settings)
    torch.manual_seed(1)
    net = Net()
    model, optimizer, loader = run.prepare(net, adamw(net), batches())
    for step, x in enumerate(loader):
        with run.accumulate(model):
            loss = model(x).square().mean()
            run.backward(loss)
            yield f"gradients {step}", [loss, [p.grad for p in net.parameters()]]
            optimizer.step()
            optimizer.zero_grad()
    yield "ends", [ends(net), optimizer.state_dict()["state"]]


def gan(folder: pathlib.Path, **settings: Any) -> Iterator[Any]:
    """Trains two modules in turn, each with an optimizer of its own."""
    run = accelerator(**settings)
    torch.manual_seed(1)
    nets = Net(out=16), Net(out=1)
    generator, critic, of_generator, of_critic, loader = run.prepare(*nets, *map(adamw, nets), batches())
    for step, x in enumerate(loader):
        torch.manual_seed(100 + step)
        made = generator(torch.randn(x.shape).to(x.device))
        of_critic.zero_grad()
        real = critic(x).square().mean()
        run.backward(real)
        fake = (critic(made.detach()) - 1).square().mean()
        run.backward(fake)
        yield f"critic {step}", [real, fake, [p.grad for p in critic.parameters()]]
        of_critic.step()
        of_generator.zero_grad()
        fooled = critic(made).square().mean()
        run.backward(fooled)
        yield f"generator {step}", [fooled, [[p.grad for p in net.parameters()] for net in nets]]
        of_generator.step()
    yield "ends", [ends(*nets), of_generator.state_dict()["state"], of_critic.state_dict()["state"]]


def pair(folder: pathlib.Path, **settings: Any) -> Iterator[Any]:
    """Trains two modules with one optimizer."""
    run = accelerator(**settings)
    torch.manual_seed(1)
    nets = nn.ModuleList([Net(out=16), Net()])
    first, second, optimizer, loader = run.prepare(*nets, adamw(nets), batches())
    for step, x in enumerate(loader):
        run.backward(second(first(x)).square().mean())
        norm = run.clip_grad_norm_(nets.parameters(), 0.1)
        yield f"gradients {step}", [norm, [p.grad for p in nets.parameters()]]
        optimizer.step()
        optimizer.zero_grad()
    yield "ends", [ends(*nets), optimizer.state_dict()["state"]]


class WithLoss(nn.Module):
    """A model with its loss, and with a head of its own that is on the device."""

    def __init__(self, net: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.net, self.head = net, nn.Linear(8, 3).to(device)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x)).square().mean()


class Around(nn.Module):
    """A module around a model, with another one, a head and a parameter of its own, as losses and averages have."""

    def __init__(self, net: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((8,), 0.5))
        self.net, self.other = net, copy.deepcopy(net).requires_grad_(False)
        self.head = nn.Linear(8, 3)
        self.placed = nn.Sequential(nn.Linear(8, 8).to(device), nn.Linear(8, 8).to(device))  # where the model is

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.placed(self.net(x) - self.other(x)) * self.scale)


def around(folder: pathlib.Path, ranks: int = 2, early: bool = False) -> Iterator[Any]:
    """Moves modules around a model of all ranks: on these ranks one, perhaps first, and one that trains on all."""
    run = accelerator()
    torch.manual_seed(1)
    net = Net()
    kept = []
    if early and run.process_index < ranks:
        kept.append(Around(net, run.device).to(run.device))
    model, optimizer, loader = run.prepare(net, adamw(net), batches())
    if not early and run.process_index < ranks:
        kept.append(Around(net, run.device).to(run.device))
    outer = Around(net, run.device).to(run.device)
    of_outer = torch.optim.SGD([outer.scale, *outer.placed.parameters(), *outer.head.parameters()], lr=0.1)
    for step, x in enumerate(loader):
        loss = model(x).square().mean()
        run.backward(loss)
        yield f"gradients {step}", [loss, [p.grad for p in net.parameters()]]
        optimizer.step()
        optimizer.zero_grad()
        outer.net, inner = model, outer.net  # whose gradients are averaged
        run.backward(outer(x).square().mean())
        outer.net = inner
        yield f"gradients around {step}", [p.grad.to("cpu") for p in outer.parameters() if p.requires_grad]
        optimizer.step()
        optimizer.zero_grad()
        of_outer.step()
        of_outer.zero_grad()
    yield "ends", [ends(net), optimizer.state_dict()["state"], [p.detach().cpu() for p in outer.parameters()]]
    del kept


def beside(folder: pathlib.Path) -> Iterator[Any]:
    """Prepares a module of which a part has been moved with another module around that."""
    run = accelerator()
    torch.manual_seed(1)
    net = Net()
    moved = Around(net, run.device).to(run.device)
    inner = WithLoss(net, run.device)
    model, optimizer, loader = run.prepare(inner, adamw(inner), batches())
    for step, x in enumerate(loader):
        loss = model(x)
        run.backward(loss)
        yield f"gradients {step}", [loss, [p.grad for p in inner.parameters()]]
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            yield f"moved {step}", moved(x)
    yield "ends", [ends(inner), optimizer.state_dict()["state"]]
    yield "moved", [p.detach().cpu() for p in moved.parameters()]


RUNS: dict[str, Callable[[], Callable[..., Iterator[Any]]]] = {
    "trainer": trainer,
    "adapters": adapters,
    "resuming": resuming,
    "trl": trl,
    "sentences": sentences,
    "plainly": lambda: plainly,
    "accumulating": lambda: accumulating,
    "gan": lambda: gan,
    "pair": lambda: pair,
    "around": lambda: around,
    "beside": lambda: beside,
}


# ---- what a rank finds


def facts() -> dict[str, Any]:
    """What is shared with the other ranks, and what is refused, on this one."""
    from sp_lightning.hf import streaming
    from sp_lightning.ranks.peers import Peers

    with place("simgpu"), streaming(window=1) as stream:
        run = accelerator()
        nets = {"moved first": Net(), "prepared": Net(), "frozen": Net().requires_grad_(False), "judge": Net()}
        nets["moved first"].to(run.device)
        run.prepare(nets["moved first"], nets["prepared"])
        run.prepare_model(nets["judge"], evaluation_mode=True)
        nets["frozen"].to(run.device)
        teams = {one.module: one.team for one in stream.handles}
        return {
            "shared": [name for name, net in nets.items() if isinstance(teams[net], Peers)],
            "streamed": len(teams),
            "torch's DDP": said(lambda: nn.parallel.DistributedDataParallel(nets["prepared"])),
            "only_if_needed": said(lambda: streaming(only_if_needed=True)),
        }


def comm_hook() -> str:
    """What a model that streams says to a communication hook of DDP."""
    from accelerate import Accelerator, DDPCommunicationHookType, DistributedDataParallelKwargs

    from sp_lightning.hf import streaming

    with place("cpu"), streaming(window=1):
        ddp = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
        run = Accelerator(cpu=True, kwargs_handlers=[ddp])
        return said(lambda: run.prepare(Net()))


def said(function: Callable[[], Any]) -> str:
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def fails(early: bool) -> str:
    """Raise on the second rank, perhaps before its model streams; return what this one says."""

    def train() -> None:
        from sp_lightning.hf import streaming

        with streaming(window=1):
            run = accelerator()
            net = Net()
            if run.process_index and early:
                net.head.to("meta")
            model, optimizer = run.prepare(net, adamw(net))
            if run.process_index:
                raise ZeroDivisionError
            run.backward(model(torch.zeros(4, 16)).sum())
            optimizer.step()

    with place("cpu"):
        return said(train)


def trained(folder: str, size: int, options: dict[str, Any] | None, resume: str | None, **settings: Any) -> Any:
    """Train with a Trainer on the first ``size`` ranks, from a checkpoint perhaps; return what it leaves."""
    if size == 1:
        if int(os.environ["LOCAL_RANK"]):
            return None
        os.environ["WORLD_SIZE"] = "1"
    run = {"save_strategy": "steps", "save_steps": 2, "evaluates": False, "lr_scheduler_type": "constant"}
    return record("trainer", options, folder=folder, resume=resume, **run, **settings)
