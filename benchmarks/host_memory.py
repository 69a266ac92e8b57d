"""Measure and predict the host memory of a whole process, by term and per parameter.

    python benchmarks/host_memory.py [--blocks 16] [--width 1024] [--device simgpu | cpu | cuda]

Each case trains a model of 537 MB of FP32 parameters with AdamW in its own process, and reads the process's resident
memory: before the model is made, its peak while the model is made and moved into slabs, and its peak in training. The
prediction is that of `sp_lightning.plan`. The simulated accelerator and the CPU use memory of the process itself: the
peak of what was allocated there is added to the prediction. Where the device is the CPU, its memory is mapped block by
block, as an accelerator's is: what is freed there may otherwise stay in the heap, by chance up to 230 MB.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "rigs"))

CASES = {
    "FP32": ("32-true", {}),
    "FP32, offloaded": ("32-true", {"activations": "offload"}),
    "autocast": ("bf16-mixed", {}),
    "master weights": ("bf16-true", {"master_weights": True}),
    "frozen but for the last block": ("32-true", {}),
}
STEPS = 3
DEVICE = "device (here the host)"
BATCH = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--device", choices=["simgpu", "cpu", "cuda"], default="simgpu")
    parser.add_argument("--case", choices=CASES, help="run only this case, in this process, and print JSON")
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(options)))
        return
    for case in CASES:
        command = [sys.executable, __file__, *sys.argv[1:], "--case", case]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        show(case, json.loads(done.stdout.splitlines()[-1]))


def show(case: str, found: dict[str, Any]) -> None:
    """Print the terms of a case, in bytes per parameter."""
    parameters, predicted = found["parameters"], sum(found["terms"].values())
    device = found["terms"].get(DEVICE, 0)
    print(f"{case}: {parameters / 1e6:.0f} M parameters")
    for term, nbytes in found["terms"].items():
        if nbytes:
            print(f"  {term:34} {nbytes / 1e6:8.1f} MB {nbytes / parameters:6.2f} bytes per parameter")
    peak = found["peak"]
    for name, nbytes in (("predicted", predicted), ("measured peak", peak), ("without the device", peak - device)):
        print(f"  {name:34} {nbytes / 1e6:8.1f} MB {nbytes / parameters:6.2f}")
    print(f"  measured / predicted               {found['peak'] / predicted:8.3f}")
    for name in ("made", "peak in setup", "after setup", "before the next step", "closed"):
        print(f"    resident: {name:24} {found[name] / 1e6:8.1f} MB {found[name] / parameters:6.2f}")


class Resident:
    """The growth of this process's resident memory."""

    def __init__(self) -> None:
        import psutil

        self._process = psutil.Process()
        self._first = self._process.memory_info().rss
        self.highest = 0
        self._ended = False
        threading.Thread(target=self._watch, daemon=True).start()

    def now(self) -> int:
        """Return the growth so far, in bytes."""
        resident: int = self._process.memory_info().rss - self._first
        self.highest = max(self.highest, resident)
        return resident

    def take_peak(self) -> int:
        """Return the peak since the last call, and begin a new one."""
        self.now()
        highest, self.highest = self.highest, 0
        return highest

    def _watch(self) -> None:
        while True:
            self.now()
            time.sleep(0.002)


def simulate() -> None:
    """Set up the simulated accelerator."""
    import importlib

    importlib.import_module("simgpu.lightning")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Train, and return the resident memory at each point."""
    import lightning as L
    import torch
    from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
    from torch import nn

    import sp_lightning

    if options.device == "simgpu":
        simulate()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(self.up(x).relu())

    class Model(L.LightningModule):
        def __init__(self, blocks: int, width: int) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

        def training_step(self, x: torch.Tensor, index: int) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x.square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad])

    def train(model: Model, strategy: Strategy, *callbacks: L.Callback) -> None:
        trainer = L.Trainer(
            strategy=strategy,
            accelerator=options.device,
            devices=1,
            max_steps=STEPS,
            precision=precision,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=list(callbacks),
        )
        dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
        batches = [torch.randn(BATCH, model.blocks[0].up.in_features, dtype=dtype) for _ in range(STEPS)]
        trainer.fit(model, torch.utils.data.DataLoader(batches, batch_size=None))

    found: dict[str, Any] = {}

    class Watch(L.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            found["after setup"] = resident.now()
            found["peak in setup"] = resident.take_peak()

        def on_train_batch_start(self, *_: Any) -> None:
            found["before the next step"] = resident.now()

        def on_train_end(self, trainer: Any, module: Any) -> None:
            found["peak"] = max(resident.take_peak(), found["peak in setup"])
            stats = trainer.strategy.handle.stats()
            found["device"] = stats["device_peak"]
            found["ours"] = stats["host_weight_bytes"] + stats["host_gradient_bytes"]

    device = torch.device("cpu") if options.device == "cpu" else torch.device(options.device, 0)
    precision, given = CASES[options.case]

    def make() -> Model:
        model = Model(options.blocks, options.width)
        if "frozen" in options.case:
            model.requires_grad_(False)
            model.blocks[-1].requires_grad_(True)
        return model

    batch = torch.randn(BATCH, options.width)
    settings = {"precision": precision, "machine": "h100", "device": options.device, "window": 2, **given}
    terms = sp_lightning.plan(make, batch, **settings).host_terms
    resident = Resident()
    # Load and start everything that is needed once: of the process, and compiled code with what it is compared with.
    train(Model(2, 8), SingleDeviceStrategy(device))
    train(Model(2, 256), sp_lightning.SuperpipelineStrategy(window=1, **given))
    resident = Resident()
    model = make()
    found["made"] = resident.take_peak()
    train(model, sp_lightning.SuperpipelineStrategy(window=2, **given), Watch())
    found["closed"] = resident.now()
    if options.device != "cuda":
        terms[DEVICE] = found["device"]
    found |= {"terms": terms, "parameters": sum(p.numel() for p in model.parameters())}
    return found


if __name__ == "__main__":
    main()
