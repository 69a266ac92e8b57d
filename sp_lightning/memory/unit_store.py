"""One unit's bytes: the host slab that its parameters alias, and the device buffer that is filled from it.

1. The host is the truth. Each parameter's data is a tensor of its own over a slice of the slab, so the optimizer, the
   user's code and checkpoints work on it as on any other. Eviction from the device is a free, never a copy.
2. The device buffer's storage object lives as long as the unit's layout: it is freed and re-allocated in place, so all
   of its aliases (the stand-ins, what autograd saved) see the refilled bytes.
3. The buffer is allocated, filled and freed under the up stream. ``ready`` is recorded there after the fill, and every
   reader of the bytes waits for it. Before the buffer is freed, the up stream waits for the last readers' events. So
   memory is never given to another unit while a kernel still reads it.
4. The host bytes may not be written while a fill reads them: ``settle`` waits for the fill.
5. A unit whose bytes are still referred to (by a saved tensor, a weight kept on ``ctx``, in a cache, as an attribute)
   is in use, and is not freed: reading a freed buffer would end the process.
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
   plain run a write to one is a write to the other. So does one whose memory torch did not allocate (`from_numpy`), and
   nothing counts who refers to that: it goes up for each visit, as the shared ones do (Rule 6). It is copied into the
   slab all the same where several ranks share that.
10. Data that model code assigns to a stand-in is copied into the device buffer. But if other code refers to a view of
   the unit's bytes, the view must keep the old ones: then the stand-in is *parted*, with memory of its own for the new
   data, which is copied into the buffer when the visit ends. If model code assigns the data in the buffer again before
   that (``old = p.data; p.data = other; ...; p.data = old``), the stand-in is over the buffer again.
11. Where several ranks share the slab, the parameters are over its face in this process (shared_memory.py), and what
   goes up from the slab is the truth. Weights that user code may have written to since the two were last equal go up
   from the face. The first rank's bytes are the truth at the beginning. Weights of Rule 9 are refused; those that lie
   in one storage side by side, to which nothing else refers, are moved.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..compat.references import OWN_STORAGE_USES, is_entry_shared, shares_storage, storage_uses, storage_uses_at
from ..compat.tensors import preserving_version, storage_id, without_dispatch
from ..core import malloc
from ..core.telemetry import Counters
from ..errors import UnsupportedError
from .device import Device
from .layout import ALIGNMENT, Field, Layout, as_few_runs
from .partition import Unit
from .pinned import find_foreign, is_foreign
from .staging import Copies
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
        shares_bytes: Callable[[Tensor], bool] = shares_storage,
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
        self.shared: Any = None if share is None else share(nbytes)  # by several ranks (Rule 11)
        self.slab = device.slab(nbytes) if self.shared is None else self.shared.truth
        self._send_up = device.send_up
        self._settled: Stamp | None = None  # of the host bytes when they were last true for all ranks
        self.is_loaded = False  # whether the bytes are on the device, or on the way up until ``ready`` has happened
        self.ready: Any = None  # dropped early, a reader would see the bytes of the memory's previous user
        self._device_dtype = device_dtype
        self._ordered: list[Any] = []  # streams that are ordered after the fill
        self.weights = self._adopt(shares_bytes)
        self._homes = self._addresses()  # where the parameters' bytes are unless user code replaced them
        self._views = self._sizes_and_strides()  # likewise: other data may lie at the same address
        self._storages = self._storage_ids()
        self._epoch = 0
        self._device_stamp = Stamp(None, [], self._homes)
        self.retype({})

    def retype(self, autocast: Mapping[int, torch.dtype]) -> None:
        """Change the types in which parameters travel, from the next fill on.

        The unit must not be resident, and no graph may need its bytes.
        """
        assert not self.is_loaded
        self.autocast = dict(autocast)
        types = [autocast.get(i, self._device_dtype(weight.host.dtype)) for i, weight in enumerate(self.weights)]
        self.layout = layout_with(self.host_layout.fields, types)
        self._offsets = [field.offset for field in self.layout.fields]
        self.nbytes = max(self.layout.nbytes, ALIGNMENT)  # parameters may all be empty
        self.flat = self.device.device_bytes(self.nbytes)
        self.storage = self.flat.untyped_storage()
        for weight, field in zip(self.weights, self.layout.fields, strict=True):
            weight.field, weight.wire, weight.saved, weight.parted, weight.saved_again = field, None, None, False, False
        self.narrow = frozenset(i for i, weight in enumerate(self.weights) if weight.is_narrow)
        self.cast_gradients: dict[int, torch.dtype] = {}  # of weights that are cast on the device only
        self.wire = self._lay_out_wire()
        self._wire_stamp: Stamp | None = None
        # Of a fill; else made at the first one, because slices of the device buffer need its memory.
        self._copies: Copies = [] if self.narrow else [(self.flat, self.slab[: self.nbytes])]
        self.memory = object()  # counts the references of graphs (Rule 8)
        self.own_aliases = 0  # tensors over the buffer that are ours: counted when stand-ins are made

    def _lay_out_wire(self) -> Tensor:
        return lay_out_wire(self.weights, self.device)

    def _sources(self) -> Iterator[tuple[Tensor, int]]:
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
            return self.layout.fields
        types = [self.cast_gradients.get(index, field.dtype) for index, field in enumerate(self.layout.fields)]
        return layout_with(self.layout.fields, types).fields

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

    def _adopt(self, shares_bytes: Callable[[Tensor], bool]) -> list[Weight]:
        """Move the parameters' bytes into the slab, but for those of Rule 9, and begin to manage them."""
        outside = self._find_outside(shares_bytes)
        weights = [
            Weight(p, field, index in outside, p.untyped_storage(), p.stride(), field)
            for index, (p, field) in enumerate(zip(self.params, self.host_layout.fields, strict=True))
        ]
        if self.shared is not None:
            return self._adopt_shared(weights)
        for weight in weights:
            if not weight.outside:
                data = self._place(weight)
                set_true_data(weight.parameter, data)
                weight.note_data()
            watch(weight.parameter, self)
        malloc.freed(sum(weight.host.nbytes for weight in weights))
        return weights

    def _find_outside(self, shares_bytes: Callable[[Tensor], bool]) -> set[int]:
        """Find the parameters that stay where they are, by their indices (Rule 9)."""
        if not self.device.is_host:
            return set()
        foreign = find_foreign(self.params) if self.shared is None else ()
        return {i for i, param in enumerate(self.params) if id(param) in foreign or shares_bytes(param)}

    def _place(self, weight: Weight) -> Tensor:
        """Copy a weight's bytes into the slab and return the tensor over them."""
        with torch.inference_mode(False), torch.no_grad():
            view = self.host_layout.own_view(self.slab.untyped_storage(), weight.host)
            return view.copy_(true_data(weight.parameter))

    def _adopt_shared(self, weights: list[Weight]) -> list[Weight]:
        """Place the parameters over the face of the slab (Rule 11)."""
        for weight in weights:
            if weight.outside:
                raise UnsupportedError(
                    f"{weight.host.name} shares its memory with another tensor, which cannot follow where several "
                    "ranks on the CPU share the weight; give the weight data of its own (p.data = p.data.clone()), "
                    "or use devices=1, or strategy='ddp'"
                )
            with torch.inference_mode(False), torch.no_grad():
                if self.shared.is_first:
                    self.host_layout.own_view(self.slab.untyped_storage(), weight.host).copy_(
                        true_data(weight.parameter)
                    )
                view = self.host_layout.own_view(self.shared.face.untyped_storage(), weight.host)
            set_true_data(weight.parameter, view)
            weight.note_data()
            watch(weight.parameter, self)
        malloc.freed(self.slab.numel())
        return weights

    # ---- several ranks (Rule 11)

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
        return [] if stamp == self._settled else self.indices_in(self.shared.private())

    def release(self, kept: bool = False) -> None:
        """Make the parameters plain again, with the bytes they have, and free the device buffer.

        With ``kept`` the user's code still refers to the device bytes: then they are left to it.
        """
        for parameter in self.params:
            unwatch(parameter)
        if self.is_loaded and not kept:
            self.free()

    def data_exposed(self) -> None:
        """Move the epoch (Rule 6) and wait for the fill (Rule 4): the host bytes may be written now."""
        self.wait_step()
        self._epoch += 1
        self.settle()

    def data_given(self, parameter: nn.Parameter, value: Tensor) -> Tensor:
        """Return the host tensor that becomes the parameter's data when ``value`` is assigned to it (Rule 1).

        In a plain run the value is on the device, often as a copy made by ``.to(p.device)``, which copies nothing here.
        So the value's memory becomes the parameter's only where the CPU computes, for an optimizer's own code, which
        runs on the host, or if it is in a slab. Any other value is copied.
        """
        host, index = true_data(parameter), self.index_of[id(parameter)]
        self._show_saved_again(index, value)
        place = self.storage.data_ptr() + self.layout.fields[index].offset
        if value.data_ptr() == place and value.shape == host.shape:
            return host  # the value is the parameter's stand-in, as ``module.to()`` in a step assigns it
        shared = self.device.is_host or self.owner.optimizing or self.owner.in_slab(value)
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

    def settle(self) -> None:
        """Wait until no fill reads the host bytes any more (Rule 4)."""
        if self.ready is not None:
            self.ready.synchronize()

    @property
    def stepping(self) -> bool:
        """Whether an optimizer step that is under way has yet to change the host bytes."""
        return self.owner.is_stepping(self)

    def wait_step(self) -> None:
        """Wait for this unit's optimizer step, which writes the host bytes."""
        self.owner.wait_step(self)

    def in_place(self, index: int) -> bool:
        """Whether a parameter's bytes are in the slab, laid out as they were."""
        data = self.params[index]
        is_home = data.data_ptr() == self._homes[index] and (data.size(), data.stride()) == self._views[index]
        return is_home and not self.weights[index].outside

    def stale(self) -> bool:
        """Whether the device's bytes may differ from the host's (Rule 6).

        The epoch comes first: parameters whose step is deferred have no address.
        """
        known = self._device_stamp
        if known.epoch != self._epoch:
            return True
        with without_dispatch():
            versions, addresses = list(map(true_version, self.params)), self._addresses()
        if versions != known.versions or addresses != known.addresses:
            return True
        return max(storage_uses_at(self._storages), default=0) > OWN_STORAGE_USES

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
        return self._homes != self._addresses() or self._views != self._sizes_and_strides()

    def written(self) -> list[int]:
        """Find the parameters that were written in place since the bytes went up, as far as version counters say."""
        pairs = zip(self._device_stamp.versions, map(true_version, self.params), strict=True)
        return [index for index, (then, now) in enumerate(pairs) if now != then]

    def replaced(self) -> list[int]:
        """Find the parameters that were given other data since the bytes went up."""
        pairs = zip(self._device_stamp.addresses, self._addresses(), strict=True)
        return [index for index, (then, now) in enumerate(pairs) if now != then]

    # ---- the device side

    def load(self) -> None:
        """Start to fill the device buffer, which is allocated first if the unit is not resident (Rule 3)."""
        self.wait_step()
        stamp = self._device_stamp
        if self.stale():
            stamp = self._stamp(self.params)
            self._note_data(stamp.addresses)
            self._device_stamp = stamp._replace(epoch=None)  # if the fill is interrupted, the old bytes stay stale
        if self.narrow and stamp != self._wire_stamp:
            self._fill_wire(self.params, stamp)
        if self.is_loaded:  # filled again in place
            self._let_readers_finish()
        else:
            with self.device.up:
                self.device.grow(self.storage, self.nbytes)
        if not self._copies:
            self._copies = self._cut()
        under_way = self.counters.listener.work("up", self.unit.name, "weights", self.nbytes)
        self.ready = self._send_up(self._copies, under_way, self._uncut(stamp))
        self._ordered = []
        self._device_stamp = stamp
        self.is_loaded = True
        self.counters.fetches += 1
        self.counters.bytes_up += self.nbytes

    def _cut(self) -> Copies:
        """List the copies that fill the device buffer, as few as possible; it has its memory."""
        runs = as_few_runs(self._sources(), self.layout.fields)
        return [(self.flat[at : at + n], source[there : there + n]) for source, there, at, n in runs]

    @property
    def is_there(self) -> bool:
        """Whether the unit is resident and the caller's stream is ordered after the fill."""
        return self.is_loaded and self.device.compute in self._ordered

    def wait_load(self) -> None:
        """Order the caller's stream after the fill, once for each stream."""
        stream = self.device.compute
        if stream not in self._ordered:
            self.ready.wait(stream)
            self._ordered.append(stream)

    def free(self) -> None:
        """Free the device buffer's memory after all queued readers (Rule 3)."""
        self._let_readers_finish()
        with self.device.up:
            self.device.shrink(self.storage)
        self.is_loaded = False
        self.counters.evictions += 1

    def _let_readers_finish(self) -> None:
        """Order the up stream after the fill, which may not be queued yet (staging.py), and after all readers.

        Readers are the work queued on the caller's stream, and on every other stream that was ordered after the fill.
        """
        self.ready.wait(self.device.up)
        for stream in {self.device.compute, *self._ordered}:
            self.device.up.wait_event(stream.record_event())

    def write_back(self, index: int, full_precision: Tensor | None = None) -> None:
        """Copy a weight, or its full-precision copy, that model code changed on the device to the host. Blocks."""
        parameter = self.params[index]
        view = self.device_view(index) if full_precision is None else full_precision
        self.owner.about_to_write_back(self, index, true_data(parameter))
        with torch.no_grad(), preserving_version(parameter):
            true_data(parameter).copy_(view)
        fresh = full_precision is None and self._device_stamp.epoch == self._epoch
        self._epoch += 1
        if fresh:  # the device has these bytes
            self._device_stamp = self._device_stamp._replace(epoch=self._epoch)
        self.counters.writebacks += 1
        self.counters.bytes_written_back += view.nbytes

    def replace(self, stand_in: Tensor, parameter: nn.Parameter, value: Tensor) -> None:
        """Give a stand-in other data inside its visit (Rule 10).

        A full-precision copy always has memory of its own (fp32_copies.py).
        """
        has_views = self.has_views()  # the value may be such a view; counted before `place` is one of ours
        index = self.index_of[id(parameter)]
        weight, place = self.weights[index], self.device_view(index)
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

    def _part(self, weight: Weight, parted: bool, stand_in: Tensor, data: Tensor) -> None:
        """Give a stand-in memory of its own, or place it over the device buffer again (Rule 10)."""
        set_true_data(stand_in, data)
        self.own_aliases += weight.parted - parted
        weight.parted = parted

    def rejoin(self, stand_ins: Sequence[Tensor]) -> None:
        """Copy the data of parted stand-ins into the device buffer when their visit ends (Rule 10)."""
        for index, (weight, stand_in) in enumerate(zip(self.weights, stand_ins, strict=True)):
            if weight.parted:
                self._leave(index)
                place = self.device_view(index)
                place.copy_(true_data(stand_in))
                self._part(weight, False, stand_in, place)

    def _leave(self, index: int) -> None:
        """Copy a weight's bytes in the device buffer to the host for saved references, before an overwrite (Rule 8)."""
        if self.remembered():
            self.weights[index].leave(lambda: self.device_view(index).to("cpu", copy=True))

    def _show_saved_again(self, index: int, value: Tensor) -> None:
        """Copy a weight's new data into the device buffer at once if a graph saved the weight past our hooks.

        Such a graph, of gradients (create_graph), saved the weight itself: a plain run gives it the new data.
        """
        if self.weights[index].saved_again:
            self.weights[index].saved_again = self.has_views()
            if self.weights[index].saved_again:
                with torch.no_grad():
                    self.device_view(index).copy_(value)

    def bytes_before(self, index: int, before: Tensor) -> torch.UntypedStorage:
        """Copy bytes that a weight had before to the device again, into a new storage."""
        field = self.layout.fields[index]
        with torch.inference_mode(False), torch.no_grad():
            tensor = torch.empty_strided(field.shape, field.stride, dtype=field.dtype, device=self.storage.device)
            tensor.copy_(before)
        self.counters.bytes_up += field.nbytes
        return tensor.untyped_storage()

    def device_view(self, index: int) -> Tensor:
        """Make a tensor over a weight's bytes in the device buffer, with a version counter of its own."""
        return self.layout.view(self.storage, self.layout.fields[index])

    def index_at(self, offset: int) -> int:
        """Return the index of the parameter in whose device bytes an offset lies."""
        return bisect_right(self._offsets, offset) - 1

    def aliases(self) -> int:
        """Return how many tensors refer to the device buffer (Rule 5)."""
        return storage_uses_at([storage_id(self.storage)])[0]

    def has_views(self) -> bool:
        """Whether tensors other than our own refer to the device buffer."""
        return storage_uses_at([storage_id(self.storage)])[0] > self.own_aliases

    # ---- details

    def _stamp(self, data: Sequence[Tensor]) -> Stamp:
        """Return the stamp of the host bytes, which lie in these tensors (Rule 6)."""
        addresses = list(map(Tensor.data_ptr, data))
        shared = max(storage_uses(data), default=0) > OWN_STORAGE_USES
        if addresses != self._homes or any(map(_outside, self.weights)):
            shared = shared or self._has_foreign(data)
        return Stamp(object() if shared else self._epoch, list(map(true_version, data)), addresses)

    def _has_foreign(self, data: Sequence[Tensor]) -> bool:
        """Whether code may write any of these bytes without a tensor over them (Rule 9)."""
        return self.device.is_host and any(is_foreign(one) and not self.owner.in_slab(one) for one in data)

    def _note_data(self, addresses: list[int]) -> None:
        """Note where the parameters' data is, and leave what it replaced to what autograd saved of that (Rule 8)."""
        if addresses != self._homes or self._views != self._sizes_and_strides():
            for weight in self.weights:
                weight.check_shape()
        replaced = zip(self.weights, self._device_stamp.addresses, addresses, strict=True)
        for index, (weight, then, now) in enumerate(replaced):
            if then != now and index not in self.autocast:
                weight.leave(weight.data_before)
            weight.note_data()
        self._storages = self._storage_ids()

    def is_shared(self) -> bool:
        """Whether another tensor refers to the bytes of any parameter."""
        return max(storage_uses(self.params), default=0) > OWN_STORAGE_USES

    def _addresses(self) -> list[int]:
        return list(map(Tensor.data_ptr, self.params))

    def _sizes_and_strides(self) -> list[Any]:
        return list(zip(map(Tensor.size, self.params), map(Tensor.stride, self.params), strict=True))

    def _storage_ids(self) -> list[int]:
        """List the storages of the parameters' data when the device buffer was filled last (weights.py)."""
        return [storage_id(weight.storage) for weight in self.weights]

    def _uncut(self, stamp: Stamp) -> list[tuple[Tensor, Tensor]]:
        """Pair weights that go up neither from the slab nor as wire copies with their places in the device buffer."""
        written = () if self.shared is None else self._on_the_face(stamp)
        if not written and stamp.addresses == self._homes and not any(map(_outside, self.weights)):
            return []
        places = enumerate(zip(self.weights, self._device_stamp.addresses, self._homes, strict=True))
        return [
            (self.layout.view(self.storage, weight.field), true_data(weight.parameter))
            for index, (weight, at, home) in places
            if weight.wire is None and (weight.outside or at != home or index in written)
        ]

    def _fill_wire(self, data: Sequence[Tensor], stamp: Stamp, done: Collection[int] = ()) -> None:
        """Convert these host bytes, which have this stamp, into wire copies (Rules 7 and 8), but for those ``done``.

        A write in the meantime, which may not be in the wire copies, makes them stale.
        """
        fill_wire(self.weights, data, self.autocast if self.remembered() else (), done)
        self._wire_stamp = stamp
