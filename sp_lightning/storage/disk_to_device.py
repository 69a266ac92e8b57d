"""Optimizer state that lies on a disk and is stepped on the device.

1. State comes from the disk into a buffer in portions, as for a step on the host (state_on_disk.py, Rules 2 to 5). From
   there a portion goes up, is stepped with torch's own code, and comes down into the same buffer (device_step.py,
   Rule 9), which goes to the disk. The disk is read and written meanwhile.
2. Parameters are cut into whole vectors, as large as a buffer allows: nothing on the host steps them.
3. What is not on the disk, and what cannot be stepped in portions, is stepped as if all state were in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..core.telemetry import Counters
from ..disk.direct_ring import Buffer
from ..disk.scratch_file import ScratchFile
from ..optim.device_step import StepsOnDevice
from ..optim.pieces import Conversions, Cutting, Group, ShadowStep
from ..optim.state_on_disk import ParameterPart, Spilled, StateOnDisk, even_lengths, in_buffer


class FromDiskToDevice(StateOnDisk):
    """The state of optimizers in one scratch file, and their steps on the device."""

    _reads_gradients = False  # code on the device may change them where no version shows it

    def __init__(self, file: ScratchFile, buffer_nbytes: int, counters: Counters, steps: StepsOnDevice) -> None:
        super().__init__(file, buffer_nbytes, counters, fuses=False)
        self._steps = steps
        self._each_by_itself, self._allocate = steps.each_by_itself, steps.host_bytes

    def follow(self, parameters: Iterable[Tensor]) -> None:
        self._steps.parameters = self.parameters
        self._steps.follow(parameters)

    def shadow(self, optimizer: Optimizer, fuses: bool) -> ShadowStep | None:
        return self._steps.shadow(optimizer, fuses)

    def attach(self, optimizer: Optimizer, shadow: ShadowStep | None) -> None:
        self._steps.attach(optimizer, shadow)
        super().attach(optimizer, shadow)

    def adopt_one(self, optimizer: Optimizer, parameter: Tensor) -> None:
        on_disk = id(parameter) in self.parameters
        (super().adopt_one if on_disk else self._steps.adopt_one)(optimizer, parameter)

    def close(self) -> None:
        super().close()
        self._steps.close()

    def _takes(self, optimizer: Any, group: Group) -> bool:
        return True

    def _first(self, shadow: Any, conversions: Conversions, adopts: bool = False) -> list[Group]:
        """Step what is on the disk, and then what is in memory (Rule 3)."""
        shadow.param_groups = super()._first(shadow, conversions, adopts)
        return self._steps.first(shadow, conversions)

    def _lengths(self, one: Spilled, cutting: Cutting, room: int) -> tuple[int, ...]:
        return even_lengths(one, room, one.param.numel())  # Rule 2

    def _step_parts(self, shadow: Any, parts: Sequence[ParameterPart], buffer: Buffer, cutting: Cutting) -> None:
        step, conversions, pieces = in_buffer(shadow, parts, buffer)
        made = {piece: part.state(buffer) for piece, part in pieces.items() if part.of.is_new}
        self._steps.step_parts(step, conversions, made)
        for piece in made:
            one = pieces[piece].of
            if pieces[piece].is_last:
                one.entry = {key: one.views.get(key, value) for key, value in step.state[piece].items()}
