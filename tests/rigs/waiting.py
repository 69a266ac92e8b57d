"""What ranks do where only one wait of theirs keeps the result: one rank is slow, or failed, at that place.

Each is a function for processes.py, Rule 1.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import os
import pathlib
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import lightning as L
import loops
import pytest
import ranked_hf
import ranked_runs
import torch
import torch.distributed as dist
from failing_runs import wait_for_arrivals
from lightning.fabric import Fabric
from torch import Tensor, nn

import models
import sp_lightning
from sp_lightning.errors import ExactnessError, PeerError, TornStepError
from sp_lightning.memory import host_copy
from sp_lightning.memory.weights import same_bytes
from sp_lightning.nodes import arrivals, transport
from sp_lightning.nodes.transport import packed
from sp_lightning.ranks import exchange, shared_memory, user_edits
from sp_lightning.ranks.board import ALIVE, Board, Ranks
from sp_lightning.ranks.connection import connect
from sp_lightning.runtime.handle import stream as stream_before

SLOW_S = 1.0  # for which the second rank is not there
ALIVE_S = 30.0  # for which a rank that failed stays alive at most


@contextlib.contextmanager
def connected(timeout_s: float = 60) -> Iterator[Ranks]:
    """Connect the ranks, without a model."""
    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=size)
    ranks = connect(None, torch.device("cpu"), timedelta(seconds=timeout_s))
    assert ranks is not None
    try:
        yield ranks
    finally:
        ranks.close()


def _noticed() -> pathlib.Path:
    return pathlib.Path(tempfile.gettempdir(), f"noticed-{os.environ['MASTER_PORT']}")


def stay_until_noticed() -> bool:
    """Stay alive until another rank has noticed that this one failed; return whether one has."""
    until = time.monotonic() + ALIVE_S
    while not _noticed().exists() and time.monotonic() < until:
        time.sleep(0.01)
    found = _noticed().exists()
    _noticed().unlink(missing_ok=True)
    return found


def after_a_failure(what: str, failed: int) -> str | bool:
    """Wait for a rank that failed, and return the error; that rank stays until then, and returns whether it came."""
    with connected() as ranks:
        if ranks.rank == failed:
            ranks.fail()
            return stay_until_noticed()
        try:
            {"meeting": lambda: ranks.meet("a meeting"), "memory": lambda: Board(ranks, 1)}[what]()
        except PeerError as error:
            _noticed().touch()
            return str(error)
        return "no error"


def seconds_at_a_meeting() -> float:
    """Return how long this rank is at a meeting to which the last one comes late."""
    with connected() as ranks:
        ranks.meet("a first one")
        time.sleep(SLOW_S * (ranks.world_rank == ranks.world - 1))
        began = time.monotonic()
        ranks.meet("a meeting")
        return time.monotonic() - began


def alike(*of_each: tuple[int, ...]) -> list[bool]:
    """Come to meetings, each with this rank's number of those; return whether all came with the same."""
    with connected() as ranks:
        board = Board(ranks, 0)
        found = [board.alike(numbers[ranks.world_rank]) for numbers in of_each]
        ranks.meet("the end")
        return found


def state_of_one_that_left() -> int:
    """Return what this rank knows of the second one, which leaves, and is slow to say so; on that one 0."""
    with connected() as ranks:
        if ranks.world_rank == 1:
            made = transport._of_numbers

            def slowly(numbers: list[int]) -> Tensor:
                time.sleep(SLOW_S)
                return made(numbers)

            with mock.patch.object(transport, "_of_numbers", slowly):
                ranks.close()
            return 0
        assert ranks._state is not None
        until = time.monotonic() + ALIVE_S
        while ranks._state[1] == ALIVE and time.monotonic() < until:
            time.sleep(0.01)
        return ranks._state[1]


def state_of_one_that_ends_while_it_leaves(cut: bool) -> int:
    """Return what this rank knows of the second one, whose farewells come but for that of one tag; on that one 0.

    Then its connections end, or it is silent.
    """
    send, is_victim = transport.NodeTransport._send, os.environ["LOCAL_RANK"] == "1"

    def some(self: Any, outbox: Any, nodes: list[int], tag: int) -> None:
        if tag != transport.PARTS:
            send(self, outbox, nodes, tag)

    longest = 0.2 if cut else ALIVE_S  # for which it stays for the farewells of others
    with (
        mock.patch.object(transport.NodeTransport, "_send", some if is_victim else send),
        mock.patch.object(transport, "CLOSE_S", longest if is_victim else transport.CLOSE_S),
        connected() as ranks,
    ):
        if is_victim:
            return 0
        assert ranks._state is not None and ranks.transport is not None
        if not cut:
            ranks.transport._keepalive_s = SLOW_S
        until = time.monotonic() + ALIVE_S / 2
        while ranks._state[1] == ALIVE and time.monotonic() < until:
            time.sleep(0.01)
        return ranks._state[1]


def error_of_one_that_waits_for_one_that_stopped() -> str:
    """Fail on the first rank, stop on the second one because of that; return what the last one hears of the second.

    The first ranks of nodes, which tell each other of all, are slow.
    """
    with connected() as ranks, mock.patch.object(transport.NodeTransport, "_pulse", lambda *_: None):
        state, rank = ranks._state, ranks.world_rank
        assert state is not None
        dist.barrier()  # one that is still at the last meeting of the connection would hear there that another failed
        if rank == 0:
            ranks.fail()
            stay_until_noticed()
        until, awaited = time.monotonic() + ALIVE_S, {1: 0, 2: 3}.get(rank)
        while awaited is not None and state[awaited] == ALIVE and time.monotonic() < until:
            time.sleep(0.01)
        if rank == 1:
            ranks.fail(because_of_another=True)
        if rank == 3:
            try:
                ranks.wait_for_nodes(lambda: [1], "something of the second rank")
            except PeerError as error:
                _noticed().touch()
                return str(error)
        return ""


def connected_by_a_device_alone(failed: int | None) -> str:
    """Connect over a group that has no connections for the host's tensors, where a rank may fail; return the error."""
    importlib.import_module("simccl").register()
    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("simgpu:simccl", rank=rank, world_size=size)

    def fail(of: arrivals.Arrivals, *_: Any) -> None:
        wait_for_arrivals(of)
        raise MemoryError

    with pytest.MonkeyPatch.context() as patch:
        if rank == failed:
            patch.setattr(arrivals.Arrivals, "gather", fail)
        try:
            ranks = connect(None, torch.device("cpu"), timedelta(seconds=60), None)
        except (PeerError, MemoryError) as error:
            return str(error)
        ranks.meet("a meeting")
        ranks.close()
        return "connected"


def error_of_a_loop(steps: tuple[int, ...]) -> str:
    """Train in a loop of as many steps as this rank is to have; return the error that ended it."""
    net, rank = Blocks(), int(os.environ["LOCAL_RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    try:
        with stream_before(net, "cpu", group=dist.group.WORLD, units=["Linear"], window=1):
            for _ in range(steps[rank]):
                net(torch.ones(2, 8)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    except PeerError as error:
        return str(error)
    return ""


def threads_after_leaving() -> int:
    """Leave while the second rank stays, and says no farewell; return how many threads to it are left."""
    with connected() as ranks, mock.patch.object(transport, "CLOSE_S", 0.2):
        if ranks.world_rank == 1:
            stay_until_noticed()
            return 0
        assert ranks.transport is not None
        with mock.patch.object(ranks.transport, "_note_lost", lambda *_: time.sleep(SLOW_S / 2)):
            ranks.close()
            left = sum(thread.is_alive() for thread in ranks.transport._threads)
        _noticed().touch()
        return left


def sockets_after_leaving() -> list[int]:
    """Connect and leave three times; return how many sockets each left, while all that they made is still there."""
    dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    kept, counts = [], []
    for _ in range(3):
        kept.append(connect(None, torch.device("cpu"), timedelta(seconds=60)))
        kept[-1].meet("all")
        kept[-1].close()
        counts.append(min(_sockets() for _ in range(20)))  # one that is being closed is no longer there in all
    return counts


def _sockets() -> int:
    time.sleep(0.05)
    return sum(name.startswith("socket:") for name in map(_target, os.listdir("/proc/self/fd")))


def _target(descriptor: str) -> str:
    with contextlib.suppress(OSError):  # that of the listing itself
        return os.readlink(f"/proc/self/fd/{descriptor}")
    return ""


def messages() -> list[bool]:
    """Send messages to the other node, and return whether its own came as they were sent.

    Ranks that hear nothing of each other end before the limit of a test does.
    """
    with connected(timeout_s=10) as ranks:
        rail, keys = ranks.transport, [(0, 0, number) for number in range(3)]
        assert rail is not None
        sent = [
            [torch.full((1 << 16,), number + 10 * rank, dtype=torch.uint8) for rank in range(2)] for number in range(3)
        ]
        for key, of_ranks in zip(keys, sent, strict=True):
            rail.send(transport.SUMS, key, transport.same_for_all(lambda mine=of_ranks[ranks.world_rank]: mine))
        ranks.wait_for_nodes(lambda: [rank for key in keys for rank in rail.missing(transport.SUMS, key)], "messages")
        other = 1 - ranks.world_rank
        came = [rail.take(transport.SUMS, key)[other] for key in keys]
        ranks.meet("the end")
        return [torch.equal(found, of_ranks[other]) for found, of_ranks in zip(came, sent, strict=True)]


def sums_beside_parts() -> tuple[int, bool]:
    """Send more parts than the other nodes take, and then a sum; return how many parts came, and whether sums did."""
    with connected() as ranks:
        rail, tag, number = ranks.transport, transport.SUMS, transport.AHEAD + 2
        assert rail is not None
        for key in [(0, 0, at) for at in range(number)]:
            rail.send(transport.PARTS, key, transport.same_for_all(lambda: torch.zeros(1 << 16, dtype=torch.uint8)))
        rail.send(tag, key, transport.same_for_all(lambda: torch.zeros(1, dtype=torch.uint8)))
        until = time.monotonic() + ALIVE_S / 3
        while rail.missing(tag, key) and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.1)  # in which further parts could come
        found = sum(not rail.missing(transport.PARTS, (0, 0, at)) for at in range(number)), not rail.missing(tag, key)
        ranks.meet("the end")
        return found


def trained_with_slow_sends(**settings: Any) -> loops.Found:
    """Train where the first rank is slow to pack what it sends to other nodes."""

    def slowly(*args: Any) -> Tensor:
        time.sleep(0.05)
        return packed(*args)

    slow = os.environ["LOCAL_RANK"] == "0"
    with mock.patch.object(exchange, "packed", slowly if slow else packed):
        return loops.train({"window": 2}, **settings)


def means_with_slow_sums() -> list[bool]:
    """Run backwards one after the other where the first rank is slow to send sums; return which means are right."""
    torch.manual_seed(0)
    net, rank = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))), int(os.environ["LOCAL_RANK"])
    plain, send = copy.deepcopy(net), transport.same_for_all

    def slow(pack: Any) -> Any:
        return lambda nodes: (time.sleep(0.1), send(pack)(nodes))[1]

    def gradients(model: nn.Module, step: int, of: int) -> list[Tensor]:
        model.zero_grad()
        model(torch.full((2, 64), 1.0 + step + of / 4)).square().mean().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    dist.init_process_group("gloo", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    with (
        mock.patch.object(exchange, "same_for_all", send if rank else slow),
        stream_before(net, "cpu", group=dist.group.WORLD, units=["Linear"], window=1),
    ):
        found = [gradients(net, step, rank) for step in range(3)]
    of_all = [[gradients(plain, step, of) for of in range(2)] for step in range(3)]
    means = [[one / 2 + other / 2 for one, other in zip(*both, strict=True)] for both in of_all]
    return [all(map(torch.equal, *pair)) for pair in zip(found, means, strict=True)]


class SlowWords:
    """The words of a board, for a rank that is slow to read them."""

    def __init__(self, words: Any) -> None:
        self.words = words

    def __getitem__(self, index: Any) -> Any:
        time.sleep(0.2)
        return self.words[index]

    def __setitem__(self, index: int, number: int) -> None:
        self.words[index] = number


def exchanged() -> list[list[int]]:
    """Return what a rank that reads slowly, and one that does not, read at two exchanges in a row."""
    with connected() as ranks:
        board = Board(ranks, 1)
        if ranks.rank == 1:
            board._words = SlowWords(board._words)  # type: ignore[assignment]
        return [board.exchange(10 * number + ranks.rank) for number in range(3)]


class Blocks(nn.Module):
    """Blocks whose backward may be slow, and of which the first one's fails when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.fails = False
        self.slow_s = 0.0
        self.runs = 4  # so many of them

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks[: self.runs]):
            x = torch.tanh(block(x))
            x.register_hook(functools.partial(self.pass_back, index))
        return x

    def pass_back(self, index: int, grad: Tensor) -> None:
        time.sleep(self.slow_s)
        if self.fails and index == 0:
            raise RuntimeError("this backward fails")


class Sums:
    """How often a unit was summed in each exchange, and the backwards whose sums had not ended before the next ones."""

    def __init__(self) -> None:
        self.counted: Counter[tuple[int, str]] = Counter()
        self.left: list[Any] = []
        self._jobs: list[tuple[Any, Any]] = []

    def end(self) -> None:
        """Note whose sums have not ended, and end them, as nobody else does."""
        for job, backward in self._jobs:
            if not job.done():
                self.left.append(backward)
                backward.all_posted = True
        self._jobs.clear()

    def begin(self, job: Any, backward: Any) -> Any:
        self._jobs.append((job, backward))
        return job


@contextlib.contextmanager
def slow_sums(net: nn.Module) -> Iterator[Sums]:
    """Stream a module with slow sums, and note them."""
    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=size)
    with stream_before(net, "cpu", group=dist.group.WORLD, units=["Linear"], window=1) as handle:
        of_net, noted = handle.team.exchange, Sums()
        sums, submit, shutdown = of_net._sum, of_net._thread.submit, of_net._thread.shutdown

        def slowly(store: Any, apart: Any) -> Any:
            noted.counted[of_net._count, store.unit.name] += 1
            found = sums(store, apart)
            time.sleep(0.2)
            return found

        of_net._sum = slowly
        of_net._thread.submit = lambda *work: (noted.end(), noted.begin(submit(*work), of_net._backward))[1]
        of_net._thread.shutdown = lambda: (noted.end(), shutdown())
        yield noted


def closed_after_a_failure() -> bool:
    """Close a run in whose backward every rank failed, after units were summed beside it; return whether sums ended."""
    net = Blocks()
    with contextlib.suppress(RuntimeError), slow_sums(net) as noted:
        for step in range(4):
            net.fails = step == 3
            net(torch.ones(2, 8)).sum().backward()
    return net.fails and not noted.left


def after_a_failure_of_all() -> bool:
    """Go on after a backward in which every rank failed; return whether the next one is a plain run's."""
    torch.manual_seed(0)
    net = Blocks()
    plain = copy.deepcopy(net)
    with slow_sums(net) as noted:
        for step in range(5):
            net.fails = step == 3
            net.zero_grad()
            with contextlib.suppress(RuntimeError):
                net(torch.full((2, 8), float(step))).sum().backward()
        plain(torch.full((2, 8), 4.0)).sum().backward()
        pairs = zip(net.parameters(), plain.parameters(), strict=True)
        return not noted.left and all(torch.equal(ours.grad, theirs.grad) for ours, theirs in pairs)


def left_out(places: tuple[str, str], times: int = 1) -> tuple[list[str], int]:
    """Train with batches of which the ranks leave some out, since they fail at these places.

    Returns what comes of each batch, and for how many units this rank has room.
    """
    torch.manual_seed(0)
    net, rank = Blocks(), int(os.environ["LOCAL_RANK"])
    plain, found = copy.deepcopy(net), []
    dist.init_process_group("gloo", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))

    def run(model: nn.Module, batch: int, fails: bool = False) -> None:
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(2 * batch + rank))
        loss = model(x).square().sum()
        if fails:
            raise RuntimeError("this forward fails")
        model.zero_grad()
        loss.backward()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "SHORT_S", 60.0)
        with stream_before(net, "cpu", group=dist.group.WORLD, units=["Linear"], window=1) as handle:
            for batch in range(4 + times):
                place = places[rank] if 2 <= batch < 2 + times else ""
                net.fails, net.slow_s = place == "backward", 0.02 * (rank == 0)
                try:
                    run(net, batch, fails=place == "forward")
                except (RuntimeError, ExactnessError) as error:
                    found.append(type(error).__name__)
                    continue
                run(plain, batch)
                for parameter in plain.parameters():
                    parameter.grad *= 0.5
                    dist.all_reduce(parameter.grad)
                pairs = zip(net.parameters(), plain.parameters(), strict=True)
                is_mean = all(torch.equal(ours.grad, theirs.grad) for ours, theirs in pairs)
                found.append("mean" if is_mean else "another")
            return found, handle.team.exchange._ahead


def gradients_after_a_failure() -> list[bool]:
    """Run one block after a backward of all that failed; return whether each block has gradients."""
    net, rank = Blocks(), int(os.environ["LOCAL_RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    with stream_before(net, "cpu", group=dist.group.WORLD, units=["Linear"], window=1):
        net.fails = True
        with contextlib.suppress(RuntimeError):
            net(torch.ones(2, 8)).sum().backward()
        net.zero_grad()
        net.fails, net.runs = False, 1
        net(torch.ones(2, 8)).sum().backward()
        return [block.weight.grad is not None for block in net.blocks]


def arrived_after_a_failure() -> list[bool]:
    """Fail in a backward while gradients are on the way down; return whether they had arrived as memory was free."""
    simgpu = importlib.import_module("simgpu")
    net, rank = Blocks(), int(os.environ["LOCAL_RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    x, found = torch.ones(2, 8, device="simgpu"), []
    with stream_before(net, "simgpu", group=dist.group.WORLD, units=["Linear"], window=1) as handle:
        net(x).sum().backward()
        simgpu.config.d2h_us, net.fails = 100_000, True
        with contextlib.suppress(RuntimeError):
            net(x).sum().backward()
        box, backward = handle.team.exchange.box, handle.team.exchange._backward
        give_back = box.give_back

        def noted(region: Tensor) -> None:
            found.extend(arriving.has_arrived() for _, arriving, _ in backward.under_way)
            give_back(region)

        box.give_back, net.fails = noted, False
        net(x)
        simgpu.config.d2h_us = 0
    return found


def means_with_slow_page_locks() -> list[bool]:
    """Penalize weights outside of the model, where page-locking is slow; return which means are right.

    A penalty comes to a weight's leaf when the weight's gradient is on the way down, and that is added to zeros: this
    thread needs memory for the sum while that of the device gets some for another unit.
    """
    simgpu = importlib.import_module("simgpu")
    torch.manual_seed(0)
    net, rank = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), int(os.environ["LOCAL_RANK"])
    plain, lock_in, me = copy.deepcopy(net), shared_memory.lock_in, threading.current_thread()
    units: list[Tensor] = []
    is_slow, both = threading.Event(), threading.Event()

    def slowly(device: Any, flat: Tensor, *more: Any) -> None:
        if threading.current_thread() is me:
            if is_slow.is_set():
                both.set()
        elif flat.nbytes > net[0].weight.nbytes:
            units.append(flat)
            if len(units) == 3:
                is_slow.set()
                both.wait(SLOW_S)
        lock_in(device, flat, *more)

    def gradients(model: nn.Module, of: int, device: str) -> list[Tensor]:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        penalty = torch.stack([parameter.square().sum() for parameter in model.parameters()]).sum()
        (model(torch.full((2, 64), 1.0 + of, device=device)).sum() + penalty.to(device)).backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    of_all = [gradients(plain, of, "cpu") for of in range(2)]
    dist.init_process_group("gloo", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    with (
        mock.patch.object(shared_memory, "lock_in", slowly),
        stream_before(net, "simgpu", group=dist.group.WORLD, units=["Linear"], window=1),
    ):
        net[3].bias.register_post_accumulate_grad_hook(lambda _: is_slow.wait(ALIVE_S) and None)
        simgpu.config.d2h_us = 20_000
        found = gradients(net, rank, "simgpu")
        simgpu.config.d2h_us = 0
    return [torch.equal(mine, one / 2 + other / 2) for mine, one, other in zip(found, *of_all, strict=True)]


def errors_of_an_exchange(where: str) -> list[str]:
    """Have the second rank fail at a place of its exchange, and go on; return the error in each batch of this rank.

    "settle": where it finds that it wrote other weights. "sums": before the ranks sum what is left.
    """
    torch.manual_seed(0)
    net, rank, found = Blocks(), int(os.environ["LOCAL_RANK"]), []
    dist.init_process_group("gloo", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    with stream_before(net, "cpu", group=dist.group.WORLD, units=["Linear"], window=1) as handle:
        of_net = handle.team.exchange
        post = of_net._post_rest
        for batch in range(3):
            if batch == 1 and where == "settle":
                with torch.no_grad():
                    net.blocks[0].weight[0, 0] += 1 + rank  # it is the first rank's
            of_net._post_rest = mock.Mock(side_effect=MemoryError) if (batch, rank, where) == (1, 1, "sums") else post
            try:
                net(torch.ones(2, 8)).sum().backward()
                found.append("")
            except (ExactnessError, MemoryError, PeerError) as error:
                found.append(type(error).__name__)
            net.zero_grad()
    return found


def most_sums_of_a_unit() -> tuple[int, int]:
    """Return how often a unit is summed in one exchange at most, and after how many backwards sums went on."""
    net = Blocks()
    with slow_sums(net) as noted:
        for _ in range(4):
            net(torch.ones(2, 8)).sum().backward()
    return max(noted.counted.values()), len(noted.left)


def error_of_sums_that_fail() -> tuple[str, int]:
    """Have the sums of the first rank fail while its backward is ahead of them.

    Return the error of this rank, and for how many units it has room: more, once it has waited in vain.
    """
    net, rank = nn.Sequential(Blocks(), Blocks()), int(os.environ["LOCAL_RANK"])

    def fail(*_: Any) -> Any:
        raise RuntimeError("this sum fails")

    dist.init_process_group("gloo", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("SHORT_S", "LONG_S"):
            patch.setattr(exchange, name, 10 * SLOW_S)
        try:
            with stream_before(net, "cpu", group=dist.group.WORLD, units=["Linear"], window=1) as handle:
                if rank == 0:
                    handle.team.exchange._sum = fail
                net(torch.ones(2, 8)).sum().backward()
        except (RuntimeError, PeerError) as error:
            return str(error), handle.team.exchange._ahead
    return "no error", handle.team.exchange._ahead


class Collects(torch.autograd.Function):
    """A collective in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        dist.all_reduce(torch.zeros(()))
        return grad


def rooms(kept: int, in_backward: bool = True) -> list[tuple[int, int]]:
    """Train with blocks that the second rank drops, and a collective after them in the first one's backward.

    The second rank comes to it in its backward, or before its forward. Returns for how many units this rank has room,
    and up to which exchange, after each of five.
    """
    net, rank = nn.Sequential(*(nn.Linear(8, 8) for _ in range(9))), int(os.environ["LOCAL_RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "KEPT", kept)
        patch.setattr(exchange, "SHORT_S" if in_backward else "LONG_S", 0.05)
        with stream_before(net, "cpu", group=dist.group.WORLD, units=["Linear"], window=1) as handle:
            for _ in range(5):
                net.zero_grad()
                if rank == 1 and not in_backward:
                    dist.all_reduce(torch.zeros(()))
                x = net[0](torch.ones(2, 8))
                x = Collects.apply(x) if rank == 0 or in_backward else x
                x = net[1:](x) if rank == 0 else x
                x.sum().backward()
                found.append((handle.team.exchange._ahead, handle.team.exchange._until))
    return found


def edited_before_a_step() -> bool:
    """Edit weights before a step, with one rank slow to compare; return whether the step is a plain run's."""
    torch.manual_seed(0)
    net, rank = Blocks(), int(os.environ["LOCAL_RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    plain = copy.deepcopy(net)
    with stream_before(net, "cpu", group=dist.group.WORLD), pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(user_edits, "same_bytes", lambda *two: (time.sleep(0.2), same_bytes(*two))[1])
        for model in (net, plain):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model(torch.ones(2, 8)).sum().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)
            optimizer.step()
        return same_values(net, plain)


def weights_of_a_slow_first_rank() -> bool:
    """Stream a model whose weights the first rank is slow to put in place; return whether this rank finds them."""
    torch.manual_seed(0)
    net, rank = Blocks(), int(os.environ["LOCAL_RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    plain, adopt = copy.deepcopy(net), host_copy.HostCopy._adopt
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(host_copy.HostCopy, "_adopt", lambda *args: (time.sleep(SLOW_S), adopt(*args))[1])
        with stream_before(net, "cpu", group=dist.group.WORLD):
            return same_values(net, plain)


def weights_after_a_slow_step(copies: bool = False) -> bool:
    """Step weights of which the second rank is slow to step its part; return whether this rank finds all of them.

    With ``copies`` each rank steps a copy, since state is of another type than its weight; it is compared, too.
    """
    torch.manual_seed(0)
    net, rank = nn.Linear(64, 64), int(os.environ["LOCAL_RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    plain = copy.deepcopy(net)
    with stream_before(net, "cpu", group=dist.group.WORLD) as handle:
        clipping = handle.team.clipping
        multiply = clipping.multiply
        if rank == 1:
            clipping.multiply = lambda: (time.sleep(SLOW_S), multiply())[1]  # it follows the comparison before a step
        found: list[list[Tensor]] = []
        for model in (net, plain):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
            for _ in range(1 + copies):
                model(torch.ones(2, 64)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                for state in optimizer.state.values():
                    state["momentum_buffer"] = state["momentum_buffer"].to(torch.float64 if copies else torch.float32)
            found.append([state["momentum_buffer"] for state in optimizer.state.values()])
        return same_values(net, plain) and all(map(torch.equal, *found))


def a_step_more_on_one_rank(steps: int) -> str:
    """Step once on the first rank, so often on the second; return the error at this rank's next step or backward."""
    net, rank = nn.Linear(8, 8), int(os.environ["LOCAL_RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    optimizer = torch.optim.AdamW(net.parameters())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "LONG_S", 0.1)  # for which a backward waits for a rank whose forward has not ended
        try:
            with stream_before(net, "cpu", group=dist.group.WORLD):
                for number in range(2):
                    net(torch.ones(2, 8)).sum().backward()
                    for _ in range(steps if rank and not number else 1):
                        optimizer.step()
        except ExactnessError as error:
            return str(error)
    return ""


def pages_after_a_replicated_step() -> int:
    """Step weights that every rank steps as a whole; return the pages of them that this rank has for itself."""
    torch.manual_seed(0)
    net, rank = nn.Linear(64, 64), int(os.environ["LOCAL_RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    with stream_before(net, "cpu", group=dist.group.WORLD) as handle:
        net(torch.ones(2, 64)).sum().backward()
        torch.optim.Adafactor(net.parameters()).step()
        return sum(len(slab.private()) for slab in handle.team.faces.slabs.values())


def after_a_step_that_failed(where: str) -> str:
    """Fail at a place of the first rank's step; return what the next one says, when nothing is streamed any more.

    "loop": in its own loop. "settle": when what each rank owns is stepped. "options": since the ranks have others.
    """
    net, rank = Blocks(), int(os.environ["LOCAL_RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1 + 0.1 * rank * (where == "options"))
    fail = mock.Mock(side_effect=MemoryError)
    errors = MemoryError, PeerError, ExactnessError
    with contextlib.suppress(*errors), pytest.MonkeyPatch.context() as patch:
        overlap = where != "settle"  # a deferred step ends on a thread of its own
        with stream_before(net, "cpu", group=dist.group.WORLD, optimizer_overlap=overlap) as handle:
            net(torch.ones(2, 8)).sum().backward()
            if rank == 0 and where == "loop":
                patch.setattr(importlib.import_module("torch.optim.sgd"), "sgd", fail)
            if rank == 0 and where == "settle":
                owners, faces = handle.team.owners, handle.team.faces

                note_all_true = faces.note_all_true

                def fail_at_the_end() -> None:
                    if owners._progress.read(0, 0) < 2:
                        return note_all_true()
                    while owners._progress.read(1, 0) < 2:
                        time.sleep(0.01)
                    return fail()

                patch.setattr(faces, "note_all_true", fail_at_the_end)
            optimizer.step()
    try:
        optimizer.step()
    except TornStepError as error:
        return str(error)
    return "no error"


def edited_without_an_optimizer() -> str:
    """Step by hand, otherwise on the second rank; return the error of the backward that follows."""
    torch.manual_seed(0)
    net, rank = Blocks(), int(os.environ["LOCAL_RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    with stream_before(net, "cpu", group=dist.group.WORLD):
        try:
            for step in range(3):
                net(torch.ones(2, 8)).sum().backward()
                with torch.no_grad():
                    for parameter in net.parameters():
                        parameter.sub_(parameter.grad, alpha=0.1 + 0.1 * (rank and step))
        except (ExactnessError, PeerError) as error:
            return f"in step {step}: {error}"
    return "no error"


def same_values(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(mine, its) for mine, its in zip(one.parameters(), other.parameters(), strict=True))


class Collective(L.Callback):
    """The second rank fails where the first one comes to a collective, and stays alive until that is noticed."""

    found: str | bool = "no error"

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.global_rank == 1:
            trainer.strategy.ranks.fail()
            self.found = stay_until_noticed()
            raise KeyboardInterrupt
        try:
            trainer.strategy.reduce(torch.ones(()))
        except PeerError as error:
            _noticed().touch()
            self.found = str(error)
            raise KeyboardInterrupt from None


def in_a_collective() -> str | bool:
    """Return the error in a Trainer's collective for which another rank does not come; on that, whether it came."""
    callback = Collective()
    with contextlib.suppress(SystemExit, KeyboardInterrupt):
        _trainer(callback).fit(*_task())
    return callback.found


class Meets(L.Callback):
    """A barrier in a run, to which the second rank comes late."""

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.waited = _waited(trainer)


def _waited(trainer: L.Trainer) -> float:
    if int(os.environ["LOCAL_RANK"]) == 1:
        time.sleep(SLOW_S)
    begin = time.monotonic()
    trainer.strategy.barrier()
    return time.monotonic() - begin


def at_barriers() -> tuple[float, float]:
    """Return for how long a barrier in a fit, and one after it, wait for the second rank."""
    callback = Meets()
    trainer = _trainer(callback)
    trainer.fit(*_task())
    return callback.waited, _waited(trainer)


def move_slowly(handle: Any) -> None:
    """Have the second rank move state that was loaded slowly into the memory of all."""
    owners, adopt = handle.team.owners, handle.team.owners.adopt
    if int(os.environ["LOCAL_RANK"]) == 1:
        owners.adopt = lambda *args: (time.sleep(SLOW_S / 6), adopt(*args))[1]


def _moments(optimizer: Any) -> list[Tensor]:
    return [state["exp_avg"].clone() for state in optimizer.state_dict()["state"].values()]


def state_when_it_was_loaded(checkpoint: str) -> bool:
    """Train from a checkpoint; return whether the state was the checkpoint's as soon as it was loaded here."""
    seen: list[list[Tensor]] = []

    class Sees(sp_lightning.SuperpipelineStrategy):
        def load_optimizer_state_dict(self, checkpoint: Any) -> None:
            move_slowly(self.handle)
            super().load_optimizer_state_dict(checkpoint)
            seen.append(_moments(self.optimizers[0]))

    case = models.case("mlp")
    _, data = _task()
    trainer = _trainer(epochs=2, strategy=Sees(units=case.units))
    trainer.fit(ranked_runs.RankedModule(case, "adamw"), data, ckpt_path=checkpoint)
    states = torch.load(checkpoint, weights_only=False)["optimizer_states"][0]["state"].values()
    expected = [state["exp_avg"] for state in states]
    return all(torch.equal(one, other) for one, other in zip(seen[0], expected, strict=True))


class Written(L.Callback):
    """How many bytes a rank has of its own after it loaded weights in a run."""

    def __init__(self, checkpoint: str) -> None:
        self.checkpoint = checkpoint

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        trainer.strategy.load_model_state_dict(torch.load(self.checkpoint, weights_only=False))
        handle = trainer.strategy.handle
        stores = [unit.store for unit in handle.engine.units]
        self.found = sum(end - start for store in stores for start, end in store.slab.slab.private())


def bytes_of_its_own(checkpoint: str) -> int:
    """Load weights in a run; return how many bytes of them this rank had of its own then."""
    callback = Written(checkpoint)
    _trainer(callback).fit(*_task())
    return callback.found


def loaded_with_fabric(checkpoint: str, also_optimizer: bool) -> tuple[int, bool]:
    """Load with Fabric; return how many bytes this rank has of its own then, and whether the state is right."""
    fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="superpipeline")
    fabric.launch()
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    net, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters()))
    parts = {"net": net, "optimizer": optimizer} if also_optimizer else {"net": net}
    moments: list[list[Tensor]] = []
    for step in range(2):
        fabric.backward(net(torch.ones(2, 64) + step).sum())
        optimizer.step()
        moments.append(_moments(optimizer))
        if step == 0:
            fabric.save(checkpoint, parts)
    move_slowly(fabric.strategy.handles[0])
    fabric.load(checkpoint, parts)
    stores = [unit.store for unit in fabric.strategy.handles[0].engine.units]
    own = sum(end - start for store in stores for start, end in store.slab.slab.private())
    pairs = zip(_moments(optimizer), moments[0 if also_optimizer else 1], strict=True)
    found = own, all(torch.equal(one, other) for one, other in pairs)
    fabric.strategy.teardown()
    return found


def loaded_with_accelerate(folder: str) -> tuple[int, bool]:
    """Load with accelerate; return how many bytes this rank has of its own then, and whether the state is right."""
    with ranked_hf.place("cpu"), importlib.import_module("sp_lightning.hf").streaming(window=1) as stream:
        run = ranked_hf.accelerator()
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
        net, optimizer = run.prepare(net, torch.optim.Adam(net.parameters()))
        for step in range(2):
            run.backward(net(torch.ones(2, 64) + step).sum())
            optimizer.step()
            if step == 0:
                moments = _moments(optimizer)
                run.save_state(folder)
        (handle,) = stream.handles
        run.wait_for_everyone()
        move_slowly(handle)
        run.load_state(folder)
        own = sum(end - start for unit in handle.engine.units for start, end in unit.store.slab.slab.private())
        return own, all(torch.equal(*pair) for pair in zip(_moments(optimizer), moments, strict=True))


def save(checkpoint: str) -> None:
    """Leave a checkpoint."""
    trainer = _trainer()
    trainer.fit(*_task())
    trainer.save_checkpoint(checkpoint)


def _trainer(*callbacks: L.Callback, epochs: int = 1, strategy: Any = "superpipeline") -> L.Trainer:
    return L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        max_epochs=epochs,
        limit_train_batches=1,
        limit_val_batches=0,
        logger=False,
        callbacks=list(callbacks),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def _task() -> tuple[L.LightningModule, Any]:
    case = models.case("mlp")
    data = torch.utils.data.DataLoader([case.batch(i) for i in range(4)], batch_size=None, shuffle=False)
    return ranked_runs.RankedModule(case, "adamw"), data
