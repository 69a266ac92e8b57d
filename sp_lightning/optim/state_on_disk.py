"""Optimizer state that lies in the scratch file, and steps of its parameters in portions.

1. Of the chosen parameters, state of their shape lies in the file (scratch_file.py): ``optimizer.state`` shows tensors
   over it. Scalars stay in memory, and so does state that other code refers to, as long as it does, and what an
   optimizer of the user's has in place of a dictionary.
2. What is elementwise is stepped in portions: state comes into a buffer, is stepped there as any other, and goes back,
   while the next portions are read and those before are written (state_ring.py). A class that steps each parameter as
   a whole finds all of it in a buffer, in its shape; one that is too large for a buffer has all of them, and nothing is
   read or written beside its step. All else is stepped on the tensors as they are, which is right, at the speed of page
   faults: other classes of optimizers, ``foreach``, parameters that share bytes or scalars, those that are to be
   stepped whole and too large for the ring, and all that are stepped at once with one that is complex, sparse or on a
   device. The result is the same to the last bit.
3. A portion consists of whole pieces (pieces.py, Rule 5), which may end inside a block. Of such a block the first
   portion keeps its part in memory, and the next one writes it.
4. Scalars are stepped by a parameter's last part, and the parts before it step copies. A parameter whose last part was
   not stepped has the scalars that it had.
5. The first step makes state: its parts have none, torch makes it for each piece in memory, and it goes to the disk
   from there. The ranges are allocated before anything is stepped. Which state a parameter has is found with a small
   one of its type. The order of ``optimizer.state`` is that of the parameters, as torch makes it.
6. State that comes into being otherwise moves into the file when it is loaded, or before a step or after it.
7. Weights may lie in the file as well (homes.py, Rule 6). They are stepped in the buffer, and wire copies are
   converted from there, or read once more where the step could not. Wire copies that are in the file too are converted
   in the buffer, and go to the file with the rest. Only NaNs are converted through the mapping, since their bits depend
   on where a vector ends.
8. An error ends the step: some parameters were stepped, and the state of others may be that of neither step. Then the
   step is torn (torn_step.py), and a run goes on from its last checkpoint.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..compat.modules import HOOKS_AFTER_LOADING, step_without_hooks
from ..compat.references import are_tensors_of_entry_shared
from ..core.malloc import freed
from ..core.telemetry import Counters
from ..core.unit_numbers import state_nbytes
from ..disk.direct_file import BLOCK, FileRange, blocks
from ..disk.direct_ring import Buffer
from ..disk.scratch_file import FILES, Extent, ScratchFile, check_room, make_room, moving_nbytes
from ..disk.state_ring import BlockRun, StateRing, as_few_runs
from ..errors import DiskError
from ..memory.layout import is_dense
from ..memory.watched_parameters import true_data
from ..memory.weights import Conversion
from ..options import format_bytes
from ..steps import torn_step
from .pieces import (
    FUSED,
    PER_PARAMETER,
    PIECE,
    Conversions,
    Cutting,
    Group,
    Regrouped,
    ShadowStep,
    State,
    each_by_itself,
    flattened,
    has_gradient_in_step,
    is_scalar,
    keep_order,
    keeps_no_state,
    needs_order,
    regroup_fused,
    regroup_in_pieces,
    same_order,
    shadow_of,
    state_in_step,
    step_each,
    step_in_pieces,
    takes_the_loop,
)
from .state_guard import known_state
from .state_in_memory import StateInMemory

log = logging.getLogger(__name__)
WEIGHT = ""  # the key of the parameter itself among what it has in the file
WIRE = "\0wire"  # that of its wire copy
GRADIENT = "\0gradient"  # that of its gradient
BESIDE_STATE = (WEIGHT, WIRE, GRADIENT)
NEW_PIECE = 1 << 17  # elements: malloc does not map state of so few by itself (malloc.py)


@dataclass(eq=False)
class Spilled:
    """A parameter in a step, with the places of its state."""

    param: Tensor
    group: Group
    entry: State
    views: dict[str, Tensor]  # what is in the file: state, and the parameter, its wire copy and its gradient
    places: dict[str, Extent]
    is_new: bool  # whether this step makes the state (Rule 5)
    fuses: bool
    is_whole: bool  # whether it is stepped as a whole, in its shape
    lengths: tuple[int, ...] = ()  # of all pieces
    conversion: Conversion | None = None
    conversions: list[Conversion] = field(default_factory=list)  # of its parts
    shared: dict[str, Tensor] = field(default_factory=dict)  # what an earlier part has of a block (Rule 3)
    is_begun: bool = False  # whether a part of it was stepped, or was being stepped
    is_done: bool = False

    def __post_init__(self) -> None:
        self.flat = flattened(self.param)
        self.grad = flattened(self.param.grad)  # type: ignore[arg-type]  # it has one
        self.before = {key: value.clone() for key, value in self.entry.items() if is_scalar(value)}  # Rule 4

    def nbytes(self, reads: bool = False) -> int:
        """Count the bytes that a step writes, or reads."""
        leaves_out = self.makes if reads else GRADIENT.__eq__
        return sum(view.nbytes for key, view in self.views.items() if not leaves_out(key))

    def makes(self, key: str) -> bool:
        """Whether this step makes what is under the key, so that none of it is read."""
        return key == WIRE or (self.is_new and key not in BESIDE_STATE)

    @property
    def changed(self) -> list[Tensor]:
        """The tensors over the file that the step changes."""
        return [view for key, view in self.views.items() if key != GRADIENT]

    def most(self, room: int) -> int:
        """Return how many elements certainly fit into a buffer's room."""
        return (room - 2 * BLOCK * len(self.views)) // sum(view.itemsize for view in self.views.values())

    def nbytes_in_buffer(self, first: int, count: int) -> int:
        """Count the bytes that this many elements take in a buffer."""
        items = [view.itemsize for view in self.views.values()]
        return sum(blocks(first * item % BLOCK + count * item) for item in items)


class StateRange(NamedTuple):
    """The state of a part under one key: where its blocks are in the file and in the buffer, and its bytes in them."""

    key: str
    run: BlockRun
    head: int  # bytes of the first block that belong to the part before
    nbytes: int

    def tensor(self, buffer: Buffer, dtype: torch.dtype) -> Tensor:
        """Make a tensor over the state in the buffer."""
        begin = self.run.at + self.head
        return buffer.flat[begin : begin + self.nbytes].view(dtype)


@dataclass(eq=False)
class ParameterPart:
    """Some pieces of a parameter, one after the other, in a portion."""

    of: Spilled
    first: int
    lengths: tuple[int, ...]
    is_last: bool
    ranges: list[StateRange]
    read_grad: Tensor | None = None  # the gradient, if it was read from the file

    @property
    def slice(self) -> slice:
        """The elements."""
        return slice(self.first, self.first + sum(self.lengths))

    def piece(self, buffer: Buffer) -> Tensor:
        """Return the part of the parameter that is stepped, in the buffer if it came from the file."""
        for range_ in self.ranges:
            if range_.key == WEIGHT:
                return self.shaped(range_.tensor(buffer, self.of.flat.dtype), self.of.param)
        return self.shaped(self.of.flat[self.slice], self.of.param)

    def grad(self, buffer: Buffer) -> Tensor:
        """Return the gradient of the part, in the buffer if it came from the file."""
        for range_ in self.ranges:
            if range_.key == GRADIENT:
                self.read_grad = range_.tensor(buffer, self.of.grad.dtype).data  # with a version of its own
                return self.shaped(self.read_grad, self.of.param.grad)
        return self.shaped(self.of.grad[self.slice], self.of.param.grad)

    def state(self, buffer: Buffer) -> dict[str, Tensor]:
        """Return the state that is in the buffer."""
        views, ranges = self.of.views, (r for r in self.ranges if r.key not in BESIDE_STATE)
        return {r.key: self.shaped(r.tensor(buffer, views[r.key].dtype), views[r.key]) for r in ranges}

    def wire(self, buffer: Buffer, wire: Tensor) -> Tensor:
        """Return the part of the wire copy, in the buffer if it goes to the file."""
        for range_ in self.ranges:
            if range_.key == WIRE:
                return self.shaped(range_.tensor(buffer, wire.dtype), wire)
        return self.shaped(flattened(wire)[self.slice], wire)

    def shaped(self, flat: Tensor, like: Tensor | None) -> Tensor:
        """View the part of a tensor as it is stepped."""
        assert like is not None
        return flat.as_strided(like.shape, like.stride()) if self.of.is_whole else flat

    def read(self) -> Iterator[BlockRun]:
        """Yield what comes from the file."""
        return (range_.run for range_ in self.ranges if not self.of.makes(range_.key))

    def written(self) -> Iterator[BlockRun]:
        """Yield what goes back: a last block that the next part shares does not (Rule 3).

        A gradient does if the optimizer changed it, as fused kernels do that unscale it.
        """
        for key, run, head, nbytes in self.ranges:
            if key == GRADIENT and (self.read_grad is None or not self.read_grad._version):
                continue
            yield run if self.is_last else run._replace(nbytes=(head + nbytes) // BLOCK * BLOCK)


class StateOnDisk(StateInMemory):
    """The state of optimizers in one scratch file, and their steps."""

    is_on_disk = True
    steps_narrow = False
    _reads_gradients = True  # into the buffer
    gradients_to_come: Callable[[], int] = int  # bytes that will be in the file and are not
    _allocate: Callable[[int], Tensor] | None = None  # memory for buffers, other than plain memory

    def __init__(self, file: ScratchFile, buffer_nbytes: int, counters: Counters, fuses: bool) -> None:
        self.parameters: Collection[int] = ()  # ids of those whose state lies on the disk
        self._file = file
        self._buffer_nbytes = buffer_nbytes
        self._counters = counters
        self._fuses = fuses
        self._made_ring: StateRing | None = None
        self._lock = threading.RLock()  # a thread may step one optimizer while the caller steps another
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._said: set[type] = set()  # the classes of optimizers of which the log says that they are slow
        # Those of which torch steps all parameters in the step that goes on (Rule 2).
        self._stepped_in_order: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def expect(self, optimizers: Sequence[Optimizer]) -> None:
        self._file.optimizers.update(optimizers)

    def check_room(
        self,
        optimizers: Sequence[Optimizer],
        checkpoints: Callable[[str], int] = lambda folder: 0,
        beside: Sequence[StateInMemory] = (),
    ) -> None:
        together = {self, *beside}
        for one in together:
            one.expect(optimizers)
        folder = self._file.folder
        check_room(folder, sum(one.to_come for one in together), checkpoints(folder))

    @property
    def to_come(self) -> int:  # type: ignore[override]
        """The bytes of state that known optimizers will make, and of gradients, that are not on the disk yet."""
        total = self.gradients_to_come()
        for optimizer in list(self._file.optimizers):
            made = state_nbytes(optimizer, self.parameters, shaped=True) or 0  # Rule 1
            total += max(0, made - moving_nbytes(self._file.folder, _state(optimizer, self.parameters), self._file))
        return total

    @property
    def ring_nbytes(self) -> int:  # type: ignore[override]
        """Bytes of the buffers."""
        return 0 if self._made_ring is None else self._made_ring.nbytes

    def shadow(self, optimizer: Optimizer, fuses: bool) -> ShadowStep | None:
        """Make what steps an optimizer: without one it would step state on the disk through page faults."""
        return super().shadow(optimizer, fuses) or step_in_pieces(optimizer) or step_each(optimizer)

    def attach(self, optimizer: Optimizer, shadow: ShadowStep | None) -> None:
        """Have an optimizer's state lie in the file from now on, and its steps be in portions if it has a shadow."""
        if not hasattr(optimizer, HOOKS_AFTER_LOADING):  # a wrapper of another one, which has the state and steps it
            return
        self._file.optimizers.add(optimizer)
        make_room(self._file.folder, self.to_come)
        self._hooks.append(optimizer.register_load_state_dict_post_hook(self.adopt))
        if shadow is None:
            self._hooks.append(optimizer.register_step_post_hook(self._adopt_after))
        else:
            shadow.rest = functools.partial(self._rest, shadow.rest)
            shadow.first = self._first
            shadow.end = functools.partial(self._end, shadow.end)
        if shadow is None or not all(self._takes(optimizer, group) for group in optimizer.param_groups):
            self._say_slow(optimizer, "")
        self.adopt(optimizer)

    def _say_slow(self, optimizer: Any, what: str) -> None:
        """Log, once for each class, what is stepped on tensors over the mapping (Rule 2)."""
        if type(optimizer) not in self._said:
            self._said.add(type(optimizer))
            log.info(
                "superpipeline: %s cannot be stepped in portions%s: its state in %s is read and written through the "
                "page cache, which takes several times as long",
                type(optimizer).__name__,
                what,
                self._file.folder,
            )

    def close(self) -> None:
        """End the threads and close the file. State lives on as tensors over it. Safe twice."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.gradients_to_come = int  # it leads to the user's module, and graphs that are kept lead here
        with self._lock:
            ring, self._made_ring = self._made_ring, None
            if ring is not None:
                ring.close()
            self._file.close()

    # ---- state that is in memory (Rule 6)

    def adopt(self, optimizer: Optimizer) -> None:
        """Move an optimizer's state into the file, but for what other code refers to."""
        state: Any = vars(optimizer).get("state", {})  # a guarded one has nothing new (state_guard.py)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in state:
                    self._adopt(state, parameter)

    def _adopt_after(self, optimizer: Optimizer, *_: Any) -> None:
        """Move the state that a step of torch's, or of the user's, has made."""
        try:
            self.adopt(optimizer)
        except DiskError as error:
            outcome = "The optimizer had stepped all parameters; state that did not move to the disk stays in memory"
            raise error.with_outcome(outcome) from error

    def _end(self, end: Callable[[Optimizer], None], optimizer: Optimizer) -> None:
        """End a step of a shadow: what torch made in the place of portions moves at once."""
        end(optimizer)
        if optimizer in self._stepped_in_order:
            self._stepped_in_order.discard(optimizer)
            self._adopt_after(optimizer)

    def adopt_one(self, optimizer: Optimizer, parameter: Tensor) -> None:
        """Move the state of one parameter into the file."""
        self._adopt(optimizer.state, parameter)

    def _adopt(self, state: Any, parameter: Tensor) -> None:
        if id(parameter) not in self.parameters or not isinstance(state[parameter], dict):
            return
        keys = [key for key, value in state[parameter].items() if self._can_move(parameter, value)]
        if not keys or are_tensors_of_entry_shared(state, parameter):
            return
        with self._lock, torch.no_grad():
            moved = self._file.tensors([state[parameter][key] for key in keys])
            for key, tensor in zip(keys, moved, strict=True):
                self._copy(state[parameter][key], tensor)
                state[parameter][key] = tensor
        freed(sum(tensor.nbytes for tensor in moved))

    def moved(self, tensor: Tensor) -> tuple[Tensor, FileRange]:
        """Return a tensor of the file with the values of this one, and its range (Rule 7)."""
        with self._lock, torch.no_grad():
            made, range_ = self.placed(tensor)
            self._copy(tensor if is_dense(tensor) else tensor.contiguous(), made)
            return made, range_

    def placed(self, like: Tensor) -> tuple[Tensor, FileRange]:
        """Return a tensor of the file with this shape, type and strides, and its range."""
        (made,) = self._file.tensors([like])
        place = self._file.place_of(made)
        assert place is not None
        return made, FileRange(self._file, *place)

    def converted(self, tensor: Tensor, wire: Tensor | None) -> bool:
        """Convert a tensor of the file into a wire copy, directly; return False if it is not there, or has a NaN.

        A NaN has other bits where a vector ends (Rule 7).
        """
        place = self._file.place_of(tensor)
        if place is None or wire is None or not same_order(tensor, wire):
            return False
        flat, ring, has_nan, to = flattened(wire), self._ring, False, self._file.place_of(wire)
        most = ring.buffer_nbytes // tensor.itemsize // BLOCK * BLOCK or BLOCK  # elements: whole blocks of both
        lengths = [min(most, len(flat) - first) for first in range(0, len(flat), most)]
        runs = (
            BlockRun(place.offset + number * most * tensor.itemsize, 0, blocks(length * tensor.itemsize))
            for number, length in enumerate(lengths)
        )
        pieces = ring.portions((run.offset - place.offset, [run]) for run in runs)
        with self._lock, torch.no_grad(), contextlib.closing(pieces):
            for begin, buffer in pieces:
                first = begin // tensor.itemsize
                count = min(most, len(flat) - first)
                source, written = buffer.flat[: count * tensor.itemsize].view(tensor.dtype), []
                has_nan = has_nan or bool(source.isnan().any())
                if to is None:
                    flat[first : first + count].copy_(source)
                else:
                    narrow = source.to(wire.dtype).view(torch.uint8)
                    buffer.flat[: narrow.nbytes].copy_(narrow)
                    written = [BlockRun(to.offset + first * wire.itemsize, 0, blocks(narrow.nbytes))]
                    self._counters.disk_written += narrow.nbytes
                ring.write(buffer, written)
        return not has_nan

    def _can_move(self, parameter: Tensor, value: Any) -> bool:
        return (
            type(value) is Tensor
            and value.is_cpu
            and value.layout is torch.strided
            and value.shape == parameter.shape
            and value.dim() > 0
            and value.numel() > 0
            and is_dense(value)
            and self._file.place_of(value) is None
        )

    def _copy(self, source: Tensor, target: Tensor) -> None:
        """Copy a tensor into one of the file, directly."""
        place, content, ring = self._file.place_of(target), flattened(source).view(torch.uint8), self._ring
        assert place is not None
        try:
            for begin in range(0, place.nbytes, ring.buffer_nbytes):
                buffer, piece = ring.take(), content[begin : begin + ring.buffer_nbytes]
                buffer.flat[: piece.nbytes].copy_(piece)
                ring.write(buffer, [BlockRun(place.offset + begin, 0, blocks(piece.nbytes))])
            ring.drain()
        except BaseException:
            ring.recover()
            raise
        self._counters.disk_written += place.nbytes

    @property
    def _ring(self) -> StateRing:
        with self._lock:
            if self._made_ring is None:
                self._made_ring = StateRing(self._file, self._buffer_nbytes, self._counters, self._allocate)
            return self._made_ring

    # ---- steps

    def _rest(self, rest: Callable[[Optimizer], Regrouped], optimizer: Optimizer) -> Regrouped:
        self.adopt(optimizer)
        return rest(optimizer)

    def _first(self, shadow: Any, conversions: Conversions, adopts: bool = False) -> list[Group]:
        """Step in portions what can be, having adopted its state if asked to; return the groups with the others."""
        if adopts:
            self.adopt(shadow)
        with torch.no_grad():
            return self._step(shadow, conversions)

    def _step(self, shadow: Any, conversions: Conversions) -> list[Group]:
        """Step in portions what can be (Rule 2), and return the groups with the other parameters."""
        groups: list[Group] = [self._each_by_itself(shadow, group) for group in shadow.param_groups]
        shadow.param_groups = groups
        spilled: list[Spilled] = []
        try:
            # Reads of gradients wait for a pending step, whose thread takes the lock: no read is the first one inside.
            is_ordered = needs_order(shadow)
            with self._lock:
                if is_ordered:
                    self._leave_to_torch(shadow)
                else:
                    spilled = list(self._spilled(shadow, conversions))
                if not spilled or _share_state(shadow):
                    return groups
                if any(one.is_new for one in spilled):  # Rule 5
                    keep_order(shadow)
                self._run(shadow, spilled)
        except BaseException as error:
            begun = [one for one in spilled if one.is_begun]  # of which the file may have other bytes by now
            torch.autograd.graph.increment_version([view for one in begun for view in one.changed])
            called_with = getattr(shadow, "called_with", None)  # else the optimizer thread counts what it stepped
            if called_with is None:
                raise
            optimizer = called_with[0][0]
            of = sum(len(group["params"]) for group in optimizer.param_groups)
            before = of - sum(len(group["params"]) for group in groups)
            if not before and not begun:  # nothing was stepped, as where there is no room
                raise
            count = before + sum(one.is_done for one in spilled)
            torn_step.tear(optimizer, count, error)
            if isinstance(error, DiskError):
                raise error.in_step(count, of) from error
            raise
        stepped = {id(one.param) for one in spilled}
        return [{**group, "params": [p for p in group["params"] if id(p) not in stepped]} for group in groups]

    def _leave_to_torch(self, shadow: Any) -> None:
        """Note that torch's own loop steps all parameters, as it would without a disk."""
        if any(id(param) in self.parameters for group in shadow.param_groups for param in group["params"]):
            self._say_slow(shadow, " beside parameters that are complex, sparse or on a device, or share their bytes")
            if (called_with := getattr(shadow, "called_with", None)) is not None:
                self._stepped_in_order.add(called_with[0][0])

    _each_by_itself = staticmethod(each_by_itself)

    def _takes(self, optimizer: Any, group: Group) -> bool:
        """Whether a group can be stepped in portions: torch's fused kernels step each element by itself, too."""
        return takes_the_loop({**group, "fused": type(optimizer) not in FUSED and group.get("fused")})

    def _spilled(self, shadow: Any, conversions: Conversions) -> Iterator[Spilled]:
        """Yield the parameters that can be stepped in portions, in the order of the groups."""
        for group in shadow.param_groups:
            if not self._takes(shadow, group):
                continue
            fuses = (
                self._fuses and type(shadow) in FUSED and group.get("foreach") is None and group.get("fused") is None
            )
            is_whole = type(shadow) in PER_PARAMETER
            makes: dict[Any, State] = {}  # by the types and dimensions of parameters (Rule 5)
            for param in group["params"]:
                views = self._views(shadow, group, param, makes)
                if views is None:
                    continue
                conversion = conversions.get(param)
                if conversion is not None and not same_order(param, conversion.wire):
                    conversion = None
                if self._file.place_of(param) is not None:
                    views = {WEIGHT: param.detach(), **views}
                if conversion is not None and self._file.place_of(conversion.wire) is not None:
                    views = {**views, WIRE: conversion.wire}
                if self._reads_gradients and self._file.place_of(param.grad) is not None:
                    views = {**views, GRADIENT: param.grad}
                places = {key: self._file.place_of(view) for key, view in views.items()}
                entry = shadow.state.get(param, {})
                known = {key: place for key, place in places.items() if place is not None}
                if known and len(known) == len(places):
                    is_new = not entry and not keeps_no_state(shadow, group)
                    fused = bool(group.get("fused") or (fuses and entry))
                    one = Spilled(param, group, entry, views, known, is_new, fused, is_whole, conversion=conversion)
                    if is_whole and one.nbytes_in_buffer(0, param.numel()) > self._ring.nbytes:
                        self._say_slow(
                            shadow, f" where a weight with its state exceeds {format_bytes(self._ring.nbytes)}"
                        )
                        continue
                    yield one

    def _views(self, shadow: Any, group: Group, param: Tensor, makes: dict[Any, State]) -> dict[str, Tensor] | None:
        """Return the state of a parameter that is to be in the file, which is made if the parameter has none.

        None if the parameter cannot be stepped in portions.
        """
        if param.grad is None or not param.dim() or not param.numel():
            return None
        if type(shadow) in PER_PARAMETER and shadow.state.get(param):
            if not has_gradient_in_step(param):
                return None
            tensors = ((key, value) for key, value in shadow.state[param].items() if isinstance(value, Tensor))
            return {
                key: value
                for key, value in tensors
                if same_order(param, value) and self._file.place_of(value) is not None
            }
        if shadow.state.get(param):
            state = state_in_step(shadow, param)
            return None if state is None else {key: value for key, value in state.items() if not is_scalar(value)}
        if not has_gradient_in_step(param):
            return None
        if keeps_no_state(shadow, group):
            return {}
        return self._new_state(shadow, group, param, makes)

    def _new_state(self, shadow: Any, group: Group, param: Tensor, makes: dict[Any, State]) -> dict[str, Tensor] | None:
        """Make room for the state that a parameter will have; None if that is not to be in the file."""
        if id(param) not in self.parameters:
            return None
        like = state_like(param, shadow, group, makes)
        return dict(zip(like, self._file.tensors(list(like.values())), strict=True)) if like else {}

    def _run(self, shadow: Any, spilled: list[Spilled]) -> None:
        """Step parameters portion by portion, reading ahead and writing behind."""
        ring, cutting = self._ring, Cutting.of(shadow, PIECE)
        large = [
            one for one in spilled if one.is_whole and one.nbytes_in_buffer(0, one.param.numel()) > ring.buffer_nbytes
        ]
        others = [one for one in spilled if one not in large]
        for one in others:
            one.lengths = self._lengths(one, cutting, ring.buffer_nbytes)
        runs_of = (
            (parts, as_few_runs(run for part in parts for run in part.read()))
            for parts in _portions(others, ring.buffer_nbytes)
        )
        with contextlib.closing(ring.portions(runs_of)) as portions:
            for parts, buffer in portions:
                self._step_portion(shadow, parts, buffer, cutting)
                ring.write(buffer, as_few_runs(run for part in parts for run in part.written()))
                for part in parts:
                    part.of.is_done = part.is_last
        for one in large:
            numel = one.param.numel()
            part = ParameterPart(one, 0, (numel,), True, list(_ranges(one, 0, numel, 0)))
            with ring.as_one(as_few_runs(part.read()), as_few_runs(part.written())) as buffer:
                self._step_portion(shadow, [part], buffer, cutting)
            one.is_done = True
        for one in spilled:
            self._counters.disk_written += one.nbytes()
            self._counters.disk_read += one.nbytes(reads=True)
            if one.is_new:
                shadow.state[one.param].update(one.entry)
            torch.autograd.graph.increment_version(one.changed)
            if one.conversion is not None and one.conversions and all(part.source for part in one.conversions):
                one.conversion.done(one.param)

    def _lengths(self, one: Spilled, cutting: Cutting, room: int) -> tuple[int, ...]:
        return _lengths(one, cutting, room)

    def _step_parts(self, shadow: Any, parts: Sequence[ParameterPart], buffer: Buffer, cutting: Cutting) -> None:
        """Step parts in a buffer, and convert those that are weights."""
        for part in parts:
            if part.of.is_new:
                _make_state(shadow, part, buffer)
        made = [part for part in parts if not part.of.is_new]
        for fuses in (False, True):
            some = [part for part in made if part.of.fuses is fuses]
            if some:
                _step_made(shadow, some, buffer, None if fuses else cutting)
        for part in parts:
            _convert(part, buffer)

    def _step_portion(self, shadow: Any, portion: list[ParameterPart], buffer: Buffer, cutting: Cutting) -> None:
        for part in portion:
            part.of.is_begun = True
            for key, run, head, _ in part.ranges:
                if head:
                    buffer.flat[run.at : run.at + head].copy_(part.of.shared[key])
        self._step_parts(shadow, portion, buffer, cutting)
        for part in portion:
            for key, run, head, nbytes in part.ranges:
                end = head + nbytes
                if not part.is_last and end % BLOCK:
                    part.of.shared[key] = buffer.flat[run.at + end // BLOCK * BLOCK : run.at + end].clone()


def left_nbytes(folder: str, parameters: Sequence[Tensor]) -> int:
    """Count the bytes on a folder's disk that earlier runs left to these parameters and their state.

    They move into the file of the next run, or are dropped with their optimizer before it makes state.
    """
    weights, ids = [[true_data(parameter)] for parameter in parameters], {id(parameter) for parameter in parameters}
    optimizers = {optimizer for file in list(FILES) for optimizer in file.optimizers}
    return moving_nbytes(folder, [*weights, *(state for one in optimizers for state in _state(one, ids))])


def _state(optimizer: Optimizer, parameters: Collection[int]) -> Iterator[list[Tensor]]:
    """Yield the state of each of these parameters, by their ids."""
    state = known_state(optimizer)
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        if id(param) in parameters and isinstance(state.get(param), dict):
            yield [value for value in state[param].values() if type(value) is Tensor and value.layout is torch.strided]


def in_buffer(
    shadow: Any, parts: Sequence[ParameterPart], buffer: Buffer
) -> tuple[Any, Conversions, dict[Tensor, ParameterPart]]:
    """Make a shadow that steps parts in a buffer; return what it converts as well, and the tensors in parts' places."""
    state: dict[Tensor, State] = {}
    conversions: Conversions = {}
    pieces: dict[Tensor, ParameterPart] = {}
    groups: list[Group] = []
    group: Group | None = None
    for part in parts:
        one = part.of
        piece = part.piece(buffer)
        piece.grad = part.grad(buffer)
        entry = part.state(buffer)
        scalars = one.entry if part.is_last else one.before
        state[piece] = {key: entry[key] if key in entry else _scalar(scalars[key], part) for key in one.entry}
        pieces[piece] = part
        if group is not one.group:
            group = one.group
            groups.append({**group, "params": []})
        groups[-1]["params"].append(piece)
        if one.conversion is not None:
            conversions[piece] = Conversion(part.wire(buffer, one.conversion.wire))
            one.conversions.append(conversions[piece])
    step = shadow_of(shadow)
    step.param_groups, step.state = groups, state
    return step, conversions, pieces


def _step_made(shadow: Any, parts: Sequence[ParameterPart], buffer: Buffer, cutting: Cutting | None) -> None:
    """Step parts whose state is in a buffer: in pieces, or in torch's fused kernels if there is no cutting."""
    step, conversions, pieces = in_buffer(shadow, parts, buffer)
    if cutting is None:
        step.param_groups, step.state = regroup_fused(step, conversions)
    elif type(shadow) not in PER_PARAMETER:
        given = {id(piece): part.lengths for piece, part in pieces.items()}
        step.param_groups, step.state = regroup_in_pieces(step, conversions, cutting=replace(cutting, given=given))
    step_without_hooks(type(shadow))(step)


def _convert(part: ParameterPart, buffer: Buffer) -> None:
    """Convert a part of a weight that is in the buffer into its wire copy, if compiled code did not yet.

    A NaN has other bits where a vector ends: then the whole weight is converted later, from the file (Rule 7).
    """
    if part.ranges[0].key == WEIGHT and part.of.conversion is not None:
        if part.of.is_new:
            part.of.conversions.append(Conversion(part.wire(buffer, part.of.conversion.wire)))
        conversion, piece = part.of.conversions[-1], flattened(part.piece(buffer))
        if conversion.source is None and not piece.isnan().any():
            flattened(conversion.wire).copy_(piece)
            conversion.done(piece)


def _share_state(shadow: Any) -> bool:
    """Whether a tensor of the state belongs to several parameters."""
    entries = (shadow.state.get(param, {}) for group in shadow.param_groups for param in group["params"])
    tensors = (value for entry in entries for value in entry.values() if isinstance(value, Tensor))
    addresses = [tensor.data_ptr() for tensor in tensors if tensor.numel()]
    return len(set(addresses)) < len(addresses)


def _scalar(value: Tensor, part: ParameterPart) -> Tensor:
    return value if part.is_last else value.clone()


def _make_state(shadow: Any, part: ParameterPart, buffer: Buffer) -> None:
    """Step a part whose state torch makes, and copy that into a buffer (Rule 5)."""
    one = part.of
    pieces = _pieces(part, part.piece(buffer))
    for piece, grad in zip(pieces, _pieces(part, part.grad(buffer)), strict=True):
        piece.grad = grad
    step = shadow_of(shadow)
    step.param_groups, step.state = [{**one.group, "params": pieces}], defaultdict(dict)
    step_without_hooks(type(shadow))(step)
    for key, made in part.state(buffer).items():
        for piece, target in zip(pieces, _pieces(part, made), strict=True):
            target.copy_(step.state[piece][key])
    if part.is_last:
        one.entry = {key: one.views.get(key, value) for key, value in step.state[pieces[-1]].items()}


def state_like(param: Tensor, shadow: Any, group: Group, makes: dict[Any, State]) -> dict[str, Tensor]:
    """Return tensors without bytes as a parameter's state of its shape will be; ``makes`` keeps what was found."""
    kind = param.dtype, param.dim()
    if kind not in makes:
        makes[kind] = _made_for(torch.zeros([2] * param.dim(), dtype=param.dtype, device="cpu"), shadow, group)
    return {
        key: torch.empty_like(param, dtype=value.dtype, device="meta")
        for key, value in makes[kind].items()
        if isinstance(value, Tensor) and list(value.shape) == [2] * param.dim()
    }


def _made_for(param: Tensor, shadow: Any, group: Group) -> State:
    """Return the state that torch makes for a small parameter."""
    param.grad = torch.zeros_like(param)
    step = shadow_of(shadow)
    # torch would read what it copies from the device, as a learning rate may be, before it is there.
    on_host: Group = {key: value.cpu() for key, value in group.items() if isinstance(value, Tensor)}
    if group.get("capturable"):
        on_host["capturable"] = False
    step.param_groups, step.state = [{**group, **on_host, "params": [param]}], defaultdict(dict)
    step_without_hooks(type(shadow))(step)
    made: State = step.state[param]
    return made


def even_lengths(one: Spilled, room: int, most: int) -> tuple[int, ...]:
    """Cut a parameter into pieces of whole vectors, as large as a buffer's room and `most` elements allow."""
    numel = one.param.numel()
    if one.is_whole:
        return (numel,)
    most = min(one.most(room), most) // BLOCK * BLOCK or BLOCK // 8
    return tuple(min(most, numel - first) for first in range(0, numel, most))


def _lengths(one: Spilled, cutting: Cutting, room: int) -> tuple[int, ...]:
    """Cut a parameter into pieces, at least one of which fits into the room that a buffer has left."""
    numel, most = one.param.numel(), one.most(room)
    if one.is_whole or one.fuses:  # fused kernels share vectors of elements between threads, wherever a tensor begins
        return even_lengths(one, room, NEW_PIECE if one.is_new else numel)
    if one.is_new:
        cutting = replace(cutting, in_turn=False, piece=NEW_PIECE)
    return (numel,) if numel <= most and cutting.leaves_whole(numel) else cutting.lengths(numel, most)


def _portions(spilled: Iterable[Spilled], room: int) -> Iterator[list[ParameterPart]]:
    """Cut parameters into portions, each as many pieces as a buffer has room for."""
    parts: list[ParameterPart] = []
    end = 0
    for one in spilled:
        lengths, first = deque(one.lengths), 0
        while lengths:
            count, taken = 0, []
            while lengths and end + one.nbytes_in_buffer(first, count + lengths[0]) <= room:
                taken.append(lengths.popleft())
                count += taken[-1]
            if taken:
                parts.append(
                    ParameterPart(one, first, tuple(taken), not lengths, list(_ranges(one, first, count, end)))
                )
                end += one.nbytes_in_buffer(first, count)
                first += count
            else:
                yield parts
                parts, end = [], 0
    yield parts


def _ranges(one: Spilled, first: int, count: int, at: int) -> Iterator[StateRange]:
    for key, view in one.views.items():
        begin, nbytes = first * view.itemsize, count * view.itemsize
        head = begin % BLOCK
        run = BlockRun(one.places[key].offset + begin - head, at, blocks(head + nbytes))
        yield StateRange(key, run, head, nbytes)
        at += run.nbytes


def _pieces(part: ParameterPart, tensor: Tensor) -> list[Tensor]:
    return [tensor] if part.of.is_whole else list(tensor.split(part.lengths))  # type: ignore[no-untyped-call]
