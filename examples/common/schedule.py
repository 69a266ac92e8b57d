"""AdamW with weight decay of matrices alone, and a learning rate that warms up and then falls."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import lightning as L
import torch


def decaying(parameters: Iterable[torch.nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Groups for an optimizer; biases and norms do not decay."""
    trained = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def adamw(module: L.LightningModule, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """Over what is trained of a module."""
    return torch.optim.AdamW(decaying(module.parameters(), weight_decay), lr=lr)


def scheduled(optimizer: torch.optim.Optimizer, factor: Callable[[int], float]) -> dict[str, Any]:
    """What ``configure_optimizers`` returns, for a factor of the learning rate at each step."""
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def warmup_then_cosine(module: L.LightningModule, lr: float, weight_decay: float, warmup: int) -> dict[str, Any]:
    """AdamW, up to ``lr`` in so many steps, then down to 0 along half a cosine until training ends."""
    return warmed_up(module, adamw(module, lr, weight_decay), warmup)


def warmed_up(module: L.LightningModule, optimizer: torch.optim.Optimizer, warmup: int) -> dict[str, Any]:
    """The same for an optimizer whose groups have learning rates of their own."""
    total = module.trainer.estimated_stepping_batches

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, total - warmup))))

    return scheduled(optimizer, factor)
