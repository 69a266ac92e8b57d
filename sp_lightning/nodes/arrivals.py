"""Ranks of a process group until they are connected: they meet in its store, and name who ends or fails there.

1. Who fails says so in the store, and so does who sees that another process ended: all raise what is said first.
2. Where the group has connections of gloo, each rank listens on them to all others, until these take leave: a
   connection ends with its process.
3. What an earlier meeting of the group left in the store is not of this one: all that counts names the processes.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from ..compat.tensors import default_store, gloo_of, known_group, members_of, store_within
from ..errors import OptionError, PeerError
from .transport import FOREVER, PAUSE_S, PULSE_S

LEAVES = 7351  # a tag in groups of the user's, of the word that says that a rank need not be listened to (Rule 2)
READ_S = 2.0  # how long a process that is to end waits for others to read what it leaves in a store
STORE_S = 1.0  # how long after the end of a store that of a connection may be noticed
ANSWER_S = 5.0  # how long a store may take to answer in any case
ENDED_EARLY, NO_MORE = "ended before all ranks were connected", "failed; its own error says why"


class NoAnswer(RuntimeError):
    """A store that exists did not answer."""


def answer(ask: Callable[[], Any], until: float) -> Any:
    """Ask a store, or make one, in a thread of its own; raise NoAnswer if no answer came until then.

    torch waits without end where another process holds the store and is stopped, in code that nothing interrupts.
    """
    found: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def asking() -> None:
        try:
            found.put((ask(), None))
        except BaseException as error:
            found.put((None, error))

    threading.Thread(target=asking, name="superpipeline-nodes", daemon=True).start()
    try:
        value, error = found.get(timeout=max(until - time.monotonic(), ANSWER_S))
    except queue.Empty:
        raise NoAnswer("no answer came from there") from None
    if error is not None:
        raise error
    return value


class AnsweringStore:
    """A store whose answers are waited for until a time, as `answer` does."""

    def __init__(self, store: Any, until: float) -> None:
        self.store, self.until = store, until

    def within(self, name: str) -> AnsweringStore:
        """Return the part of the store whose keys begin with this name."""
        return AnsweringStore(store_within(name, self.store), self.until)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self.store, name)
        return lambda *args: answer(functools.partial(method, *args), self.until)


class Meeting:
    """A meeting of ranks in a store: each brings a text, and gets those of all once all have come.

    A store may outlive processes: an agent of torchrun keeps it over restarts, and others count these in another way.
    So the first rank's process names the attempt, and an attempt is this one if its first rank has met this process.
    """

    def __init__(self, store: AnsweringStore, rank: int, size: int, note: str = "") -> None:
        """Begin a meeting. ``note``: what the first rank leaves for the others to read before they come."""
        self._store, self._rank, self._size = store, rank, size
        self.process = os.urandom(8).hex()
        self.attempt = store  # once all have met, a part of it that is this attempt's alone
        self._given_up = ""  # an earlier attempt, if that is the one that is there
        if rank == 0:
            store.within(self.process).set("note", note)
            store.set("attempt", self.process)
        elif self._here().check(["late"]):
            self._given_up = self._number()

    def note(self) -> str | None:
        """Return what the first rank left, once it is there."""
        attempt = self._here()
        return str(attempt.get("note").decode()) if attempt.check(["note"]) else None

    def come(self, text: str) -> list[str] | None:
        """Bring a text; return those of all, or None while some are missing."""
        attempt = self._here()
        attempt.set(f"{self._rank}", f"{self.process} {text}")
        ranks = [f"{rank}" for rank in range(self._size)]
        if self._rank == 0 and attempt.check(ranks):
            said = attempt.multi_get(ranks)
            attempt.set("met", json.dumps([one.decode().split(" ", 1) for one in said]))
        met = json.loads(attempt.get("met")) if attempt.check(["met"]) else []
        if not met or met[self._rank][0] != self.process:  # or they met in an earlier attempt
            return None
        self.attempt = attempt
        return [text for _, text in met]

    def missing(self) -> list[int]:
        """List the ranks that have not come."""
        attempt = self._here()
        return [rank for rank in range(self._size) if rank != self._rank and not attempt.check([f"{rank}"])]

    def give_up(self, late: Sequence[int]) -> None:
        """Say which ranks did not come, and stay a short time until those that have come know, as in `stay`."""
        attempt = self._here()
        attempt.set("late", json.dumps(late))
        _wait_for_readers(attempt, "know", self._size - len(late))

    def late(self) -> list[int]:
        """List the ranks for which the first one waits no more."""
        attempt = self._here()
        if not attempt.check(["late"]) or self._number() == self._given_up:
            return []
        found = json.loads(attempt.get("late"))
        _wait_for_readers(attempt, "know", 0)
        return list(found)

    def stay(self) -> None:
        """Stay a short time until all have read what all brought: the store may end with this process."""
        with contextlib.suppress(RuntimeError):  # it ended with another one
            _wait_for_readers(self.attempt, "read", self._size)

    def _number(self) -> str:
        return str(self._store.get("attempt").decode()) if self._store.check(["attempt"]) else "none"

    def _here(self) -> AnsweringStore:
        number = self._number()
        if self._rank == 0 and number != self.process:
            raise twice(0, "which both come to the same MASTER_ADDR and MASTER_PORT")
        return self._store.within(number)


class Arrivals:
    """The ranks of a process group until they are connected, who all name the same one that fails (Rule 1)."""

    def __init__(self, group: Any, rank: int, host: str, timeout: timedelta) -> None:
        group = known_group(group)
        members, name = members_of(group)
        self._rank, self._size, self._hosts = rank, len(members), {rank: host}
        self._holder = members.index(0) if 0 in members and not has_agent() else None  # its process has the store
        self._ended: dict[int, str] = {}  # ranks whose process ended, and the address that it had
        self._failed: set[int] = set()  # those that said that they go on no more
        self._looked_at = 0.0
        self._gloo = gloo_of(group)
        self._peers = [peer for peer in range(self._size) if peer != rank and self._gloo is not None]
        for peer in self._peers:
            threading.Thread(target=self._listen, args=(peer,), name="superpipeline-nodes", daemon=True).start()
        with self._store_there():
            until = time.monotonic() + timeout.total_seconds()
            self._store = AnsweringStore(default_store(), until).within(f"superpipeline/{name}")
            self.meeting = Meeting(self._store, rank, self._size)
            self._store.set(f"at/{rank}", f"{self.meeting.process} {host}")

    def gather(self, text: str, timeout: timedelta) -> list[str]:
        """Return the texts that all ranks bring; whoever came can say on which host the store is, should it end."""
        until, pause = time.monotonic() + timeout.total_seconds(), PAUSE_S
        while True:
            with self._store_there():
                self._learn_hosts()
                unknown = [] if self._holder is None or self._holder in self._hosts else [self._holder]
                texts = None if unknown else self.meeting.come(text)
            if texts is not None:
                return texts
            self.check()
            if time.monotonic() > until:
                with self._store_there():
                    self._learn_hosts(late := unknown or self.meeting.missing())
                names = ", ".join(map(self.name, late)) or "another rank"
                raise PeerError(f"{self.name(self._rank)} waited {timeout} for all ranks: {names} did not come")
            time.sleep(pause)
            pause = min(2 * pause, PULSE_S)

    def know(self, hosts: Sequence[str]) -> None:
        """Note the host of each rank."""
        self._hosts = dict(enumerate(hosts))

    def name(self, rank: int) -> str:
        """Return what messages call a rank: by its host if it has come, else by its address if it ended."""
        host = self._hosts.get(rank) or self._ended.get(rank)
        return f"rank {rank} on {host}" if host else f"rank {rank}"

    def check(self) -> None:
        """Raise PeerError if a rank ended or failed, which this one looks for now and then."""
        if not (self._ended or self._failed) and time.monotonic() - self._looked_at < PULSE_S:
            return
        self._looked_at = time.monotonic()
        with self._store_there():
            said = self._said_here(self._store.get("why").decode()) if self._store.check(["why"]) else ""
            self._learn_hosts()
        if said := said or self._news():
            raise PeerError(said)

    def blame(self, error: BaseException) -> str:
        """Say to all why the ranks do not connect, unless it was said before; return what was said first."""
        said = str(error) if isinstance(error, PeerError) else f"{self.name(self._rank)} {NO_MORE}"
        self._store.until = time.monotonic()  # this process is to end
        with contextlib.suppress(RuntimeError):  # the store ended
            there = [rank for rank in range(self._size) if self._store.check([f"at/{rank}"])]
            at = self._store.multi_get([f"at/{rank}" for rank in there])
            processes = [one.decode().partition(" ")[0] for one in at]
            before, mine = "", json.dumps([said, processes])
            while not (first := self._said_here(now := self._store.compare_set("why", before, mine).decode())):
                before = now
            said = first
            self.leave(NO_MORE)
            if self._holder in there:  # whose process ends last, or it would take this with it
                readers = self._size - len(self._ended) if self._rank == self._holder else 0
                _wait_for_readers(self._store, f"why/{processes[there.index(self._holder)]}", readers)
        return said

    def leave(self, why: str = "") -> None:
        """Tell the others that they need not listen any more whether this process ends. Safe twice."""
        peers, self._peers = self._peers, []
        word = torch.tensor([bool(why)], dtype=torch.int64, device="cpu")
        threading.Thread(target=self._tell, args=(peers, word), name="superpipeline-nodes", daemon=True).start()

    # ---- details

    def _learn_hosts(self, late: Sequence[int] = ()) -> None:
        """Learn on which hosts those are that may have to be named, while the store is there."""
        ranks = {*late, *self._ended, *self._failed, *([] if self._holder is None else [self._holder])}
        for rank in ranks - self._hosts.keys():
            if self._store.check([f"at/{rank}"]):
                self._hosts[rank] = self._store.get(f"at/{rank}").decode().partition(" ")[2]

    def _said_here(self, told: str) -> str:
        """Return what was said to this process; in an earlier meeting it was said to others (Rule 3)."""
        said, processes = json.loads(told)
        return str(said) if self._failed or self.meeting.process in processes else ""

    def _news(self) -> str:
        """Describe the ranks that ended, or if none did those that failed."""
        ranks, what = (self._ended, ENDED_EARLY) if self._ended else (self._failed, NO_MORE)
        return "; ".join(f"{self.name(rank)} {what}" for rank in sorted(ranks))

    @contextlib.contextmanager
    def _store_there(self) -> Iterator[None]:
        """Use the store, whose end is that of the process which holds it."""
        try:
            yield
        except RuntimeError as error:
            until = time.monotonic() + STORE_S
            while self._peers and not self._ended and time.monotonic() < until:
                time.sleep(PAUSE_S)
            if self._holder in self._ended:
                self._ended = {self._holder: self._ended[self._holder]}  # the others ended because of it
            who = "" if self._holder is None else f" ({self.name(self._holder)})"
            what = "does not answer" if isinstance(error, NoAnswer) else f"ended: {str(error).splitlines()[0]}"
            news = self._news() or f"the process that holds the store of the process group{who} {what}"
            raise PeerError(news) from error

    def _listen(self, peer: int) -> None:
        word = torch.zeros(1, dtype=torch.int64, device="cpu")
        try:
            self._gloo.recv([word], peer, LEAVES).wait(FOREVER)
        except RuntimeError as error:
            address = re.search(r"\[([^]/]+)\]:\d", str(error))
            self._ended[peer] = address[1] if address else ""
        if word.item():
            self._failed.add(peer)

    def _tell(self, peers: Sequence[int], word: Tensor) -> None:
        works = []
        for peer in peers:
            with contextlib.suppress(RuntimeError):  # it ended
                works.append(self._gloo.send([word], peer, LEAVES))
        for work in works:
            with contextlib.suppress(RuntimeError):
                work.wait(FOREVER)


def _wait_for_readers(store: Any, name: str, count: int) -> None:
    """Count this process as a reader, and wait a short time until there are as many."""
    until = time.monotonic() + READ_S
    store.add(name, 1)
    while store.add(name, 0) < count and time.monotonic() < until:
        time.sleep(10 * PAUSE_S)


def twice(rank: int, where: str) -> OptionError:
    """Return the error of two processes that have one rank."""
    allowed = "another number on each machine, from 0 on"
    return OptionError(argument="NODE_RANK", found=f"two processes with rank {rank}, {where}", allowed=allowed)


def has_agent() -> bool:
    """Whether an agent of torchrun holds the store, in place of the first rank's process."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
