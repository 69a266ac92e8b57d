"""What each training step moved, for the user's loggers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from lightning.pytorch import Callback, LightningModule, Trainer

from .errors import UnsupportedError
from .handle import Handle

MOVED = ("fetches", "bytes_up", "bytes_down")


@runtime_checkable
class Streaming(Protocol):
    """A strategy that streams the module's weights."""

    handle: Handle | None


class SuperpipelineCallback(Callback):
    """Reports what a training step moved, in the rhythm of ``log_every_n_steps``.

    The strategy adds one when the user added none. Costs a few integers per step and changes nothing; without a logger
    it does nothing. Values are named ``superpipeline/bytes_up`` (to the device), ``superpipeline/bytes_down`` and
    ``superpipeline/fetches`` (units brought up).
    """

    def __init__(self) -> None:
        self._before: Mapping[str, Any] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuses a strategy that streams nothing."""
        if not isinstance(trainer.strategy, Streaming):
            raise UnsupportedError(
                f"SuperpipelineCallback reports what strategy 'superpipeline' moves, but the Trainer uses "
                f"{type(trainer.strategy).__name__}; pass strategy='superpipeline' or remove the callback"
            )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Counters before the step."""
        self._before = _stats(trainer) if trainer.loggers else {}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """What it added to them."""
        if not self._before or not trainer._logger_connector.should_update_logs:
            return
        now = _stats(trainer)
        moved = {f"superpipeline/{name}": float(now[name] - self._before[name]) for name in MOVED}
        for logger in trainer.loggers:
            # Not through self.log(): what the user monitors, prints and saves stays what it was.
            logger.log_metrics(moved, step=trainer.fit_loop.epoch_loop._batches_that_stepped)


def _stats(trainer: Trainer) -> dict[str, Any]:
    handle = trainer.strategy.handle  # type: ignore[attr-defined]
    assert handle is not None
    return handle.stats()  # type: ignore[no-any-return]
