"""Measure how much of a step is hidden, on the simulated accelerator, where every part takes a known time.

    python benchmarks/overlap.py [--units 24] [--window 3] [--steps 5] [--devices N] [--json FILE]

Each unit's way up takes 10 ms, its forward 10, its backward 20, its gradients' way down 10 and its step on the host
10; copies of other sizes, such as of the number by which Lightning asks all ranks for signals in each step, take their
part of that. Compute alone takes units x 30 ms; the best possible step adds the first unit's gradient, step and way
up, which nothing can hide. "one after the other" is the same engine made to wait after each submission, with
``optimizer_overlap=False``.

The second part has a step on the host of 40 ms, which takes longer than everything else: in the best possible step, the
steps of all units but the first then take the place of compute. "step not deferred" has no deferred steps, which run
beside the next forward.

With ``--devices`` each of so many ranks has such a device, and steps its part of each unit in a part of that time.
"""

import argparse
import contextlib
import json
import logging
import os
import pathlib
import statistics
import sys
import time
import warnings

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "tests" / "rigs"))

from importlib import import_module

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import simgpu
import simgpu.lightning
from sp_lightning.host.device import Device
from sp_lightning.lightning.strategy import SuperpipelineStrategy

MS = 1000  # microseconds
UP, FORWARD, BACKWARD, DOWN, STEP = 10, 10, 20, 10, 10
LONG_STEP = 40
WIDTH = 64
UNIT_NBYTES = WIDTH * WIDTH * 4


class Delay(torch.autograd.Function):
    """One operation of a known time in forward, one in backward."""

    @staticmethod
    def forward(ctx, x):
        return compute_for(FORWARD, x)

    @staticmethod
    def backward(ctx, grad):
        return compute_for(BACKWARD, grad)


def compute_for(milliseconds, x):
    simgpu.config.compute_us = milliseconds * MS
    try:
        return x * 1
    finally:
        simgpu.config.compute_us = 0


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.linear(Delay.apply(x))


class Stack(L.LightningModule):
    def __init__(self, units):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(units))
        self.starts = []

    def training_step(self, batch, _):
        self.starts.append(time.perf_counter())
        (x,) = batch
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


@contextlib.contextmanager
def sleeping_optimizer(milliseconds):
    """Make SGD sleep for each parameter, of which a unit has one, within this context."""
    module = import_module("torch.optim.sgd")  # torch.optim has no attribute of that name
    plain = module.sgd

    def sgd(params, *args, **kwargs):
        time.sleep(len(params) * milliseconds / 1000)
        plain(params, *args, **kwargs)

    module.sgd = sgd
    try:
        yield
    finally:
        module.sgd = plain


@contextlib.contextmanager
def waiting():
    """Wait after every submission within this context."""
    up, down = Device.send_up, Device.send_down

    def waits_for(send):
        def send_and_wait(*args, **kwargs):
            arrival = send(*args, **kwargs)
            arrival.synchronize()
            return arrival

        return send_and_wait

    Device.send_up, Device.send_down = waits_for(up), waits_for(down)
    try:
        yield
    finally:
        Device.send_up, Device.send_down = up, down


@contextlib.contextmanager
def without_deferred_steps():
    """Finish every step before it returns, within this context."""
    plain = SuperpipelineStrategy.optimizer_step

    def step_and_wait(self, *args, **kwargs):
        result = plain(self, *args, **kwargs)
        self.handle.finish_step()
        return result

    SuperpipelineStrategy.optimizer_step = step_and_wait
    try:
        yield
    finally:
        SuperpipelineStrategy.optimizer_step = plain


def of_ranks(setting, overlap):
    """Return the time of a step on this rank: a function for tests/rigs/processes.py."""
    quiet()
    size = int(os.environ["WORLD_SIZE"])
    return step_ms(*setting, overlap=overlap, optimizer_ms=STEP / size, devices=size)


def best_ms(units, optimizer_ms):
    """Return the time of the best possible step: compute or the optimizer, and what nothing can hide."""
    return max(units * (FORWARD + BACKWARD), (units - 1) * optimizer_ms) + DOWN + optimizer_ms + UP


def step_ms(units, window, steps, overlap=True, clip=None, optimizer_ms=STEP, devices=1):
    """Return the median time from one step's start to the next one's, after warm-up."""
    simgpu.config.h2d_gbps, simgpu.config.d2h_gbps = UNIT_NBYTES / (UP * 1e6), UNIT_NBYTES / (DOWN * 1e6)
    module = Stack(units)
    strategy = SuperpipelineStrategy(window=window, units=["Block"], optimizer_overlap=overlap)
    trainer = L.Trainer(
        accelerator="simgpu",
        devices=devices,
        strategy=strategy,
        max_epochs=1,
        gradient_clip_val=clip,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = TensorDataset(torch.randn((steps + 3) * devices, 4, WIDTH))
    with sleeping_optimizer(optimizer_ms):
        trainer.fit(module, DataLoader(data, batch_size=None))
    simgpu.config.h2d_gbps = simgpu.config.d2h_gbps = 0
    times = [later - earlier for earlier, later in zip(module.starts[2:], module.starts[3:], strict=False)]
    return statistics.median(times) * 1000


def several(setting, devices, to):
    """Measure ranks with and without deferred steps, in turn."""
    sys.path.append(str(pathlib.Path(__file__).parent))
    processes, here = import_module("processes"), import_module("overlap")
    best = best_ms(setting[0], STEP / devices)
    runs = [
        [max(processes.run(devices, here.of_ranks, setting, overlap)) for overlap in (True, False)] for _ in range(3)
    ]
    deferred, after = map(statistics.median, zip(*runs, strict=True))
    print(f"{devices} devices, best possible {best:.0f} ms")
    print(f"overlapped          {deferred:7.0f} ms   {deferred / best:.2f} x best")
    print(f"  step not deferred {after:7.0f} ms   {after / deferred:.2f} x deferred")
    if to:
        facts = {"torch": torch.__version__, "units": setting[0], "window": setting[1], "devices": devices}
        to.write_text(
            json.dumps({**facts, "best_ms": best, "deferred_ms": deferred, "not_deferred_ms": after}, indent=1)
        )


def quiet():
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--units", type=int, default=24)
    parser.add_argument("--window", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    quiet()
    setting = arguments.units, arguments.window, arguments.steps
    if arguments.devices > 1:
        several(setting, arguments.devices, arguments.json)
        return
    compute = arguments.units * (FORWARD + BACKWARD)
    best, long_best = best_ms(arguments.units, STEP), best_ms(arguments.units, LONG_STEP)
    overlapped = step_ms(*setting)
    clipped = step_ms(*setting, clip=1.0)
    after = step_ms(*setting, overlap=False, clip=1.0)
    with waiting():
        serial = step_ms(*setting, overlap=False)
    long = step_ms(*setting, optimizer_ms=LONG_STEP)
    with without_deferred_steps():
        long_after = step_ms(*setting, optimizer_ms=LONG_STEP)
    print(f"compute {compute} ms, best possible {best} ms")
    print(f"overlapped          {overlapped:7.0f} ms   {overlapped / best:.2f} x best")
    print(f"with clipping       {clipped:7.0f} ms   {clipped / best:.2f} x best")
    print(f"  step not deferred {after:7.0f} ms   {after / clipped:.2f} x deferred")
    print(f"one after the other {serial:7.0f} ms   {serial / overlapped:.2f} x overlapped")
    print(f"host step {LONG_STEP} ms, best possible {long_best} ms")
    print(f"overlapped          {long:7.0f} ms   {long / long_best:.2f} x best")
    print(f"  step not deferred {long_after:7.0f} ms   {long_after / long:.2f} x deferred")
    if arguments.json:
        facts = {"torch": torch.__version__, "units": arguments.units, "window": arguments.window}
        rows = {
            "compute_ms": compute,
            "best_ms": best,
            "overlapped_ms": overlapped,
            "clipped_ms": clipped,
            "clipped_not_deferred_ms": after,
            "serial_ms": serial,
            "long_best_ms": long_best,
            "long_overlapped_ms": long,
            "long_not_deferred_ms": long_after,
        }
        arguments.json.write_text(json.dumps({**facts, **rows}, indent=1))


if __name__ == "__main__":
    main()
