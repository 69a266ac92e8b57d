"""Attributes of modules in calls that run by turns: each call finds its own, and what earlier calls leave.

The results must be those of the calls one after the other, in their order. Two ways of a call to change a module:

1. *It sets, or deletes, an attribute*, a buffer, a submodule or a hook. That holds for the call alone until it has
   ended and so have all calls before it; then it is *committed*: it holds for all. A turn takes away what its call has
   set when it ends, and puts it back when the call goes on.
2. A call finds what is committed; where that is nothing, or None, a plain value or tensor that the last earlier call
   has set by then. From its first read on it finds the value that it read, and the earlier calls must leave that one:
   compared when these are committed. So a call that sets an attribute before it reads it (scratch) takes part, and so
   does one that finds a cache which an earlier call has made, or one that only asks whether a tensor is there: it gets
   one that tells when it is used. A call that reads a counter before an earlier call counts on ends the run with an
   error.
3. Reads are known of attributes that methods of the modules' classes set (attribute_reads.py). Of any other it is
   assumed that every call reads it as it begins.
4. *It changes in place* what a module keeps: a tensor, a list, a dictionary, a set, a plain object, a random generator,
   or a weight. No call has that for itself, so it is an error, unless no other call is under way, as with one at once.
   An object that knows modules outside of this one, such as a trainer, is left alone (recompute.py, Rule 1).
5. Looked at are, where a turn ends, the modules of the units that it visited, those outside of units that travel, and
   those in which a watched attribute, a buffer or a submodule was set; all, where a call begins and ends, or registers
   hooks, or changes whether modules train. Tensors and generators are compared when a call ends.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import pickle
import random
import sys
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ..autograd.recompute import CONSTANTS, FIXED, foreign, own_forward
from ..autograd.saved_tensors import SHARED
from ..autograd.stand_ins import InPlaceOfForward
from ..compat.modules import HOOKS_OF_FORWARD, hooks_registered
from ..compat.tensors import without_function_modes
from ..errors import ExactnessError
from ..memory.watched_parameters import quietly, true_version
from ..memory.weights import same_bytes
from .attribute_reads import MISSING, SeenTensor, watched

Key = tuple[int, Any]  # of a place: the id of its dictionary, and the name in it
OUTSIDE = -1  # in place of a unit's index: the modules outside of units that travel
_FIXED_KINDS = (type, FunctionType, Enum, InPlaceOfForward)
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)


@dataclass(frozen=True, eq=False, slots=True)
class _Place:
    """A place in a module."""

    contents: dict[Any, Any]
    name: Any
    module: nn.Module

    @property
    def key(self) -> Key:
        """The name, with the id of the dictionary."""
        return id(self.contents), self.name

    @property
    def attribute(self) -> tuple[int, Any]:
        """The name, with the id of the module."""
        return id(self.module), self.name


class CallState:
    """Attributes that a call, or several that follow one another and have ended, set and read."""

    def __init__(self, number: int) -> None:
        self.first = self.last = number
        self.set: dict[Key, tuple[_Place, Any]] = {}
        self.read: dict[tuple[int, Any], Any] = {}  # by attributes: what it found there
        self.seen: dict[tuple[int, Any], SeenTensor | None] = {}  # tensors found there, and not used yet
        self.ended = False


class _Group:
    """The modules of a unit, or those outside of units, with what is committed."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self.modules = modules
        self.places: list[tuple[dict[Any, Any], nn.Module]] = []
        for module in modules:
            own = vars(module)
            hooks = (own[name] for name in HOOKS_OF_FORWARD)
            self.places += [(contents, module) for contents in (own, own["_buffers"], own["_modules"], *hooks)]
        self._dictionaries = [contents for contents, _ in self.places]
        self._values: list[Any] = []
        self.kept: list[tuple[Any, tuple[Any, ...]]] = []  # objects that can change in place, and what was in them
        self.marked: list[tuple[Any, Any, str]] = []  # tensors and generators, and what shows whether they changed

    def note(self) -> None:
        """Note that what is there now is known."""
        self._values = list(itertools.chain.from_iterable(map(dict.values, self._dictionaries)))

    @property
    def is_same(self) -> bool:
        """Whether nothing was set since."""
        now = itertools.chain.from_iterable(map(dict.values, self._dictionaries))
        same = sum(map(len, self._dictionaries)) == len(self._values)
        return same and all(map(operator.is_, now, self._values))


class ModuleState:
    """The attributes of a tree of modules that several calls use by turns."""

    def __init__(self, root: nn.Module, units: Mapping[int, Iterable[nn.Module]], tracks: bool) -> None:
        self.failure: ExactnessError | None = None
        self._root = root
        self._units = units
        self._tracks = tracks
        self._calls: dict[int, CallState] = {}  # begun and not committed, by their last numbers, in order
        self._next = 0  # the number of the first call that is not committed
        self._running: CallState | None = None
        self._installed: dict[Key, tuple[_Place, Any]] = {}  # what is in places in the stead of what is committed
        self._set: list[tuple[nn.Module, str]] = []  # what code has set in this turn, as far as that is watched
        self._ever_set: set[Key] = set()  # places that some call has set
        self._set_in: set[int] = set()  # in modules of these groups
        self._hooks = 0  # registered when the turn began
        self._modes_were: list[bool] = []  # likewise: which modules outside of units train
        self._together = False  # whether calls were under way together since tensors were compared
        self._committed: dict[int, dict[Any, Any]] = {}  # by the ids of dictionaries
        self._watching = contextlib.ExitStack()
        self._look_at_tree()

    def _look_at_tree(self) -> None:
        """Find the modules, and commit what is in them."""
        self._watching.close()
        self._names = {id(module): name or type(module).__name__ for name, module in self._root.named_modules()}
        self._modules = list(self._root.modules())
        of_units = {module: index for index, tops in self._units.items() for top in tops for module in top.modules()}
        by_group: dict[int, list[nn.Module]] = {index: [] for index in (OUTSIDE, *self._units)}
        for module in self._modules:
            by_group[of_units.get(module, OUTSIDE)].append(module)
        self._groups = {index: _Group(modules) for index, modules in by_group.items()}
        self._group_of = {id(module): index for index, modules in by_group.items() for module in modules}
        self._code = _code(self._modules)
        named = dict(self._root.named_parameters())
        self._weight_names, self._weights = [*named], [*named.values()]
        self._versions = _versions(self._weights)
        self._watched: set[tuple[type, str]] = set()
        if self._tracks:
            watching = watched(self._modules, self._note_read, self._note_set)
            self._watched = self._watching.enter_context(watching)
        self._commit(self._groups.values())

    def close(self) -> None:
        """Watch reads no longer."""
        self._watching.close()

    # ---- turns

    def begin(self, number: int) -> CallState:
        """Return the state of a call whose first turn begins."""
        call = CallState(number)
        for other in self._calls.values():  # Rule 3
            for key, (place, _) in other.set.items():
                if not self._is_watched(place):
                    call.read[place.attribute] = self._of_committed(key)
        self._together |= bool(self._calls)
        self._calls[number] = call
        self._calls = dict(sorted(self._calls.items()))
        return call

    def enter(self, call: CallState) -> None:
        """Put what a call set, or finds of earlier calls, into the modules: it goes on."""
        self._installed = {**self._view(call), **call.set}
        for place, value in self._installed.values():
            self._put(place, value)
        self._set.clear()
        self._set_in.clear()
        self._hooks, self._modes_were = hooks_registered(), self._modes()
        self._running = call

    def leave(self, call: CallState, units: Collection[int] | None) -> None:
        """Note what a call has set in a turn that visited these units, or any, and take it out of the modules."""
        self._running = None
        is_whole, found = units is None, self._view(call)
        if units is not None:
            units = {OUTSIDE, *units, *self._set_in}
            if self._hooks != hooks_registered() or self._modes_were != self._modes():
                units = None  # torch sets these in any module
        groups = [self._groups[index] for index in (self._groups if units is None else units)]
        changed = dict(self._changes(groups))
        for key, (place, value) in self._installed.items():
            now = place.contents.get(place.name, MISSING)
            if now is not value:
                changed[key] = place, now
        own = {place.key: place for place in (self._place_of(module, name) for module, name in self._set)}
        changed.update((key, (place, place.contents.get(place.name, MISSING))) for key, place in own.items())
        self._ever_set |= changed.keys()
        for key, (place, now) in changed.items():
            if type(now) is SeenTensor:
                now.use()
                now = now.value
            if key not in own and now is (found[key][1] if key in found else self._of_committed(key)):
                call.set.pop(key, None)
            else:
                call.set[key] = place, now
            if not self._is_watched(place):  # Rule 3
                for other in self._calls.values():
                    other.read.setdefault(place.attribute, self._of_committed(key))
        for key, (place, _) in {**self._installed, **changed}.items():
            self._put(place, self._of_committed(key))
        self._installed = {}
        for group in groups:
            self._check_kept(group)
        if is_whole and (code := _code(self._modules)) != self._code:
            self._code = code
            self._note_change("the class or the forward of a module")

    def end(self, call: CallState) -> None:
        """Note that a call, which has left, has ended; commit what can be."""
        call.ended = True
        seen = [(weakref.ref(tensor), tensor.use) for tensor in call.seen.values() if tensor is not None]
        call.seen = dict.fromkeys(call.seen)
        for still, use in seen:
            if still() is not None:  # in the call's result
                use()
        self._check_marked()
        self._merge()
        first = next(iter(self._calls.values()))
        if not first.ended or first.first != self._next:
            return
        del self._calls[first.last]
        self._next = first.last + 1
        if first.set:
            for other in self._calls.values():
                self._compare(first, other)
            for place, value in first.set.values():
                self._put(place, value)
            self.adopt()

    def adopt(self) -> None:
        """Commit what is in the modules by now."""
        self._versions = _versions(self._weights)
        changed = [group for group in self._groups.values() if any(True for _ in self._changes([group]))]
        if changed and [*self._root.modules()] != self._modules:
            self._look_at_tree()
        else:
            self._commit(changed)
        for group in self._groups.values():
            if any(_differ(item, then) for item, then in group.kept):
                self._note_kept(group)
            group.marked = [(item, _mark(item), name) for item, _, name in group.marked]

    def _modes(self) -> list[bool]:
        return [module.training for module in self._groups[OUTSIDE].modules]

    def wrote(self, weight: str) -> None:
        """Note that a call wrote a weight (Rule 4)."""
        if self._together or len(self._calls) > 1:
            self._fail(weight)

    # ---- what calls find

    def _merge(self) -> None:
        """Merge calls that have ended and follow one another: none between them will read what they set."""
        merged: dict[int, CallState] = {}
        for state in self._calls.values():
            before = merged.get(state.first - 1)
            if before is not None and before.ended and state.ended:
                del merged[before.last]
                self._compare(before, state)
                for place, _ in before.set.values():
                    state.read.pop(place.attribute, None)
                    state.seen.pop(place.attribute, None)
                for key, value in before.read.items():
                    if not _same(state.read.setdefault(key, value), value):
                        self._fail(f"{self._names[key[0]]}.{key[1]}")
                state.seen |= before.seen
                state.first, state.set = before.first, {**before.set, **state.set}
            merged[state.last] = state
        self._calls = merged

    def _view(self, call: CallState) -> dict[Key, tuple[_Place, Any]]:
        """Return what a call finds in the stead of what is committed, but for what it set itself (Rule 2)."""
        found: dict[Key, tuple[_Place, Any]] = {}
        for other in self._calls.values():
            if other.last >= call.first:
                break
            for key, (place, value) in other.set.items():
                is_new = any(self._of_committed(key) is nothing for nothing in (MISSING, None)) and self._is_watched(
                    place
                )
                if is_new and (type(value) in CONSTANTS or isinstance(value, Tensor)):
                    found[key] = place, value
        for state in self._calls.values():
            for key, (place, _) in state.set.items():
                if place.attribute in call.read:
                    found[key] = place, call.read[place.attribute]
        return {key: entry for key, entry in found.items() if key not in call.set}

    def _note_read(self, module: nn.Module, name: str) -> SeenTensor | None:
        """Note that code is about to read an attribute, if it is not one that the running call has set (Rule 2)."""
        call = self._running
        attribute = id(module), name
        if call is None or attribute in call.read or id(module) not in self._names:
            return None
        place = self._place_of(module, name)
        key, value = place.key, place.contents.get(name, MISSING)
        inherited = self._installed[key][1] if key in self._installed else self._of_committed(key)
        if key in call.set or value is not inherited or (module, name) in self._set:
            return None
        if isinstance(value, Tensor) and key in self._ever_set:
            seen = call.seen.get(attribute)
            if seen is None:
                use = functools.partial(self._use, call, place, value)
                seen = call.seen[attribute] = SeenTensor.of(value, use)
            return seen
        call.read[attribute] = value
        return None

    def _use(self, call: CallState, place: _Place, value: Tensor) -> None:
        """Note that a call uses a tensor that it has seen, and that earlier calls must leave there."""
        if place.attribute not in call.read:
            key = place.key
            if (self._installed[key][1] if key in self._installed else self._of_committed(key)) is not value:
                self._fail(f"{self._names[id(place.module)]}.{place.name}")
            call.read[place.attribute] = value
            if key in self._installed:  # of a call that may yet change it
                self._groups[OUTSIDE].marked.append((value, _mark(value), self._names[id(place.module)]))

    def _note_set(self, module: nn.Module, name: str) -> None:
        """Note that code sets, or deletes, an attribute: it is the call's own, even with the value that was there."""
        if id(module) in self._group_of:
            self._set_in.add(self._group_of[id(module)])
            self._set.append((module, name))

    def _place_of(self, module: nn.Module, name: str) -> _Place:
        own = vars(module)
        places = (own, own["_buffers"], own["_modules"])
        return _Place(next((place for place in places if name in place), own), name, module)

    def _is_watched(self, place: _Place) -> bool:
        own = vars(place.module)
        is_attribute = place.contents is own or place.contents is own["_buffers"]
        return is_attribute and (type(place.module), place.name) in self._watched

    def _compare(self, before: CallState, call: CallState) -> None:
        """Compare what calls leave with what a later one read (Rule 2)."""
        for place, value in before.set.values():
            unseen = place.attribute in call.seen and not isinstance(value, Tensor)
            if unseen or not _same(call.read.get(place.attribute, value), value):
                self._fail(f"{self._names[id(place.module)]}.{place.name}")

    def _note_change(self, what: str) -> None:
        """Note that the running call changed something that no call has for itself (Rule 4)."""
        if len(self._calls) > 1:
            self._fail(what)

    def _fail(self, what: str) -> None:
        if self.failure is None:
            self.failure = ExactnessError(
                f"{what} was changed by a call in lockstep, and others under way may have found it as it was before, "
                "or after: one after the other they could compute something else. Run one at a time (at_once=1); or, "
                "if the first call makes what the others read, run one before"
            )

    # ---- what is set

    def _changes(self, groups: Iterable[_Group]) -> Iterator[tuple[Key, tuple[_Place, Any]]]:
        """Yield what is in places in the stead of what was put there."""
        for group in groups:
            if group.is_same:
                continue
            all_committed = True
            for contents, module in group.places:
                number, committed = id(contents), self._committed[id(contents)]
                for name in [*contents, *(name for name in committed if name not in contents)]:
                    if name in FIXED:
                        continue
                    key, now = (number, name), contents.get(name, MISSING)
                    put = self._installed[key][1] if key in self._installed else committed.get(name, MISSING)
                    all_committed &= now is committed.get(name, MISSING)
                    if now is not put and not _are_weights(now, put):
                        yield key, (_Place(contents, name, module), now)
            if all_committed:
                group.note()  # the place of an entry of ours changed

    def _of_committed(self, key: Key) -> Any:
        return self._committed[key[0]].get(key[1], MISSING)

    def _put(self, place: _Place, value: Any) -> None:
        contents, name = place.contents, place.name
        if value is MISSING:
            contents.pop(name, None)
            return
        is_new = name not in contents
        contents[name] = value
        committed = self._committed[id(contents)]
        if is_new and name in committed and contents is not vars(place.module):
            for other in [*committed]:  # buffers, submodules and hooks have an order
                if other in contents:
                    contents[other] = contents.pop(other)

    def _commit(self, groups: Iterable[_Group]) -> None:
        """Commit what is in these modules."""
        for group in groups:
            for contents, _ in group.places:
                self._committed[id(contents)] = {name: v for name, v in contents.items() if name not in FIXED}
            group.note()
            self._note_kept(group)

    # ---- what is changed in place (Rule 4)

    def _note_kept(self, group: _Group) -> None:
        """Note what can change in place of what the modules of a group keep."""
        group.kept, group.marked = [], []
        seen: set[int] = set()
        for module in group.modules:
            own = vars(module)
            values = [v for name, v in own.items() if name not in FIXED and type(v) not in CONSTANTS]
            skipped = foreign(values, self._modules)
            stack = [value for value in (*values, *own["_buffers"].values()) if id(value) not in skipped]
            while stack:
                item = stack.pop()
                if type(item) in CONSTANTS or id(item) in seen or isinstance(item, _FIXED_KINDS):
                    continue
                seen.add(id(item))
                if isinstance(item, nn.Parameter):
                    continue
                if (mark := _mark(item)) is not None:
                    group.marked.append((item, mark, self._names[id(module)]))
                elif isinstance(item, MethodType):
                    stack.append(item.__self__)
                elif not isinstance(item, SHARED) and (isinstance(item, _CONTAINERS) or hasattr(item, "__dict__")):
                    items = _items(item)
                    if not any(isinstance(part, nn.Parameter) for part in items):  # stand-ins are put there
                        group.kept.append((item, items))
                    stack += items

    def _check_kept(self, group: _Group) -> None:
        for item, then in group.kept:
            if _differ(item, then):
                self._note_change(self._owner(item))
                for other in self._groups.values():
                    self._note_kept(other)
                return

    def _owner(self, item: Any) -> str:
        """Name the attribute that leads to an object."""
        for module in self._modules:
            for name, value in vars(module).items():
                if value is item:
                    return f"{self._names[id(module)]}.{name}"
        return f"a {type(item).__name__} that a module keeps"

    def _check_marked(self) -> None:
        weights = _versions(self._weights)
        if self._together and weights != self._versions:
            changed = next(index for index, now in enumerate(weights) if now != self._versions[index])
            self._fail(self._weight_names[changed])
        self._versions = weights
        for group in self._groups.values():
            for index, (item, then, name) in enumerate(group.marked):
                now = _mark(item)
                if not _same_mark(now, then):
                    if self._together:
                        self._fail(f"a {type(item).__name__} that {name} keeps")
                    group.marked[index] = item, now, name
        self._together = sum(not call.ended for call in self._calls.values()) > 1


def _versions(weights: list[Any]) -> list[Any]:
    """Return what shows whether code wrote to weights on the host."""
    with quietly():
        return [(true_version(weight), _address(weight)) for weight in weights]


def _code(modules: list[nn.Module]) -> list[Any]:
    """Return the modules' classes and own forwards."""
    return [(type(module), own_forward(vars(module).get("forward"))) for module in modules]


def _are_weights(one: Any, other: Any) -> bool:
    """Whether both are weights: an attribute beside the parameters has stand-ins put into it, too."""
    return isinstance(one, nn.Parameter) and isinstance(other, nn.Parameter)


def _mark(item: Any) -> Any:
    """Return what shows whether a tensor or a random generator changed; None for anything else."""
    if isinstance(item, Tensor):
        with without_function_modes(), torch.no_grad():
            return item.detach().clone() if item.is_inference() else (item._version, _address(item))
    if isinstance(item, torch.Generator):
        return item.get_state()
    numpy = sys.modules.get("numpy")
    if isinstance(item, random.Random) or (
        numpy is not None and isinstance(item, (numpy.random.RandomState, numpy.random.Generator))
    ):
        return pickle.dumps(item)
    return None


def _address(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a subclass that has no memory itself
        return 0


def _same_mark(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor):
        return bool(one == other)
    return one.shape == other.shape and one.dtype == other.dtype and same_bytes(one, other)


def _same(one: Any, other: Any) -> bool:
    """Whether two values are one object, or equal plain values."""
    if one is other:
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
    return tuple(item) if isinstance(item, _CONTAINERS) else (type(item), *vars(item), *vars(item).values())
