"""The moving average of what is trained; of a frozen base there is no second copy."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import nn


class MovingAverage(L.Callback):
    """Averages the trained weights after each step, and puts the average in their place when training ends.

    Checkpoints have both: the weights where they always are, and the average in this callback's state.

    Args:
        decay: The share of the average that a step leaves as it was.
    """

    trained_copies = 1  # for a plan, which cannot see what a callback will have

    def __init__(self, decay: float = 0.999) -> None:
        self.decay = decay
        self.average: nn.ParameterList | None = None
        self.steps = 0  # that the average has seen

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.average is None:
            self.average = nn.ParameterList(p.detach().clone() for p in trained(pl_module)).requires_grad_(False)
        for average, parameter in zip(self.average, trained(pl_module), strict=True):
            average.data = average.data.to(parameter.device)  # it may come from a checkpoint

    @torch.no_grad()
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        assert self.average is not None
        if trainer.global_step > self.steps:  # else gradients are being accumulated
            for average, parameter in zip(self.average, trained(pl_module), strict=True):
                average.lerp_(parameter, 1 - self.decay)
            self.steps = trainer.global_step

    @torch.no_grad()
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert self.average is not None
        for average, parameter in zip(self.average, trained(pl_module), strict=True):
            parameter.copy_(average)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "average": [] if self.average is None else [p.detach() for p in self.average]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps = state_dict["steps"]
        self.average = nn.ParameterList(state_dict["average"]).requires_grad_(False)


def trained(module: nn.Module) -> list[nn.Parameter]:
    """Return the weights that are trained."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]
