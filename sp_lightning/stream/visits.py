"""Visits: what runs in place of the call of a module that owns streamed weights.

A visit sits in the slot that `module.compile()` uses: forward hooks of the user's and checkpoints inside of a class's
`__call__` run within, and copies and pickles of the module are plain.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from threading import get_ident
from typing import Any

import torch
from torch import nn

from ..compat.dynamo import (
    compiling_as_here,
    compiling_callback,
    never_compiled_hook,
    not_compiled_itself,
    not_compiled_itself_hook,
)
from ..compat.torch import call_slot, graph_task, plain_call, set_call_slot, top_hooks, tree_map_only
from ..errors import ExactnessError
from .activations import SavedTensors
from .lazy import found_in
from .leaf import Weight
from .recompute import Recompute
from .unit import Unit
from .window import Window


class Visit:
    """The call of a module: its units are on the device meanwhile, and their leaves in the modules."""

    def __init__(
        self,
        module: nn.Module,
        name: str,
        units: Sequence[Unit],
        is_entry: bool,
        window: Window,
        outermost: Callable[[Visit], AbstractContextManager[None]],
        is_root: bool,
        compiles: bool = False,
    ) -> None:
        self.is_root, self._compiles = is_root, compiles
        self.contains_others = False  # whether modules inside have weights of other units
        self.asked: list[Unit] = []  # whose weights the module looks at in evaluation
        self.module, self.units, self.is_entry = module, list(units), is_entry
        self._window, self._policy, self._outermost = window, window.policy, outermost
        self._name = name
        self._recompute = Recompute(module, name, self._policy.device.torch_device)
        self.chain()

    def chain(self) -> None:
        """Take the slot. Calls go on to what the user put there, by `module.compile()`, or to what we compile so."""
        self.compiled: Callable[..., Any] | None = call_slot(self.module)
        plain = plain_call(self.module)
        self._call = self.compiled or (torch.compile(plain) if self._compiles else plain)
        set_call_slot(self.module, self)

    def __reduce__(self) -> Any:
        """Leave the slot empty in copies of modules that copy or pickle their attributes one by one."""
        return type(None), ()

    def close(self) -> None:
        """Leave the slot as the user had it."""
        if call_slot(self.module) is self:
            set_call_slot(self.module, self.compiled)

    @not_compiled_itself
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        window = self._window
        if window.is_in_call:
            if window.caller not in (None, get_ident()):
                window.check_thread(self._name)
            if self._is_inside_its_unit():
                return self._call(*args, **kwargs)
            return self._called(args, kwargs)
        if not self._policy.device.is_host:
            args, kwargs = self._brought((args, kwargs))
        with self._outermost(self):
            return self._called(args, kwargs)

    @never_compiled_hook
    def _is_inside_its_unit(self) -> bool:
        """Whether a call around this one has all that this one would prepare: most calls of a step are such ones."""
        here = self._policy.device.current_stream()
        if self.asked:
            return False
        for unit in self.units:
            if not unit.depth or unit.memory.shown_on != here:
                return False
        if not torch.is_grad_enabled():
            return bool(self.units)
        hooks = top_hooks(False)  # those of a checkpoint of the user's may be around this call alone
        return bool(self.units) and hooks is not None and isinstance(getattr(hooks[0], "__self__", None), SavedTensors)

    def _brought(self, arguments: Any) -> Any:
        """Move arguments to the device where all are on the host, as `x.to(layer.weight.device)` leaves them."""
        device = self._policy.device.torch_device
        if any(tensor.device == device for tensor in found_in(arguments, torch.Tensor)):
            return arguments
        move = lambda tensor: tensor if isinstance(tensor, nn.Parameter) else tensor.to(device)  # noqa: E731
        return tree_map_only(torch.Tensor, move, arguments)

    @not_compiled_itself_hook
    def _called(self, args: Any, kwargs: Any) -> Any:
        is_compiled = compiling_callback() is not None
        is_plain = not is_compiled and self.compiled is None  # compilers know no absent leaves
        lends = self.contains_others and not self._window.is_in_call and is_plain
        call = compiling_as_here(self._call) if is_compiled else self._call
        return self._visited(functools.partial(self._recorded, call, lends), args, kwargs)

    @never_compiled_hook
    def _visited(self, recorded: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        is_entered = self.is_entry and not self.units[0].depth  # the unit that is entered here
        if is_entered and (self._policy.recomputes or self._policy.offloads) and torch.is_grad_enabled():
            return self._policy.run(self._recompute, recorded, args, kwargs)
        return recorded(*args, **kwargs)

    def _recorded(self, call: Callable[..., Any], lends: bool, /, *args: Any, **kwargs: Any) -> Any:
        units = self.units if self.module.training or not self.asked else [*self.units, *self.asked]
        opened = [unit for unit in units if not unit.depth]
        with self._policy.saving():
            if opened or not self.units:
                return self._inside(functools.partial(call, *args, **kwargs), opened, lends)
            here = self._policy.device.current_stream()
            for unit in self.units:
                if unit.memory.shown_on != here:
                    unit.show(here)  # to a stream of the user's, inside of the unit's call
            return call(*args, **kwargs)

    def _inside(self, call: Callable[[], Any], opened: list[Unit], lends: bool) -> Any:
        """Call the module while its units are on the device and bound, and with ``lends`` all leaves in the modules."""
        window = self._window
        bound: list[tuple[Unit, list[int]]] = []
        lent: list[Unit] | None = None
        noted = window.begin_call(opened)
        try:
            if lends:
                lent = window.lend()
            for unit in opened:
                unit.depth = 1
                unit.calls += graph_task() == -1
                bound.append((unit, unit.bind()))
            return call()
        finally:
            try:
                for unit in opened:
                    unit.depth = 0
                    unit.unbind()
                if lent is not None:
                    window.take_back(lent)
                for unit, versions in bound:
                    if written := unit.written_since(versions):
                        self._keep_writes(unit, written)
            finally:
                window.end_call(noted)
                if (listener := self._policy.device.counters.listener) is not None and graph_task() == -1:
                    listener.idle()
            if torch.is_autocast_enabled(self._policy.device.torch_device.type):
                torch.clear_autocast_cache()  # of casts of leaves, which would keep memory

    def _keep_writes(self, unit: Unit, written: list[Weight]) -> None:
        if self._policy.is_repeated:
            raise ExactnessError(
                f"{unit.name} writes to its weights in its forward, which a second forward would repeat: use"
                " activations='keep' or 'offload'"
            )
        self._policy.device.counters.writebacks += 1
        for weight in written:
            unit.keep_write(weight)
