"""The devices of a stream: one alone, or the ranks that train the same model. Both answer the same calls."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

from torch import nn

from ..host.device import Device
from ..host.memory import Slabs
from ..host.room import Room
from ..optim.steps import Steps
from ..store.store import Store
from ..stream.gradients import Gradients
from ..stream.unit import Unit
from .reduction import SharedGradients
from .sharded_steps import SharedSteps
from .team import Team


class Alone:
    """One device, which shares nothing with others."""

    rank = 0
    slabs: Slabs | None = None  # of its own
    follows_buffers = True  # whether forwards that train, and a Trainer's validation, take the first rank's buffers

    def steps(self, chunk: int, overlap: bool, device: Device, store: Store, makes_trips: bool) -> Steps:
        """Make the object that steps the stream's weights."""
        return Steps(chunk, overlap, device, store, makes_trips)

    def gradients(self, device: Device, steps: Steps, units: list[Unit], room: Room | None) -> Gradients:
        """Make the object that brings gradients to the user's parameters."""
        return Gradients(device, steps, room)

    def check_alike(self, weights: list[str], advice: str) -> None:
        """Raise unless all ranks describe their weights in the same way. Collective; does nothing for one device."""

    def check_new(self, name: str) -> None:
        """Raise if a weight that came after streaming began cannot be streamed; one device streams any."""

    def share_units(self, units: list[Unit], device: Device) -> None:
        """Copy the first rank's weights to all ranks. Collective; does nothing for one device."""

    def share_buffers(self, module: nn.Module) -> None:
        """Copy the first rank's buffers to all ranks. Collective; does nothing for one device."""

    def begin_forward(self, module: nn.Module) -> None:
        """Copy the first rank's buffers to all ranks if they are due. Collective; does nothing for one device."""

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one ends by an error. Does nothing at a second call, and for one device."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backwards exchange no gradients."""
        return contextlib.nullcontext()

    def close(self) -> None:
        """End this rank's threads; ranks that wait for it raise. Does nothing at a second call, and for one device."""


class Peers(Team, Alone):  # type: ignore[misc]  # its slabs are shared ones
    """The other processes that train the same model."""

    def steps(self, chunk: int, overlap: bool, device: Device, store: Store, makes_trips: bool) -> Steps:
        """Make the object that steps this rank's part of each weight."""
        return SharedSteps(chunk, overlap, device, store, self)

    def gradients(self, device: Device, steps: Steps, units: list[Unit], room: Room | None) -> Gradients:
        """Make the object that brings gradients, as means over all ranks, to the user's parameters."""
        return SharedGradients(device, steps, self, units)
