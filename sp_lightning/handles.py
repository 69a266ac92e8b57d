"""The handles of a process: what forks and hooks do to them, and how those of dropped modules are found and closed."""

from __future__ import annotations

import contextlib
import gc
import os
import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn

from .compat.torch import forbid_access, storage_id
from .store.store import is_in_source, is_same
from .stream.parameters import unit_of

open_handles: weakref.WeakSet[Any] = weakref.WeakSet()


def handles_of(handles: Iterable[Any], parameters: Iterable[nn.Parameter]) -> list[Any]:
    """Return those of the handles that stream any of these parameters."""
    units = {unit_of(parameter) for parameter in parameters}
    return [handle for handle in handles if not units.isdisjoint(handle.units)]


def _before_fork() -> None:
    """Wait for all pending steps and copies before a fork: the forked process has neither threads nor the device."""
    for handle in list(open_handles):
        handle.steps.wait_thread()
        for unit in handle.units:
            unit.wait_copy()


def _after_fork() -> None:
    """Make reads of page-locked memory raise in a forked process, which lacks that memory, and forget all handles."""
    for handle in open_handles:
        if handle.device.hides_slabs:
            hidden = [(weight.name, weight.wire) for weight in handle.weights if not weight.unit.is_resident]
            for name, tensor in [*hidden, *(("optimizer state", state) for state in handle.steps.locked_state())]:
                forbid_access(
                    storage_id(tensor.untyped_storage()),
                    f"{name} lies in page-locked memory, which a forked process does not have: read it before the"
                    " fork, or start the process by 'spawn'",
                )
    open_handles.clear()  # a second fork would wait for their threads, which this process lacks


os.register_at_fork(before=_before_fork, after_in_child=_after_fork)


def note_new(refer: weakref.ref[Any], *_: Any) -> None:
    """Note on a handle that a module or parameter was registered anywhere in the process."""
    if (handle := refer()) is not None:
        handle.is_new = True


class KeepFiled:
    """A ``load_state_dict`` hook: a file-backed weight whose file has the loaded values stays in its file."""

    def __init__(self, handle: Any = None) -> None:
        self._handle = None if handle is None else weakref.ref(handle)

    def __reduce__(self) -> Any:
        return KeepFiled, ()  # copies of the module do not stream

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        handle = None if self._handle is None else self._handle()
        filed = {id(weight.host): weight for weight in handle.weights if is_in_source(weight)} if handle else {}
        for name, param in module.named_parameters(remove_duplicate=False) if filed else ():
            if id(param) in filed and is_same(filed[id(param)].value, state.get(prefix + name)):
                state[prefix + name] = param


class _Garbage:
    """A mark on a handle: when both become garbage, its finaliser appends the handle to ``found``."""

    def __init__(self, handle: Any, found: list[Any]) -> None:
        self.handle = handle
        self.found = found

    def __del__(self) -> None:
        self.found.append(self.handle)


def close_dropped(handles: list[Any]) -> None:
    """Close the handles that nothing but this list refers to, and remove closed ones from it. Collects garbage."""
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
        gc.collect()  # frees the closed handles' memory before more is allocated


def close_all(handles: list[Any]) -> None:
    """Close these handles, even if one of them raises, and empty the list."""
    with contextlib.ExitStack() as stack:
        for handle in handles:
            stack.callback(handle.close)
        handles.clear()
