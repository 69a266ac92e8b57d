"""Figures of the models that a context streams: in the log of transformers' Trainer, and in words at the end.

Both only if they are asked for: recording costs host time for each unit and step, and no synchronisation.
"""

from __future__ import annotations

import contextlib
import struct
import sys
from collections.abc import Collection, Iterable

from ..errors import PeerError
from ..observe.report import RunReport, ranks_in_words
from ..ranks.board import Board, OneRank, Ranks
from ..runtime.handle import Handle

NUMBER = struct.Struct("d"), struct.Struct("q")  # the board has whole numbers
PREFIX = "superpipeline/"


def begin(handle: Handle) -> None:
    """Record what a handle does from now on."""
    handle.report = RunReport(handle)


def figures(handle: Handle | None) -> dict[str, float]:
    """Return means over the steps of a model since the last call; none if it does not train."""
    if handle is None or handle.report is None or handle.closed:
        return {}
    handle.report.update()
    return {PREFIX + name: value for name, value in handle.report.figures().items()}


def end(ranks: OneRank, handles: Iterable[Handle], shared: Collection[Handle], says: bool) -> None:
    """Say on the first rank what the models did; ``shared``: those that all ranks came to end together."""
    for handle in handles:
        if handle.report is None or handle.closed:
            continue
        handle.report.close()
        lines = handle.report.lines() if says else []
        if says and isinstance(ranks, Ranks) and handle in shared:
            lines += _of_all(ranks, handle.report)
        if says and ranks.rank == 0:
            for line in lines:
                sys.stderr.write(f"superpipeline: {type(handle.module).__name__}: {line}\n")


def _of_all(ranks: Ranks, report: RunReport) -> list[str]:
    """Describe what all ranks measured; nothing if one of them does not come."""
    double, whole = NUMBER
    with contextlib.suppress(PeerError):
        board = Board(ranks, 0)
        own = [board.exchange(whole.unpack(double.pack(number))[0]) for number in report.rank_figures()]
        return [ranks_in_words([[double.unpack(whole.pack(n))[0] for n in rank] for rank in zip(*own, strict=True)])]
    return []
