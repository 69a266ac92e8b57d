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
import tempfile
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

import sp_lightning
import sp_lightning.hf
from sp_lightning import SuperpipelineStrategy
from sp_lightning.host.telemetry import LANES
from sp_lightning.observe.report import typical

OURS = "superpipeline"
WARM_UP = 2  # steps of a process that are not timed
BATCHES = 4  # different ones
RATE = 1e-4  # learning rate
NEW_TOKENS = 32  # of an answer
DOORS = ("lightning", "transformers", "forward", "generate")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """The work of every contender."""

    model: str
    batch: int
    seq: int
    precision: str = "32-true"  # or "bf16-mixed", "bf16-true"
    fused: bool = False  # the optimizer's kernels
    clip: float | None = 1.0  # the gradients' global norm
    accumulate: int = 1  # batches of a step
    door: str = "lightning"  # one of DOORS: whose Trainer trains, or how the model is called where none does
    rank: int = 0  # of adapters, which train alone
    activations: str = "keep"  # of ours; others recompute their blocks if this does, and keep them otherwise
    steps: int = 5  # of a turn
    repetitions: int = 3
    device: str = "cpu"
    device_memory: int | None = None  # bytes that a process of ours may take; others have all
    timeline: str | None = None  # a folder for one step of ours, lane by lane
    time_limit: float = 300  # seconds for a turn, its start included


class Work:
    """The parts of a turn, the same for every contender, and its clock."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.device = torch.device(setting.device, None if setting.device == "cpu" else 0)
        self.warm_up = WARM_UP if setting.door in ("lightning", "transformers") else 1
        self.losses: list[Tensor] = []
        self.times: list[float] = []  # at the start of the first timed step, and after the last
        self.moved: list[int] = []  # bytes of weights up by then
        self.bytes_up: Callable[[], int] = lambda: 0
        self.figures: dict[str, Any] = {}  # of this strategy, beside those of all

    def module(self, peers: bool = True) -> nn.Module:
        """Make the model on the host, with the peers' recomputed blocks if the setting has them."""
        module = shapes.build(self.setting.model, self.setting.rank)
        if self.setting.door in ("forward", "generate"):
            return module.to(torch.bfloat16 if self.setting.precision == "bf16-true" else torch.float32).eval()
        if peers and "recompute" in self.setting.activations:
            for block in self.blocks(module):
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        return module.train()

    def blocks(self, module: nn.Module) -> list[nn.Module]:
        """List the repeated blocks."""
        return [child for child in module.modules() if type(child).__name__ in shapes.BLOCKS]

    def optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        """Make the optimizer."""
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=RATE, fused=self.setting.fused or None)

    def batches(self) -> list[dict[str, Tensor]]:
        """Make the batches on the host."""
        generator, setting = torch.Generator().manual_seed(1), self.setting
        return [shapes.inputs(setting.model, setting.batch, setting.seq, generator) for _ in range(BATCHES)]

    def begin(self, step: int) -> None:
        """Note the time before a step, if it is the first that is timed, or would follow the last."""
        if step in (self.warm_up, self.warm_up + self.setting.steps):
            if self.device.type != "cpu":
                torch.accelerator.synchronize()
            self.times.append(time.perf_counter())
            self.moved.append(self.bytes_up())

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Yield batches on the device; note when the first timed step begins and when the step after the last would."""
        batches = [{name: value.to(self.device) for name, value in batch.items()} for batch in self.batches()]
        for step in range(self.warm_up + self.setting.steps + 1):
            self.begin(step)
            for number in range(step * self.setting.accumulate, (step + 1) * self.setting.accumulate):
                yield batches[number % BATCHES]


# ---- contenders


def plain(work: Work) -> None:
    """Everything on the device, the optimizer too."""
    if work.setting.door == "lightning":
        _with_lightning(work, SingleDeviceStrategy(device=work.device), work.module())
    elif work.setting.door == "transformers":
        _with_transformers(work, work.module())
    else:
        _called(work, work.module().to(work.device))


def superpipeline(work: Work, **options: Any) -> None:
    """Weights, gradients and optimizer on the host; each door as its page in docs/ says."""
    module = work.module(peers=False)
    options = {"activations": work.setting.activations, **options}
    if work.setting.door == "lightning":
        _with_lightning(work, SuperpipelineStrategy(**options), module)
    elif work.setting.door == "transformers":
        with sp_lightning.hf.streaming(**options):
            _with_transformers(work, module)
    else:
        with sp_lightning.stream(module, work.device, **options) as handle:
            work.bytes_up = lambda: handle.stats()["bytes_up"]
            _called(work, module)


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
        _loop(work, module, work.optimizer(module))


def torchao(work: Work) -> None:
    """CPUOffloadOptimizer: weights and gradients on the device, AdamW and its state on the host; it cannot clip."""
    from torchao.optim import CPUOffloadOptimizer

    module = work.module().to(work.device)
    _loop(work, module, CPUOffloadOptimizer(module.parameters(), lr=RATE, weight_decay=0.01), clips=False)


def _loop(work: Work, module: nn.Module, optimizer: torch.optim.Optimizer, clips: bool = True) -> None:
    mixed = work.setting.precision == "bf16-mixed"
    for batch in work:
        with torch.autocast(work.device.type, torch.bfloat16, enabled=mixed):
            loss = module(**batch).loss
        loss.backward()
        if clips and work.setting.clip is not None:
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
    "torchao": torchao,
}


# ---- doors


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


class _Recording(L.Callback):
    """Records the timed steps of a streamed run; says what a step's time went to."""

    def __init__(self, work: Work) -> None:
        self.work = work

    def on_train_batch_start(self, trainer: L.Trainer, task: L.LightningModule, batch: Any, index: int) -> None:
        if index == self.work.warm_up * self.work.setting.accumulate:
            self.recorder = trainer.strategy.handle.record()  # type: ignore[attr-defined]

    def on_train_end(self, trainer: L.Trainer, task: L.LightningModule) -> None:
        trainer.strategy.handle.stop_recording()  # type: ignore[attr-defined]
        steps = [step for step in self.recorder.steps if step.trains]
        step = typical(steps)
        self.work.figures["causes_s"] = step.causes()
        self.work.figures["lanes_s"] = {lane: step.busy(lane) for lane in LANES}
        if self.work.setting.timeline is not None:
            from sp_lightning.observe.timeline import Timeline

            Timeline.of(self.work.setting.model, steps[:2], steps, 0.0).write(pathlib.Path(self.work.setting.timeline))


def _with_lightning(work: Work, strategy: Strategy, module: nn.Module) -> None:
    trainer = L.Trainer(
        accelerator=work.device.type,
        devices=1,
        strategy=strategy,
        precision=work.setting.precision,  # type: ignore[arg-type]
        gradient_clip_val=work.setting.clip,
        accumulate_grad_batches=work.setting.accumulate,
        max_epochs=1,
        callbacks=[_Recording(work)] if isinstance(strategy, SuperpipelineStrategy) else [],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer.fit(_Task(work, module), work)


def _with_transformers(work: Work, module: nn.Module) -> None:
    """Train by Hugging Face's Trainer with its defaults: fused AdamW, clipped at 1."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Clock(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            work.begin(state.global_step)

    class Reader(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            found = super().compute_loss(*args, **kwargs)
            work.losses.append((found[0] if isinstance(found, tuple) else found).detach())
            return found

    setting = work.setting
    steps = work.warm_up + setting.steps + 1
    batches = work.batches() * steps  # so that no epoch ends
    rows = [dict(zip(batch, row, strict=True)) for batch in batches for row in zip(*batch.values(), strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=setting.batch,
            max_steps=steps,
            bf16=setting.precision == "bf16-mixed",
            use_cpu=setting.device == "cpu",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        Reader(module, arguments, train_dataset=rows, callbacks=[Clock()]).train()


@torch.no_grad()
def _called(work: Work, module: nn.Module) -> None:
    """Call the model, or let it answer, without gradients; what is kept as a loss is to be equal."""
    for batch in work:
        if work.setting.door == "forward":
            work.losses.append(module(**batch).loss)
        else:
            tokens, length = batch["input_ids"], {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
            real = torch.ones_like(tokens)
            answer = module.generate(tokens, attention_mask=real, do_sample=False, pad_token_id=0, **length)
            work.losses.append(answer[:, -NEW_TOKENS:].double().sum())


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
        if setting.device_memory is not None and contender == OURS:
            share = setting.device_memory / torch.accelerator.get_memory_info()[1]
            torch.get_device_module(work.device).set_per_process_memory_fraction(min(1.0, share))
    before = psutil.Process().memory_info().rss
    CONTENDERS[contender](work, **options)
    peak = re.search(r"VmHWM:\s+(\d+)", pathlib.Path("/proc/self/status").read_text())
    return {
        "seconds": (work.times[1] - work.times[0]) / setting.steps,
        "losses": [float(loss) for loss in work.losses[: setting.accumulate * (work.warm_up + setting.steps)]],
        "device_peak": torch.accelerator.max_memory_allocated() if on_device else None,
        "reserved_peak": torch.accelerator.max_memory_reserved() if on_device else None,
        "host_peak": 1024 * int(peak[1]) - before if peak else None,
        "bytes_up": (work.moved[1] - work.moved[0]) / setting.steps,
        **work.figures,
    }


def main() -> None:
    """Take the turn that the argument describes, and print a line of JSON; what libraries print goes to stderr."""
    with os.fdopen(os.dup(1), "w") as said:
        os.dup2(2, 1)
        job = json.loads(sys.argv[1])
        said.write(json.dumps(take_turn(Setting(**job.pop("setting")), **job)) + "\n")


if __name__ == "__main__":
    main()
