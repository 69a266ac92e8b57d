"""What each rank says of a run (processes.py, Rule 1)."""

from __future__ import annotations

import logging
import os
import pathlib

import lightning as L
import torch
from refused_runs import Net
from torch.utils.data import DataLoader

import sp_lightning


def reports(folder: str, bar: bool, timeline: bool) -> tuple[list[str], list[str]]:
    """Train with the callback; return what this rank logged of it, and the files that are there at the end."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lightning.pytorch")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        trainer = L.Trainer(
            accelerator="cpu",
            devices=int(os.environ["WORLD_SIZE"]),
            strategy=sp_lightning.SuperpipelineStrategy(window=1, units=["Linear"]),
            max_steps=6,
            logger=False,
            enable_progress_bar=bar,
            enable_model_summary=False,
            enable_checkpointing=False,
            default_root_dir=folder,
            callbacks=[
                sp_lightning.SuperpipelineCallback(timeline=folder if timeline else None, timeline_steps=(3, 4)),
            ],
        )
        trainer.fit(Net([8, 8, 8]), DataLoader(torch.ones(48, 8), batch_size=4))
        trainer.strategy.barrier()
    finally:
        logger.removeHandler(handler)
    found = sorted(str(path.relative_to(folder)) for path in pathlib.Path(folder).rglob("trace.json"))
    return [line for line in lines if "superpipeline" in line], found
