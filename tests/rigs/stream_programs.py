"""Programs that run plain and then streamed, and the comparison of all that they leave, bit for bit.

A program is a function of a `Run` and a model. It returns tensors in any nesting; optimizers that it gets from the run
are compared as well, and so are the model's weights and buffers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import parity
from sp_lightning.handle import Handle
from sp_lightning.options import Options

POLICIES = ("keep", "recompute", "offload", "recompute+offload")
CHUNK = 512  # elements of a slice, so that each weight has several


def stream(module: nn.Module, device: torch.device | str, **options: Any) -> Handle:
    """Stream with settings that users do not have, such as a chunk of few elements."""
    settings = {name: options.pop(name) for name in ("wire", "chunk") if name in options}
    return Handle(module, device, Options.parse(**{"window": 2, "transfer": 1, **options}), **settings)


def streamed(model: nn.Module, device: torch.device | str, **options: Any) -> Handle:
    """Stream with a window of one unit, in slices so small that each weight has several."""
    return stream(model, device, **{"window": 1, "chunk": CHUNK, **options})


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class Net(nn.Module):
    """Blocks between two layers that are no units."""

    def __init__(self, block: Callable[[], nn.Module] = Block, count: int = 5) -> None:
        super().__init__()
        self.emb = nn.Linear(8, 32)
        self.blocks = nn.ModuleList(block() for _ in range(count))
        self.head = nn.Linear(32, 4)

    def forward(self, x, skip=()):
        x = self.emb(x)
        for index, block in enumerate(self.blocks):
            if index not in skip:
                x = block(x)
        return self.head(x)


class Run:
    """One run of a program: inputs on its device, and the optimizers that it made."""

    def __init__(self, device: torch.device, is_streamed: bool) -> None:
        self.device, self.is_streamed = device, is_streamed
        self.optimizers: list[torch.optim.Optimizer] = []

    def x(self, seed: int, *shape: int) -> Tensor:
        """Draw an input."""
        return torch.randn(*(shape or (4, 8)), generator=torch.Generator().manual_seed(seed)).to(self.device)

    def noted(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Have an optimizer's state compared."""
        self.optimizers.append(optimizer)
        return optimizer

    def adamw(self, params: Any, lr: float = 1e-2) -> torch.optim.Optimizer:
        """Make the optimizer that most programs have."""
        return self.noted(torch.optim.AdamW([p for p in params if p.requires_grad], lr, fused=True))

    def train(self, loss: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
        """Do a backward and a step; return the loss."""
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach().clone()

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        """Train on one batch."""
        return self.train(model(self.x(i)).square().mean(), optimizer)

    def edited(self, model: nn.Module, edit: Callable[[Any], Any], count: int = 4) -> list[Any]:
        """Train on some batches, with an edit between each backward and its step; return losses and what edits saw."""
        optimizer, seen = self.adamw(model.parameters()), []
        for i in range(count):
            loss = model(self.x(i)).square().mean()
            loss.backward()
            seen += [loss.detach().clone(), edit(model)]
            optimizer.step()
            optimizer.zero_grad()
        return seen

    def loop(self, model: nn.Module, step: Any = None, optimizer: Any = None, count: int = 4) -> list[Tensor]:
        """Train on some batches by ``step(model, optimizer, i)``; return the losses."""
        optimizer = optimizer or self.adamw(model.parameters())
        return [(step or self.step)(model, optimizer, i).detach().clone() for i in range(count)]


@dataclass(frozen=True)
class Program:
    """A program, the model that it gets, the policies that it is tried with, and options of the stream."""

    do: Callable[[Run, Any], Any]
    make: Callable[[], nn.Module] = Net
    policies: tuple[str, ...] = ("keep",)
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.do.__name__


def collected(programs: list[Program]) -> Any:
    """Return a decorator ``program(make, *policies, **options)`` that appends to a list."""

    def program(make: Callable[[], nn.Module] = Net, *policies: str, **options: Any) -> Any:
        def add(do: Any) -> Any:
            programs.append(Program(do, make, policies or ("keep",), options))
            return do

        return add

    return program


def cases(programs: list[Program]) -> list[Any]:
    """List programs with their policies, as parameters of a test; all but the first policy of each are slow."""
    return [
        pytest.param(program, policy, id=f"{program.name}-{policy}", marks=[pytest.mark.slow] * (number > 0))
        for program in programs
        for number, policy in enumerate(program.policies)
    ]


PLACES = [
    pytest.param("simgpu", 1, marks=pytest.mark.simgpu),
    pytest.param("simgpu", 2, marks=[pytest.mark.simgpu, pytest.mark.slow]),
    pytest.param("cpu", 1, marks=pytest.mark.slow),
]


def device_named(name: str) -> torch.device:
    """Return the CPU, or the simulated accelerator."""
    return torch.device("cpu") if name == "cpu" else torch.device(name, 0)


def check(program: Program, device: str, policy: str = "keep", window: int = 1) -> None:
    """Run a program plain and streamed; raise AssertionError at the first difference."""
    place = device_named(device)
    torch.manual_seed(0)
    model = program.make()
    plain = copy.deepcopy(model).to(place)
    wanted = Run(place, is_streamed=False)
    want = program.do(wanted, plain)
    found = Run(place, is_streamed=True)
    with stream(model, place, window=window, activations=policy, chunk=CHUNK, **program.options):
        got = program.do(found, model)
    compare("value", want, got)
    compare("weight", dict(plain.state_dict()), dict(model.state_dict()))
    for mine, other in zip(wanted.optimizers, found.optimizers, strict=True):
        compare("state", mine.state_dict()["state"], other.state_dict()["state"])
    assert list(map(type, model.parameters())) == list(map(type, plain.parameters()))


def compare(what: str, want: Any, got: Any) -> None:
    """Raise AssertionError at the first of these values that differs."""
    parity.compare(parity.Record(parity.seen(what, want)), parity.Record(parity.seen(what, got)))
