"""The board: numbers that the ranks of a machine post for one another, the waits for them, and who is alive.

1. The board is one shared slab of 64-bit numbers. Each has one rank that writes it, after what it announces: a number
   that another rank reads says that the bytes are there.
2. Every wait for another rank goes through `wait`. It ends with a `PeerError` that names the rank, once one has died,
   failed or left, and after the process group's timeout: nothing waits for a rank that cannot come. Who waited too
   long, or for a rank that left, notes on the board for whom, so that all ranks of all nodes name the same one.
3. Local rank 0 makes all shared memory and hands the descriptors on, over sockets that have no name in a file system.
   An abstract socket has no permissions: a descriptor goes to a process of the same user that shows the run's token.
   Other users' processes are turned away at once, and a process that says nothing keeps no other one waiting.
4. A second socket from each rank to rank 0 carries nothing. Its end is the end of the process: the kernel closes it,
   whatever the reason. So a forked process closes its copies. Before a rank has connected, its number tells its end.
5. A thread of each rank watches the sockets and the board, and logs at once that a rank ended or failed. Then it ends
   its own process if that hangs where nothing looks at the board: if it is in one call of torch.distributed for
   `GRACE_S`, or the others have waited for it in vain. A rank that computes, or writes a file, comes to the board in
   the end: it has the process group's timeout for that.
6. The state of ranks belongs to one run. A rank that stops since another one failed posts so, which names that one.
7. A rank that handles an exception may still save a checkpoint, for which the others wait: a launcher ends all ranks
   once one has exited. So the thread lets it go on, and its meetings are with the others that handle one.
8. Everything here is one node's, but for the state of ranks: of those on other nodes each rank knows what its node's
   first rank hears (transport.py, Rule 5), and what the end of its own connections says. Where all nodes have to agree,
   the ranks of each agree first, then its first rank asks the other nodes', and posts what came of it.
9. A thread of a rank that steps beside other code goes on while that code handles an exception. So who waits for it
   waits until it is done, or until the rank is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import hashlib
import hmac
import logging
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

from ..compat.modules import calls_of_distributed
from ..errors import PeerError
from ..host.machine import allow_all_descriptors
from ..memory.pinned import MappedRange
from ..nodes.arrivals import Arrivals
from ..nodes.transport import KEEPALIVE, NodePlace, NodeTransport
from .shared_memory import SharedSlab, make, paged

log = logging.getLogger(__name__)

HELLO = struct.Struct("!16sIc")  # token, rank, what the socket is for
DESCRIPTORS, LIFE = b"d", b"l"
SIZE = struct.Struct("!Q")
CREDENTIALS = struct.Struct("3i")  # process, user, group
ALIVE, ENDED, FAILED, SILENT, STOPPED, LEFT, CUT, LOST, MISSED = range(9)  # the state of a rank
NEWS = {
    ENDED: "ended",
    FAILED: "failed; its own error says why",
    SILENT: "did not come in time",
    STOPPED: "stopped because of another rank",
    LEFT: "has left the run",
    CUT: "ended, or the connection to it did",
    LOST: "cannot be reached: nothing came from its machine any more",
    MISSED: "has left the run while others wait for it: every rank needs as many batches",
}
CAUSES = ENDED, FAILED, SILENT, CUT, LOST, MISSED
HANDLING = FAILED, STOPPED  # those that handle an exception (Rule 7)
GIVEN_UP = ENDED, FAILED, STOPPED, LEFT, CUT, LOST, MISSED  # those that come to nothing more of the run
GONE = 1 << 62  # more meetings than there are: added to those of a rank that comes to no further one
WORD = 8
POLL_S = 2e-5, 2e-3  # the first pause between two looks at the board, and the longest
WATCH_S = 0.1  # between two looks of the thread that watches
GRACE_S = 4.0  # from the end of another rank to that of a process which hangs (Rule 5)
HELLO_S = 5.0  # how long a process may take to say who it is
LATER_S = 5.0  # by which a wait is longer than one that it may wait for: who waits for the culprit itself names it
FOR_GRADIENTS, AFTER_GRADIENTS, TO_AGREE, TO_HEAR = range(1, 5)  # waits that are so many times longer


class OneRank:
    """A process that trains by itself: what `Ranks` overrides."""

    rank = world_rank = 0
    size = world = 1

    def check(self) -> None:
        """Raise PeerError if a rank has died or failed."""

    def meet(self, what: str) -> None:
        """Wait until all ranks have come here as often as this one: before a collective, which would not name them."""

    def together(self, what: str | None) -> AbstractContextManager[None]:
        """Run a collective of torch, which may fail; with ``what`` once all ranks have come to it."""
        return contextlib.nullcontext()

    def fail(self, because_of_another: bool = False) -> None:
        """Tell the other ranks that this one cannot go on."""

    def close(self) -> None:
        """Leave the run: when this rank ends, the others go on. Safe twice."""

    def pass_on(self, make: Callable[[], int], what: int = 0) -> int:
        """Return the descriptor that the first rank makes, which all come to have; each caller closes its own.

        Every rank calls this, in the same order with the same number, of bytes or else.
        """
        return make()


ONE_RANK = OneRank()


class Ranks(OneRank):
    """The ranks of this machine: what they share, and what they know of one another."""

    def __init__(
        self,
        rank: int,
        size: int,
        token: bytes,
        timeout: timedelta,
        processes: Sequence[int] | None = None,
        place: NodePlace | None = None,
        keepalive: timedelta = KEEPALIVE,
        arrivals: Arrivals | None = None,
    ) -> None:
        self.rank, self.size = rank, size
        self.place = place or NodePlace(0, size, ("",))
        self.world_rank, self.world = self.place.first + rank, self.place.world
        self.timeout = timeout
        self._token = hashlib.sha256(token + b"%d" % self.place.node).digest()[: len(token)] if place else token
        self._arrivals = arrivals
        self._processes = processes  # the number of each rank's process, if they can see one another
        self._meetings = 0
        self._agreements = 0  # with other nodes
        self._boards = 0
        self.transport: NodeTransport | None = None  # to other nodes
        self._nodes: Board | None = None  # on which all nodes meet
        self.exchanges: weakref.WeakSet[Any] = weakref.WeakSet()  # of gradients, one for each model that they stream
        self._closed = False
        self._waiting_beside: set[int] = set()  # threads
        self._peers: dict[int, socket.socket] = {}  # for descriptors
        self._lives: dict[int, socket.socket] = {}
        self._state: ctypes.Array[ctypes.c_int64] | None = None
        self._slab: SharedSlab | None = None
        self._deadline = time.monotonic() + timeout.total_seconds()
        _mind_forks(self)
        allow_all_descriptors()  # each unit has one, and more are on their way where a rank is late
        try:
            address = _address(self._token)
            if rank == 0:
                self._accept(address)
            else:
                self._connect(address)
            # Of each rank its state, and how often it came to a meeting, before an exception and while it handles one.
            world = self.world
            self._slab = self.share(3 * world * WORD)
        except BaseException as error:
            self.fail(because_of_another=isinstance(error, PeerError))
            self.close()
            raise
        self._state = (ctypes.c_int64 * world).from_address(self._slab.truth.data_ptr())
        self._came = (ctypes.c_int64 * world).from_address(self._slab.truth.data_ptr() + world * WORD)
        self._came_handling = (ctypes.c_int64 * world).from_address(self._slab.truth.data_ptr() + 2 * world * WORD)
        threading.Thread(target=self._watch, name="superpipeline-ranks", daemon=True).start()
        if self.world > size:
            try:
                self.transport = self._connect_nodes(token, keepalive)
                self._nodes = Board(self, 0)
                self.meet("a connection to other machines")  # of all ranks: until then news may come by the store alone
            except BaseException as error:
                self.fail(because_of_another=isinstance(error, PeerError))
                news = self._news()
                self.close()
                if isinstance(error, PeerError) and news:
                    raise PeerError(news) from error
                raise

    # ---- shared memory

    def share(self, nbytes: int, keep: bool = False) -> SharedSlab:
        """Make a slab that all ranks share, as `descriptor` does; ``keep``: with room for further faces."""
        nbytes = paged(max(nbytes, 1))
        return SharedSlab(MappedRange(self.descriptor(nbytes)), nbytes, self.rank == 0, keep)

    def descriptor(self, nbytes: int) -> int:
        """Make memory that all ranks share, and return its descriptor, which the caller closes; see `pass_on`."""
        return self.pass_on(functools.partial(make, nbytes), nbytes)

    def pass_on(self, make: Callable[[], int], what: int = 0) -> int:
        if self.rank == 0:
            descriptor = make()
            try:
                for rank, peer in self._peers.items():
                    with self._talking_to(rank):
                        socket.send_fds(peer, [SIZE.pack(what)], [descriptor])
            except BaseException:
                os.close(descriptor)
                raise
            return descriptor
        with self._talking_to(0):
            self.wait(lambda: [] if _is_readable(self._peers[0]) else [0], "the memory that they share")
            message, descriptors, _, _ = socket.recv_fds(self._peers[0], SIZE.size, 1, socket.MSG_CMSG_CLOEXEC)
            if not descriptors:
                raise EOFError("no descriptor came")
            (found,) = SIZE.unpack(message)
        if found != what:
            os.close(descriptors[0])
            raise PeerError(
                f"{self.name()} needs {what} bytes of shared memory, {self.local(0)} {found}: their models differ; "
                "make the same model on every rank"
            )
        return descriptors[0]

    # ---- waits

    def wait(self, missing: Callable[[], Sequence[int]], what: str, longer: int = 0) -> None:
        """Wait until no rank of this node is missing any more: what each posts is on the board (Rule 2)."""
        first = self.place.first
        here = range(first, first + self.size)
        seconds = self.timeout.total_seconds() + longer * LATER_S
        ended = functools.partial(self._why_late, of=here)
        self._wait(lambda: [first + rank for rank in missing()], what, seconds, ended)

    def wait_for_nodes(self, missing: Callable[[], Sequence[int]], what: str, longer: int = FOR_GRADIENTS) -> None:
        """Wait until no rank of another node is missing any more, by its number among all (Rule 8)."""
        self._wait(missing, what, self.timeout.total_seconds() + longer * LATER_S, self._why_late)

    def wait_beside(self, missing: Callable[[], Sequence[int]], what: str) -> None:
        """Wait until no rank is missing any more, by its number among all.

        It is for what threads of that rank do beside other code (Rule 9).
        """
        thread = threading.get_ident()

        def ended(states: Sequence[int], _: Sequence[int]) -> str:
            gone = {rank for rank, came in enumerate(self._came_handling) if came >= GONE}  # first: it may have posted
            missed = gone.intersection(missing())
            return self._why_late(states, [*missed]) if missed else ""

        self._waiting_beside.add(thread)
        try:
            self._wait(missing, what, self.timeout.total_seconds(), ended)
        finally:
            self._waiting_beside.discard(thread)

    def _wait(
        self,
        missing: Callable[[], Sequence[int]],
        what: str,
        seconds: float,
        ended: Callable[[Sequence[int], Sequence[int]], str],
    ) -> None:
        """Wait until no rank is missing; ``ended``: says of states, and of those missing, why they will not come."""
        if not missing():
            return
        deadline = time.monotonic() + seconds
        pause, longest = POLL_S
        while True:
            states = list(self._state or ())  # read first: who left may have posted before that
            awaited = missing()
            if not awaited:
                return
            if news := ended(states, awaited):
                if not missing():  # again: who failed meanwhile may have posted before that
                    return
                raise PeerError(news)
            if time.monotonic() > deadline:
                for rank in awaited:
                    self._note(rank, SILENT)
                raise PeerError(self._silent(what, awaited))
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def meet(self, what: str) -> None:
        if self._handles_exception:
            self._meet_handling(what)
            return
        self._meetings += 1
        first = self.place.first
        now = self._came[self.world_rank] = self._meetings
        self.wait(lambda: [rank for rank in range(self.size) if self._came[first + rank] < now], what)
        if self._nodes is not None:
            self._nodes.alike(0, what)

    def _meet_handling(self, what: str) -> None:
        """Wait until all ranks have come here while they handle an exception, or are gone: a PeerError (Rule 7)."""
        assert self._state is not None
        self._came_handling[self.world_rank] += 1
        now = self._came_handling[self.world_rank]
        deadline = time.monotonic() + self.timeout.total_seconds()
        while missing := [
            rank for rank, came in enumerate(self._came_handling) if came < now and self._state[rank] != SILENT
        ]:
            if time.monotonic() > deadline:
                raise PeerError(self._silent(what, missing))
            time.sleep(POLL_S[1])
        if any(came % GONE < now for came in self._came_handling):
            others = [
                state or LEFT * (came >= GONE) for state, came in zip(self._state, self._came_handling, strict=True)
            ]
            others[self.world_rank] = ALIVE  # it may have failed, but its own error says that
            raise PeerError(self._news((STOPPED, LEFT), others))

    def _why_late(self, states: Sequence[int], late: Sequence[int], of: Sequence[int] | None = None) -> str:
        """Describe why ranks of ``of``, or else the late ones, do not come; note which late ones left (Rule 2)."""
        for rank in late:
            if rank < len(states) and states[rank] == LEFT:
                self._note(rank, MISSED)
        return self._news((STOPPED,), of=late if of is None else of)

    @property
    def _handles_exception(self) -> bool:
        return self._state is not None and self._state[self.world_rank] in HANDLING

    def given_up(self) -> set[int]:
        """Return the ranks of this node that come to nothing more of the run: what they have posted is final."""
        if self._state is None:
            return set()
        return {rank for rank in range(self.size) if self._state[self.place.first + rank] in GIVEN_UP}

    def _connect_nodes(self, token: bytes, keepalive: timedelta) -> NodeTransport:
        """Connect to the other nodes beside the waits of the board: a rank of this node may end in the meantime."""
        made: list[NodeTransport | Exception] = []

        def connect() -> None:
            try:
                made.append(NodeTransport(self.place, self.rank, token, self.timeout, keepalive, self))
            except Exception as error:
                made.append(error)

        threading.Thread(target=connect, name="superpipeline-nodes", daemon=True).start()
        others = [rank for rank in range(self.world) if not 0 <= rank - self.place.first < self.size]

        def missing() -> list[int]:
            self._check_arrivals()
            return [] if made else others

        self.wait_for_nodes(missing, "a connection to other machines")
        if isinstance(made[0], Exception):
            raise made[0]
        return made[0]

    def numbers_of_nodes(self, purpose: int, number: int, what: str) -> list[int]:
        """List the numbers with which other nodes come to the same place. Each one's first rank asks (Rule 8)."""
        transport, at = self.transport, self._agreements
        assert transport is not None
        self._agreements += 1
        transport.say(at, (purpose, number))
        self.wait_for_nodes(lambda: transport.unsaid(at), what, TO_AGREE)
        words = transport.words(at)
        for node, (other, _) in words.items():
            if other != purpose:
                raise PeerError(
                    f"{self.name()} came to {what}, and {self.place.name(node * self.size)} to something else: all "
                    "ranks need the same number of batches, and the same collectives"
                )
        return [word for _, word in words.values()]

    # ---- what other nodes say (Rule 8)

    def heard(self, node: int, states: Sequence[int], came: Sequence[int]) -> None:
        """Take what another node's board says of all ranks' states, and of its own ranks' meetings."""
        for rank, state in enumerate(states):
            if state not in (ALIVE, LEFT):  # who left may have sent what has not come yet: its farewell comes after it
                self._note(rank, state)
        for rank, number in enumerate(came):
            at = node * self.size + rank
            self._came_handling[at] = max(self._came_handling[at], number)

    def lost(self, rank: int) -> None:
        """Note that the connection to a rank of another node ended without a farewell."""
        self._note(rank, CUT)
        self._note_gone(rank)

    def left(self, rank: int, state: int) -> None:
        """Note that a rank of another node has left in this state."""
        self._note(rank, state)
        self._note_gone(rank)

    def _own(self) -> list[int]:
        """List what other nodes hear of this one."""
        assert self._state is not None
        first = self.place.first
        return [*self._state, *self._came_handling[first : first + self.size]]

    def check(self) -> None:
        if news := self._news():
            raise PeerError(news)

    def explain(self, error: Exception) -> PeerError | None:
        """Return the error of a rank in a collective of torch, whose own error does not name the rank that ended."""
        until = time.monotonic() + 1
        while not (news := self._news()) and time.monotonic() < until and not self._closed:
            time.sleep(POLL_S[1])
        return PeerError(f"{news} ({error})") if news else None

    @contextlib.contextmanager
    def together(self, what: str | None) -> Iterator[None]:
        if what is not None:
            self.meet(what)
        try:
            yield
        except RuntimeError as error:
            peer_error = self.explain(error)
            if peer_error is None:
                raise
            raise peer_error from error

    def fail(self, because_of_another: bool = False) -> None:
        self._note(self.world_rank, STOPPED if because_of_another else FAILED)

    def close(self) -> None:
        self._note(self.world_rank, LEFT)
        self._note_gone(self.world_rank)
        if self.transport is not None:
            assert self._state is not None
            self.transport.close(self._state[self.world_rank], self._own(), self._handles_exception)
        self._closed = True
        for end in (*self._lives.values(), *self._peers.values()):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close_copies(self) -> None:
        """Close a forked process's copies of the sockets: a rank's end must close the last one (Rule 4)."""
        self._closed = True
        for end in (*self._lives.values(), *self._peers.values()):
            end.close()
        if self.transport is not None:
            self.transport.close_copies()

    # ---- details

    def number_board(self) -> int:
        """Number a board that is being made: the same one on all ranks has the same number."""
        self._boards += 1
        return self._boards

    def _note(self, rank: int, state: int) -> None:
        if self._state is None:  # there is no board yet
            return
        if self._state[rank] == ALIVE or (self._state[rank] == LEFT and state == MISSED):
            self._state[rank] = state
            if self.transport is not None:
                self.transport.drains = True  # what nobody will take must not hide a farewell

    def _note_gone(self, rank: int) -> None:
        """Note that a rank comes to no further meeting of the ranks that handle an exception (Rule 7)."""
        if self._state is not None and self._came_handling[rank] < GONE:
            self._came_handling[rank] += GONE

    def name(self, rank: int | None = None) -> str:
        """Return what messages call this rank, or the one with this number among all ranks."""
        return self.place.name(self.world_rank if rank is None else rank)

    def local(self, rank: int) -> str:
        """Return what messages call a rank of this node."""
        return self.name(self.place.first + rank)

    def _silent(self, what: str, ranks: Sequence[int]) -> str:
        return f"{self.name()} waited {self.timeout} for {what}: {', '.join(map(self.name, ranks))} did not come"

    def _news(
        self, others: Sequence[int] = (), states: Sequence[int] | None = None, of: Sequence[int] | None = None
    ) -> str:
        """Describe the ranks that failed by themselves, or if none did, those of ``of`` in a state of ``others``."""
        found = list(enumerate((self._state or ()) if states is None else states))
        causes = [(rank, state) for rank, state in found if state in CAUSES]
        rest = [(rank, state) for rank, state in found if state in others and (of is None or rank in of)]
        return "; ".join(f"{self.name(rank)} {NEWS[state]}" for rank, state in causes or rest)

    def _accept(self, address: str) -> None:
        """Wait for the sockets of all other ranks."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
            server.bind(address)
            server.listen(128)
            server.setblocking(False)
            unknown: dict[int, tuple[socket.socket, float]] = {}  # until they say who they are
            poll = select.poll()
            poll.register(server, select.POLLIN)
            try:
                while len(self._peers) + len(self._lives) < 2 * (self.size - 1):
                    for number, _ in poll.poll(WATCH_S * 1000):
                        if number in unknown:
                            poll.unregister(number)
                            self._admit(unknown.pop(number)[0])
                        elif (peer := self._of_this_user(server)) is not None:
                            unknown[peer.fileno()] = peer, time.monotonic() + HELLO_S
                            poll.register(peer, select.POLLIN)
                    self._look_for_the_missing()
                    for number in [at for at, (_, until) in unknown.items() if time.monotonic() > until]:
                        poll.unregister(number)
                        unknown.pop(number)[0].close()
            finally:
                for peer, _ in unknown.values():
                    peer.close()

    def _of_this_user(self, server: socket.socket) -> socket.socket | None:
        """Take a connection if it is one of this user's processes (Rule 3)."""
        try:
            peer, _ = server.accept()
        except OSError:  # it is gone, or this process has no descriptor left for it
            return None
        peer.setblocking(False)
        _, user, _ = CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
        if user == os.geteuid():
            return peer
        log.warning("superpipeline: a process of user %d, which is not of this run, asked for its memory", user)
        peer.close()
        return None

    def _admit(self, peer: socket.socket) -> None:
        """Take a connection that says something, if it shows the run's token (Rule 3)."""
        try:
            token, rank, purpose = HELLO.unpack(peer.recv(HELLO.size))
        except (OSError, struct.error):
            peer.close()
            return
        place = {DESCRIPTORS: self._peers, LIFE: self._lives}.get(purpose)
        right = hmac.compare_digest(token, self._token)
        if not right or place is None or not 0 < rank < self.size or rank in place:
            log.warning("superpipeline: a process that is not of this run asked for its memory")
            peer.close()
            return
        peer.settimeout(self.timeout.total_seconds())
        place[rank] = peer

    def _check_arrivals(self) -> None:
        """Raise PeerError if a rank of any node failed before all were connected."""
        if self._arrivals is not None:
            self._arrivals.check()

    def _look_for_the_missing(self) -> None:
        self._check_arrivals()
        for rank, life in self._lives.items():
            if _is_readable(life):
                raise PeerError(f"{self.local(rank)} ended while the ranks connected")
        missing = [rank for rank in range(1, self.size) if not (rank in self._peers and rank in self._lives)]
        for rank in missing:
            self._check_process(rank)
        if missing and time.monotonic() > self._deadline:
            names = ", ".join(map(self.local, missing))
            raise PeerError(f"{names} did not come within {self.timeout}")

    def _check_process(self, rank: int) -> None:
        if self._processes is not None and _is_gone(self._processes[rank]):
            raise PeerError(f"{self.local(rank)} ended before the ranks were connected")

    def _connect(self, address: str) -> None:
        for purpose, place in ((DESCRIPTORS, self._peers), (LIFE, self._lives)):
            while True:
                peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                peer.settimeout(self.timeout.total_seconds())
                try:
                    peer.connect(address)
                    peer.send(HELLO.pack(self._token, self.rank, purpose))
                    break
                except OSError as error:
                    peer.close()
                    self._check_process(0)
                    self._check_arrivals()
                    if time.monotonic() > self._deadline:
                        raise PeerError(f"{self.local(0)} did not answer within {self.timeout} ({error})") from None
                    time.sleep(0.01)
            place[0] = peer

    @contextlib.contextmanager
    def _talking_to(self, rank: int) -> Iterator[None]:
        try:
            yield
        except (OSError, EOFError) as error:
            self._note(self.place.first + rank, ENDED)  # if it says nothing else
            raise PeerError(
                self._news() or f"{self.local(rank)} ended while memory was being shared ({error})"
            ) from error

    def _watch(self) -> None:
        """Note on the board whose process ended, and log what is there (Rules 4 and 5)."""
        assert self._state is not None
        lives = {life.fileno(): rank for rank, life in self._lives.items()}
        poll = select.poll()
        for number in lives:
            poll.register(number, select.POLLIN | select.POLLHUP | select.POLLRDHUP)
        logged: set[int] = set()
        since: dict[object, float] = {}  # for each reason to end this process
        while not self._closed:
            for number, _ in poll.poll(WATCH_S * 1000):
                poll.unregister(number)
                if not self._closed:
                    self._note(rank := self.place.first + lives.pop(number), ENDED)
                    self._note_gone(rank)
            if self.transport is not None:
                for rank in self.transport.pulse(self._own):
                    self._note(rank, LOST)
                    self._note_gone(rank)
            news = {rank: state for rank, state in enumerate(self._state) if state in CAUSES}
            for rank in news.keys() - logged:
                logged.add(rank)
                if rank != self.world_rank or news[rank] == SILENT:
                    log.error("superpipeline: %s %s", self.name(rank), NEWS[news[rank]])
            now, given = time.monotonic(), dict[object, float]()
            if news.get(self.world_rank) == SILENT:
                given[SILENT] = GRACE_S
            if news.keys() - {self.world_rank}:
                given |= dict.fromkeys(calls_of_distributed(), GRACE_S) | {ENDED: self.timeout.total_seconds()}
            since = {reason: since.get(reason, now) for reason in given}
            hangs = any(now - since[reason] >= seconds for reason, seconds in given.items())
            if hangs and not (self._closed or self._handles_exception or self._waiting_beside):
                self._end_process(self._news())

    def _end_process(self, news: str) -> None:
        """End this process, which hangs (Rule 5)."""
        log.critical("superpipeline: %s hangs and is ended, since %s", self.name(), news)
        with contextlib.suppress(Exception):
            faulthandler.dump_traceback(sys.stderr)  # where it hangs
        os.kill(os.getpid(), signal.SIGKILL)


def _address(token: bytes) -> str:
    """Name the socket of a run: the name is public, in /proc/net/unix, and says nothing of the token."""
    return "\0superpipeline-" + hashlib.sha256(b"address" + token).hexdigest()[:32]


def _is_readable(end: socket.socket) -> bool:
    """Whether something came, or the other end is closed."""
    poll = select.poll()
    poll.register(end, select.POLLIN | select.POLLHUP | select.POLLRDHUP)
    return bool(poll.poll(0))


def _is_gone(process: int) -> bool:
    """Whether a process ended, also if its parent does not know yet."""
    try:
        with open(f"/proc/{process}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


_all: weakref.WeakSet[Ranks] = weakref.WeakSet()


def _mind_forks(ranks: Ranks) -> None:
    _register()
    _all.add(ranks)


@functools.cache
def _register() -> None:
    os.register_at_fork(after_in_child=_close_copies)


def _close_copies() -> None:
    for ranks in list(_all):
        ranks.close_copies()


class Board:
    """Rows of numbers, one for each rank (Rule 1), and places where all ranks meet."""

    def __init__(self, ranks: Ranks, numbers: int) -> None:
        self._ranks = ranks
        self._width = numbers + 2
        self._slab = ranks.share(ranks.size * self._width * WORD)
        # One access for each number, unlike a tensor's.
        self._words = (ctypes.c_int64 * (ranks.size * self._width)).from_address(self._slab.truth.data_ptr())
        self._meetings = 0
        self._number = ranks.number_board()

    def post(self, index: int, number: int) -> None:
        """Post a number in this rank's row."""
        self._words[self._ranks.rank * self._width + 2 + index] = number

    def read(self, rank: int, index: int) -> int:
        """Read a number of a rank's row."""
        return self._words[rank * self._width + 2 + index]

    def row(self, rank: int, start: int, end: int) -> list[int]:
        """Read several numbers of a rank's row."""
        first = rank * self._width + 2
        return self._words[first + start : first + end]

    def meet(self, longer: int = 0) -> None:
        """Wait until all ranks have come here as often as this one, ``longer`` where they come from such a wait."""
        self._meetings += 1
        self._words[self._ranks.rank * self._width] = self._meetings
        self._wait_for_all(longer)

    def exchange(self, number: int, longer: int = 0) -> list[int]:
        """Return the numbers with which all ranks come to this meeting."""
        self._words[self._ranks.rank * self._width + 1] = number
        self.meet(longer)
        numbers = [self._words[rank * self._width + 1] for rank in range(self._ranks.size)]
        self.meet()  # nobody overwrites its number before all have read it
        return numbers

    def alike(self, number: int, what: str = "a meeting of all") -> bool:
        """Whether all ranks come to this meeting with the same number, on every node (Rule 8)."""
        same, ranks = len(set(self.exchange(number))) == 1, self._ranks
        if ranks.transport is None:
            return same
        mine = number if same else -1
        verdict = ranks.rank == 0 and {*ranks.numbers_of_nodes(self._number, mine, what), mine} == {number}
        return bool(self.exchange(int(verdict), TO_HEAR)[0])

    def least(self, number: int) -> int:
        """Return the least of the numbers with which all ranks come to this meeting, on every node (Rule 8)."""
        found, ranks = min(self.exchange(number)), self._ranks
        if ranks.transport is None:
            return found
        if ranks.rank == 0:
            found = min(found, *ranks.numbers_of_nodes(self._number, found, "a meeting of all"))
        return self.exchange(found, TO_HEAR)[0]

    def _wait_for_all(self, longer: int) -> None:
        now, width = self._meetings, self._width
        self._ranks.wait(
            lambda: [rank for rank in range(self._ranks.size) if self._words[rank * width] < now],
            "a meeting of all",
            longer,
        )
