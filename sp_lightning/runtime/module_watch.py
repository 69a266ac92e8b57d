"""A module's tree while it is streamed: whether it changed, where its buffers are, whether it has memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..errors import PartitionError
from ..memory.partition import forward_of

SUBSTITUTE = "a tensor that is no parameter"  # the mark of a slot where something else stands for a parameter


class ModuleFingerprint:
    """The parameters and forwards that a module has when the fingerprint is made."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._structure = _structure(module)
        self._identities = _identities(module)
        self._forwards = {type(child): forward_of(type(child)) for child in module.modules()}

    def has_changed(self, any_replaced: bool) -> bool:
        """Return whether parameters were replaced, swapped, added, removed or retyped, or a class has another forward.

        Tensors that ``functional_call`` puts in their places for a call do not count. ``any_replaced`` says that the
        data of some parameter was replaced.
        """
        if any(forward_of(kind) is not forward for kind, forward in self._forwards.items()):
            return True
        if not any_replaced and self._identities == _identities(self._module):
            return False
        before, now = self._structure, _structure(self._module)
        return len(before) != len(now) or any(b != n and n is not SUBSTITUTE for b, n in zip(before, now, strict=True))


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Move a module's buffers to this device; one that is registered twice becomes two, as in ``module.to()``."""
    for child in module.modules():
        for name, buffer in child._buffers.items():
            if buffer is not None and buffer.device != device:
                with torch.inference_mode(False):
                    child._buffers[name] = buffer.to(device)


def _identities(module: nn.Module) -> list[Any]:
    """List which parameters are registered where: a quick check, since they are nearly always the same."""
    found: list[Any] = []
    children: list[nn.Module | None] = [module]
    for child in children:  # the list grows during the loop
        if child is not None:
            own = child.__dict__
            if own["_parameters"]:
                found += own["_parameters"]
                found += map(id, own["_parameters"].values())
                found += map(type, own["_parameters"].values())  # exchanged when torch swaps two tensors
            children += own["_modules"].values()
    return found


def _structure(module: nn.Module) -> list[Any]:
    """Describe all registered parameters, to tell whether the table of slots is still right."""

    def described(name: str, p: Any) -> Any:
        if p is None:
            return name
        return (name, id(p), type(p), p.shape, p.dtype) if isinstance(p, nn.Parameter) else SUBSTITUTE

    return [described(name, p) for child in module.modules() for name, p in child._parameters.items()]


def materialize(module: nn.Module) -> None:
    """Give parameters and buffers on the meta device host memory and their modules' own initial values.

    They stay the same objects, so tied parameters stay tied.
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
