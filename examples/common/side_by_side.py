"""Several sets of adapters over one frozen base, side by side: while a block is on the device, all sets pass it.

1. The first block makes of a batch one part for each set, and the parts stay one behind the other until the last block.
   A block runs once for each part, with that set's adapters and the shapes that a batch of this set alone would have:
   no set's result depends on the others.
2. A set without a name is the base as it is, which is given no gradient.
3. All that a block is given beside the hidden states (masks, positions) is the same for all sets.
4. Whether a model can be run this way is not looked up, but tried, with a few tokens: the last part has to be what the
   model makes with the adapters of that set alone, and its loss that of its head's weight (loss.py, Rule 2). Of a
   model without weights, whose run is planned, only the second is seen, as soon as there is the model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .checkpoints import planned
from .errors import BadInput
from .loss import few_tokens, hidden_states, unadapted, unchanged, why_not_from_hidden


class SideBySide:
    """The sets of adapters of a model with adapters (peft); the blocks of the model run once for each of them.

    Args:
        model: With the adapters of all sets.
        sets: The names of the adapters that run; None is the base as it is.
    """

    def __init__(self, model: Any, sets: Sequence[str | None]) -> None:
        self.model = model
        self.sets = sets
        self.on = True
        self.tried = False
        blocks = list(blocks_of(unadapted(model)))
        adapted = [layers_of(block) for block in blocks]
        inside = {layer for layers in adapted for layer in layers}
        if outside := [name for name, layer in model.named_modules() if is_adapted(layer) and layer not in inside]:
            raise BadInput(
                f"{outside[0].removeprefix('base_model.model.')} has an adapter, but is in none of the "
                f"{len(blocks)} {type(blocks[0]).__name__} that run once for each set; leave it out of the targets"
            )
        for index, (block, layers) in enumerate(zip(blocks, adapted, strict=True)):
            block.forward = self.beside(block.forward, layers, first=index == 0)
        if planned():
            self.check_loss({})
            self.tried = True

    def beside(self, forward: Any, layers: Sequence[Any], first: bool) -> Any:
        """Return the forward of a block for all sets (Rule 1)."""

        def run(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not self.on:
                return forward(hidden, *args, **kwargs)
            parts = [hidden] * len(self.sets) if first else hidden.chunk(len(self.sets))
            made = []
            for name, part in zip(self.sets, parts, strict=True):
                activate(layers, name)
                with torch.set_grad_enabled(torch.is_grad_enabled() and name is not None):  # Rule 2
                    made.append(forward(part, *args, **kwargs))
            if not all(isinstance(part, Tensor) for part in made):
                raise BadInput(f"a block of {type(unadapted(self.model)).__name__} returns more than hidden states")
            return torch.cat(made)

        return run

    def __call__(self, batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Return the hidden states of each set. The first time, try the model on a few tokens."""
        if not self.tried:
            self.check()
            self.tried = True
        return hidden_states(self.model, batch).chunk(len(self.sets))

    @torch.no_grad()
    def check(self) -> None:
        """Rule 4."""
        device = unadapted(self.model).get_output_embeddings().weight.device
        batch = {"input_ids": few_tokens(self.model, device)}
        with unchanged(device):
            parts = hidden_states(self.model, batch).chunk(len(self.sets))
        self.check_loss(batch)
        with self.alone():
            activate(layers_of(self.model), self.sets[-1])
            with unchanged(device):
                self.compare(parts[-1], hidden_states(self.model, batch))

    def check_loss(self, batch: dict[str, Tensor]) -> None:
        """Raise unless the model's loss is that of its hidden states and its head's weight."""
        with self.alone():
            if reason := why_not_from_hidden(self.model, batch):
                raise BadInput(f"{reason}, so sets of adapters cannot share its passes")

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Have the blocks run once, with the adapters that are active."""
        self.on = False
        try:
            yield
        finally:
            self.on = True

    def compare(self, part: Tensor, alone: Tensor) -> None:
        """Raise unless a set's part is what the model makes with its adapters alone, but for rounding."""
        difference = float((part - alone).abs().max()) if part.shape == alone.shape else torch.inf
        if not difference <= float(alone.abs().max()) * torch.finfo(alone.dtype).eps ** 0.5:
            raise BadInput(
                f"{type(unadapted(self.model)).__name__} does more with its hidden states than to hand them from block "
                f"to block, so sets of adapters cannot run side by side (they differ by {difference:.2g})"
            )


def blocks_of(model: nn.Module) -> nn.ModuleList:
    """Return the list of blocks with the most weights."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 1]
    if not lists:
        raise BadInput(f"{type(model).__name__} has no list of blocks")
    return max(lists, key=lambda found: sum(p.numel() for p in found.parameters()))


def is_adapted(module: nn.Module) -> bool:
    """Return whether peft gave a layer adapters."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return isinstance(module, BaseTunerLayer)


def layers_of(module: nn.Module) -> list[Any]:
    """Return the layers inside a module that have adapters."""
    return [layer for layer in module.modules() if is_adapted(layer)]


def activate(layers: Sequence[Any], name: str | None) -> None:
    """Choose the adapters that layers add. peft's own method also changes what is trained."""
    for layer in layers:
        layer._active_adapter = [] if name is None else [name]


def adapters(model: nn.Module, name: str) -> list[nn.Parameter]:
    """Return the weights of a set."""
    return [
        parameter
        for layer in layers_of(model)
        for part in (layer.lora_A, layer.lora_B)
        if name in part
        for parameter in part[name].parameters()
    ]
