"""Weights that are read outside their unit: ``F.linear(x, self.embedding.weight)``, a regulariser, a fast path.

1. While a step or its backward runs, every torch function that is called with host parameters is given their stand-ins
   instead, and their units are visited for the time of the call: the weights are *borrowed*. Kernels, device and the
   path of gradients are those of a plain run. The same holds for every ``torch.autograd.Function`` that is applied, a
   reentrant checkpoint's too.
2. Functions that only read metadata of a parameter, register something with it or copy other data into it are given
   the host parameter itself, and so are all functions while an optimizer steps. What else is on the host in a call
   within a step was made of weights or gradients between steps (an anchor, an average), and is on the device in a plain
   run: it goes up for the call, and what is written to it comes down. What is made like a parameter is where that seems
   to be.
3. Between a forward and its backward such a read is user code's own, and happens on the host. It is reported: if the
   loss depends on it, gradients from the host and from the device are summed on the host, in another order.
4. Between steps user code may combine a host parameter with buffers, or with results of a step, on the device (a
   pruning mask, an average). Stand-ins are given there too, and what is written to one goes down to the host.
5. While an optimizer's step is pending (pending_step.py), reading a host parameter's bytes, or borrowing the weight,
   waits for the step of its unit. In a backward that has already stepped the unit the old bytes are gone: an error
   (step_owner.py, Rule 5).
6. The result of a function may be a parameter's bytes: a view, a detached tensor, an array. They may be written through
   it at any time, unseen by the version counter, as if ``.data`` had been read.
7. Host parameters take part in torch's function dispatch only while reads are watched; nothing else ever does. A
   function mode would see the same reads, but torch's evaluation fast paths check whether a mode is active and then run
   other kernels.
8. What a borrowed weight's function returns may be a view of the stand-in, which code writes later, outside of any
   visit. Such a write shows in the stand-in's version, or, below a view's own ``.data``, in its bytes, which are
   compared after a view was made without gradients. It goes down before anything reads or writes the bytes on the host,
   such as an optimizer's step, and before the unit is evicted.
9. A function may also have arguments of other classes that take part in it: a subclass of tensors, a tensor that a file
   still has. Their dispatch goes on as if the host parameters were plain ones.
10. A transform (``torch.func``) wraps the tensors that it is given before it calls any function with them, and is given
    stand-ins for host parameters in all phases but an optimizer's step: what it computes with is on the device, as in a
    plain run. The visit ends at once, and what the transform wrapped keeps the unit there.
11. Inside a visit of its unit a weight has one set of bytes, as in a plain run: those of its stand-in. There also
    functions that write to a host parameter, or give its bytes to code, are given the stand-in.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..compat.dynamo import never_compiled, not_compiled_itself_hook
from ..compat.patches import FUNCTION_APPLY, LIST_WRITES, TRANSFORM_WRAPPERS
from ..compat.tensors import (
    dispatches,
    is_dtensor,
    local_of,
    never_dispatched,
    storages_of,
    with_dispatch,
    without_dispatch,
)
from ..errors import UnsupportedError
from ..memory.access import StepBeside
from ..memory.device import Device
from ..memory.watched_parameters import (
    HostOfLibrary,
    HostParameter,
    as_own,
    expose,
    flat,
    has_hidden_stand_in,
    has_hooks,
    has_one_node,
    host_classes,
    in_visit,
    is_on_host,
    name_of,
    of_libraries,
    owner_of,
    true_grad_fn,
)
from .autocast_weights import cast_by

_VIEWS = {"T", "mT", "H", "mH"}  # properties that compute; all others are about the parameter itself
# Functions about a parameter itself (Rule 2): those that read none of its bytes, also of properties (Rule 5), ...
_METADATA = frozenset(
    """
    shape dtype device requires_grad is_leaf grad_fn layout ndim itemsize nbytes name names output_nr retains_grad
    is_cpu is_cuda is_meta is_sparse is_nested is_quantized _backward_hooks _post_accumulate_grad_hooks __len__ __hash__
    __dir__ size stride dim ndimension numel nelement element_size is_contiguous is_floating_point is_complex is_signed
    is_conj is_neg get_device has_names is_inference dim_order is_same_size is_tensor requires_grad_ register_hook
    register_post_accumulate_grad_hook retain_grad result_type can_cast promote_types
    """.split()
)
_BYTES = frozenset(  # ... those that read its bytes or give them to code (Rule 11) ...
    """
    __repr__ __str__ __format__ __contains__ __reduce_ex__ __dlpack__ __array__ detach numpy data_ptr storage
    untyped_storage storage_offset is_nonzero
    """.split()
)
_MEMORY = frozenset(  # ... and those about the memory that it has on the host, or that give it other bytes.
    """
    __set__ __delete__ __setstate__ __deepcopy__ __dlpack_device__ detach_ set_ resize_ is_set_to pin_memory is_pinned
    share_memory_ is_shared
    """.split()
)
_ABOUT = _METADATA | _BYTES | _MEMORY
_DIFFERENTIATE = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)
_LIKE = frozenset(  # functions that make tensors where a parameter is, as it seems, and of the type that it has there
    """
    zeros_like ones_like empty_like full_like new_empty new_zeros new_ones new_full new_empty_strided
    """.split()
)
_OFFSETS = {"as_strided": 3, "as_strided_": 3, "as_strided_copy": 3, "as_strided_scatter": 4}  # from a storage's begin
_CROSSING = frozenset(  # functions whose arguments may be on several devices, or that read only the form of one
    "copy_ _foreach_copy_ to type_as new_tensor set_data view_as reshape_as expand_as".split()
)
deferred: list[StepBeside] = []  # the steps of all modules whose parameters have no data


def enable() -> None:
    """Watch reads of host parameters from now on (Rule 1)."""
    FUNCTION_APPLY.install(classmethod(apply))
    for patch in TRANSFORM_WRAPPERS:
        patch.install(_with_stand_ins(patch.original))
    LIST_WRITES.install()
    resume()


def pause() -> None:
    """Stop watching reads until ``resume``: for code that checks whether a weight takes part in function dispatch.

    Finishes deferred steps, as no read would wait for them meanwhile (Rule 5).
    """
    for step in list(deferred):
        step.finish()
    _at_rest()


def resume() -> None:
    """End a pause, if there is one."""
    if FUNCTION_APPLY.users:
        for kind in host_classes:
            kind.__torch_function__ = _torch_function  # type: ignore[attr-defined]


def disable() -> None:
    """Stop watching reads, once called as often as ``enable``."""
    LIST_WRITES.remove()
    for patch in TRANSFORM_WRAPPERS:
        patch.remove()
    FUNCTION_APPLY.remove()
    if not FUNCTION_APPLY.users:
        _at_rest()


def _at_rest() -> None:
    for kind, function in host_classes.items():
        kind.__torch_function__ = function  # type: ignore[attr-defined]


def hold(step: StepBeside) -> None:
    """Watch reads of a deferred step's parameters, ending a pause (Rule 5)."""
    deferred.append(step)
    resume()


def release(step: StepBeside) -> None:
    """Note that a step is no longer deferred. Safe twice."""
    if step in deferred:
        deferred.remove(step)


@classmethod  # type: ignore[misc]
@never_compiled  # a compiled frame that reads such a weight ends its graph there
def _torch_function(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    kwargs, name = kwargs or {}, getattr(func, "__name__", "")
    call = func if len(types) == 1 and cls is HostParameter else _dispatched(func, types)
    with without_dispatch():
        is_property = name in ("__get__", "__set__")
        if is_property:
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        is_about_parameter = name not in _VIEWS if is_property else name in _ABOUT
        if is_about_parameter and name in _METADATA:
            return call(*args, **kwargs)
        hosts = _hosts(args, kwargs)
        if name in _LIKE and len(hosts) == 1 and not _others(args, kwargs):
            given = {key: value for key, value in kwargs.items() if value is not None}
            return call(*args, **{"device": hosts[0].device, "dtype": hosts[0].dtype} | given)
        if func in _DIFFERENTIATE:
            if func is torch.autograd.grad:
                _refuse_dtensors(hosts)
            return _differentiated(call, args, kwargs)
        inside = [*filter(in_visit, hosts)]
        if is_about_parameter:
            served = inside if name in _BYTES else []
        else:
            served = hosts if any(owner_of(host).phases.serving for host in hosts) else []
        if served:
            written = _written(func, args, kwargs)
            if name in _CROSSING and written and not _is_any(inside, written):
                for host in hosts:
                    expose(host)
                return call(*args, **kwargs)
            stays = is_about_parameter or name in _CROSSING or owner_of(hosts[0]).device.is_host
            return _call_with_stand_ins(call, args, kwargs, served, [] if stays else _on_host(args, kwargs))
        if not is_about_parameter and _are_combined_on_device(func, hosts, args, kwargs):
            return _call_with_stand_ins(call, args, kwargs, hosts)
        _complete(hosts)
        if not is_about_parameter and torch.is_grad_enabled():
            for host in hosts:
                if host.requires_grad:
                    owner_of(host).phases.read_on_host(name_of(host))  # Rule 3
        return _note_exposed(call(*args, **kwargs), hosts)


def _refuse_dtensors(hosts: list[Any]) -> None:
    """Raise if ``autograd.grad`` is to differentiate by DTensors: the graph leads to their shards."""
    for host in hosts:
        if is_dtensor(host):
            raise UnsupportedError(
                f"torch.autograd.grad was called for {name_of(host)}, a DTensor, to whose shard the graph leads: call "
                "backward() and read .grad"
            )


def _dispatched(func: Any, types: Any) -> Any:
    """Return a function that calls this one as the classes of its other arguments have it (Rule 9)."""
    kinds = dict.fromkeys(kind.own if issubclass(kind, HostOfLibrary) else kind for kind in types)
    others = tuple(
        kind for kind in kinds if kind.__torch_function__ is not never_dispatched and kind not in host_classes
    )
    if others == (Tensor,):  # functions in Python name the class of plain tensors, too
        others = ()

    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        with as_own(of_libraries(args, kwargs)):
            if not others:
                return func(*args, **kwargs)
            with with_dispatch():
                results = (kind.__torch_function__(func, others, args, kwargs) for kind in others)
                return next((result for result in results if result is not NotImplemented), NotImplemented)

    return call


@not_compiled_itself_hook
def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:  # torch's compiler knows it by its name
    """Call ``Function.apply``, which bypasses function dispatch, with stand-ins (Rule 1)."""
    applied, ours = FUNCTION_APPLY.original.__get__(None, cls), not dispatches()
    hosts = [] if ours else _hosts(args, kwargs)
    wanted = any(owner_of(host).phases.serving for host in hosts) or _are_combined_on_device(
        applied, hosts, args, kwargs
    )
    return _not_compiled(applied, args, kwargs, hosts) if wanted else applied(*args, **kwargs)


@functools.cache
def _with_stand_ins(wrap: Any) -> Any:
    """Return a function that wraps tensors for a transform as this one does, but stand-ins of weights (Rule 10)."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        hosts = _hosts(args)
        if not hosts or owner_of(hosts[0]).phases.optimizing:
            return wrap(*args, **kwargs)
        return _not_compiled(wrap, args, kwargs, hosts)

    return wrapped


@never_compiled
def _not_compiled(func: Any, args: Any, kwargs: Any, hosts: list[Any]) -> Any:
    return _call_with_stand_ins(func, args, kwargs, hosts)


def holds_parameters(args: Any, kwargs: Any) -> bool:
    """Whether any argument is a host parameter whose reads are given its stand-in now."""
    return any(owner_of(host).phases.serving for host in _hosts(args, kwargs))


def lent(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function with stand-ins for the host parameters among its arguments (Rule 1)."""
    return _call_with_stand_ins(func, args, kwargs, _hosts(args, kwargs))


def _call_with_stand_ins(func: Any, args: Any, kwargs: Any, hosts: list[Any], below: Sequence[Tensor] = ()) -> Any:
    """Call a function with stand-ins for host parameters, and copies on the device of what is ``below`` (Rule 2)."""
    name, read, inside = _name(func), cast_by(func, args, kwargs), owner_of(hosts[0]).in_visit(hosts[0])
    sent = {id(other): _sent_up(other, owner_of(hosts[0]).device) for other in below}
    with contextlib.ExitStack() as visits:
        stand_ins: dict[int, Any] = {id(host): visits.enter_context(owner_of(host).lend(host, read)) for host in hosts}
        if name in _OFFSETS and not inside:  # where the offset is the stand-in's already
            args, kwargs = _with_offset(_OFFSETS[name], args, kwargs, stand_ins)
        args, kwargs = visits.enter_context(_replaced((args, kwargs), stand_ins | sent))
        result = func(*args, **kwargs)
        if read is not None and read.dtype is not None and has_hidden_stand_in(hosts[0]):
            return result.clone() if result is stand_ins[id(hosts[0])] else result  # a cast's result is a copy
    gives_bytes = name in _BYTES
    if gives_bytes or not torch.is_grad_enabled():
        for stand_in in stand_ins.values():
            may_share = gives_bytes or isinstance(result, (Tensor, tuple, list))
            if result is not stand_in and may_share and _shares_bytes(result, stand_in):
                stand_in.data_exposed[0] = True  # Rule 8
    for other in below:
        if sent[id(other)]._version:
            other.copy_(sent[id(other)])
    given = stand_ins | sent
    return next((one for one in (*hosts, *below) if given[id(one)] is result), result)  # a write returns what it wrote


def _sent_up(tensor: Tensor, device: Device) -> Tensor:
    """Return a copy of a tensor on the device, whose version shows whether it was written."""
    records = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(records):
        return tensor.to(device.torch_device)


def _with_offset(position: int, args: Any, kwargs: Any, stand_ins: Mapping[int, Any]) -> tuple[Any, Any]:
    """Return the arguments with the offset that an element of the host parameter's storage has in the stand-in's."""
    given = dict(enumerate(args)) | kwargs
    key: Any = position if position in given else "storage_offset"
    host, offset = args[0], given.get(key)
    if offset is None or not issubclass(type(host), HostParameter):
        return args, kwargs
    given[key] = offset - host.storage_offset() + stand_ins[id(host)].storage_offset()
    return [given.pop(index) for index in range(len(args))], given


def _differentiated(func: Any, args: Any, kwargs: Any) -> Any:
    """Call ``autograd.grad`` or a backward for host parameters, named by the edges that lead to them in the graph.

    Reads are watched in it, since it runs second forwards and hooks.
    """
    named = {"inputs": kwargs.pop("inputs")} if "inputs" in kwargs else {}
    materializes = kwargs.pop("materialize_grads", False)
    edges = {id(host): _edge(func, host) for host in _hosts(args, named)}
    with contextlib.ExitStack() as visits:
        stand_ins = {id(host): visits.enter_context(owner_of(host).lend(host)) for host in _hosts(kwargs)}
        given, named = visits.enter_context(_replaced((args, named), edges))
        _, others = visits.enter_context(_replaced(((), kwargs), stand_ins))
        with with_dispatch():
            grads = func(*given, **named, **others)

    def in_place(grad: Tensor | None, of: Any) -> Tensor | None:
        is_lent = id(of) in edges and not owner_of(of).phases.optimizing
        device = owner_of(of).device.torch_device if is_lent else of.device
        if grad is None and materializes:
            return torch.zeros_like(of, device=device, requires_grad=kwargs["create_graph"])
        return grad.to(device) if is_lent and grad is not None else grad

    return grads and tuple(map(in_place, grads, args[1]))


def _edge(func: Any, host: Any) -> GradientEdge:
    """Return the edge to a host parameter, or to its stand-in if all that ``autograd.grad`` looks for arrives there."""
    owner = owner_of(host)
    goes_on = _name(func) == "backward" or owner.phases.optimizing or has_hooks(host)  # which a plain run calls
    if goes_on or not (host.requires_grad and has_one_node(host)):
        return get_gradient_edge(local_of(host) if is_dtensor(host) else host)
    with owner.lend(host) as stand_in:
        return GradientEdge(true_grad_fn(stand_in), stand_in.output_nr)


def _are_combined_on_device(func: Any, hosts: list[Any], args: Any, kwargs: Any) -> bool:
    """Whether user code combines the host parameters with tensors on the device between steps (Rule 4)."""
    if not hosts or not owner_of(hosts[0]).phases.between_steps or _name(func) in _CROSSING:
        return False
    return _on_device(args, kwargs, owner_of(hosts[0]).device)


def _on_device(args: Any, kwargs: Any, device: Device) -> bool:
    """Whether any argument but the host parameters is a tensor on this device."""
    return any(map(device.holds, _others(args, kwargs)))


def _on_host(*values: Any) -> list[Tensor]:
    """List the tensors on the host among arguments, but for host parameters and scalars."""
    return [other for other in _others(*values) if other.dim() and is_on_host(other)]


def _complete(hosts: list[Any]) -> None:
    """Complete the bytes of host parameters on the host (Rules 5 and 8)."""
    for host in hosts:
        owner_of(host).before_host_access(host)


def _note_exposed(result: Any, hosts: list[Any]) -> Any:
    """Return a function's result, and mark the parameters stale whose bytes it exposes (Rule 6)."""
    for host in hosts:
        if result is not host and _shares_bytes(result, host):
            expose(host)
    return result


def _shares_bytes(result: Any, parameter: Tensor) -> bool:
    if isinstance(result, Tensor):
        return not storages_of(result).isdisjoint(storages_of(parameter))
    if isinstance(result, (tuple, list)):
        return any(isinstance(part, Tensor) and _shares_bytes(part, parameter) for part in result)
    return result is not None and not isinstance(result, (bool, int, float, str))  # an array, a storage, a capsule


def _hosts(*values: Any) -> list[Any]:
    return [value for value in flat(*values) if type(value) in host_classes]


def _others(*values: Any) -> list[Tensor]:
    return [value for value in flat(*values) if isinstance(value, Tensor) and type(value) not in host_classes]


@contextlib.contextmanager
def _replaced(values: tuple[Any, Any], given: Mapping[int, Any]) -> Iterator[tuple[Any, Any]]:
    """Give arguments with other tensors in place of some, by their ids, for the time of a call.

    Lists and dictionaries stay the same objects, as the code that is called may change them.
    """
    put_back: dict[int, tuple[Any, Any]] = {}
    changed: list[Any] = []
    try:
        yield _exchanged(values[0], given, put_back, changed), _exchanged(dict(values[1]), given, put_back, changed)
    finally:
        for place in changed:
            for key, item in list(_items(place)):
                if id(item) in put_back:
                    place[key] = put_back[id(item)][1]


def _exchanged(value: Any, given: Mapping[int, Any], put_back: dict[int, tuple[Any, Any]], changed: list[Any]) -> Any:
    if id(value) in given:
        put_back[id(given[id(value)])] = given[id(value)], value
        return given[id(value)]
    if isinstance(value, (list, dict)):
        for key, item in list(_items(value)):
            if (made := _exchanged(item, given, put_back, changed)) is not item:
                value[key] = made
                changed.append(value)
    elif isinstance(value, tuple):
        items = [_exchanged(item, given, put_back, changed) for item in value]
        if not all(map(operator.is_, items, value)):
            made = type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
            put_back[id(made)] = made, value
            return made
    return value


def _items(place: Any) -> Iterable[tuple[Any, Any]]:
    return place.items() if isinstance(place, dict) else enumerate(place)


def _name(func: Any) -> str:
    return getattr(func, "__name__", "")


def _is_any(some: list[Any], others: list[Any]) -> bool:
    return not set(map(id, some)).isdisjoint(map(id, others))


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """List the host parameters to which a function writes."""
    name = _name(func)
    in_place = (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "__iadd__", "__imul__")
    return _hosts(args[0] if in_place and args else None, kwargs.get("out"))
