"""The costs of the work in bytes and operations, and the lower bound (floor) of a streamed step's time.

1. Under autocast, weights of linear layers and convolutions travel in the type they are multiplied in, all others as
   they are; so do gradients.
2. In training the lower bound is the simulation's; in inference it is compute or the way up of the units outside the
   window, whichever takes longer.
3. A window of all units still has a way up in training: what a step changed has to be sent again.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from torch import nn

from ..autograd.autocast_weights import LAYERS
from ..core.machine import Machine
from ..core.simulation import floor
from ..core.unit_numbers import UnitNumbers
from ..memory.partition import Unit, partition
from ..planning.shapes import multiplied
from .setting import Setting

# Bytes that a step reads and writes, as shares of the 28 bytes a parameter of FP32 AdamW, which is measured.
SGD_SHARE = 12 / 28
HALF_SHARE = 14 / 28


@dataclass(frozen=True)
class Costs:
    """The costs of one step."""

    parameters: int
    flops: float  # of the model, forward and backward
    tokens: int
    units: tuple[UnitNumbers, ...]
    setting: Setting

    @classmethod
    def of(cls, module: nn.Module, setting: Setting) -> Costs:
        """Return the costs of a module, which may be on the meta device."""
        units = tuple(_unit_costs(module, setting))
        return cls(
            parameters=sum(parameter.numel() for parameter in module.parameters()),
            flops=sum(unit.forward_flops + unit.backward_flops for unit in units),
            tokens=setting.batch * setting.seq,
            units=units,
            setting=setting,
        )

    def floor_s(self, machine: Machine, window: int) -> float:
        """Return the lower bound of the step time, with this many units on the device, in seconds."""
        if not self.setting.inference:
            machine = dataclasses.replace(
                machine, optimizer_bytes_per_parameter=machine.optimizer_bytes_per_parameter * self._optimizer_share
            )
            return floor(self.units, window, machine, self.setting.recompute, self.setting.devices).seconds
        sent = [unit.up_nbytes for unit in self.units if not unit.resident][window:]
        return max(self.flops / machine.flops_per_s, sum(sent) / machine.up_bytes_per_s)

    @property
    def _optimizer_share(self) -> float:
        if self.setting.optimizer == "sgd":
            return SGD_SHARE
        return HALF_SHARE if self.setting.precision == "bf16-true" else 1


def _unit_costs(module: nn.Module, setting: Setting) -> list[UnitNumbers]:
    active = multiplied(module)
    cast = _cast(module) if setting.precision == "bf16-mixed" else set()

    def cost(unit: Unit) -> UnitNumbers:
        tokens = {name: setting.shape.tokens(name, setting.batch, setting.seq) for name, _ in unit.params}
        forward = 2.0 * sum(active[name] * count for name, count in tokens.items())
        half = setting.precision == "bf16-true"
        narrow = sum(p.numel() for _, p in unit.params if id(p) in cast)
        nbytes = 2 * unit.numel if half else 4 * unit.numel - 2 * narrow
        return UnitNumbers(
            name=unit.name,
            up_nbytes=nbytes,
            down_nbytes=0 if setting.inference else nbytes,
            parameters=unit.numel,
            cast=narrow,
            forward_flops=forward,
            backward_flops=0 if setting.inference else 2 * forward,
            resident=unit.resident,
        )

    return [cost(unit) for unit in partition(module)]


def _cast(module: nn.Module) -> set[int]:
    """Return the ids of the weights that autocast casts (Rule 1)."""
    tables = {id(child.weight) for child in module.modules() if isinstance(child, nn.Embedding)}
    return {id(child.weight) for child in module.modules() if isinstance(child, LAYERS)} - tables
