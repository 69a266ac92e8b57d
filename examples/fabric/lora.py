"""Train low-rank adapters on a frozen GPT in a loop of one's own.

python -m examples.fabric.lora [--strategy auto] [--checkpoint runs/fabric/model.pt] [--data FILE.txt]
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor, nn

from ..common.errors import in_one_line, positive
from .gpt import loss_of
from .running import Clock, endless, launched, model_of, parser, rows, say, with_model


class Adapted(nn.Module):
    """A frozen linear layer, and what a low-rank product adds to it."""

    def __init__(self, linear: nn.Linear, rank: int, alpha: float, dropout: float) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.scale = alpha / rank
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Parameter(linear.weight.new_empty(rank, linear.in_features))
        self.up = nn.Parameter(linear.weight.new_zeros(linear.out_features, rank))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.scale * (self.dropout(x) @ self.down.T @ self.up.T)


def adapt(model: nn.Module, rank: int, alpha: float, dropout: float) -> None:
    """Freeze a GPT, and put adapters around the linear layers of its blocks."""
    model.requires_grad_(False)
    for block in model.blocks:
        for parent in (block.attention, block.mlp):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(parent, name, Adapted(child, rank, alpha, dropout))


def is_adapter(name: str, value: object) -> bool:
    """Whether a checkpoint keeps this entry of the model's state."""
    return name.endswith((".down", ".up"))


def main(given: list[str] | None = None) -> None:
    made = with_model(parser(__doc__.splitlines()[0], steps=30))
    made.add_argument("--lr", type=float, default=1e-2)
    made.add_argument("--rank", type=positive, default=4)
    made.add_argument("--alpha", type=float, default=8.0)
    made.add_argument("--dropout", type=float, default=0.05)
    arguments: argparse.Namespace = made.parse_args(given)
    fabric = launched(arguments)
    model = model_of(arguments, fabric)
    adapt(model, arguments.rank, arguments.alpha, arguments.dropout)
    model = fabric.setup_module(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(trained, lr=arguments.lr))
    batches, clock = endless(fabric, rows(arguments), arguments.batch_size), Clock()
    for step in range(1, arguments.steps + 1):
        tokens = next(batches)
        loss = loss_of(model(tokens), tokens)
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        clock.tick()
        if step % 10 == 0:
            fabric.print(f"step {step}: loss {loss:.4f}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    fabric.save(arguments.out / "adapters.pt", {"model": model}, filter={"model": is_adapter})
    say(fabric, clock, loss, (model, optimizer))
    fabric.strategy.teardown()


if __name__ == "__main__":
    with in_one_line():
        main()
