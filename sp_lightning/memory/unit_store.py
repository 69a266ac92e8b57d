"""One unit's bytes on the host: the slab that its parameters alias, and what of them goes up to the device.

1. The host is the truth. Each parameter's data is a tensor of its own over a slice of the slab, so the optimizer, the
   user's code and checkpoints work on it as on any other. Eviction from the device is a free, never a copy.
2. The device copy (device_copy.py) is filled from the host bytes, which are given to it as data: runs of buffers, and
   weights that go up by themselves.
3. Data that model code assigns to a stand-in is copied into the device buffer. But if other code refers to a view of
   the unit's bytes, the view must keep the old ones: then the stand-in is *parted*, with memory of its own for the new
   data, which is copied into the buffer when the visit ends. If model code assigns the data in the buffer again before
   that (``old = p.data; p.data = other; ...; p.data = old``), the stand-in is over the buffer again. Data of another
   shape has the weight's bytes in another order (a quantized layer that packs them for its kernel). Its unit keeps its
   place and its size, so a frozen weight gets that shape at once, on both sides, unless a graph needs the old one.
4. The host bytes may not be written while a fill reads them: ``settle`` waits for the fill.
5. Where several ranks share the slab, the parameters are over its face in this process (shared_memory.py), and what
   goes up from the slab is the truth. Weights that user code may have written to since the two were last equal go up
   from the face. The first rank's bytes are the truth at the beginning. Weights of Rule 9 are refused; those that lie
   in one storage side by side, to which nothing else refers, are moved.
6. The host bytes have one stamp: their epoch, and the versions and addresses of the parameters. The device's bytes and
   the wire copies each have the stamp of the host bytes that they were made from, read before these were. A copy is
   stale once its stamp is not the host's. Who writes where no version shows it moves the epoch: an optimizer's step,
   code that the bytes are exposed to (by ``.data``, a view, an array), a write-back. After a write-back the device,
   which has the bytes already, gets the new epoch too. While another tensor shares the host bytes, code may write
   through it at any time, and no two stamps are equal. Only who may write the host bytes moves the epoch, after
   `wait_step`, so no two threads move it at a time.
7. Weights that travel in another type than they have on the host are converted into a buffer of wire copies (``wire``),
   once for each change: by the step itself where it can (`conversion`), else by the thread that stepped them
   (`after_step`), or before a fill. Small neighbours are copied there too, so that a unit goes up in one piece. Large
   ones go up from the slab.
8. Some of what autograd saves of a weight keeps its bytes in a plain run, even when the weight changes: autocast's cast
   copy, and a view of data that ``p.data = ...`` replaced. A saved reference to such bytes refers to the weight's
   ``SavedBytes``. When the weight gets other bytes, the old ones are left there, on the host, and the weight gets a new
   ``SavedBytes``. Every saved reference also refers to ``memory``, whose reference count says that some graph still
   needs the current layout.
9. Where the CPU computes, a parameter whose memory another tensor shares stays where it is, outside of the slab: in a
   plain run a write to one is a write to the other. On another device so does one that came to share its memory while
   it was streamed, if units are made anew. So does, on the CPU, one whose memory torch did not allocate (`from_numpy`),
   and nothing counts who refers to that: it goes up for each visit, as the shared ones do (Rule 6). It is copied into
   the slab all the same where several ranks share that.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..compat.references import is_entry_shared, own_uses, uses_of
from ..compat.tensors import preserving_version, without_dispatch
from ..core import malloc
from ..core.telemetry import Counters
from ..core.unit_numbers import ALIGNMENT
from ..errors import UnsupportedError
from .device import Device
from .device_copy import DeviceCopy, Run, Sources
from .layout import Field, Layout, as_few_runs
from .partition import Unit
from .pinned import find_foreign, is_foreign
from .watched_parameters import ParameterOwner, set_true_data, true_data, true_dtype, true_version, unwatch, watch
from .weights import Conversion, SavedBytes, Stamp, Weight, fill_wire, lay_out_wire, layout_with


class SharedMemory(Protocol):
    """A slab that several ranks share (shared_memory.py)."""

    truth: Tensor
    face: Tensor
    is_first: bool  # whether this rank is the first

    def private(self) -> Sequence[tuple[int, int]]:
        """Find the ranges of bytes that this rank wrote through the face."""


_outside = operator.attrgetter("outside")
_NONE = torch.empty(0, device="cpu").untyped_storage()
KNOWN = 2  # references of a store to the storage of each parameter's data: its weight's, and one in a list


class UnitStore:
    """Host slab and device buffer of one unit."""

    def __init__(
        self,
        unit: Unit,
        device: Device,
        counters: Counters,
        owner: ParameterOwner,
        device_dtype: Callable[[torch.dtype], torch.dtype] = lambda dtype: dtype,
        share: Callable[[int], SharedMemory] | None = None,
    ) -> None:
        self.unit = unit
        self.device = device
        self.counters = counters
        self.params: list[nn.Parameter] = [parameter for _, parameter in unit.params]
        self.index_of = {id(parameter): index for index, parameter in enumerate(self.params)}
        self.names = [name for name, _ in unit.params]
        self.owner = owner
        self.host_layout = self._lay_out_slab()
        nbytes = max(self.host_layout.nbytes, ALIGNMENT)
        self.shared = None if share is None else share(nbytes)  # by several ranks (Rule 5)
        self.slab = device.slab(nbytes) if self.shared is None else self.shared.truth
        self._settled: Stamp | None = None  # of the host bytes when they were last true for all ranks
        self._device_dtype = device_dtype
        self.weights = self._adopt()
        self._homes = self._addresses()  # where the parameters' bytes are unless user code replaced them
        self._views = self._sizes_and_strides()  # likewise: other data may lie at the same address
        self._storages = [weight.storage for weight in self.weights]  # when the device buffer was filled last
        self._epoch = 0
        self.on_device = DeviceCopy(unit.name, device, counters, Stamp(None, [], self._homes))
        self.retype({})

    def retype(self, autocast: Mapping[int, torch.dtype]) -> None:
        """Change the types in which parameters travel, from the next fill on.

        The unit must not be resident, and no graph may need its bytes.
        """
        self.autocast = dict(autocast)
        types = [autocast.get(i, self._usual_dtype(weight)) for i, weight in enumerate(self.weights)]
        self.on_device.lay_out(layout_with(self.host_layout.fields, types))
        for weight, field in zip(self.weights, self.on_device.layout.fields, strict=True):
            weight.field, weight.wire, weight.saved, weight.parted, weight.saved_again = field, None, None, False, False
        self.narrow = frozenset(i for i, weight in enumerate(self.weights) if weight.is_narrow)
        self.cast_gradients: dict[int, torch.dtype] = {}  # of weights that are cast on the device only
        self.wire = self._lay_out_wire()
        self._wire_stamp: Stamp | None = None
        self._runs: Sequence[Run] = [] if self.narrow else [(self.slab, 0, 0, self.on_device.nbytes)]
        self.memory = object()  # counts the references of graphs (Rule 8)

    def _usual_dtype(self, weight: Weight) -> torch.dtype:
        """Return the type in which a weight travels outside of autocast: a part as it is (partition.py, rule 10)."""
        dtype = weight.host.dtype
        return dtype if id(weight.parameter) in self.unit.parts else self._device_dtype(dtype)

    def _lay_out_wire(self) -> Tensor:
        return lay_out_wire(self.weights, self.device)

    def _buffers(self) -> Iterator[tuple[Tensor, int]]:
        """Yield where each weight goes up from: a buffer, and the first byte there."""
        for weight in self.weights:
            if weight.wire is None:
                yield self.slab, weight.host.offset
            else:
                yield self.wire, int(weight.wire.storage_offset()) * weight.wire.itemsize

    def remembered(self) -> bool:
        """Whether autograd saved any of the unit's bytes, for a backward that may follow (Rule 8)."""
        return is_entry_shared(vars(self), "memory")

    def gradient_fields(self) -> tuple[Field, ...]:
        """Return the parameters' fields with the types in which their gradients come down."""
        if not self.cast_gradients:
            return self.on_device.layout.fields
        types = [
            self.cast_gradients.get(index, field.dtype) for index, field in enumerate(self.on_device.layout.fields)
        ]
        return layout_with(self.on_device.layout.fields, types).fields

    def saved_bytes(self, index: int) -> SavedBytes:
        """Return the token for the bytes that a weight has now (Rule 8)."""
        weight = self.weights[index]
        if weight.saved is None:
            weight.saved = SavedBytes()
        return weight.saved

    # ---- the host side

    def _lay_out_slab(self) -> Layout:
        """Lay out the parameters in the slab."""
        return Layout.of([(name, true_data(parameter)) for name, parameter in self.unit.params])

    def _adopt(self) -> list[Weight]:
        """Move the parameters' bytes into the slab, but for those of Rule 9, and begin to manage them."""
        outside = self._find_outside()
        weights = [
            Weight(p, field, index in outside, p.untyped_storage(), p.stride(), field)
            for index, (p, field) in enumerate(zip(self.params, self.host_layout.fields, strict=True))
        ]
        if self.shared is not None:
            return self._adopt_shared(weights, self.shared)
        for weight in weights:
            if not weight.outside:
                data = self._place(weight)
                set_true_data(weight.parameter, data)
                weight.note_data()
            watch(weight.parameter, self)
        malloc.freed(sum(weight.host.nbytes for weight in weights))
        return weights

    def _find_outside(self) -> set[int]:
        """Find the parameters that stay where they are, by their indices (Rule 9)."""
        foreign = find_foreign(self.params) if self.device.is_host and self.shared is None else ()
        return {i for i, param in enumerate(self.params) if id(param) in foreign or self.owner.shares_bytes(param)}

    def _place(self, weight: Weight) -> Tensor:
        """Copy a weight's bytes into the slab and return the tensor over them."""
        with torch.inference_mode(False), torch.no_grad():
            view = self.host_layout.own_view(self.slab.untyped_storage(), weight.host)
            return view.copy_(true_data(weight.parameter))

    def _adopt_shared(self, weights: list[Weight], shared: SharedMemory) -> list[Weight]:
        """Place the parameters over the face of the slab (Rule 5)."""
        for weight in weights:
            if weight.outside:
                raise UnsupportedError(
                    f"{weight.host.name} shares its memory with another tensor, which cannot follow where several "
                    "ranks on the CPU share the weight; give the weight data of its own (p.data = p.data.clone()), "
                    "or use devices=1, or strategy='ddp'"
                )
            with torch.inference_mode(False), torch.no_grad():
                if shared.is_first:
                    self.host_layout.own_view(self.slab.untyped_storage(), weight.host).copy_(
                        true_data(weight.parameter)
                    )
                view = self.host_layout.own_view(shared.face.untyped_storage(), weight.host)
            set_true_data(weight.parameter, view)
            weight.note_data()
            watch(weight.parameter, self)
        malloc.freed(self.slab.numel())
        return weights

    # ---- several ranks (Rule 5)

    @property
    def host_ranges(self) -> list[tuple[int, int]]:
        """The address and the bytes of the slab, and of its face if several ranks share it."""
        slabs = [self.slab] if self.shared is None else [self.slab, self.shared.face]
        return [(slab.data_ptr(), slab.nbytes) for slab in slabs]

    def may_differ(self) -> bool:
        """Whether user code may have written to the face since it was last equal to the truth."""
        return self.stamp() != self._settled

    def is_true(self) -> None:
        """Note that the face is equal to the truth."""
        self._settled = self.stamp()

    def indices_in(self, pages: Sequence[tuple[int, int]]) -> list[int]:
        """List the parameters of which any byte is in these ranges of the slab."""
        return [
            index
            for index, field in enumerate(self.host_layout.fields)
            if any(start < field.offset + field.nbytes and field.offset < end for start, end in pages)
        ]

    def _on_the_face(self, stamp: Stamp) -> list[int]:
        """List the parameters that go up from the face."""
        if self.shared is None or stamp == self._settled:
            return []
        return self.indices_in(self.shared.private())

    def release(self, kept: bool = False) -> None:
        """Make the parameters plain again, with the bytes they have, and free the device buffer.

        With ``kept`` the user's code still refers to the device bytes: then they are left to it. Where the host
        computes, the parameters lie there from now on: in a plain run, such a view is one of theirs.
        """
        if kept and self.device.is_host and self.on_device.is_loaded and not self.shared:
            self._settle_on_device()
        for parameter in self.params:
            unwatch(parameter)
        for weight in self.weights:
            weight.storage = _NONE  # a reference of ours would count as another's where the module is streamed again
        self._storages = []
        if self.on_device.is_loaded and not kept:
            self.on_device.free()

    def _settle_on_device(self) -> None:
        """Have the parameters lie in the device buffer, where they have their own types there."""
        if self.stale():
            self.load()
            self.on_device.wait_load()
        for index, parameter in enumerate(self.params):
            view = self.on_device.view(index)
            if view.dtype == true_dtype(parameter) and view.shape == parameter.shape:
                set_true_data(parameter, view)

    def data_exposed(self, parameter: Tensor) -> None:
        """Move the epoch (Rule 6) and wait for the fill (Rule 4): the host bytes may be written now."""
        self.owner.before_host_access(parameter)
        self._epoch += 1
        self.on_device.settle()

    def data_given(self, parameter: nn.Parameter, value: Tensor) -> Tensor:
        """Return the host tensor that becomes the parameter's data when ``value`` is assigned to it (Rule 1).

        In a plain run the value is on the device, often as a copy made by ``.to(p.device)``, which copies nothing here.
        So the value's memory becomes the parameter's only where the CPU computes, for an optimizer's own code, which
        runs on the host, or if it is in a slab. Any other value is copied.
        """
        host, index = true_data(parameter), self.index_of[id(parameter)]
        self._show_saved_again(index, value)
        place = self.on_device.storage.data_ptr() + self.on_device.layout.fields[index].offset
        if value.data_ptr() == place and value.shape == host.shape:
            return host  # the value is the parameter's stand-in, as ``module.to()`` in a step assigns it
        shared = self.device.is_host or self.owner.phases.optimizing or self.owner.in_slab(value)
        return value if shared and not self.owner.on_device(value) else value.to("cpu", copy=True)

    def mark_stale(self, stepped: Collection[int] = ()) -> None:
        """Move the epoch: an optimizer or another writer changed the host bytes, or is about to (Rule 6).

        ``stepped`` has the ids of parameters whose step moves it by itself (`after_step`). If all that train are among
        them, there is nothing to do; where none trains, no step of ours moved it.
        """
        trained = {id(parameter) for parameter in self.params if parameter.requires_grad}
        if not trained or not trained.issubset(stepped):
            self._epoch += 1

    def conversion(self, index: int) -> Conversion | None:
        """Return the wire copy that the step of a weight may convert; None if it has none, or has to keep it (Rule 8).

        No fill reads it then: the unit's gradients arrived after all fills.
        """
        wire = self.weights[index].wire
        if wire is None or index not in self.narrow or (index in self.autocast and self.remembered()):
            return None
        return Conversion(wire)

    def after_step(
        self, data_of_deferred: Mapping[int, Tensor] | None = None, conversions: Mapping[int, Conversion] | None = None
    ) -> None:
        """Move the epoch and convert the wire copies as soon as the unit was stepped, on the thread that stepped it.

        ``data_of_deferred`` is the data of parameters that have none until their deferred step was waited for
        (pending_step.py). Of ``conversions`` those count that were made from what the data is now, into what the
        wire copies are now.
        """
        self._epoch += 1
        if self.narrow:
            data = [(data_of_deferred or {}).get(index, parameter) for index, parameter in enumerate(self.params)]
            with without_dispatch():
                stamp = self._stamp(data)
                now = list(zip(stamp.versions, stamp.addresses, strict=True))
                done = [
                    index
                    for index, made in (conversions or {}).items()
                    if made.source == now[index] and made.wire is self.weights[index].wire
                ]
                self._fill_wire(data, stamp, done)

    def host_cast(self, index: int, like: Tensor) -> Tensor:
        """Cast a weight to other host memory, with the type, the shape and the strides of ``like``."""
        cast = self.device.host_empty(like)
        with torch.inference_mode(False), torch.no_grad():
            self._fill_cast(index, cast)
        return cast

    def _fill_cast(self, index: int, cast: Tensor) -> None:
        cast.copy_(true_data(self.params[index]))

    @property
    def stepping(self) -> bool:
        """Whether an optimizer step that is under way has yet to change the host bytes."""
        step = self.owner.access.steps.get(self)
        return step is not None and step.is_stepping(self)

    def wait_step(self) -> None:
        """Wait for a deferred optimizer's step of this unit, which writes the host bytes."""
        if (step := self.owner.access.steps.get(self)) is not None:
            step.wait(self)

    def in_place(self, index: int) -> bool:
        """Whether a parameter's bytes are in the slab, laid out as they were."""
        data = self.params[index]
        is_home = data.data_ptr() == self._homes[index] and (data.size(), data.stride()) == self._views[index]
        return is_home and not self.weights[index].outside

    def stale(self) -> bool:
        """Whether the device's bytes may differ from the host's (Rule 6).

        The epoch comes first: parameters whose step is deferred have no address.
        """
        known = self.on_device.stamp
        if known.epoch != self._epoch:
            return True
        with without_dispatch():
            versions, addresses = list(map(true_version, self.params)), self._addresses()
        if versions != known.versions or addresses != known.addresses:
            return True
        return max(uses_of(self._storages), default=0) > own_uses(KNOWN - 1)  # the list is of `KNOWN`

    def stamp(self) -> Stamp:
        """Return the stamp of the host bytes (Rule 6)."""
        with without_dispatch():
            return self._stamp(self.params)

    def version(self, index: int) -> int:
        """Return a parameter's version counter, which does not count as a read of it (weight_reads.py)."""
        with without_dispatch():
            return self.params[index]._version

    @property
    def was_replaced(self) -> bool:
        """Whether the user's code replaced the data of any parameter, or laid it out in another way."""
        return self._homes != self._addresses() or self.was_reshaped

    @property
    def was_reshaped(self) -> bool:
        """Whether the user's code gave any parameter another shape or other strides."""
        return self._views != self._sizes_and_strides()

    def written(self) -> list[int]:
        """Find the parameters that were written in place since the bytes went up, as far as version counters say."""
        pairs = zip(self.on_device.stamp.versions, map(true_version, self.params), strict=True)
        return [index for index, (then, now) in enumerate(pairs) if now != then]

    def replaced(self) -> list[int]:
        """Find the parameters that were given other data since the bytes went up."""
        pairs = zip(self.on_device.stamp.addresses, self._addresses(), strict=True)
        return [index for index, (then, now) in enumerate(pairs) if now != then]

    # ---- the device side

    def load(self) -> None:
        """Start to fill the device buffer from the host bytes as they are now."""
        self.wait_step()
        stamp = self.on_device.stamp
        if self.stale():
            stamp = self._stamp(self.params)
            self._note_data(stamp.addresses)
        if self.narrow and stamp != self._wire_stamp:
            self._fill_wire(self.params, stamp)
        self.on_device.load(stamp, self._sources(stamp))

    def _sources(self, stamp: Stamp) -> Sources:
        """Return the host bytes with this stamp, as they go up."""
        if not self._runs:
            self._runs = self._cut()
        return Sources(self._runs, self._loose(stamp), self.device.send_up)

    def _cut(self) -> Sequence[Run]:
        """List the copies that fill the device buffer, as few as possible."""
        return list(as_few_runs(self._buffers(), self.on_device.layout.fields))

    def write_back(self, index: int, full_precision: Tensor | None = None) -> None:
        """Copy a weight, or its full-precision copy, that model code changed on the device to the host. Blocks."""
        parameter = self.params[index]
        view = self.on_device.view(index) if full_precision is None else full_precision
        self.owner.about_to_write_back(self, index, true_data(parameter))
        with torch.no_grad(), preserving_version(parameter):
            true_data(parameter).copy_(view)
        fresh = full_precision is None and self.on_device.stamp.epoch == self._epoch
        self._epoch += 1
        if fresh:  # the device has these bytes
            self.on_device.stamp = self.on_device.stamp._replace(epoch=self._epoch)
        self.counters.writebacks += 1
        self.counters.bytes_written_back += view.nbytes

    def replace(self, stand_in: Tensor, parameter: nn.Parameter, value: Tensor) -> None:
        """Give a stand-in other data inside its visit (Rule 3).

        A full-precision copy always has memory of its own (fp32_copies.py).
        """
        has_views = self.on_device.has_views()  # the value may be such a view; counted before `place` is one of ours
        index = self.index_of[id(parameter)]
        weight = self.weights[index]
        if value.shape != weight.host.shape and self._may_reshape(weight, value):
            self._reshape(index, value.shape)
            self._part(weight, False, stand_in, self.on_device.view(index))
        place = self.on_device.view(index)
        weight.check_data(value, true_dtype(stand_in))
        if index in self.autocast:
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
        needed = weight.parameter.requires_grad or self.shared is not None or self.remembered()
        return same_bytes and plain and not needed

    def _reshape(self, index: int, shape: torch.Size) -> None:
        """Give a weight another shape over the bytes that it has, on the host and on the device (Rule 3)."""
        weight = self.weights[index]
        with torch.inference_mode(False), torch.no_grad():
            set_true_data(weight.parameter, true_data(weight.parameter).view(shape))
            if weight.wire is not None:
                weight.wire = weight.wire.view(shape)
        weight.note_data()
        self.host_layout = self.host_layout.reshaped(index, shape)
        self.on_device.layout = self.on_device.layout.reshaped(index, shape)
        weight.host, weight.field = self.host_layout.fields[index], self.on_device.layout.fields[index]
        self._views[index] = weight.parameter.size(), weight.stride

    def _part(self, weight: Weight, parted: bool, stand_in: Tensor, data: Tensor) -> None:
        """Give a stand-in memory of its own, or place it over the device buffer again (Rule 3)."""
        set_true_data(stand_in, data)
        self.on_device.own_aliases += weight.parted - parted
        weight.parted = parted

    def rejoin(self, stand_ins: Sequence[Tensor]) -> None:
        """Copy the data of parted stand-ins into the device buffer when their visit ends (Rule 3)."""
        for index, (weight, stand_in) in enumerate(zip(self.weights, stand_ins, strict=True)):
            if weight.parted:
                self._leave(index)
                place = self.on_device.view(index)
                place.copy_(true_data(stand_in))
                self._part(weight, False, stand_in, place)

    def _leave(self, index: int) -> None:
        """Copy a weight's bytes in the device buffer to the host for saved references, before an overwrite (Rule 8)."""
        if self.remembered():
            self.weights[index].leave(lambda: self.on_device.view(index).to("cpu", copy=True))

    def _show_saved_again(self, index: int, value: Tensor) -> None:
        """Copy a weight's new data into the device buffer at once if a graph saved the weight past our hooks.

        Such a graph, of gradients (create_graph), saved the weight itself: a plain run gives it the new data.
        """
        if self.weights[index].saved_again:
            self.weights[index].saved_again = self.on_device.has_views()
            if self.weights[index].saved_again:
                with torch.no_grad():
                    self.on_device.view(index).copy_(value)

    def bytes_before(self, index: int, before: Tensor) -> torch.UntypedStorage:
        """Copy bytes that a weight had before to the device again, into a new storage."""
        field = self.on_device.layout.fields[index]
        with torch.inference_mode(False), torch.no_grad():
            tensor = torch.empty_strided(
                field.shape, field.stride, dtype=field.dtype, device=self.on_device.storage.device
            )
            tensor.copy_(before)
        self.counters.bytes_up += field.nbytes
        return tensor.untyped_storage()

    # ---- details

    def _stamp(self, data: Sequence[Tensor]) -> Stamp:
        """Return the stamp of the host bytes, which lie in these tensors (Rule 6)."""
        addresses = list(map(Tensor.data_ptr, data))
        shared = self._are_shared(data, self._storages)
        if addresses != self._homes or any(map(_outside, self.weights)):
            shared = shared or self._has_foreign(data)
        return Stamp(object() if shared else self._epoch, list(map(true_version, data)), addresses)

    def _has_foreign(self, data: Sequence[Tensor]) -> bool:
        """Whether code may write any of these bytes without a tensor over them (Rule 9)."""
        return self.device.is_host and any(is_foreign(one) and not self.owner.in_slab(one) for one in data)

    def _note_data(self, addresses: list[int]) -> None:
        """Note where the parameters' data is, and leave what it replaced to what autograd saved of that (Rule 8)."""
        if addresses != self._homes or self.was_reshaped:
            for weight in self.weights:
                weight.check_shape()
        replaced = zip(self.weights, self.on_device.stamp.addresses, addresses, strict=True)
        for index, (weight, then, now) in enumerate(replaced):
            if then != now and index not in self.autocast:
                weight.leave(weight.data_before)
            weight.note_data()
        self._storages = [weight.storage for weight in self.weights]

    def is_shared(self) -> bool:
        """Whether something else refers to the bytes of any parameter."""
        return self._are_shared(self.params, self._storages)

    def shares(self, index: int) -> bool:
        """Whether something else refers to the bytes of this parameter."""
        return self._are_shared([self.params[index]], islice(self._storages, index, None))

    @staticmethod
    def _are_shared(data: Sequence[Tensor], known: Iterable[torch.UntypedStorage]) -> bool:
        """Whether something else refers to any of these bytes; ``known``: the storages that the store knew them in."""
        storages = list(map(Tensor.untyped_storage, data))
        ours = map(KNOWN.__mul__, map(operator.is_, storages, known))
        return max(map(operator.sub, uses_of(storages), ours), default=0) > own_uses()

    def _addresses(self) -> list[int]:
        return list(map(Tensor.data_ptr, self.params))

    def _sizes_and_strides(self) -> list[Any]:
        return list(zip(map(Tensor.size, self.params), map(Tensor.stride, self.params), strict=True))

    def _loose(self, stamp: Stamp) -> list[tuple[int, Tensor]]:
        """List weights that go up neither from the slab nor as wire copies, by index, with their data."""
        written = self._on_the_face(stamp)
        if not written and stamp.addresses == self._homes and not any(map(_outside, self.weights)):
            return []
        places = enumerate(zip(self.weights, stamp.addresses, self._homes, strict=True))
        return [
            (index, true_data(weight.parameter))
            for index, (weight, at, home) in places
            if weight.wire is None and (weight.outside or at != home or index in written)
        ]

    def _fill_wire(self, data: Sequence[Tensor], stamp: Stamp, done: Collection[int] = ()) -> None:
        """Convert these host bytes, which have this stamp, into wire copies (Rules 7 and 8), but for those ``done``.

        A write in the meantime, which may not be in the wire copies, makes them stale.
        """
        fill_wire(self.weights, data, self.autocast if self.remembered() else (), done)
        self._wire_stamp = stamp
