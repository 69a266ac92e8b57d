"""Plan a run before there is a device: whether it fits, which window, how long a step takes, what to change."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ..errors import OptionError
from .report import Change, Plan

if TYPE_CHECKING:
    import torch
    from torch import nn

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
    tensor_parallel_size: int | None = None,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    host_headroom: int | str | None = None,
    cores: int | None = None,
    link: str | None = None,
    disk_speed: str | None = None,
    network: str | None = None,
    mesh_link: str | None = None,
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
        tensor_parallel_size: Devices among which layers are cut, by a function that takes a mesh, or by a
            LightningModule's ``configure_model``.
        device_memory: Bytes of the device such as "24GiB", if they differ from the machine's.
        host_memory: Bytes of the host. The values of the strategy's option of this name are taken as that.
        host_headroom: Bytes of host memory that are left to the system; by default a tenth, from 4 to 32 GiB.
        cores: Physical cores for the optimizer, if they are few.
        link: The link's PCIe generation and lanes such as "gen4x8", or bytes per second such as "12GB".
        disk_speed: Bytes per second read and written, such as "7GB,5GB".
        network: With several nodes: the line between them such as "100Gb", or measured bytes per second.
        mesh_link: The link between devices that have shards of one layer, as ``link``.
        **options: Options of ``SuperpipelineStrategy``.
    """
    from ..core.host import headroom
    from ..options import HOST_MEMORY, Options  # what follows imports torch
    from ..ranks.exchange import host_sharing
    from . import machines
    from .model import Answers
    from .planner import Job, Planner, mesh_of, prepared

    if host_memory in HOST_MEMORY:
        options["host_memory"], host_memory = host_memory, None
    given = {"loss": loss, "optimizer": optimizer, "copies": copies, "trained_copies": trained_copies}
    given |= {"accumulate": accumulate if accumulate != 1 else None, "clip": clip or None, **options}
    precision = _precision(str(precision))
    for argument, value, least in (
        *(("copies", copies, 0), ("trained_copies", trained_copies, 0), ("devices", devices, 1), ("nodes", nodes, 1)),
        *(("accumulate", accumulate, 1), ("tensor_parallel_size", tensor_parallel_size or 1, 1)),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise OptionError(argument=argument, found=value, allowed=f"an int >= {least}")
    answers = None
    if answer is not None or cache is not None:
        _check_answers(answer, cache, given)
        answers = Answers(answer or 1, cache or "device")
    chosen = Options.parse(**options)
    chosen.check_devices(devices, nodes)
    if chosen.master_weights and precision not in ("bf16-true", "16-true"):
        allowed = "'bf16-true' or '16-true' with master_weights=True"
        raise OptionError(argument="precision", found=precision, allowed=allowed)
    if (nodes > 1 and not answers) is not (network is not None):
        allowed = (
            'given together with nodes > 1 that train, and there alone: "100Gb", or bytes per second such as "1.9GB"'
        )
        raise OptionError(argument="network", found=network, allowed=allowed)
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
        mesh_link=mesh_link,
    )
    given_room = _nbytes(host_headroom, "host_headroom", 0)
    source, batch, name = prepared(module, batch, name)
    with mesh_of(tensor_parallel_size) as mesh, _no_collections():
        planner = Planner(source, batch, target=target, loss=loss, answers=answers, mesh=mesh, name=name)
        shards = planner.shards(precision, chosen, tensor_parallel_size, devices)
        devices = max(devices, shards)
        hosts = nodes if answers is None else 1
        scales = precision == "16-mixed"
        own = own_gradients or accumulate > 1 or scales
        sharing = host_sharing(devices // shards, hosts, own, chosen.divide_state and hosts > 1)
        job = Job(
            options=chosen,
            precision=precision,
            optimizer=optimizer,
            answers=answers,
            accumulate=accumulate,
            clip=clip or scales,
            copies=copies,
            trained_copies=trained_copies,
            devices=devices,
            nodes=nodes,
            sharing=sharing,
            machine=profile,
            target=target,
            headroom=headroom(profile.host_nbytes) if given_room is None else given_room,
        )
        return planner.plan(job, shards)


def _precision(text: str) -> str:
    found = SHORT.get(text, text)
    if found not in PRECISIONS:
        raise OptionError(argument="precision", found=text, allowed="one of " + ", ".join(map(repr, PRECISIONS)))
    return found


def _check_answers(answer: int | None, cache: str | None, given: dict[str, Any]) -> None:
    from ..options import Options

    if cache not in (None, "device", "host"):
        raise OptionError(argument="cache", found=cache, allowed="'device' or 'host'")
    if answer is None:
        raise OptionError(argument="cache", found=cache, allowed="given together with answer")
    if isinstance(answer, bool) or not isinstance(answer, int) or answer < 1:
        raise OptionError(argument="answer", found=answer, allowed="an int >= 1, the tokens of each answer")
    for argument in OF_TRAINING:
        if given.get(argument) not in (None, 0, getattr(Options(), argument, None)):
            allowed = "left out beside answer: nothing is trained"
            raise OptionError(argument=argument, found=given[argument], allowed=allowed)


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


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Leave cycles where they are: to look for them among all that was imported takes a fifth of a plan's time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
