"""What ``torch.compile`` leaves alone: a frame that it compiles ends its graph at a call of these. And who is told when
it begins."""

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
    """Neither the function nor what it calls is compiled."""
    return cast(F, torch.compiler.disable(function))  # type: ignore[no-untyped-call]


def never_compiled_hook(function: F) -> F:
    """The same without a wrapper around each call, for what no compiled frame calls: autograd does, for each tensor."""
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(_SKIP, _SKIP))
    return function


def not_compiled_itself(function: F) -> F:
    """The function is not compiled; what it calls may be."""
    return cast(F, torch.compiler.disable(function, recursive=False))  # type: ignore[no-untyped-call]


def compiles_calls() -> bool:
    """Whether functions that are called from here are compiled; asked in one that is not compiled itself."""
    return eval_frame.get_eval_frame_callback() is not None


class CompilationListener(Protocol):
    """Who wants to know of compilations."""

    def compilation_begins(self) -> None: ...


_listeners: weakref.WeakSet[CompilationListener] = weakref.WeakSet()


def tell_of_compilations(listener: CompilationListener) -> None:
    """Calls it from now on, before a frame is looked at that is to be compiled."""
    _listeners.add(listener)
    if _tell not in callback_handler.start_callbacks:  # or not any more: who resets the compiler clears them
        callback_handler.register_start_callback(_tell)


def _tell(compilation: Any) -> None:
    if compilation.callback_trigger is CallbackTrigger.DYNAMO:  # else a graph is, that was made of one
        for listener in list(_listeners):
            listener.compilation_begins()
