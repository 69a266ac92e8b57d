"""Steps of optimizers, by whatever code calls them, as the options say.

1. An optimizer that has streamed parameters steps them in pieces, or fused (pieces.py), from its first step on.
2. An optimizer reads and writes on the host. Its step begins once the copies that the caller's stream makes from and to
   the host (``non_blocking=True``) are done, and leaves resident units stale.
3. Inside ``overlapping`` units are stepped beside other work (pending_step.py). Four kinds of step run as a whole,
   after backward: of an optimizer that does not step each parameter by itself; of one that makes tensors of torch's
   default type, which a forward or backward beside it may set; of one with options on the device, which the caller's
   stream writes; and of any where the CPU computes with several threads (pending_step.py, Rule 9).
4. In a loop of the user's own nothing says what comes between ``backward`` and ``step``: no unit is stepped beside
   backward. Each step may be deferred, as if it ran inside ``overlapping``: code that reads or writes weights,
   gradients or state waits for it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import ASGD, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..compat.modules import HOOKS_AFTER_EVERY_STEP, HOOKS_AFTER_STEP, HOOKS_BEFORE_EVERY_STEP, HOOKS_BEFORE_STEP
from ..compat.patches import CLIP_GRADIENTS, PUBLIC_TOTAL_NORM, TOTAL_NORM, UNSCALE_GRADS
from ..compat.tensors import consists_of_tensors
from ..errors import UnsupportedError
from ..host import malloc
from ..optim import host_gradients
from ..optim.pending_step import AFTER_BACKWARD, WHOLE_STEP, Kept, Parts
from ..optim.pieces import PER_PARAMETER, Group, ShadowStep, all_of, has_options_on_device
from ..optim.state_in_memory import StateInMemory
from ..steps import torn_step
from ..storage.in_memory import InMemory
from .engine import Engine

log = logging.getLogger(__name__)

OTHER_HOOKS = "other step hooks are registered"


class OptimizerSteps:
    """The steps of all optimizers in the process, while a module is streamed."""

    def __init__(self, engine: Engine, storage: InMemory) -> None:
        self.engine = engine
        self._storage = storage
        self.state: StateInMemory = storage.state  # where it lies
        self._counters = engine.counters
        self._options = engine.options
        self._shadows: weakref.WeakKeyDictionary[Optimizer, ShadowStep | None] = weakref.WeakKeyDictionary()
        self._closed = False
        self.by_hand = False  # whether the loop is the user's own, without `overlapping` (Rule 4)
        self.said: dict[str, list[str]] = {AFTER_BACKWARD: [], WHOLE_STEP: []}  # the reasons that were logged
        self._note_parameters()
        UNSCALE_GRADS.install(host_gradients.unscale)
        CLIP_GRADIENTS.install(host_gradients.clip)
        for norm in (TOTAL_NORM, PUBLIC_TOTAL_NORM):
            norm.install(host_gradients.total_norm)
        self._hooks = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]

    def follow(self, engine: Engine) -> None:
        """Go on with the engine of units that were made anew, and with a disk if these need the first one."""
        self.engine = engine
        before, self.state = self.state, self._storage.state
        state = self.state
        self._note_parameters()
        if state is before:
            return
        for optimizer, shadow in list(self._shadows.items()):
            if shadow is None:
                del self._shadows[optimizer]  # which is prepared again
            else:
                state.attach(optimizer, shadow)

    def _note_parameters(self) -> None:
        self.state.follow(parameter for unit in self.engine.units for parameter in unit.store.params)

    def close(self) -> None:
        """Let optimizers step as they do without streaming."""
        self._closed = True
        malloc.as_ever()
        for patch in (UNSCALE_GRADS, CLIP_GRADIENTS, TOTAL_NORM, PUBLIC_TOTAL_NORM):
            patch.remove()
        for shadow in self._shadows.values():
            if shadow is not None:
                shadow.close()
        self._shadows.clear()
        for hook in self._hooks:
            hook.remove()

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Prepare an optimizer's step; if it has streamed parameters, they are stepped as the options say."""
        managed = self._managed_by(optimizer)
        if not managed and self.engine.phases.elsewhere:
            return None
        self._counters.listener.step_may_begin()
        if managed:
            self.engine.team.check_optimizer(optimizer)
            self._prepare(optimizer)  # adds hooks to the optimizer, which run after this one, still in this step
            host_gradients.hand_over(optimizer)
        self.engine.begin_optimizer(optimizer)
        if self._shadows.get(optimizer) is None:  # a shadow step waits after the closure
            self._wait_for_copies()
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            return None
        around = functools.partial(self.engine.run_closure, closure)
        return (args, {**kwargs, "closure": around}) if "closure" in kwargs else ((args[0], around, *args[2:]), kwargs)

    def _prepare(self, optimizer: Optimizer) -> None:
        torn_step.check_step(optimizer)
        if optimizer not in self._shadows:
            self._check_options(optimizer)
            self._storage.check_state([optimizer])
            parameters = (param for group in optimizer.param_groups for param in group["params"])
            by_itself = any(map(consists_of_tensors, parameters))  # torch's own code steps DTensors (sharded.py)
            shadow = None if by_itself else self.state.shadow(optimizer, False)
            if shadow is not None:
                shadow.rest, shadow.end = self._rest, self._end
                shadow.leads = self.engine.team.size > 1
            try:
                self.state.attach(optimizer, shadow)
            except BaseException:  # the device or the disk is full: the next step prepares it again
                if shadow is not None:
                    shadow.close()
                raise
            self._shadows[optimizer] = shadow
            if not optimizer.state:
                malloc.by_themselves()  # the first step makes the state

    def _check_options(self, optimizer: Optimizer) -> None:
        on_host = self._options.optimizer_device == "host" and not self.engine.device.is_host
        if on_host and any(group.get("capturable") for group in optimizer.param_groups):
            raise UnsupportedError(
                f"{type(optimizer).__name__} has capturable=True, with which torch steps on a device alone, and it "
                "steps on the host: set optimizer_device='device', or capturable=False"
            )

    def _wait_for_copies(self) -> None:
        """Wait for the copies of the user's code (Rule 2): by now they are all that the caller's stream has queued."""
        self.engine.device.compute.synchronize()

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        managed = self._managed_by(optimizer)
        if not managed and self.engine.phases.elsewhere:
            return
        if not self._storage.maps_blocks:
            malloc.as_ever()
        self._counters.listener.stepped()
        with self.engine.team.ending(optimizer, managed):
            self.engine.end_optimizer(managed, self.engine.step_owner.ended(optimizer))

    def _end(self, optimizer: Optimizer) -> None:
        self.engine.step_owner.code_returned(optimizer)
        self.engine.team.step_ended(optimizer)

    def other_hooks(self, optimizer: Optimizer, after: bool = False) -> str | None:
        """Say that other hooks than the library's run before this optimizer steps, or after it; None if none do."""
        self._prepare(optimizer)
        # A wrapper of another optimizer has no such attribute if it never called the base class's constructor.
        own = getattr(optimizer, HOOKS_AFTER_STEP if after else HOOKS_BEFORE_STEP, ())
        of_all = HOOKS_AFTER_EVERY_STEP if after else HOOKS_BEFORE_EVERY_STEP
        ours = 0 if self._shadows[optimizer] is None else 1
        # Those of other streamed modules read nothing of this one; where they step parameters too, `own` shows it.
        others = any(not isinstance(getattr(hook, "__self__", None), OptimizerSteps) for hook in of_all.values())
        return OTHER_HOOKS if len(own) > ours or others else None

    def may_defer(self, optimizer: Optimizer) -> bool:
        """Whether no hook of the user's runs after this optimizer's step in a loop by hand; log it if one does."""
        reason = self.other_hooks(optimizer, after=True)
        self.say(WHOLE_STEP, reason)
        return reason is None

    @property
    def shares_cores(self) -> bool:
        """Whether units compute on the cores that optimizers step on (pending_step.py, Rule 9)."""
        return self.engine.device.is_host and torch.get_num_threads() > 1

    def _beside(self, optimizer: Optimizer) -> ShadowStep | None:
        """Return the shadow that steps this optimizer's units beside other work; None if it may not (Rule 3)."""
        if self._closed:
            return None
        self._prepare(optimizer)
        if isinstance(optimizer, ASGD):
            self.say(AFTER_BACKWARD, "ASGD makes tensors of torch's default type, which forward may set")
            return None
        if has_options_on_device(optimizer):
            self.say(AFTER_BACKWARD, "its options are on the device, where no stream of the optimizer's waits for them")
            return None
        return None if self.shares_cores or type(optimizer) in PER_PARAMETER else self._shadows[optimizer]

    @contextlib.contextmanager
    def overlapping(
        self, optimizer: Optimizer, may_defer: Callable[[], bool] = lambda: False, in_backward: bool = True
    ) -> Iterator[None]:
        """Have this optimizer's units stepped beside other work, inside a context of one backward and then its step.

        With ``in_backward`` they are stepped while backward runs: between the two no code may read gradients or
        weights. What is left when the step begins is deferred, if ``may_defer`` allows it then and no code could read
        its results unseen. An optimizer that does not step each parameter by itself steps as without this context.
        """
        shadow = self._beside(optimizer)
        if shadow is None:
            yield
            return
        with self.engine.step_owner.announced(optimizer, shadow, may_defer, self.say, in_backward):
            try:
                yield
            except BaseException:
                self.engine.let_autograd_end()  # else it may submit a unit yet
                raise

    def _rest(self, optimizer: Optimizer) -> tuple[list[Group], Any]:
        """Return the groups and the state of what the optimizer steps itself, after its closure."""
        self._wait_for_copies()
        return self.engine.team.rest(optimizer, self._own_rest)

    def _own_rest(self, optimizer: Optimizer, kept: Kept, parts: Parts) -> tuple[list[Group], Any]:
        owner = self.engine.step_owner
        if self.by_hand and self._options.optimizer_overlap and not owner.is_announced():  # Rule 4
            shadow = self._beside(optimizer)
            if shadow is not None:
                owner.announce(optimizer, shadow, functools.partial(self.may_defer, optimizer), self.say)
        if not owner.is_announced(optimizer):
            return all_of(optimizer)
        if owner.begins_in_backward:
            self.engine.check_changed()  # a hook may have changed gradients after the engine's end of backward
        return owner.rest(self.engine.next_needed(), kept, parts)

    def say(self, what: str, reason: str | None) -> None:
        """Log what does not run beside other work, once for each reason."""
        if reason and not any(reason in reasons for reasons in self.said.values()):
            self.said[what].append(reason)
            log.info("superpipeline: %s, as %s", what, reason)

    def manages(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer has streamed parameters."""
        return bool(self._managed_by(optimizer))

    def _managed_by(self, optimizer: Optimizer) -> list[torch.Tensor]:
        managed = self.engine.managed
        return [param for group in optimizer.param_groups for param in group["params"] if id(param) in managed]
