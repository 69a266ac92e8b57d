"""Private names of torch, each with what would be lost without it. Tried with torch 2.11 and 2.14.

Functions in C are bound as they are, so that using one costs no call in Python.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only

# Without these our own work on weights would be taken for the user's, and wait for itself.
without_dispatch = torch._C.DisableTorchFunctionSubclass  # turns off __torch_function__ of subclasses of Tensor
without_function_modes = torch._C.DisableTorchFunction  # turns off that of modes, too

# Without these a selective checkpoint would count our copies among the operators of the user's code.
dispatch_mode_count: Callable[[], int] = torch._C._len_torch_dispatch_stack
without_dispatch_modes = _disable_current_modes

# Without these a visit in backward could not be told from one in forward, nor the gradients of two backwards apart.
graph_task: Callable[[], int] = torch._C._current_graph_task_id  # -1: no backward runs on this thread
at_end_of_backward: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback

# Without it two sets of hooks on saved tensors could not be chained: ours, and a checkpoint of the user's.
top_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks

# Without it a saved tensor could not be told to lie in a unit's memory on the device.
storage_id: Callable[[torch.UntypedStorage], int] = torch._C.StorageBase._cdata.__get__  # type: ignore[attr-defined]

# Makes each access to a storage's bytes an error with this message. Without it a forked process that reads a locked
# slab, which it does not have, would end.
forbid_access: Callable[[int, str], None] = torch._C._set_storage_data_ptr_access_error_msg

# Without these, packing gradients and taking norms would launch a kernel for each tensor.
copy_all = torch._foreach_copy_
norms_of_all = torch._foreach_norm
multiply_all = torch._foreach_mul_
unscale_all = torch._amp_foreach_non_finite_check_and_unscale_

# Without it nothing would tell on which devices torch's optimizers step lists of tensors where the user chose nothing.
devices_with_lists: Callable[[], list[str]] = _get_foreach_kernels_supported_devices

# Without it no tensor could answer for bytes that are still on their way.
as_subclass: Callable[..., Any] = Tensor._make_subclass

# Without it hf/ would have to find out by itself what the arguments of `module.to` mean.
parse_to: Callable[..., tuple[torch.device | None, torch.dtype | None, bool, Any]] = torch._C._nn._parse_to

# Attributes of tensors that can be read while the bytes have not arrived.
GRADIENT_HOOKS, HOOKS_AFTER_ACCUMULATION = "_backward_hooks", "_post_accumulate_grad_hooks"
hooks_of_gradient: Callable[[Tensor], Any] = operator.attrgetter(GRADIENT_HOOKS)  # a dict, or None
hooks_after_accumulation: Callable[[Tensor], Any] = operator.attrgetter(HOOKS_AFTER_ACCUMULATION)


# `module.compile()` puts its callable into this slot, which `module(...)` calls. Without it a visit would not enclose
# the hooks of the module and checkpoints in its class's `__call__`; copies and pickles of the module leave it out.
call_slot: Callable[[nn.Module], Any] = operator.attrgetter("_compiled_call_impl")  # None: a call runs torch's own code


def set_call_slot(module: nn.Module, call: Any) -> None:
    """Set the function that ``module(...)`` runs; None: torch's own code."""
    if call is None:
        vars(module).pop("_compiled_call_impl", None)  # the class has None
    else:
        vars(module)["_compiled_call_impl"] = call  # not by `setattr`, which a wrapper may hand on


def plain_call(module: nn.Module) -> Callable[..., Any]:
    """Return torch's own code for ``module(...)``, which calls hooks and the module's forward."""
    return module._call_impl


# An attribute of the wrapper of ``optimizer.step`` in which learning rate schedulers count. Without it no optimizer
# with a scheduler would step beside backward.
COUNTS_STEPS = "_wrapped_by_lr_sched"

# Without it each visit under ``window="auto"`` would take ten times as long to read the device's memory.
memory_figures: Callable[[int], dict[str, Any]] = torch._C._accelerator_getDeviceStats


def openmp_parallel() -> int | None:
    """Return the address of the function by which torch's OpenMP runs a function on its threads, or None.

    Without it compiled steps would need a runtime of their own, whose threads would compete with torch's for the cores.
    """
    function = getattr(ctypes.CDLL(torch._C.__file__), "GOMP_parallel", None)
    return None if function is None else ctypes.cast(function, ctypes.c_void_p).value


def store_within(name: str) -> Any:
    """Return a new connection to torch.distributed's default store, all of whose keys begin with ``name``."""
    distributed: Any = torch.distributed
    return distributed.PrefixStore(name, distributed.distributed_c10d._get_default_store()).clone()


# ---- without data

# Without these nothing could be planned: a trace looks at each operator, and at what it writes to.
schema_of: Callable[[Any], Any] = operator.attrgetter("_schema")
operator_of: Callable[[Any], Any] = operator.attrgetter("_overloadpacket")  # the operator of an overload


def fake_tensor(mode: Any, meta: Tensor) -> Tensor:
    """Make a fake tensor, without data, on the CPU, in the shape and type of a meta tensor."""
    from torch._subclasses.fake_tensor import FakeTensor

    return FakeTensor(mode, meta, torch.device("cpu"))


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor is a fake one, without data."""
    return hasattr(tensor, "fake_mode")


def fake_mode() -> Any:
    """Make a mode in which tensors are fake, without data; tensors with data may be arguments."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def needs_values() -> tuple[type[Exception], ...]:
    """Return the errors that fake tensors raise where the result of an operator depends on values."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    return DataDependentOutputException, DynamicOutputShapeException
