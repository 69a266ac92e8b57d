"""Nets put together at random train as in a plain run, bit for bit.

A net of the zoo (models.py) has one odd trait. These have several at once, in places that nobody chose: checkpoints and
hooks on saved tensors around units, inside of them and around modules with weights of their own; autocast that begins
or ends in mid-net; parts without gradients; shared and repeated modules; hooks on weights; writes between steps.

A net is made from its number alone. Left out is what docs/exactness.md names: under a reentrant checkpoint no weight is
used twice.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from often import often
from side_by_side import check, sgd
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from sp_lightning.errors import ExactnessError

WIDTH = 8
OFTEN, ALL = 4, 400  # nets in the default run, and in the slow one


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class InPlace(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu_()


class Twice(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x).tanh())


class Functional(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.clone(), self.bias * 1.5)


class Recurrent(nn.GRU):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, None])[0][:, 0]


class Experts(nn.Module):
    """Uses one of two weights, so that the other one gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Scale() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[int(x.sum() > 0)](x)


LAYERS: list[Callable[[], nn.Module]] = [
    *[functools.partial(kind, WIDTH, WIDTH) for kind in (nn.Linear, InPlace, Twice, Functional)],
    *[functools.partial(kind, WIDTH) for kind in (nn.LayerNorm, nn.BatchNorm1d)],
    *(Scale, Experts, functools.partial(Recurrent, WIDTH, WIDTH, batch_first=True)),
]
WITHOUT_WEIGHTS: list[Callable[[], nn.Module]] = [functools.partial(nn.Dropout, 0.2), nn.Tanh]


def autocast(x: Tensor, enabled: bool = True) -> torch.autocast:
    return torch.autocast(x.device.type, torch.bfloat16, enabled=enabled, cache_enabled=False)


def within(context: Callable[[Tensor], Any], call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with context(x):
        return call(x)


def without_gradients(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return x + within(lambda _: torch.no_grad(), call, x)


recomputed = functools.partial(checkpoint, use_reentrant=False)
on_cpu = functools.partial(within, lambda _: save_on_cpu())

# How a module may be called.
CALLS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "plainly": lambda call, x: call(x),
    "recomputed": recomputed,
    "recomputed by a reentrant checkpoint": functools.partial(checkpoint, use_reentrant=True),
    "with what is saved on the CPU": on_cpu,
    "recomputed around what is saved on the CPU": lambda call, x: recomputed(functools.partial(on_cpu, call), x),
    "recomputed, saved on the CPU": lambda call, x: on_cpu(functools.partial(recomputed, call), x),
    "with hooks on what is saved": functools.partial(within, lambda _: saved_tensors_hooks(torch.clone, torch.clone)),
    "without gradients": without_gradients,
    "under autocast": lambda call, x: within(autocast, call, x).float(),
    "without autocast": lambda call, x: within(lambda x: autocast(x, False), call, x.float()),
}
USUAL = ["plainly"] * 5
REENTRANT = "recomputed by a reentrant checkpoint"


class Parts(nn.Module):
    """Modules one after the other, each called in its own way, with weights of their own in front and behind."""

    def __init__(self, dice: random.Random, parts: list[nn.Module], residual: bool = False) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.calls = [dice.choice([*CALLS, *USUAL]) for _ in parts]
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for how, part in zip(self.calls, self.parts, strict=True):
            y = CALLS[how](part, y)
        return x + y if self.residual else y


class Block(Parts):
    """What the units are, in most nets."""


class Stage(Parts):
    """Blocks within a module that has weights of its own, at times."""

    def __init__(self, dice: random.Random, parts: list[nn.Module]) -> None:
        super().__init__(dice, parts)
        self.before, self.behind = (Scale().weight if dice.random() < 0.3 else None for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x if self.before is None else x * self.before)
        return x if self.behind is None else x * self.behind


def net(number: int) -> nn.Module:
    """Make a net from its number."""
    dice = random.Random(number)
    shared = nn.Linear(WIDTH, WIDTH)

    def block() -> nn.Module:
        layers = [dice.choice(LAYERS)(), *(dice.choice(LAYERS + WITHOUT_WEIGHTS)() for _ in range(dice.randrange(3)))]
        return Block(dice, [*layers, *([shared] if dice.random() < 0.1 else [])], dice.random() < 0.5)

    def stage(depth: int = 1) -> nn.Module:
        parts = [stage(0) if depth and dice.random() < 0.3 else block() for _ in range(dice.randint(1, 3))]
        return Stage(dice, [*parts, *(parts[:1] if dice.random() < 0.1 else [])])

    made = Stage(dice, [stage() for _ in range(dice.randint(1, 3))])
    if uses_reentrant(made):
        used_twice = [shared, *(part for part in made.modules() if isinstance(part, Twice)), *repeated(made)]
        for part in made.modules():
            if isinstance(part, Parts) and not set(used_twice).isdisjoint(part.modules()):
                part.calls = ["recomputed" if how == REENTRANT else how for how in part.calls]
    return nn.Sequential(made, nn.Linear(WIDTH, 3))


def uses_reentrant(module: nn.Module) -> bool:
    return any(REENTRANT in part.calls for part in module.modules() if isinstance(part, Parts))


def repeated(made: nn.Module) -> Iterator[nn.Module]:
    """Yield what is called twice by one module, with all that it calls."""
    for part in made.modules():
        if isinstance(part, Stage) and len(set(part.parts)) < len(part.parts):
            yield from part.parts[0].modules()


def attach_hooks(module: nn.Module, dice: random.Random, seen: dict[int, list[Any]]) -> None:
    """Register hooks that change gradients, or that say what they are given."""
    weights, parts = list(module.parameters()), [part for part in module.modules() if isinstance(part, Parts)]
    for number in range(dice.randint(0, 3)):
        weight, part, told = dice.choice(weights), dice.choice(parts), seen.setdefault(number, [])
        kinds: list[Callable[[], Any]] = [
            lambda weight=weight: weight.register_hook(lambda grad: grad * 0.5),
            lambda weight=weight: weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad * 0.5)),
            lambda weight=weight, told=told: weight.register_hook(lambda grad: told.append(grad.detach().clone())),
            lambda part=part: part.register_forward_pre_hook(lambda _, args: (args[0] * 0.9,)),
            lambda part=part: part.register_forward_hook(lambda _, args, output: output * 1.1),
            lambda part=part: part.register_full_backward_pre_hook(lambda _, grads: tuple(g * 0.7 for g in grads)),
        ]
        dice.choice(kinds)()


def training(dice: random.Random, module: nn.Module, device: torch.device) -> Iterator[Any]:
    """Train with everything else at random, too."""
    seen: dict[int, list[Any]] = {}
    attach_hooks(module, dice, seen)
    weights = list(module.parameters())
    optimizer = torch.optim.AdamW(weights, lr=0.01) if dice.random() < 0.5 else sgd(module)
    batches, clips, mixed, sets_to_none = dice.choice([1, 1, 2]), *(dice.random() < share for share in (0.4, 0.3, 0.7))
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        for _ in range(batches):
            x = torch.randn(4, WIDTH, generator=generator).to(device)
            with autocast(x, mixed):
                loss = module(x).float().square().mean()
            if dice.random() < 0.2 and not uses_reentrant(module):  # which torch refuses there
                trained = [p for p in weights if p.requires_grad]
                yield torch.autograd.grad(loss, trained, retain_graph=True, allow_unused=True)
            loss.backward(retain_graph=dice.random() < 0.1)
            yield loss
        if clips:
            nn.utils.clip_grad_norm_([p for p in weights if p.grad is not None], 0.5)
        yield [p.grad for p in weights]
        optimizer.step()
        optimizer.zero_grad(set_to_none=sets_to_none)
        yield between_steps(dice, module, dice.choice(weights[:-2]), x)  # the head's are always trained
    yield seen, [optimizer.state.get(p) for p in weights]


def between_steps(dice: random.Random, module: nn.Module, weight: nn.Parameter, x: Tensor) -> Any:
    """Do what user code does between two steps."""
    what = dice.randrange(8)
    if what == 0:
        with torch.no_grad():
            weight.mul_(0.9)
    elif what == 1:
        weight.data = weight.data * 0.9
    elif what == 2:
        weight.requires_grad_(False)
    elif what == 3:
        module.requires_grad_(True)
    elif what == 4:
        module.load_state_dict({name: value.clone() for name, value in module.state_dict().items()})
    elif what == 5:
        module.eval()
        with torch.no_grad():
            output = module(x)
        module.train()
        return output
    return None


def options_of(dice: random.Random) -> dict[str, Any]:
    units = dice.choice([["Block"], ["Block"], ["Stage"], "auto"])
    activations = dice.choice(["keep", "recompute", "recompute", "offload", "recompute+offload"])
    window = dice.choice([1, 1, 2, 3])
    return {"units": units, "activations": activations, "window": window, "optimizer_overlap": dice.random() < 0.7}


@pytest.mark.parametrize("number", often(range(ALL), *range(OFTEN)))
def test_a_random_net_trains_as_in_a_plain_run(number, device):
    def run(module: nn.Module, device: torch.device) -> Iterator[Any]:
        yield from training(random.Random(f"run {number}"), module, device)

    try:
        check(functools.partial(net, number), run, device, **options_of(random.Random(f"options {number}")))
    except ExactnessError as error:
        assert "was replaced (p.data = ...) while" in str(error)
