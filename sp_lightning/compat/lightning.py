"""Private names of Lightning, and of what it uses.

Tried with Lightning 2.6. What has no call here is bound as a function in C, so that using it costs no call in Python.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from lightning.fabric.utilities.cloud_io import _is_local_file_protocol as is_local
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.fabric.utilities.device_dtype_mixin import _update_properties as update_properties
from lightning.fabric.utilities.distributed import _all_gather_ddp_if_available as all_gather_if_distributed
from lightning.fabric.utilities.distributed import _get_default_process_group_backend_for_device as backend_for
from lightning.fabric.utilities.distributed import _init_dist_connection as init_process_group
from lightning.fabric.utilities.distributed import _sync_ddp_if_available as sync_if_distributed
from lightning.fabric.utilities.init import _EmptyInit as EmptyInit
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.loops.utilities import _parse_loop_limits
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO as WrappingCheckpointIO
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher as ScriptLauncher

__all__ = [
    "EmptyInit",
    "ScriptLauncher",
    "WrappingCheckpointIO",
    "all_gather_if_distributed",
    "backend_for",
    "init_process_group",
    "is_local",
    "reset_seed",
    "sync_if_distributed",
    "update_properties",
]

# Methods of precision plugins that run between backward and the optimizer's step.
BEFORE_STEP = "_clip_gradients", "_after_closure"

# A loop's loader of all its loaders. Without it a plan would take one of several loaders, or its name, for a batch.
combined_loader: Callable[[Any], Any] = operator.attrgetter("_combined_loader")

# Without these our values would be logged at other steps than the user's.
steps_taken: Callable[[Any], int] = operator.attrgetter("fit_loop.epoch_loop._batches_that_stepped")
should_log: Callable[[Any], bool] = operator.attrgetter("_logger_connector.should_update_logs")


def is_setting_up() -> bool:
    """Whether Fabric's ``setup`` is moving a module to the device, before it calls the strategy's ``setup_module``.

    Without it such a module would stream for its rank alone first, and then anew.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_move_model_to_device" and frame.f_globals["__name__"].endswith("fabric.fabric"):
            return True
        frame = frame.f_back
    return False


# The device of a callback that averages weights. Without it the whole model would go to the device.
average_device: Callable[[Any], Any] = operator.attrgetter("_device")


def set_average_device(callback: Any, device: Any) -> None:
    """Set the device for a callback's average."""
    callback._device = device


def local_name(path: str) -> str:
    """Return a local path without its protocol."""
    return str(get_filesystem(path)._strip_protocol(path))


# Makes a command line's own ``optimizer`` and ``lr_scheduler`` the module's.
add_configured_optimizers: Callable[[Any], None] = operator.methodcaller(
    "_add_configure_optimizers_method_to_model", None
)


def set_epochs(trainer: Any) -> None:
    """Set the number of epochs of a run that names none, as the Trainer does when it begins."""
    limits = trainer.min_steps, trainer.max_steps, trainer.min_epochs, trainer.max_epochs
    trainer.fit_loop.min_epochs, trainer.fit_loop.max_epochs = _parse_loop_limits(*limits, trainer)


def begin_noting_sigterm(trainer: Any) -> None:
    """Make a Trainer only note SIGTERM, and stop after the batch; pass the signal on to processes that it launched.

    Replaces Lightning's handler and its check before each batch: both run collectives, which would hang while other
    ranks wait elsewhere, or have left. `end_noting_sigterm` undoes this.
    """
    connector = trainer._signal_connector

    def note(signal: int, frame: Any) -> None:
        """Note the signal; pass on the first one."""
        if not connector.received_sigterm and trainer.strategy.launcher is not None:
            trainer.strategy.launcher.kill(signal)
        connector.received_sigterm = True

    connector._sigterm_notifier_fn = note
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None


def end_noting_sigterm(trainer: Any) -> None:
    """Give a Trainer its own handling of SIGTERM back. A second call does nothing."""
    vars(trainer._signal_connector).pop("_sigterm_notifier_fn", None)
    vars(trainer.fit_loop.epoch_loop).pop("_broadcast_sigterm_tensor", None)


def attach_data(trainer: Any, module: Any, datamodule: Any) -> None:
    """Attach a run's module and data to the Trainer, as the Trainer does when a run begins."""
    trainer._data_connector.attach_data(module, datamodule=datamodule)


def set_device_mesh(module: Any, mesh: Any) -> None:
    """Set the mesh that a module's `configure_model` reads; without it no module could cut its layers there."""
    module._device_mesh = mesh
