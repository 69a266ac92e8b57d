"""A run whose weights and optimizer state are in memory.

1. Each event is one call here, so no other file asks whether anything is in files or on a disk.
2. A storage lives as long as its handle. Where units are made anew, it chooses and opens again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from ..gradients.slab import GradientSlab
from ..host.unit_numbers import HostSharing
from ..memory.device import Device
from ..memory.host_copy import FileHome, HostCopy
from ..optim.state_in_memory import StateInMemory
from ..stream.partition import Unit


class Sharers(Protocol):
    """The ranks, one or several, as far as they choose together (ranks/alone.py)."""

    sharing: HostSharing

    @property
    def ranks(self) -> Any:
        """The processes that have one scratch file."""

    def least(self, number: int) -> int:
        """Return the least of the numbers with which all ranks come here."""

    def same_on_all(self, marks: Sequence[object], tensors: Sequence[Tensor]) -> Sequence[bool]:
        """Return which of these marks of tensors are the same on all ranks, each of which has as many.

        A mark may be another one on another machine: there the tensors' bytes are compared, but of those without one.
        """


class InMemory:
    """The memory that all of a run is in."""

    in_files: Collection[int] = ()  # ids of weights that stay in files
    adopted: Collection[int] = ()  # ids of weights that are in files, and do not stay there
    on_disk = 0  # bytes of the optimizer's state, and of weights, that will be on a disk
    frozen: Sequence[nn.Parameter] = ()  # there may be no memory for training these
    maps_blocks = False  # for the whole run (malloc.py)

    def __init__(self, state: StateInMemory | None = None) -> None:
        self.state = state or StateInMemory()  # of optimizers

    @property
    def ring_nbytes(self) -> int:
        """Bytes of the buffers through which files are read and written."""
        return self.state.ring_nbytes

    def choose(self, units: Sequence[Unit], ranks: Sharers) -> None:
        """Choose what of these units is to be in files, the same on all ranks, before anything is allocated."""

    def open(self) -> None:
        """Open the files that were chosen."""

    def homes(self, unit: Unit) -> Sequence[FileHome]:
        """Return the files in which weights of a unit lie, none or one."""
        return ()

    @property
    def may_stay_narrow(self) -> bool:
        """Whether gradients may stay in the type in which they come down (slab.py, Rule 3)."""
        return self.state.steps_narrow

    def gradients_of(self, store: HostCopy, device: Device) -> GradientSlab:
        """Make the memory in which a unit's gradients arrive."""
        return GradientSlab(store, device)

    def check_state(self, optimizers: Iterable[Optimizer]) -> None:
        """Raise HostMemoryError if a budget has no room for what these optimizers will have in memory.

        Those of earlier calls count, too. State that is unknown does not.
        """

    def is_outgrown(self, is_awaited: Callable[[], bool]) -> bool:
        """Return whether parameters came to train for which the memory does not suffice.

        While some graph waits for its backward, as ``is_awaited`` says, that can wait: only memory is at stake.
        """
        return False

    def close_weights(self) -> None:
        """Close the files of weights, until they are opened again."""

    def close(self) -> None:
        """Close all files, and free what optimizers step with."""
        self.state.close()
