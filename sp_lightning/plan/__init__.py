"""Plan a run before there is a device: whether it fits, which window, how long a step takes, what to change."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..errors import OptionError
from .report import Change, Plan

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..options import Options
    from .machines import Machine

__all__ = ["Change", "Plan", "plan"]

PRECISIONS = "32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true"
SHORT = {"32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed", "64": "64-true"}
OF_TRAINING = (
    *("loss", "optimizer", "copies", "trained_copies", "accumulate", "clip"),
    *("activations", "optimizer_overlap", "fused_optimizer", "optimizer_device", "master_weights", "divide_state"),
)


def plan(
    module: nn.Module | Callable[..., nn.Module] | str,
    batch: Any = None,
    *,
    precision: str | int = "32-true",
    optimizer: Any = None,
    machine: Machine | str = "here",
    device: torch.device | str | None = None,
    loss: Callable[[nn.Module, Any], Any] | None = None,
    answer: int | None = None,
    cache: str | None = None,
    name: str | None = None,
    clip: bool = False,
    accumulate: int = 1,
    copies: int = 0,
    trained_copies: int = 0,
    own_gradients: bool = False,
    devices: int = 1,
    nodes: int = 1,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    host_headroom: int | str | None = None,
    cores: int | None = None,
    link: str | None = None,
    disk_speed: str | None = None,
    network: str | None = None,
    **options: Any,
) -> Plan:
    """Predict the memory, on device and host, and the step time of training, or asking, this model with the strategy.

    Needs no device. Takes seconds and almost no memory: neither weights nor activations are allocated. The module is
    not changed.

    Args:
        module: A module, which is copied without its weights; a function that makes one; or a listed name.
        batch: A batch as the module takes it, or a function that makes one. For a listed name: the number of rows.
        precision: The Trainer's precision.
        optimizer: A name such as "AdamW", a class, or a function of parameters; by default the module's own, or AdamW.
        machine: A listed machine's name, a `Machine`, or "here" to measure this one.
        device: The device type whose kernels are counted; by default this machine's for "here", else "cuda".
        loss: Runs the module on a batch and returns the loss; by default ``training_step``, or ``forward``.
        answer: Tokens that the model generates for each row of the batch, whose tokens are the prompts. Nothing is
            trained then, and a step makes a token for each row. For decoders of transformers.
        cache: With ``answer``: where keys and values of layers that are not in use wait, "device" (default) or "host".
        name: The model's name in the plan.
        clip: Whether gradients are clipped by their norm.
        accumulate: Batches whose gradients are added up before the optimizer steps.
        copies: Copies of the weights beside the module on the host, such as an average that a callback has.
        trained_copies: Copies of those weights that are trained.
        own_gradients: Whether each rank has all gradients once more, as with clipping of values.
        devices: The devices of this machine that train together, each with a batch of its own.
        nodes: Machines that train together, each with these devices; bytes are those of one of them.
        device_memory: Bytes of the device such as "24GiB", if they differ from the machine's.
        host_memory: Bytes of the host. The values of the strategy's option of this name are taken as that.
        host_headroom: Bytes of host memory that are left to the system; by default a tenth, from 4 to 32 GiB.
        cores: Physical cores for the optimizer, if they are few.
        link: The link's PCIe generation and lanes such as "gen4x8", or bytes per second such as "12GB".
        disk_speed: Bytes per second read and written, such as "7GB,5GB".
        network: With several nodes: the line between them such as "100Gb", or measured bytes per second.
        **options: Options of ``SuperpipelineStrategy``.
    """
    from ..core.host import headroom
    from ..options import HOST_MEMORY, Options, check_choice  # what follows imports torch
    from ..ranks.exchange import host_sharing
    from . import listed, machines
    from .model import Answers
    from .planner import Job, Planner

    # What was asked
    if host_memory in HOST_MEMORY:
        options["host_memory"], host_memory = host_memory, None
    precision = SHORT.get(str(precision), str(precision))
    check_choice("precision", precision, PRECISIONS)
    counts = {"copies": copies, "trained_copies": trained_copies, "accumulate": accumulate}
    _check_counts(copies=copies, trained_copies=trained_copies)
    _check_counts(1, devices=devices, nodes=nodes, accumulate=accumulate)
    if answer is not None or cache is not None:
        _check_answers(answer, cache, {"loss": loss, "optimizer": optimizer, "clip": clip, **counts, **options})
    chosen = Options.parse(**options)
    _check_together(chosen, precision, devices, nodes, network, trains=answer is None)

    # The machine
    profile, target = _machine(machine, device, precision)
    profile = machines.changed(
        profile,
        device_memory=_nbytes(device_memory, "device_memory"),
        host_memory=_nbytes(host_memory, "host_memory"),
        link=link,
        cores=cores,
        disk_speed=disk_speed,
        network=network,
        devices=devices,
    )
    room = _nbytes(host_headroom, "host_headroom", 0)

    # The run
    scales = precision == "16-mixed"
    hosts, own = nodes if answer is None else 1, own_gradients or accumulate > 1 or scales
    job = Job(
        options=chosen,
        precision=precision,
        machine=profile,
        target=target,
        headroom=headroom(profile.host_nbytes) if room is None else room,
        optimizer=optimizer,
        answers=None if answer is None else Answers(answer, cache or "device"),
        accumulate=accumulate,
        clip=clip or scales,
        copies=copies,
        trained_copies=trained_copies,
        devices=devices,
        nodes=nodes,
        sharing=host_sharing(devices, hosts, own, chosen.divide_state and hosts > 1),
    )
    if isinstance(module, str):
        module, batch, name = listed.made(module, batch, name)
    collects = gc.isenabled()
    gc.disable()  # to look for cycles among all that was imported takes a fifth of a plan's time
    try:
        return Planner(module, batch, target=target, loss=loss, name=name).plan(job)
    finally:
        if collects:
            gc.enable()


def _check_counts(least: int = 0, **given: Any) -> None:
    for argument, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise OptionError(argument=argument, found=value, allowed=f"an int >= {least}")


def _check_answers(answer: int | None, cache: str | None, given: dict[str, Any]) -> None:
    from ..options import Options, check_choice

    check_choice("cache", cache or "device", ("device", "host"))
    if answer is None:
        raise OptionError(argument="cache", found=cache, allowed="given together with answer")
    _check_counts(1, answer=answer)
    defaults = {**vars(Options()), "accumulate": 1}
    for argument in OF_TRAINING:
        if given.get(argument) not in (None, 0, defaults.get(argument)):
            allowed = "left out beside answer: nothing is trained"
            raise OptionError(argument=argument, found=given[argument], allowed=allowed)


def _check_together(
    options: Options, precision: str, devices: int, nodes: int, network: str | None, trains: bool
) -> None:
    """Raise OptionError for what makes no sense together."""
    options.check_devices(devices, nodes)
    if options.master_weights and precision not in ("bf16-true", "16-true"):
        allowed = "'bf16-true' or '16-true' with master_weights=True"
        raise OptionError(argument="precision", found=precision, allowed=allowed)
    if (nodes > 1 and trains) is not (network is not None):
        allowed = (
            'given together with nodes > 1 that train, and there alone: "100Gb", or bytes per second such as "1.9GB"'
        )
        raise OptionError(argument="network", found=network, allowed=allowed)


def _machine(given: Machine | str, device: torch.device | str | None, precision: str) -> tuple[Machine, str]:
    """Return the machine, and the device type whose kernels count."""
    import torch

    from . import machines

    target = None if device is None else torch.device(device).type
    if given == "here":
        from ..memory.device import find
        from .measure import here

        found = find(None if device is None else str(device))
        return here(found, torch.float32 if precision.startswith("32") else torch.bfloat16), target or found.type
    if isinstance(given, str):
        return machines.machine_named(given), target or "cuda"
    if not isinstance(given, machines.Machine):
        raise OptionError(argument="machine", found=given, allowed="'here', a Machine, or the name of a listed one")
    return given, target or "cuda"


def _nbytes(given: int | str | None, argument: str, least: int = 1) -> int | None:
    from ..options import is_int, parse_bytes

    if given is None:
        return None
    nbytes = parse_bytes(given, argument) if isinstance(given, str) else given
    if not is_int(nbytes) or nbytes < least:
        allowed = f'bytes, at least {least}: an int, or text with a unit such as "10GiB"'
        raise OptionError(argument=argument, found=given, allowed=allowed)
    return nbytes
