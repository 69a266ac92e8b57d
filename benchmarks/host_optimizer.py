"""Time one optimizer step on the host by tensor size: torch's default loop, the loop in pieces, the fused kernels.

    python benchmarks/host_optimizer.py [--threads N] [--sizes 1e6 5e7] [--json FILE]

Repetitions are interleaved, so that other load affects all alike; figures are medians. Measure on an idle machine: on
busy cores every kernel waits for its slowest thread, and pieces run many kernels. Pieces give the bits of the loop, the
fused kernels of AdamW do not. A tensor of fewer than 4 pieces (2^19 elements a thread) stays whole.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path

import torch

from sp_lightning.optim.pieces import fuse, step_in_pieces

OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {}),
    "SGD momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "SGD momentum and decay": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}),
}
WAYS = {"loop": lambda optimizer: None, "pieces": step_in_pieces, "fused": fuse}


def make(optimizer_class, options, size, dtype):
    param = torch.nn.Parameter(torch.randn(size).to(dtype))
    param.grad = torch.randn(size).to(dtype)
    optimizer = optimizer_class([param], **options)
    optimizer.step()  # makes the state
    return optimizer


def step_ms(optimizer, attach):
    handle = attach(optimizer)
    start = time.perf_counter()
    optimizer.step()
    elapsed = time.perf_counter() - start
    if handle is not None:
        handle.close()
    return elapsed * 1e3


def measure(name, size, dtype, repetitions):
    optimizer_class, options = OPTIMIZERS[name]
    optimizer = make(optimizer_class, options, size, dtype)
    times = {way: [] for way in WAYS}
    for repetition in range(repetitions + 1):
        for way, attach in WAYS.items():
            elapsed = step_ms(optimizer, attach)
            if repetition:  # the first one warms up
                times[way].append(elapsed)
    medians = {way: statistics.median(values) for way, values in times.items()}
    return {
        "optimizer": name,
        "elements": size,
        "ms": medians,
        "ratio": {way: medians["loop"] / medians[way] for way in WAYS},
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", nargs="+", default=["1e5", "1e6", "4e6", "16e6", "5e7"], help="elements per tensor")
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64", "bfloat16"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--json", type=Path, help="file for the figures and the facts about the machine")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    sys.stdout.write(
        f"{'optimizer':24} {'elements':>10} {'loop':>10} {'pieces':>10} {'fused':>10}   loop/pieces  loop/fused\n"
    )
    rows = []
    for name in OPTIMIZERS:
        for size in arguments.sizes:
            row = measure(name, int(float(size)), getattr(torch, arguments.dtype), arguments.repetitions)
            rows.append(row)
            ms = " ".join(f"{value:7.2f} ms" for value in row["ms"].values())
            ratio = row["ratio"]
            line = f"{name:24} {row['elements']:>10} {ms} {ratio['pieces']:12.2f}x {ratio['fused']:10.2f}x\n"
            sys.stdout.write(line)
            sys.stdout.flush()
    if arguments.json:
        where = {
            "torch": torch.__version__,
            "machine": platform.machine(),
            "kernels": torch.backends.cpu.get_cpu_capability(),
        }
        figures = {**where, "threads": arguments.threads, "dtype": arguments.dtype, "rows": rows}
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
