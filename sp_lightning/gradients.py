"""The autograd bridge between host parameters and their stand-ins, and the way of gradients down.

1. One node per unit, applied once: it saves nothing, so it serves every step, repeated backward and ``retain_graph``.
   All uses of a weight in a graph, over all calls of its unit, end in it: autograd sums them as it would for a leaf.
2. It runs with the priority of a leaf's accumulation (the highest): as soon as the last use of the unit's weights is
   done. With the low number of a node made at attach, all gradients would pile up on the device until the very end.
3. Outputs share the unit's storage but not a version counter: an in-place write to one weight concerns that one only.
4. Gradients are *taken* where nobody sees when they arrive: they are packed into one buffer, start their way down, and
   are accumulated into ``.grad`` as autograd would, in the order in which they came, before backward returns.
5. They are *returned*, arrived, where autograd has something to do with them: hooks on the parameter, and
   ``autograd.grad``. Under ``create_graph`` the way down is part of the graph. What the task does not ask for is
   dropped.
6. A packed buffer is kept until the caller's stream waited for its copy, when the next unit's gradients are ready: one
   buffer on its way, one being made.
7. A unit's gradients land in a slab of their own, which becomes ``.grad``. What the user still holds of it is never
   written again, and what somebody made of ``.grad`` (``p.grad.data = ...``) is not in the slab: such a parameter gets
   new memory.
8. A weight that travels in autocast's type has a node for each use, as plain autocast has a cast for each; what arrives
   there is what the cast's backward would convert to FP32. The gradients of several uses are summed in FP32, in the
   order in which they arrive. A single one comes down as it is, and becomes FP32 on the host: the same value.
9. It lands in the second half of the room of all such gradients in FP32, and is widened from the front: what is written
   never reaches what is not read yet. So it takes no memory of its own, and a unit comes down in one piece. The same
   goes for gradients of FP32 master weights.
10. Somebody may change what was accumulated before the optimizer steps: a hook in backward, or a graph that leads to a
   host parameter past its link. Who steps ahead has to know.
"""

from __future__ import annotations

import enum
import functools
import itertools
import operator
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .device import Device
from .layout import ALIGNMENT, Layout, aligned
from .overlap import HostThread, StepAhead
from .parameters import HostParameter, set_true_grad, true_dtype, true_grad
from .store import UnitStore
from .telemetry import Counters
from .transfer import Arrival, Copies

Gradients = tuple[Tensor | None, ...]
Receive = Callable[[Any, Gradients], Gradients]  # of the node that runs
Mark = tuple[list[int], list[int]]
LEAF_PRIORITY = 2**64 - 1
_kind = operator.attrgetter("dtype", "requires_grad")
SMALL = 4096  # elements that are widened by way of a copy


class Link(torch.autograd.Function):
    """Host parameters in, device stand-ins out; device gradients in, host gradients out."""

    @staticmethod
    def forward(ctx: Any, outputs: list[Tensor], receive: Receive, *params: Tensor) -> Any:
        ctx.receive = receive
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(out for out, param in zip(outputs, params, strict=True) if not param.requires_grad)
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return (None, None, *ctx.receive(ctx, grads))


def link(store: UnitStore, receive: Receive, views: list[Tensor]) -> list[Tensor]:
    """The stand-ins of a unit's parameters as they are now: trainable ones lead to the host parameters."""
    if not any(parameter.requires_grad for parameter in store.params):
        return views
    with torch.inference_mode(False), torch.enable_grad():
        outputs = list(Link.apply(views, receive, *store.params))
    node = next(output.grad_fn for output in outputs if output.grad_fn is not None)
    node._set_sequence_nr(LEAF_PRIORITY)  # Rule 2
    return outputs


class Uses:
    """The uses in a graph of one weight that travels in autocast's type: their gradients, as they arrive (Rule 8)."""

    def __init__(self) -> None:
        self._arrived: dict[int, list[Tensor]] = {}  # by the number of autograd's task

    def arrive(self, grads: Gradients) -> Gradients:
        """Called in front of the node of a use: takes what would go on to the link."""
        if grads[0] is not None:
            self._arrived.setdefault(torch._C._current_graph_task_id(), []).append(grads[0])
        return (None,)

    def sum(self) -> Tensor | None:
        """What arrived in the task that runs."""
        arrived = self._arrived.pop(torch._C._current_graph_task_id(), None)
        if arrived is None:
            return None
        if len(arrived) == 1:
            return arrived[0]
        total = arrived[0].float()
        for grad in arrived[1:]:
            total = total + grad.float()
        return total

    def clear(self) -> None:
        """What a task left behind that did not come to the link."""
        self._arrived.clear()


@dataclass(frozen=True)
class Place:
    """Where a gradient lands: a tensor, and the bytes of a flat page-locked buffer that it is."""

    tensor: Tensor
    flat: Tensor
    offset: int
    room: Tensor | None = None  # in which it is widened (Rule 9)


class Packing:
    """Gradients side by side in a device buffer, whose memory comes and goes, as on their places on the host."""

    def __init__(self, device: Device, places: list[Place]) -> None:
        layout = Layout.of([("", place.tensor) for place in places])
        self.nbytes = sum(field.nbytes for field in layout.fields)
        self._device = device
        self._size = max(layout.nbytes, ALIGNMENT)
        self._layout = layout
        self._flat = device.device_bytes(self._size)
        self._storage = self._flat.untyped_storage()
        self._views: list[Tensor] = []
        self._runs = list(_runs(places, layout))
        self.copies: Copies = ()  # what brings them to the host: as few as can be
        self._parts = list(_parts_of_one_type([field.dtype for field in layout.fields]))

    def pack(self, grads: list[Tensor]) -> None:
        """Copies them in, on the current stream."""
        self._device.claim(self._storage, self._size)
        if not self._views:
            self._views = [self._layout.view(self._storage, field) for field in self._layout.fields]
            self.copies = [(host[to : to + n], self._flat[at : at + n]) for host, to, at, n in self._runs]
        for part in self._parts:  # a call with several types would copy one by one
            torch._foreach_copy_(self._views[part], grads[part])

    def free(self) -> None:
        """Gives the device memory back, on the current stream."""
        self._device.shrink(self._storage)


def _parts_of_one_type(types: list[torch.dtype]) -> Iterator[slice]:
    start = 0
    for _, same in itertools.groupby(types):
        end = start + sum(1 for _ in same)
        yield slice(start, end)
        start = end


class Marks:
    """What ``.grad`` of parameters was when we last knew it: somebody else may change it within the same backward
    (Rule 10)."""

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
    """What changes when a gradient is written, or another one takes its place; refers to nothing (Rule 7)."""
    grads = list(map(true_grad, parameters))
    return list(map(id, grads)), [grad._version for grad in grads if grad is not None]


@dataclass
class Landing:
    """Gradients of a unit on their way down."""

    packing: Packing  # freed early, its memory would be given away while it is read
    parameters: list[Tensor]
    host: list[tuple[Tensor, Tensor | None]]  # where their gradients land, and are widened: nobody else's until then
    marks: Marks
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


class Downlink:
    """Brings gradients to the host."""

    def __init__(self, device: Device, counters: Counters) -> None:
        self.device = device
        self.counters = counters
        self._slabs: dict[UnitStore, GradientSlab] = {}
        self._under_way: list[Landing] = []
        self._landing = False
        self._finishing = threading.RLock()
        self._last: Landing | None = None  # whose device buffer is still held
        self.taken: set[int] = set()  # ids of parameters whose gradients were, in this backward
        self.marks = Marks()
        self.ahead: StepAhead | None = None  # steps what arrives, while a step that may be overlapped is under way

    def receive(self, store: UnitStore, node: Any, grads: Gradients, final: bool) -> Gradients:
        """Takes a unit's gradients, and returns those that autograd has to have (Rules 4 and 5)."""
        if torch.is_grad_enabled():
            return self._differentiable(store, grads)
        taken: list[int] = []
        returned: list[int] = []
        leaves = node.next_functions
        for index, grad in enumerate(grads):
            if grad is None:
                continue
            fate = _fate(store.params[index], leaves[index][0], grad)
            if fate is Fate.TAKE:
                taken.append(index)
            elif fate is Fate.RETURN:
                returned.append(index)
        if taken:
            self._take(store, taken, grads, final)
        return self._arrived(store, returned, grads)

    def finish(self) -> None:
        """All that was taken is in ``.grad`` (Rule 4)."""
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
        parameter, slab = store.params[index], self._slabs.get(store)
        from_slab = 0 if slab is None else slab.references(index, true_grad(parameter))
        return _references(_known(true_grad(parameter))) == _own_references(from_slab)

    # ---- taken

    def _take(self, store: UnitStore, indices: list[int], grads: Gradients, final: bool) -> None:
        """Starts the way down."""
        self.let_go()
        slab = self._slabs.get(store)
        if slab is None or slab.autocast is not store.autocast:
            slab = self._slabs[store] = GradientSlab(store, self.device)
        indices = sorted(indices, key=lambda index: index not in store.narrow)  # Rule 9
        taken = [_known(grads[index]) for index in indices]
        places, packing = slab.room(indices, taken)
        landing = self._send(store, taken, packing)
        landing.parameters = [store.params[index] for index in indices]
        landing.host = [(place.tensor, place.room) for place in places]
        self.marks.taken(landing.parameters)
        self.taken.update(map(id, landing.parameters))
        if self.ahead is not None and final and not self._under_way:
            timed = functools.partial(self.counters.listener.work, "optimizer", store.unit.name, "step")
            self.ahead.submit(landing, timed, store.convert)
        else:
            self._under_way.append(landing)

    def _send(self, store: UnitStore, grads: list[Tensor], packing: Packing) -> Landing:
        """Packs gradients and starts their way down."""
        packing.pack(grads)
        down, compute = self.device.down, self.device.compute
        down.wait_event(compute.record_event())
        under_way = self.counters.listener.work("down", store.unit.name, "gradients", packing.nbytes)
        done = self.device.send_down(packing.copies, under_way)
        self.counters.bytes_down += packing.nbytes
        self._last = Landing(packing, [], [], self.marks, compute, done)
        return self._last

    def let_go(self) -> None:
        """The device buffer on its way may be freed after its copy (Rule 6)."""
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
            places = [Place(room.view(flat.untyped_storage(), field), flat, field.offset) for field in room.fields]
            landing = self._send(store, [_known(grads[index]) for index in dense], Packing(self.device, places))
            with self.counters.stall("gradients"):
                landing.done.synchronize()
            for index, place in zip(dense, places, strict=True):
                result[index] = place.tensor.to(store.host_layout.fields[index].dtype, copy=True)
        for index in set(indices) - set(dense):
            result[index] = _known(grads[index]).cpu()
            self.counters.bytes_down += _known(result[index])._values().nbytes  # sparse
        return tuple(result)

    def _differentiable(self, store: UnitStore, grads: Gradients) -> Gradients:
        """Copies that are part of the graph."""
        self.counters.bytes_down += sum(grad.nbytes for grad in grads if grad is not None)
        fields = store.host_layout.fields
        return tuple(g if g is None else g.to("cpu", field.dtype) for g, field in zip(grads, fields, strict=True))


class GradientSlab:
    """Where the gradients of a unit's weights land (Rule 7); frozen ones have no room."""

    def __init__(self, store: UnitStore, device: Device) -> None:
        self.autocast = store.autocast
        self._fields = store.layout.fields
        self._device = device
        trained = [index for index, parameter in enumerate(store.params) if parameter.requires_grad]
        narrow = sum(aligned(self._fields[index].nbytes) for index in trained if index in store.narrow)
        wide = sum(aligned(store.host_layout.fields[i].nbytes) for i in trained if i not in store.narrow)
        self.nbytes = max(2 * narrow + wide, ALIGNMENT)
        self._places = dict(self._laid_out(store, device.slab(self.nbytes), trained, narrow))
        self._rooms = {index: place.room for index, place in self._places.items() if place.room is not None}
        self._unseen = {index: _seen([place.tensor]) for index, place in self._places.items()}
        self._all_unseen = self._all_seen()
        self._packings: dict[tuple[int, ...], Packing] = {}  # of those that came together before

    def _laid_out(self, store: UnitStore, flat: Tensor, trained: list[int], narrow: int) -> Iterator[tuple[int, Place]]:
        """What is widened first (Rule 9), then the others, in the parameters' types."""
        storage = flat.untyped_storage()
        first, then = 0, 2 * narrow
        for index in trained:
            field, travelling = store.host_layout.fields[index], self._fields[index]
            if index in store.narrow:
                at = narrow + first
                room = Layout.own_view(storage, replace(field, offset=2 * first))
                yield index, Place(Layout.own_view(storage, replace(travelling, offset=at)), flat, at, room)
                first += aligned(travelling.nbytes)
            else:
                yield index, Place(Layout.own_view(storage, replace(field, offset=then)), flat, then)
                then += aligned(field.nbytes)

    def references(self, index: int, grad: Tensor | None) -> int:
        """How often a gradient that landed here is referred to from here."""
        place = self._places.get(index)
        if place is None or grad is None:
            return 0
        return (grad is place.tensor) + (grad is place.room) + (grad is self._rooms.get(index))

    def room(self, indices: list[int], grads: list[Tensor]) -> tuple[list[Place], Packing]:
        """Page-locked memory for gradients, with the parameters' strides, that nobody looks at."""
        unseen = self._all_seen() == self._all_unseen
        widening = unseen or _seen([*self._rooms.values()]) == self._all_unseen[1]
        places = [self._room(index, grad, unseen, widening) for index, grad in zip(indices, grads, strict=True)]
        if any(place is not self._places.get(index) for index, place in zip(indices, places, strict=True)):
            return places, Packing(self._device, places)
        packing = self._packings.get(tuple(indices))
        if packing is None:
            packing = self._packings[tuple(indices)] = Packing(self._device, places)
        return places, packing

    def _all_seen(self) -> tuple[Any, Any]:
        """Of all places, and of the rooms that they are widened in."""
        return _seen([place.tensor for place in self._places.values()]), _seen([*self._rooms.values()])

    def _room(self, index: int, grad: Tensor, unseen: bool, widening: bool) -> Place:
        place = self._places.get(index)  # None: it did not train when the slab was made
        fits = place is not None and grad.dtype is place.tensor.dtype and (widening or place.room is None)
        if place is not None and fits and (unseen or _seen([place.tensor]) == self._unseen[index]):
            return place
        field = self._fields[index]
        flat = self._device.passing(max(grad.numel() * grad.element_size(), ALIGNMENT))
        tensor = torch.empty(0, dtype=grad.dtype).set_(flat.untyped_storage(), 0, field.shape, field.stride)
        return Place(tensor, flat, 0)


def _references(tensor: Tensor) -> tuple[int, int, int]:
    """From Python and C++ to a tensor, and to its storage."""
    storage = int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))
    return sys.getrefcount(tensor), tensor._use_count(), storage


def _seen(tensors: list[Tensor]) -> Any:
    """What changes when somebody refers to one, or makes it another one: ``p.grad.data = ...``, ``grad.t_()``."""
    return (
        list(map(sys.getrefcount, tensors)),
        list(map(Tensor._use_count, tensors)),
        [torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) for tensor in tensors],
        list(map(Tensor.data_ptr, tensors)),
        list(map(Tensor.size, tensors)),
        list(map(Tensor.stride, tensors)),
        list(map(_kind, tensors)),
    )


@functools.cache
def _own_references(from_slab: int) -> tuple[int, int, int]:
    """What `_references` tells of a gradient that is its parameter's alone."""
    parameter = torch.zeros(1, requires_grad=True)
    parameter.grad = torch.zeros(1)
    slab = [parameter.grad] * from_slab
    references = _references(_known(true_grad(parameter)))
    slab.clear()
    return references


def _runs(places: list[Place], layout: Layout) -> Iterator[tuple[Tensor, int, int, int]]:
    """Copies that bring packed fields to their places: (buffer, offset there, offset here, bytes), as few as can be."""
    run: tuple[Tensor, int, int, int] | None = None
    for place, field in zip(places, layout.fields, strict=True):
        if run is not None and run[0] is place.flat and place.offset - field.offset == run[1] - run[2]:
            run = (*run[:3], field.offset + field.nbytes - run[2])
            continue
        if run is not None:
            yield run
        run = (place.flat, place.offset, field.offset, field.nbytes)
    if run is not None:
        yield run


def _known(grad: Tensor | None) -> Tensor:
    assert grad is not None
    return grad


class Fate(enum.Enum):
    """What becomes of a gradient."""

    TAKE = "take"
    RETURN = "return"
    DROP = "drop"


def _fate(parameter: Tensor, leaf: Any, grad: Tensor) -> Fate:
    """Rules 4 and 5."""
    try:
        if not torch._C._will_engine_execute_node(leaf) or not parameter.requires_grad:  # frozen since its forward
            return Fate.DROP
    except RuntimeError:  # autograd.grad: the gradient itself is asked for
        return Fate.RETURN
    seen = parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
    unguarded = type(parameter) is not HostParameter  # nobody sees who asks for its gradient
    return Fate.RETURN if seen or unguarded or grad.layout is not torch.strided else Fate.TAKE


def _accumulate(parameter: Tensor, grad: Tensor, room: Tensor | None) -> None:
    """As autograd does for a leaf."""
    before = true_grad(parameter)
    widens = before is None and room is not None
    if widens:
        grad = _widened(grad, _known(room))
    elif grad.dtype is not (dtype := true_dtype(parameter)):
        grad = grad.to(dtype)
    if before is None:
        set_true_grad(parameter, grad)
    elif before.requires_grad or before.layout is not torch.strided:
        set_true_grad(parameter, before + grad)
    else:
        before += grad


def _widened(grad: Tensor, room: Tensor) -> Tensor:
    """The gradient in FP32, in its room, which ends where the gradient does or before (Rule 9)."""
    if grad.numel() <= SMALL:
        return room.copy_(grad.clone())
    narrow, wide = (torch.as_strided(tensor, (tensor.numel(),), (1,)) for tensor in (grad, room))
    done, count = 0, narrow.numel()
    while done < count:
        # As many as have their places before the first that is not read yet: half of what is left, at least.
        free = (narrow.data_ptr() + 2 * done - wide.data_ptr()) // 4 - done
        if free < SMALL:
            wide[done:] = narrow[done:].clone()
            break
        part = slice(done, min(count, done + free))
        wide[part] = narrow[part]
        done = part.stop
    return room
