"""Gradients of several ranks: each unit's are summed on the devices, and each rank brings its part of the means down.

1. Every weight is cut into as many parts as the machine has ranks, at multiples of 64 elements: each rank sums, brings
   down and steps its own part of it (`Cut`).
2. Units are exchanged in one order on all ranks, from the last to the first: a unit waits for its turn. The end of
   backward sends the rest, with zeros for what this rank has not reached.
3. One small message at the end says which weights any rank has reached: the others keep their `.grad`.
4. As under DDP, what is in `.grad` is added before the exchange: the sum of backwards that were not exchanged, or the
   mean of one that was.
"""

from __future__ import annotations

import collections
import contextlib
import weakref
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..compat.streaming import without_dispatch
from ..compat.tensors import local_of
from ..errors import UnsupportedError
from ..host.device import NOT_RECORDED, Device, Ring, aligned
from ..stream.gradients import (
    Backward,
    DeviceGradientBytes,
    GradientBytes,
    Gradients,
    HostGradient,
    Stepper,
    norms_by_type,
)
from ..stream.lazy import grad_of, set_data, set_grad
from ..stream.leaf import Weight
from ..stream.unit import Unit
from .board import Stage
from .cut import Cut
from .memory import Twin
from .sums import tree
from .team import Team

FLYING = 2  # exchanges under way


class Mean(GradientBytes):
    """A gradient whose parts the ranks of a machine brought down. This rank's part is there once it has ``arrived``."""

    def __init__(self, weight: Weight, raw: Tensor, arrived: Any, everywhere: Future[None]) -> None:
        super().__init__(weight, raw, arrived, None)
        self.everywhere = everywhere  # when all parts are there
        self.has_local = False  # whether this rank added a gradient that was not exchanged

    def true(self) -> Tensor:
        self.everywhere.result()
        return super().true()

    def accumulate(self, came: GradientBytes, worker: Executor) -> None:
        self.has_local = True
        super().accumulate(came, worker)


class ResidentMean(DeviceGradientBytes):
    """A gradient of a resident weight, which every rank has whole."""

    has_local = False

    def accumulate(self, came: GradientBytes, worker: Executor) -> None:
        self.has_local = True
        super().accumulate(came, worker)


class Exchanged(NamedTuple):
    """A unit whose gradients are under way."""

    unit: Unit
    whose: list[Weight]
    reached: list[bool]  # by this rank
    is_complete: bool
    rows: Tensor  # what was sent: a row for each rank
    home: Any  # the stream of that memory
    got: Tensor  # what came: a row of each
    work: Any


class Turns:
    """The exchanges of one backward."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.left = collections.deque(unit for unit in reversed(units) if trained(unit))
        self.ready: dict[Unit, tuple[dict[Weight, Tensor], bool]] = {}
        self.under_way: collections.deque[Exchanged] = collections.deque()
        self.reached: list[bool] = []  # of all weights that were sent
        self.unsure: list[tuple[int, Unit, Weight, Any]] = []  # which only other ranks may have reached


def trained(unit: Unit) -> list[Weight]:
    """List the weights of a unit whose gradients are exchanged, those of one type beside each other."""
    whose = [weight for weight in unit.weights if weight.host.requires_grad and not weight.is_part]
    return sorted(whose, key=lambda weight: str(weight.value.dtype))


class SharedGradients(Gradients):
    """Takes the leaves' gradients to the user's parameters, as means over all ranks."""

    def __init__(self, device: Device, steps: Stepper, team: Team, units: list[Unit]) -> None:
        super().__init__(device, steps)
        self._team, self._units, self._slabs = team, units, team.slabs
        self._stream = device.new_stream()  # on which parts are summed, beside backward
        self._sums = Ring()
        self._turns: dict[Backward, Turns] = {}
        self._means: dict[Unit, tuple[Twin, dict[Weight, Tensor]]] = {}
        self._shown: dict[Weight, weakref.ref[Any]] = {}  # the gradient over a mean that the user got last

    # ---- turns

    def _flush(self, backward: Backward, unit: Unit, came: dict[Weight, Tensor], is_complete: bool) -> None:
        turns = self._turns_of(backward)
        if turns is None or unit not in turns.left:
            super()._flush(backward, unit, came, is_complete)
            return
        turns.ready[unit] = came, is_complete
        while turns.left and turns.left[0] in turns.ready:
            self._begin(backward, turns, turns.left.popleft())

    def _turns_of(self, backward: Backward) -> Turns | None:
        """Return the exchanges of a backward; None: there are none."""
        if backward not in self._turns and self._team.exchanges:
            self._turns[backward] = Turns(self._units)
        return self._turns.get(backward)

    def end(self, backward: Backward) -> None:
        with contextlib.ExitStack() as ends:
            ends.callback(super().end, backward)
            turns = self._turns_of(backward)
            ends.callback(self._turns.pop, backward, None)
            if turns is not None and not self._team.has_failed:
                for unit, came in backward.came.items():
                    turns.ready.setdefault(unit, (came, False))
                backward.came.clear()
                while turns.left:
                    self._begin(backward, turns, turns.left.popleft())
                while turns.under_way:
                    self._land(backward, turns, turns.under_way.popleft())
                self._settle_unreached(backward, turns)

    def _settle_unreached(self, backward: Backward, turns: Turns) -> None:
        """Deliver the gradients that only other ranks have, in one message (Rule 3)."""
        flags = torch.tensor(turns.reached, dtype=torch.uint8, device=self._device.torch_device)
        self._team.wait(self._team.start_maximum(flags), "the end of a backward")
        if not turns.unsure:
            return
        reached = flags.tolist()
        by_unit: dict[Unit, list[tuple[Weight, Any]]] = {}
        for at, unit, weight, content in turns.unsure:
            if reached[at]:
                by_unit.setdefault(unit, []).append((weight, content))
        for unit, sent in by_unit.items():
            self._deliver(backward, unit, sent, is_complete=False)

    # ---- exchanges

    def _leave_kept(self, unit: Unit) -> None:
        """Give means of before that the user has kept memory of their own: ranks write over them after the exchange."""
        with without_dispatch(), torch.no_grad():
            for weight in unit.weights:
                kept = self._shown[weight]() if weight in self._shown else None
                if kept is not None and kept is not grad_of(weight.host):
                    set_data(kept, kept.content.true().clone())
                    kept.content = None

    def _begin(self, backward: Backward, turns: Turns, unit: Unit) -> None:
        """Send the parts of a unit's gradients to their ranks."""
        came, is_complete = turns.ready.pop(unit, ({}, False))
        self._prepare(backward, came)
        unit.wait_step()  # which reads the means of before
        self._leave_kept(unit)
        whose = trained(unit)
        with torch.no_grad(), without_dispatch():
            totals = [self._total(weight, came.get(weight)) for weight in whose]
            reached = [weight in came or self._is_local(weight) for weight in whose]
            rows = self._packed_rows(whose, totals)
            here = self._device.current_stream()
            self._stream.wait_event(here.record_event())
            with self._stream:
                got, work = self._team.start_exchange(rows)
        turns.under_way.append(Exchanged(unit, whose, reached, is_complete, rows, here, got, work))
        while len(turns.under_way) > FLYING:
            self._land(backward, turns, turns.under_way.popleft())

    @staticmethod
    def _is_local(weight: Weight) -> bool:
        """Whether `.grad` has what was not exchanged yet."""
        there = grad_of(weight.host)
        return there is not None and getattr(getattr(there, "content", None), "has_local", True)

    @staticmethod
    def _total(weight: Weight, came: Tensor | None) -> Tensor | None:
        """Add what is in `.grad` (Rule 4)."""
        there = grad_of(weight.host)
        for tensor in (there, came):
            if tensor is not None and tensor.layout is not torch.strided:
                raise UnsupportedError(
                    f"{weight.name} got a sparse gradient, which several devices do not sum: set sparse=False"
                )
        if there is None:
            return came
        content = getattr(there, "content", None)
        if content is None:
            before: Tensor = (local_of(there) if weight.is_shard else there).to(weight.there.device)
        else:
            before = content.on_device()
        return before if came is None else before + came.to(before.dtype)

    def _places(self, whose: list[Weight]) -> tuple[list[tuple[Cut, int]], int]:
        """Lay out a row: for each weight its cut and its first byte, and the bytes of all."""
        places, total = [], 0
        for weight in whose:
            cut = self._team.cut(weight.value.numel())
            places.append((cut, total))
            total += aligned(cut.size * weight.value.itemsize)
        return places, total

    def _packed_rows(self, whose: list[Weight], totals: list[Tensor | None]) -> Tensor:
        """Pack gradients, each as its parts for the ranks' rows, divided by the number of all ranks as DDP does it."""
        places, per = self._places(whose)
        rows = self._device.empty(per * self._team.local)
        for weight, total, (cut, at) in zip(whose, totals, places, strict=True):
            like = weight.value
            typed = rows.view(like.dtype)
            stride, at = per // like.itemsize, at // like.itemsize
            if total is None:
                typed.as_strided((self._team.local, cut.size), (stride, 1), at).zero_()
                continue
            if total.stride() != like.stride():
                total = total.new_empty_strided(like.shape, like.stride()).copy_(total)
            full = cut.numel // cut.size if cut.size else 0
            pieces = [(full, cut.size, 0, at)]
            if rest := cut.numel - full * cut.size:
                pieces.append((1, rest, full * cut.size, full * stride + at))
            for count, size, start, place in pieces:
                if count and size:
                    source = total.as_strided((count, size), (cut.size, 1), total.storage_offset() + start)
                    target = typed.as_strided((count, size), (stride, 1), place)
                    target.copy_(source).mul_(1.0 / self._team.size)
        return rows

    def _land(self, backward: Backward, turns: Turns, done: Exchanged) -> None:
        """Sum what came, and start to bring this rank's part of the means down."""
        unit, whose = done.unit, done.whose
        places, per = self._places(whose)
        with torch.no_grad(), without_dispatch(), torch.inference_mode(False):
            with self._stream:
                self._team.wait(done.work, f"the gradients of {unit.name}")
                mean = self._summed(whose, places, done.got, per)
                of_machines = self._team.of_machines(mean, f"the gradients of {unit.name}")
                mean = self._summed(whose, places, of_machines, per)
            land = self._keep if unit.is_resident else self._bring_down
            contents = land(unit, whose, places, mean)
        self.ring.hold(done.rows, [self._stream.record_event()], done.home)
        sent = []
        for weight, reached, content in zip(whose, done.reached, contents, strict=True):
            if reached:
                sent.append((weight, content))
            else:
                turns.unsure.append((len(turns.reached), unit, weight, content))
            turns.reached.append(reached)
        self._deliver(backward, unit, sent, done.is_complete)

    def _summed(self, whose: list[Weight], places: list[tuple[Cut, int]], got: Tensor, per: int) -> Tensor:
        """Add the ranks' rows in the order of the tree, in the memory of the first."""
        rows = got.view(-1, per)
        ends = [at for _, at in places[1:]] + [per]
        start = 0
        for (weight, end), follows in zip(zip(whose, ends, strict=True), [*whose[1:], None], strict=True):
            if follows is None or follows.value.dtype != weight.value.dtype:
                tree([row[start:end].view(weight.value.dtype) for row in rows])
                start = end
        return rows[0]

    def _keep(self, unit: Unit, whose: list[Weight], places: list[tuple[Cut, int]], mean: Tensor) -> list[Any]:
        """Gather whole means on the device."""
        here = self._device.current_stream()
        with self._stream:
            rows = self._team.gathered(mean, f"the gradients of {unit.name}")
            arrived = self._stream.record_event()
        here.wait_event(arrived)
        self._device.keep_for(rows, here)
        raws = []
        for weight, (cut, at) in zip(whose, places, strict=True):
            raw = torch.empty_like(weight.there)
            for rank in range(self._team.local):
                part = cut.part_of(raw, rank)
                start = at // raw.itemsize
                part.copy_(rows[rank].view(raw.dtype)[start : start + len(part)])
            raws.append(raw)
        norms = norms_by_type(list(zip(whose, raws, strict=True)))
        event = here.record_event()
        return [ResidentMean(weight, raw, event, norms[weight]) for weight, raw in zip(whose, raws, strict=True)]

    def _bring_down(self, unit: Unit, whose: list[Weight], places: list[tuple[Cut, int]], mean: Tensor) -> list[Any]:
        """Copy this rank's parts of the means to the memory that all ranks share."""
        twin, faces = self._means_of(unit)
        twin.drop()  # the user's changes of the means of before
        self._device.down.wait_event(self._stream.record_event())
        counters, listener = self._device.counters, self._device.counters.listener
        arrived: Any = self._stream.record_event()
        for weight, (cut, at) in zip(whose, places, strict=True):
            part = cut.part_of(twin.truth_of(faces[weight]), self._team.local_rank)
            if nbytes := part.nbytes:
                counters.bytes_down += nbytes
                recorded = NOT_RECORDED if listener is None else listener.work("down", unit.name, "gradients", nbytes)
                arrived = self._device.send_down(part.view(torch.uint8), mean[at : at + nbytes], recorded)
        self._sums.hold(mean, [arrived], self._stream)
        place = f"the gradients of {unit.name}"
        everywhere = self._team.board.follow(Stage.ARRIVED, unit.index, 1, place, arrived.synchronize)
        return [Mean(weight, faces[weight], arrived, everywhere) for weight in whose]

    def _means_of(self, unit: Unit) -> tuple[Twin, dict[Weight, Tensor]]:
        """Return the memory of a unit's means, and the tensors over it."""
        if unit not in self._means:
            weights = [weight for weight in unit.weights if not weight.is_part]
            places = [0]
            for weight in weights:
                places.append(places[-1] + aligned(weight.value.nbytes))
            twin = self._slabs.twin_of(self._device.slab(places[-1]))
            faces = {w: twin.tensor(at, w.value, w.value.dtype) for w, at in zip(weights, places, strict=False)}
            self._means[unit] = twin, faces
        return self._means[unit]

    def _deposit_all(self, sent: list[tuple[Weight, Any]]) -> None:
        """Make means the parameters' gradients: what was there is part of them (Rule 4)."""
        with without_dispatch(), torch.no_grad():
            for weight, content in sent:
                if weight.is_shard and isinstance(content, Mean):
                    weight.deposit(content, is_sum=True)
                elif isinstance(content, (Mean, ResidentMean)):
                    shown: Any = HostGradient.of(content)
                    set_grad(weight.host, shown)
                    if isinstance(content, Mean):
                        self._shown[weight] = weakref.ref(shown)
        super()._deposit_all([(weight, made) for weight, made in sent if not isinstance(made, (Mean, ResidentMean))])

    def close(self) -> None:
        super().close()
        self._sums.close()
