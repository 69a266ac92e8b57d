"""A Trainer strategy on the core of handle.py, for tests, until the product's own strategy runs on that core."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.optim import Optimizer

from sp_lightning.handle import Handle, Settings

WIRES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class StreamStrategy(SingleDeviceStrategy):
    """Streams the model, whose options are those of `Settings`.

    ``early`` steps each unit beside backward; ``wire_dtype="as-is"`` has each weight travel in its own type.
    """

    def __init__(
        self,
        device: Any = "cpu",
        accelerator: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        early: bool = False,
        wire_dtype: str = "auto",
        **options: Any,
    ) -> None:
        super().__init__(device, accelerator, checkpoint_io, precision_plugin)
        self._early, self._wire_dtype, self._options = early, wire_dtype, options
        Settings(**options)
        self.streamed: Handle | None = None

    def model_to_device(self) -> None:
        is_mixed = isinstance(self.precision_plugin, MixedPrecision) and self._wire_dtype == "auto"
        wire = WIRES.get(self.precision_plugin.precision) if is_mixed else None
        self.streamed = Handle(self.model, self.root_device, Settings(wire=wire, **self._options))

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        self._place_optimizers()

    def _place_optimizers(self) -> None:
        for optimizer in self.optimizers:
            self.streamed.steps.adopt(optimizer)
            self.streamed.steps.place_state(optimizer)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            optimizer.load_state_dict(state)
        self._place_optimizers()

    def teardown(self) -> None:
        if self.streamed is not None:
            self.streamed.close()
            self.streamed = None
        super().teardown()

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        if self._early and self.lightning_module.automatic_optimization:
            self.streamed.steps.step_beside_backward(optimizer)
        try:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        finally:
            self.streamed.steps.step_beside_backward(None)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self.streamed is not None:
            self.streamed.steps.check_applied()
        return super().lightning_module_state_dict()
