"""Private names around tensors that consist of tensors, and modules that have some. Tried with torch 2.11 and 2.14."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import UnsupportedError
from .torch import schema_of

# ---- tensors that consist of tensors: those of libraries that quantise

# Without these a quantised weight of any library could only be refused. torch's compiler knows them by the same names.
FLATTEN, IS_PARAMETER = "__tensor_flatten__", "_is_param"


def consists_of_tensors(tensor: Tensor) -> bool:
    """Whether a tensor's values lie in other tensors, which are its attributes."""
    return hasattr(type(tensor), FLATTEN)


class Form(NamedTuple):
    """The recipe to rebuild a tensor from the tensors that it consists of; refers to none of them."""

    kind: Any
    context: Any
    shape: torch.Size
    stride: tuple[int, ...]
    parts: dict[str, Any]  # the recipe of each inner tensor; None for a plain one

    def whole(self, parts: Iterator[Tensor], device: torch.device) -> Tensor:
        """Rebuild the tensor from its innermost tensors, which lie on this device, taken in order."""
        inner = {name: next(parts) if form is None else form.whole(parts, device) for name, form in self.parts.items()}
        made: Tensor = self.kind.__tensor_unflatten__(inner, _on_device(device, self.context), self.shape, self.stride)
        return made


def flattened(tensor: Tensor, name: str = "") -> tuple[Any, list[tuple[str, Tensor]]]:
    """Return the recipe of a tensor that consists of others, and its innermost tensors by path, from ``name`` on."""
    if is_dtensor(tensor):
        return ShardForm(spec_of(tensor)), [(name, local_of(tensor))]
    names, context = getattr(tensor, FLATTEN)()
    forms: dict[str, Any] = {}
    found: list[tuple[str, Tensor]] = []
    for key in names:
        inner = getattr(tensor, key)
        forms[key], parts = None, [(f"{name}.{key}", inner)]
        if consists_of_tensors(inner):
            forms[key], parts = flattened(inner, f"{name}.{key}")
        found += parts
    return Form(tensor.__class__, context, tensor.size(), tensor.stride(), forms), found


def _on_device(device: torch.device, context: Any) -> Any:
    """Return the context of a flattened tensor with this device in the place of every device."""
    if isinstance(context, torch.device):
        return device
    if isinstance(context, dict):
        return type(context)({key: _on_device(device, value) for key, value in context.items()})
    if isinstance(context, (list, tuple)):
        values = [_on_device(device, value) for value in context]
        return context._make(values) if hasattr(context, "_make") else type(context)(values)
    if is_dataclass(context) and not isinstance(context, type):
        named = {field.name: getattr(context, field.name) for field in fields(context) if field.init}
        moved = {name: device for name, value in named.items() if isinstance(value, torch.device)}
        return replace(context, **moved) if moved else context
    return context


# ---- DTensors: what torch's tensor parallelism makes of parameters

# Without these no shard could lie in a unit, and no gradient keep the layout in which it arrived. The module is
# imported where DTensors are made: importing it takes a second.
_DTENSORS = "torch.distributed.tensor"


def is_dtensor_class(kind: type) -> bool:
    """Whether a class is DTensor, or one derived from it."""
    module = sys.modules.get(_DTENSORS)
    return module is not None and issubclass(kind, module.DTensor)


def is_dtensor(tensor: object) -> bool:
    """Whether a tensor is a DTensor, or of a class derived from it."""
    return is_dtensor_class(type(tensor))


def is_fully_sharded(module: object) -> bool:
    """Whether `fully_shard` was applied to a module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def local_of(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor; wait for a collective that makes it."""
    local: Any = vars(sys.modules[_DTENSORS].DTensor)["_local_tensor"].__get__(tensor)
    return local.wait() if hasattr(local, "trigger_wait") else local  # type: ignore[no-any-return]


def exchange_shards(one: Tensor, other: Tensor) -> None:
    """Swap the local tensors and gradients of two DTensors; references to each, and the attributes of each, stay.

    Unlike ``swap_tensors``, which takes attributes along and refuses tensors with weak references.
    """
    if one.requires_grad:  # a node that no graph has is gone at once
        torch.autograd.graph.get_gradient_edge(one).node.register_prehook(_refuse_graph)
    local: Any = vars(sys.modules[_DTENSORS].DTensor)["_local_tensor"]
    shards = local.__get__(one), local.__get__(other)
    local.__set__(one, shards[1])
    local.__set__(other, shards[0])
    torch._C._swap_tensor_impl(one, other)


def _refuse_graph(_grads: Any) -> None:
    """Raise UnsupportedError in a backward by a graph that was recorded before the module was streamed."""
    raise UnsupportedError(
        "a backward came to a DTensor by a graph that was recorded before its module was streamed, when its shard was "
        "on the device: run the forward again"
    )


def spec_of(tensor: Tensor) -> Any:
    """Return the mesh, the layout and the global shape of a DTensor."""
    return vars(sys.modules[_DTENSORS].DTensor)["_spec"].__get__(tensor)


def over_spec(local: Tensor, spec: Any) -> Tensor:
    """Make a DTensor of a local tensor and a spec, without a gradient between the two."""
    return sys.modules[_DTENSORS].DTensor(local, spec, requires_grad=False)  # type: ignore[no-any-return]


def laid_out(spec: Any, like: Any) -> Any:
    """Return a spec with the layout and type of ``spec``, and the global shape and strides of ``like``."""
    return type(spec)(spec.mesh, spec.placements, tensor_meta=like.tensor_meta._replace(dtype=spec.tensor_meta.dtype))


# Without this numbers for a shard on the host would be the host's, the same for each shard and in each call: torch
# moves on the generator of the mesh's device.
_drawing: list[Any] = []  # torch's own function, once for each context that is open


@contextlib.contextmanager
def drawing_for_dtensors(drawing: Callable[[str], Any]) -> Iterator[None]:
    """Draw random numbers for DTensors inside ``drawing(type of the mesh's device)``, in this context.

    Such contexts may overlap, and end in any order, if all pass the same function.
    """
    tracker = importlib.import_module("torch.distributed.tensor._random").OffsetBasedRNGTracker
    original = _drawing[0] if _drawing else tracker._distribute_region

    @contextlib.contextmanager
    def region(self: Any, spec: Any, generator: Any = None) -> Iterator[None]:
        """Enter torch's own context and ``drawing``'s."""
        with original(self, spec, generator), drawing(spec.mesh.device_type):
            yield

    _drawing.append(original)
    tracker._distribute_region = region
    try:
        yield
    finally:
        _drawing.pop()
        if not _drawing:
            tracker._distribute_region = original


def draws_at_random(operator: Any) -> bool:
    """Whether an operator takes numbers from a random generator."""
    return torch.Tag.nondeterministic_seeded in operator.tags


def writes_to(operator: Any, position: int) -> bool:
    """Whether an operator writes to the argument at this position, by its schema."""
    return schema_of(operator).arguments[position].is_write  # type: ignore[no-any-return]


class ShardForm(NamedTuple):
    """The recipe to rebuild a DTensor from its local tensor."""

    spec: Any

    def whole(self, parts: Iterator[Tensor], device: torch.device) -> Tensor:
        """Rebuild the DTensor from its local tensor, the next of ``parts``."""
        return over_spec(next(parts), self.spec)


# ---- modules that are moved, or converted

# The method by which ``module.to()`` and its relatives convert a module's tensors. Without it weights that are streamed
# would be copied to the device and back, and gradients be left there, where a plain run does nothing.
CONVERT = "_apply"


def convert_tensors(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Convert a module's parameters, buffers and other tensors by a function, in the way of ``module.to``.

    A parameter that consists of tensors stays as it is: torch would make it anew, a DTensor even with the same bytes.
    """
    modules = [] if any(map(is_fully_sharded, module.modules())) else module.modules()  # FSDP looks for its own
    left = []
    for own in [child._parameters for child in modules]:
        apart = {name: one for name, one in own.items() if one is not None and consists_of_tensors(one)}
        if apart:
            left.append((own, [*own], apart))
            for name in apart:
                del own[name]
    try:
        getattr(module, CONVERT)(function)
    finally:
        for own, names, apart in left:
            own.update(apart)
            for name in names:
                own[name] = own.pop(name)  # in the order by which optimizers number parameters


def converts_more(module: nn.Module) -> bool:
    """Whether a module's class has an ``_apply`` of its own, for more than parameters and buffers, as metrics do."""
    return not getattr(type(module), CONVERT).__module__.startswith("torch.")
