"""Recomputation: a unit's forward runs again in backward, with arguments, buffers and generators as they were.

`torch.utils.checkpoint` does the work. It keeps torch's generators, but neither what a forward changes in place
(caches, lists, arguments, buffers) nor the generators of Python and NumPy, nor which weights required gradients.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import functools
import operator
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
from .activations import Kept
from .lazy import requires_grad_of

# Classes that `copied` does not copy: values that do not change, modules, to whose buffers `Recompute` finds writes,
# and functions.
ATOMS: tuple[type, ...] = (nn.Module, type, enum.Enum, str, bytes, int, float, complex)
ATOMS += (torch.dtype, torch.device, torch.Generator, types.NoneType)
ATOMS += (types.FunctionType, types.MethodType, types.ModuleType)

FLAT = (set, bytearray, numpy.ndarray)  # copied without what is in them


def copied(value: Any, kind: Any, replace: Callable[[Any], Any], memo: dict[int, Any] | None = None) -> Any:
    """Copy the containers, arrays and objects of a value, which a forward may change; other values are kept as is.

    Objects of the class ``kind`` are replaced by what ``replace`` returns for them, each once.
    """
    memo = {} if memo is None else memo
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, kind):
        memo[id(value)] = replace(value)
        return memo[id(value)]
    if isinstance(value, (Tensor, ATOMS)):
        return value
    if isinstance(value, tuple):
        items = [copied(item, kind, replace, memo) for item in value]
        if all(map(operator.is_, items, value)):
            return value
        return value._make(items) if hasattr(value, "_make") else type(value)(items)
    if not isinstance(value, (list, deque, dict, *FLAT)) and not hasattr(value, "__dict__"):
        return value
    made = memo[id(value)] = copy.copy(value)
    if made is value:  # an object that is never copied, such as a singleton
        return value
    if isinstance(made, (list, deque)):
        for index, item in enumerate(value):
            made[index] = copied(item, kind, replace, memo)
    elif isinstance(made, dict):
        for key, item in value.items():
            dict.__setitem__(made, key, copied(item, kind, replace, memo))
    for name, item in vars(made).items() if hasattr(made, "__dict__") else ():
        made.__dict__[name] = copied(item, kind, replace, memo)
    return made


def tensors_in(value: Any) -> list[Tensor]:
    """List the tensors in a value, and in the containers and objects in it that `copied` copies."""
    found: list[Tensor] = []
    copied(value, Tensor, found.append)
    return found


class Before:
    """A tensor that a forward finds among its arguments or buffers, with a clone of its values if ``is_cloned``.

    One of inference mode has no version: that it was written shows in its values, if it is cloned.
    """

    packed: Any  # the values of an argument, saved for the second run

    def __init__(self, tensor: Tensor, is_cloned: bool) -> None:
        self.tensor: Any = tensor
        self._version = None if tensor.is_inference() else tensor._version
        self._requires_grad = tensor.requires_grad
        self.clone = tensor.detach().clone() if is_cloned else None

    @property
    def was_written(self) -> bool:
        """Whether the forward wrote to the tensor, as its version shows."""
        return self.has_other_values if self._version is None else bool(self.tensor._version != self._version)

    @functools.cached_property
    def has_other_values(self) -> bool:
        """Whether the forward left other values than the clone's: batch norm writes statistics without a version.

        Compared once, as that waits for the device.
        """
        return self.clone is not None and not torch.equal(self.clone, self.tensor)

    def pack(self, pack: Callable[[Tensor], Any]) -> None:
        """Save the values that an argument had before the forward, and drop the tensor."""
        if not self.was_written:
            self.clone = None
        if self.clone is None and self._version is None:
            return  # it stays as it is: what saves tensors asks for their version
        self.packed = pack(self.tensor if self.clone is None else self.clone)
        self.tensor = None

    def unpack(self) -> Tensor:
        """Return the argument as the first run found it."""
        kept = self.packed.get() if self.tensor is None else self.tensor
        found: Tensor = kept.detach().requires_grad_(self._requires_grad)
        return found if self.clone is None else found.clone()  # a clone: autograd refuses writes to a leaf


class Recompute:
    """Runs a module's forward, and a second time in backward with the same arguments and buffers.

    The first call clones all tensors that are arguments, and all buffers. Later calls clone only those that the first
    one wrote to. Tensors inside of arguments, such as those of a cache, may not be written; those of inference mode are
    treated as arguments.
    """

    def __init__(self, module: nn.Module, name: str, device: torch.device) -> None:
        self._module, self.name = module, name
        self._device = torch.empty(0, device=device)  # tells torch of which device to keep the generator
        # Arguments, by their place, and buffers, by module and name, that the forward writes to; None: not known.
        self._written: set[Any] | None = None

    def run(self, call: Callable[..., Any], args: Any, kwargs: Any, pack: Callable[[Tensor], Any], policy: Any) -> Any:
        """Run the forward under `torch.utils.checkpoint`, so that backward runs it again with the same values.

        ``pack`` saves tensors among the arguments. ``policy.is_repeated`` is set while the forward runs.
        """
        arguments: dict[Any, Before] = {}
        places = {id(value): place for place, value in (*enumerate(args), *kwargs.items())}

        def note(tensor: Tensor) -> Any:
            """Record an input tensor for the second run, and return the record; return a parameter as it is.

            Records are keyed by position or keyword; tensors inside of an argument are numbered.
            """
            if isinstance(tensor, nn.Parameter):
                return tensor
            is_direct = id(tensor) in places
            key = is_direct, places.get(id(tensor), len(arguments))
            arguments[key] = Before(tensor, (is_direct or tensor.is_inference()) and self._may_write(key))
            return arguments[key]

        before = copied((args, kwargs), Tensor, note)
        buffers: dict[Any, Before] = {}
        for module in self._module.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    key = module, name
                    buffers[key] = Before(buffer, buffer.is_inference() or self._may_write(key))
        with without_dispatch():
            params = [p for module in self._module.modules() for p in module._parameters.values() if p is not None]
            trained = [(param, requires_grad_of(param)) for param in params]
        generators = random.getstate(), numpy.random.get_state()
        again = False

        def forward(_: Tensor) -> Any:
            """Call the module with the caller's arguments, or in backward with those that the first run found."""
            was_repeated, policy.is_repeated, policy.repeated = policy.is_repeated, True, self.name
            try:
                if not again:
                    return call(*args, **kwargs)
                values, named = copied(before, Before, Before.unpack)
                with _as_they_were(buffers, trained, generators):
                    return call(*values, **named)
            finally:
                policy.is_repeated = was_repeated

        result = checkpoint(forward, self._device, use_reentrant=False)
        again = True
        args = kwargs = None  # `forward` would keep them
        self._learn(arguments, buffers)
        for (is_direct, _), argument in arguments.items():
            argument.pack(pack if is_direct else Kept)  # layers share caches, and what is in them: it stays
        return result

    def _may_write(self, key: Any) -> bool:
        """Whether the forward may write to an argument or a buffer: the first call tells."""
        return self._written is None or key in self._written

    def _learn(self, arguments: dict[Any, Before], buffers: dict[Any, Before]) -> None:
        """Note what the forward wrote to, and raise if that was not cloned; forget the buffers that it left alone."""
        if self._written is None:
            self._written = {key for key, one in arguments.items() if one.was_written}
            self._written |= {key for key, one in buffers.items() if one.was_written or one.has_other_values}
        for key, one in [*arguments.items(), *buffers.items()]:
            if one.was_written and one.clone is None:
                what = f"its buffer {key[1]!r}, which it did not do in earlier calls"
                if key in arguments:
                    what = "an argument, which it did not do in earlier calls"
                    what = what if key[0] else "a tensor inside of one of its arguments"
                raise ExactnessError(
                    f"{self.name} wrote to {what}: a second run would find what it wrote; use activations='keep' or"
                    " 'offload'"
                )
        for key in [*buffers]:
            module, name = key
            is_as_before = key not in self._written and not buffers[key].was_written
            if is_as_before and module._buffers.get(name) is buffers[key].tensor:
                del buffers[key]


@contextlib.contextmanager
def _as_they_were(
    buffers: dict[Any, Before], trained: list[tuple[nn.Parameter, bool]], generators: tuple[Any, Any]
) -> Iterator[None]:
    """For a second run, in this context, set what changed since the first back to what it was before.

    That is buffers, `requires_grad` of parameters, and the random generators of Python and NumPy.
    """
    with contextlib.ExitStack() as after:
        after.callback(random.setstate, random.getstate())
        after.callback(numpy.random.set_state, numpy.random.get_state())
        random.setstate(generators[0])
        numpy.random.set_state(generators[1])
        with without_dispatch():
            changed = [(param, trains) for param, trains in trained if requires_grad_of(param) != trains]
        for param, trains in changed:
            after.callback(param.requires_grad_, not trains)
            param.requires_grad_(trains)
        for (module, name), one in buffers.items():
            after.callback(module._buffers.__setitem__, name, module._buffers[name])
            module._buffers[name] = one.tensor if one.clone is None else one.clone.clone()
        yield
