"""What a run comes to: the line that each recipe prints at its end."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_only

from sp_lightning.options import format_bytes, format_seconds

say = rank_zero_only(print)  # of several devices, the first one speaks


def nbytes(tensors: Iterable[Any]) -> int:
    """Of the tensors among these."""
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))


def plain_nbytes(
    module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], averages: Iterable[torch.nn.Module] = ()
) -> int:
    """What a run that does not stream holds on the device at once, beside activations: weights and their averages, and
    if there is an optimizer a gradient for each weight that is trained, and the optimizer's state."""
    states = (state for optimizer in optimizers for state in optimizer.state.values())
    trained = [p for p in module.parameters() if p.requires_grad] if optimizers else []
    weights = sum(nbytes(holder.parameters()) for holder in (module, *averages))
    return weights + nbytes(trained) + sum(nbytes(state.values()) for state in states)


def averages(trainer: L.Trainer) -> list[torch.nn.Module]:
    """Copies of the model that callbacks keep."""
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return [held for callback in callbacks for held in vars(callback).values() if isinstance(held, torch.nn.Module)]


def device_peak(device: torch.device, handle: Any) -> int | None:
    """Most device bytes that were in use at once. On the CPU, those that streaming would have used on a device; None
    if nothing streamed."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    return None if handle is None else int(handle.stats()["device_peak"])


def bytes_so_far(trainer: L.Trainer) -> tuple[int, int]:
    """Return how many bytes went up and down since streaming began; none if nothing streams."""
    handle = getattr(trainer.strategy, "handle", None)
    stats = {} if handle is None else handle.stats()
    return stats.get("bytes_up", 0), stats.get("bytes_down", 0)


Moved = tuple[str, int, int]  # what a batch moved: its phase, bytes up and bytes down


def per_step(batches: Sequence[Moved], batches_per_step: int) -> tuple[int, int]:
    """Return the mean bytes up and down of a step, without the first one: it brings what later ones find there."""
    counted = batches[batches_per_step:] or batches
    up, down = (sum(batch[place] for batch in counted) * batches_per_step for place in (1, 2))
    return round(up / max(1, len(counted))), round(down / max(1, len(counted)))


def traffic(batches: Sequence[Moved], batches_per_step: int) -> str:
    """Say what a step moved, apart for each phase of which there are batches."""
    said = []
    for phase in dict.fromkeys(batch[0] for batch in batches):
        moved = per_step([batch for batch in batches if batch[0] == phase], batches_per_step)
        up, down = map(format_bytes, moved)
        said.append(f"{up} up and {down} down per step" + (f" while {phase}" if phase else ""))
    return ", ".join(said)


def line(
    loss: float | None, peak: int | None, plain: int, batch_s: float, batches: int = 1, moved: str | None = None
) -> str:
    """The figures for a reader."""
    return " | ".join(
        [
            *([] if loss is None else [f"loss {loss:.4f}"]),
            *([] if peak is None else [f"device peak {format_bytes(peak)}"]),
            f"plain Lightning would have needed {format_bytes(plain)} and activations",
            *([moved] if moved else []),
            f"{format_seconds(batch_s)} per batch" + (f", {batches} batches in a step" if batches > 1 else ""),
        ]
    )


class Summary(L.Callback):
    """Print loss, device peak, what plain Lightning would have needed, bytes and time per step, when the run ends.

    The first step is not timed: it makes what later ones use. Validation is not timed either. What moved is said apart
    for each ``phase`` that the module names, if it names some.
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []  # of each batch
        self.moved: list[Moved] = []  # by each batch
        self.before = (0, 0)  # of it
        self.batches_per_step = 1
        self.began = 0.0

    def _start(self, trainer: L.Trainer) -> None:
        self.seconds, self.moved = [], []
        self.batches_per_step = trainer.accumulate_grad_batches if trainer.training else 1
        if trainer.strategy.root_device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats()

    def _end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        timed = self.seconds[self.batches_per_step :] or self.seconds
        batch_s = sum(timed) / max(len(timed), 1)
        peak = device_peak(trainer.strategy.root_device, getattr(trainer.strategy, "handle", None))
        loss = trainer.callback_metrics.get("loss")
        plain = plain_nbytes(module, trainer.optimizers, averages(trainer))
        moved = traffic(self.moved, self.batches_per_step)
        say(line(None if loss is None else float(loss), peak, plain, batch_s, self.batches_per_step, moved))

    def _begin_batch(self, trainer: L.Trainer) -> None:
        self.before = bytes_so_far(trainer)
        self.began = time.perf_counter()

    def _end_batch(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.seconds.append(time.perf_counter() - self.began)
        if getattr(trainer.strategy, "handle", None) is not None:
            up, down = (now - then for now, then in zip(bytes_so_far(trainer), self.before, strict=True))
            self.moved.append((getattr(module, "phase", ""), up, down))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._start(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._end(trainer, pl_module)

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._start(trainer)
        self._begin_batch(trainer)

    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._end(trainer, pl_module)

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._begin_batch(trainer)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self._end_batch(trainer, pl_module)

    def on_predict_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self._end_batch(trainer, pl_module)
        self._begin_batch(trainer)  # several may be under way at once: from the end of one to that of the next
