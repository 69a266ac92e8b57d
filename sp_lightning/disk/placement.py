"""Which weights stay in their files, and which state goes to the disk, for a budget of host memory.

1. Weights that nothing trains may stay: those that require no gradient and, in a run that only evaluates, all.
2. A unit's weights stay together, all that can. First those of the resident rest, which are read once; then those of
   streamed units, spread evenly over the model, so that the disk works all the time instead of in bursts.
3. Only as much stays in files as the budget requires, and where units are made anew what is in files then: no weight
   goes back there, and parts that train in turns need other room each. A budget that cannot be met is an error, with
   the terms. "0B" asks for as little as can be had: all that can stay does, and whatever that leaves is right.
4. With a disk the optimizer's state goes there, unit by unit and spread evenly, as far as the budget still requires it.
   If any does, so does that of weights that are frozen now and come to train later, which no term counts.
5. Then FP32 weights go there whose wire copies travel, for each fill, from host memory, unit by unit, also frozen ones:
   with a compute type of their own (master weights) all, else those that may come to travel in autocast's type. The
   latter are read from there, through buffers as in Rule 6, until they do, and if they never do. Where the CPU
   computes, weights to whose bytes other code may refer stay in memory, where it finds what each step writes
   (host_copy.py, Rule 7).
   Then go gradients, unit by unit: they arrive in two buffers of the largest unit's (slab_on_disk.py).
   Last goes what travels of weights that train, their copies in half precision or they themselves: each visit reads
   these bytes again. A run that only evaluates puts nothing on the disk but weights that an earlier run left there.
6. The terms are those of unit_numbers.py, with the state of AdamW for what trains, wire copies for all weights that
   autocast may cast (where a loop of the user's own might use it, too), and the buffers of the ring. Beside state on
   the disk there is room for what Adafactor has instead, which is not of its weights' shapes: the optimizer is not
   known yet. What activations take on the host is not known before a run.
7. Once anything stays in its file or goes to the disk, an eleventh of the budget, at most 512 MiB, is left free: for
   what no term counts, such as the libraries' own memory.
8. Several ranks of a machine have one budget: of what they share once, and of wire copies and buffers, which each has.
   Of what trains their state alone goes to the disk: they share the memory of weights and gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from ..core.unit_numbers import ONE_PROCESS, STATES, HostBytes, HostSharing, UnitHostBytes, factored_nbytes, host_bytes
from ..memory.partition import Unit
from ..memory.weights import BY_ITSELF
from . import state_ring
from .direct_file import BLOCK, blocks
from .direct_ring import BUFFERS, PIECE, READERS
from .scratch_file import in_file

GRADIENT_BUFFERS = 2  # each with room for the gradients of any unit
GRADIENT_PIECE = 16 << 20  # bytes of gradients that a thread writes, or reads and adds to, at a time
SPARE_PART, MOST_SPARE = 11, 512 << 20  # Rule 7


@dataclass(frozen=True, kw_only=True)
class UnitPlacement:
    """Host bytes of a unit, wholly in memory and with all in files that can be there."""

    whole: UnitHostBytes
    kept: UnitHostBytes
    in_files: int  # bytes of weights that can stay in files
    state: int = 0  # bytes of the optimizer's state that can be on disk
    masters: int = 0  # bytes of FP32 weights that can be on disk, since their wire copies travel
    wires: int = 0  # bytes of these wire copies, which can be on disk too
    factored: int = 0  # bytes that stay in memory of state which is not of its weights' shapes
    slab: int = 0  # bytes of its gradients' slab in a file
    as_is: int = 0  # bytes of weights that can be on disk and travel as they are
    resident: bool = False
    stays: bool = False  # weights of it are in files, from before units were made anew (Rule 3)

    @property
    def saved(self) -> int:
        """Bytes of host memory that are not needed if its weights stay in files."""
        return self.whole.weights + self.whole.wire - self.kept.weights - self.kept.wire

    def travels(self, as_copies: bool) -> int:
        """Count the bytes of what travels and can be on disk; wire copies only of weights that are there."""
        return self.as_is + as_copies * self.wires


def stay_in_files(units: Sequence[UnitPlacement], needed: int) -> list[int]:
    """Choose units whose weights stay in files, until `needed` bytes are saved or no unit is left (Rules 2 and 3)."""
    chosen = [index for index, unit in enumerate(units) if unit.stays]
    needed -= sum(units[index].saved for index in chosen)
    others = [(index, unit) for index, unit in enumerate(units) if not unit.stays]
    for resident in (True, False):
        spread = evenly({index: unit.saved for index, unit in others if unit.resident == resident}, needed)
        needed -= sum(units[index].saved for index in spread)
        chosen += spread
    return sorted(chosen)


def evenly(saved: Mapping[int, int], needed: int) -> list[int]:
    """Choose units spread evenly over the model, until `needed` bytes are saved or no unit is left."""
    these = {index: nbytes for index, nbytes in saved.items() if nbytes > 0}
    there = sum(these.values())
    left, passed, so_far = min(needed, there), 0, 0
    chosen = []
    for index, nbytes in these.items():
        passed += nbytes
        if so_far * there < left * passed:
            chosen.append(index)
            so_far += nbytes
    return chosen


@dataclass(frozen=True, kw_only=True)
class Budgeted:
    """The units whose weights stay in files, those whose state is on disk, and the host memory that is left."""

    units: list[int]
    host: HostBytes
    in_files: int  # bytes of weights
    spilled: list[int] = field(default_factory=list)  # units whose state is on disk
    masters: dict[int, int] = field(default_factory=dict)  # bytes of FP32 weights on disk, by unit
    gradients: dict[int, int] = field(default_factory=dict)  # bytes in the file of units whose gradients are there
    gradient_buffer: int = 0  # bytes of a buffer in which gradients arrive
    # Bytes of weights on disk that travel as they are, by unit of which what travels is there.
    travelling: dict[int, int] = field(default_factory=dict)
    on_disk: int = 0  # bytes of that state, of those weights and of what travels
    factored: int = 0  # bytes that stay in memory of state that is not of its weights' shapes, of these units
    buffer: int = 0  # bytes of a buffer through which state is stepped
    fits: bool = True  # the budget is met, or none to meet (Rule 3)


def within(
    units: Sequence[UnitPlacement],
    budget: int,
    whole: HostBytes,
    ring: int,
    spills: bool = False,
    masters_ring: int = 0,
    travel_ring: int = 0,
    sharing: HostSharing = ONE_PROCESS,
) -> Budgeted:
    """Choose what stays in files, and what goes to the disk, so that the run fits into the budget (Rule 3).

    Args:
        units: All units, the resident rest included.
        budget: Bytes of host memory.
        whole: What the run takes if all weights are in memory.
        ring: Bytes of the buffers through which files are read, if any weight stays in one.
        spills: The optimizer's state may be on disk.
        masters_ring: Bytes of the buffers through which FP32 weights on disk are read as they are.
        travel_ring: Bytes of the buffers through which what travels is read.
        sharing: The ranks whose budget it is (Rule 8).
    """
    ranks, alone = sharing.ranks, not sharing.several
    most = budget
    if whole.total > budget:
        budget -= min(budget // SPARE_PART, MOST_SPARE)
    over = whole.total - budget
    there = sum(unit.saved for unit in units if unit.stays)
    chosen = stay_in_files(units, over + ring) if over > 0 or there > ring else []
    weights = sum(units[index].whole.weights - units[index].kept.weights for index in chosen)
    wire = sum(units[index].whole.wire - units[index].kept.wire for index in chosen)
    host = replace(
        whole, weights=whole.weights - weights, wire=whole.wire - wire, ring=whole.ring + bool(chosen) * ring
    )
    in_files = sum(units[index].in_files for index in chosen)
    if not spills or host.total <= budget:
        return Budgeted(units=chosen, host=host, in_files=in_files, fits=not most or host.total <= most)
    to_move = sum(unit.state for unit in units) or sum(unit.masters + unit.as_is for unit in units)
    buffer = state_ring.buffer_nbytes(to_move // ranks)
    host = replace(host, ring=host.ring + ranks * state_ring.BUFFERS * buffer)
    may_spill = {index: unit.state - unit.factored for index, unit in enumerate(units)}
    spilled = evenly(may_spill, host.total - budget)
    state = sum(units[index].state for index in spilled)
    host = replace(host, optimizer=host.optimizer - sum(may_spill[index] for index in spilled))
    # Weights of units follow all state. Those of units that leave weights in their files stay in memory.
    may_follow = {index: unit.masters for index, unit in enumerate(units) if alone and index not in chosen}
    masters: dict[int, int] = {}
    direct = bool(chosen) * ring
    if host.total > budget:
        more = max(0, masters_ring - direct)
        masters = {index: units[index].masters for index in evenly(may_follow, host.total + more - budget)}
        direct += bool(masters) * more
    weights = sum(masters.values())
    host = replace(host, weights=host.weights - weights, ring=host.ring - bool(chosen) * ring + direct)
    gradients: list[int] = []
    gradient_buffer = max((units[index].slab for index in spilled), default=0)
    through = gradient_ring(gradient_buffer)
    saved = {index: units[index].whole.trained for index in spilled if alone}
    if saved and host.total > budget and (budget <= 0 or sum(saved.values()) > through):
        gradients = evenly(saved, host.total + through - budget)
        host = replace(host, gradients=host.gradients - sum(saved[index] for index in gradients))
        host = replace(host, ring=host.ring + through)
    travelling: dict[int, int] = {}
    if host.total > budget:
        more = max(0, travel_ring - direct)
        travel = {index: units[index].travels(index in masters) for index in may_follow}
        travelling = {index: units[index].as_is for index in evenly(travel, host.total + more - budget)}
        host = replace(host, ring=host.ring + bool(travelling) * more)
    wire = sum(units[index].wires for index in travelling if index in masters)
    as_is = sum(travelling.values())
    host = replace(host, weights=host.weights - as_is, wire=host.wire - wire)
    return Budgeted(
        units=chosen,
        host=host,
        in_files=in_files,
        spilled=spilled,
        masters=masters,
        gradients={index: units[index].slab for index in gradients},
        gradient_buffer=gradient_buffer,
        travelling=travelling,
        on_disk=state + weights + sum(saved[index] for index in gradients) + wire + as_is,
        factored=sum(units[index].factored for index in spilled),
        buffer=buffer,
        fits=not most or host.total <= most,
    )


def in_slab(nbytes: Iterable[int]) -> int:
    """Return the most bytes of a file that gradients of these sizes take (slab.py, Rule 2)."""
    return max(BLOCK, sum(2 * blocks(-(-one // 2)) for one in nbytes))


def gradient_ring(buffer: int) -> int:
    """Return the bytes of all buffers of gradients."""
    return GRADIENT_BUFFERS * buffer + READERS * min(GRADIENT_PIECE, buffer)


def may_move(
    parameters: Sequence[torch.Tensor],
    compute_dtype: torch.dtype | None,
    castable: Collection[int],
    shared: Collection[int] = (),
) -> list[torch.Tensor]:
    """List a unit's weights that can be on disk (Rule 5), without the ids in `shared`, whether they train or not.

    With a compute type of their own all go up as wire copies, or none can.
    """
    moved = [p for p in parameters if id(p) in castable and p.dtype is torch.float32]
    if compute_dtype is not None:
        travel = all(p.dtype is torch.float32 or p.nbytes < BY_ITSELF for p in parameters)  # with others' wire copies
        moved = list(parameters) if travel else []
    moved = [p for p in moved if p.dim() and p.numel() and id(p) not in shared]
    return moved if any(p.dtype is torch.float32 for p in moved) else []


def may_travel(
    parameters: Sequence[torch.Tensor],
    moved: Sequence[torch.Tensor],
    narrow: bool,
    shared: Collection[int] = (),
    trains: bool = True,
) -> list[torch.Tensor]:
    """List the weights of a unit that train and can travel from the disk, those of `moved` among them.

    With `narrow` weights in FP32 travel as wire copies. Where nothing trains, all weights count that are not `shared`.
    """
    known, every = set(map(id, moved)), not trains
    trained = [p for p in parameters if (every or p.requires_grad) and p.dim() and p.numel() and id(p) not in shared]
    as_is = (p.dtype.is_floating_point and not (narrow and p.dtype is torch.float32) for p in trained)
    return [p for p, travels in zip(trained, as_is, strict=True) if travels or id(p) in known]


def choose(
    units: Sequence[Unit],
    filed: Mapping[int, int],
    budget: int,
    compute_dtype: torch.dtype | None,
    may_cast: bool,
    trains: bool,
    spills: bool = False,
    castable: Collection[int] = (),
    shared: Collection[int] = (),
    sharing: HostSharing = ONE_PROCESS,
    stay: Collection[int] = (),
) -> Budgeted:
    """Choose the units of a model whose weights stay in files: in a run, and in a plan of it.

    Args:
        units: All units, the resident rest included.
        filed: Bytes of the weights that can stay in files, by the ids of parameters.
        budget: Bytes of host memory.
        compute_dtype: The type on the device of weights that are FP32 on the host, if it is another one.
        may_cast: Weights may come to travel in autocast's type.
        trains: What requires gradients trains.
        spills: The optimizer's state may be on disk, and weights.
        castable: The ids of weights that may come to travel in autocast's type.
        shared: The ids of weights that stay in memory: other code may refer to them.
        sharing: The ranks whose budget it is (Rule 8).
        stay: The ids of weights that are in files, where units are made anew.
    """
    travels = functools.partial(_travels_as, compute_dtype, may_cast)

    def of(parameters: Iterable[torch.Tensor]) -> UnitHostBytes:
        found = UnitHostBytes.of(parameters, travels)
        return replace(found, wire=sharing.ranks * found.wire)

    placements, largest_moved, largest_travel = [], 0, 0
    for unit in units:
        parameters = [parameter for _, parameter in unit.params]
        moved = may_move(parameters, compute_dtype, castable if may_cast else (), shared)
        travelling = may_travel(parameters, moved, compute_dtype is not None, shared, trains)
        known = set(map(id, moved))
        as_is = [p for p in travelling if id(p) not in known]
        if compute_dtype is None:
            largest_moved = max(largest_moved, in_file(p.nbytes for p in moved))
        largest_travel = max(largest_travel, in_file(p.nbytes for p in [*moved, *as_is]))
        placements.append(
            UnitPlacement(
                whole=of(parameters),
                kept=of(parameter for parameter in parameters if id(parameter) not in filed),
                in_files=sum(filed.get(id(parameter), 0) for parameter in parameters),
                state=trains * STATES["AdamW"] * UnitHostBytes.of(parameters).trained,
                factored=trains * sum(factored_nbytes(p) for p in parameters if p.requires_grad and p.dim() > 1),
                masters=UnitHostBytes.of(moved).weights,
                wires=of(p for p in travelling if id(p) in known).wire,
                as_is=UnitHostBytes.of(as_is).weights,
                slab=in_slab(p.nbytes for p in parameters if p.requires_grad),
                resident=unit.resident,
                stays=any(id(parameter) in filed and id(parameter) in stay for parameter in parameters),
            )
        )
    units_whole = [UnitHostBytes.of((parameter for _, parameter in unit.params), travels) for unit in units]
    whole = host_bytes(units_whole, states=STATES["AdamW"], training=trains)
    whole = sharing.together(whole, max((unit.trained for unit in units_whole), default=0) if trains else 0)
    movable = 0 if sharing.several else sum(placement.masters + placement.as_is for placement in placements)
    spills = spills and bool(whole.optimizer if trains else movable)
    largest = max((placement.in_files for placement in placements), default=0)
    converts = compute_dtype is not None or may_cast  # in a buffer of its own
    ring = sharing.ranks * (BUFFERS + converts) * min(PIECE, largest + 2 * BLOCK)
    masters_ring = sharing.ranks * BUFFERS * min(PIECE, largest_moved)
    travel_ring = sharing.ranks * BUFFERS * min(PIECE, largest_travel)
    return within(placements, budget, whole, ring, spills, masters_ring, travel_ring, sharing)


def _travels_as(compute_dtype: torch.dtype | None, may_cast: bool, dtype: torch.dtype) -> torch.dtype:
    """Return the narrowest type in which a weight of this type may travel."""
    if dtype is not torch.float32:
        return dtype
    return compute_dtype or (torch.bfloat16 if may_cast else dtype)
