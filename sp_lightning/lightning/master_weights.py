"""Master weights: parameters stay in FP32 on the host, while buffers and what the device sees are in half precision."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from ..compat.tensors import consists_of_tensors
from ..errors import OptionError
from .names import FabricHalfPrecision, HalfPrecision, update_properties


def half_dtype(precision: Any) -> torch.dtype:
    """Return the half-precision type in which the device computes; raise OptionError for other precision plugins."""
    if not isinstance(precision, (HalfPrecision, FabricHalfPrecision)):
        raise OptionError(
            argument="precision",
            found=precision.precision,
            allowed="'bf16-true' or '16-true' with master_weights=True",
        )
    return torch.bfloat16 if precision.precision == "bf16-true" else torch.float16


def convert(module: nn.Module, half: torch.dtype) -> nn.Module:
    """Convert a module's buffers to half precision and its parameters to FP32, but for quantised ones."""
    for child in module.modules():
        for name, buffer in child._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                child._buffers[name] = buffer.to(half)
    for parameter in module.parameters():
        if parameter.is_floating_point() and not consists_of_tensors(parameter):
            parameter.data = parameter.data.float()
    update_properties(module, dtype=half)
    return module


class MasterWeights(FabricHalfPrecision):
    """Fabric's half precision, of modules whose parameters stay in FP32."""

    @classmethod
    def of(cls, precision: Any) -> MasterWeights:
        """Make this plugin for the type of another one; raise OptionError unless that is of half precision."""
        half_dtype(precision)
        return cls(precision.precision)

    @property
    def half(self) -> torch.dtype:
        """The type in which the device computes."""
        return half_dtype(self)

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert the buffers alone to half precision."""
        return convert(module, self.half)

    def module_init_context(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which weights are created in FP32."""
        return contextlib.nullcontext()
