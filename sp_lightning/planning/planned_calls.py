"""Plan calls in lockstep: how many fit, and how fast they answer.

1. Calls share each trip of the weights. Each has keys and values, and a batch, of its own; what the running one works
   with is there once. When a call ends the next begins, beside the longest caches of the others.
2. As many are under way as with ``at_once="auto"`` in a run: the most that fit beside all units
   if one does, else beside a window of two, or beside the window that was given; at most 64. An "auto" window is then
   the largest that fits beside them.
3. With speculation a forward checks ``guessed`` tokens of each row beside the one that it makes, and ``accepted`` of
   all of them count, on average: the tokens for a trip.
4. The first token is there when all prompts of the calls under way were read. The pass in the middle of an answer
   stands for each further one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal

from ..core.schedule import Schedule
from ..core.simulation import Simulation
from ..core.window_choice import FIRST_WINDOW
from ..tracing.step_trace import BATCH, CACHE, StepTrace
from .forecast import LockstepPlan
from .planned_model import Requirements
from .settings import PlannedCalls

MOST = 64  # calls
PASSES = 12  # that are averaged: what stays in a window differs from one to the next
OF_EACH = CACHE, BATCH  # terms of the device's memory that every call has


def plan_calls(
    calls: PlannedCalls,
    needs: Requirements,
    *,
    rows: int,
    cache: str,
    available: int,
    reserving: Callable[[Mapping[str, int]], dict[str, int]],
    simulated: Callable[[Requirements, tuple[int, int]], Simulation],
    window: int | Literal["auto"],
) -> LockstepPlan:
    """Plan calls of a model.

    Args:
        calls: How many, and what they guess.
        needs: Of one call.
        rows: Of one call.
        cache: Where keys and values wait.
        available: Bytes on the device.
        reserving: Adds what is reserved to terms of the device's bytes.
        simulated: Simulates a pass with these needs, a window and a transfer.
        window: The option.
    """

    assert needs.trace is not None and needs.reading is not None
    kept = kept_by_a_call(needs.trace)

    def nbytes(count: int, window: int) -> dict[str, int]:
        return reserving(of_calls(needs, count, kept).peak(window, 1))

    def fits(count: int, window: int) -> bool:
        return sum(nbytes(count, window).values()) <= available

    streamed = max(1, len(needs.streamed))
    least = min(FIRST_WINDOW if window == "auto" else window, streamed)
    beside = streamed if window == "auto" and fits(1, streamed) else least
    fitting = (count for count in range(MOST, 0, -1) if fits(count, beside))
    count = next(fitting, 1) if calls.at_once == "auto" else calls.at_once
    chosen = least
    if window == "auto":
        chosen = next((wide for wide in range(streamed, least, -1) if fits(count, wide)), least)
    reading = simulated(of_calls(needs.reading, count, kept), (chosen, 1))
    each = simulated(of_calls(needs, count, kept, calls.guessed + 1), (chosen, 1))
    tokens = count * rows * calls.accepted
    return LockstepPlan(
        cache=cache,
        at_once=count,
        window=chosen,
        device_terms=nbytes(count, chosen),
        fits=fits(count, chosen),
        first_s=reading.step_s,
        token_s=each.step_s / calls.accepted,
        tokens_per_s=tokens / each.step_s,
        weights_per_token=_travelling(needs, chosen) / tokens,
    )


def _travelling(needs: Requirements, window: int) -> float:
    """Return the bytes of weights that a pass brings up, once passes are alike, by the runtime's own schedule."""
    sizes = [cost.up_nbytes for cost in needs.costs]
    order = [work.unit for work in needs.works if not needs.costs[work.unit].resident]
    schedule, loaded = Schedule(sizes, window), 0
    for number in range(2 * PASSES):
        schedule.begin(order, wrap=True)
        for unit in order:
            load = schedule.visit(unit).load
            loaded += sum(sizes[index] for index in load) if number >= PASSES else 0
    return loaded / PASSES


def kept_by_a_call(trace: StepTrace) -> dict[str, int]:
    """Return the bytes that a call keeps on the device while others run, by term (Rule 1)."""
    last = trace.of_pass(2).visits
    return {name: min(visit.terms.get(name, 0) for visit in last) for name in OF_EACH}  # less copies of the running one


def of_calls(needs: Requirements, count: int, kept: Mapping[str, int], tokens: int = 1) -> Requirements:
    """Return the needs of a pass of several calls, each with this number of tokens in place of one (Rule 3).

    ``kept``: bytes that a call keeps on the device while others run.
    """

    def peak(window: int, transfer: int) -> dict[str, int]:
        terms = needs.peak(window, transfer)
        return terms | {name: terms.get(name, 0) + (count - 1) * nbytes for name, nbytes in kept.items() if count > 1}

    works = [
        replace(
            work,
            flops=work.flops * count * tokens,
            moved_nbytes=work.moved_nbytes * count,  # mostly of weights
            other_nbytes=work.other_nbytes * count * tokens,
            stowed_nbytes=work.stowed_nbytes * count,
            fetched_nbytes=work.fetched_nbytes * count,
        )
        for work in needs.works
    ]
    return replace(needs, works=works, peak=peak)
