"""Fine-tune an image classifier of torchvision or transformers on a folder of images."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.error import URLError

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, default_collate
from torchmetrics.classification import MulticlassAccuracy

from sp_lightning.errors import did_you_mean

from ..common import checkpoints, tiny
from ..common.arguments import NonNegativeFloat, NonNegativeInt, PositiveInt
from ..common.errors import BadInput
from ..common.files import existing, read_image
from ..common.images import to_numbers, whole_image
from ..common.loading import Data, TrainLoader
from ..common.schedule import warmup_then_cosine

TORCHVISION = "torchvision/"
SPLITS = {"train", "training", "val", "valid", "validation", "test"}  # which no classes are called


class FineTuneVision(L.LightningModule):
    """An image classifier.

    Args:
        name_or_path: A checkpoint directory, a name on the hub, or "torchvision/resnet50" and the like. None: a tiny
            ViT that the recipe makes.
        pretrained: For torchvision's models: start from its weights, downloaded, instead of random ones.
        lr: The highest learning rate; after warming up it falls along a cosine until training ends.
        weight_decay: AdamW's, of matrices and filters.
        warmup_steps: Steps until the learning rate is reached.
        label_smoothing: What the other classes get of a label.
    """

    def __init__(
        self,
        name_or_path: str | None = None,
        pretrained: bool = True,
        lr: NonNegativeFloat = 1e-4,
        weight_decay: NonNegativeFloat = 0.05,
        warmup_steps: NonNegativeInt = 0,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.name_or_path = name_or_path
        self.pretrained = pretrained
        self.lr = lr
        self.weight_decay = weight_decay
        self.warmup_steps = warmup_steps
        self.label_smoothing = label_smoothing
        self.model: Any = None

    @property
    def checkpoint(self) -> str:
        """Where the model is read from."""
        return self.name_or_path or str(tiny.made(tiny.place(self.trainer) / "vit", tiny.image_classifier))

    def prepare_data(self) -> None:
        _ = self.checkpoint  # made here if there is none: a plan makes the model without weights

    def configure_model(self) -> None:
        if self.model is None:
            classes: list[str] = self.trainer.datamodule.classes
            self.model = self.load(classes)
            self.accuracy = MulticlassAccuracy(len(classes), average="micro")

    def load(self, classes: list[str]) -> nn.Module:
        """The model, with a new head for these classes."""
        if self.checkpoint.startswith(TORCHVISION):
            return from_torchvision(self.checkpoint.removeprefix(TORCHVISION), len(classes), self.pretrained)
        from transformers import AutoModelForImageClassification

        names = dict(enumerate(classes))
        return checkpoints.load(
            AutoModelForImageClassification,
            self.checkpoint,
            id2label=names,
            label2id={name: index for index, name in names.items()},
            ignore_mismatched_sizes=True,
            new_head=True,
        )

    def forward(self, images: Tensor) -> Tensor:
        output = self.model(images)
        return output if isinstance(output, Tensor) else output.logits

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        images, labels = batch  # labels are classes, or, mixed up, a share of each class
        loss = cross_entropy(self(images), labels, label_smoothing=self.label_smoothing)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        images, labels = batch
        self.accuracy(self(images), labels)
        self.log("accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> Any:
        return warmup_then_cosine(self, self.lr, self.weight_decay, self.warmup_steps)

    def export(self, folder: Path) -> None:
        """Writes a directory that from_pretrained reads, or, of a model of torchvision, its state_dict."""
        if hasattr(self.model, "save_pretrained"):
            self.model.save_pretrained(folder)
        else:
            folder.mkdir()
            torch.save(self.model.state_dict(), folder / "model.pt")


def from_torchvision(name: str, classes: int, pretrained: bool) -> nn.Module:
    """A model of torchvision; of the downloaded weights everything is taken that has the same shape: all but the
    head."""
    import torchvision

    names = torchvision.models.list_models(torchvision.models)
    if name not in names:
        raise BadInput(f"torchvision has no classifier {name!r}{did_you_mean(name, names) or f'; it has {names}'}")
    model = torchvision.models.get_model(name, num_classes=classes)
    if pretrained and not checkpoints.planned():
        try:
            state = torchvision.models.get_model_weights(name).DEFAULT.get_state_dict(check_hash=True)
        except URLError as error:
            raise BadInput(
                f"the weights of {name} can not be downloaded ({error.reason}); --model.pretrained=false begins without"
            ) from error
        own = model.state_dict()
        model.load_state_dict({n: t for n, t in state.items() if n in own and t.shape == own[n].shape}, strict=False)
    return model


class ImageData(Data):
    """Images in a folder for each class.

    Args:
        path: The folder of training images, with a folder for each class. None: squares that the recipe paints.
        val_path: The same for validation. None: there is no validation.
        image_size: Width and height that images are brought to.
        batch_size: Images in a batch.
        mixup: How strongly pairs of images are mixed, as the parameter of the Beta distribution; 0: not.
        num_workers: Processes that read images.
    """

    def __init__(
        self,
        path: str | None = None,
        val_path: str | None = None,
        image_size: PositiveInt = 224,
        batch_size: PositiveInt = 32,
        mixup: NonNegativeFloat = 0.0,
        num_workers: NonNegativeInt = 0,
    ) -> None:
        super().__init__()
        self.path = path
        self.val_path = val_path
        self.image_size = image_size
        self.batch_size = batch_size
        self.mixup = mixup
        self.num_workers = num_workers

    def setup(self, stage: str) -> None:
        val_path = self.val_path if self.path else self.made_up("val", 4)
        self.train_images = self.folder(self.path or self.made_up("train", 24), training=True)
        self.classes: list[str] = self.train_images.classes
        if len(self.classes) < 2:
            raise BadInput(f"{self.path} has the one class {self.classes}; a classifier needs two or more")
        if {name.lower() for name in self.classes} <= SPLITS:
            raise BadInput(
                f"{self.path} has {' and '.join(self.classes)} for its classes; --data.path names the folder "
                "inside that holds the classes, and --data.val_path the other one"
            )
        self.val_images = self.folder(val_path, training=False) if val_path else None
        if self.val_images is not None and self.val_images.classes != self.classes:
            raise BadInput(f"{val_path} has the classes {self.val_images.classes}, but {self.path} has {self.classes}")

    def made_up(self, name: str, count: int) -> str:
        """Images for a run that was given none."""
        assert self.trainer is not None
        path = tiny.place(self.trainer) / f"squares-{name}"
        return str(tiny.made(path, lambda part: tiny.image_folder(part, count)))

    def folder(self, path: str, training: bool) -> Any:
        from torchvision.datasets import ImageFolder
        from torchvision.transforms import v2

        size = self.image_size
        cut = [v2.RandomResizedCrop(size, scale=(0.5, 1.0)), v2.RandomHorizontalFlip()]
        transform = v2.Compose([*cut, *to_numbers()]) if training else whole_image(size)
        try:
            return ImageFolder(str(existing(path, "the image folder")), transform, loader=read_image)
        except FileNotFoundError as error:  # no class has an image
            raise BadInput(f"{path} is not a folder of classes, each a folder of images: {error}") from None

    def mixed(self, pairs: list[tuple[Tensor, int]]) -> Any:
        """A batch in which each image is mixed with another."""
        from torchvision.transforms import v2

        return v2.MixUp(alpha=self.mixup, num_classes=len(self.classes))(*default_collate(pairs))

    def train_dataloader(self) -> TrainLoader:
        collate = self.mixed if self.mixup else default_collate
        return self.train_loader(
            self.train_images, self.batch_size, collate_fn=collate, num_workers=self.num_workers, drop_last=True
        )

    def val_dataloader(self) -> Any:
        if self.val_images is None:
            return []
        return DataLoader(self.val_images, batch_size=self.batch_size, num_workers=self.num_workers)
