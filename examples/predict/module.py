"""Continue many prompts with a language model that need not fit on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import lightning as L
import torch
from torch.utils.data import DataLoader

from ..common import tiny
from ..common.answers import Predicts
from ..common.arguments import NonNegativeFloat, PositiveInt
from ..common.checkpoints import load_config, load_tokenizer, positions, with_adapters
from ..common.errors import BadInput
from ..common.files import read_jsonl, stamps
from ..common.packing import check_padding
from ..common.quantized import Form, quantize
from ..common.text import templated
from ..finetune_llm.module import FineTuneLLM


class Generate(Predicts, FineTuneLLM):
    """A causal language model that answers, greedily or by sampling, with its cache.

    Args:
        name_or_path: A checkpoint directory, such as one that another recipe exported, or a name on the hub. None: a
            tiny model that the recipe makes.
        dtype: Of the weights: "float32", "bfloat16", or "auto" for the checkpoint's own.
        max_new_tokens: At most so many are generated for each prompt.
        temperature: 0 takes the most likely token each time; more samples.
        cache: Where keys and values of layers that are not in use wait: "device" or "host". On the host they leave room
            on the device for more prompts at a time, and each token moves them all up and down.
        base_bits: Pack the linear layers: 8 or 4 with bitsandbytes; "int8", "float8", "nf4" or "nvfp4" with torchao.
        adapters: A directory of adapters of this model, such as the recipe for adapters wrote.
    """

    def __init__(
        self,
        name_or_path: str | None = None,
        dtype: str = "auto",
        max_new_tokens: PositiveInt = 32,
        temperature: NonNegativeFloat = 0.0,
        cache: Literal["device", "host"] = "device",
        base_bits: Form | None = None,
        adapters: str | None = None,
    ) -> None:
        super().__init__(name_or_path, dtype)
        self.adapters = adapters
        self.cache = cache
        self.base_bits = base_bits
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature

    @property
    def generates(self) -> tuple[int, str]:
        """What a plan has to know: the tokens of each answer, and where keys and values wait."""
        return self.max_new_tokens, self.cache

    def load(self) -> Any:
        model = super().load()
        if self.base_bits is not None:
            quantize(model, self.base_bits, leave=[model.get_output_embeddings()])
        return model if self.adapters is None else with_adapters(model, self.adapters)

    @property
    def settings(self) -> list[Any]:
        """What answers depend on, beside the prompts."""
        model = stamps(self.name_or_path), self.dtype_name, self.base_bits, stamps(self.adapters)
        return [*model, self.max_new_tokens, self.temperature]

    def on_predict_start(self) -> None:
        super().on_predict_start()
        data = self.trainer.datamodule
        if data.batch_size > 1 and len({len(one["tokens"]) for one in data.records}) > 1:
            check_padding(self.model, self.device)

    def predict_step(self, batch: dict[str, Any], index: int) -> list[dict[str, Any]]:
        tokenizer, prompts = self.trainer.datamodule.tokenizer, batch["input_ids"]
        sampling = {"do_sample": True, "temperature": self.temperature} if self.temperature else {"do_sample": False}
        if self.temperature:  # what a batch draws depends on its place in the file: not on those before, which a run
            torch.manual_seed(self.seed + batch["number"])  # that goes on does not have, nor on those beside it
        made = self.model.generate(
            input_ids=prompts,
            attention_mask=batch["attention_mask"],
            max_new_tokens=self.max_new_tokens,
            pad_token_id=tokenizer.pad_token_id,
            past_key_values=self.own_cache(),
            **sampling,
        )[:, prompts.shape[1] :].cpu()
        batch["count"] = int((made != tokenizer.pad_token_id).sum())
        texts = tokenizer.batch_decode(made, skip_special_tokens=True)
        return [{**record, "answer": text} for record, text in zip(batch["records"], texts, strict=True)]

    def own_cache(self) -> Any:
        """The cache of one batch; None: the model makes its own, on the device."""
        if self.cache == "device":
            return None
        from ..common.host_cache import host_cache

        return host_cache(self.model.config)


class PromptData(L.LightningDataModule):
    """Prompts from a JSONL file: ``{"prompt": "..."}``, or chats as ``{"messages": [...]}`` that end with the user.

    Args:
        path: The file. None: questions that the recipe makes up.
        tokenizer: A name or a directory. None: that of the model's checkpoint.
        batch_size: Prompts that are continued at once: weights travel once for all of them.
    """

    def __init__(self, path: str | None = None, tokenizer: str | None = None, batch_size: PositiveInt = 16) -> None:
        super().__init__()
        self.path = path
        self.tokenizer_name = tokenizer
        self.batch_size = batch_size
        self.done = 0  # prompts that were answered before

    def setup(self, stage: str) -> None:
        assert self.trainer is not None
        module = self.trainer.lightning_module
        checkpoint = module.checkpoint
        self.tokenizer = load_tokenizer(self.tokenizer_name or checkpoint, checkpoint)
        most = positions(load_config(checkpoint))
        self.tokenizer.padding_side = "left"
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.records = []
        for where, record in read_jsonl(self.path or self.made_up()):
            tokens = self.tokens(record, where)
            if len(tokens) + module.max_new_tokens > most:
                raise BadInput(
                    f"{where}: a prompt of {len(tokens)} tokens and max_new_tokens={module.max_new_tokens} are more "
                    f"than the {most} positions of the model of {checkpoint}"
                )
            self.records.append({"record": record, "tokens": tokens, "number": len(self.records)})
        # The longest ones first: rows of a batch are nearly of one length, and the first batch needs the most memory.
        self.records.sort(key=lambda one: len(one["tokens"]), reverse=True)

    def made_up(self) -> str:
        """Prompts for a run that was given none."""
        questions = [{"messages": chat["messages"][:1]} for chat in tiny.chats(32, seed=1)]
        return str(
            tiny.made(tiny.place(self.trainer) / "prompts.jsonl", lambda part: tiny.write_jsonl(part, questions))
        )

    def tokens(self, record: dict[str, Any], where: str) -> list[int]:
        """What the model is to continue."""
        if "messages" in record:
            return templated(record["messages"], self.tokenizer, where, answer=True)
        if not isinstance(record.get("prompt"), str):
            raise BadInput(f'{where} has the keys {sorted(record)}; a record needs "prompt", or "messages" (texts)')
        tokens = self.tokenizer(record["prompt"])["input_ids"]
        if not tokens:
            raise BadInput(f"{where}: the prompt has no tokens to continue")
        return tokens

    def collate(self, records: Sequence[dict[str, Any]]) -> dict[str, Any]:
        tokens = self.tokenizer.pad({"input_ids": [record["tokens"] for record in records]}, return_tensors="pt")
        return {**tokens, "records": [record["record"] for record in records], "number": records[0]["number"]}

    def predict_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.records[self.done :], batch_size=self.batch_size, collate_fn=self.collate)
