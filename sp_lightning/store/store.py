"""The bytes of a stream that are in files: chosen once, as it begins, and the way of weights from there."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import HostMemoryError, OptionError
from ..host.device import Arrival, Device
from ..options import format_bytes
from . import pipeline
from .direct import DirectFile, blocks
from .pipeline import COUNT, FileFill, FileRange, Pipeline, pieces_of
from .placement import Placement, UnitBytes, choose
from .sources import Found, SourceFile, find, written

log = logging.getLogger(__name__)


class Place(NamedTuple):
    """Where in a file the bytes of a weight are."""

    file: DirectFile
    offset: int


class Several:
    """The end of several copies."""

    def __init__(self, copies: Sequence[Arrival]) -> None:
        self._copies = copies

    def wait(self, stream: Any) -> None:
        for copy in self._copies:
            copy.wait(stream)

    def synchronize(self) -> None:
        for copy in self._copies:
            copy.synchronize()


class FiledWeights:
    """The weights of a unit that are in files, and their way up."""

    def __init__(self, name: str, weights: Sequence[Any], pipeline: Pipeline, device: Device) -> None:
        self._name, self._weights, self._pipeline, self._device = name, weights, pipeline, device
        self._files = list(dict.fromkeys(weight.place.file for weight in weights))
        self._stamp: Any = None  # of the weights when they were looked at last
        self._written: Sequence[Any] = ()  # whose bytes are in memory: somebody wrote to the mapping
        self._last: FileFill | None = None

    @property
    def has_failed(self) -> bool:
        """Whether the last fill ended in an error."""
        return self._last is not None and self._last.queued.done() and self._last.queued.exception() is not None

    def send_up(self, flat: Tensor, before: Arrival, stamp: Any) -> Arrival:
        """Start to fill a unit's memory on the device.

        Args:
            flat: The memory.
            before: The copy of weights in memory, of which the returned one is the end as well.
            stamp: Changes with writes to the weights; None: there may have been any.
        """
        if stamp is None or stamp != self._stamp:
            self._stamp = stamp
            self._look()
        copies = [before]
        for weight in self._written:
            here = weight.value.as_strided((weight.value.numel(),), (1,)).view(torch.uint8)
            copies.append(self._device.send_up(flat[weight.at : weight.at + weight.nbytes], here))
        self._last = self._pipeline.send_up(flat, self._pieces, self._files, Several(copies), self._name)
        return self._last

    def _look(self) -> None:
        """Find out which weights were written, and plan the reads of the others."""
        found = written([(weight.value.data_ptr(), weight.nbytes) for weight in self._weights])
        self._written = [self._weights[number] for number in found]
        ranges = [
            FileRange(weight.place.file, weight.place.offset, weight.nbytes, weight.at) for weight in self._weights
        ]
        self._pieces = pieces_of((one for n, one in enumerate(ranges) if n not in found), self._pipeline.nbytes)


class Store:
    """The part of a stream that is in files."""

    def __init__(self, budget: int | None, disk: str | None, device: Device) -> None:
        self._budget, self._disk, self._device = budget, disk, device
        if budget is not None and not sys.platform.startswith("linux"):
            raise OptionError(argument="host_budget", found=budget, allowed="None on this system: it needs Linux")
        self.placement = Placement()
        self._found: dict[int, Found] = {}
        self._files: dict[Any, SourceFile] = {}
        self._pipeline: Pipeline | None = None

    def choose(
        self, units: Sequence[Sequence[tuple[str, nn.Parameter]]], wire_of: Callable[[Any], torch.dtype], masters: bool
    ) -> None:
        """Choose what is in files.

        Args:
            units: The parameters of each unit whose bytes are on the host.
            wire_of: Returns the type in which a parameter travels from memory.
            masters: Whether that is the type in which it computes, so that it has to travel in it from a file, too.
        """
        if self._budget is None:
            return
        frozen = [param for unit in units for _, param in unit if not param.requires_grad]
        self._found = find(param for param in frozen if not masters or wire_of(param) is param.dtype)
        counted = [self._count(unit, wire_of) for unit in units]
        largest = max((sum(param.nbytes for _, param in unit) for unit in units), default=0)
        nbytes = blocks(min(pipeline.MOST, max(pipeline.LEAST, self._budget // 64), max(largest, 1)))
        self.placement = placement = choose(counted, self._budget, self._disk is not None, COUNT * nbytes)
        if placement.host > self._budget > 0:
            raise self._not_met()
        if not placement.is_in_memory:
            self._pipeline = Pipeline(self._device, nbytes)
            log.info(
                "superpipeline: %s of frozen weights stay in their files; %s are in host memory, of them %s in buffers",
                format_bytes(sum(counted[index].frozen for index in placement.frozen)),
                format_bytes(placement.host),
                format_bytes(placement.by_term["buffers"]),
            )

    def _count(self, unit: Iterable[tuple[str, nn.Parameter]], wire_of: Callable[[Any], torch.dtype]) -> UnitBytes:
        terms = dict.fromkeys(UnitBytes._fields, 0)
        for _, param in unit:
            wire = wire_of(param)
            travels = param.numel() * wire.itemsize
            if wire is not param.dtype and id(param) not in self._found:
                terms["fixed"] += travels
            if param.requires_grad:
                terms["state"] += 2 * param.nbytes
                terms["weights"] += param.nbytes
                terms["gradients"] += travels
            else:
                terms["frozen" if id(param) in self._found else "fixed"] += param.nbytes
        return UnitBytes(**terms)

    def _not_met(self) -> HostMemoryError:
        """Make the error of a budget that is less than what has to be in memory."""
        left = {term: nbytes for term, nbytes in self.placement.by_term.items() if nbytes}
        terms = ", ".join(f"{term} {format_bytes(nbytes)}" for term, nbytes in left.items())
        spill = "" if self._disk else " Give disk= a folder on a local SSD for what trains, and freeze what does not."
        return HostMemoryError(
            f"host_budget={format_bytes(self._budget or 0)} cannot be met: the run takes"
            f" {format_bytes(self.placement.host, up=True)} of host memory ({terms}); 'fixed' are weights that travel,"
            f" and frozen ones that lie in no file as they travel (from_pretrained(dtype='auto')).{spill} Raise the"
            " budget, or give '0B' for as little as can be had"
        )

    def place_of(self, index: int, param: nn.Parameter) -> Place | None:
        """Return where in a file a parameter of a unit is that does not travel from memory."""
        found = self._found.get(id(param)) if index in self.placement.frozen else None
        if found is None:
            return None
        if found.mapping.file not in self._files:
            self._files[found.mapping.file] = SourceFile(found.mapping)
        return Place(self._files[found.mapping.file], found.offset)

    def filed(self, name: str, weights: Sequence[Any]) -> FiledWeights | None:
        """Return the way up of a unit's weights that are in files; None if there are none."""
        there = [weight for weight in weights if weight.place is not None]
        if not there:
            return None
        assert self._pipeline is not None
        return FiledWeights(name, there, self._pipeline, self._device)

    def close(self) -> None:
        """End the threads and close the files; weights in them stay what their loader made them. Safe twice."""
        ended, self._pipeline = self._pipeline, None
        if ended is not None:
            ended.close()
        for file in self._files.values():
            file.close()
        self._files.clear()
