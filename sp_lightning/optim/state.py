"""Optimizer state whose readers wait for the steps of streamed weights."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import Any

from torch import optim

from ..stream.leaf import stepped_already, weights

# Methods of a dict that make an entry, given its key; that look for one; and that take all of them.
MAKERS = "__getitem__ __setitem__ setdefault".split()
FINDERS = "__contains__ __delitem__ get pop".split()
WHOLE = "__iter__ __reversed__ __len__ __repr__ __eq__ __ne__ __or__ __ror__ __ior__".split()
WHOLE += "keys values items clear popitem update".split()


class WaitingState(collections.defaultdict[Any, Any]):
    """The `state` of an optimizer with streamed weights: what reads or writes an entry waits for the weight's step."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        super().__init__(dict, optimizer.state)
        self._reserved: set[Any] = set()  # keys whose empty entries only keep the order
        self._guessed: list[Any] = []  # reserved keys whose gradients are yet to come

    def copy(self) -> Any:
        """Return the state as a plain defaultdict, after waiting for all steps."""
        return collections.defaultdict(dict, self.items())

    def __copy__(self) -> Any:
        return self.copy()

    def __reduce__(self) -> Any:
        """Copy and pickle as the plain dict that an optimizer has without streaming."""
        return collections.defaultdict, (dict, dict(self.items()))

    def wait_step_of(self, key: Any) -> None:
        """Wait for the pending step of a parameter, whose entry then stays even if the step left it empty."""
        _wait_step(key)
        self._reserved.discard(key)

    def wait_entry(self, key: Any) -> None:
        """Wait for the pending step of a parameter; remove its reserved entry if the step left it empty."""
        _wait_step(key)
        self._forget_empty([key])

    def wait_steps(self, *_: Any) -> None:
        """Wait for the pending steps of all parameters; remove the reserved entries that are still empty."""
        for key in list(dict.keys(self)):
            _wait_step(key)
        self._forget_empty(list(self._reserved))

    # ---- without waiting

    def reserve(self, keys: list[Any]) -> None:
        """Add an empty entry for each parameter, so that the entries have a plain run's order whenever steps fill them.

        Remove the empty entries that `guess` added for other parameters. Later reads remove what steps left empty.
        """
        known = set(keys)
        for key in self._guessed:
            if key not in known and key in self._reserved and not self.peek(key):
                self._reserved.discard(key)
                dict.pop(self, key, None)
        self._guessed = []
        self._reserve(keys)

    def guess(self, keys: list[Any]) -> None:
        """Add empty entries, before backward, for parameters that may get gradients; `reserve` removes the rest."""
        self._guessed += self._reserve(keys)

    def _reserve(self, keys: list[Any]) -> list[Any]:
        """Add empty entries for keys that have none, and return these keys."""
        new = [key for key in keys if not dict.__contains__(self, key)]
        for key in new:
            dict.__setitem__(self, key, {})
        self._reserved.update(new)
        return new

    def _forget_empty(self, keys: list[Any]) -> None:
        """Remove the reserved entries of these keys if they are still empty."""
        for key in self._reserved.intersection(keys):
            self._reserved.discard(key)
            if not dict.get(self, key):
                dict.pop(self, key, None)

    peek = dict.get  # an entry, or None

    def make(self, key: Any) -> dict[str, Any]:
        """Return the entry of a key, or add an empty one, without waiting."""
        found: dict[str, Any] = dict.setdefault(self, key, {})
        return found


def _wait_step(key: Any) -> None:
    """Wait until the pending optimizer step of a parameter is done; do nothing for a parameter that does not stream.

    Raises in a backward that has already stepped the weight: a plain run would still have the old state there.
    """
    if (weight := weights.get(id(key))) is None:
        return
    if weight.unit.is_final and weight.is_stepped_early:
        raise stepped_already(weight.name)
    weight.unit.wait_step()


def _waiting(name: str, wait: Callable[..., None]) -> Callable[..., Any]:
    """Wrap a method of dict, so that it calls ``wait`` with the key first."""
    method = getattr(collections.defaultdict, name)

    @functools.wraps(method)
    def waits(self: WaitingState, *args: Any, **kwargs: Any) -> Any:
        """Wait for the steps that the method depends on, and then call it."""
        wait(self, *args[:1])
        return method(self, *args, **kwargs)

    return waits


WAITS = {WaitingState.wait_step_of: MAKERS, WaitingState.wait_entry: FINDERS, WaitingState.wait_steps: WHOLE}
for wait, names in WAITS.items():
    for name in names:
        setattr(WaitingState, name, _waiting(name, wait))
