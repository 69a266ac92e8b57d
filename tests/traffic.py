"""What streaming may move, computed beside the run: a ledger of what a step visited, and what that has to cost.

1. The ledger only listens: it notes the visits that the schedule is asked about, and the counters where passes begin.
2. What a pass may bring up is computed anew, by a schedule of its own. It starts empty where an optimizer stepped since
   the pass before: all that was resident is stale then. It is told the recorded visits and nothing else of the run,
   except which units the model itself holds on to (a weight kept on ``ctx``): those cannot be evicted, and a stale one
   is filled again in place.
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
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from parity import in_front_of
from sp_lightning.engine import Engine
from sp_lightning.schedule import Schedule


@dataclasses.dataclass
class Pass:
    """One pass over the units, as it was recorded."""

    kind: Any
    predicted: tuple[int, ...]
    wraps: bool
    stepped: bool  # whether an optimizer did since the pass before
    held_before: frozenset[int]  # stale units that could not be dropped, as something refers to them
    before: dict[str, Any]  # the counters at its beginning
    visits: list[int] = dataclasses.field(default_factory=list)
    held: list[frozenset[int]] = dataclasses.field(default_factory=list)
    after: dict[str, Any] = dataclasses.field(default_factory=dict)

    def moved(self, counter: str) -> int:
        return self.after[counter] - self.before[counter]


class Ledger:
    """All passes of the engines that run while it listens."""

    def __init__(self) -> None:
        self.engines: list[Engine] = []
        self.passes: dict[Engine, list[Pass]] = {}
        self._stepped = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[Ledger]:
        seen = {
            (Engine, "open_scope"): self._see_open,
            (Engine, "close"): self._see_close,
            (Schedule, "visit"): self._see_visit,
        }
        hooks = [register(self._see_step) for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook)]
        try:
            with contextlib.ExitStack() as patches:
                for (owner, name), see in seen.items():
                    in_front = in_front_of(getattr(owner, name), see)
                    patches.enter_context(mock.patch.object(owner, name, in_front))
                yield self
        finally:
            for hook in hooks:
                hook.remove()

    def _see_step(self, *_: Any) -> None:
        self._stepped = True

    def _see_open(self, original: Any, engine: Engine, kind: Any) -> None:
        if engine.in_scope:
            return original(engine, kind)
        self._end_pass(engine)
        held = frozenset(index for index in engine.schedule.resident if not engine.units[index].movable)
        before = engine.counters.snapshot()
        with mock.patch.object(engine.schedule, "begin", in_front_of(engine.schedule.begin, self._see_begin)):
            self._begun = (kind, self._stepped, held, before)
            original(engine, kind)
        self._stepped = False
        self.passes.setdefault(engine, []).append(self._new)
        return None

    def _see_begin(self, original: Any, order: Any = (), wrap: bool = False) -> None:
        kind, stepped, held, before = self._begun
        self._new = Pass(kind, tuple(order), wrap, stepped, held, before)
        original(order, wrap)

    def _see_visit(self, original: Any, schedule: Schedule, unit: int, held: Any = ()) -> Any:
        for engine, passes in self.passes.items():
            if engine.schedule is schedule:
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
    schedule = Schedule(nbytes, engine.schedule.window, engine.schedule.transfer)
    figures = []
    for index, recorded in enumerate(passes):
        fresh = recorded.stepped or not index
        refilled = recorded.held_before if recorded.stepped else frozenset()
        if recorded.stepped:
            schedule.invalidate(set(schedule.resident) - refilled)
        schedule.begin(recorded.predicted, recorded.wraps)
        decisions = [schedule.visit(*at) for at in zip(recorded.visits, recorded.held, strict=True)]
        loaded = [unit for decision in decisions for unit in decision.load]
        figures.append(fresh * root + sum(nbytes[unit] for unit in (*loaded, *refilled & set(recorded.visits))))
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
