"""The Lightning strategy: an unchanged LightningModule through ``Trainer(strategy="superpipeline")``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.fabric.utilities.init import _EmptyInit
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import CheckpointIO, Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torchmetrics import Metric

from .config import Options
from .errors import OptionError
from .handle import Handle


class SuperpipelineStrategy(SingleDeviceStrategy):
    """Train, validate and predict with a model that does not fit on the device.

    Weights, gradients and optimizer state live in host memory; units of the model (usually one block each) visit the
    device through a small window. Results are those of the plain run, to the last bit.

    Args:
        window: Units on the device at a time, those on their way up included. An int >= 1, or "auto".
        transfer: Units exchanged at a time, at most ``window``. An int >= 1, or "auto".
        units: "auto" finds the model's repeated blocks; or class names such as ["LlamaDecoderLayer"]; or a callable that
            takes the module and gives the submodules that are to be units.
        activations: What happens to what autograd saves inside a unit. "keep" leaves it on the device, "recompute" keeps
            the unit's inputs and runs its forward again in backward, "offload" moves it to the host and back.
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
        units: str | list[str] | Callable[[nn.Module], Any] = "auto",
        activations: Literal["keep", "recompute", "offload"] = "keep",
        device: torch.device | str | None = None,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(
            device=device or "cpu",
            accelerator=accelerator,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self.options = Options.parse(window=window, transfer=transfer, units=units, activations=activations)
        self.handle: Handle | None = None
        self._parallel_devices: list[torch.device] | None = None

    # ---- the device

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The devices that the Trainer chose; None before it has, as anything else would choose the accelerator."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        if devices is not None and len(devices) > 1:
            raise OptionError(
                argument="devices",
                found=len(devices),
                allowed="1: this strategy streams a model through one device; use strategy='fsdp' for several",
            )
        self._parallel_devices = devices
        if devices:
            self._root_device = devices[0]

    # ---- setup and teardown

    def setup(self, trainer: Trainer) -> None:
        """As the base class does, but parameters and optimizer state stay on the host."""
        assert self.accelerator is not None and self.model is not None
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        self.model = self._setup_model(self.model)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def model_to_device(self) -> None:
        """Parameters begin to stream; buffers and metric states move."""
        assert self.lightning_module is not None
        for module in self.lightning_module.modules():
            if isinstance(module, Metric):
                module.to(self.root_device)
        self.handle = Handle(self.lightning_module, self.root_device, self.options)
        _update_properties(self.lightning_module, device=self.root_device)

    def teardown(self) -> None:
        """The module is plain again. Also called after an exception, wherever it came from."""
        if self.handle is not None:
            self.handle.close()
            self.handle = None
        super().teardown()

    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Weights are made on the host, whoever makes them."""
        with _EmptyInit(enabled=bool(empty_init)), self.precision_plugin.tensor_init_context():
            yield

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restored state stays on the host."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"]):
            optimizer.load_state_dict(state)

    # ---- steps

    @contextlib.contextmanager
    def _step(self, name: str) -> Iterator[None]:
        assert self.handle is not None
        self.handle.open_scope(name)
        try:
            yield
        finally:
            self.handle.close_scope()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's, as one pass through the units."""
        with self._step("train"):
            return super().training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's, as one pass through the units."""
        with self._step("validate"):
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's, as one pass through the units."""
        with self._step("test"):
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's, as one pass through the units."""
        with self._step("predict"):
            return super().predict_step(*args, **kwargs)
