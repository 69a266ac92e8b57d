"""The access ledger: which work still reads or writes bytes of a module that user code may ask for.

1. Work beside user code is entered before it can begin, and left only once its end was waited for. So an interrupted
   wait leaves it entered, and the next one takes the wait up again.
2. Where nothing is entered, which is nearly always so, asking is a look at an empty set: nothing is called.
3. Fills read host bytes. A host copy waits for its own before its epoch moves (host_copy.py, Rule 3). User code, and an
   optimizer's, may write any: where such code is about to go on, all fills are waited for (phases.py, Rule 6). Nothing
   else has to remember them.
"""

from __future__ import annotations

from typing import Any, Protocol


class StepBeside(Protocol):
    """An optimizer's step that goes on beside other work, a backward or what follows it."""

    def is_stepping(self, unit: Any, /) -> bool:
        """Whether the step of this unit may be running, or is still to come."""

    def wait(self, unit: Any, /) -> None:
        """Wait until it has stepped this unit, if it is deferred."""

    def finish(self) -> None:
        """Wait until it is done."""

    def quiesce(self) -> None:
        """Wait until nothing of it runs, without looking at how that ended."""


class Fill(Protocol):
    """A device copy on its way up."""

    def settle(self) -> None:
        """Wait until the fill reads no host bytes any more."""


class Access:
    """The ledger of one module."""

    def __init__(self) -> None:
        self.gradients: set[object] = set()  # that make, change or read gradients: a backward, a step, a clipping
        self.deferred: object = None  # of these, a step that changes none, and refers itself to those that it reads
        self.step_has_begun = False  # in a backward, while the optimizer's own code has yet to step the rest
        self.steps: dict[object, StepBeside] = {}  # that write the host bytes of a unit, by its store
        self.fills: dict[object, Fill] = {}  # that may still read them, likewise

    @property
    def changes_gradients(self) -> bool:
        """Whether anything that is entered may give a parameter another ``.grad``, or read it from there."""
        return any(work is not self.deferred for work in self.gradients)
