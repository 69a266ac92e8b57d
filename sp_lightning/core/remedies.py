"""The changes that make room, or a step faster: what each is called in every message, and when there is one.

1. The code that offers a change tells in numbers what it takes and gains. Nothing here measures.
2. A change is named as the user makes it. Where it consists of options alone, these stand beside the name.
3. A function returns no remedy where its change cannot be made, or would change nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Remedy(NamedTuple):
    """A change to a run."""

    what: str
    options: Mapping[str, Any]  # of the strategy, that it sets
    cost: str = ""  # what it costs, or does


_NO_OPTIONS: Mapping[str, Any] = {}
_LEAVES_LESS = {"keep": "recompute", "recompute": "recompute+offload", "offload": "recompute"}  # on the device
_COSTS = {"recompute": "each forward runs twice", "recompute+offload": "inputs of units go to the host and come back"}

ADAPTERS = Remedy("training adapters beside frozen weights", _NO_OPTIONS)
TENTH = Remedy("training a tenth of the parameters (adapters)", _NO_OPTIONS)
HALF_STATE = Remedy("an optimizer with half the state", _NO_OPTIONS)
WIRE_AS_IS = Remedy("wire_dtype='as-is'", {"wire_dtype": "as-is"})
LOSS_IN_CHUNKS = Remedy("loss in chunks", _NO_OPTIONS, "the head's products are computed once more")
HALF_BATCHES = Remedy(
    "batches of half the size and accumulate_grad_batches twice as large",
    _NO_OPTIONS,
    "weights are loaded twice as often",
)


def window(size: int) -> Remedy:
    """Set the window."""
    costs = {1: "no weights are loaded while a unit computes", 2: "one unit is copied while another computes"}
    return Remedy(f"window={size}", {"window": size}, costs.get(size, ""))


def activations(policy: str) -> list[Remedy]:
    """Leave fewer activations on the device than this policy or, for "offload", recompute instead."""
    less = _LEAVES_LESS.get(policy)
    return [] if less is None else [Remedy(f"activations={less!r}", {"activations": less}, _COSTS[less])]


def smaller_units(classes: Sequence[str]) -> list[Remedy]:
    """Cut the model into units of these classes (`preflight.finer_classes`); none if there are none."""
    listed = list(classes)
    return [Remedy(f"units={listed}", {"units": listed}, "a window and gradients of smaller units")] if listed else []


def half_precision(single: bool) -> list[Remedy]:
    """Halve the bytes of weights and gradients on the device, of weights that are FP32 there."""
    what = "precision='bf16-true' and master_weights=True"
    return [Remedy(what, {"master_weights": True})] if single else []
