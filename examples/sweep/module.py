"""Train several sets of adapters, each with options of its own, side by side over one frozen language model."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from math import isnan
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

from ..common.checkpoints import check_targets, keep_trained
from ..common.curves import draw
from ..common.errors import BadInput
from ..common.loss import IGNORED, following
from ..common.packing import check_apart
from ..common.schedule import decaying, warmed_up
from ..common.side_by_side import SideBySide, adapters, layers_of
from ..common.summary import say
from ..finetune_llm.module import FineTuneLLM


@dataclass
class AdapterSet:
    """One candidate.

    Args:
        lr: Its highest learning rate. None: model.lr.
        rank: Of its adapters.
        alpha: What they add is scaled by ``alpha / rank``.
        targets: Names of the layers that get one. None: every linear layer but the head.
        seed: Of the numbers with which they begin.
    """

    lr: float | None = None
    rank: int = 8
    alpha: float = 16.0
    targets: list[str] | None = None
    seed: int = 0


class Sweep(FineTuneLLM):
    """A frozen language model and sets of adapters, all of which see the same batches.

    Args:
        sets: The candidates by their names, under which their losses are logged and their adapters saved.
        **options: FineTuneLLM's.
    """

    def __init__(self, sets: dict[str, AdapterSet], **options: Any) -> None:
        super().__init__(**options)
        self.save_hyperparameters()
        self.sets = {name: replace(one, lr=self.lr if one.lr is None else one.lr) for name, one in sets.items()}
        self.strict_loading = False  # a checkpoint holds the adapters; the base is read from its own

    def load(self) -> Any:
        from peft import LoraConfig, get_peft_model

        if not self.sets:
            raise BadInput("model.sets has no set")
        if unusable := [name for name in self.sets if not re.fullmatch(r"\w+", name) or name == "default"]:
            raise BadInput(f"model.sets: {unusable[0]!r} names a folder: letters, digits and _, but not default")
        base = super().load().eval()  # what the base drew at random would be another draw beside other sets
        for name, one in self.sets.items():  # before any adapter gives the base's layers others beneath them
            check_targets(base, one.targets or [], f"model.sets, set {name}: targets")
        adapted: Any = None
        for name, one in self.sets.items():
            config = LoraConfig(
                r=one.rank, lora_alpha=one.alpha, target_modules=one.targets or "all-linear", task_type="CAUSAL_LM"
            )
            with torch.random.fork_rng(devices=[]), torch.device("cpu"):  # wherever a plain strategy wants what is made
                torch.default_generator.manual_seed(one.seed)
                try:
                    if adapted is None:
                        adapted = get_peft_model(base, config, name)
                    else:
                        adapted.add_adapter(name, config)
                except (ValueError, KeyError) as error:
                    raise BadInput(f"model.sets, set {name}: {error}") from error
        for layer in layers_of(adapted):
            layer.requires_grad_(True).get_base_layer().requires_grad_(False)
        self.side_by_side = SideBySide(adapted, [*self.sets])
        return adapted

    def decide_now(self) -> None:
        """Leave it to the first batch: the loss is that of hidden states, of any model that was not refused."""

    def losses(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The mean loss of the next tokens of each set."""
        if "position_ids" in batch and not self.apart:
            with self.side_by_side.alone():
                check_apart(self.model, self.device)
            self.apart = True
        labels = batch["labels"]
        learned = (following(labels) != IGNORED).sum()
        parts = zip(self.sets, self.side_by_side(batch), strict=True)
        return {name: self.next_tokens.each_from(self.model, part, labels).sum() / learned for name, part in parts}

    def training_step(self, batch: dict[str, Tensor], index: int) -> dict[str, Any]:
        losses = self.losses(batch)
        self.log_dict({f"loss/{name}": loss for name, loss in losses.items()})
        total = torch.stack([*losses.values()]).sum()  # each set's gradient is that of its own loss
        self.log("loss", total / len(losses), prog_bar=True)
        return {"loss": total, "losses": {name: loss.detach() for name, loss in losses.items()}}

    def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
        losses = self.losses(batch)
        self.log_dict({f"val_loss/{name}": loss for name, loss in losses.items()}, sync_dist=True)

    def configure_optimizers(self) -> Any:
        if self.trainer.precision == "16-mixed":
            raise BadInput("16-mixed scales the losses of all sets by one factor: use bf16-mixed")
        groups = [
            {**group, "lr": one.lr}
            for name, one in self.sets.items()
            for group in decaying(adapters(self.model, name), self.weight_decay)
        ]
        return warmed_up(self, torch.optim.AdamW(groups), self.warmup_steps)

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any = None, **options: Any) -> None:
        """Clip each set by its own norm."""
        if gradient_clip_val:
            for name in self.sets:
                torch.nn.utils.clip_grad_norm_(adapters(self.model, name), gradient_clip_val)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        keep_trained(self, checkpoint)

    def export(self, folder: Path) -> None:
        """Writes a folder for each set, as ``PeftModel.from_pretrained`` reads it."""
        self.model.save_pretrained(folder)


class Report(L.Callback):
    """Prints a table of the sets, the best one first, and draws their losses, when training ends.

    Args:
        file: The picture's.
    """

    def __init__(self, file: str) -> None:
        self.file = file
        self.curves: dict[str, list[Tensor]] = defaultdict(list)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *_: Any) -> None:
        for name, loss in outputs["losses"].items():
            self.curves[name].append(loss)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, Sweep)
        if trainer.is_global_zero:
            draw(Path(trainer.default_root_dir) / self.file, self.curves)
        rows = []
        for name, one in pl_module.sets.items():
            tail = torch.stack(self.curves[name][-10:]).mean().item()
            held_out = trainer.callback_metrics.get(f"val_loss/{name}")
            found = {"loss": tail} if held_out is None else {"loss": tail, "val_loss": held_out.item()}
            rows.append({"set": name, **found, **asdict(one)})
        rows.sort(key=lambda row: (isnan(last := row.get("val_loss", row["loss"])), last))
        self.curves.clear()  # which are on the device
        say(table(rows))


def table(rows: list[dict[str, Any]]) -> str:
    """The rows below their keys, in columns."""
    cells = [[*rows[0]], *([f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in cells)
