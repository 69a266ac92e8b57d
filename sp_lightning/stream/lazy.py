"""Tensors whose bytes may be pending: functions of torch that read or write them wait first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..compat.torch import GRADIENT_HOOKS, HOOKS_AFTER_ACCUMULATION, storage_id, without_dispatch

_tensor: Any = Tensor  # whose attributes are descriptors, as type checkers do not know
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
METADATA |= {_tensor.grad_dtype.__get__} if hasattr(Tensor, "grad_dtype") else set()  # compilers ask

ARRAYS = {Tensor.numpy, Tensor.__array__, Tensor.__dlpack__}  # through which the user may write at any time, unseen


own_steps: list[Any] = []  # the optimizer whose own code steps on the host now, if one does


def in_own_step() -> bool:
    """Whether torch compiles code of an optimizer's own step, which has waited for its weights and gradients."""
    return len(own_steps) > 0 and torch.compiler.is_compiling()  # torch 2.11 compiles no `bool` of a list


def has_others(types: Any) -> bool:
    """Whether a function got an object that is no tensor and answers first, as those that load when they are read."""
    return len(types) > 1 and not all(issubclass(kind, Tensor) for kind in types)


class Lazy:
    """A mixin for subclasses of Tensor whose functions wait for the bytes.

    Results are plain tensors, unless `after` gives them a class of their own.
    """

    __slots__ = ()

    def before(self) -> None:
        """Wait until the bytes are there, and nothing else reads or writes them."""
        raise NotImplementedError

    def after(self, func: Any, result: Any) -> None:
        """Note what a function returned for this tensor."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        lazy = [] if func in METADATA or in_own_step() else list(found_in((args, kwargs), Lazy))
        for tensor in lazy:
            tensor.before()
        with without_dispatch():
            result = func(*args, **(kwargs or {}))
            for tensor in lazy:
                tensor.after(func, result)
            return result


def writes(func: Any) -> bool:
    """Whether a function of torch writes to its first argument, by its name."""
    name: str = getattr(func, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")


def shares_bytes(tensor: Tensor, value: Tensor) -> bool:
    """Whether a tensor is over the bytes of a host tensor."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return False
    return storage_id(tensor.untyped_storage()) == storage_id(value.untyped_storage())


def found_in(value: Any, kind: type) -> Iterator[Any]:
    """Find the objects of a class among a function's arguments, in their order."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from found_in(item, kind)
    elif isinstance(value, dict):
        yield from found_in(list(value.values()), kind)
