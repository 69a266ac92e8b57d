"""One unit's bytes where some of its weights stay in their files.

It follows the rules of a unit (unit_store.py), but for these:

1. Weights that stay in a file are not in the slab. Their data is a view of the file's mapping, right for any reader,
   and the device buffer is filled from the file past that mapping (direct_ring.py).
2. Before each fill the kernel is asked whether a page of a weight was written (source_files.py, Rule 3). A weight that
   was, or that has other data by now, has left its file for good: it goes up from its memory, as a weight outside of
   the slab does. Its wire copy, if it needs one, begins with the file's bytes: a graph may need them (unit_store.py,
   Rule 8).
3. A weight in a file has no wire copy: it is converted on its way up.
4. A fill from files may fail, which leaves the device copy stale (device_copy.py, Rule 4).
5. Every fill checks the unit's files, also for weights that left them: unwritten pages are still the file's.
6. FP32 weights that travel as wire copies, or may come to, may lie in the scratch file, as the optimizer's state does
   (state_on_disk.py): a `ScratchStore` has wire copies in memory, and those weights not in its slab.
7. A weight there without a wire copy (before autocast's casts are known, or where it is not only cast) goes up from its
   range of the scratch file: reading that directly finds what was written through the mapping. Once user code gives it
   other data, it goes up from that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from ..core.telemetry import Counters
from ..core.unit_numbers import aligned
from ..memory.device import Device
from ..memory.device_copy import Run, Sources
from ..memory.layout import Layout, as_few_runs
from ..memory.partition import Unit
from ..memory.staging import Around, Arrival, Copies
from ..memory.unit_store import UnitStore
from ..memory.watched_parameters import ParameterOwner, true_data
from ..memory.weights import BY_ITSELF, Stamp, Weight
from .direct_file import FileRange
from .direct_ring import DirectRing, Job, Piece, Target, pieces
from .source_files import Place, written


class FileUnitStore(UnitStore):
    """Slab, files and device buffer of one unit."""

    def __init__(
        self,
        unit: Unit,
        device: Device,
        counters: Counters,
        owner: ParameterOwner,
        device_dtype: Callable[[torch.dtype], torch.dtype],
        places: Mapping[int, Place],
        ring: Callable[[], DirectRing],
        filed: Collection[int] = (),
    ) -> None:
        """Adopt the unit's parameters, but for those of which `places` has the place in a file, by index.

        Those of the indices `filed` take no bytes in the slab either.
        """
        self._places = dict(places)
        self._filed = frozenset([*places, *filed])
        self._files = list(dict.fromkeys(place.file for place in places.values()))
        self._ring = ring
        self._own_wires: dict[int, Tensor] = {}  # of weights that left their files
        self._jobs: list[Job] | None = None  # None: to be made
        self._slices = 0  # tensors over the device buffer that fills write to, among `own_aliases`
        super().__init__(unit, device, counters, owner, device_dtype)

    # ---- the host side

    @property
    def host_ranges(self) -> list[tuple[int, int]]:
        return [*super().host_ranges, *((file.flat.data_ptr(), file.nbytes) for file in self._files)]

    def _lay_out_slab(self) -> Layout:
        """Lay out the parameters in the slab, but for those in files, which take no bytes there."""
        parameters = list(enumerate(self.unit.params))
        kept = Layout.of([(name, true_data(p)) for index, (name, p) in parameters if index not in self._filed])
        fields = iter(kept.fields)
        filed = iter(
            Layout.of([(name, true_data(p)) for index, (name, p) in parameters if index in self._filed]).fields
        )
        end = kept.nbytes
        return Layout(
            tuple(
                replace(next(filed), offset=end) if index in self._filed else next(fields) for index, _ in parameters
            ),
            end,
        )

    def _find_outside(self) -> set[int]:
        return super()._find_outside() - self._filed

    def _place(self, weight: Weight) -> Tensor:
        place = self._places.get(self.index_of[id(weight.parameter)])
        if place is None:
            return super()._place(weight)
        weight.in_file = True
        return Layout.own_view(place.file.flat.untyped_storage(), replace(weight.host, offset=place.offset))

    def in_place(self, index: int) -> bool:
        return index not in self._places and super().in_place(index)

    def _ranges(self) -> Mapping[int, FileRange]:
        """Return the ranges of files that a fill reads, by the indices of weights."""
        return self._places

    def _leave_files(self) -> None:
        """Note which weights left their files (Rule 2)."""
        if not self._places:
            return
        moved = {index for index in self._places if self.params[index].data_ptr() != self._homes[index]}
        stayed = [(index, place) for index, place in self._places.items() if index not in moved]
        found = written([(place.address, place.nbytes) for _, place in stayed])
        for index in moved.union(stayed[number][0] for number in found):
            self._leave_file(index)

    def _leave_file(self, index: int) -> None:
        place, weight = self._places.pop(index), self.weights[index]
        weight.in_file, weight.outside = False, True
        self._drop_cut()
        if weight.is_narrow:
            self._make_wire(index)
            with torch.no_grad():
                before = place.file.bytes_of(place.offset, place.nbytes)
                wire = self._own_wires[index][: weight.field.nbytes].view(weight.field.dtype)
                wire.copy_(before.clone().view(weight.host.dtype))
            self._wire_stamp = None

    def _make_wire(self, index: int) -> None:
        """Make the wire copy of a weight that left its file."""
        weight = self.weights[index]
        self._own_wires[index] = buffer = self.device.slab(aligned(weight.field.nbytes))
        weight.wire = Layout.view(buffer.untyped_storage(), replace(weight.field, offset=0))

    # ---- the device side

    def retype(self, autocast: Mapping[int, torch.dtype]) -> None:
        super().retype(autocast)
        self._own_wires = {}
        self._runs, self._jobs, self._slices = [], None, 0

    def load(self) -> None:
        self.wait_step()
        self._leave_files()
        super().load()
        self.counters.disk_read += sum(range_.nbytes for range_ in self._ranges().values())

    def _cut(self) -> list[Run]:
        """List the copies from memory."""
        listed = [
            (self.on_device.layout.fields[index], source)
            for index, (weight, source) in enumerate(zip(self.weights, self._buffers(), strict=True))
            if not weight.in_file and (weight.wire is not None or not weight.outside)
        ]
        return list(as_few_runs([source for _, source in listed], [field for field, _ in listed]))

    def _drop_cut(self) -> None:
        """Have the next fill cut its copies and pieces anew."""
        self._runs, self._jobs = [], None
        self._count_slices(0)

    def _count_slices(self, count: int) -> None:
        """Count the tensors that fills write to among our own, not among user code's (device_copy.py, Rule 5)."""
        self.on_device.own_aliases += count - self._slices
        self._slices = count

    def _sources(self, stamp: Stamp) -> Sources:
        return super()._sources(stamp)._replace(transport=self._send)

    def _buffers(self) -> Iterator[tuple[Tensor, int]]:
        for index, source in enumerate(super()._buffers()):
            yield (self._own_wires[index], 0) if index in self._own_wires else source

    @property
    def largest_piece(self) -> int:
        """The most bytes that a fill reads at once."""
        return max((piece.nbytes for piece in self.pieces()), default=0)

    def pieces(self) -> list[Piece]:
        """List the ranges of files that a fill reads."""
        ranges = self._ranges().items()
        return pieces((index, range_, self.weights[index].host.dtype.itemsize) for index, range_ in ranges)

    def _targets(self, piece: Piece) -> Iterator[Target]:
        for index, at, within, nbytes in piece.parts:
            field, given = self.on_device.layout.fields[index], self.weights[index].host.dtype
            narrow = self.weights[index].is_narrow
            first = within // given.itemsize * field.dtype.itemsize
            count = nbytes // given.itemsize * field.dtype.itemsize
            place = self.on_device.flat[field.offset + first : field.offset + first + count]
            yield Target(at, nbytes, place, (given, field.dtype) if narrow else None)

    def _send(self, copies: Copies, around: Around, loose: Copies) -> Arrival:
        """Send up what is in memory, and read the rest from files, as a `Transport`."""
        return self._ring().fill(
            self.counters, [*copies, *loose], self._pieces_to_read(), around, self._files, self.unit.name
        )

    def _pieces_to_read(self) -> list[Job]:
        """List the pieces to read from files, with the places in the device buffer, which has its memory."""
        if self._jobs is None:
            self._jobs = [(piece, list(self._targets(piece))) for piece in self.pieces()]
            self._count_slices(sum(len(targets) for _, targets in self._jobs))
        return self._jobs


class Scratch(Protocol):
    """The scratch file, as far as weights are in it (state_on_disk.py)."""

    def moved(self, tensor: Tensor) -> tuple[Tensor, FileRange]:
        """Return a tensor of the file with the values of this one, and its range."""

    def converted(self, tensor: Tensor, wire: Tensor | None) -> bool:
        """Convert a tensor of the file into a wire copy; return False, with nothing done, if that is not possible."""


class ScratchStore(FileUnitStore):
    """Slab, ranges of the scratch file, wire copies and device buffer of one unit (Rules 6 and 7)."""

    def __init__(
        self,
        unit: Unit,
        device: Device,
        counters: Counters,
        owner: ParameterOwner,
        device_dtype: Callable[[torch.dtype], torch.dtype],
        chosen: Collection[int],
        scratch: Scratch,
        ring: Callable[[], DirectRing],
    ) -> None:
        """Adopt the unit's parameters; those with the indices `chosen` move into the file."""
        self._scratch = scratch
        self._moved: dict[int, FileRange] = {}
        self._read: dict[int, FileRange] = {}
        super().__init__(unit, device, counters, owner, device_dtype, {}, ring, chosen)

    @property
    def host_ranges(self) -> list[tuple[int, int]]:
        return [*super().host_ranges, *((self._homes[index], range_.nbytes) for index, range_ in self._moved.items())]

    def _place(self, weight: Weight) -> Tensor:
        index = self.index_of[id(weight.parameter)]
        if index not in self._filed:
            return super()._place(weight)
        data, self._moved[index] = self._scratch.moved(true_data(weight.parameter))
        return data

    def in_place(self, index: int) -> bool:
        return UnitStore.in_place(self, index)

    def _lay_out_wire(self) -> Tensor:
        """Lay out the wire copies; what has none goes up from the file (Rule 7)."""
        for index in self._moved:
            weight = self.weights[index]
            joins = bool(self.narrow) and weight.field.nbytes < BY_ITSELF
            weight.in_file = not weight.is_narrow and not joins
        return super()._lay_out_wire()

    def _ranges(self) -> Mapping[int, FileRange]:
        return self._read

    @property
    def largest_piece(self) -> int:
        ranges = ((i, range_, self.weights[i].host.dtype.itemsize) for i, range_ in self._moved.items())
        return max((piece.nbytes for piece in pieces(ranges)), default=0)

    def _leave_files(self) -> None:
        """Find out which weights go up from the file: not those that were given other data (Rule 7)."""
        read = {
            index: range_
            for index, range_ in self._moved.items()
            if self.weights[index].in_file and self.params[index].data_ptr() == self._homes[index]
        }
        if read != self._read:
            self._read = read
            self._drop_cut()

    def _send(self, copies: Copies, around: Around, loose: Copies) -> Arrival:
        if not self._read:
            return self.device.send_up(copies, around, loose)
        return self._ring().fill(
            self.counters, [*copies, *loose], self._pieces_to_read(), around, (), self.unit.name, True
        )

    def _fill_wire(self, data: Sequence[Tensor], stamp: Stamp, done: Collection[int] = ()) -> None:
        """Convert weights that no step converted: those that are in the file from there, past its mapping.

        What a graph may have saved is left to the way that keeps the bytes before (unit_store.py, Rule 8).
        """
        saved = self.autocast if self.remembered() else ()
        here = [i for i in self._moved if self.weights[i].wire is not None and i not in done and i not in saved]
        read = [i for i in here if self._scratch.converted(true_data(data[i]), self.weights[i].wire)]
        super()._fill_wire(data, stamp, {*done, *read})

    def _fill_cast(self, index: int, cast: Tensor) -> None:
        if not self._scratch.converted(true_data(self.params[index]), cast):
            super()._fill_cast(index, cast)
