"""A run within a budget of host memory: what exceeds it stays in files, or goes to a disk if one is given."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..autograd.autocast_weights import castable
from ..compat.modules import is_compiled
from ..core.telemetry import Counters
from ..disk.placement import choose
from ..disk.scratch_file import ScratchFile, check_folder, check_room, make_room
from ..disk.weight_files import WeightFiles, choose_files, usual_budget
from ..memory.device import Device
from ..memory.host_copy import FileHome
from ..memory.partition import Unit
from ..optim.state_in_memory import StateInMemory
from ..optim.state_on_disk import StateOnDisk, left_nbytes
from ..options import Options
from .in_memory import InMemory


class WithinBudget(InMemory):
    """The files that weights of a run stay in, as a budget of host memory requires."""

    spills = False  # whether what exceeds the budget may go to a disk

    def __init__(
        self,
        module: nn.Module,
        device: Device,
        options: Options,
        compute_dtype: torch.dtype | None,  # on the device, of weights that are FP32 on the host; None: FP32
        may_cast: bool,  # whether weights may come to travel in autocast's type
        trains: bool,  # whether what requires gradients may be trained
        counters: Counters,
    ) -> None:
        self._module = module
        self._device = device
        self._options = options
        self._types, self._trains = (compute_dtype, may_cast), trains
        self._counters = counters
        self._budget = options.host_budget or 0
        self._units: Sequence[Unit] = ()
        self.files = WeightFiles(device, counters)

    @property
    def ring_nbytes(self) -> int:
        return super().ring_nbytes + self.files.ring_nbytes

    def choose(self, units: Sequence[Unit]) -> None:
        known = () if is_compiled(self._module) else castable(self._module)
        choice = choose_files(units, self._device, self._budget, *self._types, self._trains, self.spills, known)
        self._units, self._choice = units, choice
        self.in_files, self.adopted, self.on_disk = choice.found.keys(), choice.adopted, choice.placed.on_disk

    def open(self) -> None:
        self.files.open(self._choice)
        is_bounded = self.spills or self._budget  # not "0B": as little as can be had
        self._frozen = [p for p in self._module.parameters() if is_bounded and not p.requires_grad]

    def homes(self, unit: Unit) -> Sequence[FileHome]:
        return self.files.homes(unit)

    def is_outgrown(self) -> bool:
        if self.state.is_on_disk or not any(parameter.requires_grad for parameter in self._frozen):
            return False
        self._frozen = [parameter for parameter in self._frozen if not parameter.requires_grad]
        whole = choose(self._units, {}, self._budget, *self._types, self._trains).host
        return bool(self.in_files) or whole.total > self._budget

    def close_weights(self) -> None:
        self.files.close()

    def close(self) -> None:
        self.files.close()
        self.state.close()
        self.state = StateInMemory()


class WithDisk(WithinBudget):
    """A disk beside those files, for optimizer state and then FP32 weights that the budget has no room for."""

    spills = True

    @property
    def _folder(self) -> str:
        return str(self._options.disk)

    def choose(self, units: Sequence[Unit]) -> None:
        check_folder(self._folder)
        if self._options.host_budget is None and not self._units:  # once: what the run takes then is within it
            self._budget = usual_budget(units)
        super().choose(units)
        if not self.state.is_on_disk and not make_room(self._folder, self.on_disk):
            check_room(self._folder, self.on_disk - left_nbytes(self._folder, self._spilled_params()))

    def open(self) -> None:
        placed = self._choice.placed
        if placed.spilled and not self.state.is_on_disk:
            file, fuses = ScratchFile(self._folder), self._options.fused_optimizer
            self.state = self.files.scratch = StateOnDisk(file, placed.buffer, self._counters, fuses)
        if placed.spilled:  # also those that may come to train: no state of theirs was counted
            frozen = {id(p) for unit in self._units for _, p in unit.params if not p.requires_grad}
            self.state.parameters = frozen.union(map(id, self._spilled_params()))
        super().open()

    def _spilled_params(self) -> list[nn.Parameter]:
        """List the parameters whose state is to be on the disk."""
        return [p for index in self._choice.placed.spilled for _, p in self._units[index].params]
