"""The host memory and the disk of a run, by term, and the state that its optimizer keeps."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..core.unit_numbers import STATES, HostBytes, HostSharing, UnitHostBytes, aligned, host_bytes, state_nbytes
from ..disk import state_ring
from ..disk.placement import Budgeted, choose, may_move, may_travel
from ..errors import OptionError
from ..optim.pieces import ELEMENTWISE
from ..options import Options
from .fakes import outside
from .model import PlannedModel, optimizers_in
from .step import sent

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


@dataclass
class OnDisk:
    """Bytes that are in files, by unit."""

    weights: int = 0
    loaded: dict[int, int] = field(default_factory=dict)  # by each load
    read: dict[int, int] = field(default_factory=dict)  # by each step
    written: dict[int, int] = field(default_factory=dict)


def host_of(
    model: PlannedModel, options: Options, state: State, sharing: HostSharing, narrow_gradients: bool
) -> tuple[HostBytes, OnDisk]:
    """Return the host memory of one process, and what it has on the disk.

    Args:
        model: The model.
        options: Its options.
        state: The optimizer's state.
        sharing: The ranks of the machine.
        narrow_gradients: Whether gradients stay in the type in which they come down.
    """
    units = model.units_of(options)
    every = [p for unit in units for _, p in unit.params]
    if model.answers:
        cache = model.trace(options, tokens=model.answers.tokens).cache
        host = host_bytes([UnitHostBytes.of(every)], training=False)
        return replace(host, keys_and_values=int(cache) if model.answers.cache == "host" else 0), OnDisk()
    wires = {id(p): _wire_nbytes(p, model.travels_as(p, options)) for p in every}
    placed = _placed(model, options, sharing, {key for key, nbytes in wires.items() if nbytes})
    stepped = {id(p) for p in every if p.requires_grad and (state.stepped is None or id(p) in state.stepped)}
    of_units, disk, unmoved = [], OnDisk(), State(state.name, state.share)
    if sharing.several and state.name not in CUT:
        unmoved = State(state.name, 0.0)  # each rank has it in memory
    for unit in units:
        params = [p for _, p in unit.params]
        filed = {id(p): p.nbytes for p in params if not p.requires_grad and unit.index in placed.units}
        moved = may_move(params, model.half if options.master_weights else None, {key for key in wires if wires[key]})
        travels = may_travel(params, moved, options.master_weights) if unit.index in placed.travelling else []
        there = {id(p): p for p in (*(moved if unit.index in placed.masters else []), *travels)}
        kept = [p for p in params if id(p) not in filed]
        wire = sum(aligned(wires[id(p)]) for p in kept if id(p) not in set(map(id, travels)))
        unstepped = UnitHostBytes.of(p for p in params if id(p) not in stepped).trained
        of_units.append(replace(UnitHostBytes.of(kept), wire=wire, unstepped=unstepped))
        trained = [p for p in params if p.requires_grad and p.dim()]
        masters = sum(p.nbytes for p in there.values() if id(p) in stepped)
        gradients = sum(p.nbytes for p in trained) if unit.index in placed.gradients else 0
        of_state = unmoved.whole * sum(p.nbytes for p in trained if id(p) in stepped and unit.index in placed.spilled)
        disk.weights += sum(filed.values()) + sum(p.nbytes for p in there.values())
        disk.loaded[unit.index] = sum(filed.values()) + sum(wires[id(p)] or p.nbytes for p in travels)
        disk.read[unit.index] = of_state + masters + gradients
        disk.written[unit.index] = disk.read[unit.index] + (sum(wires[id(p)] for p in travels) if masters else 0)
    stowed = sum(int(sent(visit, options.activations)) for visit in model.trace(options).visits)
    ring = placed.host.ring // sharing.ranks
    host = host_bytes(of_units, states=state.share, activations=stowed, ring=ring)
    if narrow_gradients:
        host = replace(host, gradients=min(host.gradients, sum(size.down_nbytes for size in model.sizes(options))))
    if options.host_budget is None:
        return host, OnDisk()
    if not placed.fits:  # what it would be refused with
        return replace(placed.host, activations=max(host.activations, placed.host.activations)), disk
    return _without_disk(host, placed, of_units, unmoved), disk


def _wire_nbytes(parameter: Tensor, dtype: torch.dtype) -> int:
    """Return the bytes of a weight's wire copy; 0 for one that travels as it is."""
    return 0 if dtype is parameter.dtype else parameter.numel() * dtype.itemsize


def _placed(model: PlannedModel, options: Options, sharing: HostSharing, narrow: set[int]) -> Budgeted:
    """Return what is where: all in memory without a budget."""
    if options.host_budget is None:
        return Budgeted(units=[], host=HostBytes(), in_files=0)
    units, masters = model.units_of(options), options.master_weights
    frozen = {id(p): p.nbytes for unit in units for _, p in unit.params if not p.requires_grad}
    placed = choose(
        units,
        frozen,
        options.host_budget,
        model.half if masters else None,
        model.mixed and options.may_cast and not masters,
        True,
        options.spills,
        castable=narrow,
        sharing=sharing,
    )
    if any(id(p) in frozen for index in placed.units for _, p in units[index].params):
        model.note("frozen weights are taken to be in local files as they are")
    return placed


def _without_disk(host: HostBytes, placed: Budgeted, units: list[UnitHostBytes], state: State) -> HostBytes:
    """Return the host memory of a run less what is on the disk."""
    stepped = sum(units[index].trained - units[index].unstepped for index in placed.spilled)
    of_state = state.whole * stepped
    of_state += max(0, int(state.share * stepped) - of_state - placed.factored)  # of vectors
    weights = sum(placed.masters.values()) + sum(placed.travelling.values())
    gradients = sum(units[index].trained for index in placed.gradients)
    is_used = of_state + weights + gradients or not placed.spilled  # else the ring is not made
    return replace(
        host,
        weights=host.weights - weights,
        gradients=host.gradients - gradients,
        optimizer=host.optimizer - of_state,
        ring=host.ring - (0 if is_used else state_ring.BUFFERS * placed.buffer),
    )
