"""What user code may do with gradients and state of ranks has DDP's bits, and models that differ are an error."""

import subprocess
import sys

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


KEEP = """
import resource, torch
from sp_lightning.ranks.shared_slabs import SharedSlabs, made_file
resource.setrlimit(resource.RLIMIT_NOFILE, (64, {most}))
slabs = SharedSlabs(made_file(), True)
print(len([slabs.keep(torch.ones(4)) for _ in range(100)]))
"""


@pytest.mark.parametrize("most, said", [(1024, "100"), (64, "raise the hard limit (ulimit -Hn)")])
def test_ranks_open_as_many_files_as_they_may(most, said):
    done = subprocess.run([sys.executable, "-c", KEEP.format(most=most)], capture_output=True, text=True)
    assert said in (done.stdout or done.stderr).splitlines()[-1], done.stderr
