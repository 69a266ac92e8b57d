"""Messages between nodes: host tensors in process groups of torch's gloo, and the groups that the ranks make for them.

A *node* is the ranks of one machine, which share one host copy of the model. A *rail* is the same local rank of every
node. Ranks have a local number, and one among all nodes', which errors say.

1. Nothing but host tensors crosses the network, in gloo groups of the library's own: NCCL has no host tensors, and the
   user's group may be one of NCCL. A process group's members come node by node, as many on each.
2. A message is a header, which says what it is, and its bytes. Nothing is agreed of their order: each node sends its
   units in the order in which it has them, and finds those of the others by their keys. So blocks that a node skips,
   and experts without tokens, need no flag here either.
3. Nobody waits for the network here: a thread sends, and one for each peer receives. Whoever needs a message looks
   whether it is there, in a wait of the board, which ends with the news of ranks (board.py, Rule 2).
4. The bytes of a message are packed when its turn comes to be sent; until then they stay where they are. A receiver
   that has `AHEAD` *parts* of a peer which nobody has taken leaves the next ones to their sender, so that a node which
   is far behind needs no memory for gradients of the others. Once a rank waits for messages, it receives all: a node
   that is behind may be waited for, but it never waits itself before the end of its backward. *Sums* are of parts that
   the receiver has sent, so it takes them at once, and they never wait behind parts: each have a tag, and threads.
5. The nodes' first ranks also tell each other, a few times a second, what their boards say of ranks: all nodes name the
   same rank. They compare numbers when all ranks have to agree. These words never wait behind gradients.
6. A connection that ends before the farewell of each tag is the end of a process, as far as its peer can tell, so a
   forked process closes its copies. The loss of a machine or of the link to it may end nothing: a node of which
   nothing came for the keepalive's time counts as lost.
7. A rank that leaves says farewell with its state, and with what its board says of others: one that stops because of
   another rank names that one. It waits a short time for the farewells of the others, a shorter one after an error, as
   they may be in a collective that waits for the end of its process: threads that wait in gloo for a peer would outlive
   the group. Those of peers that are gone end with the group's connections.
8. gloo has one connection for each group and pair, on which a receiver's "go on" waits behind what it sends itself: two
   nodes that send over one connection take turns. So each direction has a group of its own, and so have words.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..compat.tensors import gloo_device, gloo_group
from ..errors import PeerError

PARTS, SUMS, WEIGHTS, WORDS = range(4)  # tags: what may be large, and what never waits behind that (Rules 4 and 5)
LARGE = PARTS, SUMS, WEIGHTS
PRETENDED = "SUPERPIPELINE_PRETENDED_NODE"  # in the environment: which part of this machine's ranks this one is of
CLOSES = 4  # a tag that nothing is sent with
UNIT, WORD, PULSE, FAREWELL = range(4)  # kinds of messages
HEADER = 8  # numbers of a header: the kind, the key's, and how many bytes follow
KEY = 3  # numbers of a key
ALIGNED = 16  # bytes at whose multiples tensors begin in a message
AHEAD = 3  # parts of each peer that nobody has taken (Rule 4)
PULSE_S = 0.2  # between two pulses (Rule 5)
KEEPALIVE = timedelta(seconds=60)  # for which nothing came of a node that counts as lost (Rule 6)
CONNECT_S = 120.0  # how long nodes that have just been heard of may take to connect
CLOSE_S = 3.0  # how long a rank waits for the farewells of others (Rule 7)
PAUSE_S = 1e-3
FOREVER = timedelta(days=365)  # of one wait in gloo; those that must end are the board's

Key = tuple[int, int, int]
Pack = Callable[[Sequence[int]], Mapping[int, Tensor]]  # makes the bytes for each of these nodes


class NodePlace(NamedTuple):
    """Where a rank is among all: its node, how many ranks each node has, and the host of each node."""

    node: int
    size: int
    hosts: tuple[str, ...]

    @property
    def first(self) -> int:
        """The number that this node's first rank has among all ranks."""
        return self.node * self.size

    @property
    def world(self) -> int:
        """How many ranks there are on all nodes."""
        return self.size * len(self.hosts)

    def name(self, rank: int) -> str:
        """Return what messages call the rank with this number among all ranks."""
        return f"rank {rank}" if len(self.hosts) == 1 else f"rank {rank} on {self.hosts[rank // self.size]}"


class Listener(Protocol):
    """A listener to all that comes from other nodes besides gradients: board.Ranks."""

    def heard(self, node: int, states: Sequence[int], came: Sequence[int]) -> None:
        """Take what another node's board says of all ranks' states, and of its own ranks' meetings."""

    def lost(self, rank: int) -> None:
        """Note that the connection to a rank ended without a farewell."""

    def left(self, rank: int, state: int) -> None:
        """Note that a rank has left in this state."""


class Message:
    """A message from one rank to its whole rail, of which each peer may get other bytes."""

    def __init__(self, kind: int, key: Key, pack: Pack) -> None:
        self.kind, self.key, self.pack = kind, key, pack
        self.is_packed = False  # whether its bytes may be overwritten where they were (Rule 4)
        self.unsent: set[int] = set()  # nodes that have not got it yet

    def tensors(self, nodes: Sequence[int]) -> list[tuple[int, Tensor]]:
        """Return for each of these nodes the header, and the bytes if there are any."""
        payloads = self.pack(nodes)
        self.is_packed = True
        found = [(node, self._header(payload)) for node, payload in payloads.items()]
        return found + [(node, payload) for node, payload in payloads.items() if payload.numel()]

    def _header(self, payload: Tensor) -> Tensor:
        header = [self.kind, *self.key, payload.numel()]
        return torch.tensor(header + [0] * (HEADER - len(header)), dtype=torch.int64, device="cpu")


class NodeTransport:
    """The connections of a rank to its rail (Rule 1)."""

    def __init__(
        self, place: NodePlace, rank: int, token: bytes, timeout: timedelta, keepalive: timedelta, listener: Listener
    ) -> None:
        self._place, self._listener, self._keepalive_s = place, listener, keepalive.total_seconds()
        peers = [node for node in range(len(place.hosts)) if node != place.node]
        self._rank_of = {node: node * place.size + rank for node in peers}
        self.drains = False  # whether more than a few messages are taken from each peer (Rule 4)
        self._closed = False
        self._inbox: dict[int, dict[int, dict[Key, Tensor]]] = {tag: {node: {} for node in peers} for tag in LARGE}
        self._words: dict[int, dict[int, tuple[int, ...]]] = {node: {} for node in peers}
        self._heard_at = dict.fromkeys(peers, time.monotonic())
        self._farewells: dict[int, set[int]] = {node: set() for node in peers}  # their tags
        self._tags = (*LARGE, WORDS) if rank == 0 else LARGE
        self._pulsed_at = 0.0
        # What goes to nodes with higher numbers, to lower ones, and words (Rule 8).
        there = _sockets()
        self._groups: list[Any] = [self._connect(rank, token, timeout, number) for number in range(2 + (rank == 0))]
        self._sockets = _sockets() - there
        self._threads: list[threading.Thread] = []
        self._units = {tag: self._sender(peers, tag) for tag in LARGE}
        self._says = {node: self._sender([node], WORDS) for node in peers if rank == 0}  # none waits for another's
        for node in peers:
            for tag in self._tags:
                self._start(self._receive, node, tag)

    def _connect(self, rank: int, token: bytes, timeout: timedelta, number: int) -> Any:
        within = min(timeout, timedelta(seconds=CONNECT_S))
        try:
            name = f"superpipeline/{token.hex()}/{rank}/{number}"
            return gloo_group(name, self._place.node, len(self._place.hosts), within)
        except RuntimeError as error:
            hosts = ", ".join(sorted(set(self._place.hosts)))
            raise PeerError(
                f"{self._place.name(self._place.first + rank)} could not connect to its peers ({hosts}) within "
                f"{within}: {error}. GLOO_SOCKET_IFNAME names the network interface of each host"
            ) from error

    # ---- units

    @property
    def peers(self) -> dict[int, int]:
        """The ranks of other nodes on this one's rail, by their nodes."""
        return dict(self._rank_of)

    def send(self, tag: int, key: Key, pack: Pack) -> Message:
        """Send bytes to the rail under a tag, made by this function for nodes that get any when it is their turn."""
        message = Message(UNIT, key, pack)
        message.unsent.update(self._rank_of)
        self._units[tag].put(message)
        return message

    def unsent(self, messages: Iterable[Message]) -> list[int]:
        """List the ranks that have not got all of these messages; one that has left needs none."""
        nodes = set[int]().union(*(message.unsent for message in messages))
        return [self._rank_of[node] for node in sorted(nodes) if not self._has_left(node)]

    def missing(self, tag: int, key: Key, nodes: Sequence[int] | None = None) -> list[int]:
        """List the ranks, of all nodes or of these, whose message with this tag and key has not come."""
        inbox = self._inbox[tag]
        return [self._rank_of[node] for node in (inbox if nodes is None else nodes) if key not in inbox[node]]

    def take(self, tag: int, key: Key) -> dict[int, Tensor]:
        """Take the messages with this tag and key from those that have come, by the node that sent each."""
        return {node: there.pop(key) for node, there in self._inbox[tag].items() if key in there}

    def forget(self, tag: int, channel: int, before: int) -> None:
        """Drop the messages of a channel that have come, and that nobody will take: the second number is less."""
        for there in self._inbox[tag].values():
            for key in [key for key in list(there) if key[0] == channel and key[1] < before]:
                del there[key]

    # ---- words

    def say(self, number: int, word: tuple[int, int]) -> None:
        """Tell the other nodes' first ranks a word, as that of this number."""
        for outbox in self._says.values():
            outbox.put(Message(WORD, (number, *word), same_for_all(_nothing)))

    def unsaid(self, number: int) -> list[int]:
        """List the first ranks of other nodes whose word of this number has not come."""
        return [self._rank_of[node] for node, words in self._words.items() if number not in words]

    def words(self, number: int) -> dict[int, tuple[int, ...]]:
        """Take the words of this number, by the node that said each."""
        return {node: words.pop(number) for node, words in self._words.items()}

    def pulse(self, numbers: Callable[[], list[int]]) -> list[int]:
        """Tell the other nodes what this one's board says, now and then; list the ranks of lost nodes (Rules 5, 6)."""
        if not self._says or self._closed:
            return []
        now = time.monotonic()
        if now - self._pulsed_at > PULSE_S:
            self._pulsed_at = now
            self._pulse(numbers())
        late = (node for node, at in self._heard_at.items() if now - at > self._keepalive_s)
        return [self._rank_of[node] for node in late if not self._has_left(node)]

    def _pulse(self, numbers: list[int]) -> None:
        for outbox in self._says.values():
            if outbox.qsize() < AHEAD:  # a peer that does not read gets no more
                outbox.put(Message(PULSE, (0, 0, 0), same_for_all(lambda: _of_numbers(numbers))))

    # ---- threads

    def _start(self, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, name="superpipeline-nodes", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _sender(self, nodes: Sequence[int], tag: int) -> queue.SimpleQueue[Message]:
        outbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._start(self._send, outbox, list(nodes), tag)
        return outbox

    def _send(self, outbox: queue.SimpleQueue[Message], nodes: list[int], tag: int) -> None:
        """Send what is put into an outbox, to these nodes, until the farewell is sent (Rule 3)."""
        kind = None
        while kind != FAREWELL:
            message = outbox.get()
            kind = message.kind
            tensors = message.tensors(nodes)
            works = [(node, work) for node, tensor in tensors for work in self._post(node, tensor, tag)]
            for node, work in works:
                if not self._wait(node, work, tag) and node in nodes:
                    nodes.remove(node)
            message.unsent.clear()

    def _way(self, sender: int, receiver: int, tag: int) -> Any:
        """Return the group in which one node sends to another (Rule 8)."""
        return self._groups[2 if tag == WORDS else int(sender > receiver)]

    def _post(self, node: int, tensor: Tensor, tag: int) -> list[Any]:
        try:
            return [self._way(self._place.node, node, tag).send([tensor], node, tag)]
        except RuntimeError:
            self._note_lost(node, tag)
            return []

    def _wait(self, node: int, work: Any, tag: int) -> bool:
        try:
            work.wait(FOREVER)
        except RuntimeError:
            self._note_lost(node, tag)
            return False
        return True

    def _receive(self, node: int, tag: int) -> None:
        """Receive what a peer sends, until its farewell (Rule 3)."""
        header = torch.empty(HEADER, dtype=torch.int64, device="cpu")
        while self._take(node, header, tag):
            kind, *key, nbytes = header.tolist()[: KEY + 2]
            payload = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            if nbytes and not self._take(node, payload, tag):
                return
            self._heard_at[node] = time.monotonic()
            if kind == FAREWELL:
                self._farewells[node].add(tag)
                if self._has_left(node):  # by now all words that were said before have come
                    self._hear(node, payload)
                    self._listener.left(self._rank_of[node], key[0])
                return
            if kind == PULSE:
                self._hear(node, payload)
            if kind == UNIT:
                there = self._inbox[tag][node]
                there[key[0], key[1], key[2]] = payload
                while tag != SUMS and len(there) >= AHEAD and not (self.drains or self._closed):
                    time.sleep(PAUSE_S)  # the sender keeps the next ones (Rule 4)
            elif kind == WORD:
                self._words[node][key[0]] = tuple(key[1:])

    def _hear(self, node: int, payload: Tensor) -> None:
        numbers = payload.view(torch.int64).tolist()
        self._listener.heard(node, numbers[: self._place.world], numbers[self._place.world :])

    def _take(self, node: int, tensor: Tensor, tag: int) -> bool:
        try:
            self._way(node, self._place.node, tag).recv([tensor], node, tag).wait(FOREVER)
        except RuntimeError:
            self._note_lost(node, tag)
            return False
        return True

    def _note_lost(self, node: int, tag: int) -> None:
        if not self._closed and tag not in self._farewells[node]:  # after a farewell nothing is lost (Rule 6)
            self._listener.lost(self._rank_of[node])

    def _has_left(self, node: int) -> bool:
        """Whether a peer has said farewell under each tag: all that it sent has come."""
        return len(self._farewells[node]) == len(self._tags)

    # ---- the end

    def close(self, state: int, numbers: list[int], after_error: bool) -> None:
        """Say farewell, and end the threads (Rule 7). Safe twice."""
        if self._closed:
            return
        self._pulse(numbers)
        self._closed = True
        for outbox in (*self._units.values(), *self._says.values()):
            outbox.put(Message(FAREWELL, (state, 0, 0), same_for_all(lambda: _of_numbers(numbers))))
        until = time.monotonic() + (CLOSE_S / 2 if after_error else CLOSE_S)
        self._join(until)
        if any(thread.is_alive() for thread in self._threads):
            nothing = torch.empty(HEADER, dtype=torch.int64, device="cpu")
            for group in self._groups:
                with contextlib.suppress(RuntimeError):  # a wait that ends too early ends all connections of a group
                    group.recv([nothing], next(iter(self._rank_of)), CLOSES).wait(timedelta(milliseconds=1))
            self._join(until + 1)
        self._inbox.clear()
        if not any(thread.is_alive() for thread in self._threads):
            self._groups.clear()  # their sockets and threads end now, also if something refers to this object

    def close_copies(self) -> None:
        """Close a forked process's copies of the connections, which end with their last one (Rule 6)."""
        for descriptor, _ in self._sockets & _sockets():
            os.close(descriptor)

    def _join(self, until: float) -> None:
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))


def same_for_all(pack: Callable[[], Tensor]) -> Pack:
    """Pack the same bytes for each node."""
    return lambda nodes: dict.fromkeys(nodes, pack())


def packed(flags: Sequence[int], parts: Sequence[Tensor]) -> Tensor:
    """Pack a unit's flags, one for each parameter, and the parts of those that are sent."""
    sizes = [_aligned(len(flags)), *(_aligned(part.nbytes) for part in parts)]
    made = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
    made[: len(flags)] = torch.tensor(list(flags), dtype=torch.uint8, device="cpu")
    start = sizes[0]
    for part, size in zip(parts, sizes[1:], strict=True):
        made[start : start + part.nbytes] = part.view(torch.uint8)
        start += size
    return made


class Unpacked:
    """The flags of a unit's parameters, and its parts in their order."""

    def __init__(self, message: Tensor, count: int) -> None:
        self.flags: list[int] = message[:count].tolist()
        self._message, self._start = message, _aligned(count)

    def part(self, like: Tensor) -> Tensor:
        """Return the next part, which has this one's type and size."""
        start, self._start = self._start, self._start + _aligned(like.nbytes)
        return self._message[start : start + like.nbytes].view(like.dtype)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNED) * ALIGNED


def _of_numbers(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device="cpu").view(torch.uint8)


def _nothing() -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu")


def _sockets() -> set[tuple[int, str]]:
    """Return the descriptors of this process that are sockets, each with the socket's own number."""
    found = set()
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # it was that of the listing itself, or is closed by now
            found.add((descriptor, os.readlink(f"/proc/self/fd/{descriptor}")))
    return {(descriptor, what) for descriptor, what in found if what.startswith("socket:")}


def node_identity() -> str:
    """Identify this process's node: its kernel, and its network, in which ranks of a node find each other's sockets.

    Parts of one machine's ranks may pretend to be nodes, as if the network were between them.
    """
    return f"{machine()} {namespace('net')} {os.environ.get(PRETENDED, '')}"


def namespace(kind: str) -> str:
    """Identify one of this process's namespaces: containers of a machine have others, and its kernel."""
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return machine()


def machine() -> str:
    """Identify this machine's kernel, which the ranks share memory through."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot_id:
            return boot_id.read().strip()
    except OSError:
        return socket.gethostname()


def interface_error() -> str:
    """Say why gloo finds no network interface here; empty if it does."""
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    try:
        for name in filter(None, names.split(",")):
            gloo_device(name)
    except RuntimeError as error:
        return f"GLOO_SOCKET_IFNAME={names}: {str(error).splitlines()[0]}"
    return ""
