"""Visits: what runs in place of the call of a module that owns streamed weights.

A visit sits in the slot that `module.compile()` uses: forward hooks of the user's and checkpoints inside of a class's
`__call__` run within, and copies and pickles of the module are plain.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
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
)
from ..compat.torch import call_slot, graph_task, plain_call, set_call_slot, top_hooks, tree_map_only
from ..errors import ExactnessError, UnsupportedError
from .activations import SavedTensors
from .lazy import found_in
from .leaf import FUSED, NO_CONTEXT, Weight
from .recompute import Recompute
from .unit import Unit
from .window import Window


class Visit:
    """The call of a module: its units are on the device meanwhile, and their leaves in the modules."""

    def __init__(
        self,
        module: nn.Module,
        name: str,
        is_entry: bool,
        window: Window,
        outermost: Callable[[Visit], AbstractContextManager[None]],
        compiles: bool = False,
    ) -> None:
        self.module, self._name, self._is_entry = module, name, is_entry
        self._window, self._policy, self._outermost = window, window.policy, outermost
        self._compiles = is_entry and compiles
        self.units: list[Unit] = []
        self.asked: list[Unit] = []  # units of modules inside, whose weights this module reads in evaluation
        self.contains_others = False  # whether modules inside have weights of other units
        self._repeat = Recompute(module, name, self._policy.device.torch_device).run
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

    @not_compiled_itself
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._window.is_in_call and self._is_prepared():
            return self._call(*args, **kwargs)
        is_compiled = compiling_callback() is not None
        return self._run(compiling_as_here(self._call) if is_compiled else self._call, is_compiled, args, kwargs)

    @never_compiled_hook
    def _is_prepared(self) -> bool:
        """Whether a call around this one has prepared everything: units on the device, and hooks that save tensors."""
        if self._window.caller not in (None, get_ident()) and graph_task() == -1:  # the caller waits for its backward
            raise UnsupportedError(
                f"two threads are in one streamed model, one of them at {self._name}: call it from one thread at a time"
            )
        here = self._policy.device.current_stream()
        for unit in self.units:
            if not unit.depth or unit.memory.shown_on != here:
                return False
        if self.asked or not self.units:
            return False
        if not torch.is_grad_enabled():
            return True
        hooks = top_hooks(False)  # not the policy's if the user's checkpoint is around this call alone
        return hooks is not None and isinstance(getattr(hooks[0], "__self__", None), SavedTensors)

    @never_compiled_hook
    def _run(self, call: Callable[..., Any], is_compiled: bool, args: Any, kwargs: Any) -> Any:
        """Run a call in a step if it is outermost, and by the activation policy if it enters a unit."""
        scope, lends = NO_CONTEXT, False
        if not self._window.is_in_call:
            scope = self._outermost(self)
            # The root needs all leaves. A compiler cannot trace absent ones.
            lends = self.contains_others and not is_compiled and self.compiled is None
            if not self._policy.device.is_host:
                args, kwargs = self._moved_to_device((args, kwargs))
        visit = functools.partial(self._run_bound, call, lends)
        with scope:
            if self._is_entry and not self.units[0].depth and torch.is_grad_enabled():
                return self._policy.run(self._repeat, visit, args, kwargs)
            return visit(*args, **kwargs)

    def _moved_to_device(self, arguments: Any) -> Any:
        """Move arguments to the device if all are on the host, where `x.to(layer.weight.device)` leaves them."""
        device = self._policy.device.torch_device
        if any(tensor.device == device for tensor in found_in(arguments, torch.Tensor)):
            return arguments
        move = lambda tensor: tensor if isinstance(tensor, nn.Parameter) else tensor.to(device)  # noqa: E731
        return tree_map_only(torch.Tensor, move, arguments)

    def _run_bound(self, call: Callable[..., Any], lends: bool, /, *args: Any, **kwargs: Any) -> Any:
        """Run a call while its units are on the device and bound, and with ``lends`` all leaves in the modules."""
        window, was_in_call = self._window, self._window.is_in_call
        units = self.units if self.module.training or not self.asked else [*self.units, *self.asked]
        opened = [unit for unit in units if not unit.depth]
        bound: list[tuple[Unit, list[int]]] = []
        lent: list[Unit] = []
        with self._policy.saving():
            held = window.begin_call(units)
            try:
                if lends:
                    lent = window.lend()
                for unit in opened:
                    unit.depth = 1
                    unit.calls += graph_task() == -1
                    bound.append((unit, unit.bind()))
                return call(*args, **kwargs)
            finally:
                try:
                    for unit in opened:
                        unit.depth = 0
                        unit.unbind()
                    if lends:
                        window.take_back(lent)
                    for unit, versions in bound:
                        if written := unit.written_since(versions):
                            self._keep_writes(unit, written)
                finally:
                    window.end_call(held, was_in_call)
                    if (listener := self._policy.device.counters.listener) is not None and graph_task() == -1:
                        listener.idle()
                    if opened and torch.is_autocast_enabled(self._policy.device.torch_device.type):
                        torch.clear_autocast_cache()  # casts of leaves would keep memory

    def _keep_writes(self, unit: Unit, written: list[Weight]) -> None:
        """Copy weights that a forward wrote to the host; raise if the forward is to run twice."""
        if self._policy.is_repeated:
            raise ExactnessError(
                f"{unit.name} writes to its weights in its forward, which a second forward would repeat: use"
                " activations='keep' or 'offload'"
            )
        for weight in written:
            unit.keep_write(weight)


class Visits:
    """The visits of a module and of the modules inside it."""

    def __init__(self, module: nn.Module, entries: Mapping[nn.Module, Unit], make: Callable[..., Visit]) -> None:
        self._module, self.entries, self._make = module, entries, make
        self._visits: dict[nn.Module, Visit] = {}

    def attach(self, units: Sequence[Unit]) -> None:
        """Put a visit before each module that owns weights of these units, or contains modules that do."""
        owner = {id(weight.host): unit for unit in units for weight in unit.weights}
        owner |= {id(whole.host): unit for unit in units for whole in unit.wholes}
        held = [unit for unit in units if unit.is_held]
        in_entries = {module for root in self.entries for module in root.modules()}

        def owners(params: Iterable[nn.Parameter | None]) -> list[Unit]:
            """List the units of parameters."""
            return list(dict.fromkeys(owner[id(param)] for param in params if id(param) in owner))

        for name, module in self._module.named_modules():
            own = owners(module.parameters() if isinstance(module, FUSED) else module._parameters.values())
            asked = owners(module.layers[:1].parameters()) if isinstance(module, nn.TransformerEncoder) else []
            entry = [self.entries[module]] if module in self.entries else []
            used = list(dict.fromkeys([*entry, *own, *(held if module not in in_entries else ())]))
            if module not in self._visits and (used or asked or module is self._module):
                self._visits[module] = self._make(module, name or type(module).__name__, bool(entry))
            if (visit := self._visits.get(module)) is not None:
                visit.units, visit.asked = used, asked
                visit.contains_others = not {*owners(module.parameters())} <= {*used}

    def retake_slots(self) -> None:
        """Put visits back before modules in whose call slots the user has put something else."""
        for visit in self._visits.values():
            if call_slot(visit.module) is not visit:
                visit.take_slot()

    def close(self) -> None:
        """Give the modules' call slots back to the calls that the user had there."""
        for visit in self._visits.values():
            if call_slot(visit.module) is visit:
                set_call_slot(visit.module, visit.compiled)
