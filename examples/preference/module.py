"""Train a language model to prefer one of two answers, by direct preference optimization (DPO)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ..common import checkpoints, tiny
from ..common.arguments import NonNegativeFloat, NonNegativeInt, PositiveInt
from ..common.errors import BadInput
from ..common.files import read_jsonl
from ..common.side_by_side import SideBySide
from ..common.text import Row, TextData, collate, learns, pad
from ..finetune_llm.module import FineTuneLLM


class Preference(FineTuneLLM):
    """A language model that learns to prefer the chosen answers more than its reference does, as it was before.

    Nothing draws dropout: it would tell the model and its reference apart.

    Args:
        train: "adapters": low-rank ones over the base, which is the reference too. "all": all weights, beside a frozen
            copy of them.
        beta: How much it costs to depart from the reference.
        rank: Of the adapters.
        alpha: What they add is scaled by ``alpha / rank``.
        targets: Names of the layers that get one. None: every linear layer but the head.
        **options: FineTuneLLM's.
    """

    def __init__(
        self,
        train: Literal["adapters", "all"] = "adapters",
        beta: NonNegativeFloat = 0.1,
        rank: PositiveInt = 8,
        alpha: float = 16.0,
        targets: list[str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.save_hyperparameters()
        self.what = train
        self.beta = beta
        self.rank = rank
        self.alpha = alpha
        self.targets = targets
        self.strict_loading = False  # a checkpoint holds what is trained; the rest is read from its own

    def load(self) -> Any:
        base = super().load().eval()
        if self.what == "all":
            self.reference = super().load().eval().requires_grad_(False)
            return base
        from peft import LoraConfig

        targets = self.targets or "all-linear"
        config = LoraConfig(r=self.rank, lora_alpha=self.alpha, target_modules=targets, task_type="CAUSAL_LM")
        with torch.device("cpu"):  # wherever a plain strategy wants what is made
            model = checkpoints.adapted(base, config)
        self.side_by_side = SideBySide(model, ["default", None])
        return model

    def decide_now(self) -> None:
        if self.what == "all":  # else the loss is that of hidden states, of any model that was not refused
            super().decide_now()

    def log_probabilities(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Those of each row's answer: the model's and the reference's."""
        if self.what == "all":
            policy = self.next_tokens.each(self.model, batch)
            with torch.no_grad():
                reference = self.next_tokens.each(self.reference, batch)
        else:
            trained, frozen = self.side_by_side(batch)
            policy = self.next_tokens.each_from(self.model, trained, batch["labels"])
            with torch.no_grad():
                reference = self.next_tokens.each_from(self.model, frozen, batch["labels"])
        shape = batch["labels"].shape
        return -policy.view(shape).sum(1), -reference.view(shape).sum(1)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """DPO's; the first half of the rows are the chosen answers."""
        policy, reference = self.log_probabilities(batch)
        chosen, rejected = (self.beta * (policy - reference)).chunk(2)  # the implicit rewards
        metrics = {"margin": (chosen - rejected).mean(), "accuracy": (chosen > rejected).float().mean()}
        self.log_dict(metrics, prog_bar=True, batch_size=len(chosen), sync_dist=not self.training)
        return -logsigmoid(chosen - rejected).mean()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.what == "adapters":
            checkpoints.keep_trained(self, checkpoint)
        else:
            state = checkpoint["state_dict"]
            checkpoint["state_dict"] = {n: value for n, value in state.items() if not n.startswith("reference.")}


def side(record: dict[str, Any], key: str, where: str) -> dict[str, Any]:
    """One of the two answers with its prompt, as a record for `encode`."""
    answer, prompt = record.get(key), record.get("prompt")
    if isinstance(answer, str) and isinstance(prompt, str):
        return {"prompt": prompt, "completion": answer}
    if isinstance(answer, list) and answer and prompt is None:
        return {"messages": answer}
    raise BadInput(
        f'{where} has the keys {sorted(record)}; a record needs "prompt", "chosen" and "rejected" (all texts), or '
        '"chosen" and "rejected" (both lists of {"role": ..., "content": ...}); nothing was trained'
    )


Pair = tuple[Row, Row]  # of the chosen and the rejected answer


class PairData(TextData):
    """Pairs of answers from a JSONL file, each with its prompt in a row.

    Args:
        path: The training data. None: right and wrong sums that the recipe makes up.
        val_path: The validation data. None: there is no validation.
        tokenizer: A name or a directory. None: that of the model's checkpoint.
        block_size: Tokens in a row of a batch.
        batch_size: Pairs in a batch.
        num_workers: Processes that make batches.
    """

    def __init__(
        self,
        path: str | None = None,
        val_path: str | None = None,
        tokenizer: str | None = None,
        block_size: PositiveInt = 128,
        batch_size: PositiveInt = 4,
        num_workers: NonNegativeInt = 0,
    ) -> None:
        super().__init__(path, val_path, tokenizer, block_size, batch_size, packing=False, num_workers=num_workers)

    def made_up(self, name: str, count: int) -> str:
        """Data for a run that was given none."""
        path = tiny.place(self.trainer) / f"pairs-{name}.jsonl"
        return str(tiny.made(path, lambda part: tiny.write_jsonl(part, sums(count))))

    def rows(self, path: str) -> list[Any]:
        """What a file holds, as pairs of rows in both of which something is learned."""
        pairs = []
        for where, record in read_jsonl(path):
            sides = [self.document(side(record, key, where), where) for key in ("chosen", "rejected")]
            pairs.append(tuple(pad(sides, self.block_size, self.filler)))
        return self.learned(pairs, path, lambda pair: all(map(learns, pair)))

    def collate(self, pairs: Sequence[Pair]) -> dict[str, Tensor]:
        """A batch: all that was chosen, and then all that was rejected."""
        return collate([pair[place] for place in (0, 1) for pair in pairs])


def sums(count: int) -> list[dict[str, Any]]:
    """Chats in which the chosen sum is right, and the rejected one is not."""
    draw = random.Random(count)
    found = []
    for chat in tiny.chats(count, seed=count):
        question, answer = chat["messages"]  # type: ignore[misc]
        words, _, number = answer["content"].rstrip(".").rpartition(" ")
        wrong = {**answer, "content": f"{words} {int(number) + draw.choice((-2, -1, 1, 2))}."}
        found.append({"chosen": [question, answer], "rejected": [question, wrong]})
    return found
