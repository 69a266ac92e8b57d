"""The bytes of a stream that are in files: chosen once, as it begins, and their ways from there and back."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from ..errors import HostMemoryError
from ..host.device import Arrival, Device
from ..host.machine import Mapping, headroom, host_memory
from ..host.memory import SMALL_THRESHOLD, USUAL_THRESHOLD, map_blocks_from
from ..options import format_bytes
from .files import BLOCK, DirectFile, SourceFile, blocks, find, is_written
from .pipeline import BUFFERS, ElementSpan, FileFill, Pipeline, W, buffer_nbytes, cut
from .placement import Placement, UnitBytes, choose, may_move
from .scratch import ScratchFile, check_folder, scratch_in

log = logging.getLogger(__name__)

BESIDE = 4  # times the largest unit: a unit that arrives, gradients of a unit, and two packs of gradients

TENSORS = 5  # of a weight, at most: itself, two numbers of state, and its gradient as it came and as it is read


class FilePlace(NamedTuple):
    """Where in a file the bytes of a weight are."""

    file: DirectFile
    offset: int


class FiledWeights:
    """The file-backed weights of a unit, and the way to bring them to the device."""

    def __init__(self, name: str, weights: Sequence[Any], pipeline: Pipeline, device: Device) -> None:
        self._name, self._weights, self._pipeline, self._device = name, weights, pipeline, device
        self._stamp: Any = None  # of the weights when it was last looked where their bytes are
        self._written: list[Any] = []  # weights whose bytes are in memory: the mapping was written to
        self._last: FileFill | None = None

    @property
    def has_failed(self) -> bool:
        """Whether the last fill ended in an error."""
        return self._last is not None and self._last.queued.done() and self._last.queued.exception() is not None

    def send_up(self, flat: Tensor, before: Arrival, stamp: Any) -> Arrival:
        """Start to fill a unit's memory on the device with file-backed weights; return the end of all its copies.

        Args:
            flat: The unit's memory on the device.
            before: The copy of weights in memory, which has ended, too, at the end that is returned.
            stamp: Differs after writes to the weights; None: they may have been written.
        """
        if stamp is None or stamp != self._stamp:
            self._stamp = stamp
            self._written = [weight for weight in self._weights if _is_written(weight)]
            self._unwritten = [weight for weight in self._weights if weight not in self._written]
        copies = [before]
        for weight in self._written:
            here = weight.value.as_strided((weight.value.numel(),), (1,)).view(torch.uint8)
            there = flat[weight.at : weight.at + weight.nbytes]
            copies.append(self._device.send_up(there, here, self._name, "weights"))
        self._last = self._pipeline.send_up(flat, self._unwritten, copies, self._name)
        return self._last


def is_in_source(weight: Any) -> bool:
    """Whether the file that a weight was loaded from still has its bytes."""
    return weight.place is not None and isinstance(weight.place.file, SourceFile) and not _is_written(weight)


def _is_written(weight: Any) -> bool:
    """Whether memory has the bytes of a file-backed weight, because its mapping was written to."""
    return is_written(weight.value.data_ptr(), weight.nbytes)


def is_same(one: Tensor, other: Any) -> bool:
    """Whether another tensor has the same type, shape and bits, in host memory."""
    if not isinstance(other, Tensor) or (one.dtype, one.shape, "cpu") != (other.dtype, other.shape, other.device.type):
        return False
    here, there = (tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(here, there)


def _free_nbytes(units: Sequence[Sequence[tuple[str, nn.Parameter]]]) -> int:
    """Return the bytes a run may take: free memory and its own weights, less what is left to the system."""
    memory, own = host_memory(), sum(param.nbytes for unit in units for _, param in unit if not param.is_meta)
    return max(1, memory.free + own - headroom(memory.total))


class Store:
    """The bytes of a stream that are in files."""

    def __init__(self, budget: int | None, disk: str | None, device: Device) -> None:
        self._budget, self._disk, self._device = budget, disk, device
        self.placement = Placement()
        self._found: dict[int, Mapping] = {}
        self._files: dict[Any, SourceFile] = {}
        # Without files there is neither of these, and nothing asks for them.
        self.pipeline: Pipeline = None  # type: ignore[assignment]
        self._scratch: ScratchFile = None  # type: ignore[assignment]

    def choose(
        self,
        units: Sequence[Sequence[tuple[str, nn.Parameter]]],
        wire_of: Callable[[Any], torch.dtype],
        masters: bool,
        window: int,
    ) -> None:
        """Choose what is in files; allocate the scratch file and start the pipeline if anything is.

        Args:
            units: The parameters of each unit whose bytes are on the host.
            wire_of: Returns the type in which a parameter travels from memory.
            masters: Whether a parameter computes in that type, so that a file must hold that type, too.
            window: How many units are on the device at a time.
        """
        if self._budget is None and self._disk is None:
            return
        if self._disk is not None:
            check_folder(self._disk)
        budget = self._budget if self._budget is not None else _free_nbytes(units)
        frozen = [param for unit in units for _, param in unit if not param.requires_grad]
        self._found = find(param for param in frozen if not masters or wire_of(param) is param.dtype)
        counted = [UnitBytes.of([param for _, param in unit], wire_of, self._found) for unit in units]
        largest = max((sum(param.nbytes for _, param in unit) for unit in units), default=0)
        nbytes = buffer_nbytes(budget, largest)
        buffers = BUFFERS * nbytes
        if self._device.is_host:  # host memory also has the window, its gradients and their packs
            buffers += (window + BESIDE) * largest
        self.placement = placement = choose(counted, budget, self._disk is not None, buffers)
        if placement.host > budget > 0:
            raise self._budget_error(budget)
        if placement.is_in_memory:
            return
        if self._disk is not None and placement.disk:
            moving = [param for index in placement.gradients for _, param in units[index] if may_move(param)]
            wide = sum(param.nbytes for param in moving if wire_of(param) is not param.dtype)  # gradients that are read
            ends = TENSORS * BLOCK * sum(map(len, units))  # for the unused ends of tensors' last blocks
            self._scratch = scratch_in(self._disk, placement.disk + wide + ends)
        map_blocks_from(SMALL_THRESHOLD)  # otherwise freed memory would stay with the process, beyond the budget
        self.pipeline = Pipeline(self._device, nbytes)
        log.info(
            "superpipeline: %s of frozen weights stay in their files, and %s go to the disk; %s are in host memory, of"
            " them %s in buffers",
            format_bytes(sum(counted[index].frozen for index in placement.frozen)),
            format_bytes(placement.disk),
            format_bytes(placement.host),
            format_bytes(placement.by_term["buffers"]),
        )

    def _budget_error(self, budget: int) -> HostMemoryError:
        """Make the error of a budget that is less than what has to be in memory."""
        left = {term: nbytes for term, nbytes in self.placement.by_term.items() if nbytes}
        terms = ", ".join(f"{term} {format_bytes(nbytes)}" for term, nbytes in left.items())
        spill = "" if self._disk else " Give disk= a folder on a local SSD for what trains, and freeze what does not."
        return HostMemoryError(
            f"host_budget={format_bytes(budget)} cannot be met: the run takes"
            f" {format_bytes(self.placement.host, up=True)} of host memory ({terms}); 'fixed' are weights that travel,"
            f" and frozen ones that lie in no file as they travel (from_pretrained(dtype='auto')).{spill} Raise the"
            " budget, or give '0B' for as little as can be had"
        )

    def place_of(self, index: int, param: nn.Parameter, wire: torch.dtype) -> FilePlace | None:
        """Return the place in a file from which a parameter travels; None if it travels from memory.

        A weight that trains is first moved to the scratch file, if the placement says so. If it travels in another
        type, its wire copy is in memory.
        """
        if index in self.placement.weights and may_move(param):
            param.data = self.moved(param.data)
            offset = self._scratch.offset_of(param.data)
            assert offset is not None
            return FilePlace(self._scratch, offset) if wire is param.dtype else None
        found = self._found.get(id(param)) if index in self.placement.frozen else None
        if found is None:
            return None
        if found.file not in self._files:
            self._files[found.file] = SourceFile(found)
        return FilePlace(self._files[found.file], found.offset)

    def filed(self, name: str, weights: Sequence[Any]) -> FiledWeights | None:
        """Return the loader of a unit's file-backed weights; None if the unit has none."""
        there = [weight for weight in weights if weight.place is not None]
        return FiledWeights(name, there, self.pipeline, self._device) if there else None

    # ---- what trains

    def has_state_of(self, weight: Any) -> bool:
        """Whether the optimizer state of a weight is to be in the scratch file."""
        return weight.unit.index in self.placement.state and may_move(weight.host)

    def is_filed(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the scratch file."""
        return self._scratch is not None and self._scratch.offset_of(tensor) is not None

    def gradients_of(self, index: int) -> Store | None:
        """Return this store if a unit's gradients are in the scratch file; None if they are in memory."""
        return self if index in self.placement.gradients else None

    def take(self, like: Tensor) -> Tensor:
        """Return a new, uninitialized, dense tensor in the scratch file, with the shape and dtype of ``like``."""
        return self._scratch.take(like)

    def moved(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor in the scratch file, or the tensor itself if it is there. Blocks."""
        if self.is_filed(tensor):
            return tensor
        there = self.take(tensor)
        with torch.no_grad():
            if tensor.stride() == there.stride():
                self.each(Tensor.copy_, there, tensor)
            else:
                there.copy_(tensor)
        return there

    def each(self, work: Callable[..., Any], target: Tensor, *others: Tensor) -> None:
        """Call an elementwise function on ``target``, which it writes, and ``others``; all have equal strides.

        If any of them is in the scratch file, call it on one range after the other. Blocks until all is written.
        """
        tensors = target, *others
        if not any(map(self.is_filed, tensors)):
            work(*tensors)
            return
        types = [tensor.dtype for tensor in tensors]
        ranges = cut(target.numel(), types, self.pipeline.nbytes)
        windows = ([ElementSpan(one, one.dtype, *ends, one is target) for one in tensors] for ends in ranges)
        with contextlib.closing(self.fetch(windows)) as fetched:
            for window in fetched:
                work(*[span.here for span in window])
        increment_version(target)

    def fetch(self, windows: Iterable[W]) -> Generator[W, None, None]:
        """Yield each window with its elements in memory; write it back when the next one is asked for.

        The caller closes this generator.
        """
        return self.pipeline.windows(self._scratch, windows)

    # ---- gradients: what a device offers for those in memory

    aligned = staticmethod(blocks)

    def passing(self, nbytes: int) -> Tensor:
        """Allocate a range of the scratch file for a unit's gradients, as a tensor of bytes."""
        return self.take(torch.empty(nbytes, dtype=torch.uint8, device="meta"))

    def send_down(self, target: Tensor, source: Tensor, unit: str, phase: str) -> Arrival:
        """Start to write device memory to a range of the scratch file; return the end."""
        offset = self._scratch.offset_of(target)
        assert offset is not None
        return self.pipeline.send_down(self._scratch, offset, source, unit, phase)

    def close(self) -> None:
        """End the threads and close the files; file-backed weights stay mapped, as their loader made them.

        The scratch file lives as long as its tensors. A second call does nothing.
        """
        ended, self.pipeline = self.pipeline, None  # type: ignore[assignment]
        if ended is not None:
            ended.close()
            map_blocks_from(USUAL_THRESHOLD)
        for file in self._files.values():
            file.close()
        self._files.clear()
