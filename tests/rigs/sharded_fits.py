"""Trainers whose modules cut their layers in `configure_model`, under Lightning's ModelParallelStrategy and streamed.

One module serves both strategies. A run returns what can be seen of it by name, as in sharded.py.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from typing import Any
from unittest import mock

import lightning as L
import sharded
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from ranked_runs import simulated
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils.data import DataLoader

import parity
import sp_lightning

STEPS = 4


class Cut(L.LightningModule):
    """Trains a model of sharded.py; ``shards_data``: with FSDP2 along the data axis, as Lightning's strategy needs."""

    def __init__(self, name: str, optimizer: str = "adamw", shards_data: bool = False) -> None:
        super().__init__()
        self.name, self.optimizer, self.shards_data = name, optimizer, shards_data
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is not None:
            return
        mesh: Any = self.device_mesh
        torch.manual_seed(0)
        self.net = sharded.MAKERS[self.name](mesh["tensor_parallel"])
        if self.shards_data:
            for block in list(self.net)[1:5]:
                fully_shard(block, mesh=mesh["data_parallel"])
            fully_shard(self.net, mesh=mesh["data_parallel"])

    def loss(self, words: Tensor) -> Tensor:
        with loss_parallel() if self.name == "sharded loss" else contextlib.nullcontext():
            return F.cross_entropy(self.net(words).flatten(0, 1), words.flatten())

    def training_step(self, words: Tensor, _: int) -> Tensor:
        loss = self.loss(words)
        self.log("loss", whole(loss), on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        with loss_parallel() if self.name == "sharded loss" else contextlib.nullcontext():
            super().backward(loss, *args, **kwargs)

    def validation_step(self, words: Tensor, _: int) -> None:
        self.log("val_loss", whole(self.loss(words)), sync_dist=True)

    def predict_step(self, words: Tensor, _: int) -> Tensor:
        return whole(self.net(words))

    def configure_optimizers(self) -> Any:
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        if self.optimizer == "sgd":
            made: Any = torch.optim.SGD(parameters, 0.1, momentum=0.9, foreach=False)
        else:
            made = torch.optim.AdamW(parameters, 1e-2, foreach=self.optimizer == "foreach")
        scheduler = torch.optim.lr_scheduler.ExponentialLR(made, 0.9)
        return [made], [{"scheduler": scheduler, "interval": "step"}]


def whole(value: Tensor) -> Tensor:
    """Return a tensor as a whole, for a log, which takes no DTensors."""
    return value.detach().full_tensor() if isinstance(value, DTensor) else value


class Watch(L.Callback):
    """Keeps what is seen of a run after each step."""

    def __init__(self, whole: bool) -> None:
        self.whole = whole
        self.found: dict[str, Any] = {}

    def see(self, name: str, value: Any) -> None:
        self.found.update(sharded.seen(name, value, self.whole))

    def on_predict_start(self, trainer: Any, module: Any) -> None:
        handle = getattr(trainer.strategy, "handle", None)
        if handle is not None and handle.team.slabs is not None:  # what was loaded is in the memory that ranks share
            handle.finish_step()
            assert not any(unit.is_edited() for unit in handle.units if not unit.is_resident)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        at = f"{trainer.global_step}.{trainer.fit_loop.batch_idx}"
        self.see(f"{at} loss", outputs["loss"])
        for name, parameter in module.named_parameters():
            self.see(f"{at} {name}", parameter)
            self.see(f"{at} gradient of {name}", parameter.grad)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        names = {parameter: name for name, parameter in module.named_parameters()}
        for parameter, state in trainer.optimizers[0].state.items():
            self.see(f"state of {names[parameter]}", dict(state))
        for name, value in trainer.callback_metrics.items():
            self.see(name, value)


def strategy(options: dict[str, Any] | None, data: int, distributed: bool = True) -> Any:
    sizes: dict[str, Any] = {"data_parallel_size": data, "tensor_parallel_size": 2}
    sizes["save_distributed_checkpoint"] = distributed
    if options is None:
        return ModelParallelStrategy(**sizes)
    return sp_lightning.SuperpipelineStrategy(**{"window": 1} | options, **sizes)


def words(size: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randint(sharded.WORDS, (8,), generator=draw) for _ in range(size)]


@contextlib.contextmanager
def trainer(
    options: dict[str, Any] | None,
    accelerator: str = "cpu",
    data: int = 1,
    distributed: bool = True,
    **settings: Any,
) -> Iterator[L.Trainer]:
    """Make a Trainer of all ranks, of which nothing is left."""
    with mock.patch.dict(os.environ), simulated(accelerator), tempfile.TemporaryDirectory() as root:
        L.seed_everything(0, verbose=False)
        yield parity.make_trainer(
            strategy=strategy(options, data, distributed),
            accelerator=accelerator,
            devices=2 * data,
            default_root_dir=root,
            **{"max_steps": STEPS, "limit_val_batches": 2, "enable_checkpointing": False} | settings,
        )


def loader(shuffled: bool = True) -> DataLoader[Tensor]:
    return DataLoader(words(48), batch_size=3, shuffle=shuffled)  # type: ignore[arg-type]


def fit(
    module: Cut, options: dict[str, Any] | None, ckpt_path: str | None = None, whole: bool = False, **settings: Any
) -> dict[str, Any]:
    """Fit, validate and predict; return what is seen."""
    watch = Watch(whole)
    with trainer(options, callbacks=[watch, *settings.pop("callbacks", ())], **settings) as made:
        made.fit(module, loader(), loader(False), ckpt_path=ckpt_path)
        found = made.predict(module, loader(False), ckpt_path=ckpt_path)
        assert found is not None
        for number, batch in enumerate(found):
            watch.see(f"predicted {number}", batch)
        if options is not None:
            handle = made.strategy.handle
            assert handle is not None and handle.stats()["fetches"] > 0
    return watch.found


def run(
    name: str,
    options: dict[str, Any] | None,
    accelerator: str = "cpu",
    optimizer: str = "adamw",
    data: int = 1,
    averages: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Fit under Lightning's own strategy, or streamed with these options."""
    sharded.begin(accelerator == "simgpu")
    module = Cut(name, optimizer, options is None and data > 1)
    callbacks = [EMAWeightAveraging(decay=0.5)] if averages else []
    return fit(module, options, accelerator=accelerator, data=data, whole=data > 1, callbacks=callbacks, **settings)


def halfway(folder: str, options: dict[str, Any] | None, distributed: bool, data: int) -> str:
    """Fit for two steps, and leave a checkpoint of each; return what the second one is."""
    sharded.begin(False)
    kept = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=2, monitor="step", mode="max", filename="{step}")
    module = Cut("in sequence", shards_data=data > 1 and options is None)
    with trainer(
        options, data=data, distributed=distributed, callbacks=[kept], max_steps=2, enable_checkpointing=True
    ) as made:
        made.fit(module, loader(False))
    return "folder" if os.path.isdir(kept.best_model_path) else "file"


def went_on(folder: str, options: dict[str, Any] | None, data: int) -> dict[str, Any]:
    """Go on from what `halfway` left."""
    sharded.begin(False)
    module = Cut("in sequence", shards_data=data > 1 and options is None)
    return fit(module, options, os.path.join(folder, "step=2.ckpt"), whole=True, data=data)


class Whole(Cut):
    """Cuts nothing."""

    def configure_model(self) -> None:
        self.net = self.net or sharded.stack()


def refused(what: str) -> str:
    """Return the error of a fit that does not begin."""
    sharded.begin(False)
    module = {"whole": Whole}.get(what, Cut)("in sequence", shards_data=what == "fully sharded")
    with trainer({}) as made:
        if what == "sizes":
            made.strategy._axes = type(made.strategy._axes)(3, 2)
        return sharded.error_of(lambda: made.fit(module, loader()))
