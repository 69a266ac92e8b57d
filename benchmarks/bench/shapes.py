"""Models to measure with: Llamas of published shapes, with random weights that are the same every time.

Weights repeat a million random numbers: drawing all of a large model's would take longer than measuring it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sp_lightning.errors import OptionError

DEVIATION = 0.02  # standard deviation of weights, as in transformers
BLOCK = "LlamaDecoderLayer"


def _config(hidden: int, layers: int, heads: int, intermediate: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    sizes |= {"intermediate_size": intermediate, "num_key_value_heads": 8, "vocab_size": 128256}
    return {**sizes, "tie_word_embeddings": True, "use_cache": False, **more}


# The published config.json files of Llama 3.2 1B and 3B, and of Llama 3.1 8B.
CONFIGS = {
    "llama-tiny": _config(128, 4, 4, 256, num_key_value_heads=2, vocab_size=512),
    "llama-1b": _config(2048, 16, 32, 8192),
    "llama-3b": _config(3072, 28, 24, 8192),
    "llama-8b": _config(4096, 32, 32, 14336, tie_word_embeddings=False),
}


def config_of(model: str) -> dict[str, Any]:
    """Return the sizes of a model by its name, such as "llama-8b", or "llama-8b:24" for 24 layers of it."""
    name, _, layers = model.partition(":")
    if name not in CONFIGS or not (layers.isdigit() or model in CONFIGS):
        raise OptionError(argument="model", found=model, allowed=f"one of {', '.join(CONFIGS)}, or such as llama-8b:24")
    return {**CONFIGS[name], **({"num_hidden_layers": int(layers)} if layers else {})}


def build(model: str) -> nn.Module:
    """Make the model of this name; called with a batch, it returns an object with the loss."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng(devices=[]), _MatricesLater():
        torch.manual_seed(0)
        module = LlamaForCausalLM(LlamaConfig(**config_of(model)))
    # A prime number of values, so that no two rows of a matrix are alike.
    values = DEVIATION * torch.randn(1_000_003, generator=torch.Generator().manual_seed(0))
    for parameter in module.parameters():
        if parameter.dim() > 1 and not parameter.is_meta:
            for piece in torch.split(parameter.data.view(-1), len(values)):
                piece.copy_(values[: len(piece)])
    return module


def inputs(model: str, batch: int, seq: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Make a batch of random tokens, all real."""
    tokens = torch.randint(config_of(model)["vocab_size"], (batch, seq), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


class _MatricesLater(TorchFunctionMode):
    """A mode in which initialization draws random numbers for vectors alone, and matrices are zeros."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (Tensor.normal_, nn.init.normal_) and (tensor := args[0] if args else kwargs["tensor"]).dim() > 1:
            with torch.no_grad():
                return tensor.zero_()
        return func(*args, **kwargs)
