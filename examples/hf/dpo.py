"""Teach a language model to prefer good answers with TRL's DPOTrainer; the model that it began as is the reference.

python -m examples.hf.dpo [--name-or-path NAME] [--data preferences.jsonl]
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

from ..common.errors import in_one_line
from . import running


def sums(count: int) -> list[dict[str, Any]]:
    """Return sums, each with the right answer and a wrong one."""
    draw = random.Random(0)
    found = []
    for _ in range(count):
        a, b = draw.randrange(20), draw.randrange(20)
        wrong = f" {a + b + draw.randrange(1, 9)}"
        found.append({"prompt": f"{a} plus {b} is", "chosen": f" {a + b}", "rejected": wrong})
    return found


def main(given: Sequence[str] | None = None) -> None:
    """Train on records of ``{"prompt", "chosen", "rejected"}``, and write the model to ``--out``."""
    parser = running.parser(__doc__, steps=20)
    parser.add_argument("--beta", type=float, default=0.1, help="how near the reference stays; default: %(default)s")
    arguments = parser.parse_args(given)
    base = running.checkpoint(arguments)
    preferences = running.data(arguments, "preferences.jsonl", lambda: sums(400))
    with running.streamed(arguments) as stream:
        trainer = DPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
            ref_model=AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
            args=DPOConfig(**running.of_trainer(arguments), beta=arguments.beta),
            train_dataset=load_dataset("json", data_files=preferences, split="train"),
            processing_class=AutoTokenizer.from_pretrained(base),
            callbacks=[clock := running.Clock()],
        )
        trainer.train()
        trainer.save_model(str(arguments.out / "model"))
        running.say_of_trainer(clock, stream, trainer)


if __name__ == "__main__":
    with in_one_line():
        main()
