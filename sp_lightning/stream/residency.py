"""The memory of a unit on the device, and whether the leaves show it.

    state     memory   leaves          left by
    ABSENT    none     without bytes   `allocate`
    LOADING   fresh    without bytes   `show`, once compute waits for the copy up; `release`
    SHOWN     fresh    with the bytes  `release`

`release` drops the reference to the memory, and nothing else frees it: what still has a view of it keeps it. The memory
is of compute's pool, as all that the model allocates: whenever it is let go of, its next user is queued behind its last
reader. A copy up waits for what compute had queued when the memory was allocated.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ..compat.torch import storage_id, without_dispatch
from ..errors import DiskError, SourceFileError
from ..host.device import Arrival, Device
from .lazy import set_data
from .leaf import Weight

NO_BYTES = torch.empty(0, dtype=torch.uint8, device="cpu")
shown: dict[int, Residency] = {}  # memory that leaves show, by the address of its storage


class Presence(enum.Enum):
    """Where a unit is between the host and its leaves."""

    ABSENT = enum.auto()
    LOADING = enum.auto()
    SHOWN = enum.auto()


class Residency:
    """The device memory of one unit, and its leaves' view of that memory."""

    def __init__(self, device: Device, weights: Sequence[Weight], nbytes: int) -> None:
        self._device, self.weights, self._nbytes = device, weights, nbytes
        self.places, self._dtypes = [weight.at for weight in weights], {weight.dtype for weight in weights}
        self.state = Presence.ABSENT
        self.flat = NO_BYTES
        self.arrived: Arrival | None = None  # the end of the copy up; None: the copy is yet to begin
        self.home: Any = None  # the stream on which the memory was allocated
        # The stream that waited for the copy last. Before any did, `device.up`: torch 2.11 has `stream != None` False.
        self.shown_on: Any = device.up

    def allocate(self, here: Any) -> None:
        """Allocate the unit's memory on the stream ``here``; copies up wait for the work queued on that stream."""
        assert self.state is Presence.ABSENT
        self.flat = self._device.empty(self._nbytes)
        self.state, self.arrived, self.home = Presence.LOADING, None, here
        self.shown_on = self._device.up
        self._device.up.wait_event(here.record_event())

    def show(self, here: Any, versions: Sequence[int]) -> None:
        """Make the stream ``here`` wait for the copy up, and point the leaves at the memory, with these versions."""
        assert self.arrived is not None
        self.arrived.wait(here)
        self.shown_on = here
        if here != self.home:
            self._device.keep_for(self.flat, here)
        if self.state is Presence.SHOWN:
            return
        self.state = Presence.SHOWN
        shown[storage_id(self.flat.untyped_storage())] = self
        with without_dispatch(), torch.inference_mode(False):
            typed = {dtype: self.flat.view(dtype) for dtype in self._dtypes}
            for weight in self.weights:
                set_data(weight.there, typed[weight.dtype].as_strided(*weight.form))
            show_versions(self.weights, versions)

    def release(self) -> None:
        """Take the bytes from the leaves, and drop the reference to the memory: views of it keep it alive."""
        if self.state is Presence.LOADING and self.arrived is not None:
            with contextlib.suppress(DiskError, SourceFileError):  # errors of a load whose bytes nobody needed
                self.arrived.wait(self.home)  # the memory's next user is queued behind the copy
        if self.state is Presence.SHOWN:
            del shown[storage_id(self.flat.untyped_storage())]
            with without_dispatch():
                for weight in self.weights:
                    if weight.is_part:  # a kept weight that consists of the part keeps the memory
                        weight.make_leaf()
                    else:
                        set_data(weight.there, weight.blank)
        self.state, self.flat = Presence.ABSENT, NO_BYTES


def show_versions(weights: Sequence[Weight], versions: Sequence[int]) -> None:
    """Increment the autograd version of each leaf whose bytes changed since its last visit, as in a plain run."""
    for weight, version in zip(weights, versions, strict=True):
        if version != weight.shown:
            if weight.shown >= 0:
                increment_version(weight.there)
            weight.shown = version
