"""Parameters that consist of other tensors: quantised ones, of any library, and DTensors.

Quantised ones, none of which is trained:

- The tensors travel with their unit as weights like others. On the device the parameter's own class makes it up again
  of them, after each load: they are plain tensors, so that code which kept the whole has its bytes. On the host the
  parameter is what it was, over bytes in the unit's slab.
- The modules have the whole on the device while its unit's call is under way. Elsewhere the user's code has the
  parameter. While any call is under way, the parameter has a class whose functions and attributes are those of the
  whole on the device; its unit is visited for each. What writes to it writes to the host.

DTensors, as torch's tensor parallelism makes them, of which this process has a shard:

1. The DTensor stays the user's parameter, in all places and in the optimizer. Its local tensor, the shard, travels with
   its unit like any weight. The leaf is a DTensor over the shard's bytes on the device, so autograd sums its uses, in
   their layouts, as in a plain run.
2. No layout is changed on the way down: a gradient that is a partial sum stays this rank's own over all accumulated
   batches. `.grad` is a DTensor over the gradient of the shard. Gradients of two layouts for one sum are refused: torch
   would choose the layout of the sum by the operator. A gradient of another shape than the shard's (of a vocabulary
   that is cut, torch makes the whole one on each rank) comes down by itself, at once.
3. An optimizer steps the DTensors by its own code on the host, and so are gradients clipped: norms are those of the
   mesh, by its group, which needs a backend for the host's tensors. State is what torch makes of the DTensors.
4. Where an operator writes to a DTensor, torch moves the version of the DTensor alone, or none (`_foreach_add_`); where
   one writes to the shard, that of the shard. After each the bytes on the device are stale.
5. Of several devices those of a group have the same shards: the mean of their gradients. As under DDP over local
   tensors (`DTensor.from_local`), a gradient is first laid out as the parameter is, in each backward: the mean of
   partial sums is none that any plain run has.

A shard travels in its own type: autocast casts it on the device, at each use, as in a plain run.

Random numbers for a DTensor are drawn on its mesh's device, by whose generator torch gives each shard its own, also
where the shard is on the host: they are drawn for a copy of it, and come down at once.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, strided
from torch.nn.modules.module import register_module_parameter_registration_hook

from ..compat.tensors import (
    IS_PARAMETER,
    ShardForm,
    drawing_for_dtensors,
    draws_at_random,
    exchange_shards,
    flattened,
    is_dtensor,
    is_fully_sharded,
    laid_out,
    local_of,
    over_spec,
    spec_of,
    writes_to,
)
from ..compat.torch import (
    HOOKS_AFTER_ACCUMULATION,
    TorchDispatchMode,
    hooks_of_gradient,
    tree_map_only,
    without_dispatch,
)
from ..errors import PartitionError, UnsupportedError
from ..options import Options
from .lazy import found_in, grad_of, requires_grad_of, set_grad, writes
from .leaf import Slot, Weight, using


@dataclass(eq=False, frozen=True)
class Whole:
    """A parameter that consists of several tensors, which are weights of its unit."""

    name: str
    parameter: nn.Parameter
    form: Any  # makes the parameter again of its parts
    parts: tuple[tuple[str, Any], ...]  # names and tensors


def whole_of(name: str, param: nn.Parameter) -> Whole:
    """Take apart a frozen parameter that consists of several tensors; raise if that is not possible."""
    kind = type(param).__name__
    if param.requires_grad:
        raise PartitionError(
            f"{name} is a {kind}, which consists of several tensors and requires grad: it can be streamed, but not "
            f"trained. Freeze it (requires_grad_(False)) and train adapters, or use a plain parameter"
        )
    try:
        with without_dispatch():
            form, parts = flattened(param, name)
        if not parts:
            raise ValueError("it has none")
    except Exception as error:
        raise PartitionError(
            f"{name} is a {kind}, which cannot be taken apart into the tensors that it consists of ({error}): use a "
            "plain parameter"
        ) from error
    for part_name, part in parts:
        if not isinstance(part, Tensor) or isinstance(part, nn.Parameter) or part.layout is not strided:
            raise PartitionError(
                f"{part_name}, of which {name} consists among others, is a {type(part).__name__} and not a plain dense "
                f"tensor, so the {kind} cannot be streamed: use a plain parameter"
            )
    return Whole(name, param, form, tuple(parts))


# ---- quantised parameters while they stream


class Part(Weight):
    """One of the tensors that a weight consists of."""

    is_part = True

    def __init__(self, name: str, tensor: Any) -> None:
        super().__init__(name, tensor, [], tensor.dtype)

    def make_leaf(self) -> None:
        """Make a plain tensor, of which the quantised weight is rebuilt on the device."""
        self.there = self.leaf = self.blank.detach()  # type: ignore[assignment]


class WholeWeight:
    """A parameter that consists of several tensors, and what stands for it on the device."""

    def __init__(self, whole: Whole, slots: list[Slot], parts: list[Weight], device: torch.device) -> None:
        self.name, self.host = whole.name, whole.parameter
        self._form, self._parts, self._device = whole.form, parts, device
        self._slots, self.unit = slots, parts[0].unit
        self._there: Any = None  # the weight on the device, while the modules have it

    def on_device(self) -> Any:
        """Load the unit, and return the weight made of its parts on the device; a kept result keeps their memory."""
        if self._there is not None:
            return self._there
        self.unit.window.visit(self.unit)
        made = self._form.whole(iter([part.there for part in self._parts]), self._device)
        setattr(made, IS_PARAMETER, True)
        return made

    def bind(self) -> None:
        """Put the weight made of its parts on the device into the modules; raise if it was set to train."""
        if requires_grad_of(self.host):
            raise UnsupportedError(
                f"requires_grad of {self.name} was set to True, but it is a {type(self.host).__name__}, which consists"
                " of several tensors: it can be streamed, but not trained. Train adapters, or a plain parameter"
            )
        self._there = self.on_device()
        self._exchange(self.host, self._there)

    def unbind(self) -> None:
        """Put the user's parameter back into the modules."""
        self._exchange(self._there, self.host)
        self._there = None

    def _exchange(self, there: Any, given: Any) -> None:
        """Replace one tensor by another in the modules, unless the user's code has put a third there."""
        for holder, key in self._slots:
            if holder.get(key) is there:
                holder[key] = given


# ---- quantised parameters that code of others reads while a call is under way

read: dict[int, WholeWeight] = {}  # weights that reads find on the device, by the id of the parameter


class ReadWhole:
    """A mixin for the class of a quantised parameter: reads get the weight on the device, writes the host's."""

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        """Do nothing: the library's class may register each of its subclasses."""

    def __getattribute__(self, name: str) -> Any:
        own: dict[str, Any] = object.__getattribute__(self, "__dict__")
        is_own = name in own and not isinstance(own[name], Tensor)
        is_writing = name.endswith("_") and not name.endswith("__")
        if is_own or is_writing or name == "__dict__":
            return object.__getattribute__(self, name)
        return getattr(read[id(self)].on_device(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = [read[id(host)] for host in found_in((args, kwargs), ReadWhole)]
        if writes(func):
            show_host(found)
            try:
                return func(*args, **(kwargs or {}))
            finally:
                show_device(found)
        units = list({whole.unit: None for whole in found})
        with using(units):
            args, kwargs = tree_map_only(ReadWhole, lambda host: read[id(host)].on_device(), (args, kwargs or {}))
            return func(*args, **kwargs)

    __torch_dispatch__ = __torch_function__


def show_device(wholes: Sequence[WholeWeight]) -> None:
    """Change the class of parameters, so that code that reads them gets the weights on the device."""
    for whole in wholes:
        if id(whole.host) not in read:
            read[id(whole.host)] = whole
            whole.host.__class__ = _reading(type(whole.host))


def show_host(wholes: Sequence[WholeWeight]) -> None:
    """Give parameters their own class back, so that code that reads them gets the bytes on the host."""
    for whole in wholes:
        if read.pop(id(whole.host), None) is not None:
            whole.host.__class__ = type(whole.host).__mro__[2]


@functools.cache
def _reading(kind: type) -> type:
    """Make the subclass of a parameter's class whose reads get the weight on the device."""
    return type(kind.__name__, (ReadWhole, kind), {"__slots__": ()})


# ---- DTensors


@dataclass(eq=False, frozen=True)
class Sharded(Whole):
    """A DTensor parameter, whose only part is its shard."""

    form: ShardForm

    @property
    def shard(self) -> Tensor:
        """The shard that this process has."""
        return self.parts[0][1]  # type: ignore[no-any-return]

    @classmethod
    def of(cls, name: str, parameter: nn.Parameter) -> Sharded:
        """Describe a DTensor parameter, and set its shard's requires_grad; raise if the shard is no plain tensor."""
        shard = local_of(parameter)
        if type(shard) is not Tensor or shard.layout is not torch.strided or shard.grad_fn is not None:
            raise PartitionError(
                f"{name} is a DTensor whose shard is a {type(shard).__name__} and not a plain dense tensor: use one, "
                "or a plain parameter"
            )
        shard.requires_grad_(parameter.requires_grad)
        return cls(name, parameter, ShardForm(spec_of(parameter)), ((name, shard),))

    def shard_name(self) -> str:
        """Describe which shard of the DTensor this process has, for a comparison of ranks."""
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


class ShardWeight(Weight):
    """A DTensor parameter of the user's: its shard travels, and a DTensor over the shard's bytes is its leaf."""

    is_shard = True

    def __init__(self, whole: Sharded, slots: list[Slot], in_a_group: bool) -> None:
        self.shard = whole.shard
        super().__init__(whole.name, whole.parameter, slots, whole.parameter.dtype)
        self.nbytes = self.shard.nbytes
        self.spec = whole.form.spec
        self._as_parameter = in_a_group  # whether gradients are laid out as the parameter is (Rule 5)
        self._spec_of_gradient: Any = None  # of the gradient that is under way

    @property
    def bytes_of_host(self) -> Tensor:
        return self.shard

    def make_leaf(self) -> None:
        """Make the leaf: a DTensor over the shard's bytes on the device."""
        self.there = self.blank.detach()
        self.leaf = over_spec(self.there, self.spec)  # type: ignore[assignment]
        self.leaf.__dict__ = self.host.__dict__

    def received(self, grad: Tensor) -> Tensor | None:
        """Return this rank's part of a gradient of backward; None if its shape differs and it was added on the host."""
        if self._as_parameter:
            grad = grad.redistribute(placements=self.spec.placements)  # type: ignore[attr-defined]
        spec = spec_of(grad)
        with without_dispatch():
            there = grad_of(self.host)
        if there is not None and spec_of(there).placements != spec.placements:
            raise UnsupportedError(
                f"the gradient of {self.name} arrived as {spec.placements}, where the one that it would be added to is"
                f" {spec_of(there).placements}: call zero_grad() between them"
            )
        self._spec_of_gradient = laid_out(spec, self.spec)
        local = local_of(grad).detach()
        if local.shape == self.value.shape:
            return local
        self._add(local.to("cpu"))
        return None

    def deposit(self, content: Any, is_total: bool) -> None:
        """Add a gradient of the shard to `.grad`, or put it there if it is the total already. Blocks for its bytes."""
        with torch.no_grad():
            self._add(content.wait_true(), content if is_total else None)

    def _add(self, local: Tensor, content: Any = None) -> None:
        """Add this rank's part to `.grad`; with `content`, or without a `.grad`, make a new DTensor of it."""
        with without_dispatch():
            there = grad_of(self.host)
            if there is not None and content is None:
                local_of(there).add_(local)
                there.content = None
                return
            made: Any = over_spec(local, self._spec_of_gradient or laid_out(self.spec, self.spec))
            made.content = content
            set_grad(self.host, made)


def on_host(grad: Tensor) -> Tensor:
    """Return a DTensor gradient with its shard on the host: itself, or a DTensor over a copy of the shard."""
    local = local_of(grad)
    return grad if local.device.type == "cpu" else over_spec(local.cpu(), spec_of(grad))


# ---- DTensors before they stream


def check_supported(shards: Iterable[Sharded], device: torch.device, options: Options) -> None:
    """Raise if a DTensor has a hook, a set option takes no DTensors, or its mesh is not of the device's kind."""
    refused = {
        "master_weights=True": options.master_weights,
        "optimizer_device='device'": options.optimizer_device == "device",
        "compile_units=True": options.compile_units,
        "disk= or host_budget=": options.uses_files,
    }
    for whole in shards:
        if hooks_of_gradient(whole.parameter) or getattr(whole.parameter, HOOKS_AFTER_ACCUMULATION, None):
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
    """Return a DTensor parameter with the shard and gradient of this one on the host; None if nothing is to move."""
    if not is_dtensor(parameter) or parameter.device.type in ("cpu", "meta"):
        return None
    with torch.no_grad():
        moved = nn.Parameter(over_spec(local_of(parameter).cpu(), spec_of(parameter)), parameter.requires_grad)
        if parameter.grad is not None:
            moved.grad = over_spec(local_of(parameter.grad).cpu(), spec_of(parameter.grad))
    return moved


@contextlib.contextmanager
def registering_on_host() -> Iterator[None]:
    """Move DTensors that modules register in this context to the host: torch makes them on the mesh's device."""
    put: Any = lambda _module, _name, parameter: _on_host(parameter)  # noqa: E731  # annotated to return nothing
    hook = register_module_parameter_registration_hook(put)
    try:
        with drawing_on_mesh():
            yield
    finally:
        hook.remove()


def drawing_on_mesh() -> contextlib.AbstractContextManager[None]:
    """Draw random numbers for shards on the host by the generator of their mesh's device, in this context."""
    return drawing_for_dtensors(DrawnOnDevice)


class DrawnOnDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs random operators on device copies of host tensors, and copies the results back to the host."""

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
