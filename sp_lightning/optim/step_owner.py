"""The owner of an optimizer's step beside other work: which step is announced, which one is pending, and how far it is.

1. A step is *announced* before the backward whose gradients it steps with. It begins in that backward, if units may be
   stepped beside it, and at the latest with the optimizer's own code, which steps the rest or leaves it to a deferred
   step. So a step goes from announced to "in backward", to its rest, to "deferred", and may leave out any of these.
2. One step of a module is pending at a time: the next one begins when the one before is done. It may be announced
   earlier. Whoever waits for the whole step asks its owner; who waits for one unit's asks the ledger (access.py).
3. A backward inside a scope, which user code runs there (for the gradient of an input, say), is not the one that the
   optimizer steps after: its gradients may be dropped, or others added. No unit is stepped in it.
4. A hook that reads the optimizer's state in backward would see the new state of units that are already stepped. So
   the first backward before an optimizer's step finds out whether any code reads the state, and steps nothing. If some
   code does, nothing is ever stepped in backward. Code that begins to read it once units are stepped is an error. So it
   is with code that runs another backward before the step (of an auxiliary loss, in a hook): the gradients of the first
   one are not all that it steps with.
5. Backward must not come back to a unit that was submitted in it (backward_pass.py, Rule 1): its old bytes are gone.
6. No checkpoint is saved between the first unit that is submitted in backward and the end of the optimizer's own code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from torch.optim import Optimizer

from ..autograd.backward_pass import in_backward
from ..errors import ExactnessError
from ..host.telemetry import Counters
from ..memory.access import Access
from ..memory.host_copy import HostCopy
from .pending_step import HostThread, Kept, Parts, PendingStep, Say
from .pieces import Group, ShadowStep


class StepOwner:
    """The optimizer's steps of one module, one after the other (Rule 2)."""

    def __init__(self, counters: Counters, access: Access) -> None:
        self._counters = counters
        self._access = access
        self.thread = HostThread()
        self._announced: PendingStep | None = None
        self.begins_in_backward = False  # the announced one
        self._current: PendingStep | None = None  # the last to begin, which may be done
        self.takes_units: PendingStep | None = None  # the current one, while it takes units of a backward
        self._reads_state: bool | None = None  # whether code in backward reads the optimizer's; None: not known yet
        self._runs_backward_again = False  # whether code runs another backward before a step (Rule 4)

    @property
    def pending(self) -> str | None:
        """Whether a step is pending "in backward", or "deferred"; None if none is."""
        step = self._current
        if step is None or step not in self._access.gradients:
            return None
        return "deferred" if step.is_deferred else "in backward"

    # ---- from announced to done (Rule 1)

    @contextlib.contextmanager
    def announced(
        self,
        optimizer: Optimizer,
        shadow: ShadowStep,
        may_defer: Callable[[], bool],
        say: Say,
        in_backward: bool = False,
    ) -> Iterator[None]:
        """Announce a step in a context of a backward, and then the optimizer's own code.

        With ``in_backward`` its units may be stepped beside that backward.
        """
        step = self.announce(optimizer, shadow, may_defer, say)
        self.begins_in_backward = in_backward
        try:
            yield
        except BaseException as error:
            step.fail(error)
            raise
        finally:
            self._announced = self.takes_units = None
            self._access.step_has_begun = False
            step.end()

    def announce(
        self, optimizer: Optimizer, shadow: ShadowStep, may_defer: Callable[[], bool], say: Say
    ) -> PendingStep:
        """Announce a step in front of its optimizer's own code, if nothing announced it before."""
        self.begins_in_backward = False
        self._announced = PendingStep(self._counters, self._access, optimizer, shadow, self.thread, may_defer, say)
        return self._announced

    def is_announced(self, optimizer: Optimizer | None = None) -> bool:
        """Whether a step is announced, of this optimizer or of any."""
        step = self._announced
        return step is not None and (optimizer is None or step.optimizer is optimizer)

    def forward_ended(self) -> None:
        """Note that the calling thread goes on to a backward, and to the announced step with the same settings."""
        if self._announced is not None:
            self._announced.note_settings()

    def backward_begins(self, in_scope: bool) -> None:
        """Finish the step before, and begin the announced one if units may be stepped in this backward (Rules 3, 4)."""
        self.finish()
        step = self._announced
        if step is None or not self.begins_in_backward:
            return
        if step is self._current:
            self._runs_backward_again = True
            self._give_up("code runs another backward", "code ran another backward after the optimizer had stepped")
        elif not in_scope:
            self._current = step
            self._access.step_has_begun = True
            if not self._reads_state and not self._runs_backward_again and step.withhold(self._state_is_read):
                self.takes_units = None if self._reads_state is None else step
                self._reads_state = False

    def rest(self, order: Sequence[HostCopy], kept: Kept, parts: Parts) -> tuple[list[Group], Any]:
        """Return the groups and the state of what the optimizer's own code steps; the rest may be deferred.

        Units are deferred in this order. ``kept`` tells which gradients others refer to than their parameters.
        """
        step, self._announced, self.takes_units = self._announced, None, None
        self._access.step_has_begun = False
        assert step is not None
        self.finish()
        self._current = step
        return step.step_rest(order, kept, parts)

    def code_returned(self, optimizer: Optimizer) -> None:
        """Note that an optimizer's own code is done: an error from here on tears no step."""
        if self._current is not None and self._current.optimizer is optimizer:
            self._current.has_ended = True

    def ended(self, optimizer: Optimizer) -> Collection[int]:
        """End an optimizer's step, but for what is deferred.

        Return the ids of the parameters that the thread has stepped, or is going to step.
        """
        step = self._current
        if step is None or step.optimizer is not optimizer:
            return ()
        params = step.params
        step.end()
        return params

    def finish(self) -> None:
        """Wait for the pending step, or leave to the optimizer's own code what the thread did not reach in backward."""
        if self._current is not None and self._current in self._access.gradients:
            self._current.finish()

    def close(self) -> None:
        """End the thread, and forget the steps: they lead to the module, which a graph that is kept would keep."""
        self.thread.close()
        self._announced = self._current = self.takes_units = None

    # ---- errors (Rules 4 to 6)

    def check_whole(self) -> None:
        """Raise if a step that began in backward has not ended: weights and state are of two steps (Rule 6)."""
        step = self._current
        if step is not None and step.submitted and step.optimizer is not None and not step.has_ended:
            raise ExactnessError(
                "a checkpoint was asked for in the middle of a step, from a signal handler or another thread, when the "
                f"optimizer had begun to step {next(iter(step.submitted)).unit.name}: it would be of two steps. Save "
                "between steps, or set optimizer_overlap=False"
            )

    def _state_is_read(self) -> None:
        """Finish the step, as code reads its state; in backward step no unit, or raise if one is submitted (Rule 4)."""
        step = self._current
        assert step is not None
        if not in_backward():
            self.finish()
            return
        self._reads_state = True
        found = "code in backward read the optimizer's state after the optimizer had stepped"
        self._give_up("code in backward reads its state", found)

    def _give_up(self, reason: str, found: str) -> None:
        """Step no unit in this backward, for this reason, or raise if one is submitted (Rule 4)."""
        step, self.takes_units = self._current, None
        assert step is not None
        if step.submitted:
            raise ExactnessError(
                f"{found} {next(iter(step.submitted)).unit.name}, which it did not do in earlier steps; set "
                "optimizer_overlap=False"
            )
        step.given_up = reason
        step.give_back()

    def has_submitted(self, store: HostCopy) -> bool:
        """Whether the step in backward was given this unit."""
        return self.takes_units is not None and store in self.takes_units.submitted

    def check_revisit(self, store: HostCopy) -> None:
        """Raise if backward comes back to a unit that was submitted in it."""
        if self.has_submitted(store):
            raise ExactnessError(
                f"backward came back to {store.unit.name} after its gradients were complete and the optimizer had "
                "stepped it. In earlier steps neither backward did so, nor a hook that reads weights or changes "
                "gradients; set optimizer_overlap=False"
            )
