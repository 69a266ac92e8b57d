"""Processes that a launcher started on several machines: they meet in a store, and torch connects them.

1. torch waits for the processes of a group until its timeout, in code that nothing interrupts, and names none. So all
   meet before, and each looks around while a thread of its own lets torch connect it.
2. From before it comes to the meeting each process holds a line to the first one's, which ends with either. The first
   process tells all who ended or failed, or that all are connected: none goes on earlier.
3. Who ended is named before anybody who failed, as others fail because of it.
4. Once the time is over in which all should connect, the first process names those that have said nothing: others
   failed because of them, and say so. If it says nothing itself, it is named.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Protocol

from ..errors import OptionError, PeerError
from .arrivals import (
    ENDED_EARLY,
    NO_MORE,
    READ_S,
    STORE_S,
    AnsweringStore,
    Meeting,
    NoAnswer,
    answer,
    has_agent,
    twice,
)
from .transport import PAUSE_S, PULSE_S, interface_error

CONNECTED, FAILED, ENDED = b"c", b"f", b""  # words on a line; the first process also says why all end
GREETING = 32  # bytes with which a line begins: the first process's token, the rank, and how many it expects
LINE_S = 2.0  # how long one attempt at a line may take
SILENT_S = 2 * STORE_S  # how long after it should be connected a process that has said nothing is named (Rule 4)
AT_ONCE = struct.pack("ii", 1, 0)  # the way in which a socket closes whose port is free then


def connect_launched(
    address: str, port: int, rank: int, size: int, timeout: timedelta, connect: Callable[[Any], None]
) -> None:
    """Have torch connect the processes of several machines by ``connect``, which gets the store in which they met.

    torch by itself names none that does not come or ends, and an interface that a host has not got is an error there
    alone.
    """
    line: _Line = _LinesOfFirst(size) if rank == 0 else _LineToFirst(rank, size, address)
    with contextlib.closing(line):
        store, hosts = _meet(address, port, rank, size, timeout, line)
        connecting = _Connecting(connect, store, f"rank {rank} on {hosts[rank]}", hosts[0], timeout)
        line.hold(connecting, hosts)


def check_interfaces(errors: Sequence[str]) -> None:
    """Raise OptionError, the same on every rank, for interfaces that hosts have not got."""
    if errors:
        found = "; ".join(dict.fromkeys(errors))
        raise OptionError(argument="GLOO_SOCKET_IFNAME", found=found, allowed="an interface that each host has")


def _meet(address: str, port: int, rank: int, size: int, timeout: timedelta, line: _Line) -> tuple[Any, list[str]]:
    """Return the store through which the processes find each other, and their hosts, once all have come to it."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in each torch

    host, error, meeting = socket.gethostname(), interface_error(), None
    late: list[int] = []
    until, pause = time.monotonic() + timeout.total_seconds(), 10 * PAUSE_S
    is_server = rank == 0 and not has_agent()
    try:
        if not is_server:
            _wait_for_store(address, port, until)
        options = {"wait_for_workers": False, "multi_tenant": True}
        server = answer(lambda: TCPStore(address, port, size, is_server, timeout, **options), until)
        meeting = Meeting(AnsweringStore(server, until).within("superpipeline"), rank, size, line.note)
        text = json.dumps([host, f"{host}: {error}" if error else ""])
        while not line.prepare(meeting.note()) or (said := meeting.come(text)) is None:
            late = meeting.late()
            if late or time.monotonic() > until:
                raise TimeoutError("the others have come")
            time.sleep(pause)
            pause = min(2 * pause, 0.5)
    except (RuntimeError, TimeoutError) as failure:
        if meeting is not None and isinstance(failure, RuntimeError) and not isinstance(failure, NoAnswer):
            raise PeerError(_end_of_store(line.first)) from failure
        if meeting is None and is_server:
            raise OptionError(
                argument="MASTER_ADDR:MASTER_PORT",
                found=f"{address}:{port}",
                allowed=f"an address of rank 0's machine, which is {host}, and a port there that no other process has: "
                f"{str(failure).splitlines()[0]}",
            ) from failure
        names, why = _holder_of_store(), line.error or str(failure).splitlines()[0]
        if meeting is not None and not isinstance(failure, NoAnswer):
            with contextlib.suppress(RuntimeError):
                others = late or meeting.missing()
                names = ", ".join(f"rank {other}" for other in others if other != rank) or "another rank"
                if rank == 0:  # the store may end with it
                    meeting.give_up(others)
        raise PeerError(
            f"rank {rank} on {host} waited for the processes of all machines, and {names} did not come to "
            f"{address}:{port} within {timeout} ({why}): start as many on every machine, with the same MASTER_ADDR and "
            "MASTER_PORT, which all machines can reach"
        ) from failure
    hosts, errors = zip(*map(json.loads, said), strict=True)
    if any(errors):
        meeting.stay()
    check_interfaces(list(filter(None, errors)))
    return meeting.attempt.within("group").store, list(hosts)


def _wait_for_store(address: str, port: int, until: float) -> None:
    """Return once something listens there, for which torch waits in code that nothing interrupts, such as Ctrl-C."""
    while True:
        why = "nothing listens there"
        try:
            with socket.create_connection((address, port), timeout=LINE_S) as probe:
                if probe.getsockname() != probe.getpeername():
                    return
                # The system gave it this port, and so connected it to itself: leave the port to the first process.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
        except OSError as error:
            why = str(error)
        if time.monotonic() > until:
            raise TimeoutError(why)
        time.sleep(PULSE_S)


def _check_size(rank: int, size: int, first: int) -> None:
    """Raise OptionError if a process expects another number of processes than the first one."""
    if size != first:
        raise OptionError(
            argument="num_nodes",
            found=f"num_nodes * devices = {size} on rank {rank}, and {first} on rank 0",
            allowed="the same on every machine, with as many devices",
        )


def _holder_of_store() -> str:
    return "the agent of torchrun" if has_agent() else "rank 0"


def _end_of_store(host: str) -> str:
    return f"{_holder_of_store()} on {host} {ENDED_EARLY}"


class _Connecting:
    """A thread in which torch connects this process (Rule 1)."""

    def __init__(self, connect: Callable[[Any], None], store: Any, me: str, first: str, timeout: timedelta) -> None:
        self.me = me
        self.is_connected = False
        self.error: BaseException | None = None
        self._failed_at = 0.0
        self._timeout, self._until = timeout, time.monotonic() + timeout.total_seconds()
        args = connect, store, first
        threading.Thread(target=self._run, args=args, name="superpipeline-nodes", daemon=True).start()

    @property
    def failed(self) -> bool:
        """Whether there is an error, and the end of another process would be known by now (Rule 3)."""
        return self.error is not None and time.monotonic() > self._failed_at + STORE_S

    def check(self) -> None:
        """Raise the error, unless it is that others did not connect in time: they are named then (Rule 4)."""
        if self.error is not None and self.failed and self._failed_at < self._until:
            raise self.error

    def check_late(self, ranks: Iterable[int], hosts: Sequence[str], seconds: float) -> None:
        """Raise PeerError for silent ranks, or the error, this number of seconds after the timeout (Rule 4)."""
        if time.monotonic() > self._until + seconds:
            if names := ", ".join(f"rank {rank} on {hosts[rank]}" for rank in ranks):
                raise PeerError(f"{self.me} waited {self._timeout} for all to be connected: {names} did not come")
            if self.error is not None:
                raise self.error

    def _run(self, connect: Callable[[Any], None], store: Any, first: str) -> None:
        try:
            with _typed(self.me, store, first):
                connect(store)
            self.is_connected = True
        except BaseException as error:
            self._failed_at = time.monotonic()
            self.error = error


@contextlib.contextmanager
def _typed(me: str, store: Any, first: str) -> Iterator[None]:
    """Raise what torch says of connections that it cannot make, or lost, as a PeerError, with what to look at.

    ``store``: the one through which the processes find each other, on the host ``first``.
    """
    try:
        yield
    except RuntimeError as error:
        try:
            store.check(["any"])
        except RuntimeError:
            raise PeerError(_end_of_store(first)) from error
        raise PeerError(
            f"{me} could not connect to the other processes: {str(error).splitlines()[0]}. "
            "GLOO_SOCKET_IFNAME names each host's network interface, and NCCL_SOCKET_IFNAME that for NCCL"
        ) from error


class _Line(Protocol):
    """A line, or all lines, of a process (Rule 2)."""

    note: str  # what the first process leaves: where it waits for lines, its token, how many it expects, its host
    first: str  # the first process's host, or its address as long as that is all this process knows
    error: str  # why there is no line to it, though it left its note

    def prepare(self, note: str | None) -> bool:
        """Make the line for which the first process left this note; return whether this one may come to the meeting."""

    def hold(self, connecting: _Connecting, hosts: Sequence[str]) -> None:
        """Return once all processes are connected; raise what prevents it."""

    def close(self) -> None:
        """End the line. Safe twice."""


class _LineToFirst:
    """The line of another process than the first."""

    def __init__(self, rank: int, size: int, address: str) -> None:
        self.note, self.first, self.error = "", address, ""
        self._rank, self._size, self._address = rank, size, address
        self._line: socket.socket | None = None

    def prepare(self, note: str | None) -> bool:
        if note is not None and note != self.note:  # a later attempt than that of the line
            self.close()
            port, token, size, self.first = note.split()
            try:
                self._line = socket.create_connection((self._address, int(port)), timeout=LINE_S)
                self._line.sendall(f"{token} {self._rank} {self._size}".ljust(GREETING).encode())
                self.note, self.error = note, ""
            except OSError as error:
                self.error = f"no line to {self.first}, at {self._address}:{port}: {error}"
                return False
            _check_size(self._rank, self._size, int(size))
        return note is not None

    def hold(self, connecting: _Connecting, hosts: Sequence[str]) -> None:
        assert self._line is not None
        self._line.settimeout(PULSE_S)
        said = False
        while True:
            if not said and (connecting.is_connected or connecting.failed):
                said = True
                self._say(CONNECTED if connecting.is_connected else FAILED)
            connecting.check()
            connecting.check_late([0], hosts, 2 * SILENT_S)
            why = _heard(self._line)
            if why == CONNECTED:
                return
            if why is not None:
                while why and (more := _heard(self._line)):
                    why += more
                told = why.decode() or f"rank 0 on {hosts[0]} {ENDED_EARLY}"
                if connecting.error is not None and told.endswith(NO_MORE):
                    raise connecting.error
                raise PeerError(told)

    def close(self) -> None:
        line, self._line, self.note = self._line, None, ""
        if line is not None:
            line.close()

    def _say(self, word: bytes) -> None:
        assert self._line is not None
        with contextlib.suppress(OSError):  # what the first process says then, or its end, is heard next
            self._line.sendall(word)


class _LinesOfFirst:
    """The lines of the first process to all others."""

    def __init__(self, size: int) -> None:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._server = socket.create_server(("", 0), family=family, backlog=size, dualstack_ipv6=both)
        self._server.setblocking(False)
        self._token = os.urandom(8).hex()
        self.first, self.error = socket.gethostname(), ""
        self.note = f"{self._server.getsockname()[1]} {self._token} {size} {self.first}"
        self._size = size
        self._lines: dict[int, socket.socket] = {}
        self._unknown: dict[socket.socket, float] = {}  # those that have not said all yet, and how long they may

    def prepare(self, note: str | None) -> bool:
        self._accept()
        return True

    def hold(self, connecting: _Connecting, hosts: Sequence[str]) -> None:
        try:
            self._hold(connecting, hosts)
        except Exception as error:
            of_another = isinstance(error, PeerError) and error is not connecting.error
            self._say_why(str(error) if of_another else f"{connecting.me} {NO_MORE}")
            raise
        self._say(CONNECTED)

    def _hold(self, connecting: _Connecting, hosts: Sequence[str]) -> None:
        said: dict[int, bytes] = {}
        while not (connecting.is_connected and len(said) == self._size - 1):
            self._accept()
            connecting.check()
            connecting.check_late([rank for rank in range(1, self._size) if rank not in said], hosts, SILENT_S)
            said |= self._words()
            ended = [rank for rank, word in said.items() if word == ENDED]
            failed = [rank for rank, word in said.items() if word == FAILED]
            if ended or (failed and connecting.error is None):
                names = "; ".join(f"rank {rank} on {hosts[rank]}" for rank in sorted(ended or failed))
                raise PeerError(f"{names} {ENDED_EARLY if ended else NO_MORE}")

    def close(self) -> None:
        for line in (self._server, *self._unknown, *self._lines.values()):
            line.close()

    def _accept(self) -> None:
        """Take the lines that have come and begin as one does; others come from elsewhere, and keep nobody waiting."""
        with contextlib.suppress(OSError):  # there are no more, or one ended before
            while True:
                line, _ = self._server.accept()
                line.setblocking(False)
                self._unknown[line] = time.monotonic() + LINE_S
        for line, until in list(self._unknown.items()):
            greeting = _heard(line, GREETING, socket.MSG_PEEK)
            if (greeting is None or 0 < len(greeting) < GREETING) and time.monotonic() < until:
                continue
            del self._unknown[line]
            token, _, numbers = (_heard(line, GREETING) or b"").decode(errors="replace").partition(" ")
            if token == self._token:
                self._take(line, *map(int, numbers.split()))
            else:
                line.close()

    def _take(self, line: socket.socket, rank: int, size: int) -> None:
        before, self._lines[rank] = self._lines.get(rank), line
        _check_size(rank, size, self._size)
        if before is not None:
            before.setblocking(False)
            if _heard(before, 1, socket.MSG_PEEK) != ENDED:
                both = (peer.getpeername()[0].removeprefix("::ffff:") for peer in (before, line))
                raise twice(rank, "at " + " and ".join(both))
            before.close()
        line.settimeout(PULSE_S)

    def _words(self) -> dict[int, bytes]:
        """Wait a short time for words; return them by rank."""
        with selectors.DefaultSelector() as selector:
            for rank, line in self._lines.items():
                selector.register(line, selectors.EVENT_READ, rank)
            ready = [key.data for key, _ in selector.select(PULSE_S / 4)]
        heard = {rank: _heard(self._lines[rank], 1) or ENDED for rank in ready}
        for rank, word in heard.items():
            if word == ENDED:
                self._lines.pop(rank).close()
        return heard

    def _say(self, word: bytes) -> None:
        for line in self._lines.values():
            with contextlib.suppress(OSError):
                line.sendall(word)

    def _say_why(self, why: str) -> None:
        """Say why all end, and stay a short time until all heard it: the store may end with this process."""
        self._say(why.encode())
        for line in self._lines.values():
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_WR)
        until = time.monotonic() + READ_S
        while self._lines and time.monotonic() < until:
            self._words()


def _heard(line: socket.socket, most: int = 4096, flags: int = 0) -> bytes | None:
    """Return what came on a line, ENDED at its end, or None if nothing came within the line's timeout."""
    try:
        return line.recv(most, flags)
    except (TimeoutError, BlockingIOError):
        return None
    except OSError:
        return ENDED
