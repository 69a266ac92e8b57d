"""Small nets for random programs: blocks of several kinds between a stem and a head, made from the names of kinds.

Each block maps the same width to itself, so that programs may exchange blocks, weights and classes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
import wrapped
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

WIDTH = 8


class Block(nn.Module):
    """A layer beside a residual, scaled by an attribute that programs change."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.computed(x) * self.factor

    def computed(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Dense(Block):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def computed(self, x: Tensor) -> Tensor:
        return self.down(super().computed(x))


class Normed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def computed(self, x: Tensor) -> Tensor:
        return F.gelu(self.linear(self.norm(x)))


class Batched(Block):
    """Writes its buffers in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def computed(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.linear(x)))


class Dropping(Block):
    """Draws random numbers."""

    def computed(self, x: Tensor) -> Tensor:
        return F.dropout(super().computed(x), 0.2, self.training)


class Attending(Block):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.outer = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def computed(self, x: Tensor) -> Tensor:
        query, key, value = self.linear(x).chunk(3, dim=-1)
        return self.outer(((query @ key.transpose(0, 1)) / WIDTH**0.5).softmax(dim=-1) @ value)


class Scaled(Block):
    """Multiplies by weights of its own, and by an attribute of one of them."""

    def __init__(self) -> None:
        super().__init__()
        del self.linear
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def computed(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight + self.bias) * getattr(self.weight, "factor", 1.0)


class Repeating(Block):
    """Uses its weights twice."""

    def computed(self, x: Tensor) -> Tensor:
        return self.linear(super().computed(x))


class Recurrent(Block):
    def __init__(self) -> None:
        super().__init__()
        del self.linear
        self.cell = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def computed(self, x: Tensor) -> Tensor:
        return self.cell(x[:, None])[0][:, 0]


class Checkpointed(Dense):
    """Recomputes itself."""

    def computed(self, x: Tensor) -> Tensor:
        return checkpoint(super().computed, x, use_reentrant=False)


class Reentrant(Dense):
    """Recomputes itself in a backward of its own."""

    def computed(self, x: Tensor) -> Tensor:
        return checkpoint(super().computed, x, use_reentrant=True)


class Surrounded(Dense):
    """Recomputes itself in a backward of its own, between two other uses of its weights."""

    def computed(self, x: Tensor) -> Tensor:
        first = super().computed(x)
        return super().computed(checkpoint(super().computed, first, use_reentrant=True))


class InFloat(torch.autograd.Function):
    """A product in FP32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.float() @ weight.float().t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return (grads[0] @ weight.float()).to(x.dtype), (grads[0].t() @ x.float()).to(weight.dtype)


class Handed(Block):
    """Hands a weight to a function of its own, beside a layer that uses it as well."""

    def computed(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            beside = InFloat.apply(x, self.linear.weight)
        return torch.tanh(self.linear(x) + beside)


class Nested(Block):
    """Has a block inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Normed()

    def computed(self, x: Tensor) -> Tensor:
        return self.inner(super().computed(x))


class Skipped(Block):
    """Leaves out its layer for some batches, whose gradient stays None."""

    def computed(self, x: Tensor) -> Tensor:
        return super().computed(x) if x.sum() > 0 else torch.zeros_like(x)


class Experts(Block):
    """Routes each row to one of three experts; some get none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def computed(self, x: Tensor) -> Tensor:
        chance, chosen = self.linear(x).softmax(dim=-1).max(dim=-1)
        found = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (rows,) = (chosen == number).nonzero(as_tuple=True)
            if len(rows):
                found = found.index_add(0, rows, (expert(x[rows]) * chance[rows, None]).to(x.dtype))
        return found


class InParts(Dense):
    """Is never called itself: the net calls its layers."""

    in_parts = True


class Lent(Block):
    """Reads a weight of another module, as a tied head does by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.lender: list[nn.Linear] = []  # hidden from the registry of modules

    def computed(self, x: Tensor) -> Tensor:
        return F.linear(super().computed(x), self.lender[0].weight)


class Tied(Block):
    """Has the weight of the stem as its own."""


class Normalised(Block):
    """Has a weight that is computed from two others."""

    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.linear)


class Adapter(Block):
    """Trains an adapter beside a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear.requires_grad_(False)
        self.low, self.high = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def computed(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) + self.high(self.low(x)))


class Quantised(Adapter):
    """Trains an adapter beside a frozen weight that consists of several tensors."""

    def __init__(self) -> None:
        super().__init__()
        wrapped.coded(self.linear)


class Lazy(Block):
    """Makes its layer when it is first called."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.LazyLinear(WIDTH)


class Writing(Block):
    """Writes its weight before each use, as an embedding with a largest norm does."""

    def computed(self, x: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            with torch.no_grad():
                self.linear.weight.mul_(0.99)
        return super().computed(x)


class Counting(Block):
    """Counts its calls in an attribute, on which its output depends."""

    calls = 0

    def computed(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().computed(x) * (1 + self.calls % 3)


WITHIN: list[type[Block]] = [Dense, Normed, Batched, Dropping, Attending, Scaled, Repeating, Recurrent, Checkpointed]
WITHIN += [Reentrant, Nested, Skipped, Experts, InParts, Lent, Tied, Normalised, Adapter, Quantised, Lazy, Writing]
WITHIN += [Counting, Surrounded, Handed]
REENTRANT = {"Reentrant", "Surrounded"}  # whose checkpoint runs a backward inside of backward
KINDS = {kind.__name__: kind for kind in WITHIN}
# Kinds that use a weight twice, so that autocast's cache counts.
USES_TWICE = {"Repeating", "Recurrent", "Lent", "Tied", "Surrounded", "again"}


class Net(nn.Module):
    """A stem, blocks, a norm that stays on the device, and a head; the kind "again" is the first block once more."""

    def __init__(self, kinds: Sequence[str]) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(KINDS[kind]() for kind in kinds if kind != "again")
        if "again" in kinds:
            self.blocks.append(self.blocks[0])
        for block in self.blocks:
            if isinstance(block, Lent):
                block.lender = [self.stem]
            if isinstance(block, Tied):
                block.linear.weight = self.stem.weight
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = self._in_parts(block, x) if hasattr(block, "in_parts") else block(x)
        return self.head(self.norm(x))

    def _in_parts(self, block: Any, x: Tensor) -> Tensor:
        return x + block.down(torch.tanh(block.linear(x))) * block.factor


def batch(number: int) -> Tensor:
    """Draw a batch."""
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1000 + number))


@functools.cache
def other(kind: type[nn.Module]) -> type[nn.Module]:
    """Make another class for a module: it computes something else with the same weights."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        call: Callable[..., Tensor] = kind.forward
        return call(self, x) * 0.5

    return type(kind.__name__, (kind,), {"forward": forward})
