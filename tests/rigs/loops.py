"""A training loop by hand on each rank: under DDP, or over `stream_before(group=...)` (processes.py, Rule 1)."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import os
import resource
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, cast
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sp_lightning
from sp_lightning.compat.patches import CLIP_GRADIENTS
from sp_lightning.errors import ExactnessError
from sp_lightning.ranks import board, exchange
from sp_lightning.runtime.handle import Handle
from sp_lightning.runtime.handle import stream as stream_before

STEPS = 6
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "foreach": lambda parameters: torch.optim.Adam(parameters, lr=1e-2, foreach=True),  # not in the default loop
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),  # not elementwise
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class OfUsers(nn.Parameter):
    """A parameter of a class of the user's."""


class Net(nn.Module):
    """Blocks of which a rank may skip one, a batch norm, and a weight without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(97, 64)
        self.blocks = nn.ModuleList(Block(64) for _ in range(6))
        self.norm = nn.BatchNorm1d(64)
        self.head = nn.Linear(64, 97)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.repeats = False

    def forward(self, tokens: Tensor, skipped: int | None) -> Tensor:
        x = self.embedding(tokens)
        if self.repeats:
            x = self.blocks[0](x)
        for index, block in enumerate(self.blocks):
            if index != skipped:
                x = block(x)
        return self.head(self.norm(x)) * self.scale


class Found(NamedTuple):
    """What a rank has at the end of its loop."""

    losses: list[float]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    gradients: dict[str, Tensor | None]
    state: list[Tensor]


def skipped(rank: int, step: int) -> int | None:
    """Return the block that a rank skips: none, one of its own, or the same on every rank."""
    return None if step < 2 else 1 + rank + step % 3 if step % 2 else 3


def placed(
    net: nn.Module, device: str, streamed: dict[str, Any] | None, stack: contextlib.ExitStack
) -> tuple[Callable[..., Tensor], str, Handle | None]:
    """Return what calls the net, its device and its handle: under DDP, on the CPU, if ``streamed`` is None."""
    if streamed is not None:
        return net, device, stack.enter_context(stream_before(net, device, group=dist.group.WORLD, **streamed))
    ddp = nn.parallel.DistributedDataParallel(net, find_unused_parameters=True)
    if dist.get_world_size() > 2:
        ddp.register_comm_hook(None, sp_lightning.tree_hook)
    return ddp, "cpu", None


def train(
    streamed: dict[str, Any] | None,
    device: str = "cpu",
    optimizer: str = "adamw",
    accumulate: int = 1,
    clip: bool = False,
    edits: bool | str = False,
    keeps_zeros: bool = False,
    holds: bool = False,
    repeats_from: int = STEPS,
    renewals: int = 0,
    grows_at: int = STEPS,
    of_users: bool = False,
) -> Found:
    """Train on this rank: under DDP if ``streamed`` is None, else with these options.

    ``repeats_from``: the step from which on a block runs twice.
    ``grows_at``: the step before which the module gets a parameter that nothing uses.
    ``renewals``: how often another optimizer takes over; only the first rank keeps those before.
    ``holds``: the first rank's user code refers to gradients that accumulate.
    ``edits``: user code writes to weights, in three ways, and to optimizer state, on every rank after each step; or
    to "weights" alone.
    ``of_users``: user code writes to a weight of a class of its own, through its data, after each step.
    """
    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=size)
    torch.manual_seed(rank)  # the first rank's weights are those of all
    net = Net()
    if of_users:
        net.blocks[0].norm.weight = OfUsers(net.blocks[0].norm.weight.detach())
    with contextlib.ExitStack() as stack:
        call, device, handle = placed(net, device, streamed, stack)
        no_sync = (call if handle is None else handle).no_sync
        stepped = OPTIMIZERS[optimizer](net.parameters())
        losses, kept = [], [stepped]
        held: list[Tensor | None] = []
        for step in range(STEPS):
            if step % accumulate == 0:
                stepped.zero_grad(set_to_none=not keeps_zeros)
            tokens = torch.randint(0, 97, (16,), generator=torch.Generator().manual_seed(100 * step + rank)).to(device)
            if step and step <= renewals:
                kept = kept * (rank == 0)
                del stepped
                stepped = OPTIMIZERS[optimizer](net.parameters())
                kept.append(stepped)
            net.repeats = step >= repeats_from
            if step == grows_at:
                net.late = nn.Parameter(torch.zeros(3))
            last = step % accumulate == accumulate - 1
            with contextlib.nullcontext() if last else no_sync():
                loss = nn.functional.cross_entropy(call(tokens, skipped(rank, step)), tokens)
                loss.backward()
            losses.append(loss.item())
            if step == 1 and rank == 0:  # evaluates alone
                with torch.no_grad():
                    net.eval()(tokens, None)
                net.train()
            if not last:
                held = [p.grad for p in net.parameters()] if holds and rank == 0 else []
                continue
            if clip:
                nn.utils.clip_grad_norm_(net.parameters(), 0.3)
            stepped.step()
            assert all(one is None or torch.equal(one, p.grad) for one, p in zip(held, net.parameters(), strict=False))
            if edits:
                edit(net, stepped, edits != "weights")
            if of_users:
                net.blocks[0].norm.weight.data.mul_(0.9)
        states = stepped.state if handle is None else whole_state(handle, stepped)
        return Found(
            losses,
            {name: p.detach().clone() for name, p in net.named_parameters()},
            {name: buffer.cpu() for name, buffer in net.named_buffers()},
            {name: None if p.grad is None else p.grad.clone() for name, p in net.named_parameters()},
            [value.clone() for of in states.values() for value in of.values() if isinstance(value, Tensor)],
        )


def whole_state(handle: Handle, optimizer: torch.optim.Optimizer) -> dict[Any, dict[str, Any]]:
    """Return an optimizer's state; where it is divided among nodes, that which the first rank would save."""
    if not handle.divides_state:
        return optimizer.state
    whole = handle.optimizer_state(optimizer)["state"]
    found: list[Any] = [whole if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return dict(found[0])


def edit(net: Net, optimizer: torch.optim.Optimizer, of_state: bool = True) -> None:
    """Edit as users do; none of it is idempotent, so it shows if it counts more than once, or not at all."""
    with torch.no_grad():
        net.blocks[0].up.weight.mul_(0.999)
        net.head.weight.data.clamp_(-0.11, 0.11)
        net.embedding.weight.detach().numpy()[3] *= 1.01
        for state in optimizer.state.values():
            if of_state and "exp_avg" in state:
                state["exp_avg"].mul_(0.99)


class Adapted(nn.Module):
    """A frozen layer with a trained one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.adapter = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.adapter(x))


def exchange_places(streamed: dict[str, Any] | None, who: str) -> list[Tensor]:
    """Train after user code exchanged the data of a frozen weight with that of a trained one; return all weights.

    ``who``: that is of "another unit", or of "no unit", and in any case stepped by the same optimizer.
    """
    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=size)
    torch.manual_seed(0)
    net, beside = nn.Sequential(nn.Linear(8, 8), Adapted(), Adapted()), nn.Parameter(torch.ones(8, 8))
    with contextlib.ExitStack() as stack:
        call, _, _ = placed(net, "cpu", streamed, stack)
        optimizer = torch.optim.SGD([*net.parameters(), beside], lr=0.1)
        frozen, other = net[1].base.weight, {"another unit": net[0].weight, "no unit": beside}[who]
        frozen.data, other.data = other.data, frozen.data
        for step in range(4):
            optimizer.zero_grad()
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(size * step + rank))
            (call(x).square().mean() + beside.square().sum()).backward()
            optimizer.step()  # after which nothing looks at a weight
        return [p.detach().clone() for p in (*net.parameters(), beside)]


def with_few_descriptors(streamed: dict[str, Any] | None) -> list[Tensor]:
    """Train a net of more units than a process may open files by default; return its weights."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 100, hard))
    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        dist.init_process_group("gloo", rank=rank, world_size=size)
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(150)))
        with contextlib.ExitStack() as stack:
            call, _, _ = placed(net, "cpu", streamed, stack)
            optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
            for step in range(2):
                optimizer.zero_grad()
                call(torch.randn(4, 4, generator=torch.Generator().manual_seed(size * step + rank))).sum().backward()
                optimizer.step()
            return [p.detach().clone() for p in net.parameters()]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def straggle(slow: int, overlap: bool, shares: bool) -> tuple[list[int], list[dict[str, Tensor]]]:
    """Run backwards in which one rank is slow; return the regions of this rank's box, and the gradients, by step.

    It is slow for longer than a unit takes by far, but gets on: the others do not take it for one that waits for them.
    ``shares``: two blocks run twice, and the first step accumulates.
    """
    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=size)
    torch.manual_seed(0)
    net = nn.Sequential(*(Block(32) for _ in range(12)))

    def late(gradient: Tensor) -> None:
        if rank == slow:
            time.sleep(0.5)

    options = {"window": 1, "units": ["Block"], "optimizer_overlap": overlap}
    regions, gradients = [], []
    waits_long = mock.patch.object(exchange, "SHORT_S", 30)
    with waits_long, stream_before(net, "cpu", group=dist.group.WORLD, **options) as handle:
        box = handle.team.exchange.box
        for step in range(3):
            net.zero_grad()
            x = torch.randn(8, 32, generator=torch.Generator().manual_seed(size * step + rank))
            with handle.no_sync() if shares and step == 0 else contextlib.nullcontext():
                for index, block in enumerate(net):
                    x = block(x)
                    if shares and index in (3, 7):
                        x = block(x)
                x.register_hook(late)
                x.square().mean().backward()
            regions.append(len(box._starts))
            gradients.append({name: p.grad.clone() for name, p in net.named_parameters()})
    return regions, gradients


class Unusual(L.LightningModule):
    """A module whose gradients come in an unusual way.

    "again": its own backward goes twice through the graph, which is an error under DDP as well. "nested": a block runs
    in two reentrant checkpoints, whose backwards bring a part of its gradients each, which DDP refuses. "plainly": the
    same without checkpoints. "clips": its own backward clips what it made, once it cleared what was there.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.blocks = nn.Sequential(Block(32), Block(32))

    def training_step(self, x: Tensor, index: int) -> Tensor:
        for block in (*self.blocks, self.blocks[0]):
            x = checkpoint(block, x.requires_grad_(), use_reentrant=True) if self.how == "nested" else block(x)
        return x.square().mean()

    def backward(self, loss: Tensor) -> None:
        if self.how == "again":
            loss.backward(retain_graph=True)
        if self.how == "clips":
            self.zero_grad()
        loss.backward()
        if self.how == "clips":
            nn.utils.clip_grad_norm_(self.parameters(), 0.1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def unusual(how: str, overlap: bool) -> dict[str, Tensor]:
    """Train three steps of `Unusual`; return its weights."""
    torch.manual_seed(0)
    module = Unusual(how)
    size = int(os.environ["WORLD_SIZE"])
    L.Trainer(
        strategy=sp_lightning.SuperpipelineStrategy(window=1, units=["Block"], optimizer_overlap=overlap),
        accelerator="cpu",
        devices=size,
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    ).fit(module, torch.utils.data.DataLoader([torch.randn(4, 32) for _ in range(3 * size)], batch_size=None))
    return {name: p.detach().clone() for name, p in module.named_parameters()}


class LeavesOut(L.LightningModule):
    """Accumulates over three batches by hand, and leaves out one of them, the last of its three.

    Where it is streamed, its backward raised an error before, which came to no unit: the loss has no graph. DDP goes on
    after no such error.
    """

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.blocks = nn.Sequential(Block(32), Block(32))

    def training_step(self, x: Tensor, index: int) -> None:
        optimizer = cast(torch.optim.Optimizer, self.optimizers())
        strategy: Any = self.trainer.strategy
        with strategy.block_backward_sync() if index % 3 < 2 else contextlib.nullcontext():
            loss = self.blocks(x + self.global_rank).square().mean()
            if index == 2:
                if isinstance(strategy, sp_lightning.SuperpipelineStrategy):
                    with pytest.raises(RuntimeError, match="does not require grad"):
                        self.manual_backward(loss.detach())
                optimizer.zero_grad()
                return
            self.manual_backward(loss)
        if index % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def left_out_in_a_fit(streamed: dict[str, Any] | None) -> list[Tensor]:
    """Train `LeavesOut` under DDP, or streamed with these options; return its weights."""
    torch.manual_seed(0)
    module = LeavesOut()
    L.Trainer(
        strategy=DDPStrategy() if streamed is None else sp_lightning.SuperpipelineStrategy(**streamed),
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        use_distributed_sampler=False,
    ).fit(module, torch.utils.data.DataLoader([torch.randn(4, 32) for _ in range(9)], batch_size=None))
    return [p.detach().clone() for p in module.parameters()]


def left_out_by_hand(streamed: dict[str, Any] | None) -> list[Tensor]:
    """Train under DDP, or streamed, with a backward that fails after some units; return the weights.

    One in `no_sync` follows it, through a graph that was there. DDP goes on after no such error: there it is left out.
    """
    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=size)
    torch.manual_seed(0)
    net = nn.Sequential(*(Block(32) for _ in range(3)))

    def fail(gradient: Tensor) -> None:
        raise ArithmeticError

    with contextlib.ExitStack() as stack:
        call, _, handle = placed(net, "cpu", streamed, stack)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            x = torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(size * step + rank))
            failing = None
            if handle is not None and step == 1:
                hook = net[0].register_forward_hook(lambda module, args, output: output.register_hook(fail) and None)
                failing = net(x[0]).sum()
                hook.remove()
            with (call if handle is None else handle).no_sync():
                loss = call(x[0]).square().mean()
            if failing is not None:
                with pytest.raises(ArithmeticError):
                    failing.backward()
                optimizer.zero_grad()
            with (call if handle is None else handle).no_sync():
                loss.backward()
            call(x[1]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in net.parameters()]


def replayed_in_a_hook(streamed: dict[str, Any] | None, device: str = "cpu") -> list[Tensor | None]:
    """Train under DDP or streamed with parts that a hook of backward runs, as losses with a cache do.

    All but the last part are in `no_sync`. Every other step has another loss beside them. Return gradients and weights.
    """
    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=size)
    torch.manual_seed(0)
    net = nn.Sequential(*(Block(16) for _ in range(4)))
    recorded: list[Tensor | None] = []
    with contextlib.ExitStack() as stack:
        call, place, handle = placed(net, device, streamed, stack)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

        def replay(gradient: Tensor, parts: Tensor) -> None:
            with torch.enable_grad():
                for number, part in enumerate(parts):
                    last = number == len(parts) - 1
                    with contextlib.nullcontext() if last else (call if handle is None else handle).no_sync():
                        (call(part).square().mean() * gradient).backward()

        for step in range(4):
            parts = torch.randn(3, 4, 16, generator=torch.Generator().manual_seed(size * step + rank)).to(place)
            loss = torch.ones((), device=place, requires_grad=True)
            loss.register_hook(functools.partial(replay, parts=parts))
            loss.backward()
            if step % 2:
                call(parts[0] + 1).square().mean().backward()
            recorded += [None if p.grad is None else p.grad.clone() for p in net.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        return [*recorded, *(p.detach().clone() for p in net.parameters())]


def looks_in_backward(streamed: dict[str, Any] | None, at: str, device: str = "cpu") -> list[list[Tensor | None]] | str:
    """Train under DDP or streamed; return the gradients that a hook finds in each backward, or the error that it gets.

    A hook between two blocks looks at a weight on both sides of it, the later of which backward has passed, or only at
    the "earlier" one; "with a hook" the later one has one. Every other backward is in `no_sync`: the only ones in which
    one looks that does so "unexchanged".
    """
    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=size)
    torch.manual_seed(0)
    net = nn.Sequential(*(Block(32) for _ in range(3)))
    earlier, later = net[0].up.weight, net[2].up.weight
    looked = [earlier] if at == "earlier" else [earlier, later]
    seen: list[list[Tensor | None]] = []
    exchanges = True

    def look(gradient: Tensor) -> None:
        if at != "unexchanged" or not exchanges:
            seen.append([None if p.grad is None else p.grad.clone() for p in looked])

    if at == "with a hook":
        later.register_post_accumulate_grad_hook(lambda p: None)
    net[0].register_forward_hook(lambda module, args, output: output.register_hook(look) and None)
    with contextlib.ExitStack() as stack:
        call, device, handle = placed(net, device, streamed, stack)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        for step in range(6):
            exchanges = step % 2 == 1
            x = torch.randn(4, 32, generator=torch.Generator().manual_seed(size * step + rank)).to(device)
            with contextlib.nullcontext() if exchanges else (call if handle is None else handle).no_sync():
                loss = call(x).square().mean()
                try:
                    loss.backward()
                except ExactnessError as error:
                    return str(error)
            if exchanges:
                optimizer.step()
                optimizer.zero_grad(set_to_none=step == 1)
    return seen


def flushing(streamed: dict[str, Any] | None, device: str, flushes: tuple[bool, ...]) -> list[list[int]]:
    """Run backwards whose means are denormal numbers, which are to be flushed to zero in some.

    Returns the bits of each weight's largest gradient, of each backward. It ends early if the processor flushes none.
    """
    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=size)
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    for layer in net:
        nn.init.eye_(layer.weight)
    found: list[list[int]] = []
    with contextlib.ExitStack() as stack:
        call, device, _ = placed(net, device, streamed, stack)
        stack.callback(torch.set_flush_denormal, False)
        for is_flushed in flushes:
            net.zero_grad()
            if not torch.set_flush_denormal(is_flushed):
                break
            (call(torch.ones(1, 8, device=device)) * 1.5e-38).sum().backward()
            torch.set_flush_denormal(False)
            found.append([int(p.grad.view(torch.int32).max()) for p in net.parameters()])
    return found


IN_HOOKS = ("in hooks", "in hooks, of zeros", "in hooks, of the same data")  # of weights, before gradients are averaged


def clipping(streamed: dict[str, Any] | None, how: str, device: str = "cpu") -> tuple[dict[str, Any], list[int], int]:
    """Train with gradients that are clipped, under DDP or streamed.

    Returns what each step left, after each one the pages that this rank had for itself beside the shared gradients, and
    how many faces of these there were.
    """
    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=size)
    torch.manual_seed(0)
    net = Net()
    found: dict[str, Any] = {}
    pages: list[int] = []
    faces: set[int] = set()
    with contextlib.ExitStack() as stack:
        call, device, handle = placed(net, device, streamed, stack)
        if handle is not None:
            assert vars(CLIP_GRADIENTS.holder)[CLIP_GRADIENTS.name] is not CLIP_GRADIENTS.original
        optimizer = OPTIMIZERS[how if how in OPTIMIZERS else "adamw"](net.parameters())
        weights = [p for p in net.parameters() if p.dim() > 1]
        for p in net.parameters() if how in IN_HOOKS else ():
            p.register_post_accumulate_grad_hook(lambda p: (nn.utils.clip_grad_norm_(p, 1e-3), None)[1])
        for step in range(4):
            seed = 100 * step + rank * (how != "in hooks, of the same data")
            tokens = torch.randint(0, 97, (16,), generator=torch.Generator().manual_seed(seed)).to(device)
            nn.functional.cross_entropy(call(tokens, None), tokens).backward()
            seen: list[Tensor] = []
            if how == "edits before":
                for p in weights[::3]:
                    p.grad.mul_(0.5)
            held = [p.grad for p in weights] if how == "holds" and rank == 0 else []
            held += [weights[2].grad[:1]] if how == "holds a view" and rank == 0 else []
            if how == "replaces":
                held = [weights[2].grad]
                weights[2].grad = 2 * weights[2].grad
            beside = [p.grad for p in net.parameters() if p.dim() < 2] if how == "writes beside" else []
            clipped = {"some": weights[1::2], "writes beside": weights}.get(how, net.parameters())
            clip = nn.utils.clip_grads_with_norm_ if how == "with a norm" else nn.utils.clip_grad_norm_
            norm = clip(clipped, 0.3, *[torch.tensor(2.0)] * (how == "with a norm"))
            if how == "twice":
                nn.utils.clip_grad_norm_(weights, 0.1)
            if how == "twice, then reads":
                for most in (0.3, 0.2):
                    vars(CLIP_GRADIENTS.holder)[CLIP_GRADIENTS.name](weights, most, norm)
            if how == "one rank alone" and rank == 0 and step == 2:
                nn.utils.clip_grad_norm_(net.parameters(), 0.01)
            if how == "twice, then reads" or (how == "reads" and rank == 0):
                seen = [weights[3].grad.clone()]
            seen += [grad.clone() for grad in held]
            if how == "edits after":
                weights[4].grad.mul_(2)
            if beside:
                torch._foreach_mul_(beside, 0.1)
            del beside
            if not (how == "accumulates" and step % 2):
                optimizer.step()
            found[f"{step}"] = norm, seen
            if handle is not None:
                ours = handle.team.exchange
                pages.append(sum(len(ours._sums[store].slab.private()) for store in ours.stores))
                faces.add(ours._sums[ours.stores[0]].slab.face.data_ptr())
            if how in ("holds", "replaces") and held:
                found[f"{step}, held"] = [grad.clone() for grad in held]
            found[f"{step}, gradients"] = [p.grad.clone() for p in net.parameters()]
            if how != "accumulates":
                optimizer.zero_grad(set_to_none=how != "in hooks, of zeros")
        found["weights"] = [p.detach().clone() for p in net.parameters()]
    assert vars(CLIP_GRADIENTS.holder)[CLIP_GRADIENTS.name] is CLIP_GRADIENTS.original
    if streamed is not None:  # an end leaves nothing that another model's clipping would meet
        with stream_before(Net(), device, group=dist.group.WORLD, **streamed):
            net.zero_grad(set_to_none=False)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    return found, pages, len(faces)


class Buffers(nn.Module):
    """Buffers of all kinds, with a rank's own bytes."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        for dtype in (torch.int16, torch.uint8, torch.bool, torch.bfloat16, torch.complex64, torch.float64):
            self.register_buffer(str(dtype).replace(".", "_"), torch.tensor([[rank + 1, 1 - rank]]).to(dtype))
        self.register_buffer("count", torch.tensor(7 + rank))
        self.register_buffer("across", torch.full((3, 2), float(rank)).t())

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def buffers_of_the_first() -> dict[str, Tensor]:
    """Return a module's buffers on this rank once it is streamed."""
    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=size)
    module = Buffers(rank)
    with stream_before(module, "cpu", group=dist.group.WORLD):
        module(torch.ones(1, 2)).sum().backward()
        return {name: buffer.clone() for name, buffer in module.named_buffers()}


def left_before_a_forward() -> str:
    """Leave with an error on the first rank, after a step; return the error with which this one ends."""
    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=size)
    module = Buffers(rank)
    try:
        with stream_before(module, "cpu", group=dist.group.WORLD):
            for step in range(2):
                if rank == 0 and step == 1:
                    raise ValueError("the first rank leaves")
                module(torch.ones(1, 2)).sum().backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def outlasts_another(waits: str) -> list[str]:
    """Fail on one rank while the first one is busy for longer than a rank that hangs is given; return its errors.

    With ``waits`` the first one is in that function of torch.distributed, to which the other does not come.
    """
    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=size)
    module, errors = Buffers(rank), list[str]()
    with mock.patch.object(board, "GRACE_S", 0.5), contextlib.suppress(ValueError):
        with stream_before(module, "cpu", group=dist.group.WORLD):
            module(torch.ones(1, 2)).sum().backward()
            if rank == 1:
                raise ValueError("a rank fails")
            if waits:
                getattr(dist, waits)()
            time.sleep(2)  # as a long forward does
            try:
                module(torch.ones(1, 2)).sum().backward()
            except sp_lightning.errors.PeerError as error:
                errors.append(str(error))
                time.sleep(2)  # as a script that saves what it has
    return errors


def differentiated_once_clipped(streams: bool, rank_alone: bool, where: str) -> list[Tensor]:
    """Train with a gradient of the inputs between clipping and step, on the first rank or on all; return weights.

    "in no_sync": it is computed there. "fails": in addition, that raises an error.
    """
    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=size)
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)))
    with contextlib.ExitStack() as stack:
        called: nn.Module = net
        if streams:
            handle = stack.enter_context(stream_before(net, "cpu", units=["Sequential"], group=dist.group.WORLD))
            no_sync = handle.no_sync
        else:
            called = nn.parallel.DistributedDataParallel(net)
            no_sync = called.no_sync
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=False)
        for step in range(4):
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(size * step + rank))
            called(x).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.01)
            if rank == 0 or not rank_alone:
                with no_sync() if where else contextlib.nullcontext():
                    first = net[0](x.requires_grad_())
                    if where == "fails":
                        first.register_hook(_no_gradient)
                    with contextlib.suppress(ValueError):
                        torch.autograd.grad(net[2](net[1](first)).sum(), x)
            optimizer.step()
            if step != 1:  # else gradients accumulate onto those that were clipped
                optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in net.parameters()]


def _no_gradient(_: Tensor) -> None:
    raise ValueError("this hook has no gradient")


def beside_the_streamed(streams: bool) -> tuple[list[Tensor], dict[Any, Any]]:
    """Train a body, under DDP or streamed, and a head under DDP by one optimizer; return losses and its state."""
    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=size)
    torch.manual_seed(0)
    body, head = Block(64), nn.parallel.DistributedDataParallel(nn.Linear(64, 3))
    losses: list[Tensor] = []
    with contextlib.ExitStack() as stack:
        called: nn.Module = body
        if streams:
            stack.enter_context(stream_before(body, "cpu", group=dist.group.WORLD))
        else:
            called = nn.parallel.DistributedDataParallel(body)
        optimizer = torch.optim.AdamW([*body.parameters(), *head.parameters()], lr=1e-2, foreach=False)
        for step in range(STEPS):
            x = torch.randn(4, 64, generator=torch.Generator().manual_seed(size * step + rank))
            loss = head(called(x)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses, copy.deepcopy(optimizer.state_dict()["state"])


def mapped_after_close() -> tuple[int, int, int]:
    """Return the bytes of weights, and of the shared memory that this rank maps in a run and after its end."""
    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=size)
    gc.collect()  # earlier runs of this process
    known = shared_bytes()
    net = nn.Sequential(*(nn.Linear(128, 128) for _ in range(6)))
    with stream_before(net, "cpu", group=dist.group.WORLD):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net(torch.ones(1, 128)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        before = shared_bytes() - known
    return sum(p.nbytes for p in net.parameters()), before, shared_bytes() - known


def shared_bytes() -> int:
    """Add up the shared memory that this process maps."""
    with open("/proc/self/maps") as maps:
        ranges = [line.split()[0].split("-") for line in maps if "memfd:superpipeline" in line]
    return sum(int(end, 16) - int(start, 16) for start, end in ranges)


class Layers(L.LightningModule):
    """Layers of 4 MB each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8)))

    def training_step(self, x: Tensor, index: int) -> Tensor:
        return self.layers(x).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def grown_by_a_resume(path: str) -> tuple[int, int]:
    """Resume; return the bytes of state, and the most by which this rank's own memory grew while that was loaded."""
    load, most = sp_lightning.SuperpipelineStrategy.load_optimizer_state_dict, 0
    size, launched = int(os.environ["WORLD_SIZE"]), dict(os.environ)

    def watched(*args: Any) -> None:
        nonlocal most
        ends, before = threading.Event(), own_bytes()

        def sample() -> None:
            nonlocal most
            while not ends.wait(1e-3):
                most = max(most, own_bytes() - before)

        thread = threading.Thread(target=sample)
        thread.start()
        load(*args)
        ends.set()
        thread.join()

    def fit(steps: int, source: str | None) -> L.Trainer:
        trainer = L.Trainer(
            strategy=sp_lightning.SuperpipelineStrategy(window=1, units=["Linear"]),
            accelerator="cpu",
            devices=size,
            max_steps=steps,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        batches = torch.utils.data.DataLoader(torch.ones(8 * size, 2, 1024), batch_size=None)
        trainer.fit(Layers(), batches, ckpt_path=source)
        os.environ.update(launched)  # a Trainer takes out what it was launched with
        return trainer

    fit(1, None).save_checkpoint(path)
    with mock.patch.object(sp_lightning.SuperpipelineStrategy, "load_optimizer_state_dict", watched):
        trainer = fit(2, path)
    state = trainer.optimizers[0].state.values()
    return sum(value.nbytes for entry in state for value in entry.values()), most


def own_bytes() -> int:
    """Return the bytes of this process's anonymous memory."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon:"))


def use_of_shm(width: int) -> tuple[int, int]:
    """Train a model of several such matrices; return its bytes, and those that /dev/shm holds in the middle."""
    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=size)
    net = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
    with stream_before(net, "cpu", group=dist.group.WORLD):
        optimizer = torch.optim.AdamW(net.parameters())
        net(torch.ones(1, width)).sum().backward()
        optimizer.step()
        shm = os.statvfs("/dev/shm")
        return sum(p.nbytes for p in net.parameters()), (shm.f_blocks - shm.f_bfree) * shm.f_frsize
