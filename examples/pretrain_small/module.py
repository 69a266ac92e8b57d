"""Train a language model from nothing on one device, within a budget of time or steps."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Timer

from ..common import tiny
from ..common.arguments import NonNegativeFloat, PositiveInt
from ..common.checkpoints import read
from ..common.curves import draw
from ..common.errors import BadInput
from ..common.files import existing, read_jsonl, whole
from ..common.loss import Kind
from ..common.schedule import adamw, scheduled
from ..common.text import TextData
from ..finetune_llm.module import FineTuneLLM


class PretrainLLM(FineTuneLLM):
    """A Llama of any size, with random weights, over the tokenizer that the data trained.

    The learning rate rises during the first tenth of the budget, and then falls to 0 at its end: of ``max_steps`` or of
    ``max_time``, whichever is further on.

    Args:
        hidden_size: Of a token.
        layers: Blocks.
        heads: Of attention.
        lr: The highest learning rate.
        weight_decay: AdamW's, of matrices.
        loss: As FineTuneLLM's.
    """

    def __init__(
        self,
        hidden_size: PositiveInt = 64,
        layers: PositiveInt = 6,
        heads: PositiveInt = 4,
        lr: NonNegativeFloat = 3e-3,
        weight_decay: NonNegativeFloat = 0.1,
        loss: Kind = "auto",
    ) -> None:
        super().__init__(lr=lr, weight_decay=weight_decay, loss=loss)
        self.save_hyperparameters()
        self.sizes = {"hidden_size": hidden_size, "num_hidden_layers": layers, "num_attention_heads": heads}

    def load(self) -> Any:
        """A new one."""
        from transformers import LlamaConfig, LlamaForCausalLM

        data = self.trainer.datamodule
        width, heads = self.sizes["hidden_size"], self.sizes["num_attention_heads"]
        if width % heads:
            raise BadInput(f"model.heads={heads} must divide model.hidden_size={width}")
        config = LlamaConfig(
            vocab_size=len(data.tokenizer),
            intermediate_size=-(-self.sizes["hidden_size"] * 8 // 3 // 64) * 64,
            max_position_embeddings=data.block_size,
            pad_token_id=data.tokenizer.pad_token_id,
            bos_token_id=data.tokenizer.bos_token_id,
            eos_token_id=data.tokenizer.eos_token_id,
            tie_word_embeddings=True,
            **self.sizes,
        )
        with torch.device("cpu"):  # wherever a plain strategy wants what is made
            return LlamaForCausalLM(config)

    def spent(self, step: int) -> float:
        """The share of the budget that is behind us."""
        shares = [step / self.trainer.max_steps] if self.trainer.max_steps > 0 else []
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, Timer) and callback._duration:
                shares.append(callback.time_elapsed() / callback._duration)
        shares = self.trainer.strategy.broadcast(shares)  # each device has a clock of its own
        return min(1.0, max(shares, default=0.0))

    def configure_optimizers(self) -> Any:
        def factor(step: int) -> float:
            spent = self.spent(step)
            return max(0.01, 10 * spent) if spent < 0.1 else (1 - spent) / 0.9

        return scheduled(adamw(self, self.lr, self.weight_decay), factor)


class PretrainData(TextData):
    """Texts from a JSONL file (``{"text": ...}``) or a plain text file (a document each paragraph), and the tokenizer
    that is trained on them, unless one is named.

    Args:
        vocabulary: Tokens of the tokenizer.
        **options: TextData's.
    """

    def __init__(self, vocabulary: PositiveInt = 512, **options: Any) -> None:
        super().__init__(**options)
        self.vocabulary = vocabulary

    def setup(self, stage: str) -> None:
        from transformers import AutoTokenizer

        assert self.trainer is not None
        path = self.as_jsonl(self.path or self.made_up("train", 600))
        self.tokenizer = read(AutoTokenizer, self.tokenizer_name or self.trained_tokenizer(path), "the tokenizer")
        self.embedded = len(self.tokenizer)
        val_path = self.val_path if self.path else self.made_up("val", 100)
        self.train_rows = self.rows(path)
        self.val_rows = self.rows(self.as_jsonl(val_path)) if val_path else []

    def trained_tokenizer(self, path: str) -> str:
        """Where the one of these texts is: made once for the same texts and size, so that a resumed run has it too."""
        assert self.trainer is not None
        texts = [json.dumps(record, ensure_ascii=False) for _, record in read_jsonl(path)]
        name = hashlib.sha256("\n".join([str(self.vocabulary), *texts]).encode()).hexdigest()[:8]
        folder = Path(self.trainer.default_root_dir) / f"tokenizer-{name}"
        return str(tiny.made(folder, lambda part: tiny.tokenizer(texts, self.vocabulary).save_pretrained(part)))

    def as_jsonl(self, path: str) -> str:
        """A plain text file's paragraphs, as records."""
        if path.endswith(".jsonl"):
            return path
        assert self.trainer is not None
        paragraphs = existing(path, "the data file").read_text(encoding="utf-8").split("\n\n")
        records = [{"text": text.strip()} for text in paragraphs if text.strip()]
        with whole(Path(self.trainer.default_root_dir) / f"{Path(path).stem}.jsonl") as part:
            tiny.write_jsonl(part, records)
        return str(Path(self.trainer.default_root_dir) / f"{Path(path).stem}.jsonl")

    def made_up(self, name: str, count: int) -> str:
        """Data for a run that was given none."""
        path = tiny.place(self.trainer) / f"sentences-{name}.jsonl"
        records = [{"text": sentence} for sentence in tiny.sentences(count, seed=count)]
        return str(tiny.made(path, lambda part: tiny.write_jsonl(part, records)))


class LossCurve(L.Callback):
    """Draws the loss over the steps when training ends, as a picture. Reads the loss of every step, once at the end."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.losses: list[Any] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *_: Any) -> None:
        self.losses.append(outputs["loss"].detach())

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            draw(Path(trainer.default_root_dir) / self.file, {"loss": self.losses})
