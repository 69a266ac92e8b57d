"""A run within a budget of host memory: what exceeds it stays in files, or goes to a disk if one is given."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..autograd.autocast_weights import castable
from ..compat.modules import is_compiled
from ..compat.references import shares_storage, sharing_bytes
from ..core import malloc
from ..core.host import headroom, host_memory
from ..core.telemetry import Counters
from ..core.unit_numbers import UnitHostBytes, state_nbytes
from ..disk.placement import Budgeted, choose, may_move, may_travel
from ..disk.scratch_file import (
    ScratchFile,
    check_folder,
    check_room,
    in_memory_nbytes,
    make_room,
)
from ..disk.source_files import Found, check_available, find
from ..disk.weight_files import WeightFiles, find_local
from ..errors import HostMemoryError
from ..gradients.slab import GradientSlab
from ..gradients.slab_on_disk import GradientRing, SlabOnDisk
from ..memory.device import Device
from ..memory.host_copy import FileHome, HostCopy
from ..memory.partition import Unit
from ..memory.pinned import find_foreign
from ..memory.watched_parameters import true_data
from ..optim.pieces import ELEMENTWISE, is_elementwise
from ..optim.state_in_memory import StateInMemory
from ..optim.state_on_disk import StateOnDisk, left_nbytes
from ..options import Options, format_both, format_bytes
from .in_memory import InMemory, Sharers

log = logging.getLogger(__name__)


class WithinBudget(InMemory):
    """The files that weights of a run stay in, as a budget of host memory requires."""

    spills = False  # whether what exceeds the budget may go to a disk
    in_files: Mapping[int, Found]

    def __init__(
        self,
        module: nn.Module,
        device: Device,
        options: Options,
        compute_dtype: torch.dtype | None,  # on the device, of weights that are FP32 on the host; None: FP32
        may_cast: bool,  # whether weights may come to travel in autocast's type
        trains: bool,  # whether what requires gradients may be trained
        counters: Counters,
        state: StateInMemory,  # of optimizers, as far as it is not on a disk
    ) -> None:
        super().__init__(state)
        self._module = module
        self._device, self.maps_blocks = device, device.is_host
        self._options = options
        self._types, self._trains = (compute_dtype, may_cast), trains
        self._counters = counters
        self._budget = options.host_budget or 0
        self._units: Sequence[Unit] = ()
        self.in_files = {}
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._thawed: set[int] = set()  # ids of parameters that came to train while state was on a disk
        self._thawed_nbytes = 0  # of those since units were chosen: gradients, and weights that leave their files
        self.files = WeightFiles(device, counters)

    @property
    def ring_nbytes(self) -> int:
        return super().ring_nbytes + self.files.ring_nbytes

    def choose(self, units: Sequence[Unit], ranks: Sharers) -> None:
        check_available(self._budget)
        keep = self._device.is_host or bool(self._units)  # those that share bytes (host_copy.py, Rule 7)
        self._units, self._sharing = units, ranks.sharing
        parameters = self._params(range(len(units)))
        may_stay = [p for p in parameters if not (self._trains and p.requires_grad)]
        found = find_local(p for p in may_stay if not (self._device.is_host and shares_storage(p)))
        places = [found[id(p)].place if id(p) in found else None for p in parameters]
        same = ranks.same_on_all(places, parameters)  # the first rank's weights are all ranks' (host_copy.py, Rule 8)
        everywhere = {id(parameter) for parameter, is_same in zip(parameters, same, strict=True) if is_same}
        found = {key: at for key, at in found.items() if key in everywhere}
        filed = {key: at.nbytes for key, at in found.items()}
        casts = () if is_compiled(self._module) else castable(self._module)
        shared = self._bound_to_memory(parameters, keep)
        kinds = *self._types, self._trains, self.spills
        placed = choose(units, filed, self._budget, *kinds, casts, shared, self._sharing, self.in_files)
        if not placed.fits:
            raise HostMemoryError(self._not_met(placed, [p for p in parameters if id(p) not in found]))
        stay = set(map(id, self._params(placed.units)))
        self.placed, self.on_disk = placed, placed.on_disk
        self.in_files = {key: at for key, at in found.items() if key in stay}
        self.adopted = found.keys() - stay if placed.units or placed.spilled else ()
        moved = {i: may_move(self._params([i]), self._types[0], casts, shared) for i in range(len(units))}
        self._moved = {id(parameter) for index in placed.masters for parameter in moved[index]}
        kind = self._types[0] is not None, shared, self._trains
        travelling = (may_travel(self._params([i]), moved[i], *kind) for i in placed.travelling)
        self._wired = {id(parameter) for of_unit in travelling for parameter in of_unit}
        if placed.units:
            log.info(
                "superpipeline: %s of weights stay in their files, those of %d of %d units; with them %s of host "
                "memory",
                format_bytes(placed.in_files),
                len(placed.units),
                len(units),
                format_bytes(placed.host.total),
            )

    def _params(self, indices: Iterable[int]) -> list[nn.Parameter]:
        """List the parameters of units."""
        return [parameter for index in indices for _, parameter in self._units[index].params]

    def _bound_to_memory(self, parameters: Sequence[nn.Parameter], keep: bool) -> set[int]:
        """Return the ids of weights that may not be on a disk; with ``keep`` those to whose bytes others may refer."""
        return set()

    def open(self) -> None:
        if self.maps_blocks:
            malloc.by_themselves()
        self.files.open(self.in_files, self._moved | self._wired, self._wired)
        may_need = self.in_files if self._sharing.several else ()  # ranks step in memory that they share
        is_bounded = self._is_bounded
        frozen = [p for p in self._module.parameters() if (is_bounded or id(p) in may_need) and not p.requires_grad]
        self.frozen = [p for p in frozen if id(p) not in self._thawed]
        self._thawed_nbytes = 0

    @property
    def _is_bounded(self) -> bool:
        """Whether there may be no memory for what comes to train; with "0B" there is as much as it takes."""
        return self._budget > 0

    def homes(self, unit: Unit) -> Sequence[FileHome]:
        return self.files.homes(unit)

    def is_outgrown(self, is_awaited: Callable[[], bool]) -> bool:
        thawed = [parameter for parameter in self.frozen if parameter.requires_grad]
        # Ranks make their units anew together, and know nothing of each other's graphs.
        if not thawed or (not self._sharing.several and is_awaited()):
            return False
        self.frozen = [parameter for parameter in self.frozen if not parameter.requires_grad]
        filed = [parameter for parameter in thawed if id(parameter) in self.in_files]
        if self.state.is_on_disk:  # once for each parameter: parts may be frozen in turns
            self._thawed.update(map(id, thawed))
            self._thawed_nbytes += sum(p.nbytes for p in [*thawed, *filed])
            outgrown = self.placed.host.total + self._thawed_nbytes > self._budget
            # Each rank steps its part of a weight, which has to be in memory that all share.
            return self._trains and (outgrown or (bool(filed) and self._sharing.several))
        if filed:  # they are given memory of their own, and do not come here again
            return True
        left = {key: at.nbytes for key, at in self.in_files.items()}
        least = choose(self._units, left, 0, *self._types, self._trains, sharing=self._sharing).host  # all stay there
        return least.total > self._budget

    def _not_met(self, placed: Budgeted, parameters: Sequence[nn.Parameter]) -> str:
        """Say what these parameters, which have to be in memory, and the rest of the run take of it."""
        trains = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
        others = sum(parameter.nbytes for parameter in parameters) - trains
        terms = ", ".join(f"{name} {format_bytes(n)}" for name, n in asdict(placed.host).items() if n)
        total = format_bytes(placed.host.total, up=True)  # to be copied
        spill = "Give disk= a folder on a local SSD for the optimizer's state. " * self._lacks_disk(placed)
        return (
            f"host_budget={format_bytes(self._budget)} cannot be met: with {format_bytes(placed.in_files)} of weights "
            f"left in their files{self._spilled(placed)} the run takes {total} of host memory ({terms}). {spill}"
            f"Of the weights in memory {format_bytes(trains)} require gradients (freeze what does not train: "
            f"requires_grad_(False)), and {format_bytes(others)} are in no file as they are (load them in the files' "
            "own type, from_pretrained(dtype='auto')). Raise the budget, or give '0B' for as little as can be had"
        )

    def _lacks_disk(self, placed: Budgeted) -> bool:
        """Whether a disk would take a part of this, and none was given."""
        return placed.host.optimizer > 0

    def _spilled(self, placed: Budgeted) -> str:
        """Say what of this is on the disk."""
        return ""

    def check_state(self, optimizers: Iterable[Optimizer]) -> None:
        self._optimizers.update(optimizers)
        budget, others = self._options.host_budget, self.placed.host.total - self.placed.host.optimizer
        if budget and others + self._state_nbytes() > budget:
            gc.collect()  # an optimizer is in a cycle with its schedulers
            state = self._state_nbytes()
            if others + state > budget:
                kinds = ", ".join(sorted({type(one).__name__ for one in self._optimizers}))
                needed, room = format_both(state, max(0, budget - others))
                copied = any(map(self._stepped_whole, self._optimizers))
                copies = ", and of weights that each rank copies as it steps them whole," * copied
                raise HostMemoryError(
                    f"host_budget={format_bytes(budget)} cannot be met: {kinds} has {needed} of state{copies} in host "
                    f"memory, and beside all else {room} are left for it. Nothing was stepped. Give '0B' for as little "
                    "as can be had, or a budget with room for all state in memory"
                )

    def _state_nbytes(self) -> int:
        """Count the bytes in memory of state that known optimizers will have, and of weights that ranks copy to step.

        These copies end with the step of each optimizer.
        """
        parameters, ranks = self._params(range(len(self._units))), self._sharing.ranks
        ids, there = set(map(id, parameters)), set(self.state.parameters)
        state, copies = 0, 0
        for optimizer in list(self._optimizers):
            whole = self._stepped_whole(optimizer) & ids
            one, each = (state_nbytes(optimizer, of) or 0 for of in (ids - whole, whole))
            state += one - (state_nbytes(optimizer, there - whole, shaped=True) or 0) + ranks * each
            copies = max(copies, ranks * UnitHostBytes.of(p for p in parameters if id(p) in whole).trained)
        return state + copies

    def _stepped_whole(self, optimizer: Optimizer) -> set[int]:
        """Return the ids of parameters of which each of several ranks steps a copy, with state of its own."""
        groups = optimizer.param_groups if self._sharing.several else ()
        whole = (one for one in groups if type(optimizer) not in ELEMENTWISE or not is_elementwise(optimizer, one))
        return {id(parameter) for group in whole for parameter in group["params"]}

    def close_weights(self) -> None:
        self.files.close()

    def close(self) -> None:
        self.files.close()
        self.state.close()
        self.state = StateInMemory()


def _here_nbytes(parameters: Sequence[nn.Parameter]) -> int:
    """Count the bytes of memory that a run has before it begins: weights, and gradients that an earlier one left."""
    filed = find(parameters)
    weights = (true_data(p) for p in parameters if not p.is_meta and id(p) not in filed)
    grads = (p.grad for p in parameters if p.grad is not None and p.grad.layout is torch.strided)
    return in_memory_nbytes([*weights, *grads])


class WithDisk(WithinBudget):
    """A disk beside those files, for optimizer state and then weights that the budget has no room for."""

    spills = True
    _gradients: GradientRing | None = None  # through which they go to the disk

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._made: set[int] = set()  # units whose gradients are there

    def choose(self, units: Sequence[Unit], ranks: Sharers) -> None:
        assert self._options.disk is not None
        check_folder(self._options.disk)
        self._ranks = ranks.ranks
        if self._options.takes_what_is_free and not self._units:  # once: what the run takes then is within it
            memory, parameters = host_memory(), [parameter for unit in units for _, parameter in unit.params]
            self._budget = max(1, ranks.least(memory.free + _here_nbytes(parameters) - headroom(memory.total)))
        super().choose(units, ranks)
        if not self.state.is_on_disk:
            folder, nbytes = self._options.disk, self.on_disk
            if not make_room(folder, nbytes):
                spilled = self._params({*self.placed.spilled, *self.placed.masters, *self.placed.travelling})
                check_room(folder, nbytes - left_nbytes(folder, spilled))

    def _bound_to_memory(self, parameters: Sequence[nn.Parameter], keep: bool) -> set[int]:
        bound = sharing_bytes(parameters) | find_foreign(parameters) if keep else set()  # placement.py, Rule 5
        if not self._trains:
            bound |= {id(p) for p in parameters if p.is_meta or in_memory_nbytes([true_data(p)])}
        return bound

    @property
    def _is_bounded(self) -> bool:
        return True

    def _lacks_disk(self, placed: Budgeted) -> bool:
        return False

    def _spilled(self, placed: Budgeted) -> str:
        what = "optimizer state and weights" if placed.masters or placed.travelling else "optimizer state"
        return f" and {format_bytes(placed.on_disk)} of {what if self._trains else 'weights'} on the disk"

    def open(self) -> None:
        placed = self.placed
        if placed.on_disk and not self.state.is_on_disk:
            assert self._options.disk is not None
            file = ScratchFile(self._options.disk, self._ranks)
            self.state = self.files.scratch = self._on_disk(file, placed.buffer)
            self._gradients = GradientRing(file, self._device, self._counters, placed.gradient_buffer)
            self.state.gradients_to_come = self._gradients_to_come
        if placed.spilled:  # also those that may come to train: no state of theirs was counted
            frozen = (p for p in self._params(range(len(self._units))) if not p.requires_grad)
            self.state.parameters = set(map(id, [*frozen, *self._params(placed.spilled)]))
        super().open()

    @property
    def ring_nbytes(self) -> int:
        return super().ring_nbytes + (0 if self._gradients is None else self._gradients.nbytes)

    def gradients_of(self, store: HostCopy, device: Device) -> GradientSlab:
        if self._gradients is None or store.unit.index not in self.placed.gradients:
            return super().gradients_of(store, device)
        self._made.add(store.unit.index)
        return SlabOnDisk(store, device, self._gradients)

    def close_weights(self) -> None:
        super().close_weights()
        if self._gradients is not None:
            self._gradients.close()  # the device unlocks its buffers; those that are made next are locked

    def _gradients_to_come(self) -> int:
        return sum(nbytes for index, nbytes in self.placed.gradients.items() if index not in self._made)

    def close(self) -> None:
        if self._gradients is not None:
            self._gradients.close()
        super().close()

    def _on_disk(self, file: ScratchFile, buffer_nbytes: int) -> StateOnDisk:
        if self._sharing.several:
            from .disk_of_ranks import OwnStateOnDisk  # on one device nothing needs it

            return OwnStateOnDisk(file, buffer_nbytes, self._counters, self._options.fused_optimizer)
        if self._options.optimizer_device == "host" or self._device.is_host:
            return StateOnDisk(file, buffer_nbytes, self._counters, self._options.fused_optimizer)
        from ..optim.device_step import StepsOnDevice  # a run that steps on the host needs nothing of these
        from .disk_to_device import FromDiskToDevice

        assert isinstance(self.state, StepsOnDevice)
        return FromDiskToDevice(file, buffer_nbytes, self._counters, self.state)
