"""Settling: writes of users through their faces become true for all ranks.

1. An edit that every rank makes, as under DDP, counts once. Each rank lists the pages that it wrote; the lists must be
   the same. The owner of each element copies it from its face to the truth. Then every rank compares what it wrote with
   the truth, and drops its own pages. Other pages, or other bytes, on one rank: ExactnessError that names a parameter.
   DDP would let the ranks drift apart. A page that has the bytes of the truth again counts as not written: one rank
   alone may try other weights for a while.
2. Until then a rank uploads what it wrote from its face (host_copy.py, Rule 8): it sees its own edit at once.
3. Units are settled where all ranks come anyway, at the exchange of gradients and around steps: never in a forward,
   which one rank may run alone.
4. A unit is looked at only if its stamp says that somebody may have written, or if it *lends* the place of a parameter
   that user code gave other data: who has its bytes there writes pages of the unit, unseen by its stamp.
5. Before a step the ranks also compare what else has to be alike for it, since each steps a part: what user code wrote
   to gradients and to the state, and the options of the optimizer. One number of each rank is compared; once it
   differs, they find out by which of these.
6. A weight in a file (the disk) has no face: a rank has the file's bytes, or what it wrote. A weight that user
   code gave other data (``p.data = ...``) is each rank's own. So what differs from the file, or from what the ranks
   share, is compared, too, once a stamp says that somebody may have written.
7. Nodes have equal copies of the weights, and each settles its own. So with several nodes all compare before that what
   they wrote as well, of which each node's ranks convince themselves as above.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import ExactnessError
from ..memory.host_copy import HostCopy
from ..memory.layout import in_order
from ..memory.watched_parameters import true_data
from ..memory.weights import same_bytes
from ..nodes.shares import flat, owned
from .board import Board, Ranks
from .shared_memory import SharedHome, SlabRange

WORD, WORDS = 8, 1 << 17  # bytes, and how many words a fingerprint takes at a time
FACTOR = 0x9E3779B97F4A7C15


class Alike(NamedTuple):
    """Something that has to be the same on all ranks when they settle (Rule 5)."""

    differs: str  # what an error says of all ranks
    mine: str  # and of this one
    digest: bytes


def fingerprint(flat: Tensor) -> int:
    """Return a number that is another one if any of these bytes is, or if two change places."""
    data = flat.view(torch.uint8)
    if data.data_ptr() % WORD or data.storage_offset() % WORD:
        data = data.clone()
    end = data.numel() // WORD * WORD
    found = int.from_bytes(bytes(data[end:].tolist()), "big")
    whole = data[:end].view(torch.int64)
    for words in (whole[start : start + WORDS] for start in range(0, end // WORD, WORDS)):
        found = (found * FACTOR + int((words * _factors()[: len(words)]).sum())) % (1 << 64)
    return found


@functools.cache
def _factors() -> Tensor:
    """Draw odd factors, one for each word of the bytes that are added up at a time."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(1 << 62), 1 << 62, (WORDS,), generator=generator, device="cpu") | 1


class Faces:
    """The weights of all units as this rank's user sees them."""

    def __init__(self, ranks: Ranks, board: Board, homes: Mapping[HostCopy, SharedHome]) -> None:
        self._ranks, self._board, self._homes = ranks, board, homes
        self.slabs = {store: home.slab for store, home in homes.items()}
        self._left: dict[str, bytes] = {}  # digests of weights that are not as their homes have them, by name

    def written(self) -> dict[HostCopy, list[SlabRange]]:
        """Find what this rank wrote since it was settled last (Rule 4)."""
        found = {}
        for store in self._homes:
            if self._may_differ(store):
                found[store] = self.slabs[store].changed()
                self._look_outside(store)
        return {store: pages for store, pages in found.items() if pages}

    def _look_outside(self, store: HostCopy) -> None:
        """Note which weights of a unit are not as their files, or the shared memory, have them (Rule 6)."""
        filed = {index for home in store.files for index in home.indices}
        found = {index: data for home in store.files for index, data in home.changed().items()}
        for index, (parameter, field) in enumerate(zip(store.params, store.host_layout.fields, strict=True)):
            self._left.pop(store.names[index], None)
            if index in filed or store.at_home(index):
                continue
            data, truth = true_data(parameter), flat(self.slabs[store].truth, field, slice(None))
            alike = (data.shape, data.dtype) == (field.shape, field.dtype)
            mine = in_order(data, field) if alike else data.contiguous().view(-1)
            if not (alike and same_bytes(mine, truth)):
                found[index] = mine.view(torch.uint8)
        for index, data in found.items():
            self._left[store.names[index]] = hashlib.sha256(data.numpy().data).digest()

    def _may_differ(self, store: HostCopy) -> bool:
        """Whether user code may have written to the face since it was last equal to the truth (Rule 4)."""
        store.wait_step()
        return store.stamp() != self._homes[store].settled or store.lends

    def copied(self, parameter: Tensor) -> Tensor:
        """Return a copy of a parameter that is in no unit but has its bytes in a face; itself if it has not."""
        data = true_data(parameter)
        faces = (slab.face for slab in self.slabs.values() if data.is_cpu)
        is_on_one = any(0 <= data.data_ptr() - face.data_ptr() < face.nbytes for face in faces)
        return data.clone(memory_format=torch.preserve_format) if is_on_one else parameter

    def is_written(self, store: HostCopy) -> bool:
        """Whether user code on this rank wrote to a unit since it was settled last, or may do so unseen."""
        if not self._may_differ(store):
            return False
        return store.is_shared() or store.lends or bool(self.slabs[store].changed())

    def settle(self, place: str, *others: Alike) -> None:
        """Make true what users wrote, once it and the others were compared. Every rank comes here (Rules 1 and 3).

        ``place`` says where that is: a rank that does something once more than another one comes to another place.
        """
        written = self.written()
        lists = repr([(index, written[store]) for index, store in enumerate(self._homes) if store in written])
        names = [name for store, pages in written.items() for name in _names(store, pages)]
        weights = Alike("wrote to different parameters", f"wrote {listed(names)}", lists.encode())
        wrote, digests = f"wrote {listed(list(self._left))}", repr(sorted(self._left.items())).encode()
        outside = Alike("wrote different values to weights that have other data or are in files", wrote, digests)
        here = Alike("came to different places", f"came to {place}", place.encode())
        self._compare([here, weights, outside, *self._bytes_between_nodes(written, names), *others])
        if not written:
            self.note_all_true()
            return
        for store, pages in written.items():
            shared = self.slabs[store]
            for index in store.host_layout.indices_in(pages):
                field = store.host_layout.fields[index]
                own = owned(field, self._ranks.rank, self._ranks.size)
                flat(shared.truth, field, own).copy_(flat(shared.face, field, own))
        self._board.meet()
        for store, pages in written.items():
            shared = self.slabs[store]
            for start, end in pages:
                if not same_bytes(shared.truth[start:end], shared.face[start:end]):
                    self._ranks.fail()  # another rank may find no difference, and waits for this one
                    raise ExactnessError(
                        f"the ranks wrote different values to {_names(store, [SlabRange(start, end)])[0]}, or to a "
                        "parameter beside it; edit parameters on every rank in the same way, as under DDP"
                    )
        self._board.meet()  # a rank that found a difference ends here, before the others give up their bytes
        for store, pages in written.items():
            self.slabs[store].drop(pages)
        self.note_all_true()

    def _bytes_between_nodes(self, written: Mapping[HostCopy, list[SlabRange]], names: Sequence[str]) -> list[Alike]:
        """Describe the bytes that this rank wrote, where other nodes settle them by themselves (Rule 7)."""
        if self._ranks.transport is None:
            return []
        digest = hashlib.sha256()
        for store, pages in written.items():
            for start, end in pages:
                digest.update(self.slabs[store].face[start:end].numpy().data)
        return [Alike("wrote different values to parameters", f"wrote {listed(names)}", digest.digest())]

    def _compare(self, all_of_them: Sequence[Alike]) -> None:
        """Raise ExactnessError unless the ranks are alike in all of these (Rule 5)."""
        if self._are_alike(b"".join(alike.digest for alike in all_of_them)):
            return
        for alike in all_of_them:
            if not self._are_alike(alike.digest):
                raise ExactnessError(
                    f"the ranks {alike.differs} since they were last equal; {self._ranks.name()} {alike.mine}. Do "
                    "the same on every rank, as under DDP"
                )

    def _are_alike(self, digest: bytes) -> bool:
        mark = int.from_bytes(hashlib.sha256(digest).digest()[:7], "big")
        return self._board.alike(mark)

    def note_all_true(self) -> None:
        """Note that all faces are equal to the truth."""
        for store in self._homes:
            self.note_true(store)

    def note_true(self, store: HostCopy) -> None:
        """Note that a unit's face is equal to the truth."""
        self._homes[store].settled = store.stamp()

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Note after this context, which moves epochs but writes no weight, that faces are as true as before it.

        Who waits for a deferred step notes this of its units.
        """
        true = [store for store in self._homes if not store.has_step and not self._may_differ(store)]
        yield
        for store in true:
            self._homes[store].settled = store.stamp()


def listed(names: Sequence[str]) -> str:
    """List names in an error: the first one."""
    return f"{names[0]} and {len(names) - 1} others" if names else "none"


def _names(store: HostCopy, pages: list[SlabRange]) -> list[str]:
    return [store.names[index] for index in store.host_layout.indices_in(pages)]
