"""Steps of weights in the scratch file, or with gradients or state there: window by window, in memory.

The optimizer steps a window as it steps whole weights: what it gets are stand-ins for the weights, over a range of
their elements. State that a first step makes is put together of what it makes in each window.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Generator, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..host.device import IdleEvent
from ..store.files import blocks
from ..store.pipeline import ElementSpan, cut, elements_of
from ..store.store import Store
from ..stream.host_gradient import GradientBytes

NEW = 3  # state tensors of a first step that are written past the page cache; more go through it


class SliceState(dict[Any, dict[str, Any]]):
    """Optimizer state of the weights of one window, by parameter; unlike `WaitingState`, reads wait for no step."""

    def peek(self, key: Any) -> dict[str, Any]:
        """Return the entry of a parameter; a new empty dict if there is none."""
        return self.get(key, {})

    def make(self, key: Any) -> dict[str, Any]:
        """Return the entry of a parameter, after adding an empty one if there is none."""
        return self.setdefault(key, {})


class FiledRange:
    """A range of a weight's elements, with those of its gradient and state, that is stepped in memory."""

    def __init__(self, item: Any, own: dict[str, Any], new: dict[str, Tensor], start: int, stop: int) -> None:
        self.item, self.own, self.new, self.start, self.stop = item, own, new, start, stop
        value, raw = item.weight.value, item.grad.raw
        self.value, self.grad = self._span(value), self._span(raw, is_written=False)
        self.entries = {key: self._span(entry) for key, entry in own.items() if is_shaped(entry, value)}
        self.rooms = [] if own else [ElementSpan(None, value.dtype, start, stop) for _ in range(NEW)]

    def _span(self, tensor: Tensor, is_written: bool = True) -> ElementSpan:
        """Make the span of this range in one tensor of the weight's layout."""
        return ElementSpan(tensor, tensor.dtype, self.start, self.stop, is_written)

    @property
    def spans(self) -> list[ElementSpan]:
        """All spans of the range: weight, gradient, state, and room for state that the step makes."""
        return [self.value, self.grad, *self.entries.values(), *self.rooms]

    def stand_in(self) -> Any:
        """Return the `StepWork` by which the optimizer steps this range, in memory, as if it were a whole weight."""
        weight, value = self.item.weight, self.value.here
        wire = elements_of(weight.wire, self.start, self.stop) if weight.is_narrow else value
        return ranged(self.item, value, wire, self.grad.here)

    def state(self) -> dict[str, Any]:
        """Return the optimizer state of this range: tensors in memory, copies of numbers, other entries as they are."""
        return {
            key: self.entries[key].here if key in self.entries else entry.clone() if is_number(entry) else entry
            for key, entry in self.own.items()
        }

    def keep(self, made: dict[str, Any], state: Any, store: Store) -> None:
        """Copy the state that this range's step made to the whole weight's; the last range adds that to ``state``."""
        weight, rooms = self.item.weight, iter(self.rooms)
        for key, entry in made.items():
            if key in self.entries:
                if self.entries[key].here is not entry:
                    self.entries[key].here.copy_(entry)
            elif isinstance(entry, Tensor) and entry.ndim:
                if key not in self.new:
                    self.new[key] = store.take(torch.empty_like(weight.value, dtype=entry.dtype, device="meta"))
                room = next((one for one in rooms if one.dtype is entry.dtype), None)
                if room is None:
                    elements_of(self.new[key], self.start, self.stop).copy_(entry)
                else:
                    room.tensor = self.new[key]
                    room.here.copy_(entry)
        written = [span.tensor for span in (self.value, *self.entries.values()) if span.memory is not None]
        increment_version([tensor for tensor in written if tensor is not None])
        if made and self.stop == weight.value.numel():
            self._keep_all(made, state.make(weight.host))

    def _keep_all(self, made: dict[str, Any], own: dict[str, Any]) -> None:
        """Put the state that the steps of all ranges made into ``own``, the optimizer's entry of the weight."""
        for key, entry in made.items():
            if key in self.new:
                own[key] = self.new[key]
            elif is_number(own.get(key)) and is_number(entry) and own[key].dtype == entry.dtype:
                own[key].copy_(entry)
            elif key not in self.entries:
                own[key] = entry


class GradientSlice(GradientBytes):
    """A range of a gradient in memory, with the gradient's factors."""

    def room(self, like: Tensor) -> Tensor:
        """Make a tensor for the true gradient, in memory even if the whole gradient is in a file."""
        return torch.empty_like(like)


def ranged(item: Any, value: Any, wire: Any, raw: Any) -> Any:
    """Return a copy of ``item`` with these tensors of a range, to be stepped as if the range were a whole weight."""
    weight = copy.copy(item.weight)
    weight.value, weight.wire = value, wire
    if not isinstance(item.grad, GradientBytes):
        return item._replace(weight=weight, grad=raw)
    content = GradientSlice(weight, raw, IdleEvent(), None)
    content.factors = list(item.grad.factors)
    return item._replace(weight=weight, grad=content)


class StepBatch(list[ElementSpan]):
    """The spans of the ranges that fit one buffer and are stepped together."""

    def __init__(self, parts: list[FiledRange]) -> None:
        super().__init__(span for part in parts for span in part.spans)
        self.parts = parts


def is_shaped(entry: Any, value: Tensor) -> bool:
    """Whether an entry of optimizer state has one number for each element of the weight."""
    return isinstance(entry, Tensor) and bool(entry.ndim) and entry.shape == value.shape


def is_number(entry: Any) -> bool:
    """Whether an entry of optimizer state is a tensor of one number, without dimensions."""
    return isinstance(entry, Tensor) and not entry.ndim


class FiledSteps:
    """Brings weights, gradients and state of a step from files to memory, and what changed back."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def is_in_memory(self) -> bool:
        """Whether all weights, gradients and state are in memory at all times."""
        return self._store.placement.is_in_memory

    def parts(self, work: list[Any], state: Any, step: Any) -> Generator[tuple[list[Any], Any], None, None]:
        """Yield parts of a step's work with their state, each in memory until the caller asks for the next.

        First come all weights that are stepped whole, whose state then goes to the file; then windows of the others.

        Args:
            work: The weights, of one unit.
            state: The optimizer's.
            step: What steps them (slices.py).
        """
        in_windows = [item for item in work if self._goes_in_windows(item, state, step)]
        if whole := [item for item in work if not any(item is other for other in in_windows)]:
            yield whole, state
            for item in whole:
                self.keep_state(item.weight, state.peek(item.weight.host) or {})
        if in_windows:
            yield from self._windows(in_windows, state, step)

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor is in the scratch file."""
        return self._store.is_filed(tensor)

    def keep_state(self, weight: Any, own: dict[str, Any]) -> None:
        """Move the state of a weight into the scratch file if the store keeps it there. Updates ``own``."""
        if own and self._store.has_state_of(weight):
            for key, entry in own.items():
                if is_shaped(entry, weight.value) and entry.device.type == "cpu":
                    own[key] = self._store.moved(entry)

    def _goes_in_windows(self, item: Any, state: Any, step: Any) -> bool:
        """Whether a weight is stepped range by range: elementwise, and with bytes in the scratch file."""
        value, own, grad = item.weight.value, state.peek(item.weight.host) or {}, item.grad
        if not (step.is_elementwise and isinstance(grad, GradientBytes) and value.numel() > 1) or None in own.values():
            return False
        shaped = [entry for entry in own.values() if is_shaped(entry, value)]
        others = [entry for entry in own.values() if isinstance(entry, Tensor) and entry.ndim]
        if len(others) > len(shaped) or any(one.stride() != value.stride() for one in shaped):
            return False
        makes_state = not own and self._store.has_state_of(item.weight)
        return makes_state or any(map(self._store.is_filed, (value, grad.raw, *shaped)))

    def _windows(self, work: list[Any], state: Any, step: Any) -> Generator[tuple[list[Any], Any], None, None]:
        """Yield work and state for ranges that were read into memory; keep the results after the caller's step."""
        for item in work:
            item.grad.arrived.synchronize()
            if step.changes_gradients or len(item.grad.factors) > 1:
                item.grad.true_on_host()  # which the step writes
        with contextlib.closing(self._store.fetch(self._planned(work, state))) as windows:
            for window in windows:
                own = SliceState()
                for part in window.parts:
                    if part.own:
                        own[part.item.weight.host] = part.state()
                    part.grad.is_written = step.changes_gradients
                yield [part.stand_in() for part in window.parts], own
                for part in window.parts:
                    part.keep(own.peek(part.item.weight.host), state, self._store)
        for item in work:
            if step.changes_gradients:
                item.grad.norm = None

    def _planned(self, work: list[Any], state: Any) -> Iterator[StepBatch]:
        """Cut weights into batches of ranges that fit a buffer; small weights share a batch."""
        parts: list[FiledRange] = []
        left = room = self._store.pipeline.nbytes
        for item in work:
            own, new = state.peek(item.weight.host) or {}, dict[str, Tensor]()
            types = [span.dtype for span in FiledRange(item, own, new, 0, 1).spans]
            count = item.weight.value.numel()
            whole = sum(blocks(count * dtype.itemsize) for dtype in types)
            if whole > left and parts:
                yield StepBatch(parts)
                parts, left = [], room
            for start, stop in cut(count, types, room):
                parts.append(FiledRange(item, own, new, start, stop))
                left -= whole
                if stop < count:
                    yield StepBatch(parts)
                    parts, left = [], 0
        if parts:
            yield StepBatch(parts)
