"""A deferred step: the optimizer thread runs it, unit by unit, while the next forward begins. If the step began beside
backward (step_in_backward.py), the deferred step is what was left of it when backward ended.

1. A step is deferred as a whole or not at all. It is deferred only if nothing but the parameters themselves and
   ``optimizer.state`` leads to what it writes: if other code refers to a weight's bytes, to a gradient or to state, the
   step is not deferred.
2. What a deferred step writes is hidden until it is done. A parameter's data is *vacant*: reading it from Python waits
   (parameters.py, weight_reads.py), and any other access to the bytes raises an error and never sees unfinished ones.
   The optimizer's state is guarded: reading it waits for the step, which gives it back (state_guard.py).
3. What a deferred step reads belongs to it alone: the gradients, which nothing else refers to and which are reached
   only by ``.grad``, and copies of the groups' options as they were, since schedulers write to the groups.
4. A deferred step never creates state: new state depends on the caller's default types and modes.
5. Units are stepped in the order in which the next forward needs them. A unit's fill waits for that unit's step, and
   for the conversion of its wire copies (unit_store.py, Rule 7).
6. A wait clears its marks only after the waiting: if it is interrupted, the next wait takes it up again. An error of
   the thread is raised once, in the first wait that finds it; how many parameters were stepped by then is logged.
7. At most one step of a module is deferred at a time: the next one begins when it is done. Time spent waiting for it is
   counted as a stall.
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
from ..compat.storages import forbid_access, storage_id
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
    "{name} is being stepped by the optimizer and was read in a way that cannot be seen; "
    "set optimizer_overlap=False, or read it by its own methods or by torch's functions"
)
_all: weakref.WeakSet[DeferredStep] = weakref.WeakSet()


class CannotDefer(Exception):
    """Raised when a step cannot be deferred; the message is the reason for the log, or empty if none is needed."""


class UnavailableData:
    """The data and gradient of a parameter that has none during its deferred step (Rule 2)."""

    def __init__(self, parameter: nn.Parameter, name: str) -> None:
        self.parameter = parameter
        self.data = parameter.detach()  # shares its version counter
        self._placeholder = _placeholder(parameter, name)
        self.grad: Tensor | None = true_grad(parameter)

    def begin(self) -> None:
        """Take the parameter's data away, for the optimizer thread alone."""
        self.data.grad = self.grad
        set_true_data(self.parameter, self._placeholder)

    def end(self) -> None:
        """Give the parameter its data again. Safe twice."""
        set_true_data(self.parameter, self.data)
        self.data.grad = self.grad = None


class DeferredUnit:
    """One unit's part of a deferred step."""

    def __init__(self) -> None:
        self.count = 0  # parameters to step
        self._unavailable: list[UnavailableData] = []
        self.data: dict[int, Tensor] = {}  # of parameters, by index in their unit
        self.groups: dict[int, Group] = {}  # by number
        self.state: dict[Tensor, State] = {}
        self.work: Future[None] | None = None
        self.stepped = False

    def add(self, number: int, options: Group, index: int, unavailable: UnavailableData, state: State) -> None:
        """Add a parameter of the group of this number."""
        self.data[index] = unavailable.data
        self.groups.setdefault(number, {**options, "params": []})["params"].append(unavailable.data)
        self.state[unavailable.data] = state
        self._unavailable.append(unavailable)
        self.count += 1

    @property
    def is_stepping(self) -> bool:
        """Whether the unit's step is still to come."""
        return self.work is not None and not self.work.done()

    @property
    def is_vacant(self) -> bool:
        """Whether the parameters have no data, or were not yet given it again after their step."""
        return bool(self._unavailable)

    def vacate(self) -> None:
        """Take the parameters' data away, until ``occupy``."""
        for unavailable in self._unavailable:
            unavailable.begin()

    def occupy(self) -> None:
        """Give the parameters their data again. Safe twice, also after an interruption."""
        for unavailable in self._unavailable:
            unavailable.end()
        self.groups, self.state, self.data = {}, {}, {}
        self._unavailable = []

    def wait(self) -> BaseException | None:
        """Wait until the unit is stepped, or is not going to be; return the error that its own step raised."""
        return None if self.work is None else self.work.exception()


class DeferredStep:
    """A deferred step of an optimizer; ``stepped`` parameters were stepped in backward already."""

    def __init__(self, optimizer: Optimizer, step: ShadowStep, thread: HostThread, stepped: int = 0) -> None:
        self._optimizer = optimizer
        self._step = step
        self._thread = thread
        self._stepped = stepped
        self._shadow: Any = None
        self._units: dict[UnitStore, DeferredUnit] = {}
        self.params: set[int] = set()  # ids of those whose step is deferred
        self._guarded: GuardedState | None = None
        self._failed = False
        self._done = False
        self._ended: Callable[[], None] = lambda: None
        self._lock = threading.RLock()  # guards the waits of several threads

    def prepare(self, groups: Sequence[Group], order: Iterable[UnitStore], owner: Owner, is_own: IsOwn) -> list[Group]:
        """Collect the streamed parameters, in this order of units; return the groups to be stepped at once.

        Changes no parameter and no state. Raises CannotDefer where Rule 1 or 4 forbids it. ``is_own`` tells whether
        only the parameter refers to its gradient.
        """
        if state_is_shared(self._optimizer):
            raise CannotDefer("somebody else refers to the optimizer's state")
        units = {store: DeferredUnit() for store in order}
        rest: list[Group] = []
        for number, group in enumerate(groups):
            if group.get("differentiable"):
                raise CannotDefer("the optimizer is differentiable")
            options = {key: _copied(value) for key, value in group.items() if key != "params"}
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
        """Start the step; return the state for parameters stepped at once. ``ended`` is called when all is done."""
        self._ended = ended
        shadow = self._shadow = object.__new__(type(self._optimizer))
        shadow.__dict__.update(self._optimizer.__dict__)
        _mind_forks()
        _all.add(self)
        self._guarded = GuardedState(self._optimizer, self.finish)
        for store, unit in self._units.items():
            timed = listener.work("optimizer", store.unit.name, "step")
            unit.vacate()
            unit.work = self._thread.submit(functools.partial(self._run, store, unit, timed))
        return self._guarded.state

    @property
    def is_running(self) -> bool:
        """Whether any unit's step is still to come."""
        return any(unit.is_stepping for unit in self._units.values())

    @property
    def vacant(self) -> set[UnitStore]:
        """The units whose parameters have no data now."""
        return {store for store, unit in self._units.items() if unit.is_vacant}

    def is_stepping(self, store: UnitStore) -> bool:
        """Whether this unit's step is still to come."""
        unit = self._units.get(store)
        return unit is not None and unit.is_stepping

    def wait(self, store: UnitStore) -> None:
        """Wait for this unit's step (Rule 5)."""
        unit = self._units.get(store)
        if unit is None or HostThread.is_current():
            return
        with self._lock:
            unit.wait()
            if not unit.stepped:
                self.finish()
            unit.occupy()

    def finish(self) -> None:
        """Wait for the whole step, make everything readable again, and raise the thread's error (Rule 6)."""
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
            if self._guarded is not None:
                self._guarded.give_back()
            self._units, self._shadow = {}, None
            self._ended()
            self._done = True
            if error is not None:
                raise error

    def quiesce(self) -> None:
        """Wait until the thread works on none of the units any more."""
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
    """The deferred step that is pending, if any: at most one at a time (Rule 7)."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._step: DeferredStep | None = None

    def begin(self, step: DeferredStep) -> dict[Any, Any]:
        """Begin a deferred step; return the state for parameters stepped at once."""
        self._counters.held_steps += 1
        self._step = step
        weight_reads.hold(self.finish)
        state: dict[Any, Any] = step.begin(self._counters.listener, self._ended)
        return state

    @property
    def is_under_way(self) -> bool:
        """Whether a deferred step is pending."""
        return self._step is not None

    @property
    def params(self) -> Collection[int]:
        """The ids of the parameters in the pending step."""
        return self._step.params if self._step is not None else ()

    @property
    def vacant(self) -> Collection[UnitStore]:
        """The units whose parameters have no data now."""
        return self._step.vacant if self._step is not None else ()

    def is_stepping(self, store: UnitStore) -> bool:
        """Whether this unit's step is still to come."""
        return self._step is not None and self._step.is_stepping(store)

    def wait(self, store: UnitStore) -> None:
        """Wait for this unit's step, if one is pending; waiting counts as a stall (Rule 7)."""
        step = self._step
        if step is not None:
            stalled = self._counters.stall("optimizer") if step.is_stepping(store) else contextlib.nullcontext()
            with stalled, quietly():
                step.wait(store)

    def finish(self) -> None:
        """Wait for the pending step as a whole, if there is one; waiting counts as a stall (Rule 7)."""
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
    """Return a parameter's state; raise CannotDefer if other code could read or write it."""
    if keeps_no_state(optimizer, group):
        return {}
    state = optimizer.state.get(param)
    if not state or (isinstance(optimizer, SGD) and state.get("momentum_buffer") is None):
        raise CannotDefer  # Rule 4: the first step creates it, after which it is there
    if not all(type(value) is Tensor and value.is_cpu for value in state.values()):
        raise CannotDefer(f"the state of {name} is not of tensors on the host")
    del state  # this reference would be counted
    if parameter_state_is_shared(optimizer.state, param):
        raise CannotDefer(f"somebody else refers to the optimizer's state of {name}")
    return optimizer.state[param]  # type: ignore[no-any-return]


# ---- Rule 2


def _placeholder(parameter: nn.Parameter, name: str) -> Tensor:
    """Make a tensor like the parameter's data but without bytes: any access to them raises an error."""
    data = true_data(parameter)
    storage = torch.UntypedStorage(data.untyped_storage().nbytes())  # type: ignore[no-untyped-call]
    tensor = torch.empty(0, dtype=data.dtype, device="cpu").set_(storage, 0, data.shape, data.stride())
    storage.resize_(0)
    forbid_access(storage_id(storage), MESSAGE.format(name=name))
    return tensor


# ---- Rule 3


def _copied(value: Any) -> Any:
    """Copy an option of a group: schedulers may write to the original."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) in (tuple, list):
        return type(value)(_copied(item) for item in value)
    return value


# ---- A forked child has no optimizer thread: no step may be half done when a process forks.


@functools.cache
def _mind_forks() -> None:
    os.register_at_fork(before=_quiesce_all)


def _quiesce_all() -> None:
    for step in list(_all):
        step.quiesce()
