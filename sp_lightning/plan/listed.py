"""Models that have a name in plans: their published sizes, made as real modules of transformers or diffusers."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from ..errors import OptionError

ROWS, TOKENS = 1, 2048


class Listed(NamedTuple):
    """The sizes of a model."""

    kind: str  # its configuration class, without "Config"
    model: str  # its class
    sizes: dict[str, Any]


def _decoder(hidden: int, layers: int, heads: int, keys: int, mlp: int, words: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "intermediate_size": mlp,
        "vocab_size": words,
        "max_position_embeddings": 131072,
        "use_cache": False,
        **more,
    }


def _llama(*sizes: int, tied: bool = False) -> Listed:
    return Listed("Llama", "LlamaForCausalLM", _decoder(*sizes, tie_word_embeddings=tied))


def _qwen(*sizes: int) -> Listed:
    return Listed("Qwen3", "Qwen3ForCausalLM", _decoder(*sizes, head_dim=128, tie_word_embeddings=False))


# Widths and depths of the models' published config.json files.
LISTED = {
    "llama-1b": _llama(2048, 16, 32, 8, 8192, 128256, tied=True),
    "llama-3b": _llama(3072, 28, 24, 8, 8192, 128256, tied=True),
    "llama-8b": _llama(4096, 32, 32, 8, 14336, 128256),
    "llama-70b": _llama(8192, 80, 64, 8, 28672, 128256),
    "qwen3-14b": _qwen(5120, 40, 40, 8, 17408, 151936),
    "qwen3-32b": _qwen(5120, 64, 64, 8, 25600, 151936),
    "mixtral-8x7b": Listed("Mixtral", "MixtralForCausalLM", _decoder(4096, 32, 32, 8, 14336, 32000)),
    "vit-h": Listed(
        "ViT",
        "ViTForImageClassification",
        {
            "hidden_size": 1280,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "intermediate_size": 5120,
            "patch_size": 14,
            "num_labels": 1000,
        },
    ),
}
SAME = {"llama3-8b": "llama-8b", "llama3-70b": "llama-70b"}


def find(name: str) -> Listed | None:
    """Return a listed model; None for a name that is not listed."""
    return LISTED.get(SAME.get(name, name))


def near(name: str) -> str:
    """Ask whether a listed name was meant; empty if none is like it."""
    found = difflib.get_close_matches(name, [*LISTED, *SAME], 1)
    return f" (did you mean {found[0]!r}?)" if found else ""


def made(name: str, batch: Any, title: str | None) -> tuple[Callable[[], nn.Module], Any, str]:
    """Return the function that makes a listed model, a batch, and the model's name."""
    found = find(name)
    if found is None:
        allowed = f"a module, a function that makes one, or one of {', '.join(LISTED)}{near(name)}"
        raise OptionError(argument="module", found=name, allowed=allowed)
    if batch is None or isinstance(batch, int):
        batch = batch_of(found, batch or ROWS, None)
    return maker(found), batch, title or SAME.get(name, name)


def maker(listed: Listed) -> Callable[[], nn.Module]:
    """Return the function that makes the model, without initial values."""
    module = _transformers(listed.kind)

    def make() -> nn.Module:
        from transformers.initialization import no_init_weights

        config = getattr(module, f"{listed.kind}Config")(**listed.sizes)
        with no_init_weights():
            return getattr(module, listed.model)(config)  # type: ignore[no-any-return]

    return make


def batch_of(listed: Listed, rows: int, length: int | None) -> dict[str, torch.Tensor]:
    """Make a batch of texts or images."""
    if listed.kind == "ViT":
        if length is not None:
            raise OptionError(argument="seq", found=length, allowed="left out for a model that takes images")
        return {"pixel_values": torch.zeros(rows, 3, 224, 224), "labels": torch.zeros(rows, dtype=torch.long)}
    tokens = torch.ones(rows, length or TOKENS, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}


def _transformers(kind: str) -> Any:
    import importlib

    try:
        return importlib.import_module(f"transformers.models.{kind.lower()}.modeling_{kind.lower()}")
    except ImportError as error:
        allowed = "a model that does not need transformers, which is not installed: pip install 'sp-lightning[models]'"
        raise OptionError(argument="model", found=kind, allowed=allowed) from error
