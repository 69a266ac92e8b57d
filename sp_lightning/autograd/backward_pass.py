"""The running backward: which units' gradients are complete, and which units may be stepped before it ends.

1. A unit may be stepped in backward (step_owner.py) once a whole backward was seen that did not come back to it
   after its gradients were complete. A backward comes back to a unit if the graph also uses a weight detached, or if a
   hook reads a weight or its gradient. What was learned is forgotten when other weights become trainable. Some
   units are never stepped in backward: those with
   frozen weights, since the layers below decide whether these are needed after the unit's gradients; those of which a
   weight was borrowed in FP32 in this backward (fp32_copies.py), since the other weights' gradients may come later; and
   those with a weight whose memory another tensor shares, since that may be another weight, and weights that share
   memory are stepped in the order of their groups.
2. A nested backward (a reentrant checkpoint) may bring a part of the gradients. They are complete only when the
   outermost backward brings them.
3. Gradients of a unit become complete together, those of a plain run one by one. A hook that reads one of them while
   backward is inside the unit gets an error. So does one on the device's thread that reads the gradient of a weight
   with hooks: the host's thread calls these, and accumulates, at any time. One on a weight, on the host's thread, gets
   an error for a gradient that the device's thread brought after that of this weight (Engine.check_gradient). With
   several ranks any hook gets one for a gradient that will be the mean of all, and is none before.
4. A backward that failed never comes to its end, and no forward need follow before the next one begins. So that one
   asks whether autograd still has what it is to call at the end: it lets go of that with the task.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable

from torch import Tensor

from ..compat.tensors import at_end_of_backward, current_node, graph_task
from ..errors import ExactnessError
from ..memory.access import Access
from .stand_ins import StreamedUnit

_requires_grad = operator.attrgetter("requires_grad")


def in_backward() -> bool:
    """Whether the calling thread is inside autograd's engine."""
    return graph_task() != -1


def at_leaf() -> bool:
    """Whether autograd runs the hooks of a leaf of the graph, that is of a parameter, on the calling thread."""
    return leaf() is not None


def leaf() -> Tensor | None:
    """Return the leaf of the graph, that is the parameter, whose hooks autograd runs on the calling thread."""
    node = current_node()
    return node.variable if type(node).__name__ == "AccumulateGrad" else None


class BackwardPass:
    """A backward, from the first unit that it needs to its end, or to a reset if it failed."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._task = -1  # autograd's number of the outermost backward
        self.at_end: Callable[[], object] = lambda: None  # what autograd is to call then (Rule 4)
        self.brought_by = -1  # that of the backward, nested or not, which brought the last gradients
        self.last: StreamedUnit | None = None  # needed last; None once its gradients came
        self._inside: set[StreamedUnit] = set()  # needed by now, with gradients that are not complete
        self._complete: set[StreamedUnit] = set()  # with complete gradients
        self._given: set[StreamedUnit] = set()  # with gradients that code got before the step
        self._never_revisited: set[StreamedUnit] = set()  # a whole backward did not come back to them (Rule 1)

    def begin(self, at_end: Callable[[], None]) -> None:
        """Begin a backward, which needs its first unit."""
        self._access.gradients.add(self)
        self._task = graph_task()
        self._inside.clear()
        self._complete.clear()
        self._given.clear()
        self.at_end = weakref.ref(at_end)
        at_end_of_backward(at_end)

    def end(self) -> None:
        """End a backward that raised no error, and record which units it did not come back to (Rule 1)."""
        self.interrupt()
        self._never_revisited |= self._complete - self._given

    def interrupt(self) -> None:
        """End a backward that may have raised an error. Safe twice."""
        self._access.gradients.discard(self)
        self.last = None

    def completed(self, unit: StreamedUnit) -> bool:
        """Record that the unit's gradients are done; return whether the unit may be stepped (Rules 1, 2)."""
        self._inside.discard(unit)
        self.last = None
        self.brought_by = graph_task()
        if self.brought_by != self._task:
            return False
        self._complete.add(unit)
        has_all = not unit.stand_ins.full_precision.gradients_split and all(map(_requires_grad, unit.store.params))
        return has_all and not unit.store.is_shared() and unit in self._never_revisited

    def needs_unit(self, unit: StreamedUnit) -> bool:
        """Record that backward needs the unit; return whether its gradients were complete before (Rule 1)."""
        if unit not in self._complete:
            self._inside.add(unit)
            return False
        self._complete.discard(unit)
        self._never_revisited.discard(unit)
        return True

    def gives_gradient(self, unit: StreamedUnit) -> None:
        """Record that code gets a gradient of the unit, which it may change before the step (Rule 1)."""
        self._given.add(unit)
        self._never_revisited.discard(unit)

    def forget(self) -> None:
        """Forget what was learned: from now on backward may need other units (Rule 1)."""
        self._never_revisited.clear()

    def check_gradient(self, unit: StreamedUnit, name: str, returned: int = -1) -> None:
        """Raise if a hook reads this weight's gradient while backward is inside its unit (Rule 3).

        ``returned``: the task in which the gradient was left to a thread of the host, for hooks on the weight.
        """
        if returned >= self._task and not at_leaf():
            raise ExactnessError(
                f"the gradient of {name} was read in a hook of backward, beside which another thread calls the hooks "
                "on that weight and adds its gradient: read it in a hook on a weight, or after backward"
            )
        if unit in self._inside and current_node() is not None:
            raise ExactnessError(
                f"the gradient of {name} was read while backward is inside {unit.name}, whose gradients arrive "
                "together: read it in a hook on the weight itself, or after backward"
            )
