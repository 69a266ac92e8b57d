"""What ``torch.compile`` leaves alone: a frame that it compiles ends its graph at a call of these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch._C._dynamo import eval_frame

F = TypeVar("F", bound=Callable[..., Any])

_SKIP = eval_frame._FrameAction.SKIP


def never_compiled(function: F) -> F:
    """Neither the function nor what it calls is compiled."""
    return cast(F, torch.compiler.disable(function))  # type: ignore[no-untyped-call]


def never_compiled_hook(function: F) -> F:
    """The same for what only autograd calls, once for each tensor: without a wrapper around each call."""
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(_SKIP, _SKIP))
    return function


def not_compiled_itself(function: F) -> F:
    """The function is not compiled; what it calls may be."""
    return cast(F, torch.compiler.disable(function, recursive=False))  # type: ignore[no-untyped-call]


def compiles_calls() -> bool:
    """Whether functions that are called from here are compiled; asked in one that is not compiled itself."""
    return eval_frame.get_eval_frame_callback() is not None
