"""``optimizer_overlap``: a unit is stepped on the host while backward of the units below it still runs.

1. What is stepped ahead is final: its gradients came out of the outermost backward of the last micro-batch, and nothing
   between that backward and the step may look at gradients or parameters (the strategy knows).
2. One thread does it, in the order of arrival: it waits for a unit's gradients, accumulates them into ``.grad`` and
   steps the unit's parameters with the optimizer's own code and state. ``optimizer.step()`` then steps the rest.
3. Who asks for a gradient waits for the thread. So does the step, and an error of the thread is raised there.
4. The order in which state is created is not that of the parameters; it is put right when the step ends.
5. What a thread has of its own and results depend on is the caller's: whether denormal numbers are flushed to zero, and
   how many threads share an operator, which decides where its vectorized loops end.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .optimizer import Group, ShadowStep

Arrive = Callable[[], Sequence[Tensor]]  # waits for gradients, accumulates them, and tells whose they were
_thread = threading.local()
_HALF = float("0.5")  # which no compiler sees


class HostThread:
    """The thread that steps ahead; it is started when it is first needed."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "superpipeline-optimizer", initializer=self._mark)

    @staticmethod
    def _mark() -> None:
        _thread.steps_ahead = True

    @staticmethod
    def is_current() -> bool:
        """Whether it asks itself."""
        return getattr(_thread, "steps_ahead", False)

    def submit(self, work: Callable[[], None]) -> Future[None]:
        """Does this after all that was submitted before, as the caller would (Rule 5)."""
        return self._pool.submit(_as_here(work))

    def close(self) -> None:
        """Ends the thread."""
        self._pool.shutdown()


def _as_here(work: Callable[[], None]) -> Callable[[], None]:
    flushes, count = _flushes_denormals(), torch.get_num_threads()

    def do() -> None:
        if _flushes_denormals() != flushes:
            torch.set_flush_denormal(flushes)
        if torch.get_num_threads() != count:
            torch.set_num_threads(count)
        work()

    return do


def _flushes_denormals() -> bool:
    """Whether this thread's arithmetic does: torch sets it and does not tell."""
    return sys.float_info.min * _HALF == 0.0


class StepAhead:
    """One step of an optimizer, of which parameters whose gradients arrive are stepped at once."""

    def __init__(self, optimizer: Optimizer, step: ShadowStep, thread: HostThread) -> None:
        self._optimizer = optimizer
        self._step = step
        self._thread = thread
        self._group_of = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self._under_way: list[Future[None]] = []
        self._known = len(optimizer.state)
        self._failed = False
        self.stepped: set[int] = set()  # ids of parameters

    def submit(self, arrive: Arrive, timed: AbstractContextManager[None], then: Callable[[], None]) -> None:
        """Gradients are under way whose parameters can be stepped when they arrive, and ``then`` has to do with what
        they are by then; both within ``timed``."""
        self._under_way.append(self._thread.submit(lambda: self._arrived(arrive, timed, then)))

    def rest(self) -> tuple[list[Group], Any]:
        """What the optimizer's own step has to do: all but what was stepped ahead, before backward returned."""
        groups = self._optimizer.param_groups
        rest = [{**group, "params": [p for p in group["params"] if id(p) not in self.stepped]} for group in groups]
        return rest, self._optimizer.state

    def finish(self) -> None:
        """All that was submitted is stepped (Rule 3)."""
        if HostThread.is_current():
            return
        for work in self._under_way:
            work.exception()  # waits for each before the first error is raised
        under_way, self._under_way = self._under_way, []
        for work in under_way:
            work.result()

    def sort_state(self) -> None:
        """State that the step made is in the order in which the optimizer's own would have made it (Rule 4)."""
        state: dict[Any, Any] = self._optimizer.state
        made = list(state)[self._known :]
        params = [param for group in self._optimizer.param_groups for param in group["params"]]
        order = {id(param): i for i, param in enumerate(params)}
        for param in sorted(made, key=lambda param: order.get(id(param), len(order))):
            state[param] = state.pop(param)

    def _arrived(self, arrive: Arrive, timed: AbstractContextManager[None], then: Callable[[], None]) -> None:
        if self._failed:
            return
        self._failed = True
        with torch._C.DisableTorchFunctionSubclass():  # host parameters are meant (reads.py)
            params = [param for param in arrive() if id(param) in self._group_of]
            groups: list[Group] = [{**group, "params": []} for group in self._optimizer.param_groups]
            for param in params:
                groups[self._group_of[id(param)]]["params"].append(param)
            with timed:
                self._step.step_groups(self._optimizer, groups)
                then()
        self.stepped.update(map(id, params))
        self._failed = False
