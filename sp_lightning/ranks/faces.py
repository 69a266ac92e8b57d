"""What users wrote through their faces, made true for all ranks: settling.

1. An edit that every rank makes, as under DDP, counts once. Each rank lists the pages that it wrote; the lists must be
   the same. The owner of each element copies it from its face to the truth. Then every rank compares what it wrote with
   the truth, and drops its own pages. Other pages, or other bytes, on one rank: ExactnessError that names a parameter.
   DDP would let the ranks drift apart.
2. Until then a rank uploads what it wrote from its face (unit_store.py): its own edit is seen by itself at once.
3. Units are settled where all ranks come anyway, at the exchange of gradients and around steps: never in a forward,
   which one rank may run alone.
4. A unit is looked at only if its stamp says that somebody may have written.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch

from ..errors import ExactnessError
from ..memory.layout import Field
from ..memory.unit_store import UnitStore
from ..memory.weights import same_bytes
from .board import Board, Ranks
from .shared_memory import Range, SharedSlab

LINE = 256  # elements: ranges of owners begin at a multiple


def owned(field: Field, rank: int, size: int) -> slice:
    """Return the elements of a tensor, in the order of memory, that a rank owns.

    Half precision is owned as a whole, by the first rank: ends of vectorized loops have other bits there.
    """
    numel = field.nbytes // field.dtype.itemsize
    share = math.ceil(math.ceil(numel / size) / LINE) * LINE if field.dtype.itemsize >= 4 else numel
    return slice(min(rank * share, numel), min((rank + 1) * share, numel))


def flat(memory: torch.Tensor, field: Field, part: slice) -> torch.Tensor:
    """Make a flat tensor over some elements of a field in a slab."""
    elements = memory[field.offset : field.offset + field.nbytes].view(field.dtype)
    return elements[part]


class Faces:
    """The weights of all units as this rank's user sees them."""

    def __init__(self, ranks: Ranks, board: Board, stores: Sequence[UnitStore]) -> None:
        self._ranks, self._board, self._stores = ranks, board, stores

    def written(self) -> dict[UnitStore, list[Range]]:
        """Find what this rank wrote since it was settled last (Rule 4)."""
        found = {store: store.shared.private() for store in self._stores if store.may_differ()}
        return {store: pages for store, pages in found.items() if pages}

    def settle(self, also: bytes = b"") -> None:
        """Make true what users wrote. Every rank comes here (Rules 1 and 3), with what else is to be equal."""
        written = self.written()
        lists = repr([(index, written[store]) for index, store in enumerate(self._stores) if store in written])
        mark = int.from_bytes(hashlib.sha256(lists.encode() + also).digest()[:7], "big")
        marks = self._board.exchange(mark)
        if any(other != mark for other in marks):
            names = [name for store, pages in written.items() for name in _names(store, pages)]
            what = f"wrote {names[0]} and {len(names) - 1} others" if names else "wrote no parameter"
            raise ExactnessError(
                "the ranks wrote to different parameters or other optimizer state, or clipped gradients differently, "
                f"since they were last equal; rank {self._ranks.rank} {what}. Do so on every rank in the same way, as "
                "under DDP"
            )
        if not written:
            self.are_true()
            return
        for store, pages in written.items():
            shared: SharedSlab = store.shared
            for index in store.indices_in(pages):
                field = store.host_layout.fields[index]
                own = owned(field, self._ranks.rank, self._ranks.size)
                flat(shared.truth, field, own).copy_(flat(shared.face, field, own))
        self._board.meet()
        for store, pages in written.items():
            for start, end in pages:
                if not same_bytes(store.shared.truth[start:end], store.shared.face[start:end]):
                    raise ExactnessError(
                        f"the ranks wrote different values to {_names(store, [Range(start, end)])[0]}, or to a "
                        "parameter beside it; edit parameters on every rank in the same way, as under DDP"
                    )
        self._board.meet()  # a rank that found a difference ends here, before the others give up their bytes
        for store, pages in written.items():
            store.shared.drop(pages)
        self.are_true()

    def are_true(self) -> None:
        """Note that all faces are equal to the truth."""
        for store in self._stores:
            store.is_true()


def _names(store: UnitStore, pages: list[Range]) -> list[str]:
    return [store.names[index] for index in store.indices_in(pages)]
