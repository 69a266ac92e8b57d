"""Generate text with a GPT, one byte after the other, in a loop of one's own with a cache.

python -m examples.fabric.generate [--checkpoint runs/fabric/model.pt] [--adapters runs/fabric/adapters.pt]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

from ..common.errors import BadInput, in_one_line, positive
from ..common.files import existing
from .lora import adapt
from .running import Clock, launched, model_of, parser, say, with_model


def sample(logits: Tensor, temperature: float, top: int) -> Tensor:
    """Draw a byte for each row, from the likeliest."""
    values, indices = torch.topk(logits[:, -1].float(), top)
    drawn = torch.multinomial(torch.softmax(values / temperature, dim=-1), 1)
    return indices.gather(-1, drawn)


@torch.inference_mode()
def generate(model: nn.Module, prompt: Tensor, count: int, temperature: float, top: int, clock: Clock) -> Tensor:
    """Return the prompt and so many bytes behind it, for each row."""
    tokens = [prompt]
    positions = torch.arange(prompt.shape[1], device=prompt.device)
    for _ in range(count):
        tokens.append(sample(model(tokens[-1], positions), temperature, top))
        positions = positions[-1:] + 1
        clock.tick()
    return torch.cat(tokens, dim=1)


def main(given: list[str] | None = None) -> None:
    made = with_model(parser(__doc__.splitlines()[0], steps=60))
    made.add_argument("--adapters", type=Path, help="what examples.fabric.lora wrote; default: none")
    made.add_argument("--alpha", type=float, default=8.0, help="of the adapters; default: %(default)s")
    made.add_argument("--prompt", default="The cat sees a ")
    made.add_argument("--temperature", type=float, default=0.8)
    made.add_argument("--top", type=positive, default=20)
    arguments: argparse.Namespace = made.parse_args(given)
    prompt = torch.tensor([list(arguments.prompt.encode())] * arguments.batch_size)
    if prompt.shape[1] + arguments.steps > arguments.context:
        raise BadInput(
            f"a prompt of {prompt.shape[1]} bytes and --steps {arguments.steps} are more than --context "
            f"{arguments.context}"
        )
    fabric = launched(arguments)
    model = model_of(arguments, fabric)
    if arguments.adapters is not None:
        state = fabric.load(existing(arguments.adapters, "the file of adapters"))["model"]
        adapt(
            model, next(value for name, value in state.items() if name.endswith(".down")).shape[0], arguments.alpha, 0.0
        )
        model.load_state_dict(state, strict=False)
    model = fabric.setup_module(model.eval())
    model.make_caches(arguments.batch_size, fabric.device)
    clock = Clock()
    found = generate(model, fabric.to_device(prompt), arguments.steps, arguments.temperature, arguments.top, clock)
    texts = [bytes(row.tolist()).decode(errors="replace") for row in found]
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "texts.txt").write_text("\n".join(texts), encoding="utf-8")
    fabric.print(texts[0])
    say(fabric, clock, None, (model, None))
    fabric.strategy.teardown()


if __name__ == "__main__":
    with in_one_line():
        main()
