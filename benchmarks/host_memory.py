"""Host memory of a whole process, measured and predicted, by term and by parameter.

    python benchmarks/host_memory.py [--blocks 16] [--width 1024] [--device simgpu | cpu | cuda]

Each case trains a model of 537 MB of FP32 parameters in a process of its own, with AdamW, and reads the process's
resident memory: before the model is made, at its highest while the model is made and taken over, and at its highest in
training. Predicted is what `sp_lightning.plan` says. The memory of the simulated accelerator is this process's,
as is that of the CPU, and is added: as much as was allocated there at most.
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

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

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
    parser.add_argument("--case", choices=CASES, help="only this one, as JSON, in this process")
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(options)))
        return
    for case in CASES:
        command = [sys.executable, __file__, *sys.argv[1:], "--case", case]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        show(case, json.loads(done.stdout.splitlines()[-1]))


def show(case: str, found: dict[str, Any]) -> None:
    """A table of the terms of a case, in bytes per parameter."""
    parameters, predicted = found["parameters"], sum(found["terms"].values())
    device = found["terms"].get(DEVICE, 0)
    print(f"{case}: {parameters / 1e6:.0f} M parameters")
    for term, nbytes in found["terms"].items():
        if nbytes:
            print(f"  {term:34} {nbytes / 1e6:8.1f} MB {nbytes / parameters:6.2f} bytes per parameter")
    peak = found["peak"]
    for name, nbytes in (("predicted", predicted), ("measured at most", peak), ("without the device", peak - device)):
        print(f"  {name:34} {nbytes / 1e6:8.1f} MB {nbytes / parameters:6.2f}")
    print(f"  measured / predicted               {found['peak'] / predicted:8.3f}")
    for name in ("made", "taken over at most", "taken over", "before the next step", "closed"):
        print(f"    resident: {name:24} {found[name] / 1e6:8.1f} MB {found[name] / parameters:6.2f}")


class Resident:
    """The resident memory of this process, beyond what it was at first."""

    def __init__(self) -> None:
        import psutil

        self._process = psutil.Process()
        self._first = self._process.memory_info().rss
        self.highest = 0
        self._ended = False
        threading.Thread(target=self._watch, daemon=True).start()

    def now(self) -> int:
        """Bytes."""
        resident: int = self._process.memory_info().rss - self._first
        self.highest = max(self.highest, resident)
        return resident

    def highest_since(self) -> int:
        """The most since the last time that this was asked."""
        self.now()
        highest, self.highest = self.highest, 0
        return highest

    def _watch(self) -> None:
        while True:
            self.now()
            time.sleep(0.002)


def simulate() -> None:
    """The simulated accelerator, which is told of slabs as CUDA is."""
    import importlib

    import fake_cudart
    import pytest

    importlib.import_module("simgpu.lightning")
    fake_cudart.install(pytest.MonkeyPatch())


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Trains, and returns what was resident when."""
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
            found["taken over"] = resident.now()
            found["taken over at most"] = resident.highest_since()

        def on_train_batch_start(self, *_: Any) -> None:
            found["before the next step"] = resident.now()

        def on_train_end(self, trainer: Any, module: Any) -> None:
            found["peak"] = max(resident.highest_since(), found["taken over at most"])
            stats = trainer.strategy.handle.stats()
            found["device"], found["ours"] = stats["device_peak"], stats["host_bytes"]

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
    terms = vars(sp_lightning.plan(make, batch, **settings).host)
    resident = Resident()
    train(Model(2, 8), SingleDeviceStrategy(device))  # loads and starts all that it does when first needed
    resident = Resident()
    model = make()
    found["made"] = resident.highest_since()
    train(model, sp_lightning.SuperpipelineStrategy(window=2, device=device, **given), Watch())
    found["closed"] = resident.now()
    if options.device != "cuda":
        terms[DEVICE] = found["device"]
    found |= {"terms": terms, "parameters": sum(p.numel() for p in model.parameters())}
    return found


if __name__ == "__main__":
    main()
