"""What recording costs: the same training steps with the recorder on and off, in turn, in one run.

    python benchmarks/telemetry.py [--device cpu | cuda | simgpu] [--units 8] [--width 512] [--rounds 8] [--json FILE]

A unit is two linear layers of WIDTH x 4 WIDTH, in FP32. Printed are the medians of a step's time and of the time that
all of the process's threads spent on a core, which other processes disturb less; off, on, and what lies between as a
share of the step. "host us per unit" is that difference for each unit and step, reading included.
"""

import argparse
import json
import pathlib
import statistics
import sys
import time

import torch
from torch import nn

import sp_lightning

STEPS = 4  # in a round: the recorder reads two steps late


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        return x + self.layers(x)


def step(module, optimizer, x):
    module(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def timed(module, optimizer, x):
    """Wall and core seconds of a step."""
    wall, core = time.perf_counter(), time.process_time()
    for _ in range(STEPS):
        step(module, optimizer, x)
    return (time.perf_counter() - wall) / STEPS, (time.process_time() - core) / STEPS


def measure(arguments):
    torch.manual_seed(0)
    module = nn.Sequential(*(Block(arguments.width) for _ in range(arguments.units)))
    x = torch.randn(arguments.batch, arguments.width, device=arguments.device)
    times = {"off": [], "on": []}
    with sp_lightning.stream(module, arguments.device, window=2, units=["Block"]) as handle:
        optimizer = torch.optim.SGD(module.parameters(), 1e-4)
        for _ in range(2):
            timed(module, optimizer, x)
        for index in range(2 * arguments.rounds):
            # Off, on, on, off: what drifts, drifts for both.
            name = ("off", "on", "on", "off")[index % 4]
            if name == "on":
                handle.record()
            step(module, optimizer, x)
            times[name].append(timed(module, optimizer, x))
            handle.stop_recording()
    return {name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in times.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--units", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    if arguments.device == "simgpu":
        sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "tests"))
        __import__("simgpu")
    torch.set_num_threads(1)
    found = measure(arguments)
    (wall_off, core_off), (wall_on, core_on) = found["off"], found["on"]
    print(f"step        off {wall_off * 1e3:8.2f} ms   on {wall_on * 1e3:8.2f} ms   {(wall_on / wall_off - 1):+.2%}")
    print(f"core time   off {core_off * 1e3:8.2f} ms   on {core_on * 1e3:8.2f} ms   {(core_on / core_off - 1):+.2%}")
    print(f"host us per unit {(core_on - core_off) / arguments.units * 1e6:.0f}")
    if arguments.json:
        facts = {"torch": torch.__version__, "device": arguments.device, "units": arguments.units}
        arguments.json.write_text(json.dumps({**facts, **found}, indent=1))


if __name__ == "__main__":
    main()
