"""Connecting the ranks of a process group, and its collectives, which may know only the host's tensors."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import socket
import sys
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ..compat.tensors import is_dtensor, local_of
from ..errors import OptionError, PeerError
from ..nodes.arrivals import Arrivals
from ..nodes.launched import check_interfaces
from ..nodes.transport import KEEPALIVE, NodePlace, interface_error, machine, namespace, node_identity
from .board import ONE_RANK, OneRank, Ranks
from .shared_memory import check_possible

ALL_HERE = "the number of this machine's devices or less, or num_nodes with as many machines"
NETWORKS = "networks of one machine"  # which its sockets without a name in a file system belong to
ONE_NETWORK = "those of one container, or of containers that share the host's network (docker run --network=host)"
KNOWN = "machines", "devices", "versions of torch", NETWORKS
ALIKE = {  # on all nodes as well, and what to do
    "devices": "that of machines with the same kind of device",
    "versions of torch": "that of machines with one version of torch: install the same on each",
    "versions of sp_lightning": "that of machines with one version of sp_lightning: install the same on each",
    "kinds of CPU, as torch's kernels tell them": "that of machines with the same kind of CPU, whose kernels round "
    "alike; where one has more, set ATEN_CPU_CAPABILITY (default, avx2, avx512) to what all have",
    # A sum of one tensor is cut into as many parts as torch has threads, so nodes would step to other bits.
    "numbers of torch's threads": "that of machines where torch computes with as many threads: set OMP_NUM_THREADS "
    "to the same number on each",
}


class _Known(NamedTuple):
    """A rank as the others know it before they connect."""

    machine: str
    device: str
    torch: str
    network: str
    process: tuple[str, int]
    version: str
    capability: str
    threads: int
    node: str
    host: str
    error: str


def connect(
    group: Any,
    device: torch.device,
    timeout: timedelta,
    nodes: int | None = 1,
    keepalive: timedelta = KEEPALIVE,
) -> OneRank:
    """Connect the ranks of a process group, each with a device of its own.

    ``nodes``: on how many machines they are; None: on any number.
    ``keepalive``: for how long nothing comes of a machine that counts as lost.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if size == 1:
        return ONE_RANK
    check_keepalive(keepalive)
    check_possible()
    arrivals = Arrivals(group, rank, socket.gethostname(), timeout)
    try:
        return _connected(arrivals, rank, _known(device), timeout, nodes, keepalive)
    except OptionError:
        arrivals.meeting.stay()  # they come to the same error
        raise
    except BaseException as error:
        said = arrivals.blame(error)
        if isinstance(error, PeerError) and str(error) != said:
            raise PeerError(said) from error
        raise
    finally:
        arrivals.leave()


def _connected(
    arrivals: Arrivals, rank: int, mine: tuple[Any, ...], timeout: timedelta, nodes: int | None, keepalive: timedelta
) -> Ranks:
    gathered = [json.loads(text) for text in arrivals.gather(json.dumps([mine, os.urandom(16).hex()]), timeout)]
    known = [_Known(*one) for one, _ in gathered]
    arrivals.know([one.host for one in known])
    names = list(dict.fromkeys(one.node for one in known))
    _check(known, names, nodes)
    ranks_of = len(known) // len(names)
    place = NodePlace(rank // ranks_of, ranks_of, tuple(one.host for one in known[::ranks_of]))
    beside = known[place.first : place.first + ranks_of]
    spaces, processes = zip(*[one.process for one in beside], strict=True)
    numbers = processes if len(set(spaces)) == 1 else None
    token = bytes.fromhex(gathered[0][1])
    return Ranks(rank - place.first, ranks_of, token, timeout, numbers, place, keepalive, arrivals)


def check_keepalive(keepalive: timedelta) -> None:
    """Raise OptionError if a machine would count as lost between two signs of its life."""
    if keepalive < timedelta(seconds=1):
        raise OptionError(argument="keepalive", found=str(keepalive), allowed="one second or longer")


def _known(device: torch.device) -> tuple[Any, ...]:
    return (
        machine(),
        device.type,
        torch.__version__,
        namespace("net"),
        (namespace("pid"), os.getpid()),
        _version(),
        torch.backends.cpu.get_cpu_capability(),
        torch.get_num_threads(),
        node_identity(),
        socket.gethostname(),
        interface_error(),
    )


def _version() -> str:
    try:
        return importlib.metadata.version("sp-lightning")
    except importlib.metadata.PackageNotFoundError:  # it runs from its source
        return "unknown"


def _check(known: Sequence[_Known], names: Sequence[str], nodes: int | None) -> None:
    """Raise OptionError, the same on every rank, if the ranks cannot train together on this number of machines."""
    if nodes == 1 or (nodes is None and len(names) == 1):
        for what, unlike in zip(KNOWN, zip(*known, strict=True), strict=False):
            if len(set(unlike)) > 1:
                allowed = ONE_NETWORK if what is NETWORKS else ALL_HERE
                raise OptionError(argument="devices", found=f"ranks of unlike {what}: {unlike}", allowed=allowed)
        return
    if nodes is not None and nodes != len(names):
        hosts = ", ".join(dict.fromkeys(one.host for one in known))
        raise OptionError(
            argument="num_nodes",
            found=nodes,
            allowed=f"{len(names)}, the number of machines on which the ranks are ({hosts}), or of containers with a "
            "network of their own",
        )
    check_interfaces([f"{one.host}: {one.error}" for one in known if one.error])
    values_of = [(one.device, one.torch, one.version, one.capability, one.threads) for one in known]
    for what, values in zip(ALIKE, zip(*values_of, strict=True), strict=True):
        if len(set(values)) > 1:
            found = ", ".join(dict.fromkeys(f"{one.host} {value}" for one, value in zip(known, values, strict=True)))
            raise OptionError(argument="num_nodes", found=f"unlike {what}: {found}", allowed=ALIKE[what])
    sizes = {one.node: 0 for one in known}
    for one in known:
        sizes[one.node] += 1
    counts = list(sizes.values())
    of_nodes = [one.node for one in known]
    if len(set(counts)) > 1 or of_nodes != [name for name in names for _ in range(counts[0])]:
        host_of = {one.node: one.host for one in known}
        listed = ", ".join(f"{host_of[name]} {count}" for name, count in sizes.items())
        raise OptionError(
            argument="num_nodes",
            found=f"ranks by machine: {listed}",
            allowed="that of machines with as many ranks each, whose numbers follow one another on each machine",
        )


def leave_at_exit(user: Any, ranks: OneRank) -> None:
    """Leave the other ranks where the process ends or their user does, and tell of its error."""
    weakref.finalize(user, _leave, ranks, os.getpid())


def _leave(ranks: OneRank, process: int) -> None:
    if os.getpid() == process:
        error = getattr(sys, "last_value", None)
        if error is not None:
            ranks.fail(isinstance(error, PeerError))
        ranks.close()


def broadcast_buffers(module: nn.Module, ranks: OneRank, group: Any, device: torch.device) -> None:
    """Give all ranks the first one's buffers, once all have come here."""
    if ranks.world == 1:
        return
    first = dist.get_process_group_ranks(group)[0]
    with ranks.together("the buffers of the first one"):
        for buffer in module.buffers():
            with _for_backend(local_of(buffer) if is_dtensor(buffer) else buffer, home(group, device)) as tensor:
                dist.broadcast(tensor.view(-1).view(torch.uint8), first, group)  # gloo and NCCL know no int16


def home(group: Any, device: torch.device) -> torch.device:
    """Return the device of the tensors that a group's backend takes."""
    return torch.device("cpu") if dist.get_backend(group) == "gloo" else device


@contextlib.contextmanager
def _for_backend(tensor: torch.Tensor, device: torch.device) -> Iterator[torch.Tensor]:
    """Yield a tensor for a collective that writes it."""
    with torch.inference_mode(False), torch.no_grad():
        ours = tensor.detach().contiguous().to(device)
    yield ours
    if ours.data_ptr() != tensor.data_ptr():
        with torch.no_grad():
            tensor.copy_(ours)
