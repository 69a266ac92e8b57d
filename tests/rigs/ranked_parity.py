"""Compare runs of several ranks: Lightning's own DDP on the CPU, and the strategy on any device.

The simulated device computes by the CPU's kernels, so that one run under DDP is the reference for both.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import processes

import parity

NOT_AS_DDP = {
    "checkpoint_reentrant": "DDP refuses reentrant checkpoints: their weights become ready in several backwards",
    "max_norm_embedding": "under DDP the ranks drift apart: each rescales the rows that it looks up; we raise an error",
}

plain_runs: dict[str, list[parity.Record]] = {}


def plain(size: int, function: Callable[..., Any], name: str, **settings: Any) -> list[parity.Record]:
    """Return what each rank recorded under DDP; run it once."""
    key = json.dumps([size, function.__name__, name, settings], sort_keys=True, default=repr)
    if key not in plain_runs:
        plain_runs[key] = processes.run(size, function, name, None, **settings)
    return plain_runs[key]


def check(
    function: Callable[..., Any],
    name: str,
    options: dict[str, Any],
    accelerator: str = "cpu",
    size: int = 2,
    **settings: Any,
) -> list[parity.Record]:
    """Run a function of ranked_*.py under DDP and under the strategy; raise Difference where a rank's records differ.

    Returns the records under the strategy.
    """
    expected = plain(size, function, name, **settings)
    found = processes.run(size, function, name, options, accelerator=accelerator, **settings)
    for rank, (theirs, ours) in enumerate(zip(expected, found, strict=True)):
        try:
            parity.compare(without_the_devices_generator(theirs), without_the_devices_generator(ours))
        except parity.Difference as difference:
            raise parity.Difference(f"rank {rank}: {difference}") from None
    return found


def without_the_devices_generator(record: parity.Record) -> parity.Record:
    entries = [entry for entry in record.entries if entry.what != "RNG state of simgpu"]
    return parity.Record(entries, record.telemetry)
