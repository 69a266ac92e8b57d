"""A parameter of which this process has a shard: a DTensor, as torch's tensor parallelism makes it.

1. The DTensor stays the user's parameter, in all places and in the optimizer. Its local tensor, the shard, is a weight
   of its unit like any other: it is a leaf, its bytes lie in the slab, its gradient arrives in its ``.grad``. So the
   host has this rank's shard, once, and no other.
2. During a visit a DTensor over the shard's device bytes stands in the slots. It is itself an output of the unit's node
   (gradient_nodes.py), so its uses are summed as those of a leaf are, and what arrives is the DTensor that a plain run
   accumulates. No layout is changed on the way: a gradient that is a partial sum (a norm under sequence parallelism)
   stays this rank's own over all accumulated batches, and is reduced where torch reduces it in a plain run.
3. ``.grad`` is a DTensor over the shard's gradient, with the layout in which that arrived. Gradients of two layouts for
   one sum are refused: torch would choose the layout of the sum by the operator. A gradient of another shape than the
   shard's (of a vocabulary that is cut, torch makes the whole one on each rank) is *apart*: it comes down by itself, at
   once, and is added on the host.
4. An optimizer steps the DTensors by its own code on the host, and so are gradients clipped: norms are those of the
   mesh, by its group, which needs a backend for the host's tensors. State is what torch makes of the DTensors.
5. Where an operator writes to a DTensor, torch moves the version of the DTensor alone. So each such operator also moves
   that of the shard, by which the device's bytes are known to be stale (host_copy.py, Rule 4).
6. Of several devices those of a group have the same shards: one host copy of each, and the mean of their gradients. As
   under DDP over local tensors (``DTensor.from_local``), a gradient is first laid out as the parameter is, in each
   backward: the mean of partial sums is none that any plain run has.
7. A shard travels in its own type: autocast casts it on the device, at each use, as in a plain run.
8. Random numbers for a DTensor are drawn on its mesh's device, by whose generator torch gives each shard its own, also
   where the shard is on the host: they are drawn for a copy of it, and come down at once.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ..compat.patches import drawing_for_dtensors
from ..compat.tensors import (
    HOOKS_AFTER_ACCUMULATION,
    ShardForm,
    TorchDispatchMode,
    draws_at_random,
    exchange_shards,
    is_dtensor,
    is_fully_sharded,
    local_of,
    over_spec,
    spec_of,
    tensor_hooks,
    without_dispatch,
    writes_to,
)
from ..errors import PartitionError, UnsupportedError
from .whole import Whole, part_of

_grad: Any = Tensor.grad
_device: Any = Tensor.device.__get__  # where a shard is, also where it seems elsewhere


@dataclass(eq=False)
class GradientLayout:
    """The layout of a shard's gradient, and the DTensor in which the user sees it (Rule 3)."""

    spec: Any = None  # of the gradient that is there, or under way
    shown: Tensor | None = None
    is_apart: bool = False
    as_parameter: bool = False  # whether gradients are laid out as the parameter is (Rule 6)


@dataclass(eq=False, frozen=True)
class Sharded(Whole):
    """A DTensor parameter, whose only part is its shard (Rule 1)."""

    is_shard: ClassVar[bool] = True
    form: ShardForm
    layout: GradientLayout = field(default_factory=GradientLayout)

    @classmethod
    def of(cls, name: str, parameter: nn.Parameter) -> Sharded:
        """Take a DTensor parameter; its shard is told whether it trains."""
        shard = local_of(parameter)
        if type(shard) is not Tensor or shard.layout is not torch.strided or shard.grad_fn is not None:
            raise PartitionError(
                f"{name} is a DTensor whose shard is a {type(shard).__name__} and not a plain dense tensor: use one, "
                "or a plain parameter"
            )
        sharded = cls(name, parameter, ShardForm(spec_of(parameter)), ((name, shard),))
        sharded.follow()
        return sharded

    # ---- the two faces

    def begin(self) -> None:
        """Begin to stream: the shard, which is on the host now, becomes the leaf (Rule 1)."""
        part_of(self).__class__ = nn.Parameter
        drawing_for_dtensors().install(_drawing)
        self.set_gradient(_grad.__get__(self.parameter))

    def follow(self) -> None:
        """Have the shard train where the parameter does."""
        if (shard := part_of(self)).requires_grad is not self.parameter.requires_grad:
            shard.requires_grad_(self.parameter.requires_grad)

    def end(self) -> None:
        """Leave the shard to the DTensor, and its gradient."""
        shard = part_of(self)
        if type(shard) is Tensor:  # it was not begun
            return
        self.gradient(shard.grad)  # stays with the parameter
        shard.grad = None
        shard.requires_grad_(False)
        shard.__class__ = Tensor
        drawing_for_dtensors().remove()

    def over(self, view: Tensor) -> Tensor:
        """Return a DTensor over the shard's bytes on the device (Rule 2)."""
        with torch.inference_mode(False):
            return self._over(view)

    def _over(self, shard: Tensor) -> Tensor:
        return over_spec(shard, self.form.spec)

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

    # ---- gradients (Rules 2 and 3)

    def gradient(self, local: Tensor | None) -> Tensor | None:
        """Return the DTensor of the shard's gradient, which becomes the parameter's ``.grad``."""
        layout = self.layout
        with without_dispatch():
            found = _grad.__get__(self.parameter)
        if layout.is_apart and found is not layout.shown:
            self.set_gradient(found)
        elif layout.is_apart:
            return found  # type: ignore[no-any-return]
        elif found is not None and found is not layout.shown:  # autograd came to the parameter itself
            if local is None or (layout.shown is not None and local_of(layout.shown) is local):
                self.set_gradient(found)
            else:
                with torch.no_grad():
                    self.set_gradient(over_spec(local, layout.spec) + found)
        elif local is None:
            self._show(None)
        elif layout.shown is None or local_of(layout.shown) is not local:
            self._show(over_spec(local, layout.spec or self.form.spec))  # none came from this rank, but others' mean
        return layout.shown

    def set_gradient(self, value: Tensor | None) -> None:
        """Take what the user, or autograd, gives the parameter as its gradient."""
        shard, layout = part_of(self), self.layout
        if value is not None and local_of(value).device != (device := _device(shard)):
            value = over_spec(local_of(value).to(device), spec_of(value))
        self._show(value)
        layout.spec = None if value is None else spec_of(value)
        local = None if value is None else local_of(value)
        layout.is_apart = local is not None and local.shape != shard.shape
        shard.grad = None if layout.is_apart else local

    def _show(self, value: Tensor | None) -> None:
        with without_dispatch():
            _grad.__set__(self.parameter, value)
        self.layout.shown = value


def refuse(name: str, refused: dict[str, bool]) -> None:
    """Raise PartitionError for a DTensor of this name, if any of what DTensors are not streamed with is in force."""
    found = [what for what, is_so in refused.items() if is_so]
    if found:
        raise PartitionError(
            f"{name} is a DTensor, and those are not streamed with {', '.join(found)}: leave that out, call "
            "sp_lightning.stream in a loop of your own, or use plain parameters"
        )


def has_shards(module: nn.Module, with_parts: bool) -> bool:
    """Whether any parameter of a module, or also of its parts, is a DTensor."""
    return any(map(is_dtensor, module.parameters(recurse=with_parts)))


def check_supported(
    units: Iterable[Any], device: torch.device | None, in_a_group: bool, refused: dict[str, bool]
) -> list[Any]:
    """Raise if any of these units' parameters is a DTensor that is not streamed with these options.

    Returns the meshes of those that are, along which the ranks meet: none on a device that is a dry run's (None).

    ``refused``: by what is said of each, whether it is in force. ``in_a_group``: whether devices share gradients.
    """
    sharded = [whole for unit in units for whole in unit.wholes if isinstance(whole, Sharded)]
    if not sharded:
        return []
    for whole in sharded:
        whole.layout.as_parameter = in_a_group
        if tensor_hooks(whole.parameter) or getattr(whole.parameter, HOOKS_AFTER_ACCUMULATION, None):
            raise UnsupportedError(
                f"{whole.name} is a DTensor with a hook, and hooks get no gradients of one that streams: remove it"
            )
    name, mesh = sharded[0].name, sharded[0].form.spec.mesh
    refuse(name, refused)
    if device is None:
        return []
    if mesh.device_type != device.type:
        raise PartitionError(
            f"{name} is a DTensor over a mesh of {mesh.device_type!r}, and its module is streamed to {device}: make "
            "the mesh of that kind of device"
        )
    meshes = [*dict.fromkeys(whole.form.spec.mesh for whole in sharded)]  # on all ranks in the same order
    _check_backends(name, meshes)
    return meshes


def _check_backends(name: str, meshes: Iterable[Any]) -> None:
    """Raise if no group along one of these meshes could sum what is on the host (Rule 4)."""
    from torch.distributed import get_backend_config  # not in each torch

    for group in (mesh.get_group(axis) for mesh in meshes for axis in range(mesh.ndim)):
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
    drawing_for_dtensors().install(_drawing)
    try:
        yield
    finally:
        drawing_for_dtensors().remove()
        hook.remove()


@contextlib.contextmanager
def _drawing(tracker: Any, spec: Any, generator: Any = None) -> Iterator[None]:
    """Draw random numbers for a DTensor as torch does, but never on the host for a device (Rule 8)."""
    with drawing_for_dtensors().original(tracker, spec, generator), DrawnOnDevice(spec.mesh.device_type):
        yield


class DrawnOnDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Has operators that draw at random run on a device, for tensors that are on the host (Rule 8)."""

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
