"""Private names of autograd: the running backward, its nodes, saved-tensor hooks and version counters.

Tried with torch 2.11 and 2.15. Functions in C are bound as they are, so that using one costs no call in Python.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

# Without these a read of a weight in backward could not be told from one in forward, nor two backward passes from each
# other; and nothing would know when a backward ends.
graph_task: Callable[[], int] = torch._C._current_graph_task_id  # the number of the running backward; -1: none runs
current_node: Callable[[], Any] = torch._C._current_autograd_node
at_end_of_backward: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback

# Without these ``autograd.grad`` of some weights would accumulate gradients of others, hooks on weights would miss
# gradients, and forward-mode tangents be dropped.
will_execute: Callable[[Any], bool] = torch._C._will_engine_execute_node
tensor_hooks: Callable[[torch.Tensor], Any] = operator.attrgetter("_backward_hooks")
HOOKS_AFTER_ACCUMULATION = "_post_accumulate_grad_hooks"  # an attribute that tensors have once there are any
forward_level: Callable[[], int] = functools.partial(getattr, forward_ad, "_current_level")

# Without it all gradients would pile up on the device until backward ends (autograd/bridge.py, Rule 2).
set_sequence_number: Callable[[Any, int], None] = torch._C._FunctionBase._set_sequence_nr  # type: ignore[attr-defined]

# Without these nothing that autograd saves could leave the device, or come back for backward.
_hooks: Any = torch._C._autograd
top_hooks: Callable[[bool], Any] = _hooks._top_saved_tensors_default_hooks
push_hooks: Callable[[Any, Any], None] = _hooks._push_saved_tensors_default_hooks
pop_hooks: Callable[[], None] = _hooks._pop_saved_tensors_default_hooks
admits_hooks: Callable[[], bool] = _hooks._saved_tensors_hooks_is_enabled

# Without these copies of a weight's own bytes would count as writes to it, and backward would raise an error.
set_versions: Callable[[tuple[torch.Tensor, ...], tuple[int, ...]], None] = _hooks._unsafe_set_version_counter
preserving_version: Any = torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]
