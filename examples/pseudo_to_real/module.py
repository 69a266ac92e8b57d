"""Pretrain a language model whose blocks share one block's weights at first, and later have weights of their own."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from torch import nn

from ..common.checkpoints import planned
from ..common.errors import BadInput
from ..pretrain_small.module import PretrainLLM

SHARED, DELINKED = "all blocks are one", "each block has its own weights"


class PseudoToReal(PretrainLLM):
    """A Llama that calls one block as often as it has layers, until each layer gets a copy of it.

    Parameters have the same names before and after: a checkpoint has every layer's weights, and one written before can
    be loaded into a plain model. Optimizer state is copied with the weights, and the schedule goes on.

    Args:
        delink_at: The step before which every layer gets its own copy.
        **options: PretrainLLM's.
    """

    phase = SHARED  # what the summary prints apart

    def __init__(self, delink_at: int = 40, **options: Any) -> None:
        super().__init__(**options)
        self.save_hyperparameters()
        self.delink_at = delink_at

    def load(self) -> Any:
        if self.delink_at < 0:
            raise BadInput(f"model.delink_at={self.delink_at} is no step; 0 delinks before the first one")
        model = super().load()
        layers = model.model.layers
        for index in range(1, len(layers)):
            layers[index] = layers[0]
        if planned() and self.trainer.estimated_stepping_batches > self.delink_at:
            self.separate(model)  # what the run needs once it has delinked
            self.phase = DELINKED
        return model

    def separate(self, model: Any) -> dict[nn.Parameter, nn.Parameter]:
        """Give each layer a copy of the first one; return for each new parameter the one that it was copied from."""
        layers, origins = model.model.layers, {}
        for index in range(1, len(layers)):
            layers[index] = own = copy.deepcopy(layers[0])
            own.self_attn.layer_idx = index  # its place in a cache
            origins.update(zip(own.parameters(), layers[0].parameters(), strict=True))
        return origins

    def delink(self) -> None:
        """Go on with a block for each layer, in the optimizer too."""
        origins = self.separate(self.model)
        for optimizer in self.trainer.optimizers:
            for group in optimizer.param_groups:
                members = set(group["params"])
                # In the order of the module, which is that of an optimizer made anew: a checkpoint counts by it.
                group["params"] = [p for p in self.parameters() if origins.get(p, p) in members]
            for own, origin in origins.items():
                if origin in optimizer.state:
                    optimizer.state[own] = copy.deepcopy(optimizer.state[origin])
        self.phase = DELINKED

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.phase == SHARED and self.trainer.global_step >= self.delink_at:
            self.delink()

    # ---- checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["phase"] = self.phase

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Make the layers that were saved, before weights and the optimizer's state are read."""
        if checkpoint.get("phase", DELINKED) == DELINKED and self.phase == SHARED:  # another recipe's says nothing
            self.separate(self.model)
            self.phase = DELINKED

    def export(self, folder: Path) -> None:
        """Write every layer's weights, as from_pretrained reads them, also while they are one block's."""
        state = self.model.state_dict()
        if self.phase == SHARED:  # a file has no two names for one tensor
            state = {name: weight.clone() if ".layers." in name else weight for name, weight in state.items()}
        self.model.save_pretrained(folder, state_dict=state)
        self.trainer.datamodule.tokenizer.save_pretrained(folder)
