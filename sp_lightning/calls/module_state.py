"""Whether calls that run by turns change their modules, of which all of them find the same.

1. Code *sets* an attribute, a buffer, a submodule or a hook: there is another object afterwards, and not one that is
   equal: a plain value, or a tuple or list of the same objects. So do hooks of all modules, and a tensor in the place
   of a weight (`torch.func.functional_call`), other than the weight's stand-in.
2. Code *changes in place* what a module keeps: a tensor, an array, a list, a dictionary, a set, a plain object, a
   random generator, or a weight. A hook keeps what its closure refers to, and the values of globals that it names. An
   object that knows modules outside of this one, such as a trainer, is left alone (recompute.py, Rule 1).
3. Looked at are, where a turn ends, the modules of the units that it visited, those outside of units that travel, and
   those of which an attribute was set; all, after a call's first turn and where it ends, or if it registers hooks or
   changes whether modules train. Tensors, arrays and generators are compared where `changed` is asked for them.
4. A write through ``.data``, or to an array over a tensor, changes no version: small tensors on the host are copied,
   and compared. On a device that would take memory and a wait in each turn.
"""

from __future__ import annotations

import itertools
import logging
import operator
import pickle
import random
import sys
from array import array
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..autograd.recompute import CONSTANTS, FIXED, foreign, host_of, own_forward
from ..autograd.saved_tensors import SHARED
from ..autograd.stand_ins import InPlaceOfForward
from ..compat.modules import HOOKS_OF_ALL, HOOKS_OF_FORWARD, hooks_registered
from ..compat.patches import MODULE_DELATTR, MODULE_SETATTR
from ..compat.tensors import without_function_modes
from ..memory.watched_parameters import quietly, true_version
from ..memory.weights import same_bytes

SMALL = 1 << 20  # bytes of a tensor (Rule 4)
OUTSIDE = -1  # in place of a unit's index: the modules outside of units that travel
MISSING = object()
_FIXED_KINDS = (type, Enum, InPlaceOfForward, logging.Logger)
_CODE = (ModuleType, FunctionType, BuiltinFunctionType, logging.Logger)  # that a hook names, beside what it keeps
_EMPTY = CellType()
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_listeners: list[set[int]] = []  # which get the ids of modules of which an attribute is set


class _Group:
    """The modules of a unit, or those outside of units, and what was in them when `note` was last called."""

    def __init__(self, modules: list[nn.Module], hooks_of_all: Iterable[dict[int, Any]]) -> None:
        self.modules = modules
        self.places: list[tuple[dict[Any, Any], Any]] = [(hooks, nn.Module) for hooks in hooks_of_all]
        for module in modules:
            own = vars(module)
            hooks = (own[name] for name in HOOKS_OF_FORWARD)
            self.places += [(contents, module) for contents in (own, own["_buffers"], own["_modules"], *hooks)]
        self._dictionaries = [contents for contents, _ in self.places]
        self._weights: list[dict[str, Any]] = []
        self._noted: list[dict[Any, Any]] = []
        self._values: list[Any] = []
        self.kept: list[tuple[Any, tuple[Any, ...]]] = []  # objects that can change in place, and what was in them
        self.marked: list[
            tuple[Any, Any, str]
        ] = []  # tensors, arrays and generators, and what shows whether they changed

    def note(self) -> None:
        """Note what is there now."""
        self._values = list(itertools.chain.from_iterable(map(dict.values, self._dictionaries)))
        self._noted = [
            {name: v for name, v in contents.items() if name not in FIXED} for contents in self._dictionaries
        ]
        self._weights = [_weights_of(module) for module in self.modules]

    @property
    def is_same(self) -> bool:
        """Whether nothing was set since."""
        now = itertools.chain.from_iterable(map(dict.values, self._dictionaries))
        same = sum(map(len, self._dictionaries)) == len(self._values)
        return same and all(map(operator.is_, now, self._values)) and self._other_weight is None

    @property
    def _other_weight(self) -> tuple[nn.Module, str] | None:
        """The place of a weight in which there is something else since."""
        for module, then in zip(self.modules, self._weights, strict=True):
            now = _weights_of(module)
            for name in {**now, **then}:
                if now.get(name, MISSING) is not then.get(name, MISSING):
                    return module, name
        return None

    @property
    def set_since(self) -> tuple[Any, Any] | None:
        """A place where something was set since."""
        for (contents, module), then in zip(self.places, self._noted, strict=True):
            for name in {**contents, **then}:
                if name not in FIXED and not _same(contents.get(name, MISSING), then.get(name, MISSING)):
                    return module, name
        return self._other_weight


class ModuleState:
    """The modules of a tree, and what they kept when they were last looked at."""

    def __init__(self, root: nn.Module, units: Mapping[int, Iterable[nn.Module]], tracks: bool) -> None:
        self._root = root
        self._units = units
        self._tracks = tracks
        self._set_in: set[int] = set()  # the ids of modules of which this turn set an attribute
        self._hooks = 0  # registered when the turn began
        self._modes: list[bool] = []  # likewise: which modules outside of units train
        self._look_at_tree()
        if tracks:
            _listeners.append(self._set_in)
            MODULE_SETATTR.install(_set_attribute)
            MODULE_DELATTR.install(_delete_attribute)

    def close(self) -> None:
        """Stop watching which attributes code sets on modules."""
        if self._tracks:
            self._tracks = False
            _listeners[:] = [one for one in _listeners if one is not self._set_in]
            MODULE_SETATTR.remove()
            MODULE_DELATTR.remove()

    def _look_at_tree(self) -> None:
        """Find the modules and weights, and what they keep."""
        self._names = {id(module): name or type(module).__name__ for name, module in self._root.named_modules()}
        self._names[id(nn.Module)] = "hooks of all modules"
        self._modules = list(self._root.modules())
        of_units = {module: index for index, tops in self._units.items() for top in tops for module in top.modules()}
        by_group: dict[int, list[nn.Module]] = {index: [] for index in (OUTSIDE, *self._units)}
        for module in self._modules:
            by_group[of_units.get(module, OUTSIDE)].append(module)
        self._groups = {
            index: _Group(modules, HOOKS_OF_ALL if index == OUTSIDE else ()) for index, modules in by_group.items()
        }
        self._group_of = {id(module): index for index, modules in by_group.items() for module in modules}
        self._code = _code(self._modules)
        self._weights = dict(self._root.named_parameters())
        self._versions = _versions(self._weights)
        for group in self._groups.values():
            self._note(group)

    def begin_turn(self) -> None:
        """Note what torch changes in any module."""
        self._set_in.clear()
        self._hooks, self._modes = hooks_registered(), self._training()

    def _training(self) -> list[bool]:
        return [module.training for module in self._groups[OUTSIDE].modules]

    def changed(self, units: Collection[int] | None, tensors: bool = False) -> str:
        """Name what code changed since the last look; empty if nothing.

        Args:
            units: The indices of the units in whose modules code ran; None: in any.
            tensors: Whether to compare tensors, arrays and generators, too.
        """
        if units is not None and self._hooks == hooks_registered() and self._modes == self._training():
            units = {OUTSIDE, *units, *(self._group_of[key] for key in self._set_in if key in self._group_of)}
        else:
            units = self._groups
        found = ""
        for group in [self._groups[index] for index in units]:
            found = found or next((self._owner(item) for item, then in group.kept if _differ(item, then)), "")
            if not group.is_same:
                found = found or self._name_of(group.set_since)
                self._note(group)
        if tensors and not found:
            found = self._tensor_changed()
        if found or tensors:
            self.adopt()
        return found

    def adopt(self) -> None:
        """Take what is in the modules by now for what is known."""
        if [*self._root.modules()] != self._modules or _code(self._modules) != self._code:
            self._look_at_tree()
            return
        self._versions = _versions(self._weights)
        for group in self._groups.values():
            if not group.is_same or any(_differ(item, then) for item, then in group.kept):
                self._note(group)
            group.marked = [(item, _mark(item), name) for item, _, name in group.marked]

    def _name_of(self, place: tuple[Any, Any] | None) -> str:
        return "" if place is None else f"{self._names[id(place[0])]}.{place[1]}"

    def _owner(self, item: Any) -> str:
        """Name the attribute that leads to an object."""
        for module in self._modules:
            for name, value in vars(module).items():
                if value is item:
                    return f"{self._names[id(module)]}.{name}"
        return f"a {type(item).__name__} that a module or a hook keeps"

    def _tensor_changed(self) -> str:
        """Name a tensor, a generator, a weight or a module's code that is not as it was."""
        versions = _versions(self._weights)
        for name, now, then in zip(self._weights, versions, self._versions, strict=True):
            if now != then:
                return name
        for group in self._groups.values():
            for item, mark, name in group.marked:
                if not _same_mark(_mark(item), mark):
                    return f"a {type(item).__name__} that {name} keeps"
        return "" if _code(self._modules) == self._code else "the class or the forward of a module"

    def _note(self, group: _Group) -> None:
        """Note what the modules of a group keep, and what of that can change in place (Rule 2)."""
        group.note()
        group.kept, group.marked = [], []
        seen: set[int] = set()
        for module in group.modules:
            own = vars(module)
            values = [v for name, v in own.items() if name not in FIXED and type(v) not in CONSTANTS]
            hooks = [own[name] for name in HOOKS_OF_FORWARD] + [*HOOKS_OF_ALL] * (module is self._root)
            for hook in (hook for contents in hooks for hook in contents.values()):
                if isinstance(hook, FunctionType):
                    group.kept.append((hook, _items(hook)))
                values += _items(hook) if isinstance(hook, (FunctionType, partial)) else [hook]
            skipped = foreign(values, self._modules)
            stack = [value for value in (*values, *own["_buffers"].values()) if id(value) not in skipped]
            while stack:
                item = stack.pop()
                if type(item) in CONSTANTS or id(item) in seen or isinstance(item, (FunctionType, *_FIXED_KINDS)):
                    continue
                seen.add(id(item))
                if isinstance(item, nn.Parameter):
                    continue
                if (mark := _mark(item)) is not None:
                    group.marked.append((item, mark, self._names[id(module)]))
                elif isinstance(item, MethodType):
                    stack.append(item.__self__)
                elif not isinstance(item, SHARED) and (
                    isinstance(item, _CONTAINERS) or hasattr(item, "__dict__") or _slots(item)
                ):
                    items = _items(item)
                    if not any(isinstance(part, nn.Parameter) for part in items):  # stand-ins are put there
                        group.kept.append((item, items))
                    stack += items


def _weights_of(module: nn.Module) -> dict[str, Any]:
    """Return what is in the places of a module's weights; in the place of a stand-in, its weight."""
    return {name: host_of(weight) for name, weight in dict.items(vars(module)["_parameters"])}


def _set_attribute(module: nn.Module, name: str, value: Any) -> None:
    for listener in _listeners:
        listener.add(id(module))
    MODULE_SETATTR.original(module, name, value)


def _delete_attribute(module: nn.Module, name: str) -> None:
    for listener in _listeners:
        listener.add(id(module))
    MODULE_DELATTR.original(module, name)


def _versions(weights: Mapping[str, Any]) -> list[Any]:
    """Return what shows whether code wrote to weights on the host."""
    with quietly():
        return [(true_version(weight), _address(weight)) for weight in weights.values()]


def _code(modules: list[nn.Module]) -> list[Any]:
    """Return the modules' classes and own forwards."""
    return [(type(module), own_forward(vars(module).get("forward"))) for module in modules]


def _mark(item: Any) -> Any:
    """Return what shows whether a tensor, an array or a random generator changed; None for anything else."""
    if isinstance(item, Tensor):
        with without_function_modes(), torch.no_grad():
            if item.is_inference():
                return item.detach().clone()
            is_small = type(item) is Tensor and item.is_cpu and item.layout is torch.strided and item.nbytes <= SMALL
            copied = item.detach().clone() if is_small else None
            return item._version, _address(item), copied
    if isinstance(item, torch.Generator):
        return item.get_state()
    if isinstance(item, (bytearray, array)):
        return bytes(item)
    if isinstance(item, random.Random):
        return pickle.dumps(item)
    if (numpy := sys.modules.get("numpy")) is None:
        return None
    if isinstance(item, numpy.ndarray):
        return item.shape, hash(item.tobytes())
    return pickle.dumps(item) if isinstance(item, (numpy.random.RandomState, numpy.random.Generator)) else None


def _address(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a subclass that has no memory itself
        return 0


def _same_mark(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor):
        if isinstance(one, tuple) and isinstance(one[-1], Tensor):
            return bool(one[:-1] == other[:-1]) and isinstance(other[-1], Tensor) and _same_mark(one[-1], other[-1])
        return bool(one == other)
    return one.shape == other.shape and one.dtype == other.dtype and same_bytes(one, other)


def _same(one: Any, other: Any) -> bool:
    """Whether two values are one object, equal plain values, or weights: stand-ins are put into attributes, too."""
    if one is other or (isinstance(one, nn.Parameter) and isinstance(other, nn.Parameter)):
        return True
    if type(one) is not type(other):
        return False
    if type(one) in (tuple, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) in CONSTANTS and repr(one) == repr(other)


def _differ(item: Any, then: tuple[Any, ...]) -> bool:
    """Whether other objects are in an object than then."""
    now = _items(item)
    return len(now) != len(then) or not all(map(operator.is_, now, then))


def _items(item: Any) -> tuple[Any, ...]:
    if isinstance(item, dict):
        return *item, *dict.values(item)
    if isinstance(item, FunctionType):
        cells = [cell.cell_contents for cell in item.__closure__ or () if cell != _EMPTY]
        named = (item.__globals__.get(name) for name in item.__code__.co_names)
        return *cells, *(value for value in named if not isinstance(value, _CODE))
    if isinstance(item, partial):
        return item.func, *item.args, *item.keywords.values()
    if isinstance(item, _CONTAINERS):
        return tuple(item)
    own = getattr(item, "__dict__", {})
    return type(item), *own, *own.values(), *(getattr(item, name, MISSING) for name in _slots(item))


def _slots(item: Any) -> list[str]:
    """Return the names of an object's attributes that are in no ``__dict__``."""
    found = [vars(kind).get("__slots__", ()) for kind in type(item).__mro__]
    return [name for names in found for name in ([names] if isinstance(names, str) else names) if name[:2] != "__"]
