"""Tensors whose bytes may be pending: functions of torch that read or write them wait first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..compat.torch import GRADIENT_HOOKS, HOOKS_AFTER_ACCUMULATION, storage_id, without_dispatch

_tensor: Any = Tensor  # type checkers do not know that its attributes are descriptors
data_of, set_data = _tensor.data.__get__, _tensor.data.__set__
grad_of, set_grad = _tensor.grad.__get__, _tensor.grad.__set__
requires_grad_of, set_requires_grad = _tensor.requires_grad.__get__, _tensor.requires_grad.__set__
stored_version = _tensor._version.__get__

_READ = "requires_grad shape dtype device layout ndim is_leaf is_sparse is_meta grad_fn nbytes is_cuda _version".split()

# Functions that neither read nor write a tensor's bytes.
METADATA: set[Any] = {getattr(Tensor, name).__get__ for name in (*_READ, GRADIENT_HOOKS, HOOKS_AFTER_ACCUMULATION)}
METADATA |= {set_requires_grad, Tensor.requires_grad_, Tensor.size, Tensor.numel, Tensor.dim}
METADATA |= {Tensor.stride, Tensor.storage_offset, Tensor.element_size, Tensor.is_floating_point, Tensor.is_complex}
METADATA |= {Tensor.is_inference, Tensor.is_pinned, Tensor.__len__, Tensor.__hash__}
METADATA |= {Tensor.register_hook, Tensor.register_post_accumulate_grad_hook}
METADATA |= {grad_of, set_grad}
METADATA |= {_tensor.grad_dtype.__get__} if hasattr(Tensor, "grad_dtype") else set()  # compilers read it

# Functions that make arrays, through which the user may write at any time without a trace.
ARRAYS = {Tensor.numpy, Tensor.__array__, Tensor.__dlpack__}


own_steps: list[Any] = []  # the optimizer whose own `step` runs on the host now; empty: none


def compiles_own_step() -> bool:
    """Whether torch compiles the user's own `optimizer.step` now, before which all that it reads was waited for."""
    return len(own_steps) > 0 and torch.compiler.is_compiling()  # torch 2.11 compiles no `bool` of a list


def has_others(types: Any) -> bool:
    """Whether a function got an argument of another class than tensors, whose `__torch_function__` answers first."""
    return len(types) > 1 and not all(issubclass(kind, Tensor) for kind in types)


class Lazy:
    """A mixin for tensors whose bytes may be pending: functions of torch wait for them first.

    Results are plain tensors, unless `after` gives them a class of their own.
    """

    __slots__ = ()

    def before(self) -> None:
        """Wait until the tensor's bytes are there, and no pending work uses them. Runs before a function gets it."""
        raise NotImplementedError

    def after(self, func: Any, result: Any) -> None:
        """Note the result of a function that got this tensor. Runs after each such function."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        lazy = [] if func in METADATA or compiles_own_step() else list(found_in((args, kwargs), Lazy))
        for tensor in lazy:
            tensor.before()
        with without_dispatch():
            result = func(*args, **(kwargs or {}))
            for tensor in lazy:
                tensor.after(func, result)
            return result


def writes(func: Any) -> bool:
    """Whether a function of torch writes to its first argument, judged by the function's name."""
    name: str = getattr(func, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")


def shares_bytes(tensor: Tensor, value: Tensor) -> bool:
    """Whether ``tensor`` is on the host and has the storage of ``value``, a host tensor."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return False
    return storage_id(tensor.untyped_storage()) == storage_id(value.untyped_storage())


def found_in(value: Any, kind: type) -> Iterator[Any]:
    """Yield the objects of a class in a value, and in lists, tuples and dicts inside of it, in their order."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from found_in(item, kind)
    elif isinstance(value, dict):
        yield from found_in(list(value.values()), kind)
