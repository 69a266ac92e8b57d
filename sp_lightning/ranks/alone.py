"""One process that streams a model by itself: what `Team` (team.py) overrides with what several ranks do.

1. Each event of a step is one call here, so no other file asks whether there are several ranks.
2. A team lives as long as its handle. It begins when the units are there, which get their slabs from it, and is closed
   with them. So it begins again where units are made anew.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..compat.references import shares_storage
from ..gradients.way_down import GradientReturn
from ..host.unit_numbers import ONE_PROCESS
from ..memory.access import Access
from ..memory.device import Device
from ..memory.host_copy import HostCopy, OwnSlab, Slab
from ..optim.pending_step import ALL_PARTS, Kept, Parts
from ..optim.pieces import Group
from ..optim.state_in_memory import StateInMemory
from ..stream.partition import Unit
from .board import ONE_RANK, OneRank

Rest = Callable[[Optimizer, Kept, Parts], tuple[list[Group], Any]]


class Alone:
    """The one process that streams a model: its weights, gradients and optimizers are its own."""

    ranks: OneRank = ONE_RANK
    rank, size = 0, 1  # on all machines
    gives_weights = True  # whether the host copy takes this process's weights, not another's

    sharing = ONE_PROCESS  # of the host's memory
    filed: Mapping[HostCopy, Sequence[int]] = {}  # units' frozen weights, by index, of which ranks share no home

    def __init__(self, device: Device) -> None:
        self._device = device
        self.exchanges = False  # whether every backward that makes gradients exchanges them with other ranks

    def check_alike(self, units: Sequence[Unit]) -> None:
        """Raise UnsupportedError unless all ranks have the same parameters in the same units."""

    def least(self, number: int) -> int:
        """Return the least of the numbers with which all ranks come here."""
        return number

    def same_on_all(self, marks: Sequence[object], tensors: Sequence[Tensor]) -> Sequence[bool]:
        """Return which of these marks of tensors are the same on all ranks, each of which has as many.

        A mark may be another one on another machine: there the tensors' bytes are compared, but of those without one.
        """
        return [True] * len(marks)

    def find_sharing(self, parameters: Sequence[Tensor], again: bool) -> Callable[[Tensor], bool]:
        """Return what says of a parameter that is not moved yet whether it stays where another tensor shares its bytes.

        On its way to a device a weight leaves what shares its bytes, in a plain run too; not what came to share them
        while it was streamed (``again``).
        """
        return shares_storage if self._device.is_host or again else _shares_none

    def slab(self, nbytes: int) -> Slab:
        """Make memory for the weights of the next unit."""
        return OwnSlab(self._device, nbytes)

    def begin(
        self,
        stores: Sequence[HostCopy],
        access: Access,
        gradients: GradientReturn,
        overlaps: bool,
        state: StateInMemory,
    ) -> None:
        """Begin with these units; ``overlaps``: whether gradients may be summed beside backward."""
        self._kept = gradients.kept

    def close(self) -> None:
        """Leave weights, gradients and state to the user's objects. The team may begin again, with units made anew."""

    def leave(self) -> None:
        """Leave the other ranks for good."""

    # ---- one step

    def note_forward(self, ended: bool) -> None:
        """Note that a forward begins, or that one ended which a backward may follow."""

    def backward_begins(self) -> None:
        """Begin a backward, which needs its first unit."""

    def backward_ends(self) -> None:
        """End a backward that raised no error: its gradients are in ``.grad``."""

    def interrupt(self) -> None:
        """End a backward that raised an error, if one did."""

    @property
    def is_to_exchange(self) -> bool:
        """Whether a backward in `exchanging` made gradients, which are no mean yet."""
        return False

    def exchanging(self, loss: Tensor) -> AbstractContextManager[None]:
        """Exchange the gradients of one backward of a loss, in this context, with the other ranks."""
        return contextlib.nullcontext()

    def show_gradients(self) -> None:
        """Complete the gradients that user code is about to read or to replace."""

    def settle(self) -> None:
        """Make true for all ranks what users wrote to weights on each. Every rank comes here."""

    # ---- an optimizer's step

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raise an error if an optimizer steps two modules that ranks share, or cannot step as the options say."""

    def check_divisible(self, optimizer: Optimizer) -> None:
        """Raise OptionError if an optimizer steps weights here whose state is to be divided, and cannot be."""

    def rest(self, optimizer: Optimizer, alone: Rest) -> tuple[list[Group], Any]:
        """Return the groups and the state that an optimizer's own code steps.

        ``alone`` finds them, having deferred what this process may step later.
        """
        return alone(optimizer, self._kept, ALL_PARTS)

    def step_ended(self, optimizer: Optimizer) -> None:
        """End a step that was cut, before hooks of the user's read what other ranks have stepped."""

    def ending(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> AbstractContextManager[None]:
        """End an optimizer's step of these parameters around this context, which writes no weight but moves epochs."""
        return contextlib.nullcontext()

    def adopt_state(self, optimizer: Optimizer) -> None:
        """Move an optimizer's state that was loaded into what the ranks share."""

    def whole_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's ``state_dict()``, whole on the first rank at least. Every rank comes here."""
        return optimizer.state_dict()

    # ---- errors

    def check_between_steps(self) -> None:
        """Raise ExactnessError if ranks step weights that they share now: a checkpoint would be of two steps."""

    def tearing(self) -> AbstractContextManager[None]:
        """Mark a step that several ranks share, and that an error in this context leaves torn (torn_step.py)."""
        return contextlib.nullcontext()

    def fail(self, error: BaseException) -> None:
        """Say to the other ranks that this one ends with an error, and mark a step that is left torn by it."""


def _shares_none(_: Tensor) -> bool:
    return False
