"""The contenders. Each does the work as its users would: setup, then a step for every batch of its turns.

Libraries other than torch and Lightning are imported where they are used: a contender whose ``needs`` are not installed
is never started.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor, nn

from ..errors import UnsupportedError
from ..lightning.strategy import SuperpipelineStrategy
from ..memory.partition import partition
from ..ranks.exchange import tree_hook
from .entries import OURS
from .setting import Setting
from .turns import Turns
from .work import Work


class Contender(Protocol):
    """A way to do the work."""

    how: str  # one sentence, with what it has to do differently
    needs: tuple[str, ...]  # libraries

    def run(self, work: Work, turns: Turns) -> None:
        """Do the whole work; return when there are no more batches."""


class _TreeDDP(DDPStrategy):
    """Lightning's DDP with the hook that adds in the order of several nodes, also where computing is on the host."""

    def __init__(self, local: int) -> None:
        super().__init__()
        self._local = local

    def configure_ddp(self) -> None:
        super().configure_ddp()
        assert isinstance(self.model, nn.parallel.DistributedDataParallel)
        self.model.register_comm_hook(self._local, tree_hook)


class Plain:
    """Lightning's strategy for one device, or for several."""

    how = (
        "Trainer(strategy='auto'), with several devices 'ddp', with several nodes that with tree_hook: everything on "
        "each device, the optimizer too"
    )
    needs: tuple[str, ...] = ()

    def run(self, work: Work, turns: Turns) -> None:
        """Do the work with a Trainer."""
        setting = work.setting
        several = _TreeDDP(setting.devices) if setting.nodes > 1 else DDPStrategy()
        strategy = several if setting.ranks > 1 else SingleDeviceStrategy(device=work.device)
        with_trainer(work, turns, strategy, work.checkpointed_module())


class Superpipeline:
    """Lightning with this package's strategy."""

    how = "Trainer(strategy=SuperpipelineStrategy(...)): weights, gradients and optimizer on the host"
    needs: tuple[str, ...] = ()

    def __init__(self, window: int | str, **options: Any) -> None:
        self.window = window
        self.options = options

    def run(self, work: Work, turns: Turns) -> None:
        """Do the work with a Trainer."""
        module = work.module()
        window = len(partition(module)) if self.window == "all" else self.window
        options: dict[str, Any] = {"activations": work.setting.activations, **self.options, "window": window}
        strategy = SuperpipelineStrategy(device=work.device if work.setting.ranks == 1 else None, **options)
        turns.details = lambda: strategy.handle.stats() if strategy.handle else {}
        with_trainer(work, turns, strategy, module)


class Fsdp2:
    """torch's sharding with CPU offload."""

    how = (
        "fully_shard of each block and of the rest with CPUOffloadPolicy, a shard for each device; "
        "bf16-mixed is MixedPrecisionPolicy(param_dtype=bfloat16)"
    )
    needs: tuple[str, ...] = ()

    def run(self, work: Work, turns: Turns) -> None:
        """Do the work in a loop."""
        if work.setting.answer:
            raise UnsupportedError("fully_shard gathers weights for a forward of the whole module, no answer is one")
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        module = work.module_for_loop()
        with process_group(work.device, work.rank, work.setting.ranks):
            options: dict[str, Any] = {
                "mesh": init_device_mesh(work.device.type, (work.setting.ranks,)),
                "offload_policy": CPUOffloadPolicy(pin_memory=work.device.type != "cpu"),
            }
            if work.setting.precision == "bf16-mixed":
                options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
            for part in (*work.blocks(module), module):
                fully_shard(part, **options)
            for buffer in module.buffers():
                buffer.data = buffer.data.to(work.device)
            with_loop(work, turns, module, None if work.setting.inference else work.optimizer(module.parameters()))


class DeepSpeed:
    """DeepSpeed's engine, with parameters and optimizer on the host."""

    needs: tuple[str, ...] = ("deepspeed",)

    def __init__(self, stage: int = 3, superoffload: bool = False) -> None:
        self.stage = stage
        self.superoffload = superoffload
        what = "optimizer" if stage < 3 else "parameters and optimizer"
        how = f"ZeRO-{stage}, {what} on the host, DeepSpeedCPUAdam for AdamW; bf16 keeps FP32 masters"
        self.how = how + ", super_offload" * superoffload

    def run(self, work: Work, turns: Turns) -> None:
        """Train in a loop over the engine."""
        refuse(work.setting, "DeepSpeed")
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", DS_ACCELERATOR=work.device.type)
        with process_group(work.device):
            import deepspeed  # type: ignore[import-not-found]

            module = work.checkpointed_module()
            sgd = {"optimizer": work.optimizer(module.parameters())} if work.setting.optimizer == "sgd" else {}
            engine, *_ = deepspeed.initialize(
                model=module, model_parameters=module.parameters(), config=self.config(work), **sgd
            )
            for batch in turns:
                loss = engine(**self.to_device(work, batch))
                engine.backward(loss)
                engine.step()
                turns.add_loss(loss)

    def to_device(self, work: Work, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Move a batch to the device, in the type of the engine's weights."""
        half = None if work.setting.precision == "32-true" else torch.bfloat16
        return {name: t.to(work.device, half if t.is_floating_point() else None) for name, t in batch.items()}

    def config(self, work: Work) -> dict[str, Any]:
        """Return DeepSpeed's config."""
        setting = work.setting
        pinned = work.device.type != "cpu"
        optimizer: dict[str, Any] = {"device": "cpu", "pin_memory": pinned}
        if self.superoffload:
            optimizer |= {"ratio": 0.9, "super_offload": True, "cpuadam_cores_perc": 0.9}
        zero: dict[str, Any] = {"stage": self.stage, "offload_optimizer": optimizer}
        if self.stage == 3:
            zero["offload_param"] = {"device": "cpu", "pin_memory": pinned}
        config = {
            "train_micro_batch_size_per_gpu": setting.batch,
            "gradient_clipping": setting.clip or 0.0,
            "bf16": {"enabled": setting.precision != "32-true"},
            "zero_optimization": zero,
        }
        if setting.optimizer == "sgd":
            return {**config, "zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
        defaults = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=1e-4).defaults
        arguments = {name: defaults[name] for name in ("betas", "eps", "weight_decay")}
        return {**config, "optimizer": {"type": "AdamW", "params": {"lr": work.optimizer_class[1]["lr"], **arguments}}}


class Torchao:
    """torchao's optimizer on the host, to which gradients are sent; weights stay on the device."""

    how = (
        "CPUOffloadOptimizer(offload_gradients=True): weights on the device, optimizer on the host, AdamW always fused"
    )
    needs: tuple[str, ...] = ("torchao",)

    def run(self, work: Work, turns: Turns) -> None:
        """Do the work in a loop."""
        refuse(work.setting, "torchao's CPUOffloadOptimizer")
        if work.setting.clip is not None:
            raise UnsupportedError(
                "torchao's CPUOffloadOptimizer moves gradients to the host as they are made: they cannot be clipped"
            )
        from torchao.optim import CPUOffloadOptimizer  # type: ignore[import-not-found, import-untyped, unused-ignore]

        module = work.module_for_loop().to(work.device)
        kind, options = work.optimizer_class
        with_loop(
            work, turns, module, CPUOffloadOptimizer(module.parameters(), kind, offload_gradients=True, **options)
        )


class Accelerate:
    """accelerate's leaf modules that fetch their weights, for inference."""

    how = "accelerate.cpu_offload"
    needs: tuple[str, ...] = ("accelerate",)

    def run(self, work: Work, turns: Turns) -> None:
        """Do the work in a loop."""
        if not work.setting.inference:
            raise UnsupportedError("accelerate's cpu_offload serves inference only: --inference")
        from accelerate import cpu_offload  # type: ignore[import-not-found,import-untyped,unused-ignore]

        module = work.module_for_loop()
        cpu_offload(module, execution_device=work.device)
        with_loop(work, turns, module, None)


class GroupOffload:
    """diffusers' groups of layers that fetch their weights, one ahead, for inference."""

    # Groups of blocks would send away a weight that a head shares and still has to use: tied models need leaves.
    how = "diffusers' apply_group_offloading at leaf level, on a stream if the device has streams"
    needs: tuple[str, ...] = ("diffusers",)

    def run(self, work: Work, turns: Turns) -> None:
        """Do the work in a loop."""
        if not work.setting.inference:
            raise UnsupportedError("diffusers' group offloading serves inference only: --inference")
        from diffusers.hooks import apply_group_offloading  # type: ignore[import-not-found,attr-defined,unused-ignore]

        module = work.module_for_loop()
        apply_group_offloading(
            module, onload_device=work.device, offload_type="leaf_level", use_stream=work.device.type != "cpu"
        )
        with_loop(work, turns, module, None)


CONTENDERS: Mapping[str, Callable[..., Contender]] = {
    "plain": Plain,
    OURS: Superpipeline,
    "fsdp2": Fsdp2,
    "deepspeed": DeepSpeed,
    "zero-offload": lambda: DeepSpeed(stage=2),
    "superoffload": lambda: DeepSpeed(superoffload=True),
    "torchao": Torchao,
    "accelerate": Accelerate,
    "group-offload": GroupOffload,
}


# ---- loops


class _Task(L.LightningModule):
    """The model as a LightningModule."""

    def __init__(self, work: Work, module: nn.Module) -> None:
        super().__init__()
        self.work = work
        self.module = module

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        return self.work.loss(self.module, batch)

    predict_step = training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.work.optimizer(self.parameters())


class _Losses(L.Callback):
    """Adds the loss of each step: a step of several at once must not change what a module keeps."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._turns.add_loss(outputs["loss"])

    def on_predict_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._turns.add_loss(outputs)


def with_trainer(work: Work, turns: Turns, strategy: Strategy, module: nn.Module) -> None:
    """Run Lightning's loop, with nothing that writes files or output."""
    setting = work.setting
    trainer = L.Trainer(
        accelerator=work.device.type,
        devices=setting.devices,
        num_nodes=setting.nodes,
        strategy=strategy,
        precision=setting.precision,  # type: ignore[arg-type]
        gradient_clip_val=None if setting.inference else setting.clip,
        max_epochs=1,
        callbacks=_Losses(turns),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    task = _Task(work, module)
    if setting.inference:
        trainer.predict(task, turns, return_predictions=False)
    else:
        trainer.fit(task, turns)


def with_loop(work: Work, turns: Turns, module: nn.Module, optimizer: Any) -> None:
    """Run a step for each batch; without an optimizer, a forward."""
    clip = work.setting.clip
    for batch in turns:
        with torch.set_grad_enabled(optimizer is not None):
            with work.autocast():
                loss: Tensor = work.loss(module, work.to_device(batch))
        turns.add_loss(loss)
        if optimizer is not None:
            loss.backward()  # type: ignore[no-untyped-call]
            if clip is not None:
                nn.utils.clip_grad_norm_(module.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()


@contextlib.contextmanager
def process_group(device: torch.device, rank: int = 0, size: int = 1) -> Iterator[None]:
    """Run a process group of this contender's processes, usually one, within this context."""
    import torch.distributed as dist

    own = dist.get_default_backend_for_device(device)
    backend = own if device.type == "cpu" else f"cpu:gloo,{device.type}:{own}"
    store = dist.HashStore() if size == 1 else None  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def refuse(setting: Setting, what: str) -> None:
    """Raise UnsupportedError for inference, if this contender only trains, and for several devices."""
    if setting.inference:
        raise UnsupportedError(f"{what} takes part in training only")
    if setting.ranks > 1:
        raise UnsupportedError(f"{what} takes part with one device only")
