"""Measure the host memory of all ranks together, by phase, and compare it with what must exist once.

    python benchmarks/ranks_memory.py [--ranks 1 2 4] [--blocks 16] [--width 1024]

Each case trains a model of 537 MB of FP32 parameters with AdamW on the CPU, which is each rank's device, and sums the
proportional set size of all ranks (``/proc/PID/smaps_rollup``: a page that four processes map counts a quarter in
each): its growth since before the model was made. The ranks stop for it, so that nothing changes meanwhile. Pages of
files are left out: libtorch's alone are several hundred MB, and of those a rank's share grows when any other process
of the machine that maps them ends. Weights, gradients and state lie in none: shared ones are memory files.

Expected is what a plan counts (unit_numbers.py), in bytes per parameter: 4 for the weights, 4 for the gradients
and 8 for the state, once, and in each rank the gradients of the units that are on their way to their owners; where they
are accumulated, 4 more in each rank. Beside it is what computes in each rank: a window of units. Where the
CPU computes, its memory is mapped block by block, as an accelerator's is (host_memory.py).

In the table, "made" is N copies: a model that ``__init__`` makes is each rank's own until the run begins. The case
``configure_model`` makes it on the meta device in all ranks, and has none.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CASES = ("made in __init__", "configure_model", "resumed", "accumulated", "clipped")
STEPS = 5  # two of them shrink the boxes
BATCH = 4
MAPPED = 1 << 22


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--case", choices=CASES, help="run only this case")
    parser.add_argument("--rank", type=int, help="be this rank of a run, and print JSON")
    options = parser.parse_args()
    if options.rank is not None:
        measure(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        for size in options.ranks:
            for case in [options.case] if options.case else CASES:
                show(size, case, run(size, case, options.blocks, options.width, folder))


def run(size: int, case: str, blocks: int, width: int, folder: str) -> dict[str, Any]:
    """Run a case on so many ranks; return what the first one found."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(size):
        command = [sys.executable, __file__, "--ranks", str(size), "--blocks", str(blocks), "--width", str(width)]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "LOCAL_RANK": str(rank),
            "NODE_RANK": "0",
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        command += ["--case", case, "--rank", str(rank)]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=folder))
    said = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError(f"a rank failed: {[process.returncode for process in processes]}")
    found: dict[str, Any] = json.loads(said[0].splitlines()[-1])
    return found


def show(size: int, case: str, found: dict[str, Any]) -> None:
    """Print the terms and the phases of a case, in bytes per parameter."""
    count = found["parameters"]
    print(f"{size} ranks, {case}: {count / 1e6:.0f} M parameters")
    for name, terms in found["expected"].items():
        for term, nbytes in terms.items():
            print(f"  {name:24} {term:34} {nbytes / 1e6:8.1f} MB {nbytes / count:6.2f}")
    for phase, nbytes in found["phases"].items():
        expected = sum(found["expected"].get(phase, {}).values())
        share = f"  measured / expected {nbytes / expected:6.3f}" if expected else ""
        print(f"  {phase:24} {'measured':34} {nbytes / 1e6:8.1f} MB {nbytes / count:6.2f}{share}")


def proportional(process: int) -> int:
    """Read the proportional set size of a process without the pages of files, in bytes."""
    with open(f"/proc/{process}/smaps_rollup") as rollup:
        return sum(1024 * int(line.split()[1]) for line in rollup if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


def measure(options: argparse.Namespace) -> None:
    """Train on one rank; the first one prints the memory of all at each phase."""
    import lightning as L
    import torch
    import torch.distributed as dist
    from torch import nn

    import sp_lightning
    from sp_lightning.core import malloc
    from sp_lightning.core.unit_numbers import UnitHostBytes, host_bytes
    from sp_lightning.ranks.exchange import AHEAD

    (size,) = options.ranks
    malloc.LARGEST = MAPPED
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(self.up(x).relu())

    class Model(L.LightningModule):
        def __init__(self, blocks: int, width: int, late: bool) -> None:
            super().__init__()
            self.sizes = blocks, width
            self.blocks = None if late else self.make()

        def make(self) -> nn.ModuleList:
            blocks, width = self.sizes
            return nn.ModuleList(Block(width) for _ in range(blocks))

        def configure_model(self) -> None:
            if self.blocks is None:
                with torch.device("meta"):
                    self.blocks = self.make()

        def training_step(self, x: torch.Tensor, index: int) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x.square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), foreach=False)

    def everywhere() -> int:
        """Sum the memory of all ranks while they stop."""
        if size == 1:
            return proportional(os.getpid())
        processes: list[Any] = [None] * size
        dist.all_gather_object(processes, os.getpid())
        total = sum(map(proportional, processes)) if options.rank == 0 else 0
        dist.barrier()
        return total

    phases: dict[str, int] = {}
    first = 0

    def note(phase: str) -> None:
        phases[phase] = everywhere() - first

    class Watch(L.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            note("at the start")

        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            note("after backward" if trainer.global_step > done else "after the first backward")

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            note("in the run")

    def train(model: Model, checkpoint: str | None, steps: int, *callbacks: L.Callback) -> L.Trainer:
        trainer = L.Trainer(
            strategy=sp_lightning.SuperpipelineStrategy(window=1, units=["Block"]),
            accelerator="cpu",
            devices=size,
            max_steps=steps,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=list(callbacks),
            accumulate_grad_batches=2 if options.case == "accumulated" else 1,
            gradient_clip_val=0.1 if options.case == "clipped" else None,
        )
        batches = [torch.randn(BATCH, model.sizes[1]) for _ in range(4 * STEPS * size)]
        before = dict(os.environ)
        trainer.fit(model, torch.utils.data.DataLoader(batches, batch_size=None), ckpt_path=checkpoint)
        os.environ.update(before)
        return trainer

    train(Model(2, 256, False), None, 2)  # starts everything that is needed once
    late = options.case == "configure_model"
    path = None
    done = 0
    if options.case == "resumed":
        path = os.path.abspath(f"of-{size}.ckpt")
        trainer = train(Model(options.blocks, options.width, False), None, 1)
        trainer.save_checkpoint(path)
        trainer.strategy.handle = None
        done = 1
        del trainer
    import gc

    gc.collect()
    malloc.freed(malloc.ENOUGH)  # the holes that imports left: else they are given back while weights move
    first = everywhere()
    model = Model(options.blocks, options.width, late)
    note("made")
    trainer = train(model, path, done + STEPS, Watch())
    stats = trainer.strategy.handle.stats()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    units = [UnitHostBytes.of(block.parameters()) for block in model.blocks]
    window = {"windows of the ranks": size * units[0].weights}
    if size == 1:
        window["a unit's gradients"] = units[0].trained

    def planned(own_gradients: bool, states: int = 2) -> dict[str, int]:
        terms = host_bytes(units, states=states).of_ranks(size, (AHEAD + 1) * units[0].trained, own_gradients)
        return {name: nbytes for name, nbytes in asdict(terms).items() if nbytes}

    own_gradients = trainer.accumulate_grad_batches > 1
    run = planned(trainer.strategy.writes_gradients)
    expected = {
        "at the start": {name: run[name] for name in ("weights", "optimizer") if path or name == "weights"},
        "after the first backward": planned(own_gradients, 2 if path else 0) | window,
        "after backward": planned(own_gradients) | window,
        "in the run": run | window,
    }
    if options.rank == 0:
        print(json.dumps({"phases": phases, "expected": expected, "parameters": parameters, "stats": str(stats)}))


if __name__ == "__main__":
    main()
