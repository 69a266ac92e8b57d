"""Preparation of a module before its weights are streamed: values for meta tensors, moves, checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..compat.tensors import consists_of_tensors, convert_tensors, converts_more
from ..errors import PartitionError, UnsupportedError


def materialize(module: nn.Module, after: Callable[[nn.Parameter], None] | None = None) -> None:
    """Give parameters and buffers on the meta device host memory and their modules' own initial values.

    They stay the same objects, so tied parameters stay tied. ``after`` is called with each parameter of such a module
    as soon as it has values.
    """
    for name, child in module.named_modules():
        own = [tensor for tensor in (*child._parameters.values(), *child._buffers.values()) if tensor is not None]
        if not any(tensor.is_meta for tensor in own):
            continue
        if any(tensor.is_meta and consists_of_tensors(tensor) for tensor in own):
            raise PartitionError(
                f"{name or type(child).__name__} has a weight on the meta device that consists of several tensors, and "
                "no values to begin with: load it before training"
            )
        reset = getattr(child, "reset_parameters", None)
        if reset is None:
            raise PartitionError(
                f"{name or type(child).__name__} has parameters on the meta device and no reset_parameters(); "
                "load its weights before training, or build it under trainer.init_module()"
            )
        for tensor in own:
            if tensor.is_meta:
                made = torch.empty_like(tensor, device="cpu")
                if isinstance(tensor, nn.Parameter):
                    made = nn.Parameter(made, tensor.requires_grad)
                torch.utils.swap_tensors(tensor, made)  # type: ignore[no-untyped-call]
        reset()
        for parameter in own:
            if after is not None and isinstance(parameter, nn.Parameter):
                after(parameter)


def move_others(
    module: nn.Module, device: torch.device, stays: Callable[[nn.Parameter], bool] = lambda _: True
) -> None:
    """Move tensors to the device that modules keep beside parameters and buffers, such as the states of metrics.

    A parameter of such a module stays where it is, and its gradient, if ``stays`` returns True for it.
    """
    for part in filter(converts_more, module.modules()):
        plain = [parameter for parameter in part.parameters() if stays(parameter)]
        kept = [*plain, *(parameter.grad for parameter in plain)]

        def moved(tensor: Tensor, kept: list[Any] = kept) -> Tensor:
            """Return the tensor on the device, or as it is if it stays."""
            return tensor if any(tensor is one for one in kept) else tensor.to(device)

        convert_tensors(part, moved)


@torch.inference_mode(False)
def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Move a module's buffers to this device; one that is registered twice becomes two, as in ``module.to()``."""
    for child in module.modules():
        for name, buffer in child._buffers.items():
            if buffer is not None and buffer.device != device:
                child._buffers[name] = buffer.to(device)


def pack_weights(module: nn.Module) -> None:
    """Pack weights on the host whose library packs them at their first move, as `module.to()` does in a plain run.

    bitsandbytes has such weights. The parameters stay the same objects.
    """
    for parameter in module.parameters():
        if _moves_by_itself(parameter) and parameter.device.type == "cpu":
            moved = parameter.to("cpu")
            if moved is not parameter and moved.data_ptr() != parameter.data_ptr():
                parameter.data = moved


def check_moves(module: nn.Module) -> None:
    """Raise for a weight whose class moves other tensors with it: only its own bytes would be on the device."""
    for name, parameter in module.named_parameters():
        along = _tensors_in(vars(parameter)) if _moves_by_itself(parameter) else []
        if any(one.device.type == "cpu" and not isinstance(one, nn.Parameter) for one in along):
            raise UnsupportedError(
                f"{name} is a {type(parameter).__name__}, which takes other tensors along where it is moved, such as"
                " the scales of its values, and only its own bytes are streamed: quantise with weights that say which"
                " tensors they consist of (torchao), or leave them unquantised"
            )


def _moves_by_itself(parameter: nn.Parameter) -> bool:
    """Whether a parameter's class overrides ``to``, and its values do not lie in several tensors."""
    return type(parameter).to is not Tensor.to and not consists_of_tensors(parameter)


def _tensors_in(value: Any) -> list[Tensor]:
    """List the tensors in a value: in lists, tuples and dicts, and in attributes of objects among them."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        value = list(vars(value).values())
    return [found for item in value for found in _tensors_in(item)] if isinstance(value, (list, tuple)) else []


def check_values(module: nn.Module) -> None:
    """Raise for a parameter or buffer on the meta device: it has no values, and a plain run cannot move it either."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta:
            raise UnsupportedError(
                f"{name} is on the meta device, so it has no values, and none are made up for it: load it with "
                "load_state_dict(..., assign=True), since without assign=True nothing is loaded into it, or make the "
                "model outside of init_empty_weights(), without low_cpu_mem_usage=True"
            )
