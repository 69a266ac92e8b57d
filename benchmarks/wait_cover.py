"""Which waits each test comes to, and which tests run: race_deletions.py lays this beside a copy of the package.

1. In a copy whose waits are marked each one calls `hit` with its number, in whichever process: all of them map one file
   with a byte for each wait. After each test pytest's process writes down which bytes are set, and clears them.
2. Without ``WAIT_COVER`` in the environment nothing is noted. With ``WAIT_ONLY``, a file of tests with the seconds that
   each may take, no other tests run, and these in its order.
3. The ranks of tests are forks of a process that is forked before tests are looked for, when torch and Lightning are
   there, but nothing of the package: else each of them would import these again. They end with pytest.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.util
import os
import pathlib
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest


def _mapped(path: str | None) -> mmap.mmap | bytearray:
    if path is None:
        return bytearray(1 << 16)
    with open(path, "r+b") as file:
        return mmap.mmap(file.fileno(), 0)


def _serve_forks() -> None:
    """Have ranks forked by a fork of this process (Rule 3)."""

    def fork(path: bytes, arguments: list[str], descriptors: list[int]) -> int:
        if "forkserver" not in arguments[-1]:
            return spawn(path, arguments, descriptors)
        if (process := os.fork()) == 0:
            with contextlib.suppress(BaseException):
                ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
                exec(arguments[-1], {})
            os._exit(0)
        return process

    spawn, multiprocessing.util.spawnv_passfds = multiprocessing.util.spawnv_passfds, fork
    multiprocessing.forkserver.ensure_running()
    given = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: given("forkserver" if method == "spawn" else method)  # type: ignore[assignment]


_hits = _mapped(os.environ.get("WAIT_COVER"))
_failed: set[str] = set()  # tests


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Make the process whose forks are ranks: not in this file's import, which would not end there."""
    _serve_forks()


def hit(number: int) -> None:
    """Note that the wait of this number was come to."""
    _hits[number] = 1


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: Any) -> Iterator[None]:
    """Write a line for a test: its name, the seconds that it took, the numbers of the waits, and if it failed."""
    path = os.environ.get("WAIT_COVER")
    _hits[:] = bytes(len(_hits))
    begin = time.monotonic()
    found = yield
    if path is not None:
        came = [number for number, byte in enumerate(_hits[:]) if byte]
        with open(f"{path}.lines", "a") as file:
            seconds = round(time.monotonic() - begin, 1)
            file.write(json.dumps([item.nodeid, seconds, came, item.nodeid in _failed]) + "\n")
    return found


def pytest_sessionfinish() -> None:
    """Write a line without a test: none is missing before it."""
    if path := os.environ.get("WAIT_COVER"):
        with open(f"{path}.lines", "a") as file:
            file.write('[""]\n')


def pytest_runtest_logreport(report: Any) -> None:
    """Note a test that failed, or whose fixtures did."""
    if report.failed:
        _failed.add(report.nodeid)


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Leave out what is not to run (Rule 2)."""
    path = os.environ.get("WAIT_ONLY")
    if path is not None:
        seconds = json.loads(pathlib.Path(path).read_text())
        named = {item.nodeid: item for item in items}
        items[:] = [named[test] for test in seconds if test in named]
        for item in items:
            item.add_marker(pytest.mark.timeout(seconds[item.nodeid]), append=False)
