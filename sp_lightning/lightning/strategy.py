"""The Lightning strategy: it parses options, makes a handle, and tells the handle of Lightning's steps."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer

from ..compat.lightning import (
    EmptyInit,
    average_device,
    begin_noting_sigterm,
    end_noting_sigterm,
    reset_seed,
    set_average_device,
    set_device_mesh,
)
from ..errors import HalfAppliedStepError
from ..handle import Handle
from ..optim.half_applied import why_refused
from ..options import Options
from ..ranks.watch import KEEPALIVE
from ..stream.preparation import materialize, move_others
from ..stream.wholes import registering_on_host
from . import master_weights as masters
from .callback import SuperpipelineCallback
from .names import (
    Accelerator,
    Checkpoint,
    CheckpointIO,
    ModelParallelStrategy,
    ParallelStrategy,
    Precision,
    SingleDeviceStrategy,
    StochasticWeightAveraging,
    Strategy,
    Trainer,
    TrainerFn,
    WeightAveraging,
    rank_zero_info,
    update_properties,
)
from .several_devices import SeveralDevices
from .step_timing import why_gradients_must_be_final

HOST = torch.device("cpu")


class SuperpipelineStrategy(SeveralDevices, SingleDeviceStrategy, ParallelStrategy):
    """Train, validate and predict with a model that does not fit on the device.

    Weights, gradients and optimizer state are in host memory; units of the model (usually one block each) visit the
    device through a small window. Results equal those of the plain run to the last bit.

    Args:
        window: Units on the device at a time, including those being copied there. An int >= 1, or "auto": grows after
            each step into the memory that it left free.
        transfer: Units exchanged at a time, at most ``window``. An int >= 1, or "auto": 1.
        memory_budget: Device bytes for resident and streamed weights and gradients, such as "10GiB", which an "auto"
            window does not exceed. None uses all of the device's memory but a twentieth.
        resident: Units whose weights, gradients and optimizer state are on the device, where they are stepped: a
            number, or bytes for them such as "8GiB", at 16 bytes for each FP32 parameter that trains. To your code
            their parameters are on the host like all others. First come units with a tied weight, then the model's
            first.
            "auto": none while weights train. Without gradients ``window="auto"`` keeps on the device all that fits.
        units: "auto" finds the model's repeated blocks; or class names such as ["LlamaDecoderLayer"]; or a callable
            that takes the module and returns the submodules that become units.
        activations: What happens to what autograd saves inside a unit. "keep" leaves it on the device, "recompute"
            keeps the unit's inputs and runs its forward again in backward, "offload" moves it to the host and back,
            "recompute+offload" moves the inputs and runs forward again. A unit inside of a non-reentrant checkpoint
            of yours is left to that one.
        optimizer_overlap: Step each unit on the host as soon as its gradients have arrived, while backward goes on.
            This needs final gradients, so clipping, gradient scaling or an overridden hook between backward and the
            step prevents it. Units that are not stepped by then are stepped beside the next forward (a deferred
            step), unless a hook of yours runs in between.
        optimizer_device: Where torch's optimizers compute. "host": on the host's cores. "device": slices of weights and
            state go up and come down stepped, with the bits of a plain run whose optimizer steps on the device
            (docs/exactness.md); gradients stay on the device until the step, as far as they fit there beside a forward,
            and state lies on the host.
        wire_dtype: "auto": with precision "bf16-mixed" or "16-mixed", weights of linear layers and convolutions, and
            their gradients, travel in autocast's type where all that reads them is one use that casts them: half the
            bytes, the same bits. "as-is": every weight travels in its own type, as it does in your own
            loops under ``torch.autocast``.
        master_weights: With precision "bf16-true" or "16-true", keep parameters, gradients and optimizer state in FP32
            on the host; the device sees half precision.
        host_memory: "pinned" puts weights and gradients into page-locked memory, which the device copies by itself, or
            raises an error; "pageable" uses ordinary memory, which one thread per direction copies through a small
            page-locked ring; "auto" uses pinned memory as far as the system allows it. Ignored where the CPU computes.
        compile_units: Compile the forward of units with ``torch.compile``: once for all units of a class.
        host_budget: Bytes of host memory for weights, gradients and optimizer state, such as "24GiB". What does not fit
            stays in the files that it was loaded from, as far as it is frozen, and is read from there for each visit
            (docs/disk.md). "0B": all that can stay does. None: all weights are copied into host memory; with ``disk``,
            what is free less the system's share.
        disk: With one device: a folder on a local SSD, for what of the optimizer's state does not fit ``host_budget``,
            and then of weights that train and of gradients: it lies there in a nameless file while the run lasts, and
            is stepped in slices, with the same bits (docs/disk.md).
        timeout: With several devices, how long a rank waits for the others.
        keepalive: With several devices, how long a rank may give no sign before the others end.
        tensor_parallel_size: How many devices have a shard of each layer that the module cuts: its ``configure_model``
            finds ``self.device_mesh`` as under Lightning's ModelParallelStrategy, and calls ``parallelize_module`` with
            ``self.device_mesh["tensor_parallel"]`` (docs/several-devices.md). "auto": all of a machine. None: no mesh.
        data_parallel_size: With ``tensor_parallel_size``, how many such groups of devices there are, each with data of
            its own. "auto": as many as the devices make.
        save_distributed_checkpoint: With ``tensor_parallel_size``: True: a checkpoint is a folder in which each rank
            writes its shards. False: it is one file with whole weights, which are gathered on the first rank's host.
            Either is that of Lightning's ModelParallelStrategy, and both are read.
        accelerator: The accelerator handler; the Trainer sets it.
        checkpoint_io: How checkpoints are written and read; the Trainer sets it.
        precision_plugin: The precision plugin; the Trainer sets it from ``precision``.
    """

    strategy_name = "superpipeline"

    def __init__(
        self,
        window: int | Literal["auto"] = "auto",
        transfer: int | Literal["auto"] = "auto",
        resident: str | int = "auto",
        units: str | list[str] | Callable[[nn.Module], Any] = "auto",
        memory_budget: str | int | None = None,  # a text has a unit, as on a command line
        activations: Literal["keep", "recompute", "offload", "recompute+offload"] = "keep",
        optimizer_overlap: bool = True,
        optimizer_device: Literal["host", "device"] = "host",
        wire_dtype: Literal["auto", "as-is"] = "auto",
        master_weights: bool = False,
        host_memory: Literal["auto", "pinned", "pageable"] = "auto",
        compile_units: bool = False,
        host_budget: str | int | None = None,
        disk: str | os.PathLike[str] | None = None,
        timeout: timedelta = default_pg_timeout,
        keepalive: timedelta = KEEPALIVE,
        tensor_parallel_size: int | Literal["auto"] | None = None,
        data_parallel_size: int | Literal["auto"] = "auto",
        save_distributed_checkpoint: bool = True,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        SingleDeviceStrategy.__init__(self, "cpu", accelerator, checkpoint_io, precision_plugin)
        options = Options.parse(
            window=window,
            transfer=transfer,
            memory_budget=memory_budget,
            resident=resident,
            units=units,
            activations=activations,
            optimizer_overlap=optimizer_overlap,
            optimizer_device=optimizer_device,
            wire_dtype=wire_dtype,
            master_weights=master_weights,
            host_memory=host_memory,
            compile_units=compile_units,
            host_budget=host_budget,
            disk=disk,
        )
        self._store(options, timeout, keepalive, data_parallel_size, tensor_parallel_size, save_distributed_checkpoint)
        self.handle: Any = None  # the handle of the latest run, at whose end it is closed
        self._ends = contextlib.ExitStack()  # undoes what the current run has changed

    def __getstate__(self) -> dict[str, Any]:
        """Leave the run out of a copy: its handle streams the original's module."""
        return {**super().__getstate__(), "handle": None, "_ends": contextlib.ExitStack()}

    # ---- setup and teardown

    def setup_environment(self) -> None:
        """Set up ranks and callbacks. Lightning calls this first in a run, before the callbacks' own setup."""
        assert self.lightning_module is not None
        trainer: Any = self.lightning_module.trainer
        self._ends.close()  # of a run whose callbacks raised before it was torn down
        self._ends.callback(update_properties, self.lightning_module, device=HOST)
        if trainer.state.fn == TrainerFn.FITTING:
            self._check_alone()
        super().setup_environment()
        if self.is_distributed:
            reset_seed()
            begin_noting_sigterm(trainer)
            self._ends.callback(end_noting_sigterm, trainer)
        self._set_up_ranks()
        set_device_mesh(self.lightning_module, self._axes.mesh)
        if not any(isinstance(callback, SuperpipelineCallback) for callback in trainer.callbacks):
            trainer.callbacks.insert(0, SuperpipelineCallback())  # the first that is told of an exception
        for callback in trainer.callbacks:
            if isinstance(callback, (WeightAveraging, StochasticWeightAveraging)) and average_device(callback) is None:
                set_average_device(callback, HOST)  # otherwise the whole model would be copied to the device
                self._ends.callback(set_average_device, callback, None)

    def setup(self, trainer: Trainer) -> None:
        """Set up as the base class does, but leave parameters and optimizer state on the host."""
        assert self.accelerator is not None and self.model is not None
        self.accelerator.setup(trainer)
        fits = trainer.state.fn == TrainerFn.FITTING
        if fits and self._layer_sync is not None and self.is_distributed:
            self.model = self._layer_sync.apply(self.model)
            self._ends.callback(self._revert_batch_norms)
        if self.options.master_weights:
            self.model = masters.convert(self.model, masters.half_dtype(self.precision_plugin))
        else:
            self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        if fits:
            self.setup_optimizers(trainer)
            for optimizer in self.optimizers:
                self.handle.announce(optimizer)
        self.setup_precision_plugin()

    def _revert_batch_norms(self) -> None:
        """Give the module back its own kind of batch norms, as DDP does."""
        self.model = self._layer_sync.revert(self.model)

    def model_to_device(self) -> None:
        """Start to stream the parameters; move buffers, and other tensors such as metrics' states, to the device."""
        module = self.lightning_module
        assert module is not None
        self.handle = None  # before the next one is made: the previous one occupies as much host memory
        if module.trainer.state.fn == TrainerFn.FITTING and self.optimizers:  # optimizers of an earlier run
            self.optimizers, self.lr_scheduler_configs = [], []
            gc.collect()  # schedulers and optimizers refer to each other
        self._axes.check_module(module)
        move_others(module, self.root_device)
        self._ends.callback(move_others, module, HOST)
        self.handle = self._streamed(module)
        self._ends.callback(self.handle.close)
        # As under DDP: Lightning syncs no buffers in manual optimization.
        self.handle.team.follows_buffers = module.automatic_optimization
        update_properties(module, device=self.root_device)

    def _streamed(self, module: nn.Module, **settings: Any) -> Handle:
        """Create the handle that streams a module in this run."""
        wire = masters.wire_of(self.precision_plugin, self.options.master_weights)
        return Handle(module, self.root_device, self.options, self._team(), wire=wire, **settings)

    def teardown(self) -> None:
        """Make the module plain again. Lightning calls this after an exception too, wherever it was raised."""
        try:
            self._ends.close()
        finally:
            assert self.accelerator is not None
            self.precision_plugin.teardown()
            self.cluster_environment.teardown()
            self.accelerator.teardown()
            self.checkpoint_io.teardown()

    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """In this context create weights in the precision plugin's type, or in FP32 with masters; on the host.

        Unlike the base class's, this context enters no device.
        """
        keep_fp32 = contextlib.nullcontext() if self.options.master_weights else None
        with EmptyInit(enabled=bool(empty_init)), keep_fp32 or self.precision_plugin.tensor_init_context():
            yield

    def model_sharded_context(self) -> Any:
        """Return a context in which the module's ``configure_model`` cuts its layers into shards on the host."""
        return registering_on_host() if self._axes.has_shards else contextlib.nullcontext()

    # ---- steps

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Step as the base class does; where exact, step units while the closure's backward still runs."""
        with self.handle.stepping(optimizer, self._may_step_early(optimizer)):
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    def _may_step_early(self, optimizer: Optimizer) -> bool:
        """Whether units may be stepped while backward runs; log once why not."""
        module: Any = self.lightning_module
        if self.handle.closed or not (module.automatic_optimization and self.options.optimizer_overlap):
            return False
        why = why_gradients_must_be_final(self, module, optimizer)
        if why is not None:
            _tell_that_steps_wait(why)
        return why is None

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run backward as the base class does, and explain errors that streaming causes."""
        with self.handle.explaining():
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    def block_backward_sync(self) -> Any:
        """Return a context in which backward exchanges no gradients between ranks, as while they are accumulated."""
        return self.handle.no_sync()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's training_step as one pass over the units."""
        with self.handle.scope("train"):
            return super().training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's validation_step as one pass over the units."""
        with self.handle.scope("validate"):
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's test_step as one pass over the units."""
        with self.handle.scope("test"):
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's predict_step as one pass over the units."""
        with self.handle.scope("predict"):
            return super().predict_step(*args, **kwargs)

    # ---- checkpoints

    @property
    def _streams(self) -> bool:
        """Whether the module streams now."""
        return self.handle is not None and not self.handle.closed

    @property
    def _files(self) -> Any:
        """The class of Lightning's whose functions read and write checkpoints: of whole weights, or of shards."""
        return ModelParallelStrategy if self._axes.has_shards else Strategy

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether a checkpoint is read once the module is set up: each rank reads its own shards into it."""
        return self._axes.has_shards

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Whether Lightning loads the state of optimizers."""
        return not self._axes.has_shards

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state for a checkpoint."""
        return self._files.lightning_module_state_dict(self)  # type: ignore[no-any-return]

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state for a checkpoint."""
        return self._files.optimizer_state(self, optimizer)  # type: ignore[no-any-return]

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint without emptying the device's memory cache; with shards, into module and optimizers."""
        if not self._axes.has_shards:
            return self.checkpoint_io.load_checkpoint(checkpoint_path, weights_only=weights_only)
        found: dict[str, Any] = self._files.load_checkpoint(self, checkpoint_path, weights_only)
        if self._streams:
            for optimizer in self.optimizers:
                self.handle.loaded(optimizer)
            self.handle.steps.publish()
        return found

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load weights as the base class does."""
        module: Any = self.lightning_module
        materialize(module)  # torch would load nothing into a weight on the meta device
        self._files.load_model_state_dict(self, checkpoint, strict)
        if self._streams:
            self.handle.steps.publish()

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load optimizer state and copy it on the host: the optimizer writes to it, and a mapped file may vanish."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            optimizer.load_state_dict(state)
            self.handle.loaded(optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save a checkpoint as the base class does; an error in the middle of a step."""
        self._check_applied("optimizer_states" in checkpoint)
        kind = self._files if self._save_distributed_checkpoint else Strategy
        kind.save_checkpoint(self, checkpoint, filepath, storage_options)

    def _check_applied(self, with_optimizers: bool = True) -> None:
        """Raise HalfAppliedStepError if a step is half applied: weights and state may not be saved then."""
        if self._streams:
            self.handle.saving()
        module: Any = self.lightning_module
        if why := why_refused([module, *(self.optimizers if with_optimizers else ())]):
            raise HalfAppliedStepError(why)

    def note_exception(self, exception: BaseException) -> None:
        """Tell other ranks of an exception that ends this run, and keep checkpoint callbacks from a half-applied step.

        Those are called next. Once told that a checkpoint was saved they would remove the one before, and link to a
        file that is not there.
        """
        if not self._streams:
            return
        self.handle.team.fail(exception)
        trainer: Any = self.lightning_module.trainer  # type: ignore[union-attr]
        try:
            self._check_applied()
        except HalfAppliedStepError:  # which the log has
            withheld = [callback for callback in trainer.callbacks if isinstance(callback, Checkpoint)]
            for callback in withheld:
                trainer.callbacks.remove(callback)  # Lightning is at an earlier place of this very list
            self._ends.close()  # whatever other callbacks do, the module is plain
            self._ends.callback(trainer.callbacks.extend, withheld)


@functools.cache
def _tell_that_steps_wait(why: str) -> None:
    """Log, once for each reason, that the optimizer steps after backward."""
    rank_zero_info(f"superpipeline: the optimizer steps after backward: {why}")
