"""The batches of a run, handed out when it is a contender's turn, and the clock that is read while they are.

1. A contender iterates over its turns, trains on each batch, and gives each loss. Nothing else is asked of it.
2. Steps that count follow each other without a pause; before the first and after the last of a repetition the device
   is waited for. The step after a repetition is not counted: it begins when the next turn does.
3. Losses stay where they are until a repetition is over: reading one would wait for the device.
4. Their number is known, because Lightning fetches one batch ahead where it is not, and the clock would be off by one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from ..memory.device import Device
from ..planning.shapes import Batch


class Turns:
    """An iterable over batches.

    Args:
        batches: Taken one after the other, again and again.
        device: That is waited for.
        steps: Of a repetition.
        repetitions: How many.
        warm_up: Steps before the first.
        report: Gets what a repetition took.
        wait: Returns when it is the contender's turn again.
    """

    def __init__(
        self,
        batches: list[Batch],
        device: Device,
        *,
        steps: int,
        repetitions: int,
        warm_up: int,
        report: Callable[[dict[str, Any]], None],
        wait: Callable[[], None],
    ) -> None:
        self._batches = batches
        self._device = device
        self._steps = steps
        self._repetitions = repetitions
        self._warm_up = warm_up
        self._report = report
        self._wait = wait
        self._begin = 0.0
        self._losses: list[Tensor] = []
        self.details: Callable[[], dict[str, Any]] = dict  # of the contender, for the report

    def __len__(self) -> int:
        return self._warm_up + self._repetitions * (self._steps + 1)

    def __iter__(self) -> Iterator[Batch]:
        for step in range(len(self)):
            self._tick(step - self._warm_up)
            yield self._batches[step % len(self._batches)]

    def lost(self, loss: Tensor) -> None:
        """The loss of the step that is under way."""
        self._losses.append(loss.detach())

    def _tick(self, step: int) -> None:
        """A step begins; those of the warm-up are negative."""
        place = step % (self._steps + 1)
        if step >= 0 and place == 0:
            self._device.synchronize()
            self._begin = time.perf_counter()
        elif step >= 0 and place == self._steps:
            self._device.synchronize()
            self._end(time.perf_counter() - self._begin)
            if step + 1 < len(self) - self._warm_up:
                self._device.free_cached()
                self._wait()

    def _end(self, seconds: float) -> None:
        losses = [float(loss) for loss in self._losses]
        self._losses.clear()
        peaks = self._device.allocator_peaks()
        self._report({"seconds": seconds, "losses": losses, **peaks, "details": self.details()})
