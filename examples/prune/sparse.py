"""Linear layers that compute with their largest weights alone, and files that hold only these.

1. Each weight has a code beside it: 2, it is used; 1, it has a gradient, by which it may come to be used; 0, neither.
   A weight that is not used keeps its value.
2. Codes are parameters without a gradient: they travel up with the weights they belong to, and never down.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import linear

from ..common.checkpoints import fill
from ..common.files import existing

USED, LEARNED = 2, 1
FILE = "sparse.safetensors"
BITS, VALUES = ".bits", ".values"  # what a file has of a weight in place of it


class Used(torch.autograd.Function):
    """Return the weights that are used; give all that are learned a gradient, as if they were used."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, codes: Tensor, share: Tensor, penalty: float) -> Tensor:
        ctx.penalty = penalty
        ctx.save_for_backward(codes, *([weight, share] if penalty else []))
        return torch.where(codes == USED, weight, 0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        codes, *others = ctx.saved_tensors
        found = torch.where(codes >= LEARNED, gradients[0], 0)
        if others:  # a pull towards 0, stronger on those that are learned and not used
            weight, share = others
            pull = torch.where(codes == USED, weight, torch.where(codes == LEARNED, weight / share, 0))
            found = found + ctx.penalty * pull
        return found, None, None, None


class SparseLinear(nn.Linear):
    """A linear layer that uses the weights whose code says so."""

    codes: nn.Parameter
    share: Tensor  # of its weights that are used
    penalty = 0.0

    @classmethod
    def of(cls, layer: nn.Linear, penalty: float) -> None:
        """Turn a linear layer into one of these, whose weights are all used so far."""
        layer.__class__ = cls
        layer.penalty = penalty  # type: ignore[assignment]
        layer.codes = nn.Parameter(torch.full_like(layer.weight, USED, dtype=torch.uint8), requires_grad=False)
        layer.register_buffer("share", layer.weight.new_ones((), requires_grad=False))

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, Used.apply(self.weight, self.codes, self.share, self.penalty), self.bias)

    @torch.no_grad()
    def chosen(self, used: float, learned: float) -> Tensor:
        """Return the codes by which the largest weights, in these shares, are used and learned."""
        size = self.weight.abs().flatten()
        codes = torch.zeros_like(size, dtype=torch.uint8)
        for share, code in ((learned, LEARNED), (used, USED)):
            count = max(1, round(share * len(size)))
            codes[size.topk(count, sorted=False).indices] = code
        return codes.view_as(self.weight)


@torch.no_grad()
def renew(model: nn.Module, used: float, learned: float) -> None:
    """Choose the weights that are used and learned from now on.

    All layers of a block are read before the first of them is written: what is written makes its unit travel again.
    """
    for _, block in itertools.groupby(sparse_layers(model).items(), key=lambda named: block_of(named[0])):
        for layer, codes in [(layer, layer.chosen(used, learned)) for _, layer in block]:
            layer.codes.copy_(codes)
            layer.share.fill_(used)


def block_of(name: str) -> str:
    """Return the first part of a module's name, up to the number of a block."""
    found = re.match(r".*?\.\d+(?=\.)", name)
    return name if found is None else found[0]


def sparse_layers(model: nn.Module) -> dict[str, SparseLinear]:
    """Return the sparse layers of a model, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, SparseLinear)}


def save(model: Any, folder: Path) -> None:
    """Write a model's used weights and where they are, with its other weights and its config."""
    state, seen = {}, set()
    layers = sparse_layers(model)
    for name, weight in model.state_dict().items():
        owner, _, kind = name.rpartition(".")
        if (
            owner in layers and kind in ("codes", "share")
        ) or weight.data_ptr() in seen:  # tied weights are written once
            continue
        seen.add(weight.data_ptr())
        if owner in layers and kind == "weight":
            used = layers[owner].codes.detach().cpu() == USED
            state[name + BITS] = torch.from_numpy(numpy.packbits(used.flatten().numpy()))
            state[name + VALUES] = weight.cpu()[used]
        else:
            state[name] = weight.cpu().contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(folder)
    save_file(state, folder / FILE, {"format": "pt"})


def load(folder: str | Path) -> Any:
    """Load a model that ``save`` wrote, with zeros for the weights that were not used."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    state = load_file(existing(Path(folder) / FILE, "the file of sparse weights"))
    for name in [name.removesuffix(BITS) for name in state if name.endswith(BITS)]:
        values, shape = state.pop(name + VALUES), model.get_parameter(name).shape
        used = numpy.unpackbits(state.pop(name + BITS).numpy(), count=shape.numel()).astype(bool)
        state[name] = torch.zeros(shape.numel(), dtype=values.dtype)
        state[name][torch.from_numpy(used)] = values
        state[name] = state[name].view(shape)
    fill(model, state, folder)
    return model.eval()
