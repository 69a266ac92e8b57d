"""What the loops share: their arguments, their data, and the line at their end."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler

import sp_lightning  # registers the strategy  # noqa: F401
from sp_lightning.cli import OneLineParser

from ..common import tiny
from ..common.errors import BadInput, positive
from ..common.files import existing
from ..common.summary import device_peak, line, plain_nbytes
from .gpt import GPT, Sizes


def parser(description: str, steps: int) -> argparse.ArgumentParser:
    """Return a parser of the arguments that all loops have."""
    made = OneLineParser(description=description)
    made.add_argument("--strategy", default="superpipeline", help="'auto' is plain Fabric; default: %(default)s")
    made.add_argument("--accelerator", default="auto")
    made.add_argument("--precision", default="32-true")
    made.add_argument("--steps", type=positive, default=steps, help="default: %(default)s")
    made.add_argument("--out", type=Path, default=Path("runs/fabric"), help="where files go; default: %(default)s")
    return made


def with_model(made: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the arguments of loops over a language model."""
    made.add_argument("--data", type=Path, help="a text file; default: sentences that are made up")
    made.add_argument("--checkpoint", type=Path, help="what examples.fabric.pretrain wrote; default: random weights")
    for name, default in vars(Sizes()).items():
        made.add_argument(f"--{name}", type=positive, default=default, help="of the model; default: %(default)s")
    made.add_argument("--batch-size", type=positive, default=8)
    return made


def launched(arguments: argparse.Namespace) -> Fabric:
    """Return a Fabric on one device, with the seed set."""
    fabric = Fabric(
        accelerator=arguments.accelerator, devices=1, strategy=arguments.strategy, precision=arguments.precision
    )
    fabric.launch()
    fabric.seed_everything(0)
    return fabric


def model_of(arguments: argparse.Namespace, fabric: Fabric) -> GPT:
    """Make the model where the strategy wants it, and read its weights if there is a checkpoint."""
    with fabric.init_module():
        model = GPT(Sizes(arguments.layers, arguments.heads, arguments.width, arguments.context))
    if arguments.checkpoint is not None:
        state = fabric.load(existing(arguments.checkpoint, "the checkpoint"))
        model.load_state_dict(state["model"])
    return model


def rows(arguments: argparse.Namespace) -> Tensor:
    """Return the text's bytes, in rows as long as the model's context."""
    if arguments.data is None:
        text = "\n".join(tiny.sentences(400)).encode()
    else:
        text = existing(arguments.data, "the text file").read_bytes()
    count = len(text) // arguments.context
    if count < 2:
        raise BadInput(f"{len(text)} bytes of text are fewer than two rows of --context {arguments.context}")
    return torch.frombuffer(bytearray(text[: count * arguments.context]), dtype=torch.uint8).view(count, -1).long()


class Endless(Sampler[int]):
    """Shuffled passes, one after the other, from any place: a resumed loop goes on with the next row."""

    def __init__(self, count: int, done: int = 0) -> None:
        self.count = count
        self.done = done

    def __iter__(self) -> Iterator[int]:
        first, place = divmod(self.done, self.count)
        for number in itertools.count(first):
            order = torch.randperm(self.count, generator=torch.Generator().manual_seed(number))
            yield from order[place if number == first else 0 :].tolist()


def endless(fabric: Fabric, rows: Tensor, batch_size: int, done: int = 0) -> Iterator[Tensor]:
    """Return batches on the device without end, behind so many that are done."""
    order = Endless(len(rows), done * batch_size)
    return iter(fabric.setup_dataloaders(DataLoader(rows, batch_size, sampler=order)))


class Clock:
    """The time of a step; the first, which makes what later ones use, does not count."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.began = time.perf_counter()

    def tick(self) -> None:
        """Note the end of a step."""
        now = time.perf_counter()
        self.seconds.append(now - self.began)
        self.began = now

    @property
    def step_ms(self) -> float:
        """The mean."""
        timed = self.seconds[1:] or self.seconds
        return 1e3 * sum(timed) / len(timed)


def say(fabric: Fabric, clock: Clock, loss: Tensor | None, *parts: tuple[nn.Module, Any]) -> None:
    """Print what the run came to; ``parts`` are modules, each with its optimizer or None."""
    handles = getattr(fabric.strategy, "handles", [])
    peaks = [device_peak(fabric.device, handle) for handle in handles or [None]]
    known = [peak for peak in peaks if peak is not None]
    plain = sum(plain_nbytes(module, [optimizer] if optimizer else []) for module, optimizer in parts)
    print(line(None if loss is None else float(loss.detach()), max(known, default=None), plain, clock.step_ms / 1e3))
