"""``torch.amp.GradScaler`` beside gradients that are on the host.

The scaler's factor is on the device. The scaler copies it to the gradients' device without waiting for the copy. If
that is the host, kernels there may run before the bytes have arrived, and gradients come out as garbage. So while a
module is streamed, a scaler whose optimizer has gradients on the host gets the factor as a host tensor, already copied.

An optimizer that unscales by itself (torch's fused ones) reads the factor from its attributes, and would copy it in the
same way. It gets a host copy too. The copy is its own, because the scaler writes to its factor after the step, which
may be deferred (pending_step.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.amp import GradScaler

from ..compat.patches import UNSCALE_GRADS


def hand_over(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer that is about to step on the host its own host copies of what a scaler left for it."""
    for name in ("grad_scale", "found_inf"):
        value = vars(optimizer).get(name)
        if isinstance(value, torch.Tensor):
            setattr(optimizer, name, value.to("cpu", copy=True))


def unscale(
    self: GradScaler, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, *rest: Any
) -> Any:
    """Unscale gradients, those on the host by a factor that is there: replaces ``GradScaler._unscale_grads_``."""
    grads = (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
    if any(grad.device.type == "cpu" for grad in grads):
        inv_scale, found_inf = inv_scale.cpu(), found_inf.cpu()
    return UNSCALE_GRADS.original(self, optimizer, inv_scale, found_inf, *rest)
