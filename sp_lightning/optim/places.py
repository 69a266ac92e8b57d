"""Where slices of weights are stepped: in host memory, or on the device, by a trip up and down.

Trips go through a few lanes: streams on each of which slices go up, are stepped and come down, one run of them after
the other. While a lane steps, others copy. A lane's memory is of its stream: the next run takes it over in order.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from ..host.device import Arrival, Device, dense_strides
from ..stream.leaf import Weight

LANES = 3  # one goes up, one is stepped, one comes down
LONGER = 32  # times a slice of a core's cache: with 32 MiB a copy reaches the link's speed


class Place(Protocol):
    """Where slices are stepped: on the host or on the device, with the copies that this takes."""

    chunk: int  # elements of a slice

    def home(self, weight: Weight) -> Tensor:
        """Return the tensor that holds the true bytes of a weight."""

    def lane(self) -> AbstractContextManager[Any]:
        """Return the context in which a run of slices is stepped, such as a stream."""

    def wait(self, arrived: Arrival, tensor: Tensor) -> None:
        """Make later reads of a tensor in this lane wait for the copy that brings its bytes."""

    def up(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the tensors in the memory where they are stepped; those already there are returned themselves."""

    def down(self, stepped: list[tuple[Tensor, Tensor]]) -> None:
        """Copy results to where they belong; each pair is (target, stepped tensor)."""

    def new_state(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Make an empty tensor of optimizer state, of the shape of another, where such state belongs."""

    def adopt_state(self, state: Tensor) -> Tensor:
        """Return state that was made elsewhere, in the kind of memory that `new_state` uses: copied if need be."""

    def finish(self) -> None:
        """Wait until all results that belong on the host are there."""


class OnHost:
    """Slices are stepped where they are, in host memory."""

    def __init__(self, chunk: int) -> None:
        self.chunk = chunk

    def home(self, weight: Weight) -> Tensor:
        """Return the weight's bytes on the host."""
        return weight.value

    def lane(self) -> AbstractContextManager[Any]:
        """Return a context that does nothing."""
        return nullcontext()

    def wait(self, arrived: Arrival, tensor: Tensor) -> None:
        """Block until the tensor has arrived."""
        arrived.synchronize()

    def up(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the tensors as they are: they are stepped in host memory."""
        return tensors

    def down(self, stepped: list[tuple[Tensor, Tensor]]) -> None:
        """Copy results to their places, except for those that were stepped in place."""
        for home, new in stepped:
            if home.data_ptr() != new.data_ptr():
                home.copy_(new)

    def new_state(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Make an empty tensor of optimizer state in host memory."""
        return torch.empty_like(like, dtype=dtype)

    def adopt_state(self, state: Tensor) -> Tensor:
        """Return the state as it is."""
        return state

    def finish(self) -> None:
        """Return at once: nothing is under way."""


class OnDevice:
    """Slices of resident weights are stepped where they are, on the caller's stream."""

    def __init__(self, chunk: int, device: Device) -> None:
        self.chunk, self._device = LONGER * chunk, device
        self._numbers: list[tuple[Tensor, Tensor]] = []  # state's numbers, for `finish`: each copy blocks

    def home(self, weight: Weight) -> Tensor:
        """Return the weight's bytes on the device."""
        return weight.there

    def lane(self) -> AbstractContextManager[Any]:
        """Return a context that does nothing: the caller's stream steps."""
        return nullcontext()

    def wait(self, arrived: Arrival, tensor: Tensor) -> None:
        """Make the current stream wait for the tensor's arrival; block if the tensor is on the host."""
        if tensor.device.type == "cpu":
            arrived.synchronize()
        else:
            arrived.wait(self._device.current_stream())

    def up(self, tensors: list[Tensor]) -> list[Tensor]:
        """Queue copies to the device of tensors that are on the host; return the others as they are."""
        there = [tensor.to(self._device.torch_device, non_blocking=True) for tensor in tensors]
        went = [tensor.nbytes for tensor, new in zip(tensors, there, strict=True) if new is not tensor]
        self._device.counters.nbytes["up"] += sum(went)
        return there

    def down(self, stepped: list[tuple[Tensor, Tensor]]) -> None:
        """Queue copies of results to their places; numbers are copied by `finish`."""
        for home, new in stepped:
            if home.data_ptr() == new.data_ptr():
                continue
            if not home.ndim:
                self._numbers.append((home, new))
                continue
            home.copy_(new.to(home.dtype), non_blocking=True)
            self._device.counters.nbytes["down"] += home.nbytes if home.device.type == "cpu" else 0

    def new_state(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Make an empty tensor of optimizer state where ``like`` is."""
        return torch.empty_like(like, dtype=dtype)

    def adopt_state(self, state: Tensor) -> Tensor:
        """Return the state as it is."""
        return state

    def finish(self) -> None:
        """Copy numbers of the state to their places. Blocks for those on the host."""
        numbers, self._numbers = self._numbers, []
        for home, stepped in numbers:
            home.copy_(stepped)


class ByTrips(OnDevice):
    """Slices are copied to the device, stepped there, and copied back, in a few lanes."""

    def __init__(self, chunk: int, device: Device) -> None:
        super().__init__(chunk, device)
        self._streams = [torch.Stream(device=device.torch_device) for _ in range(LANES)]
        self._next: Iterator[Any] = itertools.cycle(self._streams)
        self.made: list[weakref.ref[Tensor]] = []  # state in page-locked memory

    def home(self, weight: Weight) -> Tensor:
        """Return the weight's bytes on the host."""
        return weight.value

    def lane(self) -> AbstractContextManager[Any]:
        """Return the next of the streams, in turn, as a context."""
        stream: AbstractContextManager[Any] = next(self._next)
        return stream

    def new_state(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Make an empty tensor of optimizer state, in page-locked host memory if possible; numbers in plain memory."""
        if not like.ndim:
            return torch.empty((), dtype=dtype, device="cpu")
        storage = self._device.slab(like.numel() * dtype.itemsize).untyped_storage()
        with torch.inference_mode(False):
            made = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, 0, like.shape, dense_strides(like))
        self.made.append(weakref.ref(made))
        return made

    def adopt_state(self, state: Tensor) -> Tensor:
        """Return state in page-locked memory: itself, or a copy."""
        return state if state.is_pinned() else self.new_state(state, state.dtype).copy_(state)

    def finish(self) -> None:
        """Wait until all lanes are done, and copy numbers of the state to their places."""
        for stream in self._streams:
            stream.synchronize()
        super().finish()
