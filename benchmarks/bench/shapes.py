"""Models to measure with, of published shapes: Llamas, a vision model, and one that reads text and images.

Their weights are random, and the same every time.

Weights repeat a million random numbers: drawing all of a large model's would take longer than measuring it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sp_lightning.errors import OptionError

DEVIATION = 0.02  # standard deviation of weights, as in transformers
BLOCKS = ("LlamaDecoderLayer", "ViTLayer", "CLIPEncoderLayer")
CLASSES = 1000  # of images


def _config(hidden: int, layers: int, heads: int, intermediate: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    sizes |= {"intermediate_size": intermediate, "num_key_value_heads": 8, "vocab_size": 128256}
    return {**sizes, "tie_word_embeddings": True, "use_cache": False, **more}


def _vision(hidden: int, layers: int, heads: int, image: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {**sizes, "intermediate_size": 4 * hidden, "image_size": image, "patch_size": 14, **more}


def _llava(text: dict[str, Any], vision: dict[str, Any]) -> dict[str, Any]:
    towers = {"text_config": {"model_type": "llama", **text}, "vision_config": {"model_type": "clip_vision_model"}}
    towers["vision_config"] |= vision
    return {**towers, "image_token_id": text["vocab_size"] - 1, "num_hidden_layers": text["num_hidden_layers"]}


# The published config.json files of Llama 3.2 1B and 3B, of Llama 3.1 8B, of ViT-H/14, and of LLaVA's vision tower.
CONFIGS = {
    "llama-tiny": _config(128, 4, 4, 256, num_key_value_heads=2, vocab_size=512),
    "llama-1b": _config(2048, 16, 32, 8192),
    "llama-3b": _config(3072, 28, 24, 8192),
    "llama-8b": _config(4096, 32, 32, 14336, tie_word_embeddings=False),
    "vit-tiny": _vision(64, 4, 4, 28, num_labels=CLASSES),
    "vit-h": _vision(1280, 32, 16, 224, num_labels=CLASSES),
}
CONFIGS["llava-tiny"] = _llava(CONFIGS["llama-tiny"], _vision(64, 4, 4, 28))
CONFIGS["llava-1b"] = _llava(CONFIGS["llama-1b"], _vision(1024, 24, 16, 336))


def config_of(model: str) -> dict[str, Any]:
    """Return the sizes of a model by its name, such as "llama-8b", or "llama-8b:24" for 24 layers of it."""
    name, _, layers = model.partition(":")
    if name not in CONFIGS or not (layers.isdigit() or model in CONFIGS):
        raise OptionError(argument="model", found=model, allowed=f"one of {', '.join(CONFIGS)}, or such as llama-8b:24")
    return {**CONFIGS[name], **({"num_hidden_layers": int(layers)} if layers else {})}


def tiny(model: str) -> str:
    """Name the smallest model of the same kind."""
    return f"{model.partition('-')[0]}-tiny"


def build(model: str, rank: int = 0) -> nn.Module:
    """Make the model of this name; called with a batch, it returns an object with the loss.

    With a rank its weights are frozen, and adapters of that rank train at all of its linear layers.
    """
    with torch.random.fork_rng(devices=[]), _MatricesLater():
        torch.manual_seed(0)
        module = _made(model)
    # A prime number of values, so that no two rows of a matrix are alike.
    values = DEVIATION * torch.randn(1_000_003, generator=torch.Generator().manual_seed(0))
    for parameter in module.parameters():
        if parameter.dim() > 1 and not parameter.is_meta:
            for piece in torch.split(parameter.data.view(-1), len(values)):
                piece.copy_(values[: len(piece)])
    return _with_adapters(module, rank) if rank else module


def _made(model: str) -> nn.Module:
    import transformers

    kind, config = model.partition("-")[0], config_of(model)
    if kind == "vit":
        return transformers.ViTForImageClassification(transformers.ViTConfig(**config))
    if kind == "llava":
        return transformers.LlavaForConditionalGeneration(transformers.LlavaConfig(**config))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))


def _with_adapters(module: nn.Module, rank: int) -> nn.Module:
    import peft

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        config = peft.LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
        return peft.get_peft_model(module, config, autocast_adapter_dtype=False)


def inputs(model: str, batch: int, seq: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Make a batch of random tokens, all real, and of random images; ``seq`` tokens with those of an image."""
    config = config_of(model)
    text, vision = config.get("text_config", config), config.get("vision_config", config)
    found, image_tokens = dict[str, Tensor](), 0
    if size := vision.get("image_size"):
        found["pixel_values"] = torch.randn(batch, 3, size, size, generator=generator)
        image_tokens = (size // vision["patch_size"]) ** 2
    if "vocab_size" not in text:
        return {**found, "labels": torch.randint(CLASSES, (batch,), generator=generator)}
    tokens = torch.randint(text["vocab_size"] - bool(found), (batch, seq), generator=generator)
    tokens[:, :image_tokens] = config.get("image_token_id", 0)
    return {**found, "input_ids": tokens, "labels": tokens}


class _MatricesLater(TorchFunctionMode):
    """A mode in which initialization draws random numbers for vectors alone, and matrices are zeros."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (Tensor.normal_, nn.init.normal_) and (tensor := args[0] if args else kwargs["tensor"]).dim() > 1:
            with torch.no_grad():
                return tensor.zero_()
        return func(*args, **kwargs)
