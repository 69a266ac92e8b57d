"""Fine-tune an image classifier on a folder that has a folder of images for each class."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from ..common import tiny
from ..common.checkpoints import load, there


class FineTuneVision(L.LightningModule):
    """An image classifier of transformers (ViT, DINOv2, Swin, ConvNeXt, ...) with a new head.

    Args:
        name_or_path: A checkpoint's directory or its name on the hub. None: a tiny ViT that is made.
        lr: The highest learning rate; it falls along a cosine until training ends.
        weight_decay: AdamW's.
        warmup_steps: Steps until the learning rate is reached.
        label_smoothing: What the other classes get of a label.
    """

    def __init__(
        self,
        name_or_path: str | None = None,
        lr: float = 1e-4,
        weight_decay: float = 0.05,
        warmup_steps: int = 0,
        label_smoothing: float = 0.1,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.checkpoint = name_or_path or tiny.image_classifier()
        self.model: Any = None

    def configure_model(self) -> None:
        from transformers import AutoModelForImageClassification

        if self.model is None:
            classes = dict(enumerate(self.trainer.datamodule.train.classes))
            options = {"id2label": classes, "label2id": {name: index for index, name in classes.items()}}
            kind = AutoModelForImageClassification
            self.model = load(kind, self.checkpoint, ignore_mismatched_sizes=True, **options)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        images, labels = batch
        loss = cross_entropy(self.model(images).logits, labels, label_smoothing=self.hparams.label_smoothing)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> None:
        images, labels = batch
        right = self.model(images).logits.argmax(-1) == labels
        self.log("accuracy", right.float().mean(), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        from transformers import get_cosine_schedule_with_warmup

        optimizer = torch.optim.AdamW(self.parameters(), self.hparams.lr, weight_decay=self.hparams.weight_decay)
        steps = self.trainer.estimated_stepping_batches
        schedule = get_cosine_schedule_with_warmup(optimizer, self.hparams.warmup_steps, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_end(self) -> None:
        """Write a directory that from_pretrained reads."""
        if self.trainer.is_global_zero:
            self.model.save_pretrained(f"{self.trainer.default_root_dir}/model")
            self.trainer.datamodule.processor.save_pretrained(f"{self.trainer.default_root_dir}/model")


class ImageData(L.LightningDataModule):
    """Images, cropped and flipped at random, with the mean and deviation of the checkpoint's own processor.

    Args:
        path: The folder of training images. None: squares that are painted.
        val_path: That of validation images.
        image_size: Pixels of a side.
        batch_size: Images in a batch.
        num_workers: Processes that read images.
    """

    def __init__(
        self,
        path: str | None = None,
        val_path: str | None = None,
        image_size: int = 224,
        batch_size: int = 32,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        from transformers import AutoImageProcessor

        self.processor = AutoImageProcessor.from_pretrained(there(self.trainer.lightning_module.checkpoint))
        size = self.hparams.image_size
        to_numbers = [
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(self.processor.image_mean, self.processor.image_std),
        ]
        varied = v2.Compose([v2.RandomResizedCrop(size, (0.5, 1.0)), v2.RandomHorizontalFlip(), *to_numbers])
        whole = v2.Compose([v2.Resize(size), v2.CenterCrop(size), *to_numbers])
        self.train = ImageFolder(self.hparams.path or tiny.squares(), varied)
        self.val = ImageFolder(self.hparams.val_path, whole) if self.hparams.val_path else None

    def train_dataloader(self) -> Any:
        return DataLoader(self.train, self.hparams.batch_size, shuffle=True, num_workers=self.hparams.num_workers)

    def val_dataloader(self) -> Any:
        options = {"batch_size": self.hparams.batch_size, "num_workers": self.hparams.num_workers}
        return DataLoader(self.val, **options) if self.val else []
