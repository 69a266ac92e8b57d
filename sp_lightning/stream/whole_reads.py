"""Reads of weights that consist of several tensors, outside of their unit's call: a call of another module gets them.

The modules have such a weight on the device while its unit's call is under way (leaf.py). Elsewhere the user's code
has the parameter. While any call is under way, the parameter has a class whose functions and attributes are those of
the weight on the device; its unit is visited for each. What writes to it writes to the host.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..compat.streaming import tree_map_only
from .lazy import found_in, writes
from .leaf import WholeWeight

read: dict[int, WholeWeight] = {}  # by the id of the parameter


class ReadWhole:
    """A mixin of the class that the parameter's library gave it."""

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        """Keep the class from the library, which may register every subclass of its own."""

    def __getattribute__(self, name: str) -> Any:
        own: dict[str, Any] = object.__getattribute__(self, "__dict__")
        is_own = name in own and not isinstance(own[name], Tensor)
        is_writing = name.endswith("_") and not name.endswith("__")
        if is_own or is_writing or name == "__dict__":
            return object.__getattribute__(self, name)
        return getattr(read[id(self)].on_device(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = [read[id(host)] for host in found_in((args, kwargs), ReadWhole)]
        if writes(func):
            show_host(found)
            try:
                return func(*args, **(kwargs or {}))
            finally:
                show_device(found)
        units = list({whole.unit: None for whole in found})
        with units[0].window.using(units):
            args, kwargs = tree_map_only(ReadWhole, lambda host: read[id(host)].on_device(), (args, kwargs or {}))
            return func(*args, **kwargs)

    __torch_dispatch__ = __torch_function__


def show_device(wholes: Sequence[WholeWeight]) -> None:
    """Have whoever reads the parameters find the weights on the device."""
    for whole in wholes:
        if id(whole.host) not in read:
            read[id(whole.host)] = whole
            whole.host.__class__ = _reading(type(whole.host))


def show_host(wholes: Sequence[WholeWeight]) -> None:
    """Have the parameters as they are on the host."""
    for whole in wholes:
        if read.pop(id(whole.host), None) is not None:
            whole.host.__class__ = type(whole.host).__mro__[2]


@functools.cache
def _reading(kind: type) -> type:
    return type(kind.__name__, (ReadWhole, kind), {"__slots__": ()})
