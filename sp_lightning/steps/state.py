"""Optimizer state whose readers wait for the steps of streamed weights."""

from __future__ import annotations

import collections
from typing import Any

from torch import optim

from ..stream.parameters import unit_of, weights


class WaitingState(collections.defaultdict[Any, Any]):
    """The `state` of an optimizer with streamed weights."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        super().__init__(dict, optimizer.state)
        self._reserved: list[Any] = []

    def __getitem__(self, key: Any) -> Any:
        wait_step_of(key)
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        wait_step_of(key)
        return super().get(key, default)

    def __setitem__(self, key: Any, value: Any) -> None:
        wait_step_of(key)
        super().__setitem__(key, value)

    def clear(self) -> None:
        self.wait_steps()
        super().clear()

    def pop(self, key: Any, *default: Any) -> Any:
        wait_step_of(key)
        return super().pop(key, *default)

    def __delitem__(self, key: Any) -> None:
        wait_step_of(key)
        super().__delitem__(key)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        wait_step_of(key)
        return super().setdefault(key, default)

    def popitem(self) -> Any:
        self.wait_steps()
        return super().popitem()

    def copy(self) -> Any:
        return collections.defaultdict(dict, self.items())

    def __copy__(self) -> Any:
        return self.copy()

    def __reduce__(self) -> Any:
        """Copy and pickle as a plain run's state."""
        return collections.defaultdict, (dict, dict(self.items()))

    def keys(self) -> Any:
        self.wait_steps()
        return super().keys()

    def values(self) -> Any:
        self.wait_steps()
        return super().values()

    def items(self) -> Any:
        self.wait_steps()
        return super().items()

    def wait_steps(self) -> None:
        """Wait for all steps, also of weights without state."""
        for weight in list(weights.values()):
            weight.unit.wait_step()
        for key in self._reserved:
            if not super().get(key):
                super().pop(key, None)
        self._reserved.clear()

    def reserve(self, key: Any) -> None:
        """Give a key its place, in the order of a plain run, until a step has made the entry or made none."""
        if key not in self:
            super().__setitem__(key, {})
            self._reserved.append(key)

    def peek(self, key: Any) -> dict[str, Any]:
        """Return an entry without waiting; an empty one if there is none."""
        return super().get(key) or {}

    def make(self, key: Any) -> dict[str, Any]:
        """Return an entry without waiting; make it if there is none."""
        found: dict[str, Any] = super().setdefault(key, {})
        return found


def wait_step_of(key: Any) -> None:
    """Wait for the step of a streamed parameter."""
    if (unit := unit_of(key)) is not None:
        unit.wait_step()
