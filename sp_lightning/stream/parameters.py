"""The user's parameters while they are streamed: the same objects, with a class whose functions wait for the bytes."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from ..compat.dynamo import compilation, never_compiled_hook
from ..compat.tensors import IS_PARAMETER, is_dtensor, is_dtensor_class, local_of, over_spec, spec_of
from ..compat.torch import without_dispatch
from ..errors import ExactnessError, UnsupportedError
from .gradients import backwards, recover
from .host_gradient import HostGradient
from .lazy import (
    data_of,
    grad_of,
    requires_grad_of,
    set_data,
    set_grad,
    shares_bytes,
    version_of,
    writes,
)
from .leaf import Weight, check_form, graph_after_close, using, weights
from .unit import Unit
from .watched import Watched, is_in_own_call, is_inside_step, sync_requires_grad
from .wholes import on_host

wholes: dict[int, Unit] = {}  # units of parameters that consist of several tensors, by the id of the parameter


class HostParameter(Watched, nn.Parameter):
    """A streamed parameter of the user's: the same object, with this class until the stream ends."""

    plain_class: type = nn.Parameter  # its class in a plain run

    @property
    @never_compiled_hook
    def data(self) -> Tensor:
        """The weight's bytes: the leaf's during a call of its unit, else the host's."""
        if is_in_own_call(self):
            return weights[id(self)].leaf.data
        found: Tensor = super().__torch_function__(data_of, (), (self,))
        return found

    @data.setter
    def data(self, data: Tensor) -> None:
        if is_in_own_call(self):
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
    @never_compiled_hook
    def grad(self, value: Tensor | None) -> None:
        if backwards:
            recover()
        weight = None if value is None else weights.get(id(self))
        if isinstance(value, HostGradient) and weight is not None and not weight.unit.is_resident:
            value.before()  # the gradient may be that of a resident weight, on the device
        with without_dispatch():
            if weight is not None and value is not None and value.device.type != "cpu":
                value = weight.collector.assign(weight, value)
            set_grad(self, value)

    def set_(self, source: Any, *args: Any) -> Any:
        """Copy a tensor's values to the weight, for `remove_parametrizations`, whose call torch does not dispatch.

        Any other form of `set_` is torch's own.
        """
        if args or not isinstance(source, Tensor):
            return super().set_(source, *args)
        _write_data(self, source)
        return self

    __hash__ = Tensor.__hash__

    def __eq__(self, other: Any) -> Any:
        weight = weights.get(id(self))
        return True if weight is not None and other is weight.leaf else super().__eq__(other)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain_class.__reduce_ex__(self, protocol)  # type: ignore[call-arg]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        data = self.data.clone(memory_format=torch.preserve_format)
        made = memo[id(self)] = self.plain_class(data, self.requires_grad)
        return made


class HostShard(Watched):
    """A mixin for streamed DTensors (wholes.py), from which a class for each kind of DTensor is made."""

    plain_class: type

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
        if weight is None or not is_inside_step(torch.add, (self,), {}):
            self.before()
            return super().to_local(**kwargs)  # type: ignore[misc,no-any-return]
        with using([weight.unit]):
            sync_requires_grad(weight)
            return weight.leaf.to_local(**kwargs)  # type: ignore[attr-defined,no-any-return]

    def plain(self) -> Any:
        """Wait for the bytes, and return a plain DTensor over them."""
        self.before()
        this: Any = self
        with without_dispatch(), torch.no_grad():
            made = over_spec(local_of(this).detach(), spec_of(this))
            is_parameter = hasattr(this, IS_PARAMETER)
            return nn.Parameter(made, requires_grad_of(this)) if is_parameter else made


HOOKING = {Tensor.register_hook, Tensor.register_post_accumulate_grad_hook}


def _name_of(param: Any) -> str:
    """Return a streamed parameter's name, for an error; that of its class if it is not streamed."""
    return weights[id(param)].name if id(param) in weights else type(param).__name__


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
    weight.fixed = weakref.ref(weight.host)
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
    weight.end_of_graph = weight.fixed = None
    with without_dispatch():
        if isinstance(grad := grad_of(weight.host), HostGradient):
            set_grad(weight.host, grad.content.release())
    plain: Any = getattr(weight.host, "plain_class", nn.Parameter)
    weight.host.__class__ = plain
    del weights[id(weight.host)]
