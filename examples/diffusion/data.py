"""Cached latents and what they are conditioned on: a file of tensors for each image."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..common import tiny
from ..common.arguments import NonNegativeInt, PositiveInt
from ..common.errors import BadInput
from ..common.files import existing
from ..common.loading import Data, TrainLoader


class LatentData(Data):
    """A folder of safetensors files, one for each image: its ``latents``, and under the names of the model's arguments
    what else it is given (``encoder_hidden_states``, ``pooled_projections``, ``added_cond_kwargs.time_ids``, ...).

    Args:
        path: The folder. None: squares of colours that the recipe paints.
        batch_size: Images in a batch.
        num_workers: Processes that read files.
    """

    def __init__(self, path: str | None = None, batch_size: PositiveInt = 4, num_workers: NonNegativeInt = 0) -> None:
        super().__init__()
        self.path = path
        self.batch_size = batch_size
        self.num_workers = num_workers

    def setup(self, stage: str) -> None:
        assert self.trainer is not None
        made = tiny.place(self.trainer) / "latents"
        self.folder = existing(
            self.path or tiny.made(made, lambda part: tiny.latents(part, 16)), "the folder of latents"
        )
        self.files = sorted(self.folder.glob("*.safetensors"))
        if not self.files:
            raise BadInput(f"{self.folder} has no safetensors files; nothing was trained")
        first = shapes(self.files[0])
        if "latents" not in first:
            raise BadInput(f"{self.files[0]} has {', '.join(sorted(first))}, but no latents; nothing was trained")
        for file in self.files[1:]:
            other = shapes(file)
            if first.keys() != other.keys() or (self.batch_size > 1 and first != other):
                raise BadInput(
                    f"{file} has {other}, but {self.files[0]} has {first}: a batch has tensors of one size "
                    "(data.batch_size=1 trains on any); nothing was trained"
                )
        self.names = {*first} - {"latents"}

    def first(self, count: int) -> dict[str, Tensor]:
        """The first records, as many as are of one size."""
        files = [file for file in self.files if shapes(file) == shapes(self.files[0])]
        return collate([read(file) for file in files[:count]])

    def train_dataloader(self) -> TrainLoader:
        files: Any = Files(self.files)
        return self.train_loader(files, self.batch_size, collate_fn=collate, num_workers=self.num_workers)


class Files(torch.utils.data.Dataset[Any]):
    """What each file holds, read when it is asked for."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return read(self.files[index])


def read(file: Path) -> dict[str, Tensor]:
    """The tensors of a file; those with fractions in FP32."""
    from safetensors.torch import load_file

    return {name: t.float() if t.is_floating_point() else t for name, t in load_file(file).items()}


def shapes(file: Path) -> dict[str, list[int]]:
    """The sizes of a file's tensors."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as opened:
            return {name: list(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise BadInput(f"{file} can not be read: {error}; nothing was trained") from error


def collate(records: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch."""
    return {name: torch.stack([record[name] for record in records]) for name in records[0]}
