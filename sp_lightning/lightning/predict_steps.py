"""Steps of ``Trainer.predict`` in lockstep: `SuperpipelineStrategy(predict_at_once=...)`.

1. The loop's own code before a batch's step runs when the batch's call is to begin, and its code after the step runs in
   the order of the batches, as soon as the steps up to this one have ended: all of it on the caller's thread. So
   ``on_predict_batch_start`` of some batches comes before ``on_predict_batch_end`` of earlier ones; code that takes the
   two for a pair is refused.
2. A step that raises ends the run as in a plain one: the batches before it are done, and none after it is.
3. The loop's own code calls hooks of the user's. What they change in what the module keeps (module_state.py), the step
   of their own batch has to find, and those of the batches before it must not. So if they change anything before the
   first step, batches run one after the other. If the module itself has a hook after steps, the first batch runs alone,
   and what is changed then counts, too. Found while steps are under way, a change is an error.
4. A loop may run several times: ``BatchSizeFinder`` tries sizes by runs of their own, inside the begin of the one that
   it is for. Each begins without steps under way, also after one that failed.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Literal

from ..calls.lockstep import Call
from ..calls.module_state import ModuleState
from ..compat.lightning import (
    PredictBatch,
    after_predict_step,
    before_predict_step,
    begin_of_predict_run,
    end_of_predict_run,
    predict_loop_of_its_own,
    reset_predict_steps,
    set_predict_steps,
)
from ..errors import ExactnessError, UnsupportedError
from ..runtime.handle import Handle

HOOKS = "on_predict_batch_start", "on_predict_batch_end"
THEIRS = "lightning", "pytorch_lightning", "sp_lightning"

log = logging.getLogger(__name__)


class PredictSteps:
    """The steps of a predict loop, several of them at once, in each of its runs."""

    def __init__(self, trainer: Any, handle: Handle, step: Callable[..., Any], at_once: int | Literal["auto"]) -> None:
        self._trainer = trainer
        self._loop = trainer.predict_loop
        self._step = step
        self._at_once = at_once
        self._handle = handle
        self._renew()
        self._modules = None if at_once == 1 else ModuleState(handle.module, {}, tracks=False)
        self._changed = ""  # what a hook has changed on the module
        self._alone = not _is_theirs(
            _owner(type(trainer.lightning_module), HOOKS[1])
        )  # whether one is under way (Rule 3)
        self._check()
        set_predict_steps(self._loop, self._begin, self._take, self._finish)

    def _renew(self) -> None:
        """Have no step under way."""
        self._arriving: deque[Callable[[], Any]] = deque()
        self._under_way: deque[PredictBatch] = deque()  # in order, of which the next one's number follows
        self._next_number = 0
        self._begun = 0
        self._ended: dict[int, Call] = {}  # by number, while an earlier step is under way
        self._results = self._handle.calls_ended(self, self._at_once)

    def close(self) -> None:
        """Give the loop its own methods back, and end the steps under way."""
        reset_predict_steps(self._loop)
        self._results.close()

    def __iter__(self) -> Iterator[Callable[[], Any]]:
        return self

    def __next__(self) -> Callable[[], Any]:
        """Return the next step to begin, as far as its batch has come; there may be more later."""
        if not self._arriving:
            raise StopIteration
        return self._arriving.popleft()

    def _check(self) -> None:
        """Raise UnsupportedError if code of the user's takes part in the loop in a way that lockstep changes."""
        other = predict_loop_of_its_own(self._trainer)
        if other is not None:
            raise UnsupportedError(
                f"predict_at_once={self._at_once} is for Lightning's own predict loop, and steps that get a batch; "
                f"found {other}: leave the option out"
            )
        for one in (self._trainer.lightning_module, *self._trainer.callbacks):
            owners = [_owner(type(one), hook) for hook in HOOKS]
            if not any(map(_is_theirs, owners)):
                raise UnsupportedError(
                    f"{type(one).__name__} has both {HOOKS[0]} and {HOOKS[1]}, and predict_at_once={self._at_once} "
                    "calls the first for several batches before the second for one of them: leave one of the hooks "
                    "out, or the option"
                )

    def _begin(self) -> None:
        """Begin a run (Rule 4)."""
        begin_of_predict_run(self._loop)
        self._end()

    def _end(self) -> None:
        """End the steps under way."""
        self._results.close()
        self._renew()

    def _take(self, batch: Any, number: int, loader: int, _: Any) -> None:
        """Take a batch from the loop; run steps while there is no room for another one."""
        if not self._begun:
            self._check()  # the loop knows by now how batches are drawn
        self._begun += 1
        with self._watching():
            taken = before_predict_step(self._loop, batch, number, loader)
        self._under_way.append(taken)
        self._arriving.append(functools.partial(self._step, *taken.arguments))
        if self._begun - self._next_number - len(self._ended) >= self._most:
            self._run_one()

    @property
    def _most(self) -> int:
        """How many steps may be under way by now."""
        if self._alone:
            return 1
        if self._at_once != "auto":
            return self._at_once
        return 1 if self._handle.engine.turns is None else self._handle.engine.turns.at_once

    def _run_one(self) -> None:
        """Run steps until one has ended; do what comes after those that are next in order (Rule 1)."""
        ended = next(self._results)
        self._ended[ended.number] = ended
        while self._next_number in self._ended:
            call, batch = self._ended.pop(self._next_number), self._under_way.popleft()
            self._next_number += 1
            if call.error is not None:
                self._end()
                raise call.error  # Rule 2
            with self._watching():
                after_predict_step(self._loop, batch, call.result)
            self._alone = bool(self._changed)

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        """Note what hooks in this context change on the module (Rule 3)."""
        if self._modules is None or self._changed:
            yield
            return
        self._modules.adopt()  # what steps changed
        yield
        self._changed = self._modules.changed(None, tensors=True)
        if self._changed and self._under_way:
            raise ExactnessError(
                f"{self._changed} was changed by a hook while steps of other batches were under way, which would find "
                f"it as it was before, or after, if they ran one after the other: use predict_at_once=1 instead of "
                f"{self._at_once!r}, or keep it elsewhere than on the module if no step reads it"
            )
        if self._changed:
            self._alone = True
            log.info("superpipeline: a hook changed %s: steps of predict run one after the other", self._changed)

    def _finish(self) -> Any:
        """End the run, when all steps have ended."""
        while self._under_way:
            self._run_one()
        self._end()
        return end_of_predict_run(self._loop)


def _is_theirs(owner: type) -> bool:
    """Return whether a class is Lightning's or ours."""
    return owner.__module__.partition(".")[0] in THEIRS


def _owner(kind: type, name: str) -> type:
    """Return the class that defines this attribute of a class."""
    return next(base for base in kind.__mro__ if name in vars(base))
