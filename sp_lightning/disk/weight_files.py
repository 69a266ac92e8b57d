"""The weights of a model that stay in their files: which they are, their files, and the ring that reads them."""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..compat.references import shares_storage, sharing_bytes
from ..core.host import host_memory
from ..core.machine import headroom
from ..core.telemetry import Counters
from ..errors import HostMemoryError, SourceFileError
from ..memory.device import Device
from ..memory.host_copy import FileHome
from ..memory.partition import Unit
from ..memory.pinned import find_foreign
from ..memory.watched_parameters import true_data
from ..options import format_bytes
from .direct_file import BLOCK, Mount, mount_of
from .direct_ring import DirectRing
from .homes import Scratch, ScratchHome, SourceFiles
from .placement import Budgeted, choose, may_move
from .source_files import Found, Place, SourceFile, check_available, find

log = logging.getLogger(__name__)


class Choice(NamedTuple):
    """The weights that stay in files."""

    found: dict[int, Found]  # by the ids of parameters
    placed: Budgeted
    adopted: Collection[int]  # weights that are in files, and do not stay there
    moved: Collection[int]  # the ids of FP32 weights that go to the disk


class WeightFiles:
    """The files that weights of a model stay in, and the ring through which they are read."""

    scratch: Scratch  # where the weights are that go to the disk

    def __init__(self, device: Device, counters: Counters) -> None:
        self._device = device
        self._counters = counters
        self._files: dict[str, SourceFile] = {}
        self._homes: list[SourceFiles | ScratchHome] = []
        self._ring: DirectRing | None = None

    def open(self, choice: Choice) -> None:
        """Open the files of the weights that stay there."""
        self._moved = choice.moved
        self.placed = choice.placed
        try:
            self._places = {key: Place(self._file(at), at.offset, at.nbytes) for key, at in choice.found.items()}
        except BaseException:
            self.close()
            raise

    @property
    def ring_nbytes(self) -> int:
        """Bytes of the buffers."""
        return 0 if self._ring is None else self._ring.nbytes

    def homes(self, unit: Unit) -> Sequence[FileHome]:
        """Return the files in which weights of a unit lie, none or one."""
        ids = [id(parameter) for _, parameter in unit.params]
        places = {index: self._places[key] for index, key in enumerate(ids) if key in self._places}
        moved = [index for index, key in enumerate(ids) if key in self._moved]
        homes: list[SourceFiles | ScratchHome] = []
        if moved:
            homes.append(ScratchHome(moved, self.scratch, self._device, unit.name, self._counters, self._made_ring))
        elif places:
            homes.append(SourceFiles(places, unit.name, self._counters, self._made_ring))
        self._homes += homes
        return homes

    def close(self) -> None:
        """End the reads and close the files. Parameters stay what they are: views of mappings of the files."""
        if self._ring is not None:
            self._ring.close()
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._homes.clear()
        self._ring = None

    def _file(self, found: Found) -> SourceFile:
        path = found.mapping.path
        if path not in self._files:
            self._files[path] = SourceFile(path)
        file = self._files[path]
        if file.nbytes < found.offset + found.nbytes or file.identity != found.mapping.file:
            raise SourceFileError(
                f"{path} is not the file that weights were loaded from any more: it was replaced or cut. Load the "
                "model again, and leave its files as they are while weights stay there (host_budget)"
            )
        return file

    def _made_ring(self) -> DirectRing:
        if self._ring is None:
            read = [home.largest_piece() for home in self._homes]
            self._ring = DirectRing(self._device, max(read, default=BLOCK))
        return self._ring


def usual_budget(units: Sequence[Unit]) -> int:
    """Return the bytes of host memory for a run whose budget is not given: what is free, less the system's share.

    Weights that are in memory already belong to the run.
    """
    memory, parameters = host_memory(), [parameter for unit in units for _, parameter in unit.params]
    filed = find(parameters)
    here = sum(p.nbytes for p in parameters if not p.is_meta and id(p) not in filed)
    return max(1, memory.free + here - headroom(memory.total))


def choose_files(
    units: Sequence[Unit],
    device: Device,
    budget: int,
    compute_dtype: torch.dtype | None,
    may_cast: bool,
    trains: bool,
    spills: bool,
    castable: Collection[int],
) -> Choice:
    """Choose what stays in files or goes to the disk, for a budget. Opens no file.

    Args:
        units: All units, the resident rest included; their weights are as they were loaded.
        device: The device that computes.
        budget: Bytes of host memory.
        compute_dtype: The type on the device of weights that are FP32 on the host, if it is another one.
        may_cast: Weights may come to travel in autocast's type.
        trains: What requires gradients may be trained.
        spills: The optimizer's state may be on disk.
        castable: The ids of weights that may come to travel in autocast's type.
    """
    check_available(budget)
    found = _found(units, device, trains)
    filed = {key: at.nbytes for key, at in found.items()}
    shared = _shared(units) if spills and device.is_host else set()
    placed = choose(units, filed, budget, compute_dtype, may_cast, trains, spills, castable, shared)
    if placed.host.total > budget > 0:
        raise HostMemoryError(_not_met(units, budget, placed, found, spills))
    if not placed.units and not placed.spilled:
        return Choice({}, placed, (), ())
    ids = {id(parameter) for index in placed.units for _, parameter in units[index].params}
    if placed.units:
        log.info(
            "superpipeline: %s of weights stay in their files, those of %d of %d units; with them %s of host memory",
            format_bytes(placed.in_files),
            len(placed.units),
            len(units),
            format_bytes(placed.host.total),
        )
    moved = {
        id(parameter)
        for index in placed.masters
        for parameter in may_move([parameter for _, parameter in units[index].params], compute_dtype, castable, shared)
    }
    return Choice({key: at for key, at in found.items() if key in ids}, placed, found.keys() - ids, moved)


def unchanged(module: nn.Module, state: Mapping[str, Any], budget: int | None) -> Mapping[str, Any]:
    """Return a module's state in which weights that the files have already are its own: loading writes none of them.

    A weight in a file that is written leaves it, for good, even by the same bytes.
    """
    check_available(budget)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    filed = find(parameters.values())
    own = {
        name: parameters[name]
        for name, value in state.items()
        if name in parameters and id(parameters[name]) in filed and _same_bytes(true_data(parameters[name]), value)
    }
    copied = copy.copy(state)  # with its attributes, such as torch's metadata
    copied.update(own)  # type: ignore[attr-defined]
    return copied


def _same_bytes(one: Tensor, other: Any) -> bool:
    if type(other) not in (Tensor, nn.Parameter) or other.layout is not torch.strided:
        return False
    if (one.dtype, one.shape, one.device) != (other.dtype, other.shape, other.device):
        return False
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(one.itemsize)
    return whole is not None and torch.equal(one.view(whole), other.view(whole))


def _found(units: Sequence[Unit], device: Device, trains: bool) -> dict[int, Found]:
    """Find the weights that may stay in files, by their ids."""
    parameters = [parameter for unit in units for _, parameter in unit.params]
    found = find(
        parameter
        for parameter in parameters
        if not (trains and parameter.requires_grad) and not (device.is_host and shares_storage(parameter))
    )
    mounts = {path: _mount_of(path) for path in {at.mapping.path for at in found.values()}}
    remote = {path for path, mount in mounts.items() if mount.is_remote}
    if remote:
        path = min(remote)
        log.warning(
            "superpipeline: weights of %s%s are copied into host memory: a change of a file on a network filesystem "
            "(%s) might not be seen. Copy the model to a local disk to leave them there",
            path,
            f" and {len(remote) - 1} more files" if len(remote) > 1 else "",
            mounts[path].kind,
        )
    return {key: at for key, at in found.items() if at.mapping.path not in remote}


def _shared(units: Sequence[Unit]) -> set[int]:
    """Find the weights to whose bytes other code may refer, by their ids (placement.py, Rule 5)."""
    parameters = [parameter for unit in units for _, parameter in unit.params]
    return sharing_bytes(parameters) | find_foreign(parameters)


def _mount_of(path: str) -> Mount:
    try:
        return mount_of(path)
    except OSError:
        return Mount("", 0)  # it is gone, which is an error once it is opened


def _not_met(units: Sequence[Unit], budget: int, placed: Budgeted, found: dict[int, Found], spills: bool) -> str:
    parameters = [parameter for unit in units for _, parameter in unit.params if id(parameter) not in found]
    trains = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
    others = sum(parameter.nbytes for parameter in parameters) - trains
    terms = ", ".join(f"{name} {format_bytes(n)}" for name, n in asdict(placed.host).items() if n)
    total = format_bytes(placed.host.total, up=True)  # to be copied
    spilled, spill = "", ""
    if spills:
        what = "optimizer state and FP32 weights" if placed.masters else "optimizer state"
        spilled = f" and {format_bytes(placed.on_disk)} of {what} on the disk"
    elif placed.host.optimizer:
        spill = "Give disk= a folder on a local SSD for the optimizer's state. "
    return (
        f"host_budget={format_bytes(budget)} cannot be met: with {format_bytes(placed.in_files)} of weights left in "
        f"their files{spilled} the run takes {total} of host memory ({terms}). {spill}"
        f"Of the weights in memory {format_bytes(trains)} require gradients (freeze what does not train: "
        f"requires_grad_(False)), and {format_bytes(others)} are in no file as they are (load them in the files' own "
        "type, from_pretrained(dtype='auto')). Raise the budget, or give '0B' for as little as can be had"
    )
