"""Plan a run before there is a device: whether it fits, which window, how long a step takes, what to change."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..errors import OptionError
from ..host.device import find
from ..host.rates import measured
from ..options import CHOICES, Options, check_choice, is_int, nbytes_or_none
from .machines import MACHINES, REACHED, Machine
from .model import batch_of, kind_of, made
from .planner import Change, Job, Plan, Planner

__all__ = ["Change", "Job", "Plan", "plan"]

PRECISIONS = "32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true"
SHORT = {"32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed", "64": "64-true"}


def plan(
    module: nn.Module | Callable[..., nn.Module] | str,
    batch: Any = None,
    *,
    precision: str | int = "32-true",
    optimizer: Any = None,
    machine: Machine | str = "here",
    device: torch.device | str | None = None,
    loss: Callable[[nn.Module, Any], Any] | None = None,
    name: str | None = None,
    clip: bool = False,
    accumulate: int = 1,
    copies: int = 0,
    devices: int = 1,
    nodes: int = 1,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    **options: Any,
) -> Plan:
    """Predict the memory, on device and host, and the step time of a run of this model with the strategy.

    Needs no device. Takes seconds and almost no memory: neither weights nor activations are allocated. The module is
    not changed. Where nothing of it trains, the plan is of a forward.

    Args:
        module: A module, which is copied without its weights; a function that makes one; or a listed name.
        batch: A batch as the module takes it, or a function that makes one. For a listed name: the number of rows.
        precision: The Trainer's precision.
        optimizer: A name such as "AdamW", a class, or a function of parameters; by default the module's own, or AdamW.
        machine: A listed machine's name, a `Machine`, or "here" to measure this one.
        device: The device type whose driver's memory is counted; by default this machine's for "here", else "cuda".
        loss: Runs the module on a batch and returns the loss; by default ``training_step``, or ``forward``.
        name: The model's name in the plan.
        clip: Whether gradients are clipped by their norm.
        accumulate: Batches whose gradients are added up before the optimizer steps.
        copies: Copies of the weights beside the module on the host, such as an average that a callback has.
        devices: The devices of this machine that train together, each with a batch of its own.
        nodes: Machines that train together, each with these devices; bytes are those of one of them.
        device_memory: Bytes of the device such as "24GiB", if they differ from the machine's.
        host_memory: Bytes of the host. The values of the strategy's option of this name are taken as that.
        **options: Options of ``SuperpipelineStrategy``.
    """
    if host_memory in CHOICES["host_memory"]:
        options["host_memory"], host_memory = host_memory, None
    precision = SHORT.get(str(precision), str(precision))
    check_choice("precision", precision, PRECISIONS)
    for argument, value in {"devices": devices, "nodes": nodes, "accumulate": accumulate}.items():
        if not is_int(value) or value < 1:
            raise OptionError(argument=argument, found=value, allowed="an int >= 1")
    chosen = Options.parse(**options)
    chosen.check_devices(devices, nodes)
    if chosen.master_weights and not precision.endswith("16-true"):
        raise OptionError(
            argument="precision", found=precision, allowed="'bf16-true' or '16-true' with master_weights=True"
        )
    there: dict[str, Any] = {
        "device_nbytes": nbytes_or_none("device_memory", device_memory, "> 0"),
        "host_nbytes": nbytes_or_none("host_memory", host_memory, "> 0"),
    }
    job = Job(
        options=chosen,
        precision=precision,
        machine=replace(
            _machine(machine, device, precision),
            **{argument: nbytes for argument, nbytes in there.items() if nbytes is not None},
        ),
        accumulate=accumulate,
        clip=clip or precision == "16-mixed",  # its gradient scaler needs all gradients first
        copies=copies,
        devices=devices,
        nodes=nodes,
    )
    if isinstance(module, str):
        kind, name = kind_of(module), name or module
        batch = batch if hasattr(batch, "keys") else batch_of(*kind, batch or 1)
        module = functools.partial(made, *kind)
    return Planner(module, batch, loss=loss, name=name, optimizer=optimizer).plan(job)


def _machine(given: Machine | str, device: torch.device | str | None, precision: str) -> Machine:
    """Return the machine, measured if it is "here", with the device's type if one is given."""
    if given == "here":
        found = find(None if device is None else str(device))
        return Machine(
            name="here",
            device_type=found.type,
            **measured(found, torch.float32 if precision.startswith("32") else torch.bfloat16, REACHED.down_cost),
        )
    if not isinstance(given, Machine):
        check_choice("machine", given, ("here", *MACHINES))
        given = MACHINES[given]
    return given if device is None else replace(given, device_type=torch.device(device).type)
