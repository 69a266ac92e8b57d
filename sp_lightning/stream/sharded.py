"""Parameters of which this process has a shard: DTensors, as torch's tensor parallelism makes them (shards.py).

Random numbers for a DTensor are drawn on its mesh's device, by whose generator torch gives each shard its own, also
where the shard is on the host: they are drawn for a copy of it, and come down at once.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ..compat.tensors import (
    HOOKS_AFTER_ACCUMULATION,
    ShardForm,
    TorchDispatchMode,
    drawing_for_dtensors,
    draws_at_random,
    exchange_shards,
    is_dtensor,
    is_fully_sharded,
    local_of,
    over_spec,
    spec_of,
    tensor_hooks,
    writes_to,
)
from ..errors import PartitionError, UnsupportedError
from .whole import Whole

_device: Any = Tensor.device.__get__  # where a shard is, also where it seems elsewhere


@dataclass(eq=False, frozen=True)
class Sharded(Whole):
    """A DTensor parameter, whose only part is its shard."""

    is_shard: ClassVar[bool] = True
    form: ShardForm

    @classmethod
    def of(cls, name: str, parameter: nn.Parameter) -> Sharded:
        """Take a DTensor parameter; its shard is told whether it trains."""
        shard = local_of(parameter)
        if type(shard) is not Tensor or shard.layout is not torch.strided or shard.grad_fn is not None:
            raise PartitionError(
                f"{name} is a DTensor whose shard is a {type(shard).__name__} and not a plain dense tensor: use one, "
                "or a plain parameter"
            )
        shard.requires_grad_(parameter.requires_grad)
        return cls(name, parameter, ShardForm(spec_of(parameter)), ((name, shard),))

    def shard_name(self) -> str:
        """Say which shard this process has."""
        spec = self.form.spec
        return f"{spec.placements} at {spec.mesh.get_coordinate()} of {tuple(spec.mesh.shape)}"

    def largest_numel(self) -> int:
        """Return the number of elements of the largest shard, which is the same number on all ranks."""
        spec = self.form.spec
        sizes = list(spec.shape)
        for axis, placement in enumerate(spec.placements):
            if placement.is_shard():
                sizes[placement.dim] = -(-sizes[placement.dim] // spec.mesh.size(axis))
        return math.prod(sizes)


def check_supported(units: Iterable[Any], device: torch.device, refused: dict[str, bool]) -> None:
    """Raise if a parameter of these units is a DTensor that is not streamed so.

    ``refused``: by what DTensors are not streamed with, whether it is in force.
    """
    sharded = [whole for unit in units for whole in unit.wholes if isinstance(whole, Sharded)]
    for whole in sharded:
        if tensor_hooks(whole.parameter) or getattr(whole.parameter, HOOKS_AFTER_ACCUMULATION, None):
            raise UnsupportedError(
                f"{whole.name} is a DTensor with a hook, and hooks get no gradients of one that streams: remove it"
            )
        if found := [what for what, is_so in refused.items() if is_so]:
            raise PartitionError(
                f"{whole.name} is a DTensor, and those are not streamed with {', '.join(found)}: leave that out, call "
                "sp_lightning.stream in a loop of your own, or use plain parameters"
            )
        mesh = whole.form.spec.mesh
        if mesh.device_type != device.type:
            raise PartitionError(
                f"{whole.name} is a DTensor over a mesh of {mesh.device_type!r}, and its module is streamed to "
                f"{device}: make the mesh of that kind of device"
            )
        _check_backends(whole.name, mesh)


def _check_backends(name: str, mesh: Any) -> None:
    """Raise if no group along a mesh could sum what is on the host."""
    from torch.distributed import get_backend_config  # not in each torch

    for group in (mesh.get_group(axis) for axis in range(mesh.ndim)):
        if "cpu:" not in (found := get_backend_config(group)):
            raise PartitionError(
                f"{name} is a DTensor over a mesh whose group has the backend {found!r}, and gradients are clipped and "
                "weights stepped on the host: begin with torch.distributed.init_process_group(), which takes a backend "
                "for the host's tensors as well, before the mesh is made"
            )


def bring_to_host(module: nn.Module) -> None:
    """Move a module's shards to the host, where they are streamed from; the DTensors stay the same objects."""
    for name, child in module.named_modules():
        if is_fully_sharded(child):
            raise PartitionError(
                f"{name or type(child).__name__} is sharded by fully_shard, which gathers whole layers on the device "
                "by itself: leave it out; the devices along the data axis have one host copy, and share gradients"
            )
    for parameter in module.parameters():
        if (moved := _on_host(parameter)) is not None:
            exchange_shards(parameter, moved)


def _on_host(parameter: Any) -> nn.Parameter | None:
    """Return a DTensor parameter over a host copy of its shard; None if it has none on a device."""
    if not is_dtensor(parameter) or parameter.device.type in ("cpu", "meta"):
        return None
    with torch.no_grad():
        moved = nn.Parameter(over_spec(local_of(parameter).cpu(), spec_of(parameter)), parameter.requires_grad)
        if parameter.grad is not None:
            moved.grad = over_spec(local_of(parameter.grad).cpu(), spec_of(parameter.grad))
    return moved


@contextlib.contextmanager
def registering_on_host() -> Iterator[None]:
    """Have shards that modules register in this context on the host: torch makes each on its mesh's device."""
    put: Any = lambda _module, _name, parameter: _on_host(parameter)  # noqa: E731  # annotated to return nothing
    hook = register_module_parameter_registration_hook(put)
    try:
        with drawing_on_mesh():
            yield
    finally:
        hook.remove()


def drawing_on_mesh() -> contextlib.AbstractContextManager[None]:
    """Have random numbers for shards on the host be drawn on their mesh's device in this context."""
    return drawing_for_dtensors(DrawnOnDevice)


class DrawnOnDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Has operators that draw at random run on a device, for tensors that are on the host."""

    def __init__(self, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, there = kwargs or {}, list(args)
        for index, shard in enumerate(args):
            if draws_at_random(func) and isinstance(shard, Tensor) and shard.is_cpu:
                there[index] = torch.empty_strided(
                    shard.shape, shard.stride(), dtype=shard.dtype, device=self.device
                ).copy_(shard)
        made = func(*there, **kwargs)
        if there[0] is args[0]:
            return made
        if writes_to(func, 0):
            return args[0].copy_(there[0])
        return type(made)(each.cpu() for each in made) if isinstance(made, (tuple, list)) else made.cpu()
