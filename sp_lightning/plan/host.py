"""The state that an optimizer keeps, and the host memory and files of a run."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..compat.modules import tree_leaves
from ..errors import OptionError
from ..host.unit_numbers import STATES, state_nbytes
from ..store.placement import UnitBytes, choose
from .fakes import outside

NAMES = *STATES, "Adafactor"
TRAINED = "state", "weights", "gradients"  # terms that a step reads from a file, and writes
SIDE = 64  # of the weight by which the state of an optimizer that is not torch's is measured


class State(NamedTuple):
    """The parameters that an optimizer steps, and the state that it keeps."""

    share: float  # bytes of state for each byte of the weights that it steps
    stepped: frozenset[int]  # ids of parameters


@dataclass(frozen=True)
class OnDisk:
    """Bytes in files: all of them, and what a step reads and writes."""

    there: int
    read: int
    written: int


def state_of(optimizer: Any, module: nn.Module) -> State:
    """Return the state of an optimizer: of a name, a class, a function of parameters, or None for the module's own."""
    if optimizer is None and not hasattr(module, "configure_optimizers"):
        optimizer = "AdamW"
    if isinstance(optimizer, str):
        name = next((name for name in NAMES if name.lower() == optimizer.lower()), None)
        if name is None:
            allowed = f"one of {', '.join(NAMES)}; or a class or a function of parameters"
            raise OptionError(argument="optimizer", found=optimizer, allowed=allowed)
        optimizer = getattr(torch.optim, name)
    trained = [p for p in module.parameters() if p.requires_grad]
    if optimizer is not None and not trained:
        return State(0.0, frozenset())
    made = optimizers_in(module.configure_optimizers() if optimizer is None else optimizer(trained))  # type: ignore[operator]
    stepped = {id(p): p.nbytes for one in made for group in one.param_groups for p in group["params"]}
    return State(sum(map(_state_nbytes, made)) / max(1, sum(stepped.values())), frozenset(stepped))


def optimizers_in(found: Any) -> list[torch.optim.Optimizer]:
    """List the optimizers in what ``configure_optimizers`` returned."""
    return [one for one in tree_leaves(found) if isinstance(one, torch.optim.Optimizer)]


def _state_nbytes(optimizer: torch.optim.Optimizer) -> float:
    """Return the bytes of state; of an optimizer that is not torch's, by a step of a small weight."""
    known = state_nbytes(optimizer)
    if known is not None:
        return known
    takes = inspect.signature(type(optimizer)).parameters
    arguments = {name: value for name, value in optimizer.defaults.items() if name in takes}
    with outside(), torch.random.fork_rng(devices=[]), torch.enable_grad():
        weight = nn.Parameter(torch.ones(SIDE, SIDE))
        weight.grad = torch.ones_like(weight)
        small = type(optimizer)([weight], **arguments)
        small.step()
        stored = [value.nbytes for value in small.state[weight].values() if isinstance(value, Tensor) and value.dim()]
    nbytes = sum(p.nbytes for group in optimizer.param_groups for p in group["params"])
    return float(sum(stored) / weight.nbytes * nbytes)


def placed(
    units: Sequence[UnitBytes], budget: int | None, has_disk: bool, loads: float
) -> tuple[dict[str, int], OnDisk]:
    """Return the host memory by term, and what is in files as the run decides it.

    Args:
        units: Their bytes.
        budget: Bytes of host memory for them; None: all are in memory.
        has_disk: Whether there is a folder for what trains.
        loads: How often a step loads a unit.
    """
    found = choose(units, sum(map(sum, units)) if budget is None else budget, has_disk, 0)
    moved = {term: sum(getattr(units[index], term) for index in getattr(found, term)) for term in ("frozen", *TRAINED)}
    written, left = sum(moved[term] for term in TRAINED), found.by_term
    terms = {"weights": left["frozen"] + left["weights"], "wire copies": left["fixed"]}
    terms |= {"gradients": left["gradients"], "optimizer": left["state"]}
    return terms, OnDisk(written + moved["frozen"], written + int(loads * moved["frozen"]), written)
