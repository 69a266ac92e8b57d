"""Fine-tune a language model on chats with TRL's SFTTrainer.

python -m examples.hf.sft [--name-or-path NAME] [--data chats.jsonl] [--lora 16]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from ..common import tiny
from ..common.errors import in_one_line, positive
from . import running


def main(given: Sequence[str] | None = None) -> None:
    """Train on records of ``{"messages": [...]}``, and write the model, or its adapters, to ``--out``."""
    parser = running.parser(__doc__, steps=20)
    parser.add_argument("--lora", type=int, default=0, help="rank of adapters on a frozen model; default: all weights")
    parser.add_argument("--max-length", type=positive, default=128, help="tokens of a chat; default: %(default)s")
    arguments = parser.parse_args(given)
    base = running.checkpoint(arguments)
    chats = running.data(arguments, "chats.jsonl", lambda: tiny.chats(400))
    adapters = LoraConfig(r=arguments.lora, target_modules="all-linear") if arguments.lora else None
    with running.streamed(arguments) as stream:
        trainer = SFTTrainer(
            model=AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
            args=SFTConfig(**running.of_trainer(arguments), max_length=arguments.max_length),
            train_dataset=load_dataset("json", data_files=chats, split="train"),
            processing_class=AutoTokenizer.from_pretrained(base),
            peft_config=adapters,
            callbacks=[clock := running.Clock()],
        )
        trainer.train()
        trainer.save_model(str(arguments.out / "model"))
        running.say_of_trainer(clock, stream, trainer)


if __name__ == "__main__":
    with in_one_line():
        main()
