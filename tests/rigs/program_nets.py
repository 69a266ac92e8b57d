"""Small nets for random programs: blocks of several kinds between a stem and a head, made from the names of kinds.

Every block maps the same width to itself, so that programs may exchange blocks, weights and classes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 8


class Block(nn.Module):
    """A block whose forward scales what its kind computes by an attribute, which programs change."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x + self.computed(x) * self.factor

    def computed(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Dense(Block):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def computed(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Normed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def computed(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(self.linear(self.norm(x)))


class Batched(Block):
    """Has buffers that forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def computed(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.linear(x)))


class Dropping(Block):
    """Draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)

    def computed(self, x: Tensor) -> Tensor:
        return self.dropout(torch.tanh(self.linear(x)))


class Attending(Block):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def computed(self, x: Tensor) -> Tensor:
        query, key, value = self.inner(x).chunk(3, dim=-1)
        return self.outer(((query @ key.transpose(0, 1)) / WIDTH**0.5).softmax(dim=-1) @ value)


class Scaled(Block):
    """Multiplies by weights of its own, and by an attribute of one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def computed(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight + self.bias) * getattr(self.weight, "factor", 1.0)


class Repeating(Block):
    """Uses its weights twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def computed(self, x: Tensor) -> Tensor:
        return self.linear(torch.tanh(self.linear(x)))


class Recurrent(Block):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def computed(self, x: Tensor) -> Tensor:
        return self.cell(x[:, None])[0][:, 0]


class Checkpointed(Dense):
    """Recomputes itself."""

    def computed(self, x: Tensor) -> Tensor:
        return checkpoint(super().computed, x, use_reentrant=False)


class Adapting(Block):
    """Takes a step of gradient descent on its weights inside of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def computed(self, x: Tensor) -> Tensor:
        def loss(weights: dict[str, Tensor]) -> Tensor:
            return torch.func.functional_call(self.linear, weights, (x.detach(),)).float().square().mean()

        weights = dict(self.linear.named_parameters())
        slopes = torch.func.grad(loss)(weights)
        moved = {name: weight - 0.1 * slopes[name] for name, weight in weights.items()}
        return torch.tanh(torch.func.functional_call(self.linear, moved, (x,)))


class Frozen(Block):
    """Has a frozen weight beside a trained one."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.adapter = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.base.requires_grad_(False)

    def computed(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.adapter(x))


KINDS = {
    kind.__name__: kind
    for kind in (
        *(Dense, Normed, Batched, Dropping, Attending, Scaled, Repeating, Recurrent, Checkpointed, Adapting, Frozen),
    )
}
USES_TWICE = {"Repeating", "Recurrent", "Adapting", "tied"}  # weights, so that autocast's cache counts


class Net(nn.Module):
    """A stem, blocks, a norm that stays on the device, and a head."""

    def __init__(self, kinds: Sequence[str]) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(KINDS[kind]() for kind in kinds if kind != "tied")
        if "tied" in kinds:
            self.blocks.append(self.blocks[0])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batch(number: int) -> Tensor:
    """Draw a batch."""
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1000 + number))


@functools.cache
def other(kind: type[nn.Module]) -> type[nn.Module]:
    """Make another class for a module: it computes something else with the same weights."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return kind.forward(self, x) * 0.5

    return type(kind.__name__, (kind,), {"forward": forward})
