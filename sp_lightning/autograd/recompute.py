"""``activations="recompute"``: a unit's forward saves its inputs only, and runs again in backward.

It uses torch's own non-reentrant checkpoint, which restores torch's random state and autocast. These rules go beyond
it, so that the second run equals the first and leaves no trace:

1. What forward may change besides its outputs is restored for the second run as it was before the first, and put back
   afterwards: buffers, plain attributes, objects that modules keep (lists, counters, random generators) or that were
   passed (a cache, say), hooks, Python's and NumPy's random states, weights that the unit writes itself, and what is in
   the places of parameters for the time of a call (`torch.func.functional_call`). So are torch's defaults, which
   contexts set around a forward: type and device of new tensors, and the choices of kernels. An object that knows
   modules outside of the unit, such as a trainer, does not belong to the unit and is left alone. What cannot be copied
   is copied in parts, as far as these can be; an iterator that cannot be copied is an error.
2. Tensors are not copied, except buffers, weights that were written, and tensors that are passed to a unit of which it
   is not known yet that it leaves them alone: forward may change them in place (a dropout that comes first). If it did,
   the copy is kept. A change in place is an error if no copy can stand for the tensor, if the unit did not make such
   changes before, or if a module keeps the tensor beside its buffers or an attribute shares it with an argument. So is
   a second run after any of these tensors, or a weight of the unit, was changed or given other data since the first.
3. A forward that differs in the second run for any other reason is an error, where torch can see it: when it saves
   other tensors than the first time.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from types import MethodType, ModuleType, TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..compat.modules import HOOKS
from ..compat.storages import storage_id
from ..errors import ExactnessError
from ..memory.device import Device, choose_kernels, kernel_choices
from ..memory.parameters import DeviceParameter, quietly
from ..memory.unit_store import SavedBytes, UnitStore
from .offload import Offload, OffloadedTensor
from .saved_tensors import tensors_in

Call = Callable[..., Any]
# Attributes of a module that forward does not change, or that are restored in another way.
_FIXED = frozenset(vars(nn.Module())) - {"training"} | {"forward"}
_SHARED = (Tensor, nn.Module, ModuleType)  # what a copy of an object has in common with it


class Recompute:
    """Run units' forwards so that they can run again in backward."""

    def __init__(self, device: Device, written: Written, offload: Offload | None) -> None:
        self._offload = offload
        self._anchor = torch.empty(
            0, device=device.torch_device
        )  # tells the checkpoint of which device to restore the random state
        self._written = written
        self._leaves_alone: set[str] = set()  # units that do not change their arguments (Rule 2)

    def run(
        self, call: Call, name: str, store: UnitStore | None, root: nn.Module, args: Any, kwargs: Any
    ) -> tuple[Any, list[OffloadedTensor]]:
        """Run ``call(*args, **kwargs)`` now, and again when backward needs what it saves.

        Returns its output, and the arguments that wait on the host for backward: with ``offload``, those that
        gradients flow through.
        """
        try:
            before = _ForwardSnapshot(name, root, args, kwargs, self._written)
        except _CannotCopy:
            raise ExactnessError(
                f"{name} keeps, or is passed, an iterator that cannot be copied, so its forward cannot run again; "
                "use activations='keep' or 'offload'"
            ) from None
        known = name in self._leaves_alone
        clones = {} if known else _argument_clones((args, kwargs))
        offloaded = before.offload_arguments(self._offload) if self._offload is not None and known else []
        passed, kept = _versions(tensors_in((args, kwargs))), _versions(before.kept_attributes())
        first = [(args, kwargs)]  # the closure refers to them no longer than the first run takes

        def forward(_anchor: Tensor) -> Any:
            again, again_kwargs = first.pop() if first else before.arguments()
            return call(*again, **again_kwargs)

        def contexts() -> tuple[Any, Any]:
            return self._written.recording(before.weights), before

        output = checkpoint(forward, self._anchor, use_reentrant=False, context_fn=contexts)
        changed = _changed(passed)
        if _changed(kept):
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
        before.rely_on(store, kept)
        return output, offloaded


def _versions(tensors: Iterable[Tensor]) -> list[tuple[Tensor, int]]:
    return [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]


def _changed(versions: list[tuple[Tensor, int]]) -> set[int]:
    """Return the ids of the tensors that were written in place since."""
    return {id(tensor) for tensor, version in versions if tensor._version != version}


class Written:
    """The weights that model code writes, with their bytes before: each is recorded for the forward that wrote it."""

    def __init__(self) -> None:
        self._records: list[dict[Any, Tensor]] = []
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
        if self._records:
            self._records[-1].setdefault(key, before.clone())


class _ForwardSnapshot:
    """A snapshot of all that Rule 1 names, taken before a forward.

    As a context manager, which can be entered any number of times, it restores that for a second run, and puts back
    afterwards what was there.
    """

    def __init__(self, name: str, root: nn.Module, args: Any, kwargs: Any, written: Written) -> None:
        self._name = name
        self._written = written
        self._foreign = dict(_foreign(root))
        memo = {**self._foreign}  # what several values share stays shared
        self._arguments = _copied((args, kwargs), memo)
        self.weights: dict[Any, Tensor] = {}
        self._random = _random_states()
        self._defaults = _Defaults()
        self._modules = [(module, _copies(_own_attributes(module), memo)) for module in root.modules()]
        self._buffers = [
            (module._buffers, name, buffer.detach().clone())
            for module, _ in self._modules
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._parameters = [
            (places, name, _host(value))
            for module, _ in self._modules
            if type(places := module._parameters) is dict  # else it is a guard's, in a visit: autocast_weights.py
            for name, value in places.items()
        ]
        self._hooks = [(hooks, set(hooks)) for module, _ in self._modules for _, hooks in _hooks_of(module)]
        self._now: list[contextlib.ExitStack] = []  # in a second run: what puts back the state of now
        self._offload: Offload | None = None
        self._changes = False  # whether forward changes its arguments
        self._memo = memo  # of the copies for the running second run
        self._relied_on: list[tuple[Tensor, int]] = []  # must not change between the runs; each with its version
        self._weights_at: list[tuple[Tensor, int]] = []  # the same for the addresses of the weights' data
        self._cast: dict[Any, SavedBytes] = {}  # the bytes of weights that travel in autocast's type
        self._memory: object = None  # says that this graph needs the unit's layout (unit_store.py, Rule 8)

    def kept_attributes(self) -> list[Tensor]:
        """Find the tensors that modules keep as attributes, or in them: neither weights nor buffers."""
        values = (value for _, attributes in self._modules for value in attributes.values())
        reached = _reachable([value for value in values if id(value) not in self._foreign])
        return [value for value in reached if isinstance(value, Tensor) and not isinstance(value, nn.Parameter)]

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

    def rely_on(self, store: UnitStore | None, kept: list[tuple[Tensor, int]]) -> None:
        """Note the tensors that must not change until the second run (Rule 2); offload.py watches those it sent."""
        here = _mapped(self._arguments, lambda value: None if isinstance(value, OffloadedTensor) else value)
        with quietly():
            self._relied_on = [*_versions(map(_host, tensors_in(here))), *kept]
            if store is not None:
                self._relied_on += _versions(store.params)
                self._weights_at = [(weight, weight.data_ptr()) for weight in store.params]
                self._cast = {(store, index): store.contents[index] for index in store.autocast}
                self._memory = store.memory

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
        return _copied(arguments, self._memo)

    def _fetched(self, value: Any) -> Any:
        assert self._offload is not None
        if not isinstance(value, OffloadedTensor):
            return value
        if value.overtaken:
            self._refuse()
        return self._offload.unpack(value).requires_grad_()

    def __enter__(self) -> None:
        with quietly():
            changed = bool(_changed(self._relied_on)) or any(p.data_ptr() != at for p, at in self._weights_at)
            by_others = self._cast.keys() - self.weights.keys()  # which forward itself wrote
            changed = changed or any(self._cast[key].before is not None for key in by_others)
        if changed:
            self._refuse()
        now = contextlib.ExitStack()
        self._now = [now]
        now.callback(self._restorer())
        _set_random_states(self._random)
        self._memo = {**self._foreign}
        for module, attributes in self._modules:
            _set_attributes(module, _copies(attributes, self._memo))
        for place, name, before in self._buffers:
            place[name] = before.clone()
        for places, name, before in self._parameters:
            if name in places and _host(places[name]) is not before:
                places[name] = before
        for hooks, known in self._hooks:
            for key in hooks.keys() - known:
                del hooks[key]
        self._written.restored = self.weights
        now.enter_context(self._defaults.restored())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._now.pop().close()

    def _restorer(self) -> Callable[[], None]:
        """Return a function that puts back the state of now."""
        states = _random_states()
        attributes = [(module, _own_attributes(module)) for module, _ in self._modules]
        buffers = [(place, name, place.get(name)) for place, name, _ in self._buffers]
        parameters = [(places, name, places[name]) for places, name, _ in self._parameters if name in places]
        of_modules = [(hooks, dict(hooks)) for hooks, _ in self._hooks]
        of_weights = [(p, {name: set(hooks) for name, hooks in _hooks_of(p)}) for *_, p in self._parameters]
        restored = self._written.restored

        def restore() -> None:
            _set_random_states(states)
            for module, own in attributes:
                _set_attributes(module, own)
            for place, name, buffer in buffers:
                place[name] = buffer
            for places, name, value in parameters:
                places[name] = value
            for hooks, then in of_modules:
                if hooks.keys() != then.keys():
                    hooks.clear()
                    hooks.update(then)
            for parameter, known in of_weights:
                for name, hooks in _hooks_of(parameter):
                    for key in hooks.keys() - known.get(name, set()):
                        del hooks[key]
            self._written.restored = restored

        return restore


class _Defaults:
    """torch's defaults at the time of construction (Rule 1)."""

    def __init__(self) -> None:
        self._dtype, self._device = torch.get_default_dtype(), torch.get_default_device()
        self._kernels = kernel_choices()

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Set these defaults within the context."""
        now = _Defaults()
        with contextlib.nullcontext() if self._device == now._device else self._device:
            self._set()
            try:
                yield
            finally:
                now._set()

    def _set(self) -> None:
        torch.set_default_dtype(self._dtype)
        choose_kernels(self._kernels)


def _host(parameter: Any) -> Any:
    """Return what is in a parameter's place outside of visits."""
    return parameter.host if isinstance(parameter, DeviceParameter) else parameter


def _hooks_of(owner: Any) -> Iterator[tuple[str, Any]]:
    """Yield the hooks of a module, or of a parameter, by kind."""
    with quietly():
        for name in HOOKS:
            hooks = getattr(owner, name, None)
            if hooks is not None:
                yield name, hooks


def _own_attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _FIXED}


def _foreign(root: nn.Module) -> Iterator[tuple[int, Any]]:
    """Yield, by id, attributes that lead to modules outside of the unit: a trainer, say (Rule 1)."""
    own = {id(module) for module in root.modules()}
    values = (value for module in root.modules() for value in _own_attributes(module).values())
    for value in values:
        objects = hasattr(value, "__dict__") and not isinstance(value, (type, *_SHARED))
        if objects and any(isinstance(item, nn.Module) and id(item) not in own for item in _reachable(value)):
            yield id(value), value


def _copies(attributes: dict[str, Any], memo: dict[int, Any]) -> dict[str, Any]:
    return {name: _copied(value, memo) for name, value in attributes.items()}


def _set_attributes(module: nn.Module, attributes: dict[str, Any]) -> None:
    own = vars(module)
    for name in _own_attributes(module).keys() - attributes.keys():
        del own[name]
    own.update(attributes)


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Copy what can be changed in a value; the copy shares its tensors and modules.

    Containers of parameters are shared as well: stand-ins are put into them (streamed_unit.py).
    """
    if value is None or isinstance(value, (Tensor, nn.Module, str, bytes, int, float, complex, type, torch.dtype)):
        return value
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, tuple):
        made = [_copied(item, memo) for item in value]
        if all(new is old for new, old in zip(made, value, strict=True)):
            return value
        return type(value)(*made) if hasattr(value, "_fields") else tuple(made)
    if isinstance(value, (list, dict, set)) and _holds_parameters(value):
        return value
    for shared in _reachable(value):
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
    own.update({name: _copied(item, memo) for name, item in own.items()})
    return made


def _carries_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Rebuild tuples, lists and dicts with ``change`` applied to the values in them."""
    if type(value) in (tuple, list):
        return type(value)(_mapped(item, change) for item in value)
    if type(value) is dict:
        return {key: _mapped(item, change) for key, item in value.items()}
    return change(value)


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
    storages = [storage_id(tensor.untyped_storage()) for tensor in tensors.values() if tensor.layout is torch.strided]
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


def _holds_parameters(value: Any) -> bool:
    items = value.values() if isinstance(value, dict) else value
    return any(isinstance(item, nn.Parameter) for item in items)


def _reachable(value: Any) -> list[Any]:
    """Find what a copy shares with its original: tensors, modules, and Python's modules, which lead to everything."""
    found, stack, seen = [], [value], set()
    while stack:
        item = stack.pop()
        if isinstance(item, _SHARED):
            found.append(item)
        elif id(item) not in seen:
            seen.add(id(item))
            if isinstance(item, dict):
                stack += dict.values(item)  # a registry's own ``values`` may import what it names
            elif isinstance(item, (list, tuple, set)):
                stack += item
            elif isinstance(item, MethodType):
                stack.append(item.__self__)
            elif isinstance(item, functools.partial):
                stack += (item.func, item.args, item.keywords)
            elif hasattr(item, "__dict__") and not isinstance(item, type):
                stack += vars(item).values()
    return found


def _random_states() -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy")
    return random.getstate(), numpy and numpy.random.get_state()


def _set_random_states(states: tuple[Any, Any]) -> None:
    python, numpy = states
    random.setstate(python)
    if numpy is not None:
        sys.modules["numpy"].random.set_state(numpy)
