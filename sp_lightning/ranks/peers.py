"""The part of a stream through several devices that stands in the place of `Alone`."""

from __future__ import annotations

from ..host.device import Device
from ..host.room import Room
from ..optim.steps import Steps
from ..store.store import Store
from ..stream.gradients import Gradients
from ..stream.unit import Unit
from .alone import Alone
from .reduction import SharedGradients
from .sharded_steps import SharedSteps
from .team import Team


class Peers(Team, Alone):  # type: ignore[misc]  # its slabs are shared ones
    """The other processes that train the same model."""

    def steps(self, chunk: int, overlap: bool, device: Device, store: Store, makes_trips: bool) -> Steps:
        return SharedSteps(chunk, overlap, device, store, self)

    def gradients(self, device: Device, steps: Steps, units: list[Unit], room: Room | None) -> Gradients:
        return SharedGradients(device, steps, self, units)
