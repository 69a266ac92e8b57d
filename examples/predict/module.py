"""Continue many prompts with a language model that need not fit on the device."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from torch.utils.data import DataLoader

from ..common import tiny
from ..common.checkpoints import load_config, load_tokenizer, positions
from ..common.errors import BadInput
from ..common.files import read_jsonl, whole
from ..common.summary import say
from ..common.text import templated
from ..finetune_llm.module import FineTuneLLM


class Generate(FineTuneLLM):
    """A causal language model that answers, greedily or by sampling, with its cache.

    Args:
        name_or_path: A checkpoint directory, such as one that another recipe exported, or a name on the hub. None: a
            tiny model that the recipe makes.
        dtype: Of the weights: "float32", "bfloat16", or "auto" for the checkpoint's own.
        max_new_tokens: At most so many are generated for each prompt.
        temperature: 0 takes the most likely token each time; more samples.
        cache: Where keys and values of layers that are not in use wait: "device" or "host". On the host they leave room
            on the device for more prompts at a time, and each token moves them all up and down.
    """

    def __init__(
        self,
        name_or_path: str | None = None,
        dtype: str = "auto",
        max_new_tokens: int = 32,
        temperature: float = 0.0,
        cache: Literal["device", "host"] = "device",
    ) -> None:
        super().__init__(name_or_path, dtype)
        self.cache = cache
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature

    @property
    def generates(self) -> tuple[int, str]:
        """What a plan has to know: the tokens of each answer, and where keys and values wait."""
        return self.max_new_tokens, self.cache

    def on_predict_start(self) -> None:
        self.generated, self.seconds = 0, 0.0

    def predict_step(self, batch: dict[str, Any], index: int) -> list[dict[str, Any]]:
        tokenizer, prompts = self.trainer.datamodule.tokenizer, batch["input_ids"]
        sampling = {"do_sample": True, "temperature": self.temperature} if self.temperature else {"do_sample": False}
        begin = time.perf_counter()
        made = self.model.generate(
            input_ids=prompts,
            attention_mask=batch["attention_mask"],
            max_new_tokens=self.max_new_tokens,
            pad_token_id=tokenizer.pad_token_id,
            past_key_values=self.own_cache(),
            **sampling,
        )[:, prompts.shape[1] :].cpu()
        self.seconds += time.perf_counter() - begin
        self.generated += int((made != tokenizer.pad_token_id).sum())
        texts = tokenizer.batch_decode(made, skip_special_tokens=True)
        return [{**record, "answer": text} for record, text in zip(batch["records"], texts, strict=True)]

    def own_cache(self) -> Any:
        """The cache of one batch; None: the model makes its own, on the device."""
        if self.cache == "device":
            return None
        from ..common.host_cache import host_cache

        return host_cache(self.model.config)

    def on_predict_end(self) -> None:
        generated, seconds = (
            float(self.trainer.strategy.reduce(torch.tensor(figure), reduce_op=how))
            for figure, how in ((self.generated, "sum"), (self.seconds, "max"))
        )
        say(f"{generated:.0f} tokens in {seconds:.1f} s, {generated / seconds:.1f} tokens per second")


class PromptData(L.LightningDataModule):
    """Prompts from a JSONL file: ``{"prompt": "..."}``, or chats as ``{"messages": [...]}`` that end with the user.

    Args:
        path: The file. None: questions that the recipe makes up.
        tokenizer: A name or a directory. None: that of the model's checkpoint.
        batch_size: Prompts that are continued at once: weights travel once for all of them.
    """

    def __init__(self, path: str | None = None, tokenizer: str | None = None, batch_size: int = 16) -> None:
        super().__init__()
        self.path = path
        self.tokenizer_name = tokenizer
        self.batch_size = batch_size

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
            self.records.append({"record": record, "tokens": tokens})

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
        return {**tokens, "records": [record["record"] for record in records]}

    def predict_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.records, batch_size=self.batch_size, collate_fn=self.collate)


class Answers(L.Callback):
    """Writes what was predicted, a line for each record, as soon as it is there; the file appears when all are."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.writing: Any = None

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.path = Path(trainer.default_root_dir) / self.file
        ranks = range(trainer.world_size)
        self.parts = (
            [self.path.with_name(f"{self.path.name}.{rank}") for rank in ranks] if len(ranks) > 1 else [self.path]
        )
        self.part = self.parts[trainer.global_rank]
        self.writing = whole(self.part)
        self.out = self.writing.__enter__().open("w", encoding="utf-8")

    def on_predict_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *_: Any) -> None:
        self.out.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in outputs)

    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.out.close()
        self.writing.__exit__(None, None, None)
        trainer.strategy.barrier()  # all parts are there
        if trainer.is_global_zero and len(self.parts) > 1:
            self.merge()

    def merge(self) -> None:
        """Put the answers of all devices in the order of their prompts, of which Lightning deals each one in turn."""
        with contextlib.ExitStack() as stack:
            out = stack.enter_context(stack.enter_context(whole(self.path)).open("w", encoding="utf-8"))
            answers = [stack.enter_context(part.open(encoding="utf-8")) for part in self.parts]
            out.writelines(line for lines in zip_longest(*answers, fillvalue="") for line in lines)
        for part in self.parts:
            part.unlink()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if self.writing is not None:
            self.out.close()
            with contextlib.suppress(type(exception)):
                self.writing.__exit__(type(exception), exception, None)
            if self.part != self.path:
                self.part.unlink(missing_ok=True)
