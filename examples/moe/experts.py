"""Experts as modules of their own.

transformers keeps the experts of a layer in a few tensors, with the expert as their first dimension: they could only
travel together. Taken apart, each expert is a module, and a unit.

1. How a layer's experts compute is what transformers writes on their class: gated or not, transposed or not, with
   biases or without, and ``_apply_gate``. A class without these is left alone.
2. What was taken apart is tried on a few tokens, once for each class: it must give the bits of the module that it
   replaces.
3. Without weights, in a plan, no router can be asked: as many tokens go to each expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ..common.checkpoints import planned
from ..common.errors import BadInput

WRITTEN = ("has_gate", "is_transposed", "has_post_expert_norm", "_apply_gate")
WEIGHTS = {f"{name}{end}" for name in ("gate_up_proj", "up_proj", "down_proj") for end in ("", "_bias")}


class Expert(nn.Module):
    """One expert: its slices of the tensors of all, which are their memory until streaming begins."""

    def __init__(self, fused: Any, index: int) -> None:
        super().__init__()
        for name, weight in fused.named_parameters():
            self.register_parameter(name, nn.Parameter(weight.detach()[index], weight.requires_grad))
        self.transposed = fused.is_transposed
        self.first = "gate_up_proj" if fused.has_gate else "up_proj"

    def project(self, name: str, tokens: Tensor) -> Tensor:
        weight, bias = getattr(self, name), getattr(self, f"{name}_bias", None)
        if not self.transposed:
            return linear(tokens, weight, bias)
        return tokens @ weight if bias is None else tokens @ weight + bias

    def forward(self, tokens: Tensor, activate: Any) -> Tensor:
        return self.project("down_proj", activate(self.project(self.first, tokens)))


class SeparateExperts(nn.Module):
    """Does what the fused module does, expert by expert; those that no token was routed to are not called."""

    def __init__(self, fused: Any, count: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert(fused, index) for index in range(count))
        self.fused = fused  # for its activation; its weights go, once it was compared
        self.planned = planned()

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        activate = self.fused._apply_gate if self.fused.has_gate else self.fused.act_fn
        result = torch.zeros_like(hidden_states)
        for index, (place, token) in self.routed(top_k_index):
            weighted = self.experts[index](hidden_states[token], activate) * top_k_weights[token, place, None]
            result.index_add_(0, token, weighted.to(result.dtype))
        return result

    def routed(self, top_k_index: Tensor) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        """Yield each expert that tokens were routed to, and these tokens, in the order in which transformers does."""
        chosen = top_k_index.T
        if self.planned:  # Rule 3
            places = torch.arange(chosen.numel()).view(chosen.shape)
            chosen = places % len(self.experts)
        for index in torch.unique(chosen).tolist():
            if index < len(self.experts):  # else a token's place is left empty
                yield index, torch.where(chosen == index)


def is_fused(module: nn.Module) -> bool:
    """Whether a module holds all experts of a layer in a way that transformers describes."""
    names = {name for name, _ in module.named_parameters()}
    described = all(hasattr(module, name) for name in WRITTEN) and not module.has_post_expert_norm
    return described and "down_proj" in names and names <= WEIGHTS


def separate(model: nn.Module) -> int:
    """Takes the experts of every layer apart; gives the number of layers."""
    count, tried = 0, set()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if not is_fused(child):
                continue
            apart = SeparateExperts(child, len(child.down_proj))
            if type(child) not in tried and not planned():
                check_same(apart, child)
                tried.add(type(child))
            child._parameters.clear()
            setattr(parent, name, apart)
            count += 1
    return count


@torch.no_grad()
def check_same(apart: SeparateExperts, fused: Any) -> None:
    """Rule 2."""
    width = fused.down_proj.shape[2 if fused.is_transposed else 1]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(8, width, generator=generator).to(fused.down_proj.dtype)
    chosen = (torch.arange(16) % len(apart.experts)).view(8, 2)
    share = torch.full((8, 2), 0.5, dtype=tokens.dtype)
    one_by_one = type(fused).forward.__wrapped__  # whichever faster way was chosen
    if not torch.equal(apart(tokens, chosen, share), one_by_one(fused, tokens, chosen, share)):
        raise BadInput(
            f"{type(fused).__name__} computes something else than its description says, so its experts can not be "
            "taken apart; examples/finetune_llm trains the model with each layer's experts together"
        )


def fused_state(model: nn.Module) -> dict[str, Tensor]:
    """The weights under the names of the model that was taken apart. Costs a copy of all experts."""
    state = model.state_dict()
    for name, module in model.named_modules():
        if isinstance(module, SeparateExperts):
            for weight in module.experts[0]._parameters:
                parts = [state.pop(f"{name}.experts.{index}.{weight}") for index in range(len(module.experts))]
                state[f"{name}.{weight}"] = torch.stack(parts)
    return state
