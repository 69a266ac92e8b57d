"""The threads that calls in lockstep run in.

1. A thread runs one call after the other: libraries keep for each thread what they made for the shapes that they met
   there. To make it takes longer than many layers take to run: torch makes plans for cuDNN's attention anew in each
   thread, one for each length of a prompt and what was answered.
2. A thread in which a call left other settings of its own than a new thread has runs no other call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import Context, copy_context
from queue import SimpleQueue

import torch

from ..compat.tensors import dispatch_mode_count, function_mode_count

Work = Callable[["CallThread"], None]


class CallThread:
    """A thread that runs calls, until it is told to end."""

    def __init__(self) -> None:
        self.work: SimpleQueue[tuple[Context, Work] | None] = SimpleQueue()
        self._settings: object = None  # with which it began

    def serve(self) -> None:
        """Run one call after the other, on this thread."""
        self._settings = _settings()
        while (given := self.work.get()) is not None:
            context, work = given
            context.run(work, self)
            del given, context, work  # they lead to the call

    def is_as_before(self) -> bool:
        """Whether the thread has the settings with which it began; asked on this thread."""
        return self._settings == _settings()


class CallThreads:
    """The threads of a module's calls; those that run none wait for the next."""

    def __init__(self) -> None:
        self._idle: list[CallThread] = []

    def run(self, work: Work) -> None:
        """Begin work on a thread that runs nothing else, with the caller's context variables."""
        if self._idle:
            thread = self._idle.pop()
        else:
            thread = CallThread()
            threading.Thread(target=thread.serve, name="superpipeline-call", daemon=True).start()
        thread.work.put((copy_context(), work))

    def end(self, thread: CallThread) -> None:
        """Have a thread, on which this is called, run other work after this (Rule 2)."""
        if thread.is_as_before():
            self._idle.append(thread)
        else:
            thread.work.put(None)

    def close(self) -> None:
        """End the threads that run nothing."""
        while self._idle:
            self._idle.pop().work.put(None)


def _settings() -> object:
    """Return the settings of torch's that the calling thread has of its own, and code sets for more than a context."""
    kinds = {"cpu", getattr(torch.accelerator.current_accelerator(), "type", "cpu")}
    casts = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in sorted(kinds)]
    modes = function_mode_count(), dispatch_mode_count()
    return casts, torch.is_autocast_cache_enabled(), torch.is_grad_enabled(), torch.is_inference_mode_enabled(), modes
