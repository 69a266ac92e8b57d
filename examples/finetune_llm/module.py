"""Fine-tune any causal language model of transformers, all of its weights."""

from pathlib import Path
from typing import Any

import lightning as L
import torch

from ..common import checkpoints, tiny
from ..common.arguments import NonNegativeFloat, NonNegativeInt
from ..common.loss import Kind, NextTokens
from ..common.packing import check_apart
from ..common.schedule import warmup_then_cosine


class FineTuneLLM(L.LightningModule):
    """A causal language model, trained to continue what it is given.

    Args:
        name_or_path: A checkpoint directory or a name on the hub. None: a tiny model that the recipe makes.
        dtype: Of the weights as they are read: "float32", "bfloat16", or "auto" for the checkpoint's own.
        lr: The highest learning rate.
        weight_decay: AdamW's, of matrices.
        warmup_steps: Steps until the learning rate is reached; then it falls along a cosine until training ends.
        loss: "full": the model's own. "chunked": never the logits of all tokens at once. "auto": chunked where torch
            has it, the vocabulary is large, and the model's loss is nothing else.
    """

    def __init__(
        self,
        name_or_path: str | None = None,
        dtype: str = "float32",
        lr: NonNegativeFloat = 1e-4,
        weight_decay: NonNegativeFloat = 0.01,
        warmup_steps: NonNegativeInt = 0,
        loss: Kind = "auto",
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.name_or_path = name_or_path
        self.dtype_name = dtype
        self.lr = lr
        self.weight_decay = weight_decay
        self.warmup_steps = warmup_steps
        self.next_tokens = NextTokens(loss)
        self.model: Any = None
        self.apart = False  # packed documents were seen not to see each other

    make_tiny = staticmethod(tiny.language_model)

    @property
    def checkpoint(self) -> str:
        """Where the model is read from, by a name that transformers knows."""
        return self.name_or_path or str(tiny.made(tiny.place(self.trainer) / self.make_tiny.__name__, self.make_tiny))

    def prepare_data(self) -> None:
        """Make the tiny model, if none is named: before the model is made, which may be without weights (a plan)."""
        _ = self.checkpoint

    def configure_model(self) -> None:
        if self.model is not None:
            return
        self.model = self.load()
        if checkpoints.planned():
            self.apart = True  # whether documents are apart shows only with weights
            self.decide_now()

    def decide_now(self) -> None:
        """Decide how the loss is computed, of a model without weights."""
        self.next_tokens.decide_now(self.model)

    def load(self) -> Any:
        """The model, from its checkpoint."""
        from transformers import AutoModelForCausalLM

        return checkpoints.load(AutoModelForCausalLM, self.checkpoint, self.dtype_name)

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Of the next tokens."""
        self.check_documents(batch)
        return self.next_tokens(self.model, batch)

    def check_documents(self, batch: dict[str, torch.Tensor]) -> None:
        """Refuse a model in which the documents of a row see each other."""
        if "position_ids" in batch and not self.apart:
            check_apart(self.model, self.device)
            self.apart = True

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], index: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return warmup_then_cosine(self, self.lr, self.weight_decay, self.warmup_steps)

    def export(self, folder: Path) -> None:
        """Writes a directory that from_pretrained reads, with the tokenizer."""
        self.model.save_pretrained(folder)
        self.trainer.datamodule.tokenizer.save_pretrained(folder)
