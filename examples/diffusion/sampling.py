"""Samples of the trained model, and a picture of them."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import torch
from torch import Tensor

from ..common import checkpoints
from ..common.files import whole
from .module import FineTuneDiffusion


class Samples(L.Callback):
    """Draws samples when training ends, of the conditions of the first records.

    Args:
        file: Of the latents; beside it is a picture of them if there is a decoder, or if they are colours already.
        count: Of the samples.
        steps: Of the scheduler.
    """

    def __init__(self, file: str, count: int = 4, steps: int = 20) -> None:
        self.file = file
        self.count = count
        self.steps = steps

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        from safetensors.torch import save_file

        assert isinstance(pl_module, FineTuneDiffusion)
        if not trainer.is_global_zero:
            return
        conditions = trainer.datamodule.first(self.count)  # type: ignore[attr-defined]
        conditions = {name: value.to(pl_module.device) for name, value in conditions.items()}
        shape = conditions.pop("latents").shape
        pl_module.eval()
        with trainer.precision_plugin.forward_context():
            latents = pl_module.sample(shape, conditions, self.steps)
        with whole(Path(trainer.default_root_dir) / self.file) as part:
            save_file({"latents": latents.cpu()}, part)
        picture(pl_module, latents, Path(trainer.default_root_dir) / Path(self.file).with_suffix(".png"))


@torch.no_grad()
def picture(module: FineTuneDiffusion, latents: Tensor, path: Path) -> None:
    """Draw latents beside each other."""
    from PIL import Image

    if module.vae_class is not None:
        vae = module.vae_class.from_pretrained(checkpoints.found(module.checkpoint), subfolder="vae").to(latents.device)
        shift = getattr(vae.config, "shift_factor", None) or 0.0
        latents = vae.decode(latents / vae.config.scaling_factor + shift, return_dict=False)[0]
    elif latents.shape[1] != 3:
        return
    colours = ((latents.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).cpu()
    with whole(path) as part:
        Image.fromarray(torch.cat([*colours], 2).permute(1, 2, 0).numpy()).save(part, format="PNG")
