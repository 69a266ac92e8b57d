"""What users combine with several devices: each feature by a small run, under DDP or under the strategy.

1. A feature is a class of module, with its callbacks, the Trainer's settings, and options of the strategy. It runs the
   same code on both sides, and each rank sees other data.
2. What a feature remembers in ``seen`` is compared too, beside what parity.py observes.
"""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import ranked_runs
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from ranked_runs import RankedModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

import models
import parity
import sp_lightning


class Plain(RankedModule):
    """A module that remembers what it is told to."""

    def __init__(self, case: models.Case, optimizer: str = "adamw", **settings: Any) -> None:
        super().__init__(case, optimizer, **settings)
        self.seen: list[Any] = []

    def see(self, value: Any) -> None:
        self.seen += [parity.keep(leaf) for _, leaf in parity.leaves(value)]


class NormsInValidation(Plain):
    """Updates the statistics of batch norms in validation too, and logs a mean over all ranks."""

    def validation_step(self, batch: Any, batch_index: int) -> None:
        self.net.train()
        self.log("val_loss", self.case.loss(self.net, batch), batch_size=1, sync_dist=True)
        self.see(dict(self.net.named_buffers()))


class ReplacesBuffers(Plain):
    """Replaces a buffer in each step by another on each rank."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("count", torch.zeros((), dtype=torch.long), persistent=False)

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        self.see([self.scale, self.count])
        self.scale = self.scale * (1.5 + self.global_rank)
        self.count += 1 + self.global_rank
        return super().training_step(batch, batch_index) * self.scale


class Scheduled(Plain):
    """One rate follows the steps, or the mean validation loss of all ranks."""

    def validation_step(self, batch: Any, batch_index: int) -> None:
        self.log("val_loss", self.case.loss(self.net, batch), batch_size=1, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        if isinstance(optimizer, list):
            return optimizer
        steps = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20, cycle_momentum=False)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
        return [optimizer], [
            {"scheduler": steps, "interval": "step"},
            {"scheduler": plateau, "monitor": "val_loss", "interval": "epoch"},
        ]

    def on_train_batch_end(self, *args: Any) -> None:
        self.see([group["lr"] for group in self.trainer.optimizers[0].param_groups])


class HasOddParameters(Plain):
    """Has complex weights, one without elements, and one without dimensions."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.phases = nn.Parameter(torch.randn(300, dtype=torch.complex64))
        self.nothing = nn.Parameter(torch.empty(0))
        self.factor = nn.Parameter(torch.ones(()))

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        loss = super().training_step(batch, batch_index) * self.factor * (1 + self.global_rank)
        return loss + (self.phases.abs() - 1).square().mean() + self.nothing.sum()


class Finetuning(BaseFinetuning):
    """Lightning's own way to unfreeze: parameters come to the optimizer in the middle of a run."""

    def freeze_before_training(self, pl_module: L.LightningModule) -> None:
        self.freeze(pl_module.net.blocks[1])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net.blocks[1], optimizer)


class OptimizesWhatIsTrained(Plain):
    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.optimizer_name, [p for p in self.parameters() if p.requires_grad])


class FreezesAndAddsAGroup(Plain):
    """What `Finetuning` does, at times at which DDP knows the parameters: it reduces no others."""

    def configure_optimizers(self) -> Any:
        names = {id(p) for p in self.net.blocks[1].parameters()}
        return self.make_optimizer(self.optimizer_name, [p for p in self.parameters() if id(p) not in names])

    def on_train_start(self) -> None:
        BaseFinetuning.freeze(self.net.blocks[1])

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            BaseFinetuning.unfreeze_and_add_param_group(self.net.blocks[1], self.trainer.optimizers[0])


class FinetunedByCallback(OptimizesWhatIsTrained):
    """Has the order of DDP's reference, whose callback this is under the strategy."""


class Gathers(Plain):
    """Gathers from all ranks, with gradients too."""

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        loss = super().training_step(batch, batch_index)
        found = self.all_gather(loss, sync_grads=True)
        self.see(self.all_gather({"rank": torch.tensor(self.global_rank), "loss": loss.detach()}))
        return loss + found.square().mean()


class Adversaries(Plain):
    """Two optimizers by hand, each with its own backward; toggled, with `no_sync` as Lightning has it."""

    def __init__(self, case: models.Case, optimizer: str = "two", **settings: Any) -> None:
        super().__init__(case, "two", **settings)

    def configure_optimizers(self) -> Any:
        first, second = [self.net.stem, self.net.blocks[0]], [*self.net.blocks[1:], self.net.head]
        return [
            self.make_optimizer(name, [p for part in parts for p in part.parameters()])
            for name, parts in (("adamw", first), ("sgd", second))
        ]

    def step_by_hand(self, loss: Tensor) -> None:
        batch = self.trainer.strategy.batch_to_device(self.case.batch(int(self.global_step) + 7 * self.global_rank))
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.case.loss(self.net, batch))
            optimizer.step()
            self.untoggle_optimizer(optimizer)


class AccumulatesByHand(Adversaries):
    """Accumulates by hand, with `no_sync` in all but the last."""

    def step_by_hand(self, loss: Tensor) -> None:
        last = self.trainer.fit_loop.epoch_loop.batch_idx % 2 == 1
        if last:
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
                optimizer.step()
                optimizer.zero_grad()
        else:
            model = self.trainer.strategy.model
            sync = model.no_sync if hasattr(model, "no_sync") else self.trainer.strategy.block_backward_sync
            with sync():
                with sync():
                    pass
                self.manual_backward(loss)


class Regularised(Plain):
    """Adds the weights' own squares, which it reads outside of its layers, when a rank and a step say so."""

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        loss = super().training_step(batch, batch_index)
        if (batch_index + self.global_rank) % 2:
            loss = loss + 0.1 * sum(p.square().sum() for p in self.net.blocks[1].parameters())
        return loss


class AveragedCallback(EMAWeightAveraging):
    def __init__(self) -> None:
        super().__init__(decay=0.7, update_every_n_steps=1)


def early() -> list[Callback]:
    return [EarlyStopping("val_loss", patience=0, min_delta=100.0), ModelCheckpoint(monitor="val_loss", save_last=True)]


@dataclass(frozen=True)
class Feature:
    """One run (Rule 1)."""

    module: Callable[..., Plain] = Plain
    case: str = "mlp"
    optimizer: str = "adamw"
    callbacks: Callable[[], list[Callback]] = list
    settings: dict[str, Any] = field(default_factory=dict)
    under_ddp: Callable[..., Plain] | None = None  # where DDP needs other code for the same
    callbacks_under_ddp: Callable[[], list[Callback]] | None = None


FEATURES = {
    "batch norm": Feature(NormsInValidation, "batch_norm", settings={"epochs": 2, "val_check_interval": 2}),
    "buffers": Feature(ReplacesBuffers, settings={"accumulate": 2, "batches": 5}),
    "ema": Feature(NormsInValidation, "batch_norm", callbacks=lambda: [AveragedCallback()], settings={"epochs": 3}),
    "swa": Feature(
        NormsInValidation,
        "batch_norm",
        callbacks=lambda: [StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1, annealing_epochs=1)],
        settings={"epochs": 4, "batches": 3},
    ),
    "early stopping": Feature(Scheduled, callbacks=early, settings={"epochs": 5, "enable_checkpointing": True}),
    "finetuning": Feature(
        FinetunedByCallback,
        callbacks=lambda: [Finetuning()],
        settings={"epochs": 2},
        under_ddp=FreezesAndAddsAGroup,
        callbacks_under_ddp=list,
    ),
    "gathering": Feature(Gathers),
    "adversaries": Feature(Adversaries, settings={"epochs": 2}),
    "accumulation by hand": Feature(AccumulatesByHand, settings={"batches": 6}),
    "regulariser, accumulation": Feature(Regularised, settings={"batches": 9, "accumulate": 3}),
    "odd parameters": Feature(HasOddParameters, settings={"clip": ("norm", 0.1)}),
}


def run(name: str, options: dict[str, Any] | None, accelerator: str = "cpu") -> parity.Record:
    """Record a run of a feature on this rank: under DDP, or with these options under the strategy."""
    feature = FEATURES[name]
    case = models.case(feature.case)
    made: list[Plain] = []

    def make() -> Plain:
        kind = feature.module if options is not None else feature.under_ddp or feature.module
        made.append(kind(case, feature.optimizer))
        return made[-1]

    callbacks = feature.callbacks if options is not None else feature.callbacks_under_ddp or feature.callbacks
    record = ranked_runs.record(
        make,
        case,
        options,
        accelerator,
        callbacks=callbacks(),
        **feature.settings,
    )
    kept = [value.cpu() if isinstance(value, Tensor) else value for value in made[0].seen]
    record.entries += [parity.Entry("seen", str(index), value) for index, value in enumerate(kept)]
    return record


class Norm(L.LightningModule):
    """A module with a batch norm; torch synchronises it on accelerators only, so it is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.kinds: list[str] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.kinds.append(type(self.norm).__name__)
        return self.linear(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.linear.parameters(), 0.1)


def synchronised_norms() -> tuple[str, bool]:
    """Fit a module with ``sync_batchnorm``; return its norm's type in the fit, and whether it is synchronised after."""
    module = Norm()
    trainer = parity.make_trainer(
        strategy=sp_lightning.SuperpipelineStrategy(),
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        max_steps=1,
        sync_batchnorm=True,
    )
    trainer.fit(module, DataLoader(torch.ones(4, 4), batch_size=2))
    return module.kinds[0], isinstance(module.norm, nn.SyncBatchNorm)


def masters(name: str, precision: str, accelerator: str = "cpu") -> list[Tensor]:
    """Train a case with FP32 masters of half-precision weights; return them."""
    case = models.case(name)
    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    with ranked_runs.simulated(accelerator), tempfile.TemporaryDirectory() as root:
        L.seed_everything(1, verbose=False)
        module = models.ZooModule(case)
        trainer = parity.make_trainer(
            strategy=sp_lightning.SuperpipelineStrategy(window=2, master_weights=True),
            accelerator=accelerator,
            devices=size,
            precision=precision,
            use_distributed_sampler=False,
            max_epochs=1,
            default_root_dir=root,
        )
        batches = [case.batch(size * number + rank) for number in range(4)]
        trainer.fit(module, DataLoader(batches, batch_size=None, shuffle=False))
        return [parameter.detach().clone() for parameter in module.net.parameters()]


def masters_by_hand(name: str, dtype: torch.dtype, size: int = 2) -> list[Tensor]:
    """Do the same in one process: half-precision copies compute, the mean of their gradients in FP32 is stepped."""
    L.seed_everything(1, verbose=False)
    module = models.ZooModule(models.case(name))
    masters = list(module.net.parameters())
    optimizer = torch.optim.AdamW(masters, 1e-2, foreach=False)
    half = copy.deepcopy(module.net).to(dtype)
    for number in range(4):
        gradients = []
        for rank in range(size):
            with torch.no_grad():
                for low, full in zip(half.parameters(), masters, strict=True):
                    low.copy_(full)
            half.zero_grad()
            batch = torch.utils._pytree.tree_map(
                lambda t: t.to(dtype) if t.is_floating_point() else t, module.case.batch(size * number + rank)
            )
            module.case.loss(half, batch).backward()
            gradients.append([low.grad.float() * (1 / size) for low in half.parameters()])
        for full, *parts in zip(masters, *gradients, strict=True):
            full.grad = parts[0] + parts[1]
        optimizer.step()
    return [full.detach() for full in masters]
