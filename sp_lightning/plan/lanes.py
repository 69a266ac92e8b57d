"""Compute how long a step takes, from four lanes that run side by side on a machine.

The lanes are compute, the copies from host to device, those from device to host, and the cores, which move bytes in the
host's memory. Copies take what they need of that memory, and the cores what is left, as far as they can use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .machines import Machine


@dataclass(frozen=True, kw_only=True)
class UnitWork:
    """A use of a unit in a step: its work and its bytes.

    A unit that is used twice in a forward, such as a tied table, is listed twice under one name; `trained`, `cast`,
    `up_nbytes`, `down_nbytes` and the bytes of its step are the unit's, and equal in both.
    """

    name: str
    trained: int = 0  # parameters that a step changes
    cast: int = 0  # of those, the ones that are FP32 on the host and travel in half precision
    forward_flops: float = 0.0
    backward_flops: float = 0.0  # without the forward that recomputation repeats
    forward_moved: float = 0.0  # bytes of device memory that all but matrix products read and write
    backward_moved: float = 0.0
    up_nbytes: int = 0  # of each load
    down_nbytes: int = 0  # of its gradients; 0: frozen
    kept_nbytes: int = 0  # activations that go down in forward and come up again before backward
    resident: bool = False  # never leaves the device, and is stepped there
    mesh_nbytes: float = 0.0  # that devices with other shards of it send each other in forward
    file_nbytes: int = 0  # of each load, those that are read from files
    state_read_nbytes: int = 0  # from the disk, for its step
    state_written_nbytes: int = 0


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Bytes that a step costs for each parameter; see `step_cost`."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What decides the order of work in a step."""

    cost: StepCost
    window: int  # units on the device
    inference: bool = False
    recompute: bool = False  # the forward of each unit is repeated in its backward
    clip: bool = False  # by norm: steps begin when the last gradient is there
    accumulate: int = 1  # batches in a step; the time is that of all of them
    optimizer_device: Literal["host", "device"] = "host"
    overlap: Literal["none", "backward", "forward"] = "forward"  # how far steps run beside compute
    fp32: bool = False  # products are those of FP32
    ranks: int = 1  # devices on this host, which share its memory and cores
    nodes: int = 1  # such hosts, which sum their gradients


@dataclass(frozen=True)
class StepTime:
    """The time of a step, what most of it went to, and the seconds for which each lane was busy."""

    seconds: float
    bound_by: str  # a key of `lanes`
    lanes: dict[str, float]  # "compute", "host to device", "device to host", "host memory", "disk", "network"


def step_cost(states: float = 2, *, fused: bool = False) -> StepCost:
    """Return what a step of today's runtime costs, for an optimizer with this many states for each parameter."""
    raise NotImplementedError


def step_time(units: Sequence[UnitWork], machine: Machine, run: Run) -> StepTime:
    """Compute the time of a step over these uses of units, in the order of forward."""
    raise NotImplementedError
