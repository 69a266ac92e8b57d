"""The work of every contender: checked once, at the edge, and passed to each process as JSON."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..core.host import usable_cores
from ..errors import MissingExtraError, OptionError, UnsupportedError
from ..memory.device import check_supported
from ..options import ACTIVATIONS, parse_bytes
from ..planning.shapes import SHAPES, Shape

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")
OPTIMIZERS = ("adamw", "adamw-fused", "sgd")
LEAST_RANKS = 4  # that a CPU may have, however few its cores
WARM_UP = 2  # steps of a process before its first repetition


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The work, and how often it is repeated. Creating a setting checks every value; `parse` fills in defaults."""

    model: str
    batch: int
    seq: int  # tokens of a sequence
    precision: str = "32-true"
    optimizer: str = "adamw"
    clip: float | None = None  # global norm of the gradients
    activations: str = "keep"
    inference: bool = False
    answer: int = 0  # tokens that the model generates for each row of a batch, in inference; 0: a forward
    steps: int = 5  # of a repetition
    repetitions: int = 3
    device: str = "cpu"
    devices: int = 1  # each with a process, which gets batches of its own
    nodes: int = 1  # parts of this machine's processes, each with these devices, that take each other for machines
    device_memory: int | None = None  # bytes that a process may take
    time_limit: float = 300  # seconds for one turn of a contender, its start included

    @classmethod
    def parse(cls, **given: Any) -> Setting:
        """Make a setting; a value that is None or missing gets a default that suits the model and the machine."""
        chosen = {name: value for name, value in given.items() if value is not None}
        chosen.setdefault("device", _devices()[-1])
        chosen.setdefault("model", "tiny" if chosen["device"] == "cpu" else "llama-1b")
        shape = _shape(chosen["model"])
        if chosen.get("inference") and (idle := sorted({"optimizer", "clip"} & chosen.keys())):
            raise OptionError(argument=idle[0], found=chosen[idle[0]], allowed="left out with --inference")
        chosen = {"batch": shape.batch, "seq": shape.seq, **chosen}
        if isinstance(chosen.get("device_memory"), str):
            chosen["device_memory"] = parse_bytes(chosen["device_memory"], "device_memory")
        return cls(**chosen)

    def __post_init__(self) -> None:
        _shape(self.model).check(self.seq)
        for name, allowed in (("precision", PRECISIONS), ("optimizer", OPTIMIZERS), ("activations", ACTIVATIONS)):
            if getattr(self, name) not in allowed:
                raise OptionError(
                    argument=name, found=getattr(self, name), allowed="one of " + ", ".join(map(repr, allowed))
                )
        for name in ("batch", "seq", "steps", "repetitions", "devices", "nodes"):
            if getattr(self, name) < 1:
                raise OptionError(argument=name, found=getattr(self, name), allowed="an int >= 1")
        if self.answer < 0:
            raise OptionError(argument="answer", found=self.answer, allowed="an int >= 0")
        if self.answer and not self.inference:
            raise OptionError(argument="answer", found=self.answer, allowed="given together with --inference")
        if self.answer and not self.shape.answers:
            raise OptionError(argument="model", found=self.model, allowed="one that generates, such as 'llama-1b'")
        for name in ("clip", "time_limit"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise OptionError(argument=name, found=value, allowed="a number > 0")
        if self.device_memory is not None and self.device == "cpu":
            raise UnsupportedError("device_memory limits an accelerator's allocator, and the device is the CPU")
        _check_device(self.device)
        if self.ranks > 1 and self.inference:
            raise UnsupportedError("several devices are compared in training only: leave out --inference or --devices")
        if self.nodes > 1 and self.device != "cpu":
            raise UnsupportedError("nodes are pretended by processes of the CPU: give --device cpu")
        if self.devices > 1 and self.device != "cpu" and self.devices > torch.accelerator.device_count():
            raise OptionError(argument="devices", found=self.devices, allowed="at most the number of this machine's")
        if self.device == "cpu" and self.ranks > (most := max(LEAST_RANKS, usable_cores())):
            named = f"at most {most // self.nodes} on this CPU" + f" with {self.nodes} nodes" * (self.nodes > 1)
            raise OptionError(argument="devices", found=self.devices, allowed=named)

    @property
    def ranks(self) -> int:
        """How many processes a contender has."""
        return self.devices * self.nodes

    @property
    def shape(self) -> Shape:
        """Shape of the model."""
        return _shape(self.model)

    @property
    def dtype(self) -> torch.dtype:
        """Type in which the model's products are computed."""
        return torch.float32 if self.precision == "32-true" else torch.bfloat16

    @property
    def recompute(self) -> bool:
        """Whether blocks are recomputed in backward."""
        return "recompute" in self.activations and not self.inference

    @property
    def further(self) -> int:
        """Forwards of an answer after that of the prompts."""
        return max(0, self.answer - 1)

    def as_dict(self) -> dict[str, Any]:
        """Return the values for JSON."""
        return asdict(self)


def _shape(model: str) -> Shape:
    name, _, layers = model.partition(":")
    if name not in SHAPES or not (layers.isdigit() or model in SHAPES):
        allowed = (
            "one of " + ", ".join(SHAPES) + '; or one of them with another number of layers, such as "llama-8b:24"'
        )
        raise OptionError(argument="model", found=model, allowed=allowed)
    shape = SHAPES[name]
    if layers:
        shape = dataclasses.replace(shape, layers=int(layers))  # type: ignore[type-var]
    for library in shape.needs:
        if importlib.util.find_spec(library) is None:
            raise MissingExtraError(feature=f"model {model!r}", package=library, extra="models")
    return shape


def _devices() -> list[str]:
    """List the device types of this machine, without initializing any: that would take device memory."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]


def _check_device(name: str) -> None:
    if name.partition(":")[0] not in _devices():
        raise OptionError(argument="device", found=name, allowed="one of " + ", ".join(map(repr, _devices())))
    check_supported(torch.device(name))
