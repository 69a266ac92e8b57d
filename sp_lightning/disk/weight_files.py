"""The files that weights of a model stay in, and the ring that reads them."""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..core.telemetry import Counters
from ..errors import SourceFileError
from ..memory.device import Device
from ..memory.host_copy import FileHome
from ..memory.partition import Unit
from .direct_file import BLOCK, Mount, mount_of
from .direct_ring import DirectRing
from .homes import Scratch, ScratchHome, SourceFiles
from .source_files import LEFT, Found, Place, SourceFile, check_available, find

log = logging.getLogger(__name__)
State = TypeVar("State", bound=Mapping[str, Any])


class WeightFiles:
    """The files that weights of a model stay in, and the ring through which they are read."""

    scratch: Scratch  # where the weights are that go to the disk

    def __init__(self, device: Device, counters: Counters) -> None:
        self._device = device
        self._counters = counters
        self._files: dict[tuple[object, object], SourceFile] = {}
        self._homes: list[SourceFiles | ScratchHome] = []
        self._ring: DirectRing | None = None

    def open(self, found: Mapping[int, Found], moved: Collection[int], wired: Collection[int] = ()) -> None:
        """Open the files of the weights that stay there, by their ids. Those with ids in ``moved`` go to the disk.

        What travels of those with ids in ``wired`` is there as well.
        """
        self._moved, self._wired = moved, wired
        self._places = {key: Place(self._file(at), at.offset, at.nbytes) for key, at in found.items()}

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
            wired = {index for index in moved if ids[index] in self._wired}
            homes.append(
                ScratchHome(moved, wired, self.scratch, self._device, unit.name, self._counters, self._made_ring)
            )
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
        at, left = found.mapping, LEFT.get(found.mapping.begin)
        key = at.file, left and left.state  # of one that was written since a model was loaded from it there are two
        if key not in self._files:
            self._files[key] = SourceFile(at.path, left)
        file = self._files[key]
        if file.nbytes < found.offset + found.nbytes or file.identity != at.file:
            raise SourceFileError(
                f"{at.path} is not the file that weights were loaded from any more: it was replaced or cut. Load the "
                "model again, and leave its files as they are while weights stay there (host_budget)"
            )
        return file

    def _made_ring(self) -> DirectRing:
        if self._ring is None:
            read = [home.largest_piece() for home in self._homes]
            self._ring = DirectRing(self._device, max(read, default=BLOCK))
        return self._ring


def find_local(parameters: Iterable[Tensor]) -> dict[int, Found]:
    """Find where in files weights are, by their ids, and log which files on network filesystems do not count."""
    found = find(parameters)
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


def unchanged(module: nn.Module, state: State, budget: int | None) -> State:
    """Return a module's state in which weights that the files have already are its own: loading writes none of them.

    A weight in a file that is written leaves it, for good, even by the same bytes.
    """
    check_available(budget)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    filed = find(parameters.values())
    loaded = {
        name: value
        for name, value in state.items()
        if type(value) in (Tensor, nn.Parameter) and name in parameters and id(parameters[name]) in filed
    }
    read = {name: parameters[name].detach() for name in loaded}  # waits for whatever writes it: it may have left
    stay = find(read.values())
    own = {name: parameters[name] for name, one in read.items() if id(one) in stay and _same_bytes(one, loaded[name])}
    copied = copy.copy(state)  # with its attributes, such as torch's metadata
    copied.update(own)  # type: ignore[attr-defined]
    return copied


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    if other.layout is not torch.strided:
        return False
    if (one.dtype, one.shape, one.device) != (other.dtype, other.shape, other.device):
        return False
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(one.itemsize)
    return whole is not None and torch.equal(one.view(whole), other.view(whole))


def _mount_of(path: str) -> Mount:
    try:
        return mount_of(path)
    except OSError:
        return Mount("", 0)  # it is gone, which is an error once it is opened
