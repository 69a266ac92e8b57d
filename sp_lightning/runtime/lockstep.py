"""Calls of one streamed module that share each trip of its weights: `Handle.lockstep`.

1. Each call runs in a thread of its own, one at a time. The running call gives the turn away only where it is about to
   enter a unit, and where it ends; so the others wait in front of units. Only the running call's thread changes what
   follows, so nothing is locked.
2. The calls stay with a unit until none of them waits for it, and go on to the one that most of them wait for: of
   several, to the first in the module, so that calls which are behind catch up. New calls begin before that. A unit
   that always stays on the device is not waited for.
3. A pass of the window ends where they go on to a unit that they have been to in it.
4. With the turn go a call's visits, its phases, and the states of torch's default generators. Each call begins with a
   seed of its own, drawn in the order of the calls: what it draws depends neither on the others nor on how many run at
   once.
5. A thread has the autocast, the inference mode, the stream and the context variables of the caller's.
6. Calls make no gradients: a backward would come back to the units for one call after the other.
7. What a call raises ends that call alone. If the caller's wait is interrupted, no call begins any more, and the others
   end where they wait.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from ..autograd.stand_ins import StreamedUnit
from ..compat.tensors import dispatch_mode_count, function_mode_count
from ..errors import UnsupportedError
from ..memory.device import Device
from ..memory.watched_parameters import quietly
from .engine import Engine, Turn

BEGIN = -1  # in place of the index of a unit: the call has not begun


class _Interrupted(BaseException):
    """Ends a call whose result nobody waits for any more (Rule 7)."""


class _Call:
    """A call: what it runs, where it waits, and what came of it."""

    def __init__(self, function: Callable[[], Any], seed: int, turn: Turn) -> None:
        self.function = function
        self.seed = seed
        self.unit = BEGIN  # the index of the unit that it waits for
        self.turn = turn  # while it waits
        self.random: list[Tensor] = []  # likewise, the states of the generators
        self.goes_on = threading.Semaphore(0)
        self.thread: int | None = None
        self.result: Any = None
        self.error: BaseException | None = None


class Lockstep:
    """Calls that run in turns."""

    def __init__(self, engine: Engine, calls: Collection[Callable[[], Any]]) -> None:
        if function_mode_count() or dispatch_mode_count():
            raise UnsupportedError(
                "calls in lockstep run in threads of their own, where a default device or another mode of torch's that "
                "is on here is off: enter it inside of each call"
            )
        self._engine = engine
        self._surroundings = _surroundings(engine.device)
        self._generators = _generators(engine.device)
        seeds = torch.randint(2**63 - 1, (len(calls),)).tolist()
        self.calls = [_Call(call, seed, engine.new_turn()) for call, seed in zip(calls, seeds, strict=True)]
        self._to_begin = iter(self.calls)
        self._live: list[_Call] = []  # in order
        self._running: _Call | None = None
        self._here = BEGIN  # the index of the unit that the calls are at
        self._passed: set[int] = set()  # the indices of those that they have been to in this pass (Rule 3)
        self._interrupted = False
        self._all_ended = threading.Semaphore(0)

    def run(self, at_once: int) -> None:
        """Run the calls, so many at once, and keep with each its result, or what it raised."""
        for _ in range(at_once):
            self._begin_next()
        if not self._live:
            return
        random = self._states()
        self._engine.turns = self
        own = self._give_turn()
        try:
            self._wait()
        finally:
            self._engine.turns = None
            self._engine.change_turn(own)
            self._set_states(random)

    def _wait(self) -> None:
        try:
            self._all_ended.acquire()
        except BaseException:
            self._interrupted = True
            self._all_ended.acquire()
            raise

    def _begin_next(self) -> None:
        """Give the next call a thread, in which it waits for its turn, if there is a call to begin."""
        call = None if self._interrupted else next(self._to_begin, None)
        if call is not None:
            run = contextvars.copy_context().run
            threading.Thread(target=run, args=(self._run, call), name="superpipeline-call", daemon=True).start()
            self._live.append(call)

    # ---- turns

    def _run(self, call: _Call) -> None:
        """Run a call, on its own thread."""
        call.goes_on.acquire()
        call.thread = threading.get_ident()
        for generator in self._generators:
            generator.manual_seed(call.seed)
        try:
            if not self._interrupted:
                with self._surroundings():
                    call.result = call.function()
        except BaseException as error:
            call.error = error
        self._live.remove(call)
        self._begin_next()
        if self._live:
            self._give_turn()
        else:
            self._all_ended.release()

    def arrive(self, unit: StreamedUnit) -> None:
        """Wait until it is the turn of the calling thread's call to enter a unit."""
        call = self._running
        assert call is not None
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
            call.unit = unit.index
            following = self._next()
            if following is not call:
                call.random = self._states()
                call.turn = self._give_turn(following)
                call.goes_on.acquire()
                self._set_states(call.random)
        if self._interrupted:
            raise _Interrupted

    def _give_turn(self, call: _Call | None = None) -> Turn:
        """Let this call run, or the next one; return where the one is that ran until now."""
        call = self._running = call or self._next()
        ran = self._engine.change_turn(call.turn)
        call.goes_on.release()
        return ran

    def _next(self) -> _Call:
        """Return the call that runs next, where all of them wait (Rule 2)."""
        wanted = Counter(call.unit for call in self._live)
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
        return next(call for call in self._live if call.unit == unit)

    # ---- generators (Rule 4)

    def _states(self) -> list[Tensor]:
        return [generator.get_rng_state() for generator in self._generators]

    def _set_states(self, states: list[Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_rng_state(state)


def _generators(device: Device) -> list[Any]:
    """List what has the functions of the default generators: of the CPU, and of the device."""
    return [torch.random] if device.is_host else [torch.random, torch.get_device_module(device.torch_device)]


def _surroundings(device: Device) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return a context that makes another thread like the calling one (Rules 5 and 6)."""
    kinds = {"cpu", device.torch_device.type}
    casts = [
        (kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
        for kind in kinds
        if torch.is_autocast_enabled(kind)
    ]
    infers, stream = torch.is_inference_mode_enabled(), device.compute

    @contextlib.contextmanager
    def surroundings() -> Iterator[None]:
        if not device.is_host:
            torch.accelerator.set_stream(stream)
        with contextlib.ExitStack() as contexts:
            contexts.enter_context(torch.inference_mode() if infers else torch.no_grad())
            for kind, dtype, caches in casts:
                contexts.enter_context(torch.autocast(kind, dtype, cache_enabled=caches))
            yield

    return surroundings
