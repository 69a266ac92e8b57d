"""A user's script for two devices: ``python ranked_script.py STRATEGY FOLDER``, by itself or under torchrun.

Each rank leaves what it computed in the folder: a rate that was searched, training twice with a sampler of Lightning's,
evaluation of the best checkpoint, and a second Trainer.
"""

import os
import pathlib
import sys
from typing import Any

import lightning as L
import pretended_nodes
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.tuner import Tuner
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import parity
import sp_lightning  # noqa: F401  # registers the strategy


class Module(L.LightningModule):
    def __init__(self, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        width = 16
        blocks = [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width)) for _ in range(4)]
        self.net = torch.nn.Sequential(*blocks, torch.nn.Dropout(0.1), torch.nn.Linear(width, 3))

    def loss(self, batch: Any, name: str) -> Tensor:
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log(name, loss, sync_dist=True, on_epoch=True)
        return loss

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        return self.loss(batch, "loss")

    def validation_step(self, batch: Any, batch_index: int) -> None:
        self.loss(batch, "val_loss")

    def test_step(self, batch: Any, batch_index: int) -> None:
        self.loss(batch, "test_loss")

    def predict_step(self, batch: Any, batch_index: int) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, foreach=False)


def main(strategy: str, folder: pathlib.Path) -> None:
    torch.set_num_threads(1)
    L.seed_everything(3, workers=True, verbose=False)
    random = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(45, 16, generator=random), torch.randint(3, (45,), generator=random))
    train, rest = DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=5)
    module = Module()
    seen: dict[str, Any] = {}

    def make_trainer(name: str) -> L.Trainer:
        return parity.make_trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=2 // pretended_nodes.count(),
            num_nodes=pretended_nodes.count(),
            max_epochs=2,
            enable_checkpointing=True,
            callbacks=[ModelCheckpoint(folder / name, monitor="val_loss")],
        )

    def see(name: str, value: Any) -> None:
        seen.update({f"{name} {path}": parity.keep(leaf) for path, leaf in parity.leaves(value)})

    trainer = make_trainer("first")
    see("rate", Tuner(trainer).lr_find(module, train, rest, num_training=6).results)
    trainer.fit(module, train, rest)
    see("fit", [module.state_dict(), dict(trainer.callback_metrics)])
    see("validation", trainer.validate(module, rest, verbose=False))
    see("test", trainer.test(module, rest, ckpt_path="best", weights_only=False, verbose=False))
    see("predictions", trainer.predict(module, rest))
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, train, rest)
    see("more", [module.state_dict(), dict(trainer.callback_metrics)])
    trainer = make_trainer("second")
    trainer.fit(module, train, rest)
    see("second", [module.state_dict(), dict(trainer.callback_metrics), trainer.optimizers[0].state_dict()])
    torch.save(seen, folder / f"{trainer.global_rank}.pt")


if __name__ == "__main__":
    with pretended_nodes.pretending(int(os.environ.get("GROUP_RANK", 0))):  # torchrun's number of the node
        main(sys.argv[1], pathlib.Path(sys.argv[2]))
