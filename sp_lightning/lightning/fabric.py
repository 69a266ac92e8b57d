"""The Fabric strategy: modules that ``Fabric(strategy="superpipeline")`` sets up stream through one device, or several.

1. A module is streamed from the moment when plain Fabric would move it to the device: in ``setup``, ``setup_module``,
   and ``to_device``. Each has a handle of its own, which lives as long as the strategy, or until its module was dropped
   and another one begins to stream. With several devices ``to_device`` concerns this rank alone; ``setup``, as where
   plain Fabric makes a module DDP's, streams one host copy for all ranks.
2. A deep copy of a module that Fabric wrapped has a strategy of its own, a copy of this one. It begins to stream when
   it is called, with that strategy: many copies are only kept, such as the best weights so far.
3. Fabric asks by type whether a strategy has one device: it then needs no launch, and accumulates by itself. So this
   one, which finds out when Fabric has chosen, shows itself as `SingleDeviceStrategy` then.
4. With ``tensor_parallel_size`` the user's code cuts a module's layers, along the mesh that is there once Fabric has
   launched. Checkpoints are those of Lightning's ModelParallelStrategy, whose own functions write and read them.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer

from ..compat.lightning import EmptyInit, is_setting_up
from ..errors import HalfAppliedStepError, OptionError, UnsupportedError
from ..handle import Handle
from ..handles import close_all, close_dropped, handles_of
from ..optim.half_applied import why_refused
from ..options import Options
from ..ranks.peers import Peers
from ..ranks.watch import KEEPALIVE
from ..stream.parameters import unit_of
from ..stream.preparation import move_buffers, move_others
from .checkpoint_io import MappedCheckpointIO
from .master_weights import MasterWeights, half_dtype, wire_of
from .names import (
    Accelerator,
    CheckpointIO,
    FabricBaseStrategy,
    FabricModelParallelStrategy,
    FabricPrecision,
    FabricSingleDeviceStrategy,
    update_properties,
)
from .several_devices import SeveralDevices


class SuperpipelineFabricStrategy(SeveralDevices, FabricBaseStrategy):
    """Train with modules that do not fit on the device, in your own loop.

    Weights, gradients and optimizer state are in host memory; units of the model (usually one block each) visit the
    device through a small window. Results equal those of the plain loop to the last bit.

    Args:
        accelerator: The accelerator handler; Fabric sets it.
        checkpoint_io: How checkpoints are written and read; Fabric sets it.
        precision: The precision plugin; Fabric sets it.
        timeout: With several devices, how long a rank waits for the others.
        keepalive: With several devices, how long a rank may give no sign before the others end.
        tensor_parallel_size: How many devices have a shard of each layer that your code cuts, between ``launch`` and
            ``setup``, by ``fabric.strategy.device_mesh["tensor_parallel"]``. "auto": all of a machine. None: no mesh.
        data_parallel_size: With ``tensor_parallel_size``, how many such groups of devices there are.
        save_distributed_checkpoint: With ``tensor_parallel_size``: whether a checkpoint is a folder of shards, or one
            file with whole weights.
        **options: As for ``SuperpipelineStrategy``: ``window``, ``transfer``, ``units``, ... ``optimizer_overlap``
            steps units beside the next forward if no code in between waits for them.
    """

    def __init__(
        self,
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
        parallel = data_parallel_size, tensor_parallel_size, save_distributed_checkpoint
        self._store(Options.parse(**options), timeout, keepalive, *parallel)
        FabricBaseStrategy.__init__(self, accelerator, checkpoint_io, precision)
        self._root_device = torch.device("cpu")
        self._begin_without_modules()

    def _begin_without_modules(self) -> None:
        self.handles: list[Any] = []  # of the modules that were set up
        self._copies: list[nn.Module] = []  # of streamed modules; they begin to stream when they are called
        weakref.finalize(self, close_all, self.handles).atexit = False

    # ---- devices

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # Rule 3
        return type(self) if self.is_distributed else FabricSingleDeviceStrategy

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        return self._root_device

    @property
    def device_mesh(self) -> Any:
        """The devices' mesh, once Fabric has launched; its axes are "data_parallel" and "tensor_parallel" (Rule 4)."""
        return self._axes.mesh

    def _set_world_ranks(self) -> None:
        self._check_alone()
        self.set_world_ranks()

    def setup_environment(self) -> None:
        """Set up the device and connect the processes. Fabric calls this at each launch."""
        super().setup_environment()
        self._set_up_ranks()

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over all ranks."""
        return self.reduce(tensor, group, reduce_op)

    # ---- copies (Rule 2)

    def __getstate__(self) -> dict[str, Any]:
        """Leave handles out of a copy, which stream the original's modules, and what the run consists of."""
        left = "handles", "_copies", "_launcher", "_axes"
        return {key: value for key, value in vars(self).items() if key not in left}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by the type, which is not what the strategy shows (Rule 3)."""
        return _empty, (type(self),), self.__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Become a copy, without handles."""
        vars(self).update(state)
        self._launcher = None
        self._begin_without_modules()

    def __deepcopy__(self, memo: dict[int, Any]) -> SuperpipelineFabricStrategy:
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
            half_dtype(precision)  # raises for other precisions
            precision = MasterWeights(precision.precision)  # type: ignore[arg-type]
        self._precision = precision

    # ---- modules and optimizers

    @contextlib.contextmanager
    def module_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Create weights on the host, whatever code creates them."""
        with EmptyInit(enabled=bool(empty_init)), self.precision.module_init_context():
            yield

    def module_to_device(self, module: nn.Module) -> None:
        """Begin to stream a module for this rank, but for one that `setup_module` streams for all of them."""
        if not (self.is_distributed and is_setting_up()):
            self._begin(module, None)

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Return the module, which with several devices streams for all ranks from here on."""
        if self.is_distributed:
            for handle in self.handles:
                if module is handle.module:  # which this rank streamed alone
                    handle.close()
            self._axes.check_module(module)
            self._begin(module, self._team())
        return module

    def _begin(self, module: nn.Module, team: Peers | None) -> None:
        """Begin to stream a module, unless it streams already, and move what else it has."""
        close_dropped(self.handles)
        if next(module.parameters(), None) is None:
            module.to(self.root_device)
            return
        if any(unit_of(parameter) is None for parameter in module.parameters()):
            wire = wire_of(self.precision, self.options.master_weights)
            self.handles.append(Handle(module, self.root_device, self.options, team, wire=wire))
        move_buffers(module, self.root_device)  # around modules that stream, too
        move_others(module, self.root_device)
        update_properties(module, device=self.root_device)

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Have the optimizer's streamed weights stepped by their handles."""
        for handle in self._handles_of(optimizer):
            handle.announce(optimizer)
        return FabricBaseStrategy.setup_optimizer(self, optimizer)

    def _handles_of(self, optimizer: Any) -> list[Any]:
        """List the handles that step weights of an optimizer."""
        return handles_of(self.handles, (param for group in optimizer.param_groups for param in group["params"]))

    def teardown(self) -> None:
        """Make all modules plain again, then tear down as the base class does."""
        close_all(self.handles)
        if self.is_distributed:
            self.cluster_environment.teardown()
        FabricBaseStrategy.teardown(self)

    # ---- steps

    # Fabric asks this object to accumulate without an exchange; the base class sets none.
    _backward_sync_control = property(lambda self: self, lambda self, _: None)

    @contextlib.contextmanager
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> Iterator[None]:
        """Leave the gradients of backwards in this context to their ranks."""
        found = handles_of(self.handles, module.parameters())
        if not found:
            raise OptionError(argument="module", found=type(module).__name__, allowed="what fabric.setup returned")
        with contextlib.ExitStack() as stack:
            for handle in found if enabled else ():  # the module may be around several that stream
                stack.enter_context(handle.no_sync())
            yield

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step as the base class does; errors that streaming causes say what to do."""
        with contextlib.ExitStack() as stack:
            for handle in self._handles_of(optimizer):
                stack.enter_context(handle.explaining())
            return FabricBaseStrategy.optimizer_step(self, optimizer, **kwargs)

    # ---- checkpoints

    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint as the base class does, but none of a half-applied step."""
        parts = (part for part in state.values() if isinstance(part, (nn.Module, Optimizer)))
        if why := why_refused(parts):
            raise HalfAppliedStepError(why)
        for handle in self.handles:
            handle.saving()
        kind: Any = FabricModelParallelStrategy if self._axes.has_shards else FabricBaseStrategy
        kind.save_checkpoint(self, path, state, *args, **kwargs)

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint as the base class does, without a second copy of weights and state in memory."""
        parts = state if isinstance(state, dict) else {"": state}
        optimizers = {key: part for key, part in parts.items() if isinstance(part, Optimizer)}
        if isinstance(self.checkpoint_io, MappedCheckpointIO):
            copied = [name for name, part in parts.items() if isinstance(part, nn.Module) or name in optimizers]
            self.checkpoint_io.copied_later = None if "" in copied else copied
        kind: Any = FabricModelParallelStrategy if self._axes.has_shards else FabricBaseStrategy
        found: dict[str, Any] = kind.load_checkpoint(self, path, state, *args, **kwargs)
        for optimizer in optimizers.values():
            for handle in self._handles_of(optimizer):
                handle.loaded(optimizer)
        for handle in self.handles if self._axes.has_shards else ():
            handle.steps.publish()
        return found


def _empty(kind: type[SuperpipelineFabricStrategy]) -> SuperpipelineFabricStrategy:
    return kind.__new__(kind)
