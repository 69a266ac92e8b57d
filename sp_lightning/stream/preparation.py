"""Before a module streams: how it is cut, which units are resident, and how its tensors are moved.

Resident units never leave the device, where they are stepped. First come those with a tied weight: its gradient is
complete last, and the next forward needs it first, so no computation could hide its copies. The other units follow in
the model's order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..compat.tensors import consists_of_tensors, convert_tensors, converts_more
from ..errors import ExactnessError, PartitionError, UnsupportedError
from ..host.device import Device, DeviceMemoryError, aligned
from ..host.room import UnitNumbers, first_window
from ..options import Bytes, Options, format_bytes
from . import parameters
from .leaf import FUSED, Slot, Weight
from .partition import FoundUnit, partition
from .recompute import tensors_in
from .wholes import Part, Sharded, ShardWeight, bring_to_host, check_supported

CAST_IN = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)  # modules that use their weights where autocast casts them
COPIES = 4  # of a weight that trains: itself, its gradient, and state as AdamW has it


class Cut:
    """The units of a module, before they are made: which stream, which stay, and as what their weights travel."""

    def __init__(self, module: nn.Module, options: Options, device: Device, wire: torch.dtype | None) -> None:
        """Cut a module, and move its weights to the host; raise for what cannot be streamed, or does not fit.

        Args:
            module: The module.
            options: The user's options.
            device: The device that computes.
            wire: The type to which autocast casts, or in which the module computes; None: each weight has its own.
        """
        self._device, self._free = device, max(0, device.memory_capacity() - device.memory_allocated())
        self._has_masters = options.master_weights
        self._wire = wire if options.wire_dtype == "auto" or self._has_masters else None
        pack_weights(module)
        bring_to_host(module)
        if not device.is_host:
            check_moves(module)
        self.slots = slots(module)
        cut = partition(module, options.units)
        self._wholes = {id(tensor): whole for part in cut for whole in part.wholes for _, tensor in whole.parts}
        self.shards = [whole for whole in self._wholes.values() if isinstance(whole, Sharded)]
        check_supported(self.shards, device.torch_device, options)
        # Units that `resident` chose.
        self.chosen = choose_residents(cut, self.slots, 0 if options.resident == "auto" else options.resident)
        self.streamed = [part for part in cut if not part.resident and part not in self.chosen]
        self.kept = [part for part in cut if part not in self.streamed]
        casts_to = None if self._has_masters else self._wire
        self._narrow = casts_of(module, casts_to, device.torch_device.type)
        self._narrow &= {id(param) for part in self.streamed for _, param in part.params}
        # Raises if the budget does not suffice, before anything is moved.
        first_window(options.window, options.memory_budget, sizes(cut, self.travels_as, True), device.is_host)

    def travels_as(self, param: nn.Parameter) -> torch.dtype:
        """Return the type in which a parameter is copied to the device, unless it is file-backed."""
        is_narrow = param.dtype is torch.float32 if self._has_masters else id(param) in self._narrow
        return self._wire if self._wire is not None and is_narrow else param.dtype

    def weight(self, name: str, tensor: Any, place: Any, in_a_group: bool) -> Weight:
        """Make a weight of a parameter, or of one of the tensors of which a parameter consists.

        Args:
            name: Its name.
            tensor: The parameter or tensor.
            place: Where in a file its bytes are; None: in memory.
            in_a_group: Whether several devices have the same shards.
        """
        whole = self._wholes.get(id(tensor))
        if isinstance(whole, Sharded):
            return ShardWeight(whole, self.slots[whole.parameter], in_a_group)
        dtype = self.travels_as(tensor) if place is None else tensor.dtype
        made = Part(name, tensor) if whole else Weight(name, tensor, self.slots[tensor], dtype, self._has_masters)
        made.place = place
        return made

    def too_many_residents(self) -> DeviceMemoryError:
        """Make the error for chosen units that do not fit on the device; it suggests a number that fits."""
        totals = list(itertools.accumulate(part.nbytes for part in self.chosen))
        fewer = min(sum(total <= self._free for total in totals), len(totals) - 1)
        return DeviceMemoryError(
            f"{len(totals)} resident units of {format_bytes(totals[-1], up=True)} do not fit on"
            f" {self._device.torch_device}, where {format_bytes(self._free)} were free: set resident={fewer}, or fewer"
            " for gradients and optimizer state"
        )


def slots(root: nn.Module) -> dict[nn.Parameter, list[Slot]]:
    """List where the tree's modules register each parameter: a tied one in several places."""
    found: dict[nn.Parameter, list[Slot]] = {}
    for module in root.modules():
        for key, param in module._parameters.items():
            if param is not None:
                found.setdefault(param, []).append((module._parameters, key))
    return found


# ---- resident units


def choose_residents(
    cut: Sequence[FoundUnit], slots: Mapping[Any, Collection[Any]], count: int | Bytes
) -> list[FoundUnit]:
    """Choose the units that stay on the device: ``count`` of them, or as many as fit into so many bytes.

    Units with tied weights come first: ``slots`` has several places in modules for these.
    """
    tied = {id(param) for param, places in slots.items() if len(places) > 1}
    order = [part for part in cut if not part.resident]
    order.sort(key=lambda part: not any(id(param) in tied for _, param in part.params))
    if isinstance(count, Bytes):
        shards = [whole for part in order for whole in part.wholes if isinstance(whole, Sharded)]
        largest = {id(whole.shard): whole.largest_numel() for whole in shards}  # on any rank: all choose alike
        numels = [[(p, largest.get(id(p), p.numel())) for _, p in part.params] for part in order]
        nbytes = [sum((COPIES if p.requires_grad else 1) * p.element_size() * n for p, n in each) for each in numels]
        count = sum(total <= int(count) for total in itertools.accumulate(nbytes))
    return order[:count]


def sizes(
    units: Sequence[FoundUnit], travels_as: Callable[[nn.Parameter], torch.dtype], training: bool
) -> list[UnitNumbers]:
    """Return the bytes that each unit takes on the device: of its weights and, with ``training``, of its gradients."""

    def nbytes(parameters: Iterable[nn.Parameter]) -> int:
        """Return the bytes of parameters in the types in which they travel."""
        return sum(aligned(p.numel() * travels_as(p).itemsize) for p in parameters)

    def of(unit: FoundUnit) -> UnitNumbers:
        """Return the bytes and counts of one unit."""
        weights = [p for _, p in unit.params]
        trained = [p for p in weights if p.requires_grad and training]
        cast = [p for p in trained if travels_as(p) is not p.dtype]
        elements, cast_elements = (sum(p.numel() for p in some) for some in (trained, cast))
        return UnitNumbers(
            unit.name, nbytes(weights), nbytes(trained), elements, resident=unit.resident, cast=cast_elements
        )

    return list(map(of, units))


# ---- values and moves


def check_not_streamed(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Raise if another handle streams one of these parameters."""
    for name, param in named:
        if parameters.unit_of(param) is not None:
            raise ExactnessError(
                f"{name} is in another stream already: a weight can be in one at a time; close() the other handle,"
                " or stream one module that contains both"
            )


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
        along = tensors_in(vars(parameter)) if _moves_by_itself(parameter) else []
        if any(one.device.type == "cpu" and not isinstance(one, nn.Parameter) for one in along):
            raise UnsupportedError(
                f"{name} is a {type(parameter).__name__}, which takes other tensors along where it is moved, such as"
                " the scales of its values, and only its own bytes are streamed: quantise with weights that say which"
                " tensors they consist of (torchao), or leave them unquantised"
            )


def _moves_by_itself(parameter: nn.Parameter) -> bool:
    """Whether a parameter's class overrides ``to``, and its values do not lie in several tensors."""
    return type(parameter).to is not Tensor.to and not consists_of_tensors(parameter)


def check_values(module: nn.Module) -> None:
    """Raise for a parameter or buffer on the meta device: it has no values, and a plain run cannot move it either."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta:
            raise UnsupportedError(
                f"{name} is on the meta device, so it has no values, and none are made up for it: load it with "
                "load_state_dict(..., assign=True), since without assign=True nothing is loaded into it, or make the "
                "model outside of init_empty_weights(), without low_cpu_mem_usage=True"
            )


def casts_of(module: nn.Module, dtype: torch.dtype | None, device: str = "cuda") -> set[int]:
    """Return the ids of parameters that autocast to ``dtype`` casts wherever their modules use them.

    Fused kernels get uncast weights, except on CUDA, where torch does not use these kernels under autocast.
    """
    casts: set[int] = set()
    others: set[int] = set()
    for owner in module.modules() if dtype is not None else ():
        if isinstance(owner, FUSED) and device != "cuda":
            others.update(map(id, owner.parameters()))
        for name, param in owner._parameters.items():
            if param is not None:
                is_cast = type(owner) in CAST_IN and name in ("weight", "bias") and param.dtype == torch.float32
                (casts if is_cast else others).add(id(param))
    return casts - others
