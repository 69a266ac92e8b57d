"""Train under a real limit of memory: does a host budget hold, with which bits, and what does it cost in time?

    python benchmarks/memory_limits.py [--parameters 1e9] [--folder DIR] [--steps 4] [--autocast] [--peer deepspeed]

A stack of layers with so many FP32 parameters, which lie in a file, is trained on a few tokens by AdamW on the CPU, by
processes of their own, one after another: in memory as a whole, and with ``disk=`` and a ``host_budget`` of a half and
of a quarter of what that took. Those with a budget save after half of the steps, are killed at a random time of the
next two, and another process resumes and ends. Each enters a memory cgroup of its own once it has imported its
libraries, so that all it takes from there on counts: anonymous and shared memory, locked or not. With a budget the
cgroup has a limit of 1.05 times the budget; the page cache, which the kernel gives up where memory is short, is within
it too. Where no cgroup can be made (that takes root), the memory is sampled from ``/proc``, that of the libraries
included, and nothing is limited.

Before each run the kernel drops what it has of the file from the page cache. Printed are, for each run: the most memory
beside its budget, the swap that was used, the seconds of a step (the median after the first, which makes state) beside
those in memory, the bytes that a step reads and writes, and whether weights and state are equal, bit for bit.

``--peer deepspeed`` trains the same weights on the same batches by DeepSpeed's ZeRO-Infinity as well, with weights and
state on the disk, without a limit and under the same limits, and its memory and time are printed beside those of the
run in memory. Its last loss has to be that of the others to four digits; its bits are its own. Other peers do not
train from a disk: accelerate's `disk_offload` serves inference.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

WIDTH = 4096
TOKENS = 8
OVER = 1.05  # times its budget is a run's limit
CGROUPS = Path("/sys/fs/cgroup")
PARTS = {"half": 2, "quarter": 4}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=1e9)
    parser.add_argument("--folder", help="where to put the files (default: a temporary folder)")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--autocast", action="store_true", help="compute under autocast in bfloat16")
    parser.add_argument("--peer", choices=["deepspeed"], help="train by this library as well")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run is not None:
        return train(json.loads(options.run))
    layers = max(2, round(options.parameters / WIDTH**2))
    with tempfile.TemporaryDirectory(prefix="memory-limits-", dir=options.folder) as folder:
        make(layers, Path(folder) / "weights.pt")
        print(f"{layers * WIDTH * WIDTH / 1e6:.0f}e6 parameters", flush=True)
        given = {"folder": folder, "steps": options.steps, "autocast": options.autocast}
        whole = measured(given, None)
        say("in memory", whole, whole)
        for name, part in PARTS.items():
            say(name, killed_and_resumed(given, whole["peak"] // part, whole["seconds"]), whole)
        for name, part in {"no limit": 0, **PARTS}.items() if options.peer else ():
            budget = whole["peak"] // part if part else None
            say(f"{options.peer}, {name}", measured({**given, "peer": options.peer}, budget), whole)


def make(layers: int, path: Path) -> None:
    """Write the weights to a file, in a process of its own: this one's memory stays small."""
    code = "import sys, torch; torch.manual_seed(0); layers, width = map(int, sys.argv[2:]); "
    code += "torch.save([torch.empty(width, width).normal_(0, 0.02) for _ in range(layers)], sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(path), str(layers), str(WIDTH)], check=True)


def killed_and_resumed(given: dict[str, Any], budget: int, seconds: float) -> dict[str, Any]:
    """Run a process that saves and is killed, and another one that resumes; return the most memory of both."""
    path = Path(given["folder"]) / "last.ckpt"
    given = {**given, "saves": str(path)}
    first = measured({**given, "dies": random.uniform(0, 2 * seconds)}, budget)
    if first["failed"] != -signal.SIGKILL or not path.exists():
        return first
    second = measured(given, budget)
    path.unlink()
    return {"saved": first["saved"], **second, "peak": max(first["peak"], second["peak"])}


def measured(given: dict[str, Any], budget: int | None) -> dict[str, Any]:
    """Run a process, in a cgroup with a limit if it has a budget, and return what it says, and its most memory."""
    drop(Path(given["folder"]) / "weights.pt")
    with cgroup(budget) as group:
        run = json.dumps({**given, "budget": budget, "group": None if group is None else str(group)})
        with subprocess.Popen([sys.executable, __file__, "--run", run], stdout=subprocess.PIPE, text=True) as process:
            memory = Memory(group, process.pid)
            assert process.stdout is not None
            lines = process.stdout.read().splitlines()
            taken = memory.end()
    said = json.loads(lines[-1]) if lines else {}
    if process.returncode:
        return {"budget": budget, **taken, **said, "failed": process.returncode}
    return {"budget": budget, "is_limited": group is not None, **taken, **said}


def drop(path: Path) -> None:
    """Have the kernel drop a file from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


@contextlib.contextmanager
def cgroup(budget: int | None) -> Iterator[Path | None]:
    """Make a memory cgroup with a limit; None where that is not possible."""
    is_second = (CGROUPS / "cgroup.controllers").exists()
    group = (CGROUPS if is_second else CGROUPS / "memory") / f"memory-limits-{os.getpid()}"
    try:
        group.mkdir()
        if budget is not None:
            limit = group / ("memory.max" if is_second else "memory.limit_in_bytes")
            limit.write_text(str(int(OVER * budget)))
        assert (group / "memory.stat").exists()
    except (OSError, AssertionError):
        with contextlib.suppress(OSError):
            group.rmdir()
        yield None
        return
    try:
        yield group
    finally:
        for _ in range(100):  # the kernel takes a moment to forget its processes
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.1)


class Memory:
    """The most anonymous and shared memory of a cgroup, or of a process, and its swap, sampled by a thread."""

    def __init__(self, group: Path | None, pid: int) -> None:
        self._group, self._pid = group, pid
        self._most: dict[str, int] = {"peak": 0, "swap": 0}
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._ends.wait(0.005):
            with contextlib.suppress(OSError):  # the process has ended
                for name, nbytes in self._now().items():
                    self._most[name] = max(self._most[name], nbytes)

    def _now(self) -> dict[str, int]:
        if self._group is None:
            lines = Path(f"/proc/{self._pid}/status").read_text().splitlines()
            found = {
                name: int(line.split()[0]) << 10 for name, _, line in (x.partition(":") for x in lines) if "kB" in line
            }
            return {"peak": found["RssAnon"] + found["RssShmem"], "swap": found["VmSwap"]}
        stat = dict(line.split() for line in (self._group / "memory.stat").read_text().splitlines())
        anonymous = int(stat["anon"]) if "anon" in stat else int(stat["rss"])
        shared = int(stat.get("shmem", 0))
        return {"peak": anonymous + shared, "swap": int(stat.get("swap", stat.get("swapcached", 0)))}

    def end(self) -> dict[str, int]:
        """End the samples."""
        self._ends.set()
        self._thread.join()
        return self._most


def train(given: dict[str, Any]) -> None:
    """Train, and say how."""
    way = with_deepspeed if "peer" in given else with_a_window
    print(json.dumps(way(given)))


def with_a_window(given: dict[str, Any]) -> dict[str, Any]:
    """Train by this library."""
    import torch
    from torch import nn

    from sp_lightning.handle import stream
    from sp_lightning.lightning.checkpoint_io import MappedCheckpointIO

    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])  # what it imports counts as libraries'
    enter(given)
    weights = torch.load(Path(given["folder"]) / "weights.pt", mmap=True)
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, device="meta") for _ in weights))
    for layer in net:
        layer.weight = nn.Parameter(weights.pop(0))
    optimizer = torch.optim.AdamW(net.parameters())
    options: dict[str, Any] = {"window": 1, "units": ["Linear"]}
    options["wire_dtype"] = "auto" if given["autocast"] else "as-is"
    if given["budget"] is not None:
        options |= {"disk": given["folder"], "host_budget": given["budget"]}
    seconds, losses, moved, saves = [], [], [], given.get("saves", "")
    is_resumed = os.path.exists(saves)
    with stream(net, "cpu", **options) as handle:
        if is_resumed:
            checkpoint = torch.load(saves, mmap=True)
            net.load_state_dict(checkpoint["weights"])
            optimizer.load_state_dict(checkpoint["state"])
            handle.loaded(optimizer)
            del checkpoint
        for number in range(given["steps"] // 2 * is_resumed, given["steps"]):
            before, begin = handle.stats(), time.perf_counter()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=given["autocast"]):
                loss = net(batch(number)).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            handle.finish_step()
            losses.append(loss.item())
            seconds.append(time.perf_counter() - begin)
            moved.append({name: handle.stats()[name] - before[name] for name in ("disk_read", "disk_written")})
            if saves and not is_resumed and number + 1 == given["steps"] // 2:
                begin = time.perf_counter()
                MappedCheckpointIO().save_checkpoint(
                    {"weights": net.state_dict(), "state": optimizer.state_dict()}, saves
                )
                print(json.dumps({"saved": os.path.getsize(saves) / (time.perf_counter() - begin)}), flush=True)
                threading.Timer(given["dies"], os.kill, (os.getpid(), signal.SIGKILL)).start()
        digest = hashlib.sha256()
        for parameter in net.parameters():
            digest.update(parameter.detach().numpy().tobytes())
            for value in optimizer.state[parameter].values():
                digest.update(value.numpy().tobytes())
    return {"seconds": statistics.median(seconds[1:]), "loss": losses[-1], **moved[-1], "bits": digest.hexdigest()}


def with_deepspeed(given: dict[str, Any]) -> dict[str, Any]:
    """Train by DeepSpeed, weights and state on the disk."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", DS_ACCELERATOR="cpu", MASTER_ADDR="127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    import deepspeed  # type: ignore[import-not-found]
    import torch
    from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder  # type: ignore[import-not-found]
    from torch import nn

    for builder in (AsyncIOBuilder(), CPUAdamBuilder()):
        builder.load()  # compiled once, and what that takes counts as libraries'
    defaults = torch.optim.AdamW([nn.Parameter(torch.zeros(1))]).defaults
    enter(given)
    config = deepspeed_config(given, {name: defaults[name] for name in ("lr", "betas", "eps", "weight_decay")})
    weights = torch.load(Path(given["folder"]) / "weights.pt", mmap=True)
    with deepspeed.zero.Init(config_dict_or_path=config):
        net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in weights))
    for layer in net:
        with deepspeed.zero.GatheredParameters(layer.weight, modifier_rank=0), torch.no_grad():
            layer.weight.copy_(weights.pop(0))
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
    seconds, losses = [], []
    for number in range(given["steps"]):
        begin = time.perf_counter()
        loss = engine(batch(number).to(torch.bfloat16 if given["autocast"] else None)).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - begin)
    return {"seconds": statistics.median(seconds[1:]), "loss": losses[-1]}


def deepspeed_config(given: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a config that keeps no more in memory than DeepSpeed needs for one layer after the other."""
    of_layer = WIDTH * WIDTH
    on_disk = {"device": "nvme", "nvme_path": given["folder"], "pin_memory": False}
    zero = {
        "stage": 3,
        "offload_param": {**on_disk, "buffer_count": 6, "buffer_size": of_layer, "max_in_cpu": 0},
        "offload_optimizer": {**on_disk, "buffer_count": 4},  # fewest that it takes: weight, gradient, two moments
        "sub_group_size": of_layer,
        "stage3_prefetch_bucket_size": 0,
        "stage3_max_live_parameters": of_layer,
        "stage3_max_reuse_distance": 0,
        "stage3_param_persistence_threshold": 0,
    }
    return {
        "train_micro_batch_size_per_gpu": TOKENS,
        "bf16": {"enabled": given["autocast"]},
        "optimizer": {"type": "AdamW", "params": arguments},
        "zero_optimization": zero,
        "aio": {"block_size": 1 << 20, "queue_depth": 8, "single_submit": False, "overlap_events": True},
    }


def enter(given: dict[str, Any]) -> None:
    """Count and limit this process's memory from here on."""
    if given["group"] is not None:
        (Path(given["group"]) / "cgroup.procs").write_text(str(os.getpid()))


def batch(number: int) -> Any:
    """Return the tokens of a step."""
    import torch

    return torch.empty(TOKENS, WIDTH).normal_(0, 1, generator=torch.Generator().manual_seed(number))


def say(name: str, found: dict[str, Any], whole: dict[str, Any]) -> None:
    if "failed" in found:
        print(f"{name}: ended with {found['failed']} at {found['peak'] / 1e9:.2f} GB", flush=True)
        return
    said = [f"{name}: {found['peak'] / 1e9:.2f} GB"]
    if found["budget"] is not None:
        limit = f", limit {OVER * found['budget'] / 1e9:.2f} GB" if found["is_limited"] else ", no limit"
        said.append(f"{found['peak'] / found['budget']:.3f} of its budget{limit}")
    said += [f"swap {found['swap'] / 1e9:.2f} GB", f"step {found['seconds'] / whole['seconds']:.2f} of that in memory"]
    if "bits" in found:
        said.append(f"reads {found['disk_read'] / 1e9:.2f} GB and writes {found['disk_written'] / 1e9:.2f} GB")
        if "saved" in found:
            said.append(f"saved at {found['saved'] / 1e9:.2f} GB/s, killed, resumed")
        said.append("bits equal" if found["bits"] == whole["bits"] else "bits DIFFERENT")
    else:
        is_same = math.isclose(found["loss"], whole["loss"], rel_tol=1e-4)
        said.append("the same last loss" if is_same else f"ANOTHER last loss: {found['loss']}, {whole['loss']}")
    print("; ".join(said), flush=True)


if __name__ == "__main__":
    main()
