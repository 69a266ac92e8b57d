"""Entries in front of the user's ``forward`` methods: each translates a call and delegates to the engine.

1. An entry replaces ``forward`` on the instance. Forward hooks would not do: torch's evaluation fast paths and other
   code check whether a module has any and then run other kernels, and a hook is not called after Ctrl-C.
2. An entry belongs to one module. Copies and pickles of the module are made from a state without entries, in which is
   what the module itself has in their places. An entry elsewhere (``self.plain = self.forward``), or in a class that
   copies its attributes by itself, is copied as what was set on the instance, or as a method that calls the one of the
   copy's class, whichever that is by then.
3. A unit's forward may run once more in backward, for recomputation. It is called through the entry, not through the
   module, so that the user's hooks around it are not called again.
4. ``torch.compile`` traces a module's call into its entry. An entry that enters a unit breaks the graph there and runs
   uncompiled; the forward behind it is compiled as a graph of its own. Inside the visit of its unit an entry has
   nothing to do and is hidden: compiled graphs are told apart by the objects that they met, and without entries in them
   blocks that are alike share one.
5. ``torch.jit.trace`` (a logger that draws the model's graph, ``to_torchscript(method="trace")``) needs the parameters
   themselves: the module is traced on the host, where they are, with host copies of its buffers and arguments.
6. Code asks whether an attribute is a method: by type (Fabric's ``mark_forward_method``), so an entry in front of
   another method than ``forward`` is reached through one, or by its ``__func__`` (accelerate), which it wraps and binds
   again, and which an entry has, too. For a copy of the module this function is its class's.
7. The method behind an entry is what the module would have without it: the one that was set on the instance, or that
   which its class has now. A module may be given another class, and a class another method, at any time.
8. Other code may give the managed module another ``forward`` in place of the entry (TRL's fused head does). Then a
   call of the module is a step by an entry in front of the call itself. While ``forward`` is ours, that entry only
   delegates: the user's hooks run outside of the step, as they do without it.
9. Arguments are moved to the device, as code that calls a plain module there moves them. A mapping that is no node to
   torch's pytree, such as transformers' BatchEncoding, is replaced by a copy: the caller's own stays as it is.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import operator
import types
import weakref
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..autograd import weight_reads
from ..autograd.backward_pass import in_backward
from ..autograd.saved_tensors import tensors_in
from ..autograd.stand_ins import HiddenInVisits, InPlaceOfForward, StreamedUnit
from ..compat.dynamo import never_compiled, not_compiled_itself
from ..compat.modules import CALL, CONVERT, COPY, context_decorator, tree_leaves, tree_map_only
from ..compat.tensors import tracing_state
from ..memory.device import Device
from ..memory.watched_parameters import is_watched, quietly, true_dtype, true_grad, true_version
from .engine import Engine
from .same_path import SamePath


class ForwardEntry(InPlaceOfForward):
    """An entry in front of one module's forward (Rule 1), or of another of its methods; this class only delegates."""

    removed = False  # whether the module's own method is back in its place

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.own = module.__dict__.get(self.method)  # set on the instance before streaming
        self._of_class = getattr(type(module), self.method, None)
        self._forward: Callable[..., Any] = getattr(module, self.method)
        functools.update_wrapper(self, self._forward, updated=())  # other code inspects the signature
        self._installed = module.__dict__[self.method] = self._callable()

    @property
    def forward(self) -> Callable[..., Any]:
        """The method behind this entry (Rule 7)."""
        of_class = getattr(type(self.module), self.method, None)
        if of_class is not self._of_class and self.own is None:
            self._of_class = of_class
            method = inspect.getattr_static(type(self.module), self.method)
            self._forward = self._prepared(method.__get__(self.module, type(self.module)))
        return self._forward

    def _prepared(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return what is called for another method of the class."""
        return forward

    def _callable(self) -> Callable[..., Any]:
        """Return what stands in the method's place."""
        return self

    @property
    def is_in_place(self) -> bool:
        """Whether no other code has put something else in the entry's place."""
        return self.stands_as(self.module.__dict__.get(self.method))

    def stands_as(self, value: Any) -> bool:
        """Return whether this is what the entry has put in the method's place."""
        return value is self._installed

    def remove(self) -> None:
        """Put the module's own method back; where other code wrapped this entry, only retire it."""
        if self.is_in_place:
            self.restore()
            self.removed = True
        else:
            self.retire()

    def retire(self) -> None:
        """Only call the forward from now on: other code may still refer to this entry, or put it back."""
        self.method, self.__class__ = self.method, ForwardEntry

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    @property
    def __self__(self) -> nn.Module:
        return self.module

    @property
    def __func__(self) -> Callable[..., Any]:
        """The function of the method that is behind this entry, if it is one, with the entry in front (Rule 6)."""
        if self.own is not None:
            function = self.own.__func__
        elif has_method(self.module, self.method):
            function = _method_of_class(getattr(type(self.module), self.method), self.method)
        else:
            raise AttributeError("__func__")
        refer = weakref.ref(self)  # which a copy does not keep

        @functools.wraps(function)
        def method(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            entry = refer()
            if entry is None or entry.module is not module:
                return function(module, *args, **kwargs)
            return entry(*args, **kwargs)

        return method

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self.own is not None:
            return copy.deepcopy(self.own, memo)
        copied = memo.get(id(self.module), self.module)
        return types.MethodType(_method_of_class(getattr(type(copied), self.method), self.method), copied)

    def __reduce__(self) -> Any:
        if self.own is not None:
            return operator.itemgetter(0), ([self.own],)
        return getattr, (self.module, self.method)  # finds the class's: the copy has no attributes yet


def _method_of_class(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a function that looks like a method, and calls the one of this name that a module's class has by then."""

    @functools.wraps(method)
    def by_name(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return getattr(type(module), name)(module, *args, **kwargs)

    return by_name


def as_method(entry: ForwardEntry) -> Callable[..., Any]:
    """Return a method of the entry's module that calls the entry (Rule 6)."""
    function = getattr(entry, "__func__", None)
    if function is None:
        return entry
    function.entry = weakref.ref(entry)
    return types.MethodType(function, entry.module)


def without_entries(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return a module's attributes with what it has itself in the places of entries (Rule 2)."""
    plain = {}
    for name, value in attributes.items():
        # A module above units may have parameters: two entries.
        while (entry := entry_behind(value)) is not None and entry.method == name:
            value = entry.own
        if value is not None or attributes[name] is None:
            plain[name] = value
    return plain


def entry_behind(value: Any) -> InPlaceOfForward | None:
    """Return the entry that an attribute of a module is, or leads to."""
    if type(value) is types.MethodType:
        refer = getattr(value.__func__, "entry", None)
        entry = refer and refer()
        value = entry if entry and entry.stands_as(value) else None  # else another method has it from `functools.wraps`
    return value if isinstance(value, InPlaceOfForward) else None


class CopyEntry(ForwardEntry):
    """An entry in front of what copies and pickles of a module are made from (Rule 2)."""

    method = COPY

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        made = self.forward(*args, **kwargs)
        if not isinstance(made, tuple) or len(made) < 3:
            return made
        make, of, state, *more = made
        if isinstance(state, dict):
            state = without_entries(state)
        elif isinstance(state, tuple) and len(state) == 2 and isinstance(state[0], dict):  # the other has slots
            state = without_entries(state[0]), state[1]
        return make, of, state, *more


def has_method(module: nn.Module, name: str) -> bool:
    """Return whether a module's class has this method."""
    return isinstance(inspect.getattr_static(type(module), name, None), types.FunctionType)


class ModuleEntry(ForwardEntry, HiddenInVisits):
    """An entry that visits the units which own a module's direct parameters."""

    def __init__(self, module: nn.Module, engine: Engine, units: list[StreamedUnit]) -> None:
        super().__init__(module)
        self.engine = engine
        self.units = units
        self.guard: Callable[..., Any] | None = None  # in front of the forward during a visit (autocast_weights.py)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if all(unit.stand_ins.bound for unit in self.units) or tracing_state() is not None:
            return (self.guard or self.forward)(*args, **kwargs)
        return self._visit(*args, **kwargs)

    @not_compiled_itself  # Rule 4
    def _visit(self, *args: Any, **kwargs: Any) -> Any:
        if not self.engine.phases.in_step and not weight_reads.holds_parameters(args, kwargs):
            args, kwargs = to_device(args, kwargs, self.engine.device.torch_device)
        return self.engine.visit(self, self.forward, *args, **kwargs)


class ConversionEntry(ForwardEntry):
    """An entry by which ``module.to(device)`` leaves streamed weights and their gradients where they are.

    In a plain run they are on the device, so a conversion that returns what is there as it is has nothing to do.
    """

    method = CONVERT

    def __init__(self, module: nn.Module, device: Device) -> None:
        super().__init__(module)
        self.device = device

    def __call__(self, function: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
        def convert(tensor: Tensor) -> Tensor:
            return tensor if self._stays(function, tensor) else function(tensor)

        return self.forward(convert, *args, **kwargs)

    def _stays(self, function: Callable[[Tensor], Tensor], tensor: Tensor) -> bool:
        """Whether a tensor is a streamed weight, or the gradient of one, that stays as it is in a plain run."""
        weights = [weight for weight in self.module._parameters.values() if weight is not None and is_watched(weight)]
        if not any(tensor is weight or tensor is true_grad(weight) for weight in weights):
            return False
        form = tensor if tensor.dim() in (4, 5) else torch.empty((1,) * tensor.dim())  # memory formats are of these
        with quietly():
            dtype, device = true_dtype(tensor), self.device.torch_device
            probe = torch.empty_strided(form.size(), form.stride(), dtype=dtype, device=device)
            before = probe.data_ptr()
            return function(probe) is probe and probe.data_ptr() == before and not true_version(probe)


class NoFlatten(ForwardEntry):
    """An entry that keeps a recurrent layer from moving its weights into memory of its own for cuDNN.

    The same kernels run without the move.
    """

    method = "flatten_parameters"

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Leave the weights in their unit's buffer."""


class EncoderFastPathEntry(ForwardEntry):
    """An entry that keeps torch's encoder on its fast path.

    Before its first layer runs, the encoder checks whether that layer's weights take part in function dispatch, and
    leaves the fast path if they do. It reads no weight until then, and the layer's visit ends the pause.
    """

    @not_compiled_itself  # Rule 4
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        weight_reads.pause()
        try:
            return self.forward(*args, **kwargs)
        finally:
            weight_reads.resume()


class UnitEntry(ModuleEntry):
    """An entry in front of a module that is a unit as a whole: its outputs lead into the unit's backward."""

    def __init__(self, module: nn.Module, engine: Engine, units: list[StreamedUnit]) -> None:
        super().__init__(module, engine, units)
        self._forward = self._prepared(self._forward)

    def _prepared(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(forward) if self.engine.options.compile_units else forward

    @not_compiled_itself  # Rule 4
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if tracing_state() is not None:
            return self.forward(*args, **kwargs)
        if weight_reads.holds_parameters(args, kwargs):
            return weight_reads.lent(self.__call__, args, kwargs)
        if not self.engine.phases.in_step:  # inside, a plain module moves nothing
            args, kwargs = to_device(args, kwargs, self.engine.device.torch_device)
        return (self.engine.record if torch.is_grad_enabled() else self.engine.visit)(
            self, self.forward, *args, **kwargs
        )


class ShardedEntry(ModuleEntry):
    """An entry in front of a module with shards, which the ranks that have the other shards enter together.

    In backward they come together where it reaches an output of the module.
    """

    def __init__(self, module: nn.Module, engine: Engine, units: list[StreamedUnit], name: str, path: SamePath) -> None:
        super().__init__(module, engine, units)
        self.name, self.path = name, path

    @not_compiled_itself  # Rule 4
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if in_backward() or tracing_state() is not None or all(unit.stand_ins.bound for unit in self.units):
            return super().__call__(*args, **kwargs)
        self.path.enter(self.name)
        output = super().__call__(*args, **kwargs)
        for node in {tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None}:
            node.register_prehook(lambda _: self.path.enter(f"the backward of {self.name}"))
        return output


class ShardedUnitEntry(ShardedEntry, UnitEntry):
    """An entry in front of a unit with shards."""


class StepBoundary(Protocol):
    """The object that knows where steps begin and end."""

    device: Device
    closed: bool

    @property
    def in_step(self) -> bool: ...

    def open_scope(self, kind: Any) -> None: ...

    def close_scope(self) -> None: ...

    def explaining(self) -> AbstractContextManager[None]: ...

    def generating(self) -> AbstractContextManager[None]: ...


class RootEntry(ForwardEntry):
    """An entry in front of the managed module: a forward outside of any step becomes a step of its own."""

    name = ""

    def __init__(self, module: nn.Module, steps: StepBoundary) -> None:
        super().__init__(module)
        self.steps = steps

    @not_compiled_itself  # Rule 4
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if tracing_state() is not None:  # Rule 5
            with on_host(self.module):
                args, kwargs = tree_map_only(Tensor, Tensor.cpu, (args, kwargs))
                return self.forward(*args, **kwargs)
        return self.step(*args, **kwargs)

    @not_compiled_itself
    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward as a step."""
        self.steps.open_scope(("forward", self.module.training, self.name))
        try:
            with self.steps.explaining():
                args, kwargs = to_device(args, kwargs, self.steps.device.torch_device)
                # If it was removed, units were made anew.
                forward = getattr(self.module, self.method) if self.removed else self.forward
                return forward(*args, **kwargs)
        finally:
            self.steps.close_scope()


class CallEntry(RootEntry):
    """An entry in front of a call of the managed module, for a forward that took the entry's place (Rule 8)."""

    method = CALL

    def __init__(self, root: RootEntry) -> None:
        super().__init__(root.module, root.steps)
        self.root = root

    @not_compiled_itself  # Rule 4
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.root.is_in_place or tracing_state() is not None:
            return self.forward(*args, **kwargs)
        return self.step(*args, **kwargs)


class SubmoduleEntry(RootEntry):
    """An entry in front of a submodule with units inside: a forward called by itself becomes a step."""

    def __init__(self, module: nn.Module, steps: StepBoundary, name: str) -> None:
        super().__init__(module, steps)
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.forward(*args, **kwargs)
        return self.step_by_itself(*args, **kwargs)

    @not_compiled_itself  # Rule 4
    def step_by_itself(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward, as a step if none is running."""
        alone = not (self.steps.in_step or tracing_state() is not None)
        return (self.step if alone else self.forward)(*args, **kwargs)


class StepEntry(SubmoduleEntry):
    """An entry in front of a method that runs forwards, which becomes a step if it is called by itself."""

    def __init__(self, module: nn.Module, steps: StepBoundary, method: str) -> None:
        self.method = method
        super().__init__(module, steps, method)

    _callable = as_method


class Generation(ForwardEntry):
    """An entry in front of ``generate``, which reads weights and devices between its forwards as a step does.

    Its arguments are moved to the device as those of a forward: its caller may have sent them to the model's device,
    which was the host then. A ``generate`` that yields is outside of the step while its caller has the turn."""

    method = "generate"

    def __init__(self, module: nn.Module, steps: StepBoundary) -> None:
        super().__init__(module)
        self.steps = steps

    _callable = as_method

    @not_compiled_itself  # Rule 4
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.steps.closed:
            args, kwargs = to_device(args, kwargs, self.steps.device.torch_device)
        generate: Any = context_decorator(self.steps.generating, self.forward)  # type: ignore[no-untyped-call]
        return generate(*args, **kwargs)


@contextlib.contextmanager
def on_host(module: nn.Module) -> Iterator[None]:
    """Put host copies in the places of the module's buffers for the time of the context."""
    places = [(child._buffers, name) for child in module.modules() for name in child._buffers]
    buffers = [place[name] for place, name in places]
    for (place, name), buffer in zip(places, buffers, strict=True):
        place[name] = None if buffer is None else buffer.cpu()
    try:
        yield
    finally:
        for (place, name), buffer in zip(places, buffers, strict=True):
            place[name] = buffer


@never_compiled
def to_device(
    args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Move the arguments to the device, unless a tensor argument is there already: then the caller has placed them.

    The same is decided by itself for each argument that contains tensors.
    """
    if any(isinstance(value, Tensor) and value.device == device for value in (*args, *kwargs.values())):
        return args, kwargs

    def move(value: Any) -> Any:
        leaves = tree_leaves(value)
        if any(isinstance(leaf, Mapping) for leaf in leaves):
            value = tree_map_only(Mapping, move_mapping, value)
        devices = {leaf.device for leaf in leaves if isinstance(leaf, Tensor)}
        return value if not devices or device in devices else tree_map_only(Tensor, lambda leaf: leaf.to(device), value)

    def move_mapping(value: Any) -> Any:
        moved = {key: move(item) for key, item in value.items()}
        if all(item is value[key] for key, item in moved.items()):
            return value
        copied = copy.copy(value) if isinstance(value, (dict, UserDict)) else type(value)(moved)
        if isinstance(copied, (dict, UserDict)):
            copied.update(moved)
        return copied

    return tuple(map(move, args)), {key: move(value) for key, value in kwargs.items()}
