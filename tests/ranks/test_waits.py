"""Waits of ranks for others that a whole run seldom needs: each is needed here (benchmarks/race_deletions.py)."""

import re

import pretended_nodes
import processes
import pytest
import waiting

from sp_lightning.ranks import exchange


@pytest.mark.parametrize(("what", "failed"), [("meeting", 1), ("memory", 0)])
def test_a_wait_ends_when_another_rank_failed_that_is_still_alive(what, failed):
    found = processes.run(2, waiting.after_a_failure, what, failed)
    assert f"rank {failed} failed" in found[1 - failed] and found[failed]


@pytest.mark.simgpu
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.seldom
def test_ranks_of_a_group_for_a_device_alone_connect_and_name_one_that_fails(nodes):
    run = pretended_nodes.run, nodes, waiting.connected_by_a_device_alone
    assert processes.run(2, *run, None) == ["connected"] * 2
    first, failed = processes.run(2, *run, 1)
    assert re.fullmatch("rank 1 on .* failed; its own error says why", first) and not failed


@pytest.mark.seldom
def test_a_collective_ends_when_another_rank_failed_that_is_still_alive():
    said, noticed = processes.run(2, waiting.in_a_collective)
    assert "rank 1 failed" in said and noticed


@pytest.mark.seldom
def test_a_rank_that_is_slow_reads_the_numbers_of_its_own_exchange():
    expected = [[0, 1], [10, 11], [20, 21]]
    assert processes.run(2, waiting.exchanged) == [expected, expected]


@pytest.mark.seldom
def test_a_run_whose_backward_failed_beside_sums_closes():
    assert processes.run(2, waiting.closed_after_a_failure) == [True, True]


@pytest.mark.seldom
def test_a_backward_after_one_that_failed_beside_sums_has_its_own_gradients():
    assert processes.run(2, waiting.after_a_failure_of_all) == [True, True]


def test_ranks_whose_backwards_all_failed_go_on():
    """Also after many of them: the memory in which their gradients were on the way is free again."""
    expected = ["mean"] * 2 + ["RuntimeError"] * 20 + ["mean"] * 2
    assert processes.run(2, waiting.left_out, ("backward", "backward"), times=20) == [(expected, exchange.AHEAD)] * 2


@pytest.mark.parametrize("places", [("backward", ""), ("", "backward"), ("backward", "forward")])
def test_a_backward_that_failed_on_one_rank_alone_is_an_error_on_all(places):
    """None of them waits for gradients that the other one does not post."""
    for place, (found, ahead) in zip(places, processes.run(2, waiting.left_out, places), strict=True):
        failed = ["RuntimeError"] if place else []
        rest = 3 - len(failed)
        errors = ["ExactnessError"] * rest, ["ExactnessError"] * (rest - 1) + ["PeerError"]  # if the other one has left
        assert found[: 2 + len(failed)] == ["mean", "mean", *failed]
        assert found[2 + len(failed) :] in errors
        assert ahead == exchange.AHEAD


def test_a_block_that_only_a_backward_reached_which_failed_gets_no_gradients():
    assert processes.run(2, waiting.gradients_after_a_failure) == [[True, False, False, False]] * 2


@pytest.mark.simgpu
def test_memory_of_a_backward_that_failed_is_free_once_its_gradients_have_arrived():
    for arrived in processes.run(2, waiting.arrived_after_a_failure):
        assert arrived and all(arrived)


@pytest.mark.simgpu
def test_two_threads_of_a_backward_get_memory_of_their_own():
    assert processes.run(2, waiting.means_with_slow_page_locks) == [[True] * 8] * 2


@pytest.mark.parametrize("where", ["settle", "sums"])
def test_an_exchange_that_failed_on_one_rank_is_not_followed_by_another_on_any(where):
    first, second = processes.run(2, waiting.errors_of_an_exchange, where)
    assert first[1:] == ["PeerError"] * 2
    assert second[1:] == [{"settle": "ExactnessError", "sums": "MemoryError"}[where], "PeerError"]


def test_a_backward_ahead_of_sums_ends_with_the_error_that_ended_them():
    first, (second, _) = processes.run(2, waiting.error_of_sums_that_fail)
    assert first == ("this sum fails", exchange.AHEAD), "it waited for sums that do not come"
    assert "rank 0 " in second


@pytest.mark.seldom
def test_a_unit_is_summed_once():
    assert processes.run(2, waiting.most_sums_of_a_unit) == [(1, 0)] * 2


def test_a_rank_gets_room_for_what_another_one_keeps_waiting_in_backward():
    """It waits in vain in the first exchange, and again when it has had the room for long enough."""
    ahead, dropping = processes.run(2, waiting.rooms, 3)
    assert ahead == [(8, 4), (8, 4), (8, 4), (8, 4), (8, 8)]
    assert dropping == [(2, 0)] * 5


def test_a_rank_gets_room_for_what_another_one_keeps_waiting_before_its_forward():
    ahead, _ = processes.run(2, waiting.rooms, 3, in_backward=False)
    assert ahead[0] == (8, 4)


def test_a_rank_that_is_slow_to_compare_edits_does_not_find_the_step_of_another():
    assert processes.run(2, waiting.edited_before_a_step) == [True, True]


@pytest.mark.seldom
def test_a_rank_finds_the_weights_of_a_first_rank_that_is_slow():
    assert processes.run(2, waiting.weights_of_a_slow_first_rank) == [True, True]


def test_a_step_ends_once_every_rank_has_stepped_its_part():
    assert processes.run(2, waiting.weights_after_a_slow_step) == [True, True]


def test_a_rank_that_is_slow_to_copy_weights_before_a_step_does_not_find_the_step_of_another():
    assert processes.run(2, waiting.weights_after_a_slow_step, copies=True) == [True, True]


@pytest.mark.parametrize("steps", [0, 2])
def test_a_rank_that_steps_less_or_more_often_than_another_is_told_so(steps):
    """It waited for good, where the other one waits elsewhere."""
    found = processes.run(2, waiting.a_step_more_on_one_rank, steps)
    assert all("the ranks came to different places" in error for error in found), found
    assert all(any(place in error for error in found) for place in ("a step of AdamW", "an exchange of gradients"))


def test_a_step_that_every_rank_takes_as_a_whole_leaves_one_copy():
    assert processes.run(2, waiting.pages_after_a_replicated_step) == [0, 0]


def test_a_step_that_failed_on_one_rank_is_not_followed_by_another_on_any():
    first, second = processes.run(2, waiting.after_a_step_that_failed, "loop")
    assert "had stepped some of 8 parameters when a MemoryError ended its step" in first
    assert "had stepped some of 8 parameters when a PeerError ended its step" in second


@pytest.mark.parametrize("where", ["settle", "options"])
def test_a_step_that_failed_when_all_ranks_had_taken_it_or_none_is_followed_by_another(where):
    assert processes.run(2, waiting.after_a_step_that_failed, where) == ["no error"] * 2


def test_edits_without_an_optimizer_are_compared_in_the_next_backward():
    owner, other = processes.run(2, waiting.edited_without_an_optimizer)
    assert other.startswith("in step 2: the ranks wrote different values to ")
    assert owner.startswith("in step 2: rank 1 ")


@pytest.mark.seldom
def test_a_barrier_in_a_fit_and_one_after_it_wait_for_all():
    (inside, after), _ = processes.run(2, waiting.at_barriers)
    assert min(inside, after) > waiting.SLOW_S / 2


@pytest.mark.seldom
def test_what_is_loaded_is_shared_at_once(tmp_path):
    processes.run(2, waiting.save, str(tmp_path / "half.ckpt"))
    assert processes.run(2, waiting.bytes_of_its_own, str(tmp_path / "half.ckpt")) == [0, 0]
    assert processes.run(2, waiting.state_when_it_was_loaded, str(tmp_path / "half.ckpt")) == [True, True]


@pytest.mark.parametrize("also_optimizer", [True, False])
def test_what_fabric_loaded_is_shared_at_once(also_optimizer, tmp_path):
    found = processes.run(2, waiting.loaded_with_fabric, str(tmp_path / "half.ckpt"), also_optimizer)
    assert found == [(0, True), (0, True)]


def test_what_accelerate_loaded_is_shared_at_once(tmp_path):
    pytest.importorskip("transformers", reason="sp_lightning.hf is for accelerate, which comes with it")
    assert processes.run(2, waiting.loaded_with_accelerate, str(tmp_path)) == [(0, True), (0, True)]
