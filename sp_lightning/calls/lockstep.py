"""Calls of one streamed module that share each trip of its weights: `sp_lightning.lockstep`, `Handle.lockstep`.

1. Each call runs in a thread of its own, one at a time. The running call gives the turn away only where it is about to
   enter a unit, and where it ends; so the others wait in front of units. Only the thread that has the turn changes what
   follows, so nothing is locked.
2. The calls stay with a unit until none of them waits for it, and go on to the one that most of them wait for: of
   several, to the first in the module, so that calls which are behind catch up. New calls begin before that. A unit
   that always stays on the device is not waited for.
3. A pass of the window ends where they go on to a unit that they have been to in it.
4. With the turn go a call's visits, its phases, its random states (torch's default generators, Python's, NumPy's) and
   torch's settings, which belong to the process: a call begins with the caller's settings, and what it sets holds for
   it alone. It begins with a seed of its own, drawn in the order of the calls: what it draws depends neither on the
   others nor on how many run at once. The caller's generator goes on by one number if a call draws any, so that later
   calls draw others, and stays as it is if none does, as it would for calls one after the other.
5. A thread has the autocast, the inference mode, the stream, the number of threads for one operator and the context
   variables of the caller's. It runs other calls afterwards (call_threads.py). What an instance of autocast restores it
   keeps for each thread: one that decorates a function serves all calls.
6. Calls make no gradients: a backward would come back to the units for one call after the other.
7. What a call raises ends that call alone. A call that has ended gives the turn to the caller, which takes the result,
   begins the next call, and may run any code that enters no unit. If the caller is interrupted, or wants no more, no
   call begins any more, and the others end where they wait.
8. Calls find the same modules, and have to find them as the calls before leave them. So a call that changes what
   modules keep (module_state.py) runs alone, from before its beginning to its end: the first call runs alone until it
   comes back to a unit from another one, and not only to borrow a weight, or ends. If it has changed nothing by then,
   the others begin. If it has, they begin when it has ended, and the next one runs as the first did. In later calls of
   `lockstep` all begin at once, until one changes something. Found while other calls are under way, a change is an
   error.
9. torch has one level of forward-mode gradients for the process, which ends for all where one leaves it: a call keeps
   its turn from where it enters the level to where it leaves it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import nn

from ..autograd.stand_ins import StreamedUnit
from ..compat.kernels import set_settings, settings
from ..compat.patches import AUTOCAST_RESTORES
from ..compat.references import python_numbers
from ..compat.tensors import dispatch_mode_count, dual_level_count, function_mode_count
from ..errors import ExactnessError, UnsupportedError
from ..memory.device import Device
from ..memory.watched_parameters import quietly
from .call_memory import ON_HOST, CallMemory
from .call_threads import CallThread, CallThreads
from .module_state import ModuleState

BEGIN = -1  # in place of the index of a unit: the call has not begun
SEEDS = 2**63 - 1
MERSENNE_TWISTER = 2500  # bytes: 624 numbers, and the place in them

log = logging.getLogger(__name__)


_of_call = threading.local()  # what autocasts restore that the call of this thread has entered, by autocast


class _Restored:
    """An attribute of autocasts that each call has for itself (Rule 5)."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, autocast: Any, kind: type | None = None) -> Any:
        if autocast is None:
            return self
        mine = getattr(_of_call, "restored", {}).get((self._name, id(autocast)))
        return vars(autocast)[self._name] if mine is None else mine[1]

    def __set__(self, autocast: Any, value: Any) -> None:
        if hasattr(_of_call, "restored"):
            _of_call.restored[self._name, id(autocast)] = autocast, value
        else:
            vars(autocast)[self._name] = value


_restored = {patch.name: _Restored(patch.name) for patch in AUTOCAST_RESTORES}


class _Interrupted(BaseException):
    """Ends a call whose result nobody waits for any more (Rule 7)."""


class Turn(NamedTuple):
    """Where one of several calls is: the units that it visits, and the phases that it is in."""

    visits: list[StreamedUnit]
    phases: list[Any]


class Visits(Protocol):
    """The engine, of which calls take turns (engine.py)."""

    device: Device
    units: list[StreamedUnit]
    window: Any

    def new_turn(self) -> Turn:
        """Return where a call is that begins here."""

    def change_turn(self, turn: Turn, /) -> Turn:
        """Let another call run; return where the one is that ran until now."""

    def begin_pass(self, kind: Any, /) -> None:
        """Begin a pass of the window."""


class Call:
    """A call: its function, the unit that it waits for, and its result or error."""

    def __init__(self, number: int, function: Callable[[], Any], seed: int, turn: Turn, state: list[Any]) -> None:
        self.number = number  # in the order of the calls
        self.function = function
        self.seed = seed
        self.unit = BEGIN  # the index of the unit that it waits for
        self.turn = turn  # while it waits
        self.state = state  # likewise, what Rule 4 names
        self.visited: set[int] | None = None  # the units that its turn visited; None: any
        self.came_to: set[int] = set()  # units, while it runs alone (Rule 8)
        self.changes = False  # what modules keep
        self.goes_on = threading.Semaphore(0)
        self.thread: int | None = None
        self.draws = False  # random numbers
        self.kept_nbytes = 0  # that it keeps on the device (call_memory.py)
        self.result: Any = None
        self.error: BaseException | None = None


class Lockstep:
    """Calls that run in turns, ``at_once`` of them; made within the scope that they run in."""

    def __init__(
        self,
        engine: Visits,
        module: nn.Module,
        calls: Iterable[Callable[[], Any]],
        at_once: int | Literal["auto"],
        tracks: bool,
        changes_nothing: bool,
        threads: CallThreads,
    ) -> None:
        if function_mode_count() or dispatch_mode_count():
            raise UnsupportedError(
                "calls in lockstep run in threads of their own, where a default device or another mode of torch's that "
                "is on here is off: enter it inside of each call"
            )
        self._engine = engine
        self._threads = threads
        auto = at_once == "auto"
        self._memory = CallMemory(engine.device, engine.window) if auto and not engine.device.is_host else None
        self._at_once = ON_HOST if at_once == "auto" else at_once  # unless memory says it
        self._surroundings = _surroundings(engine.device)
        self._random = _RandomStates(engine.device)
        self._seeds = self._random.generator_of_seeds()
        self._draws = False
        self._phases = engine.new_turn().phases
        self._settings = settings()
        self._dual_levels = dual_level_count()
        self._to_begin = enumerate(calls)
        self._live: list[Call] = []  # in order
        self._running: Call | None = None  # None: the caller has the turn
        self._here = BEGIN  # the index of the unit that the calls are at
        self._passed: set[int] = set()  # the indices of those that they have been to in this pass (Rule 3)
        self._interrupted = False
        self._ended: Call | None = None
        self._callers_turn = threading.Semaphore(0)
        self._callers = engine.new_turn()  # where the caller is
        units = {unit.index: [top for _, top in unit.unit.modules] for unit in engine.units if not unit.unit.resident}
        self._modules = None if at_once == 1 else ModuleState(module, units, tracks)
        self.together = changes_nothing or at_once == 1  # whether more than the first call may have the turn (Rule 8)
        self._changed = False  # whether a call did what Rule 8 forbids together
        self._failure: ExactnessError | None = None
        self._undo = contextlib.ExitStack()
        for patch in AUTOCAST_RESTORES:
            patch.install(_restored[patch.name])
            self._undo.callback(patch.remove)

    def next_ended(self) -> Call | None:
        """Run calls until one of them ends, and return it; None if all have ended."""
        ended: Call | None = None
        while ended is None:
            while len(self._live) < self.at_once and not self._interrupted:
                following = next(self._to_begin, None)  # code of the caller's
                if following is None:
                    break
                self._begin(*following)
            if not self._live:
                return None
            ended = self._run_calls()
        if ended.draws and not self._draws:
            self._draws = True
            draw_seed()
        failure, self._failure = self._failure, None
        if failure is not None and not self._interrupted:
            self._interrupted = True
            raise failure
        return ended

    @property
    def at_once(self) -> int:
        """How many calls may be under way by now."""
        if not self.together:
            return 1
        return self._at_once if self._memory is None else self._memory.fits(self._live)

    def _run_calls(self) -> Call | None:
        """Run calls until one of them ends, and return it, or None where others may begin."""
        if self._modules is not None:
            self._modules.adopt()
        before = self._state()
        self._give_turn(self._next())
        try:
            self._wait()
        finally:
            ran = self._engine.change_turn(self._callers)
            if self._running is not None:
                self._running.turn, self._running = ran, None
            self._set_state(before)
        return self._ended

    def stop(self) -> None:
        """End the calls where they wait, and begin no more."""
        if self._running is not None:
            raise UnsupportedError(
                "a call in lockstep cannot end streaming: call close() after lockstep() has returned"
            )
        self._interrupted = True
        try:
            while self.next_ended() is not None:
                pass
        finally:
            self._undo.close()
            if self._modules is not None:
                self._modules.close()

    def _wait(self) -> None:
        """Wait until the turn is the caller's again."""
        try:
            self._callers_turn.acquire()
        except BaseException:
            self._interrupted = True
            self._callers_turn.acquire()
            raise

    def _begin(self, number: int, function: Callable[[], Any]) -> None:
        """Give a call a thread, in which it waits for its turn."""
        seed = draw_seed(self._seeds)
        turn = Turn([], list(self._phases))
        call = Call(number, function, seed, turn, [self._settings, self._random.seeded(seed)])
        self._threads.run(functools.partial(self._run, call))
        self._live.append(call)

    # ---- turns

    def _run(self, call: Call, thread: CallThread) -> None:
        """Run a call, on its own thread."""
        call.goes_on.acquire()
        call.thread = threading.get_ident()
        states = call.state[1]
        _of_call.restored = {}
        try:
            if not self._interrupted:
                self._go_on(call)
                try:
                    with self._surroundings():
                        call.result = call.function()
                finally:
                    call.draws = self._random.have_left(states)
                    self._look(call, None, tensors=True)
        except BaseException as error:
            call.error = error
        del _of_call.restored
        self.together = self.together or not call.changes
        self._random.forget()
        if self._memory is not None:
            self._memory.ends()
        self._live.remove(call)
        self._ended, self._running = call, None
        self._threads.end(thread)
        self._callers_turn.release()

    def arrive(self, unit: StreamedUnit, borrows: bool = False) -> None:
        """Wait until it is the turn of the calling thread's call to enter a unit, or to borrow its weights."""
        call = self._running
        if call is None:
            raise UnsupportedError(
                f"{unit.name} was entered between calls in lockstep, whose forwards are under way: run this forward "
                "inside of a call, or after them"
            )
        if call.thread != threading.get_ident():
            raise UnsupportedError(
                f"{unit.name} was entered by a thread that a call in lockstep began; only the call's own thread has "
                "its turn: run the forward there"
            )
        if torch.is_grad_enabled():
            raise UnsupportedError(
                f"{unit.name} was entered with gradients enabled, and calls in lockstep make none: leave out "
                "enable_grad(), or run the call by itself"
            )
        if not unit.unit.resident:
            if self._memory is not None:
                self._memory.arrives(call)
            comes_back = unit.index != call.unit and unit.index in call.came_to and not (borrows or self._keeps_turn)
            call.unit = unit.index
            if not self.together and not call.changes:
                call.came_to.add(unit.index)
                self._look(call, None, tensors=comes_back)
                if comes_back and not call.changes:
                    self.together = True
                    self._pause(call, None)
            following = self._next()
            if following is not call:
                self._look(call, call.visited)
                following = self._next()
            if following is not call:
                self._pause(call, following)
            if call.visited is not None:
                call.visited.add(unit.index)
        if self._interrupted:
            raise _Interrupted

    @property
    def _keeps_turn(self) -> bool:
        """Whether the running call has to be left running (Rule 9)."""
        return dual_level_count() > self._dual_levels

    def wrote(self, weight: str) -> None:
        """Note that the running call wrote a weight."""
        if self._modules is not None:
            self._note_change(weight)

    def _pause(self, call: Call, following: Call | None) -> None:
        """Let another call run, or the caller, until it is this call's turn again."""
        call.state = self._state()
        if following is None:
            self._ended = None
            self._callers_turn.release()
        else:
            self._give_turn(following)
        call.goes_on.acquire()
        self._go_on(call)
        call.visited = {visit.index for visit in call.turn.visits if not visit.unit.resident}

    def _go_on(self, call: Call) -> None:
        """Begin a turn of a call, on its thread."""
        self._set_state(call.state)
        if self._modules is not None:
            self._modules.begin_turn()
        if self._memory is not None:
            self._memory.goes_on()

    def _give_turn(self, call: Call) -> None:
        """Let this call run in the stead of the running one, or of the caller."""
        ran = self._engine.change_turn(call.turn)
        if self._running is None:
            self._callers = ran
        else:
            self._running.turn = ran
        self._running = call
        call.goes_on.release()

    # ---- what calls change (Rule 8)

    def _look(self, call: Call, units: Collection[int] | None, tensors: bool = False) -> None:
        """Look whether the running call changed what modules keep."""
        if self._modules is None:
            return
        if tensors:
            with quietly():
                self._engine.window.collect_writes()
        changed = self._modules.changed(units, tensors)
        if changed:
            self._note_change(changed)

    def _note_change(self, what: str) -> None:
        running = self._running
        if any(other is not running and other.thread is not None for other in self._live):
            self._failure = self._failure or ExactnessError(
                f"{what} was changed by a call in lockstep, and others under way may have found it as it was before, "
                "or after: one after the other they could compute something else. Run one at a time (at_once=1); or, "
                "if the first call makes what the others read, run one before"
            )
        elif running is not None:
            if not self._changed:
                log.info("superpipeline: a call changed %s: calls that change modules run one after the other", what)
            self._changed = running.changes = True
            self.together = False

    def _next(self) -> Call:
        """Return the call that runs next, where all of them wait (Rule 2)."""
        live = self._live if self.together else self._live[:1]
        if self._running is not None and self._keeps_turn:
            live = [self._running]
        wanted = Counter(call.unit for call in live)
        if wanted[BEGIN]:
            unit = BEGIN
        elif wanted[self._here]:
            unit = self._here
        else:
            self._here = unit = min(wanted, key=lambda index: (-wanted[index], index))
            if unit in self._passed:  # Rule 3
                self._passed.clear()
                with quietly():
                    self._engine.begin_pass("lockstep")
            self._passed.add(unit)
        return next(call for call in live if call.unit == unit)

    # ---- what belongs to the process (Rule 4)

    def _state(self) -> list[Any]:
        return [settings(), self._random.states()]

    def _set_state(self, state: list[Any]) -> None:
        set_settings(state[0])
        self._random.set(state[1])


def draw_seed(generator: torch.Generator | None = None) -> int:
    """Draw a seed, from torch's default generator if none is given."""
    return int(torch.randint(SEEDS, (), generator=generator, device="cpu"))


class _RandomStates:
    """The states of the generators that code draws from by default.

    Python takes as long as a small unit to tell its state, NumPy also to take another: their bytes are read and written
    instead (numpy.random.MT19937.ctypes). NumPy's must be all of its state, or not have changed.
    """

    def __init__(self, device: Device) -> None:
        self._torch = [torch.random] if device.is_host else [torch.random, torch.get_device_module(device.torch_device)]
        self._python = python_numbers()
        self._numpy = sys.modules.get("numpy")
        self._in_effect: _NumpyState | None = None  # None: not known

    def states(self) -> list[Any]:
        return [*(generator.get_rng_state() for generator in self._torch), self._python_state(), self._numpy_state()]

    def set(self, states: list[Any]) -> None:
        *of_torch, of_python, of_numpy = states
        for generator, state in zip(self._torch, of_torch, strict=True):
            generator.set_rng_state(state)
        if self._python is None:
            random.setstate(of_python)
        else:
            generator, address = self._python
            ctypes.memmove(address, of_python[0], MERSENNE_TWISTER)
            generator.gauss_next = of_python[1]
        if self._numpy is not None:
            here = self._in_effect
            if here is None or here.is_more or of_numpy.is_more:
                self._numpy.random.set_state(of_numpy.whole)
            else:
                ctypes.memmove(here.address, of_numpy.contents, MERSENNE_TWISTER)
            self._in_effect = of_numpy

    def generator_of_seeds(self) -> torch.Generator:
        """Return a generator seeded with the number that torch's draws next; that one stays where it is."""
        before = torch.get_rng_state()
        try:
            return torch.Generator().manual_seed(draw_seed())
        finally:
            torch.set_rng_state(before)

    def have_left(self, states: list[Any]) -> bool:
        """Whether a generator is no longer in the state of these."""
        *of_torch, of_python, of_numpy = states
        *torch_now, python_now, numpy_now = self.states()
        return (
            not all(map(torch.equal, of_torch, torch_now))
            or of_python != python_now
            or (of_numpy is not None and (numpy_now.is_more or of_numpy.contents != numpy_now.contents))
        )

    def forget(self) -> None:
        """Note that code drew numbers whose states nobody needs."""
        self._in_effect = None

    def _python_state(self) -> Any:
        if self._python is None:
            return random.getstate()
        generator, address = self._python
        return ctypes.string_at(address, MERSENNE_TWISTER), generator.gauss_next

    def _numpy_state(self) -> _NumpyState | None:
        if self._numpy is None:
            return None
        here, generator = self._in_effect, self._numpy.random.get_bit_generator()
        address = generator.ctypes.state_address
        contents = ctypes.string_at(address, MERSENNE_TWISTER) if type(generator).__name__ == "MT19937" else b""
        if here is None or here.is_more or here.address != address or here.contents != contents:
            self._in_effect = here = _NumpyState(address, contents, self._numpy.random.get_state(legacy=False))
        return here

    def seeded(self, seed: int) -> list[Any]:
        """Return the states of generators with this seed; those that are in effect stay."""
        before = self.states()
        try:
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed all devices
            for generator in self._torch[1:]:
                generator.manual_seed(seed)
            random.seed(seed)
            if self._numpy is not None:
                self._numpy.random.seed(seed % 2**32)
                self.forget()
            return self.states()
        finally:
            self.set(before)


class _NumpyState(NamedTuple):
    """The state of NumPy's own generator."""

    address: int  # of the bytes that its generator changes
    contents: bytes
    whole: dict[str, Any]

    @property
    def is_more(self) -> bool:
        """Whether the state is more than these bytes: half a pair of normal numbers, or another generator's."""
        return not self.contents or bool(self.whole["has_gauss"])


def _surroundings(device: Device) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return a context that makes another thread like the calling one (Rules 5 and 6)."""
    kinds = {"cpu", device.torch_device.type}
    casts = [
        (kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
        for kind in kinds
        if torch.is_autocast_enabled(kind)
    ]
    infers, stream, threads = torch.is_inference_mode_enabled(), device.compute, torch.get_num_threads()

    def share_operators() -> None:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)

    @contextlib.contextmanager
    def surroundings() -> Iterator[None]:
        if not device.is_host:
            torch.accelerator.set_stream(stream)
        share_operators()
        with contextlib.ExitStack() as contexts:
            contexts.callback(share_operators)  # the number also holds for threads that begin later
            contexts.enter_context(torch.inference_mode() if infers else torch.no_grad())
            for kind, dtype, caches in casts:
                contexts.enter_context(torch.autocast(kind, dtype, cache_enabled=caches))
            yield

    return surroundings
