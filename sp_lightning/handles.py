"""The handles of a door that streams several modules: finds those of modules that were dropped, and closes all."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import Any


class _Garbage:
    """Mark on a handle that gives it back if both are garbage."""

    def __init__(self, handle: Any, found: list[Any]) -> None:
        self.handle = handle
        self.found = found

    def __del__(self) -> None:
        self.found.append(self.handle)


def close_dropped(handles: list[Any]) -> None:
    """Close the handles that only this list leads to, and remove those that are closed."""
    dropped: list[Any] = []
    marks = []
    while handles:
        handle = handles.pop()
        if not handle.closed:
            handle.garbage = _Garbage(handle, dropped)
            marks.append(weakref.ref(handle.garbage))
        del handle
    if marks:
        gc.collect()
    for mark in filter(None, (refer() for refer in reversed(marks))):
        mark.found = []
        handles.append(mark.handle)
        mark.handle.garbage = None
    if dropped:
        close_all(dropped)
        gc.collect()  # now they go, before memory is allocated


def close_all(handles: list[Any]) -> None:
    """Close these handles, whatever error one of them raises, and empty the list."""
    with contextlib.ExitStack() as stack:
        for handle in handles:
            stack.callback(handle.close)
        handles.clear()
