"""``zero_grad`` right after a deferred step.

1. torch's ``zero_grad`` asks whether there is a gradient, which waits for the step, and then takes it away. While a
   step is deferred, gradients of streamed parameters are taken away first, and nothing waits: the step refers to the
   gradients that it reads (watched_parameters.py, Rule 5). Their memory is free once each unit was stepped.
2. Gradients that stay, and are filled with zeros (``set_to_none=False``), are the step's until it is done: that waits.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..compat.dynamo import never_compiled
from ..compat.patches import ZERO_GRAD
from ..memory.watched_parameters import is_watched

OF_MODULE, OF_OPTIMIZER = ZERO_GRAD


@never_compiled
@functools.wraps(OF_MODULE.original)
def _of_module(self: nn.Module, set_to_none: bool = True) -> None:
    if set_to_none:
        _take_away(self.parameters())
    OF_MODULE.original(self, set_to_none)


@never_compiled
@functools.wraps(OF_OPTIMIZER.original)
def _of_optimizer(self: Optimizer, set_to_none: bool = True) -> None:
    if set_to_none:
        _take_away(parameter for group in self.param_groups for parameter in group["params"])
    OF_OPTIMIZER.original(self, set_to_none)


def _take_away(parameters: Iterable[Any]) -> None:
    for parameter in parameters:
        if is_watched(parameter):
            parameter.grad = None


def begin() -> None:
    """Note that a step is deferred."""
    OF_MODULE.install(_of_module)
    OF_OPTIMIZER.install(_of_optimizer)


def end() -> None:
    """Note that a deferred step is done."""
    OF_MODULE.remove()
    OF_OPTIMIZER.remove()
