"""Models that have a name in plans: their published sizes, made as real modules of transformers."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from ..errors import OptionError

TOKENS = 2048  # in a row, by default


class Listed(NamedTuple):
    """A model's class in transformers, and the sizes of its configuration."""

    kind: str  # of the configuration's class, without "Config"
    model: str
    sizes: dict[str, Any]


def _decoder(kind: str, hidden: int, layers: int, heads: int, keys: int, mlp: int, words: int, **more: Any) -> Listed:
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": mlp, "vocab_size": words}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": keys, "max_position_embeddings": 131072}
    return Listed(kind, f"{kind}ForCausalLM", {"use_cache": False, "tie_word_embeddings": False, **sizes, **more})


IMAGES = {"hidden_size": 1280, "num_hidden_layers": 32, "num_attention_heads": 16, "intermediate_size": 5120}

# Widths and depths of the models' published config.json files.
LISTED = {
    "llama-1b": _decoder("Llama", 2048, 16, 32, 8, 8192, 128256, tie_word_embeddings=True),
    "llama-3b": _decoder("Llama", 3072, 28, 24, 8, 8192, 128256, tie_word_embeddings=True),
    "llama-8b": _decoder("Llama", 4096, 32, 32, 8, 14336, 128256),
    "llama-70b": _decoder("Llama", 8192, 80, 64, 8, 28672, 128256),
    "qwen3-14b": _decoder("Qwen3", 5120, 40, 40, 8, 17408, 151936, head_dim=128),
    "qwen3-32b": _decoder("Qwen3", 5120, 64, 64, 8, 25600, 151936, head_dim=128),
    "mixtral-8x7b": _decoder("Mixtral", 4096, 32, 32, 8, 14336, 32000),
    "vit-h": Listed("ViT", "ViTForImageClassification", {**IMAGES, "patch_size": 14, "num_labels": 1000}),
}


def made(name: str, batch: Any, title: str | None) -> tuple[Callable[[], nn.Module], Any, str]:
    """Return the function that makes a listed model, a batch, and the model's name."""
    if name not in LISTED:
        allowed = f"a module, a function that makes one, or one of {', '.join(LISTED)}"
        raise OptionError(argument="module", found=name, allowed=allowed)
    if batch is None or isinstance(batch, int):
        batch = batch_of(LISTED[name], batch or 1, None)
    return maker(LISTED[name]), batch, title or name


def maker(listed: Listed) -> Callable[[], nn.Module]:
    """Return the function that makes the model, without initial values."""
    kind = listed.kind.lower()
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")

    def make() -> nn.Module:
        from transformers.initialization import no_init_weights

        config = getattr(module, f"{listed.kind}Config")(**listed.sizes)
        with no_init_weights():
            model: Any = getattr(module, listed.model)(config)
        if hasattr(model, "tie_weights"):
            model.tie_weights()  # which making initial values would have done
        return model  # type: ignore[no-any-return]

    return make


def batch_of(listed: Listed, rows: int, length: int | None) -> dict[str, torch.Tensor]:
    """Make a batch of texts or images."""
    if listed.kind == "ViT":
        if length is not None:
            raise OptionError(argument="seq", found=length, allowed="left out for a model that takes images")
        return {"pixel_values": torch.zeros(rows, 3, 224, 224), "labels": torch.zeros(rows, dtype=torch.long)}
    tokens = torch.ones(rows, length or TOKENS, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}
