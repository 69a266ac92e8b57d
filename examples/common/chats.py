"""From chats, instructions and texts in a JSONL file to packed blocks of tokens.

A line is one of
    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"instruction": "...", "input": "...", "output": "..."}      as in Alpaca; "input" may be left out
    {"prompt": "...", "completion": "..."}                       without a chat template
    {"text": "..."}
Answers are learned, and all of a text. Several documents share a block; each begins at position 0 again, by which
transformers' decoders (Llama, Qwen, Gemma, Mistral, ...) keep them apart.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, DistributedSampler

from sp_lightning.errors import OptionError

from .checkpoints import read_jsonl, there

logger = logging.getLogger(__name__)
IGNORED = -100  # a label that no loss counts
Document = tuple[list[int], list[int]]  # tokens and labels


def documents(record: dict[str, Any], tokenizer: Any, size: int) -> Iterator[Document]:
    """Yield a record's documents: one for each answer of a chat, one for each ``size`` tokens of a text."""
    end = [tokenizer.eos_token_id]
    if "text" in record:
        tokens = tokenizer(record["text"])["input_ids"] + end
        yield from ((tokens[at : at + size], tokens[at : at + size]) for at in range(0, len(tokens), size))
    elif "completion" in record:
        prompt = tokenizer(record["prompt"])["input_ids"]
        yield answered(prompt, prompt + tokenizer(record["completion"], add_special_tokens=False)["input_ids"] + end)
    else:
        messages = record["messages"] if "messages" in record else from_alpaca(record)
        for turn, message in enumerate(messages):
            if message["role"] == "assistant":
                asked, both = messages[:turn], messages[: turn + 1]
                prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
                yield answered(prompt, tokenizer.apply_chat_template(both, return_dict=False))


def answered(prompt: list[int], whole: list[int]) -> Document:
    """Return a document of which what follows the prompt is learned."""
    if whole[: len(prompt)] != prompt:
        raise ValueError("the chat template writes a prompt otherwise once an answer follows: use prompt, completion")
    return whole, [IGNORED] * len(prompt) + whole[len(prompt) :]


def from_alpaca(record: dict[str, Any]) -> list[dict[str, str]]:
    """Return an instruction and its output as a chat."""
    asked = "\n\n".join(filter(None, (record["instruction"], record.get("input"))))
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": record["output"]}]


def packed(documents: list[Document], size: int) -> list[dict[str, list[int]]]:
    """Put documents into blocks of at most ``size`` tokens, in their order; a longer one is cut."""
    blocks: list[dict[str, list[int]]] = []
    for tokens, labels in documents:
        tokens, labels = tokens[:size], [IGNORED, *labels[1:size]]  # nothing predicts a document's first token
        if not blocks or len(blocks[-1]["input_ids"]) + len(tokens) > size:
            blocks.append({"input_ids": [], "labels": [], "position_ids": []})
        blocks[-1]["input_ids"] += tokens
        blocks[-1]["labels"] += labels
        blocks[-1]["position_ids"] += range(len(tokens))
    return blocks


class ChatData(L.LightningDataModule):
    """Blocks of tokens for a module that has a ``checkpoint``, whose tokenizer reads the files.

    Args:
        path: The training data.
        val_path: The data of validation. None: there is none.
        block_size: Tokens in a row.
        batch_size: Rows in a batch.
        num_workers: Processes that make batches.
    """

    def __init__(
        self,
        path: str,
        val_path: str | None = None,
        block_size: int = 128,
        batch_size: int = 4,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(there(self.trainer.lightning_module.checkpoint))
        self.train_blocks = self.blocks(self.hparams.path)
        self.val_blocks = self.blocks(self.hparams.val_path) if self.hparams.val_path else []

    def blocks(self, path: str) -> list[dict[str, list[int]]]:
        """Read a file; documents of which nothing is learned within a block are left out."""
        size, found, records = self.hparams.block_size, [], read_jsonl(path)
        for number, record in enumerate(records, 1):
            try:
                found += documents(record, self.tokenizer, size)
            except KeyError:
                known = "records of messages (role, content); instruction, output; prompt, completion; or text"
                wrong = f"{sorted(record)} in record {number} of {path}"
                raise OptionError(argument="data.path", found=wrong, allowed=known) from None
        learned = [one for one in found if any(label != IGNORED for label in one[1][1:size])]
        if not learned:
            allowed = f"a file with answers to learn within block_size={size} tokens"
            raise OptionError(argument="data.path", found=f"{path} ({len(records)} records)", allowed=allowed)
        if len(learned) < len(found):
            logger.warning("%d of %d answers begin after block_size=%d", len(found) - len(learned), len(found), size)
        return packed(learned, size)

    def collate(self, blocks: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        """Fill blocks up to one size: what a step needs is then the same for all."""
        size, end = self.hparams.block_size, self.tokenizer.eos_token_id
        filler = {"input_ids": end, "labels": IGNORED, "position_ids": 0}
        return {
            name: torch.tensor([block[name] + [value] * (size - len(block[name])) for block in blocks])
            for name, value in filler.items()
        }

    def train_dataloader(self) -> Any:
        # Shuffled by the epoch's number alone: a resumed run takes the order that it would have taken.
        order = DistributedSampler(self.train_blocks, self.trainer.world_size, self.trainer.global_rank)
        return self.loader(self.train_blocks, sampler=order)

    def val_dataloader(self) -> Any:
        return self.loader(self.val_blocks) if self.val_blocks else []

    def loader(self, blocks: Any, **options: Any) -> Any:
        """Return the batches of these blocks."""
        own = {"batch_size": self.hparams.batch_size, "num_workers": self.hparams.num_workers}
        return DataLoader(blocks, collate_fn=self.collate, **own, **options)
