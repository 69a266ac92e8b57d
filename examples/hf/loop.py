"""Fine-tune a language model in a loop with accelerate.

python -m examples.hf.loop [--name-or-path NAME] [--data texts.jsonl]
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..common import tiny
from ..common.errors import in_one_line, positive
from ..common.files import read_jsonl
from . import running


def main(given: Sequence[str] | None = None) -> None:
    """Train on records of ``{"text"}``, and write the model to ``--out``."""
    parser = running.parser(__doc__, steps=20)
    parser.add_argument("--accumulate", type=positive, default=2, help="batches in a step; default: %(default)s")
    parser.add_argument("--max-length", type=positive, default=128, help="tokens of a text; default: %(default)s")
    arguments = parser.parse_args(given)
    base = running.checkpoint(arguments)
    texts = running.data(arguments, "texts.jsonl", lambda: [{"text": text} for text in tiny.sentences(400)])
    words = AutoTokenizer.from_pretrained(base)

    def batch_of(records: list[str]) -> Any:
        batch = words(records, return_tensors="pt", padding=True, truncation=True, max_length=arguments.max_length)
        return batch | {"labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}

    rows = [record["text"] for _, record in read_jsonl(texts)]
    with running.streamed(arguments) as stream:
        precision = "bf16" if arguments.bf16 else "no"
        accelerator = Accelerator(gradient_accumulation_steps=arguments.accumulate, mixed_precision=precision)
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), arguments.lr)
        loader = DataLoader(rows, arguments.batch_size, shuffle=True, collate_fn=batch_of)  # type: ignore[arg-type]
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        model.train()
        clock = running.Clock()
        batches = itertools.chain.from_iterable(itertools.repeat(loader))
        for batch in itertools.islice(batches, arguments.steps * arguments.accumulate):
            with accelerator.accumulate(model):
                loss = model(**batch, use_cache=False).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                clock.tick()
        trained = accelerator.unwrap_model(model)
        trained.save_pretrained(arguments.out / "model", is_main_process=accelerator.is_main_process)
        running.say(clock, stream, loss.item(), trained, optimizer, accelerator.device)


if __name__ == "__main__":
    with in_one_line():
        main()
