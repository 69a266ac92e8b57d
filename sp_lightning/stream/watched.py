"""Tensors over a weight's host bytes: which functions of them wait, and which get the device's tensor in their place.

Between steps they are host tensors. Inside a step they are the device's: where autograd records what is read of them,
where a function gets them together with tensors on the device, inside the call of a streamed module, and in the code of
a Trainer's step, unless a function gets them together with tensors on the host.
"""

from __future__ import annotations

import weakref
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from ..compat.dynamo import never_compiled_hook
from ..compat.torch import without_dispatch
from .gradients import backwards, recover, through_hooks
from .host_gradient import HostGradient
from .lazy import (
    ARRAYS,
    METADATA,
    Copies,
    Lazy,
    compiles_own_step,
    data_of,
    found_in,
    has_others,
    replaced,
    requires_grad_of,
    set_data,
    set_requires_grad,
    shares_bytes,
    version_of,
    writes,
)
from .leaf import (
    NO_CONTEXT,
    Weight,
    call_with_leaves,
    edge_of,
    has_form_of,
    using,
    weights,
)

# Functions that make a tensor like a weight, and record nothing: state, by `full_like`, and sums of gradients, by
# `zeros_like`. `ones_like` is not among them: a mask of pruning meets what was computed of the weight.
MAKING = {torch.rand_like, torch.randn_like, torch.randint_like, torch.full_like, torch.zeros_like, torch.empty_like}
MOVING = {Tensor.to, Tensor.cuda}  # functions by which modules move their parameters
FREEZING = {Tensor.requires_grad_, set_requires_grad}
PLACE: set[Any] = {Tensor.device.__get__, Tensor.is_cuda.__get__}  # type: ignore[attr-defined]
STRIDING = {Tensor.as_strided, torch.as_strided}

# Functions that are about the bytes on the host, also where autograd would record them.
_OF_BYTES = "detach detach_ data_ptr untyped_storage storage tolist item is_contiguous copy_ is_shared share_memory_"
_OF_BYTES += " get_device is_set_to __reduce_ex__ __deepcopy__ __repr__ __format__"
ON_HOST: set[Any] = {*ARRAYS, data_of, *(getattr(Tensor, name) for name in _OF_BYTES.split())}


class Watched(Lazy):
    """A mixin for tensors over a weight's host bytes: functions of them and of their views wait for a pending step."""

    alias_of: Weight | None = None  # the weight over whose bytes this tensor is; None for the parameter itself

    def weight_of(self) -> Weight | None:
        """Return the streamed weight that has this tensor's bytes; None for a copy, or once the stream has ended."""
        if (own := weights.get(id(self))) is not None:
            return own
        weight = self.alias_of
        return weight if weight is not None and weights.get(id(weight.host)) is weight else None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if compiles_own_step():
            with without_dispatch():
                return func(*args, **(kwargs or {}))
        if backwards:
            recover()
        if func in METADATA:
            with without_dispatch():
                weight = weights.get(id(args[0])) if args else None
                if func in PLACE and weight is not None:
                    window = weight.unit.window
                    return func(weight.leaf if window.is_in_call or window.is_in_step else args[0])
                if func in FREEZING and weight is not None:
                    return _freeze(func, weight, args, kwargs or {})
                return func(*args, **(kwargs or {}))
        return NotImplemented if has_others(types) else cls._run(func, types, args, kwargs or {})

    @classmethod
    @never_compiled_hook
    def _run(cls, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run a function of torch's on the host, or in a step on the device with leaves in place of parameters."""
        if func is torch.autograd.grad:
            return _differentiate(*args, **kwargs)
        if func is torch.autograd.backward:  # with dispatch: the user's hooks run inside
            args, kwargs = replaced((args, kwargs), Tensor, edge_of)
            return func(*args, **kwargs)
        is_own = is_in_own_call(args[0] if args else None)
        if not is_own and (func in ON_HOST or not is_inside_step(func, args, kwargs)):
            return super().__torch_function__(func, types, args, kwargs)
        is_read = not writes(func) and "out" not in kwargs
        found = streamed_in((args, kwargs))
        shards = [weight.unit for weight in found if weight.is_shard]
        copies = Copies()  # of views of the user's, on the device

        def on_device(tensor: Any) -> Any:
            """Return the leaf or device tensor that the function gets in an argument's place."""
            weight = tensor.weight_of() if isinstance(tensor, Watched) else None
            if weight is None:
                return _to_device(found[0].leaf.device, tensor) if is_read and found else tensor
            if tensor is not weight.host:
                tensor.before()
                with without_dispatch():
                    return copies.add(tensor, tensor.to(weight.leaf.device))
            sync_requires_grad(weight)
            return weight.leaf

        own = weights.get(id(args[0])) if args else None
        args, kwargs = replaced((args, kwargs), Tensor, on_device)
        if func in STRIDING and own is not None and not own.is_shard:
            args, kwargs = _as_strided_arguments(own, *args, **kwargs)
        with without_dispatch(), using(shards) if shards else NO_CONTEXT:
            result = call_with_leaves(func, args, kwargs)
        result = copies.keep_writes(result)
        # The parameter and not its leaf: nothing would keep the leaf's unit on the device for the next function.
        return next((weight.host for weight in found if weight.leaf is result), result)

    def before(self) -> None:
        """Wait for pending steps of the unit and copies of its slab, so that the host may use the bytes."""
        if (weight := self.weight_of()) is not None:
            weight.unit.before_host_access(weight)

    def after(self, func: Any, result: Any) -> None:
        """Note writes by arrays and copies by `weight.to`, and make results over the same bytes wait as well."""
        if (weight := self.weight_of()) is None:
            return
        if func in ARRAYS:
            weight.unit.epoch += 1  # the user is about to write
            weight.unit.is_exposed = True
        if func in MOVING and id(self) == id(weight.host) and has_form_of(weight, result):
            weight.moved = weakref.ref(result)
        for tensor in result if isinstance(result, (list, tuple)) else (result,):
            if type(tensor) is Tensor and shares_bytes(tensor, weight.value):
                tensor.__class__ = Alias
                tensor.alias_of, tensor.version = weight, version_of(tensor)  # type: ignore[attr-defined]
                is_detached = func is Tensor.detach and id(self) == id(weight.host)
                tensor.is_detached = is_detached  # type: ignore[attr-defined]
                weight.aliases[id(tensor)] = tensor


class Alias(Watched, Tensor):
    """A tensor of the user's over a weight's host bytes, such as a view or `weight.detach()`."""

    version: int  # its version when a write was noted last
    is_detached: bool  # whether it is `weight.detach()`

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Set `requires_grad`. A `weight.detach()` becomes a parameter, as `nn.Parameter(weight)` expects."""
        with without_dispatch():
            super().requires_grad_(requires_grad)
        if (weight := self.alias_of) is not None:
            weight.aliases.pop(id(self), None)  # torch swaps no tensor that something refers to weakly
            if self.is_detached:
                self.__class__ = type(weight.host)  # type: ignore[assignment]
        return self

    def keep(self, before: Tensor) -> None:
        """Move this view to memory with the weight's old bytes: the weight is about to get other data."""
        form = self.storage_offset(), self.size(), self.stride()
        set_data(self, torch.empty(0, dtype=self.dtype, device=before.device).set_(before.untyped_storage(), *form))
        self.alias_of = None

    def after(self, func: Any, result: Any) -> None:
        """Note writes to this view, after which the unit on the device is stale."""
        super().after(func, result)
        if (weight := self.weight_of()) is not None and version_of(self) != self.version:
            self.version = version_of(self)
            weight.unit.epoch += 1  # a view by `.data` has a version of its own

    def plain(self) -> Tensor:
        """Wait for the bytes, and return a plain tensor over them."""
        self.before()
        with without_dispatch():
            return self.detach().requires_grad_(self.requires_grad) if self.is_leaf else self.view_as(self)

    def __repr__(self, *_: Any, **__: Any) -> str:  # type: ignore[override]
        return repr(self.plain())  # as a plain run prints it


def _differentiate(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Implement `torch.autograd.grad` for parameters among the inputs: gradients of leaves, passed through hooks."""
    params = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    found = torch.autograd.grad(outputs, replaced(params, Tensor, edge_of), *args, **kwargs)
    return tuple(
        through_hooks(param, grad) if grad is not None and id(param) in weights else grad
        for param, grad in zip(params, found, strict=True)
    )


def _to_device(device: torch.device, tensor: Any) -> Any:
    """Copy a dense host tensor to the device, for a function that has a weight there; a 0-d tensor stays. Blocks."""
    if not tensor.ndim or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return tensor
    if isinstance(tensor, HostGradient):
        tensor = tensor.plain()
    with without_dispatch():
        return tensor.to(device)


def _as_strided_arguments(weight: Weight, leaf: Any, size: Any, stride: Any, storage_offset: Any = None) -> Any:
    """Return the arguments of `as_strided` for a leaf: the offset is moved from the host's storage to the unit's."""
    if storage_offset is not None and not weight.is_lent:  # a tensor lent in the host's type has its own storage
        storage_offset += weight.form[2] - weight.value.storage_offset()
    return (leaf, size, stride, storage_offset), {}


def _reduce_alias(alias: Alias) -> Any:
    """Pickle a copy of a weight's view for another process: to share the view would move bytes out of the slab."""
    return reduce_tensor(alias.plain().clone())  # type: ignore[no-untyped-call]


ForkingPickler.register(Alias, _reduce_alias)


def is_in_own_call(tensor: Any) -> bool:
    """Whether a tensor is a streamed parameter with a call of its unit under way, when its bytes are the leaf's."""
    weight = weights.get(id(tensor))
    return weight is not None and bool(weight.unit.depth)


def streamed_in(value: Any) -> list[Weight]:
    """List the streamed weights whose bytes tensors in a value have."""
    return [weight for tensor in found_in([value], Watched) if (weight := tensor.weight_of()) is not None]


def is_inside_step(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a function gets weights on the device and not on the host: the rule is at the top of this file."""
    tensors = found_in((args, kwargs), Tensor)
    watched: list[Any] = [each for each in tensors if isinstance(each, Watched)]
    if func not in MAKING and torch.is_grad_enabled() and any(each.requires_grad for each in watched):
        return True
    found = streamed_in(watched)
    if any(weight.unit.window.is_in_call for weight in found):
        return True
    plain = [each for each in tensors if not isinstance(each, Watched)]
    others = {each.device for each in plain if each.ndim or each.device.type != "cpu"}  # a number is on the host
    if others:
        return any(weight.leaf.device.type != "cpu" and weight.leaf.device in others for weight in found)
    is_in_step = any(weight.unit.window.is_in_step for weight in found)
    return is_in_step and all(id(each) in weights for each in watched)  # writes to an alias go to the host


@never_compiled_hook
def _freeze(func: Any, weight: Weight, args: Any, kwargs: Any) -> Any:
    """Set `requires_grad` of a parameter, and of its leaf."""
    result = func(*args, **kwargs)
    sync_requires_grad(weight)
    return result


def sync_requires_grad(weight: Weight) -> None:
    """Set `requires_grad` of a leaf to that of its parameter, and count the unit's weights that train."""
    if requires_grad_of(weight.leaf) != weight.host.requires_grad:
        set_requires_grad(weight.leaf, weight.host.requires_grad)
        if weight.slots:  # gradients are sent when as many have arrived as weights train
            weight.unit.trained += 1 if weight.host.requires_grad else -1
