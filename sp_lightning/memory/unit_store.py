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
6. Resident bytes are stale once a parameter's version or address changed, its bytes were exposed (by ``.data``, a view,
   an array), or an optimizer that steps it has stepped. They are stale, too, as long as another tensor shares the host
   bytes: code may write through it at any time.
7. Weights that travel in another type than they have on the host are converted into a buffer of wire copies (``wire``),
   once for each change. Small neighbours are copied there too, so that a unit goes up in one piece. Large ones go up
   from the slab.
8. Some of what autograd saves of a weight keeps its bytes in a plain run, even when the weight changes: autocast's cast
   copy, and a view of data that ``p.data = ...`` replaced. A saved reference to such bytes refers to the weight's
   ``SavedBytes`` in ``contents``. When the weight gets other bytes, the old ones are left there, on the host, and the
   weight gets a new ``SavedBytes``. Every saved reference also refers to ``memory``, whose reference count says that
   some graph still needs the current layout.
9. Where the CPU computes, a parameter whose memory another tensor shares stays where it is, outside of the slab: in a
   plain run a write to one is a write to the other.
10. Data that model code assigns to a stand-in is copied into the device buffer. But if other code refers to a view of
   the unit's bytes, the view must keep the old ones: then the stand-in is *parted*, with memory of its own for the new
   data, which is copied into the buffer when the visit ends. If model code assigns the data in the buffer again before
   that (``old = p.data; p.data = other; ...; p.data = old``), the stand-in is over the buffer again.
"""

from __future__ import annotations

import bisect
import enum
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ..compat.dispatch import without_dispatch
from ..compat.graph import preserving_version
from ..compat.references import OWN_STORAGE_USES, python_references, shares_storage, storage_uses_at
from ..compat.storages import storage_id
from ..core import malloc
from ..core.telemetry import Counters
from ..errors import ExactnessError
from .device import Device
from .layout import ALIGNMENT, Field, Layout, aligned
from .parameters import ParameterOwner, set_true_data, true_data, true_dtype, true_version, unwatch, watch
from .partition import Unit

NONE_DEFERRED: Mapping[int, Tensor] = MappingProxyType({})
BY_ITSELF = 1 << 20  # bytes from which a weight that travels as it is goes up from the slab


class Residency(enum.Enum):
    """Place of a unit's bytes: on the host only, or also on the device."""

    HOST = "host"
    DEVICE = "device"  # or on the way up, until ``ready`` has happened


class SavedBytes:
    """A token for the bytes that a weight has now, for what autograd saves of them (Rule 8)."""

    __slots__ = ("before",)

    def __init__(self) -> None:
        self.before: Tensor | None = None  # on the host, once the weight has other ones


class UnitStore:
    """Host slab and device buffer of one unit."""

    def __init__(
        self,
        unit: Unit,
        device: Device,
        counters: Counters,
        owner: ParameterOwner,
        device_dtype: Callable[[torch.dtype], torch.dtype] = lambda dtype: dtype,
    ) -> None:
        self.unit = unit
        self.device = device
        self.counters = counters
        self.params: list[nn.Parameter] = [parameter for _, parameter in unit.params]
        self.index_of = {id(parameter): index for index, parameter in enumerate(self.params)}
        self.names = [name for name, _ in unit.params]
        self.owner = owner
        self.host_layout = Layout.of([(name, true_data(parameter)) for name, parameter in unit.params])
        self.slab = device.slab(max(self.host_layout.nbytes, ALIGNMENT))
        self._device_dtype = device_dtype
        self.residency = Residency.HOST
        self.retype({})
        self.ready: Any = None  # dropped early, a reader would see the bytes of the memory's previous user
        self._ordered: list[Any] = []  # streams that are ordered after the fill
        self._marked_stale = False
        self._wire_outdated = False  # model code wrote a weight, which is on the host and not in the wire copy
        self._host_epoch = 0  # counts writes of the host bytes that no version counter sees
        self._outside = self._shared_from_before()
        self._slab_addresses = self._adopt()  # with the addresses of parameters that stay outside of the slab
        self._addresses: list[int] = []  # of the parameters' data when the device buffer was filled
        self._versions: list[int] = []  # at the same time
        self._storages: list[torch.UntypedStorage] = []  # at those addresses
        self._strides: list[tuple[int, ...]] = []
        self._storage_ids: list[int] = []

    def retype(self, autocast: Mapping[int, torch.dtype]) -> None:
        """Change the types in which parameters travel, from the next fill on.

        The unit must not be resident, and no graph may need its bytes.
        """
        assert self.residency is Residency.HOST
        self.autocast = dict(autocast)
        types = [autocast.get(i, self._device_dtype(field.dtype)) for i, field in enumerate(self.host_layout.fields)]
        self.layout = _layout_with(self.host_layout, types)
        pairs = zip(self.layout.fields, self.host_layout.fields, strict=True)
        self.narrow = frozenset(i for i, (field, host) in enumerate(pairs) if field.dtype is not host.dtype)
        self.nbytes = max(self.layout.nbytes, ALIGNMENT)  # parameters may all be empty
        self.flat = self.device.device_bytes(self.nbytes)
        self.storage = self.flat.untyped_storage()
        self._offsets = [field.offset for field in self.layout.fields]
        self._lay_out_wire()
        self._marked_stale = True
        self._wire_stamp: Any = None  # `_stamp` of the wire copies' sources, if they were converted before a fill
        self.contents: defaultdict[int, SavedBytes] = defaultdict(SavedBytes)  # by index of the parameter (Rule 8)
        self.memory = object()  # counts the references of graphs (Rule 8)
        self.saved: dict[int, Any] = {}  # the last saved reference to each whole weight, by its first element
        self._own_references = self._references()
        self.own_aliases = 0  # tensors over the buffer that are ours: counted when stand-ins are made
        self._parted: set[int] = set()  # indices of parameters whose stand-ins have memory of their own (Rule 10)
        self.saved_again: set[int] = set()  # indices of weights that create_graph saved past our hooks

    def _lay_out_wire(self) -> None:
        """Lay out the buffer of wire copies; each weight goes up from there or from the slab (Rule 7)."""
        offsets: dict[int, int] = {}
        if self.layout == self.host_layout:
            self._copies, self._wire_offsets = [(self.flat, self.slab[: self.nbytes])], offsets
            self.wire = self.slab[:0]
            return
        end = 0
        for index, (field, host) in enumerate(zip(self.layout.fields, self.host_layout.fields, strict=True)):
            if field.dtype is not host.dtype or field.nbytes < BY_ITSELF:
                offsets[index] = end
                end += aligned(field.nbytes)
        self._copies = []  # made at the first load: slices of the device buffer need its memory
        self.wire = self.device.slab(max(end, ALIGNMENT))
        self._wire_offsets = offsets

    def _runs(self) -> Iterator[tuple[int, int, Tensor, int]]:
        """Yield the copies of a fill, as few as possible: (byte on the device, bytes, source buffer, byte in it)."""
        start, length, source, at = 0, 0, self.slab, 0
        for index, (field, host) in enumerate(zip(self.layout.fields, self.host_layout.fields, strict=True)):
            offset = self._wire_offsets.get(index)
            next_source, next_at = (self.slab, host.offset) if offset is None else (self.wire, offset)
            if length and (next_source is not source or next_at - at != field.offset - start):
                yield start, length, source, at
                length = 0
            if not length:
                start, source, at = field.offset, next_source, next_at
            length = field.offset + field.nbytes - start
        if length:
            yield start, length, source, at

    def remembered(self) -> bool:
        """Whether autograd saved any of the unit's bytes, for a backward that may follow (Rule 8)."""
        return self._references() > self._own_references

    def _references(self) -> int:
        self.saved.clear()
        return python_references(self.memory)

    def keep_saved(self, index: int, first: int, saved: Any) -> None:
        """Remember a saved reference for reuse, if it begins where a weight does; of parts there may be many."""
        if first * self.layout.fields[index].dtype.itemsize == self._offsets[index]:
            self.saved[first] = saved

    @property
    def host_nbytes(self) -> int:
        """Bytes of the unit's slab and wire copies."""
        return self.slab.numel() + self.wire.numel()

    # ---- the host side

    def _shared_from_before(self) -> frozenset[int]:
        """Find the parameters that Rule 9 leaves where they are."""
        if not self.device.is_host:
            return frozenset()
        return frozenset(index for index, parameter in enumerate(self.params) if shares_storage(parameter))

    def _adopt(self) -> list[int]:
        """Move the parameters' bytes into the slab and begin to manage them; return their addresses."""
        storage = self.slab.untyped_storage()
        for index, (parameter, field) in enumerate(zip(self.params, self.host_layout.fields, strict=True)):
            if index not in self._outside:
                with torch.inference_mode(False), torch.no_grad():
                    view = self.host_layout.own_view(storage, field)
                    view.copy_(true_data(parameter))
                set_true_data(parameter, view)
            watch(parameter, self)
        malloc.freed(self.slab.numel())
        return self._current_addresses()

    def release(self, kept: bool = False) -> None:
        """Make the parameters plain again, with the bytes they have, and free the device buffer.

        With ``kept`` the user's code still refers to the device bytes: then they are left to it.
        """
        self.saved.clear()
        for parameter in self.params:
            unwatch(parameter)
        if self.residency is Residency.DEVICE and not kept:
            self.free()

    def data_exposed(self) -> None:
        """Mark the device bytes stale (Rule 6) and wait for the fill (Rule 4): the host bytes may be written now."""
        self.wait_step()
        self._marked_stale = True
        self._host_epoch += 1
        self.settle()

    def data_given(self, parameter: nn.Parameter, value: Tensor) -> Tensor:
        """Return the host tensor that becomes the parameter's data when ``value`` is assigned to it (Rule 1).

        In a plain run the value is on the device, often as a copy made by ``.to(p.device)``, which copies nothing here.
        So the value's memory becomes the parameter's only where the CPU computes, for an optimizer's own code, which
        runs on the host, or if it is in a slab. Any other value is copied.
        """
        host, index = true_data(parameter), self.index_of[id(parameter)]
        self._show_saved_again(index, value)
        if value.data_ptr() == self.storage.data_ptr() + self._offsets[index] and value.shape == host.shape:
            return host  # the value is the parameter's stand-in, as ``module.to()`` in a step assigns it
        shared = self.device.is_host or self.owner.optimizing or self.owner.in_slab(value)
        return value if shared and not self.owner.on_device(value) else value.to("cpu", copy=True)

    def mark_stale(self, stepped: Collection[int] = ()) -> None:
        """Mark the device bytes stale, because an optimizer or another writer changed the host's (Rule 6).

        ``stepped`` has the ids of parameters that were stepped before their wire copies were converted. If it has all
        that train, the wire copies are still valid.
        """
        self._marked_stale = True
        if not all(id(parameter) in stepped for parameter in self.params if parameter.requires_grad):
            self._host_epoch += 1

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
        """Whether a parameter's bytes are in the slab."""
        return index not in self._outside and self.params[index].data_ptr() == self._slab_addresses[index]

    def stale(self) -> bool:
        """Whether the resident bytes may differ from the host's (Rule 6)."""
        with without_dispatch():
            return (
                self._marked_stale
                or self._versions != list(map(true_version, self.params))
                or self._addresses != self._current_addresses()
                or self.is_shared()
            )

    def version(self, index: int) -> int:
        """Return a parameter's version counter, which does not count as a read of it (weight_reads.py)."""
        with without_dispatch():
            return self.params[index]._version

    @property
    def was_replaced(self) -> bool:
        """Whether the user's code replaced the data of any parameter."""
        return self._slab_addresses != self._current_addresses()

    def written(self) -> list[int]:
        """Find the parameters that were written in place since the bytes went up, as far as version counters say."""
        return [i for i, (then, p) in enumerate(zip(self._versions, self.params, strict=True)) if p._version != then]

    def replaced(self) -> list[int]:
        """Find the parameters that were given other data since the bytes went up."""
        pairs = zip(self._addresses, self._current_addresses(), strict=True)
        return [index for index, (then, now) in enumerate(pairs) if now != then]

    # ---- the device side

    def load(self) -> None:
        """Start to fill the device buffer, which is allocated first if the unit is not resident (Rule 3)."""
        self.wait_step()
        changed = bool(self._wire_offsets) and (self._wire_outdated or self.stale())
        addresses = self._current_addresses()
        if self._marked_stale or addresses != self._addresses:
            self._leave_replaced(addresses)
            self._addresses = addresses
            self._strides = list(map(Tensor.stride, self.params))
            self._storages = [parameter.untyped_storage() for parameter in self.params]
            self._storage_ids = [storage_id(storage) for storage in self._storages]
        outside = self._not_in_slab()
        self._versions = list(map(true_version, self.params))
        self._marked_stale = self.is_shared()  # the sharing tensor may be written before it is dropped
        if changed and (self._wire_stamp is None or self._wire_stamp != self._stamp(self.params)):
            self._fill_wire()
        self._wire_stamp = None
        if self.residency is Residency.DEVICE:  # filled again in place
            self._let_readers_finish()
        else:
            with self.device.up:
                self.device.grow(self.storage, self.nbytes)
        direct = [(self.layout.fields[i], self.params[i]) for i in outside if i not in self._wire_offsets]
        replaced = [(self.layout.view(self.storage, field), true_data(parameter)) for field, parameter in direct]
        if not self._copies:
            self._copies = [(self.flat[to : to + n], source[at : at + n]) for to, n, source, at in self._runs()]
        under_way = self.counters.listener.work("up", self.unit.name, "weights", self.nbytes)
        self.ready = self.device.send_up(self._copies, under_way, replaced)
        self._ordered = []
        self.residency = Residency.DEVICE
        self.counters.fetches += 1
        self.counters.bytes_up += self.nbytes

    @property
    def is_there(self) -> bool:
        """Whether the unit is resident and the caller's stream is ordered after the fill."""
        return self.residency is Residency.DEVICE and self.device.compute in self._ordered

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
        self.residency = Residency.HOST
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
        parameter, field = self.params[index], self.layout.fields[index]
        view = self.layout.view(self.storage, field) if full_precision is None else full_precision
        self.owner.about_to_write_back(self, index, true_data(parameter))
        with torch.no_grad(), preserving_version(parameter):
            true_data(parameter).copy_(view)
        self._wire_outdated = True
        self._host_epoch += 1
        self.counters.writebacks += 1
        self.counters.bytes_written_back += view.nbytes

    def replace(self, stand_in: Tensor, parameter: nn.Parameter, value: Tensor) -> None:
        """Give a stand-in other data inside its visit (Rule 10).

        A full-precision copy always has memory of its own (fp32_copies.py).
        """
        has_views = self.has_views()  # the value may be such a view; counted before `place` is one of ours
        index, place = self.index_of[id(parameter)], self.place_of(parameter)
        full_precision = index in self.autocast
        if not full_precision and value.data_ptr() == place.data_ptr() and value.stride() == place.stride():
            set_true_data(stand_in, place)
            self._parted.discard(index)
        elif full_precision or index in self._parted or has_views:
            set_true_data(stand_in, torch.empty_like(true_data(stand_in)).copy_(value))
            self._parted.update(() if full_precision else (index,))
        else:
            self._leave(index)
            place.copy_(value)

    def is_parted(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter's stand-in has memory of its own now (Rule 10)."""
        return self.index_of[id(parameter)] in self._parted

    def place_of(self, parameter: nn.Parameter) -> Tensor:
        """Make a view of a weight's bytes in the device buffer."""
        return self.layout.view(self.storage, self.layout.fields[self.index_of[id(parameter)]])

    def rejoin(self, stand_ins: Sequence[Tensor]) -> None:
        """Copy the data of parted stand-ins into the device buffer when their visit ends (Rule 10)."""
        while self._parted:
            index = self._parted.pop()
            self._leave(index)
            place = self.layout.view(self.storage, self.layout.fields[index])
            place.copy_(true_data(stand_ins[index]))
            set_true_data(stand_ins[index], place)

    def _leave(self, index: int) -> None:
        """Copy a weight's bytes in the device buffer to the host for saved references, before an overwrite (Rule 8)."""
        if self.remembered() and index in self.contents:
            view = self.layout.view(self.storage, self.layout.fields[index])
            self.contents.pop(index).before = view.to("cpu", copy=True)

    def _show_saved_again(self, index: int, value: Tensor) -> None:
        """Copy a weight's new data into the device buffer at once if a graph saved the weight past our hooks.

        Such a graph, of gradients (create_graph), saved the weight itself: a plain run gives it the new data.
        """
        if index in self.saved_again:
            if self.has_views():
                with torch.no_grad():
                    self.layout.view(self.storage, self.layout.fields[index]).copy_(value)
            else:
                self.saved_again.clear()

    def bytes_before(self, index: int, before: Tensor) -> torch.UntypedStorage:
        """Copy bytes that a weight had before to the device again, into a new storage."""
        field = self.layout.fields[index]
        with torch.inference_mode(False), torch.no_grad():
            tensor = torch.empty_strided(field.shape, field.stride, dtype=field.dtype, device=self.storage.device)
            tensor.copy_(before)
        self.counters.bytes_up += field.nbytes
        return tensor.untyped_storage()

    def device_views(self) -> list[torch.Tensor]:
        """Make a tensor per parameter over the device buffer, each with a version counter of its own."""
        return [self.layout.view(self.storage, field) for field in self.layout.fields]

    def field_at(self, offset: int) -> int:
        """Return the index of the parameter in whose device bytes an offset lies."""
        return bisect.bisect_right(self._offsets, offset) - 1

    def aliases(self) -> int:
        """Return how many tensors refer to the device buffer (Rule 5)."""
        return storage_uses_at([storage_id(self.storage)])[0]

    def has_views(self) -> bool:
        """Whether tensors other than our own refer to the device buffer."""
        return self.aliases() > self.own_aliases - len(self._parted)

    # ---- details

    def _leave_replaced(self, addresses: list[int]) -> None:
        """Leave parameters' data that is no longer at these addresses to what autograd saved of it (Rule 8)."""
        for index, (then, now) in enumerate(zip(self._addresses, addresses, strict=False)):
            if then != now and index in self.contents and index not in self.autocast:
                self.saved.clear()
                storage, field = self._storages[index], self.host_layout.fields[index]
                first = (then - storage.data_ptr()) // field.dtype.itemsize
                with torch.inference_mode(False):
                    before = torch.empty(0, dtype=field.dtype).set_(storage, first, field.shape, self._strides[index])
                self.contents.pop(index).before = before

    def is_shared(self) -> bool:
        """Whether another tensor refers to the bytes of any parameter."""
        return max(storage_uses_at(self._storage_ids), default=0) > OWN_STORAGE_USES

    def _current_addresses(self) -> list[int]:
        return list(map(Tensor.data_ptr, self.params))

    def _not_in_slab(self) -> list[int]:
        """Find the parameters whose bytes are not in the slab."""
        if self._addresses == self._slab_addresses:
            return list(self._outside)
        self._check_shapes()
        pairs = zip(self._addresses, self._slab_addresses, strict=True)
        return [index for index, (now, then) in enumerate(pairs) if now != then or index in self._outside]

    def convert(self, data_of_deferred: Mapping[int, Tensor] = NONE_DEFERRED) -> None:
        """Convert the wire copies as soon as the unit was stepped, on the thread that stepped it.

        No fill reads them then: the unit's gradients arrived after all fills. ``data_of_deferred`` is the data of
        parameters that have none until their deferred step was waited for (deferred_step.py).
        """
        if self._wire_offsets:
            stamp = self._stamp([data_of_deferred.get(index, parameter) for index, parameter in enumerate(self.params)])
            self._fill_wire(data_of_deferred)
            self._wire_stamp = stamp  # read before: a write in the meantime may not be in the wire copies

    def _stamp(self, data: Sequence[Tensor]) -> Any:
        """Return a value that changes when the parameters' data does; None while another tensor shares it (Rule 6)."""
        if self.is_shared():
            return None
        return self._host_epoch, list(map(true_version, data)), [tensor.data_ptr() for tensor in data]

    def _fill_wire(self, data_of_deferred: Mapping[int, Tensor] = NONE_DEFERRED) -> None:
        """Convert the weights that do not go up from the slab into their wire copies (Rules 7 and 8)."""
        storage = self.wire.untyped_storage()  # no fill reads it now: writers of weights wait for fills (Rule 4)
        remembered, self._wire_outdated = self.remembered(), False
        with torch.no_grad():
            for index, offset in self._wire_offsets.items():
                view = self.layout.view(storage, replace(self.layout.fields[index], offset=offset))
                now = data_of_deferred[index] if index in data_of_deferred else true_data(self.params[index])
                if remembered and index in self.autocast:
                    now = now.to(view.dtype)
                    if same_bytes(view, now):
                        continue
                    if index in self.contents:
                        self.contents.pop(index).before = view.clone()
                view.copy_(now)

    def _check_shapes(self) -> None:
        for name, parameter, field in zip(self.names, self.params, self.host_layout.fields, strict=True):
            if parameter.shape != field.shape or true_dtype(parameter) != field.dtype:
                raise ExactnessError(
                    f"parameter {name} was {field.dtype} {tuple(field.shape)} when streaming began and is now "
                    f"{true_dtype(parameter)} {tuple(parameter.shape)}; change it before fit(), or call close() first"
                )


def _layout_with(layout: Layout, types: list[torch.dtype]) -> Layout:
    def described(field: Field, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(field.shape, field.stride, dtype=dtype, device="meta")

    return Layout.of([(field.name, described(field, dtype)) for field, dtype in zip(layout.fields, types, strict=True)])


def same_bytes(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one type and layout have the same bytes, also in a NaN."""
    return torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: Tensor) -> Tensor:
    return torch.as_strided(tensor, (tensor.numel(),), (1,)).view(torch.uint8)
