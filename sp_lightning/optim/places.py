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
    """Where slices are stepped."""

    chunk: int  # elements of a slice

    def home(self, weight: Weight) -> Tensor:
        """Return the true bytes of a weight."""

    def lane(self) -> AbstractContextManager[Any]:
        """Return the context in which a run of slices is stepped."""

    def wait(self, arrived: Arrival, tensor: Tensor) -> None:
        """Have what follows in the lane read a tensor after it has arrived."""

    def up(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return tensors where they are stepped: the same ones, if they are there."""

    def down(self, stepped: list[tuple[Tensor, Tensor]]) -> None:
        """Bring tensors that were stepped, the second of each pair, to where they belong."""

    def new(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Make a tensor of the optimizer's state, which is to belong where this one does."""

    def adopt(self, state: Tensor) -> Tensor:
        """Return a tensor of the optimizer's state, which was made elsewhere, as `new` would have made it."""

    def finish(self) -> None:
        """Wait until all that belongs on the host is there."""


class OnHost:
    """Slices are stepped where they are."""

    def __init__(self, chunk: int) -> None:
        self.chunk = chunk

    def home(self, weight: Weight) -> Tensor:
        return weight.value

    def lane(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def wait(self, arrived: Arrival, tensor: Tensor) -> None:
        arrived.synchronize()

    def up(self, tensors: list[Tensor]) -> list[Tensor]:
        return tensors

    def down(self, stepped: list[tuple[Tensor, Tensor]]) -> None:
        for home, new in stepped:
            if home.data_ptr() != new.data_ptr():
                home.copy_(new)

    def new(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.empty_like(like, dtype=dtype)

    def adopt(self, state: Tensor) -> Tensor:
        return state

    def finish(self) -> None:
        """Return at once."""


class OnDevice:
    """Slices of resident weights are stepped where they are, on the caller's stream."""

    def __init__(self, chunk: int, device: Device) -> None:
        self.chunk, self._device = LONGER * chunk, device
        self._numbers: list[tuple[Tensor, Tensor]] = []  # of the state, which come down last: each blocks the host

    def home(self, weight: Weight) -> Tensor:
        return weight.there

    def lane(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def wait(self, arrived: Arrival, tensor: Tensor) -> None:
        if tensor.device.type == "cpu":
            arrived.synchronize()
        else:
            arrived.wait(self._device.current_stream())

    def up(self, tensors: list[Tensor]) -> list[Tensor]:
        there = [tensor.to(self._device.torch_device, non_blocking=True) for tensor in tensors]
        went = [tensor.nbytes for tensor, new in zip(tensors, there, strict=True) if new is not tensor]
        self._device.counters.bytes_up += sum(went)
        return there

    def down(self, stepped: list[tuple[Tensor, Tensor]]) -> None:
        for home, new in stepped:
            if home.data_ptr() == new.data_ptr():
                continue
            if not home.ndim:
                self._numbers.append((home, new))
                continue
            home.copy_(new.to(home.dtype), non_blocking=True)
            self._device.counters.bytes_down += home.nbytes if home.device.type == "cpu" else 0

    def new(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.empty_like(like, dtype=dtype)

    def adopt(self, state: Tensor) -> Tensor:
        return state

    def finish(self) -> None:
        numbers, self._numbers = self._numbers, []
        for home, stepped in numbers:
            home.copy_(stepped)


class ByTrips(OnDevice):
    """Slices go up to be stepped, and come down."""

    def __init__(self, chunk: int, device: Device) -> None:
        super().__init__(chunk, device)
        self._streams = [torch.Stream(device=device.torch_device) for _ in range(LANES)]
        self._next: Iterator[Any] = itertools.cycle(self._streams)
        self.made: list[weakref.ref[Tensor]] = []  # state in page-locked memory

    def home(self, weight: Weight) -> Tensor:
        return weight.value

    def lane(self) -> AbstractContextManager[Any]:
        stream: AbstractContextManager[Any] = next(self._next)
        return stream

    def new(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Make it in page-locked memory if that is possible, but for numbers."""
        if not like.ndim:
            return torch.empty((), dtype=dtype, device="cpu")
        storage = self._device.slab(like.numel() * dtype.itemsize).untyped_storage()
        with torch.inference_mode(False):
            made = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, 0, like.shape, dense_strides(like))
        self.made.append(weakref.ref(made))
        return made

    def adopt(self, state: Tensor) -> Tensor:
        return state if state.is_pinned() else self.new(state, state.dtype).copy_(state)

    def finish(self) -> None:
        for stream in self._streams:
            stream.synchronize()
        super().finish()
