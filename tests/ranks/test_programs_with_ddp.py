"""What user code may do with gradients and state of ranks has DDP's bits, and models that differ are an error."""

import processes
import pytest
import rank_programs

PROGRAMS = ["kept_views", "kept_list", "kept_list_of_an_accumulation", "reset_state", "skipped_in_an_accumulation"]


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_and_state_are_those_of_ddp(name, size):
    assert processes.run(size, rank_programs.differ, name) == [[]] * size


@pytest.mark.parametrize("how", ["frozen on one", "wider on one", "in files of one"])
def test_models_that_differ_are_an_error(how):
    for error in processes.run(2, rank_programs.refused, how):
        assert error.startswith("the ranks' models differ: rank ") and "Make the same model on all of them" in error


def test_a_forked_process_reads_what_was_streamed():
    assert processes.run(2, rank_programs.read_in_a_fork) == [0, 0]
