"""The batches of a run, handed out in a contender's turns and timed.

1. A contender iterates over its turns, trains on each batch, and adds each loss. It has to do nothing else.
2. Steps that count follow each other without a pause; the device is synchronized before the first and after the last
   step of a repetition. The step after a repetition does not count: it begins with the next turn.
3. Losses stay on the device until a repetition is over: reading one would wait for the device.
4. The number of batches is known in advance: otherwise Lightning fetches one batch ahead, and times are one step off.
5. A contender that works on several batches at once has as many for each step. It draws the first batch of a step as it
   ends the first one of the step before: what it still has to do then is timed with the next step, before each
   repetition as after it, and losses of it are reported later.
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
        batches: Batches, repeated in their order.
        device: The device to synchronize.
        steps: Steps in a repetition.
        repetitions: Number of repetitions.
        warm_up: Steps before the first repetition.
        at_once: Batches of a step.
        report: Called with the time and memory of each repetition.
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
        at_once: int = 1,
        report: Callable[[dict[str, Any]], None],
        wait: Callable[[], None],
    ) -> None:
        self._batches = batches
        self._device = device
        self._steps = steps
        self._repetitions = repetitions
        self._warm_up = warm_up
        self._at_once = at_once
        self._report = report
        self._wait = wait
        self._begin = 0.0
        self._losses: list[Tensor] = []
        self.details: Callable[[], dict[str, Any]] = dict  # about the contender, for the report

    def __len__(self) -> int:
        return self._all_steps * self._at_once

    @property
    def _all_steps(self) -> int:
        return self._warm_up + self._repetitions * (self._steps + 1)

    def __iter__(self) -> Iterator[Batch]:
        for number in range(len(self)):
            step, place = divmod(number, self._at_once)
            if place == 0:
                self._tick(step - self._warm_up)
            yield self._batches[number % len(self._batches)]

    def add_loss(self, loss: Tensor) -> None:
        """Add the loss of the current step."""
        self._losses.append(loss.detach())

    def _tick(self, step: int) -> None:
        """Begin a step; steps of the warm-up have negative numbers."""
        place = step % (self._steps + 1)
        if step >= 0 and place == 0:
            self._device.synchronize()
            self._begin = time.perf_counter()
        elif step >= 0 and place == self._steps:
            self._device.synchronize()
            self._end(time.perf_counter() - self._begin)
            if step + 1 < self._all_steps - self._warm_up:
                self._device.free_cached()
                self._wait()

    def _end(self, seconds: float) -> None:
        losses = [float(loss) for loss in self._losses]
        self._losses.clear()
        peaks = self._device.allocator_peaks()
        report = {"seconds": seconds, "batches": self._steps * self._at_once, "losses": losses}
        self._report({**report, **peaks, "details": self.details()})
