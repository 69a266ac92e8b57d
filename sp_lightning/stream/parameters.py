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
    data_of,
    found_in,
    grad_of,
    has_others,
    in_own_step,
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

weights: dict[int, Weight] = {}  # by the id of the parameter
wholes: dict[int, Unit] = {}  # by the id of a parameter that consists of several tensors, which are weights there

PLACE: set[Any] = {Tensor.device.__get__, Tensor.is_cuda.__get__}  # type: ignore[attr-defined]
# Functions that make a tensor like a weight, and record nothing; the last one makes state as Adagrad is constructed.
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
    """Bytes of a weight on the host. Functions wait for a pending step, and results over the same bytes do, too."""

    alias_of: Weight | None = None  # whose bytes these are, where it is not the weight itself

    def weight_of(self) -> Weight | None:
        """Return the weight; None: this is a copy, or the stream has ended."""
        if (own := weights.get(id(self))) is not None:
            return own
        weight = self.alias_of
        return weight if weight is not None and weights.get(id(weight.host)) is weight else None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in METADATA or in_own_step():
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
        hosts: dict[int, Any] = {}  # by the ids of leaves

        def on_device(tensor: Any) -> Any:
            nonlocal has_leaves
            weight = tensor.weight_of() if isinstance(tensor, Watched) else None
            if weight is None:
                return _beside(here, tensor) if is_read else tensor
            if tensor is not weight.host:
                tensor.before()
                with without_dispatch():
                    return tensor.to(weight.leaf.device)
            _prepare(weight)
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
            args, kwargs = _in_its_unit(weight, *args, **kwargs)
        with without_dispatch(), using(units) if units else NO_CONTEXT:
            result = call_with_leaves(func, args, kwargs) if has_leaves else func(*args, **kwargs)
            if isinstance(first, HostParameter) and (weight := first.weight_of()) is not None:
                given = weight.lent if weight.is_lent else storage_id(weight.leaf.untyped_storage())
                _note_views(weight, result, given)
        # Nothing would hold a leaf's unit for the next function that gets the leaf.
        return hosts.get(id(result), result) if isinstance(result, Tensor) else result

    def before(self) -> None:
        if (weight := self.weight_of()) is not None:
            weight.unit.before_host_access(weight)

    def after(self, func: Any, result: Any) -> None:
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
    """A view of a weight's bytes that the user has."""

    version: int  # after the last write that was noted
    is_detached: bool  # whether it is `weight.detach()`

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Take the weight's class if this is `weight.detach()`, as `nn.Parameter(weight)` demands."""
        with without_dispatch():
            super().requires_grad_(requires_grad)
        if (weight := self.alias_of) is not None:
            weight.aliases.pop(id(self), None)  # torch swaps no tensor that something refers to weakly
            if self.is_detached:
                self.__class__ = type(weight.host)  # type: ignore[assignment]
        return self

    def keep(self, before: Tensor) -> None:
        """Lie in memory that has what the weight was: the weight is about to get other data."""
        form = self.storage_offset(), self.size(), self.stride()
        set_data(self, torch.empty(0, dtype=self.dtype, device=before.device).set_(before.untyped_storage(), *form))
        self.alias_of = None

    def after(self, func: Any, result: Any) -> None:
        super().after(func, result)
        if (weight := self.weight_of()) is not None and version_of(self) != self.version:
            self.version = version_of(self)
            weight.unit.epoch += 1  # a view by `.data` has a version of its own

    def plain(self) -> Tensor:
        """Return a tensor over the same bytes that nothing watches."""
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
    """A view of a weight on the device that code outside of any call has, where autograd records.

    Functions find the weight's bytes of the time in it, and what they write to it reaches the weight. Its `.data` is
    the host's.
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
        """Take over the weight's bytes as they are now."""
        weight = self.weight
        if weights.get(id(weight.host)) is not weight:
            return
        unit = weight.unit
        unit.window.visit(unit)
        now = weight.value.to(weight.there.device) if weight.is_lent else unit.memory.flat
        set_data(self, now.view(self.dtype).as_strided(self.size(), self.stride(), self.storage_offset()))

    @property
    def data(self) -> Tensor:
        begin = 0 if self.weight.is_lent else self.weight.at // self.itemsize
        at = self.storage_offset() - begin
        return self.weight.host.detach().view(self.dtype).as_strided(self.size(), self.stride(), at)

    @data.setter
    def data(self, data: Tensor) -> None:
        set_data(self, data)


def _beside(device: torch.device | None, tensor: Any) -> Any:
    """Return a tensor on the host, such as a copy of a weight, where the weight is that a function gets with it."""
    if device is None or not tensor.ndim or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return tensor
    if isinstance(tensor, HostGradient):
        tensor = tensor.plain()
    with without_dispatch():
        return tensor.to(device)


def _in_its_unit(weight: Weight, leaf: Any, size: Any, stride: Any, storage_offset: Any = None) -> Any:
    """Return the arguments of `as_strided` for a leaf, of which the user knows where the host's bytes begin."""
    if storage_offset is not None and not weight.is_lent:  # what is lent in the host's type has its own memory
        storage_offset += weight.form[2] - weight.value.storage_offset()
    return (leaf, size, stride, storage_offset), {}


def _note_views(weight: Weight, result: Any, storage: int) -> None:
    """Know views of what a function got for a weight, in this storage: a view in another type has no base."""
    if weight.unit.window.is_in_call:
        return
    for view in result if isinstance(result, (list, tuple)) else (result,):
        is_strided = type(view) is Tensor and view.layout is torch.strided
        if is_strided and storage_id(view.untyped_storage()) == storage:
            view.__class__ = LeafView
            view.weight = weight


def _handed_over(alias: Alias) -> Any:
    """Give another process a copy: sharing moves bytes out of the slab that travels."""
    return reduce_tensor(alias.plain().clone())  # type: ignore[no-untyped-call]


ForkingPickler.register(Alias, _handed_over)


class HostParameter(Watched, nn.Parameter):
    """A streamed parameter."""

    plain_class: type = nn.Parameter  # its class in a plain run

    @property
    def data(self) -> Tensor:
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
        """The gradient. Torch's own way here is longer, and `zero_grad` takes it twice for each parameter."""
        if backwards:
            recover()
        if compilation() is not None and self.device.type != "cpu":
            return None  # a compiler finds the weight on the device, and would the gradient on the host
        with without_dispatch():
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
                    _prepare(weight)
                return result
        if func is torch.autograd.grad:
            return _differentiate(*args, **(kwargs or {}))
        if func is torch.autograd.backward:  # whose hooks are the user's code
            return func(*tree_map_only(HostParameter, _edge_of, args), **tree_map_only(HostParameter, _edge_of, kwargs))
        return super().__torch_function__(func, types, args, kwargs)

    def set_(self, source: Any, *args: Any) -> Any:
        """Take over another tensor's values, as removed parametrizations have it: torch does not dispatch this."""
        if args or not isinstance(source, Tensor):
            return super().set_(source, *args)
        _write_data(self, source)
        return self

    def _use_count(self) -> int:
        """Raise: `torch.utils.swap_tensors` alone asks, before it changes anything, and torch does not dispatch it."""
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
    """A streamed DTensor (shards.py): a mixin of a class of its own for each kind of DTensor."""

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
        """Note writes, and have results over the shard's bytes, such as `.data`, wait as well."""
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
        """Return the shard, on the device where a function of torch would get it there."""
        weight = self.weight_of()
        if weight is None or not _is_inside_step(torch.add, (self,), {}):
            self.before()
            return super().to_local(**kwargs)  # type: ignore[misc,no-any-return]
        with using([weight.unit]):
            _prepare(weight)
            return weight.leaf.to_local(**kwargs)  # type: ignore[attr-defined,no-any-return]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self)] = made = self._plain(is_copy=True)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain(is_copy=False).__reduce_ex__(protocol)

    def _plain(self, is_copy: bool) -> Any:
        self.before()
        this: Any = self
        with without_dispatch(), torch.no_grad():
            local = local_of(this).detach()
            made = over_spec(local.clone() if is_copy else local, spec_of(this))
            is_parameter = hasattr(this, IS_PARAMETER)
            return nn.Parameter(made, requires_grad_of(this)) if is_parameter else made


HOOKING = {Tensor.register_hook, Tensor.register_post_accumulate_grad_hook}


def _name_of(param: Any) -> str:
    return weights[id(param)].name if id(param) in weights else type(param).__name__


def _is_in_own_call(tensor: Any) -> bool:
    """Whether this is a parameter of the unit whose call is under way, where its bytes are the leaf's."""
    weight = weights.get(id(tensor))
    return weight is not None and bool(weight.unit.depth)


def _is_inside_step(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a function gets weights as a step does (the docstring above)."""
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
    return is_in_step and all(id(each) in weights for each in watched)  # what is written to an alias is the host's


def _prepare(weight: Weight) -> None:
    """Give the leaf what autograd asks of the parameter."""
    if requires_grad_of(weight.leaf) != weight.host.requires_grad:
        set_requires_grad(weight.leaf, weight.host.requires_grad)
        weight.unit.trained += 1 if weight.host.requires_grad else -1  # of whose gradients it waits for all


def _differentiate(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute gradients, which pass the hooks of parameters among the inputs."""
    edges = tree_map_only(HostParameter, _edge_of, inputs)
    found = torch.autograd.grad(outputs, edges, *args, **kwargs)
    params = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    return tuple(
        _hooked(param, grad) if grad is not None and isinstance(param, HostParameter) else grad
        for param, grad in zip(params, found, strict=True)
    )


def _hooked(param: HostParameter, grad: Tensor) -> Tensor:
    for hook in list((hooks_of_gradient(param) or {}).values()):
        changed = hook(grad)
        grad = grad if changed is None else changed
    return grad


def _edge_of(param: HostParameter) -> Any:
    """Return where autograd's graph has a parameter: its leaf."""
    if (weight := weights.get(id(param))) is None:
        return param
    with without_dispatch():
        return torch.autograd.graph.get_gradient_edge(weight.leaf)


def _write_data(param: HostParameter, data: Tensor) -> None:
    """Write other data to the parameter's place."""
    weight = weights.get(id(param))
    if weight is None:  # a copy
        with without_dispatch():
            set_data(param, data)
        return
    is_moved = weight.moved is not None and weight.moved() is data and data.device == weight.leaf.device
    if is_moved and version_of(data) == 0:
        return  # `module.to()`, which changes nothing in a plain run, where the weight is on the device
    check_form(weight, data)
    param.before()
    weight.unit.epoch += 1
    weight.edits += 1
    with without_dispatch():
        if weight.aliases and not shares_bytes(data, weight.value):
            _let_go_of_aliases(weight, data_of(param).clone())
        data_of(param).copy_(data)
        increment_version(param)  # what autograd saved of the weight is overwritten, which a plain run keeps


def _let_go_of_aliases(weight: Weight, before: Tensor) -> None:
    """Leave to the user's views of a weight what it was before."""
    for alias in weight.aliases.values():
        alias.keep(before)
    weight.aliases.clear()


def let_go_of_weight(param: Any) -> None:
    """Make a parameter plain that was made over the bytes of a streamed one."""
    if isinstance(param, Watched):
        param.before()
        vars(param).pop("alias_of", None)
        param.__class__ = getattr(type(param), "plain_class", nn.Parameter)  # type: ignore[arg-type]


def replace(weight: Weight, host: nn.Parameter) -> None:
    """Stream another parameter in the place of a weight's, which becomes plain; it has the same form."""
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
    weight = None if grad is None else weights.get(id(param))
    if isinstance(grad, HostGradient) and weight is not None and not weight.unit.is_resident:
        grad.before()  # it may be a resident weight's, which is on the device
    with without_dispatch():
        if weight is not None and grad is not None and grad.device.type != "cpu":
            grad = weight.collector.assign(weight, grad)
        set_grad(param, grad)


@functools.cache
def _watched(plain: type) -> type:
    if plain is nn.Parameter:
        return HostParameter
    if is_dtensor_class(plain):
        return type(f"Host{plain.__name__}", (HostShard, plain), {"plain_class": plain})
    return type(f"Host{plain.__name__}", (HostParameter, plain), {"plain_class": plain})


def unit_of(param: Any) -> Unit | None:
    """Return the unit of a streamed parameter; None: it is none."""
    weight = weights.get(id(param))
    return wholes.get(id(param)) if weight is None else weight.unit


def forget_wholes(unit: Unit) -> None:
    """Note that a unit's parameters of several tensors are no longer streamed."""
    for whole in unit.wholes:
        wholes.pop(id(whole.host), None)


def watch(weight: Weight) -> None:
    """Make functions of a parameter wait for its bytes."""
    is_trainable = weight.leaf.is_floating_point() or weight.leaf.is_complex()
    if not weight.is_shard and is_trainable and not weight.host.is_inference():
        weight.end_of_graph = _end_of_graph(weight.host)
        weight.end_of_graph.register_prehook(functools.partial(_refuse_gradient, weight.name))
    weights[id(weight.host)] = weight
    kind = type(weight.host)
    weight.host.__class__ = _watched(getattr(kind, "plain_class", kind))  # it may be one that was over another's bytes


def _end_of_graph(host: nn.Parameter) -> Any:
    """Return the node by which autograd would accumulate a gradient of the parameter itself, and not of its leaf."""
    requires_grad = host.requires_grad
    with torch.inference_mode(False):  # in which nothing has a node
        host.requires_grad_(True)
        node = torch.autograd.graph.get_gradient_edge(host).node
        host.requires_grad_(requires_grad)
    return node


def _refuse(name: str, leaf: Tensor) -> None:
    raise graph_after_close(name)


def _refuse_gradient(name: str, grads: Any) -> None:
    raise ExactnessError(
        f"{name} was handed to an autograd.Function outside the forward of its module, where torch lets nothing put the"
        " device's tensor in its place: hand over a view (`weight.view_as(weight)`), or call it in that forward"
    )


def release(weight: Weight) -> None:
    """Make a parameter and its gradient plain again, if it is streamed."""
    if weights.get(id(weight.host)) is not weight:
        return
    if weight.hook is not None:
        weight.hook.remove()
        if weight.leaf.requires_grad:
            refuse: Any = functools.partial(_refuse, weight.name)
            Tensor.register_post_accumulate_grad_hook(weight.leaf, refuse)  # type: ignore[no-untyped-call]
    _make_plain(weight)


def _make_plain(weight: Weight) -> None:
    weight.end_of_graph = None
    release_gradient(weight.host)
    plain: Any = getattr(weight.host, "plain_class", nn.Parameter)
    weight.host.__class__ = plain
    del weights[id(weight.host)]
