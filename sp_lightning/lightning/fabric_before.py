"""The Fabric strategy: modules that ``Fabric(strategy="superpipeline")`` sets up stream through one device, or several.

1. A module is streamed from the moment when plain Fabric would move it to the device: in ``setup``, ``setup_module``,
   and ``to_device``. Each has a handle of its own. With several devices ``to_device`` concerns this rank alone, whose
   own weights stream; ``setup``, as where plain Fabric makes a module DDP's, streams one host copy for all ranks.
2. Each forward that is called by itself is a step, and so is each of the methods of a LightningModule that a Trainer
   would call as one.
3. Nothing tells what the user's loop does between ``backward`` and ``step``: no unit is stepped while backward runs. A
   step may be deferred (pending_step.py): code that reads or writes weights, gradients or state waits for it.
4. A handle lives as long as the strategy. When the strategy is gone, its modules are plain again. A module that the
   user's code dropped is found when another one begins to stream: garbage is collected without the handle, and if that
   is in it, it is closed.
5. A deep copy of a module that Fabric wrapped has a strategy of its own, a copy of this one. It begins to stream when
   it is called, with that strategy: many copies are only kept, such as the best weights so far.
6. With several devices what Fabric gets from ``setup`` is a `RankedModule`, as DDP has its wrapper: a forward through
   it gives all ranks the first one's buffers where DDP's does, and one of the module inside waits for nobody. The last
   forward that records gradients decides, as in DDP, whether the module's next backward exchanges them: not if that
   forward was in ``no_backward_sync``.
7. Fabric asks by type whether a strategy has one device: it then needs no launch, and accumulates by itself. So this
   one, which finds out when Fabric has chosen, shows itself as `SingleDeviceStrategy` then.
8. With ``tensor_parallel_size`` the user's code cuts a module's layers, along the mesh that is there once Fabric has
   launched. Those ranks that have the same shards exchange gradients, and checkpoints are those of Lightning's
   ModelParallelStrategy, whose own functions write and read them.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer

from ..compat.lightning import EmptyInit, is_setting_up
from ..errors import OptionError, TornStepError, UnsupportedError
from ..handles import close_all, close_dropped
from ..host.device import check_supported
from ..memory.watched_parameters import is_watched
from ..nodes.transport import KEEPALIVE
from ..options import Options
from ..ranks.board import ONE_RANK
from ..ranks.connection import leave_at_exit
from ..runtime.handle import Handle, own_state
from ..steps import torn_step
from ..stream.preparation import move_buffers, move_others
from .checkpoint_io import MappedCheckpointIO
from .master_weights import MasterWeights
from .names import (
    Accelerator,
    CheckpointIO,
    FabricBaseStrategy,
    FabricModelParallelStrategy,
    FabricPrecision,
    FabricSingleDeviceStrategy,
    update_properties,
)
from .several_devices import SeveralDevices, axes

STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class FabricStrategyBefore(SeveralDevices, FabricBaseStrategy):
    """Train with modules that do not fit on the device, in your own loop.

    Weights, gradients and optimizer state are in host memory; units of the model (usually one block each) visit the
    device through a small window. Results equal those of the plain loop to the last bit.

    Args:
        device: The device that computes. By default the one that Fabric chose.
        accelerator: The accelerator handler; Fabric sets it.
        checkpoint_io: How checkpoints are written and read; Fabric sets it.
        precision: The precision plugin; Fabric sets it.
        timeout: With several devices, how long a rank waits for the others.
        keepalive: With several machines, how long nothing comes of one that counts as lost.
        tensor_parallel_size: How many devices have a shard of each layer that your code cuts, between ``launch`` and
            ``setup``, by ``fabric.strategy.device_mesh["tensor_parallel"]``. "auto": all of a machine. None: no mesh.
        data_parallel_size: With ``tensor_parallel_size``, how many such groups of devices there are.
        save_distributed_checkpoint: With ``tensor_parallel_size``: whether a checkpoint is a folder of shards, or one
            file with whole weights.
        **options: As for ``SuperpipelineStrategy``: ``window``, ``transfer``, ``units``, ... ``optimizer_overlap``
            steps units beside the next forward if no code in between waits for them.
    """

    _backward_sync_control: Any

    def __init__(
        self,
        device: torch.device | str | None = None,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: FabricPrecision | None = None,
        timeout: timedelta = default_pg_timeout,
        keepalive: timedelta = KEEPALIVE,
        tensor_parallel_size: int | Literal["auto"] | None = None,
        data_parallel_size: int | Literal["auto"] = "auto",
        save_distributed_checkpoint: bool = True,
        **options: Any,
    ) -> None:
        self.options = Options.parse(**options)
        FabricBaseStrategy.__init__(self, accelerator, checkpoint_io, precision)
        self._root_device = torch.device(device or "cpu")
        self._timeout, self._keepalive = timeout, keepalive
        self._axes = axes(data_parallel_size, tensor_parallel_size)
        self._save_distributed_checkpoint = save_distributed_checkpoint  # Lightning's functions read it by this name
        self._device_given = device is not None
        self._begin_without_modules()
        check_supported(self.root_device)

    def _begin_without_modules(self) -> None:
        self.handles: list[Any] = []  # of the modules that were set up
        self._copies: list[nn.Module] = []  # of streamed modules; they begin to stream when they are called
        weakref.finalize(self, close_all, self.handles).atexit = False  # Rule 4

    # ---- devices

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # Rule 7
        return type(self) if self.is_distributed else FabricSingleDeviceStrategy

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        return self._root_device

    @property
    def device_mesh(self) -> Any:
        """The devices' mesh, once Fabric has launched; its axes are "data_parallel" and "tensor_parallel" (Rule 8)."""
        return self._axes.mesh

    def _check_devices(self) -> None:
        super()._check_devices()
        if self.is_distributed:
            self._backward_sync_control = _BackwardSync()

    def _set_world_ranks(self) -> None:
        self._check_alone()
        self.set_world_ranks()

    def setup_environment(self) -> None:
        """Set up the device and connect the processes. Fabric calls this at each launch."""
        super().setup_environment()
        self._connect()

    def _connect(self) -> None:
        """Connect the processes, unless they are: at a launch, and in the first setup after `teardown`."""
        if self.ranks.world == 1:
            self._set_up_ranks()
            leave_at_exit(self, self.ranks)

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over all ranks."""
        return self.reduce(tensor, group, reduce_op)

    # ---- copies (Rule 5)

    def __getstate__(self) -> dict[str, Any]:
        """Leave handles out of a copy, which stream the original's modules, and what the run consists of."""
        left = "handles", "_copies", "ranks", "data_ranks", "_launcher", "_axes"
        return {key: value for key, value in vars(self).items() if key not in left}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by the type, which is not what the strategy shows (Rule 7)."""
        return _empty, (type(self),), self.__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Become a copy, without handles."""
        vars(self).update(state)
        self._launcher = None
        self._begin_without_modules()

    def __deepcopy__(self, memo: dict[int, Any]) -> FabricStrategyBefore:
        """Copy the strategy for the copies of its modules that were made on the way here."""
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        modules = [*(handle.module for handle in self.handles), *self._copies]
        copied._copies += [memo[id(module)] for module in modules if id(module) in memo]
        return copied

    # ---- precision

    @property
    def precision(self) -> FabricPrecision:
        """The precision plugin; with master weights, one that leaves parameters in FP32.

        A module that Fabric set up reads this first when it is called: then a deep copy of one begins to stream."""
        while self._copies:
            if self.is_distributed:
                raise UnsupportedError(
                    "a deep copy of what Fabric set up on several devices is not streamed: copy the bare module, and "
                    "set that up on every rank"
                )
            self.module_to_device(self._copies.pop())
        return super().precision

    @precision.setter
    def precision(self, precision: FabricPrecision | None) -> None:
        if precision is not None and self.options.master_weights:
            precision = MasterWeights.of(precision)
        self._precision = precision

    # ---- modules

    def module_init_context(self, empty_init: bool | None = None) -> contextlib.AbstractContextManager[Any]:
        """Create weights on the host, whatever code creates them."""
        stack = contextlib.ExitStack()
        stack.enter_context(EmptyInit(enabled=bool(empty_init)))
        stack.enter_context(self.precision.module_init_context())
        return stack

    def module_to_device(self, module: nn.Module) -> None:
        """Begin to stream a module for this rank, but for one that `setup_module` streams for all of them (Rule 1)."""
        if not (self.is_distributed and is_setting_up()):
            self._stream(module, together=False)

    def _stream(self, module: nn.Module, together: bool) -> None:
        """Begin to stream a module, unless it is streamed, or a part of one that is, and move what else it has."""
        close_dropped(self.handles)
        streamed = {name: is_watched(parameter) for name, parameter in module.named_parameters()}
        if not streamed:
            module.to(self.root_device)
            return
        if not all(streamed.values()):
            if any(streamed.values()):
                raise UnsupportedError(
                    f"{next(filter(streamed.get, streamed))} is streamed already, as a part of another module that was "
                    "set up; set up a module that has all those which share weights (nn.ModuleList([first, second])) "
                    "before any of them"
                )
            if together:
                self._axes.check_module(module)
            ranks = self.data_ranks if together else ONE_RANK
            compute_dtype = self.precision.half if isinstance(self.precision, MasterWeights) else None
            self.handles.append(
                Handle(
                    module,
                    self.root_device,
                    self.options,
                    compute_dtype,
                    methods=STEPS,
                    ranks=ranks,
                    exchanges=ranks.world > 1,
                    autocasts=str(self.precision.precision).endswith("mixed"),
                    shards=self._axes.has_shards,
                    timeout=self._timeout,
                )
            )
            if together:
                self.broadcast_buffers(module)
        move_buffers(module, self.root_device)  # around modules that stream, too
        move_others(module, self.root_device, lambda parameter: not is_watched(parameter))
        update_properties(module, device=self.root_device)

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Return what Fabric calls: the module itself or, with several devices, one around it (Rule 6)."""
        if not self.is_distributed:
            return module
        self._connect()
        self._end_alone(module)
        self._stream(module, together=True)
        return RankedModule(module, self)

    def _end_alone(self, module: nn.Module) -> None:
        """Make a module plain again that this rank streams by itself, as all ranks are to stream it."""
        parameters = {*map(id, module.parameters())}
        for handle in self.handles:
            if handle.closed or handle.team.ranks is self.data_ranks or parameters.isdisjoint(handle.engine.managed):
                continue
            if not parameters.issuperset(handle.engine.managed):
                raise UnsupportedError(
                    "a module is set up on several devices that is a part of another one, which fabric.to_device() "
                    "streams for each rank alone: set up that one (fabric.setup_module) before its parts"
                )
            handle.close()

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Set up an optimizer as the base class does, if host budget and disk have room for its state.

        Each has to have room for the state of the optimizers that were set up before, too.
        """
        states = []
        for handle in self.handles:
            if not handle.closed:
                handle.team.check_divisible(optimizer)
                handle.storage.check_state([optimizer])
                states.append(handle.steps.state)
        for state in states:
            state.check_room([optimizer], beside=states)
        return super().setup_optimizer(optimizer)

    def handle_of(self, module: nn.Module) -> Handle | None:
        """Return the handle that streams a module, or one that it is a part of."""
        return next((one for one in self.handles if any(part is module for part in one.module.modules())), None)

    def teardown(self) -> None:
        """Make all modules plain again, leave the other ranks, then tear down as the base class does."""
        try:
            close_all(self.handles)
        finally:
            self.leave_ranks()
        if self.is_distributed:
            self.cluster_environment.teardown()
        super().teardown()

    # ---- steps

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step as the base class does; where exact, defer the step of units beside the next forward (Rule 3)."""
        handles = [handle for handle in self.handles if not handle.closed and handle.steps.manages(optimizer)]
        with contextlib.ExitStack() as stack:
            for handle in handles:
                stack.enter_context(handle.explaining())
            if len(handles) == 1 and self.options.optimizer_overlap:
                (handle,) = handles
                may_defer = functools.partial(handle.steps.may_defer, optimizer)
                stack.enter_context(handle.steps.overlapping(optimizer, may_defer, in_backward=False))
            return super().optimizer_step(optimizer, **kwargs)

    # ---- checkpoints

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The checkpoint plugin that was passed to Fabric, or the default one, which maps local files."""
        if self._checkpoint_io is None:
            self._checkpoint_io = MappedCheckpointIO()
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint as the base class does, but none of a torn step."""
        parts = (part for part in state.values() if isinstance(part, (nn.Module, Optimizer)))
        if why := torn_step.why_not_saved(parts):
            raise TornStepError(why)
        for handle in self.handles:
            if not handle.closed:
                handle.engine.check_whole()
        if self._axes.has_shards:
            shown = {name: _users(part) for name, part in state.items()}
            FabricModelParallelStrategy.save_checkpoint(self, path, shown, *args, **kwargs)  # type: ignore[arg-type]
            return
        super().save_checkpoint(path, state, *args, **kwargs)

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint as the base class does, without a second copy of weights and state in memory."""
        parts = state if isinstance(state, dict) else {"": state}
        # Others are wrappers that show nothing of the optimizers which have the state.
        optimizers = {k: part for k, part in parts.items() if isinstance(part, Optimizer) and hasattr(part, "state")}
        if isinstance(self.checkpoint_io, MappedCheckpointIO):
            copied = [name for name, part in parts.items() if isinstance(part, nn.Module) or name in optimizers]
            if isinstance(state, nn.Module):
                copied = [*self.get_module_state_dict(state)]
            self.checkpoint_io.copied_later = ["state"] if "" in optimizers else copied
        handles = [handle for handle in self.handles if not handle.closed]
        if self._axes.has_shards:
            found = self._load_shards(path, state, *args, **kwargs)
            for handle, optimizer in itertools.product(handles, optimizers.values()):
                handle.state_loaded(optimizer)
        else:
            found = super().load_checkpoint(path, state, *args, **kwargs)
            for optimizer in optimizers.values():
                own_state(optimizer, handles)
        for handle in handles:
            handle.settle()
        return found

    def _load_shards(self, path: Any, state: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint of shards, or of whole weights into shards (Rule 8)."""
        parts = {name: _users(part) for name, part in state.items()} if isinstance(state, dict) else _users(state)
        found = FabricModelParallelStrategy.load_checkpoint(self, path, parts, *args, **kwargs)  # type: ignore[arg-type]
        if isinstance(state, dict):
            state.update({name: part for name, part in parts.items() if not isinstance(part, nn.Module)})
        return found

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the state of the user's module, under its own names."""
        return super().get_module_state_dict(_users(module))

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state for a checkpoint."""
        divided = [handle for handle in self.handles if not handle.closed and handle.divides_state]
        return divided[0].optimizer_state(optimizer) if divided else super().get_optimizer_state(optimizer)

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Load the state of the user's module, under its own names."""
        module = _users(module)
        super().load_module_state_dict(module, state_dict, strict)


class RankedModule(nn.Module):
    """Module that Fabric calls in place of the user's on several devices (Rule 6)."""

    def __init__(self, module: nn.Module, strategy: FabricStrategyBefore) -> None:
        super().__init__()
        self.module = module
        self._strategy = strategy
        self._has_buffers = next(module.buffers(), None) is not None  # at the beginning, as in handle.py
        self._syncs_gradients = True  # of forwards, in the backward that follows
        self._syncs_buffers = True  # at the next forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward, with the first rank's buffers where DDP's has them."""
        strategy = self._strategy
        strategy.ranks.check()
        if self._syncs_buffers and self._has_buffers:
            strategy.broadcast_buffers(self.module)
        output = self.module(*args, **kwargs)
        self._syncs_buffers = torch.is_grad_enabled() and self._syncs_gradients
        handle = strategy.handle_of(self.module)
        if torch.is_grad_enabled() and handle is not None:
            handle.exchanges = self._syncs_gradients
        return output

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave the gradients of forwards in this context to their ranks."""
        before, self._syncs_gradients = self._syncs_gradients, False
        try:
            yield
        finally:
            self._syncs_gradients = before


class _BackwardSync:
    """Fabric's way to accumulate gradients without an exchange."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> contextlib.AbstractContextManager[None]:
        """Leave the gradients of forwards in this context to their ranks."""
        if not isinstance(module, RankedModule) or module._strategy.handle_of(module.module) is None:
            raise OptionError(argument="module", found=type(module).__name__, allowed="what fabric.setup returned")
        return module.no_sync() if enabled else contextlib.nullcontext()


def _users(module: Any) -> Any:
    return module.module if isinstance(module, RankedModule) else module


def _empty(kind: type[FabricStrategyBefore]) -> FabricStrategyBefore:
    return kind.__new__(kind)
