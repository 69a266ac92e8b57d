"""The running backward: which units' gradients are complete, and which units may be stepped before it ends.

1. A unit may be stepped in backward (pending_step.py) once a whole backward was seen that did not come back to it
   after its gradients were complete. A backward comes back to a unit if the graph also uses a weight detached, or if a
   hook reads a weight or changes its gradient. What was learned is forgotten when other weights become trainable. A
   backward that comes back to a unit already stepped is an error. Some units are never stepped in backward: those with
   frozen weights, since the layers below decide whether these are needed after the unit's gradients; those of which a
   weight was borrowed in FP32 in this backward (fp32_copies.py), since the other weights' gradients may come later; and
   those with a weight whose memory another tensor shares, since that may be another weight, and weights that share
   memory are stepped in the order of their groups.
2. A nested backward (a reentrant checkpoint) may bring a part of the gradients. They are complete only when the
   outermost backward brings them.
3. A backward that user code runs inside a training step (for the gradient of an input, say) is not the one that the
   optimizer steps after: its gradients may be dropped, or others added. No unit is stepped in it.
4. Gradients of a unit become complete together, those of a plain run one by one. A hook that reads one of them while
   backward is inside the unit gets an error.
5. A hook that reads the optimizer's state in backward would see the new state of units that are already stepped. So
   the first backward before an optimizer's step finds out whether any code reads the state, and steps nothing. If some
   code does, nothing is ever stepped in backward. Code that begins to read it once units are stepped is an error.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Protocol

from ..compat.tensors import at_end_of_backward, current_node, graph_task
from ..errors import ExactnessError
from ..memory.access import Access
from ..memory.unit_store import UnitStore
from .stand_ins import StreamedUnit

_requires_grad = operator.attrgetter("requires_grad")


def in_backward() -> bool:
    """Whether the calling thread is inside autograd's engine."""
    return graph_task() != -1


def at_leaf() -> bool:
    """Whether autograd runs the hooks of a leaf of the graph, that is of a parameter, on the calling thread."""
    return type(current_node()).__name__ == "AccumulateGrad"


class StepBesideBackward(Protocol):
    """An optimizer step that steps units while backward runs (pending_step.py)."""

    given_up: str

    @property
    def has_begun(self) -> bool:
        """Whether any unit was submitted."""

    def withhold(self, finish: Callable[[], None]) -> bool:
        """Guard the optimizer's state: a read calls ``finish`` first. False if other code refers to it already."""

    def give_back(self) -> None:
        """Make the optimizer's state readable again."""


class BackwardPass:
    """A backward, from the first unit that it needs to its end, or to a reset if it failed."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._in_scope = False  # whether it began inside a scope
        self._task = -1  # autograd's number of the outermost backward
        self._inside: set[StreamedUnit] = set()  # needed by now, with gradients that are not complete
        self._complete: set[StreamedUnit] = set()  # with complete gradients
        self._stepping: dict[UnitStore, None] = {}  # complete, and may be stepped by now, in this order
        self._never_revisited: set[StreamedUnit] = set()  # a whole backward did not come back to them (Rule 1)
        self._reads_state: bool | None = None  # whether code in backward reads the optimizer's; None: not known yet

    def begin(self, at_end: Callable[[], None], in_scope: bool) -> None:
        """Begin a backward, which needs its first unit, inside a scope or not (Rule 3)."""
        self._access.gradients.add(self)
        self._in_scope = in_scope
        self._task = graph_task()
        self._inside.clear()
        self._complete.clear()
        self._stepping.clear()
        at_end_of_backward(at_end)

    def end(self) -> None:
        """End a backward that raised no error, and record which units it did not come back to (Rule 1)."""
        self.interrupt()
        self._never_revisited |= self._complete

    def interrupt(self) -> None:
        """End a backward that may have raised an error. Safe twice."""
        self._access.gradients.discard(self)

    def completed(self, unit: StreamedUnit) -> bool:
        """Record that the unit's gradients are done; return whether the unit may be stepped (Rules 1 to 3)."""
        self._inside.discard(unit)
        if graph_task() != self._task:
            return False
        self._complete.add(unit)
        whole = not unit.stand_ins.full_precision.gradients_split and all(map(_requires_grad, unit.store.params))
        may_step = whole and not unit.store.is_shared() and unit in self._never_revisited
        if may_step:
            self._stepping[unit.store] = None
        return may_step and not self._in_scope

    def is_stepping(self, store: UnitStore) -> bool:
        """Whether the unit may be stepped by now, if units are stepped in this backward."""
        return store in self._stepping

    def needs_unit(self, unit: StreamedUnit, stepping_ahead: bool) -> None:
        """Record that backward needs the unit; raise if it comes back to a unit that was stepped (Rule 1)."""
        if unit not in self._complete:
            self._inside.add(unit)
            return
        self._complete.discard(unit)
        self._never_revisited.discard(unit)
        if self.is_stepping(unit.store) and stepping_ahead and not self._in_scope:
            raise ExactnessError(
                f"backward came back to {unit.name} after its gradients were complete and the optimizer had stepped "
                "it. In earlier steps neither backward did so, nor a hook that reads weights or changes gradients; "
                "set optimizer_overlap=False"
            )

    def forget(self) -> None:
        """Forget what was learned: from now on backward may need other units (Rule 1)."""
        self._never_revisited.clear()

    def check_gradient(self, unit: StreamedUnit, name: str) -> None:
        """Raise if a hook reads this weight's gradient while backward is inside its unit (Rule 4)."""
        if unit in self._inside and current_node() is not None:
            raise ExactnessError(
                f"the gradient of {name} was read while backward is inside {unit.name}, whose gradients arrive "
                "together: read it in a hook on the weight itself, or after backward"
            )

    def may_step(self, ahead: StepBesideBackward, on_read: Callable[[], None]) -> bool:
        """Guard the state of the optimizer that steps after this backward; return whether units may be stepped in it.

        A read of the state calls ``on_read`` (Rule 5).
        """
        if self._reads_state or not ahead.withhold(on_read):
            return False
        known, self._reads_state = self._reads_state is not None, False
        return known

    def sees_state(self, ahead: StepBesideBackward) -> None:
        """Record that code in backward reads the optimizer's state; raise if a unit was stepped (Rule 5)."""
        self._reads_state = True
        if ahead.has_begun:
            raise ExactnessError(
                "code in backward read the optimizer's state after the optimizer had stepped "
                f"{next(iter(self._stepping)).unit.name}, which it did not do in earlier steps; set "
                "optimizer_overlap=False"
            )
        ahead.given_up = "code in backward reads its state"
        ahead.give_back()
