"""Images of a folder, for the recipes that say something about each of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from . import checkpoints, tiny
from .arguments import NonNegativeInt, PositiveInt
from .errors import BadInput
from .files import existing, read_image, stamp

ENDINGS = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"}


class FolderImages(L.LightningDataModule):
    """All images of a folder and of the folders in it, each a record with its name.

    One that cannot be read gets a record with the error instead, and the others go on.

    Args:
        path: The folder. None: squares that the recipe paints.
        batch_size: Images that the model sees at once: weights travel once for all of them.
        num_workers: Processes that read images.
    """

    def __init__(self, path: str | None = None, batch_size: PositiveInt = 16, num_workers: NonNegativeInt = 0) -> None:
        super().__init__()
        self.path = path
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.done = 0  # images of which something was said before

    def setup(self, stage: str) -> None:
        self.folder = existing(self.path or self.made_up(), "the image folder")
        if not self.folder.is_dir():
            raise BadInput(f"{self.folder} is a file, not a folder of images")
        found = (path for path in self.folder.rglob("*") if path.suffix.lower() in ENDINGS and not path.is_dir())
        names = self.names = sorted(found)
        if not names:
            raise BadInput(f"{self.folder} has no images: files that end in {', '.join(sorted(ENDINGS))}")
        self.records = [
            {"record": {"image": written(name.relative_to(self.folder))}, "number": number, "stamp": stamp(name)}
            for number, name in enumerate(names)
        ]

    def made_up(self) -> Path:
        """Images for a run that was given none."""
        assert self.trainer is not None
        return tiny.made(tiny.place(self.trainer) / "squares", lambda part: tiny.image_folder(part, 4))

    def inputs(self, images: list[Any]) -> dict[str, Any]:
        """What the model sees of these images."""
        raise NotImplementedError

    def collate(self, records: Sequence[dict[str, Any]]) -> dict[str, Any]:
        images, seen = [], [dict(record["record"]) for record in records]
        for record, name in zip(seen, (self.names[record["number"]] for record in records), strict=True):
            try:
                images.append(read_image(str(name)))
            except BadInput as error:
                record["error"] = str(error)
        inputs = self.inputs(images) if images else {}
        failed = len(seen) - len(images)
        return {**inputs, "records": seen, "count": len(images), "failed": failed, "number": records[0]["number"]}

    def predict_dataloader(self) -> DataLoader[Any]:
        return DataLoader(
            self.records[self.done :],  # type: ignore[arg-type]
            batch_size=self.batch_size,
            collate_fn=self.collate,
            num_workers=self.num_workers,
        )


def written(path: Path) -> str:
    """A file's name as text, which not every name is."""
    return path.as_posix().encode(errors="surrogateescape").decode(errors="replace")


def told(records: Sequence[dict[str, Any]], found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records, each but those with an error with what was found."""
    rest = iter(found)
    return [record if "error" in record else {**record, **next(rest)} for record in records]


def whole_image(size: int) -> Any:
    """The function that makes numbers of an image, as a classifier that was trained on ImageNet sees it."""
    from torchvision.transforms import v2

    return v2.Compose([v2.Resize(size), v2.CenterCrop(size), *to_numbers()])


def to_numbers() -> list[Any]:
    """What comes after an image was cut."""
    from torchvision.transforms import v2

    normal = v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    return [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), normal]


def load_processor(checkpoint: str) -> tuple[Any, int]:
    """Return a vision-language model's processor of images and texts, and the token that fills rows."""
    from transformers import AutoProcessor

    processor = checkpoints.read(AutoProcessor, checkpoint)
    tokenizer = getattr(processor, "tokenizer", None)
    if tokenizer is None or not hasattr(processor, "image_processor"):
        raise BadInput(
            f"{checkpoint} has no processor of images and texts; examples/finetune_llm and examples/predict are for "
            "models of texts alone"
        )
    checkpoints.check_tokenizer(tokenizer, checkpoints.load_config(checkpoint), checkpoint, checkpoint)
    return processor, tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id


def special_tokens(processor: Any, text: str) -> dict[str, Any]:
    """What a processor has to know of a text that a chat template wrote: whether it begins as texts do."""
    begins = processor.tokenizer.bos_token
    return {"add_special_tokens": False} if begins and text.startswith(begins) else {}


def asked(processor: Any, question: str) -> str:
    """A question about an image, as a vision-language model was trained to see it."""
    if getattr(processor, "chat_template", None):
        content = [{"type": "image"}, {"type": "text", "text": question}]
        return processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    return f"{processor.image_token}{question} "
