"""One unit's bytes on the host: where each weight lies, their stamp, and what of them goes up to the device.

1. The host is the truth. The optimizer, the user's code and checkpoints work on the parameters as on any others.
   Eviction from the device is a free, never a copy.
2. Each weight lies in a *home*: usually the unit's slab, over a slice of which the parameter's data is a tensor of its
   own; or a file (the disk). One without a home stays in memory of its own (Rule 7) and goes up by itself, and so
   does one that was given other data. A weight that left a file does not come back while the unit is streamed.
3. The device copy (device_copy.py) is filled from the host bytes, which are given to it as data: runs of buffers, and
   weights that go up by themselves. The host bytes may not be written while a fill reads them: each fill is entered in
   the ledger (access.py), where writers wait for it. Code that shares the bytes (Rule 4) does not wait there: such a
   fill has read them before other code runs.
4. The host bytes have one stamp: their epoch, and the versions and addresses of the parameters. The device's bytes and
   the wire copies each have the stamp of the host bytes that they were made from, read before these were. A copy is
   stale once its stamp is not the host's. Who writes where no version shows it moves the epoch by ``wrote``: an
   optimizer's step (on the optimizer thread, by `after_step`), code that the bytes are exposed to (by ``.data``, a
   view, an array), a write-back. After a write-back the device, which has the bytes already, gets the new epoch too.
   While another tensor shares the host bytes, code may write through it at any time, and no two stamps are equal. Only
   who may write the host bytes moves the epoch, after `wait_step`, so no two threads move it at a time.
5. Weights that travel in another type than they have on the host are converted into wire copies, once for each change:
   by the step itself where it can (`conversion`), else by the thread that stepped them (`after_step`), or before a
   fill. Small neighbours are copied there too, so that a unit goes up in one piece. Large ones go up from the slab.
6. Some of what autograd saves of a weight keeps its bytes in a plain run, even when the weight changes: autocast's cast
   copy, and a view of data that ``p.data = ...`` replaced. A saved reference to such bytes refers to the weight's
   ``SavedBytes``. When the weight gets other bytes, the old ones are left there, on the host, and the weight gets a new
   ``SavedBytes``. Every saved reference also refers to ``memory``, whose reference count says that some graph still
   needs the current layout.
7. Where the CPU computes, a parameter whose memory another tensor shares stays where it is, without a home: in a
   plain run a write to one is a write to the other. On another device so does one that came to share its memory while
   it was streamed, if units are made anew. So does, on the CPU, one whose memory torch did not allocate (`from_numpy`),
   and nothing counts who refers to that: it goes up for each visit, as the shared ones do (Rule 4). It is copied into
   the slab all the same where several ranks share that.
8. Where several ranks share the slab, the parameters are over its face in this process (shared_memory.py), and what
   goes up from the slab is the truth. Weights that user code may have written to since the two were last equal go up
   from the face. The first rank's bytes are the truth at the beginning. Weights of Rule 7 are refused; those that lie
   in one storage side by side, to which nothing else refers, are moved.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from ..compat.references import is_entry_shared, own_uses, uses_of, uses_without_tensor
from ..compat.tensors import preserving_version, without_dispatch
from ..errors import UnsupportedError
from ..host import malloc
from ..host.telemetry import Counters
from ..host.unit_numbers import ALIGNMENT
from ..stream.partition import Unit
from .device import Device
from .device_copy import DeviceCopy, Run, Sources, Transport
from .layout import Field, Layout, as_few_runs
from .pinned import find_foreign, is_foreign
from .staging import Around, Arrival, Copies
from .watched_parameters import ParameterOwner, set_true_data, true_data, true_dtype, true_version
from .weights import Changes, Conversion, Home, SavedBytes, Stamp, Weight, fill_wire, lay_out_wire, layout_with

_home, _storage = operator.attrgetter("home"), operator.attrgetter("storage")
_NONE = torch.empty(0, device="cpu").untyped_storage()


class Slab(Home, Protocol):
    """Memory for all weights of a unit that lie nowhere else."""

    truth: Tensor  # what goes up
    is_shared: bool  # by several ranks (Rule 8)

    def written(self, stamp: Stamp) -> Sequence[tuple[int, int]]:
        """Find the ranges of bytes in which parameters with this stamp may differ from what would go up."""


class FileHome(Home, Protocol):
    """Files in which weights of a unit lie, and from which they go up."""

    indices: Collection[int]  # of its weights, also of those that left it

    def make_wires(self, weights: Sequence[Weight]) -> Collection[int]:
        """Make wire copies in files for weights that are to travel in other types than before.

        Return the indices of those that need no wire copy in memory, whatever their types.
        """

    def lay_out(self, weights: Sequence[Weight], on_device: DeviceCopy) -> None:
        """Have these weights go up to this device copy from now on, with the wire copies that were made."""

    def refresh(self, stamp: Stamp) -> Mapping[int, Callable[[], Tensor]]:
        """Find the weights that left for good, and the functions that read the bytes which their files have."""

    def changed(self) -> Mapping[int, Tensor]:
        """Return the bytes of weights, by index, that are not those of their files."""

    def wire_like(self, index: int, like: Tensor) -> Tensor | None:
        """Return a tensor of the file, like this one, if the weight's wire copies lie there."""

    def convert(self, index: int, data: Tensor, converted: Tensor) -> bool:
        """Convert a weight past the mapping of its file; return False, with nothing done, if that is not possible."""

    def send(self, copies: Copies, around: Around, loose: Copies, /) -> Arrival:
        """Send up the whole unit, as a `Transport`, after ``refresh``."""


class OwnSlab:
    """A slab of this process: the parameters lie over what goes up."""

    is_shared = False

    def __init__(self, device: Device, nbytes: int) -> None:
        self.truth = device.slab(nbytes)

    def adopt(self, index: int, field: Field, data: Tensor) -> Tensor:
        return Layout.own_view(self.truth.untyped_storage(), field).copy_(data)

    def ranges(self) -> list[tuple[int, int]]:
        return [(self.truth.data_ptr(), self.truth.nbytes)]

    def written(self, stamp: Stamp) -> Sequence[tuple[int, int]]:
        return ()


class HostCopy:
    """The bytes of one unit on the host, and the device copy that is made from them."""

    def __init__(
        self,
        unit: Unit,
        device: Device,
        counters: Counters,
        owner: ParameterOwner,
        device_dtype: Callable[[torch.dtype], torch.dtype],
        slab: Callable[[int], Slab],
        files: Sequence[FileHome] = (),
    ) -> None:
        """Adopt the unit's parameters. Those that lie in no file get a slab, of as many bytes as they take."""
        self.unit = unit
        self.device = device
        self.counters = counters
        self.params: list[nn.Parameter] = [parameter for _, parameter in unit.params]
        self.index_of = {id(parameter): index for index, parameter in enumerate(self.params)}
        self.names = [name for name, _ in unit.params]
        self.owner = owner
        assert len(files) <= 1, "a fill has one way up (`load`)"
        self.files = files
        self._device_dtype = device_dtype
        filed: dict[int, Home] = {index: home for home in files for index in home.indices}
        self.host_layout = Layout.of([(name, true_data(parameter)) for name, parameter in unit.params], without=filed)
        self.slab = slab(max(self.host_layout.nbytes, ALIGNMENT))
        self.weights = self._adopt(filed)
        self._addresses_at_home = self._addresses()  # where the parameters' bytes are unless user code replaced them
        self.epoch = 0
        self.on_device = DeviceCopy(unit.name, device, counters, Stamp(None, [], self._addresses_at_home))
        self.retype({})

    def _adopt(self, filed: Mapping[int, Home]) -> list[Weight]:
        """Move the parameters' bytes to their homes, but for those of Rule 7."""
        outside = self._find_outside() - filed.keys()
        weights = []
        for index, (parameter, field) in enumerate(zip(self.params, self.host_layout.fields, strict=True)):
            home = None if index in outside else filed.get(index, self.slab)
            if home is not None:
                with torch.inference_mode(False), torch.no_grad():
                    data = home.adopt(index, field, true_data(parameter))
                set_true_data(parameter, data)
            weights.append(Weight(parameter, field, home, parameter.untyped_storage(), parameter.stride(), field))
        malloc.freed(sum(field.nbytes for field in self.host_layout.fields))
        return weights

    def _find_outside(self) -> set[int]:
        """Find the parameters that stay where they are, by their indices (Rule 7)."""
        foreign = find_foreign(self.params) if self.device.is_host and not self.slab.is_shared else ()
        outside = {i for i, param in enumerate(self.params) if id(param) in foreign or self.owner.shares_bytes(param)}
        if outside and self.slab.is_shared:
            raise UnsupportedError(
                f"{self.names[min(outside)]} shares its memory with another tensor, which cannot follow where several "
                "ranks on the CPU share the weight; give the weight data of its own (p.data = p.data.clone()), "
                "or use devices=1, or strategy='ddp'"
            )
        return outside

    def retype(self, autocast: Mapping[int, torch.dtype]) -> None:
        """Change the types in which parameters travel, from the next fill on.

        The unit must not be resident, and no graph may need its bytes. After an error it is as it was: all memory, on
        the host and on a disk, is taken first.
        """
        self.wait_step()  # the optimizer thread converts into wire copies
        usual = [
            weight.host.dtype if id(weight.parameter) in self.unit.parts else self._device_dtype(weight.host.dtype)
            for weight in self.weights
        ]  # a part of a whole travels as it is (partition.py, rule 10)
        types = [autocast.get(index, dtype) for index, dtype in enumerate(usual)]
        layout = layout_with(self.host_layout.fields, types)
        weights = [weight.anew(field) for weight, field in zip(self.weights, layout.fields, strict=True)]
        from_files = {index for home in self.files for index in home.make_wires(weights)}
        lay_out_wire([weight for index, weight in enumerate(weights) if index not in from_files], self.device)
        self.on_device.lay_out(layout)
        for home in self.files:
            home.lay_out(weights, self.on_device)
        self.weights, self.autocast = weights, dict(autocast)
        self.narrow = frozenset(i for i, weight in enumerate(weights) if weight.is_narrow)
        self.cast_gradients: dict[int, torch.dtype] = {}  # of weights that are cast on the device only
        self._wire_stamp: Stamp | None = None
        self._runs: Sequence[Run] | None = None  # to be cut
        self.memory = object()  # counts the references of graphs (Rule 6)

    def reshape(self, index: int, shape: torch.Size) -> None:
        """Give a weight another shape over the bytes that it has, on the host and on the device."""
        weight = self.weights[index]
        with torch.inference_mode(False), torch.no_grad():
            set_true_data(weight.parameter, true_data(weight.parameter).view(shape))
            if weight.wire is not None:
                weight.wire = weight.wire.view(shape)
        self.host_layout = self.host_layout.reshaped(index, shape)
        self.on_device.layout = self.on_device.layout.reshaped(index, shape)
        weight.host, weight.field = self.host_layout.fields[index], self.on_device.layout.fields[index]
        weight.note_data()

    def release(self, kept: bool = False) -> None:
        """Leave the bytes to the parameters, and free the device buffer.

        With ``kept`` the user's code still refers to the device bytes: then they are left to it. Where the host
        computes, the parameters lie there from now on: in a plain run, such a view is one of theirs.
        """
        if kept and self.device.is_host and self.on_device.is_loaded and not self.slab.is_shared:
            self._settle_on_device()
        for weight in self.weights:
            weight.storage = _NONE  # a reference of ours would count as another's where the module is streamed again
            weight.wire = weight.buffer = None  # there is no way up any more
        if self.on_device.is_loaded and not kept:
            self.on_device.free()
        self._runs = None
        self.on_device.forget_sources()

    def _settle_on_device(self) -> None:
        """Have the parameters lie in the device buffer, where they have their own types there."""
        if self.stale():
            self.refill()
        for index, parameter in enumerate(self.params):
            view = self.on_device.view(index)
            if view.dtype == true_dtype(parameter) and view.shape == parameter.shape:
                set_true_data(parameter, view)

    def ranges(self) -> list[tuple[int, int]]:
        """List where the bytes lie, unless user code replaced them: addresses, and numbers of bytes."""
        return [range_ for home in (self.slab, *self.files) for range_ in home.ranges()]

    @property
    def wire_nbytes(self) -> int:
        """Bytes of the wire copies."""
        return sum(
            {id(weight.buffer): len(weight.buffer) for weight in self.weights if weight.buffer is not None}.values()
        )

    # ---- for graphs (Rule 6)

    def remembered(self) -> bool:
        """Whether autograd saved any of the unit's bytes, for a backward that may follow."""
        return is_entry_shared(vars(self), "memory")

    def saved_bytes(self, index: int) -> SavedBytes:
        """Return the token for the bytes that a weight has now."""
        weight = self.weights[index]
        if weight.saved is None:
            weight.saved = SavedBytes()
        return weight.saved

    # ---- what the bytes are (Rule 4)

    def stamp(self) -> Stamp:
        """Return the stamp of the host bytes."""
        with without_dispatch():
            return self._stamp(self.params)

    def _stamp(self, data: Sequence[Tensor]) -> Stamp:
        """Return the stamp of the host bytes, which lie in these tensors."""
        addresses = list(map(Tensor.data_ptr, data))
        shared = _are_shared(data, self.weights)
        if addresses != self._addresses_at_home or None in map(_home, self.weights):
            shared = shared or self._has_foreign(data)
        return Stamp(object() if shared else self.epoch, list(map(true_version, data)), addresses)

    def _has_foreign(self, data: Sequence[Tensor]) -> bool:
        """Whether code may write any of these bytes without a tensor over them (Rule 7)."""
        return self.device.is_host and any(is_foreign(one) and not self.owner.in_slab(one) for one in data)

    def stale(self) -> bool:
        """Whether the device's bytes may differ from the host's.

        The epoch comes first: parameters whose step is deferred have no address.
        """
        known = self.on_device.stamp
        if known.epoch != self.epoch:
            return True
        with without_dispatch():
            versions, addresses = list(map(true_version, self.params)), self._addresses()
        if versions != known.versions or addresses != known.addresses:
            return True
        return max(uses_of(list(map(_storage, self.weights))), default=0) > own_uses(1)  # one: the weight's

    def is_shared(self) -> bool:
        """Whether something else refers to the bytes of any parameter."""
        return _are_shared(self.params, self.weights)

    @property
    def lends(self) -> bool:
        """Whether something else refers to the place of a parameter whose bytes are elsewhere."""
        with without_dispatch():
            places = zip(self.weights, self._addresses(), self._addresses_at_home, strict=True)
            left = [weight.storage for weight, now, before in places if now != before and weight.home is not None]
        return max(uses_of(left), default=0) > uses_without_tensor()

    def shares(self, index: int) -> bool:
        """Whether something else refers to the bytes of this parameter."""
        return _are_shared([self.params[index]], [self.weights[index]])

    def at_home(self, index: int) -> bool:
        """Whether a parameter's bytes are at home, laid out as they were."""
        data, weight = self.params[index], self.weights[index]
        is_there = weight.home is not None and data.data_ptr() == self._addresses_at_home[index]
        return is_there and (data.size(), data.stride()) == (weight.host.shape, weight.stride)

    def refers_to(self, tensor: Tensor) -> bool:
        """Whether any parameter's data lies in this tensor's storage."""
        storage = tensor.untyped_storage()
        return any(true_data(parameter).untyped_storage() is storage for parameter in self.params)

    @property
    def was_replaced(self) -> bool:
        """Whether the user's code replaced the data of any parameter, or laid it out in another way."""
        return self._addresses_at_home != self._addresses() or self.was_reshaped

    @property
    def was_reshaped(self) -> bool:
        """Whether the user's code gave any parameter another shape or other strides."""
        known = [(weight.host.shape, weight.stride) for weight in self.weights]
        return known != list(zip(map(Tensor.size, self.params), map(Tensor.stride, self.params), strict=True))

    def _addresses(self) -> list[int]:
        return list(map(Tensor.data_ptr, self.params))

    def changes(self, since: Stamp) -> Changes:
        """Find the parameters that were written in place, as version counters say, or given other data."""
        self.wait_step()
        with without_dispatch():
            versions, addresses = list(map(true_version, self.params)), self._addresses()
        indices = range(len(self.params))
        return Changes(
            [index for index in indices if versions[index] != since.versions[index]],
            [index for index in indices if addresses[index] != since.addresses[index]],
        )

    def version(self, index: int) -> int:
        """Return a parameter's version counter, which does not count as a read of it (weight_reads.py)."""
        with without_dispatch():
            return self.params[index]._version

    def data(self, index: int) -> Tensor:
        """Return a parameter's bytes, which no deferred step writes any more."""
        self.wait_step()
        return true_data(self.params[index])

    def state(self, index: int) -> tuple[int, ...]:
        """Return what differs once an optimizer, or a write that version counters see, has changed a parameter."""
        parameter, data = self.params[index], self.data(index)
        of_bytes = self.version(index), data.data_ptr()
        return (*of_bytes, self.epoch) if parameter.requires_grad else of_bytes

    # ---- writes

    def wrote(self, stepped: Collection[int] = ()) -> None:
        """Move the epoch, as bytes were written or are about to be, once no fill reads them (Rules 3 and 4).

        ``stepped`` has the ids of parameters whose step moves it by itself (`after_step`). If all that train are among
        them, there is nothing to do. No thread of ours steps a unit in which nothing trains: its epoch moves here.
        """
        trained = {id(parameter) for parameter in self.params if parameter.requires_grad} if stepped else set()
        if trained and trained.issubset(stepped):
            return
        if self in self.owner.access.fills:
            self.on_device.settle()
            del self.owner.access.fills[self]
        self.epoch += 1

    def write_back(self, index: int, full_precision: Tensor | None = None) -> None:
        """Copy a weight, or its full-precision copy, that model code changed on the device to the host. Blocks."""
        host = true_data(self.params[index])
        view = self.on_device.view(index) if full_precision is None else full_precision
        self.owner.about_to_write_back(self, index, host)
        with torch.no_grad(), preserving_version(self.params[index]):
            host.copy_(view)
        fresh = full_precision is None and self.on_device.stamp.epoch == self.epoch
        self.wrote()
        if fresh:  # the device has these bytes
            self.on_device.stamp = self.on_device.stamp._replace(epoch=self.epoch)
        self.counters.writebacks += 1
        self.counters.bytes_written_back += view.nbytes

    @property
    def has_step(self) -> bool:
        """Whether an optimizer step of the unit is entered in the ledger."""
        return self in self.owner.access.steps

    @property
    def is_being_stepped(self) -> bool:
        """Whether an optimizer step that is entered in the ledger has yet to change the host bytes."""
        step = self.owner.access.steps.get(self)
        return step is not None and step.is_stepping(self)

    def wait_step(self) -> None:
        """Wait for a deferred step of this unit, which writes the host bytes; none in backward is waited for."""
        if (step := self.owner.access.steps.get(self)) is not None:
            step.wait(self)

    def conversion(self, index: int) -> Conversion | None:
        """Return the wire copy that the step of a weight may convert; None if it has none, or has to keep it (Rule 6).

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
        self.epoch += 1
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

    def _fill_wire(self, data: Sequence[Tensor], stamp: Stamp, done: Collection[int] = ()) -> None:
        """Convert these host bytes, which have this stamp, into wire copies (Rules 5 and 6), but for those ``done``.

        A write in the meantime, which may not be in the wire copies, makes them stale.
        """
        saved = self.autocast if self.remembered() else ()
        for home in self.files:
            done = {*done, *self._converted(home, data, {*done, *saved})}
        fill_wire(self.weights, data, saved, done)
        self._wire_stamp = stamp

    def _converted(self, home: FileHome, data: Sequence[Tensor], others: Collection[int]) -> Iterator[int]:
        """Convert weights in files, but for the ``others``, past the files' mappings, and yield those that are done."""
        for index in home.indices:
            wire = self.weights[index].wire
            if wire is not None and index not in others and home.convert(index, true_data(data[index]), wire):
                yield index

    def host_cast(self, index: int, like: Tensor) -> Tensor:
        """Cast a weight to where wire copies are, with the type, the shape and the strides of ``like``."""
        data, homes = true_data(self.params[index]), [home for home in self.files if index in home.indices]
        with torch.inference_mode(False), torch.no_grad():
            cast = next((made for home in homes if (made := home.wire_like(index, like)) is not None), None)
            if cast is None:
                cast = self.device.host_empty(like)
            if not any(home.convert(index, data, cast) for home in homes):
                cast.copy_(data)
        return cast

    # ---- the way up

    def load(self) -> None:
        """Start to fill the device buffer from the host bytes as they are now."""
        self.wait_step()
        stamp = self.on_device.stamp
        transport: Transport = self.device.send_up
        if self.stale():
            stamp = self._stamp(self.params)
            self._note_data(stamp.addresses)
        for home in self.files:
            transport = home.send
            for index, bytes_in_file in home.refresh(stamp).items():
                self._leave_file(index, bytes_in_file)
        if self.narrow and stamp != self._wire_stamp:
            self._fill_wire(self.params, stamp)
        if self._runs is None:
            self._runs = self._cut()
        self.owner.access.fills[self] = self.on_device
        self.on_device.load(stamp, Sources(self._runs, self._loose(stamp), transport))
        if stamp.epoch != self.epoch:  # other code may write to the bytes at any time (Rule 4)
            self.on_device.settle()

    def refill(self) -> None:
        """Fill the device buffer again in place, and order the caller's stream after that."""
        self.load()
        self.on_device.wait_load()

    def _note_data(self, addresses: list[int]) -> None:
        """Note where the parameters' data is, and leave what it replaced to what autograd saved of that (Rule 6)."""
        if addresses != self._addresses_at_home or self.was_reshaped:
            for weight in self.weights:
                weight.check_data(weight.parameter, weight.host.dtype)
        then, storages = self.on_device.stamp.addresses, map(Tensor.untyped_storage, self.params)
        for index, storage in enumerate(storages):
            weight, is_replaced = self.weights[index], addresses[index] != then[index]
            if is_replaced and index not in self.autocast:
                weight.leave(weight.data_before)
            if is_replaced or storage is not weight.storage:
                weight.note_data()

    def _leave_file(self, index: int, bytes_in_file: Callable[[], Tensor]) -> None:
        """Have a weight go up by itself from here on; a graph may need the bytes of the file as its wire copy."""
        weight = self.weights[index]
        if weight.is_narrow:
            in_file = bytes_in_file()  # may fail, and then the weight has not left
            lay_out_wire([weight], self.device)
            wire, _ = weight.place_of_wire()
            with torch.no_grad():
                wire[: weight.field.nbytes].view(weight.field.dtype).copy_(in_file.view(weight.host.dtype))
            self._wire_stamp = None
        weight.home = self._runs = None

    def _cut(self) -> list[Run]:
        """List the copies of what goes up neither from files nor by itself, as few as possible."""
        if not self.narrow and all(weight.home is self.slab for weight in self.weights):
            return [(self.slab.truth, 0, 0, self.on_device.nbytes)]
        listed = [w for w in self.weights if w.buffer is not None or (w.wire is None and w.home is self.slab)]
        places = [(self.slab.truth, w.host.offset) if w.wire is None else w.place_of_wire() for w in listed]
        return list(as_few_runs(places, [weight.field for weight in listed]))

    def _loose(self, stamp: Stamp) -> Sequence[tuple[int, Tensor]]:
        """List weights that go up by themselves, by index, with their data."""
        written = self.slab.written(stamp)
        if not written and stamp.addresses == self._addresses_at_home and None not in map(_home, self.weights):
            return ()
        on_face = self.host_layout.indices_in(written)
        places = enumerate(zip(self.weights, stamp.addresses, self._addresses_at_home, strict=True))
        return [
            (index, true_data(weight.parameter))
            for index, (weight, at, home) in places
            if weight.wire is None and (weight.home is None or at != home or index in on_face)
        ]


def _are_shared(data: Sequence[Tensor], weights: Iterable[Weight]) -> bool:
    """Whether something beside these weights refers to these bytes of theirs."""
    storages = list(map(Tensor.untyped_storage, data))
    ours = map(operator.is_, storages, map(_storage, weights))
    return max(map(operator.sub, uses_of(storages), ours), default=0) > own_uses()
