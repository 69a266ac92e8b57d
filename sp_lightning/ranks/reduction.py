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
import contextlib
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..compat.tensors import local_of
from ..compat.torch import without_dispatch
from ..errors import UnsupportedError
from ..host.device import Device, Ring, aligned
from ..stream.gradients import Backward, Gradients, norms_by_type
from ..stream.host_gradient import DeviceGradientBytes, GradientBytes, HostGradient
from ..stream.lazy import grad_of, set_data, set_grad
from ..stream.leaf import Weight
from ..stream.unit import Unit
from .board import Stage
from .shared_slabs import Twin
from .sums import tree
from .team import Team

FLYING = 2  # exchanges under way at a time


class Everywhere(NamedTuple):
    """The end of a copy of means to the host, of which each rank of the machine makes a part."""

    reached: Future[None]

    def wait(self, stream: Any) -> None:
        """Block until all ranks' parts have arrived: no stream knows of other ranks' copies."""
        self.synchronize()

    def synchronize(self) -> None:
        """Block until all ranks' parts have arrived."""
        self.reached.result()


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
        self.means: Twin | None = None  # the memory of the means, which ranks share

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


class Exchanged(NamedTuple):
    """A unit whose gradients are being exchanged."""

    unit: Unit
    message: Message
    reached: list[bool]  # whether this rank's backward reached each weight
    is_complete: bool
    sent: Tensor
    home: Any  # the stream on which `sent` was allocated
    got: Tensor  # this rank's part of the gradients, one row from each rank
    work: Any
    kept: dict[Weight, Tensor]  # copies of the means in `.grad` of weights that this rank's backward did not reach


class Unsure(NamedTuple):
    """The mean of a weight that this rank's backward did not reach, and that another rank's may have reached."""

    at: int  # its place among all weights that were sent
    unit: Unit
    weight: Weight
    content: Any
    kept: Tensor | None  # a copy of the mean in `.grad`


class Turns:
    """The exchanges of one backward: units that wait for their turn, and units under way."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.left = collections.deque(unit for unit in reversed(units) if trained(unit))
        self.ready: dict[Unit, tuple[dict[Weight, Tensor], bool]] = {}
        self.under_way: collections.deque[Exchanged] = collections.deque()
        self.reached: list[bool] = []  # for all weights that were sent, whether this rank reached them
        self.unsure: list[Unsure] = []


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
        self._sums = Ring()
        self._turns: dict[Backward, Turns] = {}
        self._messages: dict[tuple[Weight, ...], Message] = {}
        # The gradient over shared means that the user got last, and its bytes, of which there may be views.
        self._shown: dict[Weight, tuple[weakref.ref[Any], GradientBytes]] = {}

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
        with contextlib.ExitStack() as ends:
            ends.callback(super().end, backward)
            turns = self._turns_of(backward)
            ends.callback(self._turns.pop, backward, None)
            if turns is not None and not self._team.has_failed:
                for unit, came in backward.came.items():
                    turns.ready.setdefault(unit, (came, False))
                backward.came.clear()
                while turns.left:
                    self._start_exchange(backward, turns, turns.left.popleft())
                while turns.under_way:
                    self._finish_exchange(backward, turns, turns.under_way.popleft())
                self._deliver_unreached(backward, turns)

    def _deliver_unreached(self, backward: Backward, turns: Turns) -> None:
        """Deliver the means of weights that only other ranks' backwards have reached (Rule 3). Collective; blocks."""
        flags = torch.tensor(turns.reached, dtype=torch.uint8, device=self._device.torch_device)
        self._team.wait(self._team.start_maximum(flags), "the end of a backward")
        if not turns.unsure:
            return
        reached = flags.tolist()
        by_unit: dict[Unit, list[tuple[Weight, Any]]] = {}
        for one in turns.unsure:
            if reached[one.at]:
                by_unit.setdefault(one.unit, []).append((one.weight, one.content))
            elif one.kept is not None:  # the exchange has divided and summed it again, which rounds
                with torch.no_grad(), without_dispatch():
                    grad_of(one.weight.host).content.wait_true().copy_(one.kept)
        for unit, sent in by_unit.items():
            self._deliver(backward, unit, sent, is_complete=False)

    # ---- exchanges

    def _detach_kept_means(self, unit: Unit) -> None:
        """Give the last means that the user has kept memory of their own: the exchange overwrites the shared memory."""
        viewed: list[int] = []  # addresses of means of which the user may have views
        with without_dispatch(), torch.no_grad():
            for weight in self._shown.keys() & set(unit.weights):
                shown, content = self._shown[weight]
                kept = shown()
                if kept is not None and kept is grad_of(weight.host):
                    continue
                del self._shown[weight]
                if content.is_exposed:
                    viewed.append(content.full.data_ptr())
                if kept is not None and kept.content is content:
                    set_data(kept, content.full if content.is_exposed else content.wait_true().clone())
                    kept.__class__ = Tensor
            for message in self._messages.values() if viewed else ():
                if message.means is not None and any(map(message.means.has, viewed)):
                    message.means = self._team.slabs.renewed(message.means)

    def _message_of(self, unit: Unit) -> Message:
        """Return the layout of a unit's message; allocate shared memory for means at its first use, on all ranks."""
        if (whose := trained(unit)) not in self._messages:
            message = self._messages[whose] = Message(whose, self._team.local)
            if not unit.is_resident:
                message.means = self._team.slabs.twin_of(self._device.slab(message.nbytes))
        return self._messages[whose]

    def _start_exchange(self, backward: Backward, turns: Turns, unit: Unit) -> None:
        """Start to send each rank its part of a unit's gradients, `.grad` included. Collective."""
        came, is_complete = turns.ready.pop(unit, ({}, False))
        self._prepare(backward, came)
        unit.wait_step()  # the last step reads the means that are overwritten
        self._detach_kept_means(unit)
        with torch.no_grad(), without_dispatch():
            message = self._message_of(unit)
            reached = [weight in came or self._is_local(weight) for weight in message.whose]
            kept = {}
            for weight, is_reached in zip(message.whose, reached, strict=True):
                if not is_reached and message.means is not None and grad_of(weight.host) is not None:
                    kept[weight] = grad_of(weight.host).content.wait_true().clone()
            sent = self._device.empty(message.size * self._team.local)
            for weight, place in zip(message.whose, message.views(sent), strict=True):
                total = self._total_with_grad(weight, came.get(weight))
                place.zero_() if total is None else place.copy_(total)
            for dtype, where in message.types.items():
                sent[where].view(dtype).mul_(1.0 / self._team.size)  # as DDP divides
            here = self._device.current_stream()
            self._stream.wait_event(here.record_event())
            with self._stream:
                got, work = self._team.start_exchange(sent)
        turns.under_way.append(Exchanged(unit, message, reached, is_complete, sent, here, got, work, kept))
        while len(turns.under_way) > FLYING:
            self._finish_exchange(backward, turns, turns.under_way.popleft())

    @staticmethod
    def _is_local(weight: Weight) -> bool:
        """Whether `.grad` has a sum that was not exchanged yet."""
        there = grad_of(weight.host)
        return there is not None and not getattr(getattr(there, "content", None), "is_mean", False)

    @staticmethod
    def _total_with_grad(weight: Weight, came: Tensor | None) -> Tensor | None:
        """Return the sum of `.grad` and a gradient that came, on the device; None if there is neither (Rule 4)."""
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

    def _finish_exchange(self, backward: Backward, turns: Turns, done: Exchanged) -> None:
        """Sum the parts that came, start to bring this rank's part of the means down, and deliver them. Collective."""
        unit, message, team, place = done.unit, done.message, self._team, f"the gradients of {done.unit.name}"
        with torch.no_grad(), without_dispatch(), torch.inference_mode(False):
            with self._stream:
                team.wait(done.work, place)
                part = message.add(done.got.view(team.local, -1), team.local_rank)
                part = message.add(team.gathered(part, place, over_machines=True), team.local_rank)
            contents = (self._keep if unit.is_resident else self._bring_down)(unit, message, part, place)
        self.ring.hold(done.sent, [self._stream.record_event()], done.home)
        sent = []
        for weight, reached, content in zip(message.whose, done.reached, contents, strict=True):
            content.is_mean = True
            if reached:
                sent.append((weight, content))
            else:
                turns.unsure.append(Unsure(len(turns.reached), unit, weight, content, done.kept.get(weight)))
            turns.reached.append(reached)
        self._deliver(backward, unit, sent, done.is_complete)

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
        means.drop_edits()  # of the last means, by the user
        target = means.truth[first : min(first + message.size, message.nbytes)]
        self._device.down.wait_event(self._stream.record_event())
        arrived = self._device.send_down(target, part[: target.nbytes], unit.name, "gradients")
        self._sums.hold(part, [arrived], self._stream)
        everywhere = Everywhere(self._team.board.follow(Stage.ARRIVED, unit.index, 1, place, arrived.synchronize))
        faces = [means.tensor(at, w.value, w.value.dtype) for w, at in zip(message.whose, message.places, strict=True)]
        return [GradientBytes(*named, everywhere, None) for named in zip(message.whose, faces, strict=True)]

    def _deposit_all(self, sent: list[tuple[Weight, Any]]) -> None:
        """Put means into `.grad`, in place of what they include (Rule 4); add gradients that were not exchanged."""
        local = []
        with without_dispatch(), torch.no_grad():
            for weight, content in sent:
                if not getattr(content, "is_mean", False):
                    local.append((weight, content))
                elif weight.is_shard:
                    weight.deposit(content, is_sum=True)
                else:
                    shown: Any = grad_of(weight.host)
                    before = getattr(shown, "content", None)
                    if before is None or before.weight is not weight:
                        shown = HostGradient.of(content)
                    else:  # the user may have a list of gradients
                        set_data(shown, content.full)
                        shown.content = content
                    set_grad(weight.host, shown)
                    self._shown[weight] = weakref.ref(shown), content
        super()._deposit_all(local)

    def let_go(self) -> None:
        """Let go of device memory whose copies are under way, summed parts too; its streams wait for the copies."""
        super().let_go()
        self._sums.let_go()

    def close(self) -> None:
        """Block until all copies are done, and release the device memory, that of summed parts too."""
        super().close()
        self._sums.close()
