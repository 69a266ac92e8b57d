"""Fine-tune Whisper to write down what is said, all of its weights or adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import lightning as L
from torch import Tensor
from torchmetrics.text import WordErrorRate

from ..common import checkpoints, tiny
from ..common.arguments import NonNegativeFloat, NonNegativeInt, PositiveInt
from ..common.errors import BadInput
from ..common.quantized import Form, quantize
from ..common.schedule import warmup_then_cosine
from ..common.text import IGNORED


class FineTuneSpeech(L.LightningModule):
    """A Whisper, trained to write down what it hears.

    Args:
        name_or_path: A checkpoint directory or a name on the hub. None: a tiny Whisper that the recipe makes.
        dtype: Of the weights as they are read: "float32", "bfloat16", or "auto" for the checkpoint's own.
        train: "all": all weights. "adapters": low-rank ones of the attention, through peft.
        rank: Of the adapters; what they add is doubled.
        base_bits: Pack the frozen weights: 8 or 4 with bitsandbytes; "int8", "float8", "nf4" or "nvfp4" with torchao.
        lr: The highest learning rate; after warming up it falls along a cosine until training ends.
        weight_decay: AdamW's, of matrices.
        warmup_steps: Steps until the learning rate is reached.
        max_length: Tokens of a text that is written in validation, at most.
    """

    def __init__(
        self,
        name_or_path: str | None = None,
        dtype: str = "float32",
        train: Literal["all", "adapters"] = "all",
        rank: PositiveInt = 8,
        base_bits: Form | None = None,
        lr: NonNegativeFloat = 1e-5,
        weight_decay: NonNegativeFloat = 0.0,
        warmup_steps: NonNegativeInt = 0,
        max_length: PositiveInt = 225,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.name_or_path = name_or_path
        self.dtype_name = dtype
        self.what = train
        self.rank = rank
        self.base_bits = base_bits
        self.strict_loading = train == "all"  # of adapters, the base is read from its own checkpoint
        self.lr = lr
        self.weight_decay = weight_decay
        self.warmup_steps = warmup_steps
        self.max_length = max_length
        self.word_errors = WordErrorRate()
        self.model: Any = None

    @property
    def checkpoint(self) -> str:
        """Where the model is read from, by a name that transformers knows."""
        return self.name_or_path or str(tiny.made(tiny.place(self.trainer) / "whisper", tiny.speech_recognizer))

    def prepare_data(self) -> None:
        """Make the tiny model, if none is named."""
        _ = self.checkpoint

    def configure_model(self) -> None:
        if self.model is not None:
            return
        from transformers import AutoModelForSpeechSeq2Seq

        self.model = checkpoints.load(AutoModelForSpeechSeq2Seq, self.checkpoint, self.dtype_name)
        language = self.trainer.datamodule.language
        if getattr(self.model.generation_config, "is_multilingual", False) != (language is not None):
            raise BadInput(
                f"data.language={language}, but the model of {self.checkpoint} has "
                + ("one language: leave it out" if language else "several: name the texts' language")
            )
        if self.what == "adapters":
            self.add_adapters()
        elif self.base_bits is not None:
            raise BadInput(f"base_bits={self.base_bits} packs weights that are frozen: use train=adapters")

    def add_adapters(self) -> None:
        """Freeze the model, packed if that is wanted, and give its attention what is trained."""
        from peft import LoraConfig, get_peft_model

        if self.base_bits is not None:
            quantize(self.model, self.base_bits, leave=[self.model.get_output_embeddings()])
        config = LoraConfig(r=self.rank, lora_alpha=2 * self.rank, target_modules=["q_proj", "v_proj"])
        self.model = get_peft_model(self.model, config).train()

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Of the tokens of what was said."""
        return self.model(**batch, use_cache=False).loss

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
        """The loss, and the words that are wrong in what the model writes by itself."""
        data = self.trainer.datamodule
        self.log("val_loss", self.loss(batch), batch_size=len(batch["labels"]), sync_dist=True)
        written = self.model.generate(batch["input_features"], max_length=self.max_length, **data.language_options)
        said = batch["labels"].masked_fill(batch["labels"] == IGNORED, data.filler)
        self.word_errors(*(data.tokenizer.batch_decode(each, skip_special_tokens=True) for each in (written, said)))
        self.log("word_error_rate", self.word_errors, prog_bar=True, batch_size=len(said))

    def configure_optimizers(self) -> Any:
        return warmup_then_cosine(self, self.lr, self.weight_decay, self.warmup_steps)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.what == "adapters":
            checkpoints.keep_trained(self, checkpoint)

    def export(self, folder: Path) -> None:
        """Writes what from_pretrained, or peft's, reads, with the tokenizer and what makes features of sound."""
        self.model.save_pretrained(folder)
        self.trainer.datamodule.tokenizer.save_pretrained(folder)
        self.trainer.datamodule.features.save_pretrained(folder)
