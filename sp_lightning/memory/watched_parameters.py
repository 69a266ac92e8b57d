"""The two forms of a streamed parameter: the host parameter in the user's model, and its stand-in on the device.

1. A host parameter stays the user's own ``nn.Parameter`` object. Only its class changes while it is managed, to a
   subclass that notices what torch's version counters cannot: reads of ``p.data``, through which code may write later.
2. Inside a running step, and in the model's ``generate``, ``p.device``, ``p.dtype`` and their relatives have the values
   of the stand-in, as in a plain run. So tensors that model code makes with the weights' device and type are right. The
   bytes stay on the host.
3. A stand-in is the output of an autograd node, so it is not a leaf, but model code sees an ``nn.Parameter``. It
   notices reads of ``.data`` too, because model code writes its own weights through them, unseen by the version
   counter. Properties of a leaf, and attributes that the user's code set on the parameter, are read from the host
   parameter. As keys of a dictionary the two are equal.
4. Copies (deepcopy, pickle) are plain parameters. So is the result of ``nn.Parameter(p)``, as parametrizations call it:
   torch would give it the class of ``p``. It shares the bytes of ``p``, as in a plain run.
5. Reading ``.grad`` waits for gradients that are on their way, and for a step that reads them. A deferred step refers
   to the gradients itself and changes no ``.grad``: one that is None is so at once, and so is one that is set to None.
   torch's ``zero_grad`` asks whether there is a gradient only to take it away, so that waits for no deferred step.
6. torch calls a parameter's hooks whenever the node before it ran. A unit has one node for all of its weights, so hooks
   of a weight that the graph did not use (an expert that got no token) would be called, with None. They are kept from
   it: each is wrapped as soon as that is about to happen. Hooks that run after the accumulation are given no gradient;
   for them a hook in front notes whether there is one.
7. A parameter of a class of a library's, or of the user's, keeps what that class does. While it is managed, its class
   is a subclass, of which the library never hears: it has the parameter's true class back for the time of a copy, and
   of each function in which that class takes part, so that results are of that class. What notices reads comes behind
   the true class, where ``nn.Parameter`` is in a plain run. For a parameter that consists of several tensors
   (partition.py, rule 10) it is each call of the class that is noticed.
8. So it is with a DTensor, whose gradient is one over that of its shard, which is a host parameter (sharded.py). An
   operator that writes to it moves the shard's version too: torch moves that of the DTensor alone.
9. A gradient may keep the narrower type in which it came down (slab.py, Rule 3) until code asks for ``.grad``: then it
   is widened, and ``.grad`` is a plain tensor from there on. Until then it is a tensor without bytes. Only two of
   torch's functions are shown that one: ``zero_grad``, which takes it away, and ``clip_grad_norm_``, which asks for its
   norm and has it multiplied (host_gradients.py). Code in C++ comes to it without asking, as autograd does to
   accumulate: then the operator is called with the widened gradient.
10. Inside a visit of its unit a host parameter that code has kept gives the bytes of its stand-in, to functions
    (weight_reads.py) and by ``.data``: in a plain run both are one. So it is with ``.grad``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn

from ..compat.modules import grad_is_taken_away, looks_at_no_value
from ..compat.patches import PARAMETER_NEW
from ..compat.tensors import (
    FLATTEN,
    HOOKS_AFTER_ACCUMULATION,
    IS_PARAMETER,
    dispatch_mode_count,
    dispatches,
    in_selective_checkpoint,
    in_transform,
    is_dtensor_class,
    local_of,
    never_dispatched,
    outside_selective_checkpoints,
    outside_transforms,
    over_spec,
    set_class,
    spec_of,
    tensor_hooks,
    with_dispatch,
    without_bytes,
    without_dispatch,
    without_function_modes,
    written_by,
)
from ..errors import ExactnessError, UnsupportedError
from ..stream.whole import Whole
from .access import Access
from .device import Device

# The properties themselves, past those that are overridden below.
_data: Any = torch.Tensor.data
_device: Any = torch.Tensor.device
_is_cpu: Any = torch.Tensor.is_cpu
_dtype: Any = torch.Tensor.dtype
_grad: Any = torch.Tensor.grad
_version: Any = torch.Tensor._version
_grad_fn: Any = torch.Tensor.grad_fn
_requires_grad: Any = torch.Tensor.requires_grad


# What a parameter or a stand-in truly has, whatever its class answers; each a function in C.
true_data: Callable[[Tensor], Tensor] = _data.__get__
set_true_data: Callable[[Tensor, Tensor], None] = _data.__set__
true_version: Callable[[Tensor], int] = _version.__get__
true_grad_fn: Callable[[Tensor], Any] = _grad_fn.__get__
true_device: Callable[[Tensor], torch.device] = _device.__get__
is_on_host: Callable[[Tensor], bool] = _is_cpu.__get__
true_dtype: Callable[[Tensor], torch.dtype] = _dtype.__get__
true_grad: Callable[[Tensor], Tensor | None] = _grad.__get__  # whatever is under way; it may have no bytes (Rule 9)
set_true_grad: Callable[[Tensor, Tensor | None], None] = _grad.__set__


class ReadPhases(Protocol):
    """The answers to reads of a host parameter, by the code that runs (phases.py)."""

    @property
    def optimizing(self) -> bool:
        """Whether an optimizer steps, which finds everything on the host."""

    @property
    def serving(self) -> bool:
        """Whether a function that reads host parameters gets their stand-ins now."""

    @property
    def between_steps(self) -> bool:
        """Whether the user's code runs between steps, and may combine host parameters with device tensors."""

    def apparent_device(self) -> torch.device | None:
        """Return the device that ``p.device`` shows, or None for the true one."""

    def apparent_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the type that ``p.dtype`` shows for this true type."""

    def read_on_host(self, name: str) -> None:
        """Report that a function computed with this host parameter on the host."""


class ParameterOwner(Protocol):
    """The object that streams a module's parameters: the engine."""

    device: Device  # on which units compute
    access: Access

    @property
    def phases(self) -> ReadPhases:
        """The answers that reads get now."""

    def land(self) -> None:
        """Finish the gradients that are under way: wait for them and put them into ``.grad``."""

    def check_gradient(self, parameter: Tensor) -> None:
        """Raise an error if a read of this gradient in a backward would not find what it finds in a plain run."""

    def gradient_given(self, parameter: Tensor) -> None:
        """Note that code is about to get this gradient, which it may write where no version shows it."""

    def before_host_access(self, parameter: Tensor) -> None:
        """Complete a parameter's host bytes, before code outside of visits reads or writes them."""

    def in_visit(self, parameter: Tensor) -> bool:
        """Whether the calling thread runs model code inside a visit of the parameter's unit."""

    def lend(self, parameter: nn.Parameter, read: Any = None) -> AbstractContextManager[Tensor]:
        """Borrow the parameter's stand-in for the time of a call; ``read``: how the call only casts the weight."""

    def on_device(self, tensor: Tensor) -> bool:
        """Whether a tensor's bytes are on the device, or in a unit's device buffer."""

    def in_slab(self, tensor: Tensor) -> bool:
        """Whether a tensor's bytes are in the slab of a unit."""

    def in_weights(self, tensor: Tensor) -> bool:
        """Whether a tensor's memory is that of a weight."""

    def shares_bytes(self, parameter: Tensor) -> bool:
        """Whether a parameter that is about to be streamed has to stay where another tensor shares its bytes."""

    def about_to_write_back(self, store: Any, index: int, before: Tensor) -> None:
        """Note that model code wrote a weight on the device; ``before`` is its host copy, not yet overwritten."""


class DataWatcher(Protocol):
    """The object that brings a host parameter and its stand-in together (stand_ins.py)."""

    owner: ParameterOwner
    names: list[str]
    bound: bool  # whether the stand-ins are in the places of the host parameters
    index_of: dict[int, int]  # by the parameters' ids

    @property
    def autocast(self) -> Mapping[int, torch.dtype]:
        """The types of the weights that travel in autocast's type, by index."""

    @property
    def has_one_node(self) -> bool:
        """Whether every graph leads to the stand-ins that the next visit finds."""

    def host_exposed(self, parameter: Tensor) -> None:
        """Prepare for writes to the host bytes at any time from here on, unseen by any version counter."""

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Return a parameter's gradient, in a visit of its unit one on the device."""

    def replace(self, stand_in: Tensor, parameter: nn.Parameter, value: Tensor) -> None:
        """Take note that model code gives a stand-in of the parameter other data."""

    def data_given(self, parameter: nn.Parameter, value: Tensor) -> Tensor:
        """Return the host tensor that becomes the parameter's data when ``value`` is assigned to it."""

    def whole_of(self, parameter: Tensor) -> Any:
        """Return the whole that a host parameter is (partition.py, rule 10)."""


class NarrowGradient(Tensor):
    """A ``.grad`` without bytes of its own, whose values are still in the type in which they came down (Rule 9)."""

    came_down: Tensor
    factor = 1.0  # by which the widened gradient is multiplied
    wide: Tensor | None = None
    _widen: Callable[[], Callable[[], None] | None]  # weakly what widens the gradients of the unit

    __torch_function__ = never_dispatched  # type: ignore[assignment]

    @classmethod
    def of(
        cls, came_down: Tensor, dtype: torch.dtype, widen: Callable[[], Callable[[], None] | None]
    ) -> NarrowGradient:
        """Make one with these values, which the function behind the reference ``widen`` widens to this type."""
        made: NarrowGradient = without_bytes(
            cls, came_down.shape, strides=came_down.stride(), dtype=dtype, device="cpu"
        )
        made.came_down, made._widen = came_down, widen
        return made

    def widened(self) -> Tensor:
        """Return the gradient in its parameter's type, as plain Lightning has it; the first call makes it."""
        if self.wide is None and (widen := self._widen()) is not None:
            widen()
        if self.wide is None:  # no parameter has it any more, or nothing is streamed
            with quietly(), torch.inference_mode(False), torch.no_grad():
                self.wide = self.made()
        return self.wide

    def made(self, place: Tensor | None = None) -> Tensor:
        """Return the gradient's values in its own type, at this place if there is one."""
        wide = self.came_down.to(true_dtype(self)) if place is None else place.copy_(self.came_down)
        return wide if self.factor == 1.0 else wide.mul_(self.factor)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*_widened(args), **_widened(kwargs or {}))


def _widened(value: Any) -> Any:
    if type(value) is NarrowGradient:
        return value.widened()
    if isinstance(value, (tuple, list)):
        return type(value)(map(_widened, value))
    return {key: _widened(one) for key, one in value.items()} if isinstance(value, dict) else value


def wide_grad(parameter: Tensor) -> Tensor | None:
    """Return ``.grad`` for code that reads or writes its bytes."""
    grad = true_grad(parameter)
    if type(grad) is not NarrowGradient:
        return grad
    wide = grad.widened()
    if true_grad(parameter) is grad:
        set_true_grad(parameter, wide)
    return wide


HOST_OF_WHOLE = "superpipeline_host"  # an attribute of the stand-in of a parameter that consists of tensors

_new = nn.Parameter.__new__
_watchers: dict[int, DataWatcher] = {}  # by id of the parameter, which lives at least as long as it is watched


class HostParameter(nn.Parameter):
    """A managed parameter, as the user's code sees it (Rules 1 and 2)."""

    __torch_function__ = never_dispatched  # type: ignore[assignment]  # but see weight_reads.py

    def __eq__(self, other: Any) -> Any:
        return True if isinstance(other, DeviceParameter) and other.host is self else super().__eq__(other)

    __hash__ = nn.Parameter.__hash__

    @property
    def data(self) -> torch.Tensor:
        watcher = _watchers[id(self)]
        if in_visit(self):  # Rule 10
            with watcher.owner.lend(self) as lent:
                return lent.data
        watcher.host_exposed(self)
        return _data.__get__(self)  # type: ignore[no-any-return]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        watcher = _watchers[id(self)]
        if in_visit(self):
            with watcher.owner.lend(self) as lent:
                lent.data = value
            return
        watcher.host_exposed(self)
        _data.__set__(self, watcher.data_given(self, _with_plain_bytes(value)))

    def set_(self, source: Any = None, *args: Any, **kwargs: Any) -> HostParameter:
        """Take a tensor's bytes or a storage, as ``torch.Tensor.set_``, which takes no part in function dispatch."""
        watcher = _watchers[id(self)]
        if in_visit(self):
            with watcher.owner.lend(self) as lent:
                lent.set_(source, *args, **kwargs)
            return self
        watcher.host_exposed(self)
        if isinstance(source, Tensor):
            source = watcher.data_given(self, _with_plain_bytes(source))
        with without_dispatch():
            given = () if source is None else (source,)
            return super().set_(*given, *args, **kwargs)  # type: ignore[return-value]

    @property
    def grad(self) -> torch.Tensor | None:
        watcher = _watchers[id(self)]
        owner = watcher.owner
        if watcher.bound and owner.in_visit(self):  # Rule 10
            return watcher.gradient(self)
        access = owner.access
        if access.gradients:
            owner.check_gradient(self)
            if access.changes_gradients or (_has_grad(self) and not grad_is_taken_away()):
                owner.land()
        if access.step_has_begun:
            owner.gradient_given(self)
        with without_dispatch():
            grad = true_grad(self)
        if access.gradients:
            owner.check_gradient(self)  # again: it may have come meanwhile
        if type(grad) is not NarrowGradient or looks_at_no_value():
            return grad
        with without_dispatch():
            return wide_grad(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        owner = _watchers[id(self)].owner
        if owner.access.gradients:
            owner.check_gradient(self)
            if owner.access.changes_gradients or value is not None:
                owner.land()
        with without_dispatch():
            if value is not None and true_device(value) != true_device(self):
                value = value.to(true_device(self), true_dtype(self))  # it comes from a loss on the device
            _grad.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None  # as ``del`` does in torch

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return owner_of(self).phases.apparent_device() or _device.__get__(self)

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return self.device.type == "cpu"

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return self.device.type == "cuda"

    def get_device(self) -> int:
        device = self.device
        return -1 if device.index is None else device.index

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return owner_of(self).phases.apparent_dtype(_dtype.__get__(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            data = self.data if in_visit(self) else _data.__get__(self)
            copied = data.clone(memory_format=torch.preserve_format)
            memo[id(self)] = nn.Parameter(copied, self.requires_grad)
        return memo[id(self)]  # type: ignore[no-any-return]


class HostOfLibrary:
    """A managed parameter of another class than ``nn.Parameter``, as the user's code sees it (Rule 7)."""

    __slots__ = ()
    own: type[Tensor]  # its true class

    @staticmethod
    def written(host: Any) -> None:
        """Note that an operator wrote to a parameter."""

    def __init_subclass__(cls) -> None:
        """Keep the subclass from the library, which may register every subclass of its classes."""

    __class__: Any = property(lambda self: type(self).own, set_class)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _called(self, "__deepcopy__", memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _called(self, "__reduce_ex__", protocol)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with as_own(of_libraries(args, kwargs)), with_dispatch():
            return func(*args, **kwargs or {})


class HostOfOneTensor(HostOfLibrary):
    """One of them whose bytes are its own: stands before its class, as ``HostParameter`` does behind it (Rule 7)."""

    __slots__ = ()

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.own(*args, **kwargs)  # made by ``type(p)(...)``

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        host: Any = self
        if in_visit(host):  # Rule 10
            with owner_of(host).lend(host) as lent:
                return lent.__deepcopy__(memo)  # type: ignore[no-untyped-call]
        expose(host)
        return super().__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        expose(self)  # type: ignore[arg-type]
        return super().__reduce_ex__(protocol)


class HostWhole(HostOfLibrary):
    """A managed parameter that consists of several tensors, as the user's code sees it (Rule 7)."""

    __slots__ = ()
    names: frozenset[str]  # attributes that are neither every tensor's nor Python's

    def __getattribute__(self, name: str) -> Any:
        kind = type(self)
        if name.startswith("__") or not dispatches():
            return super().__getattribute__(name)
        if name not in kind.names and not isinstance(vars(self).get(name), Tensor):
            return super().__getattribute__(name)
        host: Any = self
        if owner_of(host).phases.serving:
            with owner_of(host).lend(host) as lent:
                return getattr(lent, name)
        with as_own((host,)):
            found = getattr(host, name)
        if isinstance(found, Tensor) or getattr(found, "__self__", None) is host:
            expose(host)
        return functools.partial(_called, host, name) if getattr(found, "__self__", None) is host else found

    @property
    def device(self) -> torch.device:
        host: Any = self
        return owner_of(host).phases.apparent_device() or _device.__get__(host)

    @property
    def is_cpu(self) -> bool:
        return self.device.type == "cpu"

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def get_device(self) -> int:
        device = self.device
        return -1 if device.index is None else device.index

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with as_own(of_libraries(args, kwargs)):
            return func(*args, **kwargs or {})


class HostDTensor(HostWhole):
    """A managed DTensor, as the user's code sees it (Rule 8)."""

    __slots__ = ()
    # What its layout is asks for none of its bytes.
    placements: Any = property(lambda self: spec_of(self).placements)
    device_mesh: Any = property(lambda self: spec_of(self).mesh)
    _spec: Any = property(spec_of)

    @property
    def grad(self) -> Tensor | None:
        host: Any = self
        local = local_of(host).grad  # which waits (Rule 5)
        return _sharded(host).gradient(local)  # type: ignore[no-any-return]

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        _sharded(self).set_gradient(value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def data(self) -> Tensor:
        host: Any = self
        expose(host)
        return _called(self, "detach")  # type: ignore[no-any-return]

    @data.setter
    def data(self, value: Tensor) -> None:
        host: Any = self
        raise UnsupportedError(
            f"{name_of(host)}.data was assigned, which gives a DTensor no other local tensor: write to the parameter, "
            "as by copy_() under torch.no_grad()"
        )

    def register_hook(self, hook: Any) -> Any:
        host: Any = self
        raise UnsupportedError(f"{name_of(host)} is a streamed DTensor, of which hooks get no gradients: use none")

    register_post_accumulate_grad_hook = register_hook

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = _plain_copy(self, torch.clone)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain_copy(self, lambda local: local).__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        hosts = of_libraries(args, kwargs)
        with as_own(hosts), without_dispatch():
            result = func(*args, **kwargs)
        for host in hosts and of_libraries(written_by(func, args, kwargs)):  # its version moves later
            type(host).written(host)
        return result

    @staticmethod
    def written(host: Any) -> None:
        torch.autograd.graph.increment_version(local_of(host))


def _sharded(host: Any) -> Any:
    return _watchers[id(host)].whole_of(host)


def _plain_copy(host: Any, copied: Callable[[Tensor], Tensor]) -> Any:
    """Return a plain DTensor parameter over these bytes, or a copy of them."""
    expose(host)
    with without_dispatch(), torch.no_grad():
        local = copied(_data.__get__(local_of(host)))
    return nn.Parameter(over_spec(local, spec_of(host)), host.requires_grad)


@contextlib.contextmanager
def as_own(hosts: Iterable[Any]) -> Iterator[None]:
    """Give managed parameters of classes of libraries their true classes for the time of a call (Rule 7)."""
    with without_dispatch():
        changed = [(host, type(host), true_version(host)) for host in hosts]
    for host, kind, _ in changed:
        set_class(host, kind.own)
    try:
        yield
    finally:
        with without_dispatch():
            for host, kind, version in changed:
                if type(host) is kind.own and is_watched(host):  # it may have been swapped
                    set_class(host, kind)
                    if true_version(host) != version:
                        kind.written(host)


def of_libraries(*values: Any) -> list[Any]:
    """Return the managed parameters of other classes than ``nn.Parameter`` among arguments."""
    return [value for value in flat(*values) if issubclass(type(value), HostOfLibrary)]


def own_class(parameter: Tensor) -> Any:
    """Return the class that a parameter, managed or not, has where nothing is streamed."""
    kind = type(parameter)
    if kind is HostParameter:
        return nn.Parameter
    return kind.own if issubclass(kind, HostOfLibrary) else kind


def flat(*values: Any) -> Iterator[Any]:
    """Yield arguments, and what is in them."""
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from flat(*value)
        elif isinstance(value, dict):
            yield from flat(*value.values())
        else:
            yield value


# The classes of host parameters, with the ``__torch_function__`` that each has while reads are not watched.
host_classes: dict[type, Any] = {HostParameter: never_dispatched}


@functools.cache
def _host_class(kind: type[Tensor]) -> type[Tensor]:
    """Return the class of managed parameters of this class, which is not ``nn.Parameter`` (Rule 7)."""
    own: dict[str, Any] = {"__slots__": (), "own": kind}
    bases: tuple[type, ...] = HostOfOneTensor, kind, HostParameter
    if hasattr(kind, FLATTEN):
        base = HostDTensor if is_dtensor_class(kind) else HostWhole
        names = {name for its in kind.__mro__[: kind.__mro__.index(Tensor)] for name in vars(its)}
        own["names"] = frozenset(names.difference(*map(vars, base.__mro__[:-1])))
        bases = base, kind
    made = type(kind.__name__, bases, own)
    is_dispatched = kind.__torch_function__ is not never_dispatched
    host_classes[made] = vars(HostOfLibrary)["__torch_function__"] if is_dispatched else never_dispatched
    watching = vars(HostParameter)["__torch_function__"]
    made.__torch_function__ = host_classes[made] if watching is never_dispatched else watching  # type: ignore[attr-defined]
    return made


def _called(whole: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """Call a method of a managed parameter's true class."""
    with as_own((whole,)):
        return getattr(whole, name)(*args, **kwargs)


class DeviceParameter(nn.Parameter):
    """The stand-in of a host parameter inside a visit (Rule 3)."""

    data_exposed: list[bool]  # shared by the stand-ins of a unit: [True] once the ``.data`` of any of them was read
    host: nn.Parameter

    @property
    def data(self) -> torch.Tensor:
        self.data_exposed[0] = True
        return _data.__get__(self)  # type: ignore[no-any-return]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self.data_exposed[0] = True
        _watchers[id(self.host)].replace(self, self.host, _with_plain_bytes(value))

    def __eq__(self, other: Any) -> Any:
        return True if other is self.host else super().__eq__(other)

    def __hash__(self) -> int:
        return hash(self.host)

    def __getattr__(self, name: str) -> Any:
        if name == "host":
            raise AttributeError(name)
        return getattr(self.host, name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = name in ("host", "data_exposed") or name.startswith("__")
        if own or hasattr(getattr(type(self), name, None), "__set__"):
            super().__setattr__(name, value)
        else:
            setattr(self.host, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.host, name)

    @property
    def _version(self) -> int:  # type: ignore[override]
        """Version of both faces, which changes when either is written: model code may cache results by it."""
        with without_dispatch():
            return self.host._version + true_version(self)

    @property
    def grad(self) -> torch.Tensor | None:
        return _watchers[id(self.host)].gradient(self.host)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self.host.grad = None if value is None else value.to(true_device(self.host))

    @property
    def grad_dtype(self) -> torch.dtype:  # type: ignore[override]
        """Type of a leaf's gradients: always the parameter's own (partition.py refuses others)."""
        return true_dtype(self)

    @property
    def grad_fn(self) -> None:  # type: ignore[override]
        return None

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        return True

    @property
    def requires_grad(self) -> bool:
        return _requires_grad.__get__(self)  # type: ignore[no-any-return]

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> DeviceParameter:
        if requires_grad != self.requires_grad:
            raise UnsupportedError(
                f"requires_grad of a weight was set to {requires_grad} inside its unit's forward, which began with "
                f"{not requires_grad}: set it before the step"
            )
        return self

    def set_(self, *args: Any, **kwargs: Any) -> DeviceParameter:
        """Take a copy of a tensor's bytes, or of a storage's, as by ``.data =``."""
        empty = torch.empty(0, dtype=true_dtype(self), device=true_device(self))
        self.data = empty.set_(*args, **kwargs)
        return self

    def as_strided(self, size: Any, stride: Any, storage_offset: int | None = None) -> Tensor:  # type: ignore[override]
        """Make a view as ``torch.Tensor.as_strided``, whose offset counts from the begin of the unit's buffer here."""
        first = self.storage_offset()
        if storage_offset is not None and not first <= storage_offset <= first + self.numel():
            raise ExactnessError(
                f"as_strided(..., storage_offset={storage_offset}) of a weight inside its unit's forward, where the "
                f"weight begins at {first} of a storage that it shares with the unit's other weights: leave the offset "
                "out, or add the weight's storage_offset()"
            )
        return super().as_strided(size, stride, storage_offset)

    def register_hook(self, hook: Any) -> Any:
        return self.host.register_hook(hook)  # type: ignore[no-untyped-call]

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        return self.host.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = own_class(self.host)(_data.__get__(self).clone(), self.requires_grad)
        return memo[id(self)]  # type: ignore[no-any-return]


def _with_plain_bytes(value: Tensor) -> Tensor:
    """Return data whose bytes are its values: in a lazy conjugate or negative they are not, and only bytes travel."""
    return value.detach().resolve_conj().resolve_neg()


def _has_grad(parameter: nn.Parameter) -> bool:
    with without_dispatch():
        return true_grad(parameter) is not None


def finished_grad(parameter: nn.Parameter) -> torch.Tensor | None:
    """Wait for gradients under way and return ``parameter.grad``."""
    owner_of(parameter).land()
    with without_dispatch():
        return wide_grad(parameter)


def watch(parameter: nn.Parameter, watcher: DataWatcher) -> None:
    """Begin to manage a parameter (Rules 1 and 7)."""
    PARAMETER_NEW.install(_new_plain)
    _watchers[id(parameter)] = watcher
    if isinstance(parameter, nn.Parameter):  # no part of one that consists of several tensors
        kind = own_class(parameter)
        set_class(parameter, HostParameter if kind is nn.Parameter else _host_class(kind))


def is_watched(parameter: nn.Parameter) -> bool:
    """Whether this parameter is managed (Rule 1)."""
    return id(parameter) in _watchers


def unwatch(parameter: nn.Parameter) -> None:
    """Make a managed parameter plain again."""
    set_class(parameter, own_class(parameter))
    for hooks in _hooks_of(parameter):
        for key, hook in list(hooks.items()):
            if isinstance(hook, _WithGradient):
                hooks[key] = hook.hook
            elif isinstance(hook, _Arrival):
                del hooks[key]
    if _watchers.pop(id(parameter), None) is not None:
        PARAMETER_NEW.remove()


# ---- hooks (Rule 6)


class _Arrival:
    """A hook that notes whether a gradient has arrived."""

    noted = True

    def __call__(self, grad: Tensor | None) -> None:
        self.noted = grad is not None


class _WithGradient:
    """A hook of the user's on a gradient, or after its accumulation, that is called only where one has arrived."""

    def __init__(self, hook: Callable[[Any], Any], arrival: _Arrival | None = None) -> None:
        self.hook = hook
        self.arrival = arrival

    def __call__(self, given: Any) -> Any:
        has_arrived = given is not None if self.arrival is None else self.arrival.noted
        return self.hook(given) if has_arrived else None


def has_hooks(parameter: Tensor) -> bool:
    """Whether autograd calls code of the user's with this parameter's gradient, or after its accumulation."""
    return bool(with_hooks((parameter,)))


def with_hooks(parameters: Iterable[Tensor]) -> set[int]:
    """Return the indices of parameters that have such hooks (`has_hooks`)."""
    return {
        index
        for index, parameter in enumerate(parameters)
        if tensor_hooks(parameter) or getattr(parameter, HOOKS_AFTER_ACCUMULATION, None)
    }


def keep_from_hooks(parameter: Tensor) -> None:
    """Have a parameter's hooks called only where a gradient arrives: a node is about to pass on None (Rule 6)."""
    after = _hooks_of(parameter)[1]
    if after and parameter.requires_grad:  # else they are not called
        arrival = next((hook for hook in _hooks_of(parameter)[0].values() if isinstance(hook, _Arrival)), None)
        if arrival is None:
            arrival = _Arrival()
            with without_dispatch():
                Tensor.register_hook(parameter, arrival)  # type: ignore[no-untyped-call]
        _wrap(after, arrival)
    _wrap(_hooks_of(parameter)[0])


def _wrap(hooks: dict[int, Any], arrival: _Arrival | None = None) -> None:
    for key, hook in list(hooks.items()):
        if not isinstance(hook, (_WithGradient, _Arrival)):
            hooks[key] = _WithGradient(hook, arrival)


def _hooks_of(parameter: Tensor) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return a parameter's hooks on its gradient, and those after the accumulation."""
    return tensor_hooks(parameter) or {}, getattr(parameter, HOOKS_AFTER_ACCUMULATION, None) or {}


def _new_plain(cls: type[nn.Parameter], data: Any = None, requires_grad: bool = True) -> nn.Parameter:
    """Make a plain parameter: replaces ``nn.Parameter.__new__`` while any parameter is managed (Rule 4)."""
    if issubclass(type(data), HostOfLibrary):
        with as_own((data,)):
            return _new(cls, data, requires_grad)
    plain = _data.__get__(data) if type(data) in (HostParameter, DeviceParameter) else data
    return _new(cls, plain, requires_grad)


def owner_of(parameter: Tensor) -> ParameterOwner:
    """Return the owner of this managed host parameter."""
    return _watchers[id(parameter)].owner


def in_visit(parameter: Tensor) -> bool:
    """Whether model code runs in a visit of this managed host parameter's unit (Rule 10)."""
    watcher = _watchers[id(parameter)]
    return watcher.bound and watcher.owner.in_visit(parameter)


def name_of(parameter: Tensor) -> str:
    """Return the name of this managed host parameter in the module."""
    watcher = _watchers[id(parameter)]
    return watcher.names[watcher.index_of[id(parameter)]]


def has_hidden_stand_in(parameter: Tensor) -> bool:
    """Whether the parameter's stand-in is hidden: in no slot (stand_ins.py, Rule 6)."""
    watcher = _watchers[id(parameter)]
    return watcher.index_of[id(parameter)] in watcher.autocast


def has_one_node(parameter: Tensor) -> bool:
    """Whether gradients of a parameter arrive on the device at its stand-in, and at no other place."""
    return _watchers[id(parameter)].has_one_node and not has_hidden_stand_in(parameter)


def expose(parameter: Tensor) -> None:
    """Prepare for writes to the host bytes of this managed parameter that no version counter shows."""
    _watchers[id(parameter)].host_exposed(parameter)


# Our own reads of host parameters are not the user's (weight_reads.py).
@contextlib.contextmanager
def _outside_transforms() -> Iterator[None]:
    with without_dispatch(), outside_transforms():
        yield


@contextlib.contextmanager
def _outside_selective_checkpoints() -> Iterator[None]:
    with without_function_modes(), outside_selective_checkpoints():
        yield


def quietly() -> AbstractContextManager[None]:
    """Exempt our own work on weights, as a context, from reads by the user and from what observes the user's code.

    These are transforms (vmap, grad) and selective checkpoints.
    """
    if in_transform():
        return _outside_transforms()
    if dispatch_mode_count() and in_selective_checkpoint():
        return _outside_selective_checkpoints()
    return without_function_modes()


def stand_in(output: torch.Tensor, host: nn.Parameter, data_exposed: list[bool]) -> DeviceParameter:
    """Turn an output of a unit's node into the stand-in of a host parameter."""
    output.__class__ = _stand_in_class(own_class(host))
    output.host = host  # type: ignore[attr-defined]
    output.data_exposed = data_exposed  # type: ignore[attr-defined]
    return output  # type: ignore[return-value]


def stand_in_of_parts(whole: Whole, parts: list[Tensor]) -> Tensor:
    """Make a parameter that consists of tensors again, of stand-ins of its parts (partition.py, rule 10)."""
    device = true_device(parts[0])
    with torch.inference_mode(False), torch.no_grad():
        made: Tensor = whole.form.whole(iter(parts), device)
    if true_device(made) != device:
        raise UnsupportedError(
            f"{whole.name} is a {type(made).__name__}, which is on {true_device(made)} although the tensors that it "
            f"consists of are on {device}: use a plain parameter"
        )
    return made


def stand_in_of_whole(made: Tensor, host: nn.Parameter, data_exposed: list[bool]) -> Tensor:
    """Turn a tensor that was made of stand-ins into the stand-in of a host parameter that consists of tensors."""
    others = {name: value for name, value in vars(host).items() if name not in vars(made)}
    own = {IS_PARAMETER: True, HOST_OF_WHOLE: host, "data_exposed": data_exposed}
    vars(made).update(others, **own)
    return made


def is_stand_in(tensor: Tensor) -> TypeGuard[DeviceParameter]:
    """Whether a tensor is a stand-in; ``isinstance`` takes three times as long, as torch answers it in Python."""
    return issubclass(type(tensor), DeviceParameter)


@functools.cache
def _stand_in_class(kind: type[nn.Parameter]) -> type[DeviceParameter]:
    """Return the class of stand-ins for this class of parameter: a subclass of it, so that its methods are there."""
    return DeviceParameter if kind is nn.Parameter else type(kind.__name__, (DeviceParameter, kind), {})
