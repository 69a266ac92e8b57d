"""The phases of a step: which code runs now, and so how weights are read and what ``p.device`` is.

1. What autograd runs is in BACKWARD. Only the hooks of a parameter are user code, as in BEFORE_BACKWARD: the gradient
   that they get is on the host. All other code is in the phase on top of a stack, until it returns or raises.
2. At the bottom of the stack is user code: BETWEEN_STEPS; or BEFORE_BACKWARD, from the end of an outermost STEP that
   records gradients to the end of a backward. It is CLOSED before streaming begins and from its end on, which may come
   in any phase: what ends later finds its phase gone.
3. On top of it lie, in any order, STEP (a scope: engine.py, Rule 2), OPTIMIZER (an optimizer's step) and GENERATE (the
   model's ``generate``, which reads weights as a step does). GENERATE lies on no phase of model code: it would change
   nothing there.
4. A step may run inside another one, also of the same optimizer (``super().step()``). One that raised does not report
   its end. It ends with its closure, if that raised, with the phase below it, or where a scope or another step begins,
   which looks for the steps that run. An optimizer's closure runs in the phase below the optimizer's step. The step of
   an optimizer that has none of the weights is no phase on another thread than the one of the last scope.
5. Reads of weights are watched (weight_reads.py) in all phases but OPTIMIZER, and there while a step is deferred, or in
   the hooks of a parameter: autograd's thread of the device goes on beside them. A function that model code gives a
   weight finds it on the device, as in a plain run, with the type that it has there; ``p.data`` is the host's in any
   phase, but for model code inside of the parameter's unit.
6. Where user code or an optimizer's goes on after code of the library's or the model's, no fill may read host bytes any
   more: a scope, a backward or a closure ends, or an optimizer's step begins (access.py, Rule 3).
7. User code for one model may be model code of another: a loss that is computed in a student's step, from a teacher's
   weights. It reads weights as the other model's does.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from ..compat.modules import running_steps
from ..memory.access import Access
from ..memory.device import Device
from . import weight_reads
from .backward_pass import at_leaf, in_backward

log = logging.getLogger(__name__)


class Phase(enum.Enum):
    """The code that runs."""

    CLOSED = "any code, while nothing is streamed"
    BETWEEN_STEPS = "user code between steps"
    BEFORE_BACKWARD = "user code between a forward and a backward"
    STEP = "model code"
    GENERATE = "the model's generate"
    BACKWARD = "differentiation and recomputation"
    OPTIMIZER = "an optimizer's step"


USER_CODE = (Phase.BETWEEN_STEPS, Phase.BEFORE_BACKWARD)
MODEL_CODE = (Phase.STEP, Phase.GENERATE, Phase.BACKWARD)
_started: weakref.WeakSet[Phases] = weakref.WeakSet()  # of the models that are streamed


class Phases:
    """The phases that the running code is in, one inside the other."""

    def __init__(self, access: Access, device: Device, device_dtype: Callable[[torch.dtype], torch.dtype]) -> None:
        self._access = access
        self._device, self._device_dtype = device, device_dtype
        self._reported_read = False
        self._stack: list[Phase | Optimizer] = [Phase.CLOSED]  # an optimizer stands for its step
        self._thread = 0  # of the last outermost scope

    @property
    def current(self) -> Phase:
        """The phase of the calling thread (Rule 1)."""
        if in_backward() and not at_leaf():
            return Phase.BACKWARD
        top = self._stack[-1]
        if not isinstance(top, Phase):
            return Phase.OPTIMIZER
        return Phase.BEFORE_BACKWARD if in_backward() else top

    @property
    def closed(self) -> bool:
        """Whether nothing is streamed, not yet or no longer."""
        return self._stack[0] is Phase.CLOSED

    @property
    def in_scope(self) -> bool:
        """Whether a scope is open that did not begin in backward, also around an optimizer's step."""
        return Phase.STEP in self._stack

    @property
    def in_step(self) -> bool:
        """Whether a forward that begins now is a part of an open scope, or of a backward."""
        return self.in_scope or in_backward()

    @property
    def elsewhere(self) -> bool:
        """Whether the calling thread is another one than that of the last scope (Rule 4)."""
        return self._thread != threading.get_ident()

    # ---- what a read of a weight finds (Rule 5)

    @property
    def serving(self) -> bool:
        """Whether reads of host parameters are answered with their stand-ins (Rules 5 and 7)."""
        phase, device = self.current, self._device.torch_device
        return phase in MODEL_CODE or (
            phase in USER_CODE
            and any(one.current in MODEL_CODE and one._device.torch_device == device for one in _started)
        )

    @property
    def between_steps(self) -> bool:
        """Whether user code may bring host parameters together with tensors on the device."""
        return self.current in USER_CODE and not self._device.is_host

    @property
    def optimizing(self) -> bool:
        """Whether an optimizer steps, which finds everything on the host."""
        return self.current is Phase.OPTIMIZER

    def apparent_device(self) -> torch.device | None:
        """Return what ``parameter.device`` reports, or None for the true one."""
        return self._device.torch_device if self.serving else None

    def apparent_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return what ``parameter.dtype`` reports for a parameter of this type."""
        return self._device_dtype(dtype) if self.serving else dtype

    def read_on_host(self, name: str) -> None:
        """Warn, once, that a weight was read on the host: nothing else in streaming can change a result's bits."""
        if self.current is Phase.BEFORE_BACKWARD and not self._reported_read:
            self._reported_read = True
            log.warning(
                "superpipeline: %s was read on the host; if a loss depends on this read, the weight's gradient is "
                "summed in another order and equals the plain run's only to rounding. Read it inside the step to avoid "
                "that, at no cost",
                name,
            )

    # ---- changes

    def start(self) -> None:
        """Begin to stream."""
        assert self.closed
        self._stack = [Phase.BETWEEN_STEPS]
        self._thread = threading.get_ident()
        _started.add(self)
        weight_reads.enable()

    def close(self) -> None:
        """End streaming, in whatever phase (Rule 2)."""
        if not self.closed:
            self._stack = [Phase.CLOSED]
            _started.discard(self)
            weight_reads.disable()

    def begin_step(self) -> None:
        """Begin a scope; one in backward is a part of it: whatever recomputes there (Rule 1)."""
        if not self.in_step:
            self._thread = threading.get_ident()
            self._end_raised()
        self._stack.append(Phase.BACKWARD if in_backward() else Phase.STEP)
        weight_reads.resume()

    def end_step(self) -> bool:
        """End the innermost scope, if it is open still; return whether user code follows."""
        kind = Phase.BACKWARD if in_backward() else Phase.STEP
        if kind not in self._stack:
            return False
        innermost = len(self._stack) - 1 - self._stack[::-1].index(kind)
        del self._stack[innermost:]  # with the steps in it of optimizers that raised (Rule 4)
        if not self.in_step and torch.is_grad_enabled():
            self._stack[0] = Phase.BEFORE_BACKWARD
        self._watch_reads()
        if self.in_step:
            return False
        self.before_user_code()
        return True

    def end_backward(self) -> None:
        """End a backward that raised no error."""
        if not self.closed:
            self._stack[0] = Phase.BETWEEN_STEPS
            self._watch_reads()
            self.before_user_code()

    @contextlib.contextmanager
    def generating(self) -> Iterator[None]:
        """Answer reads of weights as in a scope, around the model's ``generate`` (Rule 3)."""
        depth = len(self._stack)
        if self.current not in MODEL_CODE:
            self._stack.append(Phase.GENERATE)
            weight_reads.resume()
        try:
            yield
        finally:
            del self._stack[depth:]
            self._watch_reads()

    def begin_optimizer(self, optimizer: Optimizer) -> None:
        """Begin an optimizer's step."""
        self._end_raised(but=1)
        self._stack.append(optimizer)
        self._watch_reads()
        self.before_user_code()

    def end_optimizer(self) -> None:
        """End the innermost step of an optimizer, and those inside it that raised (Rule 4)."""
        self._end_raised(but=1)
        self._watch_reads()

    def _end_raised(self, but: int = 0) -> None:
        """End the steps on top that the calling thread does not run, or only as its innermost ones (Rule 4)."""
        while not isinstance(self._stack[-1], Phase):
            if self._stack.count(self._stack[-1]) <= running_steps()[but:].count(self._stack[-1]):
                return
            self._stack.pop()

    def run_closure(self, closure: Callable[[], Any]) -> Any:
        """Call an optimizer's closure in the phase below the optimizer's step (Rule 4)."""
        stepping: list[Phase | Optimizer] = []
        while not isinstance(self._stack[-1], Phase):
            stepping.insert(0, self._stack.pop())
        weight_reads.resume()
        result = closure()
        if not self.closed:
            self._stack += stepping
        self._watch_reads()
        self.before_user_code()
        return result

    def end_loan(self) -> None:
        """End the time of one call in which a unit's weight was lent to other code."""
        if self.current not in (Phase.STEP, Phase.BACKWARD):
            self.before_user_code()

    def before_user_code(self) -> None:
        """Wait until no fill reads host bytes: code that may write them goes on next (Rule 6)."""
        fills = self._access.fills
        for copied in list(fills):
            fills[copied].settle()
            del fills[copied]

    def _watch_reads(self) -> None:
        """Watch reads of weights as Rule 5 says."""
        optimizes = not isinstance(self._stack[-1], Phase)
        if not optimizes or self._access.steps or (at_leaf() and not self._device.is_host):
            weight_reads.resume()
        else:
            weight_reads.pause()
