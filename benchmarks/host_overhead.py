"""Host time that the engine adds to each visit of a unit: streamed minus plain, over forward and backward.

    python benchmarks/host_overhead.py [--device cpu] [--repeat 7] [--json FILE]

Units of 12 parameters so small that computing and copying them takes next to no time; the rest is the engine.
"""

import argparse
import json
import pathlib
import statistics
import time

import torch
from torch import nn

import sp_lightning

WIDTH = 4


class Block(nn.Module):
    """Six linear layers: 12 parameters."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))

    def forward(self, x):
        return self.layers(x)


class Stack(nn.Module):
    def __init__(self, units):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(units))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def seconds_per_step(module, device, steps):
    x = torch.randn(2, WIDTH, device=device)
    for parameter in module.parameters():
        parameter.grad = None
    begin = time.perf_counter()
    for _ in range(steps):
        module(x).sum().backward()
        for parameter in module.parameters():
            parameter.grad = None
    if device != "cpu":
        torch.accelerator.synchronize()
    return (time.perf_counter() - begin) / steps


def measure(units, device, window, repeat):
    """Microseconds per visit that streaming adds: median over interleaved repetitions."""
    plain, streamed = Stack(units).to(device), Stack(units)
    with sp_lightning.stream(streamed, device, window=window, units=["Block"]) as handle:
        seconds_per_step(streamed, device, 3)
        visits = len(handle.engine.window.order)
        added = []
        for _ in range(repeat):
            without = seconds_per_step(plain, device, 10)
            added.append((seconds_per_step(streamed, device, 10) - without) / visits * 1e6)
        return statistics.median(added), min(added), max(added)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    print("units  window   us per visit   (least, most)")
    for units, window in [(8, 2), (32, 2), (128, 2), (128, 4), (128, 128)]:
        median, least, most = measure(units, arguments.device, window, arguments.repeat)
        rows.append({"units": units, "window": window, "us_per_visit": median, "least": least, "most": most})
        print(f"{units:5d}  {window:6d}   {median:12.0f}   ({least:.0f}, {most:.0f})")
    if arguments.json:
        facts = {"torch": torch.__version__, "device": arguments.device, "threads": 1}
        arguments.json.write_text(json.dumps({"machine": facts, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
