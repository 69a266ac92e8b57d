"""A step in backward (``optimizer_overlap``): units are stepped on the host while backward of those below still runs.

1. What is stepped in backward is final: its gradients came out of the outermost backward of the last micro-batch, and
   no code between that backward and the step may read gradients or parameters (the strategy makes sure of it).
2. One thread, the optimizer thread, waits for a unit's gradients, accumulates them into ``.grad`` and steps the unit's
   parameters with the optimizer's own code and state. ``optimizer.step()`` then steps the rest.
3. Reading a gradient waits for the thread. So does the step; an error of the thread is raised there.
4. If the rest of the step may be deferred (deferred_step.py), nothing waits for units that the thread has not stepped
   when the last gradients arrive: their gradients are accumulated, and they are left to the step. Among the units whose
   gradients have arrived the thread chooses the newest, again after each part of a unit: so the units that are left are
   those that the next forward needs last.
5. The thread never creates optimizer state: new state depends on the caller's default types and modes, and so does its
   order. A parameter without state is left to ``optimizer.step()``.
6. Settings of a thread that change results are taken over from the caller's: whether denormal numbers are flushed to
   zero, and how many threads share an operator, which decides where its vectorized loops end.
7. Where the CPU computes with several threads, nothing is stepped beside other work: threads of both sides would wait
   for each other on cores that one side can fill alone.
8. The optimizer's state is guarded from the beginning of backward to the step (state_guard.py, and backward_pass.py,
   Rule 5). A parameter whose state other code refers to is not stepped in backward. A read of the state on another
   thread waits for what is being stepped.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..compat.dispatch import without_dispatch
from ..core.simulation import PARTS
from ..errors import ExactnessError
from ..memory.parameters import HostParameter, true_grad
from .pieces import Group, ShadowStep, keeps_no_state
from .state_guard import GuardedState, parameter_state_is_shared, state_is_shared

_thread = threading.local()
_HALF = float("0.5")  # made at run time: no compiler may fold products of it


class HostThread:
    """The optimizer thread, started at the first submission."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "superpipeline-optimizer", initializer=self._mark)

    @staticmethod
    def _mark() -> None:
        _thread.steps_ahead = True

    @staticmethod
    def is_current() -> bool:
        """Whether the calling thread is the optimizer thread."""
        return getattr(_thread, "steps_ahead", False)

    def submit(self, work: Callable[[], None]) -> Future[None]:
        """Queue work behind all that was submitted before; it runs with the caller's settings (Rule 6)."""
        return self._pool.submit(_as_here(work))

    def close(self) -> None:
        """End the thread after the queued work."""
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
    """Whether this thread flushes denormal numbers to zero: torch sets this and has no way to read it."""
    return sys.float_info.min * _HALF == 0.0


class Arriving(Protocol):
    """A unit's gradients on their way to the host."""

    def has_arrived(self) -> bool:
        """Whether the gradients are on the host."""

    def wait(self) -> None:
        """Wait until the gradients are on the host."""

    def land(self) -> Sequence[Tensor]:
        """Wait for the gradients, accumulate them, and return their parameters."""


class _Unit:
    """A unit to be stepped, part by part (Rule 4)."""

    def __init__(
        self,
        number: int,
        gradients: Arriving,
        timed: Callable[[], AbstractContextManager[None]],
        then: Callable[[], None],
    ) -> None:
        self.number = number
        self.gradients = gradients
        self.timed = timed
        self.then = then
        self._accumulated = False
        self._left: list[Tensor] = []  # parameters to be stepped
        self._part = 0  # fewest elements of a part

    def has_arrived(self) -> bool:
        """Whether the unit can be stepped without waiting."""
        return self._accumulated or self.gradients.has_arrived()

    def land(self) -> None:
        """Wait for the unit's gradients and accumulate them. Safe twice."""
        if not self._accumulated:
            self._accumulated = True
            self._left = list(self.gradients.land())
            self._part = sum(map(Tensor.numel, self._left)) // PARTS

    def next_part(self) -> list[Tensor]:
        """Take out the parameters to be stepped next."""
        part: list[Tensor] = []
        elements = 0
        while self._left and elements < max(self._part, 1):
            part.append(self._left.pop(0))
            elements += part[-1].numel()
        return part

    @property
    def done(self) -> bool:
        """Whether no parameter is left to be stepped."""
        return self._accumulated and not self._left


class StepInBackward:
    """One step of an optimizer that steps parameters in backward, as their gradients arrive.

    ``may_leave`` tells whether the step may be deferred: then units that the thread does not reach are left (Rule 4).
    """

    def __init__(
        self, optimizer: Optimizer, step: ShadowStep, thread: HostThread, may_leave: Callable[[], bool] = lambda: False
    ) -> None:
        self._optimizer = optimizer
        self._step = step
        self._thread = thread
        self._may_leave = may_leave
        self._groups_of: dict[int, list[int]] = {}  # numbers of its groups: a parameter in two is stepped twice
        self._under_way: list[Future[None]] = []
        self._units: list[_Unit] = []  # to be stepped, without the one that is being stepped, oldest first
        self._numbers = itertools.count()  # of units
        self._leaving = False  # the thread ends with the part that it is at (Rule 4)
        self._lock = threading.Lock()  # guards the units, the futures and the flag above
        self._options: Any = None  # of the groups, when the first unit was submitted
        self._failed = False
        self.stepped: set[int] = set()  # ids of parameters
        self.state: Any = None  # the optimizer's, while it is guarded
        self.given_up = ""  # why nothing is stepped in backward, for the log
        self.withheld: GuardedState | None = None

    def withhold(self, finish: Callable[[], None]) -> bool:
        """Guard the optimizer's state when backward begins: until ``give_back``, a read calls ``finish`` first.

        Returns False if other code refers to the state already; then nothing may be stepped in backward (Rule 8).
        """
        if state_is_shared(self._optimizer):
            self.given_up = "somebody else refers to the optimizer's state"
            return False
        self.withheld = GuardedState(self._optimizer, finish)
        self.state = self.withheld.state
        return True

    def give_back(self) -> None:
        """Make the optimizer's state readable again. Safe twice."""
        if self.withheld is not None:
            self.withheld.give_back()
            self.withheld = self.state = None

    @property
    def is_idle(self) -> bool:
        """Whether no submitted unit is still to be stepped or waited for."""
        return not self._under_way and not self._units

    @property
    def has_begun(self) -> bool:
        """Whether any unit was submitted."""
        return self._options is not None

    def submit(
        self, gradients: Arriving, timed: Callable[[], AbstractContextManager[None]], then: Callable[[], None]
    ) -> None:
        """Have a unit's parameters stepped when its gradients have arrived, and ``then`` called after the last of them.

        Each part is stepped in a context made by ``timed``, and so is the call of ``then``.
        """
        if self._options is None:
            self._options = _options(self._optimizer)
            for number, group in enumerate(self._optimizer.param_groups):
                for param in group["params"]:
                    self._groups_of.setdefault(id(param), []).append(number)
        with self._lock:
            self._units.append(_Unit(next(self._numbers), gradients, timed, then))
            self._under_way.append(self._thread.submit(self._step_next))

    def rest(self) -> list[Group]:
        """Return the groups for the optimizer's own step, without the parameters that were stepped in backward."""
        if self.stepped and self._options != _options(self._optimizer):
            raise ExactnessError(
                "the optimizer's options were changed in backward, when it had stepped some parameters with what they "
                "were; set optimizer_overlap=False, or change them before"
            )
        groups = self._optimizer.param_groups
        return [{**group, "params": [p for p in group["params"] if id(p) not in self.stepped]} for group in groups]

    def finish(self) -> None:
        """Wait until each submitted unit is stepped (Rule 3), or leave those not reached to the step (Rule 4)."""
        if HostThread.is_current():
            return
        if self._units and self._may_leave():
            self._leave()
        for work in self._under_way:
            work.exception()  # waits for each before the first error is raised
        with self._lock:
            under_way, self._under_way = self._under_way, []
            self._leaving = False
        for work in under_way:
            work.result()

    def _may_step(self, state: dict[Any, Any], param: Tensor) -> bool:
        """Whether the thread may step this parameter: it is the optimizer's, with state of its own (Rules 5 and 8)."""
        groups = [self._optimizer.param_groups[number] for number in self._groups_of.get(id(param), [])]
        if state.get(param):
            return bool(groups) and not parameter_state_is_shared(state, param)
        return bool(groups) and all(keeps_no_state(self._optimizer, group) for group in groups)

    def _leave(self) -> None:
        """Leave the remaining units to the step (Rule 4). The thread still ends the part it is stepping."""
        for unit in self._units[-1:]:
            unit.gradients.wait()
        with self._lock:
            self._leaving = True
        with without_dispatch():
            while (oldest := self._take(lambda _: 0)) is not None:
                oldest.land()
        with self._lock:
            if not self._units:  # otherwise some were submitted in the meantime
                self._under_way = [work for work in self._under_way if not work.cancel()]

    def _take(self, which: Callable[[list[_Unit]], int]) -> _Unit | None:
        with self._lock:
            return self._units.pop(which(self._units)) if self._units else None

    def _step_next(self) -> None:
        """Step parts of the newest unit that has arrived, until one unit is complete or the rest is left (Rule 4)."""
        while not self._failed and (unit := self._take(_newest_that_arrived)) is not None:
            self._failed = True
            self._step_part(unit)
            self._failed = False
            with self._lock:
                if unit.done or self._leaving:
                    return
                self._units.insert(sum(other.number < unit.number for other in self._units), unit)

    def _step_part(self, unit: _Unit) -> None:
        with without_dispatch():  # host parameters, without stand-ins or waits (weight_reads.py)
            unit.land()
            state: dict[Any, Any] = vars(self._optimizer).get("state", self.state)
            params = [param for param in unit.next_part() if self._may_step(state, param)]
            with unit.timed():
                self._step_params(params, state)
                if unit.done:
                    unit.then()
        self.stepped.update(map(id, params))

    def _step_params(self, params: list[Tensor], state: dict[Any, Any]) -> None:
        """Step these parameters by their plain data: reads of a host parameter would wait for this thread (Rule 3)."""
        groups: list[Group] = [{**group, "params": []} for group in self._optimizer.param_groups]
        own: dict[Any, Any] = {}
        for param in params:
            data = data_of(param)
            own[data] = state.get(param, {})
            for number in self._groups_of[id(param)]:
                groups[number]["params"].append(data)
        self._step.step_groups(self._optimizer, groups, own)


def data_of(parameter: Tensor) -> Tensor:
    """Make a plain tensor over a host parameter's bytes, with its version counter and its gradient."""
    if type(parameter) is not HostParameter:
        return parameter  # the optimizer may depend on a class of the user's own
    data = parameter.detach()
    data.grad = true_grad(parameter)
    return data


def _options(optimizer: Optimizer) -> list[Any]:
    """Return a value that differs once an option of any group was changed."""
    return [
        {key: list(map(id, value)) if key == "params" else _mark(value) for key, value in group.items()}
        for group in optimizer.param_groups
    ]


def _mark(option: Any) -> Any:
    if isinstance(option, Tensor):
        return id(option), option._version
    return tuple(map(_mark, option)) if isinstance(option, (tuple, list)) else option


def _newest_that_arrived(units: list[_Unit]) -> int:
    """Return the index of the newest unit whose gradients arrived (Rule 4), or of the oldest if none did."""
    return next((index for index in reversed(range(len(units))) if units[index].has_arrived()), 0)
