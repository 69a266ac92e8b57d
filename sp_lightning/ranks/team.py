"""The ranks of a machine around one model: its weights, gradients and optimizers, each owned in parts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ..errors import UnsupportedError
from ..memory.access import Access
from ..memory.device import Device
from ..memory.host_copy import HostCopy
from ..memory.partition import Unit
from ..memory.watched_parameters import true_data
from ..optim.pieces import Group
from .board import Board, Ranks
from .clipping import Clipping
from .exchange import Exchange
from .sharded_step import Owners
from .shared_memory import SharedHome
from .user_edits import Faces


class Team:
    """All ranks of a machine, which stream one host copy of a model."""

    def __init__(self, ranks: Ranks, device: Device, homes: Mapping[HostCopy, SharedHome], access: Access) -> None:
        stores = list(homes)
        self.ranks = ranks
        # The first rank shares the exchange's memory once its weights are in place, for which the others wait there.
        self.exchange = Exchange(ranks, device, stores)
        self.faces = Faces(ranks, self.exchange.board, homes)
        self.clipping = Clipping(ranks, self.exchange, stores, access)
        self.owners = Owners(ranks, self.exchange.board, self.faces, self.clipping, stores)
        self.faces.are_true()

    def exchange_gradients(self) -> None:
        """Exchange the gradients of the backward that ended, and settle what users wrote. Every rank comes here."""
        self.exchange.end_backward()
        self.faces.settle()
        self.exchange.finish()

    def pieces(self, optimizer: Optimizer) -> tuple[list[Group], Any]:
        """Return the groups and the state with which this rank steps what it owns. Every rank comes here."""
        return self.owners.pieces(optimizer, self.exchange.gradients_of(optimizer, self.clipping.clipped))

    def exchange_if_any(self) -> None:
        """Exchange the gradients of the backward that ended, if it made any: `torch.autograd.grad` makes none."""
        if self.exchange.has_any:
            self.exchange_gradients()
        else:
            self.exchange.cancel()

    def close(self) -> None:
        """Leave weights, gradients and state to their users."""
        self.clipping.close()
        self.exchange.close()
        self.owners.close()


def shared_home(ranks: Ranks, device: Device, made: list[SharedHome], nbytes: int) -> SharedHome:
    """Make a slab that all ranks share, page-locked for this rank's device, and add it to those that were made."""
    slab = ranks.share(nbytes)
    slab.lock(device)
    made.append(SharedHome(slab))
    return made[-1]


def check_alike(ranks: Ranks, units: Sequence[Unit]) -> None:
    """Raise UnsupportedError unless all ranks have the same parameters in the same units, before these are shared."""
    lines = [_described(unit.name, name, parameter) for unit in units for name, parameter in unit.params]
    board = Board(ranks, 0)
    if not _unlike(board, "\n".join(lines), ranks.rank):
        return
    for line in lines[: min(board.exchange(len(lines)))]:
        if others := _unlike(board, line, ranks.rank):
            raise UnsupportedError(
                f"the ranks' models differ: rank {ranks.rank} has {line}, and rank {others[0]} has something else in "
                "its place; make the same model on every rank"
            )
    raise UnsupportedError(
        f"the ranks' models differ: rank {ranks.rank} has {len(lines)} parameters, and another one has more or less; "
        "make the same model on every rank"
    )


def _described(unit: str, name: str, parameter: torch.Tensor) -> str:
    data = true_data(parameter)
    trains = "" if parameter.requires_grad else ", frozen"
    return f"{name} ({data.dtype}, {tuple(data.shape)}, strides {data.stride()}{trains}; unit {unit})"


def _unlike(board: Board, text: str, rank: int) -> list[int]:
    """List the ranks that have another text than this one."""
    marks = board.exchange(int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big"))
    return [other for other, mark in enumerate(marks) if mark != marks[rank]]
