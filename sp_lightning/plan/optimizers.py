"""The state that an optimizer keeps, in bytes for each byte of weights that it steps."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..core.unit_numbers import STATES, state_nbytes
from ..errors import OptionError
from .fakes import outside

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
    share = nbytes / max(1, sum(p.nbytes for p in stepped.values()))
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
    return each * sum(p.nbytes for group in optimizer.param_groups for p in group["params"] if p.requires_grad)


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
