"""Recomputation: a unit's forward runs again in backward, with arguments, buffers and generators as they were.

`torch.utils.checkpoint` does the work. It keeps torch's generators, but neither what a forward changes in place
(caches, lists, arguments, buffers) nor the generators of Python and NumPy, nor which weights required gradients.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import random
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..compat.torch import without_dispatch
from ..errors import ExactnessError
from .lazy import requires_grad_of
from .leaf import version_of

# Classes that `copied` does not copy: values that do not change, tensors and modules, to which `Argument` and
# `ForwardBuffer` find writes, and functions.
ATOMS: tuple[type, ...] = (Tensor, nn.Module, type, enum.Enum, str, bytes, int, float, complex)
ATOMS += (torch.dtype, torch.device, torch.Generator, types.NoneType)
ATOMS += (types.FunctionType, types.MethodType, types.ModuleType)

FLAT = (set, bytearray, numpy.ndarray)  # copied without what is in them


def copied(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """Copy the containers, arrays and objects of a value, which a forward may change; other values are kept as is."""
    memo = {} if memo is None else memo
    if isinstance(value, ATOMS):
        return value
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, tuple):
        items = [copied(item, memo) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return value._make(items) if hasattr(value, "_make") else type(value)(items)
    if not isinstance(value, (list, deque, dict, *FLAT)) and not hasattr(value, "__dict__"):
        return value
    made = memo[id(value)] = copy.copy(value)
    if isinstance(made, (list, deque)):
        for index, item in enumerate(value):
            made[index] = copied(item, memo)
    elif isinstance(made, dict):
        for key, item in value.items():
            dict.__setitem__(made, key, copied(item, memo))
    for name, item in vars(made).items() if hasattr(made, "__dict__") else ():
        made.__dict__[name] = copied(item, memo)
    return made


def tensors_in(value: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Yield the tensors in a value, and in the lists, deques, dicts, tuples and objects in it that `copied` copies."""
    seen = set() if seen is None else seen
    if isinstance(value, Tensor):
        yield value
    if isinstance(value, ATOMS) or id(value) in seen:
        return
    seen.add(id(value))
    items = value if isinstance(value, (list, deque, tuple)) else value.values() if isinstance(value, dict) else ()
    for item in (*items, *getattr(value, "__dict__", {}).values()):
        yield from tensors_in(item, seen)


class Argument:
    """An argument of a forward, of which a second run gets the value that the first one found."""

    def __init__(self, value: Any, is_cloned: bool) -> None:
        self.value = value
        self._before: Any
        self._is_tensor = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)  # a parameter is passed on
        if self._is_tensor:
            self._version = -1 if value.is_inference() else value._version
            self._requires_grad = value.requires_grad
            self._before = value.detach().clone() if is_cloned else None
        else:
            self._before = copied(value)
        self._inside = [] if isinstance(value, Tensor) else [(each, version_of(each)) for each in tensors_in(value)]

    @property
    def was_written(self) -> bool:
        """Whether the argument is a tensor to which the forward wrote."""
        return self._is_tensor and self._version >= 0 and self.value._version != self._version

    def _was_written_inside(self) -> bool:
        """Whether a tensor in this argument's containers and objects was written since the first run began."""
        return any(version_of(tensor) != version for tensor, version in self._inside)

    def keep(self, pack: Callable[[Tensor], Any], where: str) -> None:
        """Save the argument's value for a second run by ``pack``, and drop the tensor; raise if the value is lost."""
        self._where = where
        if self._was_written_inside():
            raise ExactnessError(
                f"{where} wrote in place to a tensor inside of one of its arguments: a second run would find what it"
                " wrote; pass the tensor itself, or use activations='keep' or 'offload'"
            )
        if self._is_tensor:
            if self.was_written and self._before is None:
                raise ExactnessError(
                    f"{where} wrote to one of its arguments in place, which it did not do in earlier calls: a second"
                    " run would find what it wrote; use activations='keep' or 'offload'"
                )
            self._is_written = self.was_written
            kept: Tensor = self._before if self._is_written else self.value
            self._before = pack(kept)
            self.value = None

    def restored(self) -> Any:
        """Return the argument as the first run found it; raise if a tensor inside of it was written since."""
        if self._was_written_inside():
            raise ExactnessError(
                f"a tensor inside of an argument of {self._where} was written between forward and backward: the second"
                " run would find what was written; use activations='keep' or 'offload'"
            )
        if not self._is_tensor:
            return copied(self._before)
        found = self._before.get().detach().requires_grad_(self._requires_grad)
        return found.clone() if self._is_written else found  # a clone: autograd refuses writes to a leaf


class ForwardBuffer:
    """A module's buffer as it was before a forward, with a clone of its values if ``is_cloned``."""

    def __init__(self, place: dict[str, Any], name: str, is_cloned: bool) -> None:
        self.place, self.name = place, name
        self.tensor: Tensor = place[name]
        self._version = self.tensor._version
        self._before = self.tensor.clone() if is_cloned else None

    def forget_unchanged(self) -> None:
        """Drop the clone if the forward did not write to the buffer.

        Values are compared as well, because batch norm writes its statistics without a new version.
        """
        is_unwritten = self.tensor._version == self._version
        if self._before is not None and is_unwritten and torch.equal(self._before, self.tensor):
            self._before = None

    @property
    def has_changed(self) -> bool:
        """Whether the forward wrote to the buffer, or replaced it."""
        return self._before is not None or self.place.get(self.name) is not self.tensor

    @property
    def is_lost(self) -> bool:
        """Whether the forward wrote to the buffer and its old values were not cloned."""
        return self.tensor._version != self._version and self._before is None

    def restore(self) -> None:
        """Put the buffer into its module, with its values of before the forward."""
        self.place[self.name] = self.tensor if self._before is None else self._before.clone()


class Recompute:
    """Runs a module's forward, and a second time in backward with the same arguments and buffers.

    The first call clones all tensors among the arguments, and all buffers. Later calls clone only those that earlier
    calls wrote to.
    """

    def __init__(self, module: nn.Module, name: str, device: torch.device) -> None:
        self._module, self.name = module, name
        self._device = torch.empty(0, device=device)  # tells torch of which device to keep the generator
        self._is_first = True
        self._written: set[int] = set()  # positions of arguments that the forward writes to
        self._buffers: set[tuple[int, str]] = set()  # modules and names of buffers that it writes to

    def run(self, call: Callable[..., Any], args: Any, kwargs: Any, pack: Callable[[Tensor], Any], policy: Any) -> Any:
        """Run the forward under `torch.utils.checkpoint`, so that backward runs it again with the same values.

        ``pack`` saves tensors among the arguments. ``policy.is_repeated`` is set while the forward runs.
        """
        is_first, names = self._is_first, list(kwargs)
        arguments = [
            Argument(value, is_first or place in self._written) for place, value in enumerate((*args, *kwargs.values()))
        ]
        buffers = [
            ForwardBuffer(module._buffers, name, is_first or (id(module), name) in self._buffers)
            for module in self._module.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        trained = _trained(self._module)
        generators = _generators()
        again = False

        def forward(_: Tensor) -> Any:
            """Call the module with the caller's arguments, or in backward with those that the first run found."""
            before, policy.is_repeated, policy.repeated = policy.is_repeated, True, self.name
            try:
                if not again:
                    return call(*args, **kwargs)
                values = [argument.restored() for argument in arguments]
                count = len(values) - len(names)
                with _as_they_were(buffers, generators), _trained_as_they_were(trained):
                    return call(*values[:count], **dict(zip(names, values[count:], strict=True)))
            finally:
                policy.is_repeated = before

        result = checkpoint(forward, self._device, use_reentrant=False)
        again = True
        args = kwargs = None  # `forward` would keep them
        self._learn(arguments, buffers, pack)
        return result

    def _learn(self, arguments: list[Argument], buffers: list[ForwardBuffer], pack: Callable[[Tensor], Any]) -> None:
        """Note the arguments and buffers that the forward wrote to, and save values that a second run needs."""
        is_first, self._is_first = self._is_first, False
        for place, argument in enumerate(arguments):
            if argument.was_written:
                self._written.add(place)
            argument.keep(pack, self.name)
        owners = {id(module._buffers): id(module) for module in self._module.modules()}
        for buffer in buffers:
            if is_first:
                buffer.forget_unchanged()
            if buffer.is_lost:
                raise ExactnessError(
                    f"{self.name} wrote to its buffer {buffer.name!r}, which it did not do in earlier calls: a second"
                    " run would find what it wrote; use activations='keep' or 'offload'"
                )
            if buffer.has_changed and id(buffer.place) in owners:
                self._buffers.add((owners[id(buffer.place)], buffer.name))
        buffers[:] = [buffer for buffer in buffers if buffer.has_changed]


def _generators() -> tuple[Any, Any]:
    """Return the states of Python's and NumPy's random generators."""
    return random.getstate(), numpy.random.get_state()


def _set_generators(states: tuple[Any, Any]) -> None:
    """Set the states of Python's and NumPy's random generators."""
    random.setstate(states[0])
    numpy.random.set_state(states[1])


def _trained(module: nn.Module) -> list[tuple[nn.Parameter, bool]]:
    """List the parameters of a module and its children, and whether each requires a gradient."""
    with without_dispatch():
        return [
            (param, requires_grad_of(param))
            for each in module.modules()
            for param in each._parameters.values()
            if param is not None
        ]


@contextlib.contextmanager
def _trained_as_they_were(trained: list[tuple[nn.Parameter, bool]]) -> Iterator[None]:
    """Set `requires_grad` of parameters to that of the first run, in this context."""
    with without_dispatch():
        changed = [(param, trains) for param, trains in trained if requires_grad_of(param) != trains]
    for param, trains in changed:
        param.requires_grad_(trains)
    try:
        yield
    finally:
        for param, trains in changed:
            param.requires_grad_(not trains)


@contextlib.contextmanager
def _as_they_were(buffers: list[ForwardBuffer], generators: tuple[Any, Any]) -> Iterator[None]:
    """Put buffers and random generators back into the state before the first run, in this context."""
    now = [(buffer, buffer.place[buffer.name]) for buffer in buffers]
    states = _generators()
    _set_generators(generators)
    try:
        for buffer in buffers:
            buffer.restore()
        yield
    finally:
        for buffer, tensor in now:
            buffer.place[buffer.name] = tensor
        _set_generators(states)
