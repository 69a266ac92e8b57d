"""Step optimizer state that lies on a disk: time beside the disk's own speed, bits, and memory.

    python benchmarks/state_on_disk.py [--gigabytes 1.6] [--folder DIR] [--repeats 5] [--autocast]

A stack of layers with so many bytes of FP32 weights is stepped by AdamW, in two processes on the CPU:

- "memory": state in memory. "disk": ``disk=``, ``host_budget="0B"``. Both take the same steps, one after the other in
  turns, so that other load falls on both, and both have the same weights and state at the end, bit for bit.
- After each pair of steps the raw disk moves as much as a step does, by three threads each way, in 32 MiB direct
  transfers of a file of its own: read and written at once, or one after the other, whichever is faster. The step's time
  is divided by the larger of the two others, and the median of these ratios is printed.

With ``--autocast`` a forward and a backward under autocast make the gradients, and FP32 weights lie on the disk, too.

The growth of anonymous and locked memory of "disk" since before ``stream`` is sampled all the time, and compared with
what the run's own choice says, first step and the loading of state included. The page cache is not part of it.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

WIDTH = 4096
LAYER_NBYTES = WIDTH * WIDTH * 4
CHUNK = 32 << 20
THREADS = 3
BEFORE = 3  # steps: the first one makes state, and compiled code is compared meanwhile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.6, help="of weights; on the disk twice as many")
    parser.add_argument("--folder", help="where to put the scratch file (default: a temporary folder)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--run", choices=("memory", "disk"), help=argparse.SUPPRESS)
    parser.add_argument("--autocast", action="store_true", help="compute under autocast, with weights on the disk")
    options = parser.parse_args()
    layers = max(2, round(options.gigabytes * 1e9 / LAYER_NBYTES))
    with tempfile.TemporaryDirectory(prefix="state-on-disk-", dir=options.folder) as folder:
        if options.run is not None:
            return serve(options.run, layers, options.folder, options.autocast)
        workers = {name: Worker(name, options.gigabytes, folder, options.autocast) for name in ("memory", "disk")}
        nbytes = (3 if options.autocast else 2) * layers * LAYER_NBYTES
        times: dict[str, list[float]] = {"memory": [], "disk": [], "raw": []}
        for turn in range(BEFORE + options.repeats):
            taken = {name: worker.ask("step") for name, worker in workers.items()}
            taken["raw"] = raw(Path(folder) / "raw", nbytes)
            if turn >= BEFORE:
                for name, seconds in taken.items():
                    times[name].append(seconds)
        ends = {name: worker.ask("end") for name, worker in workers.items()}
    print(f"{layers * WIDTH * WIDTH / 1e6:.0f}e6 parameters, {nbytes / 1e9:.2f} GB read and written in a step")
    print("weights and state:", "equal, bit for bit" if ends["memory"]["bits"] == ends["disk"]["bits"] else "DIFFERENT")
    for name, seconds in times.items():
        print(f"{name}: {statistics.median(seconds):.2f} s, from {min(seconds):.2f} to {max(seconds):.2f}")
    ratios = [d / max(m, r) for m, d, r in zip(*times.values(), strict=True)]
    print(
        f"step on disk / max(step in memory, raw disk): {statistics.median(ratios):.2f}, {min(ratios):.2f} to "
        f"{max(ratios):.2f}"
    )
    found = ends["disk"]
    growth, there, planned = (found[name] / 1e6 for name in ("growth", "there", "planned"))
    print(f"anonymous and locked memory: the model's {there:.0f} MB grew by {growth:.0f} MB; planned {planned:.0f} MB")
    print(f"memory / planned: {(there + growth) / planned:.2f}")


class Worker:
    """A process that steps when it is asked to."""

    def __init__(self, name: str, gigabytes: float, folder: str, autocast: bool) -> None:
        command = [sys.executable, __file__, "--run", name, "--gigabytes", str(gigabytes), "--folder", folder]
        command += ["--autocast"] * autocast
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, what: str) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


def serve(name: str, layers: int, folder: str, autocast: bool) -> None:
    """Step a model whenever a line comes in, and say how long it took."""
    import sp_lightning
    from sp_lightning.autograd.autocast_weights import castable
    from sp_lightning.optim import native

    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    for layer in net:
        layer.weight.data = torch.empty(WIDTH, WIDTH).normal_(0, 0.02)
    there = layers * LAYER_NBYTES
    memory = Memory()
    options = {"disk": folder, "host_budget": "0B"} if name == "disk" else {}
    options["wire_dtype"] = "auto" if autocast else "as-is"
    optimizer = torch.optim.AdamW(net.parameters())
    with sp_lightning.stream(net, "cpu", window=1, units=["Linear"], **options) as handle:
        planned = 0
        if name == "disk":
            from sp_lightning.disk.placement import choose

            cast = castable(net) if autocast else ()
            placed = choose(handle.units, {}, 0, None, autocast, trains=True, spills=True, castable=cast)
            planned = placed.host.total
        for number, line in enumerate(sys.stdin):
            if line.strip() == "end":
                break
            if autocast:
                compute(net, number)
            else:
                give_gradients(net, number)
            begin = time.perf_counter()
            optimizer.step()
            native.LIBRARY.wait()
            seconds = time.perf_counter() - begin
            if number == 0:  # and loads what it has, as a run does that goes on from a checkpoint
                handle.state_loaded(optimizer, optimizer.param_groups[0], net[0].weight)
            print(json.dumps(seconds), flush=True)
        growth, planned = memory.end(), planned + handle.stats()["device_peak"]  # which is the CPU's memory, too
        digest = hashlib.sha256()
        for parameter in net.parameters():
            digest.update(parameter.detach().numpy().tobytes())
            for value in optimizer.state[parameter].values():
                digest.update(value.numpy().tobytes())
    print(json.dumps({"bits": digest.hexdigest(), "growth": growth, "planned": planned, "there": there}), flush=True)


def give_gradients(net: nn.Sequential, number: int) -> None:
    """Make gradients as a backward would, in memory that stays."""
    generator = torch.Generator().manual_seed(number)
    some = torch.empty(WIDTH).normal_(0, 1e-3, generator=generator)
    for index, layer in enumerate(net):
        if layer.weight.grad is None:
            layer.weight.grad = torch.empty(WIDTH, WIDTH)
        torch.mul(some.roll(index)[:, None], some[None], out=layer.weight.grad)


def compute(net: nn.Sequential, number: int) -> None:
    """Run forward and backward under autocast."""
    for layer in net:
        layer.weight.grad = None
    batch = torch.empty(8, WIDTH).normal_(0, 1, generator=torch.Generator().manual_seed(number))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = net(batch).float().square().mean()
    loss.backward()


class Memory:
    """The growth of this process's anonymous and locked memory, sampled by a thread."""

    def __init__(self) -> None:
        self._begin = self._most = self._now()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._ends.wait(0.005):
            self._most = max(self._most, self._now())

    @staticmethod
    def _now() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "VmLck:")))

    def end(self) -> int:
        self._ends.set()
        self._thread.join()
        return self._most - self._begin


def raw(path: Path, nbytes: int) -> float:
    """Read and write so many bytes directly; return the seconds."""
    new = not path.exists()
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    os.posix_fallocate(fd, 0, nbytes)
    buffers = [mmap.mmap(-1, CHUNK) for _ in range(2 * THREADS)]
    for buffer in buffers:
        buffer.madvise(mmap.MADV_HUGEPAGE)  # as the ring's: fewer pages to hold for each transfer
        buffer[:] = bytes(CHUNK)

    def move(call: Any, thread: int) -> None:
        buffer = buffers[thread]
        for begin in range(CHUNK * (thread % THREADS), nbytes, CHUNK * THREADS):
            call(fd, [memoryview(buffer)[: min(CHUNK, nbytes - begin)]], begin)

    if new:
        for thread in range(THREADS):
            move(os.pwritev, thread)
    ways = [(os.preadv, range(THREADS)), (os.pwritev, range(THREADS, 2 * THREADS))]
    with concurrent.futures.ThreadPoolExecutor(2 * THREADS) as threads:

        def timed(*given: Any) -> float:
            begin = time.perf_counter()
            for job in [threads.submit(move, call, thread) for call, of in given for thread in of]:
                job.result()
            return time.perf_counter() - begin

        seconds = min(timed(*ways), timed(ways[0]) + timed(ways[1]))
    os.close(fd)
    return seconds


if __name__ == "__main__":
    main()
