"""The Lightning strategy on the core of before handle.py: several devices, disks, and what else is not on that yet."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import nn
from torch.optim import Optimizer

from ..compat.lightning import (
    EmptyInit,
    average_device,
    begin_noting_sigterm,
    end_noting_sigterm,
    move_optimizers,
    reset_seed,
    set_average_device,
    setup_model,
)
from ..compat.modules import convert_tensors
from ..errors import PeerError, TornStepError
from ..memory.device import numbered
from ..memory.watched_parameters import is_watched
from ..observe.progress import waiting
from ..optim.pending_step import AFTER_BACKWARD, WHOLE_STEP
from ..options import Options, format_bytes
from ..ranks.new_weights import check_readable
from ..runtime.handle import Handle, own_state
from ..steps import torn_step
from ..stream.preparation import materialize, move_others
from . import master_weights as masters
from . import step_timing
from .callback import SuperpipelineCallback
from .checkpoint_io import (
    MappedCheckpointIO,
    WholeFiles,
    checkpoints_to_come,
    size_so_far,
)
from .names import (
    Checkpoint,
    CheckpointIO,
    GradientAccumulationScheduler,
    ParallelStrategy,
    SingleDeviceStrategy,
    StochasticWeightAveraging,
    Trainer,
    TrainerFn,
    WeightAveraging,
    WrappingCheckpointIO,
    update_properties,
)
from .several_devices import SeveralDevices

HOST = torch.device("cpu")

log = logging.getLogger(__name__)


class StrategyBefore(SeveralDevices, SingleDeviceStrategy, ParallelStrategy):
    """Stream on the core of before handle.py, for what that does not have yet."""

    _files: WholeFiles = WholeFiles()
    options: Options
    handle: Any
    _last_checkpoint: str | None
    _averages: list[WeightAveraging | StochasticWeightAveraging]
    _callback: SuperpipelineCallback | None
    _withheld: list[Checkpoint]

    def __getstate__(self) -> dict[str, Any]:
        """Leave the handle out of a copy: it streams the original's module."""
        return {**super().__getstate__(), "handle": None}

    # ---- setup and teardown

    def setup_environment(self) -> None:
        """Prepare the callbacks. Lightning calls this first in a run; the callbacks' own setup comes next."""
        assert self.lightning_module is not None
        trainer: Any = self.lightning_module.trainer
        if trainer.state.fn == TrainerFn.FITTING:
            self._check_alone()
        if self._device_given:
            self._root_device = numbered(self.root_device)  # Lightning asks torch for the device of that number
        super().setup_environment()
        if self.is_distributed:
            reset_seed()
        self._set_up_ranks()
        if self.is_distributed:
            begin_noting_sigterm(trainer)
        self._add_callback(trainer)
        self._keep_averages_on_host(trainer)

    def _add_callback(self, trainer: Any) -> None:
        """Add a callback for this run unless the user passed one: before checkpoint callbacks, as Lightning orders
        them, and without reordering the others."""
        callbacks = list(trainer.callbacks)
        if any(isinstance(callback, SuperpipelineCallback) for callback in callbacks):
            self._callback = None
        else:
            self._callback = self._callback or SuperpipelineCallback()
            checkpoints = (place for place, callback in enumerate(callbacks) if isinstance(callback, Checkpoint))
            callbacks.insert(next(checkpoints, len(callbacks)), self._callback)
            trainer.callbacks = callbacks

    def _remove_callback(self) -> None:
        """Remove our callback from ``trainer.callbacks``, which Lightning's tuners and user code read between runs.

        We tear it down too: Lightning does so after the strategy, and not at all after an exception."""
        ours = self._callback
        if ours is not None:
            assert self.lightning_module is not None
            trainer: Any = self.lightning_module.trainer
            trainer.callbacks = [callback for callback in trainer.callbacks if callback is not ours]
            ours.teardown(trainer, self.lightning_module, trainer.state.fn)

    def _keep_averages_on_host(self, trainer: Any) -> None:
        """Set weight-averaging callbacks to the host, since they would otherwise copy the whole model to the device."""
        for callback in trainer.callbacks:
            if isinstance(callback, (WeightAveraging, StochasticWeightAveraging)) and average_device(callback) is None:
                set_average_device(callback, HOST)
                self._averages.append(callback)
                self._warn_of_copy(type(callback).__name__)

    def _warn_of_copy(self, of: str) -> None:
        """Warn that a callback copies weights into memory that a budget does not count."""
        assert self.lightning_module is not None
        if self.options.uses_files:
            log.warning(
                "superpipeline: %s copies all weights (%s) into host memory, those in files too, beside host_budget "
                "(a plan counts them: of a config, or by copies=1)",
                of,
                format_bytes(sum(parameter.nbytes for parameter in self.lightning_module.parameters())),
            )

    def setup(self, trainer: Trainer) -> None:
        """Set up as the base class does, but leave parameters and optimizer state on the host."""
        assert self.accelerator is not None and self.model is not None
        self.accelerator.setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self._sync_batch_norms()
        self.model = self._convert_module(self.model)
        self.model_to_device()
        self.model = setup_model(self)(self.model)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            self._check_room(trainer)
        self.setup_precision_plugin()

    def _check_room(self, trainer: Trainer) -> None:
        """Raise an error if the optimizers' state would exceed the budget, or with checkpoints fill its disk."""
        assert self.handle is not None and self.lightning_module is not None
        module = self.lightning_module

        def to_come(folder: str) -> int:
            return checkpoints_to_come(folder, trainer, module, not step_timing.chooses_checkpoints(module))

        for optimizer in self.optimizers:
            self.handle.team.check_optimizer(optimizer)
        self.handle.storage.check_state(self.optimizers)
        self.handle.steps.state.check_room(self.optimizers, to_come)

    def _convert_module(self, module: nn.Module) -> nn.Module:
        """Convert the module as the precision plugin does; with master weights, keep parameters in FP32."""
        if not self.options.master_weights:
            return self.precision_plugin.convert_module(module)
        return masters.convert(module, masters.half_dtype(self.precision_plugin))

    def model_to_device(self) -> None:
        """Begin to stream the parameters; move buffers, and what parts take along, such as metrics, to the device."""
        assert self.lightning_module is not None
        self.handle = None  # before the next one is made: the previous one occupies as much host memory
        self._axes.check_module(self.lightning_module)
        move_others(self.lightning_module, self.root_device, lambda parameter: not is_watched(parameter))
        compute_dtype = masters.half_dtype(self.precision_plugin) if self.options.master_weights else None
        fits = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        if fits and self.optimizers:  # of an earlier run: this one makes others, and state of its own
            self.optimizers, self.lr_scheduler_configs = [], []
            gc.collect()  # schedulers are in cycles with them
        with self._waiting_for_parameters("superpipeline: weights into host memory", is_watched):
            self.handle = Handle(
                self.lightning_module,
                self.root_device,
                self.options,
                compute_dtype,
                only_inference=not fits,
                trains=fits,
                ranks=self.data_ranks,
                own_gradients=self.writes_gradients,
                autocasts=str(self.precision_plugin.precision).endswith("mixed"),
                shards=self._axes.has_shards,
                timeout=self._timeout,
            )
        self.handle.last_checkpoint = self._last_checkpoint
        self.broadcast_buffers(self.lightning_module)
        self._syncs_buffers = fits
        update_properties(self.lightning_module, device=self.root_device)

    @property
    def writes_gradients(self) -> bool:
        """Whether every rank accumulates gradients, or writes to them, by what the user passed to the Trainer.

        Clipping the norm writes nothing (ranks/clipping.py, optim/host_gradients.py).
        """
        assert self.lightning_module is not None
        trainer: Any = self.lightning_module.trainer
        scales = getattr(self.precision_plugin, "scaler", None) is not None
        clips = bool(trainer.gradient_clip_val) and trainer.gradient_clip_algorithm == "value"
        schedules = (one for one in trainer.callbacks if isinstance(one, GradientAccumulationScheduler))
        later = any(one.going_to_accumulate_grad_batches() for one in schedules)
        return clips or scales or later or bool(trainer.accumulate_grad_batches > 1)

    def teardown(self) -> None:
        """Make the module plain again. Lightning calls this after an exception too, wherever it was raised."""
        try:
            if self.handle is not None:
                self.handle.close()
        finally:
            self._revert_batch_norms()
            for callback in self._averages:
                set_average_device(callback, None)
            self._averages.clear()
            self._last_checkpoint = None
            self.leave_ranks()
            self._remove_callback()
            if self.lightning_module is not None:
                end_noting_sigterm(self.lightning_module.trainer)
            self._base_teardown()

    def _base_teardown(self) -> None:
        """Tear down as the base class does, but leave meta weights alone: moving them would hide their error."""
        move_optimizers(self.optimizers, HOST)
        if self.lightning_module is not None:
            convert_tensors(self.lightning_module, _unless_meta)
            update_properties(self.lightning_module, device=HOST)
        self.precision_plugin.teardown()
        assert self.accelerator is not None
        if self.cluster_environment is not None:
            self.cluster_environment.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Create weights on the host, whatever code creates them."""
        keep_fp32 = contextlib.nullcontext() if self.options.master_weights else None
        with EmptyInit(enabled=bool(empty_init)), keep_fp32 or self.precision_plugin.tensor_init_context():
            yield

    @contextlib.contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Have a module's ``configure_model`` cut its layers into shards on the host."""
        with self._axes.making():
            yield

    @property
    def _module_to_make(self) -> Any:
        return self.lightning_module

    # ---- checkpoints

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The Trainer's checkpoint plugin, or the default one, which maps local files instead of reading them."""
        if self._checkpoint_io is None:
            self._checkpoint_io = MappedCheckpointIO()
        elif isinstance(self._checkpoint_io, WrappingCheckpointIO):
            self._checkpoint_io.checkpoint_io = MappedCheckpointIO()  # a wrapper without one of the user's
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint without emptying the device's memory cache."""
        self._note_checkpoint(checkpoint_path)
        found = self._files.load(checkpoint_path, self.checkpoint_io.load_checkpoint, weights_only)
        if self._files.in_shards and self._streaming is not None:  # they are loaded
            for optimizer in self.optimizers:
                self._streaming.state_loaded(optimizer)
            self._streaming.settle()
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
        self._check_whole()
        return self._files.state_of((), super().lightning_module_state_dict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state for a checkpoint."""
        self._check_whole()
        plain, handle = super().optimizer_state, self._streaming
        if handle is None:
            check_readable(optimizer)
        if handle is not None and handle.divides_state and not self._handles_exception:
            plain = handle.optimizer_state
        return self._files.state_of((optimizer,), plain)

    def _check_whole(self) -> None:
        if self._streaming is not None:
            self._streaming.engine.check_whole()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load weights as the base class does, with a progress bar if it takes long."""
        if self._files.in_shards:
            return
        assert self.lightning_module is not None
        materialize(self.lightning_module)  # torch would load nothing into a weight on the meta device
        before = {id(parameter): parameter._version for parameter in self.lightning_module.parameters()}
        with self._waiting_for_parameters("superpipeline: loading weights", lambda p: p._version != before[id(p)]):
            super().load_model_state_dict(checkpoint, strict=strict)
        if self._streaming is not None:
            self._streaming.settle()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save a checkpoint as the base class does, with a progress bar if it takes long.

        In the middle of a step that is an error. Of a torn step nothing is saved: while Lightning handles an exception
        the log says so, else it is an error.
        """
        self._check_whole()
        if why := self._why_not_saved("optimizer_states" in checkpoint):
            if not self._handles_exception:
                raise TornStepError(why)
            log.error("superpipeline: %s was not saved, since %s", os.fspath(filepath), why)
            return
        ours = self._callback
        if ours is not None and "callbacks" in checkpoint and (chosen := ours.state_dict()):
            checkpoint["callbacks"][ours.state_key] = chosen  # after the run, the callback is not in the Trainer
        sizes: list[int] = []
        apply_to_collection(checkpoint, torch.Tensor, lambda tensor: sizes.append(tensor.nbytes))
        what = f"superpipeline: saving {os.path.basename(os.fspath(filepath))}"
        with waiting(what, sum(sizes), lambda: size_so_far(filepath), self._may_show, self._display):
            self._files.save(checkpoint, filepath, super().save_checkpoint, storage_options)
        self._note_checkpoint(filepath)

    def _why_not_saved(self, with_optimizers: bool = True) -> str | None:
        """Say why no checkpoint may be saved: a step was torn (torn_step.py), or state cannot be brought together."""
        assert self.lightning_module is not None
        if with_optimizers and self._handles_exception and self.handle is not None and self.handle.divides_state:
            return "the optimizers' state is divided among machines, which do not meet while they handle an exception"
        return torn_step.why_not_saved([self.lightning_module, *(self.optimizers if with_optimizers else ())])

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
        if (why := self._why_not_saved()) is not None:
            if not torn_step.why_not_saved([self.lightning_module, *self.optimizers]):  # else it was said
                log.error("superpipeline: no checkpoint is saved of this exception, since %s", why)
            self._withheld = [callback for callback in trainer.callbacks if isinstance(callback, Checkpoint)]
            for callback in self._withheld:
                trainer.callbacks.remove(callback)  # Lightning is at an earlier place of this very list

    def _note_checkpoint(self, path: Any) -> None:
        """Note the checkpoint from which a run that fails can go on."""
        self._last_checkpoint = os.fspath(path)
        if self.handle is not None:
            self.handle.last_checkpoint = self._last_checkpoint

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

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load optimizer state and copy it on the host: the optimizer writes to it, and a mapped file may vanish."""
        handles = [] if self._streaming is None else [self._streaming]
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            optimizer.load_state_dict(state)
            own_state(optimizer, handles)
        for handle in handles:
            handle.settle()

    # ---- steps

    @property
    def _streaming(self) -> Any:
        """The handle of the current run; None outside a run, where steps are the base class's."""
        return None if self.handle is None or self.handle.closed else self.handle

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Step as the base class does; where exact, step units while the closure's backward still runs."""
        handle = self._streaming
        if handle is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        assert self.lightning_module is not None
        with handle.explaining():
            if not (self._automatic and self.options.optimizer_overlap):
                return super().optimizer_step(optimizer, closure, model, **kwargs)
            with handle.steps.overlapping(optimizer, self._may_hold, self._may_step_ahead(optimizer)):
                return super().optimizer_step(optimizer, closure, model, **kwargs)

    def _may_step_ahead(self, optimizer: Optimizer) -> bool:
        assert self.handle is not None and self.lightning_module is not None
        reason = step_timing.why_gradients_must_be_final(self, self.lightning_module, optimizer)
        reason = reason or self.handle.steps.other_hooks(optimizer)
        self.handle.steps.say(AFTER_BACKWARD, reason)
        return reason is None

    def _may_hold(self) -> bool:
        """Decide whether the step may be deferred, to run beside the next forward: code that reads a weight waits."""
        module = self.lightning_module
        assert module is not None and self.handle is not None
        reason = self.handle.steps.other_hooks(module.trainer.optimizers[0], after=True)
        self.handle.steps.say(WHOLE_STEP, reason)
        return reason is None and step_timing.next_is_a_training_step(module.trainer)

    def tell_peers(self, exception: BaseException) -> None:
        """Tell the other ranks, also those with shards of the same layers, of an exception. Safe twice."""
        super().tell_peers(exception)
        if self._streaming is not None:
            self._streaming.path.fail(isinstance(exception, PeerError))

    def on_exception(self, exception: BaseException) -> None:
        """Complete what is being written, and put checkpoint callbacks back."""
        assert self.lightning_module is not None
        trainer: Any = self.lightning_module.trainer
        trainer.callbacks += self._withheld
        self._withheld = []
        super().on_exception(exception)

    @property
    def _automatic(self) -> bool:
        assert self.lightning_module is not None
        return self.lightning_module.automatic_optimization

    @contextlib.contextmanager
    def _step(self, name: str) -> Iterator[None]:
        handle = self._streaming
        if handle is None:
            yield
            return
        if self.ranks.world > 1:
            self.ranks.check()
            if self._syncs_buffers and handle.has_buffers:
                assert self.lightning_module is not None
                self.broadcast_buffers(self.lightning_module)
        handle.open_scope(name)
        try:
            with handle.explaining():
                yield
        finally:
            handle.close_scope()
            # As DDP decides after its forward. By hand, Lightning has it not synchronise.
            self._syncs_buffers = torch.is_grad_enabled() and self._syncs_gradients and self._automatic

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run backward as the base class does, and explain errors that streaming causes."""
        handle = self._streaming
        if handle is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        with handle.explaining():
            if self.ranks.world == 1:
                return super().backward(closure_loss, optimizer, *args, **kwargs)
            return self._backward_of_ranks(handle, closure_loss, optimizer, *args, **kwargs)

    def _backward_of_ranks(
        self, handle: Handle, loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Run backward; gradients are exchanged before ``on_after_backward``, which the last part of it calls."""
        plugin, module = self.precision_plugin, self.lightning_module
        assert module is not None
        if not self._automatic:  # as Lightning prepares DDP; the end of a step decides again
            self._syncs_buffers = torch.is_grad_enabled() and self._syncs_gradients
        self.pre_backward(loss)
        loss = plugin.pre_backward(loss, module)
        with handle.team.exchanging(loss) if self._syncs_gradients else contextlib.nullcontext():
            plugin.backward(loss, module, optimizer, *args, **kwargs)
        loss = plugin.post_backward(loss, module)
        self.post_backward(loss)
        return loss

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's training_step as one pass over the units."""
        with self._step("train"):
            return super().training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's validation_step as one pass over the units."""
        with self._step("validate"):
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's test_step as one pass over the units."""
        with self._step("test"):
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's predict_step as one pass over the units."""
        with self._step("predict"):
            return super().predict_step(*args, **kwargs)


def _unless_meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_meta else tensor.to(HOST)
