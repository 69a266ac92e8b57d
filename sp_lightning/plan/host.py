"""What a run takes of the host's memory and of its disk, by term: formulas of the sizes of its units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from ..core.unit_numbers import HostBytes, HostSharing, UnitHostBytes, aligned, host_bytes
from ..disk import state_ring
from ..disk.activation_blocks import in_memory_nbytes, written_nbytes
from ..disk.placement import Budgeted, choose, may_move, may_travel
from ..memory.partition import Unit
from ..optim.pieces import ELEMENTWISE
from ..options import Options
from .model import PlannedModel
from .optimizers import State

CUT = frozenset(kind.__name__ for kind in ELEMENTWISE)  # optimizers of which each rank steps a part


@dataclass(frozen=True)
class OnDisk:
    """Bytes that are in files, by unit."""

    weights: int = 0
    loaded: Mapping[int, int] = field(default_factory=dict)  # by each load
    read: Mapping[int, int] = field(default_factory=dict)  # by each step
    written: Mapping[int, int] = field(default_factory=dict)
    activations: int = 0


def host_of(
    model: PlannedModel, options: Options, state: State, sharing: HostSharing, narrow_gradients: bool
) -> tuple[HostBytes, OnDisk]:
    """Return the host memory of one process, and what it has on the disk."""
    units = model.units_of(options)
    stepped = {id(p) for unit in units for _, p in unit.params if p.requires_grad}
    stepped = stepped if state.stepped is None else stepped & state.stepped
    if model.answers:
        of_units = [UnitHostBytes.of(p for _, p in unit.params) for unit in units]
        found = model.later(options, tokens=model.answers.tokens)
        waiting = found.cache if model.answers.cache == "host" else 0
        return replace(host_bytes(of_units, training=False), keys_and_values=waiting), OnDisk()
    stowed = sum(visit.down for visit in model.later(options).visits)
    filed, placed = _placed(model, options, units, sharing)
    of_units = []
    for unit in units:
        kept = [p for _, p in unit.params if id(p) not in filed.get(unit.index, {})]
        there = set() if unit.index not in placed.travelling else set(map(id, _travelling(model, options, unit)))
        wires = sum(_wire_nbytes(model, options, p) for p in kept if id(p) not in there)
        one = UnitHostBytes.of(kept)
        unstepped = UnitHostBytes.of(p for _, p in unit.params if id(p) not in stepped).trained
        of_units.append(replace(one, wire=wires, unstepped=unstepped))
    in_memory = in_memory_nbytes(stowed, placed.block, placed.room) if placed.room else stowed
    ring = placed.host.ring // sharing.ranks
    host = host_bytes(of_units, states=state.share, activations=in_memory, ring=ring)
    if narrow_gradients:
        came = sum(size.down_nbytes for size in model.sizes(options))
        host = replace(host, gradients=min(host.gradients, came))
    if options.host_budget is None:
        return host, OnDisk()
    movable = 0.0 if sharing.several and state.name not in CUT else state.share
    on_disk = _on_disk(model, options, units, placed, filed, stepped, State(state.name, movable))
    activations = written_nbytes(stowed, placed.block, placed.room) if placed.room else 0
    return _without_disk(host, placed, of_units, movable), replace(on_disk, activations=activations)


def _placed(
    model: PlannedModel, options: Options, units: Sequence[Unit], sharing: HostSharing
) -> tuple[dict[int, dict[int, int]], Budgeted]:
    """Return the bytes of weights that stay in files, by unit and parameter, and what is where."""
    if options.host_budget is None:
        return {}, Budgeted(units=[], host=HostBytes(), in_files=0)
    frozen = {unit.index: {id(p): p.nbytes for n, p in unit.params if not p.requires_grad} for unit in units}
    everything = {key: nbytes for of_unit in frozen.values() for key, nbytes in of_unit.items()}
    placed = choose(
        units,
        everything,
        options.host_budget,
        model.half if options.master_weights else None,
        model.mixed and options.may_cast and not options.master_weights,
        model.answers is None,
        model.answers is None and options.spills,
        castable=_narrow(model, options, units),
        sharing=sharing,
        offloads=options.offloads,
    )
    if placed.units and any(frozen[index] for index in placed.units):
        model.note("frozen weights are taken to be in local files as they are")
    return {index: frozen[index] for index in placed.units}, placed


def _on_disk(
    model: PlannedModel,
    options: Options,
    units: Sequence[Unit],
    placed: Budgeted,
    filed: Mapping[int, Mapping[int, int]],
    stepped: set[int],
    state: State,
) -> OnDisk:
    loaded, read, written, weights = {}, {}, {}, 0
    for unit in units:
        index = unit.index
        moved = _moved(model, options, unit) if index in placed.masters else []
        travels = _travelling(model, options, unit) if index in placed.travelling else []
        there = {id(p): p for p in (*moved, *travels)}
        trained = [p for _, p in unit.params if p.requires_grad and p.dim()]
        nbytes = sum(p.nbytes for p in there.values() if id(p) in stepped)
        wire = sum(_wire_nbytes(model, options, p) for p in travels) if nbytes else 0
        gradients = sum(p.nbytes for p in trained) if index in placed.gradients else 0
        of_state = state.whole * sum(p.nbytes for p in trained if id(p) in stepped) if index in placed.spilled else 0
        as_it_is = sum(_wire_nbytes(model, options, p) or p.nbytes for p in travels)
        loaded[index] = sum(filed.get(index, {}).values()) + as_it_is
        read[index] = of_state + nbytes + gradients
        written[index] = of_state + nbytes + wire + gradients
        weights += sum(filed.get(index, {}).values()) + sum(p.nbytes for p in there.values())
    return OnDisk(weights, loaded, read, written)


def _without_disk(host: HostBytes, placed: Budgeted, units: Sequence[UnitHostBytes], states: float) -> HostBytes:
    """Return the host memory of a run less what is on the disk, or what it would be refused with."""
    if not placed.fits:
        return replace(placed.host, activations=max(host.activations, placed.host.activations))
    stepped = sum(units[index].trained - units[index].unstepped for index in placed.spilled)
    state = int(states + 1e-3) * stepped
    state += max(0, int(states * stepped) - state - placed.factored)  # of vectors
    weights = sum(placed.masters.values()) + sum(placed.travelling.values())
    gradients = sum(units[index].trained for index in placed.gradients)
    is_used = state + weights + gradients or not placed.spilled  # else the ring is not made
    return replace(
        host,
        weights=host.weights - weights,
        gradients=host.gradients - gradients,
        optimizer=host.optimizer - state,
        ring=host.ring - (0 if is_used else state_ring.BUFFERS * placed.buffer),
    )


def _narrow(model: PlannedModel, options: Options, units: Sequence[Unit]) -> set[int]:
    return {id(p) for unit in units for _, p in unit.params if model.travels_as(p, options) is not p.dtype}


def _moved(model: PlannedModel, options: Options, unit: Unit) -> list[Tensor]:
    """List a unit's FP32 weights that can be on the disk."""
    dtype = model.half if options.master_weights else None
    return may_move([p for _, p in unit.params], dtype, _narrow(model, options, [unit]))


def _travelling(model: PlannedModel, options: Options, unit: Unit) -> list[Tensor]:
    """List a unit's weights that can travel from the disk."""
    return may_travel([p for _, p in unit.params], _moved(model, options, unit), options.master_weights)


def _wire_nbytes(model: PlannedModel, options: Options, parameter: Tensor | nn.Parameter) -> int:
    """Return the bytes of a weight's wire copy; 0 for one that travels as it is."""
    dtype = model.travels_as(parameter, options)
    return 0 if dtype is parameter.dtype else aligned(parameter.numel() * dtype.itemsize)
