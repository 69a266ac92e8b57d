"""How weights are cut among the ranks of a machine."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

VECTOR = 64  # elements: a kernel rounds a whole vector in another way than the rest


class Cut(NamedTuple):
    """A weight's elements, in the order of memory, cut into a part for each rank."""

    numel: int
    size: int  # of a part; the last ones may be shorter, or empty

    @classmethod
    def of(cls, numel: int, ranks: int) -> Cut:
        return cls(numel, -(-numel // (VECTOR * ranks)) * VECTOR)

    def part(self, rank: int) -> tuple[int, int]:
        """Return the first element of a rank's part, and the one after the last."""
        return min(rank * self.size, self.numel), min((rank + 1) * self.size, self.numel)

    def part_of(self, tensor: Tensor, rank: int) -> Tensor:
        """Return a rank's part of a tensor without gaps."""
        start, stop = self.part(rank)
        return tensor.as_strided((stop - start,), (1,), tensor.storage_offset() + start)
