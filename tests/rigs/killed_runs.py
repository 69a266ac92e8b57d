"""A run with state and weights on a disk, which saves at every third step, and goes on from the last checkpoint."""

import pathlib
import time

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from ranked_runs import RememberingLoader, Scheduled

import models
import parity
import sp_lightning
from sp_lightning.store import pipeline, placement

STEPS = 40


class Lasts(Callback):
    """Has a step last, so that processes end in the middle of a run."""

    def on_train_batch_end(self, *_):
        time.sleep(0.02)


def main(folder):
    torch.set_num_threads(1)
    placement.LEAST, pipeline.MOST, pipeline.LEAST, pipeline.SMALLEST = 1, *[1 << 16] * 3
    case = models.case("mlp")
    L.seed_everything(0, verbose=False)
    module = Scheduled(case, "adamw")
    saves = ModelCheckpoint(f"{folder}/checkpoints", every_n_train_steps=3, save_last=True, save_top_k=-1)
    trainer = parity.make_trainer(
        strategy=sp_lightning.SuperpipelineStrategy(units=case.units, window=1, host_budget="0B", disk=folder),
        accelerator="cpu",
        max_steps=STEPS,
        enable_checkpointing=True,
        callbacks=[saves, Lasts()],
    )
    data = [case.batch(i) for i in range(STEPS)]
    trainer.fit(module, RememberingLoader(data, batch_size=None, shuffle=False), ckpt_path="last", weights_only=False)
    assert trainer.strategy.handle.stats()["disk_written"] > 0
    trainer.save_checkpoint(pathlib.Path(folder) / "end.ckpt")
