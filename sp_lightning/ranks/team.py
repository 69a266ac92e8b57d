"""The ranks around one model: its weights, gradients and optimizers, each owned in parts by the ranks of a node."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..compat.references import sharing_bytes
from ..compat.tensors import graph_task
from ..errors import ExactnessError, PeerError, UnsupportedError
from ..gradients.way_down import GradientReturn
from ..memory.access import Access
from ..memory.device import Device
from ..memory.host_copy import HostCopy
from ..memory.watched_parameters import quietly, true_data
from ..nodes.transport import PARTS, same_for_all
from ..optim.pieces import Group
from ..optim.state_in_memory import StateInMemory
from ..steps import torn_step
from ..stream.partition import Unit
from .alone import Alone, Rest
from .board import Board, Ranks
from .clipping import Clipping
from .exchange import Exchange, host_sharing
from .sharded_step import Owners
from .shared_memory import SharedHome
from .user_edits import Faces, fingerprint


class Team(Alone):
    """All ranks of a machine, which stream one host copy of a model; those of other machines stream equal ones."""

    ranks: Ranks

    def __init__(self, ranks: Ranks, device: Device, own_gradients: bool, divides_state: bool) -> None:
        """``own_gradients``: whether each rank certainly has gradients of its own."""
        super().__init__(device)
        nodes = ranks.world // ranks.size
        self._divides = divides_state and nodes > 1
        self.sharing = host_sharing(ranks.size, nodes, own_gradients, self._divides)
        self.ranks = ranks
        self.rank, self.size = ranks.world_rank, ranks.world
        self.gives_weights = ranks.rank == 0
        self._made: list[SharedHome] = []  # for the units, in order
        self._used: list[Tensor] = []  # parameters of the units before whose gradients are to be exchanged yet
        self._ended: Optimizer | None = None  # whose step has ended on all ranks, but for hooks of the user's

    def check_alike(self, units: Sequence[Unit]) -> None:
        lines = [_described(unit.name, name, parameter) for unit in units for name, parameter in unit.params]
        lines += [f"{whole.name} ({whole.shard_name()})" for unit in units for whole in unit.wholes]
        board, rank = Board(self.ranks, 0), self.ranks.rank
        if board.alike(_mark("\n".join(lines))):
            return
        for line in lines[: min(board.exchange(len(lines)))]:
            if others := _unlike(board, line, rank):
                raise UnsupportedError(
                    f"the ranks' models differ: {self.ranks.name()} has {line}, and {self.ranks.local(others[0])} has "
                    "something else in its place; make the same model on every rank"
                )
        if not _unlike(board, "\n".join(lines), rank):
            raise UnsupportedError(
                f"the models of the machines differ: {self.ranks.name()} has {len(lines)} parameters, the first of "
                f"them {''.join(lines[:1])}, and those of another machine are others; make the same model on every rank"
            )
        raise UnsupportedError(
            f"the ranks' models differ: {self.ranks.name()} has {len(lines)} parameters, and another one has more or "
            "less; make the same model on every rank"
        )

    def least(self, number: int) -> int:
        return Board(self.ranks, 0).least(number)

    def same_on_all(self, marks: Sequence[object], tensors: Sequence[Tensor]) -> Sequence[bool]:
        board, is_first = Board(self.ranks, 0), self.ranks.rank == 0
        here = _same(marks, lambda mark: len(set(board.exchange(mark))) == 1)
        if self.ranks.transport is None:
            return here
        read = [is_first and same and mark is not None for same, mark in zip(here, marks, strict=True)]
        of_node = [_fingerprint(tensor) if reads else None for reads, tensor in zip(read, tensors, strict=True)]
        everywhere = _same(of_node, lambda mark: board.alike(board.exchange(mark)[0]))
        return [*map(operator.and_, here, everywhere)]

    def find_sharing(self, parameters: Sequence[Tensor], again: bool) -> Callable[[Tensor], bool]:
        self._made = []
        sharing = sharing_bytes(parameters)
        return lambda parameter: self._device.is_host and id(parameter) in sharing

    def slab(self, nbytes: int) -> SharedHome:
        slab = self.ranks.share(nbytes)
        slab.lock(self._device)
        self._made.append(SharedHome(slab))
        return self._made[-1]

    def begin(
        self,
        stores: Sequence[HostCopy],
        access: Access,
        gradients: GradientReturn,
        overlaps: bool,
        state: StateInMemory,
    ) -> None:
        self._gradients, self._access = gradients, access
        homes = dict(zip(stores, self._made, strict=True))
        _give_weights(self.ranks, self._made)
        # The first rank shares the exchange's memory once its weights are in place, for which the others wait there.
        self.exchange = gradients.exchange = Exchange(self.ranks, self._device, stores)
        used, self._used = self._used, []
        self.exchange.reached(used)
        self.exchange.overlaps, self.exchange.kept = overlaps, gradients.kept
        self.faces = Faces(self.ranks, self.exchange.board, homes)
        self.clipping = Clipping(self.ranks, self.exchange, stores, access)
        self.owners = Owners(self.ranks, self.exchange, self.faces, self.clipping, stores, state, self._divides)
        self.exchange.steps = self.owners
        self.faces.note_all_true()
        filed = {store: store.host_layout.elsewhere for store in stores if store.host_layout.elsewhere}
        self.filed = {store: [i for i in there if not store.params[i].requires_grad] for store, there in filed.items()}
        _teams.add(self)

    def close(self) -> None:
        _teams.discard(self)
        self._used = self.exchange.used
        self.clipping.close()
        self.exchange.close()
        self.owners.close()

    def leave(self) -> None:
        self.ranks.close()

    # ---- one step

    def note_forward(self, ended: bool) -> None:
        self.exchange.note_forward(ended)

    def backward_begins(self) -> None:
        self.clipping.show()
        if self.exchanges:
            self.exchange.begin(graph_task())
        elif self.exchange not in self._access.gradients:
            self.exchange.abandon()  # one that failed: this one's gradients are not exchanged

    def backward_ends(self) -> None:
        if self.exchange in self._access.gradients:  # behind this backward
            return
        if self.exchange.has_any:
            self._exchange_gradients()
        elif self.exchange.active:  # `torch.autograd.grad` makes none
            self.exchange.cancel()
        elif self.exchanges and self.exchange.used:  # a hook ran several: the first in `no_sync`, not the last
            self.exchange.begin(graph_task())
            self._exchange_gradients()

    def interrupt(self) -> None:
        self.exchange.abandon()

    @property
    def is_to_exchange(self) -> bool:
        return self.exchange in self._access.gradients and self.exchange.has_any

    @contextlib.contextmanager
    def exchanging(self, loss: Tensor) -> Iterator[None]:
        self.clipping.show()
        self.exchange.begin(None)
        self._access.gradients.add(self.exchange)  # which is to come when the backward has ended
        try:
            if loss.requires_grad:  # autograd calls its hook first, and in the outermost backward
                hook = loss.register_hook(lambda _: self.exchange.runs_as(graph_task()))  # type: ignore[no-untyped-call]
                yield
                hook.remove()
            else:
                yield
        finally:
            self._access.gradients.discard(self.exchange)
        with quietly():
            self._exchange_gradients()

    def _exchange_gradients(self) -> None:
        """Exchange the gradients of the backward that ended, and settle what users wrote. Every rank comes here."""
        self.exchange.end_backward()
        try:
            self.faces.settle("an exchange of gradients", self.exchange.number())
        except BaseException:
            self.exchange.abandon()
            raise
        try:
            self.exchange.finish()
        except BaseException as error:  # the others may have come to meetings in which this rank counts
            self.fail(error)
            raise
        self._gradients.marks.clear()  # of gradients that came before the mean
        self.clipping.forget()
        self.owners.all_summed()

    def show_gradients(self) -> None:
        self.clipping.show()

    def settle(self) -> None:
        self.faces.settle("a load of weights")

    # ---- an optimizer's step

    def check_divisible(self, optimizer: Optimizer) -> None:
        self.owners.check_divisible(optimizer)

    def check_optimizer(self, optimizer: Optimizer) -> None:
        self.check_divisible(optimizer)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if any(team is not self and team.owners.stores_of(parameters) for team in _teams):
            raise UnsupportedError(
                "on several devices an optimizer cannot step modules that were set up one by one: set up a module that "
                "has both (nn.ModuleList([first, second])), or make an optimizer for each"
            )

    def rest(self, optimizer: Optimizer, alone: Rest) -> tuple[list[Group], Any]:
        with self.tearing(), quietly():  # others may have stepped their parts: no read may compare that with views
            parts = self.owners.begin(optimizer, self.exchange.gradients_of(optimizer, self.clipping.clipped))
            return self.owners.pieces(*alone(optimizer, self.exchange.shared_means, parts))

    def step_ended(self, optimizer: Optimizer) -> None:
        with self.tearing(), quietly():
            self.owners.end(optimizer)
        self._ended = optimizer

    @contextlib.contextmanager
    def ending(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> Iterator[None]:
        if not parameters:
            yield
            return
        if self._ended is not optimizer:
            for store in self.owners.stores_of(parameters):
                store.wrote()  # by code that may have written where no version counter shows it
            self.owners.end(optimizer)
        self._ended = None
        with self.faces.unchanged():  # hooks of the user's may have written since the step ended
            yield

    def adopt_state(self, optimizer: Optimizer) -> None:
        self.owners.adopt_all(optimizer)

    def whole_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return self.owners.whole_state(optimizer)

    # ---- errors

    def check_between_steps(self) -> None:
        if self.owners.is_stepping:
            raise ExactnessError(
                "a checkpoint was asked for in the middle of a step, from a signal handler or another thread, when "
                "other ranks may have stepped parts of it: it would be of two steps. Save between steps"
            )

    @contextlib.contextmanager
    def tearing(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._mark_torn(error)
            raise

    def fail(self, error: BaseException) -> None:
        self._mark_torn(error)
        self.ranks.fail(isinstance(error, PeerError))

    def _mark_torn(self, error: BaseException) -> None:
        if (optimizer := self.owners.take_torn()) is not None:
            torn_step.tear(optimizer, "some", error)


_teams: weakref.WeakSet[Team] = weakref.WeakSet()  # that have begun


def _give_weights(ranks: Ranks, homes: Iterable[SharedHome]) -> None:
    """Give all nodes the first rank's weights: each node's first rank has them before it shares further memory."""
    transport = ranks.transport
    if transport is None:
        return
    channel = ranks.number_board()
    if ranks.rank == 0:
        for index, home in enumerate(homes):
            key = channel, 0, index
            if ranks.place.node == 0:
                transport.send(PARTS, key, same_for_all(home.truth.detach))
            else:
                ranks.wait_for_nodes(functools.partial(transport.missing, PARTS, key, [0]), "the first rank's weights")
                home.truth.copy_(transport.take(PARTS, key)[0])


def _described(unit: str, name: str, parameter: torch.Tensor) -> str:
    data = true_data(parameter)
    trains = "" if parameter.requires_grad else ", frozen"
    return f"{name} ({data.dtype}, {tuple(data.shape)}, strides {data.stride()}{trains}; unit {unit})"


def _mark(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def _fingerprint(tensor: Tensor) -> int:
    return fingerprint(true_data(tensor).contiguous().view(-1))


def _same(marks: Sequence[object], alike: Callable[[int], bool]) -> list[bool]:
    """Return which of these are alike on all ranks, which have as many."""
    if alike(_mark(repr(marks))):
        return [True] * len(marks)
    return [alike(_mark(repr(mark))) for mark in marks]


def _unlike(board: Board, text: str, rank: int) -> list[int]:
    """List the ranks that have another text than this one."""
    marks = board.exchange(_mark(text))
    return [other for other, mark in enumerate(marks) if mark != marks[rank]]
