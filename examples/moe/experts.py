"""Experts as modules of their own.

transformers keeps the experts of a layer in two tensors, ``gate_up_proj`` and ``down_proj``, with the expert as their
first dimension: they could only travel together. Taken apart, each expert is a module, and a unit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


class Expert(nn.Module):
    """One expert: its slices of the tensors of all, which are their memory until streaming begins."""

    def __init__(self, fused: Any, index: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(fused.gate_up_proj.detach()[index], fused.gate_up_proj.requires_grad)
        self.down_proj = nn.Parameter(fused.down_proj.detach()[index], fused.down_proj.requires_grad)
        self.act_fn = fused.act_fn

    def forward(self, tokens: Tensor) -> Tensor:
        gate, up = linear(tokens, self.gate_up_proj).chunk(2, dim=-1)
        return linear(self.act_fn(gate) * up, self.down_proj)


class SeparateExperts(nn.Module):
    """Does what the fused module does, expert by expert; those that no token was routed to are not called."""

    def __init__(self, fused: Any) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert(fused, index) for index in range(fused.gate_up_proj.shape[0]))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        result = torch.zeros_like(hidden_states)
        for index in torch.unique(top_k_index).tolist():
            if index == len(self.experts):  # where a token's place is left empty
                continue
            token, place = torch.where(top_k_index == index)
            weighted = self.experts[index](hidden_states[token]) * top_k_weights[token, place, None]
            result.index_add_(0, token, weighted.to(result.dtype))
        return result


def is_fused(module: nn.Module) -> bool:
    """Whether a module holds all experts of a layer in the way that transformers does."""
    shapes = (getattr(module, name, torch.empty(0)).ndim for name in ("gate_up_proj", "down_proj"))
    own = set(module._parameters)
    return own == {"gate_up_proj", "down_proj"} and all(ndim == 3 for ndim in shapes) and hasattr(module, "act_fn")


def separate(model: nn.Module) -> int:
    """Takes the experts of every layer apart; gives the number of layers."""
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if is_fused(child):
                setattr(parent, name, SeparateExperts(child))
                count += 1
    return count


def fused_state(model: nn.Module) -> dict[str, Tensor]:
    """The weights under the names of the model that was taken apart. Costs a copy of all experts."""
    state = model.state_dict()
    for name, module in model.named_modules():
        if isinstance(module, SeparateExperts):
            for weight in ("gate_up_proj", "down_proj"):
                parts = [state.pop(f"{name}.experts.{index}.{weight}") for index in range(len(module.experts))]
                state[f"{name}.{weight}"] = torch.stack(parts)
    return state
