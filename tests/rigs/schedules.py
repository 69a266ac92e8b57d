"""Random schedules of units, another one on each rank, against a plain model that adds up what all ranks do.

A *schedule* is what the ranks do until a step: for each micro-batch and rank a path over the blocks, in any order, with
some skipped and some taken again, the experts that get tokens, and the place of a collective in backward, if there is
one. The processes of a test run many (processes.py, Rule 1). Each draws all of them from one seed, so that each knows
the others', and computes the reference by itself: nothing that the library shares takes part in that.
"""

from __future__ import annotations

import contextlib
import copy
import os
import pathlib
import random
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import parity
import sp_lightning
from sp_lightning.ranks.exchange import tree
from sp_lightning.runtime.handle import stream as stream_before

BLOCKS, EXPERTS, WIDTH = 4, 3, 8
RANKS = str(pathlib.Path(sp_lightning.__file__).parent / "ranks")
TIMEOUT = timedelta(seconds=30)
OPTIMIZERS = [
    lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=False),
]


class Experts(nn.Module):
    """Experts of which those that get tokens run."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x: Tensor, chosen: tuple[int, ...]) -> Tensor:
        for place, expert in enumerate(chosen):
            x = x.index_add(0, torch.tensor([place]), self.experts[expert](x[place : place + 1]))
        return x


class Meets(torch.autograd.Function):
    """A collective in backward, to which a rank comes after the blocks that follow it here: SyncBatchNorm has one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        dist.all_reduce(torch.zeros(()))
        return grad


class Net(nn.Module):
    """Blocks and a layer of experts in any order, between an embedding and a head that every path may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.meets = False
        self.embedding = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList([*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)), Experts()])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor, part: Part) -> Tensor:
        if part.idle:  # a loss that reaches none of the model's weights
            return torch.ones((), requires_grad=True) * 1.0
        x = self.embedding(tokens)
        for place, block in enumerate((*part.path, None)):
            if self.meets and part.meets == place:
                x = Meets.apply(x)
            if block is None:
                break
            x = x + torch.tanh(self.blocks[block](x, part.chosen) if block == BLOCKS else self.blocks[block](x))
        return (self.head(x) if part.head else x).square().mean()


class Part(NamedTuple):
    """What one rank does in one micro-batch."""

    path: tuple[int, ...]
    chosen: tuple[int, ...]  # the expert of each of the first tokens
    head: bool
    idle: bool
    seed: int  # of its tokens
    pause: float  # seconds, before its backward
    meets: int | None  # the place in its path of a collective in backward, which all ranks have or none


class Schedule(NamedTuple):
    """What all ranks do until a step."""

    parts: list[list[Part]]  # by micro-batch and rank
    alone: int | None  # a rank that evaluates by itself before the step
    edits: bool  # whether every rank writes to a weight after the step
    zeros: bool  # whether gradients are cleared to zeros


def draw(dice: random.Random, size: int) -> Schedule:
    """Draw a schedule."""

    def part() -> Part:
        path = dice.sample(range(BLOCKS + 1), dice.randint(0, BLOCKS + 1))
        if path and dice.random() < 0.3:
            path.insert(dice.randrange(len(path) + 1), dice.choice(path))
        chosen = tuple(dice.randrange(EXPERTS) for _ in range(dice.randint(0, 2)))
        idle, pause = dice.random() < 0.1, dice.choice([0, 0, 0, 1e-3, 4e-3])
        return Part(tuple(path), chosen, dice.random() < 0.8, idle, dice.randrange(1 << 30), pause, None)

    def joint() -> list[Part]:
        parts = [part() for _ in range(size)]
        if dice.random() < 0.7 or any(part.idle for part in parts):
            return parts
        return [part._replace(meets=dice.randint(0, len(part.path))) for part in parts]

    micro = dice.choice([1, 1, 2, 3])
    parts = [joint() for _ in range(micro)]
    return Schedule(parts, dice.choice([None, *range(size)]), dice.random() < 0.2, dice.random() < 0.3)


def run(seeds: list[int], count: int, held_up: float = 0.0, early: bool = False) -> list[str]:
    """Run so many schedules from each seed; return what differs from the reference on this rank.

    ``held_up``: the share of the calls in sp_lightning/ranks before which this rank sleeps, another one than others.
    ``early``: units are stepped beside backward, as far as each rank has that.
    """
    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=size)
    ahead: list[int] = []
    with holding_up(held_up, rank):
        wrong = [f"seed {seed}: {one}" for seed in seeds for one in differences(seed, count, rank, size, early, ahead)]
    return wrong or ["nothing was stepped beside backward"] * (early and not any(ahead))


@contextlib.contextmanager
def holding_up(share: float, seed: int) -> Iterator[None]:
    """Sleep at random places of sp_lightning/ranks: an order that only luck keeps does not hold."""
    dice = random.Random(seed)

    def pause(frame: FrameType, event: str, _: Any) -> None:
        if event != "return" and dice.random() < share and frame.f_code.co_filename.startswith(RANKS):
            time.sleep(dice.choice([1e-4, 1e-3, 5e-3]))

    for profiled in (sys, threading) if share else ():
        profiled.setprofile(pause)
    try:
        yield
    finally:
        for profiled in (sys, threading):
            profiled.setprofile(None)


def differences(seed: int, count: int, rank: int, size: int, early: bool, ahead: list[int]) -> list[str]:
    """Return what differs after a model's schedules, or after the first that differs.

    Adds to ``ahead`` how many parameters were stepped beside backward.
    """
    dice, own_dice = random.Random(f"{seed} of {size}"), random.Random(f"{seed} on {rank}")
    torch.manual_seed(seed)
    plain = Net()
    net, make = copy.deepcopy(plain), dice.choice(OPTIMIZERS)
    net.meets = True
    options = {"window": dice.choice([1, 2, 9]), "units": ["Linear", "Embedding"]}
    expected = make(plain.parameters())
    with stream_before(net, "cpu", group=dist.group.WORLD, timeout=TIMEOUT, **options) as handle:
        optimizer = make(net.parameters())
        for step in range(count):
            schedule = draw(dice, size)
            accumulate(handle, net, schedule, rank)
            with beside(handle, optimizer, own_dice) if early else contextlib.nullcontext():
                take(handle, net, schedule, rank)
                if not early:
                    evaluate(net, schedule, rank)
                found = {name: None if p.grad is None else p.grad.clone() for name, p in net.named_parameters()}
                mean(plain, schedule, size)
                wrong = differing(found, {name: p.grad for name, p in plain.named_parameters()})
                optimizer.step()
            if early:
                evaluate(net, schedule, rank)
            expected.step()
            if wrong := wrong + differing(net.state_dict(), plain.state_dict()):
                return [f"step {step}, {name} of rank {rank}" for name in wrong]
            for model in (net, plain) if schedule.edits else ():
                with torch.no_grad():
                    model.head.weight.mul_(0.99)
            for each in (optimizer, expected):
                each.zero_grad(set_to_none=not schedule.zeros)
        ahead.append(handle.stats()["stepped_ahead"])
    return []


def beside(handle: Any, optimizer: Any, dice: random.Random) -> contextlib.AbstractContextManager[None]:
    """Step beside a backward and the next forward, as the strategy has it where hooks allow that on this rank."""
    defers = dice.random() < 0.7
    return handle.steps.overlapping(optimizer, lambda: defers, dice.random() < 0.9)


def accumulate(handle: Any, net: Net, schedule: Schedule, rank: int) -> None:
    """Do this rank's part of all micro-batches but the last."""
    for of_ranks in schedule.parts[:-1]:
        with handle.no_sync():
            loss = net(tokens(of_ranks[rank]), of_ranks[rank])
            time.sleep(of_ranks[rank].pause)
            loss.backward()


def take(handle: Any, net: Net, schedule: Schedule, rank: int) -> None:
    """Do this rank's part of the last micro-batch, whose backward exchanges gradients."""
    part = schedule.parts[-1][rank]
    idle = any(one.idle for one in schedule.parts[-1])  # as the strategy: who reaches nothing exchanges, too
    with handle.no_sync() if idle else contextlib.nullcontext():
        loss = net(tokens(part), part)
        time.sleep(part.pause)
        with handle.team.exchanging(loss) if idle else contextlib.nullcontext():
            loss.backward()


def evaluate(net: Net, schedule: Schedule, rank: int) -> None:
    """Run the model on one rank alone, if the schedule says so."""
    if schedule.alone == rank:
        part = schedule.parts[-1][rank]
        with torch.no_grad():
            net(tokens(part), part._replace(idle=False))


def mean(plain: Net, schedule: Schedule, size: int) -> None:
    """Give the reference the mean of all ranks' gradients, added in the order of `sp_lightning.tree_hook`."""
    parameters = list(plain.parameters())
    before = [p.grad for p in parameters]
    of_ranks, reached = [], [False] * len(parameters)
    for rank in range(size):
        sums = [None if grad is None else grad.clone() for grad in before]
        for parts in schedule.parts:
            for p in parameters:
                p.grad = None
            plain(tokens(parts[rank]), parts[rank]).backward()
            for index, p in enumerate(parameters):
                if p.grad is not None:
                    reached[index] = True
                    known = sums[index]
                    sums[index] = p.grad if known is None else known + p.grad
        of_ranks.append(sums)
    for index, p in enumerate(parameters):
        shares = [torch.zeros_like(p) if sums[index] is None else sums[index] * (1 / size) for sums in of_ranks]
        p.grad = tree(shares) if reached[index] else before[index]


def differing(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Return the names under which the two have other bits."""
    return [name for name in expected if parity.difference(expected[name], found[name])]


def tokens(part: Part) -> Tensor:
    """Draw a micro-batch."""
    return torch.randint(0, 11, (3,), generator=torch.Generator().manual_seed(part.seed))
