"""Time steps of optimizers with little state on this host, as multiples of AdamW's fused step.

    python benchmarks/small_state.py

`planning.planner.PACE` has such multiples, for plans with these optimizers. Steps are interleaved; the last column is a
ratio of medians within this run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

SHAPE = (4096, 2048)
REPEATS = 7


def makers() -> dict[str, Callable[[Any], torch.optim.Optimizer]]:
    """Return the optimizers to time; bitsandbytes' is left out where it is not installed."""
    found: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "AdamW": lambda parameters: torch.optim.AdamW(parameters, fused=True),
        "Adafactor": torch.optim.Adafactor,
    }
    try:
        import bitsandbytes
    except ImportError:
        return found
    return found | {"AdamW8bit": bitsandbytes.optim.AdamW8bit}


def main() -> None:
    """Print one line for each optimizer and type."""
    cases = {}
    for dtype in (torch.float32, torch.bfloat16):
        for name, make in makers().items():
            parameter = nn.Parameter(torch.randn(SHAPE, dtype=dtype))
            parameter.grad = torch.randn_like(parameter)
            cases[name, dtype] = make([parameter])
    times: dict[Any, list[float]] = {case: [] for case in cases}
    for _ in range(REPEATS):
        for case, optimizer in cases.items():
            begin = time.perf_counter()
            optimizer.step()
            times[case].append(time.perf_counter() - begin)
    for (name, dtype), seconds in times.items():
        median = statistics.median(seconds[1:])
        ratio = median / statistics.median(times["AdamW", dtype][1:])
        print(f"{name:10} {dtype!s:15} {1e3 * median:6.0f} ms  {ratio:5.1f} times AdamW's")


if __name__ == "__main__":
    main()
