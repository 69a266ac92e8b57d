"""The parts of the work, the same for every contender: model, batches, precision, optimizer."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..memory.device import Device
from ..planning.shapes import Batch, build
from .setting import Setting

BATCHES = 4  # different ones
RATE = 1e-4  # learning rate


def device_here() -> int:
    """Return the number of this process's device among those of its machine."""
    return int(os.environ.get("LOCAL_RANK", 0))


class Work:
    """Makes the parts of a training run; every call makes equal ones."""

    def __init__(self, setting: Setting, device: Device) -> None:
        self.setting = setting
        self.device = device.torch_device
        self.rank = int(os.environ.get("RANK", 0))  # among all processes of a contender

    def batches(self) -> list[Batch]:
        """Make the batches, on the host."""
        generator = torch.Generator().manual_seed(1 + self.rank)
        setting = self.setting
        return [setting.shape.inputs(setting.batch, setting.seq, generator) for _ in range(BATCHES)]

    def module(self) -> nn.Module:
        """Make the model on the host, in FP32, ready for training or inference."""
        return build(self.setting.shape).train(not self.setting.inference)

    def checkpointed_module(self) -> nn.Module:
        """Make the model, with blocks that are recomputed in backward if the setting says so."""
        module = self.module()
        if self.setting.recompute:
            for block in self.blocks(module):
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        return module

    def blocks(self, module: nn.Module) -> list[nn.Module]:
        """List the repeated blocks of the model."""
        return [child for child in module.modules() if type(child).__name__ in self.setting.shape.blocks]

    def module_for_loop(self) -> nn.Module:
        """Make a `checkpointed_module` in the type that Lightning's precision plugin would give it."""
        module = self.checkpointed_module()
        return module.bfloat16() if self.setting.precision == "bf16-true" else module

    def optimizer(self, parameters: Iterable[Tensor], **options: Any) -> torch.optim.Optimizer:
        """Make the optimizer of these parameters."""
        kind, defaults = self.optimizer_class
        return kind(parameters, **defaults, **options)

    @property
    def optimizer_class(self) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        """Class of the optimizer, and its arguments."""
        if self.setting.optimizer == "sgd":
            return torch.optim.SGD, {"lr": RATE}
        fused = {"fused": True} if self.setting.optimizer == "adamw-fused" else {}
        return torch.optim.AdamW, {"lr": RATE, **fused}

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """Return the loss of a batch on the device: of its tokens, or of those that the model answers."""
        tokens = self.setting.answer
        loss: Tensor = module.answer(tokens, **batch) if tokens else module(**batch)  # type: ignore[operator]
        return loss

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context that Lightning's precision plugin puts around forward."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.setting.precision == "bf16-mixed")

    def to_device(self, batch: Batch) -> Batch:
        """Move a batch to the device, in the model's type."""
        half = torch.bfloat16 if self.setting.precision == "bf16-true" else None
        return {name: t.to(self.device, half if t.is_floating_point() else None) for name, t in batch.items()}
