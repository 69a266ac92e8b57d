"""A module tree, and what of it has to be so while it is streamed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..errors import PartitionError
from ..memory.partition import forward_of

SUBSTITUTE = "a tensor that is no parameter"  # stands where one is registered


class ModuleFingerprint:
    """A module's parameters and forwards, as they are now."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._structure = _structure(module)
        self._identities = _identities(module)
        self._forwards = {type(child): forward_of(type(child)) for child in module.modules()}

    def has_changed(self, any_replaced: bool) -> bool:
        """Whether parameters were replaced, swapped, added, removed or retyped since (not by ``functional_call`` for a
        call), or a class was given another forward; ``any_moved``: one has other memory."""
        if any(forward_of(kind) is not forward for kind, forward in self._forwards.items()):
            return True
        if not any_replaced and self._identities == _identities(self._module):
            return False
        before, now = self._structure, _structure(self._module)
        return len(before) != len(now) or any(b != n and n is not SUBSTITUTE for b, n in zip(before, now, strict=True))


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Buffers live on the device; one that is registered twice becomes two, as by ``module.to()``."""
    for child in module.modules():
        for name, buffer in child._buffers.items():
            if buffer is not None and buffer.device != device:
                with torch.inference_mode(False):
                    child._buffers[name] = buffer.to(device)


def _identities(module: nn.Module) -> list[Any]:
    """Which parameters stand where: nearly always the same ones, so this is asked first."""
    found: list[Any] = []
    children: list[nn.Module | None] = [module]
    for child in children:  # which grows meanwhile
        if child is not None:
            own = child.__dict__
            if own["_parameters"]:
                found += own["_parameters"]
                found += map(id, own["_parameters"].values())
                found += map(type, own["_parameters"].values())  # which torch exchanges where it swaps two tensors
            children += own["_modules"].values()
    return found


def _structure(module: nn.Module) -> list[Any]:
    """What tells whether the table of slots still holds."""

    def described(name: str, p: Any) -> Any:
        if p is None:
            return name
        return (name, id(p), type(p), p.shape, p.dtype) if isinstance(p, nn.Parameter) else SUBSTITUTE

    return [described(name, p) for child in module.modules() for name, p in child._parameters.items()]


def materialize(module: nn.Module) -> None:
    """Gives parameters on the meta device their memory, on the host, and their modules' own initial values.

    They stay the objects they are, so what is tied stays tied.
    """
    for name, child in module.named_modules():
        own = [tensor for tensor in (*child._parameters.values(), *child._buffers.values()) if tensor is not None]
        if not any(tensor.is_meta for tensor in own):
            continue
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
