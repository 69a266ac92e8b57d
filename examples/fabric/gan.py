"""Train a GAN in a loop of one's own: two modules, each with an optimizer, that stream side by side.

python -m examples.fabric.gan [--strategy auto] [--steps 60]
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

from ..common.errors import in_one_line, positive
from .running import Clock, endless, launched, parser, say

NOISE = 8


def stack(width_in: int, width: int, width_out: int, layers: int) -> nn.Sequential:
    """A network of equal blocks between a first and a last layer."""
    blocks = [nn.Sequential(nn.Linear(width, width), nn.LeakyReLU(0.2)) for _ in range(layers)]
    return nn.Sequential(nn.Linear(width_in, width), *blocks, nn.Linear(width, width_out))


def circle(count: int) -> Tensor:
    """Points on a circle."""
    angles = torch.rand(count, generator=torch.Generator().manual_seed(0)) * 2 * torch.pi
    return torch.stack([angles.cos(), angles.sin()], dim=1)


def main(given: list[str] | None = None) -> None:
    made = parser(__doc__.splitlines()[0], steps=60)
    made.add_argument("--layers", type=positive, default=4)
    made.add_argument("--width", type=positive, default=64)
    made.add_argument("--batch-size", type=positive, default=64)
    arguments: argparse.Namespace = made.parse_args(given)
    fabric = launched(arguments)
    generator = stack(NOISE, arguments.width, 2, arguments.layers)
    critic = stack(2, arguments.width, 1, arguments.layers)
    optimizers = [torch.optim.Adam(net.parameters(), lr=1e-3, betas=(0.5, 0.99)) for net in (generator, critic)]
    generator, by_generator = fabric.setup(generator, optimizers[0])
    critic, by_critic = fabric.setup(critic, optimizers[1])
    batches, clock = endless(fabric, circle(1024), arguments.batch_size), Clock()
    softplus = nn.functional.softplus
    for step in range(1, arguments.steps + 1):
        real = next(batches)
        made_up = generator(torch.randn(len(real), NOISE, device=fabric.device))
        by_critic.zero_grad()
        loss = softplus(-critic(real)).mean() + softplus(critic(made_up.detach())).mean()
        fabric.backward(loss)
        by_critic.step()
        by_generator.zero_grad()
        fooled = softplus(-critic(made_up)).mean()
        fabric.backward(fooled)
        by_generator.step()
        clock.tick()
        if step % 20 == 0:
            fabric.print(f"step {step}: critic {loss:.4f}, generator {fooled:.4f}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    parts = {"generator": generator, "critic": critic, "by_generator": by_generator, "by_critic": by_critic}
    fabric.save(arguments.out / "gan.pt", parts)
    say(fabric, clock, fooled, (generator, by_generator), (critic, by_critic))
    fabric.strategy.teardown()


if __name__ == "__main__":
    with in_one_line():
        main()
