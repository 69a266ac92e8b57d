"""Compare the time that a step loses to a checkpoint written beside training with that of one that is waited for.

    python benchmarks/checkpoints_beside.py [--layers 48] [--width 1024] [--tokens 1024] [--rounds 15] [--folder DIR]

A stack of layers is trained on the CPU by AdamW, with one thread, so that units are stepped beside backward. In one run
each round has a step without a checkpoint, one after a checkpoint that is waited for, and one after a checkpoint that
is written beside training, in turns. The time from the begin of a save to the end of the step that follows counts, less
that of the step without one of the same round. The medians of these differences, their quartiles and the ratio of the
medians are printed: with enough work in a step it is what cannot be hidden. The threads that write need a core beside
the one that trains.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sp_lightning
from sp_lightning.lightning.checkpoint_io import WrittenAtOnce

WAYS = ("none", "wait", "beside")


class Stack(L.LightningModule):
    """Layers of equal width."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            batch = batch + block(batch).relu()
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-6, foreach=False)


class Turns(L.Callback):
    """Save in one of the ways before each step, and time both."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.times = folder, {way: list[float]() for way in WAYS}

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        self.way, strategy = WAYS[index % len(WAYS)], trainer.strategy
        strategy.handle.finish_step()
        self.begin, beside = time.perf_counter(), strategy._writer
        if self.way != "none":
            strategy._writer = beside if self.way == "beside" else WrittenAtOnce()
            trainer.save_checkpoint(self.folder / "last.ckpt")
            strategy._writer = beside

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        trainer.strategy.handle.finish_step()
        taken = time.perf_counter() - self.begin
        if index >= len(WAYS):  # the first of each is warm-up
            self.times[self.way].append(taken)
        trainer.strategy._writer.finish()  # what is left of a file falls on no step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 48), ("width", 1024), ("tokens", 1024), ("rounds", 15)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--folder", default=None)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        turns = Turns(Path(folder))
        steps = (given.rounds + 1) * len(WAYS)
        trainer = L.Trainer(
            strategy=sp_lightning.SuperpipelineStrategy(window=2, checkpoints="beside"),
            accelerator="cpu",
            devices=1,
            max_steps=steps + 1,
            callbacks=[turns],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        batches = [torch.randn(given.tokens, given.width) for _ in range(steps)]
        trainer.fit(Stack(given.layers, given.width), torch.utils.data.DataLoader(batches, batch_size=None))
    step = statistics.median(turns.times["none"])
    wait, beside = (
        [time - none for time, none in zip(turns.times[way], turns.times["none"], strict=False)] for way in WAYS[1:]
    )
    gigabytes = 12 * given.layers * given.width**2 / 1e9
    print(f"a checkpoint of {gigabytes:.2f} GB; a step takes {step:.2f} s; one with a checkpoint that is")
    print(f"  waited for loses {spread(wait)}")
    print(f"  written beside loses {spread(beside)}: {statistics.median(beside) / statistics.median(wait):.1%} of that")


def spread(times: list[float]) -> str:
    low, middle, high = statistics.quantiles(times, n=4)
    return f"{middle:.3f} s (quartiles {low:.3f} and {high:.3f})"


if __name__ == "__main__":
    main()
