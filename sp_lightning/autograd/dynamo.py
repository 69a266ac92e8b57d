"""Functions that ``torch.compile`` leaves alone, and listeners for its compilations.

A frame that is compiled ends its graph at a call of such a function.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

import torch
from torch._C._dynamo import eval_frame
from torch._dynamo.callback import CallbackTrigger, callback_handler

F = TypeVar("F", bound=Callable[..., Any])

_SKIP = eval_frame._FrameAction.SKIP


def never_compiled(function: F) -> F:
    """Keep a function, and all that it calls, from being compiled."""
    return cast(F, torch.compiler.disable(function))  # type: ignore[no-untyped-call]


def never_compiled_hook(function: F) -> F:
    """Keep a function from being compiled, as ``never_compiled`` does, but without a wrapper around each call.

    For functions that no compiled frame calls: hooks that autograd calls for each tensor.
    """
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(_SKIP, _SKIP))
    return function


def not_compiled_itself(function: F) -> F:
    """Keep a function from being compiled; what it calls may be compiled."""
    return cast(F, torch.compiler.disable(function, recursive=False))  # type: ignore[no-untyped-call]


def compiles_calls() -> bool:
    """Whether functions that the caller calls are compiled; for callers that are not compiled themselves."""
    return eval_frame.get_eval_frame_callback() is not None


class CompilationListener(Protocol):
    """An object that is called before frames are compiled."""

    def compilation_begins(self) -> None: ...


_listeners: weakref.WeakSet[CompilationListener] = weakref.WeakSet()


def listen_to_compilations(listener: CompilationListener) -> None:
    """Call a listener, from now on, before each frame that is compiled is traced. Safe twice."""
    _listeners.add(listener)
    if _notify not in callback_handler.start_callbacks:  # a reset of the compiler clears them
        callback_handler.register_start_callback(_notify)


def _notify(compilation: Any) -> None:
    if compilation.callback_trigger is CallbackTrigger.DYNAMO:  # the others compile graphs, which were made of frames
        for listener in list(_listeners):
            listener.compilation_begins()
