"""Runs on ranks whose optimizer state is in one scratch file, in portions that are smaller than what a rank owns."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import in_files
import lightning as L
import pretended_nodes
import ranked_parity
import ranked_runs
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import models
import parity
import sp_lightning
from sp_lightning.core import host
from sp_lightning.core.host import headroom
from sp_lightning.disk import direct_file, state_ring
from sp_lightning.disk.scratch_file import ScratchFile
from sp_lightning.runtime.handle import stream as stream_before
from sp_lightning.steps import torn_step
from sp_lightning.storage import disk_of_ranks, within_budget

LITTLE = 18 << 20  # bytes: too few for four layers with their state, and enough without
OPTIONS = {"host_budget": "0B", "disk": "."}


@contextlib.contextmanager
def small_portions() -> Iterator[None]:
    """Have buffers of the smallest size."""
    with mock.patch.object(state_ring, "BUFFER", state_ring.SMALLEST):
        yield


def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function of ranked_*.py with buffers of the smallest size."""
    with small_portions():
        return function(*args, **kwargs)


def check(
    function: Callable[..., Any], name: str, options: dict[str, Any], nodes: int = 1, **settings: Any
) -> list[parity.Record]:
    """Compare ranks whose state is on the disk with ranks under DDP, as `ranked_parity.check` does."""
    around = functools.partial(pretended_nodes.trainer, nodes, run)
    return ranked_parity.check(function, name, OPTIONS | options, around=around, **settings)


class Wide(torch.nn.Module):
    """Layers of which a rank's part has several portions, of one element, and of fewer elements than a block."""

    scales = True  # else the scale has no gradient

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = [(40, 130), (130, 257), (257, 130), (130, 8)]
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(*size, dtype=dtype) for size in sizes])
        self.scale = torch.nn.Parameter(torch.ones(1, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return x * self.scale if self.scales else x


def wide(dtype: torch.dtype) -> models.Case:
    """Make a case of that net."""

    def batch(index: int) -> torch.Tensor:
        return torch.randn(6, 40, generator=torch.Generator().manual_seed(index)).to(dtype)

    return models.Case(
        "wide", functools.partial(Wide, dtype), batch, lambda net, x: net(x).square().mean(), lambda net, x: net(x)
    )


def fit_wide(dtype: str, options: dict[str, Any] | None, optimizer: str = "adamw", **settings: Any) -> parity.Record:
    """Record a run of a wide net on this rank: under DDP, or with these options under the strategy."""
    case = wide(getattr(torch, dtype))
    make = functools.partial(ranked_runs.RankedModule, case, optimizer)
    return ranked_runs.record(make, case, options, **settings)


def thaw_within_budget(options: dict[str, Any] | None, folder: str) -> parity.Record:
    """Record a run in which a weight comes to train: from its file, beside state on the disk, with room in the budget.

    Without options all is streamed from memory.
    """

    def make() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(24)))

    def batch(index: int) -> torch.Tensor:
        return torch.randn(5, 128, generator=torch.Generator().manual_seed(index))

    case = models.Case("layers", make, batch, lambda net, x: net(x).square().mean(), lambda net, x: net(x), ["Linear"])
    case = in_files.frozen(case) if options is None else in_files.filed_together(case, folder)
    needs_room = options is not None

    class Thaws(ranked_runs.RankedModule):
        def on_train_batch_start(self, batch: Any, batch_index: int) -> None:
            weight = self.net[0].weight
            if batch_index == 2 and needs_room:
                storage = self.trainer.strategy.handle.storage
                assert storage.state.is_on_disk and id(weight) in storage.in_files
                assert storage.placed.host.total + 2 * weight.nbytes <= storage._budget
            weight.requires_grad_(batch_index >= 2)

    options = {"window": 1} if options is None else options
    return run(ranked_runs.record, functools.partial(Thaws, case), case, options, batches=5)


def written_blocks(options: dict[str, Any]) -> list[int]:
    """Train a wide net on this rank; return the blocks of the scratch file to which it wrote directly."""
    found: set[int] = set()
    write = ScratchFile.write

    def noted(self: ScratchFile, memory: memoryview, begin: int, nbytes: int) -> None:
        found.update(range(begin // direct_file.BLOCK, -(-(begin + nbytes) // direct_file.BLOCK)))
        write(self, memory, begin, nbytes)

    with mock.patch.object(ScratchFile, "write", noted):
        run(fit_wide, "float32", OPTIONS | options)
    return sorted(found)


class LateFault:
    """Errors of the disk on one rank, from the second step on: it cannot be read or written, or has no room."""

    def __init__(self, call: str) -> None:
        self.call, self.real, self.is_late = call, getattr(os, call), False
        self.makes_room = call == "posix_fallocate"
        self.number = errno.ENOSPC if self.makes_room else errno.EIO

    def __call__(self, *args: Any) -> Any:
        if self.is_late and (self.makes_room or threading.current_thread().name.startswith("superpipeline-state")):
            raise OSError(self.number, os.strerror(self.number))
        return self.real(*args)


def fail(call: str, victim: int | None, options: dict[str, Any]) -> dict[str, Any]:
    """Have the disk fail on one rank; return how this rank's run ended, with which weights, and if they can be saved.

    Without a victim: the weights before each step.
    """
    fault, is_victim = LateFault(call), pretended_nodes.rank() == victim
    steps: list[list[Any]] = []

    class Fails(ranked_runs.RankedModule):
        def on_train_batch_start(self, batch: Any, batch_index: int) -> None:
            if victim is None:
                steps.append([weight.tolist() for weight in self.parameters()])
            fault.is_late = is_victim and batch_index == 2
            self.net.scales = batch_index >= 2 or not fault.makes_room  # else its state is there before

    strategy = sp_lightning.SuperpipelineStrategy(**(OPTIONS | options))
    with small_portions(), mock.patch.object(os, call, fault), tempfile.TemporaryDirectory() as root:
        case = wide(torch.float32)
        L.seed_everything(0, verbose=False)
        module = Fails(case, "adamw")
        trainer = L.Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=2 // pretended_nodes.count(),
            num_nodes=pretended_nodes.count(),
            max_steps=6,
            default_root_dir=root,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        found: dict[str, Any] = {"error": "", "said": ""}
        try:
            data = DataLoader([case.batch(i) for i in range(12)], batch_size=None, shuffle=False)
            trainer.fit(module, data)
        except Exception as error:
            found = {"error": type(error).__name__, "said": str(error)}
        optimizer = trainer.optimizers[0]
        found["torn"] = torn_step.why_not_saved([optimizer]) is not None
        return found | {"weights": [weight.tolist() for weight in module.parameters()], "steps": steps}


def even() -> torch.nn.Module:
    """Make a net of which no tensor needs room for its alignment."""
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(128, 128, bias=False) for _ in range(6)))


class OwnAdamW(torch.optim.AdamW):
    """An optimizer of the user's own: it may not be cut."""


def unlike_memory(folder: str) -> list[int]:
    """Stream a wide net without a budget where this rank finds more memory than the others do; return what is spilled.

    The last rank finds too little for the state.
    """
    rank, size = pretended_nodes.rank(), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=size)
    total = 1 << 30
    free = headroom(total) + (LITTLE if rank == size - 1 else total // 2)
    found = host.HostMemory(total, free, "machine", total)
    with mock.patch.object(within_budget, "host_memory", lambda: found):
        net = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
        with small_portions(), stream_before(net, "cpu", group=dist.group.WORLD, disk=folder) as handle:
            optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
            for _ in range(2):
                net(torch.ones(2, 512)).sum().backward()
                optimizer.step()
            return handle.storage.placed.spilled


def state_of_adafactor(folder: str) -> tuple[int, list[str]]:
    """Step with Adafactor; return the bytes that went to the disk, and what the log says of it."""
    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=size)
    said: list[logging.LogRecord] = []
    watch = logging.Handler(logging.INFO)
    watch.emit = said.append  # type: ignore[method-assign]
    log = logging.getLogger(disk_of_ranks.__name__)
    log.addHandler(watch)
    log.setLevel(logging.INFO)
    net = Wide(torch.float32)
    with stream_before(net, "cpu", group=dist.group.WORLD, disk=folder, host_budget="0B") as handle:
        optimizer = torch.optim.Adafactor(net.parameters(), foreach=False)
        for _ in range(2):
            net(torch.ones(2, 40)).sum().backward()
            optimizer.step()
        log.removeHandler(watch)
        return handle.stats()["disk_written"], [record.getMessage() for record in said]


def fill(victim: int, options: dict[str, Any]) -> tuple[str, str, bool, bool]:
    """Have the disk be full on one rank, when it makes room for the second layer's state.

    Returns this rank's error and what it says, whether its step is torn, and whether any weight was stepped.
    """
    dist.init_process_group("gloo", rank=pretended_nodes.rank(), world_size=int(os.environ["WORLD_SIZE"]))
    allocate, allocated = os.posix_fallocate, 0

    def full(descriptor: int, begin: int, nbytes: int) -> None:
        nonlocal allocated
        allocated += 1
        if allocated > 6:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(descriptor, begin, nbytes)

    net, said = Wide(torch.float32), ("", "")
    optimizer = torch.optim.AdamW(net.parameters())
    before = [parameter.detach().clone() for parameter in net.parameters()]
    try:
        with stream_before(net, "cpu", group=dist.group.WORLD, **(OPTIONS | options)):
            net(torch.ones(6, 40)).square().mean().backward()
            with mock.patch.object(os, "posix_fallocate", full if dist.get_rank() == victim else allocate):
                optimizer.step()
    except Exception as error:
        said = type(error).__name__, str(error)
    stepped = not all(map(torch.equal, before, net.parameters()))
    return *said, torn_step.why_not_saved([optimizer]) is not None, stepped
