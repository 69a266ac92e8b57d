"""Fine-tune all weights of a causal language model on chats, instructions or texts (examples/common/chats.py)."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch

from ..common import tiny
from ..common.checkpoints import load


class FineTuneLLM(L.LightningModule):
    """A causal language model of transformers: Llama 3.1 8B, Qwen3 8B, Gemma 3, ...

    Args:
        name_or_path: A checkpoint's directory or its name on the hub. None: a tiny Llama that is made.
        dtype: Of the weights as they are read: "float32", "bfloat16", or "auto" for the checkpoint's own.
        lr: The highest learning rate; it falls along a cosine until training ends.
        warmup_steps: Steps until it is reached.
    """

    def __init__(
        self, name_or_path: str | None = None, dtype: str = "float32", lr: float = 1e-5, warmup_steps: int = 0
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.checkpoint = name_or_path or tiny.language_model()
        self.model: Any = None

    def configure_model(self) -> None:
        from transformers import AutoModelForCausalLM

        if self.model is None:
            self.model = load(AutoModelForCausalLM, self.checkpoint, self.hparams.dtype)

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        loss = self.model(**batch, use_cache=False).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], index: int) -> None:
        self.log("val_loss", self.model(**batch, use_cache=False).loss, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        from transformers import get_cosine_schedule_with_warmup

        optimizer = torch.optim.AdamW(self.parameters(), self.hparams.lr)
        steps = self.trainer.estimated_stepping_batches
        schedule = get_cosine_schedule_with_warmup(optimizer, self.hparams.warmup_steps, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_end(self) -> None:
        """Write a directory that from_pretrained reads."""
        if self.trainer.is_global_zero:
            self.model.save_pretrained(f"{self.trainer.default_root_dir}/model")
            self.trainer.datamodule.tokenizer.save_pretrained(f"{self.trainer.default_root_dir}/model")
