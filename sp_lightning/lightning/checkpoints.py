"""The checkpoints of a Trainer's run: what is written and read, with bars where it takes long."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import nn
from torch.optim import Optimizer

from ..errors import HalfAppliedStepError
from ..observe.progress import waiting
from ..optim.half_applied import why_refused
from ..stream.preparation import materialize
from .callback import SuperpipelineCallback
from .checkpoint_io import MappedCheckpointIO, WholeFiles, size_so_far
from .names import Checkpoint, CheckpointIO, Strategy, WrappingCheckpointIO

log = logging.getLogger(__name__)


class TrainerCheckpoints(Strategy):
    """The part of the Trainer's strategy that saves and loads."""

    _files: WholeFiles = WholeFiles()
    _checkpoint_io: Any
    _callback: SuperpipelineCallback | None
    _withheld: list[Checkpoint]
    _streaming: Any
    handle: Any

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The Trainer's checkpoint plugin, or the default one, which maps local files instead of reading them."""
        if self._checkpoint_io is None:
            self._checkpoint_io = MappedCheckpointIO()
        elif isinstance(self._checkpoint_io, WrappingCheckpointIO):
            self._checkpoint_io.checkpoint_io = MappedCheckpointIO()  # a wrapper without one of the user's
        io: CheckpointIO = self._checkpoint_io
        return io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint without emptying the device's memory cache."""
        found = self._files.load(checkpoint_path, self.checkpoint_io.load_checkpoint, weights_only)
        if self._files.in_shards and self._streaming is not None:  # they are loaded
            for optimizer in self.optimizers:
                self._streaming.loaded(optimizer)
            self._streaming.steps.publish()
        return found

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether a checkpoint is read once the module is set up."""
        return self._files.in_shards

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Whether Lightning loads the state of optimizers."""
        return not self._files.in_shards

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state for a checkpoint."""
        return self._files.state_of((), super().lightning_module_state_dict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state for a checkpoint.

        After an exception in a half-applied step it is empty: `save_checkpoint` says why it writes nothing.
        """
        if self._handles_exception and self._why_not_saved():
            return {}
        return self._files.state_of((optimizer,), super().optimizer_state)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load weights as the base class does, with a progress bar if it takes long."""
        if self._files.in_shards:
            return  # `load_checkpoint` has loaded them
        module = self.lightning_module
        assert module is not None
        materialize(module)  # torch would load nothing into a weight on the meta device
        before = {id(parameter): parameter._version for parameter in module.parameters()}
        with self._waiting_for_parameters("superpipeline: loading weights", lambda p: p._version != before[id(p)]):
            super().load_model_state_dict(checkpoint, strict=strict)
        if self._streaming is not None:
            self._streaming.steps.publish()

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load optimizer state and copy it on the host: the optimizer writes to it, and a mapped file may vanish."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            optimizer.load_state_dict(state)
            self.handle.loaded(optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save a checkpoint as the base class does, with a progress bar if it takes long.

        In the middle of a step that is an error. Of a half-applied step nothing is saved: while Lightning handles an
        exception the log says so, else it is an error.
        """
        if why := self._why_not_saved("optimizer_states" in checkpoint):
            if not self._handles_exception:
                raise HalfAppliedStepError(why)
            log.error("superpipeline: %s was not saved, since %s", os.fspath(filepath), why)
            return
        sizes: list[int] = []
        apply_to_collection(checkpoint, torch.Tensor, lambda tensor: sizes.append(tensor.nbytes))
        what = f"superpipeline: saving {os.path.basename(os.fspath(filepath))}"
        with waiting(what, sum(sizes), lambda: size_so_far(filepath), self._may_show, self._display):
            self._files.save(checkpoint, filepath, super().save_checkpoint, storage_options)

    def _why_not_saved(self, with_optimizers: bool = True) -> str | None:
        try:
            if self._streaming is not None:
                self._streaming.saving()
        except HalfAppliedStepError as error:
            return str(error)
        module: Any = self.lightning_module
        return why_refused([module, *(self.optimizers if with_optimizers else ())])

    @property
    def _handles_exception(self) -> bool:
        """Whether Lightning handles an exception that ends this run: another one would hide it, and skip the end."""
        assert self.lightning_module is not None
        return self._streaming is not None and self.lightning_module.trainer.interrupted

    def withhold_checkpoint_callbacks(self) -> None:
        """Keep checkpoint callbacks, which come next, from an exception of which nothing is saved.

        Once told that a checkpoint was saved they would remove the one before, and link to a file that is not there.
        """
        assert self.lightning_module is not None
        trainer: Any = self.lightning_module.trainer
        if self._why_not_saved() is not None:  # which the log has
            self._withheld = [callback for callback in trainer.callbacks if isinstance(callback, Checkpoint)]
            for callback in self._withheld:
                trainer.callbacks.remove(callback)  # Lightning is at an earlier place of this very list

    def _waiting_for_parameters(
        self, what: str, done: Callable[[nn.Parameter], bool]
    ) -> contextlib.AbstractContextManager[None]:
        assert self.lightning_module is not None
        sizes = [(parameter, parameter.nbytes) for parameter in self.lightning_module.parameters()]
        so_far = lambda: sum(nbytes for parameter, nbytes in sizes if done(parameter))  # noqa: E731
        return waiting(what, sum(nbytes for _, nbytes in sizes), so_far, self._may_show, self._display)

    @property
    def _may_show(self) -> bool:
        """Whether progress may be shown on the terminal."""
        assert self.lightning_module is not None
        trainer: Any = self.lightning_module.trainer
        ours = [callback for callback in trainer.callbacks if isinstance(callback, SuperpipelineCallback)]
        bar = trainer.progress_bar_callback
        return bar is not None and trainer.is_global_zero and all(callback.progress for callback in ours)

    @property
    def _display(self) -> Any:
        """The live display of the Trainer's progress bar, such as rich's during training; None without one."""
        assert self.lightning_module is not None
        progress = getattr(self.lightning_module.trainer.progress_bar_callback, "progress", None)
        live = getattr(progress, "live", None)
        return progress if live is not None and live.is_started else None
