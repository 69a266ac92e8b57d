"""Weights that are read outside their unit: ``F.linear(x, self.embedding.weight)``, a regulariser, a fast path.

1. While a step or its backward runs, every torch function that is handed host parameters gets their stand-ins, for
   which their units are visited for the time of the call: the same kernels on the same device as in a plain run, and
   the same way of gradients. So does every ``torch.autograd.Function`` that is applied, a reentrant checkpoint's too.
2. Not so for what only asks about a parameter or registers something with it, for what writes to it, for what works on
   other host tensors, and while an optimizer steps: that is about the host parameter. A write of what is on the device,
   or comes from its random generator, is a write there.
3. Between a forward and its backward such a read is the user's, and on the host; it is reported: if the loss depends on
   it, gradients from the host and from the device are summed there, in another order.
4. Between steps a host parameter meets buffers, or what a step left, on the device (a pruning mask, an average): there
   their stand-ins work too, and what is written to one goes down to the host.
5. While an optimizer's step still runs (deferred_step.py), who looks at a host parameter's bytes, or is lent a
   stand-in, waits for the step of its unit. In a backward, while units are stepped (step_in_backward.py), he comes too
   late: an error, as in backward_pass.py, Rule 1.
6. What a function gives may be a parameter's bytes: a view, a detached tensor, an array. They may be written by it at
   any time, unseen by the version counter, as if ``.data`` had been taken.
7. Host parameters take part in torch's function dispatch only while somebody listens; nothing else ever does. A
   function mode would see the same reads, but torch's evaluation fast paths ask whether one is active and then run
   other kernels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..memory.parameters import HostParameter, owner_of, true_device
from .backward_pass import in_backward
from .dynamo import never_compiled

_VIEWS = {"T", "mT", "H", "mH"}  # properties that compute; all others only tell
_ABOUT = frozenset(
    """
    __repr__ __str__ __format__ __len__ __hash__ __deepcopy__ __reduce_ex__ __setstate__ __dir__ __contains__ __set__
    __delete__ __dlpack__ __dlpack_device__ __array__ backward register_hook register_post_accumulate_grad_hook
    requires_grad_ retain_grad detach detach_ size stride dim ndimension numel nelement element_size data_ptr
    storage_offset storage untyped_storage is_contiguous is_floating_point is_complex is_signed is_conj is_neg is_pinned
    pin_memory is_shared share_memory_ is_set_to is_same_size get_device has_names is_inference numpy dim_order
    zeros_like ones_like empty_like full_like new_empty new_zeros new_ones new_full
    new_tensor new_empty_strided set_ resize_ is_tensor is_nonzero result_type can_cast promote_types
    """.split()
)
_TELLS = frozenset(  # of what only tells about a parameter: what does so without a look at its bytes (Rule 5)
    """
    shape dtype device requires_grad is_leaf grad_fn layout ndim itemsize nbytes name names output_nr retains_grad
    is_cpu is_cuda is_meta is_sparse is_nested is_quantized _backward_hooks _post_accumulate_grad_hooks __len__ __hash__
    __dir__ size stride dim ndimension numel nelement element_size storage_offset is_contiguous is_floating_point
    is_complex is_signed is_conj is_neg get_device has_names is_inference dim_order is_same_size is_tensor
    requires_grad_ register_hook register_post_accumulate_grad_hook retain_grad result_type can_cast promote_types
    zeros_like ones_like empty_like full_like new_empty new_zeros new_ones new_full
    """.split()
)
_RANDOM = frozenset("normal_ uniform_ random_ bernoulli_ exponential_ cauchy_ geometric_ log_normal_".split())
_CROSSING = {"copy_", "to", "type_as", "set_data"}  # from one device to another, as they are
_apply: Any = vars(Function)["apply"]
_listeners = 0
_holding: list[Callable[[], None]] = []  # what finishes each step that is under way


def enable() -> None:
    """Begins Rule 1."""
    global _listeners
    _listeners += 1
    HostParameter.__torch_function__ = _serve  # type: ignore[assignment]
    Function.apply = classmethod(apply)


def pause() -> None:
    """Until ``resume``, nobody is told: for code that only asks whether a weight takes part in function dispatch.

    So nothing may be under way (Rule 5).
    """
    for finish in list(_holding):
        finish()
    HostParameter.__torch_function__ = torch._C._disabled_torch_function_impl


def resume() -> None:
    """Ends a pause, if there is one."""
    if _listeners:
        HostParameter.__torch_function__ = _serve  # type: ignore[assignment]


def disable() -> None:
    """Ends it, once as often as ``enable`` began it."""
    global _listeners
    _listeners -= 1
    if not _listeners:
        HostParameter.__torch_function__ = torch._C._disabled_torch_function_impl
        Function.apply = _apply


def hold(finish: Callable[[], None]) -> None:
    """Begins Rule 5, whatever else is paused; this finishes the step."""
    _holding.append(finish)
    enable()


def release(finish: Callable[[], None]) -> None:
    """Ends it; safe twice."""
    if finish in _holding:
        _holding.remove(finish)
        disable()


@classmethod  # type: ignore[misc]
@never_compiled  # a compiled frame that reads such a weight ends its graph there
def _serve(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    kwargs = kwargs or {}
    with torch._C.DisableTorchFunctionSubclass():
        if _only_tells(func):
            if _name_of(func) in _TELLS:
                return func(*args, **kwargs)
            _wait_steps(args, kwargs)
            return _given_away(func(*args, **kwargs), args, kwargs)
        hosts = [value for value in _flat(args, kwargs) if type(value) is HostParameter and owner_of(value).serving]
        if not hosts:
            hosts = _met_on_device(func, args, kwargs)
            if hosts:
                return _lent(func, args, kwargs, hosts)
            _wait_steps(args, kwargs)
            _report(args, kwargs)
            return _given_away(func(*args, **kwargs), args, kwargs)
        if _writes(func, args, kwargs) and not _writes_on_device(func, args, kwargs, owner_of(hosts[0]).torch_device):
            _wait_steps(args, kwargs)
            for host in hosts:
                owner_of(host).mark_stale([host])
            return func(*args, **kwargs)
        if _about_host(args, kwargs, owner_of(hosts[0]).torch_device):
            _wait_steps(args, kwargs)
            return _given_away(func(*args, **kwargs), args, kwargs)
        return _lent(func, args, kwargs, hosts)


def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:  # torch's compiler knows it by its name
    """``Function.apply``: it asks nobody about what it is handed."""
    applied, ours = _apply.__get__(None, cls), not torch._C._is_torch_function_enabled()
    return applied(*args, **kwargs) if ours or not holds_parameters(args, kwargs) else lent(applied, args, kwargs)


def holds_parameters(args: Any, kwargs: Any) -> bool:
    """Whether host parameters that are served are passed to a unit."""
    return any(type(value) is HostParameter and owner_of(value).serving for value in _flat(args, kwargs))


def lent(func: Any, args: Any, kwargs: Any) -> Any:
    """A call with stand-ins for the host parameters that it is passed (Rule 1)."""
    return _lent(func, args, kwargs, [value for value in _flat(args, kwargs) if type(value) is HostParameter])


def _lent(func: Any, args: Any, kwargs: Any, hosts: list[Any]) -> Any:
    if _name(func) == "grad" and any(owner_of(host).has_hidden_stand_in(host) for host in hosts):
        # Its graph leads to the host parameters and by no stand-in that could be lent.
        grads, device = func(*args, **kwargs), owner_of(hosts[0]).torch_device
        return tuple(grad if grad is None else grad.to(device) for grad in grads)
    with contextlib.ExitStack() as visits:
        stand_ins = {id(host): visits.enter_context(owner_of(host).lend(host)) for host in hosts}
        result = func(*_replaced(args, stand_ins), **_replaced(kwargs, stand_ins))
    return next((host for host in hosts if stand_ins[id(host)] is result), result)  # of a write, to be written again


def _met_on_device(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Rule 4."""
    hosts = [value for value in _flat(args, kwargs) if type(value) is HostParameter]
    if not hosts or not owner_of(hosts[0]).between_steps or _name(func) in _CROSSING:
        return []
    return hosts if _on_device(args, kwargs, owner_of(hosts[0]).torch_device) else []


def _on_device(args: Any, kwargs: Any, device: torch.device) -> bool:
    """Whether any of the other tensors is on this device."""
    others = (v for v in _flat(args, kwargs) if isinstance(v, Tensor) and type(v) is not HostParameter)
    return any(true_device(other) == device for other in others)


def _wait_steps(args: Any, kwargs: Any) -> None:
    """Rule 5."""
    if _holding or in_backward():
        for value in _flat(args, kwargs):
            if type(value) is HostParameter:
                owner_of(value).wait_step_of(value)


def _given_away(result: Any, args: Any, kwargs: Any) -> Any:
    """What a function gives, which may be a parameter's bytes (Rule 6)."""
    for value in _flat(args, kwargs):
        if type(value) is HostParameter and result is not value and _leads_to(result, value):
            owner_of(value).mark_stale([value])
    return result


def _leads_to(result: Any, parameter: Tensor) -> bool:
    if isinstance(result, Tensor):
        storage = parameter.untyped_storage()
        return torch._C._has_storage(result) and result.untyped_storage()._cdata == storage._cdata
    if isinstance(result, (tuple, list)):
        return any(isinstance(part, Tensor) and _leads_to(part, parameter) for part in result)
    return result is not None and not isinstance(result, (bool, int, float, str))  # an array, a storage, a capsule


def _report(args: Any, kwargs: Any) -> None:
    """Rule 3."""
    if torch.is_grad_enabled():
        for value in _flat(args, kwargs):
            if type(value) is HostParameter and value.requires_grad:
                owner_of(value).read_on_host(value)


def _about_host(args: Any, kwargs: Any, device: torch.device) -> bool:
    """Whether the other tensors are on the host: then that is where the caller computes."""
    others = (v for v in _flat(args, kwargs) if isinstance(v, Tensor) and type(v) is not HostParameter)
    return any(other.dim() and true_device(other) != device for other in others)


def _flat(*values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _flat(*value)
        elif isinstance(value, dict):
            yield from _flat(*value.values())
        else:
            yield value


def _replaced(value: Any, stand_ins: dict[int, Tensor]) -> Any:
    if type(value) is HostParameter:
        return stand_ins.get(id(value), value)
    if isinstance(value, (tuple, list)):
        made = [_replaced(item, stand_ins) for item in value]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    if isinstance(value, dict):
        return {key: _replaced(item, stand_ins) for key, item in value.items()}
    return value


def _name(func: Any) -> str:
    return getattr(func, "__name__", "")


def _name_of(func: Any) -> str:
    """The name of a function; of a property, for the function that gets or sets it."""
    name = _name(func)
    return getattr(getattr(func, "__self__", None), "__name__", "") if name in ("__get__", "__set__") else name


def _writes(func: Any, args: Any, kwargs: Any) -> bool:
    name = _name(func)
    in_place = (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "__iadd__", "__imul__")
    written = (args[0] if in_place and args else None, kwargs.get("out"))
    return any(type(value) is HostParameter for value in _flat(written))


def _writes_on_device(func: Any, args: Any, kwargs: Any, device: torch.device) -> bool:
    """Whether what it writes comes from there: from another tensor, or from the device's random generator."""
    name = _name(func)
    there = name in _RANDOM or (name not in _CROSSING and _on_device(args, kwargs, device))
    return there and device.type != "cpu"


def _only_tells(func: Any) -> bool:
    name = _name(func)
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", "") not in _VIEWS
    return name in _ABOUT
