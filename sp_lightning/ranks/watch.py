"""Which rank others wait for: each says on torch's store where it is, and reads the others' signs once it has waited.

A rank that raised is named with its error, one whose process has ended as soon as the others wait, and one that gives
no sign after a while. A write to the store in `PULSE` seconds is all that this costs.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import os
import select
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..compat.torch import store_within
from ..errors import PeerError

PULSE = 0.5  # seconds between two signs
KEEPALIVE = timedelta(seconds=30)
ENDED = "its run has ended"

_numbers: dict[str, Iterator[int]] = collections.defaultdict(itertools.count)  # numbers of teams, by their group


class Watch:
    """Tells other ranks where this rank is, and finds out which rank this one waits for."""

    def __init__(
        self, group: dist.ProcessGroup, processes: Sequence[int | None], timeout: timedelta, keepalive: timedelta
    ) -> None:
        """Start to watch the ranks of a group; ``processes``: the process ids of ranks on this machine, else None."""
        self._rank, self._size, self._group = group.rank(), group.size(), group
        self._timeout, self._keepalive = timeout.total_seconds(), keepalive.total_seconds()
        name = group.group_name
        self._store = store_within(f"superpipeline {name} {next(_numbers[name])}")
        self.error: PeerError | None = None
        self._waits: dict[Any, tuple[str, float]] = {}  # where threads and the device's streams wait, and since when
        self._place, self._beat, self._failed = "the start", 0, ""
        self._signs = {rank: ("", time.monotonic()) for rank in range(self._size) if rank != self._rank}
        others = {rank: process for rank, process in enumerate(processes) if process is not None}
        self._ends = {os.pidfd_open(process): rank for rank, process in others.items() if rank != self._rank}
        self._lock, self._end = threading.Lock(), threading.Event()
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
        self.note("collective", place)
        try:
            yield
        except PeerError:
            raise
        except (dist.DistError, RuntimeError) as error:
            raise self._cause(place, error) from error
        finally:
            self.note("collective", None)

    def _cause(self, place: str, error: Exception) -> PeerError:
        """Wait until other ranks can say why they ended; return the error that names the rank to blame."""
        since = time.monotonic()
        while self.error is None and time.monotonic() < since + self._keepalive + 2 * PULSE:
            time.sleep(PULSE / 5)
        return self.error or self._look(place, since) or PeerError(f"rank {self._rank} at {place}: {error}")

    def check(self) -> None:
        """Raise PeerError if another rank is known to be gone."""
        if self.error is not None:
            raise PeerError(str(self.error))

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks of an error, unless they caused it. Safe twice."""
        if not isinstance(error, PeerError):
            self._failed = self._failed or f"{type(error).__name__}: {error}"
            self._post()

    def close(self) -> None:
        """End the watch, and tell the other ranks, which raise if they wait for this one. Safe twice."""
        if self._end.is_set():
            return
        self._end.set()
        self._thread.join()
        for descriptor in self._ends:
            os.close(descriptor)
        self._failed = self._failed or ENDED
        self._post()

    # ---- signs

    def _post(self) -> bool:
        """Write this rank's place to the store; return False if the store is gone, as it is once rank 0 has ended."""
        with self._lock, contextlib.suppress(dist.DistError, RuntimeError):
            self._beat += 1
            self._store.set(f"at/{self._rank}", json.dumps([self._beat, self._place, self._failed]))
            return True
        return False

    def _run(self) -> None:
        """Post signs, and look for the rank that lets this one wait, until `close`. Runs on the thread."""
        while not self._end.wait(PULSE):
            if not self._post():
                self.error = self.error or self._without_store()
                return
            for waiter, (place, since) in list(self._waits.items()):
                if isinstance(waiter, dist.Work) and waiter.is_completed():
                    self.note(waiter, None)
                elif self.error is None and time.monotonic() - since > 2 * PULSE:
                    self.error = self._look(place, since)
            if self.error is not None and any(isinstance(waiter, dist.Work) for waiter in list(self._waits)):
                self._group.abort()  # the device's kernels end, and the host's next wait for them raises

    def _without_store(self) -> PeerError:
        """Make the error of a store that is gone."""
        return PeerError(f"rank {self._rank} at {self._place}: the store of rank 0 is gone")

    def _look(self, place: str, since: float) -> PeerError | None:
        """Return an error that names the rank this one waits for in vain; None if all give signs and no time is up."""
        here, now = f"rank {self._rank} waits at {place}", time.monotonic()
        ended = {self._ends[descriptor] for descriptor in select.select(list(self._ends), [], [], 0)[0]}
        for other, (sign, seen) in self._signs.items():
            try:
                text = self._store.get(f"at/{other}").decode() if self._store.check([f"at/{other}"]) else ""
            except (dist.DistError, RuntimeError):
                return self._without_store()
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
