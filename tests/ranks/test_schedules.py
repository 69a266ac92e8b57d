"""No order in which ranks visit, skip and repeat units makes them wait for ever, or changes a bit."""

import processes
import pytest
import schedules

EACH = 30  # schedules for each seed, which is a model
SEEDS = {2: 24, 3: 22, 4: 21}  # 2,010 schedules


def check(size, seeds, count=EACH, **options):
    assert processes.run(size, schedules.run, list(seeds), count, **options) == [[]] * size


@pytest.mark.seldom
def test_random_schedules_are_the_sum_of_all_ranks():
    check(2, [0])


def test_random_schedules_are_stepped_beside_backward():
    check(2, [2], early=True)


@pytest.mark.slow
@pytest.mark.parametrize("early", [False, True])
def test_ranks_that_are_held_up_anywhere_change_nothing(early):
    check(2, [1], count=15, held_up=0.02, early=early)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "seeds"), SEEDS.items())
@pytest.mark.parametrize("early", [False, True])
def test_two_thousand_random_schedules_are_the_sum_of_all_ranks(size, seeds, early):
    check(size, range(100, 100 + seeds), timeout=900, early=early)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
def test_more_ranks_that_are_held_up_anywhere_change_nothing(size):
    check(size, range(200, 203), held_up=0.02, early=size % 2 == 0)
