"""What the ranks of a test run: real Trainers on each, under DDP or under the strategy (processes.py, Rule 1)."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import signal
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import families
import lightning as L
import pretended_nodes
import simccl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch.utils.data import DataLoader

import models
import parity
import sp_lightning


class HookedDDP(DDPStrategy):
    """DDP with the hook that sums as the strategy does, on every device: Lightning registers hooks on CUDA only."""

    def _register_ddp_hooks(self) -> None:
        self.model.register_comm_hook(None, sp_lightning.tree_hook)


def plain(size: int) -> DDPStrategy:
    """Lightning's own strategy for so many ranks: stock where its order of summation is the only one."""
    return (DDPStrategy if size == 2 else HookedDDP)(find_unused_parameters=True)


class RankedModule(models.ZooModule):
    """A case in which each rank sees other data, and logs the mean over all ranks."""

    def training_step(self, batch: Any, batch_index: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_index)
        self.log("mean_loss", loss, batch_size=1, sync_dist=True, on_epoch=True)
        return loss


def fit(name: str, options: dict[str, Any] | None, optimizer: str = "adamw", **settings: Any) -> parity.Record:
    """Record a run of a case on this rank: under DDP, or with these options under the strategy."""
    case = families.FAMILIES[name].case if name in families.FAMILIES else models.case(name)
    return record(functools.partial(RankedModule, case, optimizer), case, options, **settings)


def record(
    make: Callable[[], L.LightningModule],
    case: models.Case,
    options: dict[str, Any] | None,
    accelerator: str = "cpu",
    **settings: Any,
) -> parity.Record:
    """Record a run of a module on this rank: under DDP on the CPU, or with these options under the strategy."""
    size = int(os.environ["WORLD_SIZE"])
    strategy = (
        plain(size) if options is None else sp_lightning.SuperpipelineStrategy(**({"units": case.units} | options))
    )
    if options is None:
        accelerator = "cpu"
    with simulated(accelerator):
        return parity.record(
            make,
            strategy,
            accelerator=accelerator,
            devices=size // pretended_nodes.count(),
            num_nodes=pretended_nodes.count(),
            make_loader=lambda n: DataLoader([case.batch(i) for i in range(n * size)], batch_size=None, shuffle=False),
            **settings,
        )


def leg(
    name: str,
    side: str,
    source: str | None,
    target: str,
    steps: int,
    optimizer: str = "adamw",
    accelerator: str = "cpu",
    save_after: int | None = None,
    options: dict[str, Any] | None = None,
) -> None:
    """Train up to this step from a checkpoint, under plain Lightning or under the strategy; save another.

    It is saved at the end, where Lightning counts the epoch as done, or after a step on the way.
    """
    case = models.case(name)
    size = int(os.environ["WORLD_SIZE"])
    if side == "plain":
        strategy, accelerator = plain(size) if size > 1 else SingleDeviceStrategy(torch.device("cpu")), "cpu"
    else:
        strategy = sp_lightning.SuperpipelineStrategy(units=case.units, window=2, **(options or {}))
    with simulated(accelerator), tempfile.TemporaryDirectory() as root:
        L.seed_everything(0, verbose=False)
        module = Scheduled(case, optimizer)
        L.seed_everything(1, verbose=False)
        trainer = parity.make_trainer(
            strategy=strategy,
            accelerator=accelerator,
            devices=size // pretended_nodes.count(),
            num_nodes=pretended_nodes.count(),
            max_steps=steps,
            default_root_dir=root,
            limit_val_batches=2,
            callbacks=[SavesAfter(save_after, target)],
        )
        data = [case.batch(i) for i in range(40)]
        trainer.fit(
            module,
            RememberingLoader(data, batch_size=None, shuffle=False),
            DataLoader(data, batch_size=None, shuffle=False),
            ckpt_path=source,
        )
        if save_after is None:
            trainer.save_checkpoint(target)


class SavesAfter(L.Callback):
    def __init__(self, step: int | None, target: str) -> None:
        self.step, self.target = step, target

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.target)


class RememberingLoader(DataLoader):
    """Resumes where it was: Lightning has other loaders begin their epoch again."""

    given = 0

    def __iter__(self) -> Any:
        first, self.given = self.given, 0
        for number, batch in enumerate(super().__iter__()):
            if number >= first:
                self.given = number + 1
                yield batch
        self.given = 0

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


class Scheduled(RankedModule):
    """A case with a rate that follows its steps."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        if isinstance(optimizer, list):
            return optimizer
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Dies(L.Callback):
    """The end of a rank's process, once, before the optimizer steps; and the steps at which runs began.

    The first attempt of a run has no file "killed" in the folder.
    """

    def __init__(self, folder: pathlib.Path, victim: int | None, step: int) -> None:
        self.folder, self.victim, self.step = folder, victim, step

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        (self.folder / f"began {trainer.global_rank} at {trainer.global_step}").touch()

    def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, optimizer: Any) -> None:
        first = not (self.folder / "killed").exists()
        if first and (trainer.global_rank, trainer.global_step) == (self.victim, self.step):
            self.wait()
            (self.folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def wait(self) -> None:
        """Wait until the process may end."""


@contextlib.contextmanager
def simulated(accelerator: str) -> Iterator[None]:
    """Have Lightning know the simulated device, and ranks the group that it needs."""
    if accelerator == "simgpu":
        import simgpu.lightning  # noqa: F401

        if not dist.is_initialized():
            rank, size = pretended_nodes.rank(), int(os.environ["WORLD_SIZE"])
            dist.init_process_group(simccl.register(), rank=rank, world_size=size)
    yield
