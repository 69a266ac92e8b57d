"""The arguments of `sp_lightning.plan` beside the model, validated and normalised once; all other code trusts them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from ..core.machine import PROFILES, Machine, headroom, with_cores, with_disk, with_link, with_mesh, with_network
from ..core.unit_numbers import HostSharing
from ..errors import OptionError
from ..memory.device import find
from ..optim.pieces import ELEMENTWISE, PER_PARAMETER
from ..options import Options, is_int, parse_bytes
from ..ranks.exchange import host_sharing
from ..runtime.measure import measure
from ..tracing.answers import Answers
from ..tracing.dry_run import Runner
from .planned_model import name_of_optimizer

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true")
SHORT_PRECISIONS = {"32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed", "64": "64-true"}
ON_DEVICE = frozenset(kind.__name__ for kind in ELEMENTWISE | PER_PARAMETER)  # optimizers that can step there
NOT_CUT = (
    "left out for a module none of whose parameters is a DTensor: have a function that takes the mesh call "
    "parallelize_module(..., mesh, plan), or configure_model with self.device_mesh['tensor_parallel']"
)
OF_TRAINING = (
    *("loss", "optimizer", "copies", "trained_copies"),
    *("activations", "optimizer_overlap", "fused_optimizer", "optimizer_device", "master_weights"),
    "divide_state",
)


@dataclass(frozen=True)
class PlannedCalls:
    """The calls in lockstep to plan for (planned_calls.py). Creating an instance checks every value."""

    at_once: int | Literal["auto"]
    guessed: int = 0
    accepted: float = 1.0  # tokens for each forward and row, that of the forward itself included

    def __post_init__(self) -> None:
        if self.at_once != "auto" and not (is_int(self.at_once) and self.at_once >= 1):
            raise OptionError(argument="at_once", found=self.at_once, allowed="'auto' or an int >= 1")
        if not (is_int(self.guessed) and self.guessed >= 0):
            raise OptionError(argument="guessed", found=self.guessed, allowed="an int >= 0")
        if not 1 <= self.accepted <= self.guessed + 1:
            allowed = f"from 1 to {self.guessed + 1}, one more than guessed"
            raise OptionError(argument="accepted", found=self.accepted, allowed=allowed)


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """How the model is trained, or asked for answers. Creating an instance checks every value."""

    options: Options
    precision: str  # one of `PRECISIONS`, or a short name of one
    optimizer: Any  # a name, a class, a function of parameters, or None for the module's own
    loss: Runner | str | None  # a function of module and batch, "full", "chunked", or None for the module's own
    answers: Answers | None  # what the model generates, if it is not trained
    copies: int  # of all weights, beside the module
    trained_copies: int  # of the weights that are trained
    devices: int
    own_gradients: bool  # whether each rank has all gradients once more, or, alone, FP32 ones (unit_numbers.py, Rule 5)
    accumulate: int  # batches in a step of the optimizer
    calls: PlannedCalls | None = None  # in lockstep, of such batches
    predict_at_once: int = 1  # batches that are answered in lockstep; one has all figures of a plan
    nodes: int = 1  # machines, each with these devices
    tensor_parallel_size: int | None = None  # devices among which layers are cut; None: as the module was cut
    clip: bool = False  # whether gradients are clipped

    def __post_init__(self) -> None:
        precision = SHORT_PRECISIONS.get(self.precision, self.precision)
        if precision not in PRECISIONS:
            allowed = "one of " + ", ".join(map(repr, PRECISIONS))
            raise OptionError(argument="precision", found=self.precision, allowed=allowed)
        object.__setattr__(self, "precision", precision)  # a frozen instance may change only while it is made
        if isinstance(self.loss, str) and self.loss not in ("full", "chunked"):
            raise OptionError(argument="loss", found=self.loss, allowed="'full', 'chunked' or a function")
        for name, least in (
            ("copies", 0),
            ("trained_copies", 0),
            ("devices", 1),
            ("accumulate", 1),
            ("predict_at_once", 1),
            ("nodes", 1),
            ("tensor_parallel_size", 1),
        ):
            value = getattr(self, name)
            if value is None and name == "tensor_parallel_size":
                continue
            if not is_int(value) or value < least:
                raise OptionError(argument=name, found=value, allowed=f"an int >= {least}")
        if self.calls is not None and self.answers is None:
            raise OptionError(argument="at_once", found=self.calls.at_once, allowed="given together with answer")
        if self.predict_at_once > 1 and self.answers is None:
            allowed = "given together with answer"
            raise OptionError(argument="predict_at_once", found=self.predict_at_once, allowed=allowed)
        self.options.check_devices(self.devices, self.nodes)
        steps_there = self.options.optimizer_device == "device" and self.answers is None
        if steps_there and isinstance(self.optimizer, str | type) and self.optimizer_name not in ON_DEVICE:
            allowed = f"one of {', '.join(sorted(ON_DEVICE))} with optimizer_device='device'"
            raise OptionError(argument="optimizer", found=self.optimizer_name, allowed=allowed)
        if self.accumulate > 1 or precision == "16-mixed":  # which scales the gradients
            object.__setattr__(self, "own_gradients", True)

    @property
    def reads_after_backward(self) -> int:
        """How often all gradients are read or written between backward and the step: by clipping, and by a scaler."""
        return int(self.clip) + 2 * (self.precision == "16-mixed")

    def shards_among(self, found: int) -> int:
        """Return among how many devices layers are cut, as was found; raise OptionError if it was to be otherwise."""
        if self.tensor_parallel_size not in (None, found):
            allowed = f"{found}, among which the module's layers are cut" if found > 1 else NOT_CUT
            raise OptionError(argument="tensor_parallel_size", found=self.tensor_parallel_size, allowed=allowed)
        if self.devices > 1 and self.devices % found:
            allowed = f"a multiple of {found}, among which the module's layers are cut, or left out"
            raise OptionError(argument="devices", found=self.devices, allowed=allowed)
        if self.nodes > 1 < found:
            allowed = "1 for a module with DTensors, which is not streamed on several machines"
            raise OptionError(argument="nodes", found=self.nodes, allowed=allowed)
        return found

    @property
    def nodes_of_steps(self) -> int:
        """The machines that sum gradients: nothing crosses a network where nothing is trained."""
        return self.nodes if self.answers is None else 1

    @property
    def sharing(self) -> HostSharing:
        """The ranks of a machine, which share its host memory."""
        nodes = self.nodes_of_steps
        divides = self.options.divide_state and nodes > 1
        return host_sharing(self.devices, nodes, self.own_gradients, divides)

    @property
    def own_loss(self) -> Runner | None:
        """The user's function of module and batch, if there is one."""
        return None if isinstance(self.loss, str) else self.loss

    @property
    def optimizer_name(self) -> str:
        """Name of the optimizer, such as "AdamW"; empty where only the module knows it."""
        return name_of_optimizer(self.optimizer)

    def within_host(self, available_nbytes: int) -> PlannedRun:
        """Return the run with a host budget of all available bytes, if it has a disk and no other budget."""
        if not self.options.takes_what_is_free:
            return self
        return replace(self, options=replace(self.options, host_budget=max(1, available_nbytes)))


@dataclass(frozen=True, kw_only=True)
class PlannedMachine:
    """The machine that a run is planned for."""

    profile: Machine  # with the memory, cores, link and disk that were given for it
    target: str  # the device type whose kernels count
    headroom_nbytes: int  # of host memory, left to the system
    is_disk_assumed: bool  # the disk's speed was not given
    mesh_link: str | float | None = None  # as given

    @classmethod
    def of(
        cls,
        machine: Machine | str,
        device: torch.device | str | None,
        precision: str,
        *,
        device_memory: int | str | None,
        host_memory: int | str | None,
        host_headroom: int | str | None,
        cores: int | None,
        link: str | float | None,
        disk_speed: str | None,
        network: str | None = None,
        devices: int = 1,
        mesh_link: str | float | None = None,
    ) -> PlannedMachine:
        """Return the machine with this profile, changed by what is given; the arguments are those of `plan`."""
        profile, target = _profile(machine, device, precision)
        if device_memory is not None:
            profile = replace(profile, device_nbytes=_nbytes(device_memory, "device_memory"))
        if host_memory is not None:
            profile = replace(profile, host_nbytes=_nbytes(host_memory, "host_memory"))
        if cores is not None:
            profile = with_cores(profile, cores)
        if link is not None:
            profile = with_link(profile, link)
        if disk_speed is not None:
            profile = with_disk(profile, disk_speed)
        if network is not None:
            profile = with_network(profile, network, devices)
        profile = with_mesh(profile, mesh_link)
        left = headroom(profile.host_nbytes) if host_headroom is None else _nbytes(host_headroom, "host_headroom", 0)
        return cls(
            profile=profile,
            target=target,
            headroom_nbytes=left,
            is_disk_assumed=disk_speed is None,
            mesh_link=mesh_link,
        )

    def check_mesh(self, shards: int) -> None:
        """Raise OptionError if a link between devices with shards was given and there are none."""
        if self.mesh_link is not None and shards == 1:
            allowed = "left out for a module whose layers are not cut"
            raise OptionError(argument="mesh_link", found=self.mesh_link, allowed=allowed)


def answers_of(tokens: int | None, cache: str | None, given: dict[str, Any]) -> Answers | None:
    """Return what the model generates, if it is not trained; refuse those given arguments that only training has."""
    if cache not in (None, "device", "host"):
        raise OptionError(argument="cache", found=cache, allowed="'device' or 'host'")
    if tokens is None:
        if cache is not None:
            raise OptionError(argument="cache", found=cache, allowed="given together with answer")
        return None
    if not is_int(tokens) or tokens < 1:
        raise OptionError(argument="answer", found=tokens, allowed="an int >= 1, the tokens of each answer")
    for name in OF_TRAINING:
        if given.get(name) not in (None, 0, getattr(Options(), name, None)):
            raise OptionError(argument=name, found=given[name], allowed="left out beside answer: nothing is trained")
    return Answers(tokens, cache or "device")


def check_network(nodes: int, network: str | None) -> None:
    """Raise OptionError unless there is a network where several machines are, and there alone."""
    if nodes > 1 and network is None:
        allowed = 'given together with nodes: the line such as "100Gb", or measured bytes per second such as "1.9GB"'
        raise OptionError(argument="network", found=None, allowed=allowed)
    if nodes == 1 and network is not None:
        raise OptionError(argument="network", found=network, allowed="given together with nodes > 1 that train")


def calls_of(at_once: Any, guessed: int, accepted: float) -> PlannedCalls | None:
    """Return the calls in lockstep to plan for, if there are any."""
    if at_once is not None:
        return PlannedCalls(at_once, guessed, accepted)
    for name, value, default in (("guessed", guessed, 0), ("accepted", accepted, 1)):
        if value != default:
            raise OptionError(argument=name, found=value, allowed="given together with at_once")
    return None


def _profile(given: Machine | str, device: torch.device | str | None, precision: str) -> tuple[Machine, str]:
    """Return the machine's profile, and the device type whose kernels count."""
    here = torch.accelerator.current_accelerator(check_available=True)
    target = torch.device(device).type if device is not None else None
    if given == "here":
        found = find(None if device is None else str(device))
        dtype = torch.float32 if precision.startswith("32") else torch.bfloat16
        return measure(found, dtype=dtype), target or found.type
    if isinstance(given, Machine):
        return given, target or (here.type if here is not None else "cuda")
    if given not in PROFILES:
        allowed = "'here', a machine.Machine, or one of " + ", ".join(map(repr, PROFILES))
        raise OptionError(argument="machine", found=given, allowed=allowed)
    return PROFILES[given], target or "cuda"


def _nbytes(given: int | str, argument: str, least: int = 1) -> int:
    nbytes = parse_bytes(given, argument) if isinstance(given, str) else given
    if not is_int(nbytes) or nbytes < least:
        allowed = f'bytes, at least {least}: an int, or text with a unit such as "10GiB"'
        raise OptionError(argument=argument, found=given, allowed=allowed)
    return nbytes
