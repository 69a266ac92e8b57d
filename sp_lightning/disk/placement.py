"""Which weights stay in their files, so that the rest of a run fits into a budget of host memory.

1. Weights that nothing trains may stay: those that require no gradient and, in a run that only evaluates, all.
2. A unit's weights stay together, all that can. First those of the resident rest, which are read once; then those of
   streamed units, spread evenly over the model, so that the disk works all the time instead of in bursts.
3. Only as much stays in files as the budget requires. A budget that cannot be met is an error, with the terms. "0B"
   asks for as little as can be had: all that can stay does, and whatever that leaves is right.
4. The terms are those of footprint.py, with the state of AdamW for what trains, wire copies for all weights that
   autocast may cast, and the buffers of the ring. What activations take on the host is not known before a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..memory.footprint import HostBytes, UnitHostBytes


@dataclass(frozen=True, kw_only=True)
class UnitPlacement:
    """What a unit takes on the host, wholly in memory and with all in files that can be there."""

    whole: UnitHostBytes
    kept: UnitHostBytes
    in_files: int  # bytes of weights that can stay in files
    resident: bool = False

    @property
    def saved(self) -> int:
        """Bytes of host memory that are not needed if its weights stay in files."""
        return self.whole.weights + self.whole.wire - self.kept.weights - self.kept.wire


def stay_in_files(units: Sequence[UnitPlacement], needed: int) -> list[int]:
    """Choose the units whose weights stay in files, so that so many bytes less are needed, or all (Rule 2)."""
    chosen = []
    for resident in (True, False):
        these = [
            (index, unit.saved) for index, unit in enumerate(units) if unit.resident == resident and unit.saved > 0
        ]
        there = sum(saved for _, saved in these)
        left, passed = min(needed, there), 0
        so_far = 0
        for index, saved in these:
            passed += saved
            if so_far * there < left * passed:
                chosen.append(index)
                so_far += saved
        needed -= so_far
    return sorted(chosen)


@dataclass(frozen=True, kw_only=True)
class Budgeted:
    """The units whose weights stay in files, and the host memory that is left."""

    units: list[int]
    host: HostBytes
    in_files: int  # bytes of weights


def within(units: Sequence[UnitPlacement], budget: int, whole: HostBytes, ring: int) -> Budgeted:
    """Choose what stays in files so that the run fits into the budget, as far as that is possible (Rule 3).

    Args:
        units: All units, the resident rest included.
        budget: Bytes of host memory.
        whole: What the run takes if all weights are in memory.
        ring: Bytes of the buffers through which files are read, if any weight stays in one.
    """
    over = whole.total - budget
    chosen = stay_in_files(units, over + ring) if over > 0 else []
    weights = sum(units[index].whole.weights - units[index].kept.weights for index in chosen)
    wire = sum(units[index].whole.wire - units[index].kept.wire for index in chosen)
    host = replace(
        whole, weights=whole.weights - weights, wire=whole.wire - wire, ring=whole.ring + bool(chosen) * ring
    )
    return Budgeted(units=chosen, host=host, in_files=sum(units[index].in_files for index in chosen))
