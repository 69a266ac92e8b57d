"""Decide which unit is on the device when: integers in, integers out, shared by the planner and the runtime.

A *pass* is a predicted order of visits. At each visit the schedule says which units to evict and which to load.
Consecutive visits of one unit are one visit, as at the turn of a forward-backward sweep.

From an empty window, a forward-backward sweep over n units loads 2n - window of them, whatever `transfer` is: the last
units of forward stay for the start of backward. With `transfer` 1 and any known order (without `wrap`), no schedule
that loads what is due at once loads fewer. A visit costs time in proportion to the window, unless the order repeats a
few units many times.
"""

from __future__ import annotations

import itertools
import sys
from bisect import bisect_right
from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple

NEVER = sys.maxsize


class Decision(NamedTuple):
    """Evictions and then loads for one visit. If the visited unit was absent it is the first load.

    The other loads are prefetch, in order of next use.
    """

    evict: tuple[int, ...]
    load: tuple[int, ...]
    surprise: bool  # whether the visit was not the predicted one; False in a pass without a prediction


class Schedule:
    """Decides which units to load and evict at each visit of a pass. Units are indices into `nbytes`."""

    def __init__(self, nbytes: Sequence[int], window: int, transfer: int = 1) -> None:
        self._nbytes = tuple(nbytes)
        # The units on the device, in order of loading, and when each was last visited or loaded.
        self.loaded: dict[int, int] = {}
        self.loaded_nbytes = 0  # of the loaded units together
        self._clock = itertools.count(1)
        self.window, self.transfer = window, transfer  # may change: excess units are evicted at the next visit
        self.begin()

    def begin(self, order: Sequence[int] = (), wrap: bool = False) -> None:
        """Start a pass with these predicted visits; loaded units stay.

        With `wrap` the order starts again after its last visit, otherwise no visit is predicted beyond it.
        """
        self._order = _without_repeats(order, wrap)
        self._wrap = wrap and bool(self._order)
        self._places: dict[int, list[int]] = {}
        for index, unit in enumerate(self._order):
            self._places.setdefault(unit, []).append(index)
        self._current: int | None = None
        self._at = -1  # position of the last predicted visit; with `wrap` it keeps counting past the end

    def invalidate(self, units: Iterable[int]) -> list[int]:
        """Mark these units as not loaded, and return those that were loaded."""
        were = [unit for unit in dict.fromkeys(units) if unit in self.loaded]
        self._move(were, ())
        return were

    def visit(self, unit: int, in_use: Container[int] = ()) -> Decision:
        """Decide what to evict and load so that `unit` is loaded now; those `in_use` are not evicted.

        `in_use` is looked into only when something has to be evicted or could be prefetched.
        """
        surprise = self._arrive(unit)
        evict, load = self._demand(unit, in_use)
        ahead_evict, ahead_load = self._prefetch(unit, in_use) if self.window > 1 else ([], [])
        self.loaded[unit] = next(self._clock)
        return Decision((*evict, *ahead_evict), (*load, *ahead_load), surprise)

    # Where we are in the order

    def _arrive(self, unit: int) -> bool:
        """Move the prediction to the next occurrence of this unit; return whether the visit was a surprise.

        A unit that is not predicted any more leaves the prediction where it was.
        """
        if unit == self._current or not self._order:
            return False
        self._current = unit
        predicted, position = self._at + 1, self._next_use(unit, self._at)
        if position != NEVER:
            self._at = position
        return position != predicted

    def _next_use(self, unit: int, position: int) -> int:
        """Return the first position after `position` at which the unit is predicted, or NEVER."""
        places = self._places.get(unit)
        if places is None:
            return NEVER
        lap, index = divmod(position, len(self._order)) if self._wrap else (0, position)
        later = bisect_right(places, index)
        if later < len(places):
            return lap * len(self._order) + places[later]
        return (lap + 1) * len(self._order) + places[0] if self._wrap else NEVER

    def _use(self, unit: int) -> int:
        """Return the next position at which the unit is predicted, or NEVER."""
        return self._next_use(unit, self._at)

    def _wanted(self, unit: int) -> list[int]:
        """List the positions of the next visits of other units: of as many as the window holds beside this one."""
        order, length = self._order, len(self._order)
        wanted: list[int] = []
        seen = {unit}
        for position in range(self._at + 1, self._at + 1 + length if self._wrap else length):
            if (other := order[position % length]) not in seen:
                seen.add(other)
                wanted.append(position)
                if len(wanted) == self.window - 1:
                    break
        return wanted

    # What to move

    def _demand(self, unit: int, in_use: Container[int]) -> tuple[list[int], list[int]]:
        """Load the visited unit if it is absent, and evict only as many other units as exceed the window.

        A unit in use is not evicted and, unless it is the visited one, not counted. What exceeds the window then is
        evicted at the first visit at which it is in use no longer.
        """
        load = [] if unit in self.loaded else [unit]
        evict: list[int] = []
        if len(self.loaded) + len(load) > self.window:
            evictable = self._evictable(unit, in_use)
            excess = len(evictable) + 1 - self.window
            evict = evictable[: max(excess, 0)]
        if evict or load:
            self._move(evict, load)
        return evict, load

    def _prefetch(self, unit: int, in_use: Container[int]) -> tuple[list[int], list[int]]:
        """Load units before they are visited, among the next `window`, in place of units that are visited later.

        *Due*: the next visit to another unit is of one that is missing. The next `transfer` missing units are loaded
        now, while the visited one computes: no visit waits for a load that could have begun earlier. *Free*: a load
        before that costs no extra load, since a place is empty or its unit would be evicted anyway. Free loads start
        when there are `transfer` of them.
        """
        if self.loaded.keys() >= self._places.keys():
            return [], []
        order, length = self._order, len(self._order)
        wanted = self._wanted(unit)
        missing = [position for position in wanted if order[position % length] not in self.loaded]
        if not missing:
            return [], []
        due = self.transfer if missing[0] == wanted[0] else 0
        evictable = self._evictable(unit, in_use)
        room = self.window - 1 - len(evictable)
        evict: list[int] = []
        load: list[int] = []
        for position in missing:
            if len(load) >= room:
                if len(evict) == len(evictable):
                    break
                victim = evictable[len(evict)]
                victim_use = self._use(victim)
                if victim_use < position:
                    break
                if len(load) >= due and not self._is_free(victim_use, position, unit, wanted):
                    break
                evict.append(victim)
            load.append(order[position % length])
        if not due and len(load) < self.transfer:
            return [], []
        self._move(evict, load)
        return evict, load

    def _is_free(self, victim_use: int, position: int, unit: int, wanted: list[int]) -> bool:
        """Whether a loaded unit, next used at `victim_use`, would be evicted anyway when `position` is due.

        Every unit visited before then is loaded by then, and competes with the loaded one, except for the unit that
        will be computing at that moment.
        """
        if victim_use == NEVER:
            return True
        order, length = self._order, len(self._order)
        busy = {unit, *(order[earlier % length] for earlier in wanted if earlier < position)}
        busy.discard(order[(position - 1) % length])
        return all(self._next_use(other, position) < victim_use for other in busy)

    def _evictable(self, unit: int, in_use: Container[int]) -> list[int]:
        """Return the units that may be evicted while `unit` is visited, those first whose next visit is farthest away.

        (Belady.) Among several that are not predicted, the least recently visited is first.
        """
        idle = [other for other in self.loaded if other != unit and other not in in_use]
        idle.sort(key=self.loaded.__getitem__)
        idle.sort(key=self._use, reverse=True)  # a stable sort: units with one next use stay in order of last visit
        return idle

    def _move(self, evict: Iterable[int], load: Iterable[int]) -> None:
        """Record evictions and loads in the list of loaded units."""
        for unit in evict:
            del self.loaded[unit]
            self.loaded_nbytes -= self._nbytes[unit]
        for unit in load:
            self.loaded[unit] = next(self._clock)
            self.loaded_nbytes += self._nbytes[unit]


def _without_repeats(order: Sequence[int], wrap: bool) -> tuple[int, ...]:
    """Join consecutive visits of one unit; with `wrap`, also the last visit with the first."""
    visits = [unit for index, unit in enumerate(order) if index == 0 or unit != order[index - 1]]
    if wrap and len(visits) > 1 and visits[0] == visits[-1]:
        visits.pop()
    return tuple(visits)
