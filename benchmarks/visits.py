"""Measure the host time of a visit in the core of handle.py: with a load, without one, and FSDP2's with CPU offload.

    python benchmarks/visits.py [--device cpu | cuda] [--units 32] [--repeat 31]

Both figures are ratios within one run, of what streaming adds to the plain module, by the time of one core:

- a training step's visit of a unit, against FSDP2's;
- a visit in a forward whose units are all on the device, against one in a forward that loads each unit.

Modules, turns and checks of bits are those of host_overhead.py.
"""

import argparse
import contextlib
import gc
import os
import time

import host_overhead as base
import torch
from host_overhead import process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from sp_lightning.handle import stream

LOADS, STAYS = "every unit is loaded", "all units stay"


@contextlib.contextmanager
def trained(units, device):
    """Yield the modules that train, by name."""
    streamed, sharded = base.stack(units), base.stack(units)
    with stream(streamed, device, window=2, units=["Block"]), process_group(device):
        mesh = init_device_mesh(device.type, (1,))
        for part in (*sharded, sharded):
            fully_shard(part, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=device.type != "cpu"))
        yield {base.PLAIN: base.stack(units).to(device), base.OURS: streamed, base.FSDP2: sharded}


@contextlib.contextmanager
def evaluated(units, device):
    """Yield the modules that run forward alone, by name."""
    few, all_of_them = base.stack(units), base.stack(units)
    with stream(few, device, window=2, units=["Block"]), stream(all_of_them, device, window=units, units=["Block"]):
        yield {base.PLAIN: base.stack(units).to(device), LOADS: few, STAYS: all_of_them}


def forward(module, x):
    with torch.no_grad():
        return module(x)


def train(module, x):
    base.step(module, x)
    module.zero_grad()


def seconds(run, module, x, turns):
    """Return the seconds of a run on the core."""
    gc.collect()
    gc.disable()
    try:
        begin = time.process_time()
        for _ in range(turns):
            run(module, x)
        if x.device.type != "cpu":
            torch.accelerator.synchronize()
        return (time.process_time() - begin) / turns
    finally:
        gc.enable()


def added(run, modules, x, repeat, visits):
    """Return the microseconds per visit that each module adds to the plain one.

    The least of the repetitions counts, because what else runs on the core only adds to them.
    """
    turns = max(1, 2 * base.TURN // len(modules[base.PLAIN]))
    least = dict.fromkeys(modules, float("inf"))
    for index in range(repeat + 1):
        for name in list(modules) if index % 2 else list(reversed(modules)):
            least[name] = min(least[name], seconds(run, modules[name], x, turns))
    return {name: (least[name] - least[base.PLAIN]) / visits * 1e6 for name in modules if name != base.PLAIN}


def show(first, second, found, bar):
    """Print what two modules add, and their ratio."""
    ratio = found[first] / found[second]
    print(f"{first}: {found[first]:.1f} us a visit; {second}: {found[second]:.1f} us; ratio {ratio:.2f} (bar: {bar})")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", type=torch.device, default="cpu")
    parser.add_argument("--units", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=31)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):  # Linux
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    x = torch.randn(base.BATCH, base.WIDTH, device=arguments.device)
    with trained(arguments.units, arguments.device) as modules:
        base.check(modules, x)
        show(base.OURS, base.FSDP2, added(train, modules, x, arguments.repeat, 2 * arguments.units), 0.45)
    with evaluated(arguments.units, arguments.device) as modules:
        show(STAYS, LOADS, added(forward, modules, x, arguments.repeat, arguments.units), 0.2)


if __name__ == "__main__":
    main()
