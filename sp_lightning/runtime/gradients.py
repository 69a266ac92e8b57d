"""The way of gradients down.

1. Gradients are *taken* where nobody sees when they arrive: they are packed into one buffer, start their way down, and
   are accumulated into ``.grad`` as autograd would, in the order in which they came, before backward returns.
2. They are *returned*, arrived, where autograd has something to do with them: hooks on the parameter, and
   ``autograd.grad``. Under ``create_graph`` the way down is part of the graph; it is an operator like any other as well
   for gradients that have tangents, or stand for many. What the task does not ask for is dropped.
3. A packed buffer is kept until the caller's stream waited for its copy, when the next unit's gradients are ready: one
   buffer on its way, one being made.
4. A gradient in autocast's type comes down as it is, and becomes FP32 on the host: the same value.
5. Somebody may change what was accumulated before the optimizer steps: a hook in backward, or a graph that leads to a
   host parameter past its link. Who steps ahead has to know.
"""

from __future__ import annotations

import enum
import functools
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..autograd.bridge import Gradients
from ..core.telemetry import Counters
from ..memory.device import Device
from ..memory.gradient_store import GradientSlab, GradientSlot, PackedGradients, is_own, widened
from ..memory.layout import ALIGNMENT, Layout
from ..memory.parameters import HostParameter, set_true_grad, true_dtype, true_grad
from ..memory.staging import Arrival
from ..memory.unit_store import UnitStore
from ..optim.step_in_backward import HostThread, StepInBackward

Mark = tuple[list[int], list[int]]


class GradientVersions:
    """What ``.grad`` of parameters was when we last knew it: somebody else may change it within the same backward
    (Rule 5)."""

    def __init__(self) -> None:
        self._marks: dict[int, tuple[list[Tensor], Mark]] = {}  # by the first of those that came together
        self._changed: list[Tensor] = []

    def taken(self, parameters: list[Tensor]) -> None:
        """Their gradients are on their way."""
        if id(parameters[0]) not in self._marks:
            self._marks[id(parameters[0])] = parameters, _mark(parameters)

    def landed(self, parameters: list[Tensor], before: Mark) -> None:
        """They were accumulated, into what was this."""
        known, mark = self._marks[id(parameters[0])]
        if len(known) != len(parameters) or mark != before:
            self._changed.append(parameters[0])
        self._marks[id(parameters[0])] = parameters, _mark(parameters)

    def changed(self) -> list[Tensor]:
        """Of those that came together and of which one was changed by somebody else, the first."""
        return self._changed + [known[0] for known, mark in self._marks.values() if _mark(known) != mark]

    def clear(self) -> None:
        """Another backward begins."""
        self._marks.clear()
        self._changed.clear()


def _mark(parameters: list[Tensor]) -> Mark:
    """Make a mark that changes when a gradient is written or replaced.

    It refers to no tensor (gradient_store.py, Rule 1)."""
    grads = list(map(true_grad, parameters))
    return list(map(id, grads)), [grad._version for grad in grads if grad is not None]


@dataclass
class GradientTransfer:
    """Gradients of a unit on their way down."""

    packing: PackedGradients  # freed early, its memory would be given away while it is read
    parameters: list[Tensor]
    host: list[tuple[Tensor, Tensor | None]]  # where their gradients land, and are widened: nobody else's until then
    marks: GradientVersions
    stream: Any  # on which the packed buffer was made: its memory is given out there again
    done: Arrival

    def has_arrived(self) -> bool:
        """Whether ``land`` would not wait."""
        return self.done.query()

    def wait(self) -> None:
        """The gradients are on the host."""
        self.done.synchronize()

    def land(self) -> list[Tensor]:
        """They are accumulated; tells whose they were."""
        self.wait()
        before = _mark(self.parameters)
        for parameter, (grad, room) in zip(self.parameters, self.host, strict=True):
            _accumulate(parameter, grad, room)
        self.marks.landed(self.parameters, before)
        return self.parameters


class GradientReturn:
    """Brings gradients to the host."""

    def __init__(self, device: Device, counters: Counters) -> None:
        self.device = device
        self.counters = counters
        self._slabs: dict[UnitStore, GradientSlab] = {}
        self._under_way: list[GradientTransfer] = []
        self._landing = False
        self._finishing = threading.RLock()
        self._last: GradientTransfer | None = None  # whose device buffer is still held
        self.taken: set[int] = set()  # ids of parameters whose gradients were, in this backward
        self.marks = GradientVersions()
        self.ahead: StepInBackward | None = None  # steps what arrives, while a step that may be overlapped is under way

    def receive(self, store: UnitStore, node: Any, grads: Gradients, final: bool) -> Gradients:
        """Takes a unit's gradients, and returns those that autograd has to have (Rules 1 and 2)."""
        if torch.is_grad_enabled() or _are_more_than_bytes(grads):
            return self._differentiable(store, grads)
        taken: list[int] = []
        returned: list[int] = []
        leaves = node.next_functions
        for index, grad in enumerate(grads):
            if grad is None:
                continue
            fate = _fate(store.params[index], leaves[index][0], grad)
            if fate is Disposition.TAKE:
                taken.append(index)
            elif fate is Disposition.RETURN:
                returned.append(index)
        if taken:
            self._take(store, taken, grads, final)
        return self._arrived(store, returned, grads)

    def finish(self) -> None:
        """All that was taken is in ``.grad`` (Rule 1)."""
        if HostThread.is_current():
            return
        with self._finishing:  # another thread that looks at a gradient waits for it as well
            self._finish()

    def _finish(self) -> None:
        if self.ahead is not None:
            with self.counters.stall("optimizer"):
                self.ahead.finish()
        if self._under_way:
            self._landing = True
            try:
                under_way, self._under_way = self._under_way, []
                for landing in under_way:
                    with self.counters.stall("gradients"):
                        landing.land()
            finally:
                self._landing = False

    @property
    def idle(self) -> bool:
        """Whether there is nothing to finish, here or in another thread."""
        return self.ahead is None and not self._under_way and not self._landing

    @property
    def host_nbytes(self) -> int:
        """Of the slabs that gradients land in."""
        return sum(slab.nbytes for slab in self._slabs.values())

    def drop(self) -> None:
        """Forgets what is under way: its backward failed."""
        self.let_go()
        self._under_way = []

    def is_own(self, store: UnitStore, index: int) -> bool:
        """Whether nobody but the parameter, and the slab that it may be in, refers to its gradient."""
        return is_own(store.params[index], self._slabs.get(store), index)

    # ---- taken

    def _take(self, store: UnitStore, indices: list[int], grads: Gradients, final: bool) -> None:
        """Starts the way down."""
        self.let_go()
        slab = self._slabs.get(store)
        if slab is None or slab.autocast is not store.autocast:
            slab = self._slabs[store] = GradientSlab(store, self.device)
        indices = sorted(indices, key=lambda index: index not in store.narrow)  # gradient_store.py, Rule 2
        taken = [_known(grads[index]) for index in indices]
        places, packing = slab.slots_for(indices, taken)
        landing = self._send(store, taken, packing)
        landing.parameters = [store.params[index] for index in indices]
        landing.host = [(place.tensor, place.wide_view) for place in places]
        self.marks.taken(landing.parameters)
        self.taken.update(map(id, landing.parameters))
        if self.ahead is not None and final and not self._under_way:
            timed = functools.partial(self.counters.listener.work, "optimizer", store.unit.name, "step")
            self.ahead.submit(landing, timed, store.convert)
        else:
            self._under_way.append(landing)

    def _send(self, store: UnitStore, grads: list[Tensor], packing: PackedGradients) -> GradientTransfer:
        """Packs gradients and starts their way down."""
        packing.pack(grads)
        down, compute = self.device.down, self.device.compute
        down.wait_event(compute.record_event())
        under_way = self.counters.listener.work("down", store.unit.name, "gradients", packing.nbytes)
        done = self.device.send_down(packing.copies, under_way)
        self.counters.bytes_down += packing.nbytes
        self._last = GradientTransfer(packing, [], [], self.marks, compute, done)
        return self._last

    def let_go(self) -> None:
        """The device buffer on its way may be freed after its copy (Rule 3)."""
        if self._last is not None:
            with self.counters.listener.waiting("gradients"):
                self._last.done.wait(self._last.stream)
            with self._last.stream:
                self._last.packing.free()
            self._last = None

    # ---- returned

    def _arrived(self, store: UnitStore, indices: list[int], grads: Gradients) -> Gradients:
        """Copies nobody else holds, in the host parameters' types; blocks until they are there."""
        result: list[Tensor | None] = [None] * len(grads)
        dense = [index for index in indices if _known(grads[index]).layout is torch.strided]
        if dense:
            self.let_go()
            room = Layout.of([("", _known(grads[index])) for index in dense])
            flat = self.device.passing(max(room.nbytes, ALIGNMENT))
            places = [
                GradientSlot(room.view(flat.untyped_storage(), field), flat, field.offset) for field in room.fields
            ]
            landing = self._send(store, [_known(grads[index]) for index in dense], PackedGradients(self.device, places))
            with self.counters.stall("gradients"):
                landing.done.synchronize()
            for index, place in zip(dense, places, strict=True):
                result[index] = place.tensor.to(store.host_layout.fields[index].dtype, copy=True)
        for index in set(indices) - set(dense):
            result[index] = _known(grads[index]).cpu()
            self.counters.bytes_down += _known(result[index])._values().nbytes  # sparse
        return tuple(result)

    def _differentiable(self, store: UnitStore, grads: Gradients) -> Gradients:
        """Copies that are part of the graph, or whatever else their originals are."""
        self.counters.bytes_down += sum(grad.nbytes for grad in grads if grad is not None)
        fields = store.host_layout.fields
        return tuple(g if g is None else g.to("cpu", field.dtype) for g, field in zip(grads, fields, strict=True))


def _are_more_than_bytes(grads: Gradients) -> bool:
    """Whether they may have tangents, or stand for many (``is_grads_batched``)."""
    if forward_ad._current_level >= 0:
        return True
    return any(grad is not None and torch._C._functorch.is_legacy_batchedtensor(grad) for grad in grads)


def _known(grad: Tensor | None) -> Tensor:
    assert grad is not None
    return grad


class Disposition(enum.Enum):
    """What becomes of a gradient."""

    TAKE = "take"
    RETURN = "return"
    DROP = "drop"


def _fate(parameter: Tensor, leaf: Any, grad: Tensor) -> Disposition:
    """Rules 1 and 2."""
    try:
        if not torch._C._will_engine_execute_node(leaf) or not parameter.requires_grad:  # frozen since its forward
            return Disposition.DROP
    except RuntimeError:  # autograd.grad: the gradient itself is asked for
        return Disposition.RETURN
    seen = parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
    unguarded = type(parameter) is not HostParameter  # nobody sees who asks for its gradient
    return Disposition.RETURN if seen or unguarded or grad.layout is not torch.strided else Disposition.TAKE


def _accumulate(parameter: Tensor, grad: Tensor, room: Tensor | None) -> None:
    """As autograd does for a leaf."""
    before = true_grad(parameter)
    widens = before is None and room is not None
    if widens:
        grad = widened(grad, _known(room))
    elif grad.dtype is not (dtype := true_dtype(parameter)):
        grad = grad.to(dtype)
    if before is None:
        set_true_grad(parameter, grad)
    elif before.requires_grad or before.layout is not torch.strided:
        set_true_grad(parameter, before + grad)
    else:
        before += grad
