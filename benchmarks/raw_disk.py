"""What benchmarks of disks share: memory as the library has it, other work beside a transfer, and growth of memory."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path


def private(nbytes: int) -> memoryview:
    """Map memory as the library does: Python's own mapping would be shared, which has pages of 4 KiB only."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    memory[:] = os.urandom(1 << 20) * (nbytes >> 20)
    return memoryview(memory)


@contextlib.contextmanager
def computing() -> Iterator[None]:
    """Have a thread compute in pure Python."""
    ended = threading.Event()

    def compute() -> None:
        number = 0
        while not ended.is_set():
            number += 1

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class Growth:
    """The most that this process's anonymous and locked memory grew, sampled by a thread until `end`."""

    def __init__(self) -> None:
        self._begin = self._most = self._now()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._ends.wait(0.005):
            self._most = max(self._most, self._now())

    @staticmethod
    def _now() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "VmLck:")))

    def end(self) -> int:
        """End the samples; return the bytes."""
        self._ends.set()
        self._thread.join()
        return self._most - self._begin
