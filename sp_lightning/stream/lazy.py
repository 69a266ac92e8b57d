"""Tensors whose bytes may be pending: functions of torch that read or write them wait first."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ..compat.dynamo import never_compiled_hook
from ..compat.torch import GRADIENT_HOOKS, HOOKS_AFTER_ACCUMULATION, storage_id, without_dispatch

_tensor: Any = Tensor  # type checkers do not know that its attributes are descriptors
data_of, set_data = _tensor.data.__get__, _tensor.data.__set__
grad_of, set_grad = _tensor.grad.__get__, _tensor.grad.__set__
requires_grad_of, set_requires_grad = _tensor.requires_grad.__get__, _tensor.requires_grad.__set__
stored_version = _tensor._version.__get__

_READ = "requires_grad shape dtype device layout ndim is_leaf is_sparse is_meta grad_fn nbytes is_cuda _version"
_READ += f" {GRADIENT_HOOKS} {HOOKS_AFTER_ACCUMULATION} grad_dtype"  # torch 2.11 has no `grad_dtype`
_CALLED = "size numel dim stride storage_offset element_size is_floating_point is_complex is_inference is_pinned"
_CALLED += " requires_grad_ register_hook register_post_accumulate_grad_hook __len__ __hash__"

# Functions that neither read nor write a tensor's bytes.
METADATA: set[Any] = {getattr(Tensor, name).__get__ for name in _READ.split() if hasattr(Tensor, name)}
METADATA |= {grad_of, set_grad, set_requires_grad, *(getattr(Tensor, name) for name in _CALLED.split())}

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

    def plain(self) -> Tensor:
        """Wait for the bytes, and return a plain tensor over them."""
        self.before()
        this: Any = self
        with without_dispatch():
            return this.as_subclass(Tensor)  # type: ignore[no-any-return]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo[id(self)] = copy.deepcopy(self.plain(), memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def before(self) -> None:
        """Wait until the tensor's bytes are there, and no pending work uses them. Runs before a function gets it."""
        raise NotImplementedError

    def after(self, func: Any, result: Any) -> None:
        """Note the result of a function that got this tensor. Runs after each such function."""

    @classmethod
    @never_compiled_hook
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        lazy = [] if func in METADATA or compiles_own_step() else found_in((args, kwargs), Lazy)
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


def found_in(values: Iterable[Any], kind: Any) -> list[Any]:
    """List the objects of a class among values, and in lists, tuples and dicts among them, in their order."""
    found = []
    for value in values:
        if isinstance(value, kind):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += found_in(value, kind)
        elif isinstance(value, dict):
            found += found_in(value.values(), kind)
    return found


def replaced(value: Any, kind: Any, replace: Callable[[Any], Any]) -> Any:
    """Replace the objects of a class in a list, tuple or dict, and in those inside of it, in their order."""
    if isinstance(value, dict):
        return dict(zip(value, replaced(list(value.values()), kind, replace), strict=True))
    items = [
        replace(item)
        if isinstance(item, kind)
        else replaced(item, kind, replace)
        if isinstance(item, (list, tuple, dict))
        else item
        for item in value
    ]
    return value._make(items) if hasattr(value, "_make") else type(value)(items)


def version_of(tensor: Tensor) -> int:
    """Return a tensor's version; -1 for a tensor of inference mode, which has none."""
    return -1 if tensor.is_inference() else tensor._version


class Copies:
    """Copies that a function gets in the place of tensors on another device."""

    def __init__(self) -> None:
        self._made: list[tuple[Tensor, Tensor, int]] = []  # with the version of the copy before the function ran

    def add(self, tensor: Tensor, copied: Tensor) -> Tensor:
        """Note a tensor's copy, and return the copy."""
        self._made.append((tensor, copied, version_of(copied)))
        return copied

    def keep_writes(self, result: Any) -> Any:
        """Copy the function's writes to the tensors; return its result, or the tensor whose copy that is."""
        for tensor, copied, version in self._made:
            if version_of(copied) != version:
                with torch.no_grad():
                    tensor.copy_(copied)  # with dispatch: a view of a weight's notes the write
            if result is copied:
                result = tensor
        return result
