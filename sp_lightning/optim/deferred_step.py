"""A step that is held: it runs on the host thread, unit by unit, while the next forward begins. Of a step that began
beside backward (step_in_backward.py) it is what was left at backward's end.

1. It is held as a whole, or not at all, and only where nothing but the parameters themselves and ``optimizer.state``
   leads to what it writes: where somebody else refers to a weight's bytes, to a gradient or to state, it is not.
2. What it writes is not there until it is done. A parameter's data is *vacant*: whoever looks by Python's ways waits
   (parameters.py, weight_reads.py), and whatever else looks at the bytes is told so by an error, never given unfinished
   ones. The optimizer's state is withheld: asking for it waits, and puts it back (state_guard.py).
3. What it reads is its own: the gradients, which nobody else refers to and which are asked for by ``.grad`` only, and
   copies of the groups' options as they were, since schedulers write to the groups.
4. It makes no state, as what it would be made like (default types, modes) is the caller's.
5. Units are stepped in the order in which the next forward needs them. A unit's way up waits for that unit's step, and
   for the cast of what does not travel as it is (unit_store.py, Rule 7).
6. Who waits waits first and clears marks afterwards: a wait that was interrupted is taken up again by the next one.
   An error of the thread is raised, once, by whoever waits first; what was stepped by then is said.
7. At most one step of a module is deferred at a time: the next one begins when it is done. Time spent in waiting for it
   is counted as a stall.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from ..autograd import weight_reads
from ..compat.references import is_referenced_elsewhere, shares_storage
from ..core.telemetry import Counters, StepListener
from ..memory.parameters import HostParameter, quietly, set_true_data, true_data, true_dtype, true_grad
from ..memory.unit_store import UnitStore
from .pieces import Group, ShadowStep, State, keeps_no_state
from .state_guard import GuardedState, parameter_state_is_shared, state_is_shared
from .step_in_backward import HostThread

log = logging.getLogger(__name__)
Owner = Callable[[Tensor], UnitStore | None]
IsOwn = Callable[[UnitStore, int], bool]
MESSAGE = (
    "{name} is being stepped by the optimizer and was read in a way that can not be seen; "
    "set optimizer_overlap=False, or read it by its own methods or by torch's functions"
)
_all: weakref.WeakSet[DeferredStep] = weakref.WeakSet()


class CannotDefer(Exception):
    """Why a step is not held; empty where that is nothing to tell."""


class UnavailableData:
    """A parameter whose data is not there for the time of a step (Rule 2)."""

    def __init__(self, parameter: nn.Parameter, name: str) -> None:
        self.parameter = parameter
        self.data = parameter.detach()  # its version counter, too
        self._placeholder = _placeholder(parameter, name)
        self.grad: Tensor | None = true_grad(parameter)

    def begin(self) -> None:
        self.data.grad = self.grad
        set_true_data(self.parameter, self._placeholder)

    def end(self) -> None:
        """Safe twice."""
        set_true_data(self.parameter, self.data)
        self.data.grad = self.grad = None


class DeferredUnit:
    """What is stepped of one unit."""

    def __init__(self) -> None:
        self.count = 0  # of its parameters
        self._vacancies: list[UnavailableData] = []
        self.data: dict[int, Tensor] = {}  # of parameters, by index in their unit
        self.groups: dict[int, Group] = {}  # by number
        self.state: dict[Tensor, State] = {}
        self.work: Future[None] | None = None
        self.stepped = False

    def add(self, number: int, options: Group, index: int, vacancy: UnavailableData, state: State) -> None:
        """A parameter of the group of this number."""
        self.data[index] = vacancy.data
        self.groups.setdefault(number, {**options, "params": []})["params"].append(vacancy.data)
        self.state[vacancy.data] = state
        self._vacancies.append(vacancy)
        self.count += 1

    @property
    def is_stepping(self) -> bool:
        """Whether its step is still to come."""
        return self.work is not None and not self.work.done()

    @property
    def is_vacant(self) -> bool:
        """Whether its parameters have no data, or had none until just now."""
        return bool(self._vacancies)

    def vacate(self) -> None:
        """Parameters have no data until they are occupied again."""
        for vacancy in self._vacancies:
            vacancy.begin()

    def occupy(self) -> None:
        """Safe twice, also after an interruption."""
        for vacancy in self._vacancies:
            vacancy.end()
        self.groups, self.state, self.data = {}, {}, {}
        self._vacancies = []

    def wait(self) -> BaseException | None:
        """Until it is stepped, or is not going to be; gives the error because of which."""
        return None if self.work is None else self.work.exception()


class DeferredStep:
    """One step of an optimizer, on its way; of some parameters it is done already."""

    def __init__(self, optimizer: Optimizer, step: ShadowStep, thread: HostThread, stepped: int = 0) -> None:
        self._optimizer = optimizer
        self._step = step
        self._thread = thread
        self._stepped = stepped
        self._shadow: Any = None
        self._units: dict[UnitStore, DeferredUnit] = {}
        self.params: set[int] = set()  # ids of those that are held
        self._withheld: GuardedState | None = None
        self._failed = False
        self._done = False
        self._ended: Callable[[], None] = lambda: None
        self._lock = threading.RLock()  # of those who wait

    def prepare(self, groups: Sequence[Group], order: Iterable[UnitStore], owner: Owner, is_own: IsOwn) -> list[Group]:
        """Finds what of these groups can be held, in this order of units; gives what of them has to be stepped at once.

        Changes nothing. Raises CannotDefer where Rule 1 or 4 forbids it. ``is_own`` tells whether nobody but the
        parameter refers to its gradient.
        """
        if state_is_shared(self._optimizer):
            raise CannotDefer("somebody else refers to the optimizer's state")
        units = {store: DeferredUnit() for store in order}
        rest: list[Group] = []
        for number, group in enumerate(groups):
            if group.get("differentiable"):
                raise CannotDefer("the optimizer is differentiable")
            options = {key: _as_it_is(value) for key, value in group.items() if key != "params"}
            rest.append({**group, "params": [param for param in group["params"] if owner(param) is None]})
            for param in group["params"]:
                store = owner(param)
                if store is not None and true_grad(param) is not None:
                    index = store.index_of[id(param)]
                    _check_parameter(param, store, index)
                    if not is_own(store, index):
                        raise CannotDefer(f"somebody else refers to the gradient of {store.names[index]}")
                    state = _state_of(self._optimizer, group, param, store.names[index])
                    units[store].add(number, options, index, UnavailableData(param, store.names[index]), state)
                    self.params.add(id(param))
        self._units = {store: unit for store, unit in units.items() if unit.count}
        return rest

    def begin(self, listener: StepListener, ended: Callable[[], None]) -> Any:
        """Starts it; gives the state for what is stepped at once. ``ended`` is called when all of it is done."""
        self._ended = ended
        shadow = self._shadow = object.__new__(type(self._optimizer))
        shadow.__dict__.update(self._optimizer.__dict__)
        _mind_forks()
        _all.add(self)
        self._withheld = GuardedState(self._optimizer, self.finish)
        for store, unit in self._units.items():
            timed = listener.work("optimizer", store.unit.name, "step")
            unit.vacate()
            unit.work = self._thread.submit(functools.partial(self._run, store, unit, timed))
        return self._withheld.state

    @property
    def is_running(self) -> bool:
        """Whether any unit's step is still to come."""
        return any(unit.is_stepping for unit in self._units.values())

    @property
    def vacant(self) -> set[UnitStore]:
        """Whose parameters have no data now."""
        return {store for store, unit in self._units.items() if unit.is_vacant}

    def is_stepping(self, store: UnitStore) -> bool:
        """Whether this unit's step is still to come."""
        unit = self._units.get(store)
        return unit is not None and unit.is_stepping

    def wait(self, store: UnitStore) -> None:
        """This unit is stepped (Rule 5)."""
        unit = self._units.get(store)
        if unit is None or HostThread.is_current():
            return
        with self._lock:
            unit.wait()
            if not unit.stepped:
                self.finish()
            unit.occupy()

    def finish(self) -> None:
        """All of it is done (Rule 6)."""
        if HostThread.is_current():
            return
        with self._lock:
            if self._done:
                return
            errors = [unit.wait() for unit in self._units.values()]
            error = next((error for error in errors if error is not None), None)
            if not all(unit.stepped for unit in self._units.values()):
                self._say_partly_stepped()
            for unit in self._units.values():
                unit.occupy()
            if self._withheld is not None:
                self._withheld.give_back()
            self._units, self._shadow = {}, None
            self._ended()
            self._done = True
            if error is not None:
                raise error

    def quiesce(self) -> None:
        """The thread has nothing to do for it any more."""
        for unit in list(self._units.values()):
            unit.wait()

    def _run(self, store: UnitStore, unit: DeferredUnit, timed: AbstractContextManager[None]) -> None:
        if self._failed:
            return
        with timed:
            try:
                self._step.step_groups(self._shadow, list(unit.groups.values()), unit.state)
            except BaseException:
                self._failed = True
                raise
            unit.stepped = True
            store.convert(unit.data)

    def _say_partly_stepped(self) -> None:
        stepped = self._stepped + sum(unit.count for unit in self._units.values() if unit.stepped)
        count = self._stepped + sum(unit.count for unit in self._units.values())
        log.error(
            "superpipeline: the optimizer's step failed when it had stepped %d of %d parameters; the weights are not "
            "those of one step",
            stepped,
            count,
        )


class CurrentStep:
    """From the beginning of a step to its end, and then the next."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._step: DeferredStep | None = None

    def begin(self, step: DeferredStep) -> dict[Any, Any]:
        """This one is under way from here on; gives the state for what is stepped at once."""
        self._counters.held_steps += 1
        self._step = step
        weight_reads.hold(self.finish)
        state: dict[Any, Any] = step.begin(self._counters.listener, self._ended)
        return state

    @property
    def is_under_way(self) -> bool:
        """Whether there is one."""
        return self._step is not None

    @property
    def params(self) -> Collection[int]:
        """The ids of its parameters."""
        return self._step.params if self._step is not None else ()

    @property
    def vacant(self) -> Collection[UnitStore]:
        """Whose parameters have no data now."""
        return self._step.vacant if self._step is not None else ()

    def is_stepping(self, store: UnitStore) -> bool:
        """Whether it is still to come to this unit."""
        return self._step is not None and self._step.is_stepping(store)

    def wait(self, store: UnitStore) -> None:
        """It is done with this unit."""
        step = self._step
        if step is not None:
            stalled = self._counters.stall("optimizer") if step.is_stepping(store) else contextlib.nullcontext()
            with stalled, quietly():
                step.wait(store)

    def finish(self) -> None:
        """There is none any more."""
        step = self._step
        if step is not None:
            stalled = self._counters.stall("optimizer") if step.is_running else contextlib.nullcontext()
            with stalled, quietly():
                step.finish()

    def _ended(self) -> None:
        self._step = None
        weight_reads.release(self.finish)


# ---- Rule 1


def _check_parameter(param: nn.Parameter, store: UnitStore, index: int) -> None:
    grad, name = true_grad(param), store.names[index]
    assert grad is not None
    if type(param) is not HostParameter:
        raise CannotDefer(f"{name} is of a class of its own, {type(param).__name__}")
    if shares_storage(param) or is_referenced_elsewhere(param) or not store.in_place(index):
        raise CannotDefer(f"somebody else refers to the bytes of {name}")
    if type(grad) is not Tensor or grad.layout is not torch.strided or grad.dtype is not true_dtype(param):
        raise CannotDefer(f"the gradient of {name} is not as the weight is")


def _state_of(optimizer: Optimizer, group: Group, param: nn.Parameter, name: str) -> State:
    """A parameter's state, which nobody else may write or look at."""
    if keeps_no_state(optimizer, group):
        return {}
    state = optimizer.state.get(param)
    if not state or (isinstance(optimizer, SGD) and state.get("momentum_buffer") is None):
        raise CannotDefer  # Rule 4: it has some after its first step
    if not all(type(value) is Tensor and value.is_cpu for value in state.values()):
        raise CannotDefer(f"the state of {name} is not of tensors on the host")
    del state  # references are counted
    if parameter_state_is_shared(optimizer.state, param):
        raise CannotDefer(f"somebody else refers to the optimizer's state of {name}")
    return optimizer.state[param]  # type: ignore[no-any-return]


# ---- Rule 2


def _placeholder(parameter: nn.Parameter, name: str) -> Tensor:
    """A tensor that is as the parameter's data is, but for its bytes: they can not be reached."""
    data = true_data(parameter)
    storage = torch.UntypedStorage(data.untyped_storage().nbytes())  # type: ignore[no-untyped-call]
    tensor = torch.empty(0, dtype=data.dtype, device="cpu").set_(storage, 0, data.shape, data.stride())
    storage.resize_(0)
    torch._C._set_storage_data_ptr_access_error_msg(storage._cdata, MESSAGE.format(name=name))
    return tensor


# ---- Rule 3


def _as_it_is(value: Any) -> Any:
    """A copy of an option, which schedulers may write to."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) in (tuple, list):
        return type(value)(_as_it_is(item) for item in value)
    return value


# ---- A process that forks has no thread in its child.


@functools.cache
def _mind_forks() -> None:
    os.register_at_fork(before=_quiesce_all)


def _quiesce_all() -> None:
    for step in list(_all):
        step.quiesce()
