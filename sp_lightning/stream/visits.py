"""Visits: what runs in place of the call of a module that owns streamed weights.

A visit sits in the slot that `module.compile()` uses: forward hooks of the user's and checkpoints inside of a class's
`__call__` run within, and copies and pickles of the module are plain.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..compat.dynamo import compiling_as_here, never_compiled, not_compiled_itself
from ..compat.streaming import call_slot, graph_task, plain_call, set_call_slot
from ..errors import ExactnessError
from .activations import Activations
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
        policy: Activations,
        before: Callable[[bool], None],
    ) -> None:
        self.module, self.units, self.is_entry = module, list(units), is_entry
        self._window, self._policy, self._before = window, policy, before
        self._name = name
        self._recompute = Recompute(module, name, policy.device.torch_device)
        self.chain()

    def chain(self) -> None:
        """Take the slot, and call what the user put there: `module.compile()`."""
        self.compiled: Callable[..., Any] | None = call_slot(self.module)
        self._call = self.compiled or plain_call(self.module)
        set_call_slot(self.module, self)

    def chain_again(self) -> None:
        """Take the slot back if the user compiled the module meanwhile."""
        if call_slot(self.module) is not self:
            self.chain()

    def close(self) -> None:
        """Leave the slot as the user had it."""
        if call_slot(self.module) is self:
            set_call_slot(self.module, self.compiled)

    @not_compiled_itself
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._window.check_thread(self._name)
        if not self._window.is_in_call:
            self._before(self.is_entry)
        return self._visited(compiling_as_here(self._call), args, kwargs)

    @never_compiled
    def _visited(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        recorded = functools.partial(self._recorded, call)
        if torch.is_grad_enabled() and self.is_entry and not self.units[0].depth:  # the unit that is entered here
            return self._policy.run(self._recompute, recorded, args, kwargs)
        return recorded(*args, **kwargs)

    def _recorded(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        opened = [unit for unit in self.units if not unit.depth]
        with self._policy.saving():
            return self._inside(opened, call, args, kwargs) if opened else call(*args, **kwargs)

    def _inside(self, opened: list[Unit], call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        written: list[list[Any]] = []
        with self._window.using(opened), self._window.in_call():
            try:
                for unit in opened:
                    unit.depth = 1
                    unit.calls += graph_task() == -1
                    unit.bind()
                    written.append(unit.written())
                return call(*args, **kwargs)
            finally:
                for unit in opened:
                    unit.depth = 0
                    unit.unbind()
                for unit, before in zip(opened, written, strict=False):
                    self._keep_writes(unit, before)
                if torch.is_autocast_enabled(self._policy.device.torch_device.type):
                    torch.clear_autocast_cache()  # of casts of leaves, which would keep memory

    def _keep_writes(self, unit: Unit, before: list[Any]) -> None:
        if unit.written() == before:
            return
        if self._policy.recomputes and torch.is_grad_enabled() and self.is_entry:
            raise ExactnessError(
                f"{unit.name} writes to its weights in its forward, which a second forward would repeat: use"
                " activations='keep' or 'offload'"
            )
        unit.keep_writes(before)
