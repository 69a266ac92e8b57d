"""The Fabric strategy: modules that ``Fabric(strategy="superpipeline")`` sets up stream through one device.

1. A module is streamed from the moment when plain Fabric would move it to the device: in ``setup``, ``setup_module``,
   and ``to_device``. Each has a handle of its own.
2. Each forward that is called by itself is a step, and so is each of the methods of a LightningModule that a Trainer
   would call as one.
3. Nothing tells what the user's loop does between ``backward`` and ``step``: no unit is stepped while backward runs. A
   step may be deferred (pending_step.py): code that reads or writes weights, gradients or state waits for it.
4. A handle lives as long as the strategy. When the strategy is gone, its modules are plain again.
5. A deep copy of a module that Fabric wrapped has a strategy of its own, a copy of this one. It begins to stream when
   it is called, with that strategy: many copies are only kept, such as the best weights so far.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..compat.lightning import EmptyInit
from ..errors import UnsupportedError
from ..memory.device import check_supported
from ..memory.parameters import is_watched
from ..options import Options
from ..runtime.handle import Handle
from ..runtime.optimizer_steps import WHOLE_STEP, OptimizerSteps
from .checkpoint_io import MappedCheckpointIO
from .master_weights import MasterWeights
from .names import Accelerator, CheckpointIO, FabricPrecision, FabricSingleDeviceStrategy
from .one_device import OneDevice

STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class SuperpipelineFabricStrategy(OneDevice, FabricSingleDeviceStrategy):
    """Train with modules that do not fit on the device, in your own loop.

    Weights, gradients and optimizer state are in host memory; units of the model (usually one block each) visit the
    device through a small window. Results equal those of the plain loop to the last bit.

    Args:
        device: The device that computes. By default the one that Fabric chose.
        accelerator: The accelerator handler; Fabric sets it.
        checkpoint_io: How checkpoints are written and read; Fabric sets it.
        precision: The precision plugin; Fabric sets it.
        **options: As for ``SuperpipelineStrategy``: ``window``, ``transfer``, ``units``, ... ``optimizer_overlap``
            steps units beside the next forward if no code in between waits for them: call ``zero_grad()`` right
            before ``backward``, not right after ``step``.
    """

    def __init__(
        self,
        device: torch.device | str | None = None,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: FabricPrecision | None = None,
        **options: Any,
    ) -> None:
        self.options = Options.parse(**options)
        super().__init__(device or "cpu", accelerator, checkpoint_io, precision)
        self._device_given = device is not None
        self._begin_without_modules()
        check_supported(self.root_device)

    def _begin_without_modules(self) -> None:
        self.handles: list[Handle] = []  # of the modules that were set up
        self._copies: list[nn.Module] = []  # of streamed modules; they begin to stream when they are called
        weakref.finalize(self, _close_all, self.handles).atexit = False  # Rule 4

    # ---- copies (Rule 5)

    def __getstate__(self) -> dict[str, Any]:
        """Leave handles out of a copy: they stream the original's modules."""
        return {key: value for key, value in vars(self).items() if key not in ("handles", "_copies")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Become a copy, without handles."""
        vars(self).update(state)
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

        What Fabric wrapped asks for it first when it is called: a copy begins to stream."""
        while self._copies:
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
        """Begin to stream a module, if it has parameters and is not a part of one that is streamed (Rule 1)."""
        self.handles[:] = [handle for handle in self.handles if not handle.closed]
        streamed = {name: is_watched(parameter) for name, parameter in module.named_parameters()}
        if not streamed:
            super().module_to_device(module)
        elif not all(streamed.values()):
            if any(streamed.values()):
                raise UnsupportedError(
                    f"{next(filter(streamed.get, streamed))} is streamed already, as a part of another module that was "
                    "set up; set up, or pass to fabric.to_device(), a module that has all those which share weights "
                    "(nn.ModuleList([first, second])) before any of them"
                )
            compute_dtype = self.precision.half if isinstance(self.precision, MasterWeights) else None
            autocasts = str(self.precision.precision).endswith("mixed")
            self.handles.append(
                Handle(module, self.root_device, self.options, compute_dtype, methods=STEPS, autocasts=autocasts)
            )

    def teardown(self) -> None:
        """Make all modules plain again, then tear down as the base class does."""
        _close_all(self.handles)
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
                may_defer = functools.partial(_may_defer, handle.steps, optimizer)
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

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint as the base class does, without a second copy of the modules' weights in memory."""
        if isinstance(self.checkpoint_io, MappedCheckpointIO):
            parts = state.items() if isinstance(state, dict) else ()
            copied = [name for name, part in parts if isinstance(part, nn.Module)]
            self.checkpoint_io.copied_later = state.state_dict() if isinstance(state, nn.Module) else copied
        return super().load_checkpoint(path, state, *args, **kwargs)


def _may_defer(steps: OptimizerSteps, optimizer: Optimizer) -> bool:
    reason = steps.other_hooks(optimizer, after=True)
    steps.say(WHOLE_STEP, reason)
    return reason is None


def _close_all(handles: list[Handle]) -> None:
    with contextlib.ExitStack() as stack:
        for handle in handles:
            stack.callback(handle.close)
        handles.clear()
