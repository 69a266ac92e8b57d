"""Turn texts into vectors, with an encoder or a language model that need not fit on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor
from torch.nn.functional import normalize
from torch.utils.data import DataLoader

from ..common import checkpoints, tiny
from ..common.answers import Predicts
from ..common.arguments import PositiveInt
from ..common.errors import BadInput
from ..common.files import read_jsonl, stamps
from ..common.quantized import Form, quantize


class Embed(Predicts):
    """A model of texts whose last hidden states become one vector of length 1 for each text.

    Args:
        name_or_path: A checkpoint directory or a name on the hub. None: a tiny Llama that the recipe makes.
        dtype: Of the weights: "float32", "bfloat16", or "auto" for the checkpoint's own.
        pooling: The "mean" of all tokens' states, or that of the "first" or the "last" token, as the model was trained.
        base_bits: Pack the linear layers: 8 or 4 with bitsandbytes; "int8", "float8", "nf4" or "nvfp4" with torchao.
    """

    counts = "texts"

    def __init__(
        self,
        name_or_path: str | None = None,
        dtype: str = "auto",
        pooling: Literal["mean", "first", "last"] = "mean",
        base_bits: Form | None = None,
    ) -> None:
        super().__init__()
        self.name_or_path = name_or_path
        self.dtype_name = dtype
        self.pooling = pooling
        self.base_bits = base_bits
        self.model: Any = None

    @property
    def checkpoint(self) -> str:
        """Where the model is read from."""
        return self.name_or_path or str(tiny.made(tiny.place(self.trainer) / "llm", tiny.language_model))

    @property
    def settings(self) -> list[Any]:
        """What vectors depend on, beside the texts."""
        return [stamps(self.name_or_path), self.dtype_name, self.pooling, self.base_bits]

    def configure_model(self) -> None:
        if self.model is None:
            from transformers import AutoModel

            self.model = checkpoints.load(AutoModel, self.checkpoint, self.dtype_name, unused=("pooler.",))
            if self.base_bits is not None:
                quantize(self.model, self.base_bits, leave=[])

    def predict_step(self, batch: dict[str, Any], index: int) -> list[dict[str, Any]]:
        mask = batch["attention_mask"]
        states = self.model(input_ids=batch["input_ids"], attention_mask=mask).last_hidden_state.float()
        vectors = normalize(self.pooled(states, mask), dim=-1).tolist()
        return [{**record, "embedding": vector} for record, vector in zip(batch["records"], vectors, strict=True)]

    def pooled(self, states: Tensor, mask: Tensor) -> Tensor:
        """One vector for each row, whose padding is on the right."""
        if self.pooling == "mean":
            weights = mask.unsqueeze(-1).to(states.dtype)
            return (states * weights).sum(1) / weights.sum(1)
        place = torch.zeros_like(mask[:, 0]) if self.pooling == "first" else mask.sum(1) - 1
        return states[torch.arange(len(states), device=states.device), place]


class TextData(L.LightningDataModule):
    """Texts from a JSONL file: ``{"text": "..."}``.

    Args:
        path: The file. None: texts that the recipe makes up.
        tokenizer: A name or a directory. None: that of the model's checkpoint.
        batch_size: Texts that the model sees at once: weights travel once for all of them.
        most_tokens: What a text has beyond is left out. None: a text with more than the model has positions is refused.
    """

    def __init__(
        self,
        path: str | None = None,
        tokenizer: str | None = None,
        batch_size: PositiveInt = 64,
        most_tokens: int | None = None,
    ) -> None:
        super().__init__()
        self.path = path
        self.tokenizer_name = tokenizer
        self.batch_size = batch_size
        self.most_tokens = most_tokens
        self.done = 0  # texts that had their vectors before

    def setup(self, stage: str) -> None:
        assert self.trainer is not None
        checkpoint = self.trainer.lightning_module.checkpoint
        self.tokenizer = checkpoints.load_tokenizer(self.tokenizer_name or checkpoint, checkpoint, ends=False)
        config = checkpoints.load_config(checkpoint)
        if config.is_encoder_decoder:
            raise BadInput(f"{checkpoint} is an encoder with a decoder; this recipe is for encoders, and for decoders")
        most = min(checkpoints.positions(config), self.tokenizer.model_max_length)
        self.tokenizer.padding_side = "right"
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.records = []
        for where, record in read_jsonl(self.path or self.made_up()):
            if not isinstance(record.get("text"), str):
                raise BadInput(f'{where} has the keys {sorted(record)}; a record needs "text" (a text)')
            cut = {} if self.most_tokens is None else {"truncation": True, "max_length": self.most_tokens}
            tokens = self.tokenizer(record["text"], **cut)["input_ids"]
            if not 0 < len(tokens) <= most:
                raise BadInput(f"{where}: a text of {len(tokens)} tokens; the model of {checkpoint} takes 1 to {most}")
            self.records.append({"record": record, "tokens": tokens, "number": len(self.records)})
        # The longest ones first: rows of a batch are nearly of one length, and the first batch needs the most memory.
        self.records.sort(key=lambda one: len(one["tokens"]), reverse=True)

    def made_up(self) -> str:
        """Texts for a run that was given none."""
        texts = [{"text": text} for text in tiny.sentences(64, seed=1)]
        return str(tiny.made(tiny.place(self.trainer) / "texts.jsonl", lambda part: tiny.write_jsonl(part, texts)))

    def collate(self, records: Sequence[dict[str, Any]]) -> dict[str, Any]:
        tokens = self.tokenizer.pad({"input_ids": [record["tokens"] for record in records]}, return_tensors="pt")
        return {**tokens, "records": [record["record"] for record in records], "count": len(records)}

    def predict_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.records[self.done :], batch_size=self.batch_size, collate_fn=self.collate)  # type: ignore[arg-type]
