"""Stand-ins in the places of host parameters, for the time of a visit.

1. A slot is a place that holds a parameter: an entry of some module's ``_parameters``, or another list or attribute
   that holds it as well. A slot that holds something else by now belongs to user code, and is left alone.
2. Stand-ins are in the slots only while the unit is resident, and never after it was evicted.
3. The node is made anew when ``requires_grad`` of a parameter changed; older graphs keep the older one. A backward that
   comes by both is an error (gradients/way_down.py, Rule 6).
4. What model code writes to a stand-in goes down to the host at the end of the visit. The version counter shows a
   write; where ``.data`` was read, the bytes are compared with the host's, also later, while code may have kept what it
   read. Outside of visits the host's may be written meanwhile: then the device's are compared with what they were, and
   a weight of which both were written is an error. So is an in-place write that autograd recorded, as for a plain leaf.
5. A stand-in that is referenced elsewhere keeps its unit resident (device_copy.py, Rule 5).
6. The stand-in of a weight that travels in autocast's type is *hidden*: it is in no slot. A read of such a weight that
   autocast_weights.py does not foresee is given a full-precision copy (fp32_copies.py).
7. Data that model code assigns to a stand-in is copied into the device buffer. But if other code refers to a view of
   the unit's bytes, the view must keep the old ones: then the stand-in is *parted*, with memory of its own for the new
   data, which is copied into the buffer when the visit ends. If model code assigns the data in the buffer again before
   that (``old = p.data; p.data = other; ...; p.data = old``), the stand-in is over the buffer again. Data of another
   shape has the weight's bytes in another order (a quantized layer that packs them for its kernel). Its unit keeps its
   place and its size, so a frozen weight gets that shape at once, on both sides, unless a graph needs the old one.
8. Code in a visit that asks for a gradient gets a copy of it on the device, the same one until the visit ends. What the
   code has written to it goes to the host then.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..compat.references import references
from ..compat.tensors import attributes_in, set_versions, were_replaced
from ..errors import ExactnessError
from ..host.unit_numbers import UnitHostBytes, UnitNumbers, aligned
from ..memory.host_copy import HostCopy
from ..memory.watched_parameters import (
    finished_grad,
    set_true_data,
    stand_in,
    stand_in_of_parts,
    stand_in_of_whole,
    true_data,
    true_dtype,
    true_grad_fn,
    true_version,
    unwatch,
    watch,
)
from ..memory.weights import Weight, same_bytes
from ..stream.partition import Slot, Unit, exchange
from ..stream.whole import Whole, part_of
from .fp32_copies import FullPrecisionCopies
from .gradient_nodes import Awaited, CastUses, Gradients, Receive, check_not_recorded, connect

_requires_grad = operator.attrgetter("requires_grad")
GradientCopy = tuple[Tensor, int, Tensor, int]  # a gradient on the host, and one on the device, with their versions
OnGradients = Callable[["StreamedUnit", Any, Gradients], Gradients]


class Hidden(Protocol):
    """An entry that is out of the way, or a guard that is in place, while the unit is bound."""

    def hide(self) -> None: ...

    def show(self) -> None: ...


class InPlaceOfForward:
    """Something of ours in the place of a module's forward, or of another of its methods."""

    module: nn.Module
    method = "forward"
    own: Any = None  # what the module itself has there, if anything

    def restore(self) -> None:
        """Put back what the module itself has there."""
        if self.own is None:
            del self.module.__dict__[self.method]
        else:
            self.module.__dict__[self.method] = self.own


class HiddenInVisits(InPlaceOfForward):
    """An entry that leaves its place to the module's own forward while its only unit is bound."""

    hidden = False

    def hide(self) -> None:
        """Leave the place, unless other code has taken it."""
        if self.module.__dict__.get("forward") is self:
            self.hidden = True
            self.restore()

    def show(self) -> None:
        """Take the place again, unless other code has taken it."""
        if self.hidden:
            self.hidden = False
            if self.module.__dict__.get("forward") is self.own:
                self.module.__dict__["forward"] = self


class StandIns:
    """The stand-ins of one unit's parameters, and the slots that they are put into; the watcher of the parameters."""

    def __init__(
        self,
        store: HostCopy,
        receive: Receive,
        slots: Mapping[nn.Parameter, list[Slot]],
    ) -> None:
        self.store = store
        self.owner = store.owner
        self.wholes = store.unit.wholes
        self.names = [*store.names, *(whole.name for whole in self.wholes)]
        sharded = [whole for whole in self.wholes if whole.is_shard]
        self.sharded: dict[int, Any] = {store.index_of[id(part_of(whole))]: whole for whole in sharded}
        # What stands in slots: the unit's weights, and then its wholes, whose parts stand in none (partition.py).
        self.hosts: list[Any] = [*store.params, *(whole.parameter for whole in self.wholes)]
        self.index_of = {id(host): index for index, host in enumerate(self.hosts)}
        # Each with the index of its host parameter.
        self.slots = [(index, slot) for index, host in enumerate(self.hosts) for slot in slots.get(host, ())]
        self.receive = receive
        self.hidden: list[Hidden] = []  # while the unit is bound
        self.bound = False
        self._nodes: weakref.WeakSet[Any] = weakref.WeakSet()  # of this build, and of older ones that graphs keep
        self.build = -1  # number of times that the stand-ins were made anew
        self.outputs: list[Tensor] = []  # of the unit's node: the stand-ins of its weights
        self.places: list[Tensor] = []  # over the device bytes of the weights: the same, but for shards
        self.shown: list[Tensor] = []  # the stand-ins of `hosts`
        self.data_exposed = [False]  # whether ``.data`` of any stand-in was read; each refers to this list
        self.may_be_kept = False  # whether it was read before, and other code may still have what it got (Rule 4)
        self._were: list[Tensor] = []  # the weights' bytes as they were collected, where code may have kept some
        self.awaited = Awaited()  # of any build: a graph leads from them to a node of the unit
        self.uses = CastUses(self.awaited, store.device)
        self.full_precision = FullPrecisionCopies(store, receive)
        self.gradients: dict[int, GradientCopy] = {}  # that code in this visit has, by index
        self._bound_slots = 0
        self._trainable: list[bool] = []
        self._attributes: list[Any] = []  # of the wholes' stand-ins when they were made
        self.known_versions: list[int] = []  # as of when writes were collected last
        self._own_references = 0
        for whole in self.wholes:
            whole.begin()
        for host in self.hosts:
            watch(host, self)

    @property
    def autocast(self) -> Mapping[int, torch.dtype]:
        """The types of the weights that travel in autocast's type, by index."""
        return self.store.autocast

    @property
    def has_one_node(self) -> bool:
        """Whether every graph leads to the stand-ins that the next visit finds (Rule 3)."""
        return len(self._nodes) < 2 and list(map(_requires_grad, self.hosts)) == self._trainable

    def refresh(self) -> bool:
        """Make the stand-ins if there are none, or if ``requires_grad`` of a parameter changed (Rule 3).

        Return True if it changed: then other parameters train than before.
        """
        trainable = list(map(_requires_grad, self.hosts))
        changed = trainable != self._trainable and bool(self._trainable)
        if not changed and self.outputs:
            return False
        assert not self.bound
        for whole in self.wholes:
            whole.follow()
        trainable = list(map(_requires_grad, self.hosts))  # a whole's parts train as it does
        self.uses = CastUses(self.awaited, self.store.device)
        receive = self._receiver(self.uses)
        on_device = self.store.on_device
        self._drop()
        others = on_device.aliases()
        views = [*map(on_device.view, range(len(self.store.params)))]
        self.places, parts = [*views], self.store.unit.parts
        for index, sharded in self.sharded.items():
            views[index] = sharded.over(views[index])
        self.outputs = [  # with wholes made of them the only references: references are counted below
            output if id(parameter) in parts else stand_in(output, parameter, self.data_exposed)
            for output, parameter in zip(connect(self.store, receive, views), self.store.params, strict=True)
        ]
        del views
        self._nodes.update(node for node in map(true_grad_fn, self.outputs) if node is not None)
        wholes = [*map(self._whole, self.wholes)]
        self.shown = [*self.outputs, *wholes] if wholes else self.outputs
        self._attributes = [*map(attributes_in, wholes)]
        del wholes
        self._trainable = trainable
        self.build += 1
        self.known_versions = self.versions()
        on_device.stand_ins = on_device.aliases() - others
        self.may_be_kept = self.may_be_kept or (changed and on_device.has_views())  # of the stand-ins before
        self._own_references = sum(map(sum, references(self.shown)))  # from Python and from C++
        return changed

    def _whole(self, whole: Whole) -> Tensor:
        """Make a whole's stand-in from the stand-ins of its parts."""
        parts = [self.outputs[self.index_of[id(part)]] for _, part in whole.parts]
        made = parts[0] if whole.is_shard else stand_in_of_parts(whole, parts)
        return stand_in_of_whole(made, whole.parameter, self.data_exposed)

    def _receiver(self, uses: CastUses) -> Receive:
        """Return the receiver of the node's gradients: it adds those in autocast's type, which come by ``uses``."""
        hidden = frozenset(self.store.autocast)
        take = (lambda node, grads: self.receive(node, self._local(grads))) if self.sharded else self.receive

        def receive(node: Any, grads: Gradients) -> Gradients:
            if not uses.arrived:
                return take(node, grads)
            merged = list(grads)
            for index, total in uses.sums().items():
                if index in hidden:
                    self.full_precision.check_source(index, receive)
                elif merged[index] is not None:
                    self.full_precision.refuse_sources(index)
                merged[index] = total
            return take(node, tuple(merged))

        return receive

    def _local(self, grads: Gradients) -> Gradients:
        """Return this rank's own part of gradients, those of shards being DTensors."""
        local = list(grads)
        for index, sharded in self.sharded.items():
            if (grad := local[index]) is not None:
                local[index] = sharded.receive(grad, self.store.device.copied_to_host)
        return tuple(local)

    def whole_of(self, parameter: Tensor) -> Any:
        """Return the whole that a host parameter is."""
        return self.wholes[self.index_of[id(parameter)] - len(self.store.params)]

    def bind(self) -> None:
        """Put the stand-ins into the slots; the unit is resident (Rule 2)."""
        if self.bound:
            return
        self._bound_slots += exchange(self.slots, self.hosts, self.shown, but=self.store.autocast)
        for index in sorted(self.full_precision.enabled):
            self._show_full_precision(index)
        for entry in self.hidden:
            entry.hide()
        self.bound = True

    def unbind(self) -> None:
        """Put the host parameters back into the slots."""
        if not self.bound:
            return
        if self.data_exposed[0]:
            self._rejoin()
        exchange(self.slots, self.shown, self.hosts)
        for entry in reversed(self.hidden):
            entry.show()
        if copies := self.full_precision.copies:
            exchange([(index, slot) for index, slot in self.slots if index in copies], copies, self.hosts)
            self.full_precision.end_visit()
        self._bound_slots = 0
        self.bound = False

    def expose(self, index: int) -> None:
        """Put a full-precision copy into the slots of a weight with a hidden stand-in, from now on (Rule 6)."""
        if index not in self.store.autocast:
            return
        self.full_precision.enabled.add(index)
        if self.bound:
            self._show_full_precision(index)

    def _show_full_precision(self, index: int) -> None:
        """Put a weight's full-precision copy, which is made if it is wanted, into the slots that have the weight."""
        parameter = self.store.params[index]
        for at, slot in self.slots:
            if at == index and slot.get() is parameter:
                slot.set(self.full_precision.tensor(index))

    def stand_in(self, index: int) -> Tensor:
        """Return the device tensor that model code may see in a parameter's place."""
        return self.full_precision.tensor(index) if index in self.store.autocast else self.shown[index]

    def remake(self) -> None:
        """Drop the stand-ins, since their types changed: ``refresh`` makes others."""
        self._drop()
        self.known_versions = []  # the unit may be fetched and evicted before its next visit
        self.may_be_kept = False
        self._were = []
        self.data_exposed[0] = False
        self.full_precision.clear()

    def _drop(self) -> None:
        self.outputs = self.shown = self.places = []
        self._attributes = []
        self.store.on_device.stand_ins = 0

    def backward_done(self) -> None:
        """End a backward: all gradients have arrived."""
        self.uses.clear()
        self.full_precision.backward_done()

    def forget(self) -> None:
        """Drop the stand-ins and the slots when streaming ends.

        Autograd's nodes lead to the engine, and no garbage collector sees through them: if a module keeps a graph,
        neither module nor engine would ever be freed.
        """
        for host in self.hosts:
            unwatch(host)
        for whole in self.wholes:
            whole.end()
        self._drop()
        self.known_versions = []  # an optimizer whose closure made the units anew ends with these
        self._were = []
        self.slots = []
        self.hidden = []

    def versions(self) -> list[int]:
        """Read the stand-ins' version counters."""
        return list(map(true_version, self.outputs))

    def collect_writes(self, replayed: Sequence[int] = ()) -> None:
        """Write back what model code wrote to stand-ins (Rule 4).

        ``replayed``: weights that a recomputation wrote again. The host has their bytes since the first run.
        A write that is refused is undone: the device's bytes and the stand-ins are made anew.
        """
        old_copies = self.full_precision.old_copies
        changed = self.wholes and self.bound and self._changed_whole()
        kept = self.may_be_kept and (self.bound or bool(self._were) or not self.store.stale())
        exposed = self.data_exposed[0] or kept
        if not (exposed or replayed or old_copies or self.versions() != self.known_versions or changed):
            return
        try:
            if changed:
                raise ExactnessError(
                    f"an attribute of {changed} was set inside its unit's forward, and it may be a tensor of those "
                    "that the weight consists of: set it between steps"
                )
            self._collect_writes(replayed, exposed)
        except Exception:
            self.unbind()
            self.remake()
            self.store.wrote()
            raise

    def collect_in_visit(self) -> None:
        """Write back what model code has written so far in the visit that the unit is in."""
        self.collect_writes()
        self.full_precision.collect_in_visit()
        self.collect_gradients()

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Return a parameter's gradient, in a visit one on the device (Rule 8)."""
        grad, index, device = finished_grad(parameter), self.index_of[id(parameter)], self.store.device
        if grad is None or not self.bound or device.holds(grad):
            return grad
        known = self.gradients.get(index)
        if known is not None and known[0] is grad:
            if known[1] != grad._version:
                self._collect_gradient(index)
                known[2].data.copy_(grad)
            copied = known[2]
        else:
            if known is not None:
                self._collect_gradient(index)
            copied = grad.to(device.torch_device)
        self.gradients[index] = grad, grad._version, copied, copied._version
        return copied

    def collect_gradients(self) -> None:
        """Write back what code wrote to gradients in the visit (Rule 8)."""
        while self.gradients:
            self._collect_gradient(next(iter(self.gradients)))

    def _collect_gradient(self, index: int) -> None:
        grad, version, copied, version_of_copy = self.gradients.pop(index)
        if grad._version != version:
            if copied._version != version_of_copy:
                raise ExactnessError(
                    f"the gradient of {self.store.names[index]} was written inside its unit's forward, and changed "
                    "there by a backward, or by other code, as well: write to it outside of the forward"
                )
        elif copied._version != version_of_copy or (
            copied.layout is torch.strided and not same_bytes(copied.cpu(), grad)
        ):
            with torch.no_grad():
                grad.copy_(copied)

    def _changed_whole(self) -> str | None:
        """Return the name of a whole whose stand-in was given another attribute, if any was."""
        changed = map(were_replaced, self._attributes)
        return next((whole.name for whole, was in zip(self.wholes, changed, strict=True) if was), None)

    def _collect_writes(self, replayed: Sequence[int], exposed: bool) -> None:
        if exposed:
            self._rejoin()
        for index in replayed:
            self._replay(index)
        if self.full_precision.old_copies:
            self.full_precision.collect_writes()
        versions = self.versions()
        for index, (now, before) in enumerate(zip(versions, self.known_versions, strict=True)):
            if now != before:
                check_not_recorded(self.outputs[index], self.store.names[index])
                self._check_written_once(index)
                self.store.write_back(index)
            elif exposed:
                self._write_back_if_differs(index)
        self.known_versions = versions
        self.may_be_kept = (self.data_exposed[0] or self.may_be_kept) and self.has_views()
        self.data_exposed[0] = False
        self.note_bytes()

    def note_bytes(self) -> None:
        """Note the device bytes, if code may have kept some, and may write the host's as well (Rule 4)."""
        count = len(self.outputs) if self.may_be_kept else 0
        if count and self.store.stale():
            self._were = [self.store.on_device.view(index).clone() for index in range(count)]
        else:  # the host has the same
            self._were = [true_data(parameter).clone() for parameter in self.store.params[:count]]

    def overwritten(self, indices: Sequence[int]) -> None:
        """Raise the version counters of stand-ins whose bytes are new.

        What autograd saved of the old bytes without our hooks is then an error in backward, as in a plain run.
        """
        if not self.outputs:  # nothing could be saved since the types changed
            return
        for index in indices:
            torch.autograd.graph.increment_version(self.outputs[index])
        self.known_versions = self.versions()

    def _replay(self, index: int) -> None:
        """Give a weight its bytes after the first run: a recomputation may have stopped before it wrote them."""
        self.store.on_device.view(index).copy_(true_data(self.store.params[index]))
        set_versions((self.outputs[index],), (self.known_versions[index],))

    def in_use(self) -> bool:
        """Whether the device bytes are referenced elsewhere (Rule 5)."""
        held = sum(map(sum, references(self.shown))) > self._own_references + self._bound_slots
        return held or self.store.on_device.has_views()

    def check_replaced(self, replaced: Sequence[int]) -> None:
        """Raise if a weight's data was replaced while other code refers to views of the unit's device bytes.

        The views are only counted, so whether they have the old data or the new in a plain run is unknown.
        """
        if replaced and self.has_views():
            raise ExactnessError(
                f"the data of {self.store.names[replaced[0]]} was replaced (p.data = ...) while a graph or an object "
                f"refers to a view of weights of {self.store.unit.name} on the device, and it is not known whether the "
                "view has the old data in a plain run: write to the weight in place (p.copy_(...) under "
                "torch.no_grad()), or drop the view"
            )

    def has_views(self) -> bool:
        """Whether tensors other than the stand-ins lie over the device bytes and are referenced elsewhere."""
        return self.store.on_device.has_views()

    def may_be_written(self) -> bool:
        """Whether code may write to device bytes of the unit outside of its visits."""
        return self.has_views() or bool(self.full_precision.old_copies)

    # ---- data that user code gives to parameters, and model code to stand-ins

    def host_exposed(self, parameter: Tensor) -> None:
        """Move the epoch, as the host bytes may be written now."""
        self.owner.before_host_access(parameter)
        self.store.wrote()

    def data_given(self, parameter: nn.Parameter, value: Tensor) -> Tensor:
        """Return the host tensor that becomes the parameter's data when ``value`` is assigned to it.

        In a plain run the value is on the device, often as a copy made by ``.to(p.device)``, which copies nothing here.
        So the value's memory becomes the parameter's only where the CPU computes, for an optimizer's own code, which
        runs on the host, or if it is a weight's already. Any other value is copied.
        """
        host, index, on_device = true_data(parameter), self.store.index_of[id(parameter)], self.store.on_device
        self._show_saved_again(index, value)
        place = on_device.storage.data_ptr() + on_device.layout.fields[index].offset
        if value.data_ptr() == place and value.shape == host.shape:
            return host  # the value is the parameter's stand-in, as ``module.to()`` in a step assigns it
        shared = self.store.device.is_host or self.owner.phases.optimizing or self.owner.in_weights(value)
        return value if shared and not self.owner.on_device(value) else value.to("cpu", copy=True)

    def _show_saved_again(self, index: int, value: Tensor) -> None:
        """Copy a weight's new data into the device buffer at once if a graph saved the weight past our hooks.

        Such a graph, of gradients (create_graph), saved the weight itself: a plain run gives it the new data.
        """
        weight, on_device = self.store.weights[index], self.store.on_device
        if weight.saved_again:
            weight.saved_again = on_device.has_views()
            if weight.saved_again:
                with torch.no_grad():
                    on_device.view(index).copy_(value)

    def replace(self, stand_in: Tensor, parameter: nn.Parameter, value: Tensor) -> None:
        """Give a stand-in other data inside its visit (Rule 7).

        A full-precision copy always has memory of its own (fp32_copies.py).
        """
        store, on_device = self.store, self.store.on_device
        has_views = on_device.has_views()  # the value may be such a view; counted before `place` is one of ours
        index = store.index_of[id(parameter)]
        weight = store.weights[index]
        if value.shape != weight.host.shape and self._may_reshape(weight, value):
            store.reshape(index, value.shape)
            self._part(weight, False, stand_in, on_device.view(index))
        place = on_device.view(index)
        weight.check_data(value, true_dtype(stand_in))
        if index in store.autocast:
            set_true_data(stand_in, torch.empty_like(true_data(stand_in)).copy_(value))
        elif value.data_ptr() == place.data_ptr() and value.stride() == place.stride():
            self._part(weight, False, stand_in, place)
        elif weight.parted or has_views:
            self._part(weight, True, stand_in, torch.empty_like(true_data(stand_in)).copy_(value))
        else:
            self._leave(index)
            place.copy_(value)

    def _may_reshape(self, weight: Weight, value: Tensor) -> bool:
        """Whether data of another shape is the weight's bytes in another order, and no one needs the old shape."""
        same_bytes = value.dtype is weight.host.dtype and value.numel() == weight.parameter.numel()
        plain = value.is_contiguous() and weight.parameter.is_contiguous() and not weight.is_narrow
        needed = weight.parameter.requires_grad or self.store.slab.is_shared or self.store.remembered()
        return same_bytes and plain and not needed

    def _part(self, weight: Weight, parted: bool, stand_in: Tensor, data: Tensor) -> None:
        """Give a stand-in memory of its own, or place it over the device buffer again (Rule 7)."""
        set_true_data(stand_in, data)
        self.store.on_device.stand_ins += weight.parted - parted
        weight.parted = parted

    def _rejoin(self) -> None:
        """Copy the data of parted stand-ins into the device buffer when their visit ends (Rule 7)."""
        for index, (weight, output) in enumerate(zip(self.store.weights, self.outputs, strict=True)):
            if weight.parted:
                self._leave(index)
                place = self.store.on_device.view(index)
                place.copy_(true_data(output))
                self._part(weight, False, output, place)

    def _leave(self, index: int) -> None:
        """Save a weight's device bytes on the host before they are overwritten, if a graph refers to the unit."""
        if self.store.remembered():
            self.store.weights[index].leave(lambda: self.store.on_device.view(index).to("cpu", copy=True))

    def _write_back_if_differs(self, index: int) -> None:
        now = self.store.on_device.view(index).cpu()
        host = true_data(self.store.params[index]).to(now.dtype)
        was = self._were[index].cpu().to(now.dtype) if self._were and not self.bound else host
        if same_bytes(now, was):
            return
        self._check_written_once(index)
        self.store.write_back(index)

    def _check_written_once(self, index: int) -> None:
        """Raise if a weight of which code wrote the device's bytes outside of a visit was written on the host too."""
        if self.bound:
            return
        host, was = true_data(self.store.params[index]), self._were[index].cpu() if self._were else None
        is_seen = self.store.version(index) != self.store.on_device.stamp.versions[index]
        if is_seen or (was is not None and not same_bytes(host.to(was.dtype), was)):
            raise ExactnessError(
                f"{self.store.names[index]} was written through what model code kept of it in a forward, and through "
                "the weight itself or another tensor over its bytes on the host, and it is not known in which order: "
                "write to the weight itself"
            )


class StreamedUnit:
    """A unit at run time: its bytes, its stand-ins and the number of its open visits."""

    def __init__(
        self, unit: Unit, store: HostCopy, receive: OnGradients, slots: Mapping[nn.Parameter, list[Slot]]
    ) -> None:
        self.unit = unit
        self.name = unit.name
        self.index = unit.index
        self.store = store
        self.visits = 0
        self.stand_ins = StandIns(store, lambda node, grads: receive(self, node, grads), slots)

    def stand_in(self, parameter: Tensor) -> Tensor:
        """Return the device tensor that model code may see in the place of one of the unit's host parameters."""
        return self.stand_ins.stand_in(self.stand_ins.index_of[id(parameter)])

    @property
    def names(self) -> list[str]:
        """The names of the unit's parameters, as ``named_parameters()`` has them."""
        parts = self.unit.parts
        plain = [name for name, parameter in self.unit.params if id(parameter) not in parts]
        return [*plain, *(whole.name for whole in self.unit.wholes)]

    def forget(self) -> None:
        """Drop modules and stand-ins when streaming ends; names and numbers stay."""
        self.stand_ins.forget()
        self.unit = self.store.unit = replace(self.unit, modules=())

    def sizes(self) -> UnitNumbers:
        """Return the unit's byte counts, from which sizes are chosen."""
        fields = zip(self.store.on_device.layout.fields, self.store.host_layout.fields, self.store.params, strict=True)
        trained = [(field, host, p.numel()) for field, host, p in fields if p.requires_grad]
        return UnitNumbers(
            self.name,
            self.store.on_device.nbytes,
            sum(field.nbytes for field, *_ in trained),
            sum(numel for *_, numel in trained),
            resident=self.unit.resident,
            cast=sum(numel for field, host, numel in trained if field.dtype is not host.dtype),
        )

    def host_bytes(self) -> UnitHostBytes:
        """Return the unit's bytes on the host, and those that its gradients will take there."""
        fields = zip(self.store.host_layout.fields, self.store.params, strict=True)
        trained = sum(aligned(field.nbytes) for field, p in fields if p.requires_grad)
        return UnitHostBytes(weights=self.store.slab.truth.numel(), wire=self.store.wire_nbytes, trained=trained)

    @property
    def movable(self) -> bool:
        """Whether the unit's bytes may leave the device now."""
        return not self.visits and not self.stand_ins.in_use()

    @property
    def awaited(self) -> bool:
        """Whether the unit is visited, or code or a graph that waits for its backward may need what it has now."""
        return not self.movable or self.store.remembered() or bool(self.stand_ins.awaited)
