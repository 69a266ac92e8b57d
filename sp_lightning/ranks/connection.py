"""Connecting the ranks of a process group, and its collectives, which may know only the host's tensors."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..errors import OptionError, PeerError
from .board import Ranks
from .shared_memory import check_possible

ALL_HERE = "the number of this machine's devices or less; several machines are not supported yet"
NETWORKS = "networks of one machine"  # which its sockets without a name in a file system belong to
ONE_NETWORK = "those of one container, or of containers that share the host's network (docker run --network=host)"


def connect(group: Any, device: torch.device, timeout: timedelta) -> Ranks | None:
    """Connect the ranks of a process group, each with a device of its own here; return None if there is only one."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if size == 1:
        return None
    check_possible()
    ranks: list[Any] = [None] * size
    known = _machine(), device.type, torch.__version__, _namespace("net"), _process()
    dist.all_gather_object(ranks, known, group)
    columns = zip(*ranks, strict=True)
    for what, unlike in zip(("machines", "devices", "versions of torch", NETWORKS), columns, strict=False):
        if len(set(unlike)) > 1:
            allowed = ONE_NETWORK if what is NETWORKS else ALL_HERE
            raise OptionError(argument="devices", found=f"ranks of unlike {what}: {unlike}", allowed=allowed)
    spaces, processes = zip(*[process for *_, process in ranks], strict=True)
    token = [os.urandom(16)]
    dist.broadcast_object_list(token, _first(group), group)
    return Ranks(rank, size, token[0], timeout, processes if len(set(spaces)) == 1 else None)


def leave_at_exit(user: Any, ranks: Ranks | None) -> None:
    """Leave the other ranks, if there are any, where the process ends or their user does, and tell of its error."""
    if ranks is not None:
        weakref.finalize(user, _leave, ranks, os.getpid())


def _leave(ranks: Ranks, process: int) -> None:
    if os.getpid() == process:
        error = getattr(sys, "last_value", None)
        if error is not None:
            ranks.fail(isinstance(error, PeerError))
        ranks.close()


def broadcast_buffers(module: nn.Module, group: Any, device: torch.device) -> None:
    """Give all ranks the first one's buffers."""
    first = _first(group)
    for buffer in module.buffers():
        with _for_backend(buffer, home(group, device)) as tensor:
            dist.broadcast(tensor.view(-1).view(torch.uint8), first, group)  # gloo and NCCL know no int16


def home(group: Any, device: torch.device) -> torch.device:
    """Return the device of the tensors that a group's backend takes."""
    return torch.device("cpu") if dist.get_backend(group) == "gloo" else device


def _first(group: Any) -> int:
    """Return the global rank of a group's first rank; without a group, of all."""
    return 0 if group is None else dist.get_global_rank(group, 0)


@contextlib.contextmanager
def _for_backend(tensor: torch.Tensor, device: torch.device) -> Iterator[torch.Tensor]:
    """Yield a tensor for a collective that writes it."""
    with torch.inference_mode(False), torch.no_grad():
        ours = tensor.detach().contiguous().to(device)
    yield ours
    if ours.data_ptr() != tensor.data_ptr():
        with torch.no_grad():
            tensor.copy_(ours)


def _process() -> tuple[str, int]:
    """Identify this process: its number, and where that number holds."""
    return _namespace("pid"), os.getpid()


def _namespace(kind: str) -> str:
    """Identify one of this process's namespaces: containers of a machine have others, and its kernel."""
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return _machine()


def _machine() -> str:
    """Identify this machine's kernel, which the ranks share memory through."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot_id:
            return boot_id.read().strip()
    except OSError:
        return socket.gethostname()
