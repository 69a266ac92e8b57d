"""A frozen base in few bits: linear layers whose weights travel, and lie on the host, as a library packs them.

1. Of bitsandbytes the packed bytes and the scale of each block are plain frozen parameters, so they stream like any
   other weight. A layer unpacks its weight when it is used. The unpacked one lives as long as autograd needs it, which
   is until the block's backward with ``activations: recompute``.
2. A weight of torchao's consists of tensors, and streams as these. What the layer computes is torchao's own.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .errors import BadInput

Form = Literal[4, 8, "int8", "float8", "nf4", "nvfp4"]  # 4 and 8 are bits of bitsandbytes', the others torchao's
BLOCK = 64  # weights that share a scale


def library(form: Form) -> Any:
    """What packs and unpacks, or an error that says what to install."""
    name, needed = ("torchao", "torchao.quantization") if isinstance(form, str) else ("bitsandbytes",) * 2
    if importlib.util.find_spec(name) is None:
        raise BadInput(
            f"base_bits={form} needs {name}, which is not installed: pip install {name}, or leave out "
            "base_bits for a base in the precision of its checkpoint"
        )
    return importlib.import_module("bitsandbytes.functional" if name == needed else needed)


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


def quantize(model: nn.Module, form: Form, leave: Iterable[nn.Module | None] = ()) -> None:
    """Pack and freeze every linear layer but those in the modules to be left (the head), one at a time."""
    library(form)
    left = {module for root in leave if root is not None for module in root.modules()}
    plain = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and child not in left
    ]
    if not plain:
        raise BadInput(f"base_bits={form} packs nn.Linear, of which {type(model).__name__} has none but its head")
    for parent, name, child in plain:
        if isinstance(form, str):
            by_torchao(child.requires_grad_(False), form, name)
        else:
            setattr(parent, name, QuantizedLinear(child, form))


def by_torchao(layer: nn.Linear, form: str, name: str) -> None:
    """Give a frozen layer the weight that torchao makes of its own."""
    torchao = library("int8")
    try:
        if form == "nf4":
            blocks = math.gcd(layer.weight.numel() // BLOCK, 256)  # of which the scales share one
            weight = torchao.NF4Tensor.from_tensor(layer.weight.detach(), block_size=BLOCK, scaler_block_size=blocks)
            layer.weight = nn.Parameter(weight, requires_grad=False)
        elif form == "nvfp4":
            formats = importlib.import_module("torchao.prototype.mx_formats")
            torchao.quantize_(layer, formats.NVFP4WeightOnlyConfig())
        else:
            kind = torchao.Int8WeightOnlyConfig if form == "int8" else torchao.Float8WeightOnlyConfig
            torchao.quantize_(layer, kind())
    except (AssertionError, NotImplementedError, RuntimeError, ValueError) as error:
        shape = tuple(layer.weight.shape)
        raise BadInput(f"base_bits={form} cannot pack {name}, of shape {shape}: {error}") from error
