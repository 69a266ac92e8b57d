"""The step that is held (deferred_step.py), if one is, for those who may have to wait for it.

1. There is at most one: the next one begins when it is done.
2. Who has to wait is counted as stalled for as long.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from typing import Any

from ..autograd import weight_reads
from ..core.telemetry import Counters
from ..memory.parameters import quietly
from ..memory.unit_store import UnitStore
from .deferred_step import DeferredStep


class CurrentStep:
    """From the beginning of a step to its end, and then the next."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._step: DeferredStep | None = None

    def begin(self, step: DeferredStep) -> dict[Any, Any]:
        """This one is under way from here on; gives the state for what is stepped at once."""
        self._counters.held_steps += 1
        self._step = step
        weight_reads.hold(self.finish)
        state: dict[Any, Any] = step.begin(self._counters.listener, self._ended)
        return state

    @property
    def is_under_way(self) -> bool:
        """Whether there is one."""
        return self._step is not None

    @property
    def params(self) -> Collection[int]:
        """The ids of its parameters."""
        return self._step.params if self._step is not None else ()

    @property
    def vacant(self) -> Collection[UnitStore]:
        """Whose parameters have no data now."""
        return self._step.vacant if self._step is not None else ()

    def is_stepping(self, store: UnitStore) -> bool:
        """Whether it is still to come to this unit."""
        return self._step is not None and self._step.is_stepping(store)

    def wait(self, store: UnitStore) -> None:
        """It is done with this unit."""
        step = self._step
        if step is not None:
            stalled = self._counters.stall("optimizer") if step.is_stepping(store) else contextlib.nullcontext()
            with stalled, quietly():
                step.wait(store)

    def finish(self) -> None:
        """There is none any more."""
        step = self._step
        if step is not None:
            stalled = self._counters.stall("optimizer") if step.is_running else contextlib.nullcontext()
            with stalled, quietly():
                step.finish()

    def _ended(self) -> None:
        self._step = None
        weight_reads.release(self.finish)
