"""Where ranks wait for each other, and for which rank.

- The watch: each rank says on torch's store where it is, and reads the others' signs once it has waited. A rank that
  raised is named with its error, one whose process has ended as soon as the others wait, and one that gives no sign
  after a while. A write to the store in `PULSE` seconds is all that this costs.
- The board has numbers that each rank of a machine raises and the others read: for how many weights of a unit a stage
  is over. A wait for a stage ends when every rank's number is as high as this rank's own. So ranks may come to the
  units in different orders, and at different times.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import itertools
import json
import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from ..compat.torch import store_within
from ..errors import PeerError

PULSE = 0.5  # seconds between two signs
KEEPALIVE = timedelta(seconds=30)
ENDED = "its run has ended"
SHORTEST, LONGEST = 5e-5, 1e-3  # seconds between two looks at the board

_numbers: dict[str, Iterator[int]] = collections.defaultdict(itertools.count)  # numbers of teams, by their group


class Watch:
    """Tells other ranks where this rank is, and finds out which rank this one waits for."""

    def __init__(
        self, group: dist.ProcessGroup, processes: dict[int, int], timeout: timedelta, keepalive: timedelta
    ) -> None:
        """Start to watch the ranks of a group; ``processes``: the process ids of other ranks on this machine."""
        self._rank, self._size, self._group = group.rank(), group.size(), group
        self._timeout, self._keepalive = timeout.total_seconds(), keepalive.total_seconds()
        name = group.group_name
        self._store = store_within(f"superpipeline {name} {next(_numbers[name])}")
        self.error: PeerError | None = None
        self._waits: dict[Any, tuple[str, float]] = {}  # where threads and the device's streams wait, and since when
        self._place, self._beat, self._failed = "the start", 0, ""
        self._signs = {rank: ("", time.monotonic()) for rank in range(self._size) if rank != self._rank}
        self._ends = {os.pidfd_open(process): rank for rank, process in processes.items()}
        self._end = threading.Event()
        self._post()
        self._thread = threading.Thread(target=self._run, daemon=True, name="superpipeline-watch")
        self._thread.start()

    # ---- waits

    def note(self, waiter: Any, place: str | None) -> None:
        """Note the place at which a thread, or work on the device, waits; None: it waits no longer."""
        if place is None:
            self._waits.pop(waiter, None)
        elif self._waits.get(waiter, ("",))[0] != place:
            self._waits[waiter] = place, time.monotonic()
            self._place = place

    def wait(self, work: Any, place: str, is_on_host: bool) -> None:
        """Block until a collective on the host is done, or make the device's stream wait. Raises if a rank is gone."""
        if not is_on_host:
            self.check()
            self.note(work, place)
            work.wait()
            return
        with self.waiting(place):
            while not work.is_completed():
                with contextlib.suppress(RuntimeError):
                    work.wait(timedelta(seconds=PULSE))
                self.check()
            work.wait()

    @contextlib.contextmanager
    def waiting(self, place: str) -> Iterator[None]:
        """Note where this rank waits in this context; turn errors of the backend into one that names a rank."""
        self.check()
        self.note(threading.get_ident(), place)
        try:
            yield
        except PeerError:
            raise
        except RuntimeError as error:
            raise self._cause(place, error) from error
        finally:
            self.note(threading.get_ident(), None)

    def _cause(self, place: str, error: Exception) -> PeerError:
        """Wait until other ranks can say why they ended; return the error that names the rank to blame."""
        end = time.monotonic() + self._keepalive + 3 * PULSE
        while self.error is None and time.monotonic() < end:
            time.sleep(PULSE / 5)
        return self.error or PeerError(f"rank {self._rank} at {place}: {error}")

    def check(self) -> None:
        """Raise PeerError if another rank is known to be gone."""
        if self.error is not None:
            raise PeerError(str(self.error))

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks of an error, unless they caused it. A second call does nothing."""
        if not isinstance(error, PeerError):
            self._say_failed(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """End the watch, and tell other ranks, which raise if they wait for this one. A second call does nothing."""
        self._end.set()
        self._thread.join()
        while self._ends:
            os.close(self._ends.popitem()[0])
        self._say_failed(ENDED)

    # ---- signs

    def _say_failed(self, why: str) -> None:
        """Tell the other ranks why this one ends; the first reason counts."""
        self._failed = self._failed or why
        with contextlib.suppress(RuntimeError):  # the store has ended with rank 0
            self._post()

    def _post(self) -> None:
        """Write this rank's place to the store."""
        self._beat += 1
        self._store.set(f"at/{self._rank}", json.dumps([self._beat, self._place, self._failed]))

    def _run(self) -> None:
        """Post signs, and look for the rank that lets this one wait, until `close`. Runs on the thread."""
        while not self._end.wait(PULSE):
            try:
                self._post()
                for waiter, (place, since) in list(self._waits.items()):
                    if isinstance(waiter, dist.Work) and waiter.is_completed():
                        self.note(waiter, None)
                    elif self.error is None and time.monotonic() - since > 2 * PULSE:
                        self.error = self._look(place, since)
            except RuntimeError as error:
                gone = f"rank {self._rank} at {self._place}: the store of rank 0 is gone ({error})"
                self.error = self.error or PeerError(gone)
                self._end.set()
            if self.error is not None and any(isinstance(waiter, dist.Work) for waiter in list(self._waits)):
                self._group.abort()  # the device's kernels end, and the host's next wait for them raises

    def _look(self, place: str, since: float) -> PeerError | None:
        """Return an error that names the rank this one waits for in vain; None if all give signs and no time is up."""
        here, now = f"rank {self._rank} waits at {place}", time.monotonic()
        ended = {self._ends[descriptor] for descriptor in select.select(list(self._ends), [], [], 0)[0]}
        for other, (sign, seen) in self._signs.items():
            text = self._store.get(f"at/{other}").decode() if self._store.check([f"at/{other}"]) else ""
            if text != sign:
                self._signs[other], seen = (text, now), now
            _, at, failed = json.loads(text or '[0, "no place yet", ""]')
            if failed:
                return PeerError(f"{here}, but rank {other} is gone since {at}: {failed}")
            if other in ended:
                return PeerError(f"{here}, but the process of rank {other} has ended; it was last at {at}")
            if (silent := now - max(seen, since)) > self._keepalive:
                return PeerError(f"{here}, but rank {other} has given no sign for {silent:.0f} s; it was last at {at}")
            if now - since > self._timeout:
                return PeerError(f"{here} for {self._timeout:.0f} s; rank {other} is at {at}")
        return None


class Stage(enum.IntEnum):
    """The stages of a unit's weights that ranks tell each other."""

    ARRIVED = 0  # this rank's gradients are on the host
    READY = 1  # nothing of this rank reads what a step will write
    WHOLE = 2  # this rank has stepped whole weights, in its own face of the slabs
    STEPPED = 3  # this rank's parts are stepped


class Meeting(NamedTuple):
    """The end of a stage of a unit on all ranks. For copies of which each rank makes a part it is their arrival."""

    board: Board
    column: int
    target: int
    place: str
    own: Future[None]  # done once this rank's number is raised

    def wait(self, stream: Any) -> None:
        """Block until all ranks have come to the end of the stage: no stream knows of other ranks' copies."""
        self.synchronize()

    def synchronize(self) -> None:
        """Block until all ranks have come to the end of the stage."""
        self.own.result()
        self.board.wait(self.column, self.target, self.place)


class Board:
    """The numbers of all ranks of a machine."""

    def __init__(self, numbers: Any, rank: int, watch: Watch) -> None:
        """Start a thread that raises numbers once this rank's copies are done; ``numbers`` has a row for each rank."""
        self._numbers, self._rank, self._watch = numbers, rank, watch
        self._counts: dict[int, int] = {}
        self._is_closed = False
        self._thread = ThreadPoolExecutor(1, "superpipeline-board")

    def meet(self, stage: Stage, unit: int, count: int, place: str, before: Callable[[], Any] = int) -> Meeting:
        """Raise this rank's number by ``count`` on the thread, once ``before`` returns; return the stage's end.

        Never blocks. ``before`` may wait for this rank's copies, and for no other rank's step.
        """
        column = unit * len(Stage) + stage
        self._counts[column] = target = self._counts.get(column, 0) + count

        def raise_number() -> None:
            """Raise this rank's number. Runs on the thread."""
            before()
            self._numbers[self._rank][column] = target

        return Meeting(self, column, target, place, self._thread.submit(raise_number))

    def wait(self, column: int, target: int, place: str) -> None:
        """Block until all ranks' numbers in a column have reached a target."""
        if self._is_over(column, target):
            return
        pause = SHORTEST
        with self._watch.waiting(place):
            while not self._is_over(column, target):
                if self._is_closed:
                    raise PeerError(f"closed before all ranks came to {place}")
                self._watch.check()
                time.sleep(pause)
                pause = min(2 * pause, LONGEST)

    def _is_over(self, column: int, target: int) -> bool:
        """Whether all ranks' numbers in a column have reached a target."""
        return all(row[column] >= target for row in self._numbers)

    def close(self) -> None:
        """End the thread; every wait that is left fails. A second call does nothing."""
        self._is_closed = True
        self._thread.shutdown()
