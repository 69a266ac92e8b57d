"""The contenders, each used as its documentation says, and the process in which one of them takes a turn.

Libraries other than torch and Lightning are imported where they are used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import psutil
import shapes
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sp_lightning import SuperpipelineStrategy

OURS = "superpipeline"
WARM_UP = 2  # steps of a process that are not timed
BATCHES = 4  # different ones
RATE = 1e-4  # learning rate


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """The work of every contender."""

    model: str
    batch: int
    seq: int
    precision: str = "32-true"  # or "bf16-mixed", "bf16-true"
    fused: bool = False  # the optimizer's kernels
    clip: float | None = 1.0  # the gradients' global norm
    activations: str = "keep"  # of ours; others recompute their blocks if this does, and keep them otherwise
    steps: int = 5  # of a turn
    repetitions: int = 3
    device: str = "cpu"
    device_memory: int | None = None  # bytes that a process may take
    time_limit: float = 300  # seconds for a turn, its start included


class Work:
    """The parts of a turn, the same for every contender, and its clock."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.device = torch.device(setting.device, None if setting.device == "cpu" else 0)
        self.losses: list[Tensor] = []
        self.times: list[float] = []  # at the start of the first timed step, and after the last

    def module(self, peers: bool = True) -> nn.Module:
        """Make the model on the host, with the peers' recomputed blocks if the setting has them."""
        module = shapes.build(self.setting.model).train()
        if peers and "recompute" in self.setting.activations:
            for block in self.blocks(module):
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        return module

    def blocks(self, module: nn.Module) -> list[nn.Module]:
        """List the repeated blocks."""
        return [child for child in module.modules() if type(child).__name__ == shapes.BLOCK]

    def optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        """Make the optimizer."""
        return torch.optim.AdamW(module.parameters(), lr=RATE, fused=self.setting.fused or None)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Yield batches on the device; note when the first timed step begins and when the step after the last would."""
        generator, setting = torch.Generator().manual_seed(1), self.setting
        sizes = setting.model, setting.batch, setting.seq
        made = [shapes.inputs(*sizes, generator) for _ in range(BATCHES)]
        batches = [{name: tokens.to(self.device) for name, tokens in batch.items()} for batch in made]
        for number in range(WARM_UP + setting.steps + 1):
            if number in (WARM_UP, WARM_UP + setting.steps):
                if self.device.type != "cpu":
                    torch.accelerator.synchronize()
                self.times.append(time.perf_counter())
            yield batches[number % BATCHES]


# ---- contenders


def plain(work: Work) -> None:
    """Trainer(strategy="auto"): everything on the device, the optimizer too."""
    _with_trainer(work, SingleDeviceStrategy(device=work.device), work.module())


def superpipeline(work: Work, **options: Any) -> None:
    """Trainer(strategy=SuperpipelineStrategy(...)): weights, gradients and optimizer on the host."""
    strategy = SuperpipelineStrategy(device=work.device, **{"activations": work.setting.activations, **options})
    _with_trainer(work, strategy, work.module(peers=False))


def fsdp2(work: Work) -> None:
    """fully_shard of each block and of the rest, with CPUOffloadPolicy."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    module = work.module()
    module = module.bfloat16() if work.setting.precision == "bf16-true" else module
    with process_group(work.device):
        mixed = work.setting.precision == "bf16-mixed"
        options: dict[str, Any] = {
            "mesh": init_device_mesh(work.device.type, (1,)),
            "offload_policy": CPUOffloadPolicy(pin_memory=work.device.type != "cpu"),
            "mp_policy": MixedPrecisionPolicy(*((torch.bfloat16, torch.float32) if mixed else ())),
        }
        for part in (*work.blocks(module), module):
            fully_shard(part, **options)
        for buffer in module.buffers():
            buffer.data = buffer.data.to(work.device)
        optimizer = work.optimizer(module)
        for batch in work:
            with torch.autocast(work.device.type, torch.bfloat16, enabled=mixed):
                loss = module(**batch).loss
            loss.backward()
            if work.setting.clip is not None:
                nn.utils.clip_grad_norm_(module.parameters(), work.setting.clip)
            optimizer.step()
            optimizer.zero_grad()
            work.losses.append(loss.detach())


def deepspeed(work: Work) -> None:
    """ZeRO-3, parameters and optimizer on the host, DeepSpeedCPUAdam; bf16 keeps FP32 masters."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", DS_ACCELERATOR=work.device.type)
    import deepspeed as library

    with process_group(work.device):
        module, on_host = work.module(), {"device": "cpu", "pin_memory": work.device.type != "cpu"}
        optimizer = library.ops.adam.DeepSpeedCPUAdam(module.parameters(), lr=RATE, weight_decay=0.01)
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": work.setting.batch,
            "gradient_clipping": work.setting.clip or 0.0,
            "bf16": {"enabled": work.setting.precision != "32-true"},
            "zero_optimization": {"stage": 3, "offload_optimizer": on_host, "offload_param": on_host},
        }
        engine, *_ = library.initialize(model=module, optimizer=optimizer, config=config)
        for batch in work:
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            work.losses.append(loss.detach())


CONTENDERS: dict[str, Callable[..., None]] = {
    "plain": plain,
    OURS: superpipeline,
    "fsdp2": fsdp2,
    "deepspeed": deepspeed,
}


class _Task(L.LightningModule):
    """The model as a LightningModule."""

    def __init__(self, work: Work, module: nn.Module) -> None:
        super().__init__()
        self.work, self.module = work, module

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        loss: Tensor = self.module(**batch).loss
        self.work.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.work.optimizer(self)


def _with_trainer(work: Work, strategy: Strategy, module: nn.Module) -> None:
    trainer = L.Trainer(
        accelerator=work.device.type,
        devices=1,
        strategy=strategy,
        precision=work.setting.precision,  # type: ignore[arg-type]
        gradient_clip_val=work.setting.clip,
        max_epochs=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer.fit(_Task(work, module), work)


@contextlib.contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Run a process group of this process alone within this context."""
    import torch.distributed as dist

    own = dist.get_default_backend_for_device(device)
    backend = own if device.type == "cpu" else f"cpu:gloo,{device.type}:{own}"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


# ---- the process of a turn


def take_turn(setting: Setting, contender: str, options: dict[str, Any]) -> dict[str, Any]:
    """Do the work, and return the time of a step, the losses and the peaks of memory."""
    work, on_device = Work(setting), setting.device != "cpu"
    if on_device:
        torch.zeros(1, device=work.device)  # the host memory of the device's runtime counts for no contender
        if setting.device_memory is not None:
            share = setting.device_memory / torch.accelerator.get_memory_info()[1]
            torch.get_device_module(work.device).set_per_process_memory_fraction(min(1.0, share))
    before = psutil.Process().memory_info().rss
    CONTENDERS[contender](work, **options)
    peak = re.search(r"VmHWM:\s+(\d+)", pathlib.Path("/proc/self/status").read_text())
    return {
        "seconds": (work.times[1] - work.times[0]) / setting.steps,
        "losses": [float(loss) for loss in work.losses[: WARM_UP + setting.steps]],
        "device_peak": torch.accelerator.max_memory_allocated() if on_device else None,
        "reserved_peak": torch.accelerator.max_memory_reserved() if on_device else None,
        "host_peak": 1024 * int(peak[1]) - before if peak else None,
    }


def main() -> None:
    """Take the turn that the argument describes, and print a line of JSON; what libraries print goes to stderr."""
    with os.fdopen(os.dup(1), "w") as said:
        os.dup2(2, 1)
        job = json.loads(sys.argv[1])
        said.write(json.dumps(take_turn(Setting(**job.pop("setting")), **job)) + "\n")


if __name__ == "__main__":
    main()
