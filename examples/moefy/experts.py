"""Feed-forward layers that are split into a shared part and experts, of which each token uses one.

1. What a layer makes of a token is the sum of what each of its neurons makes of it, so neurons can be dealt out: the
   most important ones to the shared part, the others to the experts in turn. Each part is a module, and a unit.
2. The expert of a token is chosen by the token's number, from a table that is drawn once for each layer (a random
   hash): nothing has to be learned to route, and every expert gets as many of the vocabulary's tokens. numpy draws it,
   so that a plan of a run, which has no weights, still has the table and knows which experts run.
3. A neuron's importance is how much the loss would change without it, to first order: what it makes, times the
   gradient of that, summed over a row of tokens, and of that the size, summed over rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..common.checkpoints import fill
from ..common.errors import BadInput
from ..common.files import existing

LAYERS = ("gate_proj", "up_proj", "down_proj")
SPLIT = "moefied.json"  # beside a model's weights: how it was split


class Tokens:
    """The tokens of the latest forward, by which experts are chosen; backward may run parts of it again."""

    ids: Any = None

    def read(self, model: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Read the tokens where a forward of the model begins."""
        ids = options.get("input_ids", arguments[0] if arguments else None)
        if ids is None:
            raise BadInput("a model that chooses experts by tokens needs input_ids")
        self.ids = ids


class Expert(nn.Module):
    """Some neurons of a gated feed-forward layer, the shared ones or an expert's."""

    def __init__(self, width: int, neurons: int, activation: Callable[[Tensor], Tensor], like: Any, last: bool) -> None:
        super().__init__()
        dtype, bias = like.up_proj.weight.dtype, like.up_proj.bias is not None
        self.gate_proj = nn.Linear(width, neurons, like.gate_proj.bias is not None, dtype=dtype)
        self.up_proj = nn.Linear(width, neurons, bias, dtype=dtype)
        self.down_proj = nn.Linear(neurons, width, last and like.down_proj.bias is not None, dtype=dtype)
        self.activation = activation

    def forward(self, tokens: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_proj(tokens)) * self.up_proj(tokens))

    @torch.no_grad()
    def fill(self, dense: Any, neurons: Tensor) -> None:
        """Take these neurons of a dense layer."""
        for name in LAYERS:
            mine, theirs = getattr(self, name), getattr(dense, name)
            among = neurons.to(theirs.weight.device)
            mine.weight.copy_(theirs.weight[:, among] if name == "down_proj" else theirs.weight[among])
            if mine.bias is not None:
                mine.bias.copy_(theirs.bias if name == "down_proj" else theirs.bias[among])


class SplitFeedForward(nn.Module):
    """A layer that does for each token what the shared neurons and one expert of a dense layer do (Rule 1)."""

    table: Tensor

    def __init__(self, dense: Any, tokens: Tokens, vocabulary: int, experts: int, shared: float, seed: int) -> None:
        super().__init__()
        neurons, width = dense.up_proj.weight.shape
        each = int((1 - shared) * neurons) // experts
        if experts < 2 or not 0 <= shared < 1 or each < 1:
            raise BadInput(f"{neurons} neurons cannot be split into {experts} experts and a share of {shared} for all")
        self.tokens = tokens
        self.shared = Expert(width, neurons - experts * each, dense.act_fn, dense, last=True)
        self.experts = nn.ModuleList(Expert(width, each, dense.act_fn, dense, last=False) for _ in range(experts))
        drawn = np.random.default_rng(seed).permutation(vocabulary) % experts
        self.register_buffer("table", torch.from_numpy(drawn.astype(np.int32)))  # Rule 2; gloo broadcasts none of int16

    def fill(self, dense: Any, order: Tensor) -> None:
        """Deal out the neurons of a dense layer, the most important ones first (Rule 1)."""
        shared = self.shared.up_proj.out_features
        self.shared.fill(dense, order[:shared])
        for index, expert in enumerate(self.experts):
            expert.fill(dense, order[shared + index :: len(self.experts)])

    def forward(self, hidden_states: Tensor) -> Tensor:
        tokens = hidden_states.flatten(0, -2)
        chosen = self.table[self.tokens.ids.flatten()]
        result = self.shared(tokens)
        for index in torch.unique(chosen).tolist():  # an expert without tokens does not travel
            (place,) = torch.where(chosen == index)
            result = result.index_add(0, place, self.experts[index](tokens[place]))
        return result.view_as(hidden_states)


def feed_forwards(model: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """Return the dense layers that can be split, each with the module that it is in and its name there."""
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if hasattr(child, "act_fn") and all(type(getattr(child, part, None)) is nn.Linear for part in LAYERS)
    ]


def split(model: Any, experts: int, shared: float, weights: bool = True) -> list[SplitFeedForward]:
    """Put a split layer in the place of each dense one, its neurons dealt out in the order in which they are there.

    Without ``weights``, in a plan, there are no neurons to deal out.
    """
    tokens, vocabulary, made = Tokens(), model.config.get_text_config().vocab_size, []
    for parent, name, dense in feed_forwards(model):
        layer = SplitFeedForward(dense, tokens, vocabulary, experts, shared, seed=len(made))
        if weights:
            layer.fill(dense, torch.arange(dense.up_proj.out_features))
            if not made:
                check_sum(layer, dense)
        setattr(parent, name, layer)
        made.append(layer)
    if not made:
        raise BadInput(
            f"{type(model).__name__} has no feed-forward layers with {', '.join(LAYERS)} and act_fn, as Llama, "
            "Mistral, Qwen and Gemma have; nothing was split"
        )
    model.register_forward_pre_hook(tokens.read, with_kwargs=True)
    return made


@torch.no_grad()
def check_sum(layer: SplitFeedForward, dense: Any) -> None:
    """Refuse a dense layer that is not the sum of its parts (Rule 1)."""
    tokens = torch.randn(4, dense.up_proj.in_features, generator=torch.Generator().manual_seed(0))
    tokens = tokens.to(dense.up_proj.weight.dtype)
    parts = layer.shared(tokens) + sum(expert(tokens) for expert in layer.experts)
    expected = dense(tokens)
    if (parts - expected).abs().max() > expected.abs().max() * torch.finfo(tokens.dtype).eps ** 0.5:
        raise BadInput(f"{type(dense).__name__} does more than its neurons do one by one, so it cannot be split")


class Watch(torch.autograd.Function):
    """Pass on the output of a layer's neurons; in backward, add up their importance (Rule 3)."""

    @staticmethod
    def forward(ctx: Any, made: Tensor, starts: Tensor, total: Tensor) -> Tensor:
        ctx.save_for_backward(made)
        ctx.total = total
        return made.view_as(made)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (made,) = ctx.saved_tensors
        ctx.total.add_((made.float() * gradients[0].float()).sum(-2).abs().flatten(0, -2).sum(0))
        return gradients[0], gradients[0].new_zeros(()), None


@contextmanager
def watched(model: nn.Module, device: torch.device) -> Iterator[list[Tensor]]:
    """Add up the importance of each dense layer's neurons in the backwards of this context."""
    layers = [dense for _, _, dense in feed_forwards(model)]
    totals = [torch.zeros(dense.up_proj.out_features, device=device) for dense in layers]
    starts = torch.zeros((), device=device, requires_grad=True)  # of a frozen model nothing else would have a gradient

    def watch(total: Tensor) -> Any:
        return lambda _, arguments: (Watch.apply(arguments[0], starts, total),)

    hooks = [d.down_proj.register_forward_pre_hook(watch(t)) for d, t in zip(layers, totals, strict=True)]
    try:
        yield totals
    finally:
        for hook in hooks:
            hook.remove()


def load(folder: str | Path) -> Any:
    """Load a model that the recipe exported."""
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    split(model, **json.loads(existing(Path(folder) / SPLIT, "the description of the split").read_text()))
    state = {}
    for path in sorted(Path(folder).glob("model*.safetensors")):
        state.update(load_file(path))
    fill(model, state, folder)
    return model.eval()
