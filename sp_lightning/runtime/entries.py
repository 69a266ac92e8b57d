"""What stands in front of the user's ``forward`` methods: entries that translate and delegate to the engine.

1. An entry replaces ``forward`` on the instance. Forward hooks would do, but torch's evaluation fast paths and other
   code ask whether a module has any and then run other kernels; and a hook is not called when the user presses Ctrl-C.
2. A copy or a pickle of the module has the forward of its class: an entry belongs to one module.
3. A unit's forward may run once more in backward, for recomputation: the entry calls it, user's hooks around it are not
   called again.
4. ``torch.compile`` traces a module's call into its entry. One that enters a unit breaks the graph there, runs as it
   is, and the forward behind it is compiled as a graph of its own. Inside the visit of its unit an entry has nothing to
   do and is out of the way: graphs are told apart by the objects that they met, and blocks that are alike share one.
5. ``torch.jit.trace`` (a logger that draws the model's graph, ``to_torchscript(method="trace")``) asks for parameters
   themselves: it traces the module on the host, where they are, on copies of what is on the device.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._contextlib import context_decorator
from torch.utils._pytree import tree_leaves, tree_map_only

from ..autograd import weight_reads
from ..autograd.dynamo import compiles_calls, never_compiled, not_compiled_itself
from ..autograd.streamed_unit import StreamedUnit
from ..memory.device import Device
from .engine import Engine


class ForwardEntry:
    """Stands in front of one module's forward (Rule 1), or of another method of it."""

    method = "forward"
    removed = False  # nothing of it is left in the module

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward: Callable[..., Any] = getattr(module, self.method)
        self._own = module.__dict__.get(self.method)  # set on the instance by someone before us
        functools.update_wrapper(self, self.forward, updated=())  # its signature is asked for
        module.__dict__[self.method] = self

    def remove(self) -> None:
        """The module's own forward again; where somebody wrapped this entry, it only passes on."""
        if self.module.__dict__.get(self.method) is not self:
            self.retire()
        else:
            self._restore()
            self.removed = True

    def retire(self) -> None:
        """Only pass on from now on, wherever somebody keeps this entry or puts it back."""
        self.__class__ = ForwardEntry

    def _restore(self) -> None:
        if self._own is None:
            del self.module.__dict__[self.method]
        else:
            self.module.__dict__[self.method] = self._own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self.module), self.module)
        return types.MethodType(getattr(type(copied), self.method), copied)

    def __reduce__(self) -> Any:
        return getattr, (self.module, self.method)  # resolved before the copy has any attributes: its class's


class ModuleEntry(ForwardEntry):
    """Enters the units that own a module's direct parameters."""

    def __init__(self, module: nn.Module, engine: Engine, units: list[StreamedUnit]) -> None:
        super().__init__(module)
        self.engine = engine
        self.units = units
        self.hidden = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if all(unit.stand_ins.bound for unit in self.units) or is_tracing():
            return self.forward(*args, **kwargs)
        return self.visit(*args, **kwargs)

    def hide(self) -> None:
        """Inside a visit of its only unit (Rule 4)."""
        if self.module.__dict__.get("forward") is self:
            self.hidden = True
            self._restore()

    def show(self) -> None:
        """After it."""
        if self.hidden:
            self.hidden = False
            if self.module.__dict__.get("forward") is self._own:
                self.module.__dict__["forward"] = self

    @not_compiled_itself  # Rule 4
    def visit(self, *args: Any, **kwargs: Any) -> Any:
        """Forward, with the units there."""
        if compiles_calls() and self.engine.autocast_weights.enabled:
            self.engine.autocast_weights.stop()
        depth = self.engine.enter_all(self.units)
        try:
            return self.forward(*args, **kwargs)
        finally:
            self.engine.leave_to(depth)


class NoFlatten(ForwardEntry):
    """cuDNN's recurrent layers would move their weights into memory of their own; without, the same kernels run."""

    method = "flatten_parameters"

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """The weights stay in their unit's buffer."""


class EncoderFastPathEntry(ForwardEntry):
    """torch's encoder asks, before its first layer runs, whether that layer's weights take part in function dispatch.

    If they do, it leaves its fast path. It reads nothing until then.
    """

    @not_compiled_itself  # Rule 4
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        weight_reads.pause()
        try:
            return self.forward(*args, **kwargs)
        finally:
            weight_reads.resume()


class UnitEntry(ModuleEntry):
    """A part that is a unit as a whole: its outputs lead into the unit's backward."""

    def __init__(self, module: nn.Module, engine: Engine, units: list[StreamedUnit]) -> None:
        super().__init__(module, engine, units)
        if engine.options.compile_units:
            self.forward = torch.compile(self.forward)

    @not_compiled_itself  # Rule 4
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_tracing():
            return self.forward(*args, **kwargs)
        if weight_reads.holds_parameters(args, kwargs):
            return weight_reads.lent(self.__call__, args, kwargs)
        args, kwargs = moved(args, kwargs, self.engine.device.torch_device)
        if not torch.is_grad_enabled():
            return self.visit(*args, **kwargs)
        return self.engine.run(self.units[0], self.module, self.visit, args, kwargs)


class StepBoundary(Protocol):
    """Who knows where steps begin and end."""

    device: Device

    @property
    def in_step(self) -> bool: ...

    def open_scope(self, kind: Any) -> None: ...

    def close_scope(self) -> None: ...

    def explaining(self) -> AbstractContextManager[None]: ...

    def generating(self) -> AbstractContextManager[None]: ...


class RootEntry(ForwardEntry):
    """The managed module itself: a forward of it outside of any step is a step of its own."""

    name = ""

    def __init__(self, module: nn.Module, steps: StepBoundary) -> None:
        super().__init__(module)
        self.steps = steps

    @not_compiled_itself  # Rule 4
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_tracing():
            with on_host(self.module):
                args, kwargs = tree_map_only(Tensor, Tensor.cpu, (args, kwargs))
                return self.forward(*args, **kwargs)
        return self.step(*args, **kwargs)

    @not_compiled_itself
    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Forward, as a step."""
        self.steps.open_scope(("forward", self.module.training, self.name))
        try:
            with self.steps.explaining():
                args, kwargs = moved(args, kwargs, self.steps.device.torch_device)
                forward = self.module.forward if self.removed else self.forward  # units were made anew
                return forward(*args, **kwargs)
        finally:
            self.steps.close_scope()


class SubmoduleEntry(RootEntry):
    """A part of it that consists of more than a unit: so is a forward of it that is called by itself."""

    def __init__(self, module: nn.Module, steps: StepBoundary, name: str) -> None:
        super().__init__(module, steps)
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.forward(*args, **kwargs)
        return self.step_by_itself(*args, **kwargs)

    @not_compiled_itself  # Rule 4
    def step_by_itself(self, *args: Any, **kwargs: Any) -> Any:
        """Forward, as a step where none runs."""
        alone = not (self.steps.in_step or is_tracing())
        return (self.step if alone else self.forward)(*args, **kwargs)


class Generation(ForwardEntry):
    """Stands in front of ``generate``: what it asks and reads between the forwards that it calls is read in a step. One
    that yields is outside of it while whoever called it has the turn."""

    method = "generate"

    def __init__(self, module: nn.Module, steps: StepBoundary) -> None:
        super().__init__(module)
        self.steps = steps

    @classmethod
    def fits(cls, module: nn.Module) -> bool:
        """Tell whether the module's class has this method."""
        return isinstance(inspect.getattr_static(type(module), cls.method, None), types.FunctionType)

    @not_compiled_itself  # Rule 4
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        generate: Any = context_decorator(self.steps.generating, self.forward)  # type: ignore[no-untyped-call]
        return generate(*args, **kwargs)


def is_tracing() -> bool:
    """Whether ``torch.jit.trace`` looks on (Rule 5)."""
    return torch._C._get_tracing_state() is not None


@contextlib.contextmanager
def on_host(module: nn.Module) -> Iterator[None]:
    """Within, copies on the host stand for the module's buffers."""
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
def moved(
    args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments on the device, if no tensor among them is there yet; else they are as the caller wants them. What
    holds tensors is an argument by itself."""
    if any(isinstance(value, Tensor) and value.device == device for value in (*args, *kwargs.values())):
        return args, kwargs

    def move(value: Any) -> Any:
        devices = {leaf.device for leaf in tree_leaves(value) if isinstance(leaf, Tensor)}
        return value if not devices or device in devices else tree_map_only(Tensor, lambda leaf: leaf.to(device), value)

    return tuple(map(move, args)), {key: move(value) for key, value in kwargs.items()}
