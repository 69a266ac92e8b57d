"""Functions that ``torch.compile`` leaves alone, and what is known of its compilations.

A frame that is compiled ends its graph at a call of a function that is never compiled. Private names (tried with torch
2.11 and 2.15): ``torch._C._dynamo.eval_frame`` and ``torch._guards.CompileContext``. Without them autograd's hooks
would be compiled, at a cost for each new shape, or each of their calls would take a wrapper; code that is compiled
inside a unit would read weights that travel in autocast's type unnoticed; and compilers would find gradients on the
host at weights on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch._C._dynamo import eval_frame
from torch._dynamo import graph_break as graph_break  # ends a graph where a compiler traces the call
from torch._dynamo.exc import Unsupported as Unsupported  # an error of fullgraph=True
from torch._guards import CompileContext

F = TypeVar("F", bound=Callable[..., Any])

_SKIP, _DEFAULT = eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT


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
    """Keep a function from being compiled, without a wrapper around each call; what it calls may be compiled.

    A graph that a compiler traces ends at a call of the function.
    """
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(_SKIP, _DEFAULT))
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_recursive = False  # type: ignore[attr-defined]
    return function


# Not None while a compiler runs on this thread, which looks at tensors to compile code for them.
compilation: Callable[[], Any] = CompileContext.current_compile_id

# Not None if functions that the caller calls would be compiled. The caller itself must not be compiled.
compiling_callback: Callable[[], Any] = eval_frame.get_eval_frame_callback


def compiling_as_here(function: F) -> F:
    """Wrap a function so that ``torch.compile`` compiles its calls, on any thread, as it would the caller's."""
    callback = compiling_callback()
    if callback is None:
        return function

    def compiling(*args: Any, **kwargs: Any) -> Any:
        """Call the function with the compiler that was in effect when it was wrapped."""
        before = eval_frame.set_eval_frame(callback)
        try:
            return function(*args, **kwargs)
        finally:
            eval_frame.set_eval_frame(before)

    return cast(F, compiling)
