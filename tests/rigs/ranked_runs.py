"""What the ranks of a test run: real Trainers on each, under DDP or under the strategy (processes.py, Rule 1)."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import signal
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import families
import in_files
import lightning as L
import pretended_nodes
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch.utils.data import DataLoader

import models
import parity
import sp_lightning
from sp_lightning.errors import UnsupportedError
from sp_lightning.runtime.handle import stream as stream_before


class HookedDDP(DDPStrategy):
    """DDP with the hook that sums as the strategy does, on every device: Lightning registers hooks on CUDA only."""

    def _register_ddp_hooks(self) -> None:
        self.model.register_comm_hook(None, sp_lightning.tree_hook)


def plain(size: int) -> DDPStrategy:
    """Lightning's own strategy for so many ranks: stock where its order of summation is the only one."""
    return (DDPStrategy if size == 2 else HookedDDP)(find_unused_parameters=True)


class RankedModule(models.ZooModule):
    """A case in which each rank sees other data, and logs the mean over all ranks."""

    def training_step(self, batch: Any, batch_index: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_index)
        self.log("mean_loss", loss, batch_size=1, sync_dist=True, on_epoch=True)
        return loss


def fit(name: str, options: dict[str, Any] | None, optimizer: str = "adamw", **settings: Any) -> parity.Record:
    """Record a run of a case on this rank: under DDP, or with these options under the strategy."""
    case = families.FAMILIES[name].case if name in families.FAMILIES else models.case(name)
    return record(functools.partial(RankedModule, case, optimizer), case, options, **settings)


def fit_in_files(
    name: str, options: dict[str, Any] | None, folder: str, precision: str = "32-true", **settings: Any
) -> parity.Record:
    """Record a run whose frozen weights are in a file of a node's ranks, in their own type, or under DDP in memory."""
    dtype, case = {"bf16-true": torch.bfloat16}.get(precision), models.case(name)
    of_node = os.path.join(folder, os.environ["NODE_RANK"])  # as on a disk of its own
    os.makedirs(of_node, exist_ok=True)
    case = in_files.frozen(case, dtype) if options is None else in_files.filed_together(case, of_node, dtype)
    return record(functools.partial(RankedModule, case), case, options, precision=precision, **settings)


def record(
    make: Callable[[], L.LightningModule],
    case: models.Case,
    options: dict[str, Any] | None,
    accelerator: str = "cpu",
    **settings: Any,
) -> parity.Record:
    """Record a run of a module on this rank: under DDP on the CPU, or with these options under the strategy."""
    size = int(os.environ["WORLD_SIZE"])
    strategy = (
        plain(size) if options is None else sp_lightning.SuperpipelineStrategy(**({"units": case.units} | options))
    )
    if options is None:
        accelerator = "cpu"
    with simulated(accelerator):
        return parity.record(
            make,
            strategy,
            accelerator=accelerator,
            devices=size // pretended_nodes.count(),
            num_nodes=pretended_nodes.count(),
            make_loader=lambda n: DataLoader([case.batch(i) for i in range(n * size)], batch_size=None, shuffle=False),
            **settings,
        )


def leg(
    name: str,
    side: str,
    source: str | None,
    target: str,
    steps: int,
    optimizer: str = "adamw",
    accelerator: str = "cpu",
    save_after: int | None = None,
    options: dict[str, Any] | None = None,
) -> None:
    """Train up to this step from a checkpoint, under plain Lightning or under the strategy; save another.

    It is saved at the end, where Lightning counts the epoch as done, or after a step on the way.
    """
    case = models.case(name)
    size = int(os.environ["WORLD_SIZE"])
    if side == "plain":
        strategy, accelerator = plain(size) if size > 1 else SingleDeviceStrategy(torch.device("cpu")), "cpu"
    else:
        strategy = sp_lightning.SuperpipelineStrategy(units=case.units, window=2, **(options or {}))
    with simulated(accelerator), tempfile.TemporaryDirectory() as root:
        L.seed_everything(0, verbose=False)
        module = Scheduled(case, optimizer)
        L.seed_everything(1, verbose=False)
        trainer = L.Trainer(
            strategy=strategy,
            accelerator=accelerator,
            devices=size // pretended_nodes.count(),
            num_nodes=pretended_nodes.count(),
            max_steps=steps,
            default_root_dir=root,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=2,
            callbacks=[SavesAfter(save_after, target)],
        )
        data = [case.batch(i) for i in range(40)]
        trainer.fit(
            module,
            RememberingLoader(data, batch_size=None, shuffle=False),
            DataLoader(data, batch_size=None, shuffle=False),
            ckpt_path=source,
        )
        if save_after is None:
            trainer.save_checkpoint(target)


class SavesAfter(L.Callback):
    def __init__(self, step: int | None, target: str) -> None:
        self.step, self.target = step, target

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.target)


class RememberingLoader(DataLoader):
    """Resumes where it was: Lightning has other loaders begin their epoch again."""

    given = 0

    def __iter__(self) -> Any:
        first, self.given = self.given, 0
        for number, batch in enumerate(super().__iter__()):
            if number >= first:
                self.given = number + 1
                yield batch
        self.given = 0

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


class Scheduled(RankedModule):
    """A case with a rate that follows its steps."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        if isinstance(optimizer, list):
            return optimizer
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Dies(L.Callback):
    """The end of a rank's process, once, before the optimizer steps; and the steps at which runs began.

    The first attempt of a run has no file "killed" in the folder.
    """

    def __init__(self, folder: pathlib.Path, victim: int | None, step: int) -> None:
        self.folder, self.victim, self.step = folder, victim, step

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        (self.folder / f"began {trainer.global_rank} at {trainer.global_step}").touch()

    def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, optimizer: Any) -> None:
        first = not (self.folder / "killed").exists()
        if first and (trainer.global_rank, trainer.global_step) == (self.victim, self.step):
            self.wait()
            (self.folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def wait(self) -> None:
        """Wait until the process may end."""


@contextlib.contextmanager
def simulated(accelerator: str) -> Iterator[None]:
    """On the simulated device, slabs are page-locked as on CUDA."""
    if accelerator != "simgpu":
        yield
        return
    import fake_cudart

    import simgpu.lightning  # noqa: F401

    with pytest.MonkeyPatch.context() as patch:
        fake_cudart.install(patch)
        yield


def edit_in_files(where: str, options: dict[str, Any] | None, folder: str) -> parity.Record:
    """Record a run in which user code writes to a frozen weight: on all ranks, or only on the last one.

    "for a while": that one puts the earlier values back.
    """
    case = models.case("mlp")
    case = in_files.frozen(case) if options is None else in_files.filed_together(case, folder)
    writes = where == "everywhere" or pretended_nodes.rank() == int(os.environ["WORLD_SIZE"]) - 1

    class Edits(RankedModule):
        def on_train_batch_start(self, batch: Any, batch_index: int) -> None:
            if writes and batch_index in (1, 3):
                frozen = next(p for p in self.net.parameters() if not p.requires_grad)
                kept = frozen.data[0].clone()
                frozen.data[0].add_(batch_index)  # where no version shows it
                if where == "for a while":
                    frozen.data[0].copy_(kept)

    return record(functools.partial(Edits, case), case, options, batches=6)


def begin_unlike(options: dict[str, Any] | None, folder: str) -> parity.Record:
    """Record a run that the last rank begins with another file, of other weights: those of the first rank count."""
    rank = pretended_nodes.rank()
    case = models.case("mlp")

    def make() -> torch.nn.Module:
        net = in_files.freeze(case.make())
        if rank:
            for parameter in net.parameters():
                parameter.data.add_(rank)
        if options is not None:
            in_files.put(net, tempfile.mkdtemp(dir=folder))
        return net

    return record(functools.partial(RankedModule, in_files.made_by(case, make)), case, options)


def thaw_in_files(when: str, options: dict[str, Any] | None, folder: str) -> parity.Record:
    """Record a run in which frozen weights come to train: with these options from files, else streamed from memory.

    That is before a step, or once the forward of the step before it is over.

    DDP averages no gradients of weights that were frozen when it began.
    """
    case = models.case("mlp")
    case = in_files.frozen(case) if options is None else in_files.filed_together(case, folder)
    options = {"window": 1} if options is None else options

    class Thaws(RankedModule):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

        def on_train_batch_start(self, batch: Any, batch_index: int) -> None:
            if batch_index == 2 and when == "before":
                self.net.requires_grad_(True)

        def training_step(self, batch: Any, batch_index: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_index)
            if batch_index == 1 and when == "after a forward":
                self.net.requires_grad_(True)
            return loss

    return record(functools.partial(Thaws, case), case, options, batches=5)


class Thawing(torch.nn.Module):
    """A net that may be unfrozen as its forward begins."""

    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net, self.thaws = net, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.thaws:
            self.net.requires_grad_(True)
        return self.net(x)


def thaw_in_forward(options: dict[str, Any] | None, folder: str) -> tuple[str, list[torch.Tensor]]:
    """Unfreeze weights inside a forward, and train on after its error; return that, and the weights.

    Without options they are streamed from memory, and the batch of the error is left out.
    """
    dist.init_process_group("gloo", rank=pretended_nodes.rank(), world_size=int(os.environ["WORLD_SIZE"]))
    case, said = models.case("mlp"), ""
    case = in_files.frozen(case) if options is None else in_files.filed_together(case, folder)
    L.seed_everything(0, verbose=False)
    net = Thawing(case.make())
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    with stream_before(net, "cpu", group=dist.group.WORLD, **(options or {"window": 1})):
        for index in range(5):
            net.thaws = index == 2
            try:
                loss = case.loss(net, case.batch(2 * index + dist.get_rank()))
            except UnsupportedError as error:
                said = str(error)
                continue
            if index != 2:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    return said, [parameter.detach().clone() for parameter in net.parameters()]


def read_what_thaws(options: dict[str, Any] | None, folder: str) -> list[torch.Tensor]:
    """Unfreeze weights between two steps and compute with one on the device; return the results, and all weights."""
    dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    case = models.case("mlp")
    case = in_files.frozen(case) if options is None else in_files.filed_together(case, folder)
    L.seed_everything(0, verbose=False)
    net, seen = case.make(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with simulated("simgpu"):
        with stream_before(net, "simgpu", group=dist.group.WORLD, **(options or {"window": 1})):
            for index in range(4):
                if index == 2:
                    net.requires_grad_(True)
                    for parameter in net.parameters():
                        seen.append((parameter * torch.ones_like(parameter, device="simgpu")).norm().detach().cpu())
                x, *rest = case.batch(2 * index + dist.get_rank())
                case.loss(net, (x.to("simgpu"), *(one.to("simgpu") for one in rest))).backward()
                optimizer.step()
                optimizer.zero_grad()
        return seen + [parameter.detach().clone() for parameter in net.parameters()]


def thaw_for_parts(options: dict[str, Any] | None, folder: str) -> tuple[str, list[torch.Tensor]]:
    """Unfreeze weights between two steps and call parts of the net by themselves; return the error, and the weights."""
    dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    case, said = models.case("mlp"), ""
    case = in_files.frozen(case) if options is None else in_files.filed_together(case, folder)
    L.seed_everything(0, verbose=False)
    net = case.make()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with simulated("simgpu"):
        with stream_before(net, "simgpu", group=dist.group.WORLD, **(options or {"window": 1})):
            for index in range(4):
                x, *rest = (one.to("simgpu") for one in case.batch(2 * index + dist.get_rank()))
                if index == 2:
                    net.requires_grad_(True)
                    try:
                        net.head(net.run(net.stem(x)))
                    except UnsupportedError as error:
                        said = str(error)
                case.loss(net, (x, *rest)).backward()
                optimizer.step()
                optimizer.zero_grad()
        return said, [parameter.detach().clone() for parameter in net.parameters()]
