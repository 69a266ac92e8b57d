"""Step optimizer state that lies on a disk: time beside the disk's own speed, bits, and memory.

    python benchmarks/state_on_disk.py [--gigabytes 1.6] [--folder DIR] [--repeats 5] [--autocast]
    python benchmarks/state_on_disk.py --trainer [--gigabytes 1.6] [--folder DIR]

A stack of layers with so many bytes of FP32 weights is stepped by AdamW, in processes of their own on the CPU, which
take turns, so that other load falls on all of them:

- "raw": the disk as a program without Python's lock finds it: direct transfers of a file of its own, written before,
  from private memory in huge pages (in 4 KiB pages, such as those of a shared mapping, a disk takes twice as long). Of
  all numbers of threads and sizes of transfers in `THREADS` and `SIZES` it uses those that were the fastest at the
  beginning, and both directions at once or one after the other, whichever is faster each time. ``dd`` reads and writes
  the same file as a cross-check.
- "ring": state goes through the ring that steps use, beside a thread that computes in pure Python; that of "raw"
  computes in another process meanwhile. The ratio of both speeds is printed for each direction: to "raw" with the
  ring's own number of threads and size of transfers, and to the fastest.
- "memory": steps with state in memory. "disk": with ``disk=``, ``host_budget="0B"``. Both have the same weights and
  state at the end, bit for bit. The time of a step on disk is divided by the larger of the time in memory and that in
  which "raw" moves as much as a step does.

The medians of the ratios of all turns are printed. With ``--autocast`` a forward and a backward under autocast make the
gradients, and FP32 weights lie on the disk, too.

The growth of anonymous and locked memory of "disk" since before ``stream`` is sampled all the time, and compared with
what the run's own choice says, first step and the loading of state included. The page cache is not part of it. With
``--trainer`` only that is measured, in a Trainer's run and in one that goes on from its checkpoint, and the same by
Fabric and by transformers' Trainer, each with a ``host_budget`` that it exceeds without the disk.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import hashlib
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from raw_disk import Growth, computing, private
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

WIDTH = 4096
LAYER_NBYTES = WIDTH * WIDTH * 4
THREADS = (1, 2, 3, 4)
SIZES = (4 << 20, 16 << 20, 32 << 20, 64 << 20)
SAMPLE = 512 << 20  # bytes to find the fastest of these with
COUNTED = {"read": "disk_read", "write": "disk_written"}
BEFORE = 3  # steps: the first one makes state, and compiled code is compared meanwhile
NARROW = 2048  # of layers in a Trainer's run: the window and gradients of the device are beside them, on the CPU
SPARE = 1.1  # times weights, gradients and buffers is a Trainer's host budget; in memory all takes twice as much


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.6, help="of weights; on the disk twice as many")
    parser.add_argument("--folder", help="where to put the scratch file (default: a temporary folder)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--trainer", action="store_true", help="measure the memory of Trainers' runs and of Fabric's")
    parser.add_argument("--autocast", action="store_true", help="compute under autocast, with weights on the disk")
    parser.add_argument("--run", choices=RUNS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    layers = max(2, round(options.gigabytes * 1e9 / LAYER_NBYTES))
    nbytes = on_disk(layers, options.autocast)
    if options.run is not None:
        return RUNS[options.run](options.run, layers, options.folder, options.autocast)
    with tempfile.TemporaryDirectory(prefix="state-on-disk-", dir=options.folder) as folder:
        if options.trainer:
            return in_trainers(options.gigabytes, folder)
        names = ("raw", "ring", "memory", "disk")
        workers = {name: Worker(name, options.gigabytes, folder, options.autocast) for name in names}
        print(workers["raw"].ask("choose"))
        times: dict[str, list[float]] = {}
        for turn in range(BEFORE + options.repeats):
            steps = {name: workers[name].ask("step") for name in ("memory", "disk")}
            taken = {name: step.pop("seconds") for name, step in steps.items()}
            assert not turn or steps["disk"] == nbytes, steps["disk"]  # the first step makes the state
            taken["raw"] = workers["raw"].ask("both")
            for way in ("read", "write"):
                taken[f"ring {way}"] = workers["ring"].ask(way)
                with computing():
                    taken[f"raw {way}"] = workers["raw"].ask(way)
                    taken[f"raw of the same sizes {way}"] = workers["raw"].ask(f"same {way}")
            if turn >= BEFORE:
                for name, seconds in taken.items():
                    times.setdefault(name, []).append(seconds)
        checked = dd(Path(folder) / "raw", nbytes)
        ends = {name: workers[name].ask("end") for name in ("memory", "disk")}
    gigabytes = {way: value / 1e9 for way, value in nbytes.items()}
    said = f"{gigabytes['read']:.2f} GB read and {gigabytes['write']:.2f} GB written in a step"
    print(f"{layers * WIDTH * WIDTH / 1e6:.0f}e6 parameters, {said}")
    print("weights and state:", "equal, bit for bit" if ends["memory"]["bits"] == ends["disk"]["bits"] else "DIFFERENT")
    for name, seconds in times.items():
        way = name.split()[-1]
        rate = f", {gigabytes[way] / statistics.median(seconds):.2f} GB/s" if way in gigabytes else ""
        print(f"{name}: {statistics.median(seconds):.2f} s, from {min(seconds):.2f} to {max(seconds):.2f}{rate}")
    print(checked)
    for way in ("read", "write"):
        for name in ("raw of the same sizes", "raw"):
            ratios = [raw / ring for raw, ring in zip(times[f"{name} {way}"], times[f"ring {way}"], strict=True)]
            print(f"ring / {name}, {way}, beside pure Python: {spread(ratios)}")
    ratios = [d / max(m, r) for m, d, r in zip(*(times[name] for name in ("memory", "disk", "raw")), strict=True)]
    print(f"step on disk / max(step in memory, raw disk): {spread(ratios)}")
    say_memory(ends["disk"])


def on_disk(layers: int, autocast: bool) -> dict[str, int]:
    """Count the bytes that a step reads and writes: weights, two moments, and gradients that a backward made."""
    return {"read": (4 if autocast else 3) * layers * LAYER_NBYTES, "write": 3 * layers * LAYER_NBYTES}


def spread(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}"


def say_memory(found: dict[str, Any]) -> None:
    growth, there, planned = (found[name] / 1e6 for name in ("growth", "there", "planned"))
    print(f"anonymous and locked memory: the model's {there:.0f} MB grew by {growth:.0f} MB; planned {planned:.0f} MB")
    print(f"memory / planned: {(there + growth) / planned:.2f}")


class Worker:
    """A process that does what it is asked for."""

    def __init__(self, name: str, gigabytes: float, folder: str, autocast: bool = False) -> None:
        command = [sys.executable, __file__, "--run", name, "--gigabytes", str(gigabytes), "--folder", folder]
        command += ["--autocast"] * autocast
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, what: str) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


def answer(found: Any) -> None:
    print(json.dumps(found), flush=True)


# ---- steps


def serve(name: str, layers: int, folder: str, autocast: bool) -> None:
    """Step a model whenever a line comes in, and say how long it took."""
    import sp_lightning
    from sp_lightning.optim import native

    net = stack(layers)
    torch.save([layer.weight.data for layer in net], Path(folder) / f"{name}.pt")
    weights = torch.load(Path(folder) / f"{name}.pt", mmap=True)  # which take no memory before the run
    for layer in net:
        layer.weight = nn.Parameter(weights.pop(0))
    memory = Growth()
    options = {"disk": folder, "host_budget": "0B"} if name == "disk" else {}
    options["wire_dtype"] = "auto" if autocast else "as-is"
    optimizer = torch.optim.AdamW(net.parameters())
    with sp_lightning.stream(net, "cpu", window=1, units=["Linear"], **options) as handle:
        planned = 0
        if name == "disk":
            planned = planned_nbytes(handle, autocast=autocast) + (0 if autocast else layers * LAYER_NBYTES)
        for number, line in enumerate(sys.stdin):
            if line.strip() == "end":
                break
            if autocast:
                compute(net, number)
            else:
                give_gradients(net, number)
            before, begin = handle.stats(), time.perf_counter()
            optimizer.step()
            native.LIBRARY.wait()
            seconds, after = time.perf_counter() - begin, handle.stats()
            if number == 0:  # and loads what it has, as a run does that goes on from a checkpoint
                handle.state_loaded(optimizer)
            answer({"seconds": seconds, **{way: after[name] - before[name] for way, name in COUNTED.items()}})
        growth, planned = memory.end(), planned + handle.stats()["device_peak"]  # which is the CPU's memory, too
        digest = hashlib.sha256()
        for parameter in net.parameters():
            digest.update(parameter.detach().numpy().tobytes())
            for value in optimizer.state[parameter].values():
                digest.update(value.numpy().tobytes())
    answer({"bits": digest.hexdigest(), "growth": growth, "planned": planned, "there": 0})


def stack(layers: int, width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(width, width, bias=False, device="meta") for _ in range(layers)))
    for layer in net:
        layer.weight = nn.Parameter(torch.empty(width, width).normal_(0, 0.02))
    return net


def planned_nbytes(handle: Any, budget: int = 0, autocast: bool = False) -> int:
    """Return the host memory that the run's own choice counts."""
    from sp_lightning.autograd.autocast_weights import castable
    from sp_lightning.disk.placement import choose

    cast = castable(handle.module) if autocast else ()
    return choose(handle.units, {}, budget, None, autocast, trains=True, spills=True, castable=cast).host.total


def compute(net: nn.Sequential, number: int) -> None:
    """Run forward and backward under autocast."""
    for layer in net:
        layer.weight.grad = None
    batch = torch.empty(8, WIDTH).normal_(0, 1, generator=torch.Generator().manual_seed(number))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = net(batch).float().square().mean()
    loss.backward()


def give_gradients(net: nn.Sequential, number: int) -> None:
    """Make gradients as a backward would, in memory that stays, and that no plan counts."""
    generator = torch.Generator().manual_seed(number)
    some = torch.empty(WIDTH).normal_(0, 1e-3, generator=generator)
    for index, layer in enumerate(net):
        if layer.weight.grad is None:
            layer.weight.grad = torch.empty(WIDTH, WIDTH)
        torch.mul(some.roll(index)[:, None], some[None], out=layer.weight.grad)


# ---- runs of a Trainer and of Fabric, and those that go on from their checkpoints


def in_trainers(gigabytes: float, folder: str) -> None:
    for name in list(RUNS)[list(RUNS).index("fit") :]:
        print(f"{name}:")
        found = Worker(name, gigabytes, folder).ask("")
        say_memory(found)
        print(f"of a host budget of {found['budget'] / 1e6:.0f} MB: {'kept' if found['kept'] else 'EXCEEDED'}")


def fit(name: str, layers: int, folder: str, autocast: bool) -> None:
    """Train two steps and save a checkpoint, or two more from there on; say how much memory it took."""
    import lightning as L
    from torch.utils.data import DataLoader

    from sp_lightning.lightning.strategy import SuperpipelineStrategy

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = stack(layers * (WIDTH // NARROW) ** 2, NARROW)

        def training_step(self, batch: Any) -> Any:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    class Planned(L.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.nbytes = planned_nbytes(trainer.strategy.handle, budget)

        def on_train_end(self, trainer: Any, module: Any) -> None:
            self.nbytes += peak_on_device(trainer.strategy.handle)

    budget = budget_of(layers)
    path, planned = Path(folder) / "last.ckpt", Planned()
    module = Module()
    memory = Growth()
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=SuperpipelineStrategy(disk=folder, host_budget=budget, window=1, wire_dtype="as-is", units=["Linear"]),
        max_epochs=1 if name == "fit" else 2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
        callbacks=[planned],
    )
    trainer.fit(module, DataLoader(batches(), batch_size=None), ckpt_path=None if name == "fit" else path)
    if name == "fit":
        trainer.save_checkpoint(path)
    say_kept(memory, layers, planned.nbytes)


def fit_by_fabric(name: str, layers: int, folder: str, autocast: bool) -> None:
    """Do the same in a loop of one's own with Fabric."""
    import lightning as L

    from sp_lightning.lightning.fabric import SuperpipelineFabricStrategy

    budget, path = budget_of(layers), Path(folder) / "last.ckpt"
    strategy = SuperpipelineFabricStrategy(
        disk=folder, host_budget=budget, window=1, wire_dtype="as-is", units=["Linear"]
    )
    net = stack(layers * (WIDTH // NARROW) ** 2, NARROW)
    memory = Growth()
    fabric = L.Fabric(accelerator="cpu", devices=1, strategy=strategy)
    net, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-4))
    state = {"net": net, "optimizer": optimizer}
    if name == "fabric resume":
        fabric.load(path, state)
    for batch in batches():
        optimizer.zero_grad()
        fabric.backward(net(batch).square().mean())
        optimizer.step()
    if name == "fabric fit":
        fabric.save(path, state)
    (handle,) = strategy.handles
    say_kept(memory, layers, planned_nbytes(handle, budget) + peak_on_device(handle))


def fit_by_transformers(name: str, layers: int, folder: str, autocast: bool) -> None:
    """Do the same with transformers' Trainer, whose checkpoint is in a folder."""
    import transformers

    import sp_lightning.hf

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = stack(layers * (WIDTH // NARROW) ** 2, NARROW)

        def forward(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.net(rows).square().mean()}

    resumes, budget = name == "transformers resume", budget_of(layers)
    rows = [{"rows": row} for batch in batches() for row in batch]
    net = Module()
    memory = Growth()
    options = {"disk": folder, "host_budget": budget, "window": 1, "wire_dtype": "as-is", "units": ["Linear"]}
    with sp_lightning.hf.streaming(**options) as stream:
        arguments = transformers.TrainingArguments(
            folder,
            per_device_train_batch_size=4,
            max_steps=4 if resumes else 2,
            save_steps=2,
            save_strategy="no" if resumes else "steps",
            use_cpu=True,
            dataloader_pin_memory=False,
            report_to=[],
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(net, arguments, train_dataset=rows)
        trainer.train(resume_from_checkpoint=str(Path(folder) / "checkpoint-2") if resumes else None)
        (handle,) = stream.handles
        planned = planned_nbytes(handle, budget) + peak_on_device(handle)
    say_kept(memory, layers, planned)


def budget_of(layers: int) -> int:
    """Return a host budget that a run exceeds without the disk."""
    from sp_lightning.disk.state_ring import BUFFER, BUFFERS

    return int(SPARE * (2 * layers * LAYER_NBYTES + BUFFERS * BUFFER))


def batches() -> list[torch.Tensor]:
    return [torch.randn(4, NARROW) for _ in range(2)]


def peak_on_device(handle: Any) -> int:
    """Return the most that a run took on the device, which is the CPU's memory, too."""
    stats = handle.stats()
    assert stats["disk_written"] > 0
    return int(stats["device_peak"])


def say_kept(memory: Growth, layers: int, planned: int) -> None:
    """Say what a run took, and whether it kept to its budget."""
    there, budget = layers * LAYER_NBYTES, budget_of(layers)
    found = {"growth": memory.end(), "there": there, "planned": planned, "budget": budget}
    answer({**found, "kept": found["growth"] + there <= budget})


# ---- the disk


class Raw:
    """Direct transfers of a file that was written before."""

    def __init__(self, path: Path, nbytes: dict[Any, int]) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        most = max(nbytes.values())
        os.posix_fallocate(self._fd, 0, most)
        self._nbytes = {os.pwritev: most}
        self._memory = [private(max(SIZES)) for _ in range(2 * max(THREADS))]
        self._fastest = dict.fromkeys((os.preadv, os.pwritev), (3, 32 << 20))
        self.time(os.pwritev)
        self._nbytes = nbytes

    def choose(self) -> str:
        """Find the fastest number of threads and size of transfers for each direction."""
        said = []
        for call in self._fastest:
            taken: dict[tuple[int, int], list[float]] = {}
            for _ in range(3):
                for way in itertools.product(THREADS, SIZES):
                    taken.setdefault(way, []).append(self._timed({call: way}, SAMPLE))
            self._fastest[call] = best = min(taken, key=lambda way: statistics.median(taken[way]))
            said.append(f"{call.__name__} by {best[0]} threads in {best[1] >> 20} MiB")
        return f"raw: {', '.join(said)}"

    def time(self, *calls: Any, way: tuple[int, int] | None = None) -> float:
        """Move a step's bytes in these directions, at once, the fastest way or by so many threads and bytes."""
        return self._timed({call: way or self._fastest[call] for call in calls})

    def _timed(self, ways: dict[Any, tuple[int, int]], at_most: int = sys.maxsize) -> float:
        memory = iter(self._memory)
        with concurrent.futures.ThreadPoolExecutor(2 * max(THREADS)) as threads:
            begin, jobs = time.perf_counter(), []
            for call, (count, size) in ways.items():
                nbytes = min(at_most, self._nbytes[call])
                begins, lock = iter(range(0, nbytes, size)), threading.Lock()
                jobs += [
                    threads.submit(self._move, call, next(memory), begins, lock, size, nbytes) for _ in range(count)
                ]
            for job in jobs:
                job.result()
            return time.perf_counter() - begin

    def _move(self, call: Any, memory: memoryview, begins: Iterator[int], lock: Any, size: int, nbytes: int) -> None:
        while True:
            with lock:
                begin = next(begins, None)
            if begin is None:
                return
            done, size = 0, min(size, nbytes - begin)
            while done < size:
                done += call(self._fd, [memory[done:size]], begin + done)


def raw(name: str, layers: int, folder: str, autocast: bool) -> None:
    from sp_lightning.disk.state_ring import BUFFER, READERS

    nbytes = on_disk(layers, autocast)
    disk = Raw(Path(folder) / "raw", {os.preadv: nbytes["read"], os.pwritev: nbytes["write"]})
    same = READERS, BUFFER
    calls: dict[str, Callable[[], Any]] = {
        "choose": disk.choose,
        "read": lambda: disk.time(os.preadv),
        "write": lambda: disk.time(os.pwritev),
        "same read": lambda: disk.time(os.preadv, way=same),
        "same write": lambda: disk.time(os.pwritev, way=same),
        "both": lambda: min(disk.time(os.preadv, os.pwritev), disk.time(os.preadv) + disk.time(os.pwritev)),
    }
    for line in sys.stdin:
        answer(calls[line.strip()]())


def ring(name: str, layers: int, folder: str, autocast: bool) -> None:
    """Read or write as much as a step does through the ring, beside a thread in pure Python."""
    from sp_lightning.core.telemetry import Counters
    from sp_lightning.disk.scratch_file import ScratchFile
    from sp_lightning.disk.state_ring import BUFFER, BlockRun, StateRing
    from sp_lightning.ranks.board import ONE_RANK

    file = ScratchFile(folder, ONE_RANK)
    ring = StateRing(file, BUFFER, Counters())
    nbytes = on_disk(layers, autocast)
    (tensor,) = file.tensors([torch.empty(max(nbytes.values()), dtype=torch.uint8)])
    place = file.place_of(tensor)
    assert place is not None
    runs = [BlockRun(place.offset + at, 0, min(BUFFER, place.nbytes - at)) for at in range(0, place.nbytes, BUFFER)]

    def read() -> None:
        with contextlib.closing(ring.portions((run, [run]) for run in runs[: nbytes["read"] // BUFFER])) as portions:
            for _, buffer in portions:
                ring.write(buffer, [])

    def write(count: int = nbytes["write"] // BUFFER) -> None:
        for run in runs[:count]:
            ring.write(ring.take(), [run])
        ring.drain()

    for buffer in ring._buffers:
        buffer.memory[:] = os.urandom(1 << 20) * (BUFFER >> 20)
    write(len(runs))
    for line in sys.stdin:
        with computing():
            begin = time.perf_counter()
            {"read": read, "write": write}[line.strip()]()
            seconds = time.perf_counter() - begin
        answer(seconds)


def dd(path: Path, nbytes: dict[str, int]) -> str:
    """Read and write the raw file once more by another program."""
    if shutil.which("dd") is None:
        return "there is no dd"
    rates = {}
    for way, flags in (
        ("read", [f"if={path}", "of=/dev/null", "iflag=direct"]),
        ("write", ["if=/dev/zero", f"of={path}", "oflag=direct", "conv=notrunc"]),
    ):
        begin, count = time.perf_counter(), nbytes[way] // (32 << 20)
        subprocess.run(["dd", *flags, "bs=32M", f"count={count}"], check=True, capture_output=True)
        rates[way] = count * (32 << 20) / 1e9 / (time.perf_counter() - begin)
    return f"dd, one thread: read {rates['read']:.2f} GB/s, write {rates['write']:.2f} GB/s"


RUNS: dict[str, Callable[[str, int, str, bool], None]] = {
    "memory": serve,
    "disk": serve,
    "raw": raw,
    "ring": ring,
    "fit": fit,
    "resume": fit,
    "fabric fit": fit_by_fabric,
    "fabric resume": fit_by_fabric,
    "transformers fit": fit_by_transformers,
    "transformers resume": fit_by_transformers,
}

if __name__ == "__main__":
    main()
