"""Numbers that each rank of a machine raises and the others read, and the thread that waits for them.

A number counts the weights of a unit for which a stage is over: a rank raises its own, in memory that all ranks map.
A wait for a stage ends when every rank's number is as high as this rank's own. So ranks may come to the units in
different orders, and at different times.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

from torch import Tensor

from .watch import Watch

SHORTEST, LONGEST = 5e-5, 1e-3  # seconds between two looks at the numbers


class Stage(enum.IntEnum):
    """The stages of a unit's weights that ranks tell each other."""

    ARRIVED = 0  # this rank's gradients are on the host
    READY = 1  # nothing of this rank reads what a step will write
    WHOLE = 2  # this rank has stepped whole weights, in its own face of the slabs
    STEPPED = 3  # this rank's parts are stepped


class Item(NamedTuple):
    """A wait for all ranks' numbers in a column to reach a target."""

    column: int
    target: int
    place: str
    reached: Future[None]


class Board:
    """The numbers of all ranks of a machine, and the thread that waits for them."""

    def __init__(self, numbers: Tensor, rank: int, watch: Watch) -> None:
        """Start the thread over shared numbers, which have a row for each rank."""
        self._numbers, self._rank, self._watch = numbers, rank, watch
        self._begun: list[tuple[Callable[[], Any], Item]] = []
        self._change, self._is_closed = threading.Condition(), False
        self._counts: dict[int, int] = {}
        self._thread = threading.Thread(target=self._run, name="superpipeline-board", daemon=True)
        self._thread.start()

    def follow(self, stage: Stage, unit: int, count: int, place: str, before: Callable[[], Any] = int) -> Future[None]:
        """Raise this rank's number by ``count`` once ``before`` returns; return a future of all ranks' numbers as high.

        Never blocks: the board's thread calls ``before`` and waits.
        """
        column = unit * len(Stage) + stage
        item = Item(column, self._counts.get(column, 0) + count, place, Future())
        self._counts[column] = item.target
        with self._change:
            self._begun.append((before, item))
            self._change.notify()
        return item.reached

    def close(self) -> None:
        """End the thread; every wait that is left fails. Safe twice."""
        with self._change:
            self._is_closed = True
            self._change.notify()
        self._thread.join()

    # ---- on the thread

    def _run(self) -> None:
        """Raise this rank's numbers and poll the others' until `close`. Runs on the thread."""
        items: list[Item] = []
        pause = SHORTEST
        while True:
            self._watch.note("board", items[0].place if items else None)
            with self._change:
                while not (items or self._begun or self._is_closed):
                    self._change.wait()
                begun, self._begun = self._begun, []
            left = self._complete([*items, *(item for before, item in begun if self._raise_number(before, item))])
            if (error := self._watch.error) is not None or self._is_closed:
                while left:
                    item = left.pop()
                    item.reached.set_exception(error or RuntimeError(f"closed before all ranks came to {item.place}"))
                if self._is_closed:
                    return
            pause = SHORTEST if begun or len(left) < len(items) else min(2 * pause, LONGEST)
            if items := left:
                time.sleep(pause)

    def _raise_number(self, before: Callable[[], Any], item: Item) -> bool:
        """Call ``before`` and raise this rank's number; fail the item and return False if ``before`` raised."""
        try:
            before()
            self._numbers[self._rank, item.column] = item.target
            return True
        except BaseException as error:
            item.reached.set_exception(error)
            return False

    def _complete(self, items: list[Item]) -> list[Item]:
        """Complete the items whose targets all ranks have reached; return the items that are left."""
        lowest = self._numbers[:, [item.column for item in items]].amin(0).tolist() if items else []
        for item, low in zip(items, lowest, strict=True):
            if low >= item.target:
                item.reached.set_result(None)
        return [item for item, low in zip(items, lowest, strict=True) if low < item.target]
