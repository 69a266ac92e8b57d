"""Wholes: parameters that consist of several tensors, as quantised ones do, of any library; none is trained, but for
DTensors (shards.py).

- The tensors travel with their unit as weights like others. On the device the parameter's own class makes it up again
  of them, after each load: they are plain tensors, so that code which kept the whole has its bytes. On the host the
  parameter is what it was, over bytes in the unit's slab.
- The modules have the whole on the device while its unit's call is under way. Elsewhere the user's code has the
  parameter. While any call is under way, the parameter has a class whose functions and attributes are those of the
  whole on the device; its unit is visited for each. What writes to it writes to the host.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, strided

from ..compat.tensors import IS_PARAMETER, flattened
from ..compat.torch import tree_map_only, without_dispatch
from ..errors import PartitionError, UnsupportedError
from .lazy import found_in, requires_grad_of, writes
from .leaf import Slot, Weight, using


@dataclass(eq=False, frozen=True)
class Whole:
    """A parameter that consists of several tensors, which are weights of its unit."""

    name: str
    parameter: nn.Parameter
    form: Any  # makes the parameter again of its parts
    parts: tuple[tuple[str, Any], ...]  # names and tensors


def whole_of(name: str, param: nn.Parameter) -> Whole:
    """Take apart a frozen parameter that consists of several tensors; raise if that is not possible."""
    kind = type(param).__name__
    if param.requires_grad:
        raise PartitionError(
            f"{name} is a {kind}, which consists of several tensors and requires grad: it can be streamed, but not "
            f"trained. Freeze it (requires_grad_(False)) and train adapters, or use a plain parameter"
        )
    try:
        with without_dispatch():
            form, parts = flattened(param, name)
        if not parts:
            raise ValueError("it has none")
    except Exception as error:
        raise PartitionError(
            f"{name} is a {kind}, which cannot be taken apart into the tensors that it consists of ({error}): use a "
            "plain parameter"
        ) from error
    for part_name, part in parts:
        if not isinstance(part, Tensor) or isinstance(part, nn.Parameter) or part.layout is not strided:
            raise PartitionError(
                f"{part_name}, of which {name} consists among others, is a {type(part).__name__} and not a plain dense "
                f"tensor, so the {kind} cannot be streamed: use a plain parameter"
            )
    return Whole(name, param, form, tuple(parts))


# ---- while it streams


class Part(Weight):
    """One of the tensors that a weight consists of."""

    is_part = True

    def __init__(self, name: str, tensor: Any) -> None:
        super().__init__(name, tensor, [], tensor.dtype)


class WholeWeight:
    """A parameter that consists of several tensors, and what stands for it on the device."""

    def __init__(self, whole: Whole, slots: list[Slot], parts: list[Weight], device: torch.device) -> None:
        self.name, self.host = whole.name, whole.parameter
        self._form, self._parts, self._device = whole.form, parts, device
        self._slots, self.unit = slots, parts[0].unit
        self._there: Any = None  # the weight on the device, while the modules have it

    def on_device(self) -> Any:
        """Load the unit, and return the weight made of its parts on the device; a kept result keeps their memory."""
        if self._there is not None:
            return self._there
        self.unit.window.visit(self.unit)
        made = self._form.whole(iter([part.there for part in self._parts]), self._device)
        setattr(made, IS_PARAMETER, True)
        return made

    def bind(self) -> None:
        """Put the weight made of its parts on the device into the modules; raise if it was set to train."""
        if requires_grad_of(self.host):
            raise UnsupportedError(
                f"requires_grad of {self.name} was set to True, but it is a {type(self.host).__name__}, which consists"
                " of several tensors: it can be streamed, but not trained. Train adapters, or a plain parameter"
            )
        self._there = self.on_device()
        self._exchange(self.host, self._there)

    def unbind(self) -> None:
        """Put the user's parameter back into the modules."""
        self._exchange(self._there, self.host)
        self._there = None

    def _exchange(self, there: Any, given: Any) -> None:
        """Replace one tensor by another in the modules, unless the user's code has put a third there."""
        for holder, key in self._slots:
            if holder.get(key) is there:
                holder[key] = given


# ---- reads by code of others, while a call is under way

read: dict[int, WholeWeight] = {}  # weights that reads find on the device, by the id of the parameter


class ReadWhole:
    """A mixin for the class of a quantised parameter: reads get the weight on the device, writes the host's."""

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        """Do nothing: the library's class may register each of its subclasses."""

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
        with using(units):
            args, kwargs = tree_map_only(ReadWhole, lambda host: read[id(host)].on_device(), (args, kwargs or {}))
            return func(*args, **kwargs)

    __torch_dispatch__ = __torch_function__


def show_device(wholes: Sequence[WholeWeight]) -> None:
    """Change the class of parameters, so that code that reads them gets the weights on the device."""
    for whole in wholes:
        if id(whole.host) not in read:
            read[id(whole.host)] = whole
            whole.host.__class__ = _reading(type(whole.host))


def show_host(wholes: Sequence[WholeWeight]) -> None:
    """Give parameters their own class back, so that code that reads them gets the bytes on the host."""
    for whole in wholes:
        if read.pop(id(whole.host), None) is not None:
            whole.host.__class__ = type(whole.host).__mro__[2]


@functools.cache
def _reading(kind: type) -> type:
    """Make the subclass of a parameter's class whose reads get the weight on the device."""
    return type(kind.__name__, (ReadWhole, kind), {"__slots__": ()})
