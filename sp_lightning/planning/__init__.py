"""Will it fit, which window, how long a step takes, and what to change first: before there is a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..core.machine import Machine
from ..core.simulation import simulate
from .forecast import Change, Plan, SweepPoint
from .workloads import Workload

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["Change", "Plan", "SweepPoint", "plan", "simulate"]


def plan(
    module: nn.Module | Callable[[], nn.Module] | Workload | str,
    batch: Any = None,
    *,
    precision: str | int = "32-true",
    optimizer: Any = None,
    machine: Machine | str = "here",
    device: torch.device | str | None = None,
    device_memory: int | str | None = None,
    loss: Callable[[nn.Module, Any], Any] | None = None,
    name: str | None = None,
    **options: Any,
) -> Plan:
    """What training this model with the strategy would need: memory on both sides, and time. Needs no device.

    Takes seconds, and next to no memory: neither weights nor activations are made. The module is not changed.

    Args:
        module: A module, which is copied without its weights; or a function without arguments that makes one, which
            runs on tensors without data; or one of ``workloads.WORKLOADS``, or its name, whose numbers are given.
        batch: A batch as the module takes it, or a function that makes one. Of a workload: the number of tokens.
        precision: As the Trainer's.
        optimizer: A name such as "AdamW", a class, or a function of parameters; by default the module's own, or AdamW.
        machine: A name in ``machine.MACHINES``, a profile, or "here": this machine, measured.
        device: What it computes on, for the choice of kernels; by default what is here, or else "cuda".
        device_memory: Its bytes, such as "24GiB", where that is not the machine's.
        loss: Runs the module on a batch and returns its loss; by default ``training_step``, or ``forward``.
        name: Of the model, for a reader.
        **options: As for ``SuperpipelineStrategy``.
    """
    from .planner import planned  # which takes time to import

    return planned(module, batch, precision, optimizer, machine, device, device_memory, loss, name, options)
