"""``activations="recompute"``: a unit's forward saves its inputs only, and runs again in backward.

It uses torch's own non-reentrant checkpoint, which restores torch's random state and autocast. These rules go beyond
it, so that the second run equals the first and leaves no trace:

1. What forward may change besides its outputs is restored for the second run as it was before the first, and put back
   afterwards: buffers, plain attributes, objects that modules keep (lists, counters, random generators) or that were
   passed (a cache, say), attributes in Python of tensors that are kept or passed (weights, too), hooks, Python's and
   NumPy's random states, weights that the unit writes itself, and what is in the places of parameters for the time of a
   call (`torch.func.functional_call`). So are the modules' children, classes and own forwards, which weights train, and
   torch's defaults, which contexts set around a forward: type and device of new tensors, and the choices of kernels. An
   object that knows modules outside of the unit, such as a trainer, does not belong to the unit and is left alone. What
   cannot be copied is copied in parts, as far as these can be; an iterator that cannot be copied is an error. A copy of
   plain values, such as a model's config, is used again as long as neither it nor the original has changed.
2. Tensors are not copied, except buffers, weights that were written, and tensors that are passed to a unit of which it
   is not known yet that it leaves them alone: forward may change them in place (a dropout that comes first). If it did,
   the copy is kept. A change in place is an error if no copy can stand for the tensor, if the unit did not make such
   changes before, or if a module keeps the tensor beside its buffers or an attribute shares it with an argument. So is
   a second run after any of these tensors, or a weight of the unit, was changed or given other data since the first.
3. A forward that differs in the second run for any other reason is an error, where torch can see it: when it saves
   other tensors than the first time.
4. A unit inside of a non-reentrant checkpoint of the user's is left to that one, which runs it again as in a plain run,
   with its traces: batch normalization counts twice there. Around a checkpoint of ours it would stop before the unit.
5. The second run is on the stream of the first one, whichever stream needs something of it first: a unit may compute on
   several. So what it saves is made, ordered and freed on the streams on which a plain run has it.
"""

from __future__ import annotations

import contextlib
import copy
import copyreg
import io
import itertools
import operator
import random
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..compat.dynamo import never_compiled
from ..compat.kernels import choose_kernels, kernel_choices
from ..compat.modules import CALL, CONVERT, COPY, HOOKS_OF_MODULE, HOOKS_OF_WEIGHT
from ..compat.tensors import FLATTEN, storage_id, without_function_modes
from ..errors import ExactnessError
from ..memory.device import Device
from ..memory.host_copy import HostCopy
from ..memory.watched_parameters import HOST_OF_WHOLE, DeviceParameter, quietly
from ..memory.weights import SavedBytes
from .offload import Offload, OffloadedTensor
from .saved_tensors import SHARED, mark_own_checkpoint, reachable, tensors_in
from .stand_ins import InPlaceOfForward

Call = Callable[..., Any]
_COPIED_BY_ITSELF = {
    "__deepcopy__",
    "__reduce__",
    "__reduce_ex__",
    "__getstate__",
    "__getnewargs__",
    "__getnewargs_ex__",
}
# Attributes of a module that forward does not change, or that are restored in another way, and those in whose places
# entries are (runtime/entries.py): a copy of an entry would be the method that it is in front of.
ENTERED = frozenset(("forward", "flatten_parameters", "generate", CALL, CONVERT, COPY))
FIXED = frozenset(vars(nn.Module())) - {"training"} | ENTERED
_children: Callable[[nn.Module], dict[str, Any]] = operator.attrgetter("_modules")
# Types whose objects cannot change.
CONSTANTS = frozenset((str, bytes, int, float, complex, bool, type, torch.dtype, torch.device, type(None)))
# What a copy has as it is.
_ATOMS = (Tensor, nn.Module, str, bytes, int, float, complex, type, torch.dtype, type(None))


class Recompute:
    """Run units' forwards so that they can run again in backward."""

    def __init__(self, device: Device, offload: Offload | None) -> None:
        self._device, self._offload = device, offload
        # Tells the checkpoint of which device to restore the random state.
        self._anchor = torch.empty(0, device=device.torch_device)
        self.written = Written()
        self._leaves_alone: set[str] = set()  # units that do not change their arguments (Rule 2)
        self._copies = _KeptCopies()

    @never_compiled
    def run(
        self, call: Call, name: str, store: HostCopy | None, root: nn.Module, args: Any, kwargs: Any
    ) -> tuple[Any, list[OffloadedTensor]]:
        """Run ``call(*args, **kwargs)`` now, and again when backward needs what it saves.

        Returns its output, and the arguments that wait on the host for backward: with ``offload``, those that
        gradients flow through.
        """
        try:
            before = _ForwardSnapshot(name, root, args, kwargs, self.written, self._copies)
        except _CannotCopy:
            raise ExactnessError(
                f"{name} keeps, or is passed, an iterator that cannot be copied, so its forward cannot run again; "
                "use activations='keep' or 'offload'"
            ) from None
        known = name in self._leaves_alone
        clones = {} if known else _argument_clones((args, kwargs))
        offloaded = before.offload_arguments(self._offload) if self._offload is not None and known else []
        passed = _versions(tensors_in((args, kwargs)))
        first = [(args, kwargs)]  # the closure refers to them no longer than the first run takes
        stream = None if self._device.is_host else self._device.compute

        def forward(_anchor: Tensor) -> Any:
            with contextlib.nullcontext() if first or stream is None else self._device.on(stream):  # Rule 5
                again, again_kwargs = first.pop() if first else before.arguments()
                return call(*again, **again_kwargs)

        @contextlib.contextmanager
        def first_run() -> Iterator[None]:
            mark_own_checkpoint()
            with self.written.recording(before.weights):
                yield

        def contexts() -> tuple[Any, Any]:
            return first_run(), before

        output = checkpoint(forward, self._anchor, use_reentrant=False, context_fn=contexts)
        changed = _changed(passed)
        if _changed(before.kept):
            raise ExactnessError(
                f"{name} changes a tensor in place that one of its modules keeps as an attribute, so its forward "
                "cannot run again; register it as a buffer, or use activations='keep' or 'offload'"
            )
        if not changed <= clones.keys():
            self._leaves_alone.discard(name)
            raise ExactnessError(
                f"{name} changes a tensor that is passed to it in place, so its forward cannot run again; "
                "use activations='keep' or 'offload'"
            )
        if changed:
            before.replace({key: clones[key] for key in changed})
        else:
            self._leaves_alone.add(name)
        if self._offload is not None and not known:
            offloaded = before.offload_arguments(self._offload)
        before.rely_on(store)
        return output, offloaded


def _versions(tensors: Iterable[Tensor]) -> list[tuple[Tensor, int]]:
    with without_function_modes():
        return [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]


def _changed(versions: list[tuple[Tensor, int]]) -> set[int]:
    """Return the ids of the tensors that were written in place since."""
    with without_function_modes():
        return {id(tensor) for tensor, version in versions if tensor._version != version}


class Written:
    """The weights that model code writes, with their bytes before: each is recorded for the forward that wrote it."""

    def __init__(self) -> None:
        self._records: list[dict[Any, Tensor]] = []
        self.counts: dict[int, int] = {}  # of writes, by the ids of the weights: these leave versions as they were
        self.restored: dict[Any, Tensor] = {}  # in a second run: the weights' bytes before the first

    @contextlib.contextmanager
    def recording(self, record: dict[Any, Tensor]) -> Iterator[None]:
        """Record in ``record`` what is reported within the context."""
        self._records.append(record)
        try:
            yield
        finally:
            self._records.pop()

    def report(self, key: Any, before: Tensor) -> None:
        """Record that a weight was written; ``before`` is its host copy, not yet overwritten."""
        store, index = key
        weight = id(store.params[index])
        self.counts[weight] = self.counts.get(weight, 0) + 1
        if self._records:
            self._records[-1].setdefault(key, before.clone())


class _ForwardState:
    """A copy of all that a unit's forward may change, other than its arguments and weights (Rule 1)."""

    def __init__(self, modules: list[nn.Module], tensors: Iterable[Tensor]) -> None:
        numpy = sys.modules.get("numpy")
        self._random = random.getstate(), numpy and numpy.random.get_state()
        self.device, self._dtype, self._kernels = (
            torch.get_default_device(),
            torch.get_default_dtype(),
            kernel_choices(),
        )
        self.attributes: list[tuple[Any, dict[str, Any]]] = [
            (m, {name: v for name, v in vars(m).items() if name not in FIXED}) for m in modules
        ]
        self.note_attributes(tensors)
        self._code = [(module, type(module), vars(module).get("forward")) for module in modules]
        self._buffers = [(module._buffers, dict(module._buffers)) for module in modules]
        self._parameters: list[tuple[dict[str, Any], dict[str, Any]]] = [(p, dict(p)) for p in _places(modules)]
        self._children = [*zip(map(_children, modules), map(dict, map(_children, modules)), strict=True)]
        with quietly():
            self._hooks = [
                (owner, name, dict(getattr(owner, name) or ()))
                for owners, names in ((modules, HOOKS_OF_MODULE), (_weights(modules), HOOKS_OF_WEIGHT))
                for owner in owners
                for name in names
            ]

    def note_attributes(self, tensors: Iterable[Tensor]) -> None:
        """Take the attributes that tensors have in Python, too."""
        self.attributes += [(tensor, dict(vars(tensor))) for tensor in tensors if not hasattr(type(tensor), FLATTEN)]

    @property
    def values(self) -> list[Any]:
        """The values of all attributes that a forward may change."""
        return [v for _, attributes in self.attributes for v in attributes.values() if not isinstance(v, _ATOMS)]

    def copied(self, memo: dict[int, Any], copies: dict[int, _Copy]) -> _ForwardState:
        """Return the same state in copies of what a forward may change; what several values share stays shared.

        ``copies``: those that are there, by the ids of the values.
        """

        def copied(value: Any) -> Any:
            known = copies.get(id(value))
            if known is None or not known.parts.keys().isdisjoint(memo):
                return value if isinstance(value, _ATOMS) else _copied(value, memo)
            memo.update(known.parts)
            return known.copy

        made = copy.copy(self)
        made.attributes = [(owner, {name: copied(v) for name, v in then.items()}) for owner, then in self.attributes]

        def clone(buffer: Tensor | None) -> Tensor | None:
            if buffer is not None:
                attributes, buffer = vars(buffer), buffer.detach().clone()
                if attributes and not hasattr(type(buffer), FLATTEN):
                    vars(buffer).update({name: copied(v) for name, v in attributes.items()})
            return buffer

        made._buffers = [
            (place, {name: clone(value) for name, value in buffers.items()}) for place, buffers in self._buffers
        ]
        made._parameters = [(p, {name: host_of(value) for name, value in then.items()}) for p, then in self._parameters]
        return made

    def restore(self) -> None:
        """Put all of it back, except the default device, which is a context."""
        python, numpy = self._random
        random.setstate(python)
        if numpy is not None:
            sys.modules["numpy"].random.set_state(numpy)
        torch.set_default_dtype(self._dtype)
        choose_kernels(self._kernels)
        for module, kind, forward in self._code:
            if type(module) is not kind:
                module.__class__ = kind
            if own_forward(vars(module).get("forward")) is not own_forward(forward):
                vars(module)["forward"] = forward
                if forward is None:
                    del vars(module)["forward"]
        for owner, values in self.attributes:
            own = vars(owner)
            for name in own.keys() - FIXED - values.keys():
                del own[name]
            own.update(values)
        for place, buffers in self._buffers:
            place.clear()
            place.update(buffers)
        for place, then in self._parameters:
            for name, value in then.items():
                if place.get(name, value) is not value and host_of(place[name]) is not host_of(value):
                    place[name] = value
        for children, was in self._children:
            if [*children.items()] != [*was.items()]:
                children.clear()
                children.update(was)
        with quietly():
            for owner, name, before in self._hooks:
                hooks = getattr(owner, name)
                if hooks is not None and hooks.keys() != before.keys():
                    hooks.clear()
                    hooks.update(before)


class _Copy:
    """A copy of a plain value, which no code changes, and what shows whether the value has changed since."""

    def __init__(self, value: Any, contents: list[tuple[Any, tuple[Any, ...]]]) -> None:
        memo: dict[int, Any] = {}
        self.copy = copy.deepcopy(value, memo)
        self.parts = {id(part): memo[id(part)] for part, _ in contents if id(part) in memo}  # copies, by the originals
        self._contents = contents  # refers to the originals, whose ids stay theirs
        self._of_copy = _contents(self.copy) or []
        self._given_back: list[_Copy] = []  # copies of this copy

    @property
    def is_true(self) -> bool:
        """Whether the value and its copy are what they were."""
        both = itertools.chain(self._contents, self._of_copy)
        return all(len(then) == len(now := _items(part)) and all(map(operator.is_, now, then)) for part, then in both)

    def take(self) -> _Copy:
        """Copy the stored copy for a second run, which may change it."""
        while self._given_back:
            if (again := self._given_back.pop()).is_true:
                return again
        return _Copy(self.copy, self._of_copy)

    def give_back(self, again: _Copy) -> None:
        """Give back what was taken, after the run."""
        self._given_back.append(again)


class _KeptCopies:
    """The copies of plain values, each for all units that keep it (Rule 1)."""

    def __init__(self) -> None:
        self._of_units: dict[str, dict[int, _Copy]] = {}  # by the ids of the values
        self._all: weakref.WeakValueDictionary[int, _Copy] = weakref.WeakValueDictionary()

    def of(self, name: str, state: _ForwardState) -> dict[int, _Copy]:
        """Return copies of the plain values in a unit's state, by their ids."""
        found: dict[int, _Copy] = {}
        for value in state.values:
            known = self._all.get(id(value))
            if id(value) in found:
                continue
            if known is None or not known.is_true:
                contents = _contents(value)
                known = None if contents is None else _Copy(value, contents)
            if known is not None:
                found[id(value)] = self._all[id(value)] = known
        self._of_units[name] = found
        return found


def _contents(value: Any) -> list[tuple[Any, tuple[Any, ...]]] | None:
    """List all parts of a value with what is in them; None if it leads to anything but plain values and constants."""
    found: list[tuple[Any, tuple[Any, ...]]] = []
    stack, seen = [value], set()
    while stack:
        part = stack.pop()
        if type(part) in CONSTANTS or id(part) in seen:
            continue
        if not (type(part) in (dict, list, tuple, set, frozenset) or _is_plain_object(part)):
            return None
        seen.add(id(part))
        found.append((part, _items(part)))
        stack += found[-1][1]
    return found


def _items(part: Any) -> tuple[Any, ...]:
    if type(part) is dict:
        return *part, *part.values()
    return tuple(part) if type(part) in (list, tuple, set, frozenset) else (type(part), vars(part))


def _is_plain_object(value: Any) -> bool:
    """Whether an object consists of its class and the entries of its ``__dict__``, also for ``copy``."""
    kind = type(value)
    if isinstance(value, SHARED) or not hasattr(value, "__dict__"):
        return False
    if any(not _COPIED_BY_ITSELF.isdisjoint(vars(base)) for base in kind.__mro__[:-1]):
        return False
    try:
        make, arguments, state, *items = value.__reduce_ex__(4)
    except Exception:
        return False
    return make is copyreg.__newobj__ and arguments == (kind,) and type(state) is dict and items == [None, None]  # type: ignore[attr-defined]


class _ForwardSnapshot:
    """A snapshot of all that Rule 1 names, taken before a forward.

    As a context manager, which can be entered any number of times, it restores that for a second run, and puts back
    afterwards what was there.
    """

    def __init__(
        self, name: str, root: nn.Module, args: Any, kwargs: Any, written: Written, copies: _KeptCopies
    ) -> None:
        self._name = name
        self._written = written
        self._modules = list(root.modules())
        weights = _weights(self._modules)
        self._trained = [(weight, weight.requires_grad) for weight in weights if isinstance(weight, nn.Parameter)]
        now = _ForwardState(self._modules, weights)
        plain = copies.of(name, now)
        values = [value for _, then in now.attributes for value in then.values() if id(value) not in plain]
        self._foreign = foreign(values, self._modules)
        reached = reachable([value for value in values if id(value) not in self._foreign])
        attributes = [value for value in reached if isinstance(value, Tensor) and not isinstance(value, nn.Parameter)]
        self.kept = _versions(attributes)  # tensors that modules keep as attributes, or in them
        now.note_attributes(attributes)
        self._tensors = [*weights, *attributes]
        memo = {**self._foreign}
        self._arguments = _copied((args, kwargs), memo)
        self._marks = [_copies(vars(tensor), memo) for tensor in _passed(self._arguments)]  # their attributes
        self._before = now.copied(memo, plain)
        self._plain = list(plain.values())
        self.weights: dict[Any, Tensor] = {}
        self._now: list[contextlib.ExitStack] = []  # in a second run: what puts back the state of now
        self._offload: Offload | None = None
        self._changes = False  # whether forward changes its arguments
        self._memo = memo  # of the copies for the running second run
        self._relied_on: list[tuple[Tensor, int]] = []  # must not change between the runs; each with its version
        self._of_modules: list[Tensor] = [weight for weight in weights if not hasattr(type(weight), FLATTEN)]
        self._weights: list[Tensor] = []  # of these and of the unit
        self._addresses: list[int] = []  # of the weights' data: must not change either
        self._counts: list[int | None] = []  # of their writes: likewise, but for those that forward itself writes
        self._cast: dict[Any, SavedBytes] = {}  # the bytes of weights that travel in autocast's type
        self._memory: object = None  # says that this graph needs the unit's layout (host_copy.py, Rule 6)

    def replace(self, clones: dict[int, Tensor]) -> None:
        """Put clones in the places of arguments that the first run changed, by the ids of these."""
        self._arguments = _mapped(self._arguments, lambda value: clones.get(id(value), value))
        self._changes = True

    def offload_arguments(self, offload: Offload) -> list[OffloadedTensor]:
        """Send the arguments that gradients flow through to the host: each unit has its own."""
        offload.begin()
        try:
            self._arguments = _mapped(
                self._arguments, lambda value: offload.pack(value) if _carries_gradient(value) else value
            )
        finally:
            offloaded = offload.end()
        self._offload = offload
        return offloaded

    def rely_on(self, store: HostCopy | None) -> None:
        """Note the tensors that must not change until the second run (Rule 2); offload.py watches those it sent."""
        here = _mapped(self._arguments, lambda value: None if isinstance(value, OffloadedTensor) else value)
        with quietly():
            if store is not None:
                self._weights = [*self._of_modules, *store.params]
                self._counts = list(map(self._written.counts.get, map(id, self._weights)))
                self._addresses = list(map(Tensor.data_ptr, self._weights))
                self._cast = {(store, index): store.saved_bytes(index) for index in store.autocast}
                self._memory = store.memory
            self._relied_on = [*_versions([*map(host_of, tensors_in(here)), *self._weights]), *self.kept]

    def _refuse(self) -> NoReturn:
        raise ExactnessError(
            f"a weight of {self._name}, a tensor that was passed to it or one that its modules keep was changed after "
            "its forward, which cannot run again; use activations='keep' or 'offload'"
        )

    def arguments(self) -> Any:
        """Return the arguments of the first run, in copies that another run may change."""
        arguments = self._arguments
        if self._offload is not None:
            arguments = _mapped(arguments, self._fetched)
        if self._changes:
            clones: dict[int, Tensor] = {}  # a tensor that is passed twice is one tensor again

            def cloned(value: Any) -> Any:
                return clones.setdefault(id(value), value.clone()) if isinstance(value, Tensor) else value

            arguments = _mapped(arguments, cloned)
        for tensor, marks in zip(_passed(arguments), self._marks, strict=True):
            attributes = vars(tensor)
            if marks or attributes:
                self._now[-1].callback(attributes.update, dict(attributes))
                self._now[-1].callback(attributes.clear)
                attributes.clear()
                attributes.update(_copies(marks, self._memo))
        return _copied(arguments, self._memo)

    def _fetched(self, value: Any) -> Any:
        assert self._offload is not None
        if not isinstance(value, OffloadedTensor):
            return value
        if value.overtaken:
            self._refuse()
        return self._offload.unpack(value).requires_grad_()

    def __enter__(self) -> None:
        mark_own_checkpoint()
        with quietly():
            changed = bool(_changed(self._relied_on)) or list(map(Tensor.data_ptr, self._weights)) != self._addresses
        if (counts := list(map(self._written.counts.get, map(id, self._weights)))) != self._counts:
            own = {id(store.params[index]) for store, index in self.weights}
            both = zip(self._weights, counts, self._counts, strict=True)
            changed = changed or any(now != then and id(weight) not in own for weight, now, then in both)
        by_others = self._cast.keys() - self.weights.keys()  # which forward itself wrote
        if changed or any(self._cast[key].before is not None for key in by_others):
            self._refuse()
        now, before = contextlib.ExitStack(), _ForwardState(self._modules, self._tensors)
        self._now = [now]
        now.callback(before.restore)
        now.callback(setattr, self._written, "restored", self._written.restored)
        self._memo = {**self._foreign}
        taken = {id(plain.copy): plain.take() for plain in self._plain}
        for plain in self._plain:
            now.callback(plain.give_back, taken[id(plain.copy)])
        self._before.copied(self._memo, taken).restore()
        for weight, trained in self._trained:
            if weight.requires_grad != trained:
                now.callback(weight.requires_grad_, weight.requires_grad)
                weight.requires_grad_(trained)
        self._written.restored = self.weights
        if self._before.device != before.device:
            now.enter_context(self._before.device)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._now.pop().close()


def host_of(value: Any) -> Any:
    """Return the host parameter of a stand-in; anything else as it is."""
    return value.host if isinstance(value, DeviceParameter) else getattr(value, HOST_OF_WHOLE, value)


def _places(modules: list[nn.Module]) -> list[dict[str, Any]]:
    """Return the places of modules' parameters, but for those where a guard is (autocast_weights.py)."""
    return [module._parameters for module in modules if type(module._parameters) is dict]


def _weights(modules: list[nn.Module]) -> list[Any]:
    """Return what is in these places outside of visits, once each."""
    found = (host_of(parameter) for place in _places(modules) for parameter in place.values() if parameter is not None)
    return list({id(parameter): parameter for parameter in found}.values())


def own_forward(found: Any) -> Any:
    """Return the forward that a module has beside its class's, whatever of ours is in its place."""
    return found.own if isinstance(found, InPlaceOfForward) else found


def foreign(values: list[Any], modules: list[nn.Module]) -> dict[int, Any]:
    """Find, by id, the values that lead to other modules than these: a trainer, say (Rule 1)."""
    own, found = set(map(id, modules)), {}
    for value in values:
        objects = hasattr(value, "__dict__") and not isinstance(value, (type, *SHARED))
        if objects and any(isinstance(item, nn.Module) and id(item) not in own for item in reachable(value)):
            found[id(value)] = value
    return found


def _copies(values: dict[str, Any], memo: dict[int, Any]) -> dict[str, Any]:
    return {name: value if isinstance(value, _ATOMS) else _copied(value, memo) for name, value in values.items()}


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Copy what can be changed in a value; the copy shares its tensors and modules.

    Containers of parameters are shared as well: stand-ins are put into them (stand_ins.py).
    """
    if isinstance(value, _ATOMS):
        return value
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, tuple):
        made = [_copied(item, memo) for item in value]
        if all(map(operator.is_, made, value)):
            return value
        return type(value)(*made) if hasattr(value, "_fields") else tuple(made)
    if isinstance(value, (list, dict, set)):
        items = value.values() if isinstance(value, dict) else value
        if any(isinstance(item, nn.Parameter) for item in items):
            return value
    for shared in reachable(value):
        memo[id(shared)] = shared
    known = set(memo)
    try:
        return copy.deepcopy(value, memo)
    except Exception:
        for half_copied in memo.keys() - known:
            del memo[half_copied]
        return _copied_in_parts(value, memo)


class _CannotCopy(Exception):
    """Raised for an iterator that cannot be copied: the first run has advanced it."""


def _copied_in_parts(value: Any, memo: dict[int, Any]) -> Any:
    """Copy the parts of a value that cannot be copied as a whole.

    A part that cannot be copied at all, such as a lock, is shared: as with any checkpoint, forward must leave it alone.
    """
    if isinstance(value, Iterator) and not isinstance(value, io.IOBase):
        raise _CannotCopy
    try:
        made = copy.copy(value)
    except Exception:
        return value
    if made is value:
        return value
    memo[id(value)] = made
    memo.setdefault(id(memo), []).append(value)  # as deepcopy does: an id stays unique while its object lives
    if isinstance(made, list):
        made[:] = [_copied(item, memo) for item in value]
    elif isinstance(made, dict):
        made.update((key, _copied(item, memo)) for key, item in dict.items(value))
    own = getattr(made, "__dict__", {})
    own.update(_copies(own, memo))
    return made


def _carries_gradient(value: Any) -> bool:
    """Whether an argument is a plain tensor that gradients flow through; a weight is on the host already."""
    if not isinstance(value, Tensor) or not value.requires_grad:
        return False
    return not issubclass(type(value), DeviceParameter) and not hasattr(type(value), FLATTEN)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Rebuild tuples, lists and dicts with ``change`` applied to the values in them."""
    if type(value) in (tuple, list):
        return type(value)([_mapped(item, change) for item in value])
    if type(value) is dict:
        return {key: _mapped(item, change) for key, item in value.items()}
    return change(value)


def _passed(arguments: Any) -> list[Tensor]:
    """List the tensors in tuples, lists and dicts, in their order, but for weights."""
    found: list[Tensor] = []

    def look(value: Any) -> None:
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and not hasattr(type(value), FLATTEN):
            found.append(value)

    _mapped(arguments, look)
    return found


def _argument_clones(arguments: Any) -> dict[int, Tensor]:
    """Clone the tensors among the arguments that nothing else among them aliases, by their ids.

    Tensors of which a clone would have another layout or alignment are left out: kernels are chosen by these.
    """
    passed: dict[int, Tensor] = {}
    inside: dict[int, Tensor] = {}  # inside objects, where no clone can take their places

    def look(value: Any) -> Any:
        (passed if isinstance(value, Tensor) else inside).update((id(tensor), tensor) for tensor in tensors_in(value))

    _mapped(arguments, look)
    tensors = passed | inside
    with without_function_modes():
        strided = [tensor for tensor in tensors.values() if tensor.layout is torch.strided]
        storages = [storage_id(tensor.untyped_storage()) for tensor in strided]
    return {
        key: tensor.detach().clone().requires_grad_(tensor.requires_grad)
        for key, tensor in passed.items()
        if key not in inside
        and tensor.layout is torch.strided
        and not tensor.is_inference()
        and storages.count(storage_id(tensor.untyped_storage())) == 1
        and tensor.storage_offset() == 0  # aligned as a new allocation is
        and (tensor.is_contiguous() or torch.empty_like(tensor, device="meta").stride() == tensor.stride())
    }
