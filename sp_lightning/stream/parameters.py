"""The user's parameters while they are streamed: the same objects, with a class whose functions wait for the bytes.

Between steps they are host tensors. Inside a step they are the device's: where autograd records what is read of them,
where a function gets them together with tensors on the device, inside the call of a streamed module, and in the code of
a Trainer's step, unless a function gets them together with tensors on the host.
"""

from __future__ import annotations

import copy
import functools
import weakref
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.multiprocessing.reductions import reduce_tensor

from ..compat.dynamo import compilation, graph_break
from ..compat.tensors import IS_PARAMETER, is_dtensor, is_dtensor_class, local_of, over_spec, spec_of
from ..compat.torch import hooks_of_gradient, storage_id, tree_map_only, without_dispatch
from ..errors import ExactnessError, UnsupportedError
from .gradients import backwards, recover
from .host_gradient import HostGradient, release_gradient
from .lazy import (
    ARRAYS,
    METADATA,
    Lazy,
    compiles_own_step,
    data_of,
    found_in,
    grad_of,
    has_others,
    requires_grad_of,
    set_data,
    set_grad,
    set_requires_grad,
    shares_bytes,
    writes,
)
from .leaf import NO_CONTEXT, Weight, call_with_leaves, check_form, graph_after_close, has_form_of, using, version_of
from .shards import on_host
from .unit import Unit

weights: dict[int, Weight] = {}  # streamed weights, by the id of the parameter
wholes: dict[int, Unit] = {}  # units of parameters that consist of several tensors, by the id of the parameter

PLACE: set[Any] = {Tensor.device.__get__, Tensor.is_cuda.__get__}  # type: ignore[attr-defined]
# Functions that make a tensor like a weight, and record nothing. Adagrad makes its state by `full_like`.
MAKING = {torch.rand_like, torch.randn_like, torch.randint_like, torch.full_like}
FREEZING = {Tensor.requires_grad_, set_requires_grad}
MOVING = {Tensor.to, Tensor.cuda}  # functions by which modules move their parameters
STRIDING = {Tensor.as_strided, torch.as_strided}

# Functions that are about the bytes on the host, also where autograd would record them.
ON_HOST: set[Any] = {*ARRAYS, data_of, Tensor.detach, Tensor.detach_, Tensor.data_ptr, Tensor.untyped_storage}
ON_HOST |= {
    Tensor.storage,
    Tensor.tolist,
    Tensor.item,
    Tensor.__reduce_ex__,
    Tensor.__deepcopy__,
    Tensor.__repr__,
    Tensor.is_contiguous,
}
ON_HOST |= {
    Tensor.copy_,
    Tensor.is_shared,
    Tensor.share_memory_,
    Tensor.get_device,
    Tensor.__format__,
    Tensor.is_set_to,
}


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
        if func in METADATA or compiles_own_step():
            with without_dispatch():
                return func(*args, **(kwargs or {}))
        graph_break()
        if has_others(types):
            return NotImplemented
        is_own = _is_in_own_call(args[0] if args else None)
        if not is_own and (func in ON_HOST or not _is_inside_step(func, args, kwargs)):
            return super().__torch_function__(func, types, args, kwargs)
        has_leaves, is_read = False, not writes(func) and "out" not in (kwargs or {})
        units: list[Unit] = []
        hosts: dict[int, Any] = {}  # the arguments that leaves replace, by the ids of the leaves

        def on_device(tensor: Any) -> Any:
            """Return the leaf or device tensor that the function gets in an argument's place."""
            nonlocal has_leaves
            weight = tensor.weight_of() if isinstance(tensor, Watched) else None
            if weight is None:
                return _to_device(here, tensor) if is_read else tensor
            if tensor is not weight.host:
                tensor.before()
                with without_dispatch():
                    return tensor.to(weight.leaf.device)
            _sync_requires_grad(weight)
            if weight.is_shard:
                units.append(weight.unit)
            else:
                has_leaves = True
            hosts[id(weight.leaf)] = tensor
            return weight.leaf

        first = args[0] if args else None
        watched = found_in((args, kwargs), Watched)
        here = next((weight.leaf.device for each in watched if (weight := each.weight_of()) is not None), None)
        args, kwargs = tree_map_only(Tensor, on_device, (args, kwargs or {}))
        if func in STRIDING and isinstance(first, HostParameter) and (weight := first.weight_of()) is not None:
            args, kwargs = _as_strided_arguments(weight, *args, **kwargs)
        with without_dispatch(), using(units) if units else NO_CONTEXT:
            result = call_with_leaves(func, args, kwargs) if has_leaves else func(*args, **kwargs)
            if isinstance(first, HostParameter) and (weight := first.weight_of()) is not None:
                given = weight.lent if weight.is_lent else storage_id(weight.leaf.untyped_storage())
                _note_views(weight, result, given)
        # The parameter and not its leaf: nothing would keep the leaf's unit on the device for the next function.
        return hosts.get(id(result), result) if isinstance(result, Tensor) else result

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

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo[id(self)] = copy.deepcopy(self.plain(), memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class LeafView(Tensor):
    """A view of a weight on the device that the user's code made outside of any call, where autograd records.

    Functions find the weight's current bytes in it, and their writes to it reach the weight. Its `.data` is the host's.
    """

    weight: Weight

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        views = [] if func in METADATA else list(found_in((args, kwargs), LeafView))
        with without_dispatch():
            for view in views:
                view.renew()
            versions = [view._version for view in views]
            result = func(*args, **(kwargs or {}))
            for view, version in zip(views, versions, strict=True):
                if view._version != version:
                    view.weight.keep_written(view)
            if views:
                _note_views(views[0].weight, result, storage_id(views[0].untyped_storage()))
            return result

    def renew(self) -> None:
        """Bring the unit to the device, and point this view at the weight's current bytes there."""
        weight = self.weight
        if weights.get(id(weight.host)) is not weight:
            return
        unit = weight.unit
        unit.window.visit(unit)
        now = weight.value.to(weight.there.device) if weight.is_lent else unit.memory.flat
        set_data(self, now.view(self.dtype).as_strided(self.size(), self.stride(), self.storage_offset()))

    @property
    def data(self) -> Tensor:
        """The same elements of the weight's host bytes."""
        begin = 0 if self.weight.is_lent else self.weight.at // self.itemsize
        at = self.storage_offset() - begin
        return self.weight.host.detach().view(self.dtype).as_strided(self.size(), self.stride(), at)

    @data.setter
    def data(self, data: Tensor) -> None:
        set_data(self, data)


def _to_device(device: torch.device | None, tensor: Any) -> Any:
    """Copy a host tensor to the device if a function gets it together with a weight there; a 0-d tensor stays."""
    if device is None or not tensor.ndim or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
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


def _note_views(weight: Weight, result: Any, storage: int) -> None:
    """Make results `LeafView`s that are in the storage that a function got for a weight, outside of calls.

    Storages are compared because a view in another type has no base.
    """
    if weight.unit.window.is_in_call:
        return
    for view in result if isinstance(result, (list, tuple)) else (result,):
        is_strided = type(view) is Tensor and view.layout is torch.strided
        if is_strided and storage_id(view.untyped_storage()) == storage:
            view.__class__ = LeafView
            view.weight = weight


def _reduce_alias(alias: Alias) -> Any:
    """Pickle a copy of a weight's view for another process: to share the view would move bytes out of the slab."""
    return reduce_tensor(alias.plain().clone())  # type: ignore[no-untyped-call]


ForkingPickler.register(Alias, _reduce_alias)


class HostParameter(Watched, nn.Parameter):
    """A streamed parameter of the user's: the same object, with this class until the stream ends."""

    plain_class: type = nn.Parameter  # its class in a plain run

    @property
    def data(self) -> Tensor:
        """The weight's bytes: the leaf's during a call of its unit, else the host's."""
        if _is_in_own_call(self):
            return weights[id(self)].leaf.data
        found: Tensor = super().__torch_function__(data_of, (), (self,))
        return found

    @data.setter
    def data(self, data: Tensor) -> None:
        if _is_in_own_call(self):
            weights[id(self)].leaf.data = data
        else:
            _write_data(self, data)

    @property
    def grad(self) -> Tensor | None:
        """The gradient, which is on the host. Delivers gradients that an exception left behind."""
        if backwards:
            recover()
        if compilation() is not None and self.device.type != "cpu":
            return None  # a compiler would find the weight on the device and its gradient on the host
        with without_dispatch():  # torch's own way is longer, and `zero_grad` takes it twice for each parameter
            return grad_of(self)  # type: ignore[no-any-return]

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if backwards:
            recover()
        _assign_gradient(self, value)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if backwards:
            recover()
        if func in METADATA:
            with without_dispatch():
                if func in PLACE and (weight := weights.get(id(args[0]))) is not None:
                    window = weight.unit.window
                    return func(weight.leaf if window.is_in_call or window.is_in_step else args[0])
                result = func(*args, **(kwargs or {}))
                if func in FREEZING and (weight := weights.get(id(args[0]))) is not None:
                    _sync_requires_grad(weight)
                return result
        if func is torch.autograd.grad:
            return _differentiate(*args, **(kwargs or {}))
        if func is torch.autograd.backward:  # with dispatch: the user's hooks run inside
            return func(*tree_map_only(HostParameter, _edge_of, args), **tree_map_only(HostParameter, _edge_of, kwargs))
        return super().__torch_function__(func, types, args, kwargs)

    def set_(self, source: Any, *args: Any) -> Any:
        """Copy a tensor's values to the weight, for `remove_parametrizations`, whose call torch does not dispatch.

        Any other form of `set_` is torch's own.
        """
        if args or not isinstance(source, Tensor):
            return super().set_(source, *args)
        _write_data(self, source)
        return self

    def _use_count(self) -> int:
        """Raise for a streamed parameter: only `torch.utils.swap_tensors` asks, before it changes anything."""
        if (weight := weights.get(id(self))) is not None:
            raise UnsupportedError(
                f"torch.utils.swap_tensors got {weight.name}, whose memory is streamed: copy to it instead"
                " (`weight.data.copy_(other)`). load_state_dict() and module.to() swap under"
                " torch.__future__.set_swap_module_params_on_conversion(True): set it to False while the module streams"
            )
        return super()._use_count()  # type: ignore[no-any-return,misc]

    __hash__ = Tensor.__hash__

    def __eq__(self, other: Any) -> Any:
        weight = weights.get(id(self))
        return True if weight is not None and other is weight.leaf else super().__eq__(other)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        data = self.data.clone(memory_format=torch.preserve_format)
        made = memo[id(self)] = self.plain_class(data, self.requires_grad)
        return made


class HostShard(Watched):
    """A mixin for streamed DTensors (shards.py), from which a class for each kind of DTensor is made."""

    plain_class: type

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if backwards:
            recover()
        if func in HOOKING:
            raise UnsupportedError(
                f"{_name_of(args[0])} is a streamed DTensor, of which hooks get no gradients: use none"
            )
        if func == set_data:
            raise UnsupportedError(
                f"{_name_of(args[0])}.data was assigned, which gives a DTensor no other local tensor: write to the"
                " parameter, as by copy_() under torch.no_grad()"
            )
        if func == set_grad and args[1] is not None:
            with without_dispatch():
                return set_grad(args[0], on_host(args[1]))
        found = next(found_in((args[1:], kwargs), HostShard), None) if func is torch.autograd.grad else None
        if found is not None:
            raise UnsupportedError(
                f"torch.autograd.grad was called for {_name_of(found)}, a DTensor, whose"
                " gradients come by backward() alone: call that"
            )
        if func is torch.autograd.backward:
            return func(*tree_map_only(Watched, _edge_of, args), **tree_map_only(Watched, _edge_of, kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)

    def after(self, func: Any, result: Any) -> None:
        """Note writes, and make results over the shard's bytes, such as `.data`, wait for pending steps as well."""
        if (weight := self.weight_of()) is None:
            return
        if writes(func):
            weight.unit.epoch += 1  # functions of lists move no version of a DTensor, and `.data` has one of its own
        for tensor in result if isinstance(result, (list, tuple)) else (result,):
            is_new = is_dtensor(tensor) and not isinstance(tensor, Watched)
            if is_new and shares_bytes(local_of(tensor), weight.value):
                kind: Any = type(tensor)
                tensor.__class__ = _watched(kind)
                tensor.alias_of = weight

    def to_local(self, **kwargs: Any) -> Tensor:
        """Return the local shard: on the device inside a step, where functions of torch get it, else on the host."""
        weight = self.weight_of()
        if weight is None or not _is_inside_step(torch.add, (self,), {}):
            self.before()
            return super().to_local(**kwargs)  # type: ignore[misc,no-any-return]
        with using([weight.unit]):
            _sync_requires_grad(weight)
            return weight.leaf.to_local(**kwargs)  # type: ignore[attr-defined,no-any-return]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self)] = made = self._plain(is_copy=True)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain(is_copy=False).__reduce_ex__(protocol)

    def _plain(self, is_copy: bool) -> Any:
        """Wait for the bytes, and return a plain DTensor over them, or over a copy."""
        self.before()
        this: Any = self
        with without_dispatch(), torch.no_grad():
            local = local_of(this).detach()
            made = over_spec(local.clone() if is_copy else local, spec_of(this))
            is_parameter = hasattr(this, IS_PARAMETER)
            return nn.Parameter(made, requires_grad_of(this)) if is_parameter else made


HOOKING = {Tensor.register_hook, Tensor.register_post_accumulate_grad_hook}


def _name_of(param: Any) -> str:
    """Return a streamed parameter's name, for an error; that of its class if it is not streamed."""
    return weights[id(param)].name if id(param) in weights else type(param).__name__


def _is_in_own_call(tensor: Any) -> bool:
    """Whether a tensor is a streamed parameter with a call of its unit under way, when its bytes are the leaf's."""
    weight = weights.get(id(tensor))
    return weight is not None and bool(weight.unit.depth)


def _is_inside_step(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a function gets weights on the device and not on the host: the rule is at the top of this file."""
    if (
        func not in MAKING
        and torch.is_grad_enabled()
        and any(tensor.requires_grad for tensor in found_in((args, kwargs), Watched))
    ):
        return True
    tensors = list(found_in((args, kwargs), Tensor))
    watched = [each for each in tensors if isinstance(each, Watched)]
    found = [weight for each in watched if (weight := each.weight_of()) is not None]
    if any(weight.unit.window.is_in_call for weight in found):
        return True
    where = {weight.leaf.device for weight in found}
    others = {each.device for each in tensors if each.ndim and not isinstance(each, Watched)}
    if others:
        return any(device.type != "cpu" for device in where & others)
    is_in_step = any(weight.unit.window.is_in_step for weight in found)
    return is_in_step and all(id(each) in weights for each in watched)  # writes to an alias go to the host


def _sync_requires_grad(weight: Weight) -> None:
    """Set `requires_grad` of a leaf to that of its parameter, and count the unit's weights that train."""
    if requires_grad_of(weight.leaf) != weight.host.requires_grad:
        set_requires_grad(weight.leaf, weight.host.requires_grad)
        weight.unit.trained += 1 if weight.host.requires_grad else -1  # gradients are sent when this many have arrived


def _differentiate(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Implement `torch.autograd.grad` for parameters among the inputs: gradients of leaves, passed through hooks."""
    edges = tree_map_only(HostParameter, _edge_of, inputs)
    found = torch.autograd.grad(outputs, edges, *args, **kwargs)
    params = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    return tuple(
        _hooked(param, grad) if grad is not None and isinstance(param, HostParameter) else grad
        for param, grad in zip(params, found, strict=True)
    )


def _hooked(param: HostParameter, grad: Tensor) -> Tensor:
    """Run the user's hooks on a parameter's gradient, and return the gradient that they leave."""
    for hook in list((hooks_of_gradient(param) or {}).values()):
        changed = hook(grad)
        grad = grad if changed is None else changed
    return grad


def _edge_of(param: HostParameter) -> Any:
    """Return the gradient edge of a parameter's leaf, which stands for it in autograd's graph."""
    if (weight := weights.get(id(param))) is None:
        return param
    with without_dispatch():
        return torch.autograd.graph.get_gradient_edge(weight.leaf)


def _write_data(param: HostParameter, data: Tensor) -> None:
    """Do `param.data = data`: copy the data into the weight's bytes.

    Views that the user holds are moved to a copy of the old bytes first, as in plain torch they keep the old storage.
    """
    weight = weights.get(id(param))
    if weight is None:  # a copy of a parameter is not streamed
        with without_dispatch():
            set_data(param, data)
        return
    is_moved = weight.moved is not None and weight.moved() is data and data.device == weight.leaf.device
    if is_moved and version_of(data) == 0:
        return  # `module.to()` assigns its unchanged copy; in a plain run the weight is on the device already
    check_form(weight, data)
    param.before()
    weight.unit.epoch += 1
    weight.edits += 1
    with without_dispatch():
        if weight.aliases and not shares_bytes(data, weight.value):
            _let_go_of_aliases(weight, data_of(param).clone())
        data_of(param).copy_(data)
        increment_version(param)  # saved tensors over these bytes are wrong now; a plain run keeps the old data


def _let_go_of_aliases(weight: Weight, before: Tensor) -> None:
    """Give the user's views of a weight memory of their own, with the weight's old bytes."""
    for alias in weight.aliases.values():
        alias.keep(before)
    weight.aliases.clear()


def let_go_of_weight(param: Any) -> None:
    """Make a parameter plain that was made of a streamed one's bytes, as by `nn.Parameter(weight)`."""
    if isinstance(param, Watched):
        param.before()
        vars(param).pop("alias_of", None)
        param.__class__ = getattr(type(param), "plain_class", nn.Parameter)  # type: ignore[arg-type]


def replace(weight: Weight, host: nn.Parameter) -> None:
    """Stream another parameter of the same form in a weight's place; the old one becomes plain, with its own bytes."""
    weight.unit.before_host_access(weight)
    with without_dispatch():
        before = weight.value.clone()
        _let_go_of_aliases(weight, before)
    old = weight.host
    _make_plain(weight)
    old.data = before
    weight.unit.replace(weight, host)
    watch(weight)


def _assign_gradient(param: HostParameter, grad: Tensor | None) -> None:
    """Set a parameter's `.grad`; the weight's collector first converts a tensor that is on the device."""
    weight = None if grad is None else weights.get(id(param))
    if isinstance(grad, HostGradient) and weight is not None and not weight.unit.is_resident:
        grad.before()  # the gradient may be that of a resident weight, on the device
    with without_dispatch():
        if weight is not None and grad is not None and grad.device.type != "cpu":
            grad = weight.collector.assign(weight, grad)
        set_grad(param, grad)


@functools.cache
def _watched(plain: type) -> type:
    """Return the class that a parameter of a plain class has while it is streamed."""
    if plain is nn.Parameter:
        return HostParameter
    if is_dtensor_class(plain):
        return type(f"Host{plain.__name__}", (HostShard, plain), {"plain_class": plain})
    return type(f"Host{plain.__name__}", (HostParameter, plain), {"plain_class": plain})


def unit_of(param: Any) -> Unit | None:
    """Return the unit of a streamed parameter; None if the parameter is not streamed."""
    weight = weights.get(id(param))
    return wholes.get(id(param)) if weight is None else weight.unit


def forget_wholes(unit: Unit) -> None:
    """Forget a unit's parameters that consist of several tensors: they are no longer streamed."""
    for whole in unit.wholes:
        wholes.pop(id(whole.host), None)


def watch(weight: Weight) -> None:
    """Register a weight as streamed: functions of its parameter wait for the bytes from now on."""
    is_trainable = weight.leaf.is_floating_point() or weight.leaf.is_complex()
    if not weight.is_shard and is_trainable and not weight.host.is_inference():
        weight.end_of_graph = _end_of_graph(weight.host)
        weight.end_of_graph.register_prehook(functools.partial(_refuse_gradient, weight.name))
    weights[id(weight.host)] = weight
    kind = type(weight.host)
    weight.host.__class__ = _watched(getattr(kind, "plain_class", kind))  # the parameter may be made of another's bytes


def _end_of_graph(host: nn.Parameter) -> Any:
    """Return the AccumulateGrad node of the parameter itself; a gradient that arrives there missed the leaf."""
    requires_grad = host.requires_grad
    with torch.inference_mode(False):  # in inference mode no tensor has a node
        host.requires_grad_(True)
        node = torch.autograd.graph.get_gradient_edge(host).node
        host.requires_grad_(requires_grad)
    return node


def _refuse(name: str, leaf: Tensor) -> None:
    """Raise for a gradient that arrives at a leaf after its stream was closed. A hook of the leaf."""
    raise graph_after_close(name)


def _refuse_gradient(name: str, grads: Any) -> None:
    """Raise for a gradient that arrives at a parameter and not at its leaf. A hook of autograd's node."""
    raise ExactnessError(
        f"{name} was handed to an autograd.Function outside the forward of its module, where torch lets nothing put the"
        " device's tensor in its place: hand over a view (`weight.view_as(weight)`), or call it in that forward"
    )


def release(weight: Weight) -> None:
    """Make a parameter and its gradient plain again, if it is streamed. A later backward to its leaf raises."""
    if weights.get(id(weight.host)) is not weight:
        return
    if weight.hook is not None:
        weight.hook.remove()
        if weight.leaf.requires_grad:
            refuse: Any = functools.partial(_refuse, weight.name)
            Tensor.register_post_accumulate_grad_hook(weight.leaf, refuse)  # type: ignore[no-untyped-call]
    _make_plain(weight)


def _make_plain(weight: Weight) -> None:
    """Give a parameter its own class and a plain gradient again, and forget the weight."""
    weight.end_of_graph = None
    release_gradient(weight.host)
    plain: Any = getattr(weight.host, "plain_class", nn.Parameter)
    weight.host.__class__ = plain
    del weights[id(weight.host)]
