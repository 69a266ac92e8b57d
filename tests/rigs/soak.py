"""Runs of many steps in which a process must not grow: what it has in memory, its open files and its threads.

    [samples] = processes.run(1, soak.run, "disk", 20_000, 1000, 500, False)  # in a process of its own
    assert soak.grown([soak.Sample(*one) for one in samples]) == {}

1. Memory is what Linux counts of this process in no file (`smaps_rollup`), with its share of what ranks share: pages of
   libraries and of checkpoints come and go with the page cache. Garbage is collected before it is read.
2. Figures are taken after so many steps, when caches and pools have filled, and then at regular times, between steps.
   None may become larger than the first by more than 1 %. Of memory that is the usual growth from one figure to the
   next, times their number: a leak is in each, and a pool of the C library's that a thread opens late is in one.
3. A soak shows that it finds a leak by having some: a tensor in each step, a descriptor in every hundredth.
"""

from __future__ import annotations

import gc
import itertools
import os
import pathlib
import statistics
import tempfile
from typing import Any, NamedTuple

import in_files
import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers.logger import Logger
from ranked_runs import simulated
from torch import Tensor, nn
from torch.utils.data import DataLoader

import models
import parity
import sp_lightning
from sp_lightning.store import pipeline

WIDTH = 32
LEAK = 16 << 10  # bytes that a step leaks
SETTINGS: dict[str, dict[str, Any]] = {  # disk= is for one device
    "disk": {"devices": 1, "precision": "bf16-mixed"},
    "ranks": {"devices": 2, "gradient_clip_val": 1.0},
}


class Sample(NamedTuple):
    """What a process has after so many steps."""

    step: int
    memory: int  # bytes (Rule 1)
    on_disk: int  # bytes of open files without a name: the scratch file
    descriptors: int
    threads: int


def sample(step: int) -> Sample:
    gc.collect()
    figures = dict(line.split(":") for line in pathlib.Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    memory = sum(int(figures[name].split()[0]) for name in ("Pss_Anon", "Pss_Shmem")) << 10
    folder = pathlib.Path("/proc/self")
    descriptors = list((folder / "fd").iterdir())
    threads = os.listdir(folder / "task")
    return Sample(step, memory, sum(map(nameless_bytes, descriptors)), len(descriptors), len(threads))


def nameless_bytes(descriptor: pathlib.Path) -> int:
    """The bytes on disk of an open file without a name; ranks share memory by some that are on no disk."""
    try:
        found, path = descriptor.stat(), descriptor.readlink()
    except FileNotFoundError:  # of the listing itself
        return 0
    return 0 if found.st_nlink or path.name.startswith("memfd:") else found.st_blocks * 512


def grown(samples: list[Sample]) -> dict[str, tuple[int, int]]:
    """What became larger than in the first sample by more than 1 %, with what it was then and at most (Rule 2)."""
    first, *later = samples
    most = {name: max(getattr(one, name) for one in later) for name in Sample._fields[1:]}
    growth = statistics.median(after.memory - before.memory for before, after in itertools.pairwise(samples))
    most["memory"] = first.memory + int(growth * len(later))
    return {name: (now, most[name]) for name, now in zip(most, first[1:], strict=True) if most[name] > 1.01 * now}


class Watch(Callback):
    """Takes samples, and leaks what it is told to (Rule 3)."""

    def __init__(self, begin: int, every: int, leaks: bool) -> None:
        self.begin = begin
        self.every = every
        self.leaks = leaks
        self.leaked: list[Any] = []
        self.samples: list[Sample] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        step = trainer.global_step
        if self.leaks:
            self.leaked.append(torch.ones(LEAK, dtype=torch.uint8))
            if step % 100 == 0:
                self.leaked.append(os.open("/dev/null", os.O_RDONLY))
        if step >= self.begin and (step - self.begin) % self.every == 0:
            self.samples.append(sample(step))

    def let_go(self) -> None:
        for one in self.leaked:
            if isinstance(one, int):
                os.close(one)
        self.leaked.clear()


class Forgetful(Logger):
    """A logger that keeps nothing: what is computed for loggers is computed."""

    name = version = "forgetful"

    def log_metrics(self, metrics: Any, step: int | None = None) -> None: ...

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...


class Block(nn.Module):
    """A weight that can stay in a file, and one that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.down = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(self.up(x).relu()))


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        stem, head = nn.Linear(models.FEATURES, WIDTH), nn.Linear(WIDTH, models.CLASSES)
        self.net = nn.Sequential(stem, Block(), Block(), head)

    def loss(self, batch: Any, name: str) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log(name, loss, batch_size=1, sync_dist=True)
        return loss

    def training_step(self, batch: Any, index: int) -> Tensor:
        return self.loss(batch, "loss")

    def validation_step(self, batch: Any, index: int) -> None:
        self.loss(batch, "val_loss")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3, foreach=False)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9999)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def batches(count: int, devices: int) -> DataLoader:
    few = [models.vectors(index) for index in range(8)]
    return DataLoader([few[index % 8] for index in range(count * devices)], batch_size=None, shuffle=False)


def run(name: str, steps: int, begin: int, every: int, leaks: bool) -> list[tuple[int, ...]]:
    """Train on the simulated device with everything that a run can have at once; return the samples."""
    settings = dict(SETTINGS[name])
    devices, watch = settings["devices"], Watch(begin, every, leaks)
    torch.manual_seed(0)
    module = Module()
    options: dict[str, Any] = {"window": 1, "units": ["Block"], "activations": "recompute+offload"}
    checkpoint = ModelCheckpoint(monitor="step", mode="max", save_top_k=2, save_last=True)  # the newest are the best
    with simulated("simgpu"), tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        from simgpu.lightning import SimGPUAccelerator

        if name == "disk":
            in_files.put(module.net, folder)
            options |= {"host_budget": "0B", "disk": folder}
            patch.setattr(pipeline, "MOST", 1 << 15)
        trainer = parity.make_trainer(
            accelerator=SimGPUAccelerator(),
            strategy=sp_lightning.SuperpipelineStrategy(**options),
            max_steps=steps,
            max_epochs=-1,
            default_root_dir=folder,
            logger=Forgetful(),
            val_check_interval=0.5,
            enable_checkpointing=True,
            callbacks=[
                watch,
                checkpoint,
                sp_lightning.SuperpipelineCallback(log_metrics=True),
            ],
            **settings,
        )
        trainer.fit(module, batches(every, devices), batches(2, devices))
        assert trainer.global_step == steps
        assert f"step={steps}." in checkpoint.best_model_path  # they were saved to the end
    watch.let_go()
    return [tuple(one) for one in watch.samples]
