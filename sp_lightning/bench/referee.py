"""Let contenders take turns, each in its own process, and measure the memory of each."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import math
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

import psutil  # type: ignore[import-untyped]
import torch

from ..core.host import host_memory
from ..core.machine import Machine
from ..errors import SuperpipelineError
from ..nodes.transport import PRETENDED
from ..planning.shapes import build
from ..runtime.measure import best_of
from .contenders import CONTENDERS
from .entries import Entry
from .facts import facts
from .figures import Result, Row
from .floor import Costs
from .setting import Setting
from .worker import describe_machine

COMMAND = [sys.executable, "-m", "sp_lightning.bench.worker"]
GRACE_S = 60  # after the end of the time, for a turn that has begun
SAMPLE_S = 0.02  # between samples of a process's memory
HOST_BYTES = 20  # per parameter, for any contender: weights, gradients, two moments in FP32, and a wire copy


class ContenderError(SuperpipelineError):
    """A contender cannot go on; the message is one line."""


def compare(
    setting: Setting,
    entries: Sequence[Entry],
    say: Callable[[str], None] = lambda line: None,
    *,
    left_s: Callable[[], float] = lambda: math.inf,
    keep: Callable[[Result], None] = lambda result: None,
) -> Result:
    """Run all contenders, interleaved; one that fails is a row with its error.

    The machine is measured before and after them, and its better figures count: where other processes take a core, a
    product of two threads was seen to take 30 times as long.

    Args:
        setting: The work.
        entries: The rows.
        say: Called with a line for each turn.
        left_s: Returns the seconds in which a turn may begin; a turn ends at most `GRACE_S` after them.
        keep: Called after each turn, and after the last measurement, with the result so far.
    """
    with torch.device("meta"):
        costs = Costs.of(build(setting.shape), setting)
    say("measuring the machine")
    here = _measured(setting)
    together = fit_together(setting, setting.ranks * len(entries), costs.parameters, host_memory().free)
    rows = [Row(entry) for entry in entries]
    machine = Machine(**here["machine"])
    result = Result(setting, costs, machine, {**facts(), "device": here["device"]}, together, rows)
    with contextlib.ExitStack() as workers:
        seats = [_Seat(setting, row, together, workers) for row in rows]
        for turn in range(setting.repetitions):
            for seat in seats:
                if seat.row.error is None and left_s() > 0:
                    say(f"{turn + 1}/{setting.repetitions} {seat.row.entry.label}")
                    seat.take_turn(min(setting.time_limit, left_s() + GRACE_S))
                    seat.report_error(say)
                    seat.row.compute(costs, machine)
                    keep(result)
    if left_s() > 0:
        say("measuring the machine again")
        with contextlib.suppress(ContenderError):  # the figures from before stay
            machine = best_of(machine, Machine(**_measured(setting)["machine"]))
        for row in rows:
            row.compute(costs, machine)
        result = dataclasses.replace(result, machine=machine)
        keep(result)
    for row in rows:
        if row.error is None and not row.repetitions:
            row.error = "not begun: no time left"
    return result


def fit_together(setting: Setting, count: int, parameters: int, host_free: int) -> bool:
    """Whether all processes may stay while others work: never on an accelerator, which each needs to itself."""
    return setting.device == "cpu" and count * parameters * HOST_BYTES <= host_free // 2


def _measured(setting: Setting) -> dict[str, Any]:
    """Measure the machine; an accelerator in a separate process, which leaves nothing on it."""
    if setting.device == "cpu":
        return describe_machine(setting)
    with contextlib.ExitStack() as workers:
        worker = workers.enter_context(_started({"setting": setting.as_dict(), "contender": None}))
        return worker.reply(setting.time_limit)


class _Seat:
    """A row, and its process while it has one."""

    def __init__(self, setting: Setting, row: Row, stays: bool, workers: contextlib.ExitStack) -> None:
        self.row = row
        self._setting = setting
        self._stays = stays
        self._workers = workers
        self._worker: _Worker | None = None

    def take_turn(self, limit: float) -> None:
        """Run one repetition within this many seconds, or note the row's error."""
        try:
            if self._worker is None:
                self._worker = self._start(limit)
            else:
                self._worker.go()
            self.row.add(self._worker.reply(limit), self._worker.host_peak)
        except ContenderError as error:
            self.row.error = str(error)
        finally:
            if self._worker is not None and (self.row.error is not None or not self._stays):
                self._worker.close()
                self._worker = None

    def report_error(self, say: Callable[[str], None]) -> None:
        """Report the error that ended the row's turns, if there was one."""
        if self.row.error is not None:
            say(f"    {self.row.error}")

    def _start(self, limit: float) -> _Worker:
        entry = self.row.entry
        missing = [name for name in CONTENDERS[entry.contender](**entry.options).needs if not _installed(name)]
        if missing:
            raise ContenderError(f"{', '.join(missing)} is not installed")
        job = {
            "setting": self._setting.as_dict(),
            "contender": entry.contender,
            "options": dict(entry.options),
            "repetitions": self._setting.repetitions if self._stays else 1,
        }
        worker = self._workers.enter_context(_started(job))
        first = worker.reply(limit)
        self.row.how = first["how"]
        worker.watch(first["resident_set"])
        return worker


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


@contextlib.contextmanager
def _started(job: dict[str, Any]) -> Iterator[_Worker]:
    with tempfile.TemporaryFile() as errors:
        worker = _Worker(job, errors)
        try:
            yield worker
        finally:
            worker.close()


def _place(size: int) -> dict[str, str]:
    """Return the address at which this many processes find one another."""
    if size == 1:
        return {}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}


class _Worker:
    """A process with a job, or one for each device; the first one reports."""

    def __init__(self, job: dict[str, Any], errors: IO[bytes]) -> None:
        self._errors = errors
        setting = Setting(**job["setting"])
        size, self._local = (setting.ranks, setting.devices) if job["contender"] is not None else (1, 1)
        self._processes = [self._start(rank, size, place) for place in [_place(size)] for rank in range(size)]
        self._process = self._processes[0]
        self._memory = [psutil.Process(process.pid) for process in self._processes]
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self._before: int | None = None
        self.host_peak = 0
        self._send(json.dumps(job))

    def _start(self, rank: int, size: int, place: dict[str, str]) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **place}
        if size > 1:
            node, local = divmod(rank, self._local)
            environment |= {"LOCAL_RANK": str(local), "RANK": str(rank), "NODE_RANK": str(node), PRETENDED: str(node)}
        return subprocess.Popen(
            COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            stderr=self._errors,
            text=True,
            env=environment,
        )

    def watch(self, before: int) -> None:
        """Count memory from now on, beyond these bytes; that of several processes beyond what they have now."""
        self._before = before if len(self._memory) == 1 else self._in_use()

    def go(self) -> None:
        """Start the contender's next turn."""
        self._send("go")

    def reply(self, seconds: float) -> dict[str, Any]:
        """Wait for the next reply, and sample the process's memory meanwhile."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                line = self._lines.get(timeout=SAMPLE_S * len(self._memory))
                return self._parsed(line)
            self._sample()
        raise ContenderError(f"no answer within {seconds:g} s")

    def close(self) -> None:
        """End the process; safe twice."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        for process in self._processes:
            process.wait()
            for stream in (process.stdin, process.stdout):
                with contextlib.suppress(OSError, AttributeError):  # for what could no longer be sent
                    stream.close()  # type: ignore[union-attr]

    def _parsed(self, line: str | None) -> dict[str, Any]:
        if line is None:
            raise ContenderError(self._exit_message())
        facts: dict[str, Any] = json.loads(line)
        if "error" in facts:
            raise ContenderError(facts["error"])
        return facts

    def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError):  # closed
            for line in self._process.stdout:
                self._lines.put(line)
        self._lines.put(None)

    def _send(self, line: str) -> None:
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # its exit message says why
                process.stdin.write(line + "\n")
                process.stdin.flush()

    def _sample(self) -> None:
        if self._before is not None:
            with contextlib.suppress(psutil.Error):
                self.host_peak = max(self.host_peak, self._in_use() - self._before)

    def _in_use(self) -> int:
        """Return the bytes of the process, or of all: a page that several share counts once."""
        if len(self._memory) == 1:
            return int(self._memory[0].memory_info().rss)
        return sum(int(memory.memory_full_info().pss) for memory in self._memory)

    def _exit_message(self) -> str:
        code = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        ended = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        return ": ".join([ended, *lines[-1:]])
