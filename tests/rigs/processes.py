"""Processes that stay, one for each rank: they import everything once, and run the functions that a test sends them.

    [found, also_found] = processes.run(2, runs.fit, "case", settings)

1. A function and its arguments travel by pickle, so it is one of a module in tests/rigs; what it returns travels by
   `torch.save`, in bytes: tensors in shared memory would outlive what they are compared with.
2. Each run has a process group of its own, at a port of its own; Lightning finds the ranks in the environment, as
   under torchrun.
3. An exception in any rank, or a race on a simulated device, is raised here, with all ranks' tracebacks. Once a rank
   does not answer, the processes are ended, and the next run makes new ones.
4. A rank is a fork of a server that has imported torch and Lightning, or, with "spawn", shares no memory with one. It
   ends with its parent, and that with this process, whatever ends it: else one that waits for others would do so for
   minutes.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import io
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

TIMEOUT = 240  # seconds for one run
PARENT = os.getpid()
SET_PARENT_DEATH_SIGNAL = 1  # of prctl


class RankFailed(AssertionError):
    """A rank raised; the message has the traceback of each."""


class Processes:
    """So many ranks, ready to run functions."""

    def __init__(self, size: int, start: str = "forkserver") -> None:
        context: Any = multiprocessing.get_context(start)
        if start == "forkserver":  # which imports once, for all ranks
            context.set_forkserver_preload(["lightning", "sp_lightning", "parity"])
        self.size = size
        self.connections: list[Connection] = []
        self.processes = []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(rank, size, there, sys.path), daemon=True)
            process.start()
            there.close()
            self.connections.append(here)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT, **kwargs: Any) -> list[Any]:
        port = free_port()
        for connection in self.connections:
            connection.send((port, function, args, kwargs))
        results, errors, lost = [], [], False
        for rank, connection in enumerate(self.connections):
            try:
                if not connection.poll(timeout):
                    raise TimeoutError(f"no answer within {timeout} s")
                kind, payload = connection.recv()
            except (EOFError, OSError) as error:
                kind, payload, lost = "error", repr(error), True
            if kind == "error":
                errors.append(f"rank {rank}: {payload}")
                timeout = min(timeout, 20)
            else:
                results.append(torch.load(io.BytesIO(payload), weights_only=False))
        if lost:
            self.close()
        if errors:
            raise RankFailed("\n".join(errors))
        return results

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        if started.get(self.size) is self:
            del started[self.size]


started: dict[int, Processes] = {}


def run(size: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    """Run a function on so many ranks; return what each returned."""
    if size not in started:
        started[size] = Processes(size)
    try:
        return started[size].run(function, *args, **kwargs)
    except RankFailed:
        raise
    except BaseException:  # the test's time is over: the ranks would run on
        started[size].close()
        raise


@atexit.register
def close_all() -> None:
    if os.getpid() == PARENT:
        for processes in list(started.values()):
            processes.close()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def serve(rank: int, size: int, connection: Connection, path: list[str]) -> None:
    """Run what comes, until the parent is gone."""
    ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    sys.path[:] = path
    os.chdir(tempfile.gettempdir())  # that of the test which started this process will be gone
    torch.set_num_threads(1)
    place = {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    os.environ["OMP_NUM_THREADS"] = "1"
    simgpu = _simulated_device()
    while True:
        try:
            port, function, args, kwargs = connection.recv()
        except EOFError:
            return
        os.environ.update(place, MASTER_PORT=str(port))  # of which a Trainer forgets some at its end
        try:
            result = function(*args, **kwargs)
            if simgpu is not None and (races := simgpu.races()):
                raise AssertionError(f"races: {races}")
            stream = io.BytesIO()
            torch.save(result, stream)
            connection.send(("result", stream.getvalue()))
        except BaseException:
            connection.send(("error", traceback.format_exc()))
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
            gc.collect()  # which closes its connections: another rank's work may wait for them


@functools.cache
def _simulated_device() -> Any:
    try:
        import simgpu
    except (ImportError, RuntimeError):
        return None
    return simgpu
