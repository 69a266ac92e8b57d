"""Private names of modules and optimizers, and of utilities in Python.

Tried with torch 2.11 and 2.15.
"""

from __future__ import annotations

import importlib
import inspect
import operator
import os
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks as HOOKS_AFTER_EVERY_STEP
from torch.optim.optimizer import _global_optimizer_pre_hooks as HOOKS_BEFORE_EVERY_STEP
from torch.utils._contextlib import context_decorator as context_decorator
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only

from .tensors import consists_of_tensors, is_fully_sharded

__all__ = ["HOOKS_AFTER_EVERY_STEP", "HOOKS_BEFORE_EVERY_STEP", "context_decorator", "tree_leaves", "tree_map_only"]

# Attributes of modules and weights with hooks. Without them a hook that a forward registers would be there twice after
# the second forward of a recomputation.
HOOKS_OF_MODULE = "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"
HOOKS_OF_WEIGHT = "_backward_hooks", "_post_accumulate_grad_hooks"

# Attributes of optimizers with hooks. Without them units would be stepped in backward although a hook of the user's
# wants to see the gradients first, or the weights afterwards.
HOOKS_BEFORE_STEP, HOOKS_AFTER_STEP = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"

# The same of loads of state. Without it optimizers that wrap others could not train with state on a disk: such classes
# often never call the constructor of the base class, and make the hooks of steps themselves, but not these.
HOOKS_AFTER_LOADING = "_optimizer_load_state_dict_post_hooks"

# An attribute of the wrapper of ``optimizer.step`` in which learning rate schedulers count. Without it no optimizer
# with a scheduler would step beside backward.
COUNTS_STEPS = "_wrapped_by_lr_sched"

# The method by which ``module.to()`` and its relatives convert a module's tensors. Without it weights that are streamed
# would be copied to the device and back, and gradients be left there, where a plain run does nothing.
CONVERT = "_apply"

# The method of any object that tells what its copies and pickles are made from. Without it those of a module would have
# what is of ours in the places of its methods.
COPY = "__reduce_ex__"

# What a call of a module calls, hooks included. Without it a model whose ``forward`` was replaced while it is streamed
# would run outside of any step.
CALL = "_call_impl"

# The code of torch's ``zero_grad``, of modules and of optimizers, which asks whether there is a gradient before it
# takes it away. Without it loops that call ``zero_grad`` after ``step`` would wait for the whole step. It is recognised
# and not replaced: a function in its place would hide what others wrapped around it.
ZERO_GRADS = {inspect.unwrap(kind.zero_grad).__code__ for kind in (nn.Module, Optimizer)}

# The code of torch's clipping by norm, with that of the list that it makes, which asks for gradients only to have their
# norm computed and to have them multiplied, both by functions that are replaced while a module is streamed.
_clip = inspect.unwrap(torch.nn.utils.clip_grad_norm_).__code__
CLIPS = {_clip, *filter(inspect.iscode, _clip.co_consts)}

# The code of what torch makes of each optimizer's ``step``, which calls hooks. Without it an optimizer whose step
# raised would count as stepping, or one that calls another one's step as done. Hooks would run for parts of a step, on
# any thread, where other code has wrapped the class's step once more.
HOOKED_STEP = operator.attrgetter("__code__")(Optimizer.profile_hook_step(Optimizer.step))

# By what a module's state is put together, and the attribute with hooks that change it. Without them a disk would need
# room for frozen weights that checkpoints do not have.
MAKES_STATE, HOOKS_OF_STATE = ("state_dict", "_save_to_state_dict"), "_state_dict_hooks"

# Not None if the module was compiled in place. Without it its code would read weights that travel in autocast's type.
_compiled_call: Callable[[nn.Module], Any] = operator.attrgetter("_compiled_call_impl")


def is_compiled(module: nn.Module) -> bool:
    """Whether a module, or one in it, was compiled in place."""
    return any(_compiled_call(child) is not None for child in module.modules())


def grad_is_taken_away() -> bool:
    """Whether the caller of the calling function is a ``zero_grad`` that sets gradients to None."""
    frame = sys._getframe(2)
    return frame.f_code in ZERO_GRADS and bool(frame.f_locals["set_to_none"])


def looks_at_no_value() -> bool:
    """Whether the caller of the calling function is a function of torch's that looks at no number of a gradient."""
    frame = sys._getframe(2)
    return frame.f_code in CLIPS or (frame.f_code in ZERO_GRADS and bool(frame.f_locals["set_to_none"]))


def running_steps() -> list[Optimizer]:
    """List the optimizers whose steps the calling thread runs, one inside the other, the innermost first."""
    found, frame = [], sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is HOOKED_STEP:
            found.append(frame.f_locals["self"])
    return found


def step_without_hooks(kind: type[Optimizer]) -> Callable[[Any], Any]:
    """Return the step of a class without torch's hooks, and without what other code has wrapped around these."""
    step: Any = kind.step
    while step.__code__ is not HOOKED_STEP:
        step = step.__wrapped__
    found: Callable[[Any], Any] = step.__wrapped__
    return found


def run_first(optimizer: Optimizer, hook: torch.utils.hooks.RemovableHandle) -> None:
    """Have a hook after the optimizer's step run before the user's, which read the arguments that it puts back."""
    getattr(optimizer, HOOKS_AFTER_STEP).move_to_end(hook.id, last=False)


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


_TORCH = os.path.dirname(torch.__file__) + os.sep
_DISTRIBUTED = os.path.join(_TORCH, "distributed", "")
_SHUTDOWN = threading._shutdown.__code__  # type: ignore[attr-defined]


def calls_of_distributed() -> set[tuple[int, int, int]]:
    """Return the calls of torch.distributed that threads are in, each by its thread, frame and place in it."""
    found = set()
    for thread, frame in sys._current_frames().items():
        inner: FrameType | None = frame
        while inner is not None and inner.f_code.co_filename.startswith(_TORCH):
            if inner.f_code.co_filename.startswith(_DISTRIBUTED):
                found.add((thread, id(inner), inner.f_lasti))
                break
            inner = inner.f_back
    return found


def is_ending() -> bool:
    """Whether the main thread has ended its work: the interpreter waits for the other ones, and ends then."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    return frame is None or frame.f_code is _SHUTDOWN


DISPATCHED = "_hf_hook"  # accelerate's mark of a module that it has dispatched


def accelerate_precision() -> Any:
    """Return the mixed precision that accelerate was set up for: "bf16", "fp16", "no" or None."""
    return importlib.import_module("accelerate.state").AcceleratorState._shared_state.get("_mixed_precision")
