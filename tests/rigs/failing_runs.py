"""Runs on several ranks in which one fails: at a phase, in a way, on a rank.

    [Ending(...), Ending(...)] = failing_runs.endings(2, phase="forward", way="kill", victim=1)

1. Every rank is a process of its own, which a server forks that has imported everything. Nothing but the library
   tells the others: no launcher watches them.
2. The phases are the functions of `STRIKES`, in which the victim fails at the second step, or when it comes there
   first in `ONCE`. With ``beside`` it fails when it comes there first after it began to step beside backward.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import multiprocessing
import multiprocessing.forkserver
import os
import pathlib
import signal
import socket
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any
from unittest import mock

import lightning as L
import processes
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch.utils.data import DataLoader

import sp_lightning
from sp_lightning.lightning import several_devices
from sp_lightning.nodes import arrivals, transport
from sp_lightning.optim import pending_step
from sp_lightning.ranks import board, connection, exchange, new_weights, sharded_step, user_edits

LONGEST_S = 90
SAVE_S = 3.0  # of a checkpoint on exception
LAG_S = 5.0  # that a slow rank's thread waits at most in a step
ORPHAN_S = 12.0  # for which a forked process outlives its parent


@dataclasses.dataclass
class Ending:
    """How a rank's process ended."""

    status: int  # -9 also if the test had to end it
    error: str  # the type of the exception that the Trainer raised
    message: str
    at: float  # when that was, on the clock of all processes; else when the process ended
    names: list[str]  # of sockets that existed in the run
    in_shm: list[str]  # mapped files of /dev/shm
    struck: float  # when the victim failed


class Net(L.LightningModule):
    """A small net with a buffer that the ranks synchronise, and a strike in each of its hooks."""

    def __init__(self, strike: Callable[[str], None], width: int = 8) -> None:
        super().__init__()
        self.strike, self.width = strike, width
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(width, width) for _ in range(3)])
        self.norm = torch.nn.BatchNorm1d(width)

    def setup(self, stage: str) -> None:
        self.strike("setup")

    def configure_model(self) -> None:
        self.strike("configure_model")

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        x = self.norm(batch)
        for number, block in enumerate(self.blocks):
            x = block(x).relu()
            if number == 1:
                self.strike("forward")
                x.register_hook(lambda grad: self.strike("backward"))
        loss = x.square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), foreach=False)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.strike("before the step")

    def on_train_batch_end(self, *_: Any) -> None:
        self.strike("after the step")

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.strike("validation")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.strike("checkpoint")

    def teardown(self, stage: str) -> None:
        self.strike("teardown")


class NoHooks(Net):
    """The same without hooks around a step, which may therefore be deferred."""

    on_before_optimizer_step = L.LightningModule.on_before_optimizer_step
    on_train_batch_end = L.LightningModule.on_train_batch_end


BESIDE_BACKWARD = "beside backward"

# Functions of the library, and one of torch, in which a rank fails before they do anything.
STRIKES: dict[str, tuple[Any, str]] = {
    "meeting": (arrivals.Arrivals, "gather"),
    "connecting": (board.Ranks, "_connect"),
    "accepting": (board.Ranks, "_accept"),
    "descriptors": (board.Ranks, "descriptor"),
    "exchange": (exchange.Exchange, "finish"),
    "between post and sum": (exchange.Exchange, "_sum"),
    "settle": (user_edits.Faces, "settle"),
    "joining": (several_devices, "init_process_group"),
    "connecting nodes": (transport.NodeTransport, "_connect"),
    "sum of nodes": (exchange.Exchange, "_sum_of_nodes"),
    "sums of other nodes": (exchange.Exchange, "_take_sums"),
    "agreement of nodes": (board.Ranks, "numbers_of_nodes"),
    "in the step": (sharded_step.Owners, "_owned"),
    "loop of the step": (importlib.import_module("torch.optim.adam"), "adam"),
    "end of the step": (sharded_step.Owners, "end"),
    "deferred part": (sharded_step.OwnParts, "stepped"),
    "sending new weights": (new_weights.NewWeights, "send"),
    "taking new weights": (new_weights.NewWeights, "_put"),
    "promise": (sharded_step.EarlyParts, "mark"),
    BESIDE_BACKWARD: (sharded_step.EarlyParts, "take_up"),
}
IN_MODULE = [
    *("setup", "configure_model", "data", "forward", "backward", "before the step", "after the step"),
    *("validation", "checkpoint", "teardown"),
]
BESIDE = ("deferred part", "promise", BESIDE_BACKWARD)  # other work, where no hooks keep steps from there
# The ranks of one machine never come there, or have torch's own error.
BETWEEN_NODES = ("joining", "connecting nodes", "sum of nodes", "sums of other nodes", "agreement of nodes")
BETWEEN_NODES += ("sending new weights", "taking new weights")
PHASES = [phase for phase in (*STRIKES, *IN_MODULE) if phase not in BETWEEN_NODES]
ONCE = {
    "meeting",
    "connecting",
    "accepting",
    "joining",
    "connecting nodes",
    "setup",
    "configure_model",
    "teardown",
    "validation",
    "checkpoint",
}
FIFTH = {"descriptors"}


def ways(way: str) -> None:
    if way == "raise":
        raise ValueError("the victim fails")
    if way == "memory":
        raise MemoryError("the victim has no memory left")
    if way == "orphan" and os.fork() == 0:  # as a worker of a data loader, which looks for its parent now and then
        time.sleep(ORPHAN_S)
        os._exit(0)
    if way in ("kill", "orphan"):
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "signal":
        os.kill(os.getpid(), signal.SIGTERM)
    if way == "hang":
        time.sleep(LONGEST_S)
    if way == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)


@functools.cache
def server() -> Any:
    """Start the server: it finds modules by its environment alone."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["failing_runs"])
    with mock.patch.dict(os.environ, {"PYTHONPATH": os.pathsep.join(sys.path)}):
        multiprocessing.forkserver.ensure_running()
    return context


def endings(
    size: int,
    *,
    phase: str,
    way: str,
    victim: int | None,
    timeout: float = 60,
    longest: float = LONGEST_S,
    saves_to: str | None = None,
    nodes: int = 1,
    keepalive: float = 60,
    beside: bool = False,
    slow: int | None = None,
    overlap: bool = True,
    disk: str | None = None,
    divides: bool = False,
    saver: str = "SlowSaver",
) -> list[Ending]:
    """Run a Trainer on each rank, in which the victim (None: every rank) fails; return how each ended.

    Of several nodes the victim's whole one stops, as if it were lost.

    With ``saves_to`` it saves a checkpoint on exception, which takes the first rank longer than a hanging one is given;
    in phase "none" one of each step. ``slow``: a rank whose thread steps two units beside backward, and leaves the
    rest, while those of others leave nothing. Without ``overlap`` no step is deferred. ``disk``: where state is.
    ``divides``: nodes have shares of the optimizer's state. ``saver``: the callback that saves on exception.
    """
    context = server()
    port = processes.free_port()
    here = []
    for rank in range(size):
        reads, writes = context.Pipe(duplex=False)
        of_victim = victim is not None and rank * nodes // size == victim * nodes // size
        strikes = rank == victim or victim is None or (nodes > 1 and way == "stop" and of_victim)
        its_way = way if strikes else ""
        args = (
            rank,
            size,
            port,
            phase,
            its_way,
            timeout,
            writes,
            saves_to,
            nodes,
            keepalive,
            beside,
            slow,
            overlap,
            disk,
            divides,
            saver,
        )
        process = context.Process(target=run, args=args)
        process.start()
        writes.close()
        here.append((process, reads, its_way == "stop"))
    until = time.monotonic() + longest
    found: dict[int, Ending] = {}
    for rank, (process, reads, stopped) in sorted(enumerate(here), key=lambda item: item[1][2]):
        # whoever is stopped ends by nothing of its own: once all others have, there is nothing to wait for
        found[rank] = ending(process, reads, min(until, time.monotonic() + 2) if stopped else until)
    return [found[rank] for rank in range(size)]


def ending(process: Any, reads: Any, until: float) -> Ending:
    told: dict[str, Any] = {}
    with contextlib.suppress(EOFError):
        while reads.poll(max(until - time.monotonic(), 0)):
            told |= reads.recv()
    process.join(max(until - time.monotonic(), 0.1))
    at = time.monotonic()
    if process.exitcode is None:
        process.kill()
        process.join()
    defaults = {"error": "", "message": "", "at": at, "names": [], "in_shm": [], "struck": 0.0}
    return Ending(status=process.exitcode, **(defaults | told))


def run(
    rank: int,
    size: int,
    port: int,
    phase: str,
    way: str,
    timeout: float,
    tell: Any,
    saves_to: str | None,
    nodes: int,
    keepalive: float,
    beside: bool,
    slow: int | None,
    overlap: bool,
    disk: str | None,
    divides: bool,
    saver: str,
) -> None:
    """Run a Trainer on one rank, of the first, second, ... of as many pretended nodes (pretended_nodes.py)."""
    torch.set_num_threads(1)
    here = size // nodes
    node = f"{rank // here}"
    if nodes > 1:
        connection.node_identity = lambda: f"pretended node {node}"
        socket.gethostname = lambda: f"host{node}"
    os.environ.update(
        LOCAL_RANK=str(rank % here),
        NODE_RANK=node,
        WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    calls = exchanges = 0
    has_begun = not beside
    of_phase = 1 if phase in ONCE or beside else 5 if phase in FIFTH else 2

    def strike(where: str, *args: Any) -> None:
        nonlocal calls, exchanges, has_begun
        has_begun = has_begun or where == BESIDE_BACKWARD
        exchanges += where == "exchange"
        until = time.monotonic() + LAG_S
        # On a busy machine a backward ends before any part has begun; in the first one none does.
        while where == "exchange" and exchanges > 1 and not has_begun and time.monotonic() < until:
            time.sleep(1e-3)
        if where == phase and has_begun:
            calls += 1
            if way and calls == of_phase:
                if phase == "meeting":
                    wait_for_arrivals(*args)
                tell.send({"struck": time.monotonic()})
                if way == "save":
                    save_from_handler(net.trainer, saves_to)
                ways(way)

    for name, (owner, method) in STRIKES.items():
        wrap(owner, method, name, strike)
    if saves_to is not None:
        board.GRACE_S = SAVE_S / 3
    real = board._address
    board._address = lambda token: (tell.send({"names": [real(token)]}), real(token))[1]
    try:
        with contextlib.redirect_stdout(None), paced(None if slow is None else slow == rank):
            torch.manual_seed(rank)
            width = 8 if disk is None else 128  # state of smaller weights is written through a mapping
            net = (NoHooks if beside or phase in BESIDE else Net)(strike, width)
            fit(size, net, timeout, tell, savers(saves_to, phase, saver), nodes, keepalive, overlap, disk, divides)
    except BaseException as error:
        tell.send({"error": type(error).__name__, "message": str(error), "at": time.monotonic()})
        traceback.print_exc()
        raise SystemExit(1) from None


def script(phase: str, way: str) -> None:
    """Run a Trainer on two ranks in which the last fails, in processes that a launcher starts."""
    calls = 0

    def strike(where: str) -> None:
        nonlocal calls
        calls += where == phase
        if where == phase and calls == 2 and os.environ.get("LOCAL_RANK") == "1":
            print("the victim strikes at", time.monotonic(), file=sys.stderr, flush=True)
            ways(way)

    fit(2, Net(strike), 30, mock.Mock())  # in which both import everything


def wrap(owner: Any, method: str, name: str, strike: Callable[..., None]) -> None:
    real = getattr(owner, method)

    def struck(*args: Any, **kwargs: Any) -> Any:
        strike(name, *args)
        return real(*args, **kwargs)

    setattr(owner, method, struck)


def save_from_handler(trainer: L.Trainer, folder: str) -> None:
    """Save a checkpoint in a signal handler, which runs at once."""
    signal.signal(signal.SIGUSR1, lambda *_: trainer.save_checkpoint(os.path.join(folder, "handler.ckpt")))
    os.kill(os.getpid(), signal.SIGUSR1)


def wait_for_arrivals(of: arrivals.Arrivals, *_: Any) -> None:
    """Wait until all others have come: before that torch still connects some to the group."""
    until = time.monotonic() + LONGEST_S
    while of.meeting.missing() and time.monotonic() < until:
        time.sleep(1e-2)


class SlowSaver(OnExceptionCheckpoint):
    """Saves a checkpoint on exception, which takes the first rank long."""

    def on_save_checkpoint(self, trainer: L.Trainer, *_: Any) -> None:
        time.sleep(SAVE_S if trainer.is_global_zero else 0)


@contextlib.contextmanager
def paced(is_slow: bool | None) -> Iterator[None]:
    """Have the thread wait with the second unit that it steps beside backward until it is to leave the rest, or do all.

    None: it does what it does.
    """
    kind = pending_step.PendingStep
    step_part, until = kind._step_part, weakref.WeakKeyDictionary[Any, float]()

    def late(self: Any, unit: Any) -> None:
        is_first = self not in until
        until.setdefault(self, time.monotonic() + LAG_S)
        goes_on = is_first or self._leaving or self._deferred or not self._takes_units
        while not goes_on and time.monotonic() < until[self]:
            time.sleep(1e-3)
            goes_on = self._leaving or self._deferred or not self._takes_units
        step_part(self, unit)

    with contextlib.ExitStack() as stack:
        if is_slow:
            stack.enter_context(mock.patch.object(kind, "_step_part", late))
        elif is_slow is not None:
            stack.enter_context(mock.patch.object(kind, "_leave", lambda self: None))
        yield


class PlainSaver(L.Callback):
    """Saves a checkpoint on exception, and is no checkpoint callback, which Lightning would call last."""

    def __init__(self, folder: str) -> None:
        self.path = os.path.join(folder, "on_exception.ckpt")

    def on_exception(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.path)


def savers(to: str | None, phase: str, saver: str) -> list[L.Callback]:
    if to is None:
        return []
    return [ModelCheckpoint(to, every_n_train_steps=1, save_top_k=-1) if phase == "none" else globals()[saver](to)]


def fit(
    size: int,
    net: Net,
    timeout: float,
    tell: Any,
    callbacks: Sequence[L.Callback] = (),
    nodes: int = 1,
    keepalive: float = 60,
    overlap: bool = True,
    disk: str | None = None,
    divides: bool = False,
) -> None:
    L.seed_everything(0, verbose=False)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=size // nodes,
        num_nodes=nodes,
        strategy=sp_lightning.SuperpipelineStrategy(
            window=1,
            units=["Linear"],
            timeout=timedelta(seconds=timeout),
            keepalive=timedelta(seconds=keepalive),
            optimizer_overlap=overlap,
            **({} if disk is None else {"disk": disk, "host_budget": "0B"}),
            divide_state=divides,
        ),
        max_epochs=1,
        callbacks=list(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=os.getcwd(),
    )
    data = [torch.randn(4, net.width) for _ in range(3 * size)]
    trainer.fit(net, DataLoader(Struck(data, net.strike), batch_size=None), DataLoader(data, batch_size=None))
    with open("/proc/self/maps") as maps:
        tell.send({"in_shm": [line for line in maps if "/dev/shm" in line]})


class Struck(torch.utils.data.Dataset):
    def __init__(self, data: list[torch.Tensor], strike: Callable[[str], None]) -> None:
        self.data, self.strike = data, strike

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> torch.Tensor:
        self.strike("data")
        return self.data[index]


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """Check that no file appears in /dev/shm that one of our processes made."""
    before = set(os.listdir("/dev/shm"))
    yield
    new = [name for name in set(os.listdir("/dev/shm")) - before if "torch" in name or "superpipeline" in name]
    assert not new


def sockets() -> str:
    """Read the names of all sockets that exist."""
    return pathlib.Path("/proc/net/unix").read_text()


def open_in(folder: str) -> list[str]:
    """List what processes have open in a folder, nameless files too."""
    found = []
    for link in pathlib.Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(link))
    return [name for name in found if name.startswith(folder)]
