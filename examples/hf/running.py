"""What the scripts share: their arguments, what they run on when they are given nothing, and the line at their end."""

from __future__ import annotations

import argparse
import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import sp_lightning.hf
from sp_lightning.cli import OneLineParser

from ..common import tiny
from ..common.checkpoints import there
from ..common.errors import positive
from ..common.files import existing
from ..common.summary import device_peak, line, plain_nbytes


def parser(description: str, steps: int) -> argparse.ArgumentParser:
    """Return a parser of the arguments that all scripts have."""
    made = OneLineParser(description=description.splitlines()[0])
    made.add_argument("--stock", action="store_true", help="without streaming: the same bits")
    made.add_argument("--window", default="auto", help="layers on the device at once; default: %(default)s")
    made.add_argument("--name-or-path", help="a checkpoint directory or a name on the hub; default: a tiny model")
    made.add_argument("--data", type=Path, help="a JSONL file; default: data that is made up")
    made.add_argument("--steps", type=positive, default=steps, help="default: %(default)s")
    made.add_argument("--batch-size", type=positive, default=4)
    made.add_argument("--lr", type=float, default=1e-3)
    made.add_argument("--bf16", action="store_true", help="compute in bfloat16, with FP32 weights")
    made.add_argument("--out", type=Path, default=Path("runs/hf"), help="where files go; default: %(default)s")
    return made


def checkpoint(arguments: argparse.Namespace, make: Callable[[Path], None] = tiny.language_model) -> str:
    """Return the checkpoint that was given, or a tiny one that is made."""
    if arguments.name_or_path is not None:
        return there(arguments.name_or_path)
    return str(tiny.made(arguments.out / "tiny" / make.__name__, make))


def data(arguments: argparse.Namespace, name: str, records: Callable[[], list[Any]]) -> str:
    """Return the data that was given, or a file of records that are made up."""
    if arguments.data is not None:
        return str(existing(arguments.data, "the data file"))
    return str(tiny.made(arguments.out / "tiny" / name, lambda part: tiny.write_jsonl(part, records())))


def streamed(arguments: argparse.Namespace) -> contextlib.AbstractContextManager[Any]:
    """Return the context in which models stream."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(0)
    if arguments.stock:
        return contextlib.nullcontext()
    return sp_lightning.hf.streaming(window=arguments.window, activations="recompute")


def of_trainer(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments that the scripts give a Trainer's configuration."""
    return {
        "output_dir": str(arguments.out),
        "per_device_train_batch_size": arguments.batch_size,
        "max_steps": arguments.steps,
        "learning_rate": arguments.lr,
        "bf16": arguments.bf16,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


class Clock(transformers.TrainerCallback):  # type: ignore[misc]
    """The times of the steps; the first, which makes what later ones use, does not count."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def tick(self) -> None:
        """Note the end of a step."""
        self.ends.append(time.perf_counter())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.tick()

    def step_s(self) -> float:
        """Return the mean time of a step."""
        return (self.ends[-1] - self.ends[0]) / max(1, len(self.ends) - 1)


def say(clock: Clock, stream: Any, loss: float | None, model: nn.Module, optimizer: Any, device: torch.device) -> None:
    """Print what the run came to."""
    handles = stream.handles if stream is not None else [None]
    peaks = [peak for peak in (device_peak(device, handle) for handle in handles) if peak is not None]
    optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper has it
    print(line(loss, max(peaks, default=None), plain_nbytes(model, [optimizer]), clock.step_s()))


def say_of_trainer(clock: Clock, stream: Any, trainer: Any) -> None:
    """Print what a Trainer's run came to."""
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    say(clock, stream, losses[-1], trainer.model, trainer.optimizer, trainer.args.device)
