"""Which unit is on the device when: integers in, integers out, shared by the planner and the runtime.

A *pass* is a predicted order of visits. At each visit the schedule says what to evict and what to load.

Rule 1  A visited unit is resident after the decision, and at most `window` units are, held ones aside.
Rule 2  The unit to evict is the one whose next predicted visit is farthest away, or that has none (Belady); among
        several of those, the one least recently visited.
Rule 3  *Due*: the next visit to another unit is predicted and that unit is missing. The next `transfer` missing units
        are loaded now, while the visited one computes: nothing is waited for that could have been on its way.
        Only units among the next `window` to be visited are loaded, and only in place of later ones.
Rule 4  *Free*: a missing unit may come earlier than due if that costs no load: there is an empty place, or the unit
        that Rule 2 would evict when it is due is already idle. Free loads start when there are `transfer` of them.
Rule 5  A visit that was not the predicted one moves the prediction to the next occurrence of that unit; if there is
        none, the unit is loaded on demand and the prediction stays where it was.
Rule 6  Consecutive visits of one unit are one visit, as at the turn of a forward-backward sweep.
Rule 7  A held unit (somebody uses it) is not evicted and, if it is not the visited one, not counted. What is over the
        window is evicted at the first visit at which it is no longer held.
Rule 8  Evictions only make room: what may be used again stays.

From an empty window, a forward-backward sweep over n units loads 2n - window of them, whatever `transfer` is: the last
units of forward stay for the start of backward. With `transfer` 1 and any known order (without `wrap`), no schedule
that obeys Rule 3 loads fewer. A visit costs time in proportion to the window, not to the number of units or the length
of the pass.
"""

from __future__ import annotations

import sys
from bisect import bisect_right, insort
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

NEVER = sys.maxsize


@dataclass(frozen=True)
class Decision:
    """What to do at a visit: evict, then load. If the visited unit was absent it is the first load; the rest is
    prefetch, in order of next use."""

    evict: tuple[int, ...]
    load: tuple[int, ...]
    surprise: bool  # the visit was not the predicted one; never so in a pass without a prediction


class Schedule:
    """Says what to load and evict at each visit of a pass. Units are indices into `nbytes`."""

    def __init__(self, nbytes: Sequence[int], window: int, transfer: int = 1) -> None:
        self._nbytes = tuple(nbytes)
        self._resident: dict[int, int] = {}  # unit -> when it was last visited or loaded; in order of loading
        self._resident_nbytes = 0
        self._clock = 0
        self._window = window
        self._transfer = transfer
        self.begin()

    @property
    def window(self) -> int:
        return self._window

    @property
    def transfer(self) -> int:
        return self._transfer

    @property
    def resident(self) -> tuple[int, ...]:
        """The units on the device, in order of loading."""
        return tuple(self._resident)

    @property
    def resident_nbytes(self) -> int:
        """The bytes of the units on the device."""
        return self._resident_nbytes

    def begin(self, order: Sequence[int] = (), wrap: bool = False) -> None:
        """Start a pass with the visits predicted from here on; residents stay.

        With `wrap` the order starts again after its last visit, otherwise nothing is predicted beyond it.
        """
        self._order = _without_repeats(order, wrap)
        self._wrap = wrap and bool(self._order)
        self._places: dict[int, list[int]] = {}
        for index, unit in enumerate(self._order):
            self._places.setdefault(unit, []).append(index)
        self._current: int | None = None
        self._at = -1  # position of the last predicted visit; with `wrap` it goes on counting over the end
        self._forget_ahead()

    def resize(self, window: int, transfer: int) -> None:
        """Change both sizes; what is over the new window is evicted at the next visit."""
        self._window = window
        self._transfer = transfer
        self._forget_ahead()

    def weigh(self, unit: int, nbytes: int) -> None:
        """This unit has another size from now on; it is not resident."""
        self._nbytes = (*self._nbytes[:unit], nbytes, *self._nbytes[unit + 1 :])

    def invalidate(self, units: Iterable[int] | None = None) -> tuple[int, ...]:
        """These units (default: all) are stale and no longer resident; returns those that were."""
        asked = self.resident if units is None else units
        were = tuple(unit for unit in dict.fromkeys(asked) if unit in self._resident)
        self._move(were, ())
        return were

    def keep(self, unit: int) -> None:
        """This unit is resident after all, although it was said not to be."""
        self._move((), (unit,))

    def visit(self, unit: int, held: Container[int] = ()) -> Decision:
        """`unit` must be resident now; the units in `held` may not be evicted. It is asked only where that matters."""
        surprise = self._arrive(unit)
        evict, load = self._demand(unit, held)
        ahead_evict, ahead_load = self._prefetch(unit, held)
        self._resident[unit] = self._tick()
        return Decision((*evict, *ahead_evict), (*load, *ahead_load), surprise)

    # Where we are in the order

    def _arrive(self, unit: int) -> bool:
        """Move the prediction to this visit (Rules 5 and 6); returns whether it was a surprise."""
        if unit == self._current or not self._order:
            return False
        self._current = unit
        predicted, position = self._at + 1, self._next_use(unit, self._at)
        if position != NEVER:
            self._advance(position)
        return position != predicted

    def _next_use(self, unit: int, position: int) -> int:
        """The first position after `position` at which the unit is predicted."""
        places = self._places.get(unit)
        if places is None:
            return NEVER
        lap, index = divmod(position, len(self._order)) if self._wrap else (0, position)
        later = bisect_right(places, index)
        if later < len(places):
            return lap * len(self._order) + places[later]
        return (lap + 1) * len(self._order) + places[0] if self._wrap else NEVER

    def _unit_at(self, position: int) -> int:
        return self._order[position % len(self._order)]

    # The next distinct units, kept as a sorted list of the position of each one's next visit. Both ends only move
    # forward, so that a pass costs its length however often its units repeat.

    def _forget_ahead(self) -> None:
        self._ahead: list[int] = []
        self._ahead_units: set[int] = set()
        self._scanned = self._at + 1
        self._look_ahead()

    def _advance(self, position: int) -> None:
        while self._ahead and self._ahead[0] <= position:
            unit = self._unit_at(self._ahead.pop(0))
            again = self._next_use(unit, position)
            if again < self._scanned:
                insort(self._ahead, again)
            else:
                self._ahead_units.discard(unit)
        self._at = position
        self._scanned = max(self._scanned, position + 1)
        self._look_ahead()

    def _look_ahead(self) -> None:
        end = self._at + 1 + len(self._order) if self._wrap else len(self._order)
        while len(self._ahead) < self._window and self._scanned < end:
            unit = self._unit_at(self._scanned)
            if unit not in self._ahead_units:
                self._ahead_units.add(unit)
                self._ahead.append(self._scanned)
            self._scanned += 1

    # What to move

    def _demand(self, unit: int, held: Container[int]) -> tuple[list[int], list[int]]:
        """Make the visited unit resident, and the window no larger than it may be (Rules 1 and 7)."""
        load = [] if unit in self._resident else [unit]
        evict: list[int] = []
        if len(self._resident) + len(load) > self._window:
            evictable = self._evictable(unit, held)
            excess = len(evictable) + 1 - self._window
            evict = evictable[: max(excess, 0)]
        self._move(evict, load)
        return evict, load

    def _prefetch(self, unit: int, held: Container[int]) -> tuple[list[int], list[int]]:
        """Bring what is due, and what is free (Rules 3 and 4)."""
        if self._resident.keys() >= self._ahead_units:
            return [], []
        wanted = [position for position in self._ahead if self._unit_at(position) != unit][: self._window - 1]
        missing = [position for position in wanted if self._unit_at(position) not in self._resident]
        if not missing:
            return [], []
        due = self._transfer if missing[0] == wanted[0] else 0
        evictable = self._evictable(unit, held)
        room = self._window - 1 - len(evictable)
        evict: list[int] = []
        load: list[int] = []
        for position in missing:
            if len(load) >= room:
                if len(evict) == len(evictable):
                    break
                victim = evictable[len(evict)]
                victim_use = self._next_use(victim, self._at)
                if victim_use < position:
                    break
                if len(load) >= due and not self._is_free(victim_use, position, unit, wanted):
                    break
                evict.append(victim)
            load.append(self._unit_at(position))
        if not due and len(load) < self._transfer:
            return [], []
        self._move(evict, load)
        return evict, load

    def _is_free(self, victim_use: int, position: int, unit: int, wanted: list[int]) -> bool:
        """Whether the idle unit is the one that would be evicted anyway when the unit at `position` is due.

        Everything visited before then is resident by then, and competes with the idle unit, except for the unit
        that will be computing at that moment.
        """
        if victim_use == NEVER:
            return True
        busy = {unit, *(self._unit_at(earlier) for earlier in wanted if earlier < position)}
        busy.discard(self._unit_at(position - 1))
        return all(self._next_use(other, position) < victim_use for other in busy)

    def _evictable(self, unit: int, held: Container[int]) -> list[int]:
        """What may go while `unit` is visited, in the order of Rule 2."""
        idle = [other for other in self._resident if other != unit and other not in held]
        return sorted(idle, key=lambda other: (-self._next_use(other, self._at), self._resident[other]))

    def _move(self, evict: Iterable[int], load: Iterable[int]) -> None:
        for unit in evict:
            del self._resident[unit]
            self._resident_nbytes -= self._nbytes[unit]
        for unit in load:
            self._resident[unit] = self._tick()
            self._resident_nbytes += self._nbytes[unit]

    def _tick(self) -> int:
        self._clock += 1
        return self._clock


def sweep(n: int, recompute: bool = False) -> list[int]:
    """The visits of a training step over n units: forward, then backward.

    With `recompute` each unit is visited twice in backward: for its forward again, and for its gradients.
    """
    backward = [unit for unit in reversed(range(n)) for _ in range(1 + recompute)]
    return [*range(n), *backward]


def loads(nbytes: Sequence[int], order: Sequence[int], window: int, transfer: int = 1, wrap: bool = False) -> list[int]:
    """The units loaded over a whole pass that starts with an empty window."""
    schedule = Schedule(nbytes, window, transfer)
    schedule.begin(order, wrap)
    return [loaded for unit in order for loaded in schedule.visit(unit).load]


def _without_repeats(order: Sequence[int], wrap: bool) -> tuple[int, ...]:
    visits = [unit for index, unit in enumerate(order) if index == 0 or unit != order[index - 1]]
    if wrap and len(visits) > 1 and visits[0] == visits[-1]:
        visits.pop()
    return tuple(visits)
