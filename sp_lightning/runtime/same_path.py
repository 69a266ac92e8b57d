"""The path of ranks that have shards of the same layers: they enter each of these together."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch

from ..errors import UnsupportedError
from ..ranks.board import Board, Ranks
from ..ranks.connection import connect


class SamePath:
    """The path of the ranks that have shards of the same layers: they enter each of these together, or not at all.

    Collectives inside a layer know nothing of which layer that is: where ranks took different paths they would mix up
    what belongs to two layers, or wait for one another for ever.
    """

    def __init__(self, meshes: Iterable[Any], device: torch.device, timeout: timedelta) -> None:
        groups = [mesh.get_group(axis) for mesh in meshes for axis in range(mesh.ndim)]
        self._ranks = [connect(group, device, timeout, nodes=None) for group in groups]
        self._boards = [(ranks, Board(ranks, 0)) for ranks in self._ranks if isinstance(ranks, Ranks)]
        self._marks: dict[str, int] = {}

    def enter(self, place: str) -> None:
        """Wait until the other ranks enter this layer too; raise UnsupportedError if one of them enters another."""
        mark = self._marks.get(place)
        if mark is None:
            mark = self._marks[place] = int.from_bytes(hashlib.sha256(place.encode()).digest()[:7], "big")
        for ranks, board in self._boards:
            if not board.alike(mark, place):
                self._raise(place, ranks, board.exchange(mark))

    def _raise(self, place: str, ranks: Ranks, marks: list[int]) -> None:
        names = {mark: name for name, mark in self._marks.items()}
        others = [
            f"{ranks.local(rank)} {names.get(mark, 'a layer where this rank has not been')}"
            for rank, mark in enumerate(marks)
            if mark != marks[ranks.rank]
        ]
        raise UnsupportedError(
            f"ranks that have shards of one layer took different paths: {ranks.name()} came to {place}, "
            f"{', '.join(others) or 'and one on another machine to something else'}. Let what they decide depend on "
            "what all of them have; ranks along the data axis may take different paths"
        )

    def fail(self, because_of_another: bool = False) -> None:
        """Tell the other ranks that this one cannot go on."""
        for ranks in self._ranks:
            ranks.fail(because_of_another)

    def close(self) -> None:
        """Leave the other ranks. Safe twice."""
        for ranks in self._ranks:
            ranks.close()
