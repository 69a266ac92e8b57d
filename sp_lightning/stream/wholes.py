"""Frozen weights that consist of several plain tensors, as quantised ones do.

The tensors travel with their unit. On the device the weight's own class makes it up again of them, once: a load gives
the same tensors other bytes. On the host the parameter is what it was, over bytes in the unit's slab.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..compat.tensors import IS_PARAMETER, consists_of_tensors
from ..errors import UnsupportedError
from ..memory.partition import Slot, exchange
from ..wholes.whole import Whole
from .leaf import Weight


class Part(Weight):
    """One of the tensors that a weight consists of."""

    is_part = True

    def __init__(self, name: str, tensor: Any) -> None:
        super().__init__(name, tensor, [], tensor.dtype)


class WholeWeight:
    """A parameter that consists of several tensors, and what stands for it on the device."""

    def __init__(self, whole: Whole, slots: list[Slot], parts: list[Weight], device: torch.device) -> None:
        if whole.is_shard:
            raise UnsupportedError(
                f"{whole.name} is a DTensor, a part of a weight that several devices have: a stream through one device"
                " takes weights that are there as a whole"
            )
        self.name, self.host = whole.name, whole.parameter
        self._form, self._parts, self._device = whole.form, parts, device
        self._slots = [(0, slot) for slot in slots]
        self._there: Any = None

    def bind(self) -> None:
        """Put the weight on the device into the modules, with its parts' bytes there."""
        if self.host.requires_grad:
            raise UnsupportedError(
                f"requires_grad of {self.name} was set to True, but it is a {type(self.host).__name__}, which consists"
                " of several tensors: it can be streamed, but not trained. Train adapters, or a plain parameter"
            )
        if self._there is None:
            self._there = self._form.whole(iter([part.there for part in self._parts]), self._device)
            setattr(self._there, IS_PARAMETER, True)
        exchange(self._slots, [self.host], [self._there])

    def unbind(self) -> None:
        """Put the user's parameter back."""
        exchange(self._slots, [self._there], [self.host])


def pack_weights(module: nn.Module) -> None:
    """Have weights that change where they are moved do so, as a plain run's `module.to()` has it.

    bitsandbytes packs its weights at their first move. The parameters stay the same objects.
    """
    for parameter in module.parameters():
        if _moves_by_itself(parameter) and parameter.device.type == "cpu":
            moved = parameter.to("cpu")
            if moved is not parameter and moved.data_ptr() != parameter.data_ptr():
                parameter.data = moved


def check_moves(module: nn.Module) -> None:
    """Raise for a weight that takes other tensors along when it is moved: only its own bytes would be on the device."""
    for name, parameter in module.named_parameters():
        along = _tensors_in(vars(parameter)) if _moves_by_itself(parameter) else []
        if any(one.device.type == "cpu" and not isinstance(one, nn.Parameter) for one in along):
            raise UnsupportedError(
                f"{name} is a {type(parameter).__name__}, which takes other tensors along where it is moved, such as"
                " the scales of its values, and only its own bytes are streamed: quantise with weights that say which"
                " tensors they consist of (torchao), or leave them unquantised"
            )


def _moves_by_itself(parameter: nn.Parameter) -> bool:
    """Whether a parameter's class has a ``to`` of its own."""
    return type(parameter).to is not Tensor.to and not consists_of_tensors(parameter)


def _tensors_in(value: Any) -> list[Tensor]:
    """Find tensors in containers, and in the attributes of objects among them."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        value = list(vars(value).values())
    return [found for item in value for found in _tensors_in(item)] if isinstance(value, (list, tuple)) else []
