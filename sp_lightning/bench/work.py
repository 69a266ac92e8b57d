"""What there is to do, the same for every contender: the model, the batches, the precision, the optimizer."""

from __future__ import annotations

import functools
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
RATE = 1e-4


class Work:
    """Makes the parts of a training run; each call makes the same."""

    def __init__(self, setting: Setting, device: Device) -> None:
        self.setting = setting
        self.device = device.torch_device

    def batches(self) -> list[Batch]:
        """On the host."""
        generator = torch.Generator().manual_seed(1)
        setting = self.setting
        return [setting.shape.inputs(setting.batch, setting.seq, generator) for _ in range(BATCHES)]

    def module(self) -> nn.Module:
        """On the host, in FP32, ready to train or to infer."""
        return build(self.setting.shape).train(not self.setting.inference)

    def recomputing(self) -> nn.Module:
        """The same, with blocks that run again in backward where the setting says so."""
        module = self.module()
        if self.setting.recompute:
            for block in self.blocks(module):
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        return module

    def blocks(self, module: nn.Module) -> list[nn.Module]:
        """What repeats."""
        return [child for child in module.modules() if type(child).__name__ in self.setting.shape.blocks]

    def by_hand(self) -> nn.Module:
        """As `recomputing`, in the type that Lightning's precision plugin would give it."""
        module = self.recomputing()
        return module.bfloat16() if self.setting.precision == "bf16-true" else module

    def optimizer(self, parameters: Iterable[Tensor], **options: Any) -> torch.optim.Optimizer:
        """Of these."""
        kind, defaults = self.optimizer_class
        return kind(parameters, **defaults, **options)

    @property
    def optimizer_class(self) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        """And its arguments."""
        if self.setting.optimizer == "sgd":
            return torch.optim.SGD, {"lr": RATE}
        fused = {"fused": True} if self.setting.optimizer == "adamw-fused" else {}
        return torch.optim.AdamW, {"lr": RATE, **fused}

    def autocast(self) -> AbstractContextManager[Any]:
        """What Lightning's precision plugin puts around forward."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.setting.precision == "bf16-mixed")

    def here(self, batch: Batch) -> Batch:
        """On the device, in the model's type."""
        half = torch.bfloat16 if self.setting.precision == "bf16-true" else None
        return {name: t.to(self.device, half if t.is_floating_point() else None) for name, t in batch.items()}
