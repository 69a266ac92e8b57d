"""A unit in plain numbers, and the host memory of a run, term by term (measured by ``benchmarks/host_memory.py``).

Weights lie in one slab per unit, exact to the page, and wire copies in a second one; small weights that travel as they
are, and join them, do not count. A unit that trains has a slab for its gradients, in the types of its weights.
Gradients that come down in bfloat16 take half of that until code asks for them: a plan knows, but a check that a run
fits does not count on it. Optimizer state is torch's: tensors of the parameters' sizes and types. Adafactor has means
over a matrix's rows and columns instead. What trains and is in no optimizer has gradients only.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ALIGNMENT = 512  # at which every tensor of a slab or of a device buffer begins, as one that torch allocates does
STATES = {"Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "Adadelta": 2, "ASGD": 1, "Rprop": 2, "SGD": 0}
STATES |= {"Adagrad": 1, "RMSprop": 1}  # tensors per parameter with default arguments
FACTORED = "Adafactor"  # which has means over the dimensions of a matrix
MORE_STATES = ("momentum", "centered", "amsgrad")  # arguments that add one each


def aligned(nbytes: int, alignment: int = ALIGNMENT) -> int:
    """Round `nbytes` up to a multiple of `alignment`."""
    return -(-nbytes // alignment) * alignment


@dataclass(frozen=True)
class UnitNumbers:
    """The bytes of one unit."""

    name: str
    up_nbytes: int  # of its weights on the device, which each load copies
    down_nbytes: int  # of its gradients; 0 for a frozen unit
    parameters: int = 0  # elements that train
    resident: bool = False  # stays on the device, outside the window
    cast: int = 0  # of the elements that train, those that travel in half precision and are FP32 there

    @property
    def trained(self) -> bool:
        """Whether a step changes the unit."""
        return self.down_nbytes > 0


@dataclass(frozen=True, kw_only=True)
class UnitHostBytes:
    """Host memory of one unit, in bytes."""

    weights: int
    wire: int = 0  # of wire copies, for weights that travel in another type
    trained: int = 0  # of the weights that require gradients
    unstepped: int = 0  # of those that no optimizer has

    @classmethod
    def of(
        cls, parameters: Iterable[Tensor], travels_as: Callable[[torch.dtype], torch.dtype] = lambda dtype: dtype
    ) -> UnitHostBytes:
        """Compute the bytes of a unit with these parameters, which may be on the meta device."""
        params = list(parameters)
        return cls(
            weights=sum(_nbytes(p, p.dtype) for p in params),
            wire=sum(_nbytes(p, travels_as(p.dtype)) for p in params if travels_as(p.dtype) is not p.dtype),
            trained=sum(_nbytes(p, p.dtype) for p in params if p.requires_grad),
        )


@dataclass(frozen=True, kw_only=True)
class HostBytes:
    """Host memory of a run by purpose, in bytes."""

    weights: int = 0
    wire: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0  # offloaded
    keys_and_values: int = 0  # of a cache that waits on the host
    copies: int = 0  # of the weights, such as an average of them
    under_way: int = 0  # gradients on their way to other ranks
    ring: int = 0  # staging buffers, if memory cannot be page-locked

    @property
    def total(self) -> int:
        """The sum of all terms."""
        return sum(getattr(self, field.name) for field in fields(self))

    def times(self, count: int) -> HostBytes:
        """Return what as many such runs need, which share nothing: those of devices with other shards."""
        return HostBytes(**{field.name: count * getattr(self, field.name) for field in fields(self)})

    def of_ranks(
        self, ranks: int, under_way: int, own_gradients: bool = False, shared_state: bool = True, messages: int = 0
    ) -> HostBytes:
        """Return what this many ranks need together, on one of several machines.

        Ranks share weights, gradients and state. Each has wire copies, offloaded activations, keys and values, averages
        and staging buffers of its own, and all gradients once more where it accumulates or writes them.

        Args:
            ranks: The number of devices.
            under_way: Bytes of gradients that a rank may have on their way.
            own_gradients: Whether each rank has gradients of its own.
            shared_state: Whether each rank steps a part, or every one all parameters with a state of its own.
            messages: Bytes of sums between machines, for all ranks together; 0 on the only machine.
        """
        if ranks == 1 and not messages:
            return self
        alone = 0 if shared_state else ranks
        return replace(
            self,
            weights=self.weights + alone * self.gradients,  # those that train, until the ranks' results are settled
            wire=ranks * self.wire,
            gradients=(1 + ranks * own_gradients) * self.gradients,
            optimizer=max(1, alone) * self.optimizer,
            activations=ranks * self.activations,
            keys_and_values=ranks * self.keys_and_values,
            copies=ranks * self.copies,
            under_way=ranks * under_way + messages,
            ring=ranks * self.ring,
        )


def host_bytes(
    units: Iterable[UnitHostBytes], *, states: float = 0, activations: int = 0, ring: int = 0, training: bool = True
) -> HostBytes:
    """Compute the host memory that these units need.

    Args:
        units: All units, the resident rest included.
        states: State tensors per parameter, of its size and type: 2 for AdamW (see `STATES`).
        activations: The most bytes that ``activations="offload"`` has on the host.
        ring: Bytes of staging buffers.
        training: Whether there are gradients and an optimizer at all.
    """
    units = list(units)
    trained = sum(unit.trained for unit in units) if training else 0
    stepped = trained - sum(unit.unstepped for unit in units)
    return HostBytes(
        weights=sum(unit.weights for unit in units),
        wire=sum(unit.wire for unit in units),
        gradients=trained,
        optimizer=int(states * stepped),
        activations=activations,
        ring=ring,
    )


def state_nbytes(
    optimizer: torch.optim.Optimizer, of: Container[int] | None = None, shaped: bool = False
) -> int | None:
    """Return the bytes of state that one of torch's optimizers will make; None for any other, where it is unknown.

    Args:
        optimizer: The optimizer.
        of: Ids of the parameters whose state counts; None for all.
        shaped: Only state of its parameter's shape counts.
    """
    kind = type(optimizer)
    if kind.__name__ not in (*STATES, FACTORED) or not kind.__module__.startswith("torch.optim"):
        return None
    total = 0
    for group in optimizer.param_groups:
        params = [p for p in group["params"] if p.requires_grad and (of is None or id(p) in of)]
        if kind.__name__ == FACTORED:
            total += sum(factored_nbytes(p, shaped) for p in params)
        else:
            states = STATES[kind.__name__] + sum(bool(group.get(name)) for name in MORE_STATES)
            total += states * sum(_nbytes(p, p.dtype) for p in params)
    return total


def factored_nbytes(parameter: Tensor, shaped: bool = False) -> int:
    """Count Adafactor's state: means over the last dimension, and over the one before; of a vector, all elements."""
    if parameter.dim() < 2:
        return _nbytes(parameter, parameter.dtype)
    sizes = [size for size in parameter.shape[-2:] if size == 1 or not shaped]
    return sum(aligned(parameter.numel() // max(1, size) * parameter.itemsize) for size in sizes)


def _nbytes(parameter: Tensor, dtype: torch.dtype) -> int:
    return aligned(parameter.numel() * dtype.itemsize)
