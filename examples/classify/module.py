"""Name what is on each image of a folder, with a classifier of transformers that need not fit on the device."""

from __future__ import annotations

from typing import Any

import torch

from ..common import checkpoints, tiny
from ..common.answers import Predicts
from ..common.files import stamps
from ..common.images import FolderImages, told, whole_image


class Classify(Predicts):
    """An image classifier, which says the likeliest class of each image, and its probability.

    Args:
        name_or_path: A checkpoint directory, such as one that another recipe exported, or a name on the hub. None: a
            tiny ViT that the recipe makes.
        dtype: Of the weights: "float32", "bfloat16", or "auto" for the checkpoint's own.
    """

    counts = "images"

    def __init__(self, name_or_path: str | None = None, dtype: str = "auto") -> None:
        super().__init__()
        self.name_or_path = name_or_path
        self.dtype_name = dtype
        self.model: Any = None

    @property
    def checkpoint(self) -> str:
        """Where the model is read from."""
        return self.name_or_path or str(tiny.made(tiny.place(self.trainer) / "vit", tiny.image_classifier))

    @property
    def settings(self) -> list[Any]:
        """What predictions depend on, beside the images."""
        return [stamps(self.name_or_path), self.dtype_name]

    def configure_model(self) -> None:
        if self.model is None:
            from transformers import AutoModelForImageClassification

            self.model = checkpoints.load(AutoModelForImageClassification, self.checkpoint, self.dtype_name)

    def predict_step(self, batch: dict[str, Any], index: int) -> list[dict[str, Any]]:
        if not batch["count"]:
            return list(batch["records"])
        images = batch["pixel_values"].to(next(self.model.parameters()).dtype)
        logits = self.model(images).logits.float()
        several = self.model.config.problem_type == "multi_label_classification"
        likeliest = (logits.sigmoid() if several else logits.softmax(-1)).max(-1)
        names = [self.model.config.id2label[label] for label in likeliest.indices.tolist()]
        pairs = zip(names, likeliest.values.tolist(), strict=True)
        return told(batch["records"], [{"label": name, "probability": value} for name, value in pairs])


class ImagesToClassify(FolderImages):
    __doc__ = FolderImages.__doc__

    def setup(self, stage: str) -> None:
        super().setup(stage)
        from transformers import AutoConfig, AutoImageProcessor
        from transformers.utils import cached_file

        assert self.trainer is not None
        checkpoint = checkpoints.there(self.trainer.lightning_module.checkpoint)
        lenient = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
        if any(
            cached_file(checkpoint, name, **lenient) for name in ("preprocessor_config.json", "processor_config.json")
        ):
            self.processor = checkpoints.read(AutoImageProcessor, checkpoint)
        else:  # as of one that the recipe for training exported
            self.processor = None
            size = getattr(checkpoints.read(AutoConfig, checkpoint), "image_size", 224)
            self.size = max(size) if isinstance(size, (list, tuple)) else size

    def inputs(self, images: list[Any]) -> dict[str, torch.Tensor]:
        if self.processor is not None:
            return {"pixel_values": self.processor(images=images, return_tensors="pt")["pixel_values"]}
        prepare = whole_image(self.size)
        return {"pixel_values": torch.stack([prepare(image) for image in images])}
