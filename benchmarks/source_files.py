"""Predict and train adapters over a checkpoint that stays in its files: memory, bits, and the speed of the disk.

    python benchmarks/source_files.py [--gigabytes 4.3] [--folder DIR]

Writes a checkpoint of that size (bf16, frozen, one file for each four blocks; removed at the end), and runs in
processes of their own, on the CPU:

- "plain": the model in its files' mappings, without streaming: what the results must be, bit for bit;
- "streamed": ``host_budget="0B"``, window 1. The growth of the process's anonymous and locked memory is sampled all the
  time from before ``stream`` to the end of a prediction, and of a step of SGD on low-rank adapters beside each block.
  The page cache is not part of it. Where the CPU computes, the window of units is, and what the model computes.

Then it reads the same files by turns, ``--repeats`` times, beside a thread that computes in pure Python: raw (64
MiB at a time by three threads, O_DIRECT, into private memory in huge pages, as the library's) and into the ring; then
into the ring and on into a unit's buffer, which an accelerator copies by itself and here the processor does. The ratio
of the medians of the first two is printed, and the raw speed without that thread.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import functools
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from raw_disk import Growth, computing, private
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

WIDTH = 2048
HIDDEN = 4 * WIDTH
RANK = 8
ROWS = 4
BLOCKS_PER_FILE = 4
BLOCK_NBYTES = 2 * WIDTH * HIDDEN * 2
CHUNK = 64 << 20


class Block(nn.Module):
    """A residual MLP without biases."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False, dtype=dtype)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Adapted(nn.Module):
    """A block with a low-rank adapter beside it."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = block
        self.a = nn.Parameter(torch.full((WIDTH, RANK), 0.01, dtype=torch.bfloat16))
        self.b = nn.Parameter(torch.zeros(RANK, WIDTH, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) + x @ self.a @ self.b


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4.3)
    parser.add_argument("--folder", help="where to write the checkpoint (default: a temporary one)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--run", choices=("plain", "streamed", "speed"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run is not None:
        print(json.dumps(RUNS[options.run](Path(options.folder), options.repeats)))
        return
    folder = Path(tempfile.mkdtemp(prefix="source-files-", dir=options.folder))
    try:
        count = write(folder, round(options.gigabytes * 1e9 / BLOCK_NBYTES))
        print(f"{count * BLOCK_NBYTES / 1e9:.2f} GB of frozen weights in {len(list(folder.iterdir()))} files")
        plain, streamed, speed = (run(name, folder, options.repeats) for name in RUNS)
    finally:
        shutil.rmtree(folder)
    for name in ("logits", "adapters"):
        print(f"{name}: {'equal, bit for bit' if plain[name] == streamed[name] else 'DIFFERENT'}")
    for name in ("predict", "step"):
        print(f"{name}: at most {streamed[name] / 1e6:.0f} MB more anonymous and locked memory")
    print(f"read: {streamed['read'] / 1e9:.2f} GB")
    for name, rate in speed.items():
        print(f"{name}: {rate:.2f} GB/s")
    print(f"ring / raw, beside pure Python: {speed['ring beside pure Python'] / speed['raw beside pure Python']:.2f}")


def run(name: str, folder: Path, repeats: int) -> Any:
    command = [sys.executable, __file__, "--run", name, "--folder", str(folder), "--repeats", str(repeats)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout)


def write(folder: Path, count: int) -> int:
    """Write a checkpoint of so many blocks, a few at a time; return their number."""
    generator = torch.Generator().manual_seed(0)
    values = torch.empty(WIDTH * HIDDEN, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
    for first in range(0, count, BLOCKS_PER_FILE):
        state = {
            f"{index}.{name}.weight": values.roll(index + (name == "up")).view(shape)
            for index in range(first, min(first + BLOCKS_PER_FILE, count))
            for name, shape in (("up", (HIDDEN, WIDTH)), ("down", (WIDTH, HIDDEN)))
        }
        torch.save(state, folder / f"{first:05d}.pt")
    os.sync()
    return count


def load(folder: Path) -> nn.Sequential:
    """Load the model as a loader that maps files leaves it."""
    state: dict[str, Tensor] = {}
    for path in sorted(folder.iterdir()):
        state |= torch.load(path, mmap=True)
    with torch.device("meta"):
        model = nn.Sequential(*(Block(torch.bfloat16) for _ in range(len(state) // 2)))
    model.load_state_dict(state, assign=True)
    return model.requires_grad_(False)


def results(model: nn.Sequential, context: Any) -> dict[str, Any]:
    """Predict, then take a step on adapters, each in a context; return what came out as hashes."""
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()
    found: dict[str, Any] = {}
    with context("predict", model), torch.no_grad():
        found["logits"] = digest([model(x)])
    adapted = nn.Sequential(*(Adapted(block) for block in model))
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.1)
    with context("step", adapted):
        adapted(x).float().square().mean().backward()
        optimizer.step()
    found["adapters"] = digest([p for p in adapted.parameters() if p.requires_grad])
    return found


def digest(tensors: list[Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def plain(folder: Path, repeats: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    return results(load(folder), lambda name, model: contextlib.nullcontext())


def streamed(folder: Path, repeats: int) -> dict[str, Any]:
    import sp_lightning

    torch.set_num_threads(1)
    growth: dict[str, Any] = {"read": 0}
    torch.ones(64, 64, dtype=torch.bfloat16) @ torch.ones(64, 64, dtype=torch.bfloat16)  # what libraries allocate once

    @contextlib.contextmanager
    def context(name: str, model: nn.Module) -> Iterator[None]:
        memory = Growth()
        options = {"window": 1, "host_budget": "0B", "units": ["Block" if name == "predict" else "Adapted"]}
        with sp_lightning.stream(model, "cpu", **options) as handle:
            yield
            growth["read"] += handle.stats()["disk_read"]
        growth[name] = memory.end()

    return results(load(folder), context) | growth


def speed(folder: Path, repeats: int) -> dict[str, float]:
    """Read all files by turns: raw alone, raw and through the ring beside a thread in pure Python."""
    from sp_lightning.core.telemetry import Counters
    from sp_lightning.disk.direct_ring import DirectRing, Target, pieces
    from sp_lightning.disk.source_files import BLOCK, Place, SourceFile
    from sp_lightning.memory.device import Device

    torch.set_num_threads(1)
    paths = sorted(folder.iterdir())
    sizes = [path.stat().st_size // BLOCK * BLOCK for path in paths]
    total = sum(sizes)
    buffers = [private(CHUNK) for _ in range(6)]

    def raw() -> None:
        fds = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in paths]
        chunks = [
            (fd, begin, min(CHUNK, size - begin))
            for fd, size in zip(fds, sizes, strict=True)
            for begin in range(0, size, CHUNK)
        ]

        def read(number: int) -> None:
            fd, begin, nbytes = chunks[number]
            done = 0
            while done < nbytes:
                done += os.preadv(fd, [buffers[number % 6][done:nbytes]], begin + done)

        with concurrent.futures.ThreadPoolExecutor(3) as threads:
            list(threads.map(read, range(len(chunks))))
        for fd in fds:
            os.close(fd)

    device, files = Device("cpu"), [SourceFile(str(path)) for path in paths]
    through, unit = DirectRing(device, CHUNK), torch.zeros(max(sizes), dtype=torch.uint8)

    def ring(copies: bool = False) -> None:
        fills = []
        for file, size in zip(files, sizes, strict=True):
            jobs = [
                (piece, [Target(part.at, part.nbytes, unit[part.within : part.within + part.nbytes], None)] * copies)
                for piece in pieces([(0, Place(file, 0, size), 1)], CHUNK)
                for part in piece.parts
            ]
            fills.append(through.fill(Counters(), [], jobs, contextlib.nullcontext(), [file]))
        for fill in fills:
            fill.wait(device.compute)

    taken: dict[str, list[float]] = {}
    for repeat in range(repeats + 1):
        for name, read, beside in (
            ("raw", raw, contextlib.nullcontext),
            ("raw beside pure Python", raw, computing),
            ("ring beside pure Python", ring, computing),
            ("ring and copy beside pure Python", functools.partial(ring, True), computing),
        ):
            with beside():
                begin = time.perf_counter()
                read()
                seconds = time.perf_counter() - begin
            if repeat:  # the first is not counted
                taken.setdefault(name, []).append(total / 1e9 / seconds)
    through.close()
    return {name: statistics.median(rates) for name, rates in taken.items()}


RUNS = {"plain": plain, "streamed": streamed, "speed": speed}

if __name__ == "__main__":
    main()
