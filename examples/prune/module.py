"""Train a language model of which each layer uses its largest weights alone: magnitude pruning, and Top-KAST."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
from torch import Tensor, nn

from sp_lightning.options import format_bytes

from ..common.arguments import NonNegativeFloat
from ..common.errors import BadInput
from ..common.summary import Summary, per_step, say
from ..finetune_llm.module import FineTuneLLM
from .sparse import LEARNED, USED, SparseLinear, renew, save, sparse_layers


class Prune(FineTuneLLM):
    """A language model whose linear layers, but for the head, use a share of their weights.

    Which ones is decided again every few steps, by their size. Those that are not used keep their values, and those
    among them that are learned may come to be used.

    Args:
        density: The share of a layer's weights that is used.
        backward_density: The share that has a gradient (Top-KAST). None: those that are used (magnitude pruning).
        ramp_steps: Steps in which the share falls from 1 to ``density``, fast at first. 0: it is so from the beginning.
        every: Steps between two decisions.
        penalty: Pulls weights towards 0, those that are learned and not used ``1 / density`` times as strongly.
        weight_decay: AdamW's, which also changes weights that are neither used nor learned.
        **options: FineTuneLLM's.
    """

    def __init__(
        self,
        density: float = 0.1,
        backward_density: float | None = None,
        ramp_steps: int = 0,
        every: int = 10,
        penalty: float = 0.0,
        weight_decay: NonNegativeFloat = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(weight_decay=weight_decay, **options)
        self.save_hyperparameters()
        self.density = density
        self.backward_density = backward_density
        self.ramp_steps = ramp_steps
        self.every = every
        self.penalty = penalty

    def load(self) -> Any:
        learned = self.density if self.backward_density is None else self.backward_density
        if not 0 < self.density <= learned <= 1:
            raise BadInput(
                f"model.density={self.density} and model.backward_density={self.backward_density} are shares, of which "
                "the second is not less than the first: 0 < density <= backward_density <= 1"
            )
        if self.every < 1 or self.ramp_steps < 0:
            raise BadInput(
                f"model.every={self.every} has to be 1 or more, model.ramp_steps={self.ramp_steps} 0 or more"
            )
        model = super().load()
        head = model.get_output_embeddings()
        layers = [module for module in model.modules() if type(module) is nn.Linear and module is not head]
        if not layers:
            raise BadInput(f"{type(model).__name__} has no nn.Linear but its head, so nothing of it can be pruned")
        for layer in layers:
            SparseLinear.of(layer, self.penalty)
        renew(model, *self.shares(0))
        return model

    def shares(self, step: int) -> tuple[float, float]:
        """Return the shares of weights that are used and learned at a step."""
        left = max(0.0, 1 - step / self.ramp_steps) if self.ramp_steps else 0.0
        used = self.density + (1 - self.density) * left**3
        return used, max(used, self.backward_density or 0.0)

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        step = self.trainer.global_step
        if step and step % self.every == 0 and index % self.trainer.accumulate_grad_batches == 0:
            renew(self.model, *self.shares(step))
        return super().training_step(batch, index)

    def export(self, folder: Path) -> None:
        """Write the weights that are used, as ``examples.prune.sparse.load`` reads them."""
        save(self.model, folder)
        self.trainer.datamodule.tokenizer.save_pretrained(folder)


class KeptSummary(Summary):
    """Print, too, the bytes that a step would have moved if only kept weights travelled.

    They are computed from the bytes that did travel. Up would go the values that are used and two bits for each weight,
    down the gradients that are learned and one bit.
    Of the bytes up, the resident root counts once for each step, and all units as equally often.
    """

    def _end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        super()._end(trainer, module)
        layers = list(sparse_layers(module).values())
        shares = [share(layers, code) for code in (USED, LEARNED)]
        said = "{:.1%} of the weights of pruned layers are used, {:.1%} are learned".format(*shares)
        if (handle := getattr(trainer.strategy, "handle", None)) is not None:
            up, down = per_step(self.moved, self.batches_per_step)
            resident = min(up, handle.stats()["resident_root_bytes"])
            streamed = {p for unit in handle.units if not unit.resident for _, p in unit.params}
            trained = {p for p in module.parameters() if p.requires_grad}
            kept = resident + (up - resident) * kept_share(layers, streamed, USED, 2)
            learned = down * kept_share(layers, trained, LEARNED, 1)
            said += (
                f"; they alone would be {format_bytes(round(kept))} up and {format_bytes(round(learned))} down per step"
            )
        say(said)


def share(layers: list[SparseLinear], code: int) -> float:
    """Return the share of the layers' weights that have this code or a larger one."""
    weights = sum(layer.weight.numel() for layer in layers)
    return sum(int((layer.codes >= code).sum()) for layer in layers) / max(1, weights)


def kept_share(layers: list[SparseLinear], among: set[nn.Parameter], code: int, bits: int) -> float:
    """Return the share of these parameters' bytes that would be left, with so many bits for each pruned weight."""
    pruned = [layer for layer in layers if layer.weight in among]
    apart = {p for layer in pruned for p in (layer.weight, layer.codes)}
    kept = share(pruned, code) * sum(layer.weight.nbytes for layer in pruned)
    kept += sum(layer.weight.numel() for layer in pruned) * bits / 8
    return (kept + sum(p.nbytes for p in among - apart)) / max(1, sum(p.nbytes for p in among))
