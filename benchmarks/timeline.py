"""Draw the pictures in docs/: a simulated step alone, and one above its measured counterpart.

    python benchmarks/timeline.py [--directory docs]

``timeline_llama3-8b.png`` is simulated: 8192 tokens on an RTX 4090, window 3, recompute. ``timeline_simgpu.png`` shows
the same step twice, simulated above and measured below, on the simulated accelerator of the tests: eight units whose
way up takes 10 ms, forward 10, backward 20, gradients' way down 10 and step on the host 30 (as in overlap.py).
"""

import argparse
import dataclasses
import pathlib
import tempfile
import warnings

import overlap
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, TensorDataset

import simgpu
import sp_lightning
from sp_lightning.core.machine import MACHINES, Machine
from sp_lightning.core.schedule import Schedule
from sp_lightning.core.simulation import simulate
from sp_lightning.core.unit_numbers import UnitNumbers
from sp_lightning.observe import timeline, timeline_plot
from sp_lightning.planning.workloads import WORKLOADS

UNITS, WINDOW, STEP = 8, 3, 30
# Bytes, operations and parameters of a unit are its milliseconds.
CLOCK = Machine("milliseconds", 1e3, 1e3, 1e3, 1.0, 1e3, 0, 0, optimizer_bytes_per_parameter=1)


def simulated(units, machine, title, **options):
    schedule = Schedule([unit.up_nbytes for unit in units], WINDOW)
    result = simulate(units, schedule, machine, steps_into_forward=True, **options)
    return timeline.simulated(result, title)


def of_the_benchmark():
    def unit(index):
        backward = overlap.BACKWARD if index else 0  # the gradient of the first unit's input is not needed
        return UnitNumbers(f"blocks.{index}", overlap.UP, overlap.DOWN, STEP, overlap.FORWARD, backward)

    return simulated([unit(index) for index in range(UNITS)], CLOCK, "Eight units")


def measured(directory):
    simgpu.config.h2d_us, simgpu.config.d2h_us = overlap.UP * overlap.MS, overlap.DOWN * overlap.MS
    strategy = sp_lightning.SuperpipelineStrategy(window=WINDOW, units=["Block"], device=torch.device("simgpu", 0))
    callback = sp_lightning.SuperpipelineCallback(timeline=directory, timeline_steps=range(4, 7))
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
    }
    trainer = Trainer(accelerator="simgpu", strategy=strategy, max_epochs=1, callbacks=[callback], **quiet)
    with overlap.sleeping_optimizer(STEP):
        trainer.fit(overlap.Stack(UNITS), DataLoader(TensorDataset(torch.randn(10, 4, overlap.WIDTH)), batch_size=None))
    return dataclasses.replace(timeline.load(directory / "trace.json"), title="Eight units")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=pathlib.Path, default=pathlib.Path("docs"))
    directory = parser.parse_args().directory
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)

    llama = WORKLOADS["llama3-8b"].units(tokens=8192)
    one = simulated(llama, MACHINES["rtx4090"], "Llama 3 8B on rtx4090", activations="recompute")
    timeline_plot.save([one], directory / "timeline_llama3-8b.png")
    print(timeline.summary(one))
    with tempfile.TemporaryDirectory() as temporary:
        both = [of_the_benchmark(), measured(pathlib.Path(temporary))]
    timeline_plot.save(both, directory / "timeline_simgpu.png")
    for each in both:
        print(timeline.summary(each))


if __name__ == "__main__":
    main()
