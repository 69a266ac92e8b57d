"""A rank's box: memory in which its gradients lie while the other ranks read them.

1. A box is a file of which only what was written takes memory (shared_memory.py, Rule 1). It has room for several times
   the gradients, because they are laid out again when they change their types.
2. It is taken in regions, each mapped and page-locked by itself. A region is given back when all owners have summed
   what lies there, and taken again for gradients of about its size.
3. A region that nobody took for `IDLE` exchanges is given up: its memory goes back to the system.
"""

from __future__ import annotations

import mmap
import os

from torch import Tensor

from ..errors import UnsupportedError
from ..memory.device import Device
from ..memory.pinned import mapped
from .board import Ranks
from .shared_memory import drop_pages, lock_in, paged

IDLE = 1  # exchanges after which a region that nobody needs is given up (Rule 3)


class Box:
    """The boxes of all ranks: this one's, from which it takes regions, and the others', which it reads."""

    def __init__(self, ranks: Ranks, device: Device, nbytes: int) -> None:
        self._device = device
        self._nbytes = paged(nbytes)
        self.of: list[Tensor] = []
        for rank in range(ranks.size):
            descriptor = ranks.descriptor(self._nbytes)
            self.of.append(mapped(descriptor, self._nbytes, mmap.MAP_SHARED)[0])
            if rank == ranks.rank:
                self._descriptor = descriptor
            else:
                os.close(descriptor)
        self._end = 0
        self._holes: list[tuple[int, int]] = []  # bytes of regions that were given up
        self._starts: dict[int, int] = {}  # of regions, by their address here
        self._free: list[Tensor] = []
        self._idle: dict[int, int] = {}  # for how many exchanges nobody took a region, by its address

    def region(self, nbytes: int) -> Tensor:
        """Take memory of this rank's box, page-locked for its device: free memory, if there is any of about this size.

        It never waits: the box grows.
        """
        nbytes = max(nbytes, 1)  # no memory cannot be mapped
        region = self.free_for(nbytes)
        if region is None:
            return self._grow(paged(nbytes))
        self._free = [other for other in self._free if other is not region]
        self._idle[region.data_ptr()] = 0
        return region

    def free_for(self, nbytes: int) -> Tensor | None:
        """Return the free region that would be taken: always the first one, so that the others may be given up."""
        fitting = [region for region in self._free if paged(nbytes) <= region.numel() <= 2 * paged(nbytes)]
        return min(fitting, key=lambda region: (region.numel(), self._starts[region.data_ptr()]), default=None)

    def _grow(self, nbytes: int) -> Tensor:
        start = next((start for start, room in self._holes if room >= nbytes), self._end)
        if start + nbytes > self._nbytes:
            raise UnsupportedError("the gradients of this model change their types too often for several devices")
        region, before = mapped(self._descriptor, nbytes, mmap.MAP_SHARED, start)
        lock_in(self._device, region, before)
        self._starts[region.data_ptr()] = start
        self._idle[region.data_ptr()] = 0
        if start == self._end:
            self._end += nbytes
        else:
            self._holes = [
                (at + nbytes, room - nbytes) if at == start else (at, room)
                for at, room in self._holes
                if at != start or room > nbytes
            ]
        return region

    def give_back(self, region: Tensor) -> None:
        """Let a region be taken again."""
        self._free.append(region)

    def trim(self) -> list[Tensor]:
        """Give up the regions that nobody took for `IDLE` exchanges; return them, for their last references."""
        left: list[Tensor] = []
        for region in self._free:
            address = region.data_ptr()
            self._idle[address] += 1
            if self._idle[address] > IDLE:
                start = self._starts.pop(address)
                del self._idle[address]
                drop_pages(self._descriptor, start, region.numel())
                self._holes.append((start, region.numel()))
                left.append(region)
        self._free = [region for region in self._free if region.data_ptr() in self._starts]
        return left

    def place(self, region: Tensor, tensor: Tensor) -> int | None:
        """Return where in the box a tensor begins; None if it is not in this region, or that is not of the box."""
        start = self._starts.get(region.data_ptr())
        offset = tensor.data_ptr() - region.data_ptr()
        return start + offset if start is not None and 0 <= offset < region.numel() else None

    def close(self) -> None:
        """Give up all memory that nothing else refers to. Safe twice."""
        if self.of:
            os.close(self._descriptor)
        self.of.clear()
        self._free.clear()
