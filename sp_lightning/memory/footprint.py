"""Bytes of host memory that a run takes, term by term, as plain numbers: planned here, measured by
``benchmarks/host_memory.py``.

1. Weights lie in one slab per unit, exact to the page: no allocator rounds them up.
2. What travels in another type has a second slab (``wire``); small weights that join it there do not count.
3. A unit that trains has a slab for its gradients, in the types of its weights: 4 bytes per parameter of FP32.
4. Optimizer state is torch's, in ordinary memory: tensors of the parameters' sizes and types, one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from .layout import aligned

STATES = {"Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "Adadelta": 2, "ASGD": 1, "Rprop": 2, "SGD": 0}
STATES |= {"Adagrad": 1, "RMSprop": 1}  # tensors per parameter with default arguments
MORE_STATES = ("momentum", "centered", "amsgrad")  # arguments that add one each


@dataclass(frozen=True, kw_only=True)
class UnitHostBytes:
    """What one unit has on the host."""

    weights: int
    wire: int = 0  # what travels, where that is not the weights themselves
    trained: int = 0  # of the weights: what requires gradients

    @classmethod
    def of(
        cls, parameters: Iterable[Tensor], travels_as: Callable[[torch.dtype], torch.dtype] = lambda dtype: dtype
    ) -> UnitHostBytes:
        """Of a unit with these parameters, which may be on the meta device."""
        params = list(parameters)
        return cls(
            weights=sum(_nbytes(p, p.dtype) for p in params),
            wire=sum(_nbytes(p, travels_as(p.dtype)) for p in params if travels_as(p.dtype) is not p.dtype),
            trained=sum(_nbytes(p, p.dtype) for p in params if p.requires_grad),
        )


@dataclass(frozen=True, kw_only=True)
class HostBytes:
    """Host memory by what it is for."""

    weights: int = 0
    wire: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0  # offloaded
    ring: int = 0  # staging buffers, where memory can not be page-locked

    @property
    def total(self) -> int:
        """All of it."""
        return sum(getattr(self, field.name) for field in fields(self))


def host_bytes(
    units: Iterable[UnitHostBytes], *, states: float = 0, activations: int = 0, ring: int = 0, training: bool = True
) -> HostBytes:
    """What these units take.

    Args:
        units: All of them, the resident rest included.
        states: Tensors that the optimizer keeps of each parameter, in its size and type: 2 for AdamW (see `STATES`).
        activations: Bytes that ``activations="offload"`` has on the host at most.
        ring: Bytes of staging buffers.
        training: Whether there are gradients and an optimizer at all.
    """
    units = list(units)
    trained = sum(unit.trained for unit in units) if training else 0
    return HostBytes(
        weights=sum(unit.weights for unit in units),
        wire=sum(unit.wire for unit in units),
        gradients=trained,
        optimizer=int(states * trained),
        activations=activations,
        ring=ring,
    )


def state_nbytes(optimizer: torch.optim.Optimizer) -> int | None:
    """What an optimizer of torch will keep of its parameters; None of another, of which that is not known."""
    kind = type(optimizer)
    if kind.__name__ not in STATES or not kind.__module__.startswith("torch.optim"):
        return None
    total = 0
    for group in optimizer.param_groups:
        states = STATES[kind.__name__] + sum(bool(group.get(name)) for name in MORE_STATES)
        total += states * sum(_nbytes(p, p.dtype) for p in group["params"] if p.requires_grad)
    return total


def _nbytes(parameter: Tensor, dtype: torch.dtype) -> int:
    return aligned(parameter.numel() * dtype.itemsize)
