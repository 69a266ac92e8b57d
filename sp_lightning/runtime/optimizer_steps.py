"""Steps of optimizers, by whatever code calls them, as the options say.

1. An optimizer that has streamed parameters steps them in pieces, or fused (pieces.py), from its first step on.
2. An optimizer reads and writes on the host. Its step begins once the copies that the caller's stream makes from and to
   the host (``non_blocking=True``) are done, and leaves resident units stale.
3. Inside ``ahead`` units are stepped while backward runs (step_in_backward.py), inside ``held`` beside the next forward
   (deferred_step.py). Three kinds of step run as a whole, after backward: of an optimizer that does not step each
   parameter by itself; of one that makes tensors of torch's default type, which a forward or backward beside it may
   set; and of any where the CPU computes with several threads (step_in_backward.py, Rule 7).
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch.optim import ASGD, Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ..autograd import weight_reads
from ..compat.modules import HOOKS_AFTER_EVERY_STEP, HOOKS_AFTER_STEP, HOOKS_BEFORE_EVERY_STEP, HOOKS_BEFORE_STEP
from ..compat.patches import UNSCALE_GRADS
from ..core import malloc
from ..memory.parameters import quietly, true_grad
from ..memory.unit_store import UnitStore
from ..optim import grad_scaler
from ..optim.deferred_step import CannotDefer, DeferredStep
from ..optim.pieces import Group, ShadowStep, all_of, fuse, step_in_pieces
from ..optim.step_in_backward import HostThread, StepInBackward
from .engine import Engine

log = logging.getLogger(__name__)

AFTER_BACKWARD = "the optimizer steps after backward"
WHOLE_STEP = "the next forward waits for the whole step of the optimizer"


class OptimizerSteps:
    """The steps of all optimizers in the process, while a module is streamed."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine  # replaced when the module's parameters change
        self._counters = engine.counters
        self._options = engine.options
        self._shadows: weakref.WeakKeyDictionary[Optimizer, ShadowStep | None] = weakref.WeakKeyDictionary()
        self._thread = HostThread()
        self._closed = False
        self.said: dict[str, list[str]] = {AFTER_BACKWARD: [], WHOLE_STEP: []}  # the reasons that were logged
        UNSCALE_GRADS.install(grad_scaler.unscale)
        self._hooks = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]

    def close(self) -> None:
        """Let optimizers step as they do without streaming."""
        self._closed = True
        malloc.as_ever()
        UNSCALE_GRADS.remove()
        for shadow in self._shadows.values():
            if shadow is not None:
                shadow.close()
        self._shadows.clear()
        self._thread.close()
        for hook in self._hooks:
            hook.remove()

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        """Prepare an optimizer's step; if it has streamed parameters, they are stepped as the options say."""
        self._counters.listener.step_may_begin()
        managed = self._managed_by(optimizer)
        if managed:
            self._prepare(optimizer)  # adds hooks to the optimizer, which run after this one, still in this step
            grad_scaler.hand_over(optimizer)
        self.engine.optimizing = True
        # The optimizer may call a closure first, whose forward runs beside a deferred step.
        if not self.engine.current_step.is_under_way:
            weight_reads.pause()
        self.engine.collect_writes()
        if self._shadows.get(optimizer) is None:  # a shadow step waits after the closure
            self._wait_for_copies()
        self.engine.settle()  # marks nothing stale: a closure that runs before the optimizer writes needs no refill

    def _prepare(self, optimizer: Optimizer) -> None:
        if optimizer not in self._shadows:
            shadow = self._shadows[optimizer] = (fuse if self._options.fused_optimizer else step_in_pieces)(optimizer)
            if shadow is not None:
                shadow.rest = self._all_of
            if not optimizer.state:
                malloc.by_themselves()  # the first step makes the state

    def _all_of(self, optimizer: Optimizer) -> tuple[list[Group], Any]:
        self._wait_for_copies()
        return all_of(optimizer)

    def _wait_for_copies(self) -> None:
        """Wait for the copies of the user's code (Rule 2): by now they are all that the caller's stream has queued."""
        self.engine.device.compute.synchronize()

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        malloc.as_ever()
        self.engine.optimizing = False
        self._counters.listener.stepped()
        weight_reads.resume()
        ahead = self.engine.gradient_return.ahead
        stepped = {*(ahead.stepped if ahead is not None else ()), *self.engine.current_step.params}
        self.engine.mark_stale(self._managed_by(optimizer), stepped)
        self.engine.refresh_referenced()

    def has_other_hooks(self, optimizer: Optimizer, after: bool = False) -> bool:
        """Return whether other hooks than the library's run before this optimizer steps, or after it."""
        self._prepare(optimizer)
        # A wrapper of another optimizer has no such attribute if it never called the base class's constructor.
        own = getattr(optimizer, HOOKS_AFTER_STEP if after else HOOKS_BEFORE_STEP, ())
        of_all = HOOKS_AFTER_EVERY_STEP if after else HOOKS_BEFORE_EVERY_STEP
        ours = 0 if self._shadows[optimizer] is None else 1
        return len(own) > ours or len(of_all) > 1

    @property
    def shares_cores(self) -> bool:
        """Whether units compute on the cores that optimizers step on (step_in_backward.py, Rule 7)."""
        return self.engine.device.is_host and torch.get_num_threads() > 1

    def _beside(self, optimizer: Optimizer) -> ShadowStep | None:
        """Return the shadow that steps this optimizer's units beside other work; None if it may not (Rule 3)."""
        if self._closed:
            return None
        self._prepare(optimizer)
        if isinstance(optimizer, ASGD):
            self.say(AFTER_BACKWARD, "ASGD makes tensors of torch's default type, which forward may set")
            return None
        return None if self.shares_cores else self._shadows[optimizer]

    @contextlib.contextmanager
    def ahead(self, optimizer: Optimizer, may_hold: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Have units stepped while backward runs, inside a context of one backward and then this optimizer's step.

        Between the two no code may read gradients or weights. What backward's end leaves is stepped as by ``held``. An
        optimizer that does not step each parameter by itself steps as without this context.
        """
        step = self._beside(optimizer)
        if step is None:
            yield
            return
        self.engine.gradient_return.marks.clear()  # they are of an earlier backward
        self.engine.gradient_return.ahead = ahead = StepInBackward(optimizer, step, self._thread, may_hold)

        def rest(_: Optimizer) -> tuple[list[Group], Any]:
            ahead.give_back()
            self.engine.check_changed()
            return self._rest(optimizer, step, ahead.rest(), ahead.stepped, may_hold)

        step.rest = rest
        try:
            yield
        except BaseException:
            self._say_partly_stepped(ahead)
            raise
        finally:
            self.engine.gradient_return.ahead = None
            step.rest = self._all_of
            ahead.give_back()
            self.say(AFTER_BACKWARD, ahead.given_up)
            self._counters.stepped_ahead += len(ahead.stepped)

    @contextlib.contextmanager
    def held(self, optimizer: Optimizer, may_hold: Callable[[], bool]) -> Iterator[None]:
        """Have this optimizer's step, inside the context, return at once and run beside the next forward.

        The step is deferred (deferred_step.py) if ``may_hold`` allows it when it begins, and no code could read its
        results unseen.
        """
        step = self._beside(optimizer)
        if step is None:
            yield
            return
        step.rest = lambda _: self._rest(optimizer, step, optimizer.param_groups, (), may_hold)
        try:
            yield
        finally:
            step.rest = self._all_of

    def _rest(
        self,
        optimizer: Optimizer,
        step: ShadowStep,
        groups: list[Group],
        stepped: Collection[int],
        may_hold: Callable[[], bool],
    ) -> tuple[list[Group], dict[Any, Any]]:
        """Defer the step of these groups if possible; return the groups and state for the optimizer's own step."""
        self._wait_for_copies()
        self.engine.current_step.finish()
        if self._any_left(groups) and may_hold():
            try:
                return self._hold(DeferredStep(optimizer, step, self._thread, len(stepped)), groups, stepped)
            except CannotDefer as reason:
                self.say(WHOLE_STEP, str(reason))
        return groups, optimizer.state

    def _any_left(self, groups: list[Group]) -> bool:
        """Return whether any streamed parameter in these groups has a gradient."""
        with quietly():
            params = (param for group in groups for param in group["params"])
            return any(self.engine.unit_of(param) is not None and true_grad(param) is not None for param in params)

    def _hold(
        self, step: DeferredStep, groups: list[Group], stepped: Collection[int]
    ) -> tuple[list[Group], dict[Any, Any]]:
        """Begin a deferred step; return the groups and state of what has to be stepped at once."""
        stores = self.engine.next_needed()
        with quietly():
            rest = step.prepare(groups, stores, self._store_of, self.engine.gradient_return.is_own)
            for store in stores:
                store.mark_stale(stepped)  # no fill reads these bytes: backward and scope ended after all of them
            return rest, self.engine.current_step.begin(step)

    def _store_of(self, parameter: torch.Tensor) -> UnitStore | None:
        unit = self.engine.unit_of(parameter)
        return None if unit is None else unit.store

    def say(self, what: str, reason: str | None) -> None:
        """Log what does not run beside other work, once for each reason."""
        if reason and not any(reason in reasons for reasons in self.said.values()):
            self.said[what].append(reason)
            log.info("superpipeline: %s, as %s", what, reason)

    def _say_partly_stepped(self, ahead: StepInBackward) -> None:
        """Log that a failed step changed some weights: they are not those of one step."""
        with contextlib.suppress(Exception):  # the caller raises the first error
            ahead.finish()
        if ahead.stepped:
            log.error(
                "superpipeline: the step failed when the optimizer had already stepped %d of %d parameters; "
                "optimizer_overlap=False keeps a failed step from changing any parameter",
                len(ahead.stepped),
                sum(len(unit.store.params) for unit in self.engine.units),
            )

    def _managed_by(self, optimizer: Optimizer) -> list[torch.Tensor]:
        managed = self.engine.managed
        return [param for group in optimizer.param_groups for param in group["params"] if id(param) in managed]
