"""Fine-tune the diffusion transformer or the UNet of a pipeline of diffusers, all of its weights or adapters."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor

from ..common import checkpoints, tiny
from ..common.arguments import NonNegativeFloat, NonNegativeInt, PositiveInt
from ..common.errors import BadInput
from ..common.quantized import Form, quantize
from ..common.schedule import warmup_then_cosine
from .cache import Index

PARTS = ("transformer", "unet")  # of a pipeline, which are trained


class FineTuneDiffusion(L.LightningModule):
    """A model that predicts what to take from noisy latents: the flow, or the noise, as the pipeline's scheduler says.

    Args:
        name_or_path: A pipeline's directory or name on the hub. None: a tiny transformer that the recipe makes.
        dtype: Of the weights as they are read: "float32", "bfloat16" or "float16".
        train: "adapters": low-rank ones. "all": all weights.
        rank: Of the adapters.
        alpha: What they add is scaled by ``alpha / rank``.
        targets: Names of the layers that get one.
        lr: The highest learning rate; after warming up it falls along a cosine until training ends.
        weight_decay: AdamW's, of matrices and filters.
        warmup_steps: Steps until the learning rate is reached.
        base_bits: Pack the frozen weights: 8 or 4 with bitsandbytes; "int8", "float8", "nf4" or "nvfp4" with torchao.
    """

    def __init__(
        self,
        name_or_path: str | None = None,
        dtype: str = "float32",
        train: Literal["adapters", "all"] = "adapters",
        rank: PositiveInt = 8,
        alpha: float = 16.0,
        targets: tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0"),
        lr: NonNegativeFloat = 1e-4,
        weight_decay: NonNegativeFloat = 0.01,
        warmup_steps: NonNegativeInt = 0,
        base_bits: Form | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.name_or_path = name_or_path
        self.dtype_name = dtype
        self.what = train
        self.rank = rank
        self.alpha = alpha
        self.targets = targets
        self.lr = lr
        self.weight_decay = weight_decay
        self.warmup_steps = warmup_steps
        self.base_bits = base_bits
        self.strict_loading = train == "all"  # of adapters, the base is read from its own checkpoint
        self.model: Any = None

    @property
    def checkpoint(self) -> str:
        """Where the pipeline is read from."""
        return self.name_or_path or str(tiny.made(tiny.place(self.trainer) / "diffusion", tiny.diffusion_transformer))

    def prepare_data(self) -> None:
        """Make the tiny model, if none is named."""
        _ = self.checkpoint

    def configure_model(self) -> None:
        if self.model is None:
            planned = checkpoints.planned()
            with torch.device("cpu"):  # wherever a plain strategy wants what is made; diffusers makes some on import
                self.load(planned)

    def load(self, planned: bool) -> None:
        """Read the scheduler and the model, in a plan without its weights, and add adapters."""
        import diffusers

        parts = checkpoints.read(Index, self.checkpoint, "the pipeline")
        part = next((name for name in PARTS if name in parts), None)
        if part is None:
            raise BadInput(f"the pipeline {self.checkpoint} has {', '.join(parts)}, but none of {PARTS}")
        model_class, dtype = getattr(diffusers, parts[part][1]), checkpoints.dtype_of(self.dtype_name)
        self.scheduler = checkpoints.read(
            getattr(diffusers, parts["scheduler"][1]), self.checkpoint, "the scheduler of", subfolder="scheduler"
        )
        if getattr(self.scheduler.config, "use_dynamic_shifting", False):
            raise BadInput(
                f"the scheduler of {self.checkpoint} shifts time by the size of an image, which is not done here"
            )
        self.flow = "FlowMatch" in type(self.scheduler).__name__
        if planned:
            sizes = model_class.load_config(checkpoints.found(self.checkpoint), subfolder=part)
            with torch.device("meta"):
                self.model = torch.nn.Module.to(model_class.from_config(sizes), dtype)  # diffusers' own warns
        else:
            options = {"subfolder": part, "torch_dtype": dtype}
            self.model = checkpoints.read(model_class, self.checkpoint, "the pipeline", **options)
        self.vae_class = getattr(diffusers, parts["vae"][1]) if "vae" in parts else None
        self.check_conditions(self.trainer.datamodule.names)
        self.model.train()
        if self.what == "adapters":
            self.add_adapters()
        elif self.base_bits is not None:
            raise BadInput(f"base_bits={self.base_bits} packs weights that are frozen: use train=adapters")

    def check_conditions(self, names: set[str]) -> None:
        """Refuse what was cached for another kind of model."""
        taken = list(inspect.signature(self.model.forward).parameters)[1:]
        for name in names:
            if name.partition(".")[0] not in taken:
                raise BadInput(
                    f"{self.trainer.datamodule.folder} has {name}, which {type(self.model).__name__} does not take; it "
                    f"takes {', '.join(taken)}"
                )

    def add_adapters(self) -> None:
        from peft import LoraConfig

        self.model.requires_grad_(False)
        if self.base_bits is not None:
            quantize(self.model, self.base_bits)
        config = LoraConfig(r=self.rank, lora_alpha=self.alpha, target_modules=list(self.targets))
        try:
            self.model.add_adapter(config)
        except ValueError as error:
            raise BadInput(f"model.targets={self.targets}: {error}") from error

    def forward(self, latents: Tensor, times: Tensor, conditions: dict[str, Tensor]) -> Tensor:
        """What the model predicts; of one that predicts a variance too, the rest."""
        given: dict[str, Any] = {}
        for name, value in conditions.items():
            first, _, second = name.partition(".")
            if second:
                given.setdefault(first, {})[second] = value
            else:
                given[first] = value
        found = self.model(latents, timestep=times, **given, return_dict=False)[0]
        return found[:, : latents.shape[1]].float()

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        conditions = dict(batch)
        latents = conditions.pop("latents")
        noisy, times, target = (self.flowing if self.flow else self.noised)(latents, torch.randn_like(latents))
        loss = (self(noisy, times, conditions) - target).square().mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def flowing(self, latents: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """On the line between latents and noise, more often in its middle; what is predicted is its direction."""
        config = self.scheduler.config
        share = torch.randn(len(latents), device=latents.device).sigmoid()
        share = config.shift * share / (1 + (config.shift - 1) * share)
        part = share.view(-1, *[1] * (latents.ndim - 1))
        return (1 - part) * latents + part * noise, share * config.num_train_timesteps, noise - latents

    def noised(self, latents: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """At a random time of the scheduler's."""
        count, kind = self.scheduler.config.num_train_timesteps, self.scheduler.config.prediction_type
        times = torch.randint(0, count, (len(latents),), device=latents.device)
        if kind == "v_prediction":
            target = self.scheduler.get_velocity(latents, noise, times)
        else:
            target = noise if kind == "epsilon" else latents
        return self.scheduler.add_noise(latents, noise, times), times, target

    def configure_optimizers(self) -> Any:
        return warmup_then_cosine(self, self.lr, self.weight_decay, self.warmup_steps)

    @torch.no_grad()
    def sample(self, shape: torch.Size, conditions: dict[str, Tensor], steps: int) -> Tensor:
        """Latents of these conditions, from noise that is always the same."""
        latents = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(self.device)
        scheduler = type(self.scheduler).from_config(self.scheduler.config)  # it keeps times on the device
        scheduler.set_timesteps(steps, device=self.device)
        for time in scheduler.timesteps:
            scaled = latents if self.flow else scheduler.scale_model_input(latents, time)
            predicted = self(scaled, time.expand(len(latents)), conditions)
            latents = scheduler.step(predicted, time, latents, return_dict=False)[0]
        return latents

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.what == "adapters":
            checkpoints.keep_trained(self, checkpoint)

    def export(self, folder: Path) -> None:
        """Writes the model as from_pretrained reads it, or the adapters as load_lora_adapter does."""
        if self.what == "adapters":
            self.model.save_lora_adapter(folder)
        else:
            self.model.save_pretrained(folder)
