"""Draw the picture in docs/troubleshooting.md: a step on the simulated accelerator of the tests.

    python benchmarks/timeline.py [--directory docs]

Eight units, whose copy to the device takes 10 ms, forward 10, backward 20, gradients' copy to the host 10 and step on
the host 30 (as in overlap.py), in a window of 3.
"""

import argparse
import pathlib
import shutil
import tempfile
import warnings

import overlap
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, TensorDataset

import simgpu
import sp_lightning

UNITS, WINDOW, STEP = 8, 3, 30


def write_timeline(directory):
    """Train ten batches, and write the timeline of three to a directory."""
    simgpu.config.h2d_us, simgpu.config.d2h_us = overlap.UP * overlap.MS, overlap.DOWN * overlap.MS
    strategy = sp_lightning.SuperpipelineStrategy(window=WINDOW, units=["Block"])
    callback = sp_lightning.SuperpipelineCallback(timeline=directory, timeline_steps=range(4, 7))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    trainer = Trainer(accelerator="simgpu", strategy=strategy, max_epochs=1, callbacks=[callback], **quiet)
    with overlap.sleeping_optimizer(STEP):
        trainer.fit(overlap.Stack(UNITS), DataLoader(TensorDataset(torch.randn(10, 4, overlap.WIDTH)), batch_size=None))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=pathlib.Path, default=pathlib.Path("docs"))
    directory = parser.parse_args().directory
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        write_timeline(temporary)
        shutil.copy(pathlib.Path(temporary) / "timeline.png", directory / "timeline_simgpu.png")


if __name__ == "__main__":
    main()
