"""Functions that ``torch.compile`` leaves alone, and what is known of its compilations.

A frame that is compiled ends its graph at a call of a function that is never compiled. Private names (tried with torch
2.11 and 2.15): ``torch._C._dynamo.eval_frame``, ``torch._guards.CompileContext``, ``compile_lock`` and
``_is_compiling_flag``. Without them autograd's hooks would be compiled, at a cost for each new shape, or each of their
calls would take a wrapper; code that is compiled inside a unit would read weights that travel in autocast's type
unnoticed; compilers would find gradients on the host at weights on the device; and optimizers would step with other
last bits while another thread compiles.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any, TypeVar, cast

import torch
from torch._C._dynamo import eval_frame
from torch._dynamo.convert_frame import compile_lock as compile_lock  # held by a thread while it compiles
from torch._dynamo.exc import Unsupported as Unsupported  # an error of fullgraph=True
from torch._guards import CompileContext

F = TypeVar("F", bound=Callable[..., Any])

_SKIP, _DEFAULT = eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT


def never_compiled(function: F) -> F:
    """Keep a function, and all that it calls, from being compiled."""
    return cast(F, torch.compiler.disable(function))  # type: ignore[no-untyped-call]


def never_compiled_hook(function: F) -> F:
    """Keep a function from being compiled, as ``never_compiled`` does, but without a wrapper around each call.

    A graph that a compiler traces ends at a call of the function.
    """
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(_SKIP, _SKIP))
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
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


def wait_beside_compilation(future: Future[Any]) -> None:
    """Wait for work of a thread that takes `compile_lock`; while the caller compiles, it lends the lock."""
    if future.done():
        return
    if compilation() is None:
        wait([future])
        return
    lock = threading.Condition(compile_lock)

    def wake(_: Future[Any]) -> None:
        with lock:
            lock.notify()

    future.add_done_callback(wake)
    with lock, _compiling_said(False):
        lock.wait_for(future.done)


@contextlib.contextmanager
def _compiling_said(value: bool) -> Iterator[None]:
    """Have `torch.compiler.is_compiling`, which answers all threads, return this value."""
    compiler: Any = torch.compiler
    before, compiler._is_compiling_flag = compiler._is_compiling_flag, value
    try:
        yield
    finally:
        compiler._is_compiling_flag = before
