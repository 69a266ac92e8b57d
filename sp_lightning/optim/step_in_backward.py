"""``optimizer_overlap``: a unit is stepped on the host while backward of the units below it still runs.

1. What is stepped ahead is final: its gradients came out of the outermost backward of the last micro-batch, and nothing
   between that backward and the step may look at gradients or parameters (the strategy knows).
2. One thread does it: it waits for a unit's gradients, accumulates them into ``.grad`` and steps the unit's parameters
   with the optimizer's own code and state. ``optimizer.step()`` then steps the rest.
3. Who asks for a gradient waits for the thread. So does the step, and an error of the thread is raised there.
4. Where the step may run on (deferred_step.py), nobody waits for what the thread did not come to by the time at which
   the last gradients arrive: they are accumulated, and the rest is left to the step. Of what has arrived the thread
   takes the newest, also between the parts of a unit: what is left is what the next forward needs last.
5. It makes no state: what it would be made like (default types, modes) is the caller's, and so is its order. A
   parameter that has none yet is left to the step.
6. What a thread has of its own and results depend on is the caller's: whether denormal numbers are flushed to zero, and
   how many threads share an operator, which decides where its vectorized loops end.
7. Where the CPU computes with several threads, nothing is done beside anything else: threads of both sides would wait
   for each other's on cores that one side can fill alone.
8. The optimizer's state is withheld from the beginning of backward to the step (state_guard.py, and backward_pass.py,
   Rule 5). What is kept of it is not stepped ahead. Another thread that asks for it waits for what is under way.
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

from ..core.simulation import PARTS
from ..errors import ExactnessError
from ..memory.parameters import HostParameter, true_grad
from .pieces import Group, ShadowStep, keeps_no_state
from .state_guard import GuardedState, parameter_state_is_shared, state_is_shared

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
        """Does this after all that was submitted before, as the caller would (Rule 6)."""
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


class Arriving(Protocol):
    """Gradients of a unit on their way to the host."""

    def has_arrived(self) -> bool:
        """Whether they are there."""

    def wait(self) -> None:
        """They are."""

    def land(self) -> Sequence[Tensor]:
        """Waits for them, accumulates them, and tells whose they were."""


class _Unit:
    """What is stepped of one unit, part by part (Rule 4)."""

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
        self._landed = False
        self._left: list[Tensor] = []  # of its parameters, to be stepped
        self._part = 0  # elements of a part, at least

    def has_arrived(self) -> bool:
        """Whether it can be stepped now."""
        return self._landed or self.gradients.has_arrived()

    def land(self) -> None:
        """Its gradients are there. Safe twice."""
        if not self._landed:
            self._landed = True
            self._left = list(self.gradients.land())
            self._part = sum(map(Tensor.numel, self._left)) // PARTS

    def next_part(self) -> list[Tensor]:
        """The parameters to be stepped next."""
        part: list[Tensor] = []
        elements = 0
        while self._left and elements < max(self._part, 1):
            part.append(self._left.pop(0))
            elements += part[-1].numel()
        return part

    @property
    def done(self) -> bool:
        """Whether no parameter is left."""
        return self._landed and not self._left


class StepInBackward:
    """One step of an optimizer, of which parameters whose gradients arrive are stepped at once.

    ``may_leave`` tells whether the step may run on: what the thread does not come to is left (Rule 4).
    """

    def __init__(
        self, optimizer: Optimizer, step: ShadowStep, thread: HostThread, may_leave: Callable[[], bool] = lambda: False
    ) -> None:
        self._optimizer = optimizer
        self._step = step
        self._thread = thread
        self._may_leave = may_leave
        self._groups_of: dict[int, list[int]] = {}  # one that is listed twice is stepped twice
        self._under_way: list[Future[None]] = []
        self._units: list[_Unit] = []  # that are not stepped and not being stepped, oldest first
        self._numbers = itertools.count()  # of units
        self._leaving = False  # what is left of a unit is not taken up again
        self._lock = threading.Lock()  # of all these
        self._options: Any = None  # of its groups, when the first unit was submitted
        self._failed = False
        self.stepped: set[int] = set()  # ids of parameters
        self.state: Any = None  # the optimizer's, where it is withheld
        self.given_up = ""  # why nothing is stepped ahead
        self.withheld: GuardedState | None = None

    def withhold(self, finish: Callable[[], None]) -> bool:
        """Backward begins: asking for the state calls this until it is given back. False: it is kept, and nothing may
        be stepped ahead (Rule 8)."""
        if state_is_shared(self._optimizer):
            self.given_up = "somebody else refers to the optimizer's state"
            return False
        self.withheld = GuardedState(self._optimizer, finish)
        self.state = self.withheld.state
        return True

    def give_back(self) -> None:
        """The state can be asked for again. Safe twice."""
        if self.withheld is not None:
            self.withheld.give_back()
            self.withheld = self.state = None

    @property
    def is_idle(self) -> bool:
        """Whether nothing that was submitted is still to be stepped, or waited for."""
        return not self._under_way and not self._units

    @property
    def has_begun(self) -> bool:
        """Whether anything was submitted."""
        return self._options is not None

    def submit(
        self, gradients: Arriving, timed: Callable[[], AbstractContextManager[None]], then: Callable[[], None]
    ) -> None:
        """Gradients are under way whose parameters can be stepped when they arrive, and ``then`` has to do with what
        they are by then; both within what ``timed`` gives."""
        if self._options is None:
            self._options = _options(self._optimizer)
            for number, group in enumerate(self._optimizer.param_groups):
                for param in group["params"]:
                    self._groups_of.setdefault(id(param), []).append(number)
        with self._lock:
            self._units.append(_Unit(next(self._numbers), gradients, timed, then))
            self._under_way.append(self._thread.submit(self._step_next))

    def rest(self) -> list[Group]:
        """What the optimizer's own step has to do: all but what was stepped ahead, before backward returned."""
        if self.stepped and self._options != _options(self._optimizer):
            raise ExactnessError(
                "the optimizer's options were changed in backward, when it had stepped some parameters with what they "
                "were; set optimizer_overlap=False, or change them before"
            )
        groups = self._optimizer.param_groups
        return [{**group, "params": [p for p in group["params"] if id(p) not in self.stepped]} for group in groups]

    def finish(self) -> None:
        """All that was submitted is stepped (Rule 3), or left (Rule 4)."""
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
        """Whether this parameter is the optimizer's, and what is its own there is (Rules 5 and 8)."""
        groups = [self._optimizer.param_groups[number] for number in self._groups_of.get(id(param), [])]
        if state.get(param):
            return bool(groups) and not parameter_state_is_shared(state, param)
        return bool(groups) and all(keeps_no_state(self._optimizer, group) for group in groups)

    def _leave(self) -> None:
        """Rule 4. The thread goes on with the newest meanwhile, and ends with a part of it."""
        for unit in self._units[-1:]:
            unit.gradients.wait()
        with self._lock:
            self._leaving = True
        with torch._C.DisableTorchFunctionSubclass():
            while (oldest := self._take(lambda _: 0)) is not None:
                oldest.land()
        with self._lock:
            if not self._units:  # else some were submitted meanwhile
                self._under_way = [work for work in self._under_way if not work.cancel()]

    def _take(self, which: Callable[[list[_Unit]], int]) -> _Unit | None:
        with self._lock:
            return self._units.pop(which(self._units)) if self._units else None

    def _step_next(self) -> None:
        """Steps what is the next unit to be done, and parts of others."""
        while not self._failed and (unit := self._take(_newest_that_arrived)) is not None:
            self._failed = True
            self._step_part(unit)
            self._failed = False
            with self._lock:
                if unit.done or self._leaving:
                    return
                self._units.insert(sum(other.number < unit.number for other in self._units), unit)

    def _step_part(self, unit: _Unit) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # host parameters are meant (weight_reads.py)
            unit.land()
            state: dict[Any, Any] = vars(self._optimizer).get("state", self.state)
            params = [param for param in unit.next_part() if self._may_step(state, param)]
            with unit.timed():
                self._step_params(params, state)
                if unit.done:
                    unit.then()
        self.stepped.update(map(id, params))

    def _step_params(self, params: list[Tensor], state: dict[Any, Any]) -> None:
        """Step these parameters by way of their data: nothing but this thread may be told of it (Rule 3)."""
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
        return parameter  # an optimizer may look at a class of the user's own
    data = parameter.detach()
    data.grad = true_grad(parameter)
    return data


def _options(optimizer: Optimizer) -> list[Any]:
    """What changes when somebody changes an option of a group."""
    return [
        {key: list(map(id, value)) if key == "params" else _mark(value) for key, value in group.items()}
        for group in optimizer.param_groups
    ]


def _mark(option: Any) -> Any:
    if isinstance(option, Tensor):
        return id(option), option._version
    return tuple(map(_mark, option)) if isinstance(option, (tuple, list)) else option


def _newest_that_arrived(units: list[_Unit]) -> int:
    """Rule 4; the oldest where none has."""
    return next((index for index in reversed(range(len(units))) if units[index].has_arrived()), 0)
