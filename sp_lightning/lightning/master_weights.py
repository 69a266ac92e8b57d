"""Master weights: parameters stay in FP32 on the host, while buffers and what the device sees are in half precision."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from ..compat.tensors import consists_of_tensors
from ..errors import OptionError
from .names import FabricHalfPrecision, HalfPrecision, update_properties

WIRES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def half_dtype(precision: Any) -> torch.dtype:
    """Return the half-precision type in which the device computes; raise OptionError for other precision plugins."""
    if not isinstance(precision, (HalfPrecision, FabricHalfPrecision)):
        raise OptionError(
            argument="precision",
            found=precision.precision,
            allowed="'bf16-true' or '16-true' with master_weights=True",
        )
    return torch.bfloat16 if precision.precision == "bf16-true" else torch.float16


def wire_of(precision: Any, with_masters: bool) -> torch.dtype | None:
    """Return the type to which a precision plugin casts weights in a step; None if it casts none."""
    return half_dtype(precision) if with_masters else WIRES.get(precision.precision)


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

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert the buffers alone to half precision."""
        return convert(module, half_dtype(self))

    def module_init_context(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which weights are created in FP32."""
        return contextlib.nullcontext()
