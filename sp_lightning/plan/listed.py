"""Models that have a name in plans: their published sizes, made as real modules of transformers."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from ..errors import OptionError

TOKENS = 2048  # tokens in a row, by default
IMAGE = 224  # height and width of an image, if the configuration has none
BY_PYTHON = "sp_lightning.plan(make_model, batch) plans others, by Python"


# A configuration's class in transformers, without "Config", the model's class, and the sizes of the configuration.
Listed = tuple[str, str, dict[str, Any]]


def _decoder(kind: str, hidden: int, layers: int, heads: int, keys: int, mlp: int, words: int, **more: Any) -> Listed:
    """Return a decoder-only language model of these sizes, as transformers' configuration names them."""
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": mlp, "vocab_size": words}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": keys, "max_position_embeddings": 131072}
    return kind, f"{kind}ForCausalLM", {"use_cache": False, "tie_word_embeddings": False, **sizes, **more}


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
    "vit-h": ("ViT", "ViTForImageClassification", {**IMAGES, "patch_size": 14, "num_labels": 1000}),
}


def kind_of(name: str) -> tuple[Any, Any]:
    """Return a listed model's class in transformers, and its configuration."""
    if name not in LISTED:
        allowed = f"a module, a function that makes one, or one of {', '.join(LISTED)}"
        raise OptionError(argument="module", found=name, allowed=allowed)
    kind, model, sizes = LISTED[name]
    module = importlib.import_module(f"transformers.models.{kind.lower()}.modeling_{kind.lower()}")
    return getattr(module, model), getattr(module, f"{kind}Config")(**sizes)


def made(kind: Any, config: Any) -> nn.Module:
    """Make a model of transformers, without initial values."""
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model: nn.Module = kind(config)
    if hasattr(model, "tie_weights"):
        model.tie_weights()  # type: ignore[operator]  # skipped with the initial values
    return model


def made_with_adapters(kind: Any, config: Any, rank: int) -> Any:
    """Make a model of transformers that is frozen, with low-rank adapters beside its linear layers."""
    from peft import LoraConfig, get_peft_model

    with torch.device("meta"):
        adapters = LoraConfig(r=rank, target_modules="all-linear")
        return get_peft_model(made(kind, config), adapters, low_cpu_mem_usage=True)


def batch_of(kind: Any, config: Any, rows: int, tokens: int | None = None) -> dict[str, torch.Tensor]:
    """Make a batch for a model: token ids, with labels for a language model, or images."""
    if kind.main_input_name == "pixel_values":
        if tokens is not None:
            raise OptionError(argument="seq", found=tokens, allowed="left out for a model that takes images")
        size = getattr(config, "image_size", IMAGE)
        height, width = (size, size) if isinstance(size, int) else size
        return {"pixel_values": torch.zeros(rows, getattr(config, "num_channels", 3), height, width)}
    if kind.main_input_name != "input_ids":
        raise OptionError(argument="model", found=kind.__name__, allowed=f"a model of texts or images ({BY_PYTHON})")
    texts = torch.ones(rows, tokens or TOKENS, dtype=torch.long)
    predicts = any(head in kind.__name__ for head in ("LM", "Generation"))
    return {"input_ids": texts} | ({"labels": texts} if predicts else {})
