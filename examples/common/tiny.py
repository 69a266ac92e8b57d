"""Tiny checkpoints and data, made on the spot: what a recipe runs on when it is given none of its own.

They are written where the run writes, as the files that a user would bring, and read by the code that reads those.
Each is made once, whole or not at all, and draws its random numbers without touching the run's.
"""

import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path

import lightning as L
import torch

from .files import whole

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
COLOURS = {"red": (220, 40, 40), "green": (40, 200, 60), "blue": (50, 70, 220), "yellow": (230, 220, 50)}
ANIMALS, THINGS = ("cat", "dog", "owl", "fox"), ("stone", "leaf", "boat", "lamp")


def place(trainer: L.Trainer) -> Path:
    """Where a run keeps what it made for itself."""
    return Path(trainer.default_root_dir) / "tiny"


def made(path: Path, make: Callable[[Path], None]) -> Path:
    """The file or folder, made if it is not there yet; the run's random numbers stay what they were."""
    if not path.exists():
        with torch.random.fork_rng(devices=[]), whole(path) as part:
            torch.manual_seed(0)
            make(part)
    return path


# ---- text


def sentences(count: int) -> list[str]:
    """Sentences that a small model can learn: who sees what follows from who and where."""
    draw = random.Random(0)
    found = []
    for _ in range(count):
        animal, thing, colour = draw.choice(ANIMALS), draw.choice(THINGS), draw.choice(list(COLOURS))
        found.append(f"The {animal} sees a {colour} {thing} and then another {thing}, which is {colour} too.")
    return found


def chats(count: int, seed: int = 0) -> list[dict[str, object]]:
    """Sums, asked and answered."""
    draw = random.Random(seed)
    found: list[dict[str, object]] = []
    for _ in range(count):
        a, b = draw.randrange(20), draw.randrange(20)
        question, answer = f"What is {a} plus {b}?", f"{a} plus {b} is {a + b}."
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        found.append({"messages": messages})
    return found


def write_jsonl(path: Path, records: Iterable[object]) -> None:
    """One record a line."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def tokenizer(texts: Iterable[str], vocabulary: int = 384, extra: Iterable[str] = ()):
    """A byte-level BPE tokenizer with a chat template, trained on these texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", *extra]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=CHAT_TEMPLATE,
        extra_special_tokens=list(extra),
        padding_side="left",
    )


def language_model(folder: Path) -> None:
    """A checkpoint directory: a Llama of four layers in several shards, and its tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    words = tokenizer([*sentences(200), json.dumps(chats(200))])
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        pad_token_id=words.pad_token_id,
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="400KB")
    words.save_pretrained(folder)
