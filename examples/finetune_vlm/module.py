"""Fine-tune a vision-language model of transformers (LLaVA, Qwen2-VL, Idefics, ...), or what connects its parts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ..common import checkpoints, tiny
from ..common.arguments import NonNegativeFloat, NonNegativeInt, PositiveInt
from ..common.errors import BadInput
from ..common.files import read_image, read_jsonl
from ..common.images import asked, load_processor, special_tokens
from ..common.loading import Data, TrainLoader
from ..common.loss import Kind, NextTokens
from ..common.quantized import Form, quantize
from ..common.schedule import warmup_then_cosine
from ..common.text import IGNORED

CONNECTORS = ("multi_modal_projector", "connector", "merger", "vision_projection", "aligner")


class FineTuneVLM(L.LightningModule):
    """A vision-language model, trained to answer about images.

    Args:
        name_or_path: A checkpoint directory or a name on the hub. None: a tiny LLaVA that the recipe makes.
        dtype: Of the weights as they are read: "float32", "bfloat16", or "auto" for the checkpoint's own.
        train: "all" trains the vision tower, the projection and the language model. "connection" freezes the tower and
            the language model, and trains the projection and one token in front of every text (as eP-ALM does).
        lr: The highest learning rate; after warming up it falls along a cosine until training ends.
        weight_decay: AdamW's, of matrices.
        warmup_steps: Steps until the learning rate is reached.
        loss: "full": the model's own. "chunked": never the logits of all tokens at once. "auto": chunked where torch
            has it, the vocabulary is large, and the model's loss is nothing else.
        base_bits: Pack the frozen weights: 8 or 4 with bitsandbytes; "int8", "float8", "nf4" or "nvfp4" with torchao.
    """

    def __init__(
        self,
        name_or_path: str | None = None,
        dtype: str = "float32",
        train: Literal["all", "connection"] = "all",
        lr: NonNegativeFloat = 1e-5,
        weight_decay: NonNegativeFloat = 0.0,
        warmup_steps: NonNegativeInt = 0,
        loss: Kind = "auto",
        base_bits: Form | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.name_or_path = name_or_path
        self.dtype_name = dtype
        self.what = train
        self.strict_loading = train == "all"
        self.lr = lr
        self.weight_decay = weight_decay
        self.warmup_steps = warmup_steps
        self.next_tokens = NextTokens(loss)
        self.base_bits = base_bits
        self.model: Any = None

    @property
    def checkpoint(self) -> str:
        """Where the model is read from, by a name that transformers knows."""
        return self.name_or_path or str(tiny.made(tiny.place(self.trainer) / "vlm", tiny.vision_language_model))

    def configure_model(self) -> None:
        if self.model is not None:
            return
        from transformers import AutoModelForImageTextToText

        self.model = checkpoints.load(AutoModelForImageTextToText, self.checkpoint, self.dtype_name)
        if self.what == "connection":
            self.freeze_all_but_the_connection()
        elif self.base_bits is not None:
            raise BadInput(f"base_bits={self.base_bits} packs weights that are frozen: use train=connection")
        if checkpoints.planned():
            self.next_tokens.decide_now(self.model)

    def freeze_all_but_the_connection(self) -> None:
        connections = [m for name, m in self.model.named_modules() if name.rpartition(".")[2] in CONNECTORS]
        if not connections:
            raise BadInput(
                f"{type(self.model).__name__} has none of the modules {CONNECTORS}; train: all trains it all"
            )
        self.model.requires_grad_(False)
        if self.base_bits is not None:
            quantize(self.model, self.base_bits, leave=[self.model.get_output_embeddings(), *connections])
        for connection in connections:
            connection.requires_grad_(True)
        embedding = self.model.get_input_embeddings()
        self.token = nn.Parameter(embedding.weight.detach().float().mean(0))
        embedding.register_forward_hook(self.put_token_first)

    def put_token_first(self, embedding: nn.Module, arguments: Any, embedded: Tensor) -> Tensor:
        """The first place of every text, which holds another token, is the one that is trained."""
        if embedded.ndim != 3:
            return embedded
        first = self.token.to(embedded.dtype).expand(embedded.shape[0], 1, -1)
        return torch.cat([first, embedded[:, 1:]], 1)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        if self.what == "connection":
            front = {"input_ids": self.trainer.datamodule.filler, "attention_mask": 1, "labels": IGNORED}
            shape = batch["input_ids"].shape  # also of what tells images and texts apart
            batch = {
                name: nn.functional.pad(value, (1, 0), value=front.get(name, 0)) if value.shape == shape else value
                for name, value in batch.items()
            }
        return self.next_tokens(self.model, batch)

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True, batch_size=len(batch["input_ids"]))

    def configure_optimizers(self) -> Any:
        return warmup_then_cosine(self, self.lr, self.weight_decay, self.warmup_steps)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Of a frozen model only what is trained is saved; the rest is read from its own checkpoint."""
        if self.what == "connection":
            checkpoints.keep_trained(self, checkpoint)

    def export(self, folder: Path) -> None:
        """Writes a directory that from_pretrained reads, with the processor, or what alone was trained."""
        if self.what == "connection":
            folder.mkdir()
            torch.save({n: p.detach() for n, p in self.named_parameters() if p.requires_grad}, folder / "connection.pt")
            return
        self.model.save_pretrained(folder)
        self.trainer.datamodule.processor.save_pretrained(folder)


def _common(one: Tensor, other: Tensor) -> int:
    """How many tokens two texts begin with in common: the prompt's last may be another when more text follows it."""
    count = min(len(one), len(other))
    return int((one[:count] == other[:count]).cumprod(0).sum())


class CaptionData(Data):
    """Questions about images from a JSONL file: ``{"image": "a.png", "prompt": "What ...?", "completion": "..."}``.

    Args:
        path: The training data; images are looked for from where the file is. None: squares that the recipe paints.
        val_path: The validation data. None: there is no validation.
        batch_size: Records in a batch.
        num_workers: Processes that make batches.
    """

    def __init__(
        self,
        path: str | None = None,
        val_path: str | None = None,
        batch_size: PositiveInt = 4,
        num_workers: NonNegativeInt = 0,
    ) -> None:
        super().__init__()
        self.path = path
        self.val_path = val_path
        self.batch_size = batch_size
        self.num_workers = num_workers

    def setup(self, stage: str) -> None:
        assert self.trainer is not None
        self.processor, self.filler = load_processor(self.trainer.lightning_module.checkpoint)
        self.processor.tokenizer.padding_side = "right"
        val_path = self.val_path if self.path else self.made_up("val", 4)
        self.train_records = self.records(self.path or self.made_up("train", 20))
        self.val_records = self.records(val_path) if val_path else []

    def made_up(self, name: str, count: int) -> str:
        """Images and questions for a run that was given none."""
        assert self.trainer is not None
        folder = tiny.made(tiny.place(self.trainer) / f"captions-{name}", lambda part: tiny.captions(part, count))
        return str(folder / "captions.jsonl")

    def records(self, path: str) -> list[dict[str, str]]:
        """What the file holds, once each record was seen to have what it needs and its image to be there."""
        records = []
        for where, record in read_jsonl(path):
            if not all(isinstance(record.get(key), str) for key in ("image", "prompt", "completion")):
                raise BadInput(
                    f'{where} has the keys {sorted(record)}; a record needs "image", "prompt" and "completion" '
                    "(texts); nothing was trained"
                )
            image = Path(path).parent / record["image"]
            if not image.is_file():
                raise BadInput(f"{where}: the image {image} does not exist; nothing was trained")
            records.append({**record, "image": str(image)})
        return records

    def collate(self, records: Sequence[dict[str, str]]) -> dict[str, Tensor]:
        """A batch in which what follows the prompt is learned."""
        images = [[read_image(record["image"])] for record in records]
        prompts = [asked(self.processor, record["prompt"]) for record in records]
        end = self.processor.tokenizer.eos_token
        texts = [prompt + record["completion"] + end for prompt, record in zip(prompts, records, strict=True)]
        how = {"return_tensors": "pt", **special_tokens(self.processor, texts[0])}
        batch = dict(self.processor(images=images, text=texts, padding=True, **how))
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)
        for row, image, prompt in zip(labels, images, prompts, strict=True):
            row[: _common(row, self.processor(images=[image], text=[prompt], **how)["input_ids"][0])] = IGNORED
        return {**batch, "labels": labels}

    def train_dataloader(self) -> TrainLoader:
        return self.train_loader(
            self.train_records, self.batch_size, collate_fn=self.collate, num_workers=self.num_workers
        )

    def val_dataloader(self) -> Any:
        if not self.val_records:
            return []
        return DataLoader(
            self.val_records, batch_size=self.batch_size, collate_fn=self.collate, num_workers=self.num_workers
        )
