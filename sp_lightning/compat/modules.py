"""Private names of modules and optimizers, and of utilities in Python.

Tried with torch 2.11 and 2.15.
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks as HOOKS_AFTER_EVERY_STEP
from torch.optim.optimizer import _global_optimizer_pre_hooks as HOOKS_BEFORE_EVERY_STEP
from torch.utils._contextlib import context_decorator as context_decorator
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only

from .tensors import consists_of_tensors, is_fully_sharded

__all__ = ["HOOKS_AFTER_EVERY_STEP", "HOOKS_BEFORE_EVERY_STEP", "context_decorator", "tree_leaves", "tree_map_only"]


# An attribute of the wrapper of ``optimizer.step`` in which learning rate schedulers count. Without it no optimizer
# with a scheduler would step beside backward.
COUNTS_STEPS = "_wrapped_by_lr_sched"

# The method by which ``module.to()`` and its relatives convert a module's tensors. Without it weights that are streamed
# would be copied to the device and back, and gradients be left there, where a plain run does nothing.
CONVERT = "_apply"


# Not None if the module was compiled in place. Without it its code would read weights that travel in autocast's type.
_compiled_call: Callable[[nn.Module], Any] = operator.attrgetter("_compiled_call_impl")


def is_compiled(module: nn.Module) -> bool:
    """Whether a module, or one in it, was compiled in place."""
    return any(_compiled_call(child) is not None for child in module.modules())


def convert_tensors(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Convert a module's parameters, buffers and other tensors by a function, in the way of ``module.to``.

    A parameter that consists of tensors stays as it is: torch would make it anew, a DTensor even with the same bytes.
    """
    modules = [] if any(map(is_fully_sharded, module.modules())) else module.modules()  # which looks for its own
    left = []
    for own in [child._parameters for child in modules]:
        apart = {name: one for name, one in own.items() if one is not None and consists_of_tensors(one)}
        if apart:
            left.append((own, [*own], apart))
            for name in apart:
                del own[name]
    try:
        getattr(module, CONVERT)(function)
    finally:
        for own, names, apart in left:
            own.update(apart)
            for name in names:
                own[name] = own.pop(name)  # in their order, which optimizers number them by


def converts_more(module: nn.Module) -> bool:
    """Whether a module's class converts more than parameters and buffers, as metrics do."""
    return not getattr(type(module), CONVERT).__module__.startswith("torch.")


# Without it no module could cut its layers in `configure_model`.
def set_device_mesh(module: Any, mesh: Any) -> None:
    """Give a module the mesh that its `configure_model` reads."""
    module._device_mesh = mesh


DISPATCHED = "_hf_hook"  # accelerate's mark of a module that it has dispatched


def accelerate_precision() -> Any:
    """Return the mixed precision that accelerate was set up for: "bf16", "fp16", "no" or None."""
    return importlib.import_module("accelerate.state").AcceleratorState._shared_state.get("_mixed_precision")
