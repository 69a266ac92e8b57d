"""An optimizer's state while parameters are stepped beside other work, and whether other code refers to it.

1. The state is *guarded* while it could be seen half stepped: the attribute ``optimizer.state`` is taken out, and
   reading it calls the guard's ``finish``, which waits and gives the state back (pending_step.py), or decides in
   backward, where the read may be an error (step_owner.py, Rule 4).
2. Code that already refers to the state can read it unnoticed. So references are counted (references.py): to the state
   as a whole, to a parameter's state, to its tensors and to their bytes. State that is *shared* is not stepped beside
   other work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from ..compat.patches import OPTIMIZER_GETATTR

_all: dict[int, GuardedState] = {}  # by id of the optimizer


class GuardedState:
    """The guarded state of an optimizer: a read of it calls ``finish`` first (Rule 1)."""

    def __init__(self, optimizer: Optimizer, finish: Callable[[], None]) -> None:
        self.state: Any = None
        self.finish = finish
        self._optimizer = optimizer

    def guard(self) -> None:
        """Take the state out, once ``finish`` leads to this: an interrupt may come right after it."""
        optimizer = self._optimizer
        self.state = optimizer.state
        if id(optimizer) not in _all:
            OPTIMIZER_GETATTR.install(_missing)
        _all[id(optimizer)] = self
        vars(optimizer).pop("state", None)

    def give_back(self) -> None:
        """Make the state an attribute again, unless other code has set one in the meantime. Safe twice."""
        if _all.get(id(self._optimizer)) is self:
            vars(self._optimizer).setdefault("state", self.state)
            del _all[id(self._optimizer)]
            OPTIMIZER_GETATTR.remove()
            self.state = None  # this reference would be counted (Rule 2)


def known_state(optimizer: Optimizer) -> Any:
    """Return an optimizer's state, also a guarded one, without a wait: what steps it may be writing to its tensors."""
    guarded = _all.get(id(optimizer))
    state = {} if guarded is None else guarded.state  # read first: another thread may give it back in the meantime
    return vars(optimizer).get("state", state)


def _missing(optimizer: Optimizer, name: str) -> Any:
    guarded = _all.get(id(optimizer))
    if name != "state" or guarded is None:
        raise AttributeError(f"'{type(optimizer).__name__}' object has no attribute '{name}'")
    state = guarded.state  # read first: another thread may give it back in the meantime
    guarded.finish()
    return vars(optimizer).get("state", state)
