"""The way of gradients down: they are packed by unit, copied, and put into `.grad` of the user's parameters.

Each backward has a record of its own, by autograd's number. `.grad` is written as the last gradient of a unit came, and
as the backward ends where that would have to wait: for a reader of what is there, or of a unit that is not complete.
Where an exception ended a backward, the next touch of a weight writes the rest.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable
from concurrent.futures import Executor
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..compat.torch import (
    at_end_of_backward,
    copy_all,
    graph_task,
    hooks_after_accumulation,
    hooks_of_gradient,
    norms_of_all,
    storage_id,
    without_dispatch,
)
from ..errors import UnsupportedError
from ..host.device import NOT_RECORDED, Device, Ring, aligned
from ..host.room import Room
from .host_gradient import DeviceGradientBytes, GradientBytes, HostGradient
from .lazy import grad_of, set_grad
from .leaf import Weight, casts, stepped_already
from .unit import Unit


class Backward:
    """A backward, and the gradients of units that wait for the rest of their unit's."""

    def __init__(self, collector: Gradients, number: int, thread: int | None) -> None:
        self.collector, self.number = collector, number  # by autograd: one inside of another has a higher one
        self.thread = thread  # which called it
        self.came: dict[Unit, dict[Weight, Tensor]] = {}
        self.streams: set[Any] = set()  # on which they were computed
        self.sent: list[tuple[Weight, Any]] = []  # what is put into `.grad` at the end


# By autograd's number and the stream: those under way, and those that an exception ended.
backwards: dict[tuple[int, Gradients], Backward] = {}


def recover() -> None:
    """Deliver the gradients of ended backwards, as a plain run has all that were accumulated before an exception.

    A thread that is in no backward has ended those that it called; those of another thread may be under way.
    """
    if graph_task() != -1:
        return
    here = threading.get_ident()
    for key, backward in list(backwards.items()):
        if backward.thread == here and backwards.pop(key, None) is not None:  # else a hook of the user's came here
            backward.collector.end(backward)


class Stepper(Protocol):
    """The steps of a stream, as gradients know them."""

    early: Any  # the optimizer that steps this backward's gradients as they come; None: there is none

    @property
    def thread(self) -> Executor:
        """The thread that runs steps, one after the other, and sums of gradients between them."""

    def delivered(self, unit: Unit, whose: list[Weight], is_complete: bool) -> None:
        """Note a unit's gradients: all of them, or those that came by the end of backward."""

    def backward_ended(self) -> None:
        """Note that the backward has ended."""


class Gradients:
    """Takes the leaves' gradients to the user's parameters."""

    def __init__(self, device: Device, steps: Stepper, room: Room | None = None) -> None:
        self._device, self._steps = device, steps
        self._room = room  # for gradients that stay on the device until the step
        self.ring = Ring()

    def let_go(self) -> None:
        """Let go of memory whose copies down are under way, before a forward: the device waits for them."""
        self.ring.let_go()

    def close(self) -> None:
        """Release memory on the device, once the copies are done."""
        self.ring.close()

    def take(self, weight: Weight, leaf: Tensor) -> None:
        """Take a leaf's gradient; with the last one of a unit, send them down."""
        key, unit = (graph_task(), self), weight.unit
        if (backward := backwards.get(key)) is None:
            backward = backwards[key] = Backward(self, key[0], unit.window.thread)
            at_end_of_backward(lambda: self.end(backwards.pop(key)))
        backward.streams.add(self._device.current_stream())
        came = backward.came.setdefault(unit, {})
        with without_dispatch():
            grad = grad_of(leaf)
            set_grad(leaf, None)
            trains = weight.host.requires_grad
        if grad is None or not trains:
            return  # frozen since the forward, as by `toggle_optimizer`
        if weight.is_stepped_early:
            raise stepped_already(weight.name)
        if grad.requires_grad:
            raise UnsupportedError(
                f"backward(create_graph=True) would give {weight.name} a gradient with a graph, which cannot be in host"
                " memory: compute such gradients by torch.autograd.grad(..., create_graph=True)"
            )
        if weight.is_shard and (grad := weight.received(grad)) is None:
            return
        if weight.is_narrow:
            grad = self._narrowed(weight, grad)
        came[weight] = grad
        del grad  # which may be wider than what is sent down of it
        if len(came) >= unit.trained:
            self._flush(backward, unit, backward.came.pop(unit), is_complete=True)

    @staticmethod
    @torch.no_grad()
    def _narrowed(weight: Weight, grad: Tensor) -> Tensor:
        """Return a gradient that came through one cast alone in the cast's type, which has all bits of it.

        One that a hook of the user's sees stays as it is.
        """
        with without_dispatch():
            through = {storage_id(storage) for storage in casts.get(graph_task(), {}).pop(weight, ())}
            is_of_one = grad._version == 1 and storage_id(grad.untyped_storage()) in through  # 1: the copy that made it
            return grad.to(weight.dtype) if is_of_one and not hooks_of_gradient(weight.host) else grad

    def end(self, backward: Backward) -> None:
        """Send down what came of units that did not get all their gradients, and put all into `.grad`."""
        self._deposit_before(backward, {weight for weight, _ in backward.sent}.union(*backward.came.values()))
        with contextlib.ExitStack() as ends:  # which go on, last one first, where a hook of the user's raises
            if (listener := self._device.counters.listener) is not None:
                ends.callback(listener.idle)
            ends.callback(self._steps.backward_ended)
            ends.callback(self._deposit_all, backward.sent)
            while backward.came:
                self._flush(backward, *backward.came.popitem(), is_complete=False)

    def _deposit_before(self, inner: Backward, whose: Iterable[Weight]) -> None:
        """Deposit what backwards around this one have so far of these weights: sums depend on order."""
        if not backwards:
            return
        mine = set(whose)
        for backward in list(backwards.values()):
            if backward.collector is self and backward.number < inner.number:
                for unit in [unit for unit, came in backward.came.items() if not mine.isdisjoint(came)]:
                    self._flush(backward, unit, backward.came.pop(unit), is_complete=False)
                sent, backward.sent[:] = backward.sent[:], []
                self._deposit_all(sent)

    def _flush(self, backward: Backward, unit: Unit, came: dict[Weight, Tensor], is_complete: bool) -> None:
        self._prepare(backward, came)
        with torch.no_grad(), without_dispatch():
            sent = self._send(unit, came, self._device.current_stream())
        self._deliver(backward, unit, sent, is_complete)

    def _prepare(self, backward: Backward, came: dict[Weight, Tensor]) -> None:
        """Have the caller's stream wait for gradients, and pass them through the user's hooks."""
        here = self._device.current_stream()
        for stream in backward.streams - {here}:
            here.wait_event(stream.record_event())
            for grad in came.values():
                self._device.keep_for(grad, here)
        with without_dispatch():
            hooked = [weight for weight in came if hooks_of_gradient(weight.host)]
        with torch.no_grad():
            for weight in hooked:  # with dispatch: the weights and gradients that hooks read wait
                window = weight.unit.window
                was_in_step, window.is_in_step = window.is_in_step, True  # hooks get weights where the gradients are
                try:
                    came[weight] = self._hooked(weight, came[weight])
                finally:
                    window.is_in_step = was_in_step

    def _deliver(self, backward: Backward, unit: Unit, sent: list[tuple[Weight, Any]], is_complete: bool) -> None:
        """Put a unit's gradients into `.grad`, and tell the steps.

        At the end of backward those that would have to wait, unless a step or a hook of the user's reads them now.
        """
        with without_dispatch():
            after = [weight.host for weight, _ in sent if hooks_after_accumulation(weight.host)]
            is_read = bool(after) or self._steps.early is not None
            waits = {weight for weight, came in sent if weight.is_shard or not (is_read or _can_take(weight, came))}
        self._deposit_before(backward, [weight for weight, _ in sent if weight not in waits])
        backward.sent += [one for one in sent if one[0] in waits]
        self._deposit_all([one for one in sent if one[0] not in waits])
        for host in after:
            for hook in list(hooks_after_accumulation(host).values()):
                hook(host)
        self._steps.delivered(unit, [weight for weight, _ in sent], is_complete)

    @staticmethod
    def _hooked(weight: Weight, grad: Tensor) -> Tensor:
        """Pass a gradient through the user's hooks on the parameter."""
        with without_dispatch():
            hooks = list((hooks_of_gradient(weight.host) or {}).values())
        for hook in hooks:
            changed = hook(grad)
            grad = grad if changed is None else changed
        return grad

    def _send(self, unit: Unit, came: dict[Weight, Tensor], here: Any) -> list[tuple[Weight, Any]]:
        """Send a unit's gradients down, or note those of resident weights; return them in their order."""
        dense = [(weight, grad) for weight, grad in came.items() if grad.layout is torch.strided]
        sent: dict[Weight, Any] = dict(came)
        if dense:
            norms = norms_by_type(dense)
            room = None if unit.is_resident else self._room
            stays = unit.is_resident or (room is not None and room.takes(sum(grad.nbytes for _, grad in dense)))
            kind = DeviceGradientBytes if stays else GradientBytes
            raws, arrived = self._kept(dense, here) if stays else self._packed(unit, dense, here)
            for (weight, _), raw in zip(dense, raws, strict=True):
                sent[weight] = kind(weight, raw, arrived, norms[weight])
                if stays and room is not None:
                    room.keep(sent[weight], raw.nbytes)
        if len(dense) < len(came):
            for weight, grad in came.items():
                if grad.layout is not torch.strided:
                    sent[weight] = grad.to("cpu", weight.value.dtype)
        return list(sent.items())

    def _kept(self, dense: list[tuple[Weight, Tensor]], stream: Any) -> tuple[list[Tensor], Any]:
        """Keep gradients on the device, as fresh memory in the order of their weights."""
        kept = [torch.empty_like(weight.there, dtype=grad.dtype).copy_(grad) for weight, grad in dense]
        return kept, stream.record_event()

    def _packed(self, unit: Unit, dense: list[tuple[Weight, Tensor]], stream: Any) -> tuple[list[Tensor], Any]:
        """Pack gradients on the device, and start to copy them down as one."""
        places, total = [], 0
        host: Any = self._device if unit.spill is None else unit.spill
        round_up = aligned if unit.spill is None else unit.spill.aligned
        nbytes = [grad.nbytes for _, grad in dense]
        for each in nbytes:
            places.append(total)
            total += round_up(each)
        there, here = self._device.empty(total), host.passing(total)
        typed = {dtype: there.view(dtype) for dtype in {grad.dtype for _, grad in dense}}
        packed, views, storage = [], [], here.untyped_storage()
        for at, (weight, grad) in zip(places, dense, strict=True):
            shape, stride, _ = weight.form
            packed.append(typed[grad.dtype].as_strided(shape, stride, at // grad.itemsize))
            alone = storage[at : at + grad.nbytes]  # torch.save writes whole storages
            views.append(torch.empty(0, dtype=grad.dtype, device=alone.device).set_(alone, 0, shape, stride))
        copy_all(packed, [grad for _, grad in dense])
        self._device.down.wait_event(stream.record_event())
        counters, listener = self._device.counters, self._device.counters.listener
        recorded = NOT_RECORDED if listener is None else listener.work("down", unit.name, "gradients", sum(nbytes))
        arrived = host.send_down(here, there, recorded)
        counters.bytes_down += sum(nbytes)
        self.ring.hold(there, [arrived], stream)
        return views, arrived

    def assign(self, weight: Weight, grad: Tensor) -> Tensor:
        """Make a parameter's gradient of a tensor on the device, which the user assigns."""
        with torch.no_grad(), without_dispatch():
            ((_, made),) = self._send(weight.unit, {weight: grad}, self._device.current_stream())
            return HostGradient.of(made) if isinstance(made, GradientBytes) else made

    def _deposit_all(self, sent: list[tuple[Weight, Any]]) -> None:
        """Make these the parameters' gradients, or add them to the gradients that are there."""
        with without_dispatch(), torch.no_grad():
            for weight, came in sent:
                if weight.is_shard:
                    weight.deposit(came, is_sum=False)
                    continue
                host = weight.host
                there = grad_of(host)
                if there is None:
                    set_grad(host, HostGradient.of(came) if isinstance(came, GradientBytes) else came)
                elif isinstance(came, GradientBytes) and isinstance(there, HostGradient):
                    there.content.accumulate(came, self._steps.thread)
                else:
                    _add_tensors(host, there, came)


def _can_take(weight: Weight, came: Any) -> bool:
    """Whether `.grad` takes a gradient without a wait: it is None, or nothing reads it. Called without dispatch."""
    there = grad_of(weight.host)
    return isinstance(came, GradientBytes) and (there is None or (isinstance(there, HostGradient) and there.is_unread))


def norms_by_type(dense: list[tuple[Weight, Tensor]]) -> dict[Weight, Tensor]:
    """Return the gradients' norms, by the kernel for many tensors of one type: that for several types is another."""
    alike: dict[torch.dtype, dict[Weight, Tensor]] = {}
    for weight, grad in dense:
        alike.setdefault(weight.value.dtype, {})[weight] = grad.to(weight.value.dtype)
    norms: dict[Weight, Tensor] = {}
    for grads in alike.values():
        norms.update(zip(grads, norms_of_all(list(grads.values()), 2.0), strict=True))
    return norms


def _add_tensors(host: nn.Parameter, there: Any, came: Any) -> None:
    if isinstance(there, HostGradient):
        there.before()
    new = came.settle() if isinstance(came, GradientBytes) else came
    set_grad(host, new + there if there.is_sparse and not new.is_sparse else there.add_(new))
