"""What users combine with several devices: each feature by a small run, under DDP or under the strategy.

1. A feature is a class of module, with its callbacks, the Trainer's settings, and options of the strategy. It runs the
   same code on both sides, and each rank sees other data.
2. What a feature remembers in ``seen`` is compared too, beside what parity.py observes.
"""

from __future__ import annotations

import copy
import functools
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import lightning as L
import ranked_runs
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
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


class OtherWeightsOnEachRank(Plain):
    """Draws other weights and buffers on each rank: those of the first are the model."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        torch.manual_seed(100 + int(os.environ["LOCAL_RANK"]))
        super().__init__(*args, **settings)


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


class RegistersBuffers(Plain):
    """Registers a running statistic with its first batch, and on one rank alone another buffer, for the fit."""

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        mean = batch[0].mean(0)
        self.register_buffer("center", mean if batch_index == 0 else 0.9 * self.center + 0.1 * mean)
        if batch_index == 1 and self.global_rank == 1:
            self.register_buffer("longer", torch.ones(3), persistent=False)
        self.see(self.center)
        return super().training_step((batch[0] - self.center, batch[1]), batch_index)

    def on_train_end(self) -> None:
        self._buffers.pop("longer", None)


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


class Edits(Plain):
    """Writes to weights, gradients and optimizer state, in the same way on every rank."""

    def on_after_backward(self) -> None:
        for parameter in next(self.net.children()).parameters():
            if parameter.grad is not None:
                parameter.grad.data.clamp_(-0.05, 0.05)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in list(self.net.parameters())[::2]:
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)

    def on_train_batch_end(self, *args: Any) -> None:
        parameters = list(self.net.parameters())
        with torch.no_grad():
            parameters[0].mul_(0.999)
        parameters[1].data.clamp_(-0.1, 0.1)
        parameters[4].detach().numpy()[1] *= 1.01
        state = self.trainer.optimizers[0].state
        if len(state) == len(parameters):
            state[parameters[0]]["exp_avg"].mul_(0.9)
            state[parameters[6]]["exp_avg"] = state[parameters[6]]["exp_avg"] * 1.1
        self.see(dict(self.net.named_parameters()))


class EditsStateOnOneRank(Plain):
    def on_train_batch_end(self, *args: Any) -> None:
        if self.global_rank == 1:
            self.trainer.optimizers[0].state[self.net.stem.weight]["exp_avg"].mul_(2)


class EditsWeightsOnOneRank(Plain):
    def on_train_batch_end(self, *args: Any) -> None:
        if self.global_rank == 1:
            self.net.stem.weight.data.mul_(2)


class ChangesGradients(Plain):
    """Changes a gradient before the step, on the second rank alone, or on each in another way."""

    def change(self, weight: nn.Parameter) -> None:
        raise NotImplementedError

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_rank == 1:
            self.change(self.net.stem.weight)


class ScalesAGradient(ChangesGradients):
    def change(self, weight: nn.Parameter) -> None:
        weight.grad.mul_(2)


class WritesToAnArray(ChangesGradients):
    """No version counter sees it."""

    def change(self, weight: nn.Parameter) -> None:
        weight.grad.numpy()[0] += 1


class ReplacesAGradient(ChangesGradients):
    def change(self, weight: nn.Parameter) -> None:
        weight.grad = weight.grad * 2


class ClearsAGradient(ChangesGradients):
    def change(self, weight: nn.Parameter) -> None:
        weight.grad = None


class AddsNoise(Plain):
    """Each rank adds ones at a place of its own: the sums over all elements are equal."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.net.stem.weight.grad.view(-1)[self.global_rank] += 1
        self.net.stem.weight.grad.view(-1)[1 - self.global_rank] += 0


class TurnsGradients(Plain):
    """Replaces gradients by ones of other strides, on every rank."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            if parameter.dim() == 2:
                parameter.grad = (parameter.grad * 0.5).t().contiguous().t()
        self.net.head.bias.grad = torch.ones(()).expand_as(self.net.head.bias)


class GivesGradientsOtherData(Plain):
    """Assigns to a gradient's ``.data`` in every second step, on every rank."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        if self.trainer.global_step % 2:
            for gradient in gradients:
                gradient.data = gradient.data * 0.5
        self.see(gradients)


class HooksAfterSteps(Plain):
    """Averages weights, reads state and writes to weights in a hook after the optimizer's step."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        self.averages = [parameter.detach().clone() for parameter in self.parameters()]
        optimizer.register_step_post_hook(self.after_step)
        return optimizer

    @torch.no_grad()
    def after_step(self, optimizer: Any, *_: Any) -> None:
        for average, parameter in zip(self.averages, self.parameters(), strict=True):
            average.lerp_(parameter, 0.3)
            parameter.clamp_(-0.2, 0.2)
            self.see(optimizer.state[parameter]["exp_avg"])
        self.see(self.averages)


class SwapsData(Plain):
    """Has two blocks exchange some of their data for three steps: the bytes lie beside other parameters then."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_index: int) -> None:
        if batch_index in (1, 4):
            pairs = zip(self.net.blocks[1].parameters(), self.net.blocks[2].parameters(), strict=True)
            for first, second in list(pairs)[::2]:
                first.data, second.data = second.data, first.data


class LoadsEarlierState(Plain):
    """Loads other state, and then again what it kept without a copy; all look at what the first rank kept."""

    def on_train_batch_start(self, batch: Any, batch_index: int) -> None:
        optimizer = self.trainer.optimizers[0]
        if batch_index == 2:
            kept = optimizer.state_dict()
            halved = copy.deepcopy(kept)
            for entry in halved["state"].values():
                entry["exp_avg"].mul_(0.5)
            self.copied = copy.deepcopy(kept)
            self.kept = kept if self.keeps() else None
            del kept
            optimizer.load_state_dict(halved)
        if batch_index == 4:
            kept = self.copied if self.kept is None else self.kept
            self.see(kept["state"][0]["exp_avg"])
            optimizer.load_state_dict(kept)

    def keeps(self) -> bool:
        """Whether this rank keeps the state itself, not a copy."""
        return True


class KeepsStateOnOneRank(LoadsEarlierState):
    """Does so on the first rank alone."""

    def keeps(self) -> bool:
        return self.global_rank == 0


class SetsStateAside(Plain):
    """Trains two batches without the state of all weights, and later of one; the first rank keeps it, others a copy."""

    def on_train_batch_start(self, batch: Any, batch_index: int) -> None:
        state = self.trainer.optimizers[0].state
        if batch_index in (2, 5):
            taken = {parameter: state.pop(parameter) for parameter in list(state)[: None if batch_index == 2 else 1]}
            self.aside = copy_of_state(taken) if self.global_rank else taken
        if batch_index in (4, 7):
            self.see([entry["exp_avg"] for entry in self.aside.values()])
            state.update(self.aside)


def copy_of_state(state: dict[Tensor, dict[str, Tensor]]) -> dict[Tensor, dict[str, Tensor]]:
    return {parameter: {key: value.clone() for key, value in entry.items()} for parameter, entry in state.items()}


class SwapsState(Plain):
    """Has two blocks exchange the optimizer's state of some weights, and then the weights themselves as well."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_index: int) -> None:
        if batch_index in (1, 3):
            state = self.trainer.optimizers[0].state
            first, second = (block.up.weight for block in self.net.blocks[1:3])
            state[first], state[second] = state[second], state[first]
            if batch_index == 3:
                first.data, second.data = second.data, first.data


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


class ReplacesStateOnOneRank(Plain):
    def on_train_batch_end(self, *args: Any) -> None:
        state = self.trainer.optimizers[0].state[self.net.stem.weight]
        state["exp_avg"] = state["exp_avg"] * (1 + self.global_rank)


class CastsState(Plain):
    """Keeps a weight's averages in another type."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_index: int) -> None:
        if batch_index == 2:
            state = self.trainer.optimizers[0].state[self.net.stem.weight]
            state["exp_avg_sq"] = state["exp_avg_sq"].double()


class CountsStepsOnOneRank(Plain):
    """Changes the number of steps of a weight, which bias corrections depend on, on the second rank alone."""

    def on_train_batch_end(self, *args: Any) -> None:
        if self.global_rank == 1:
            self.trainer.optimizers[0].state[self.net.stem.weight]["step"].add_(3)


class ClearsStateOnOneRank(Plain):
    def on_train_batch_end(self, *args: Any) -> None:
        if self.global_rank == 1:
            del self.trainer.optimizers[0].state[self.net.stem.weight]


class WritesCastStateOnOneRank(CastsState):
    """The second rank alone writes to it as well."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_index: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_index)
        if batch_index == 3 and self.global_rank == 1:
            self.trainer.optimizers[0].state[self.net.stem.weight]["exp_avg_sq"].mul_(2)


class MovesToAnotherGroupOnOneRank(Plain):
    """Gives a weight the rate of another group on the second rank alone."""

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        groups: list[Any] = [{"params": parameters[:6]}, {"params": parameters[6:], "lr": 0.02}]
        return self.make_optimizer(self.optimizer_name, groups)

    def on_train_batch_end(self, *args: Any) -> None:
        if self.global_rank == 1:
            first, second = (group["params"] for group in self.trainer.optimizers[0].param_groups)
            second.insert(0, first.pop())


class GivesOtherDataOnEachRank(Plain):
    """Gives a weight, which may be frozen, other data with other values on each rank."""

    trains = True

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_index: int) -> None:
        weight = self.net.stem.weight.requires_grad_(self.trains)
        if batch_index == 1:
            weight.data = weight.data * (1 + self.global_rank)


class GivesOtherDataToFrozenWeights(GivesOtherDataOnEachRank):
    trains = False


class WritesToOtherDataOnOneRank(Plain):
    """Gives a weight other data on every rank, and writes to that on the second rank alone."""

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_index: int) -> None:
        weight = self.net.stem.weight
        if batch_index == 1:
            weight.data = weight.data.clone()
        if batch_index == 2 and self.global_rank == 1:
            weight.mul_(2)


class EditsBeforeAnotherStructure(Plain):
    """The second rank alone writes to a weight, before another one is registered on every rank."""

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_index: int) -> None:
        if batch_index == 1:
            if self.global_rank == 1:
                self.net.stem.weight.mul_(2)
            self.net.late = nn.Parameter(torch.zeros(3))


class RateOfOneRank(Plain):
    def on_train_batch_end(self, *args: Any) -> None:
        self.trainer.optimizers[0].param_groups[0]["lr"] *= 1 + self.global_rank


class BackwardByHand(Plain):
    """Forgets `manual_backward`: under DDP the ranks drift apart."""

    def step_by_hand(self, loss: Tensor) -> None:
        loss.backward()
        for optimizer in self.optimizers():
            optimizer.step()


class GeneratesOnOneRank(Plain):
    """Runs the model on the first rank alone, between steps and within one."""

    def generate(self, batch: Any) -> None:
        with torch.no_grad():
            self.see(self.case.predict(self.net, batch))

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        if self.trainer.is_global_zero:
            self.generate(batch)
        loss = super().training_step(batch, batch_index)
        if self.trainer.is_global_zero:
            self.generate(batch)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_index: int) -> None:
        with torch.no_grad():
            next(self.net.parameters()).mul_(1.01)
        if self.trainer.is_global_zero:
            self.generate(batch)

    def on_train_epoch_end(self) -> None:
        if self.global_rank == self.trainer.world_size - 1:
            self.generate(self.trainer.strategy.batch_to_device(self.case.batch(99)))


class TriesAverages(Plain):
    """Copies averaged weights into the model of the first rank for a look, and puts the earlier values back."""

    def on_fit_start(self) -> None:
        self.averages = [parameter.detach().clone() for parameter in self.parameters()]

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_index: int) -> None:
        parameters = list(self.parameters())
        for average, parameter in zip(self.averages, parameters, strict=True):
            average.lerp_(parameter, 0.3)
        if self.trainer.is_global_zero:
            before = [parameter.detach().clone() for parameter in parameters]
            for values in (self.averages, before):
                for parameter, value in zip(parameters, values, strict=True):
                    parameter.data.copy_(value)
                self.see(self.case.predict(self.net, batch))
        parameters[-1].mul_(0.9)  # by every rank, beside what one alone wrote


class FreezesAtStart(Plain):
    """Freezes its first blocks after the strategy is set up, and trains them from the second epoch on."""

    def parts(self) -> list[nn.Module]:
        return [self.net.stem, *self.net.blocks[:2]]

    def on_train_start(self) -> None:
        for part in self.parts():
            part.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            for part in self.parts():
                part.requires_grad_(True)


class FreezesInTheMiddle(Plain):
    def on_train_epoch_start(self) -> None:
        for part in [self.net.stem, *self.net.blocks[1:3]]:
            part.requires_grad_(self.current_epoch != 1)


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


class KeepsZeros(Plain):
    def optimizer_zero_grad(self, epoch: int, batch_index: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class KeepsGradients(Plain):
    """Holds on to gradients of earlier steps, and reads them later."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.kept: list[Any] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for gradients in self.kept[-3:]:
            self.see(gradients)
        self.kept.append([parameter.grad for parameter in list(self.parameters())[:: 1 + len(self.kept) % 3]])

    def on_train_end(self) -> None:
        self.see(self.kept)


class KeepsGradientsAndZeros(KeepsGradients, KeepsZeros):
    """Its gradients are written in place: who holds them sees the next ones."""


class NeverClears(KeepsGradients):
    """Adds up the gradients of all steps."""

    def optimizer_zero_grad(self, epoch: int, batch_index: int, optimizer: Any) -> None:
        pass


class StepsGradients(NeverClears):
    """Steps by Nesterov's momentum over lists, in which torch writes to the gradients, and never clears them."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9, nesterov=True, foreach=True)


class Gathers(Plain):
    """Gathers from all ranks, with gradients too."""

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        loss = super().training_step(batch, batch_index)
        found = self.all_gather(loss, sync_grads=True)
        self.see(self.all_gather({"rank": torch.tensor(self.global_rank), "loss": loss.detach()}))
        return loss + found.square().mean()


class NormalisesOverRanks(Plain):
    """Normalises by the data of all ranks, as SyncBatchNorm on accelerators, before blocks that one rank drops."""

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        x = self.net.stem(batch[0])
        every = self.all_gather(x, sync_grads=True).flatten(0, 1)
        x = (x - every.mean(0)) / (every.var(0) + 1e-5).sqrt()
        if (batch_index + self.global_rank) % 2:
            x = self.net.run(x)
        return torch.nn.functional.cross_entropy(self.net.head(x), batch[1])


class Measures(Plain):
    """Logs a torchmetrics metric, whose state is summed over ranks."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        from torchmetrics import MeanMetric

        self.metric = MeanMetric()
        self.val_metric = MeanMetric()

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        loss = super().training_step(batch, batch_index)
        self.metric(loss.detach())
        self.log("metric", self.metric, on_step=True, on_epoch=True, batch_size=1)
        return loss

    def validation_step(self, batch: Any, batch_index: int) -> None:
        self.val_metric(self.case.loss(self.net, batch))
        self.log("val_metric", self.val_metric, batch_size=1)


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


class TwoBackwards(Adversaries):
    """Two backwards of one graph before the steps."""

    def step_by_hand(self, loss: Tensor) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(loss * 0.5)
        for optimizer in self.optimizers():
            optimizer.step()


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


class SkipsOnOneRank(Plain):
    """Runs other blocks on each rank, and in the last micro-batch other ones than before."""

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        x = self.net.stem(batch[0])
        for index, block in enumerate(self.net.blocks):
            if (index + batch_index + self.global_rank) % 3:
                x = block(x)
        loss = torch.nn.functional.cross_entropy(self.net.head(x), batch[1])
        self.log("mean_loss", loss, batch_size=1, sync_dist=True, on_epoch=True)
        return loss


class LeavesOneOut(NeverClears):
    """Never clears gradients, which are clipped in each step, also of the block that no rank runs in it."""

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        x = self.net.stem(batch[0])
        for index, block in enumerate(self.net.blocks):
            if index != batch_index % 4:
                x = block(x)
        return torch.nn.functional.cross_entropy(self.net.head(x), batch[1])


class ReversesOnOneRank(SkipsOnOneRank):
    """Visits its blocks in another order on each rank."""

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        x = self.net.stem(batch[0])
        for block in list(self.net.blocks)[:: 1 - 2 * (self.global_rank % 2)]:
            x = block(x)
        return torch.nn.functional.cross_entropy(self.net.head(x), batch[1])


class Regularised(Plain):
    """Adds the weights' own squares, which it reads outside of its layers, when a rank and a step say so."""

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        loss = super().training_step(batch, batch_index)
        if (batch_index + self.global_rank) % 2:
            loss = loss + 0.1 * sum(p.square().sum() for p in self.net.blocks[1].parameters())
        return loss


class NormsOfGradients(Plain):
    """Logs norms, clips by itself, and has hooks on parameters."""

    def on_fit_start(self) -> None:
        self.net.stem.weight.register_hook(lambda grad: grad * 0.5)
        self.net.head.weight.register_post_accumulate_grad_hook(lambda p: None)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.see(torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None]))

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.see(torch.nn.utils.clip_grad_norm_(self.parameters(), 0.3))


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
    ours: dict[str, Any] = field(default_factory=dict)
    under_ddp: Callable[..., Plain] | None = None  # where DDP needs other code for the same
    callbacks_under_ddp: Callable[[], list[Callback]] | None = None
    on_the_cpu_only: str = ""  # why


FEATURES = {
    "weights of rank 0": Feature(OtherWeightsOnEachRank, "batch_norm"),
    "cast state": Feature(CastsState),
    "batch norm": Feature(NormsInValidation, "batch_norm", settings={"epochs": 2, "val_check_interval": 2}),
    "batch norm, accumulation": Feature(NormsInValidation, "batch_norm", settings={"epochs": 2, "accumulate": 2}),
    "batch norm by hand": Feature(NormsInValidation, "batch_norm", "two", settings={"epochs": 2}),
    "batch norm accumulated by hand": Feature(AccumulatesByHand, "batch_norm", settings={"epochs": 2}),
    "buffers": Feature(ReplacesBuffers, settings={"accumulate": 2, "batches": 5}),
    "late buffers": Feature(RegistersBuffers, settings={"epochs": 2, "accumulate": 2}),
    "ema": Feature(NormsInValidation, "batch_norm", callbacks=lambda: [AveragedCallback()], settings={"epochs": 3}),
    "swa": Feature(
        NormsInValidation,
        "batch_norm",
        callbacks=lambda: [StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1, annealing_epochs=1)],
        settings={"epochs": 4, "batches": 3},
    ),
    "schedulers": Feature(Scheduled, settings={"epochs": 3}),
    "early stopping": Feature(Scheduled, callbacks=early, settings={"epochs": 5, "enable_checkpointing": True}),
    "edits": Feature(Edits),
    "edits, accumulation, clipping": Feature(Edits, settings={"accumulate": 2, "clip": ("norm", 0.1), "batches": 6}),
    "edits, batch norm, sgd": Feature(NormsInValidation, "rescaled_data", "sgd"),
    "generation": Feature(GeneratesOnOneRank, "batch_norm", settings={"epochs": 2}),
    "averages of rank 0": Feature(TriesAverages, settings={"accumulate": 2, "batches": 6}),
    "unfreezing": Feature(FreezesAtStart, settings={"epochs": 2}),
    "unfreezing, accumulation": Feature(FreezesAtStart, "batch_norm", "sgd", settings={"epochs": 2, "accumulate": 2}),
    "freezing": Feature(FreezesInTheMiddle, settings={"epochs": 3}),
    "finetuning": Feature(
        FinetunedByCallback,
        callbacks=lambda: [Finetuning()],
        settings={"epochs": 2},
        under_ddp=FreezesAndAddsAGroup,
        callbacks_under_ddp=list,
    ),
    "tied weights": Feature(Edits, "tied_embedding", settings={"accumulate": 2}),
    "zeros": Feature(KeepsZeros, "skipped_block", settings={"epochs": 2}),
    "zeros, accumulation": Feature(KeepsZeros, "skipped_block", "sgd", settings={"epochs": 2, "accumulate": 2}),
    "kept gradients": Feature(KeepsGradients, settings={"batches": 6}),
    "kept gradients, accumulation": Feature(KeepsGradients, "skipped_block", settings={"batches": 6, "accumulate": 2}),
    "kept gradients, zeros": Feature(KeepsGradientsAndZeros, settings={"batches": 6}),
    "gradients never cleared": Feature(NeverClears, settings={"batches": 6}),
    "gradients that are stepped": Feature(StepsGradients, settings={"batches": 6}),
    "gradients never cleared, clipping": Feature(LeavesOneOut, settings={"batches": 6, "clip": ("norm", 0.1)}),
    "gathering": Feature(Gathers),
    "gathering in backward, dropped layers": Feature(NormalisesOverRanks, settings={"batches": 6}),
    "metrics": Feature(
        Measures, settings={"epochs": 2}, on_the_cpu_only="gloo gathers no metric from a simulated device"
    ),
    "adversaries": Feature(Adversaries, settings={"epochs": 2}),
    "two backwards": Feature(TwoBackwards),
    "accumulation by hand": Feature(AccumulatesByHand, settings={"batches": 6}),
    "skips": Feature(SkipsOnOneRank, settings={"batches": 6}),
    "skips, accumulation": Feature(SkipsOnOneRank, settings={"batches": 9, "accumulate": 3}),
    "skips, growing accumulation": Feature(
        SkipsOnOneRank,
        optimizer="sgd",
        callbacks=lambda: [GradientAccumulationScheduler({0: 1, 1: 2})],
        settings={"batches": 5, "epochs": 2},
    ),
    "orders": Feature(ReversesOnOneRank, settings={"batches": 6}),
    "regulariser": Feature(Regularised, settings={"batches": 6}),
    "regulariser, accumulation": Feature(Regularised, settings={"batches": 9, "accumulate": 3}),
    "norms": Feature(NormsOfGradients),
    "turned gradients": Feature(TurnsGradients),
    "gradients with other data": Feature(GivesGradientsOtherData, settings={"batches": 6, "clip": ("norm", 0.1)}),
    "swapped data": Feature(SwapsData, settings={"batches": 6}),
    "kept state": Feature(LoadsEarlierState, settings={"batches": 7}),
    "kept state of rank 0": Feature(KeepsStateOnOneRank, settings={"batches": 7}),
    "swapped state": Feature(SwapsState, settings={"batches": 6}),
    "without state": Feature(SetsStateAside, settings={"batches": 9}),
    "odd parameters": Feature(HasOddParameters, settings={"clip": ("norm", 0.1)}),
    "hooks after steps": Feature(HooksAfterSteps, settings={"batches": 6}),
    "norms, accumulation": Feature(NormsOfGradients, settings={"accumulate": 2}),
    "foreach": Feature(functools.partial(Edits, foreach=True), settings={"batches": 6}),
    "fused": Feature(functools.partial(Edits, fused=True), settings={"batches": 6}),
    "lbfgs": Feature(NormsInValidation, "batch_norm", "lbfgs"),
    "adagrad": Feature(Scheduled, "mlp", "adagrad", settings={"accumulate": 2, "epochs": 2}),
    "adafactor": Feature(Plain, "skipped_block", "adafactor", settings={"clip": ("norm", 0.1)}),
}


MISTAKES = {
    "steps of one rank": Feature(CountsStepsOnOneRank),
    "cleared state of one rank": Feature(ClearsStateOnOneRank),
    "state of one rank": Feature(EditsStateOnOneRank),
    "weights of one rank": Feature(EditsWeightsOnOneRank),
    "backward by hand": Feature(BackwardByHand, optimizer="two"),
    "scaled gradient of one rank": Feature(ScalesAGradient),
    "gradient of one rank, by numpy": Feature(WritesToAnArray),
    "replaced gradient of one rank": Feature(ReplacesAGradient),
    "cleared gradient of one rank": Feature(ClearsAGradient),
    "other noise on each rank": Feature(AddsNoise),
    "replaced state of one rank": Feature(ReplacesStateOnOneRank),
    "rate of one rank": Feature(RateOfOneRank),
    "group of one rank": Feature(MovesToAnotherGroupOnOneRank),
    "cast state of one rank": Feature(WritesCastStateOnOneRank, settings={"batches": 6}),
    "other data on each rank": Feature(GivesOtherDataOnEachRank),
    "other data of frozen weights": Feature(GivesOtherDataToFrozenWeights),
    "other data that one rank writes": Feature(WritesToOtherDataOnOneRank),
    "weights of one rank, other units": Feature(EditsBeforeAnotherStructure),
    **{
        f"{what}, {kernels}": Feature(functools.partial(module, **{kernels: True}))
        for what, module in {
            "steps of one rank": CountsStepsOnOneRank,
            "cleared state of one rank": ClearsStateOnOneRank,
            "state of one rank": EditsStateOnOneRank,
            "replaced state of one rank": ReplacesStateOnOneRank,
        }.items()
        for kernels in ("foreach", "fused")
    },
}


def run(name: str, options: dict[str, Any] | None, accelerator: str = "cpu") -> parity.Record:
    """Record a run of a feature on this rank: under DDP, or with these options under the strategy."""
    feature = (FEATURES | MISTAKES)[name]
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
        None if options is None else {**feature.ours, **options},
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
    trainer = L.Trainer(
        strategy=sp_lightning.SuperpipelineStrategy(),
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        max_steps=1,
        sync_batchnorm=True,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(torch.ones(4, 4), batch_size=2))
    return module.kinds[0], isinstance(module.norm, nn.SyncBatchNorm)


def broadcasts(steps: int) -> int:
    """Fit a module without buffers for some steps; return how often that broadcast something."""
    module = Norm()
    module.norm = nn.Identity()
    trainer = L.Trainer(
        strategy=sp_lightning.SuperpipelineStrategy(),
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with mock.patch.object(dist, "broadcast", wraps=dist.broadcast) as seen:
        trainer.fit(module, DataLoader(torch.ones(16, 4), batch_size=2))
    return int(seen.call_count)


def masters(name: str, precision: str, accelerator: str = "cpu") -> list[Tensor]:
    """Train a case with FP32 masters of half-precision weights; return them."""
    case = models.case(name)
    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    with ranked_runs.simulated(accelerator), tempfile.TemporaryDirectory() as root:
        L.seed_everything(1, verbose=False)
        module = models.ZooModule(case)
        trainer = L.Trainer(
            strategy=sp_lightning.SuperpipelineStrategy(window=2, master_weights=True),
            accelerator=accelerator,
            devices=size,
            precision=precision,
            use_distributed_sampler=False,
            max_epochs=1,
            default_root_dir=root,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
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
