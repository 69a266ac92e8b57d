"""State of several ranks in one scratch file, of which each moves the ranges that it steps.

1. State lies in segments that all ranks map, as it does in memory (sharded_step.py, Rules 2 and 7). Owners make them,
   and move state there that was loaded or that user code replaced.
2. What a rank owns of a large parameter is whole blocks of the file, which no other rank writes: it is moved directly,
   and stepped in portions (state_on_disk.py, Rule 2). What it owns of others is stepped through the mapping.
3. Optimizers that ranks do not cut are stepped by torch's own code on every rank, with state in memory: a rank's range
   of a parameter is not what a class like Adafactor steps.
4. The first step makes state in a buffer: its ranges are allocated before it, on all ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..disk.scratch_file import SharedSegment
from ..optim.pieces import ELEMENTWISE, Group, ShadowStep, State, keeps_no_state
from ..optim.state_on_disk import StateOnDisk, state_like

log = logging.getLogger(__name__)


class OwnStateOnDisk(StateOnDisk):
    """The state of optimizers in the scratch file of a machine's ranks, and this rank's steps of its part."""

    _made: Mapping[Tensor, dict[str, Tensor]] = {}  # where the next step makes state, by the tensors that it steps

    def shadow(self, optimizer: Optimizer, fuses: bool) -> ShadowStep | None:
        return super().shadow(optimizer, fuses) if type(optimizer) in ELEMENTWISE else None  # Rule 3

    def segment(self, parameter: Tensor, nbytes: int, what: int) -> SharedSegment | None:
        return self._file.share(nbytes, what) if id(parameter) in self.parameters else None

    def to_make(self, optimizer: Optimizer, group: Group, parameter: Tensor) -> Collection[str]:
        if id(parameter) not in self.parameters or keeps_no_state(optimizer, group):
            return ()
        return state_like(parameter, optimizer, group, {})

    def make_in(self, made: Mapping[Tensor, dict[str, Tensor]]) -> None:
        self._made = made

    def _new_state(self, shadow: Any, group: Group, param: Tensor, makes: dict[Any, State]) -> dict[str, Tensor] | None:
        return self._made.get(param)  # Rule 4

    def _say_slow(self, optimizer: Any, what: str) -> None:
        """Log, once for each class, that state stays in memory (Rule 3), or is stepped through the mapping."""
        if type(optimizer) in ELEMENTWISE:
            super()._say_slow(optimizer, what)
        elif type(optimizer) not in self._said:
            self._said.add(type(optimizer))
            log.info(
                "superpipeline: every rank steps %s, or some of its parameters, as a whole: their state is in memory",
                type(optimizer).__name__,
            )

    def _adopt(self, state: Any, parameter: Tensor) -> None:
        """Do nothing (Rule 1)."""
