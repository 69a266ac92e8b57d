"""Literal schedules are lists of (event, unit); what a visit evicts and loads stands before it."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sp_lightning.errors import MemoryBudgetError
from sp_lightning.host.room import UnitNumbers, first_window
from sp_lightning.stream.schedule import Decision, Schedule


def started(n, window, transfer=1, order=(), wrap=False):
    schedule = Schedule([1] * n, window, transfer)
    schedule.begin(order, wrap)
    return schedule


def run(schedule, visits):
    events = []
    for unit in visits:
        decision = schedule.visit(unit)
        events += [("evict", other) for other in decision.evict]
        events += [("load", other) for other in decision.load]
        events.append(("surprise" if decision.surprise else "visit", unit))
    return events


def sweep(n, recompute=False):
    """Return the visits of a training step over n units: forward, then backward.

    With `recompute` each unit is visited twice in backward: for its forward again, and for its gradients.
    """
    backward = [unit for unit in reversed(range(n)) for _ in range(1 + recompute)]
    return [*range(n), *backward]


def loads(nbytes, order, window, transfer=1, wrap=False):
    """Return the units loaded over a whole pass that starts with an empty window."""
    schedule = Schedule(nbytes, window, transfer)
    schedule.begin(order, wrap)
    return [loaded for unit in order for loaded in schedule.visit(unit).load]


def literal(text):
    """[("load", 0), ("visit", 0), ("evict", 0), ("surprise", 2)] is written "+0 0  -0 2!"."""
    kinds = {"+": "load", "-": "evict", "!": "surprise"}
    return [
        (next((kind for sign, kind in kinds.items() if sign in word), "visit"), int(word.strip("+-!")))
        for word in text.split()
    ]


# The forward-backward sweep


@pytest.mark.parametrize(
    ("n", "window", "transfer", "expected"),
    [
        (4, 1, 1, "+0 0  -0 +1 1  -1 +2 2  -2 +3 3  3  -3 +2 2  -2 +1 1  -1 +0 0"),
        (4, 2, 1, "+0 +1 0  -0 +2 1  -1 +3 2  3  3  -3 +1 2  -2 +0 1  0"),
        (4, 2, 2, "+0 +1 0  -0 +2 1  -1 +3 2  3  3  -3 +1 2  -2 +0 1  0"),
        (4, 4, 1, "+0 +1 +2 +3 0  1  2  3  3  2  1  0"),
        (4, 6, 2, "+0 +1 +2 +3 0  1  2  3  3  2  1  0"),
        (5, 3, 2, "+0 +1 +2 0  1  -0 -1 +3 +4 2  3  4  4  3  -4 -3 +1 +0 2  1  0"),
        (
            8,
            4,
            2,
            "+0 +1 +2 +3 0  1  -0 -1 +4 +5 2  3  -2 -3 +6 +7 4  5  6  7  "
            "7  6  -7 -6 +3 +2 5  4  -5 -4 +1 +0 3  2  1  0",
        ),
    ],
)
def test_a_sweep(n, window, transfer, expected):
    assert run(started(n, window, transfer, sweep(n)), sweep(n)) == literal(expected)


def test_a_recomputed_sweep_loads_no_more():
    assert run(started(3, 2, 1, sweep(3, True)), sweep(3, True)) == literal(
        "+0 +1 0  -0 +2 1  2  2  2  -2 +0 1  1  0  0"
    )


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("n", range(1, 11))
def test_a_sweep_from_an_empty_window_loads_2n_minus_k(n, recompute):
    for window in range(1, n + 1):
        for transfer in range(1, window + 1):
            assert len(loads([1] * n, sweep(n, recompute), window, transfer)) == 2 * n - window


# Other orders


def test_inference_goes_on_with_the_first_unit():
    assert run(started(4, 2, 1, range(4), wrap=True), [0, 1, 2, 3, 0, 1, 2, 3, 0]) == literal(
        "+0 +1 0  -0 +2 1  -1 +3 2  -2 +0 3  -3 +1 0  -0 +2 1  -1 +3 2  -2 +0 3  -3 +1 0"
    )


def test_without_prediction_the_least_recently_visited_unit_goes():
    assert run(started(4, 2), sweep(4)) == literal("+0 0  +1 1  -0 +2 2  -1 +3 3  3  2  -3 +1 1  -2 +0 0")


# Surprises


def test_a_skipped_unit_moves_the_prediction_on():
    assert run(started(4, 2, 1, sweep(4)), [0, 2, 3, 3, 2, 0]) == literal(
        "+0 +1 0  -0 -1 +2 +3 2!  3  3  -3 +1 2  -1 +0 0!"
    )


def test_an_unpredicted_unit_comes_while_the_prediction_waits():
    order = [0, 1, 3, 4, 4, 3, 1, 0]
    assert run(started(5, 3, 1, order), [0, 1, 2, 3, 4, 4, 3, 2, 1, 0]) == literal(
        "+0 +1 +3 0  -0 +4 1  -1 +2 2!  -2 +1 3  4  4  -4 +0 3  -3 +2 2!  1  0"
    )


# Held units


def test_a_held_unit_stays_beside_the_window():
    schedule = started(4, 1)
    schedule.visit(0)
    assert schedule.visit(1, in_use=(0, 1)) == Decision((), (1,), False)
    assert schedule.visit(2, in_use=(0,)) == Decision((1,), (2,), False)
    assert list(schedule.loaded) == [0, 2]


# Changes from outside


def test_invalidated_units_are_loaded_again():
    schedule = started(3, 2, 1, [0, 1, 2])
    schedule.visit(0)
    assert schedule.invalidate([0, 2, 0]) == [0]
    assert list(schedule.loaded) == [1]
    assert schedule.visit(0) == Decision((), (0,), False)


def test_a_smaller_window_holds_from_the_next_visit():
    schedule = started(6, 4, 2, sweep(6))
    schedule.visit(0)
    schedule.window, schedule.transfer = 2, 1
    assert [*schedule.loaded] == [0, 1, 2, 3]
    assert schedule.visit(1) == Decision((0, 3), (), False)


# Properties


UNITS = 7
units = st.integers(0, UNITS - 1)
orders = st.lists(units, max_size=24)


@st.composite
def sizes(draw):
    window = draw(st.integers(1, UNITS + 1))
    return window, draw(st.integers(1, window))


visits = st.tuples(st.just("visit"), units, st.sets(units, max_size=3))
changes = st.one_of(
    st.tuples(st.just("invalidate"), st.sets(units)),
    st.tuples(st.just("resize"), sizes()),
    st.tuples(st.just("begin"), orders, st.booleans()),
)


def check_visit(schedule, unit, held):
    """Check at one visit that the unit is there, and that at most a window of idle units is."""
    before = set(schedule.loaded)
    decision = schedule.visit(unit, held)
    evicted, loaded, after = set(decision.evict), set(decision.load), set(schedule.loaded)
    assert len(evicted) == len(decision.evict) and len(loaded) == len(decision.load)
    assert evicted <= before - held - {unit}
    assert not loaded & before
    assert after == before - evicted | loaded
    assert unit in after
    assert unit in before or decision.load[0] == unit
    assert len(after - (held - {unit})) <= schedule.window


@given(sizes(), orders, st.booleans(), st.lists(st.one_of(visits, visits, visits, changes), max_size=40))
def test_whatever_happens_a_visited_unit_is_within_the_window(size, order, wrap, steps):
    schedule = started(UNITS, *size, order, wrap)
    for kind, *arguments in steps:
        if kind == "visit":
            check_visit(schedule, *arguments)
        elif kind == "resize":
            schedule.window, schedule.transfer = arguments[0]
        else:
            getattr(schedule, kind)(*arguments)
        assert schedule.loaded_nbytes == len(schedule.loaded)  # each is of one byte


@given(sizes(), orders, st.booleans())
def test_a_predicted_visit_never_surprises_and_never_waits(size, order, wrap):
    schedule = started(UNITS, *size, order, wrap)
    for index, unit in enumerate(order * (2 if wrap else 1)):
        decision = schedule.visit(unit)
        assert not decision.surprise
        assert index == 0 or schedule.window == 1 or unit not in decision.load


def fewest_loads(order, window):
    """By exhaustion, over all schedules in which the next visit is resident while the one before it computes."""
    distinct = [unit for unit, _ in itertools.groupby(order)]
    costs = {frozenset(): 0}
    for index in range(len(distinct)):
        needed = frozenset(distinct[index : index + min(window, 2)])
        reached = {}
        for resident, cost in costs.items():
            together = resident | needed
            idle = together - needed
            for dropped in itertools.combinations(sorted(idle), max(0, len(together) - window)):
                after = together - set(dropped)
                reached[after] = min(reached.get(after, len(order)), cost + len(needed - resident))
        costs = reached
    return min(costs.values())


@settings(max_examples=300)
@given(st.integers(1, 5), st.lists(st.integers(0, 5), min_size=1, max_size=20))
def test_no_schedule_loads_fewer(window, order):
    assert len(loads([1] * 6, order, window)) == fewest_loads(order, window)


# The first window

MIB = 2**20


def test_a_budget_that_does_not_suffice_is_refused_in_numbers():
    units = [UnitNumbers(f"block {index}", 100 * MIB, 100 * MIB) for index in range(8)]
    units.append(UnitNumbers("(root)", 50 * MIB, 50 * MIB, resident=True))
    with pytest.raises(MemoryBudgetError, match=r"needs at least 300.00 MiB for block 0, got 200.00 MiB: raise it"):
        first_window("auto", 200 * MIB, units, False)
    with pytest.raises(MemoryBudgetError, match=r"window 6 does not fit .* which holds 4 of the largest"):
        first_window(6, 700 * MIB, units, False)
    assert [first_window(window, 700 * MIB, units, False) for window in ("auto", 3)] == [4, 3]
