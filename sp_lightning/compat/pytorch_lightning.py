"""Private names of ``pytorch_lightning`` whose objects differ from those of ``lightning`` (lightning.py).

Tried with pytorch_lightning 2.6.
"""

from lightning_fabric.utilities.device_dtype_mixin import _update_properties as update_properties
from pytorch_lightning.plugins.io.wrapper import _WrappingCheckpointIO as WrappingCheckpointIO
from pytorch_lightning.strategies.launchers.subprocess_script import _SubprocessScriptLauncher as ScriptLauncher

__all__ = ["ScriptLauncher", "WrappingCheckpointIO", "update_properties"]
