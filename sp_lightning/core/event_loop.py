"""Discrete-event loop of the simulation: when each task of each lane starts and ends (simulation.py)."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

MOST_TASKS = 1 << 40  # more than there are
LaneName = Literal["disk in", "up", "compute", "down", "network", "optimizer", "disk out"]


@dataclass(eq=False, slots=True)
class Task:
    """A piece of work for one lane."""

    lane: LaneName
    unit: int
    work: float  # seconds, if nothing slows it down
    number: int  # in the order of issue
    phase: str = ""  # as of a span (telemetry.py)
    waits: int = 0  # how many tasks it still waits for
    then: list[Task] = field(default_factory=list)  # the tasks that wait for this one
    blocker: Task | None = None  # the task whose end let this one start
    left: float = 0.0  # seconds of `work` still to do
    start: float = 0.0
    end: float = 0.0


class InOrder:
    """A lane that runs its tasks in the order of issue."""

    def __init__(self) -> None:
        self._queue: deque[Task] = deque()
        self.last: Task | None = None

    def add(self, task: Task) -> None:
        """Add a task that is issued now."""
        self._queue.append(task)

    def may_start(self, task: Task) -> None:
        """Note that this task no longer waits for another."""

    def take(self) -> Task | None:
        """Remove and return the task to start now, if there is one."""
        return self._queue.popleft() if self._queue and not self._queue[0].waits else None


class NewestFirst(InOrder):
    """A lane that runs, of the tasks that may start, the one that was issued last."""

    def __init__(self) -> None:
        super().__init__()
        self._heap: list[tuple[int, Task]] = []

    def add(self, task: Task) -> None:
        if not task.waits:
            self.may_start(task)

    def may_start(self, task: Task) -> None:
        heapq.heappush(self._heap, (self._rank(task), task))

    def take(self) -> Task | None:
        return heapq.heappop(self._heap)[1] if self._heap else None

    def _rank(self, task: Task) -> int:
        return -task.number


class WeightsFirst(NewestFirst):
    """A lane that runs, of the tasks that may start, weights in the order of issue, and then state."""

    def __init__(self, newest_state_first: bool) -> None:
        super().__init__()
        self._newest_first = newest_state_first

    def _rank(self, task: Task) -> int:
        if task.phase != "state":
            return task.number - MOST_TASKS
        return MOST_TASKS - task.number if self._newest_first else task.number


class StateBeside(WeightsFirst):
    """A lane that runs all else in the order of issue, and state while the first of that has to wait."""

    def __init__(self, newest_state_first: bool) -> None:
        super().__init__(newest_state_first)
        self._others = InOrder()

    def add(self, task: Task) -> None:
        if task.phase == "state":
            super().add(task)
        else:
            self._others.add(task)

    def may_start(self, task: Task) -> None:
        if task.phase == "state":
            super().may_start(task)

    def take(self) -> Task | None:
        return self._others.take() or super().take()


def run(lanes: dict[LaneName, InOrder], rates_of: Callable[[Collection[LaneName]], Mapping[LaneName, float]]) -> None:
    """Compute every task's start and end, with the rates of the lanes in which tasks run at a time."""
    now = 0.0
    running: dict[LaneName, Task] = {}
    changed = set(lanes)  # in which a task may start that could not before
    while True:
        for name, lane in lanes.items():
            if name in changed and name not in running and (begun := lane.take()) is not None:
                _start(begun, lane, now)
                running[name] = begun
        changed.clear()
        if not running:
            return
        rates = rates_of(running)
        left = {name: task.left / rates[name] for name, task in running.items()}
        passed = min(left.values())
        now += passed
        for name, seconds in left.items():
            task = running[name]
            if seconds <= passed:
                del running[name]
                changed.add(name)
                _end(task, lanes, now, changed)
            else:
                task.left -= passed * rates[name]


def _start(task: Task, lane: InOrder, now: float) -> None:
    before = lane.last
    if before is not None and (task.blocker is None or before.end >= task.blocker.end):
        task.blocker = before
    task.start = now
    lane.last = task


def _end(task: Task, lanes: dict[LaneName, InOrder], now: float, changed: set[LaneName]) -> None:
    task.end = now
    for other in task.then:
        other.blocker = task
        other.waits -= 1
        if not other.waits:
            lanes[other.lane].may_start(other)
            changed.add(other.lane)
    task.then.clear()  # tasks that refer to each other would wait for the garbage collector
