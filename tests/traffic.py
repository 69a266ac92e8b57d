"""What streaming may move, computed beside the run: a ledger of what a step visited, and what that has to cost.

1. The ledger only listens: it notes the visits that the schedule is asked about, and the counters where passes begin.
2. What a pass may bring up is computed anew, by a schedule of its own. It starts empty where an optimizer stepped since
   the pass before began: all that was resident is stale then. It is told the recorded visits and nothing else of the
   run, except which units the model itself holds on to (a weight kept on ``ctx``): those cannot be evicted, and are
   filled again in place when the optimizer stepped.
3. What a pass may send down are its gradients: their bytes are counted in the plain run, where they reach the leaves.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import lightning as L
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from parity import in_front_of
from sp_lightning.engine import Engine
from sp_lightning.schedule import Schedule


@dataclasses.dataclass
class Pass:
    """One pass over the units, as it was recorded."""

    kind: Any
    predicted: tuple[int, ...]
    wraps: bool
    kept: frozenset[int] | None  # if an optimizer stepped since the pass before began: the units held on to by then
    before: dict[str, Any]  # the counters at its beginning
    visits: list[int] = dataclasses.field(default_factory=list)
    held: list[frozenset[int]] = dataclasses.field(default_factory=list)
    refilled: list[int] = dataclasses.field(default_factory=list)
    after: dict[str, Any] = dataclasses.field(default_factory=dict)

    def moved(self, counter: str) -> int:
        return self.after[counter] - self.before[counter]


class Ledger:
    """All passes of the engines that run while it listens."""

    def __init__(self) -> None:
        self.passes: dict[Engine, list[Pass]] = {}
        self._kept: dict[Engine, frozenset[int]] = {}

    @contextlib.contextmanager
    def listening(self) -> Iterator[Ledger]:
        seen = {
            (Engine, "open_scope"): self._see_open,
            (Engine, "close"): self._see_close,
            (Schedule, "visit"): self._see_visit,
        }
        hook = register_optimizer_step_post_hook(self._see_step)
        try:
            with contextlib.ExitStack() as patches:
                for (owner, name), see in seen.items():
                    in_front = in_front_of(getattr(owner, name), see)
                    patches.enter_context(mock.patch.object(owner, name, in_front))
                yield self
        finally:
            hook.remove()

    def _see_step(self, *_: Any) -> None:
        for engine, passes in self.passes.items():
            resident = engine.window.schedule.resident
            self._kept[engine] = frozenset(index for index in resident if not engine.units[index].movable)
            passes[-1].refilled += self._kept[engine]

    def _see_open(self, original: Any, engine: Engine, kind: Any) -> None:
        if engine.in_scope:
            return original(engine, kind)
        self._end_pass(engine)
        before = engine.counters.snapshot()

        def see_begin(original: Any, order: Any = (), wrap: bool = False) -> None:
            kept = self._kept.pop(engine, None)
            self.passes.setdefault(engine, []).append(Pass(kind, tuple(order), wrap, kept, before))
            original(order, wrap)

        with mock.patch.object(engine.window.schedule, "begin", in_front_of(engine.window.schedule.begin, see_begin)):
            original(engine, kind)

    def _see_visit(self, original: Any, schedule: Schedule, unit: int, held: Any = ()) -> Any:
        for engine, passes in self.passes.items():
            if engine.window.schedule is schedule:
                passes[-1].visits.append(unit)
                passes[-1].held.append(frozenset(index for index in schedule.resident if index in held))
        return original(schedule, unit, held)

    def _see_close(self, original: Any, engine: Engine) -> None:
        self._end_pass(engine)
        original(engine)

    def _end_pass(self, engine: Engine) -> None:
        if passes := self.passes.get(engine):
            passes[-1].after = engine.counters.snapshot()


def expected_bytes_up(engine: Engine, passes: list[Pass]) -> list[int]:
    """What each pass brings up by Rule 2."""
    nbytes = [unit.store.nbytes for unit in engine.units]
    root = sum(unit.store.nbytes for unit in engine.units if unit.unit.resident)
    schedule = Schedule(nbytes, engine.window.schedule.window, engine.window.schedule.transfer)
    figures = []
    for index, recorded in enumerate(passes):
        if recorded.kept is not None:
            schedule.invalidate(set(schedule.resident) - recorded.kept)
        schedule.begin(recorded.predicted, recorded.wraps)
        decisions = [schedule.visit(*at) for at in zip(recorded.visits, recorded.held, strict=True)]
        loaded = [unit for decision in decisions for unit in decision.load]
        fresh = recorded.kept is not None or not index
        figures.append(fresh * root + sum(nbytes[unit] for unit in (*loaded, *recorded.refilled)))
    return figures


def assert_streamed(ledger: Ledger, gradient_nbytes: list[int], writes: bool) -> None:
    """Every pass moved what it had to, and nothing else.

    Args:
        gradient_nbytes: What the plain run's backward passes gave to the leaves.
        writes: Whether the model's forward writes its own weights.
    """
    for engine, passes in ledger.passes.items():
        assert [recorded.moved("bytes_up") for recorded in passes] == expected_bytes_up(engine, passes)
        evaluations = [recorded for recorded in passes if recorded.kind != "train"]
        assert not any(recorded.moved("bytes_down") for recorded in evaluations)
        written = sum(recorded.moved("bytes_written_back") for recorded in passes)
        assert bool(written) == bool(passes[-1].after["writebacks"]) and (writes or not written)
    trained = [recorded for passes in ledger.passes.values() for recorded in passes if recorded.kind == "train"]
    assert [recorded.moved("bytes_down") for recorded in trained] == gradient_nbytes
    assert sum(recorded.moved("bytes_up") for recorded in trained) > 0


class GradientBytes(L.Callback):
    """Counts, in a plain run, the bytes of the gradients that arrive at the parameters: a sum for each batch."""

    def __init__(self) -> None:
        self.by_batch: list[int] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for parameter in pl_module.parameters():
            if parameter.requires_grad:
                parameter.register_hook(self._see)

    def on_train_batch_start(self, *_: Any) -> None:
        self.by_batch.append(0)

    def _see(self, gradient: Tensor) -> None:
        self.by_batch[-1] += gradient.numel() * gradient.element_size()
