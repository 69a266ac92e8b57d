"""An optimizer's state while parameters are stepped beside other work, and who else refers to it.

1. It is *withheld* while it could be seen half stepped: ``optimizer.state`` is no attribute, and asking for it calls
   whoever knows what to do: it waits and gives it back (deferred_step.py), or raises an error (backward_pass.py).
2. What somebody refers to already he may look at unnoticed. References are counted, to the state as a whole, to that of
   a parameter, to its tensors and to their bytes: what is *kept* is not stepped beside anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..compat.references import are_tensors_of_entry_shared, is_entry_shared

_all: dict[int, GuardedState] = {}  # by id of the optimizer


class GuardedState:
    """The state of an optimizer, for which ``finish`` is called whenever somebody asks (Rule 1)."""

    def __init__(self, optimizer: Optimizer, finish: Callable[[], None]) -> None:
        self.state: Any = optimizer.state
        self.finish = finish
        self._optimizer = optimizer
        if not _all:
            Optimizer.__getattr__ = _missing  # type: ignore[attr-defined]
        _all[id(optimizer)] = self
        vars(optimizer).pop("state", None)

    def give_back(self) -> None:
        """Safe twice. What somebody set in the meantime stays."""
        if _all.get(id(self._optimizer)) is self:
            vars(self._optimizer).setdefault("state", self.state)
            del _all[id(self._optimizer)]
            if not _all:
                del Optimizer.__getattr__  # type: ignore[attr-defined]
            self.state = None  # references to it are counted


def _missing(optimizer: Optimizer, name: str) -> Any:
    withheld = _all.get(id(optimizer))
    if name != "state" or withheld is None:
        raise AttributeError(f"'{type(optimizer).__name__}' object has no attribute '{name}'")
    state = withheld.state  # which another thread may give back meanwhile
    withheld.finish()
    return vars(optimizer).get("state", state)


def state_is_shared(optimizer: Optimizer) -> bool:
    """Whether something else refers to an optimizer's state as a whole (Rule 2)."""
    return is_entry_shared(vars(optimizer), "state")


def parameter_state_is_shared(state: Any, param: Tensor) -> bool:
    """Whether something else refers to the state of one parameter, which is there (Rule 2)."""
    return are_tensors_of_entry_shared(state, param)
