"""Continue many prompts with a language model that need not fit on the device."""

from __future__ import annotations

import contextlib
import hashlib
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
from ..common.quantized import Form, quantize
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
        base_bits: Pack the linear layers: 8 or 4 with bitsandbytes; "int8", "float8", "nf4" or "nvfp4" with torchao.
    """

    def __init__(
        self,
        name_or_path: str | None = None,
        dtype: str = "auto",
        max_new_tokens: int = 32,
        temperature: float = 0.0,
        cache: Literal["device", "host"] = "device",
        base_bits: Form | None = None,
    ) -> None:
        super().__init__(name_or_path, dtype)
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
        return model

    @property
    def settings(self) -> list[Any]:
        """What answers depend on, beside the prompts."""
        return [self.name_or_path, self.dtype_name, self.max_new_tokens, self.temperature, self.base_bits]

    def on_predict_start(self) -> None:
        self.generated, self.begin, self.seed = 0, time.perf_counter(), torch.initial_seed()

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
        batch["generated"] = int((made != tokenizer.pad_token_id).sum())  # on the module others would count, too
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
            for figure, how in ((self.generated, "sum"), (time.perf_counter() - self.begin, "max"))
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


class Answers(L.Callback):
    """Writes what was predicted, a line for each record, as soon as it is there; the file appears when all are.

    Until then the lines are in a file beside it, from which the same run goes on after a kill: with the next whole
    batch, so that batches, and what they draw at random, are those of an undisturbed run. On several devices each has
    such a file, and a run begins anew.
    """

    def __init__(self, file: str) -> None:
        self.file = file
        self.out: Any = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.path = Path(trainer.default_root_dir) / self.file
        ranks = range(trainer.world_size)
        self.parts = [self.path.with_name(f"{self.path.name}.part{f'.{rank}' * (len(ranks) > 1)}") for rank in ranks]
        self.part = self.parts[trainer.global_rank]
        self.of = self.path.with_name(f"{self.path.name}.of")  # says of which run the part is
        self.kept = 0
        if len(ranks) == 1:
            self.go_on(trainer.datamodule, pl_module)

    def go_on(self, data: Any, module: Any) -> None:
        """Keep the whole batches of the same run, if one was killed."""
        prompts = json.dumps([[one["tokens"], one["record"]] for one in data.records])
        digest = hashlib.sha256(prompts.encode()).hexdigest()
        run = json.dumps([digest, data.batch_size, torch.initial_seed(), *module.settings])
        if self.part.exists() and self.of.exists() and self.of.read_text() == run:
            with self.part.open("rb") as part:
                sizes = [len(line) for line in part if line.endswith(b"\n")]
            batches = len(sizes) // data.batch_size
            data.done = min(batches * data.batch_size, len(data.records) - 1)  # something is left to answer
            data.done -= data.done % data.batch_size
            self.kept = sum(sizes[: data.done])
            say(f"going on after {data.done} prompts that {self.part} has answers to")
        else:
            self.part.unlink(missing_ok=True)  # before the other file says that it is of this run
            with whole(self.of) as of:
                of.write_text(run)

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.out = self.part.open("ab")
        self.out.truncate(self.kept)

    def on_predict_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        self.out.write("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in outputs).encode())
        self.out.flush()
        pl_module.generated += batch["generated"]
        speed = pl_module.generated / (time.perf_counter() - pl_module.begin)
        show_beside(trainer.progress_bar_callback, f"{speed:.1f} tokens/s")

    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.out.close()
        trainer.strategy.barrier()  # all parts are there
        if trainer.is_global_zero:
            if len(self.parts) > 1:
                self.merge()
            else:
                self.part.replace(self.path)
            self.of.unlink(missing_ok=True)

    def merge(self) -> None:
        """Put the answers of all devices in the order of their prompts, of which Lightning deals each one in turn."""
        with contextlib.ExitStack() as stack:
            out = stack.enter_context(stack.enter_context(whole(self.path)).open("w", encoding="utf-8"))
            answers = [stack.enter_context(part.open(encoding="utf-8")) for part in self.parts]
            out.writelines(line for lines in zip_longest(*answers, fillvalue="") for line in lines)
        for part in self.parts:
            part.unlink()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if self.out is not None:
            self.out.close()
            if len(self.parts) > 1 or not self.part.stat().st_size:  # nothing to go on from
                self.part.unlink(missing_ok=True)
                self.of.unlink(missing_ok=True)


def show_beside(bar: Any, text: str) -> None:
    """Show a figure in a progress bar of either kind, beside the batches that were predicted."""
    if getattr(bar, "predict_progress_bar_id", None) is not None:
        bar.progress.update(bar.predict_progress_bar_id, description=f"{bar.predict_description} {text}")
    elif hasattr(bar, "predict_progress_bar"):
        bar.predict_progress_bar.set_postfix_str(text)
