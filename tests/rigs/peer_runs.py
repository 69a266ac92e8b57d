"""Runs of several ranks by hand, through streaming and through DDP, for tests that compare their bits."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple
from unittest import mock

import in_files
import simccl
import torch
import torch.distributed as dist
from program_doors import Own
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

import sp_lightning
from sp_lightning.errors import HalfAppliedStepError, PeerError, UnsupportedError
from sp_lightning.handle import stream
from sp_lightning.handles import open_handles
from sp_lightning.optim.slices import SlicedOptimizer

DIM = 48


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.up, self.down = (
            nn.LayerNorm(DIM),
            nn.Linear(DIM, DIM),
            nn.Linear(DIM, 2 * DIM),
            nn.Linear(2 * DIM, DIM),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm(x)).cumsum(1) / 9
        return x + self.down(nn.functional.gelu(self.up(x)))


class Language(nn.Module):
    """A model of tokens, whose layers may be skipped."""

    def __init__(self, tied: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(37, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.extra, self.head = nn.Linear(DIM, DIM), nn.Linear(DIM, 37, bias=False)
        if tied:
            self.head.weight = self.table.weight
        if frozen:
            for part in (self.table, self.blocks[1], self.blocks[2].up):
                part.requires_grad_(False)

    def forward(self, tokens: Tensor, skipped: tuple[Any, ...] = ()) -> Tensor:
        hidden = self.table(tokens)
        for index, block in enumerate(self.blocks):
            if index not in skipped:
                hidden = block(hidden)
        if "extra" not in skipped:
            hidden = hidden + self.extra(hidden)
        return nn.functional.cross_entropy(self.head(hidden)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def data(self, generator: torch.Generator) -> Tensor:
        return torch.randint(0, 37, (3, 7), generator=generator)


class Pictures(nn.Module):
    """Convolutions with batch norms, whose statistics are buffers."""

    def __init__(self) -> None:
        super().__init__()
        stage = lambda i, o: nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU())  # noqa: E731
        self.blocks = nn.ModuleList([stage(3, 12), stage(12, 24), stage(24, 24)])
        self.head = nn.Linear(24, 10)

    def forward(self, x: Tensor, skipped: tuple[Any, ...] = ()) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3))).square().mean()

    def data(self, generator: torch.Generator) -> Tensor:
        return torch.randn(4, 3, 9, 9, generator=generator)


def filed() -> Language:
    """Make a model whose frozen weights lie in a file, of the same bytes on each rank."""
    torch.manual_seed(0)
    model = Language(frozen=True)
    in_files.put(model, tempfile.mkdtemp(dir=os.getcwd()), files=1)
    return model


NETS: dict[str, Callable[[], Any]] = {
    "plain": Language,
    "tied": lambda: Language(tied=True),
    "frozen": lambda: Language(frozen=True),
    "skipping": Language,
    "pictures": Pictures,
    "filed": filed,
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3),
    "fused": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
    "foreach": lambda params: torch.optim.AdamW(params, lr=1e-3, foreach=True),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
    "own": Own,
}
SKIPPED = [(), (1,), ("extra",), (0, 3), (2, "extra")]


class Case(NamedTuple):
    """A run of so many steps."""

    net: str = "plain"
    optimizer: str = "adamw"
    accumulated: int = 1
    clipped: float | None = None
    edits: bool = False
    syncs: bool = True  # only in the last of the accumulated backwards
    options: dict[str, Any] = {}
    steps: int = 4
    device: str = "cpu"
    machines: int = 1  # that are pretended
    compiled: bool = False
    scaled: bool = False  # by a GradScaler


def begin_group(device: str) -> Any:
    """Begin the process group of a run."""
    if not dist.is_initialized():
        backend = "gloo" if device == "cpu" else simccl.register()
        dist.init_process_group(backend, "env://", rank=int(os.environ["LOCAL_RANK"]))
    return dist.group.WORLD


def placed(
    model: nn.Module,
    streamed: bool,
    stack: contextlib.ExitStack,
    device: str = "cpu",
    machines: int = 1,
    **options: Any,
) -> tuple[Any, Callable[[], Any]]:
    """Stream a model over all ranks, or wrap it by DDP; return what calls it, and `no_sync`."""
    group = begin_group(device)
    if streamed:
        handle = stack.enter_context(stream(model, device, group=group, units=blocks_of, **options))
        return model, handle.no_sync
    called = DistributedDataParallel(model.to(device), find_unused_parameters=True)
    if (size := group.size()) > 2:
        called.register_comm_hook(None if machines == 1 else size // machines, sp_lightning.tree_hook)
    return called, called.no_sync


def run(case: Case, streamed: bool) -> dict[str, Any]:
    """Train on this rank, and return losses, norms, weights and state."""
    group = begin_group(case.device)
    rank, size = group.rank(), group.size()
    torch.manual_seed(rank)  # the first rank's weights count
    model = NETS[case.net]()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, GROUP_RANK=str(rank * case.machines // size)))
        options = case.options if streamed else {}
        called, no_sync = placed(model, streamed, stack, case.device, case.machines, **options)
        if streamed and case.compiled:
            called = torch.compile(model, backend="eager")
        optimizer = OPTIMIZERS[case.optimizer]([p for p in model.parameters() if p.requires_grad])
        scaler = torch.amp.GradScaler("cpu", enabled=case.scaled)
        losses, norms = [], []
        for step in range(case.steps):
            for turn in range(case.accumulated):
                data = model.data(torch.Generator().manual_seed(1000 * step + 10 * turn + rank)).to(case.device)
                skipped = SKIPPED[(step * 3 + rank * 2 + turn) % 5] if case.net == "skipping" else ()
                waits = no_sync() if turn + 1 < case.accumulated and case.syncs else contextlib.nullcontext()
                with waits:
                    loss = called(data, skipped)
                    scaler.scale(loss).backward()
                losses.append(loss.item())
            if case.clipped is not None:
                norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), case.clipped)))
            scaler.step(optimizer)
            scaler.update()
            if step + 1 == case.steps:  # steps before run on beside what follows
                gradients = [None if p.grad is None else p.grad.cpu().clone() for p in model.parameters()]
            optimizer.zero_grad()
            if case.edits:
                with torch.no_grad():
                    for param in model.parameters():
                        param.mul_(0.9)
                    for state in list(optimizer.state.values())[:3]:
                        for entry in state.values():
                            if isinstance(entry, Tensor) and entry.ndim:
                                entry.add_(0.01)
        weights = {name: value.cpu().clone() for name, value in model.state_dict().items()}
        state = tree_map_only(Tensor, lambda tensor: tensor.cpu().clone(), optimizer.state_dict())
    return {"losses": losses, "norms": norms, "gradients": gradients, "weights": weights, "state": state}


def blocks_of(module: Any) -> list[nn.Module]:
    return list(module.blocks)


def differences(case: Case) -> list[str]:
    """Train both ways, and say what differs."""
    plain, ours = run(case, streamed=False), run(case, streamed=True)
    found = [name for name in ("losses", "norms") if plain[name] != ours[name]]
    pairs = zip(plain["gradients"], ours["gradients"], strict=True)
    found += ["gradients" for one, other in pairs if not (one is other is None or torch.equal(one, other))]
    found += [name for name, value in plain["weights"].items() if not torch.equal(value, ours["weights"][name])]
    theirs, mine = plain["state"]["state"], ours["state"]["state"]
    if list(theirs) != list(mine):
        return [*found, f"state of {list(mine)}"]
    for index, entry in theirs.items():
        for key, value in entry.items():
            same = torch.equal(value, mine[index][key]) if isinstance(value, Tensor) else value == mine[index][key]
            if not same:
                found.append(f"state {index} {key}")
    return found


# ---- programs


class Rank:
    """A model that is trained on this rank, under DDP or streamed, and what was seen of it."""

    def __init__(self, streamed: bool, stack: contextlib.ExitStack, device: str) -> None:
        torch.manual_seed(0)
        self.model, self.seen, self.number = Language(), list[Any](), begin_group(device).rank()
        self.called, self.no_sync = placed(self.model, streamed, stack, device)
        self.device = device
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)

    def data(self, step: int) -> Tensor:
        """Draw this rank's data."""
        return self.model.data(torch.Generator().manual_seed(100 * step + self.number)).to(self.device)

    def backward(self, step: int, skipped: tuple[int, ...] = ()) -> None:
        """Run forward and backward."""
        self.called(self.data(step), skipped).backward()

    def gradients(self) -> list[Any]:
        """List the gradients of all parameters."""
        return [param.grad for param in self.model.parameters()]

    def step(self, **kwargs: bool) -> None:
        """Take a step, and zero the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad(**kwargs)


def kept_views(run: Rank) -> None:
    """Keep views of gradients, of which the next backward makes new ones."""
    views: list[Callable[[Tensor], Tensor]] = [Tensor.detach, lambda grad: grad.view(-1), lambda grad: grad[0]]
    for step, view in enumerate([*views, lambda grad: grad]):
        run.backward(step)
        run.seen += map(view, run.gradients())
        run.step()


def kept_and_written(run: Rank) -> None:
    """Write to the gradients of the first batch."""
    run.backward(0)
    grads = run.gradients()
    run.step()
    for step in range(1, 4):
        run.backward(step)
        for grad in grads:
            grad.mul_(0.5)
        run.step()
        run.seen += [grad.clone() for grad in grads]


def stepped_into_gradients(run: Rank) -> None:
    """Take steps that write into gradients, to which the next backward adds."""
    run.optimizer = torch.optim.SGD(run.model.parameters(), 0.1, momentum=0.9, nesterov=True, foreach=True)
    for step in range(3):
        run.backward(step)
        run.optimizer.step()
        run.seen += [grad.clone() for grad in run.gradients()]


def kept_list(run: Rank) -> None:
    """Scale gradients through a list that was made once."""
    run.backward(0)
    grads = run.gradients()
    for step in range(1, 4):
        for grad in grads:
            grad.mul_(0.5)
        run.seen += [grad.sum() for grad in grads]
        run.step(set_to_none=False)
        run.backward(step)


def kept_list_of_an_accumulation(run: Rank) -> None:
    """Scale gradients through a list that was made before the exchange."""
    for step in range(3):
        with run.no_sync():
            run.backward(step)
        grads = run.gradients()
        run.backward(step + 10)
        for grad in grads:
            grad.mul_(0.5)
        run.step()


def reset_state(run: Rank) -> None:
    """Write to the state of a weight that is not stepped, beside one that is."""
    bias = run.model.blocks[0].up.bias
    for step in range(3):
        run.backward(step, (1,) * (step > 0))
        if step:
            run.optimizer.state[bias]["momentum_buffer"].zero_()
            bias.grad = None
        run.step()
        run.seen += [state["momentum_buffer"].clone() for state in run.optimizer.state.values()]


def taken_state(run: Rank) -> None:
    """Take the state out of the optimizer, and give it back."""
    state: dict[Any, Any] = {}
    for step in range(4):
        if step == 1:
            state.update(run.optimizer.state)
            run.optimizer.state.clear()
        if step == 3:
            run.optimizer.state.update(state)
        run.backward(step)
        run.step()


def skipped_in_an_accumulation(run: Rank) -> None:
    """Skip a block on all ranks in the second of two backwards that exchange."""
    for step in range(3):
        run.backward(step)
        run.backward(step + 10, (1,))
        run.seen += [grad.clone() for grad in run.gradients() if grad is not None]
        run.step()


def other_orders(run: Rank) -> None:
    """Visit blocks in another order than other ranks, and evaluate more often."""
    blocks = run.model.blocks
    for step in range(3):
        if run.number:  # both are alike, so one is the other's place
            blocks[1], blocks[2] = blocks[2], blocks[1]
        with torch.no_grad():
            run.seen += [run.model(run.data(step)) for _ in range(2 * run.number + (step == 1))]
        run.backward(step)
        run.step()


def views_of_sums(run: Rank) -> None:
    """Read views of gradients to which a backward has just added."""
    for step in range(3):
        run.backward(step)
        views = [grad.view(-1) for grad in run.gradients()]
        run.backward(step + 10)
        run.seen += [view.clone() for view in views]
        run.step()


def late_steps(run: Rank) -> None:
    """Skip the block that is stepped last while it is being stepped."""
    step_slices = SlicedOptimizer.step

    def late(*args: Any) -> None:
        time.sleep(0.1)
        step_slices(*args)

    with mock.patch.object(SlicedOptimizer, "step", late):
        for step in range(4):
            run.backward(step, (3,) * (step % 2))
            run.step()


def late_sums(run: Rank) -> None:
    """Exchange means to which gradients are still being added."""
    for step in range(2):
        run.backward(step)
        for handle in open_handles:
            handle.steps.thread.submit(time.sleep, 0.2)
        with run.no_sync():
            run.backward(step + 10)
        run.backward(step + 20)
        run.step()


PROGRAMS: dict[str, Callable[[Rank], None]] = {
    program.__name__: program
    for program in (
        kept_views,
        kept_and_written,
        stepped_into_gradients,
        kept_list,
        kept_list_of_an_accumulation,
        reset_state,
        taken_state,
        skipped_in_an_accumulation,
        other_orders,
        views_of_sums,
        late_steps,
        late_sums,
    )
}


def differ(name: str, device: str = "cpu") -> list[str]:
    """Run a program under DDP and streamed; return what differs on this rank."""
    found = []
    for streamed in (False, True):
        with contextlib.ExitStack() as stack:
            run = Rank(streamed, stack, device)
            PROGRAMS[name](run)
            run.seen += run.model.state_dict().values()
            found.append([tensor.detach().cpu().clone() for tensor in run.seen])
    return [f"{name}: {index}" for index, pair in enumerate(zip(*found, strict=True)) if not torch.equal(*pair)]


# ---- ends


def end(how: str, folder: str) -> None:
    """Train until the last rank ends this way; the first one writes when it noticed, and what it was told."""
    group = begin_group("cpu")
    model, last = Language(), group.size() - 1
    begun = time.monotonic()
    try:
        with stream(model, "cpu", group=group, units=blocks_of, keepalive=timedelta(seconds=2)) as handle:
            optimizer = OPTIMIZERS["adamw"](model.parameters())
            for step in range(4):
                begun = time.monotonic()
                if step == 2 and group.rank() == last:
                    if how == "raises":
                        raise ValueError("a bad batch")
                    if how == "is stopped":
                        subprocess.Popen(["sh", "-c", f"sleep 12; kill -KILL {os.getpid()}"])  # for who waits for it
                    if how in ("is killed", "is stopped"):
                        os.kill(os.getpid(), signal.SIGKILL if how == "is killed" else signal.SIGSTOP)
                    if how == "has fewer batches":
                        break
                model(model.data(torch.Generator().manual_seed(step))).backward()
                optimizer.step()
                optimizer.zero_grad()
            handle.finish_step()
    except PeerError as error:
        told = {"seconds": time.monotonic() - begun, "message": str(error)}
        pathlib.Path(folder, "told.json").write_text(json.dumps(told))
    except ValueError:
        pass
    assert not [name for name in os.listdir("/dev/shm") if "superpipeline" in name]
    ours = "superpipeline-board", "superpipeline-ends", "superpipeline-watch"
    assert not [one for one in threading.enumerate() if one.name.startswith(ours)]


def fail_in_step(place: str) -> list[str]:
    """Fail in the last rank's second step of a unit, and go on; return the kinds of errors that this rank gets."""
    group = begin_group("cpu")
    model, told, step = Language(), [], SlicedOptimizer.step
    with stream(model, "cpu", group=group, units=blocks_of) as handle:
        optimizer = OPTIMIZERS["adamw"](model.parameters())

        def fails(own: Any, work: list[Any], *args: Any) -> None:
            if work[0].weight.unit.name == place:
                raise MemoryError("no room")
            step(own, work, *args)

        for second in (False, True):
            model(model.data(torch.Generator())).backward()
            is_last = second and group.rank() == group.size() - 1
            with mock.patch.object(SlicedOptimizer, "step", fails if is_last else step):
                optimizer.step()
                handle.steps.wait_thread()
        for attempt in (handle.finish_step, optimizer.state_dict, handle.saving, optimizer.step):
            try:
                attempt()
            except (MemoryError, PeerError, HalfAppliedStepError) as error:
                told.append(type(error).__name__)
    return told


def add_weights(how: str) -> str:
    """Add a weight, or put one in another's place, while ranks stream; return the error of the next forward."""
    group = begin_group("cpu")
    model = Language()
    with stream(model, "cpu", group=group, units=blocks_of):
        model(model.data(torch.Generator())).backward()
        if how == "added":
            model.blocks[0].more = nn.Linear(2, 2)
        else:
            model.blocks[0].up.weight = nn.Parameter(torch.zeros_like(model.blocks[0].up.weight))
        try:
            model(model.data(torch.Generator()))
        except UnsupportedError as error:
            return str(error)
    return ""


def refused(how: str) -> str:
    """Stream models that differ by rank; return the error."""
    group = begin_group("cpu")
    model, is_first = Language(), not group.rank()
    options: dict[str, Any] = {}
    if how == "frozen on one":
        model.blocks[1].requires_grad_(is_first)
    elif how == "wider on one":
        model.blocks[1].mix = nn.Linear(DIM, DIM, bias=is_first)
    else:  # in files of one
        model.requires_grad_(False)
        model.blocks[0].requires_grad_(True)
        options = {"host_budget": "0B"}
        if is_first:
            in_files.put(model, tempfile.mkdtemp(dir=os.getcwd()))
    try:
        with stream(model, "cpu", group=group, units=blocks_of, **options):
            return ""
    except UnsupportedError as error:
        return str(error)


def read_in_a_fork() -> int:
    """Read a weight in a forked process, once the stream is closed; return how that process ended."""
    model = Language()
    with stream(model, "cpu", group=begin_group("cpu"), units=blocks_of):
        pass
    if not (child := os.fork()):
        os._exit(0 if model.blocks[0].up.weight.sum().isfinite() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
