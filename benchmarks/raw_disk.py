"""Steps and checkpoints from a disk, beside the disk's own speed.

    python benchmarks/raw_disk.py [--folder DIR] [--rounds 5]

A net of one unit with 200 million FP32 parameters, about those of a block of Llama 8B, has weights, gradients and state
in the scratch file. Each round steps it by fused AdamW, saves weights and state, and moves as many bytes by direct
reads and writes of the same sizes, by a thread each way: over a file of allocated blocks beside the step, and into a
new file beside the checkpoint, which is synced as that is. Others use the disk as well: the ratios of one round are
compared, and their median counts. Bars: a step takes at most 1.15 times the raw time, a checkpoint twice.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sp_lightning.handle import stream
from sp_lightning.host.memory import private_mapping
from sp_lightning.lightning.checkpoint_io import MappedCheckpointIO
from sp_lightning.store import pipeline

SHAPE = 8192, 24576
SPANS = 4  # of a window: weight, gradient and two numbers of state


class RawFile:
    """A nameless file that is read and written directly."""

    def __init__(self, folder: str, nbytes: int, block: int) -> None:
        self._folder, self._nbytes, self._block = folder, nbytes, block
        self._buffers = [private_mapping(block), private_mapping(block)]
        for buffer in self._buffers:
            buffer[:] = os.urandom(1 << 12) * (block >> 12)
        self._file = self._new()
        self._move(self._file, os.pwrite, nbytes)

    def _new(self) -> int:
        return os.open(self._folder, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT)

    def _move(self, file: int, call: Callable[..., int], nbytes: int) -> None:
        write = call is os.pwrite
        for at in range(0, nbytes, self._block):
            place, buffer = at % self._nbytes, self._buffers[write]
            count = call(file, buffer, place) if write else call(file, [buffer], place)
            assert count == self._block

    def seconds(self, read: int, written: int, *, is_new: bool = False) -> float:
        """Read and write so many bytes at once; a new file is synced."""
        begin, file = time.perf_counter(), self._new() if is_new else self._file
        with ThreadPoolExecutor(2) as threads:
            moves = [
                threads.submit(self._move, self._file, os.preadv, read),
                threads.submit(self._move, file, os.pwrite, written),
            ]
        for move in moves:
            move.result()
        if is_new:
            os.fsync(file)
        seconds = time.perf_counter() - begin
        if is_new:
            os.close(file)
        return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", help="a folder on the disk (default: a temporary folder)")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    pipeline.LEAST = pipeline.MOST  # as with a budget from 4 GiB on
    net = nn.Sequential(nn.Linear(*SHAPE, bias=False))
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    checkpoints = MappedCheckpointIO()
    with tempfile.TemporaryDirectory(prefix="raw-disk-", dir=options.folder) as folder:
        raw = RawFile(folder, 2 << 30, pipeline.MOST // SPANS)
        given = {"window": 1, "units": ["Linear"], "disk": folder, "host_budget": "0B"}
        found: dict[str, list[tuple[float, float]]] = {"step": [], "checkpoint": []}
        with stream(net, "cpu", **given) as handle:
            net(torch.randn(1, SHAPE[0])).square().mean().backward()
            optimizer.step()  # which makes state
            handle.finish_step()
            for _ in range(options.rounds):
                before, begin = handle.stats(), time.perf_counter()
                optimizer.step()
                handle.finish_step()
                seconds, after = time.perf_counter() - begin, handle.stats()
                moved = [int(after[name] - before[name]) for name in ("disk_read", "disk_written")]
                found["step"].append((seconds, raw.seconds(*moved)))
                path, begin = f"{folder}/last.ckpt", time.perf_counter()
                checkpoints.save_checkpoint({"weights": net.state_dict(), "state": optimizer.state_dict()}, path)
                seconds, size = time.perf_counter() - begin, os.path.getsize(path)
                found["checkpoint"].append((seconds, raw.seconds(size, size, is_new=True)))
                os.remove(path)
    for name, bar in ("step", 1.15), ("checkpoint", 2):
        own, floor = (statistics.median(times) for times in zip(*found[name], strict=True))
        ratio = statistics.median(one / other for one, other in found[name])
        print(f"{name}: {own:.2f} s, raw {floor:.2f} s; ratio {ratio:.2f} (bar {bar})")


if __name__ == "__main__":
    main()
