"""A user's script that checkpoints, and goes on from the last checkpoint: ``python restarted_script.py FOLDER [RANK]``.

Under torchrun, on as many pretended nodes as it has agents. In the first attempt the rank of this number is killed, if
one is given. The first rank leaves the last checkpoint in the folder, and each one the steps from which it went on.
"""

import os
import pathlib
import sys

import lightning as L
import pretended_nodes
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from ranked_runs import Dies, RememberingLoader, Scheduled

import models
import parity
import sp_lightning

STEPS, DIES_AT = 8, 5


def main(folder: pathlib.Path, victim: int | None = None) -> None:
    torch.set_num_threads(1)
    nodes, case = pretended_nodes.count(), models.case("mlp")
    L.seed_everything(0, verbose=False)
    module = Scheduled(case, "adamw")
    L.seed_everything(1, verbose=False)
    trainer = parity.make_trainer(
        strategy=sp_lightning.SuperpipelineStrategy(units=case.units, window=2),
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=nodes,
        max_steps=STEPS,
        enable_checkpointing=True,
        callbacks=[
            ModelCheckpoint(folder / "checkpoints", every_n_train_steps=2, save_last=True, save_top_k=-1),
            Dies(folder, victim, DIES_AT),
        ],
    )
    data = [case.batch(i) for i in range(40)]
    trainer.fit(module, RememberingLoader(data, batch_size=None, shuffle=False), ckpt_path="last")
    trainer.save_checkpoint(folder / "end.ckpt")


if __name__ == "__main__":
    with pretended_nodes.pretending(int(os.environ["GROUP_RANK"])):  # torchrun's number of the node
        main(pathlib.Path(sys.argv[1]), *map(int, sys.argv[2:]))
