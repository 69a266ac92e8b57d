"""A loop on each rank whose user code looks at what is stepped beside the next forward (processes.py, Rule 1)."""

from __future__ import annotations

import contextlib
import copy
import os
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import loops
import pretended_nodes
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from sp_lightning.errors import TornStepError
from sp_lightning.optim import pending_step
from sp_lightning.ranks.clipping import Clipping
from sp_lightning.runtime.handle import stream as stream_before

STEPS = 5
SLOW_S = 0.15  # that a slow rank takes more for each unit's step


class Found(NamedTuple):
    """What a rank has seen, and has at the end of its loop."""

    seen: list[Tensor]
    parameters: dict[str, Tensor]
    state: list[Tensor]


@contextlib.contextmanager
def slow(rank: int | None, seconds: float = SLOW_S) -> Iterator[None]:
    """Have a rank's thread be slow to step each unit."""
    if rank != pretended_nodes.rank():
        yield
        return
    step_part = pending_step.PendingStep._step_part

    def late(self: Any, unit: Any) -> None:
        time.sleep(seconds)
        step_part(self, unit)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pending_step.PendingStep, "_step_part", late)
        yield


def look(
    net: loops.Net, optimizers: list[torch.optim.Optimizer], what: str, rank: int, views: list[Tensor]
) -> list[Tensor]:
    """Do to a model that was just stepped what user code may do; return what it sees."""
    block = net.blocks[2]
    with torch.no_grad():
        if what == "reads":
            return [block.up.weight.clone(), net.scale.clone(), net.head.weight.data.sum()]
        if what == "writes":
            block.up.weight.mul_(0.99)
            net.head.weight.data.clamp_(-0.11, 0.11)
        if what == "writes beside":  # of what is frozen, in a page with what is stepped
            block.norm.weight.mul_(0.99)
            block.norm.bias.data.add_(0.01)
        if what == "writes beside, by a view":
            for view in views:
                view.mul_(0.99)
        if what == "writes an array":
            block.down.bias.detach().numpy()[3] *= 1.01
        if what == "reads gradients":
            return [p.grad.clone() for p in net.parameters() if p.grad is not None]
        if what == "writes gradients":
            block.up.weight.grad.zero_()
        if what == "takes gradients":
            for optimizer in optimizers:
                optimizer.zero_grad()
        if what == "reads state":
            states = [one for optimizer in optimizers for one in optimizer.state.values()]
            return [value.clone() for one in states for value in one.values() if isinstance(value, Tensor)]
        if what == "reads state on one rank" and rank == 0:
            copy.deepcopy(optimizers[0].state_dict())
        if what == "steps again":
            for optimizer in optimizers:
                optimizer.step()
        if what == "writes state":
            optimizers[0].state[block.up.weight]["exp_avg"].mul_(0.9)
        if what == "evaluates on one rank" and rank == 0:
            net.eval()
            net(torch.arange(8), None)
            net.train()
    return []


def train(
    streamed: dict[str, Any] | None,
    device: str = "cpu",
    what: str = "",
    slow_rank: int | None = None,
    optimizer: str = "adamw",
    several: int = 1,
    keeps: int | None = None,
) -> tuple[Found, int]:
    """Train on this rank: under DDP if ``streamed`` is None, else with these options.

    Returns how many steps it deferred, too. ``what``: what user code does after each step. ``keeps``: the rank whose
    user code refers to a weight's bytes, so that it defers nothing. ``several``: optimizers, each of some parameters.
    """
    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=size)
    torch.manual_seed(rank)
    net = loops.Net()
    for block in net.blocks:
        block.norm.requires_grad_(False)
    seen = []
    with contextlib.ExitStack() as stack:
        if streamed is not None:
            stack.enter_context(slow(slow_rank))
        call, device, handle = loops.placed(net, device, streamed, stack)
        trained = [p for p in net.parameters() if p.requires_grad]
        optimizers = [loops.OPTIMIZERS[optimizer](trained[part::several]) for part in range(several)]
        kept = net.head.weight.detach() if keeps == rank else None
        views = [block.norm.weight.detach() for block in net.blocks] if "view" in what else []
        for step in range(STEPS):
            tokens = torch.randint(0, 97, (16,), generator=torch.Generator().manual_seed(100 * step + rank)).to(device)
            nn.functional.cross_entropy(call(tokens, loops.skipped(rank, step)), tokens).backward()
            for each in optimizers:
                each.step()
            if streamed is None and what == "evaluates on one rank":
                continue
            seen += look(net, optimizers, what, rank, views)
        if handle is not None:
            handle.finish_step()
        assert kept is None or torch.equal(kept, net.head.weight)
        del kept, views
        found = Found(
            seen,
            {name: p.detach().clone() for name, p in net.named_parameters()},
            [
                value.clone()
                for each in optimizers
                for of in each.state.values()
                for value in map(as_tensor, of.values())
            ],
        )
        return found, 0 if handle is None else handle.stats()["held_steps"]


def clipped_one_by_one(streams: bool) -> tuple[list[Tensor], int]:
    """Step two optimizers whose gradients are clipped in the other order, where the second rank is slow to multiply.

    Returns the weights, and how many steps this rank deferred.
    """
    rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(2)))
    multiply = Clipping.multiply

    def late(clipping: Clipping) -> None:
        time.sleep(SLOW_S * rank)
        multiply(clipping)

    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(Clipping, "multiply", late)
        streamed = {"units": ["Sequential"]} if streams else None
        call, _, handle = loops.placed(net, "cpu", streamed, stack)
        first, second = [torch.optim.SGD(part.parameters(), lr=0.1) for part in net]
        for step in range(STEPS):
            x = torch.randn(4, 64, generator=torch.Generator().manual_seed(100 * step + rank))
            call(x).square().mean().backward()
            for part in reversed(net):
                nn.utils.clip_grad_norm_(part.parameters(), 1e-3)
            first.step()
            second.step()
            net.zero_grad()
        held = 0 if handle is None else handle.stats()["held_steps"]
        return [p.detach().clone() for p in net.parameters()], held


def as_tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(float("nan") if value is None else value)


def after_an_error(where: str) -> tuple[str, bool]:
    """Fail on the first rank after a deferred step; return the error, and whether weights are those of a plain run.

    "forward": in user code of the next forward. "thread": in the step of a unit.
    """
    rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    plain = copy.deepcopy(net)
    made = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (net, plain)]

    def fail(*_: Any) -> None:
        raise MemoryError

    plain(torch.ones(2, 64)).sum().backward()
    made[1].step()
    said = "no error"
    with pytest.MonkeyPatch.context() as patch, slow(1):
        try:
            with stream_before(net, "cpu", group=dist.group.WORLD) as handle:
                net(torch.ones(2, 64)).sum().backward()
                if rank == 0 and where == "thread":
                    patch.setattr(pending_step.PendingStep, "_step_part", fail)
                made[0].step()
                assert handle.stats()["held_steps"] == 1
                if rank == 0 and where == "forward":
                    net[2].register_forward_pre_hook(fail)
                net(torch.ones(2, 64)).sum().backward()
        except Exception as error:
            said = type(error).__name__
    try:
        made[0].step()  # with the gradients that it had
    except TornStepError:
        return f"{said}, torn", False
    made[1].step()
    return said, all(torch.equal(*pair) for pair in zip(net.parameters(), plain.parameters(), strict=True))
