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

_plain = GradScaler._unscale_grads_
_users = 0


def begin() -> None:
    """Have scalers unscale host gradients with host factors, until ``end``."""
    global _users
    _users += 1
    GradScaler._unscale_grads_ = _unscale_grads_  # type: ignore[assignment, method-assign]


def end() -> None:
    """Undo one ``begin``; the last one restores torch's own function."""
    global _users
    _users -= 1
    if not _users:
        GradScaler._unscale_grads_ = _plain  # type: ignore[method-assign]


def hand_over(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer that is about to step on the host its own host copies of what a scaler left for it."""
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
