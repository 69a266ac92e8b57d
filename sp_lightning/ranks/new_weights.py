"""Optimizer state that is divided among nodes (``divide_state``), and the new weights that each sends the others.

1. Of the elements that it owns a rank steps its node's share (shares.py), and has optimizer state of that alone.
   Weights and gradients are whole on each node. An elementwise update has the same bits wherever it is made, so a run
   has those of one whose nodes each step everything. What is not cut on a node (sharded_step.py, Rule 3) all step.
2. State lies in the slabs of one node, and takes the memory of what was written there: of shares. In `optimizer.state`
   are tensors of the parameters' shapes, and each access to their bytes is an error that says what to do. So no code
   reads what is old or nowhere, and none writes what would be lost. State that is loaded is whole; each rank takes its
   share of it.
3. Once a rank has stepped its part of a unit, it sends the new weights to its rail: one message for each unit and step.
   All ranks know which parameters a step cuts, and so which units' weights come; nothing is sent of others.
4. A thread takes the messages in the order in which they come: nodes may step units in any order, and no rank waits
   before it has sent all of its own. It begins after the meeting at which a step begins (sharded_step.py, Rule 4), as
   ranks may read the old weights until then. Messages that come earlier stay in the inbox, or with their sender.
5. A rank posts a unit as stepped once its own part and all of its rail are in place. So whoever waits for the ranks of
   a node waits for the other nodes, too.
6. New weights are packed when it is their turn to be sent. They are still there: a step, and a settling of what users
   wrote, begins with a meeting of all ranks, to which each comes when it has all weights of the step before.
7. A rank that leaves waits until its last messages have been received: others may still need them.
8. A checkpoint has the whole state: the first rank of each node sends what is there to the first of all, one tensor
   after the other. It is still there when it is packed: the next step begins once the first of all has come from here.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import PeerError, SuperpipelineError, UnsupportedError
from ..memory.host_copy import HostCopy
from ..memory.layout import Field, Layout
from ..nodes.shares import flat, owned, share
from ..nodes.transport import PARTS, WEIGHTS, Key, Message, Unpacked, packed, same_for_all
from .board import Ranks

PAUSE_S = 2e-4  # between two looks for messages
SHARE = "superpipeline_share_of"  # the attribute by which a tensor in `optimizer.state` is known (Rule 2)
DIVIDED = (
    "the optimizer's state is divided among machines (divide_state=True), and none of them has the whole of it. "
    "Checkpoints of a Trainer and of Fabric have it, as long as the model is streamed, and so has "
    "handle.optimizer_state(optimizer), if every rank calls it"
)
Post = Callable[[HostCopy, int], None]


def share_of(tensor: Tensor) -> Any:
    """Return what a tensor in `optimizer.state` stands for; None for any that can be read (Rule 2)."""
    return vars(tensor).get(SHARE)


def check_readable(optimizer: Optimizer) -> None:
    """Raise UnsupportedError if an optimizer's state is divided: a run that has ended brings it together no more."""
    tensors = (value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))
    if any(map(share_of, tensors)):
        raise UnsupportedError(DIVIDED)


class OwnWeights:
    """The weights that a rank steps where each node steps all of its copy: what `NewWeights` overrides."""

    is_divided = False

    def __init__(self, ranks: Ranks, truths: Mapping[HostCopy, Tensor], post: Post) -> None:
        """``truths``: the units' weights; ``post`` says to the ranks of this node that a unit is stepped in a step."""
        self._ranks, self._truths, self._post = ranks, truths, post

    def part(self, field: Field, index: int) -> slice:
        """Return the elements of a unit's parameter that this rank steps."""
        return owned(field, self._ranks.rank, self._ranks.size)

    def begin(self, step: int, stepped: Mapping[HostCopy, Sequence[int]]) -> None:
        """Begin a step that cuts these parameters of units, by index. All ranks have met."""

    def send(self, store: HostCopy, step: int) -> None:
        """Post a unit of which this rank has stepped its part, once all that others step is there, too."""
        self._post(store, step)

    def late(self, store: HostCopy) -> list[int]:
        """List the ranks, by their numbers among all, whose part of a unit this rank lacks, having stepped its own."""
        return []

    def whole(self, state: Tensor, field: Field, index: int) -> Tensor | None:
        """Return a tensor of a slab of state as a whole on the first rank of all. Every rank comes here."""
        return Layout.own_view(state.untyped_storage(), field)

    def close(self) -> None:
        """End the thread. Safe twice."""


class _Coming:
    """A unit's new weights in a step, until all are in place."""

    def __init__(self, key: Key, indices: Sequence[int], nodes: Iterable[int]) -> None:
        self.key, self.indices = key, indices
        self.left = set(nodes)  # whose weights are missing
        self.sent: Message | None = None


class NewWeights(OwnWeights):
    """New weights of one model between nodes, each of which steps its shares (Rules 3 to 7)."""

    is_divided = True

    def __init__(self, ranks: Ranks, truths: Mapping[HostCopy, Tensor], post: Post) -> None:
        super().__init__(ranks, truths, post)
        assert ranks.transport is not None
        self._transport, self._nodes = ranks.transport, len(ranks.place.hosts)
        self._channel, self._gathered = ranks.number_board(), 0
        self._numbers = {store: number for number, store in enumerate(truths)}
        self._coming: dict[HostCopy, _Coming] = {}
        self._last: list[Message] = []  # that were sent since the step began
        self._lock = threading.Lock()  # around what the thread takes
        self._error: BaseException | None = None  # of the thread
        self._closed = False

    def part(self, field: Field, index: int) -> slice:
        return self._part(field, index, self._ranks.rank, self._ranks.place.node)

    def _part(self, field: Field, index: int, rank: int, node: int) -> slice:
        own = owned(field, rank, self._ranks.size)
        part = share(field, index, own.stop - own.start, node, self._nodes)
        return slice(own.start + part.start, own.start + part.stop)

    def _weights(self, store: HostCopy, index: int, node: int) -> Tensor:
        field = store.host_layout.fields[index]
        return flat(self._truths[store], field, self._part(field, index, self._ranks.rank, node))

    def begin(self, step: int, stepped: Mapping[HostCopy, Sequence[int]]) -> None:
        self._last = []
        peers = self._transport.peers
        self._coming = {
            store: _Coming((self._channel, step, self._numbers[store]), indices, peers)
            for store, indices in stepped.items()
        }
        if self._coming:
            given = step, self._coming
            threading.Thread(target=self._take, args=given, name="superpipeline-weights", daemon=True).start()

    def send(self, store: HostCopy, step: int) -> None:
        coming = self._coming.get(store)
        if coming is None:
            self._post(store, step)
            return
        parts = [self._weights(store, index, self._ranks.place.node) for index in coming.indices]
        coming.sent = self._transport.send(WEIGHTS, coming.key, same_for_all(functools.partial(packed, (), parts)))
        self._last.append(coming.sent)

    def _take(self, step: int, units: dict[HostCopy, _Coming]) -> None:
        """Put new weights of a step in their places, on the thread, until all are there (Rules 4 and 5)."""
        try:
            while units and units is self._coming and not self._closed:
                self._transport.forget(WEIGHTS, self._channel, step)  # of a step that failed
                for store, coming in list(units.items()):
                    with self._lock:
                        for node, message in self._transport.take(WEIGHTS, coming.key).items():
                            self._put(store, coming, node, message)
                    if coming.sent is not None and not coming.left:
                        self._post(store, step)
                        del units[store]
                time.sleep(PAUSE_S)
        except BaseException as error:
            self._error = error

    def _put(self, store: HostCopy, coming: _Coming, node: int, message: Tensor) -> None:
        came = Unpacked(message, 0)
        for index in coming.indices:
            weights = self._weights(store, index, node)
            weights.copy_(came.part(weights))
        coming.left.remove(node)

    def late(self, store: HostCopy) -> list[int]:
        if self._error is not None:
            raise SuperpipelineError(
                f"new weights of other machines were not taken over: {self._error}"
            ) from self._error
        with self._lock:  # the thread has no message that is neither in the inbox nor in its place
            coming = self._coming.get(store)
            if coming is None or coming.sent is None:
                return []
            missing = self._transport.missing(WEIGHTS, coming.key, sorted(coming.left))
            return missing or [self._ranks.world_rank]

    def whole(self, state: Tensor, field: Field, index: int) -> Tensor | None:
        ranks, node = self._ranks, self._ranks.place.node
        if ranks.rank:
            return None
        self._gathered += 1
        key = self._channel, 0, self._gathered  # no step has this number
        here = self._parts_of(node, state, field, index)
        if node:
            self._last.append(self._transport.send(PARTS, key, lambda nodes: {0: packed((), here)}))
            return None
        made = torch.empty(field.nbytes, dtype=torch.uint8, device="cpu")
        place = replace(field, offset=0)
        ranks.wait_for_nodes(lambda: self._transport.missing(PARTS, key), "optimizer state of other machines")
        for part, own in zip(self._parts_of(0, made, place, index), here, strict=True):
            part.copy_(own)
        for other, message in self._transport.take(PARTS, key).items():
            came = Unpacked(message, 0)
            for part in self._parts_of(other, made, place, index):
                part.copy_(came.part(part))
        return Layout.own_view(made.untyped_storage(), place)

    def _parts_of(self, node: int, memory: Tensor, field: Field, index: int) -> list[Tensor]:
        """Return what the ranks of a node have of a tensor that lies in this memory."""
        ranks = range(self._ranks.size)
        return [flat(memory, field, self._part(field, index, rank, node)) for rank in ranks]

    def close(self) -> None:
        if self._closed:
            return
        with contextlib.suppress(PeerError):
            self._ranks.wait_for_nodes(lambda: self._transport.unsent(self._last), "new weights of this one")
        self._closed = True
