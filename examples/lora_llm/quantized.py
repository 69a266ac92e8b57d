"""A frozen base in 8 or 4 bits: linear layers whose weights travel, and lie on the host, as bitsandbytes packs them.

1. The packed bytes and the scale of each block are plain frozen parameters, so they stream like any other weight.
2. A layer unpacks its weight when it is used. The unpacked one lives as long as autograd needs it, which is until the
   block's backward with ``activations: recompute``.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor, nn

from ..common.errors import BadInput

BLOCK = 64  # weights that share a scale


def library(bits: int) -> Any:
    """What packs and unpacks, or an error that says what to install."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise BadInput(
            f"base_bits={bits} needs bitsandbytes, which is not installed: pip install bitsandbytes, or leave out "
            "base_bits for a base in the precision of its checkpoint"
        )
    return importlib.import_module("bitsandbytes.functional")


class QuantizedLinear(nn.Linear):
    """A frozen linear layer, packed."""

    def __init__(self, plain: nn.Linear, bits: int) -> None:
        with torch.device("meta"):
            super().__init__(plain.in_features, plain.out_features, bias=False)
        self.functional = library(bits)
        weight = plain.weight.detach().float().contiguous()
        pack = self.functional.quantize_4bit if bits == 4 else self.functional.quantize_blockwise
        packed, state = pack(weight, blocksize=BLOCK, **({"quant_type": "nf4"} if bits == 4 else {}))
        self.bits = bits
        self.dtype = plain.weight.dtype
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.scales = nn.Parameter(state.absmax, requires_grad=False)
        self.bias = None if plain.bias is None else nn.Parameter(plain.bias.detach(), requires_grad=False)
        self.register_buffer("code", state.code, persistent=False)

    def unpacked(self) -> Tensor:
        """The weight, as it was before it was packed, nearly."""
        shape = torch.Size((self.out_features, self.in_features))
        kind = {"quant_type": "nf4"} if self.bits == 4 else {}
        state = self.functional.QuantState(self.scales, shape, self.code, BLOCK, dtype=self.dtype, **kind)
        unpack = self.functional.dequantize_4bit if self.bits == 4 else self.functional.dequantize_blockwise
        return unpack(self.weight, state)

    def forward(self, input: Tensor) -> Tensor:
        weight = self.unpacked()
        return nn.functional.linear(input.to(weight.dtype), weight, self.bias)


def quantize(model: nn.Module, bits: int, leave: nn.Module | None) -> None:
    """Packs every linear layer but one (the head), one at a time."""
    library(bits)
    plain = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and child is not leave
    ]
    if not plain:
        raise BadInput(f"base_bits={bits} packs nn.Linear, of which {type(model).__name__} has none but its head")
    for parent, name, child in plain:
        setattr(parent, name, QuantizedLinear(child, bits))
