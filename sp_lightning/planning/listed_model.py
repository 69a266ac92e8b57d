"""A workload to plan for, by its listed numbers (workloads.py).

1. Listed numbers agree with a dry run of the same model within a tenth, by a test: in half precision and under
   autocast. In FP32 attention saves its scores, too, whose bytes depend on the length of a row and are not listed.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..compat.kernels import has_chunked_loss
from ..core.machine import Machine
from ..core.simulation import SimulatedVisit
from ..core.unit_numbers import (
    ONE_PROCESS,
    STATES,
    HostBytes,
    HostSharing,
    UnitHostBytes,
    UnitNumbers,
    host_bytes,
)
from ..disk.direct_ring import BUFFERS, PIECE
from ..disk.placement import Budgeted, UnitPlacement, in_slab, within
from ..errors import OptionError
from ..options import Options
from ..tracing.step_trace import GRADIENTS, KEPT, ROOT, WINDOW, WORKING
from .planned_model import (
    PlannedModel,
    Requirements,
    check_master_weights,
    half_of,
    states_of,
    whole_states,
    with_moved,
    without_disk,
)
from .workloads import Workload, WorkloadPart

HALF_BYTES = 2
# What a listed model's activations take, as multiples of what they would in half precision alone: norms and sums of
# blocks compute in FP32. Of a head's logits there are a copy in FP32, its softmax and gradients, by the loss
# (planned_model.py, Rule 2).
SAVED = {"half": 1.09, "mixed": 1.4, "full": 2.17}
INPUTS = {"half": 1, "mixed": 2, "full": 2}
LOSS = 2
BACKWARD = 1.2  # of a recomputed unit's activations, with their gradients


class ListedModel(PlannedModel):
    """A workload, by its listed numbers, which are for half precision."""

    counted = "tokens"

    def __init__(
        self,
        workload: Workload,
        tokens: int,
        options: Options,
        precision: str = "32-true",
        optimizer: Any = None,
        chunked: bool = False,
        sharing: HostSharing = ONE_PROCESS,
    ) -> None:
        if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
            raise OptionError(argument="batch", found=tokens, allowed="the number of tokens of a workload's batch")
        if options.activations not in ("keep", "recompute"):
            found, allowed = options.activations, "'keep' or 'recompute' for a workload, which lists nothing else"
            raise OptionError(argument="activations", found=found, allowed=allowed)
        if options.units != "auto":
            allowed = "'auto' for a workload, which lists its units (name them with its config.json as the model)"
            raise OptionError(argument="units", found=options.units, allowed=allowed)
        check_master_weights(options, precision)
        self._workload = workload
        self._chunked, self._sharing = chunked, sharing
        self._precision = precision
        self._optimizer = optimizer
        dtype = torch.bfloat16 if self._host_width(options) == HALF_BYTES else torch.float32
        self._states = states_of(optimizer, None, dtype)
        self.rows = tokens
        self.name = workload.name
        scores = ": in FP32 they take more (plan the model's config.json)" if self._kind() == "full" else ""
        self.notes = [f"planned from listed numbers, in which attention's scores are not saved{scores}"]

    def _kind(self) -> str:
        """Return the kind of precision: "mixed", "half", or "full", whose activations are FP32 or wider."""
        return "mixed" if self._precision.endswith("mixed") else "half" if half_of(self._precision) else "full"

    def _host_width(self, options: Options) -> int:
        """Return the bytes of a weight on the host."""
        if self._precision == "64-true":
            return 8
        return HALF_BYTES if self._kind() == "half" and not options.master_weights else 4

    def _wire_width(self, part: WorkloadPart, options: Options) -> int:
        """Return the bytes of a weight on its way: tables that are looked up are never cast by autocast."""
        casts = self._kind() == "mixed" and options.wire_dtype == "auto" and not options.compile_units
        if options.master_weights or (casts and part.active):
            return HALF_BYTES
        return self._host_width(options)

    def needs(self, options: Options, machine: Machine) -> Requirements:
        return self.with_rows(self.rows, options, machine)

    def with_rows(self, rows: int, options: Options, machine: Machine) -> Requirements:
        recompute = options.activations == "recompute"
        kind = self._kind()
        slower = machine.flops_per_s / (machine.fp32_flops_per_s or machine.flops_per_s) if kind == "full" else 1.0
        parts = sorted(self._workload.parts, key=lambda part: part.resident)  # a stable order
        plain = {cost.name: cost for cost in self._workload.units(rows, chunked=self._chunked, kind=kind)}
        costs = []
        for part in parts:
            cost, wire = plain[part.name], self._wire_width(part, options)
            forward = slower * cost.forward_flops
            again = recompute and not (self._chunked and part.vocabulary)  # what is in chunks is made again anyway
            costs.append(
                replace(
                    cost,
                    up_nbytes=part.parameters * wire,
                    down_nbytes=part.parameters * wire,
                    cast=part.parameters * (wire != self._host_width(options)),
                    forward_flops=forward,
                    backward_flops=slower * cost.backward_flops + again * forward,
                    backward_other=cost.backward_other + again * cost.forward_other,
                    activation_nbytes=round(SAVED[kind] * cost.activation_nbytes),
                    input_nbytes=round(INPUTS[kind] * cost.input_nbytes),
                )
            )
        first = HALF_BYTES if options.master_weights else self._host_width(options)  # bytes in the first step
        device = {part.name: part.parameters * first for part in parts}
        later = {cost.name: cost.up_nbytes for cost in costs}  # and of gradients, in the first step too

        turns, kept = [], 0  # places of units in `costs`, with what is on the device beside weights at their turn
        for turn, cost in enumerate(costs):
            working, gradient = 0, later[cost.name]
            if _feeds_the_loss(cost):
                of_loss = plain[cost.name].activation_nbytes
                turns.append((turn, {KEPT: kept, WORKING: of_loss if self._chunked else LOSS * of_loss}))
                gradient = device[cost.name] if self._chunked else gradient  # of a weight that the loss itself casts
            else:
                kept += cost.input_nbytes if recompute else cost.activation_nbytes
                working = recompute * round(BACKWARD * cost.activation_nbytes)
            turns.append((turn, {KEPT: kept, WORKING: working, GRADIENTS: 2 * gradient}))

        if (of_table := _gradient_of_tied(parts, later)) and len(costs) > 1:
            # The head's gradient waits for the embedding's, to which it is added; a block's is on its way down.
            turns.append((0, {KEPT: of_table, WORKING: of_table, GRADIENTS: of_table + later[costs[1].name]}))

        def step(nbytes: Mapping[str, int], window: int) -> dict[str, int]:
            """Return the peak of a step with these bytes of each unit's weights."""
            fullest = _fullest(tuple(nbytes[cost.name] for cost in costs if not cost.resident), window)
            weights = [*fullest, *(max(fullest) for cost in costs if cost.resident)]
            root = sum(nbytes[cost.name] for cost in costs if cost.resident)
            found = ({WINDOW: weights[turn], ROOT: root} | beside for turn, beside in turns)
            return max(found, key=lambda terms: sum(terms.values()))

        def peak(window: int, transfer: int) -> dict[str, int]:
            if device == later:
                return step(device, window)
            narrow = step(device, max(1, window // 2))  # window.py, Rule 4
            return max(step(later, window), narrow, key=lambda terms: sum(terms.values()))

        sizes = [replace(c, up_nbytes=device[c.name], down_nbytes=device[c.name]) for c in costs]
        width, whole = self._host_width(options), self._workload.parts
        trained = [part.parameters * width for part in whole]
        placed, names = self._placed(options), [part.name for part in whole]
        stepped = {**placed.travelling, **placed.masters}
        wires = {index: whole[index].parameters * HALF_BYTES for index in placed.travelling if index in placed.masters}
        travelling = {names[index] for index in placed.travelling}
        costs = [replace(cost, disk_nbytes=cost.up_nbytes * (cost.name in travelling)) for cost in costs]
        state = [whole_states(self._movable_states()) * nbytes for nbytes in trained]
        costs = with_moved(costs, names, placed, trained, stepped, wires, placed.gradients, state)
        return Requirements(costs, _sweep(costs), peak, sizes, weights_on_disk=sum(stepped.values()))

    @property
    def logits_nbytes(self) -> int:
        vocabularies = (part.vocabulary for part in self._workload.parts if has_chunked_loss and not self._chunked)
        return 4 * self.rows * sum(vocabularies)

    def in_chunks(self) -> PlannedModel | None:
        if not self.logits_nbytes:
            return None
        return ListedModel(self._workload, self.rows, Options(), self._precision, self._optimizer, True, self._sharing)

    def host(self, options: Options, needs: Requirements) -> HostBytes:
        units, placed = self._units(options), self._placed(options)
        units = [replace(unit, wire=unit.wire * (i not in placed.travelling)) for i, unit in enumerate(units)]
        host = host_bytes(units, states=self._states, ring=placed.host.ring // self._sharing.ranks)
        return without_disk(host, placed, units, self._movable_states())

    def _units(self, options: Options) -> list[UnitHostBytes]:
        """List the host memory of the parts."""
        width, units = self._host_width(options), []
        for part in self._workload.parts:
            nbytes, wire = part.parameters * width, self._wire_width(part, options)
            units.append(UnitHostBytes(weights=nbytes, wire=part.parameters * wire * (wire != width), trained=nbytes))
        return units

    def _placed(self, options: Options) -> Budgeted:
        """Choose what is on the disk, of a workload whose weights all train (planned_model.py, Rule 3)."""
        ranks = self._sharing.ranks
        units = [replace(unit, wire=ranks * unit.wire) for unit in self._units(options)]
        whole = host_bytes(self._units(options), states=STATES["AdamW"])
        whole = self._sharing.together(whole, max(unit.trained for unit in units))
        placements = [
            UnitPlacement(
                whole=unit,
                kept=unit,
                in_files=0,
                state=STATES["AdamW"] * unit.trained,
                masters=unit.weights if unit.wire else 0,
                wires=unit.wire,
                slab=in_slab([unit.trained]),
                as_is=0 if unit.wire else unit.weights,
            )
            for unit in units
        ]
        read = 0 if options.master_weights else max(placement.masters for placement in placements)
        budget = whole.total if options.host_budget is None else options.host_budget
        largest = read, max(unit.weights for unit in units)
        of_copies, travelling = (ranks * BUFFERS * min(PIECE, nbytes) for nbytes in largest)
        return within(placements, budget, whole, 0, options.spills, of_copies, travelling, self._sharing)

    def states(self) -> float:
        return self._states

    def _movable_states(self) -> float:
        return self.movable_states(self._sharing, self._optimizer)

    def in_half(self) -> PlannedModel | None:
        if half_of(self._precision) and not self._precision.endswith("mixed"):
            return None
        return ListedModel(
            self._workload, self.rows, Options(), "bf16-true", self._optimizer, self._chunked, self._sharing
        )


@functools.lru_cache
def _fullest(sizes: tuple[int, ...], window: int) -> list[int]:
    """Return, for each unit, the bytes of the largest window that it is in: a window has neighbours."""
    window = min(window, len(sizes))
    sums = [sum(sizes[first : first + window]) for first in range(len(sizes) - window + 1)]
    return [max(sums[max(0, place - window + 1) : place + 1]) for place in range(len(sizes))]


def _feeds_the_loss(cost: UnitNumbers) -> bool:
    """Whether a listed unit is the head, whose outputs are larger than a block's."""
    return cost.name.startswith("head")


def _gradient_of_tied(parts: Sequence[WorkloadPart], nbytes: Mapping[str, int]) -> int:
    """Return the bytes of the gradient of a table that the first part looks up and a head multiplies with, or 0."""
    shared = any(part.vocabulary and not part.parameters and part.active == parts[0].parameters for part in parts)
    return nbytes[parts[0].name] if shared else 0


def _sweep(costs: Sequence[UnitNumbers]) -> list[SimulatedVisit]:
    """List a plain step's visits: forward over all units, what is resident, then backward in reverse order."""
    streamed = [index for index, cost in enumerate(costs) if not cost.resident]
    roots = [index for index, cost in enumerate(costs) if cost.resident]
    works = [SimulatedVisit(i, costs[i].forward_flops, other_nbytes=costs[i].forward_other) for i in streamed]
    works[-1] = replace(
        works[-1],
        flops=works[-1].flops + sum(costs[i].forward_flops + costs[i].backward_flops for i in roots),
        other_nbytes=works[-1].other_nbytes + sum(costs[i].forward_other + costs[i].backward_other for i in roots),
    )
    for index in reversed(streamed):
        cost, sends = costs[index], (index,) if costs[index].trained else ()
        works.append(SimulatedVisit(index, cost.backward_flops, sends=sends, other_nbytes=cost.backward_other))
    trained_roots = tuple(index for index in roots if costs[index].trained)
    works[-1] = replace(works[-1], sends=(*works[-1].sends, *trained_roots))
    return works
