"""The state that an optimizer keeps, and the host memory and files of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..compat.torch import tree_leaves
from ..errors import OptionError
from ..store.placement import UnitBytes, choose

TRAINED = "state", "weights", "gradients"  # terms that a step reads from a file, and writes


@dataclass(frozen=True)
class OnDisk:
    """Bytes in files: all of them, and what a step reads and writes."""

    there: int
    read: int
    written: int


def state_share(optimizer: Any, module: nn.Module) -> float:
    """Return an optimizer's bytes of state for each byte of trained weights, by stepping one weight of each shape.

    Args:
        optimizer: A name, a class, a function of parameters, or None for the module's own, or else AdamW.
        module: The module.
    """
    trained = [p for p in module.parameters() if p.requires_grad]
    if not trained:
        return 0.0
    if optimizer is None and hasattr(module, "configure_optimizers"):
        made = module.configure_optimizers()  # type: ignore[operator]
    else:
        made = (_kind(optimizer or "AdamW") if optimizer is None or isinstance(optimizer, str) else optimizer)(trained)
    optimizers = [one for one in tree_leaves(made) if isinstance(one, Optimizer)]
    return sum(map(_state_nbytes, optimizers)) / sum(p.nbytes for p in trained)


def _kind(name: str) -> Any:
    """Return the class of ``torch.optim`` with this name, in upper or lower case."""
    kinds = {key: kind for key, kind in vars(torch.optim).items() if isinstance(kind, type) and kind is not Optimizer}
    found = next((kind for key, kind in kinds.items() if key.lower() == name.lower()), None)
    if found is None:
        allowed = f"one of {', '.join(kinds)}; or a class or a function of parameters"
        raise OptionError(argument="optimizer", found=name, allowed=allowed)
    return found


def _state_nbytes(optimizer: Optimizer) -> int:
    """Return the bytes of an optimizer's state, by stepping one weight of each shape. Replaces its parameters."""
    stepped: list[tuple[nn.Parameter, int]] = []
    for group in optimizer.param_groups:
        alike = Counter((p.shape, p.dtype) for p in group["params"] if p.requires_grad)
        group["params"] = [nn.Parameter(torch.empty(shape, dtype=dtype)) for shape, dtype in alike]
        stepped += zip(group["params"], alike.values(), strict=True)
    for weight, _ in stepped:
        weight.grad = torch.empty_like(weight)
    type(optimizer).step(optimizer)
    states = [(value, count) for weight, count in stepped for value in optimizer.state[weight].values()]
    return sum(count * value.nbytes for value, count in states if isinstance(value, Tensor) and value.dim())


def placed(
    units: Sequence[UnitBytes], budget: int | None, has_disk: bool, loads: float
) -> tuple[dict[str, int], OnDisk]:
    """Decide what of a run's weights, gradients and state is in files; return host bytes by term, and bytes in files.

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
