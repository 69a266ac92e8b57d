"""An optimizer's state while parameters are stepped beside other work, and who else refers to it.

1. It is *withheld* while it could be seen half stepped: ``optimizer.state`` is no attribute, and asking for it calls
   whoever knows what to do: it waits and gives it back (deferred_step.py), or raises an error (backward_pass.py).
2. What somebody refers to already he may look at unnoticed. References are counted, to the state as a whole, to that of
   a parameter, to its tensors and to their bytes: what is *kept* is not stepped beside anything.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

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
    """Whether somebody else refers to its state (Rule 2)."""
    return _references(vars(optimizer), "state") != _references({"state": {}}, "state")


def parameter_state_is_shared(state: Any, param: Tensor) -> bool:
    """Whether somebody else refers to what this state has of a parameter, which is in it."""
    return _references(state, param) != _references({"state": {}}, "state") or not all(
        _uses(state[param], key) == _alone() for key in state[param] if isinstance(state[param][key], Tensor)
    )


def _references(holder: Mapping[Any, Any], key: Any) -> tuple[int, int]:
    """Strong and weak ones to what is held there."""
    return sys.getrefcount(holder[key]), weakref.getweakrefcount(holder[key])


def _uses(holder: Mapping[Any, Any], key: Any) -> tuple[int, ...]:
    """References to a tensor that is held there, from Python and C++, and to its bytes."""
    dense = torch._C._has_storage(holder[key])
    storage = int(torch._C._storage_Use_Count(holder[key].untyped_storage()._cdata)) if dense else 0
    return *_references(holder, key), holder[key]._use_count(), storage


@functools.cache
def _alone() -> tuple[int, ...]:
    """What `_uses` tells of a tensor that is held nowhere else."""
    return _uses({"tensor": torch.zeros(1, device="cpu")}, "tensor")
