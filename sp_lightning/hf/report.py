"""Figures of the models that a context streams: in the log of transformers' Trainer, and in words at the end.

Both only if they are asked for: recording costs host time for each unit and step, and no synchronisation.
"""

from __future__ import annotations

import contextlib
import struct
import sys
from collections.abc import Sequence

from ..errors import PeerError
from ..observe.run_report import RunReport, ranks_in_words
from ..ranks.board import Board, OneRank, Ranks
from ..runtime.handle import Handle

NUMBER = struct.Struct("d"), struct.Struct("q")  # the board has whole numbers
PREFIX = "superpipeline/"


class Reports:
    """The reports on models that train, by their handles."""

    def __init__(self) -> None:
        self._reports: dict[Handle, RunReport] = {}

    def begin(self, handle: Handle) -> None:
        """Record what a handle does from now on."""
        self._reports[handle] = RunReport(handle)

    def figures(self, handle: Handle | None) -> dict[str, float]:
        """Return means over the steps of a model since the last call; none if it does not train."""
        report = None if handle is None else self._reports.get(handle)
        if report is None or (handle is not None and handle.closed):
            return {}
        report.update()
        return {PREFIX + name: value for name, value in report.figures().items()}

    def end(self, ranks: OneRank, shared: Sequence[Handle], says: bool) -> None:
        """Say on the first rank what the models did; ``shared``: those that all ranks came to end together."""
        for handle, report in self._reports.items():
            if handle.closed:
                continue
            report.close()
            lines = report.report() if says else []
            if says and isinstance(ranks, Ranks) and handle in shared:
                lines += _of_all(ranks, report)
            if says and ranks.rank == 0:
                for line in lines:
                    sys.stderr.write(f"superpipeline: {type(handle.module).__name__}: {line}\n")
        self._reports.clear()


def _of_all(ranks: Ranks, report: RunReport) -> list[str]:
    """Describe what all ranks measured; nothing if one of them does not come."""
    double, whole = NUMBER
    with contextlib.suppress(PeerError):
        board = Board(ranks, 0)
        own = [board.exchange(whole.unpack(double.pack(number))[0]) for number in report.rank_figures()]
        return [ranks_in_words([[double.unpack(whole.pack(n))[0] for n in rank] for rank in zip(*own, strict=True)])]
    return []
