"""Weights that are read outside their unit: ``F.linear(x, self.embedding.weight)``, a regulariser, an evaluation fast path.

1. Inside a step, and outside the visits of units, every torch function that is handed host parameters gets their
   stand-ins, for which their units are visited for the time of the call: the same kernels on the same device as in a
   plain run, and the same way of gradients.
2. Not so for what only asks about a parameter or registers something with it, for what writes to it, for what works on
   other host tensors, and while an optimizer steps: that is about the host parameter.
3. Within visits the mode costs too much to be on always. It is on at the first visit of a unit in each mode of running,
   and stays on for units that were seen to read weights of others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .parameters import HostParameter, true_device

if TYPE_CHECKING:
    from .engine import Engine

_VIEWS = {"T", "mT", "H", "mH"}  # properties that compute; all others only tell
_ABOUT = frozenset(
    """
    __repr__ __str__ __format__ __len__ __hash__ __deepcopy__ __reduce_ex__ __setstate__ __dir__ __contains__ __set__
    __delete__ __dlpack__ __dlpack_device__ __array__ backward register_hook register_post_accumulate_grad_hook
    requires_grad_ retain_grad detach detach_ size stride dim ndimension numel nelement element_size data_ptr
    storage_offset storage untyped_storage is_contiguous is_floating_point is_complex is_signed is_conj is_neg is_pinned
    pin_memory is_shared share_memory_ is_set_to is_same_size get_device has_names is_inference numpy dim_order
    zeros_like ones_like empty_like rand_like randn_like randint_like full_like new_empty new_zeros new_ones new_full
    new_tensor new_empty_strided set_ resize_ is_tensor is_nonzero result_type can_cast promote_types
    """.split()
)


class OutsideReads(TorchFunctionMode):
    """In force inside a step, outside visits (Rules 1 and 3)."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        hosts = [value for value in _flat(args, kwargs) if type(value) is HostParameter]
        if not hosts or self.engine.optimizing:
            return func(*args, **kwargs)
        if _writes(func, args, kwargs):
            self.engine.suspect(hosts)
            return func(*args, **kwargs)
        if _only_tells(func) or self._about_host(args, kwargs):
            return func(*args, **kwargs)
        return self._with_stand_ins(func, hosts, args, kwargs)

    def _about_host(self, args: Any, kwargs: Any) -> bool:
        device = self.engine.device.torch_device
        others = (v for v in _flat(args, kwargs) if isinstance(v, Tensor) and type(v) is not HostParameter)
        return any(other.dim() and true_device(other) != device for other in others)

    def _with_stand_ins(self, func: Callable[..., Any], hosts: list[HostParameter], args: Any, kwargs: Any) -> Any:
        engine = self.engine
        depth = engine.depth
        engine.read_outside()
        try:
            stand_ins = {}
            for host in hosts:
                unit = engine.owner(host)
                assert unit is not None
                engine.enter(unit)
                stand_ins[id(host)] = unit.stand_in(host)
            return func(*_replaced(args, stand_ins), **_replaced(kwargs, stand_ins))
        finally:
            engine.leave_to(depth)


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
        return stand_ins[id(value)]
    if isinstance(value, (tuple, list)):
        made = [_replaced(item, stand_ins) for item in value]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    if isinstance(value, dict):
        return {key: _replaced(item, stand_ins) for key, item in value.items()}
    return value


def _name(func: Any) -> str:
    return getattr(func, "__name__", "")


def _writes(func: Any, args: Any, kwargs: Any) -> bool:
    name = _name(func)
    in_place = (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "__iadd__", "__imul__")
    in_place = in_place and name not in _ABOUT
    written = (args[0] if in_place and args else None, kwargs.get("out"))
    return any(type(value) is HostParameter for value in _flat(written))


def _only_tells(func: Any) -> bool:
    name = _name(func)
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", "") not in _VIEWS
    return name in _ABOUT
