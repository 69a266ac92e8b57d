"""Train a language model by a reward of its own answers with TRL's GRPOTrainer.

python -m examples.hf.grpo [--name-or-path NAME] [--data prompts.jsonl]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from ..common import tiny
from ..common.errors import in_one_line, positive
from . import running


def varied(completions: list[str], **_: Any) -> list[float]:
    """Reward answers for the share of different characters in them."""
    return [len(set(text)) / max(1, len(text)) for text in completions]


def main(given: Sequence[str] | None = None) -> None:
    """Train on records of ``{"prompt"}``, and write the model to ``--out``."""
    parser = running.parser(__doc__, steps=5)
    parser.add_argument("--answers", type=positive, default=4, help="to each prompt; default: %(default)s")
    parser.add_argument("--tokens", type=positive, default=16, help="of an answer, at most; default: %(default)s")
    parser.add_argument("--beta", type=float, default=0.0, help="above 0 a reference streams, too")
    arguments = parser.parse_args(given)
    base = running.checkpoint(arguments)
    prompts = running.data(arguments, "prompts.jsonl", lambda: [{"prompt": text[:20]} for text in tiny.sentences(200)])
    sizes = {"num_generations": arguments.answers, "max_completion_length": arguments.tokens, "beta": arguments.beta}
    with running.streamed(arguments) as stream:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
            reward_funcs=varied,
            args=GRPOConfig(**running.of_trainer(arguments), **sizes),
            train_dataset=load_dataset("json", data_files=prompts, split="train"),
            processing_class=AutoTokenizer.from_pretrained(base),
            callbacks=[clock := running.Clock()],
        )
        trainer.train()
        trainer.save_model(str(arguments.out / "model"))
        running.say_of_trainer(clock, stream, trainer)


if __name__ == "__main__":
    with in_one_line():
        main()
