"""Fine-tune the transformer of Stable Diffusion 3 or 3.5 on images and texts, by adapters or as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.io import decode_image
from torchvision.transforms.v2.functional import center_crop, resize

from ..common import tiny
from ..common.checkpoints import keep_trained, read_jsonl, there


class FineTuneDiffusion(L.LightningModule):
    """A pipeline of which the transformer learns to predict flows; text encoders and autoencoder are frozen.

    Args:
        name_or_path: A pipeline's directory or its name on the hub. None: a tiny one that is made.
        dtype: Of the weights as they are read.
        rank: Of adapters in the attention layers. 0: all weights of the transformer are trained.
        lr: AdamW's learning rate.
    """

    def __init__(
        self, name_or_path: str | None = None, dtype: str = "float32", rank: int = 16, lr: float = 1e-4
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.checkpoint = name_or_path or tiny.diffusion_pipeline()
        self.strict_loading = False  # checkpoints have what is trained
        self.transformer: Any = None

    def configure_model(self) -> None:
        from diffusers import StableDiffusion3Pipeline
        from peft import LoraConfig

        if self.transformer is not None:
            return
        dtype = getattr(torch, self.hparams.dtype)
        with torch.device("cpu"):
            self.pipeline = StableDiffusion3Pipeline.from_pretrained(there(self.checkpoint), dtype=dtype)
            self.encoders = torch.nn.ModuleList(
                one for name, one in self.pipeline.components.items() if name.startswith("text_encoder") and one
            )
            self.vae, self.transformer = self.pipeline.vae, self.pipeline.transformer
            self.requires_grad_(False)
            self.transformer.train()
            if self.hparams.rank:
                layers = ["to_q", "to_k", "to_v", "to_out.0"]
                self.transformer.add_adapter(LoraConfig(r=self.hparams.rank, target_modules=layers))
            else:
                self.transformer.requires_grad_(True)

    @torch.no_grad()
    def encode(self, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return latents of the images, and what encoders make of the tokens and of each whole text."""
        texts, config = [batch["text"]] * 3, self.vae.config
        words, _, whole, _ = self.pipeline.encode_prompt(*texts, self.device, do_classifier_free_guidance=False)
        latents = self.vae.encode(batch["pixels"].to(self.vae.dtype)).latent_dist.sample()
        return (latents - config.shift_factor) * config.scaling_factor, words, whole

    def training_step(self, batch: dict[str, Any], index: int) -> torch.Tensor:
        latents, words, whole = self.encode(batch)
        noise, config = torch.randn_like(latents), self.pipeline.scheduler.config
        share = torch.randn(len(latents), device=self.device).sigmoid().to(latents.dtype)  # most in the middle
        share = config.shift * share / (1 + (config.shift - 1) * share)
        part = share.view(-1, 1, 1, 1)
        flow = self.transformer(
            (1 - part) * latents + part * noise,
            timestep=share * config.num_train_timesteps,
            encoder_hidden_states=words,
            pooled_projections=whole,
            return_dict=False,
        )[0]
        loss = (flow - (noise - latents)).float().square().mean()
        self.log("loss", loss, prog_bar=True, batch_size=len(latents))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], self.hparams.lr)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        keep_trained(self, checkpoint)

    def on_train_end(self) -> None:
        """Write the adapters, or the transformer, as diffusers reads them."""
        save = self.transformer.save_lora_adapter if self.hparams.rank else self.transformer.save_pretrained
        if self.trainer.is_global_zero:
            save(f"{self.trainer.default_root_dir}/model")


class ImageTextData(L.LightningDataModule):
    """Lines of ``{"image": "a.png", "text": "..."}``.

    Args:
        path: The file; images are looked for beside it. None: squares that are painted.
        image_size: Pixels of a side.
        batch_size: Images in a batch.
    """

    def __init__(self, path: str | None = None, image_size: int = 1024, batch_size: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> Any:
        path = Path(self.hparams.path or f"{tiny.squares()}/captions.jsonl")
        size = self.hparams.image_size

        def collate(records: list[dict[str, str]]) -> dict[str, Any]:
            images = [decode_image(path.parent / record["image"], "RGB") for record in records]
            pixels = torch.stack([center_crop(resize(image, [size]), [size, size]) for image in images])
            return {"pixels": pixels / 127.5 - 1, "text": [record["text"] for record in records]}

        records = read_jsonl(path)
        order = DistributedSampler(records, self.trainer.world_size, self.trainer.global_rank)
        return DataLoader(records, self.hparams.batch_size, sampler=order, collate_fn=collate)
