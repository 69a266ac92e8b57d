"""What ranks do in tests of optimizer state that is divided among nodes (processes.py, Rule 1)."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import io
import logging
import mmap
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import lightning as L
import loops
import pretended_nodes
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

import sp_lightning
from sp_lightning.memory.pinned import libc
from sp_lightning.nodes import transport
from sp_lightning.nodes.transport import packed
from sp_lightning.ranks import new_weights
from sp_lightning.runtime.handle import Handle
from sp_lightning.runtime.handle import stream as stream_before

WIDTH = 512


@contextlib.contextmanager
def streamed(net: nn.Module, **options: Any) -> Iterator[Handle]:
    """Stream a net on this rank; its optimizer's state is divided."""
    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=size)
    given = {"divide_state": True} | options
    with stream_before(net, "cpu", group=dist.group.WORLD, window=1, units=["Linear"], **given) as handle:
        yield handle


def layers(width: int = 64, count: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


def step(net: nn.Sequential, optimizer: torch.optim.Optimizer, number: int = 0) -> None:
    """Train with other data on each rank."""
    x = torch.randn(2, net[0].in_features, generator=torch.Generator().manual_seed(100 * number + dist.get_rank()))
    optimizer.zero_grad()
    net(x).square().mean().backward()
    optimizer.step()


def bytes_of_state(**options: Any) -> tuple[int, int]:
    """Return the bytes of weights, and those of memory that this node has for AdamW's state of them."""
    net = layers(WIDTH)
    with streamed(net, **options) as handle:
        optimizer = torch.optim.AdamW(net.parameters())
        for number in range(2):
            step(net, optimizer, number)
        len(optimizer.state)  # waits for the step
        dist.barrier()  # other ranks of the node write there, too
        slabs = handle.team.owners._slabs[optimizer].values()
        return sum(p.nbytes for p in net.parameters()), sum(resident(slab.shared.truth) for slab in slabs)


def resident(memory: Tensor) -> int:
    """Count the bytes of a mapped file that are in memory."""
    pages = memory.numel() // mmap.PAGESIZE
    found = (ctypes.c_ubyte * pages)()
    assert not libc().mincore(memory.data_ptr(), memory.numel(), found)
    return sum(page & 1 for page in found) * mmap.PAGESIZE


def trained_with_slow_weights(**settings: Any) -> loops.Found:
    """Train where one node is slow to send its new weights, and all put others' in place late."""
    draws, put = random.Random(os.environ["LOCAL_RANK"]), new_weights.NewWeights._put

    def slowly(*args: Any) -> Tensor:
        time.sleep(0.02)
        return packed(*args)

    def late(self: Any, *args: Any) -> None:
        time.sleep(draws.random() / 50)
        put(self, *args)

    is_slow = os.environ["LOCAL_RANK"] == "0"
    with (
        mock.patch.object(new_weights, "packed", slowly if is_slow else packed),
        mock.patch.object(new_weights.NewWeights, "_put", late),
    ):
        return loops.train({"window": 2, "divide_state": True}, **settings)


def end_of_a_short_run(slow: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return weights and whole state of a run at whose end a node is slow to send its own, and in a hurry to leave."""
    net, is_slow = layers(), int(os.environ["LOCAL_RANK"]) == slow

    def slowly(*args: Any) -> Tensor:
        time.sleep(0.2)
        return packed(*args)

    with (
        mock.patch.object(new_weights, "packed", slowly if is_slow else packed),
        mock.patch.object(transport, "CLOSE_S", 0.02 if is_slow else transport.CLOSE_S),
        streamed(net) as handle,
    ):
        optimizer = torch.optim.AdamW(net.parameters())
        step(net, optimizer)
        states = handle.optimizer_state(optimizer)["state"].values() if slow else ()
        whole = [value for state in states for value in state.values() if dist.get_rank() == 0]
    return [parameter.detach().clone() for parameter in net.parameters()], whole


# ---- what the user cannot do


READS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "reads": lambda optimizer: first_state(optimizer).sum(),
    "reads an element": lambda optimizer: first_state(optimizer)[0, 0].item(),
    "writes": lambda optimizer: first_state(optimizer).mul_(0.5),
    "sets": lambda optimizer: first_state(optimizer).zero_(),
    "takes an array": lambda optimizer: first_state(optimizer).numpy(),
    "saves": lambda optimizer: torch.save(optimizer.state_dict(), io.BytesIO()),
    "copies": lambda optimizer: copy.deepcopy(optimizer.state_dict()),
}


def first_state(optimizer: torch.optim.Optimizer) -> Tensor:
    state: Tensor = next(iter(optimizer.state.values()))["exp_avg"]
    return state


def errors_of_reads() -> dict[str, str]:
    """Return what is said to code that reads or writes state, and train on."""
    net = layers()
    said = {}
    with streamed(net) as handle:
        optimizer = torch.optim.AdamW(net.parameters())
        step(net, optimizer)
        for what, read in READS.items():
            said[what] = error_of(lambda read=read: read(optimizer))
        kept = first_state(optimizer)
        said["shape"] = f"{tuple(kept.shape)} {kept.dtype}"
        for number in range(2):
            step(net, optimizer, 1 + number)
        said["after more steps"] = error_of(kept.sum)
        whole = handle.optimizer_state(optimizer)["state"][0]["exp_avg"]
        said["whole"] = error_of(whole.sum)
    said["after the end"] = error_of(lambda: first_state(optimizer).sum())
    return said


def error_of(does: Callable[[], Any]) -> str:
    try:
        does()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refused(what: str) -> str:
    """Return the error of a step that cannot be divided."""
    net = layers()
    with streamed(net):
        kinds = {"adafactor": torch.optim.Adafactor, "lbfgs": torch.optim.LBFGS}
        optimizer: torch.optim.Optimizer = kinds.get(what, torch.optim.AdamW)(net.parameters())
        if what == "nesterov":
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=True)
        if what == "lbfgs":
            return error_of(lambda: optimizer.step(lambda: net(torch.ones(1, 64)).sum()))
        if what in kinds or what == "nesterov":
            return error_of(lambda: step(net, optimizer))
        step(net, optimizer)
        state, weights = optimizer.state, list(net.parameters())
        if what == "moved":
            state[weights[0]], state[weights[2]] = state[weights[2]], state[weights[0]]
        if what == "grows":
            net.late = nn.Parameter(torch.zeros(3))
        if what == "other data":
            weights[0].data = weights[0].data.clone()
        return error_of(lambda: step(net, optimizer))


def loaded_again() -> tuple[bool, bool]:
    """Return whether a loop that loads the state which it has saved goes on as one that does not.

    Once each rank loads the whole of it, once its own ``state_dict()``.
    """
    found = []
    for loads in ("", "whole", "own"):
        net = layers()
        with streamed(net) if not found else again(net) as handle:
            optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
            for number in range(2):
                step(net, optimizer, number)
            if loads == "whole":
                whole = handle.optimizer_state(optimizer)
                given = [whole if dist.get_rank() == 0 else None]
                dist.broadcast_object_list(given)
                optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
                optimizer.load_state_dict(given[0])
            if loads == "own":
                optimizer.load_state_dict(optimizer.state_dict())
            step(net, optimizer, 2)
        found.append([p.detach().clone() for p in net.parameters()])
    first, *others = found
    return tuple(all(map(torch.equal, first, other)) for other in others)  # type: ignore[return-value]


def again(net: nn.Module) -> Any:
    return stream_before(net, "cpu", group=dist.group.WORLD, window=1, units=["Linear"], divide_state=True)


# ---- checkpoints of a Trainer


class Net(L.LightningModule):
    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.blocks, self.fails = layers(), fails

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        if self.fails and index == 1:
            dist.barrier()  # else a slow rank meets the other one's error first
            raise ValueError("every rank fails")
        loss: Tensor = self.blocks(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def checkpoints(folder: str, fails: bool = False) -> tuple[list[str], str, list[str]]:
    """Fit, and save at the end or on an exception; return the errors, and what was saved on an exception."""
    size = int(os.environ["WORLD_SIZE"])
    callbacks = [L.pytorch.callbacks.OnExceptionCheckpoint(folder)] if fails else []
    strategy = sp_lightning.SuperpipelineStrategy(divide_state=True, units=["Linear"])
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=size // pretended_nodes.count(),
        num_nodes=pretended_nodes.count(),
        max_epochs=1,
        default_root_dir=tempfile.gettempdir(),
        logger=False,
        enable_checkpointing=fails,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    said: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("sp_lightning")
    log.addHandler(listener)
    try:
        data = list(torch.randn(4 * size, 2, 64, generator=torch.Generator().manual_seed(0)))
        errors = [error_of(lambda: trainer.fit(Net(fails), DataLoader(data, batch_size=None)))]
    finally:
        log.removeHandler(listener)
    if not fails:
        target = os.path.join(folder, "end.ckpt")
        errors += [error_of(lambda: trainer.save_checkpoint(target))]
        errors += [error_of(lambda: trainer.save_checkpoint(target, weights_only=True))]
    return errors, "\n".join(said), sorted(os.listdir(folder))
