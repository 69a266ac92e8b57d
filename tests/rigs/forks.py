"""Programs in processes of their own that do not import torch and Lightning, which takes seconds, once more.

    done = forks.run("import sys, torch; torch.set_num_threads(2); print(sys.argv)", "argument")  # as `subprocess.run`

1. Each is a fork of a server, which has imported a few modules and done nothing else: it has no thread of Python's but
   its first, none of torch's, and no device. A test of what an import brings, or of how Python begins, starts Python.
2. A program has the environment and the directory of the process that asks for it, leads a group of processes, and ends
   as any interpreter does. It writes to files, so what it leaves running keeps nobody waiting.
3. There is a server for each set of modules and of variables that count when a process begins, such as LD_PRELOAD. It
   ends with the process that started it, which its connection tells it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from types import MappingProxyType, ModuleType

OWNER = os.getpid()
NUMBER = struct.Struct("q")
MOST = 1 << 20  # bytes of a request


def run(code: str, *arguments: str, timeout: float = 300, **how) -> subprocess.CompletedProcess[str]:
    """Run a program to its end."""
    program = Program(code, *arguments, **how)
    try:
        return program.wait(timeout)
    finally:
        program.kill()


class Program:
    """A running program, and what it has written.

    Args:
        env: Its environment; this process's if None.
        modules: What is imported already.
        begins_with: Variables that count when a process begins.
    """

    def __init__(
        self,
        code: str,
        *arguments: str,
        env: dict[str, str] | None = None,
        modules: tuple[str, ...] = ("sp_lightning",),
        begins_with: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.arguments = arguments
        self.files = [tempfile.TemporaryFile("w+") for _ in ("stdout", "stderr")]  # noqa: SIM115
        self.numbers, numbers = os.pipe()
        request = json.dumps([code, arguments, env or dict(os.environ), os.getcwd()]).encode()
        fds = [numbers, *(file.fileno() for file in self.files)]
        socket.send_fds(server(modules, tuple(begins_with.items())), [request], fds)
        os.close(numbers)
        self.pid = self._number(None)  # however long the server takes under load: pytest's own limit ends it

    def wait(self, timeout: float) -> subprocess.CompletedProcess[str]:
        """Wait until it has ended."""
        returncode = os.waitstatus_to_exitcode(self._number(timeout))
        os.close(self.numbers)
        for file in self.files:
            file.seek(0)
        written = [file.read() for file in self.files]
        return subprocess.CompletedProcess(self.arguments, returncode, *written)

    def kill(self) -> None:
        """End whatever still runs of its group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def _number(self, timeout: float | None) -> int:
        """Receive the next thing that the server's side tells: the program's number, then how it ended."""
        if not select.select([self.numbers], [], [], timeout)[0]:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.arguments, timeout)
        told = os.read(self.numbers, NUMBER.size)
        if not told:
            raise ChildProcessError("the server of forks has ended")
        return NUMBER.unpack(told)[0]


@functools.cache
def server(modules: tuple[str, ...], begins_with: tuple[tuple[str, str], ...]) -> socket.socket:
    """Start a server; return the connection to it."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, __file__, str(there.fileno()), *modules]
    process = subprocess.Popen(command, env={**os.environ, **path, **dict(begins_with)}, pass_fds=[there.fileno()])
    there.close()
    atexit.register(end, process, here)
    return here


def end(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    if os.getpid() == OWNER:
        connection.close()
        process.wait()


def serve(connection: socket.socket) -> str | None:
    """Fork for each request; return in the fork what it is to run, and here nothing in the end."""
    running: dict[int, int] = {}

    def tell_ends(*_: object) -> None:
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                tell(running.pop(found[0]), found[1])

    signal.signal(signal.SIGCHLD, tell_ends)
    while (received := socket.recv_fds(connection, MOST, 3))[0]:
        message, (numbers, *files), *_ = received
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # it may end before it is among those that run
        program = os.fork()
        if program == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
            for each in (connection.detach(), numbers, *running.values()):
                os.close(each)
            return prepare(files, *json.loads(message))
        running[program] = os.dup(numbers)
        tell(numbers, program)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        for file in files:
            os.close(file)
    return None


def tell(numbers: int, number: int) -> None:
    """Send a program's number, or how it ended, to who asked for it."""
    with contextlib.suppress(BrokenPipeError):  # who has not waited for it
        os.write(numbers, NUMBER.pack(number))
    os.close(numbers)


def prepare(files: list[int], code: str, arguments: list[str], env: dict[str, str], directory: str) -> str:
    """Become a process of this environment that writes to these files."""
    os.setsid()
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(env)
    for fd, file in enumerate([os.open(os.devnull, os.O_RDONLY), *files]):
        os.dup2(file, fd)
        os.close(file)
    sys.argv = ["-c", *arguments]
    return code


if __name__ == "__main__":
    _, fd, *modules = sys.argv
    for module in modules:
        importlib.import_module(module)
    gc.freeze()  # a program's end does not go through all this; of which nanobind says in stderr that it leaks
    program = serve(socket.socket(fileno=int(fd)))
    if program is None:
        os._exit(0)
    main = sys.modules["__main__"] = ModuleType("__main__")
    exec(compile(program, "<string>", "exec"), vars(main))
