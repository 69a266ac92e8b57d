"""The Lightning strategy on the core of handle.py: options, a handle, and what it is told of Lightning's steps."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Literal, TypeVar, cast

import torch
from torch import nn
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer

from ..compat.lightning import end_noting_sigterm, set_average_device, setup_model
from ..errors import TornStepError
from ..handle import Handle, not_yet
from ..host.device import check_supported
from ..nodes.transport import KEEPALIVE
from ..options import Options
from ..steps import torn_step
from ..stream.parameters import unit_of
from ..stream.preparation import materialize, move_others
from . import master_weights as masters
from . import step_timing
from .before import StrategyBefore
from .checkpoint_io import ShardFiles
from .names import (
    Accelerator,
    CheckpointIO,
    Precision,
    SingleDeviceStrategy,
    Trainer,
    TrainerFn,
    update_properties,
)
from .several_devices import axes

F = TypeVar("F", bound=Callable[..., Any])
WIRES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def on_core(method: F) -> F:
    """Leave a method to the class of before in a run on that core."""

    @functools.wraps(method)
    def chosen(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_before:
            return getattr(super(SuperpipelineStrategy, self), method.__name__)(*args, **kwargs)
        return method(self, *args, **kwargs)

    return cast(F, chosen)


class SuperpipelineStrategy(StrategyBefore):
    """Train, validate and predict with a model that does not fit on the device.

    Weights, gradients and optimizer state are in host memory; units of the model (usually one block each) visit the
    device through a small window. Results equal those of the plain run to the last bit.

    Args:
        window: Units on the device at a time, including those being copied there. An int >= 1, or "auto": chosen in
            the first steps from the memory that they leave free and the times that they take. "auto" reads the
            device's memory counters at each visit of a unit.
        transfer: Units exchanged at a time, at most ``window``. An int >= 1, or "auto": chosen with the window.
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
        disk: A folder on a local SSD, for what of the optimizer's state does not fit ``host_budget``, and then of
            gradients and weights that train: it lies there in a nameless file while the run lasts, and is stepped in
            portions, with the same bits (docs/disk.md). With several devices, state alone goes there.
        divide_state: With several machines: each has a share of the optimizer's state, steps that share of the weights
            and sends the others the new ones (docs/several-devices.md). The bits are the same. State cannot be read
            but by a checkpoint, which the first machine writes whole. For torch's optimizers that update each element
            by itself, with state in memory.
        timeout: With several devices, how long a rank waits for the others.
        keepalive: With several machines, how long nothing comes of one that counts as lost.
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
        memory_budget: str | int | None = None,  # of a command line as it was typed, which has a unit
        activations: Literal["keep", "recompute", "offload", "recompute+offload"] = "keep",
        optimizer_overlap: bool = True,
        optimizer_device: Literal["host", "device"] = "host",
        wire_dtype: Literal["auto", "as-is"] = "auto",
        master_weights: bool = False,
        host_memory: Literal["auto", "pinned", "pageable"] = "auto",
        compile_units: bool = False,
        host_budget: str | int | None = None,
        disk: str | os.PathLike[str] | None = None,
        divide_state: bool = False,
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
        self._axes = axes(data_parallel_size, tensor_parallel_size)
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
            divide_state=divide_state,
        )
        self.handle = None  # of the latest run; closed when that run ended
        self._last_checkpoint = None  # of this run
        self._device_given = device is not None
        self._averages = []  # callbacks whose averages we keep on the host
        self._callback = None  # added to runs without a callback of the user's
        self._withheld = []  # callbacks, while Lightning handles an exception
        check_supported(self.root_device)

    # ---- setup and teardown

    @property
    def is_before(self) -> bool:
        """Whether this run is on the core of before."""
        return not_yet(self.options, self.world_size) is not None

    @on_core
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

    @on_core
    def model_to_device(self) -> None:
        """Begin to stream the parameters; move buffers, and what parts take along, such as metrics, to the device."""
        module = self.lightning_module
        assert module is not None
        self.handle = None  # before the next one is made: the previous one occupies as much host memory
        if module.trainer.state.fn == TrainerFn.FITTING and self.optimizers:  # of an earlier run
            self.optimizers, self.lr_scheduler_configs = [], []
            gc.collect()  # schedulers are in cycles with them
        self._axes.check_module(module)
        move_others(module, self.root_device)
        moved = lambda parameter: unit_of(parameter) is not None  # noqa: E731
        with self._waiting_for_parameters("superpipeline: weights into host memory", moved):
            self.handle = self._streamed(module)
        self.handle.team.follows_buffers = self._automatic  # as under DDP, whose forward Lightning has not synchronise
        update_properties(module, device=self.root_device)

    def _streamed(self, module: nn.Module, **settings: Any) -> Handle:
        """Stream a module for this run."""
        trainer: Any = self.lightning_module.trainer  # type: ignore[union-attr]
        wire = WIRES.get(str(self.precision_plugin.precision))
        if self.options.master_weights:
            wire = masters.half_dtype(self.precision_plugin)
        trains = trainer.state.fn == TrainerFn.FITTING
        return Handle(module, self.root_device, self.options, self._team(), wire=wire, trains=trains, **settings)

    @on_core
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
            self._remove_callback()
            if self.lightning_module is not None:
                end_noting_sigterm(self.lightning_module.trainer)
            self._base_teardown()

    # ---- checkpoints

    @on_core
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint without emptying the device's memory cache."""
        self._note_checkpoint(checkpoint_path)
        found = self._files.load(checkpoint_path, self.checkpoint_io.load_checkpoint, weights_only)
        if self._files.in_shards and self._streaming is not None:  # they are loaded
            for optimizer in self.optimizers:
                self._streaming.loaded(optimizer)
            self._streaming.steps.publish()
        return found

    @on_core
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state for a checkpoint."""
        return self._files.state_of((), functools.partial(SingleDeviceStrategy.lightning_module_state_dict, self))

    @on_core
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state for a checkpoint.

        After an exception in a half-applied step it is empty: `save_checkpoint` says why it writes nothing.
        """
        if self._handles_exception and self._why_not_saved():
            return {}
        return self._files.state_of((optimizer,), functools.partial(SingleDeviceStrategy.optimizer_state, self))

    @on_core
    def _check_whole(self) -> None:
        """Leave it to `_why_not_saved`, which says why."""

    @on_core
    def _why_not_saved(self, with_optimizers: bool = True) -> str | None:
        try:
            if self._streaming is not None:
                self._streaming.saving()
        except TornStepError as error:
            return str(error)
        module: Any = self.lightning_module
        return torn_step.why_not_saved([module, *(self.optimizers if with_optimizers else ())])

    @on_core
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load weights as the base class does, with a progress bar if it takes long."""
        if self._files.in_shards:
            return  # `load_checkpoint` has loaded them
        module = self.lightning_module
        assert module is not None
        materialize(module)  # torch would load nothing into a weight on the meta device
        before = {id(parameter): parameter._version for parameter in module.parameters()}
        with self._waiting_for_parameters("superpipeline: loading weights", lambda p: p._version != before[id(p)]):
            SingleDeviceStrategy.load_model_state_dict(self, checkpoint, strict=strict)
        if self._streaming is not None:
            self._streaming.steps.publish()

    @on_core
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load optimizer state and copy it on the host: the optimizer writes to it, and a mapped file may vanish."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            optimizer.load_state_dict(state)
            self.handle.loaded(optimizer)

    # ---- steps

    @on_core
    def tell_peers(self, exception: BaseException) -> None:
        """Tell the other ranks of an exception. Safe twice."""
        if self._streaming is not None:
            self._streaming.team.fail(exception)

    @on_core
    def block_backward_sync(self) -> Any:
        """Leave gradients to their ranks, while they are accumulated."""
        return self.handle.no_sync()

    @on_core
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Step as the base class does; where exact, step units while the closure's backward still runs."""
        handle = self._streaming
        if handle is None:
            return SingleDeviceStrategy.optimizer_step(self, optimizer, closure, model, **kwargs)
        with handle.stepping(optimizer, self._may_step_early(optimizer)):
            return SingleDeviceStrategy.optimizer_step(self, optimizer, closure, model, **kwargs)

    def _may_step_early(self, optimizer: Optimizer) -> bool:
        module = self.lightning_module
        assert module is not None
        if not (self._automatic and self.options.optimizer_overlap):
            return False
        return step_timing.why_gradients_must_be_final(self, module, optimizer) is None

    @on_core
    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run backward as the base class does, and explain errors that streaming causes."""
        if (handle := self._streaming) is None:
            return SingleDeviceStrategy.backward(self, closure_loss, optimizer, *args, **kwargs)
        with handle.explaining():
            return SingleDeviceStrategy.backward(self, closure_loss, optimizer, *args, **kwargs)

    @on_core
    def _step(self, name: str) -> Any:
        return contextlib.nullcontext() if (handle := self._streaming) is None else handle.scope(name)
