"""The Lightning strategy: it parses options, makes a handle, and tells the handle of Lightning's steps."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
from collections.abc import Callable, Iterator
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
    move_optimizers,
    reset_seed,
    set_average_device,
    setup_model,
)
from ..compat.tensors import convert_tensors
from ..handle import Handle
from ..host.device import check_supported, numbered
from ..options import Options, format_bytes
from ..ranks.watch import KEEPALIVE
from ..stream.parameters import unit_of
from ..stream.preparation import move_others
from . import master_weights as masters
from . import step_timing
from .callback import SuperpipelineCallback
from .checkpoint_io import ShardFiles
from .checkpoints import TrainerCheckpoints
from .names import (
    Accelerator,
    Checkpoint,
    CheckpointIO,
    ParallelStrategy,
    Precision,
    SingleDeviceStrategy,
    StochasticWeightAveraging,
    Trainer,
    TrainerFn,
    WeightAveraging,
    update_properties,
)
from .several_devices import Axes, SeveralDevices

HOST = torch.device("cpu")
WIRES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}

log = logging.getLogger(__name__)


class SuperpipelineStrategy(SeveralDevices, TrainerCheckpoints, SingleDeviceStrategy, ParallelStrategy):
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
        device: The device that computes. By default the one that the Trainer chose.
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
        device: torch.device | str | None = None,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        SingleDeviceStrategy.__init__(self, device or "cpu", accelerator, checkpoint_io, precision_plugin)
        self._timeout, self._keepalive = timeout, keepalive
        self._save_distributed_checkpoint = save_distributed_checkpoint  # Lightning's functions read it by this name
        self._axes = Axes(data_parallel_size, tensor_parallel_size)
        if self._axes.has_shards:
            self._files = ShardFiles(self, save_distributed_checkpoint)
        self.options = Options.parse(
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
        self.handle: Any = None  # the handle of the latest run, at whose end it is closed
        self._device_given = device is not None
        self._averages: list[Any] = []  # callbacks whose averages we keep on the host
        self._callback = None  # added to runs without a callback of the user's
        self._withheld = []  # callbacks, while Lightning handles an exception
        check_supported(self.root_device)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the handle out of a copy: it streams the original's module."""
        return {**super().__getstate__(), "handle": None}

    # ---- setup and teardown

    def setup_environment(self) -> None:
        """Set up ranks and callbacks. Lightning calls this first in a run, before the callbacks' own setup."""
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
        """Add a SuperpipelineCallback for this run unless the user passed one.

        It goes in front of the first checkpoint callback, as Lightning keeps those last; the others keep their order.
        """
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
        """Warn, if weights may be in files, that a callback copies all of them into host memory."""
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
            for optimizer in self.optimizers:
                self.handle.announce(optimizer)
        self.setup_precision_plugin()

    def _convert_module(self, module: nn.Module) -> nn.Module:
        """Convert the module as the precision plugin does; with master weights, keep parameters in FP32."""
        if not self.options.master_weights:
            return self.precision_plugin.convert_module(module)
        return masters.convert(module, masters.half_dtype(self.precision_plugin))

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
        moved = lambda parameter: unit_of(parameter) is not None  # noqa: E731
        with self._waiting_for_parameters("superpipeline: weights into host memory", moved):
            self.handle = self._streamed(module)
        self.handle.team.follows_buffers = self._automatic  # as under DDP: Lightning syncs none in manual optimization
        update_properties(module, device=self.root_device)

    def _streamed(self, module: nn.Module, **settings: Any) -> Handle:
        """Create the handle that streams a module in this run."""
        wire = WIRES.get(str(self.precision_plugin.precision))
        if self.options.master_weights:
            wire = masters.half_dtype(self.precision_plugin)
        return Handle(module, self.root_device, self.options, self._team(), wire=wire, **settings)

    def teardown(self) -> None:
        """Make the module plain again. Lightning calls this after an exception too, wherever it was raised."""
        with contextlib.ExitStack() as ends:  # all of them run, the last one first, even if one raises
            ends.callback(self._base_teardown)
            if self.lightning_module is not None:
                ends.callback(end_noting_sigterm, self.lightning_module.trainer)
            ends.callback(self._remove_callback)
            ends.callback(self._averages.clear)
            for callback in self._averages:
                ends.callback(set_average_device, callback, None)
            ends.callback(self._revert_batch_norms)
            if self.handle is not None:
                ends.callback(self.handle.close)

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
        """Create weights on the host in this context, in the precision plugin's type or with masters in FP32."""
        keep_fp32 = contextlib.nullcontext() if self.options.master_weights else None
        with EmptyInit(enabled=bool(empty_init)), keep_fp32 or self.precision_plugin.tensor_init_context():
            yield

    @contextlib.contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Return a context in which the module's ``configure_model`` cuts its layers into shards on the host."""
        with self._axes.making():
            yield

    @property
    def _module_to_make(self) -> Any:
        """The module whose ``configure_model`` makes its layers once the ranks are connected."""
        return self.lightning_module

    # ---- steps

    @property
    def _streaming(self) -> Any:
        """The handle of the current run; None outside a run, where steps are the base class's."""
        return None if self.handle is None or self.handle.closed else self.handle

    @property
    def _automatic(self) -> bool:
        """Whether Lightning steps the optimizers, by automatic optimization."""
        module: Any = self.lightning_module
        return bool(module.automatic_optimization)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Step as the base class does; where exact, step units while the closure's backward still runs."""
        handle = self._streaming
        if handle is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        with handle.stepping(optimizer, self._may_step_early(optimizer)):
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    def _may_step_early(self, optimizer: Optimizer) -> bool:
        """Whether units may be stepped while backward runs; log once why not."""
        module = self.lightning_module
        assert module is not None
        if not (self._automatic and self.options.optimizer_overlap):
            return False
        why = step_timing.why_gradients_must_be_final(self, module, optimizer)
        if why is not None:
            _tell_that_steps_wait(why)
        return why is None

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run backward as the base class does, and explain errors that streaming causes."""
        if (handle := self._streaming) is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        with handle.explaining():
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    def tell_peers(self, exception: BaseException) -> None:
        """Tell the other ranks of an exception. Safe twice."""
        if self._streaming is not None:
            self._streaming.team.fail(exception)

    def block_backward_sync(self) -> Any:
        """Return a context in which backward exchanges no gradients between ranks, as while they are accumulated."""
        return self.handle.no_sync()

    def on_exception(self, exception: BaseException) -> None:
        """Put checkpoint callbacks back that were withheld, and finish checkpoints that are being written."""
        assert self.lightning_module is not None
        trainer: Any = self.lightning_module.trainer
        trainer.callbacks += self._withheld
        self._withheld = []
        super().on_exception(exception)

    def _step(self, name: str) -> Any:
        """Return the context of one step of the handle, or an empty one outside of a run."""
        return contextlib.nullcontext() if (handle := self._streaming) is None else handle.scope(name)

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


@functools.cache
def _tell_that_steps_wait(why: str) -> None:
    """Log, once for each reason, that the optimizer steps after backward."""
    log.info("superpipeline: the optimizer steps after backward: %s", why)


def _unless_meta(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the host, or as it is on the meta device."""
    return tensor if tensor.is_meta else tensor.to(HOST)
