"""A pending step: the optimizer thread steps an optimizer's parameters on the host, unit by unit, beside other work.

1. A step has two orders. *Beside backward* units are stepped last to first, each once its gradients are final: they
   came out of the outermost backward of the last micro-batch, and no code between that backward and the step may read
   gradients or parameters (the strategy makes sure of it). *Beside the next forward* units are stepped in the order in
   which it needs them: the step is *deferred*. A step is in the first order, in the second, or in the first one and
   then, with what is left, in the second.
2. One thread, the optimizer thread, does both, with the optimizer's own code and state. Settings of a thread that
   change results are taken over from the one that calls ``optimizer.step()``, which steps all that is left: whether
   denormal numbers are flushed to zero, and how many threads share an operator, which decides where its vectorized
   loops end. Beside backward they are those that this thread had in front of it: autograd's thread of the device, which
   brings the gradients, has others. A change that it makes from there to the step is an error.
3. Beside backward the thread chooses the newest unit whose gradients have arrived, and again after each part of a unit.
   The end of backward waits for the thread. If the rest may be deferred, it waits only for the part that the thread is
   at: other units are left, with their gradients accumulated. So those are left that the next forward needs last.
4. The thread never creates optimizer state: new state depends on the caller's default types and modes, and so does its
   order. Beside backward a parameter without state is left to ``optimizer.step()``, with those that it steps in another
   way beside such a one; a step that creates state is not deferred.
5. What code outside could see half stepped is not stepped beside other work. Beside backward a parameter whose state
   other code refers to is left. What is left is deferred as a whole or not at all, and only if nothing but the
   parameters themselves and ``optimizer.state`` leads to what the thread writes: other code must not refer to the bytes
   of a weight, to a gradient or to state.
6. What is being stepped is hidden. The optimizer's state is guarded (state_guard.py) from the beginning of backward to
   the step, and while the step is deferred: a read waits, or is an error (step_owner.py, Rule 4). A parameter's data
   is *vacant* while its step is deferred: reading it from Python waits (watched_parameters.py, weight_reads.py), and
   any other access to the bytes raises an error and never sees unfinished ones. Reading a gradient waits in either
   order; taking it away waits in the first one.
7. What a deferred step reads belongs to it alone: the gradients, which are reached only by ``.grad``, the optimizer's
   attributes as they were, and copies of its groups' options: schedulers and scalers write to the originals. Gradients
   that the step needs wide (pieces.py, Rule 7) are widened before: the thread would bring back those taken away.
8. A unit's fill waits for that unit's deferred step, and for the conversion of its wire copies (host_copy.py, Rule 5),
   and so does a read of one of its weights. Gradients, state and the next step wait for the whole step. The thread
   itself waits for no step, no fill and no read that is watched. A wait clears its marks only after the waiting: if it
   is interrupted, the next wait takes it up again. An error of the thread is raised once, in the first wait that finds
   it; then nothing more is stepped, and the step is torn (torn_step.py). Time spent waiting counts as a stall.
9. Where the CPU computes with several threads, nothing is stepped beside other work: threads of both sides would wait
   for each other on cores that one side can fill alone.
10. Where several ranks step a part of each parameter, a unit's step is done once all have stepped theirs. `Parts` says
    what this process steps, and waits for what others do. A deferred unit is hidden until all are done with it. One of
    which this process has nothing left to step comes to no thread: it has told the others so, and an error from then on
    would tear a step that they save. Where nobody else steps, it steps all. Others have to agree to a step beside
    backward: a unit is *promised* when its gradients leave the device, and comes to the thread when they are summed, if
    it does. While the parts are *open*, units may come, and nobody waits for the step.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import logging
import operator
import os
import sys
import threading
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from ..autograd import weight_reads
from ..compat.references import (
    are_tensors_of_entry_shared,
    is_entry_shared,
    is_referenced_elsewhere,
)
from ..compat.tensors import forbid_access, storage_id, without_dispatch
from ..errors import DiskError, ExactnessError, SuperpipelineError
from ..host.telemetry import Counters
from ..memory.access import Access
from ..memory.host_copy import HostCopy
from ..memory.watched_parameters import (
    HostParameter,
    NarrowGradient,
    quietly,
    set_true_data,
    true_data,
    true_dtype,
    true_grad,
    wide_grad,
)
from ..memory.weights import Conversion
from ..steps import torn_step
from .pieces import Group, ShadowStep, State, keeps_no_state, shadow_of
from .state_guard import GuardedState

log = logging.getLogger(__name__)
Kept = Callable[[HostCopy, Collection[int]], list[int]]  # which of a unit's gradients others have, too
Say = Callable[[str, str], None]
THREAD = "superpipeline-optimizer"
PARTS = 4  # pieces of a unit's step, between which the host can turn to a more urgent unit
AFTER_BACKWARD = "the optimizer steps after backward"
WHOLE_STEP = "the next forward waits for the whole step of the optimizer"
STATE_IS_SHARED = "somebody else refers to the optimizer's state"
MESSAGE = (
    "{name} is being stepped by the optimizer and was read in a way that cannot be seen; "
    "set optimizer_overlap=False, or read it by its own methods or by torch's functions"
)
_HALF = float("0.5")  # made at run time: no compiler may fold products of it
_urgency = operator.attrgetter("urgency")
_NOTHING_LEFT: Future[None] = Future()  # the job of a unit of which this process has nothing to step
_NOTHING_LEFT.set_result(None)


class CannotDefer(Exception):
    """Raised when a step cannot be deferred; the message is the reason for the log, or empty if none is needed."""


class Arriving(Protocol):
    """A unit's gradients on their way to the host."""

    def has_arrived(self) -> bool:
        """Whether the gradients are on the host."""

    def wait(self) -> None:
        """Wait until the gradients are on the host."""

    def land(self) -> Sequence[Tensor]:
        """Wait for the gradients, accumulate them, and return their parameters."""

    def cancel(self) -> None:
        """Have the gradients not land."""


class SteppedPiece(Protocol):
    """A tensor that is stepped in place of a parameter."""

    data: Tensor  # with its gradient
    made: State


class Parts:
    """Which part of each parameter this process steps: all of it; ranks override this (sharded_step.py; Rule 10)."""

    is_all = True
    is_open = False  # whether units may come that are promised (Rule 10)
    may_be_torn = False  # whether another process may have stepped its part of one
    pieces: Mapping[int, SteppedPiece] = {}  # of parameters, by their ids, of which it steps another tensor
    stepped = staticmethod(HostCopy.after_step)  # called on the thread when its part of a unit is stepped

    def take_up(self, params: Sequence[Tensor], state: Mapping[Tensor, State]) -> None:
        """Take up parameters that the thread begins to step beside backward, with their state."""

    def check(self) -> None:
        """Raise CannotDefer if the step as a whole cannot be deferred."""

    def beside(self, store: HostCopy) -> Collection[int]:
        """List the parameters of a unit, by index, to whose bytes no code may refer though nothing steps them."""
        return ()

    def begin(self, stepped: Mapping[HostCopy, Sequence[Tensor]], state: Mapping[Tensor, State]) -> None:
        """Begin to defer the step of these parameters, whose state this is."""

    def misses(self, store: HostCopy) -> bool:
        """Whether another process has not stepped its part of a unit."""
        return False

    def wait(self, store: HostCopy) -> None:
        """Wait until all have stepped their parts of a unit."""

    def done(self, store: HostCopy) -> None:
        """Note that a unit's parameters have their data again."""


ALL_PARTS = Parts()


class HostThread:
    """The optimizer thread, started at the first submission."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, THREAD)

    @staticmethod
    def is_current() -> bool:
        """Whether the calling thread is an optimizer thread."""
        return threading.current_thread().name.startswith(THREAD)

    def submit(self, work: Callable[[], None], settings: tuple[bool, int] | None = None) -> Future[None]:
        """Queue work behind all that was submitted before; it runs with these settings, or the caller's (Rule 2)."""
        return self._pool.submit(with_settings, work, *(settings or thread_settings()))

    def close(self) -> None:
        """End the thread after the queued work."""
        self._pool.shutdown()


def with_settings(work: Callable[[], None], flushes: bool, threads: int) -> None:
    """Do work on this thread with the settings of another one (Rule 2)."""
    torch.set_flush_denormal(flushes)
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    work()


def thread_settings() -> tuple[bool, int]:
    """Return this thread's settings that change results (Rule 2).

    One is whether it flushes denormal numbers to zero: torch sets this and has no way to read it.
    """
    return sys.float_info.min * _HALF == 0.0, torch.get_num_threads()


@dataclass(eq=False)
class _Unit:
    """A unit to be stepped."""

    store: HostCopy
    urgency: int  # of those that can be stepped, the most urgent one is
    timed: AbstractContextManager[None]
    gradients: Arriving | None = None  # until they are accumulated
    left: list[Any] = field(default_factory=list)  # parameters to be stepped, once the gradients are accumulated
    part: float = float("inf")  # fewest elements that are stepped in one go
    data: dict[int, Tensor] = field(default_factory=dict)  # of vacant parameters, by index in the unit
    placeholders: dict[int, Tensor] = field(default_factory=dict)  # their data meanwhile
    conversions: dict[int, Conversion] = field(default_factory=dict)  # of what was stepped, by index in the unit
    job: Future[None] = _NOTHING_LEFT  # after which a deferred unit is stepped

    def has_arrived(self) -> bool:
        """Whether the unit can be stepped without waiting."""
        return self.gradients is None or self.gradients.has_arrived()

    def land(self) -> None:
        """Wait for the unit's gradients and accumulate them. Safe twice."""
        if self.gradients is not None:
            gradients, self.gradients = self.gradients, None
            self.left = list(gradients.land())

    def cancel(self) -> None:
        """Have the unit's gradients not land: nobody steps it."""
        if self.gradients is not None:
            self.gradients.cancel()

    def next_part(self) -> list[Any]:
        """Take out the parameters to be stepped next."""
        part: list[Any] = []
        elements = 0
        while self.left and elements < max(self.part, 1):
            part.append(self.left.pop(0))
            elements += part[-1].numel()
        return part

    def occupy(self, parts: Parts) -> None:
        """Give the parameters their data again (Rule 6). Safe twice, also after an interruption."""
        for index, data in self.data.items():
            set_true_data(self.store.params[index], data)
            data.grad = None
        if self.data and not parts.is_all:
            parts.done(self.store)
        self.data, self.placeholders = {}, {}


class PendingStep:
    """One step of an optimizer beside other work.

    ``may_defer`` tells whether the step may be deferred, as far as hooks of the user are concerned. ``say`` logs what
    does not run beside other work, and why.
    """

    def __init__(
        self,
        counters: Counters,
        access: Access,
        optimizer: Any,
        shadow_step: ShadowStep,
        thread: HostThread,
        may_defer: Callable[[], bool] = bool,
        say: Say = lambda what, reason: None,
    ) -> None:
        self._counters = counters
        self._access = access
        self.optimizer = optimizer
        self._source = optimizer  # of the attributes and options to step with
        self._shadow_step = shadow_step
        self._thread = thread
        self._may_defer, self._say = may_defer, say
        self.stepped: set[int] = set()  # ids of parameters that the thread has stepped
        self.params = self.stepped  # with those that it is going to step
        self.given_up = ""  # why nothing is stepped in backward, for the log
        self._guard: Any = None
        self._numbers: dict[int, list[int]] = {}  # of each parameter's groups: one that is in two is stepped twice
        self._options: Any = None  # of the groups, when the first unit was promised
        self._left_to_step: set[int] = set()  # ids of parameters that others without state decide about (Rule 4)
        self._settings = thread_settings()  # of the thread that steps (Rule 2)
        self._queue: list[_Unit] = []  # to be stepped, without the one that is being stepped, the most urgent one last
        self.submitted: dict[HostCopy, None] = {}  # promised in backward, in this order
        self._places = itertools.count(1)  # in the order in which units came to the thread in backward
        self._jobs: list[Future[None]] = []  # to be waited for
        self._deferred: dict[HostCopy, _Unit] = {}
        self._failed = False
        self._parts = ALL_PARTS  # that this process steps (Rule 10)
        self._writes = False  # since the thread stepped a parameter
        self.has_ended = False  # but for what is deferred: the optimizer's own step returned
        self._leaving = False  # the thread ends with the part that it is at (Rule 3)
        self._takes_units = True  # until the step is over, or fails
        self._lock = threading.Lock()  # guards the queue, the jobs and the two flags above
        self._waiting = threading.RLock()  # guards the waits of several threads

    @property
    def is_deferred(self) -> bool:
        """Whether the step is deferred and not done."""
        return bool(self._deferred)

    def is_stepping(self, store: HostCopy) -> bool:
        """Whether the step of a unit that is entered in the ledger may be running, or is still to come."""
        unit = self._deferred.get(store)
        return unit is None or not unit.job.done() or self._parts.misses(store)

    # ---- waits (Rule 8)

    def wait(self, store: HostCopy) -> None:
        """Wait for this unit's deferred step."""
        unit = self._deferred.get(store)
        if unit is not None and unit.data and not HostThread.is_current():
            with self._waiting, self._stall([unit.job], [unit]), quietly():
                is_done = unit.job.exception() is None and not unit.left
                if not (is_done and (self._parts.is_all or self._error_of_others([unit]) is None)):
                    self.finish()
                unit.occupy(self._parts)
                self._access.steps.pop(store, None)

    def _error_of_others(self, units: Iterable[_Unit]) -> SuperpipelineError | None:
        """Wait for what others step of these units; return the error of one that cannot go on (Rule 10)."""
        try:
            for unit in units:
                self._parts.wait(unit.store)
        except SuperpipelineError as error:
            return error
        return None

    def finish(self) -> None:
        """Wait for all that is pending, or leave to the optimizer's code what the thread did not reach (Rule 3)."""
        if self not in self._access.gradients or self._parts.is_open or HostThread.is_current():
            return
        with self._waiting, self._stall(self._jobs, self._deferred.values()), quietly():
            if self._queue and not self._deferred and self._may_defer():
                self._leave()
            jobs = list(self._jobs)
            error = next(filter(None, [job.exception() for job in jobs]), None)
            if isinstance(error, DiskError) and self._writes and self.optimizer is not None:
                error = error.in_step(len(self.stepped), self._count)
            if self._deferred:
                error = error or (None if self._parts.is_all else self._error_of_others(self._deferred.values()))
                if error is not None and not self._parts.is_all:
                    torn_step.tear(self.optimizer, "some", error)  # others may have stepped theirs
                elif error is not None and self._writes:
                    torn_step.tear(self.optimizer, len(self.stepped), error)
                for unit in self._deferred.values():
                    unit.occupy(self._parts)
                weight_reads.release(self)
                self.close()
            with self._lock:
                self._jobs = self._jobs[len(jobs) :]  # other threads may have submitted more
                if not self._jobs:
                    self._access.gradients.discard(self)
                    self._left(self.submitted)
                self._leaving = False
            if error is not None:
                raise error

    def quiesce(self) -> None:
        """Wait for the thread alone: whatever it raises is left to ``finish``."""
        for job in list(self._jobs):
            job.exception()

    def fail(self, error: BaseException) -> None:
        """End a step in which the user's code, or the thread, raised an error."""
        optimizer, params, may_be_torn = self.optimizer, self.params, self._parts.may_be_torn
        with self._lock:
            self._takes_units = self._parts.is_open = False
        try:
            with contextlib.suppress(Exception):  # the caller raises the first error
                self.finish()
        finally:  # also where the thread raised what is no Exception: an interrupt of the wait for a disk, say
            if (self._writes or may_be_torn) and not self.has_ended and optimizer is not None:
                torn_step.tear(optimizer, "some" if may_be_torn else len(params), error)

    @property
    def _count(self) -> int:
        """The number of the optimizer's parameters."""
        return sum(len(group["params"]) for group in self.optimizer.param_groups)

    def end(self) -> None:
        """Forget the optimizer, whose own step is over, unless what it left is deferred. Safe twice."""
        if not self._deferred:
            self.close()
        if self.given_up:
            self._say(AFTER_BACKWARD, self.given_up)

    def close(self) -> None:
        """Forget the optimizer, drop what is queued, and leave the ledger. Safe twice."""
        with self._lock:
            self._takes_units = self._parts.is_open = False
        self.give_back()
        self.optimizer = self._source = None
        self._may_defer = bool
        if self._deferred:
            self._access.deferred = None
        self._left((*self._deferred, *self.submitted))
        _cancel(self._queue)
        self._queue, self._deferred = [], {}
        self._parts = ALL_PARTS
        self.params = self.stepped = set()

    def _left(self, stores: Iterable[HostCopy]) -> None:
        for store in stores:
            self._access.steps.pop(store, None)

    def _stall(self, jobs: Sequence[Future[None]], units: Collection[_Unit]) -> AbstractContextManager[None]:
        done = all(job.done() for job in jobs)
        if not self._parts.is_all:
            done = done and not any(self._parts.misses(unit.store) for unit in units)
        return contextlib.nullcontext() if done else self._counters.stall("optimizer")

    # ---- beside backward

    def withhold(self, finish: Callable[[], None]) -> bool:
        """Guard the optimizer's state when backward begins: until ``give_back``, a read calls ``finish`` first.

        Returns False if other code refers to the state already; then nothing may be stepped in backward (Rule 5).
        """
        if is_entry_shared(vars(self.optimizer), "state"):
            self.given_up = STATE_IS_SHARED
            return False
        self._guard = GuardedState(self.optimizer, finish)
        self._guard.guard()
        return True

    def give_back(self) -> None:
        """Make the optimizer's state readable again: no unit is stepped in backward from here on. Safe twice."""
        if self._guard is not None:
            self._guard.give_back()
            self._guard = None

    def note_settings(self) -> None:
        """Note the settings of the calling thread, which steps later (Rule 2)."""
        self._settings = thread_settings()

    def promise(self, store: HostCopy, parts: Parts = ALL_PARTS) -> None:
        """Enter a unit in the ledger, to be stepped in these parts once it is taken."""
        self._parts = parts
        if self._options is None:
            self._options = _options(self.optimizer)
            for number, group in enumerate(self.optimizer.param_groups):
                for param in group["params"]:
                    self._numbers.setdefault(id(param), []).append(number)
                if self._shadow_step.begins is not None:
                    may_come = [p for p in group["params"] if p.requires_grad or true_grad(p) is not None]
                    types = self._shadow_step.begins(self.optimizer, group, self._guard.state, may_come)
                    self._left_to_step.update(id(p) for p in group["params"] if p.dtype in types)
        self.submitted[store] = None
        self._access.gradients.add(self)
        self._access.steps[store] = self

    def take(self, store: HostCopy, gradients: Arriving) -> None:
        """Have a promised unit stepped, and its wire copies converted, when its gradients have arrived.

        Any thread may call this. It does nothing once the step failed.
        """
        timed = self._counters.listener.work("optimizer", store.unit.name, "step")
        self._enqueue(_Unit(store, next(self._places), timed, gradients))

    def _leave(self) -> None:
        """Leave the queued units to the step. The thread still ends the part that it is stepping (Rule 3)."""
        for unit in self._queue[-1:]:
            if (gradients := unit.gradients) is not None:
                gradients.wait()
        with self._lock:
            self._leaving = True
            left, self._queue = self._queue, []
        try:
            for unit in left:
                unit.land()
        except BaseException:
            _cancel(left)
            raise
        with self._lock:  # units submitted meanwhile need their jobs
            self._jobs = [job for job in self._jobs if self._queue or not job.cancel()]

    def numbers_of(self, param: Any) -> list[int]:
        """Return the numbers of the groups in which a parameter is."""
        return self._numbers.get(id(param), [])

    def state_of(self, param: Any) -> State:
        """Return a parameter's state, while all state is guarded."""
        state: State = self._guard.state.get(param, {})
        return state

    def may_step(self, param: Any) -> bool:
        """Whether the thread may step this parameter: it is the optimizer's, with state of its own (Rules 4 and 5)."""
        if id(param) in self._left_to_step:
            return False
        groups = [self._source.param_groups[number] for number in self._numbers.get(id(param), [])]
        if self._guard.state.get(param):
            return bool(groups) and not are_tensors_of_entry_shared(self._guard.state, param)
        return bool(groups) and all(keeps_no_state(self.optimizer, group) for group in groups)

    # ---- on the thread

    def _enqueue(self, unit: _Unit) -> None:
        with self._lock:
            if not self._takes_units:
                return
            self._access.gradients.add(self)
            self._access.steps[unit.store] = self
            if unit.gradients is None and not unit.left:  # it is hidden for what others step (Rule 10)
                return
            try:
                bisect.insort(self._queue, unit, key=_urgency)
                self._submit(unit)
            except BaseException:  # a signal's handler raised: the thread may have a job that nobody knows
                self._submit(unit)  # and comes to this one behind it
                raise

    def _submit(self, unit: _Unit) -> None:
        unit.job = self._thread.submit(self._step_next, self._settings)
        self._jobs.append(unit.job)

    def _take(self) -> _Unit | None:
        """Take out the most urgent unit whose gradients have arrived, or the least urgent one if none have."""
        with self._lock:
            if self._failed or not self._queue:
                return None
            unit = next((unit for unit in reversed(self._queue) if unit.has_arrived()), self._queue[0])
            self._queue.remove(unit)
            return unit

    def _step_next(self) -> None:
        """Step parts of the most urgent unit, until one unit is complete or the rest is left (Rule 3)."""
        with without_dispatch():  # host parameters, without stand-ins or waits (weight_reads.py)
            while (unit := self._take()) is not None:
                self._failed = True
                self._step_part(unit)
                self._failed = False
                with self._lock:
                    if not unit.left or self._leaving:
                        return
                    bisect.insort(self._queue, unit, key=_urgency)

    def _step_part(self, unit: _Unit) -> None:
        if unit.gradients is not None:
            unit.land()
            unit.left = [param for param in unit.left if self.may_step(param)]
            if not self._parts.is_all:
                self._parts.take_up(unit.left, self._guard.state)
            unit.part = sum(map(Tensor.numel, unit.left)) // PARTS
        part = unit.next_part()
        self._writes = self._writes or bool(part)
        with unit.timed:
            self._step_params(part, unit)
            if not unit.left:
                self._parts.stepped(unit.store, unit.data, unit.conversions)
        self.stepped.update(map(id, part))
        if not self._deferred:
            self._counters.stepped_ahead += len(part)

    def _step_params(self, params: list[Any], unit: _Unit) -> None:
        """Step these parameters by their plain data: reads of a host parameter would wait for this thread."""
        groups: list[Group] = [{**group, "params": []} for group in self._source.param_groups]
        state: dict[Tensor, State] = {}
        conversions: dict[Tensor, Conversion] = {}
        for param in params:
            index = unit.store.index_of[id(param)]
            if (piece := self._parts.pieces.get(id(param))) is not None:
                data, state[piece.data] = piece.data, piece.made
            else:
                data = unit.data[index] if unit.data else data_of(param)
                state[data] = self._guard.state.get(param, {})
                if (conversion := unit.store.conversion(index)) is not None:
                    conversions[data] = unit.conversions[index] = conversion
            for number in self._numbers[id(param)]:
                groups[number]["params"].append(data)
        self._shadow_step.step_groups(self._source, groups, state, conversions)

    # ---- beside the next forward

    def step_rest(self, order: Sequence[HostCopy], kept: Kept, parts: Parts) -> tuple[list[Group], Any]:
        """Return the groups and the state for ``optimizer.step()``, having deferred the rest in this order if possible.

        ``kept`` tells which gradients of a unit others refer to than their parameters.
        """
        self.give_back()
        before, self._parts, self._settings = self._settings, parts, thread_settings()
        if self.stepped and self._options != _options(self.optimizer):
            raise ExactnessError(
                "the optimizer's options were changed in backward, when it had stepped some parameters with what they "
                "were; set optimizer_overlap=False, or change them before"
            )
        if self.stepped and self._settings != before:
            raise ExactnessError(
                "torch.set_flush_denormal or torch.set_num_threads was called between the forward and the optimizer's "
                "step, which had stepped some parameters with what was set before; set optimizer_overlap=False, or "
                "call it between steps"
            )
        streamed = {key: store for store in order for key in store.index_of}
        groups = self._groups_without(self.stepped)
        with quietly():
            to_hide = [  # also what others step yet (Rule 10)
                (streamed[id(param)], number, param)
                for number, group in enumerate(groups if parts.is_all else self.optimizer.param_groups)
                for param in group["params"]
                if id(param) in streamed and true_grad(param) is not None
            ]
            if to_hide and self._may_defer():
                try:
                    units = self._prepare(order, to_hide, kept)
                except CannotDefer as reason:
                    self._say(WHOLE_STEP, str(reason))
                else:
                    self._defer(units)
                    return self._groups_without(streamed), self._guard.state
        return groups, self.optimizer.state

    def _groups_without(self, ids: Container[int]) -> list[Group]:
        groups = self.optimizer.param_groups
        return [{**group, "params": [param for param in group["params"] if id(param) not in ids]} for group in groups]

    def _prepare(
        self, order: Sequence[HostCopy], to_hide: list[tuple[HostCopy, int, Any]], kept: Kept
    ) -> dict[HostCopy, _Unit]:
        """Prepare the units to be deferred, changing no parameter and no state; raise CannotDefer (Rules 4 and 5)."""
        groups = self.optimizer.param_groups
        if is_entry_shared(vars(self.optimizer), "state"):
            raise CannotDefer(STATE_IS_SHARED)
        if any(group.get("differentiable") for group in groups):
            raise CannotDefer("the optimizer is differentiable")
        self._parts.check()
        timed = self._counters.listener.work
        asked: dict[HostCopy, dict[int, None]] = {}
        for store, _, param in to_hide:
            index = store.index_of[id(param)]
            if index in asked.setdefault(store, {}):
                raise CannotDefer(f"the optimizer has {store.names[index]} twice")
            _check_bytes(param, store, index)
            _check_gradient(param, store.names[index])
            asked[store][index] = None
        for store, indices in asked.items():  # before `data_of` has the gradients, too
            for index in kept(store, indices):
                raise CannotDefer(f"somebody else refers to the gradient of {store.names[index]}")
            for index in set(self._parts.beside(store)).difference(indices):
                _check_bytes(store.params[index], store, index)
        units = {
            store: _Unit(store, -place, timed("optimizer", store.unit.name, "step"))
            for place, store in enumerate(order)
            if store in asked
        }
        stateless = [keeps_no_state(self.optimizer, group) for group in groups]
        narrow = [self._shadow_step.steps_narrow(group) for group in groups]
        for store, number, param in to_hide:
            index = store.index_of[id(param)]
            if not stateless[number]:
                _check_state(self.optimizer, param, store.names[index])
            if not narrow[number]:
                wide_grad(param)  # not on the thread (Rule 7)
            self._numbers[id(param)] = [number]
            if id(param) not in self.stepped:
                units[store].left.append(param)
            units[store].data[index] = data_of(param)
            units[store].placeholders[index] = _placeholder(param, store.names[index])
        return units

    def _defer(self, units: dict[HostCopy, _Unit]) -> None:
        """Hide these units and have them stepped; whatever is hidden when a signal's handler raises, a wait finds."""
        for store in units:
            store.wrote()  # no fill reads these bytes: backward and scope ended after all of them
        self.params = self.stepped.union(id(param) for unit in units.values() for param in unit.left)
        self._counters.held_steps += 1
        self._source = shadow_of(self.optimizer)
        self._source.param_groups = [
            {key: _copied(value) for key, value in group.items() if key != "params"}
            for group in self._source.param_groups
        ]
        _mind_forks()
        self._parts.begin({store: unit.left for store, unit in units.items()}, self.optimizer.state)
        with self._waiting:  # another thread that waits finds all units with a job
            self._access.gradients.add(self)
            self._deferred = units
            for store in units:
                self._access.steps[store] = self
            weight_reads.hold(self)
            self._access.deferred = self
            self._guard = GuardedState(self.optimizer, self.finish)
            self._guard.guard()
            for store, unit in units.items():
                for index, placeholder in unit.placeholders.items():
                    set_true_data(store.params[index], placeholder)
                self._enqueue(unit)


def _cancel(units: Iterable[_Unit]) -> None:
    for unit in units:
        unit.cancel()


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


# ---- Rules 4 and 5


def _check_bytes(param: nn.Parameter, store: HostCopy, index: int) -> None:
    name = store.names[index]
    if type(param) is not HostParameter:
        raise CannotDefer(f"{name} is of a class of its own, {type(param).__name__}")
    if store.shares(index) or is_referenced_elsewhere(param) or not store.at_home(index):
        raise CannotDefer(f"somebody else refers to the bytes of {name}")


def _check_gradient(param: nn.Parameter, name: str) -> None:
    grad: Any = true_grad(param)
    is_known = type(grad) in (Tensor, NarrowGradient)
    if not is_known or grad.layout is not torch.strided or grad.dtype is not true_dtype(param):
        raise CannotDefer(f"the gradient of {name} is not as the weight is")


def _check_state(optimizer: Optimizer, param: nn.Parameter, name: str) -> None:
    state = optimizer.state.get(param)
    if not state or (isinstance(optimizer, SGD) and state.get("momentum_buffer") is None):
        raise CannotDefer  # the first step creates it, after which it is there
    if not all(type(value) is Tensor and value.is_cpu for value in state.values()):
        raise CannotDefer(f"the state of {name} is not of tensors on the host")
    del state  # this reference would be counted
    if are_tensors_of_entry_shared(optimizer.state, param):
        raise CannotDefer(f"somebody else refers to the optimizer's state of {name}")


# ---- Rules 6 and 7


def _placeholder(parameter: nn.Parameter, name: str) -> Tensor:
    """Make a tensor like the parameter's data but without bytes: any access to them raises an error."""
    data = true_data(parameter)
    storage = torch.UntypedStorage(data.untyped_storage().nbytes())  # type: ignore[no-untyped-call]
    tensor = torch.empty(0, dtype=data.dtype, device="cpu").set_(storage, 0, data.shape, data.stride())
    storage.resize_(0)
    forbid_access(storage_id(storage), MESSAGE.format(name=name))
    return tensor


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
    for step in list(weight_reads.deferred):
        step.quiesce()
