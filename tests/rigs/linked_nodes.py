"""Nodes, each in a network namespace of its own, with a link of a given speed to a switch between them: needs root.

Run as a program it is one rank, which does one of `WORKS` and leaves what it found in a file.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from sp_lightning.nodes.transport import PARTS, NodeTransport, same_for_all
from sp_lightning.ranks import connection
from sp_lightning.ranks.board import Ranks
from sp_lightning.runtime.handle import stream as stream_before

RIGS = pathlib.Path(__file__).parent
MASTER = "10.77.0.1"
WIDTH, LAYERS = 640, 4
KEEPALIVE_S = 3.0
TIMEOUT_S = 5.0
PART_NBYTES, COUNT = 1 << 22, 12


def can_link() -> bool:
    """Whether this process may make network namespaces, and has the tools."""
    name = f"probe{os.getpid()}"
    try:
        return not any(_run(f"ip netns {verb} {name}", check=False) for verb in ("add", "del")) and not _run("tc -V")
    except (OSError, subprocess.CalledProcessError):
        return False


def _run(command: str, check: bool = True) -> int:
    return subprocess.run(command.split(), check=check, capture_output=True).returncode


class Link:
    """Links from the nodes' namespaces to a switch, which has another one."""

    def __init__(self, rate: str, nodes: int) -> None:
        number = os.getpid()
        self.spaces = [f"node{node}n{number}" for node in range(nodes)]
        self.ends = [f"n{node}n{number}" for node in range(nodes)]
        self._switch = f"switch{number}"
        for space in (self._switch, *self.spaces):
            _run(f"ip netns add {space}")
        _run(f"ip -n {self._switch} link add switch type bridge")
        _run(f"ip -n {self._switch} link set switch up")
        for index, (space, end) in enumerate(zip(self.spaces, self.ends, strict=True)):
            _run(f"ip -n {self._switch} link add port{index} type veth peer name {end} netns {space}")
            _run(f"ip -n {self._switch} link set port{index} master switch")
            _run(f"ip -n {self._switch} link set port{index} up")
            _run(f"ip -n {space} addr add 10.77.0.{index + 1}/24 dev {end}")
            for device in ("lo", end):
                _run(f"ip -n {space} link set {device} up")
            # A burst holds the largest packet, so that headers do not count.
            _run(f"ip netns exec {space} tc qdisc add dev {end} root tbf rate {rate} burst 256kb latency 500ms")

    def go_down(self) -> None:
        """End the first node's link."""
        _run(f"ip -n {self.spaces[0]} link set {self.ends[0]} down")

    def stall(self) -> None:
        """Have the first node's link carry nothing, until it goes on: the node itself sees no end of it."""
        _run(f"ip -n {self._switch} link set port0 down")

    def go_on(self) -> None:
        """Have the link carry again."""
        _run(f"ip -n {self._switch} link set port0 up")

    def close(self) -> None:
        """Remove the namespaces, and what is in them."""
        for space in (self._switch, *self.spaces):
            _run(f"ip netns del {space}", check=False)


@contextlib.contextmanager
def linked(rate: str, nodes: int = 2) -> Iterator[Link]:
    link = Link(rate, nodes)
    try:
        yield link
    finally:
        link.close()


def start(link: Link, work: str, folder: pathlib.Path, local: int = 2) -> list[subprocess.Popen[str]]:
    """Start the ranks of all nodes."""
    ranks, world = [], len(link.spaces) * local
    for rank in range(world):
        node = rank // local
        place = {"LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "RANK": str(rank), "OMP_NUM_THREADS": "1"}
        place |= {"MASTER_ADDR": MASTER, "MASTER_PORT": "29511", "GLOO_SOCKET_IFNAME": link.ends[node]}
        place |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = ["ip", "netns", "exec", link.spaces[node], sys.executable, str(RIGS / "linked_nodes.py")]
        command += [work, str(folder / f"{rank}.pt")]
        ranks.append(subprocess.Popen(command, env=os.environ | place, stderr=subprocess.PIPE, text=True))
    return ranks


def results(ranks: list[subprocess.Popen[str]], folder: pathlib.Path, timeout: float = 240) -> list[Any]:
    """Wait for the ranks, and return what each has found."""
    try:
        said = [rank.communicate(timeout=timeout)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    found = [folder / f"{rank}.pt" for rank in range(len(ranks))]
    assert all(file.exists() for file in found), "\n".join(said)[-4000:]
    return [torch.load(file, weights_only=False) for file in found]


# ---- what a rank does


def train() -> tuple[Any, ...]:
    import loops

    return tuple(loops.train({"window": 2}, clip=True))


def sent_nbytes() -> int:
    """Return how many bytes have left this namespace."""
    with open("/proc/net/dev") as devices:
        lines = [line.split(":") for line in devices if ":" in line]
    return sum(int(numbers.split()[8]) for name, numbers in lines if name.strip() != "lo")


def steps(count: int, more: Callable[[int], None], **options: Any) -> int:
    """Train a stack of layers; return how many parameters it has."""

    rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    with stream_before(net, "cpu", group=dist.group.WORLD, window=1, **options) as handle:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for step in range(count):
            optimizer.zero_grad()
            net(torch.ones(2, WIDTH)).square().mean().backward()
            optimizer.step()
            handle.finish_step()
            more(step)
    return sum(p.numel() for p in net.parameters())


def nbytes_of_steps(sent: Callable[[], int] = sent_nbytes, **options: Any) -> float:
    """Return how many bytes this rank's node sends in a step, for each parameter."""
    counts: list[int] = []

    def count(_: int) -> None:
        dist.barrier()
        counts.append(sent())

    numel = steps(4, count, **options)
    return (counts[-1] - counts[0]) / (len(counts) - 1) / numel


def message_nbytes_of_steps(**options: Any) -> float:
    """Return how many bytes this rank packs for its rail in a step, for each parameter."""
    packed, send = [0], NodeTransport.send

    def counting(self: NodeTransport, tag: int, key: Any, pack: Any) -> Any:
        def counted(nodes: Any) -> Any:
            made = pack(nodes)
            packed[0] += sum(payload.nbytes for payload in made.values())
            return made

        return send(self, tag, key, counted)

    with mock.patch.object(NodeTransport, "send", counting):
        return nbytes_of_steps(lambda: packed[0], **options)


def until_the_link_ends(**options: Any) -> tuple[str, float]:
    """Train without end; return the error that ended it, and when that was."""
    options = options or {"keepalive": timedelta(seconds=KEEPALIVE_S)}
    mark = pathlib.Path(sys.argv[2]).with_suffix(".mark")

    def note(step: int) -> None:
        if step == 1:
            mark.touch()

    try:
        steps(1 << 30, note, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic()
    return "", 0.0


def until_the_timeout() -> tuple[str, float]:
    """Train without end where a machine may be silent for hours; return the error that ended it, and when that was."""
    return until_the_link_ends(timeout=timedelta(seconds=TIMEOUT_S), keepalive=timedelta(hours=1))


def bytes_per_s() -> float:
    """Return the bytes per second that this rank sends to its rail while the other node does so, too."""
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    ranks = connection.connect(None, torch.device("cpu"), timedelta(seconds=120), None)
    assert isinstance(ranks, Ranks) and ranks.transport is not None
    transport, part = ranks.transport, torch.zeros(PART_NBYTES, dtype=torch.uint8)
    transport.drains = True
    keys = [(0, 0, number) for number in range(COUNT)]
    ranks.meet("the begin")
    began = time.monotonic()
    for key in keys:
        transport.send(PARTS, key, same_for_all(lambda: part))
    ranks.wait_for_nodes(lambda: [rank for key in keys for rank in transport.missing(PARTS, key)], "all parts")
    ended = time.monotonic()
    ranks.meet("the end")
    ranks.close()
    return COUNT * PART_NBYTES / (ended - began)


WORKS: dict[str, Callable[[], Any]] = {
    work.__name__: work for work in (train, nbytes_of_steps, until_the_link_ends, until_the_timeout, bytes_per_s)
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    made = WORKS[sys.argv[1]]()
    part = pathlib.Path(sys.argv[2] + ".part")
    torch.save(made, part)
    part.rename(sys.argv[2])
    sys.stderr.flush()
    os._exit(0)  # torch's own group may wait for its peers
