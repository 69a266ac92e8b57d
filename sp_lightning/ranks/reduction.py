"""Gradients of several ranks: each unit's are summed on the devices, and each rank brings a part of the means down.

1. A unit's gradients lie one after the other in a message, which is cut into as many parts as the machine has ranks:
   each rank sums one and brings it down, into memory that all of them share.
2. Units are exchanged in one order on all ranks, from the last to the first: a unit waits for its turn. The end of
   backward sends the rest, with zeros for what this rank has not reached.
3. One small message at the end says which weights any rank has reached: the others keep their `.grad`.
4. As under DDP, what is in `.grad` is added before the exchange: the sum of backwards that were not exchanged, or the
   mean of one that was.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..compat.tensors import is_dtensor, local_of
from ..compat.torch import without_dispatch
from ..errors import UnsupportedError
from ..host.device import Arrival, Device, Ring, aligned
from ..stream.gradients import Backward, Gradients, norms_by_type
from ..stream.host_gradient import DeviceGradientBytes, GradientBytes, HostGradient
from ..stream.lazy import grad_of, set_grad
from ..stream.leaf import Weight
from ..stream.unit import Unit
from .shared_slabs import SharedSlabs
from .sums import tree
from .team import Team
from .watch import Stage

FLYING = 2  # exchanges under way at a time


class MeanBytes(GradientBytes):
    """The bytes of a mean in memory that ranks share. Where the host reads it, this rank gets a copy of its own."""

    def __init__(self, weight: Weight, raw: Tensor, arrived: Arrival, slabs: SharedSlabs) -> None:
        super().__init__(weight, raw, arrived, None)
        self.full, self._slabs = self.room(weight.value), slabs

    def on_device(self) -> Tensor:
        """Return the true mean on the device. Blocks until it arrived, and no sum and no step uses it."""
        if self.is_full or self.factors:
            return super().on_device()
        self.wait()
        self.arrived.synchronize()
        return self.raw.to(self.weight.there.device)

    def release(self) -> Tensor:
        """Return the true mean as streaming ends: no exchange overwrites the shared memory any more."""
        if not self.is_full:
            self.full = self.raw = self._slabs.face_of(self.raw)
        return super().release()


class Message:
    """The layout of a unit's gradients in a flat message: gradients of one type lie beside each other.

    The message has a part for each rank, all of one size.
    """

    def __init__(self, whose: Sequence[Weight], ranks: int) -> None:
        self.whose, self.places, self.nbytes = whose, list[int](), 0
        self.types: dict[torch.dtype, slice] = {}  # the bytes in which gradients of a type lie
        for weight in whose:
            first = self.types.get(weight.value.dtype, slice(self.nbytes, 0)).start
            self.places.append(self.nbytes)
            self.nbytes += aligned(weight.value.nbytes)
            self.types[weight.value.dtype] = slice(first, self.nbytes)
        self.size = aligned(-(-self.nbytes // ranks))  # bytes of a rank's part
        self.means: Tensor | None = None  # the truth of the memory for means, which ranks share

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return a view of the message for each gradient, in the gradient's form."""
        parts = zip(self.whose, self.places, strict=True)
        values = [(weight.value, flat[at : at + weight.value.nbytes]) for weight, at in parts]
        return [part.view(value.dtype).as_strided(value.shape, value.stride()) for value, part in values]

    def add(self, rows: Tensor, part: int) -> Tensor:
        """Sum a part of the message over rows, one from each rank, in the order of the tree, into the first row."""
        first = part * self.size
        for dtype, where in self.types.items():
            start, stop = (min(max(at - first, 0), self.size) for at in (where.start, where.stop))
            tree([row[start:stop].view(dtype) for row in rows])
        return rows[0]


class Turns:
    """The exchanges of one backward: units that wait for their turn, and units under way."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.left = collections.deque(unit for unit in reversed(units) if trained(unit))
        self.ready: dict[Unit, tuple[dict[Weight, Tensor], bool]] = {}
        self.under_way: collections.deque[Callable[[], None]] = collections.deque()  # what ends each exchange
        self.reached: list[bool] = []  # for all weights that were sent, whether this rank reached them
        # Means of weights that another rank may have reached, by their place among all that were sent.
        self.unsure: dict[int, tuple[Unit, Any]] = {}


def trained(unit: Unit) -> tuple[Weight, ...]:
    """Return the weights of a unit whose gradients are exchanged, sorted by type."""
    whose = [weight for weight in unit.weights if weight.host.requires_grad and not weight.is_part]
    return tuple(sorted(whose, key=lambda weight: str(weight.value.dtype)))


class SharedGradients(Gradients):
    """Takes the leaves' gradients to the user's parameters, as means over all ranks."""

    def __init__(self, device: Device, steps: Any, team: Team, units: list[Unit]) -> None:
        super().__init__(device, steps)
        self._team, self._units = team, units
        self._stream = device.new_stream()  # on which parts are summed, beside backward
        self.ring = Ring(2 * FLYING)  # for what is sent, and for sums on their way down
        self._turns: weakref.WeakKeyDictionary[Backward, Turns] = weakref.WeakKeyDictionary()
        self._messages: dict[tuple[Weight, ...], Message] = {}
        self._last: dict[Weight, weakref.ref[MeanBytes]] = {}  # means in the memory that the next ones overwrite

    # ---- turns

    def _flush(self, backward: Backward, unit: Unit, came: dict[Weight, Tensor], is_complete: bool) -> None:
        """Note a unit's gradients, and start the exchange of each unit whose turn has come. Collective."""
        turns = self._turns_of(backward)
        if turns is None or unit not in turns.left:
            super()._flush(backward, unit, came, is_complete)
            return
        turns.ready[unit] = came, is_complete
        while turns.left and turns.left[0] in turns.ready:
            self._start_exchange(backward, turns, turns.left.popleft())

    def _turns_of(self, backward: Backward) -> Turns | None:
        """Return the exchanges of a backward, made at their first use; None if this backward exchanges nothing."""
        if backward not in self._turns and self._team.exchanges:
            self._turns[backward] = Turns(self._units)
        return self._turns.get(backward)

    def end(self, backward: Backward) -> None:
        """Exchange all units that are left, with zeros for missing gradients, and deliver the means. Collective."""
        try:
            turns = self._turns_of(backward)
            if turns is not None and not self._team.has_failed:
                for unit, came in backward.came.items():
                    turns.ready.setdefault(unit, (came, False))
                backward.came.clear()
                while turns.left:
                    self._start_exchange(backward, turns, turns.left.popleft())
                while turns.under_way:
                    turns.under_way.popleft()()
                self._deliver_unreached(backward, turns)
        finally:
            super().end(backward)

    def _deliver_unreached(self, backward: Backward, turns: Turns) -> None:
        """Deliver the means of weights that only other ranks' backwards have reached (Rule 3). Collective; blocks."""
        flags = torch.tensor(turns.reached, dtype=torch.uint8, device=self._device.torch_device)
        self._team.wait(self._team.start_maximum(flags), "the end of a backward")
        is_reached = flags.tolist() if turns.unsure else []
        for at, (unit, content) in turns.unsure.items():
            if is_reached[at]:
                self._deliver(backward, unit, [(content.weight, content)], is_complete=False)

    # ---- exchanges

    def _message_of(self, unit: Unit) -> Message:
        """Return the layout in which ranks exchange a unit's gradients, made at the first call.

        All ranks call this for units in the same order: the first call for a streamed unit reserves shared memory.
        """
        if (whose := trained(unit)) not in self._messages:
            message = self._messages[whose] = Message(whose, self._team.local)
            if not unit.is_resident:
                message.means = self._team.slabs.truth(self._device.slab(message.nbytes))
        return self._messages[whose]

    def _start_exchange(self, backward: Backward, turns: Turns, unit: Unit) -> None:
        """Start to send each rank its part of a unit's gradients; end exchanges beyond `FLYING`. Collective."""
        came, is_complete = turns.ready.pop(unit, ({}, False))
        self._prepare(backward, came)
        unit.wait_step()  # the last step reads the means that are overwritten
        with torch.no_grad(), without_dispatch():
            message = self._message_of(unit)
            sent = self._device.empty(message.size * self._team.local)
            reached = self._fill(message, sent, came)
            here = self._device.current_stream()
            self._stream.wait_event(here.record_event())
            with self._stream:
                got, work = self._team.start_exchange(sent)

        def finish() -> None:
            """Sum this rank's part, start to bring the means down, and deliver them. Collective."""
            contents = self._means(unit, message, got, work)
            self.ring.hold(sent, [self._stream.record_event()], here)
            deliver = []
            for is_reached, content in zip(reached, contents, strict=True):
                content.is_mean = True
                if is_reached:
                    deliver.append((content.weight, content))
                else:
                    turns.unsure[len(turns.reached)] = unit, content
                turns.reached.append(is_reached)
            self._deliver(backward, unit, deliver, is_complete)

        turns.under_way.append(finish)
        while len(turns.under_way) > FLYING:
            turns.under_way.popleft()()

    def _fill(self, message: Message, sent: Tensor, came: dict[Weight, Tensor]) -> list[bool]:
        """Fill a message with gradients, those in `.grad` included (Rule 4); return which weights this rank reached."""
        reached = []
        for weight, place in zip(message.whose, message.views(sent), strict=True):
            there: Any = grad_of(weight.host)
            content = getattr(there, "content", None)
            is_reached = weight in came or (there is not None and not getattr(content, "is_mean", False))
            last = self._last.pop(weight)() if weight in self._last else None
            if last is not None and not (is_reached and last is content):
                last.wait_true()  # it stays in use, and the exchange overwrites the shared memory
            total = self._total(weight, there, came.get(weight))
            place.zero_() if total is None else place.copy_(total)
            reached.append(is_reached)
        for dtype, where in message.types.items():
            sent[where].view(dtype).mul_(1.0 / self._team.size)  # as DDP divides
        return reached

    @staticmethod
    def _total(weight: Weight, there: Any, came: Tensor | None) -> Tensor | None:
        """Return the sum of `.grad` and a gradient that came, on the device; None if there is neither."""
        for tensor in (there, came):
            if tensor is not None and tensor.layout is not torch.strided:
                raise UnsupportedError(
                    f"{weight.name} got a sparse gradient, which several devices do not sum: set sparse=False"
                )
        if there is None:
            return came
        if (content := getattr(there, "content", None)) is not None:
            there = content.on_device()
        before: Tensor = (local_of(there) if is_dtensor(there) else there).to(weight.there.device)
        return before if came is None else before + came.to(before.dtype)

    def _means(self, unit: Unit, message: Message, got: Tensor, work: Any) -> list[Any]:
        """Sum this rank's part of a message, and start to bring the means to where they are stepped. Collective."""
        team, place = self._team, f"the gradients of {unit.name}"
        with torch.no_grad(), without_dispatch(), torch.inference_mode(False):
            with self._stream:
                team.wait(work, place)
                part = message.add(got.view(team.local, -1), team.local_rank)
                part = message.add(team.gathered(part, place, over_machines=True), team.local_rank)
            return (self._keep if unit.is_resident else self._bring_down)(unit, message, part, place)

    def _keep(self, unit: Unit, message: Message, part: Tensor, place: str) -> list[Any]:
        """Gather the whole means of a resident unit on the device. Collective."""
        here = self._device.current_stream()
        with self._stream:
            means = self._team.gathered(part, place)
            here.wait_event(self._stream.record_event())
        self._device.keep_for(means, here)
        whole = list(zip(message.whose, message.views(means.view(-1)), strict=True))
        norms, arrived = norms_by_type(whole), here.record_event()
        return [DeviceGradientBytes(weight, mean, arrived, norms[weight]) for weight, mean in whole]

    def _bring_down(self, unit: Unit, message: Message, part: Tensor, place: str) -> list[Any]:
        """Start to copy this rank's part of the means to shared host memory; return gradients over all means there."""
        means, first = message.means, self._team.local_rank * message.size
        assert means is not None
        target = means[first : min(first + message.size, message.nbytes)]
        self._device.down.wait_event(self._stream.record_event())
        arrived = self._device.send_down(target, part[: target.nbytes], unit.name, "gradients")
        self.ring.hold(part, [arrived], self._stream)
        everywhere = self._team.board.meet(Stage.ARRIVED, unit.index, 1, place, arrived.synchronize)
        parts = zip(message.whose, message.views(means), strict=True)
        contents = [MeanBytes(weight, mean, everywhere, self._team.slabs) for weight, mean in parts]
        self._last.update((content.weight, weakref.ref(content)) for content in contents)
        return contents

    def _deposit_all(self, sent: list[tuple[Weight, Any]]) -> None:
        """Set `.grad` to means, which include what was there (Rule 4); add gradients that were not exchanged."""
        local = []
        with without_dispatch(), torch.no_grad():
            for weight, content in sent:
                if not getattr(content, "is_mean", False):
                    local.append((weight, content))
                elif weight.is_shard:
                    weight.deposit(content, is_total=True)
                else:
                    there: Any = grad_of(weight.host)
                    before = getattr(there, "content", None)
                    if before is None or before.weight is not weight:
                        set_grad(weight.host, HostGradient.of(content))
                        continue
                    # The user may have a list of gradients, or views of their bytes.
                    content.full, there.content = before.full, content
                    if before.is_exposed:
                        content.is_exposed = True
                        content.wait_true()  # views wait for nothing
        super()._deposit_all(local)
