"""Which bytes of a run are in memory, and which in files: decided once, from bytes."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

LEAST = 4096  # the fewest bytes of a weight that may be in the scratch file
TERMS = ("frozen", "state", "weights", "gradients")  # in the order in which they leave memory


class UnitBytes(NamedTuple):
    """How many bytes a unit takes in host memory, split into the kinds that may be moved to files."""

    frozen: int = 0  # of frozen weights that lie in files as they travel
    state: int = 0  # of optimizer state, taken as two numbers for each element that trains
    weights: int = 0  # of weights that train
    gradients: int = 0
    fixed: int = 0  # of all else, which has to be in memory

    @classmethod
    def of(cls, params: Iterable[Tensor], wire_of: Callable[[Any], torch.dtype], filed: Container[int]) -> UnitBytes:
        """Count the host bytes of a unit's parameters, by what may be in files.

        Args:
            params: The parameters.
            wire_of: Returns the type in which a parameter travels from memory.
            filed: The ids of frozen parameters that lie in files.
        """
        terms = dict.fromkeys(cls._fields, 0)
        for param in params:
            wire = wire_of(param)
            travels = param.numel() * wire.itemsize
            if wire is not param.dtype and id(param) not in filed:
                terms["fixed"] += travels
            if not param.requires_grad:
                terms["frozen" if id(param) in filed else "fixed"] += param.nbytes
            elif may_move(param):
                terms["state"] += 2 * param.nbytes
                terms["weights"] += param.nbytes
                terms["gradients"] += travels
            else:
                terms["fixed"] += 3 * param.nbytes + travels
        return cls(**terms)


def may_move(param: Tensor) -> bool:
    """Whether a weight, its state and its gradient may be in the scratch file: small ones would be slow there."""
    return param.requires_grad and param.layout is torch.strided and param.nbytes >= LEAST


@dataclass(frozen=True)
class Placement:
    """The kinds of bytes that are in files, each as the indices of its units; all else is in memory."""

    frozen: frozenset[int] = frozenset()
    state: frozenset[int] = frozenset()
    weights: frozenset[int] = frozenset()
    gradients: frozenset[int] = frozenset()
    host: int = 0  # bytes that are left in memory, buffers included
    disk: int = 0  # bytes in the scratch file
    by_term: dict[str, int] = field(default_factory=dict)  # bytes in memory, by term

    @property
    def is_in_memory(self) -> bool:
        """Whether nothing is in files."""
        return not (self.frozen or self.state or self.weights or self.gradients)


def choose(units: Sequence[UnitBytes], budget: int, has_disk: bool, buffers: int) -> Placement:
    """Choose units whose weights, state or gradients are in files, until the rest fits the budget.

    The kinds of bytes leave memory in the order of TERMS: frozen weights cost a read in each visit,
    state a read and a write in each step, weights that train both, gradients a write and a read. Where only part of a
    kind leaves, its units are spread over the model, so that the disk has no bursts.
    """
    host = sum(map(sum, units))
    left = {term: sum(getattr(unit, term) for unit in units) for term in (*TERMS, "fixed")}
    if host <= budget:
        return Placement(host=host, by_term=left)
    host += buffers
    gone: dict[str, set[int]] = {term: set() for term in TERMS}
    for term in TERMS if has_disk else TERMS[:1]:
        for index in sorted(range(len(units)), key=_turn_of):
            nbytes = getattr(units[index], term)
            if nbytes and host > budget:
                gone[term].add(index)
                host, left[term] = host - nbytes, left[term] - nbytes
    disk = sum(getattr(units[index], term) for term in TERMS[1:] for index in gone[term])
    sets = {term: frozenset(indices) for term, indices in gone.items()}
    return Placement(**sets, host=host, disk=disk, by_term={**left, "buffers": buffers})


def _turn_of(index: int) -> int:
    """Return a unit's turn (its index, bits reversed), by which the first few turns are spread over the model."""
    return int(f"{index:032b}"[::-1], 2)
