"""Measure the host time that streaming adds to each visit of a unit, and what FSDP2's CPU offload adds, on one core.

    python benchmarks/host_overhead.py [--device cpu | cuda] [--units 8 32 128] [--window 2] [--repeat 31] [--json FILE]

A unit is six linear layers of 16 x 16 with a batch of 4: 12 parameters, which take almost no time to compute and copy;
the rest is the host's work. A step is forward and backward without an optimizer, and visits each unit twice. A
contender's cost per visit is its step time less the plain module's in the same repetition, divided by twice the units.
Contenders take short turns on one core with one thread, in an order that alternates; Python's garbage is collected
before each timing, not during it. The output shows medians over the repetitions: of both times, and of their ratio,
which carries over to another machine better than the times do.

Times are those that all threads of the process spend on the core, which other processes disturb less than wall-clock
times. The ratio by the clock is printed, too: there, sleeping while waiting does not help. Nothing is timed unless all
losses and gradients equal the plain module's bit for bit.
"""

import argparse
import contextlib
import gc
import json
import os
import pathlib
import statistics
import sys
import time

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

import sp_lightning

sys.path.insert(0, str(pathlib.Path(__file__).parent / "bench"))

from contenders import process_group

WIDTH, BATCH = 16, 4
TURN = 64  # least number of units in a contender's turn
PLAIN, OURS, FSDP2 = "plain", "superpipeline", "fsdp2"


class Block(nn.Module):
    """Six linear layers: 12 parameters. The residual connection keeps gradients from vanishing: denormals are slow."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))

    def forward(self, x):
        return x + self.layers(x)


def stack(units):
    """Make a stack of blocks, with the same weights each time."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(units)))


@contextlib.contextmanager
def contenders(units, device, window):
    """Yield the plain, the streamed and the sharded module, by name."""
    streamed, sharded = stack(units), stack(units)
    with sp_lightning.stream(streamed, device, window=window, units=["Block"]), process_group(device):
        mesh = init_device_mesh(device.type, (1,))
        for part in (*sharded, sharded):
            fully_shard(part, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=device.type != "cpu"))
        yield {PLAIN: stack(units).to(device), OURS: streamed, FSDP2: sharded}


def step(module, x):
    """Run forward and backward."""
    loss = module(x).square().mean()
    loss.backward()
    return loss


def outcome(module, x):
    """Return the loss and all gradients of one step, on the host."""
    loss = step(module, x).detach()
    gradients = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    return [whole(tensor).cpu().clone() for tensor in (loss, *gradients)]


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check(modules, x):
    """Exit unless all contenders compute the same, in the first steps and once the order of visits is known."""
    for _ in range(3):
        expected = outcome(modules[PLAIN], x)
        for name, module in modules.items():
            found = outcome(module, x)
            if len(found) != len(expected) or not all(map(torch.equal, found, expected)):
                raise SystemExit(f"{name} computes other losses or gradients than the plain module: nothing is timed")


def seconds_per_step(module, x, steps):
    """Return the seconds of a step on the core, and by the clock."""
    synchronize = torch.accelerator.synchronize if x.device.type != "cpu" else lambda: None
    gc.collect()
    gc.disable()
    try:
        synchronize()
        core, clock = time.process_time(), time.perf_counter()
        for _ in range(steps):
            step(module, x)
            module.zero_grad()
        synchronize()
        return (time.process_time() - core) / steps, (time.perf_counter() - clock) / steps
    finally:
        gc.enable()


def added(modules, x):
    """Return the microseconds per visit that streaming and FSDP2 add in one repetition, by "core" and "clock"."""
    units = len(modules[PLAIN])
    seconds = {name: seconds_per_step(module, x, max(1, TURN // units)) for name, module in modules.items()}
    own = [[(seconds[name][by] - seconds[PLAIN][by]) / (2 * units) * 1e6 for name in (OURS, FSDP2)] for by in (0, 1)]
    return dict(zip(("core", "clock"), own, strict=True))


def measure(units, device, window, repeat):
    """Return what streaming and FSDP2 add in each repetition."""
    x = torch.randn(BATCH, WIDTH, device=device)
    with contenders(units, device, window) as modules:
        check(modules, x)
        gc.collect()
        gc.freeze()  # or each collection would traverse all imported modules
        try:
            there, back = modules, dict(reversed(modules.items()))
            return [added(back if index % 2 else there, x) for index in range(repeat)]
        finally:
            gc.unfreeze()


def ratios(rows, by):
    return [ours / fsdp2 for row in rows for ours, fsdp2 in (row[by],)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", type=torch.device, default="cpu")
    parser.add_argument("--units", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--window", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=31)
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):  # Linux
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    result = {"torch": torch.__version__, "device": str(arguments.device), "window": arguments.window, "units": {}}
    print(f" units   {OURS}   {FSDP2}   ratio   (least, most)   by the clock")
    for units in arguments.units:
        rows = result["units"][units] = measure(units, arguments.device, arguments.window, arguments.repeat)
        ours, fsdp2 = (statistics.median(column) for column in zip(*(row["core"] for row in rows), strict=True))
        core, clock = ratios(rows, "core"), ratios(rows, "clock")
        both = f"{statistics.median(core):.2f}    ({min(core):.2f}, {max(core):.2f})   {statistics.median(clock):12.2f}"
        print(f"{units:6d}   {ours:10.0f} us   {fsdp2:2.0f} us   {both}", flush=True)
    result["ratio"] = statistics.median(ratio for rows in result["units"].values() for ratio in ratios(rows, "core"))
    print(f"a visit of a unit takes the host {result['ratio']:.2f} of what FSDP2 adds to it")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
