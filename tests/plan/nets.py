"""Nets of different kinds, large enough that a peak on the device is a statement about them, with a batch of each."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from models import transformer

ROWS = 8


class Net(NamedTuple):
    """A net, a batch, and what a step computes of them."""

    make: Callable[[], nn.Module]
    batch: Callable[[], Any]
    loss: Callable[[nn.Module, Any], torch.Tensor]


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Tied(nn.Module):
    """A language model whose table is its head as well."""

    def __init__(self, width: int = 256, words: int = 16384) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(12))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.table(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class Convolutions(nn.Module):
    """An image net with batch norms, whose stages differ."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [3, 64, 128, 256, 512, 512]
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.BatchNorm2d(b), nn.ReLU(), nn.Conv2d(b, b, 3, 1, 1))
            for a, b in itertools.pairwise(sizes)
        )
        self.head = nn.Linear(512, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean((2, 3)))


class Adapted(nn.Module):
    """Frozen linear layers, beside which small ones are trained."""

    def __init__(self, width: int = 1024) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"base": nn.Linear(width, width)}) for _ in range(12))
        for layer in self.layers:
            layer["base"].requires_grad_(False)
        self.blocks = nn.ModuleList(Pair(layer["base"], width) for layer in self.layers)
        del self.layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Pair(nn.Module):
    """A frozen layer and its adapter."""

    def __init__(self, base: nn.Linear, width: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(width, 8, bias=False)
        self.up = nn.Linear(8, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


def _sum(net: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return net(batch).float().square().mean()


def _scores(net: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    logits = net(batch)
    return nn.functional.cross_entropy(logits.flatten(0, -2), batch.new_zeros(logits.shape[:-1].numel()).long())


def _named(net: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return net(**batch).loss


def _tokens(length: int = 128, words: int = 1024) -> dict[str, torch.Tensor]:
    tokens = torch.arange(ROWS * length).reshape(ROWS, length) % words
    return {"input_ids": tokens, "labels": tokens}


def _images() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.zeros(ROWS, 3, 64, 64), "labels": torch.zeros(ROWS, dtype=torch.long)}


LLAMA = {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 12}
LLAMA |= {"num_attention_heads": 8, "num_key_value_heads": 4, "use_cache": False, "attn_implementation": "eager"}
MIXTRAL = {"vocab_size": 8192, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6}
MIXTRAL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "use_cache": False}
BERT = {"vocab_size": 8192, "hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6}
BERT |= {"num_attention_heads": 6, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
VIT = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 6}
VIT |= {"image_size": 64, "patch_size": 8, "num_labels": 10, "attn_implementation": "eager"}


NETS = {
    "blocks": Net(lambda: nn.Sequential(*(Block(768) for _ in range(8))), lambda: torch.zeros(512, 768), _sum),
    "tied table": Net(Tied, lambda: _tokens()["input_ids"], _scores),
    "convolutions": Net(Convolutions, lambda: torch.zeros(ROWS, 3, 128, 128), _sum),
    "adapters": Net(Adapted, lambda: torch.zeros(1024, 1024), _sum),
    "one wide layer": Net(
        lambda: nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 32768), nn.Linear(32768, 8)),
        lambda: torch.zeros(64, 512),
        _sum,
    ),
    "llama": Net(transformer("LlamaForCausalLM", "LlamaConfig", **LLAMA), _tokens, _named),
    "mixtral": Net(transformer("MixtralForCausalLM", "MixtralConfig", **MIXTRAL), _tokens, _named),
    "bert": Net(transformer("BertForMaskedLM", "BertConfig", **BERT, attn_implementation="eager"), _tokens, _named),
    "vit": Net(transformer("ViTForImageClassification", "ViTConfig", **VIT), _images, _named),
}
