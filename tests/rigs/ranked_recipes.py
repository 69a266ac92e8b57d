"""What the ranks of a test run: the recipes under examples/, by their command lines (processes.py, Rule 1)."""

from __future__ import annotations

import contextlib
import os
import pathlib
import sys
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

import parity

ROOT = pathlib.Path(__file__).parents[2]
PLAIN = "--trainer.strategy=plain_ddp"


StrategyRegistry.register("plain_ddp", DDPStrategy, find_unused_parameters=True)


class Losses(L.Callback):
    """What each step of this rank lost, and its random numbers at the end."""

    seen: list[parity.Entry]

    def on_train_start(self, *_: Any) -> None:
        Losses.seen = []

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *_: Any) -> None:
        Losses.seen.append(parity.Entry(f"step {trainer.global_step}", "loss", outputs["loss"].detach().cpu()))

    def on_train_end(self, *_: Any) -> None:
        Losses.seen.append(parity.Entry("at the end", "random numbers", torch.get_rng_state()))


def fit(folder: str, recipe: str, *arguments: str, steps: int = 3) -> parity.Record:
    """Train a recipe on this rank; return what it lost and what its checkpoint holds."""
    run(folder, "fit", recipe, f"--trainer.max_steps={steps}", "--trainer.callbacks+=ranked_recipes.Losses", *arguments)
    (path,) = pathlib.Path(folder, "run").glob("**/last.ckpt")
    checkpoint = torch.load(path, weights_only=True)
    kept = {name: checkpoint[name] for name in ("state_dict", "optimizer_states", "lr_schedulers", "global_step")}
    kept = [parity.Entry("checkpoint", name, leaf) for name, leaf in parity.leaves(kept)]
    return parity.Record([*Losses.seen, *kept])


def answers(folder: str, *arguments: str) -> list[str]:
    """Answer prompts on this rank; return its lines."""
    run(folder, "predict", "predict", *arguments)
    return pathlib.Path(folder, f"run/answers.{os.environ['LOCAL_RANK']}.jsonl").read_text().splitlines()


def run(folder: str, command: str, recipe: str, *arguments: str) -> None:
    """Run a recipe's command line on this rank, in a folder."""
    from sp_lightning.cli import main

    config = f"--config={ROOT}/examples/{recipe}/config.yaml"
    size = os.environ["WORLD_SIZE"]
    trainer = [f"--trainer.devices={size}", "--trainer.accelerator=cpu", "--trainer.default_root_dir=run"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        with contextlib.suppress(FileExistsError):
            os.symlink(ROOT / "examples", "examples")
        patch.syspath_prepend(ROOT)
        patch.setattr(sys, "argv", ["sp_lightning"])  # else LightningCLI warns that it was given two command lines
        patch.setenv("HF_HUB_OFFLINE", "1")
        main([command, config, *trainer, "--trainer.enable_progress_bar=false", *arguments])
