"""Optimizer state in memory, where torch makes it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from torch import Tensor
from torch.optim import Optimizer

from .pieces import Group, ShadowStep, fuse, step_in_pieces


class StateInMemory:
    """The memory that the state of optimizers is in."""

    is_on_disk = False
    steps_narrow = True  # gradients in the type in which they came down (slab.py, Rule 3)
    parameters: Collection[int] = ()  # ids of those whose state lies on a disk
    to_come = ring_nbytes = 0

    def follow(self, parameters: Iterable[Tensor]) -> None:
        """Note the parameters that are streamed from now on."""

    def shadow(self, optimizer: Optimizer, fuses: bool) -> ShadowStep | None:
        """Make what steps an optimizer faster than its own code does; return None if nothing does."""
        return (fuse if fuses else step_in_pieces)(optimizer)

    def attach(self, optimizer: Optimizer, shadow: ShadowStep | None) -> None:
        """Have an optimizer's state lie here from now on."""

    def adopt_one(self, optimizer: Optimizer, parameter: Tensor) -> None:
        """Move the state of one parameter, which was loaded, to where it lies."""

    def to_make(self, optimizer: Optimizer, group: Group, parameter: Tensor) -> Collection[str]:
        """Return the names of the state of a parameter's shape that its first step makes in a file."""
        return ()

    def make_in(self, made: Mapping[Tensor, dict[str, Tensor]]) -> None:
        """Have the next step make the state of these tensors in these parts of the file."""

    def expect(self, optimizers: Sequence[Optimizer]) -> None:
        """Note optimizers that will make state."""

    def check_room(
        self,
        optimizers: Sequence[Optimizer],
        checkpoints: Callable[[str], int] = lambda folder: 0,
        beside: Sequence[StateInMemory] = (),
    ) -> None:
        """Raise DiskError if the disk has no room for the state that these optimizers will make, and for checkpoints.

        What other modules' optimizers will make `beside` them on this disk counts, too; of optimizers whose state is
        unknown nothing does. ``checkpoints`` counts their bytes on the disk of a folder.
        """

    def close(self) -> None:
        """Close the file, if there is one. State lives on as tensors over it. Safe twice."""
