"""What ranks do in tests of bad input: each returns the error that it got, as "type: message"."""

from __future__ import annotations

import functools
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from typing import Any
from unittest import mock

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset

import sp_lightning


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
        strategy=sp_lightning.SuperpipelineStrategy(window=1, units=["Linear"]),
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


def unlike_models(settings: list[dict[str, Any]]) -> str:
    """Train another model on each rank."""
    size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    return error(lambda: trained(Net(**settings[rank]), [torch.randn(4, 8)] * 4, size))


def another_torch() -> str:
    """Train with another version of torch on the last rank."""
    size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    version = "0.1" if rank == size - 1 else torch.__version__
    with mock.patch.object(torch, "__version__", version):
        return error(lambda: trained(Net(), [torch.randn(4, 8)] * 4, size))


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
