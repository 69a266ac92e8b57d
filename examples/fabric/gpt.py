"""A small GPT over bytes, in plain torch, as loops for Fabric are written around."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..common.errors import BadInput

VOCABULARY = 256  # bytes


@dataclass(frozen=True)
class Sizes:
    """What a model is made of."""

    layers: int = 4
    heads: int = 4
    width: int = 64
    context: int = 128


class Cache(nn.Module):
    """Keys and values of the tokens so far."""

    keys: Tensor
    values: Tensor

    def __init__(self, rows: int, sizes: Sizes, device: torch.device) -> None:
        super().__init__()
        shape = (rows, sizes.heads, sizes.context, sizes.width // sizes.heads)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(shape, device=device), persistent=False)

    def forward(self, positions: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self.keys, self.values = self.keys.to(keys.dtype), self.values.to(values.dtype)  # autocast's, if there is one
        return self.keys.index_copy_(2, positions, keys), self.values.index_copy_(2, positions, values)


class Attention(nn.Module):
    """Causal attention; with a cache, to the tokens before these as well."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.qkv = nn.Linear(sizes.width, 3 * sizes.width)
        self.proj = nn.Linear(sizes.width, sizes.width)
        self.cache: Cache | None = None

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        rows, length, width = x.shape
        queries, keys, values = self.qkv(x).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.cache is not None:
            keys, values = self.cache(positions, keys, values)
        mixed = nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        return self.proj(mixed.transpose(1, 2).reshape(rows, length, width))


class Block(nn.Module):
    """Attention and a network behind it."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm_1, self.attention = nn.LayerNorm(sizes.width), Attention(sizes)
        self.norm_2 = nn.LayerNorm(sizes.width)
        self.mlp = nn.Sequential(
            nn.Linear(sizes.width, 4 * sizes.width), nn.GELU(), nn.Linear(4 * sizes.width, sizes.width)
        )

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x), positions, mask)
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """Logits of the next byte."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        if sizes.width % sizes.heads:
            raise BadInput(f"a width of {sizes.width} cannot be divided into {sizes.heads} heads")
        self.sizes = sizes
        self.tokens = nn.Embedding(VOCABULARY, sizes.width)
        self.positions = nn.Embedding(sizes.context, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return the logits behind each token; with positions, those of tokens that follow what is cached."""
        if positions is None:
            positions = seen = torch.arange(tokens.shape[1], device=tokens.device)
        else:
            seen = torch.arange(self.sizes.context, device=tokens.device)
        mask = seen <= positions[:, None]
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x, positions, mask)
        return self.head(self.norm(x))

    def make_caches(self, rows: int, device: torch.device) -> None:
        """Make room for the keys and values of so many rows."""
        for block in self.blocks:
            block.attention.cache = Cache(rows, self.sizes, device)


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Cross-entropy of each byte but the first."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
