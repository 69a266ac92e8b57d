"""Pretrain a GPT from nothing in a loop of one's own.

python -m examples.fabric.pretrain [--strategy auto] [--data FILE.txt] [--steps 40] [--resume]
"""

from __future__ import annotations

import argparse
import math

import torch
from torch.utils.data import DataLoader

from ..common.errors import in_one_line, positive
from .gpt import loss_of
from .running import Clock, endless, launched, model_of, parser, rows, say, with_model

ACCUMULATED = 2  # batches of a step


def rate(step: int, steps: int, highest: float) -> float:
    """The learning rate: it rises for a tenth of the steps, then falls along a cosine."""
    rising = max(1, steps // 10)
    if step < rising:
        return highest * (step + 1) / rising
    return highest * 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))


@torch.no_grad()
def validate(model: torch.nn.Module, loader: DataLoader) -> torch.Tensor:
    """Return the mean loss of rows that are not learned."""
    model.eval()
    losses = [loss_of(model(tokens), tokens) for tokens in loader]
    model.train()
    return torch.stack(losses).mean()


def main(given: list[str] | None = None) -> None:
    made = with_model(parser(__doc__.splitlines()[0], steps=40))
    made.add_argument("--lr", type=float, default=3e-3)
    made.add_argument("--save-every", type=positive, default=20, help="steps; default: %(default)s")
    made.add_argument(
        "--resume", action="store_true", help="go on from the checkpoint in --out, with the same other arguments"
    )
    arguments: argparse.Namespace = made.parse_args(given)
    fabric = launched(arguments)
    model = model_of(arguments, fabric)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, weight_decay=0.1)
    model, optimizer = fabric.setup(model, optimizer)
    every = rows(arguments)
    held = max(1, len(every) // 10)
    val = fabric.setup_dataloaders(DataLoader(every[:held], arguments.batch_size))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if arguments.resume:
        fabric.load(arguments.out / "model.pt", state)
    batches = endless(fabric, every[held:], arguments.batch_size, ACCUMULATED * state["step"])
    arguments.out.mkdir(parents=True, exist_ok=True)
    clock = Clock()
    while state["step"] < arguments.steps:
        for group in optimizer.param_groups:
            group["lr"] = rate(state["step"], arguments.steps, arguments.lr)
        optimizer.zero_grad()
        for index in range(ACCUMULATED):
            tokens = next(batches)
            with fabric.no_backward_sync(model, enabled=index + 1 < ACCUMULATED):
                loss = loss_of(model(tokens), tokens)
                fabric.backward(loss / ACCUMULATED)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        state["step"] += 1
        if state["step"] % arguments.save_every == 0 or state["step"] == arguments.steps:
            fabric.save(arguments.out / "model.pt", state)
        clock.tick()
        if state["step"] % 10 == 0:
            fabric.print(f"step {state['step']}: loss {loss:.4f}, validation {validate(model, val):.4f}")
    say(fabric, clock, loss, (model, optimizer))
    fabric.strategy.teardown()


if __name__ == "__main__":
    with in_one_line():
        main()
