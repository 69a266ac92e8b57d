"""``torch.amp.GradScaler`` beside gradients that are on the host.

The scaler keeps its factor on the device and copies it to the gradients' device without waiting for it: from a device
to the host, kernels on the host may run before the bytes are there, and gradients come out as garbage. While a module
is streamed, a scaler whose optimizer's gradients are on the host is handed the factor there, arrived.

An optimizer that unscales by itself (torch's fused ones) finds the factor among its attributes, and copies it likewise.
It is handed one of its own as well: the scaler writes to its factor after the step, which may be held
(deferred_step.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.amp import GradScaler

_plain = GradScaler._unscale_grads_
_users = 0


def begin() -> None:
    """Scalers unscale host gradients with host factors from here on."""
    global _users
    _users += 1
    GradScaler._unscale_grads_ = _unscale_grads_  # type: ignore[assignment, method-assign]


def end() -> None:
    """Called once for each ``begin``; the last one restores torch's."""
    global _users
    _users -= 1
    if not _users:
        GradScaler._unscale_grads_ = _plain  # type: ignore[method-assign]


def hand_over(optimizer: torch.optim.Optimizer) -> None:
    """This optimizer is about to step parameters on the host: what a scaler left for it is there."""
    for name in ("grad_scale", "found_inf"):
        value = vars(optimizer).get(name)
        if isinstance(value, torch.Tensor):
            setattr(optimizer, name, value.to("cpu", copy=True))


def _unscale_grads_(
    self: GradScaler, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, *rest: Any
) -> Any:
    grads = (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
    if any(grad.device.type == "cpu" for grad in grads):
        inv_scale, found_inf = inv_scale.cpu(), found_inf.cpu()
    return _plain(self, optimizer, inv_scale, found_inf, *rest)
