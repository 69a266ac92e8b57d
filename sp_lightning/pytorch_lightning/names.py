"""The classes of ``pytorch_lightning``, under the names of sp_lightning/lightning/names.py."""

# ruff: noqa: F401  # the list of names is the other file's
from lightning_fabric.plugins.environments.lightning import LightningEnvironment
from lightning_fabric.plugins.environments.slurm import SLURMEnvironment
from lightning_fabric.plugins.precision import HalfPrecision as FabricHalfPrecision
from lightning_fabric.plugins.precision import Precision as FabricPrecision
from lightning_fabric.strategies.model_parallel import ModelParallelStrategy as FabricModelParallelStrategy
from lightning_fabric.strategies.single_device import SingleDeviceStrategy as FabricSingleDeviceStrategy
from lightning_fabric.strategies.strategy import Strategy as FabricBaseStrategy
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.accelerators import Accelerator
from pytorch_lightning.callbacks import (
    Checkpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from pytorch_lightning.loggers import Logger
from pytorch_lightning.plugins import CheckpointIO, HalfPrecision, Precision
from pytorch_lightning.plugins.io import TorchCheckpointIO
from pytorch_lightning.strategies import (
    ModelParallelStrategy,
    ParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities import rank_zero_info

from ..compat.pytorch_lightning import ScriptLauncher, WrappingCheckpointIO, update_properties
from ..lightning.names import __all__ as __all__
