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
        self.asked: list[Unit] = []  # units of modules inside, whose weights this module reads in evaluation
        self.module, self.units, self.is_entry = module, list(units), is_entry
        self._window, self._policy, self._outermost = window, window.policy, outermost
        self._name = name
        self._recompute = Recompute(module, name, self._policy.device.torch_device)
        self.take_slot()

    def take_slot(self) -> None:
        """Put this visit into the module's call slot; it calls what the user had put there, or the plain module."""
        self.compiled: Callable[..., Any] | None = call_slot(self.module)
        plain = plain_call(self.module)
        self._call = self.compiled or (torch.compile(plain) if self._compiles else plain)
        set_call_slot(self.module, self)

    def __reduce__(self) -> Any:
        """Pickle and copy as None: the copy of a module that copies its attributes has an empty call slot."""
        return type(None), ()

    def close(self) -> None:
        """Give the module's call slot back to the call that the user had there."""
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
            return self._call_module(args, kwargs)
        if not self._policy.device.is_host:
            args, kwargs = self._moved_to_device((args, kwargs))
        with self._outermost(self):
            return self._call_module(args, kwargs)

    @never_compiled_hook
    def _is_inside_its_unit(self) -> bool:
        """Whether a call around this one has prepared everything: units on the device, and hooks that save tensors."""
        here = self._policy.device.current_stream()
        if self.asked:
            return False
        for unit in self.units:
            if not unit.depth or unit.memory.shown_on != here:
                return False
        if not torch.is_grad_enabled():
            return bool(self.units)
        hooks = top_hooks(False)  # not the policy's if the user's checkpoint is around this call alone
        return bool(self.units) and hooks is not None and isinstance(getattr(hooks[0], "__self__", None), SavedTensors)

    def _moved_to_device(self, arguments: Any) -> Any:
        """Move arguments to the device if all are on the host, where `x.to(layer.weight.device)` leaves them."""
        device = self._policy.device.torch_device
        if any(tensor.device == device for tensor in found_in(arguments, torch.Tensor)):
            return arguments
        move = lambda tensor: tensor if isinstance(tensor, nn.Parameter) else tensor.to(device)  # noqa: E731
        return tree_map_only(torch.Tensor, move, arguments)

    @not_compiled_itself_hook
    def _call_module(self, args: Any, kwargs: Any) -> Any:
        """Call the module inside a visit: compiled if the caller is, and with all leaves lent if it needs them."""
        is_compiled = compiling_callback() is not None
        is_plain = not is_compiled and self.compiled is None  # a compiler cannot trace absent leaves
        lends = self.contains_others and not self._window.is_in_call and is_plain
        call = compiling_as_here(self._call) if is_compiled else self._call
        return self._run_by_policy(functools.partial(self._run_visited, call, lends), args, kwargs)

    @never_compiled_hook
    def _run_by_policy(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a call; one that enters a unit goes through the activation policy if that recomputes or offloads."""
        is_entered = self.is_entry and not self.units[0].depth  # first call of a unit's module
        if is_entered and (self._policy.recomputes or self._policy.offloads) and torch.is_grad_enabled():
            return self._policy.run(self._recompute, call, args, kwargs)
        return call(*args, **kwargs)

    def _run_visited(self, call: Callable[..., Any], lends: bool, /, *args: Any, **kwargs: Any) -> Any:
        """Run a call under hooks that save weights as references, with the units on the device."""
        units = self.units if self.module.training or not self.asked else [*self.units, *self.asked]
        opened = [unit for unit in units if not unit.depth]
        with self._policy.saving():
            if opened or not self.units:
                return self._run_bound(functools.partial(call, *args, **kwargs), opened, lends)
            here = self._policy.device.current_stream()
            for unit in self.units:
                if unit.memory.shown_on != here:
                    unit.show(here)  # the user changed streams inside of the unit's call
            return call(*args, **kwargs)

    def _run_bound(self, call: Callable[[], Any], opened: list[Unit], lends: bool) -> Any:
        """Run a call while its units are on the device and bound, and with ``lends`` all leaves in the modules."""
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
                    torch.clear_autocast_cache()  # casts of leaves would keep memory

    def _keep_writes(self, unit: Unit, written: list[Weight]) -> None:
        """Copy weights that a forward wrote to the host; raise if the forward is to run twice."""
        if self._policy.is_repeated:
            raise ExactnessError(
                f"{unit.name} writes to its weights in its forward, which a second forward would repeat: use"
                " activations='keep' or 'offload'"
            )
        self._policy.device.counters.writebacks += 1
        for weight in written:
            unit.keep_write(weight)
