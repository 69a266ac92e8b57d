"""A checkpoint that is written while training goes on: which bytes stay as they are until its file has them.

1. A checkpoint is of one step. All of it is in the file, or in torch's structure of the file, when `begin` returns, but
   for the large tensors that are *kept*: weights at home to whose bytes only the parameter refers, and the state, to
   which only the optimizer refers, of optimizers each of whose weights is stepped by itself.
2. A thread copies what is kept, first of the unit that backward steps first. A weight's step waits until the weight and
   its state are in the file (`ShadowStep.before`), and so does any other code of which is known that it may write the
   weight (`Engine.before_host_access`, `Engine.about_to_write_back`). Steps by other code wait for the whole file.
3. Other writes are found: a kept tensor whose version counter moved by the time its bytes are in the file ends the
   write with an error. Bytes that something came to refer to while the checkpoint was put together, such as a callback
   that keeps the state that it was given, are waited for when the next step begins.
4. The file takes its name once it is complete (lightning/checkpoint_io.py). What is to happen after that, such as the
   removal of the file before, happens when the next step begins, and does not happen after an error.
5. An error lets all steps go on. It is raised once: when the next scope opens, by the next checkpoint, or at the end.
6. At most one checkpoint of a module is being written; the next one waits for it, and so do loads and the end of
   streaming. All but the copies happens on the thread that trains.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import IO, Any

from torch import Tensor
from torch.optim import Optimizer

from ..compat.references import KeptBytes, are_tensors_of_entry_shared
from ..core.telemetry import Counters
from ..disk import checkpoint_file
from ..errors import CheckpointError, ExactnessError
from ..memory.access import Access
from ..memory.host_copy import HostCopy
from ..memory.watched_parameters import HostParameter, quietly
from ..optim.pieces import Group, ShadowStep


class KeptTensor:
    """A tensor that stays as it is until its bytes are in the file."""

    def __init__(self, name: str, tensor: Tensor, place: tuple[int, int], is_shared: Callable[[], bool] | None = None):
        """Keep a tensor; ``is_shared`` tells whether other code refers to its bytes."""
        self.name, self.place = name, place
        self.bytes = KeptBytes(tensor)
        self.is_shared = is_shared or self.bytes.are_shared
        self.in_file = threading.Event()

    def copied(self) -> None:
        """Let the bytes go; raise an error if they may be of another step (Rule 3)."""
        if self.bytes.were_written():
            raise ExactnessError(
                f"{self.name} was written before it was in the file, by code that could not be made to wait; set "
                "checkpoints='wait'"
            )
        self.let_go()

    def let_go(self) -> None:
        """Let the bytes go, whether they are in the file or not. Safe twice."""
        self.bytes.release()
        self.in_file.set()


class CheckpointBeside:
    """One checkpoint of a module that is streamed."""

    def __init__(
        self,
        access: Access,
        counters: Counters,
        stores: Iterable[HostCopy],
        shadows: Mapping[Optimizer, ShadowStep],
    ) -> None:
        """Keep what can be kept (Rule 1), before the checkpoint is put together. No step may be pending."""
        self._access, self._counters = access, counters
        self._shadows = list(shadows.values())
        self._parameters: dict[int, tuple[Tensor, list[KeptTensor]]] = {}  # by id
        self._addresses: dict[int, int] = {}  # of weights, with their parameters' ids
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._is_new = True  # no step began since
        self.path = ""
        self.afterwards: list[Callable[[], None]] = []  # Rule 4
        with quietly():
            for number, store in enumerate(stores):
                self._keep(store, (int(store.unit.resident), -number), shadows)  # backward comes to the last unit first

    def _keep(self, store: HostCopy, place: tuple[int, int], optimizers: Iterable[Optimizer]) -> None:
        for index, parameter in enumerate(store.params):
            if type(parameter) is not HostParameter:
                continue
            name, kept = store.names[index], list[KeptTensor]()
            self._parameters[id(parameter)] = parameter, kept
            self._addresses[parameter.data_ptr()] = id(parameter)
            if _is_large(parameter) and store.at_home(index) and not store.shares(index):
                kept.append(KeptTensor(name, parameter, place, functools.partial(store.shares, index)))
            for optimizer in optimizers:
                if parameter in optimizer.state and not are_tensors_of_entry_shared(optimizer.state, parameter):
                    state = optimizer.state[parameter].items()
                    kept += [KeptTensor(f"{key} of {name}", value, place) for key, value in state if _is_large(value)]

    @property
    def _kept(self) -> Iterator[KeptTensor]:
        return (one for _, kept in self._parameters.values() for one in kept)

    def begin(self, checkpoint: Any, path: str, new_file: AbstractContextManager[IO[bytes]]) -> None:
        """Write what is not kept, and begin to write what is; ``new_file`` has its name once its context ends."""
        self.path = path
        keepers = {kept.bytes.place(): kept for kept in self._kept}
        for kept in keepers.values():
            kept.bytes.note_version()
        try:
            with contextlib.ExitStack() as stack:
                file = stack.enter_context(new_file)
                copies = stack.enter_context(contextlib.closing(checkpoint_file.CopiesToFile(file, keepers)))
                copies.begin(checkpoint)
                found = set(copies.settle())
                rest = stack.pop_all()
        except BaseException:
            self.let_go()
            raise
        for kept in self._kept:
            if kept not in found:
                kept.let_go()
        for shadow in self._shadows:
            shadow.before = self._before
        self._access.savings.add(self)
        threading.Thread(target=self._write, args=(rest, copies), name="superpipeline-checkpoint").start()

    def let_go(self) -> None:
        """Keep nothing any more. Safe twice."""
        for kept in self._kept:
            kept.let_go()

    def _write(self, rest: contextlib.ExitStack, copies: checkpoint_file.CopiesToFile) -> None:
        try:
            with rest:
                copies.copy_later()
                copies.finish()
        except BaseException as error:
            self._error = error
        finally:
            self.let_go()
            self._ended.set()

    # ---- waits (Rules 2 and 5)

    @property
    def is_being_written(self) -> bool:
        """Whether the file has no name yet."""
        return not self._ended.is_set()

    @property
    def is_open(self) -> bool:
        """Whether what is to happen after the write is still to come (Rule 4)."""
        return self in self._access.savings

    def wait_for(self, parameters: Iterable[Tensor]) -> None:
        """Wait until the bytes of these parameters, and of their optimizer state, are in the file."""
        for parameter in parameters:
            self._wait(self._parameters.get(id(parameter), (parameter, ()))[1])

    def _before(self, groups: Sequence[Group]) -> None:
        """Wait for the parameters of these groups, in whose place there may be tensors over the same bytes."""
        for parameter in (parameter for group in groups for parameter in group["params"]):
            key = id(parameter) if type(parameter) is HostParameter else self._addresses.get(parameter.data_ptr())
            self._wait(self._parameters.get(key or 0, (parameter, ()))[1])

    def _wait(self, kept: Iterable[KeptTensor]) -> None:
        for one in kept:
            if not one.in_file.is_set():
                with self._counters.stall("disk"):
                    one.in_file.wait()

    def check(self) -> None:
        """Leave the ledger if the write has ended, and raise its error (Rule 5); look for references (Rule 3)."""
        if not self.is_being_written:
            self.finish()
        elif self._is_new:
            self._is_new = False
            self._wait_for_shared()

    def _wait_for_shared(self) -> None:
        """Wait for bytes that something came to refer to, which may write them (Rule 3)."""
        with quietly():
            self._wait([kept for kept in self._kept if kept.is_shared()])

    def finish(self) -> None:
        """Wait for the whole file, leave the ledger, and raise the error that ended the write. Safe twice."""
        if self.is_being_written:
            with self._counters.stall("disk"):
                self._ended.wait()
        self._access.savings.discard(self)
        for shadow in self._shadows:
            shadow.before = None
        error, self._error, afterwards, self.afterwards = self._error, None, self.afterwards, []
        if error is not None:
            raise CheckpointError(
                f"{self.path} could not be written while training went on: {error}. A file that had this name is intact"
            ) from error
        for function in afterwards:
            function()


def _is_large(value: Any) -> bool:
    """Whether a value is a tensor that is copied by itself."""
    return isinstance(value, Tensor) and value.is_cpu and value.nbytes >= checkpoint_file.LARGE
