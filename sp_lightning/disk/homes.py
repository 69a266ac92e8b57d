"""Files as homes of a unit's weights: the files that a model was loaded from, and the scratch file.

1. A weight in a file takes no bytes in the slab. Its data is a view of the file's mapping, right for any reader, and
   the device buffer is filled from the file past that mapping (direct_ring.py).
2. Before each fill the kernel is asked whether a page of a weight in a source file was written (source_files.py,
   Rule 3). A weight that was, or that has other data by now, has left its file for good: it goes up from its memory.
   Its wire copy, if it needs one, begins with the file's bytes: a graph may need them (host_copy.py, Rule 6).
3. A weight in a source file has no wire copy: it is converted on its way up.
4. A fill from files may fail, which leaves the device copy stale (device_copy.py, Rule 4).
5. Every fill checks the unit's source files, also for weights that left them: unwritten pages are still the file's.
6. FP32 weights that travel as wire copies, or may come to, may lie in the scratch file, as the optimizer's state does
   (state_on_disk.py). Their wire copies are in memory, or in the file as well.
7. A wire copy in the file goes up from its range, and so does a weight there without one (it travels as it is,
   autocast's casts are not known yet, or it is not only cast): reading a range directly finds what was written through
   the mapping. While user code has given a weight other data, it goes up from that; once nothing refers to the range,
   which ends with its last tensor, the weight has left the file for good: other memory may come to have its address.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from ..core.telemetry import Counters
from ..memory.device import Device
from ..memory.device_copy import DeviceCopy
from ..memory.layout import Field, Layout, in_order
from ..memory.staging import Around, Arrival, Copies
from ..memory.watched_parameters import true_data
from ..memory.weights import Stamp, Weight
from .direct_file import DirectFile, FileRange
from .direct_ring import GAP, PIECE, DirectRing, Job, Piece, Target, pieces
from .scratch_file import SEGMENT, in_file
from .source_files import Place, written


class _Files:
    """A home in files of either kind."""

    _gap = GAP  # most bytes between two weights that are read together

    def __init__(self, unit: str, counters: Counters, ring: Callable[[], DirectRing]) -> None:
        self._unit, self._counters, self._ring = unit, counters, ring
        self._here: dict[int, tuple[int, FileRange]] = {}  # addresses and ranges of the weights, by index
        self._wires: dict[int, FileRange] = {}  # of wire copies that are in files
        self._read: dict[int, FileRange] = {}  # those that a fill reads
        self._jobs: list[Job] | None = None  # these, in pieces; None: to be made
        self._slices = 0  # tensors over the device buffer that fills write to, among its own aliases

    def ranges(self) -> list[tuple[int, int]]:
        return [(address, range_.nbytes) for address, range_ in self._here.values()]

    def lay_out(self, weights: Sequence[Weight], on_device: DeviceCopy) -> None:
        self._weights, self._on_device = weights, on_device
        self._jobs, self._slices = None, 0

    def _find_read(self, indices: Collection[int], stamp: Stamp) -> None:
        """Note what a fill reads from files: wire copies there, and these weights, if they lie there and have none."""
        read = {
            index: range_
            for index, (address, range_) in self._here.items()
            if index in indices and self._weights[index].wire is None and stamp.addresses[index] == address
        } | self._wires
        if read != self._read:
            self._read = read
            self._have_jobs(None)

    def _have_jobs(self, jobs: list[Job] | None) -> None:
        """Set the jobs of fills, and count the tensors that they write to as our own (device_copy.py, Rule 5)."""
        slices = sum(len(targets) for _, targets in jobs or ())
        self._on_device.own_aliases += slices - self._slices
        self._jobs, self._slices = jobs, slices

    def largest_piece(self) -> int:
        """Return the most bytes that a fill may read at once."""
        return max((piece.nbytes for piece in self._pieces({i: at for i, (_, at) in self._here.items()})), default=0)

    def _pieces(self, ranges: Mapping[int, FileRange]) -> list[Piece]:
        places = ((index, range_, self._type(index).itemsize) for index, range_ in ranges.items())
        return pieces(places, gap=self._gap)

    def _type(self, index: int) -> torch.dtype:
        """Return the type of what is read of a weight."""
        weight = self._weights[index]
        return weight.field.dtype if index in self._wires else weight.host.dtype

    def _targets(self, piece: Piece) -> Iterator[Target]:
        for index, at, within, nbytes in piece.parts:
            field, given = self._weights[index].field, self._type(index)
            first = field.offset + within // given.itemsize * field.dtype.itemsize
            place = self._on_device.flat[first : first + nbytes // given.itemsize * field.dtype.itemsize]
            yield Target(at, nbytes, place, (given, field.dtype) if given is not field.dtype else None)

    def _fill(
        self, copies: Copies, around: Around, loose: Copies, files: Sequence[DirectFile], writable: bool
    ) -> Arrival:
        """Send up what is in memory, and read the rest from files into the device buffer, which has its memory."""
        if self._jobs is None:
            self._have_jobs([(piece, list(self._targets(piece))) for piece in self._pieces(self._read)])
        jobs = self._jobs or []
        arrival = self._ring().fill(self._counters, [*copies, *loose], jobs, around, files, self._unit, writable)
        self._counters.disk_read += sum(range_.nbytes for range_ in self._read.values())
        return arrival


class SourceFiles(_Files):
    """The files that weights were loaded from."""

    def __init__(
        self, places: Mapping[int, Place], unit: str, counters: Counters, ring: Callable[[], DirectRing]
    ) -> None:
        super().__init__(unit, counters, ring)
        self.indices: Collection[int] = places.keys()
        self._places = places
        self._files = list(dict.fromkeys(place.file for place in places.values()))

    def adopt(self, index: int, field: Field, data: Tensor) -> Tensor:
        place = self._places[index]
        self._here[index] = place.address, place
        return Layout.own_view(place.file.flat.untyped_storage(), replace(field, offset=place.offset))

    def make_wires(self, weights: Sequence[Weight]) -> Collection[int]:
        return [index for index, weight in enumerate(weights) if weight.home is self]  # Rule 3

    def refresh(self, stamp: Stamp) -> dict[int, Callable[[], Tensor]]:
        left: dict[int, Callable[[], Tensor]] = {}
        here = {i: place for i, place in self._places.items() if self._weights[i].home is self}
        self._leave_files(here, stamp, left)
        self._find_read(here.keys() - left.keys(), stamp)
        return left

    def _leave_files(self, here: Mapping[int, Place], stamp: Stamp, left: dict[int, Callable[[], Tensor]]) -> None:
        """Add the weights that left their files to ``left``, with functions that read their bytes (Rule 2)."""
        stayed = {i: place for i, place in here.items() if stamp.addresses[i] == place.address}
        found = written([(place.address, place.nbytes) for place in stayed.values()])
        for index in here.keys() - stayed.keys() | {list(stayed)[number] for number in found}:
            left[index] = functools.partial(here[index].file.bytes_of, here[index].offset, here[index].nbytes)

    def changed(self) -> dict[int, Tensor]:
        found = {}
        for index, place in self._places.items():
            data = true_data(self._weights[index].parameter)
            if data.data_ptr() != place.address or written([(place.address, place.nbytes)]):
                mine = in_order(data, self._weights[index].host).view(torch.uint8)
                if not torch.equal(mine, place.file.bytes_of(place.offset, place.nbytes)):
                    found[index] = mine
        return found

    def wire_like(self, index: int, like: Tensor) -> Tensor | None:
        return None

    def convert(self, index: int, data: Tensor, converted: Tensor) -> bool:
        return False

    def send(self, copies: Copies, around: Around, loose: Copies) -> Arrival:
        return self._fill(copies, around, loose, self._files, False)


class Scratch(Protocol):
    """The scratch file, as far as weights are in it (state_on_disk.py)."""

    def moved(self, tensor: Tensor) -> tuple[Tensor, FileRange]:
        """Return a tensor of the file with the values of this one, and its range."""

    def placed(self, like: Tensor) -> tuple[Tensor, FileRange]:
        """Return a tensor of the file with this shape, type and strides, and its range."""

    def converted(self, tensor: Tensor, wire: Tensor | None) -> bool:
        """Convert a tensor of the file into a wire copy; return False, with nothing done, if that is not possible."""


class ScratchHome(_Files):
    """The scratch file (Rules 6 and 7)."""

    _gap = SEGMENT

    def __init__(
        self,
        indices: Collection[int],
        wired: Collection[int],  # those of which what travels is in the file
        scratch: Scratch,
        device: Device,
        unit: str,
        counters: Counters,
        ring: Callable[[], DirectRing],
    ) -> None:
        super().__init__(unit, counters, ring)
        self.indices: Collection[int] = indices
        self._wired, self._scratch, self._device = wired, scratch, device
        self._made: dict[int, FileRange] = {}  # of wire copies for the next layout

    def adopt(self, index: int, field: Field, data: Tensor) -> Tensor:
        moved, range_ = self._scratch.moved(data)
        self._here[index] = moved.data_ptr(), range_
        return moved

    def make_wires(self, weights: Sequence[Weight]) -> Collection[int]:
        self._made = {}
        for index in self._wired:
            weight, field = weights[index], weights[index].field
            if index in self._wires and self._type(index) is field.dtype:  # no room for both is needed
                weight.wire, self._made[index] = self._weights[index].wire, self._wires[index]
            elif weight.is_narrow:
                like = torch.empty_strided(field.shape, field.stride, dtype=field.dtype, device="meta")
                weight.wire, self._made[index] = self._scratch.placed(like)
        return self._wired

    def lay_out(self, weights: Sequence[Weight], on_device: DeviceCopy) -> None:
        super().lay_out(weights, on_device)
        self._wires = self._made

    def largest_piece(self) -> int:
        return min(PIECE, in_file(range_.nbytes for _, range_ in self._here.values()))

    def refresh(self, stamp: Stamp) -> dict[int, Callable[[], Tensor]]:
        here = {i: (address, at) for i, (address, at) in self._here.items() if self._weights[i].wire is None}
        left = [i for i, (address, at) in here.items() if at.file.offset_of(address, at.nbytes) != at.offset]
        for index in left:
            del self._here[index]
        self._find_read(self.indices, stamp)
        return dict.fromkeys(left, _not_needed)

    def changed(self) -> dict[int, Tensor]:
        return {}  # what is written to a weight is what its file has

    def wire_like(self, index: int, like: Tensor) -> Tensor | None:
        return self._scratch.placed(like)[0] if index in self._wired else None

    def convert(self, index: int, data: Tensor, converted: Tensor) -> bool:
        return self._scratch.converted(data, converted)

    def send(self, copies: Copies, around: Around, loose: Copies) -> Arrival:
        if not self._read:
            return self._device.send_up(copies, around, loose)
        return self._fill(copies, around, loose, (), True)


def _not_needed() -> Tensor:
    """Read a range that ended, for a wire copy: only weights that need none leave the scratch file."""
    raise AssertionError
