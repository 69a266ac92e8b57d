"""Programs over shards, each made from a number, do streamed what they do plainly (tests/rigs/sharded_programs.py)."""

from __future__ import annotations

import processes
import pytest
import sharded_programs

FIRST, OFTEN, SHEET = 101, 3, 10  # the first program, how many run by default, and how many in each slow test
TELL_NOTHING = 2  # of a sheet: the plain run raises


def check(numbers, simulated):
    found = {number: processes.run(2, sharded_programs.outcome, number, simulated) for number in numbers}
    wrong = [(number, ranks) for number, ranks in found.items() if {kind for kind, _ in ranks} & {"differs", "refused"}]
    assert not wrong
    assert sum(ranks[0][0] == "tells nothing" for ranks in found.values()) <= TELL_NOTHING


@pytest.mark.filterwarnings("ignore")
def test_programs_over_shards_do_streamed_what_they_do_plainly():
    check(range(FIRST, FIRST + OFTEN), False)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("sheet", range(7))
@pytest.mark.parametrize("simulated", [False, pytest.param(True, marks=pytest.mark.simgpu)])
def test_more_programs_over_shards_do_streamed_what_they_do_plainly(sheet, simulated):
    first = FIRST + OFTEN + SHEET * sheet
    check(range(first, first + SHEET), simulated)


def test_a_program_that_does_something_else_is_noticed():
    for first, second in processes.run(2, sharded_programs.two_programs):
        assert first == [] and len(second) > 10
