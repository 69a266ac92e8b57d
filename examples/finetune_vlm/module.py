"""Fine-tune a vision-language model on questions about images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, DistributedSampler

from ..common import tiny
from ..common.checkpoints import keep_trained, load, read_jsonl, there


class FineTuneVLM(L.LightningModule):
    """A vision-language model of transformers: LLaVA, Qwen2.5-VL, Gemma 3, ...

    Args:
        name_or_path: A checkpoint's directory or its name on the hub. None: a tiny LLaVA that is made.
        dtype: Of the weights as they are read: "float32", "bfloat16", or "auto" for the checkpoint's own.
        trained: Only weights with one of these in their names are trained, such as "language_model" or
            "multi_modal_projector". None: all.
        lr: AdamW's learning rate.
    """

    def __init__(
        self,
        name_or_path: str | None = None,
        dtype: str = "float32",
        trained: list[str] | None = None,
        lr: float = 1e-5,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.checkpoint = name_or_path or tiny.vision_language_model()
        self.strict_loading = False  # checkpoints have what is trained
        self.model: Any = None

    def configure_model(self) -> None:
        from transformers import AutoModelForImageTextToText

        if self.model is None:
            self.model = load(AutoModelForImageTextToText, self.checkpoint, self.hparams.dtype)
            for name, parameter in self.model.named_parameters():
                parameter.requires_grad_(any(part in name for part in self.hparams.trained or [""]))

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        loss = self.model(**batch, use_cache=False).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, self.hparams.lr)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        keep_trained(self, checkpoint)

    def on_train_end(self) -> None:
        """Write a directory that from_pretrained reads."""
        if self.trainer.is_global_zero:
            self.model.save_pretrained(f"{self.trainer.default_root_dir}/model")
            self.trainer.datamodule.processor.save_pretrained(f"{self.trainer.default_root_dir}/model")


class CaptionData(L.LightningDataModule):
    """Lines of ``{"image": "a.png", "prompt": "What ...?", "completion": "..."}``, whose completion is learned.

    Args:
        path: The file; images are looked for beside it. None: squares that are painted.
        batch_size: Records in a batch.
        num_workers: Processes that make batches.
    """

    def __init__(self, path: str | None = None, batch_size: int = 4, num_workers: int = 0) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        from transformers import AutoProcessor

        self.processor = AutoProcessor.from_pretrained(there(self.trainer.lightning_module.checkpoint))
        self.path = Path(self.hparams.path or f"{tiny.squares()}/captions.jsonl")
        self.records = read_jsonl(self.path)

    def collate(self, records: list[dict[str, str]]) -> dict[str, torch.Tensor]:
        """Make a batch, in which the loss counts what follows each prompt."""
        chats = []
        for record in records:
            image = {"type": "image", "path": str(self.path.parent / record["image"])}
            asked = {"role": "user", "content": [image, {"type": "text", "text": record["prompt"]}]}
            said = {"role": "assistant", "content": [{"type": "text", "text": record["completion"]}]}
            chats.append([asked, said])
        options = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
        padded = {"processor_kwargs": {"padding": True, "padding_side": "right"}}
        batch = self.processor.apply_chat_template(chats, **options, **padded)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        for row, (asked, _) in zip(labels, chats, strict=True):
            prompt = self.processor.apply_chat_template([asked], add_generation_prompt=True, **options)["input_ids"]
            row[: prompt.shape[1]] = -100
        return {**batch, "labels": labels}

    def train_dataloader(self) -> Any:
        order = DistributedSampler(self.records, self.trainer.world_size, self.trainer.global_rank)
        options = {"collate_fn": self.collate, "num_workers": self.hparams.num_workers}
        return DataLoader(self.records, self.hparams.batch_size, sampler=order, **options)
