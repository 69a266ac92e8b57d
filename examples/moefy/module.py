"""Adapt a dense language model to be a mixture of experts, which learns layer by layer from the dense one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from ..common import checkpoints, tiny
from ..common.arguments import NonNegativeFloat
from ..common.text import collate
from ..distill.module import Distill
from .experts import SPLIT, feed_forwards, split, watched


class Moefy(Distill):
    """A language model whose feed-forward layers are split into experts, beside the dense one, which is frozen.

    Args:
        name_or_path: The dense model: a checkpoint directory or a name on the hub. None: a tiny one.
        experts: Of each layer; a token uses one of them.
        shared: The share of a layer's neurons, the most important ones, that all tokens use.
        importance_batches: Batches of the data from which their importance is found before the first step.
        temperature: Distill's.
        own: Distill's.
        **options: FineTuneLLM's.
    """

    make_tiny = staticmethod(tiny.teacher)

    def __init__(
        self,
        name_or_path: str | None = None,
        experts: int = 4,
        shared: float = 0.25,
        importance_batches: int = 8,
        temperature: NonNegativeFloat = 2.0,
        own: float = 0.1,
        **options: Any,
    ) -> None:
        super().__init__(
            teacher=name_or_path,
            name_or_path=name_or_path,
            match="both",
            temperature=temperature,
            own=own,
            on_policy=0.0,
            **options,
        )
        self.save_hyperparameters()
        self.split = {"experts": experts, "shared": shared}
        self.importance_batches = importance_batches

    def load(self) -> Any:
        model = super().load()
        planned = checkpoints.planned()
        with torch.device("cpu"):  # wherever a plain strategy wants what is made
            self.layers = split(model, **self.split, weights=not planned)
        return model

    def on_train_start(self) -> None:
        """Deal out neurons by their importance for the dense model; a resumed run has them from its checkpoint."""
        if self.trainer.global_step:
            return
        data = self.trainer.datamodule
        with watched(self.teacher, self.device) as totals:
            for index in range(self.importance_batches):
                rows = data.train_rows[index * data.batch_size : (index + 1) * data.batch_size]
                if not rows:
                    break
                batch = {name: value.to(self.device) for name, value in collate(rows).items()}
                with self.trainer.precision_plugin.forward_context():
                    loss = self.teacher(**batch, use_cache=False).loss
                loss.backward()
        for layer, (_, _, dense), total in zip(self.layers, feed_forwards(self.teacher), totals, strict=True):
            layer.fill(dense, total.argsort(descending=True, stable=True).cpu())

    def on_train_end(self) -> None:
        self.layers[0].tokens.ids = None  # the last batch's, which are on the device

    def export(self, folder: Path) -> None:
        """Write a directory that ``examples.moefy.experts.load`` reads, with the tokenizer."""
        self.model.save_pretrained(folder)
        self.trainer.datamodule.tokenizer.save_pretrained(folder)
        (folder / SPLIT).write_text(json.dumps(self.split))
