"""Gradients on their way down: packed on the device, copied to the host, accumulated into ``.grad``.

1. A gradient is *taken* where no code can see when it arrives. It is packed with its unit's others into one buffer,
   sent down, and accumulated into ``.grad`` as autograd would: before backward returns, in the order of arrival from
   autograd.
2. A gradient is *returned* to autograd, after its arrival on the host, where autograd has more to do with it: for hooks
   on the parameter, and for ``autograd.grad``. Under ``create_graph`` the way down is part of the graph. It is an
   ordinary operator as well for gradients that have tangents or are batched. A gradient that this backward does not
   need is dropped. Leaves on the host run on another thread than the device's nodes: of those that wait there, autograd
   takes any that has the highest number. So each gets a lower one than the last, and hooks run in the order of arrival,
   however fast either thread is: ranks whose hooks have collectives run them in one order.
3. A packed buffer is freed when the next unit's gradients are ready, after the caller's stream has waited for its copy:
   at most one exists, beside the gradients that autograd collects for the next unit.
4. A gradient in autocast's type comes down in that type and becomes FP32 on the host: the same value.
5. Other code may change what was accumulated before the optimizer steps: a hook in backward, or a graph that leads to a
   host parameter past its unit's node (gradient_nodes.py). Such changes are recorded for the step in backward. Where
   code has kept an earlier gradient, the next one is added to it at once, for a hook may read or write what was kept.
6. A task of autograd brings a parameter's gradient once: a plain run sums all of it before it adds the sum to an
   earlier gradient, or calls a hook. Where a unit has two nodes in one graph (stand_ins.py, Rule 3) they would come one
   after the other, which is an error.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..autograd.gradient_nodes import LEAF_PRIORITY, Gradients
from ..compat.tensors import forward_level, is_batched_gradient, set_sequence_number, values_of, will_execute
from ..errors import ExactnessError
from ..host.telemetry import Counters
from ..host.unit_numbers import ALIGNMENT
from ..memory.device import Device
from ..memory.host_copy import HostCopy
from ..memory.layout import Layout
from ..memory.staging import Arrival
from ..memory.watched_parameters import (
    HostParameter,
    NarrowGradient,
    keep_from_hooks,
    quietly,
    set_true_grad,
    true_grad,
    wide_grad,
    with_hooks,
)
from ..memory.weights import same_bytes
from ..optim.pending_step import Arriving, PendingStep
from .slab import GradientSlab, GradientSlot, NarrowSlab, PackedGradients, accumulate, can_stay_narrow, is_own, widen

Mark = tuple[list[int], list[int]]


class GradientVersions:
    """The last known ``.grad`` of parameters, to find what other code changes within the same backward (Rule 5)."""

    def __init__(self) -> None:
        self._marks: dict[int, tuple[list[Tensor], Mark]] = {}  # by id of the first parameter that was packed together
        self._changed: list[Tensor] = []
        self._given: list[tuple[Tensor, Tensor]] = []  # of parameters whose gradients code got: what they were

    def note_packed(self, parameters: list[Tensor]) -> None:
        """Record that the gradients of these parameters are on their way down together."""
        if id(parameters[0]) not in self._marks:
            self._marks[id(parameters[0])] = parameters, mark_of(map(true_grad, parameters))

    def note_accumulated(self, parameters: list[Tensor], before: Mark) -> None:
        """Record that the gradients were accumulated; ``before`` is the mark of each ``.grad`` until then."""
        known, mark = self._marks[id(parameters[0])]
        if len(known) != len(parameters) or mark != before:
            self._changed.append(parameters[0])
        self._marks[id(parameters[0])] = parameters, mark_of(map(true_grad, parameters))

    def note_given(self, parameter: Tensor) -> None:
        """Record what a gradient is that code gets, and may write through its ``.data``."""
        if (grad := wide_grad(parameter)) is not None:
            self._given.append((parameter, grad.clone()))

    @contextlib.contextmanager
    def exchanging(self, parameters: Collection[Tensor]) -> Iterator[None]:
        """Have gradients of these parameters get other memory in a context: with the same values it is no change."""
        theirs = set(map(id, parameters))
        marks = list(self._marks.values())  # at once: a backward on another thread adds to them
        marks = [known for known in marks if not theirs.isdisjoint(map(id, known[0]))]
        unchanged = [known for known, mark in marks if mark_of(map(true_grad, known)) == mark]
        yield
        for known in unchanged:
            self._marks[id(known[0])] = known, mark_of(map(true_grad, known))

    def changed(self) -> list[Tensor]:
        """List the first parameter of each packed group in which other code changed a gradient, and others."""
        marks = self._marks.values()
        changed = [known[0] for known, mark in marks if mark_of(map(true_grad, known)) != mark]
        unseen = [one for one, was in self._given if (now := true_grad(one)) is not None and not same_bytes(now, was)]
        return [*self._changed, *changed, *unseen]

    def clear(self) -> None:
        """Forget all gradients: another backward begins."""
        self._marks.clear()
        self._changed.clear()
        self._given.clear()


def mark_of(grads: Iterable[Tensor | None]) -> Mark:
    """Make a mark that changes when one of these gradients is written or replaced, and that refers to no tensor.

    A reference would count as user code's (slab.py, Rule 1).
    """
    grads = list(grads)
    return list(map(id, grads)), [grad._version for grad in grads if grad is not None]


@dataclass
class GradientTransfer:
    """Gradients of a unit on their way down."""

    packing: PackedGradients  # freed early, its memory would be reused while the copy reads it
    parameters: list[Tensor]
    slots: list[GradientSlot]  # where each arrives and is widened
    in_use: list[tuple[Tensor | None, ...]]  # their tensors: references, so that nothing else uses these meanwhile
    marks: GradientVersions
    stream: Any  # the packed buffer was made on it, and its memory is reused there
    done: Arrival

    def has_arrived(self) -> bool:
        """Return whether ``land`` would find the gradients on the host."""
        return self.done.query()

    def wait(self) -> None:
        """Wait until the gradients are on the host."""
        self.done.synchronize()

    def cancel(self) -> None:
        """Give back what this holds for gradients that do not land: here nothing."""

    def land(self) -> list[Tensor]:
        """Wait for the gradients, accumulate them into ``.grad``, and return their parameters."""
        self.wait()
        before = list(map(true_grad, self.parameters))
        if NarrowGradient in map(type, before):
            before = list(map(wide_grad, self.parameters))
        mark = mark_of(before)
        widening: list[tuple[Tensor, Tensor, GradientSlot]] = []
        for parameter, so_far, slot in zip(self.parameters, before, self.slots, strict=True):
            if slot.narrow is not None and so_far is None:
                set_true_grad(parameter, slot.narrow())
            elif slot.wide_view is None or so_far is not None:
                accumulate(parameter, so_far, slot.tensor)  # now: widening may write over it
            else:
                widening.append((parameter, slot.wide_view, slot))
        widen([slot for *_, slot in widening])
        for parameter, wide, _ in widening:
            set_true_grad(parameter, wide)
        self.marks.note_accumulated(self.parameters, mark)
        return self.parameters


class GradientExchange(Protocol):
    """The exchange of gradients with other ranks (ranks/exchange.py)."""

    @property
    def active(self) -> bool:
        """Whether a backward runs whose gradients are exchanged."""

    def slab_for(self, store: HostCopy) -> GradientSlab:
        """Return slots for a unit's gradients, where the other ranks read them."""

    def reached(self, parameters: Iterable[Tensor]) -> None:
        """Note parameters whose gradients came in a backward, whether it is exchanged or not."""

    def submit(
        self,
        store: HostCopy,
        arriving: Arriving,
        places: Sequence[tuple[int, Tensor, Tensor]],
        step: PendingStep | None,
    ) -> None:
        """Have a unit's gradients posted when they have arrived in these places, for a step once they are summed."""


class GradientReturn:
    """The way of all units' gradients to the host."""

    def __init__(
        self,
        device: Device,
        counters: Counters,
        slab_of: Callable[[HostCopy, Device], GradientSlab] = GradientSlab,
        may_stay_narrow: Callable[[], bool] = bool,
    ) -> None:
        self.device = device
        self._slab_of = slab_of
        self._may_stay_narrow = may_stay_narrow  # slab.py, Rule 3
        self.counters = counters
        self.exchange: GradientExchange | None = None  # of several ranks
        self._slabs: dict[HostCopy, GradientSlab] = {}
        self._under_way: list[GradientTransfer] = []
        self._accumulating = False
        self._lock = threading.RLock()
        self._last: GradientTransfer | None = None  # its device buffer is not freed yet
        self._numbers = itertools.count(LEAF_PRIORITY - 1, -1)
        self.taken: dict[int, int] = {}  # by the ids of parameters, the task of this backward that took theirs (Rule 1)
        self._returned: dict[int, int] = {}  # likewise of those that autograd got back, in any backward (Rule 2)
        self._arrivals = itertools.count()
        self._came: dict[int, int] = {}  # by the ids of parameters, which arrival from autograd brought theirs last
        self.marks = GradientVersions()

    def receive(self, store: HostCopy, node: Any, grads: Gradients, step: PendingStep | None, task: int) -> Gradients:
        """Receive a unit's gradients from autograd and return those that it has to get back (Rules 1 and 2).

        If they are final, ``step`` may step the unit once they are accumulated. ``task`` is autograd's number for this.
        """
        hooked = with_hooks(store.params)
        for index in hooked:
            if grads[index] is None:
                keep_from_hooks(store.params[index])
        if torch.is_grad_enabled() or forward_level() >= 0:
            return self._differentiable(store, grads, task)
        self._came.update(dict.fromkeys(map(id, store.params), next(self._arrivals)))
        taken: dict[int, Tensor] = {}
        returned: dict[int, Tensor] = {}
        for index, (grad, parameter, (leaf, _)) in enumerate(
            zip(grads, store.params, node.next_functions, strict=True)
        ):
            if grad is None:
                continue
            if is_batched_gradient(grad):
                return self._differentiable(store, grads, task)
            disposition = _disposition(parameter, leaf, grad, index in hooked)
            if disposition is Disposition.TAKE:
                taken[index] = grad
            elif disposition is Disposition.RETURN:
                returned[index] = grad
                set_sequence_number(leaf, next(self._numbers))
        if taken:
            self._take(store, taken, step, task)
        if returned:
            self._note_returned(store, returned, task)
        return self._arrived(store, returned)

    def finish(self) -> None:
        """Wait until all taken gradients are in ``.grad`` (Rule 1), but for those of a step in backward."""
        if not (self._under_way or self._accumulating):
            return
        with quietly(), self._lock:  # another thread that reads a gradient waits here as well
            self._accumulating = True
            try:
                under_way, self._under_way = self._under_way, []
                for transfer in under_way:
                    with self.counters.stall("gradients"):
                        transfer.land()
            except BaseException:
                _cancel(under_way)
                raise
            finally:
                self._accumulating = False

    @property
    def host_nbytes(self) -> int:
        """The host bytes of all gradient slabs."""
        return sum(slab.nbytes for slab in self._slabs.values())

    def close(self) -> None:
        """Forget what makes slabs, which leads to the user's module: graphs that are kept lead here."""
        self._slab_of, self._may_stay_narrow = GradientSlab, bool

    def widen(self, store: HostCopy) -> None:
        """Have a unit's gradients as in plain Lightning, whose parameters are plain from here on."""
        if store in self._slabs:
            self._slabs[store].widen()

    def drop(self) -> None:
        """Discard the gradients under way: their backward failed."""
        self.let_go()
        under_way, self._under_way = self._under_way, []
        _cancel(under_way)

    def kept(self, store: HostCopy, indices: Collection[int]) -> list[int]:
        """Return those gradients to which others refer than their parameters, and the slab that they may lie in."""
        slab = self._slabs.get(store)
        return [index for index in indices if not is_own(store.params[index], slab, index)]

    # ---- taken

    def _take(self, store: HostCopy, taken: dict[int, Tensor], step: PendingStep | None, task: int) -> None:
        """Pack these gradients and send them down, to be accumulated or stepped on arrival."""
        self.let_go()
        exchange = self.exchange if self.exchange is not None and self.exchange.active else None
        slab = self._slabs.get(store) if exchange is None else exchange.slab_for(store)
        if slab is None or slab.wide is not None or not slab.fits(store):
            slab = self._slabs[store] = self._next_slab(store)
        indices = list(taken)
        if slab.narrow:
            indices.sort(key=lambda index: index not in slab.narrow)  # slab.py, Rule 2
        parameters: list[Tensor] = [store.params[index] for index in indices]
        ids = list(map(id, parameters))
        if not self.taken.keys().isdisjoint(ids):
            _check_once(store, ids, task, self.taken)
        grads = [taken[index] for index in indices]
        try:
            places, packing = slab.slots_for(indices, grads)
        except BaseException:  # of the disk, or an interrupt of the wait for it
            self.drop()
            raise
        transfer = self._send(store, grads, packing, slab.make_transfer or GradientTransfer)
        transfer.parameters = parameters
        transfer.slots = places
        transfer.in_use = [(place.tensor, place.wide_view, place.lands_in) for place in places]
        self.marks.note_packed(parameters)
        self.taken.update(dict.fromkeys(ids, task))
        is_first = {*map(type, map(true_grad, parameters))} == {type(None)}
        is_kept = not is_first and self._is_kept(store, indices)
        if self.exchange is not None:
            self.exchange.reached(parameters)
        if exchange is not None:
            named = zip(indices, places, strict=True)
            exchange.submit(store, transfer, [(i, place.flat, place.tensor) for i, place in named], step)
        elif step is not None and self.exchange is None and not self._under_way and not is_kept:
            step.promise(store)
            step.take(store, transfer)
        else:
            self._under_way.append(transfer)
            if is_kept:
                self.finish()

    def _is_kept(self, store: HostCopy, indices: Iterable[int]) -> bool:
        """Whether code may have kept an earlier gradient of any of these parameters (Rule 5)."""
        earlier = [index for index in indices if true_grad(store.params[index]) is not None]
        return bool(self.kept(store, earlier))

    def _next_slab(self, store: HostCopy) -> GradientSlab:
        before = self._slabs.get(store)
        if before is not None:
            before.widen()  # what is in it: nobody will know the slab any more
            if before.wide is not None and before.wide.fits(store):
                return before.wide
        is_read = before is not None and before.is_read
        if is_read or self.exchange is not None or not self._may_stay_narrow() or not can_stay_narrow(store):
            slab = self._slab_of(store, self.device)
            slab.is_read = is_read
            return slab
        slab = NarrowSlab(store, self.device)
        slab.exchanging = self.marks.exchanging
        return slab

    def _send(
        self,
        store: HostCopy,
        grads: list[Tensor],
        packing: PackedGradients,
        make: Callable[..., GradientTransfer] = GradientTransfer,
    ) -> GradientTransfer:
        """Pack gradients and start their copy to the host."""
        packing.pack(grads)
        down, compute = self.device.down, self.device.compute
        down.wait_event(compute.record_event())
        under_way = self.counters.listener.work("down", store.unit.name, "gradients", packing.nbytes)
        done = self.device.send_down(packing.copies, under_way)
        self.counters.bytes_down += packing.nbytes
        self._last = transfer = make(packing, [], [], [], self.marks, compute, done)
        return transfer

    def let_go(self) -> None:
        """Free the last packed buffer, in stream order after its copy (Rule 3)."""
        if self._last is not None:
            with self.counters.listener.waiting("gradients"):
                self._last.done.wait(self._last.stream)
            with self._last.stream:
                self._last.packing.free()
            self._last = None

    # ---- returned

    def _note_returned(self, store: HostCopy, indices: Iterable[int], task: int) -> None:
        """Note which parameters' gradients a task of autograd gets back, each once (Rule 6)."""
        ids = [id(store.params[index]) for index in indices]
        _check_once(store, ids, task, self._returned)
        self._returned.update(dict.fromkeys(ids, task))

    def returned_in(self, parameter: Tensor) -> int:
        """Return the number of the last task of autograd that got this parameter's gradient back, or -1."""
        return self._returned.get(id(parameter), -1)

    def came_after(self, parameter: Tensor, other: Tensor) -> bool:
        """Whether this backward took the gradient of a parameter after it gave the other one's back to autograd."""
        came = self._came
        return id(parameter) in self.taken and came[id(parameter)] > came.get(id(other), came[id(parameter)])

    def is_shared(self, parameter: Tensor) -> bool:
        """Whether this backward took a parameter's gradient for an exchange, after which alone ``.grad`` has it."""
        return self.exchange is not None and self.exchange.active and id(parameter) in self.taken

    def _arrived(self, store: HostCopy, returned: dict[int, Tensor]) -> Gradients:
        """Return host copies of these gradients in their parameters' types; block until they have arrived.

        Autograd gets memory that nothing else refers to.
        """
        result: list[Tensor | None] = [None] * len(store.params)
        dense = [index for index, grad in returned.items() if grad.layout is torch.strided]
        if dense:
            self.let_go()
            layout = Layout.of([("", returned[index]) for index in dense])
            flat = self.device.passing(max(layout.nbytes, ALIGNMENT))
            places = [
                GradientSlot(layout.view(flat.untyped_storage(), field), flat, field.offset) for field in layout.fields
            ]
            packing = PackedGradients(self.device, places)
            transfer = self._send(store, [returned[index] for index in dense], packing)
            with self.counters.stall("gradients"):
                transfer.done.synchronize()
            for index, place in zip(dense, places, strict=True):
                result[index] = place.tensor.to(store.host_layout.fields[index].dtype, copy=True)
        for index in returned.keys() - dense:
            sparse = result[index] = returned[index].cpu()
            self.counters.bytes_down += values_of(sparse).nbytes
        return tuple(result)

    def _differentiable(self, store: HostCopy, grads: Gradients, task: int) -> Gradients:
        """Copy gradients to the host by an operator, which autograd records and transforms like any other."""
        self._note_returned(store, (index for index, grad in enumerate(grads) if grad is not None), task)
        self.counters.bytes_down += sum(grad.nbytes for grad in grads if grad is not None)
        fields = store.host_layout.fields
        return tuple(g if g is None else g.to("cpu", field.dtype) for g, field in zip(grads, fields, strict=True))


def _check_once(store: HostCopy, ids: Iterable[int], task: int, brought: Mapping[int, int]) -> None:
    """Raise ExactnessError if this task of autograd brought gradients of these parameters before (Rule 6)."""
    if any(brought.get(each) == task for each in ids):
        raise ExactnessError(
            f"one backward sums gradients of {store.unit.name} over two forwards between which requires_grad of a "
            "parameter changed; a plain run sums them in another order. Call backward before it changes"
        )


def _cancel(transfers: Iterable[GradientTransfer]) -> None:
    for transfer in transfers:
        transfer.cancel()


class Disposition(enum.Enum):
    """The outcomes for a gradient (Rules 1 and 2)."""

    TAKE = "take"
    RETURN = "return"
    DROP = "drop"


def _disposition(parameter: Tensor, leaf: Any, grad: Tensor, has_hooks: bool) -> Disposition:
    """Decide between taking, returning and dropping a gradient (Rules 1 and 2)."""
    try:
        if not will_execute(leaf):
            return Disposition.DROP
    except RuntimeError:  # autograd.grad captures the gradient itself at this leaf
        return Disposition.RETURN
    if has_hooks:
        return Disposition.RETURN
    if not parameter.requires_grad:  # frozen after its forward
        return Disposition.DROP
    is_of_library = type(parameter) is not HostParameter  # whose class may read ``.grad`` past its property
    return Disposition.RETURN if is_of_library or grad.layout is not torch.strided else Disposition.TAKE
