"""State of several ranks in one scratch file, of which each moves the ranges that it steps.

1. State lies in segments that all ranks map, as it does in memory (sharded_step.py, Rules 2 and 7). Owners make them,
   and move state there that was loaded or that user code replaced.
2. What a rank owns of a large parameter is whole blocks of the file, which no other rank writes: it is moved directly,
   and stepped in portions (state_on_disk.py, Rule 2). What it owns of others is stepped through the mapping.
3. The first step makes state in a buffer: its ranges are allocated before it, on all ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..disk.scratch_file import SharedSegment
from ..optim.pieces import Group, State
from ..optim.state_on_disk import StateOnDisk, state_like


class OwnStateOnDisk(StateOnDisk):
    """The state of optimizers in the scratch file of a machine's ranks, and this rank's steps of its part."""

    _made: Mapping[Tensor, dict[str, Tensor]] = {}  # where the next step makes state, by the tensors that it steps

    def segment(self, parameter: Tensor, nbytes: int, what: int) -> SharedSegment | None:
        return self._file.share(nbytes, what) if id(parameter) in self.parameters else None

    def to_make(self, optimizer: Optimizer, group: Group, parameter: Tensor) -> Collection[str]:
        return state_like(parameter, optimizer, group, {}) if id(parameter) in self.parameters else ()

    def make_in(self, made: Mapping[Tensor, dict[str, Tensor]]) -> None:
        self._made = made

    def _new_state(self, shadow: Any, group: Group, param: Tensor, makes: dict[Any, State]) -> dict[str, Tensor] | None:
        return self._made.get(param)  # Rule 3

    def _adopt(self, state: Any, parameter: Tensor) -> None:
        """Do nothing (Rule 1)."""
