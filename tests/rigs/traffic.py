"""What streaming may move, computed beside the run: a ledger of what a step visited, and what that has to cost.

1. The ledger only listens: it notes the visits that the schedule is asked about, and the counters where passes begin.
2. What a pass may bring up is computed anew, by a schedule of its own. It starts empty where an optimizer stepped since
   the pass before began: all that was resident is stale then. It is told the recorded visits and nothing else of the
   run, except which units the model itself holds on to (a weight kept on ``ctx``): those cannot be evicted, and are
   filled again in place when the optimizer stepped; and which are being stepped: those do not come up ahead of a visit.
3. What a pass may send down are its gradients: their bytes are counted in the plain run, where they reach the leaves.
4. What travels in another type than it has on the host is asked of the stores where a pass begins: a unit for which
   that changed is not resident then. Bytes of its gradients change with those of the weight. A weight that travels as
   it is, and that autocast may cast, may have a gradient of half the bytes (autocast_weights.py, Rule 6). The window's
   width, which is another one in a pass that is recorded, is asked of the schedule.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import lightning as L
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from parity import in_front_of
from sp_lightning.core.schedule import Schedule
from sp_lightning.runtime.engine import Engine


@dataclasses.dataclass
class Pass:
    """One pass over the units, as it was recorded."""

    kind: Any
    predicted: tuple[int, ...]
    wraps: bool
    kept: frozenset[int] | None  # if an optimizer stepped since the pass before began: the units held on to by then
    before: dict[str, Any]  # the counters at its beginning
    nbytes: list[int] = dataclasses.field(default_factory=list)  # of the units
    share: dict[str, float] = dataclasses.field(default_factory=dict)  # of a parameter's bytes that travel
    cast_there: frozenset[str] = frozenset()  # weights that autocast may cast on the device
    retyped: frozenset[int] = frozenset()
    sizes: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # window and transfer at each visit
    visits: list[int] = dataclasses.field(default_factory=list)
    held: list[frozenset[int]] = dataclasses.field(default_factory=list)
    stepping: list[frozenset[int]] = dataclasses.field(default_factory=list)
    refilled: list[int] = dataclasses.field(default_factory=list)
    after: dict[str, Any] = dataclasses.field(default_factory=dict)

    def moved(self, counter: str) -> int:
        return self.after[counter] - self.before[counter]


class Ledger:
    """All passes of the engines that run while it listens."""

    def __init__(self) -> None:
        self.passes: dict[Engine, list[Pass]] = {}
        self._kept: dict[Engine, frozenset[int]] = {}
        self._types: dict[Engine, list[Any]] = {}

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
        if engine.phases.in_step:
            return original(engine, kind)
        self._end_pass(engine)
        before = engine.counters.snapshot()

        def see_begin(original: Any, order: Any = (), wrap: bool = False) -> None:
            kept = self._kept.pop(engine, None)
            sizes = *travelling(engine), cast_there(engine), self._retyped(engine)
            begun = Pass(kind, tuple(order), wrap, kept, before, *sizes)
            self.passes.setdefault(engine, []).append(begun)
            original(order, wrap)

        with mock.patch.object(engine.window.schedule, "begin", in_front_of(engine.window.schedule.begin, see_begin)):
            original(engine, kind)

    def _retyped(self, engine: Engine) -> frozenset[int]:
        types = [unit.store.autocast for unit in engine.units]
        before = self._types.get(engine, types)
        self._types[engine] = types
        return frozenset(i for i, (now, then) in enumerate(zip(types, before, strict=True)) if now is not then)

    def _see_visit(self, original: Any, schedule: Schedule, unit: int, held: Any = ()) -> Any:
        for engine, passes in self.passes.items():
            if engine.window.schedule is schedule:
                passes[-1].visits.append(unit)
                passes[-1].sizes.append((schedule.window, schedule.transfer))
                passes[-1].held.append(frozenset(index for index in schedule.resident if index in held))
                stepped = frozenset(each.index for each in engine.units if each.store.is_being_stepped)
                passes[-1].stepping.append(stepped)
        return original(schedule, unit, held)

    def _see_close(self, original: Any, engine: Engine) -> None:
        self._end_pass(engine)
        original(engine)

    def _end_pass(self, engine: Engine) -> None:
        if passes := self.passes.get(engine):
            passes[-1].after = engine.counters.snapshot()


def travelling(engine: Engine) -> tuple[list[int], dict[str, float]]:
    """Bytes of the units, and the share of its bytes that each parameter has on its way (Rule 4)."""
    share = {}
    for unit in engine.units:
        for there, host in zip(unit.store.on_device.layout.fields, unit.store.host_layout.fields, strict=True):
            share[host.name] = there.dtype.itemsize / host.dtype.itemsize
    return [unit.store.on_device.nbytes for unit in engine.units], share


def cast_there(engine: Engine) -> frozenset[str]:
    """The weights that travel as they are, and that autocast may cast on the device."""
    weights = engine.autocast_weights._weights.values()
    return frozenset(
        each.unit.store.names[each.index] for each in weights if each.index not in each.unit.store.autocast
    )


def expected_bytes_up(engine: Engine, passes: list[Pass]) -> list[int]:
    """What each pass brings up by Rule 2."""
    resident = [unit.index for unit in engine.units if unit.unit.resident]
    schedule = Schedule(passes[0].nbytes, engine.window.schedule.window, engine.window.schedule.transfer)
    figures = []
    for index, recorded in enumerate(passes):
        if recorded.kept is not None:
            schedule.invalidate(set(schedule.resident) - recorded.kept)
        schedule.invalidate(recorded.retyped)
        schedule.begin(recorded.predicted, recorded.wraps)
        loaded: list[int] = []
        visits = zip(recorded.visits, recorded.held, recorded.stepping, recorded.sizes, strict=True)
        for visited, held, stepping, sizes in visits:
            schedule.resize(*sizes)
            coming = schedule.visit(visited, held).load
            schedule.invalidate(stepping & {*coming} - {visited})
            loaded += [unit for unit in coming if unit == visited or unit not in stepping]
        loaded += [unit for unit in resident if recorded.kept is not None or not index or unit in recorded.retyped]
        figures.append(sum(recorded.nbytes[unit] for unit in (*loaded, *recorded.refilled)))
    return figures


def assert_streamed(ledger: Ledger, gradient_nbytes: list[dict[str, int]], writes: bool) -> None:
    """Every pass moved what it had to, and nothing else.

    Args:
        gradient_nbytes: What the plain run's backward passes gave to each leaf.
        writes: Whether the model's forward writes its own weights.
    """
    for engine, passes in ledger.passes.items():
        assert [recorded.moved("bytes_up") for recorded in passes] == expected_bytes_up(engine, passes)
        evaluations = [recorded for recorded in passes if recorded.kind != "train"]
        assert not any(recorded.moved("bytes_down") for recorded in evaluations)
        written = sum(recorded.moved("bytes_written_back") for recorded in passes)
        assert bool(written) == bool(passes[-1].after["writebacks"]) and (writes or not written)
    trained = [recorded for passes in ledger.passes.values() for recorded in passes if recorded.kind == "train"]
    pairs = zip(trained, gradient_nbytes, strict=True)
    for recorded, leaves in pairs:
        nbytes = {name: nbytes * recorded.share[name] for name, nbytes in leaves.items()}
        less = sum(nbytes.get(name, 0) for name in recorded.cast_there) / 2
        assert sum(nbytes.values()) - less <= recorded.moved("bytes_down") <= sum(nbytes.values())
    assert sum(recorded.moved("bytes_up") for recorded in trained) > 0


class GradientBytes(L.Callback):
    """Counts, in a plain run, the bytes of the gradients that arrive at each parameter, batch by batch."""

    def __init__(self) -> None:
        self.by_batch: list[dict[str, int]] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for name, parameter in pl_module.named_parameters():
            if parameter.requires_grad:
                parameter.register_hook(functools.partial(self._see, name))

    def on_train_batch_start(self, *_: Any) -> None:
        self.by_batch.append({})

    def _see(self, name: str, gradient: Tensor) -> None:
        nbytes = gradient.numel() * gradient.element_size()
        self.by_batch[-1][name] = self.by_batch[-1].get(name, 0) + nbytes
