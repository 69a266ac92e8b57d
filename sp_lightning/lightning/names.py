"""The classes of Lightning under which the modules beside this file work.

They import Lightning from here alone, since they run a second time as modules of ``sp_lightning.pytorch_lightning``,
whose file of this name has the same classes of ``pytorch_lightning``.
"""

from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.precision import HalfPrecision as FabricHalfPrecision
from lightning.fabric.plugins.precision import Precision as FabricPrecision
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy as FabricModelParallelStrategy
from lightning.fabric.strategies.single_device import SingleDeviceStrategy as FabricSingleDeviceStrategy
from lightning.fabric.strategies.strategy import Strategy as FabricBaseStrategy
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import (
    Checkpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import CheckpointIO, HalfPrecision, Precision
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import (
    ModelParallelStrategy,
    ParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info

from ..compat.lightning import ScriptLauncher, WrappingCheckpointIO, update_properties

__all__ = [
    "Accelerator",
    "Callback",
    "Checkpoint",
    "CheckpointIO",
    "FabricBaseStrategy",
    "FabricHalfPrecision",
    "FabricModelParallelStrategy",
    "FabricPrecision",
    "FabricSingleDeviceStrategy",
    "HalfPrecision",
    "LightningEnvironment",
    "LightningModule",
    "Logger",
    "ModelParallelStrategy",
    "ParallelStrategy",
    "Precision",
    "SLURMEnvironment",
    "ScriptLauncher",
    "SingleDeviceStrategy",
    "StochasticWeightAveraging",
    "Strategy",
    "TorchCheckpointIO",
    "Trainer",
    "TrainerFn",
    "WeightAveraging",
    "WrappingCheckpointIO",
    "rank_zero_info",
    "update_properties",
]
