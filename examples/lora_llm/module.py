"""Train low-rank adapters on a frozen causal language model, which may be packed to 8 or 4 bits (QLoRA)."""

from __future__ import annotations

import math
from typing import Any, Literal

import lightning as L
import torch
from torch import nn

from ..common import tiny
from ..common.checkpoints import keep_trained, load


class LoraLLM(L.LightningModule):
    """A frozen language model with adapters of peft in every linear layer but the head.

    Args:
        name_or_path: A checkpoint's directory or its name on the hub. None: a tiny Llama that is made.
        dtype: Of the frozen weights: "float32", "bfloat16", or "auto" for the checkpoint's own.
        base_bits: Pack the frozen weights with torchao: 8 (int8) or 4 (NF4).
        rank: Of the adapters.
        alpha: What they add is scaled by ``alpha / rank``.
        lr: The highest learning rate; it falls along a cosine until training ends.
        warmup_steps: Steps until it is reached.
        merge: Also write the model with its adapters merged, as for llama.cpp's convert_hf_to_gguf.
    """

    def __init__(
        self,
        name_or_path: str | None = None,
        dtype: str = "auto",
        base_bits: Literal[4, 8] | None = None,
        rank: int = 16,
        alpha: float = 32.0,
        lr: float = 1e-4,
        warmup_steps: int = 0,
        merge: bool = False,
    ) -> None:
        super().__init__()
        if merge and base_bits is not None:
            raise ValueError("merge: adapters are not merged into packed weights; leave base_bits out")
        self.save_hyperparameters()
        self.checkpoint = name_or_path or tiny.language_model()
        self.strict_loading = False  # checkpoints have the adapters; the base is read from its own
        self.model: Any = None

    def configure_model(self) -> None:
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        if self.model is not None:
            return
        base = load(AutoModelForCausalLM, self.checkpoint, self.hparams.dtype).requires_grad_(False)
        if self.hparams.base_bits is not None:
            pack(base.base_model, self.hparams.base_bits)
        sizes = {"r": self.hparams.rank, "lora_alpha": self.hparams.alpha}
        with torch.device("cpu"):  # adapters begin at random, with the host's numbers
            config = LoraConfig(**sizes, target_modules="all-linear", task_type="CAUSAL_LM")
            self.model = get_peft_model(base, config)

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        loss = self.model(**batch, use_cache=False).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], index: int) -> None:
        self.log("val_loss", self.model(**batch, use_cache=False).loss, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        from transformers import get_cosine_schedule_with_warmup

        adapters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(adapters, self.hparams.lr)
        steps = self.trainer.estimated_stepping_batches
        schedule = get_cosine_schedule_with_warmup(optimizer, self.hparams.warmup_steps, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        keep_trained(self, checkpoint)

    def on_train_end(self) -> None:
        """Write the adapters, and the merged model if it is wanted, as from_pretrained reads them."""
        if self.trainer.is_global_zero:
            self.model.save_pretrained(f"{self.trainer.default_root_dir}/adapters")
            if self.hparams.merge:
                folder = f"{self.trainer.default_root_dir}/merged"
                self.model.merge_and_unload().save_pretrained(folder)
                self.trainer.datamodule.tokenizer.save_pretrained(folder)


def pack(model: nn.Module, bits: int) -> None:
    """Give linear layers weights of torchao's: int8, or NF4, whose scales are packed in groups of up to 256."""
    from torchao.quantization import Int8WeightOnlyConfig, NF4Tensor, quantize_

    if bits == 8:
        quantize_(model, Int8WeightOnlyConfig())
        return
    for layer in filter(lambda module: isinstance(module, nn.Linear), model.modules()):
        group = math.gcd(layer.weight.numel() // 64, 256)
        weight = NF4Tensor.from_tensor(layer.weight.detach(), block_size=64, scaler_block_size=group)
        layer.weight = nn.Parameter(weight, requires_grad=False)
