"""The backward that runs: whose gradients are complete, and which units may be stepped while it goes on.

1. A unit may be stepped ahead (step_in_backward.py) once a backward was seen that did not come back to it after its
   gradients: one that uses a weight detached, too, does, and so does a hook that looks at one, or changes its gradient.
   It has to be seen again when other weights train. If a backward comes back all the same, that is an error. A unit
   with frozen weights of its own never is: whether they are needed after its gradients depends on what lies below. Nor
   is one of which a weight was lent in this backward (fp32_copies.py): the others' gradients may come later. Nor one
   with a weight whose memory another tensor shares: that may be another weight, and they are stepped in the order of
   their groups.
2. What a backward inside another one brings (a reentrant checkpoint) may be a part of the gradients: only what comes
   out of the outermost one is complete.
3. One inside a training step, of the user's own (for the gradient of an input, say), is not the one that the optimizer
   steps after: its gradients may be dropped, or others added. So nothing is stepped ahead in it.
4. Gradients of a unit become complete together, those of a plain run one by one. A hook that asks for one of them while
   backward is inside the unit gets an error.
5. A hook in it that looks at the optimizer's state would see that of units that are stepped. So the first one that the
   optimizer steps after shows whether somebody looks, and steps nothing. If he does, none ever steps anything; if he
   begins to do so when units are stepped, that is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from ..errors import ExactnessError
from ..memory.unit_store import UnitStore
from .streamed_unit import StreamedUnit


def in_backward() -> bool:
    """Whether the calling thread is inside autograd's engine."""
    return bool(torch._C._current_graph_task_id() != -1)


def at_leaf() -> bool:
    """Whether it runs hooks of a leaf of the graph: of a parameter."""
    return type(torch._C._current_autograd_node()).__name__ == "AccumulateGrad"


class StepBesideBackward(Protocol):
    """An optimizer's step of which units are stepped while backward runs (step_in_backward.py)."""

    given_up: str

    @property
    def has_begun(self) -> bool:
        """Whether any unit was submitted."""

    def withhold(self, finish: Callable[[], None]) -> bool:
        """Withhold the optimizer's state, for which ``finish`` is called when somebody asks; False if it is kept."""

    def give_back(self) -> None:
        """Let the state be asked for again."""


class BackwardPass:
    """From the first unit that a backward needs to its end; still running after one that failed."""

    def __init__(self) -> None:
        self.running = False
        self._task = -1  # autograd's number of the outermost one
        self._inside: set[StreamedUnit] = set()  # that it needed, and whose gradients are not complete
        self._complete: set[StreamedUnit] = set()  # whose gradients came out of it
        self._stepping: dict[UnitStore, None] = {}  # of those of them that may be stepped by now, in this order
        self._never_revisited: set[StreamedUnit] = set()  # to which a backward did not come back after that
        self._sees_state: bool | None = None  # of the optimizer; None: not known yet

    def begin(self, at_end: Callable[[], None]) -> bool:
        """It needs a unit; tells whether that is its first."""
        if self.running:
            return False
        self.running = True
        self._task = torch._C._current_graph_task_id()
        self._inside.clear()
        self._complete.clear()
        self._stepping.clear()
        torch.autograd.Variable._execution_engine.queue_callback(at_end)
        return True

    def end(self) -> None:
        """It went through."""
        self.running = False
        self._never_revisited |= self._complete

    def completed(self, unit: StreamedUnit) -> bool:
        """All uses of the unit's weights in it are done; tells whether the unit may be stepped (Rules 1 and 2)."""
        self._inside.discard(unit)
        if torch._C._current_graph_task_id() != self._task:
            return False
        self._complete.add(unit)
        whole = not unit.stand_ins.full_precision.gradients_split and all(
            param.requires_grad for param in unit.store.params
        )
        whole = whole and not unit.store.is_shared()
        may_step = whole and unit in self._never_revisited
        if may_step:
            self._stepping[unit.store] = None
        return may_step

    def is_stepping(self, store: UnitStore) -> bool:
        """Whether this unit may be stepped by now, if units are stepped in it."""
        return store in self._stepping

    def needs_unit(self, unit: StreamedUnit, stepping_ahead: bool) -> None:
        """It needs this unit (Rule 1)."""
        if unit not in self._complete:
            self._inside.add(unit)
            return
        self._complete.discard(unit)
        self._never_revisited.discard(unit)
        if self.is_stepping(unit.store) and stepping_ahead:
            raise ExactnessError(
                f"backward came back to {unit.name} when its gradients were complete and the optimizer had stepped it, "
                "which neither it nor a hook that looks at weights or changes gradients did in the steps before; set "
                "optimizer_overlap=False"
            )

    def forget(self) -> None:
        """What a backward needs may be something else from now on (Rule 1)."""
        self._never_revisited.clear()

    def check_gradient(self, unit: StreamedUnit, name: str) -> None:
        """A hook asks for the gradient of this weight (Rule 4)."""
        if unit in self._inside and torch._C._current_autograd_node() is not None:
            raise ExactnessError(
                f"the gradient of {name} was asked for while backward is inside {unit.name}, whose gradients arrive "
                "together: look at it in a hook on the weight itself, or after backward"
            )

    def may_step(self, ahead: StepBesideBackward, asked_for: Callable[[], None]) -> bool:
        """An optimizer steps after it, whose state calls this when somebody asks for it; tells whether units may be
        stepped before its end (Rule 5)."""
        if self._sees_state or not ahead.withhold(asked_for):
            return False
        known, self._sees_state = self._sees_state is not None, False
        return known

    def sees_state(self, ahead: StepBesideBackward) -> None:
        """Somebody in it asks for that (Rule 5)."""
        self._sees_state = True
        if ahead.has_begun:
            raise ExactnessError(
                f"backward looked at the optimizer's state when it had stepped {next(iter(self._stepping)).unit.name}, "
                "which it did not in the steps before; set optimizer_overlap=False"
            )
        ahead.given_up = "backward looks at its state"
        ahead.give_back()
