"""What user code does with gradients and state of ranks: each program runs under DDP and streamed.

As in ``processes.run(2, rank_programs.differ, "kept_views") == [[], []]``.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from peer_runs import begin_group
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sp_lightning import tree_hook
from sp_lightning.errors import UnsupportedError
from sp_lightning.handle import stream

WIDTH = 48


class Net(nn.Module):
    """Blocks that may be skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3))

    def forward(self, x: Tensor, skip: tuple[int, ...] = ()) -> Tensor:
        for index, block in enumerate(self.blocks):
            if index not in skip:
                x = x + block(x)
        return x.square().mean()


class Rank:
    """A model that is trained on this rank, under DDP or streamed."""

    def __init__(self, is_streamed: bool, stack: contextlib.ExitStack) -> None:
        torch.manual_seed(0)
        self.group, self.model, self.seen = begin_group("cpu"), Net(), list[Any]()
        if is_streamed:
            blocks = list(self.model.blocks)
            handle = stack.enter_context(stream(self.model, "cpu", group=self.group, units=lambda _: blocks))
            self.called, self.no_sync = self.model, handle.no_sync
        else:
            self.called = DistributedDataParallel(self.model, find_unused_parameters=True)
            self.no_sync = self.called.no_sync
            if self.group.size() > 2:
                self.called.register_comm_hook(None, tree_hook)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)

    def backward(self, step: int, skip: tuple[int, ...] = ()) -> None:
        """Run forward and backward on this rank's data."""
        draw = torch.Generator().manual_seed(100 * step + self.group.rank())
        self.called(torch.randn(3, WIDTH, generator=draw), skip).backward()

    def step(self, **kwargs: bool) -> None:
        """Take a step, and zero the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad(**kwargs)


def kept_views(run: Rank) -> None:
    """Keep views of gradients, of which the next backward makes new ones."""
    views: list[Callable[[Tensor], Tensor]] = [Tensor.detach, lambda grad: grad.view(-1), lambda grad: grad[0]]
    for step, view in enumerate([*views, lambda grad: grad]):
        run.backward(step)
        run.seen += [view(param.grad) for param in run.model.parameters() if param.grad is not None]
        run.step()


def kept_list(run: Rank) -> None:
    """Scale gradients through a list that was made once."""
    run.backward(0)
    grads: list[Any] = [param.grad for param in run.model.parameters()]
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
        grads: list[Any] = [param.grad for param in run.model.parameters()]
        run.backward(step + 10)
        for grad in grads:
            grad.mul_(0.5)
        run.step()


def reset_state(run: Rank) -> None:
    """Write to the state of a weight that is not stepped, beside one that is."""
    for step in range(3):
        run.backward(step, (1,) * (step > 0))
        if step:
            run.optimizer.state[run.model.blocks[0][0].bias]["momentum_buffer"].zero_()
            run.model.blocks[0][0].bias.grad = None
        run.step()
        run.seen += [state["momentum_buffer"].clone() for state in run.optimizer.state.values()]


def skipped_in_an_accumulation(run: Rank) -> None:
    """Skip a block on all ranks in the second of two backwards that exchange."""
    for step in range(3):
        run.backward(step)
        run.backward(step + 10, (1,))
        run.seen += [param.grad.clone() for param in run.model.parameters() if param.grad is not None]
        run.step()


def differ(name: str) -> list[str]:
    """Run a program under DDP and streamed; return what differs on this rank."""
    found = []
    for is_streamed in (False, True):
        with contextlib.ExitStack() as stack:
            run = Rank(is_streamed, stack)
            globals()[name](run)
            run.seen += run.model.state_dict().values()
            found.append([tensor.detach().clone() for tensor in run.seen])
    return [f"{name}: {index}" for index, pair in enumerate(zip(*found, strict=True)) if not torch.equal(*pair)]


def refused(how: str) -> str:
    """Stream models that differ by rank; return the error."""
    group = begin_group("cpu")
    model, is_first = Net(), not group.rank()
    options: dict[str, Any] = {}
    if how == "frozen on one":
        model.blocks[1].requires_grad_(is_first)
    elif how == "wider on one":
        model.blocks[1][0] = nn.Linear(WIDTH, WIDTH, bias=is_first)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        if how == "in files of one":
            model.requires_grad_(False)
            model.blocks[0].requires_grad_(True)
            torch.save(model.state_dict(), pathlib.Path(folder, "weights.pt"))
            if is_first:
                model.load_state_dict(torch.load(pathlib.Path(folder, "weights.pt"), mmap=True), assign=True)
            options = {"host_budget": "0B"}
        try:
            stack.enter_context(stream(model, "cpu", group=group, units=lambda _: list(model.blocks), **options))
        except UnsupportedError as error:
            return str(error)
    return ""


def read_in_a_fork() -> int:
    """Read a weight in a forked process, once the stream is closed; return how that process ended."""
    model = Net()
    with stream(model, "cpu", group=begin_group("cpu"), units=lambda _: list(model.blocks)):
        pass
    if not (child := os.fork()):
        os._exit(0 if model.blocks[0][0].weight.sum().isfinite() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
