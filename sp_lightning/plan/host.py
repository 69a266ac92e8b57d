"""The host memory and the disk of a run, by term, and the state that its optimizer keeps."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..core.unit_numbers import STATES, HostBytes, HostSharing, UnitHostBytes, aligned, host_bytes, state_nbytes
from ..disk import state_ring
from ..disk.placement import Budgeted, choose, may_move, may_travel
from ..errors import OptionError
from ..memory.partition import Unit
from ..optim.pieces import ELEMENTWISE
from ..options import Options
from .fakes import outside
from .model import PlannedModel

CUT = frozenset(kind.__name__ for kind in ELEMENTWISE)  # optimizers of which each rank steps a part


EIGHT_BITS = {"AdamW8bit": 2.03}  # bytes of state for each parameter, of bitsandbytes' optimizers
NAMES = *STATES, "Adafactor", *EIGHT_BITS


class State(NamedTuple):
    """An optimizer's name, its state, and what it steps."""

    name: str
    share: float  # bytes of state for each byte of the weights that it steps
    stepped: frozenset[int] | None = None  # ids of parameters; None: all that train

    @property
    def whole(self) -> int:
        """Count the tensors of a parameter's shape."""
        return int(self.share + 1e-3)


def state_of(optimizer: Any, module: nn.Module) -> State:
    """Return the state of an optimizer: of a name, a class, a function of parameters, or None for the module's own."""
    trained = [p for p in module.parameters() if p.requires_grad]
    if optimizer is None and not hasattr(module, "configure_optimizers"):
        optimizer = "AdamW"
    if isinstance(optimizer, str):
        name = next((name for name in NAMES if name.lower() == optimizer.lower()), None)
        if name is None:
            near = difflib.get_close_matches(optimizer, NAMES, 1)
            allowed = f"one of {', '.join(NAMES)}, a class or a function of parameters"
            allowed += f" (did you mean {near[0]!r}?)" if near else ""
            raise OptionError(argument="optimizer", found=optimizer, allowed=allowed)
        if name in EIGHT_BITS:
            return State(name, EIGHT_BITS[name] / trained[0].itemsize if trained else 0.0)
        optimizer = getattr(torch.optim, name)
    made = list(optimizers_in(module.configure_optimizers() if optimizer is None else optimizer(trained or [_one()])))  # type: ignore[operator]
    groups = [group for one in made for group in one.param_groups]
    stepped = {id(p): p for group in groups for p in group["params"] if p.requires_grad}
    nbytes = sum(map(_state_nbytes, made))
    share = nbytes / max(1, UnitHostBytes.of(stepped.values()).trained)
    return State(type(made[0]).__name__ if made else "", share, frozenset(stepped) if optimizer is None else None)


def optimizers_in(found: Any) -> Iterator[torch.optim.Optimizer]:
    """Yield the optimizers in what ``configure_optimizers`` returned."""
    if isinstance(found, torch.optim.Optimizer):
        yield found
    elif isinstance(found, dict):
        yield from optimizers_in(found.get("optimizer"))
    elif isinstance(found, list | tuple):
        for item in found:
            yield from optimizers_in(item)


def _state_nbytes(optimizer: torch.optim.Optimizer) -> float:
    known = state_nbytes(optimizer)
    if known is not None:
        return known
    takes = inspect.signature(type(optimizer)).parameters
    arguments = {name: value for name, value in optimizer.defaults.items() if name in takes}
    each = _stored(lambda parameters: type(optimizer)(parameters, **arguments))
    return each * UnitHostBytes.of(p for group in optimizer.param_groups for p in group["params"]).trained


def _one() -> nn.Parameter:
    return nn.Parameter(torch.ones(64, 64))


def _stored(make: Callable[[Any], torch.optim.Optimizer]) -> float:
    """Step one parameter, and count what is stored for it."""
    stored: float
    with outside(), torch.random.fork_rng(devices=[]), torch.enable_grad():
        parameter = _one()
        optimizer = make([parameter])
        parameter.grad = torch.ones(64, 64)
        optimizer.step()
        stored = sum(value.nbytes for value in optimizer.state[parameter].values() if isinstance(value, Tensor))
    return stored // 64 * 64 / parameter.nbytes  # without the step counter


# ---- bytes


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
        wires = sum(aligned(_wire_nbytes(model, options, p)) for p in kept if id(p) not in there)
        one = UnitHostBytes.of(kept)
        unstepped = UnitHostBytes.of(p for _, p in unit.params if id(p) not in stepped).trained
        of_units.append(replace(one, wire=wires, unstepped=unstepped))
    ring = placed.host.ring // sharing.ranks
    host = host_bytes(of_units, states=state.share, activations=stowed, ring=ring)
    if narrow_gradients:
        came = sum(size.down_nbytes for size in model.sizes(options))
        host = replace(host, gradients=min(host.gradients, came))
    if options.host_budget is None:
        return host, OnDisk()
    movable = 0.0 if sharing.several and state.name not in CUT else state.share
    on_disk = _on_disk(model, options, units, placed, filed, stepped, State(state.name, movable))
    return _without_disk(host, placed, of_units, movable), on_disk


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
    return 0 if dtype is parameter.dtype else parameter.numel() * dtype.itemsize
