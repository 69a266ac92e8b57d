"""The Fabric strategy: modules that ``Fabric(strategy="superpipeline")`` sets up stream through one device.

A module is streamed from the moment when plain Fabric would move it to the device: in ``setup``, ``setup_module``, and
``to_device``. Each has a handle of its own, which lives as long as the strategy, or until its module was dropped and
another one begins to stream. A deep copy of what Fabric wrapped begins to stream when it is called: many copies are
only kept, such as the best weights so far.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch import nn
from torch.distributed import is_initialized
from torch.optim import Optimizer

from ..compat.lightning import is_setting_up
from ..errors import OptionError, TornStepError
from ..handle import Handle, not_yet
from ..handles import close_all, close_dropped
from ..peers.peers import Peers
from ..steps import torn_step
from ..stream.parameters import unit_of
from ..stream.preparation import move_buffers, move_others
from .checkpoint_io import MappedCheckpointIO
from .fabric_before import FabricStrategyBefore
from .master_weights import MasterWeights
from .names import FabricBaseStrategy, FabricModelParallelStrategy, update_properties
from .strategy import WIRES

F = TypeVar("F", bound=Callable[..., Any])


def on_core(method: F) -> F:
    """Leave a method to the class of before in a run on that core."""

    @functools.wraps(method)
    def chosen(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_before:
            return getattr(super(SuperpipelineFabricStrategy, self), method.__name__)(*args, **kwargs)
        return method(self, *args, **kwargs)

    return cast(F, chosen)


class SuperpipelineFabricStrategy(FabricStrategyBefore):
    __doc__ = FabricStrategyBefore.__doc__

    @property
    def is_before(self) -> bool:
        """Whether this run is on the core of before."""
        return not_yet(self.options, self.world_size) is not None

    def _check_devices(self) -> None:
        super()._check_devices()
        if self.is_distributed and not self.is_before:
            self._backward_sync_control = _BackwardSync(self)

    # ---- modules and optimizers

    @on_core
    def module_to_device(self, module: nn.Module) -> None:
        """Begin to stream a module for this rank, but for one that `setup_module` streams for all of them."""
        if not (self.is_distributed and is_setting_up()):
            self._begin(module, None)

    @on_core
    def setup_module(self, module: nn.Module) -> nn.Module:
        """Return the module, which with several devices streams for all ranks from here on."""
        if self.is_distributed:
            for handle in self.handles:
                if module is handle.module:  # which this rank streamed alone
                    handle.close()
            self._axes.check_module(module)
            self._begin(module, self._team())
        return module

    @on_core
    def _connect(self) -> None:
        """Begin the process group, unless it is begun."""
        needs_mesh = self._axes.has_shards and self._axes.mesh is None
        if self.is_distributed and (needs_mesh or not is_initialized()):
            self._set_up_ranks()

    def _begin(self, module: nn.Module, team: Peers | None) -> None:
        """Begin to stream a module, unless it streams already, and move what else it has."""
        close_dropped(self.handles)
        if next(module.parameters(), None) is None:
            module.to(self.root_device)
            return
        if any(unit_of(parameter) is None for parameter in module.parameters()):
            masters = self.precision.half if isinstance(self.precision, MasterWeights) else None
            wire = masters or WIRES.get(str(self.precision.precision))
            self.handles.append(Handle(module, self.root_device, self.options, team, wire=wire))
        move_buffers(module, self.root_device)  # around modules that stream, too
        move_others(module, self.root_device)
        update_properties(module, device=self.root_device)

    @on_core
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Have the optimizer's streamed weights stepped by their handles."""
        for handle in self._handles_of(optimizer):
            handle.announce(optimizer)
        return FabricBaseStrategy.setup_optimizer(self, optimizer)

    def _handles_of(self, optimizer: Any) -> list[Any]:
        """List the handles that step weights of an optimizer."""
        units = {unit_of(param) for group in optimizer.param_groups for param in group["params"]}
        return [handle for handle in self.handles if not units.isdisjoint(handle.units)]

    @on_core
    def teardown(self) -> None:
        """Make all modules plain again, then tear down as the base class does."""
        close_all(self.handles)
        if self.is_distributed:
            self.cluster_environment.teardown()
        FabricBaseStrategy.teardown(self)

    # ---- steps

    @on_core
    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step as the base class does; errors that streaming causes say what to do."""
        with contextlib.ExitStack() as stack:
            for handle in self._handles_of(optimizer):
                stack.enter_context(handle.explaining())
            return FabricBaseStrategy.optimizer_step(self, optimizer, **kwargs)

    # ---- checkpoints

    @on_core
    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint as the base class does, but none of a half-applied step."""
        parts = (part for part in state.values() if isinstance(part, (nn.Module, Optimizer)))
        if why := torn_step.why_not_saved(parts):
            raise TornStepError(why)
        for handle in self.handles:
            handle.saving()
        kind: Any = FabricModelParallelStrategy if self._axes.has_shards else FabricBaseStrategy
        kind.save_checkpoint(self, path, state, *args, **kwargs)

    @on_core
    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint as the base class does, without a second copy of weights and state in memory."""
        parts = state if isinstance(state, dict) else {"": state}
        optimizers = {key: part for key, part in parts.items() if isinstance(part, Optimizer)}
        if isinstance(self.checkpoint_io, MappedCheckpointIO):
            copied = [name for name, part in parts.items() if isinstance(part, nn.Module) or name in optimizers]
            if isinstance(state, nn.Module):
                copied = [*self.get_module_state_dict(state)]
            self.checkpoint_io.copied_later = ["state"] if "" in optimizers else copied
        kind: Any = FabricModelParallelStrategy if self._axes.has_shards else FabricBaseStrategy
        found: dict[str, Any] = kind.load_checkpoint(self, path, state, *args, **kwargs)
        for optimizer in optimizers.values():
            for handle in self._handles_of(optimizer):
                handle.loaded(optimizer)
        for handle in self.handles if self._axes.has_shards else ():
            handle.steps.publish()
        return found

    @on_core
    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state for a checkpoint."""
        return FabricBaseStrategy.get_optimizer_state(self, optimizer)


class _BackwardSync:
    """Fabric's way to accumulate gradients without an exchange."""

    def __init__(self, strategy: SuperpipelineFabricStrategy) -> None:
        self._strategy = strategy

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> contextlib.AbstractContextManager[None]:
        """Leave the gradients of backwards in this context to their ranks."""
        if (handle := self._strategy.handle_of(module)) is None:
            raise OptionError(argument="module", found=type(module).__name__, allowed="what fabric.setup returned")
        return handle.no_sync() if enabled else contextlib.nullcontext()
