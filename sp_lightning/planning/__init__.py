"""Plan a training run before there is a device: what fits, which window, how long a step takes, what to change."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..core.machine import Machine
from ..core.simulation import simulate
from ..errors import OptionError
from ..options import HOST_MEMORY, Options
from .forecast import Change, Plan, SweepPoint

if TYPE_CHECKING:
    import torch
    from torch import nn

    from .workloads import Workload

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
    loss: Callable[[nn.Module, Any], Any] | str | None = None,
    answer: int | None = None,
    cache: str | None = None,
    name: str | None = None,
    host_memory: int | str | None = None,
    host_headroom: int | str | None = None,
    cores: int | None = None,
    link: str | float | None = None,
    disk_speed: str | None = None,
    copies: int = 0,
    trained_copies: int = 0,
    devices: int = 1,
    own_gradients: bool = False,
    accumulate: int = 1,
    predict_at_once: int = 1,
    at_once: int | str | None = None,
    guessed: int = 0,
    accepted: float = 1.0,
    nodes: int = 1,
    network: str | None = None,
    tensor_parallel_size: int | None = None,
    mesh_link: str | float | None = None,
    host_nbytes: int | str | None = None,
    clip: bool = False,
    **options: Any,
) -> Plan:
    """Predict the memory, on device and host, and the step time of training, or asking, this model with the strategy.

    Needs no device. Takes seconds and almost no memory: neither weights nor activations are allocated. The module is
    not changed.

    Args:
        module: A module, which is copied without its weights; or a function without arguments that makes one, which
            runs on tensors without data; or a workload of ``workloads.WORKLOADS``, or its name, whose numbers are
            listed there.
        batch: A batch as the module takes it, or a function that makes one. For a workload: the number of tokens.
        precision: The Trainer's precision.
        optimizer: A name such as "AdamW", a class, or a function of parameters; by default the module's own, or AdamW.
        machine: A name in ``machine.PROFILES``, a profile, or "here" to measure this machine.
        device: The device type whose kernels are counted. By default "cuda" for a machine's name, this machine's
            device for "here", and its accelerator, or else "cuda", for a profile.
        device_memory: Bytes of device memory, such as "24GiB", if they differ from the machine's.
        loss: Runs the module on a batch and returns the loss; by default ``training_step``, or ``forward``. "chunked":
            the loss of a language model of transformers, or of a workload, in chunks as the recipes compute it.
        answer: Tokens that the model generates for each row of the batch, whose tokens are the prompts. Nothing is
            trained then, and a step makes a token for each row. For decoders of transformers.
        cache: With ``answer``: where keys and values of layers that are not in use wait, on the "device" (default) or
            on the "host", as with ``--model.cache host`` of the recipe for batch inference.
        name: The model's name in the plan.
        host_memory: Bytes of host memory, such as "64GiB", if they differ from the machine's. The values of the
            strategy's option of this name ("auto", "pinned", "pageable") are taken as that option, which changes no
            plan.
        host_headroom: Bytes of host memory that are left to the system; by default a tenth, from 4 to 32 GiB.
        cores: Physical cores for the optimizer, if they are few.
        copies: Copies of the weights beside the module on the host, such as an average that a callback has.
        trained_copies: Copies of those weights that are trained.
        devices: The devices of this machine that train together, each with a batch of its own.
        own_gradients: Whether each rank has all gradients once more, as with clipping of values or
            ``zero_grad(set_to_none=False)``. With one device: whether code reads gradients, as clipping of values does,
            which are FP32 then; clipping of the norm does not. Accumulation and gradient scaling are known without it.
        accumulate: Batches whose gradients are added up before the optimizer steps.
        predict_at_once: With ``answer``: batches under way at once, as by the strategy's option of this name. The plan
            is of all of them, and its rows are theirs together.
        at_once: With ``answer``: plan calls in lockstep, too, each with such a batch: how many, or "auto" for all that
            fit (docs/inference.md).
        guessed: With ``at_once``: tokens of each row that speculation guesses for a forward.
        accepted: Tokens for each row that a forward then gives on average, its own included.
        nodes: Machines that train together, each with these devices; bytes are those of one of them.
        network: With several nodes: the line between them such as "100Gb", of which gloo carries a part, or bytes per
            second that each was measured to send, such as "1.9GB" (doctor under torchrun).
        link: The link's PCIe generation and lanes such as "gen4x8", or bytes per second such as "12GB".
        disk_speed: Bytes per second that the machine's disk reads and writes, such as "7GB,5GB"; by default those of a
            drive on four lanes of PCIe 4. A third number, from 0.5 to 1, is the share of that which each direction
            keeps while both run.
        tensor_parallel_size: Devices among which layers are cut, for a module that is cut while it is made: a
            function that takes a mesh, or a LightningModule whose ``configure_model`` reads ``self.device_mesh``. The
            mesh is one of this process alone. A module whose parameters are DTensors needs no size. ``devices`` are
            then all devices, along both axes.
        mesh_link: With shards: the link between their devices as ``link``, or bytes per second that each was measured
            to send, such as "40GB" (doctor under torchrun); by default that to the host.
        host_nbytes: The former name of ``host_memory``.
        clip: Whether gradients are clipped: they are final only after backward then, and no unit is stepped before.
        **options: Options of ``SuperpipelineStrategy``.
    """
    from .planner import make_plan  # slow to import
    from .settings import PlannedMachine, PlannedRun, answers_of, calls_of, check_network

    if host_nbytes is not None:
        if host_memory not in (None, *HOST_MEMORY):
            raise OptionError(argument="host_nbytes", found=host_nbytes, allowed="left out beside host_memory")
        warnings.warn("plan(host_nbytes=...) is now plan(host_memory=...)", FutureWarning, stacklevel=2)
    elif host_memory not in HOST_MEMORY:
        host_nbytes, host_memory = host_memory, None
    if host_memory is not None:
        options["host_memory"] = host_memory
    trains = {"loss": loss, "optimizer": optimizer, "copies": copies, "trained_copies": trained_copies}
    run = PlannedRun(
        options=Options.parse(**options),
        precision=str(precision),
        optimizer=optimizer,
        loss=loss,
        answers=answers_of(answer, cache, {**trains, **options}),
        copies=copies,
        trained_copies=trained_copies,
        devices=devices,
        own_gradients=own_gradients,
        accumulate=accumulate,
        calls=calls_of(at_once, guessed, accepted),
        predict_at_once=predict_at_once,
        nodes=nodes,
        tensor_parallel_size=tensor_parallel_size,
        clip=clip,
    )
    check_network(run.nodes_of_steps, network)
    on = PlannedMachine.of(
        machine,
        device,
        run.precision,
        device_memory=device_memory,
        host_memory=host_nbytes,
        host_headroom=host_headroom,
        cores=cores,
        link=link,
        disk_speed=disk_speed,
        network=network,
        devices=devices,
        mesh_link=mesh_link,
    )
    return make_plan(module, batch, run, on, name)
