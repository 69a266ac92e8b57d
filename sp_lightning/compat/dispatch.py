"""Private names of torch's dispatch: of functions in Python, of operators in C++, and of transforms.

Tried with torch 2.11 and 2.15. Functions in C are bound as they are, so that using one costs no call in Python.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes

# Without these our own work on weights would be taken for the user's: it would borrow them, and wait for itself.
without_dispatch = torch._C.DisableTorchFunctionSubclass  # of functions by subclasses of Tensor
without_function_modes = torch._C.DisableTorchFunction  # nor by modes
never_dispatched = torch._C._disabled_torch_function_impl  # the ``__torch_function__`` of a class that takes no part
dispatches: Callable[[], bool] = torch._C._is_torch_function_enabled

# Without these a weight would travel in autocast's type, or a unit be recomputed, where code observes operators or
# transforms them: other results of vmap and grad, or an error.
function_mode_count: Callable[[], int] = torch._C._len_torch_function_stack
dispatch_mode_count: Callable[[], int] = torch._C._len_torch_dispatch_stack
in_transform: Callable[[], bool] = torch._C._are_functorch_transforms_active
outside_transforms = temporarily_clear_interpreter_stack
is_batched_gradient: Callable[[torch.Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor

# Not None while ``torch.jit.trace`` traces. Without it a graph would have stand-ins for its weights.
tracing_state: Callable[[], Any] = torch._C._get_tracing_state

# Without these nothing could be planned: a dry run observes each operator, looks at what it writes to, and casts as a
# device that is absent would.
without_dispatch_modes = _disable_current_modes
schema_of: Callable[[Any], Any] = operator.attrgetter("_schema")
operator_of: Callable[[Any], Any] = operator.attrgetter("_overloadpacket")  # without its overload
key_set = torch._C.DispatchKeySet
key_excluded = torch._C._ExcludeDispatchKeyGuard
key_included = torch._C._IncludeDispatchKeyGuard
is_key_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
set_key_excluded = torch._C._dispatch_tls_set_dispatch_key_excluded
operators_with_key = torch._C._dispatch_get_registrations_for_dispatch_key


def dispatch_key(name: str) -> Any:
    """Return the dispatch key of this name."""
    return getattr(torch._C.DispatchKey, name)
