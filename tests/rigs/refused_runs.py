"""What ranks do in tests of bad input: each returns the error that it got, as "type: message"."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any
from unittest import mock

import lightning as L
import pretended_nodes
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import sp_lightning
from sp_lightning.core.host import HostMemory
from sp_lightning.memory.pinned import libc
from sp_lightning.ranks import connection
from sp_lightning.ranks.board import WATCH_S
from sp_lightning.ranks.connection import connect
from sp_lightning.runtime import preflight
from sp_lightning.runtime.handle import stream as stream_before

NEW_NETWORK = 0x40000000  # CLONE_NEWNET


class Net(L.LightningModule):
    def __init__(self, widths: list[int] = [8, 8], dtype: torch.dtype = torch.float32, frozen: bool = False) -> None:  # noqa: B006
        super().__init__()
        sizes = list(zip(widths, [*widths[1:], 8], strict=True))
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(i, o, dtype=dtype) for i, o in sizes])
        self.blocks[0].bias.requires_grad_(not frozen)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(module: L.LightningModule, data: Any, devices: int, **trainer: Any) -> None:
    L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=trainer.pop("strategy", None) or sp_lightning.SuperpipelineStrategy(window=1, units=["Linear"]),
        max_steps=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=tempfile.gettempdir(),
        **trainer,
    ).fit(module, data)


def error(run: Callable[[], Any]) -> str:
    try:
        with mock.patch.dict(os.environ):  # from which the end of a run removes the ranks
            run()
    except Exception as found:
        return f"{type(found).__name__}: {found}"
    return ""


def unlike_by_hand() -> tuple[str, list[str], torch.Tensor]:
    """Stream another module on each rank, and then one that is alike; return what watched the ranks in between."""
    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=size)
    found = error(lambda: stream_before(torch.nn.Linear(4, 4 + rank), "cpu", group=dist.group.WORLD))
    time.sleep(2 * WATCH_S)
    watching = [thread.name for thread in threading.enumerate() if thread.name == "superpipeline-ranks"]
    with stream_before(torch.nn.Linear(4, 4), "cpu", group=dist.group.WORLD) as handle:
        return found, watching, handle.module(torch.ones(4)).detach()


def unlike_models(settings: list[dict[str, Any]]) -> str:
    """Train another model on each rank."""
    size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    return error(lambda: trained(Net(**settings[rank]), [torch.randn(4, 8)] * 4, size))


def shared_bytes() -> str:
    """Train a layer whose weight another attribute is over until its first forward, as `spectral_norm` leaves it."""
    module = Net()
    torch.nn.utils.spectral_norm(module.blocks[1])
    return error(lambda: trained(module, [torch.randn(4, 8)] * 4, int(os.environ["WORLD_SIZE"])))


def another_torch() -> str:
    """Train with another version of torch on the last rank."""
    size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    version = "0.1" if rank == size - 1 else torch.__version__
    with mock.patch.object(torch, "__version__", version):
        return error(lambda: trained(Net(), [torch.randn(4, 8)] * 4, size))


@contextlib.contextmanager
def network_of_its_own() -> Iterator[None]:
    """Give this thread the network of another container; without the right to, let it seem so."""
    with open("/proc/self/ns/net") as before, contextlib.ExitStack() as stack:
        if libc().unshare(NEW_NETWORK) == 0:
            stack.callback(libc().setns, before.fileno(), NEW_NETWORK)
        else:
            real = os.readlink
            seems = lambda path: "net:[1]" if path == before.name else real(path)  # noqa: E731
            stack.enter_context(mock.patch.object(os, "readlink", seems))
        yield


def another_network() -> tuple[str, float]:
    """Connect one machine's ranks, the last in another container; return the error, and how long that took."""
    size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=size)
    began = time.monotonic()
    with network_of_its_own() if rank == size - 1 else contextlib.nullcontext():
        said = error(lambda: connect(None, torch.device("cpu"), timedelta(seconds=20)))
    return said, time.monotonic() - began


UNLIKE: dict[str, Callable[[], Any]] = {  # what one node has in another way than the other
    "torch": lambda: mock.patch.object(torch, "__version__", "0.1"),
    "sp_lightning": lambda: mock.patch.object(connection, "_version", lambda: "0.1"),
    "CPU": lambda: mock.patch.object(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT+"),
    "threads": lambda: mock.patch.object(torch, "get_num_threads", lambda: 7),
    "interface": lambda: mock.patch.dict(os.environ, GLOO_SOCKET_IFNAME="none0"),
    "nothing": contextlib.nullcontext,
}


class Untouched(Dataset):
    """Data that must not be read."""

    reads = 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        Untouched.reads += 1
        return torch.zeros(4, 8)


def unlike_nodes(nodes: Sequence[int], what: str, machines: int = 2, **trainer: Any) -> tuple[str, float, int]:
    """Train on pretended nodes, of each rank one, of which the last has something else.

    Returns the error, how long it took to come, and how much data was read.
    """
    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    node, began = nodes[rank], time.monotonic()
    Untouched.reads = 0
    local = size // machines
    place = {"LOCAL_RANK": str(rank % local), "NODE_RANK": str(rank // local)}
    with (
        pretended_nodes.pretending(node),
        mock.patch.dict(os.environ, place),
        UNLIKE[what]() if node == max(nodes) else contextlib.nullcontext(),
    ):
        data = DataLoader(Untouched(), batch_size=None)
        said = error(lambda: trained(Net(), data, size // machines, num_nodes=machines, **trainer))
    return said, time.monotonic() - began, Untouched.reads


def unlike_sizes(machines: Sequence[int]) -> str:
    """Train on pretended nodes of one rank each, whose Trainers are told of different numbers of machines."""
    rank = int(os.environ["LOCAL_RANK"])
    place = {"LOCAL_RANK": "0", "NODE_RANK": str(rank)}
    with pretended_nodes.pretending(rank), mock.patch.dict(os.environ, place):
        return error(lambda: trained(Net(), DataLoader(Untouched(), batch_size=None), 1, num_nodes=machines[rank]))


def unlike_group(nodes: Sequence[int], what: str) -> str:
    """Stream over a group on pretended nodes, of which the last has something else."""
    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=size)
    unlike = UNLIKE[what]() if nodes[rank] == max(nodes) else contextlib.nullcontext()
    with pretended_nodes.pretending(nodes[rank]), unlike:
        return error(lambda: stream_before(Net(), "cpu", group=dist.group.WORLD, timeout=timedelta(seconds=20)))


def without_a_node(timeout: float) -> str:
    """Train on two nodes of which the last does not come, and for which the first rank waits the shortest time."""
    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    if rank >= size // 2:
        return "PeerError"
    strategy = sp_lightning.SuperpipelineStrategy(timeout=timedelta(seconds=timeout + 20 * rank))
    data = DataLoader(Untouched(), batch_size=None)
    local = size // 2
    with pretended_nodes.pretending(0), mock.patch.dict(os.environ, NODE_RANK="0"):
        return error(lambda: trained(Net(), data, local, num_nodes=2, strategy=strategy))


def refused_memfd(number: int) -> str:
    """Train where the system refuses a memfd."""
    size = int(os.environ["WORLD_SIZE"])
    refused = mock.Mock(side_effect=OSError(number, os.strerror(number)))
    with mock.patch.object(os, "memfd_create", refused):
        return error(lambda: trained(Net(), [torch.randn(4, 8)] * 4, size))


class Reads(Dataset):
    """Data that a worker computes from a weight, or from a gradient."""

    def __init__(self, module: Net, what: str) -> None:
        self.module, self.what = module, what

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        weight = self.module.blocks[1].weight
        if self.what == "slice":
            return weight[2:4, :8].sum() + torch.zeros(4, 8)
        if self.what == "numpy":
            return torch.full((4, 8), float(weight.detach().numpy()[3, 3]))
        if self.what == "nothing":
            return torch.zeros(4, 8)
        return weight.mean() + torch.zeros(4, 8)


def worker(what: str) -> str:
    """Train with a data loader whose forked workers read what the ranks share."""
    module = Net()
    loader = DataLoader(Reads(module, what), batch_size=None, num_workers=1, multiprocessing_context="fork")
    # The processes of tests may have no children otherwise, so that they end with their parent.
    with mock.patch.dict(multiprocessing.current_process()._config, daemon=False):
        return error(functools.partial(trained, module, loader, int(os.environ["WORLD_SIZE"])))


def too_few_devices() -> str:
    """Train where the environment has more ranks here than the Trainer has devices."""
    with mock.patch.dict(os.environ, LOCAL_RANK="2"):
        return error(lambda: trained(Net(), [torch.randn(4, 8)] * 4, 2))


# ---- room on the host


class Large(Net):
    """Twelve layers of 24 MiB: 288 MiB of weights, which is worth a look at the free memory."""

    def __init__(self, late: bool = False) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList() if late else self.make()

    @staticmethod
    def make() -> torch.nn.ModuleList:
        return torch.nn.ModuleList(torch.nn.Linear(2048, 3072) for _ in range(12))

    def configure_model(self) -> None:
        if not self.blocks:
            with torch.device("meta"):
                self.blocks = self.make()

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        for block in self.blocks:
            batch = block(batch)[:, :2048]
        return batch.square().mean()


def little_memory(free: int, late: bool = False, **trainer: Any) -> tuple[str, list[str]]:
    """Train where the first rank finds so many free bytes, and another finds none; return what was said."""
    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    memory = HostMemory(1 << 40, 0 if rank else free, "machine", 1 << 40)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("sp_lightning")
    logger.addHandler(handler)
    try:
        with mock.patch.object(preflight, "host_memory", lambda: memory):
            said = error(lambda: trained(Large(late), DataLoader(torch.randn(16, 2048), batch_size=2), size, **trainer))
    finally:
        logger.removeHandler(handler)
    return said, [line for line in lines if "host memory" in line]


class Noting(torch.nn.Linear):
    """A layer that notes the memory of this process when its weights are drawn."""

    noted = 0

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if not self.weight.is_meta:
            Noting.noted = private_nbytes()


def private_nbytes() -> int:
    """Return the bytes that no file holds: whether a library's page is shared changes as other processes come."""
    with open("/proc/self/smaps_rollup") as rollup:
        return sum(1024 * int(line.split()[1]) for line in rollup if line.startswith("Anonymous:"))


def drawn_late() -> tuple[int, list[torch.Tensor]]:
    """Draw weights in a run; return how much memory this rank had for them, its first weight and a random number."""
    module = Large(True)
    module.configure_model()
    with torch.device("meta"):
        module.blocks.append(Noting(2048, 3072))
    ctypes.CDLL(None).malloc_trim(0)  # of what earlier tests freed
    before = private_nbytes()
    torch.manual_seed(0)
    trained(module, DataLoader(torch.zeros(16, 2048), batch_size=2), int(os.environ["WORLD_SIZE"]))
    return Noting.noted - before, [module.blocks[0].weight.detach().clone(), torch.rand(4)]
