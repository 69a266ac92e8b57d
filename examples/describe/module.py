"""Answer a question about each image of a folder, with a vision-language model that need not fit on the device."""

from __future__ import annotations

from typing import Any

import torch

from ..common import checkpoints, tiny
from ..common.answers import Predicts
from ..common.arguments import NonNegativeFloat, NonNegativeInt, PositiveInt
from ..common.files import stamps
from ..common.images import FolderImages, asked, load_processor, special_tokens, told
from ..common.quantized import Form, quantize


class Describe(Predicts):
    """A vision-language model that answers, greedily or by sampling.

    Args:
        name_or_path: A checkpoint directory, such as one that another recipe exported, or a name on the hub. None: a
            tiny LLaVA that the recipe makes.
        dtype: Of the weights: "float32", "bfloat16", or "auto" for the checkpoint's own.
        max_new_tokens: At most so many are generated for each image.
        temperature: 0 takes the most likely token each time; more samples.
        base_bits: Pack the linear layers: 8 or 4 with bitsandbytes; "int8", "float8", "nf4" or "nvfp4" with torchao.
    """

    def __init__(
        self,
        name_or_path: str | None = None,
        dtype: str = "auto",
        max_new_tokens: PositiveInt = 64,
        temperature: NonNegativeFloat = 0.0,
        base_bits: Form | None = None,
    ) -> None:
        super().__init__()
        self.name_or_path = name_or_path
        self.dtype_name = dtype
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature
        self.base_bits = base_bits
        self.model: Any = None

    @property
    def checkpoint(self) -> str:
        """Where the model is read from."""
        return self.name_or_path or str(tiny.made(tiny.place(self.trainer) / "vlm", tiny.vision_language_model))

    @property
    def generates(self) -> tuple[int, str]:
        """What a plan has to know: the tokens of each answer, and where keys and values wait."""
        return self.max_new_tokens, "device"

    @property
    def settings(self) -> list[Any]:
        """What answers depend on, beside the images."""
        model, question = stamps(self.name_or_path), self.trainer.datamodule.question
        return [model, self.dtype_name, self.max_new_tokens, self.temperature, self.base_bits, question]

    def configure_model(self) -> None:
        if self.model is None:
            from transformers import AutoModelForImageTextToText

            self.model = checkpoints.load(AutoModelForImageTextToText, self.checkpoint, self.dtype_name)
            if self.base_bits is not None:
                quantize(self.model, self.base_bits, leave=[self.model.get_output_embeddings()])

    def predict_step(self, batch: dict[str, Any], index: int) -> list[dict[str, Any]]:
        if not batch["count"]:
            return list(batch["records"])
        inputs = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
        tokenizer, filler = self.trainer.datamodule.processor.tokenizer, self.trainer.datamodule.filler
        sampling = {"do_sample": True, "temperature": self.temperature} if self.temperature else {"do_sample": False}
        if self.temperature:  # by its place: not by the batches before, which a run that goes on does not have
            torch.manual_seed(self.seed + batch["number"])
        inputs["pixel_values"] = inputs["pixel_values"].to(self.model.dtype)
        made = self.model.generate(**inputs, max_new_tokens=self.max_new_tokens, pad_token_id=filler, **sampling)[
            :, inputs["input_ids"].shape[1] :
        ].cpu()
        batch["count"] = int((made != filler).sum())
        texts = tokenizer.batch_decode(made, skip_special_tokens=True)
        return told(batch["records"], [{"answer": text} for text in texts])


class ImagesToDescribe(FolderImages):
    __doc__ = (FolderImages.__doc__ or "") + "    question: What is asked about each image.\n"

    def __init__(
        self,
        path: str | None = None,
        question: str = "What is on the image?",
        batch_size: PositiveInt = 16,
        num_workers: NonNegativeInt = 0,
    ) -> None:
        super().__init__(path, batch_size, num_workers)
        self.question = question

    def setup(self, stage: str) -> None:
        super().setup(stage)
        assert self.trainer is not None
        self.processor, self.filler = load_processor(self.trainer.lightning_module.checkpoint)
        self.processor.tokenizer.padding_side = "left"

    def inputs(self, images: list[Any]) -> dict[str, Any]:
        texts = [asked(self.processor, self.question)] * len(images)
        how = {"padding": True, "return_tensors": "pt", **special_tokens(self.processor, texts[0])}
        return dict(self.processor(images=[[image] for image in images], text=texts, **how))
