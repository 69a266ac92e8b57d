"""Whoever waits for a rank that is gone is told which one, where it was and why; nothing is left behind."""

import errno
import json
import os
import re

import peer_runs
import processes
import pytest
from often import often

from sp_lightning.errors import UnsupportedError
from sp_lightning.ranks import shared_slabs

ENDS = {
    "raises": (3, r"rank 0 waits at .*, but rank 1 is gone since .*: ValueError: a bad batch"),
    "has fewer batches": (3, r"rank 0 waits at .*, but rank 1 is gone since .*: its run has ended"),
    "is killed": (5, r"rank 0 waits at .*, but the process of rank 1 has ended; it was last at .*"),
    "is stopped": (6, r"rank 0 waits at .*, but rank 1 has given no sign for \d s; it was last at .*"),
}


@pytest.mark.parametrize("how", often(ENDS, "raises", "is killed", "has fewer batches"))
def test_a_rank_that_is_gone_is_named(how, tmp_path):
    seconds, message = ENDS[how]
    if how in ("raises", "has fewer batches"):
        processes.run(2, peer_runs.end, how, str(tmp_path))
    else:
        with pytest.raises(processes.RankFailed, match=r"^rank 1"):
            processes.run(2, peer_runs.end, how, str(tmp_path))
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["seconds"] < seconds
    assert re.match(message, told["message"])


def test_a_step_that_fails_on_one_rank_is_half_applied_on_all():
    refused = ["HalfAppliedStepError"] * 3
    for place in ("blocks.0", "blocks.2"):
        assert processes.run(2, peer_runs.fail_in_step, place) == [["PeerError", *refused], ["MemoryError", *refused]]


@pytest.mark.parametrize("how", ["added", "replaced"])
def test_weights_that_come_later_are_an_error(how):
    """The ranks would have them by themselves, which is silent under DDP."""
    for error in processes.run(2, peer_runs.add_weights, how):
        assert re.fullmatch(r"blocks\.0\.\S+ came after streaming began, and each of several devices has .*", error)


@pytest.mark.parametrize("how", ["frozen on one", "wider on one", "in files of one"])
def test_models_that_differ_are_an_error(how):
    for error in processes.run(2, peer_runs.refused, how):
        assert error.startswith("the ranks' models differ: rank ") and "Make the same model on all of them" in error


def test_a_forked_process_reads_what_was_streamed():
    assert processes.run(2, peer_runs.read_in_a_fork) == [0, 0]


def test_a_process_that_may_not_map_so_much_is_told_what_to_allow(monkeypatch):
    def refuses(*_):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    slabs = shared_slabs.SharedSlabs(shared_slabs.made_file(), True)
    monkeypatch.setattr(shared_slabs.mmap, "mmap", refuses)
    with pytest.raises(UnsupportedError, match=r"may not map the memory .*Cannot allocate memory.*ulimit -v"):
        slabs.expect(1)
