"""Answer prompts with a language model that need not fit on the device, many for each trip of its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import lightning as L
from torch.utils.data import DataLoader

from ..common import tiny
from ..common.checkpoints import load, planned, read_jsonl, there


class Generate(L.LightningModule):
    """A causal language model that answers, with its cache.

    Args:
        name_or_path: A checkpoint's directory or its name on the hub. None: a tiny Llama that is made.
        adapters: A directory of adapters of this model, such as the recipe for them wrote.
        dtype: Of the weights: "float32", "bfloat16", or "auto" for the checkpoint's own.
        max_new_tokens: At most so many are generated for each prompt.
        temperature: 0 takes the most likely token each time; more samples.
        cache: Where keys and values of layers not in use wait. On the host they leave room for more prompts (CUDA).
    """

    def __init__(
        self,
        name_or_path: str | None = None,
        adapters: str | None = None,
        dtype: str = "auto",
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        cache: Literal["device", "host"] = "device",
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.checkpoint = name_or_path or tiny.language_model()
        self.model: Any = None

    def configure_model(self) -> None:
        from peft import PeftConfig, PeftModel, get_peft_model
        from transformers import AutoModelForCausalLM

        if self.model is not None:
            return
        self.model = load(AutoModelForCausalLM, self.checkpoint, self.hparams.dtype).eval()
        if folder := self.hparams.adapters:
            config = PeftConfig.from_pretrained(folder)
            made = get_peft_model(self.model, config) if planned() else PeftModel.from_pretrained(self.model, folder)
            self.model = made.eval()

    def on_predict_start(self) -> None:
        rank = f".{self.global_rank}" if self.trainer.world_size > 1 else ""
        folder = Path(self.trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self.file = (folder / f"answers{rank}.jsonl").open("w", encoding="utf-8")

    def predict_step(self, batch: dict[str, Any], index: int) -> list[str]:
        tokenizer, prompts = self.trainer.datamodule.tokenizer, batch["input_ids"]
        answers = self.model.generate(
            input_ids=prompts,
            attention_mask=batch["attention_mask"],
            max_new_tokens=self.hparams.max_new_tokens,
            do_sample=self.hparams.temperature > 0,
            temperature=self.hparams.temperature or None,
            pad_token_id=tokenizer.pad_token_id,
            cache_implementation="offloaded" if self.hparams.cache == "host" else None,
        )[:, prompts.shape[1] :]
        texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
        for record, text in zip(batch["records"], texts, strict=True):
            self.file.write(json.dumps({**record, "completion": text}, ensure_ascii=False) + "\n")
        return texts

    def on_predict_end(self) -> None:
        self.file.close()


class PromptData(L.LightningDataModule):
    """Lines of ``{"prompt": ...}``: a text, or a chat that ends with the user, as a list of messages.

    Args:
        path: The file.
        batch_size: Prompts that are answered at once: weights travel once for all of them.
    """

    def __init__(self, path: str, batch_size: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        from transformers import AutoTokenizer

        name = self.trainer.lightning_module.checkpoint
        self.tokenizer = AutoTokenizer.from_pretrained(there(name), padding_side="left")
        self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token
        rows = [
            {"record": record, "input_ids": self.tokens(record["prompt"])} for record in read_jsonl(self.hparams.path)
        ]
        # The longest first: rows of a batch are nearly of one length, and the first batch needs the most memory.
        self.rows = sorted(rows, key=lambda row: -len(row["input_ids"]))

    def tokens(self, prompt: Any) -> list[int]:
        """Return what the model is to continue."""
        if isinstance(prompt, str):
            return self.tokenizer(prompt)["input_ids"]
        return self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)

    def predict_dataloader(self) -> Any:
        def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
            tokens = self.tokenizer.pad({"input_ids": [row["input_ids"] for row in rows]}, return_tensors="pt")
            return {**tokens, "records": [row["record"] for row in rows]}

        return DataLoader(self.rows, batch_size=self.hparams.batch_size, collate_fn=collate)
