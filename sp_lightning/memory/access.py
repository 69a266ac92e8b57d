"""The access ledger: which work still reads or writes bytes of a module that user code may ask for.

1. Work beside user code is entered before it can begin, and left only once its end was waited for. So an interrupted
   wait leaves it entered, and the next one takes the wait up again.
2. Where nothing is entered, which is nearly always so, asking is a look at an empty set: nothing is called.
"""

from __future__ import annotations

from typing import Any, Protocol


class DeferredStep(Protocol):
    """An optimizer's step that goes on beside other work."""

    def is_stepping(self, unit: Any, /) -> bool:
        """Whether the step of this unit may be running, or is still to come."""

    def wait(self, unit: Any, /) -> None:
        """Wait until it has stepped this unit, if it is deferred."""

    def finish(self) -> None:
        """Wait until it is done."""

    def quiesce(self) -> None:
        """Wait until nothing of it runs, without looking at how that ended."""


class Access:
    """The ledger of one module."""

    def __init__(self) -> None:
        self.gradients: set[object] = set()  # that make, change or read gradients: a backward, a step, a clipping
        self.deferred: object = None  # of these, a step that changes none, and refers itself to those that it reads
        self.steps: dict[object, DeferredStep] = {}  # that write the host bytes of a unit, by its store

    @property
    def changes_gradients(self) -> bool:
        """Whether anything that is entered may give a parameter another ``.grad``, or read it from there."""
        return any(work is not self.deferred for work in self.gradients)
