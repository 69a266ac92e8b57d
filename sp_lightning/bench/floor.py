"""The costs of the work in bytes and operations, and the lower bound (floor) of a streamed step's time.

1. Under autocast, weights of linear layers and convolutions travel in the type they are multiplied in, all others as
   they are; so do gradients.
2. In training the lower bound is the simulation's; in inference it is, for each forward, compute or the way up of the
   units outside the window, whichever takes longer. Batches at once share the way up. A forward that makes a token for
   each row reads all weights in the device's memory.
3. A batch of answers is a forward of the prompts and one of each further token. What makes logits is multiplied with
   the last token alone then.
4. A window of all units still has a way up in training: what a step changed has to be sent again.
5. What lies between products takes the time of the device's memory, in training, as a dry run of the step counts it:
   not on the CPU, whose caches hold the activations of small models.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import nn

from ..autograd.autocast_weights import LAYERS
from ..core.machine import MACHINES, Machine
from ..core.simulation import floor
from ..core.unit_numbers import UnitNumbers, stepped_on_device
from ..memory.partition import Unit, partition
from ..options import Options
from ..planning.shapes import multiplied
from ..planning.traced_model import TracedModel
from .setting import Setting

# Bytes that a step reads and writes, as shares of the 28 bytes a parameter of FP32 AdamW, which is measured.
SGD_SHARE = 12 / 28
HALF_SHARE = 14 / 28


@dataclass(frozen=True)
class Costs:
    """The costs of one step."""

    parameters: int
    flops: float  # of the model, forward and backward
    token_flops: float  # of a forward that makes one further token for each row
    tokens: int  # of a batch, or that are answered
    units: tuple[UnitNumbers, ...]
    setting: Setting

    @classmethod
    def of(cls, module: nn.Module, setting: Setting) -> Costs:
        """Return the costs of a module, which may be on the meta device."""
        units, token_flops = tuple(_unit_costs(module, setting)), _token_flops(module, setting)
        return cls(
            parameters=sum(parameter.numel() for parameter in module.parameters()),
            flops=sum(unit.forward_flops + unit.backward_flops for unit in units) + setting.further * token_flops,
            token_flops=token_flops,
            tokens=setting.batch * (setting.answer or setting.seq),
            units=units,
            setting=setting,
        )

    def floor_s(self, machine: Machine, window: int, at_once: int = 1, steps_on_device: bool = False) -> float:
        """Return the lower bound of a batch's time, in seconds, for a window and a number of batches at once."""
        if not self.setting.inference:
            machine = dataclasses.replace(
                machine, optimizer_bytes_per_parameter=machine.optimizer_bytes_per_parameter * self._optimizer_share
            )
            units = self.units
            if steps_on_device:
                width = 2 if self.setting.precision == "bf16-true" else 4
                units = tuple(stepped_on_device(units, 0 if self.setting.optimizer == "sgd" else 2, width))
            return floor(units, window, machine, self.setting.recompute, self.setting.ranks).seconds
        sent = [unit.up_nbytes for unit in self.units if not unit.resident][window:]
        up_s = sum(sent) / machine.up_bytes_per_s / at_once
        further = self.setting.further
        first = (self.flops - further * self.token_flops) / machine.flops_per_s
        each = machine.compute_s(self.token_flops, sum(unit.up_nbytes for unit in self.units))
        return max(first, up_s) + further * max(each, up_s)

    @property
    def _optimizer_share(self) -> float:
        if self.setting.optimizer == "sgd":
            return SGD_SHARE
        return HALF_SHARE if self.setting.precision == "bf16-true" else 1


def _unit_costs(module: nn.Module, setting: Setting) -> list[UnitNumbers]:
    others = {} if setting.inference or setting.device == "cpu" else _others(setting)
    active = multiplied(module)
    once = _of_last_token(module) if setting.answer else set()  # for each row
    cast = _cast(module) if setting.precision == "bf16-mixed" else set()

    def cost(unit: Unit) -> UnitNumbers:
        tokens = {
            name: setting.batch if id(p) in once else setting.shape.tokens(name, setting.batch, setting.seq)
            for name, p in unit.params
        }
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
            forward_other=others[unit.name].forward_other if others else 0.0,
            backward_other=others[unit.name].backward_other if others else 0.0,
        )

    return [cost(unit) for unit in partition(module)]


def _others(setting: Setting) -> dict[str, UnitNumbers]:
    """Return units as a dry run of a step counts them, by their names (Rule 5)."""
    shape = setting.shape
    batch = shape.inputs(setting.batch, setting.seq, torch.Generator())
    target = torch.device(setting.device).type
    traced = TracedModel(shape.make, batch, setting.precision, "AdamW", target, lambda module, given: module(**given))
    return {cost.name: cost for cost in traced.needs(Options(activations="keep"), MACHINES["h200"]).costs}


def _token_flops(module: nn.Module, setting: Setting) -> float:
    if not setting.answer:
        return 0.0
    tokens, rows, last = setting.shape.tokens, setting.batch, setting.seq
    active = multiplied(module).items()
    return 2.0 * sum(size * (tokens(name, rows, last + 1) - tokens(name, rows, last)) for name, size in active)


def _of_last_token(module: nn.Module) -> set[int]:
    """Return the ids of the weights that make logits, which an answer needs of its last token alone (Rule 3)."""
    return {id(module.model.get_output_embeddings().weight)}  # type: ignore[operator, union-attr]


def _cast(module: nn.Module) -> set[int]:
    """Return the ids of the weights that autocast casts (Rule 1)."""
    tables = {id(child.weight) for child in module.modules() if isinstance(child, nn.Embedding)}
    return {id(child.weight) for child in module.modules() if isinstance(child, LAYERS)} - tables
