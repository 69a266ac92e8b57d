"""From lines of JSON to batches of tokens.

A record is one of
    {"text": "..."}                                        every token is learned
    {"prompt": "...", "completion": "..."}                 the completion is learned
    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
                                                           what the assistant says is learned

Packing puts several documents into one block. Each begins at position 0 again, by which transformers' models tell them
apart (packing.py holds them to it). Everything is read and checked before the first step.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from . import tiny
from .arguments import NonNegativeInt, PositiveInt
from .checkpoints import check_length, load_config, load_tokenizer
from .errors import BadInput
from .files import read_jsonl
from .loading import Data, TrainLoader

logger = logging.getLogger(__name__)
IGNORED = -100  # a label that no loss counts


@dataclass(frozen=True)
class Document:
    """Tokens, and what of each the model is to predict."""

    tokens: list[int]
    labels: list[int]


def encode(record: dict[str, Any], tokenizer: Any, where: str) -> Document:
    """The tokens of a record; ``where`` it stood names it in an error."""
    if isinstance(record.get("text"), str):
        tokens = [*tokenizer(record["text"])["input_ids"], tokenizer.eos_token_id]
        return Document(tokens, list(tokens))
    if isinstance(record.get("prompt"), str) and isinstance(record.get("completion"), str):
        prompt = tokenizer(record["prompt"])["input_ids"]
        completion = tokenizer(record["completion"], add_special_tokens=False)["input_ids"]
        completion = [*completion, tokenizer.eos_token_id]
        return Document(prompt + completion, [IGNORED] * len(prompt) + completion)
    if _is_chat(record.get("messages")):
        return _encode_chat(record["messages"], tokenizer, where)
    raise BadInput(
        f'{where} has the keys {sorted(record)}; a record needs "text", or "prompt" and "completion" (all texts), or '
        '"messages" (a list of {"role": ..., "content": ...}, all texts); nothing was trained'
    )


def _is_chat(messages: Any) -> bool:
    return isinstance(messages, list) and bool(messages) and all(map(_is_turn, messages))


def _is_turn(message: Any) -> bool:
    """What a template writes of a turn: its text, or the calls of tools that it makes instead."""
    said = isinstance(message, dict) and (isinstance(message.get("content"), str) or bool(message.get("tool_calls")))
    return said and isinstance(message.get("role"), str)


def templated(messages: list[dict[str, Any]], tokenizer: Any, where: str, answer: bool) -> list[int]:
    """The tokens of a chat; for an answer, up to where the assistant begins."""
    if not _is_chat(messages):
        raise BadInput(f'{where}: "messages" needs a list of {{"role": ..., "content": ...}}, all texts')
    if not tokenizer.chat_template:
        name = tokenizer.name_or_path
        other = f"set model.name_or_path={chat_variant(name)}"
        if os.path.isdir(name):  # whose name says nothing about its family
            other = "add the chat_template.jinja of its model for chats to that folder, name the folder of that model"
        raise BadInput(
            f"{where} is a chat, but the tokenizer of {name} has no chat template, as those of base models have none: "
            f"{other}, or write each record as prompt and completion"
        )
    try:
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=answer, return_dict=False))
    except Exception as error:  # a template may refuse with any error; it says what it does not like
        raise BadInput(f"{where}: the tokenizer's chat template refuses these messages: {error}") from error


def chat_variant(name: str) -> str:
    """Name the checkpoint that is trained on chats beside this one, as its family usually calls it."""
    family = name.rstrip("/").removesuffix("-Base").removesuffix("-base").removesuffix("-pt")
    if family != name:
        return family + ("-it" if name.endswith("-pt") else "")
    return family + ("-it" if "gemma" in name.lower() else "-Instruct")


def _encode_chat(messages: list[dict[str, Any]], tokenizer: Any, where: str) -> Document:
    tokens: list[int] = []
    labels: list[int] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        for until, learned in ((messages[:index], False), (messages[: index + 1], True)):
            now = templated(until, tokenizer, where, not learned) if until else []
            if now[: len(tokens)] != tokens:
                raise BadInput(
                    f"{where}: the chat template changes earlier turns when later ones are added, so what the "
                    "assistant said can not be told apart; make a record of each turn"
                )
            labels += now[len(tokens) :] if learned else [IGNORED] * (len(now) - len(tokens))
            tokens = now
    if not tokens:
        raise BadInput(f"{where} is a chat in which the assistant says nothing; nothing was trained")
    return Document(tokens, labels)


Row = dict[str, list[int]]


def pack(documents: Iterable[Document], size: int, filler: int) -> list[Row]:
    """Blocks of ``size`` tokens: a document goes where it fits whole; one longer than a block fills several."""
    rows: list[Row] = []
    room = 0
    for document in documents:
        for start in range(0, len(document.tokens), size):
            tokens, labels = document.tokens[start : start + size], document.labels[start : start + size]
            if len(tokens) > room:
                rows.append({"input_ids": [], "labels": [], "position_ids": []})
                room = size
            # The first token of a document is predicted from nothing, not from the document before it.
            _extend(rows[-1], tokens, [IGNORED, *labels[1:]])
            room -= len(tokens)
    for row in rows:
        missing = size - len(row["input_ids"])
        _extend(row, [filler] * missing, [IGNORED] * missing)
    return rows


def _extend(row: Row, tokens: list[int], labels: list[int]) -> None:
    row["input_ids"] += tokens
    row["labels"] += labels
    row["position_ids"] += range(len(tokens))


def pad(documents: Sequence[Document], size: int, filler: int) -> list[Row]:
    """A row for each document, cut to ``size`` and padded to it; a mask tells padding apart."""
    rows = []
    for document in documents:
        tokens, labels = document.tokens[:size], document.labels[:size]
        missing = size - len(tokens)
        mask = [1] * len(tokens) + [0] * missing
        tokens, labels = tokens + [filler] * missing, labels + [IGNORED] * missing
        rows.append({"input_ids": tokens, "labels": labels, "attention_mask": mask})
    return rows


def learns(row: Row) -> bool:
    """Whether something of a row is learned; its first token is predicted from nothing."""
    return any(label != IGNORED for label in row["labels"][1:])


def collate(rows: Sequence[Row]) -> dict[str, torch.Tensor]:
    """A batch."""
    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}


class TextData(Data):
    """Documents from a JSONL file, in blocks of tokens.

    Args:
        path: The training data. None: sums that the recipe makes up.
        val_path: The validation data. None: there is no validation.
        tokenizer: A name or a directory. None: that of the model's checkpoint.
        block_size: Tokens in a row of a batch.
        batch_size: Rows in a batch.
        packing: Several documents in a row, instead of one and padding.
        num_workers: Processes that make batches.
    """

    def __init__(
        self,
        path: str | None = None,
        val_path: str | None = None,
        tokenizer: str | None = None,
        block_size: PositiveInt = 128,
        batch_size: PositiveInt = 4,
        packing: bool = True,
        num_workers: NonNegativeInt = 0,
    ) -> None:
        super().__init__()
        self.path = path
        self.val_path = val_path
        self.tokenizer_name = tokenizer
        self.block_size = block_size
        self.batch_size = batch_size
        self.packing = packing
        self.num_workers = num_workers

    def setup(self, stage: str) -> None:
        assert self.trainer is not None
        checkpoint = self.trainer.lightning_module.checkpoint
        self.tokenizer = load_tokenizer(self.tokenizer_name or checkpoint, checkpoint)
        config = load_config(checkpoint)
        check_length(self.block_size, config, checkpoint)
        self.embedded = config.vocab_size
        val_path = self.val_path if self.path else self.made_up("val", 40)
        self.train_rows = self.rows(self.path or self.made_up("train", 400))
        self.val_rows = self.rows(val_path) if val_path else []

    def made_up(self, name: str, count: int) -> str:
        """Data for a run that was given none."""
        path = tiny.place(self.trainer) / f"sums-{name}.jsonl"
        return str(tiny.made(path, lambda part: tiny.write_jsonl(part, tiny.chats(count, seed=count))))

    def rows(self, path: str) -> list[Row]:
        """What a file holds, in blocks of which something is learned: the loss of another would be 0 / 0."""
        documents = [self.document(record, where) for where, record in read_jsonl(path)]
        rows = (pack if self.packing else pad)(documents, self.block_size, self.filler)
        return self.learned(rows, path, learns)

    @property
    def filler(self) -> int:
        """The token that fills rows up."""
        filler = self.tokenizer.pad_token_id
        return self.tokenizer.eos_token_id if filler is None else filler

    def learned(self, rows: list[Any], path: str, learns: Callable[[Any], bool]) -> list[Any]:
        """Those of a file's rows that teach something; says how many others there are."""
        learned = [row for row in rows if learns(row)]
        if not learned:
            raise BadInput(
                f"{path} has nothing to learn: no completion or answer begins within the first "
                f"data.block_size={self.block_size} tokens of its record; nothing was trained"
            )
        if len(learned) < len(rows):
            logger.warning(
                "%d of %d rows of %s are left out: nothing in them is learned (data.block_size=%d cuts it off, or they "
                "hold a part of a long prompt)",
                *(len(rows) - len(learned), len(rows), path, self.block_size),
            )
        return learned

    def document(self, record: dict[str, Any], where: str) -> Document:
        """A record's, of tokens that the model embeds."""
        document = encode(record, self.tokenizer, where)
        if (last := max(document.tokens)) >= self.embedded:
            token = self.tokenizer.convert_ids_to_tokens(last)
            raise BadInput(f"{where} holds the token {token!r} ({last}), but the model embeds {self.embedded}")
        return document

    def collate(self, rows: Sequence[Any]) -> dict[str, torch.Tensor]:
        """A batch of rows."""
        return collate(rows)

    def train_dataloader(self) -> TrainLoader:
        options = {"collate_fn": self.collate, "num_workers": self.num_workers}
        return self.train_loader(self.train_rows, self.batch_size, **options)

    def val_dataloader(self) -> Any:
        if not self.val_rows:
            return []
        return DataLoader(self.val_rows, self.batch_size, collate_fn=self.collate, num_workers=self.num_workers)
