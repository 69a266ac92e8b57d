"""Gradients from device to host: packed by unit, copied, and put into `.grad` of the user's parameters.

Each backward has a record of its own, by autograd's number. `.grad` is written when the last gradient of a unit has
arrived. It is written at the end of the backward if the unit is not complete, or if the write would have to wait for a
reader of the gradient that is there. Where an exception ended a backward, the next touch of a weight writes the rest.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..compat.dynamo import never_compiled_hook
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
from ..host.device import Device, Ring, aligned
from ..host.room import Room
from .host_gradient import DeviceGradientBytes, GradientBytes, HostGradient
from .lazy import grad_of, set_grad
from .leaf import Weight, casts, stepped_already
from .unit import Unit


class Backward:
    """One backward of autograd's, and the gradients that wait for the other gradients of their unit."""

    def __init__(self, collector: Gradients, number: int, thread: int | None) -> None:
        self.collector, self.number = collector, number  # autograd's; a backward inside of another has a higher one
        self.thread = thread  # that called this backward
        self.came: dict[Unit, dict[Weight, Tensor]] = {}  # gradients of units that are not complete
        self.streams: set[Any] = set()  # on which gradients were computed
        self.sent: list[tuple[Weight, Any]] = []  # gradients that are put into `.grad` as this backward ends


# Backwards under way, and those that an exception ended; by autograd's number and the collector of the stream.
backwards: dict[tuple[int, Gradients], Backward] = {}


def recover() -> None:
    """Put gradients that came before an exception ended their backward into `.grad`, as a plain run has them there.

    Does nothing inside a backward. A backward that another thread called may be under way, and is left alone.
    """
    if graph_task() != -1:
        return
    here = threading.get_ident()
    for key, backward in list(backwards.items()):
        if backward.thread == here and backwards.pop(key, None) is not None:  # None: a hook delivered it
            backward.collector.end(backward)


class Gradients:
    """Moves gradients of leaves on the device to `.grad` of the user's parameters on the host."""

    def __init__(self, device: Device, steps: Any, room: Room | None = None) -> None:
        self._device, self._steps = device, steps  # the stream's optimizer steps (optim/steps.py)
        self._room = room  # for gradients that stay on the device until the step
        self.ring = Ring()

    def let_go(self) -> None:
        """Release the device memory of sent gradients before a forward; the device waits for their copies."""
        self.ring.let_go()

    def close(self) -> None:
        """Release the device memory of sent gradients. Blocks until their copies to the host are done."""
        self.ring.close()

    @never_compiled_hook
    def take(self, weight: Weight, leaf: Tensor) -> None:
        """Take a gradient off its leaf; with the last one of a unit, start to copy the unit's gradients to the host."""
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
            return  # the weight was frozen since the forward, as by `toggle_optimizer`
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
        del grad  # it may be wider than the gradient that is sent
        if len(came) >= unit.trained:
            self._flush(backward, unit, backward.came.pop(unit), is_complete=True)

    @staticmethod
    @torch.no_grad()
    def _narrowed(weight: Weight, grad: Tensor) -> Tensor:
        """Convert a gradient that came through one cast alone to the cast's type, which holds all bits of it.

        A gradient that a hook of the user's sees stays as it is.
        """
        with without_dispatch():
            through = map(storage_id, casts.get(graph_task(), {}).pop(weight, ()))
            is_of_one = grad._version == 1 and storage_id(grad.untyped_storage()) in through  # 1: `Lend` wrote it alone
            return grad.to(weight.dtype) if is_of_one and not hooks_of_gradient(weight.host) else grad

    def end(self, backward: Backward) -> None:
        """Finish a backward: send gradients of units that are not complete, and put all that wait into `.grad`."""
        self._deposit_before(backward, {weight for weight, _ in backward.sent}.union(*backward.came.values()))
        with contextlib.ExitStack() as ends:  # run last one first, all of them even if a hook of the user's raises
            if (listener := self._device.counters.listener) is not None:
                ends.callback(listener.idle)
            ends.callback(self._steps.backward_ended)
            ends.callback(self._deposit_all, backward.sent)
            while backward.came:
                self._flush(backward, *backward.came.popitem(), is_complete=False)

    def _deposit_before(self, inner: Backward, whose: Iterable[Weight]) -> None:
        """First put gradients of these weights into `.grad` that enclosing backwards hold: sums depend on order."""
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
        """Pass a unit's gradients through hooks, start to copy them to the host, and put them into `.grad`."""
        self._prepare(backward, came)
        with torch.no_grad(), without_dispatch():
            sent = self._send(unit, came, self._device.current_stream())
        self._deliver(backward, unit, sent, is_complete)

    def _prepare(self, backward: Backward, came: dict[Weight, Tensor]) -> None:
        """Make the current stream wait for gradients, and pass each through the user's hooks on its parameter."""
        here = self._device.current_stream()
        for stream in backward.streams - {here}:
            here.wait_event(stream.record_event())
            for grad in came.values():
                self._device.keep_for(grad, here)
        with without_dispatch():
            hooked = [weight for weight in came if hooks_of_gradient(weight.host)]
        with torch.no_grad():
            for weight in hooked:  # with dispatch: weights and gradients that hooks read wait for their bytes
                window = weight.unit.window
                was_in_step, window.is_in_step = window.is_in_step, True  # hooks get weights where the gradients are
                try:
                    came[weight] = through_hooks(weight.host, came[weight])
                finally:
                    window.is_in_step = was_in_step

    def _deliver(self, backward: Backward, unit: Unit, sent: list[tuple[Weight, Any]], is_complete: bool) -> None:
        """Put a unit's gradients into `.grad`, run hooks after accumulation, and notify the optimizer steps.

        Gradients that would have to wait are put there as the backward ends, unless a step or a hook reads them now.
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

    def _send(self, unit: Unit, came: dict[Weight, Tensor], here: Any) -> list[tuple[Weight, Any]]:
        """Start to copy a unit's gradients to the host, or keep them on the device; return them in the order of `came`.

        Gradients of resident weights are kept, and those for which there is room. Sparse ones block.
        """
        dense = [(weight, grad) for weight, grad in came.items() if grad.layout is torch.strided]
        sent: dict[Weight, Any] = {
            weight: grad if grad.layout is torch.strided else grad.to("cpu", weight.value.dtype)
            for weight, grad in came.items()
        }
        if dense:
            norms = norms_by_type(dense)
            room = None if unit.is_resident else self._room
            stays = unit.is_resident or (room is not None and room.takes(sum(grad.nbytes for _, grad in dense)))
            kind = DeviceGradientBytes if stays else GradientBytes
            if stays:  # in fresh memory, in the weights' layout
                raws = [torch.empty_like(weight.there, dtype=grad.dtype).copy_(grad) for weight, grad in dense]
                arrived = here.record_event()
            else:
                raws, arrived = self._packed(unit, dense, here)
            for (weight, _), raw in zip(dense, raws, strict=True):
                sent[weight] = kind(weight, raw, arrived, norms[weight])
                if stays and room is not None:
                    room.keep(sent[weight], raw.nbytes)
        return list(sent.items())

    def _packed(self, unit: Unit, dense: list[tuple[Weight, Tensor]], stream: Any) -> tuple[list[Tensor], Any]:
        """Pack gradients into one device buffer, and start its copy to the host; return host tensors and its end."""
        host: Any = self._device if unit.spill is None else unit.spill
        round_up = aligned if unit.spill is None else unit.spill.aligned
        nbytes = [grad.nbytes for _, grad in dense]
        *places, total = itertools.accumulate(map(round_up, nbytes), initial=0)
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
        arrived = host.send_down(here, there, unit.name, "gradients")
        self.ring.hold(there, [arrived], stream)
        return views, arrived

    def assign(self, weight: Weight, grad: Tensor) -> Tensor:
        """Convert a device tensor that the user assigns to `.grad` to the gradient that the parameter gets."""
        with torch.no_grad(), without_dispatch():
            ((_, made),) = self._send(weight.unit, {weight: grad}, self._device.current_stream())
            return HostGradient.of(made) if isinstance(made, GradientBytes) else made

    def _deposit_all(self, sent: list[tuple[Weight, Any]]) -> None:
        """Put gradients into `.grad` of their parameters, or add them to the gradients that are there."""
        with without_dispatch(), torch.no_grad():
            for weight, came in sent:
                if weight.is_shard:
                    weight.deposit(came, is_total=False)
                    continue
                host = weight.host
                there = grad_of(host)
                if there is None:
                    set_grad(host, HostGradient.of(came) if isinstance(came, GradientBytes) else came)
                elif isinstance(came, GradientBytes) and isinstance(there, HostGradient):
                    there.content.accumulate(came, self._steps.thread)
                else:
                    _add_tensors(host, there, came)


def through_hooks(param: Tensor, grad: Tensor) -> Tensor:
    """Run the user's hooks on a parameter's gradient, and return the gradient that they leave."""
    with without_dispatch():
        hooks = list((hooks_of_gradient(param) or {}).values())
    for hook in hooks:
        changed = hook(grad)
        grad = grad if changed is None else changed
    return grad


def _can_take(weight: Weight, came: Any) -> bool:
    """Whether a gradient can go into `.grad` without a wait: `.grad` is None, or nothing reads its bytes."""
    there = grad_of(weight.host)
    return isinstance(came, GradientBytes) and (there is None or (isinstance(there, HostGradient) and there.is_unread))


def norms_by_type(dense: list[tuple[Weight, Tensor]]) -> dict[Weight, Tensor]:
    """Compute each gradient's 2-norm by one multi-tensor call per type: mixed types take another kernel."""
    alike: dict[torch.dtype, dict[Weight, Tensor]] = {}
    for weight, grad in dense:
        alike.setdefault(weight.value.dtype, {})[weight] = grad.to(weight.value.dtype)
    norms: dict[Weight, Tensor] = {}
    for grads in alike.values():
        norms.update(zip(grads, norms_of_all(list(grads.values()), 2.0), strict=True))
    return norms


def _add_tensors(host: nn.Parameter, there: Any, came: Any) -> None:
    """Add a gradient to the one in `.grad`, of which one is sparse or the user's own tensor. Blocks for their bytes."""
    if isinstance(there, HostGradient):
        there.before()
    new = came.wait_true() if isinstance(came, GradientBytes) else came
    set_grad(host, new + there if there.is_sparse and not new.is_sparse else there.add_(new))
