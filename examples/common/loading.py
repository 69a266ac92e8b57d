"""Data of which a resumed run goes on with the next batch, in the middle of an epoch too."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, DistributedSampler

from .errors import BadInput


class Order(DistributedSampler[int]):
    """A shuffled order that depends on the epoch alone, from any place in it; each rank takes every n-th record.

    Where records do not divide by the ranks some come twice, as in torch's sampler. Lightning puts none of its own in
    the place of this one, and tells it the epoch.
    """

    start = 0  # of the next pass: records of all ranks that are behind it

    def __iter__(self) -> Iterator[int]:
        start, self.start = self.start, 0
        order = torch.randperm(len(self.dataset), generator=torch.Generator().manual_seed(self.epoch)).tolist()  # type: ignore[arg-type]
        left = order[start:]
        left += islice(cycle(order), -len(left) % self.num_replicas)
        return iter(left[self.rank :: self.num_replicas])


class TrainLoader(DataLoader[Any]):
    """Shuffled batches. The Trainer saves its state in checkpoints, and a resumed run goes on with the next batch."""

    def __init__(self, trainer: L.Trainer, dataset: Any, batch_size: int, **options: Any) -> None:
        order = Order(dataset, trainer.world_size, trainer.global_rank)
        # With a generator of its own it draws nothing from the run's random numbers.
        generator = torch.Generator().manual_seed(0)
        super().__init__(dataset, batch_size, sampler=order, generator=generator, **options)
        self.trainer = trainer
        self.order = order
        self.done = 0  # records of all ranks in this pass, those before it was resumed included

    def __iter__(self) -> Any:
        self.done = self.order.start
        for batch in super().__iter__():
            self.done += (self.batch_size or 1) * self.order.num_replicas
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"records": 0 if self.trainer.is_last_batch else self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.order.start = state["records"]


class Data(L.LightningDataModule):
    """A data module that saves the place in its training data.

    The Trainer saves a loader's state by itself, but does not restore it when ``estimated_stepping_batches`` made the
    loader before the checkpoint was read.
    """

    place: dict[str, int] | None = None
    made: TrainLoader | None = None

    def train_loader(self, dataset: Any, batch_size: int, **options: Any) -> TrainLoader:
        assert self.trainer is not None
        if batch_size < 1:
            raise BadInput(f"data.batch_size={batch_size}: a batch has at least 1 row")
        self.made = TrainLoader(self.trainer, dataset, batch_size, **options)
        if not len(self.made):
            each = f" on each of {self.trainer.world_size} devices" if self.trainer.world_size > 1 else ""
            raise BadInput(f"{len(dataset)} records do not fill one batch of data.batch_size={batch_size}{each}")
        if self.place is not None:
            self.made.load_state_dict(self.place)
            self.place = None
        return self.made

    def state_dict(self) -> dict[str, int]:
        return {} if self.made is None else self.made.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state or None


class RandomState(L.Callback):
    """Saves torch's random state in checkpoints: a resumed run draws what it would have drawn (dropout, augmentations).

    Loaders with worker processes draw there, and begin anew.
    """

    restored: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        return {"cpu": torch.get_rng_state(), "cuda": cuda}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.restored = state_dict

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.restored is not None:
            torch.set_rng_state(self.restored["cpu"])
            if self.restored["cuda"]:
                torch.cuda.set_rng_state_all(self.restored["cuda"])
            self.restored = None
