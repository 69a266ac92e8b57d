"""A rank that fails ends the run on all ranks, at once, with an error that names it; and nothing is left."""

import functools
import os
import signal
import subprocess
import sys
import time

import failing_runs
import processes
import pytest
import ranked_features
import torch

import parity

LIMIT_S = 5
SLOW = pytest.mark.slow
ALL_WAYS = [
    (phase, way)
    for phase in failing_runs.PHASES
    for way in ("raise", "kill", "memory")
    if way != "memory" or phase in ("forward", "backward", "in the step")
]
DAILY = {
    ("descriptors", "kill"),
    ("forward", "kill"),
    ("backward", "raise"),
    ("in the step", "kill"),
    ("deferred part", "kill"),
    ("beside backward", "kill"),
}


def check(size, phase, way, victim, timeout=60, disk=None):
    with failing_runs.nothing_left():
        slow = victim if phase == "deferred part" else None  # so that something is left for that
        endings = failing_runs.endings(size, phase=phase, way=way, victim=victim, timeout=timeout, slow=slow, disk=disk)
    names = [f"@{name[1:]}" for ending in endings for name in ending.names]
    assert not any(name in failing_runs.sockets() for name in names)
    struck = max(ending.struck for ending in endings)
    assert struck, f"nothing failed: {endings}"
    assert not any(ending.in_shm for ending in endings)
    for rank, ending in enumerate(endings):
        if victim is None or rank == victim:
            continue
        assert ending.at - struck < LIMIT_S + (timeout if way in ("hang", "stop") else 0), f"rank {rank}: {ending}"
        assert (ending.error, ending.status) == ("PeerError", 1), f"rank {rank}: {ending}"
        assert f"rank {victim} " in f"{ending.message} ", f"rank {rank}: {ending}"
    return endings


def victim_of(phase, size=2):
    return 0 if phase == "accepting" else size - 1


@pytest.mark.parametrize(
    ("phase", "way"),
    [
        pytest.param(*case, marks=[] if case in DAILY else pytest.mark.slow)
        for case in ALL_WAYS
        if case[0] != "teardown"
    ],
)
@pytest.mark.few(1)
def test_the_other_rank_ends_with_an_error_that_names_the_one_that_failed(phase, way):
    check(2, phase, way, victim_of(phase))


@pytest.mark.slow
@pytest.mark.parametrize(("phase", "way"), [case for case in ALL_WAYS if case[0] not in ("teardown", "connecting")])
def test_the_first_rank_may_fail(phase, way):
    check(2, phase, way, 0)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["raise", "kill"])
@pytest.mark.parametrize(
    "phase", ["meeting", "descriptors", "configure_model", "forward", "backward", "exchange", "settle"]
)
def test_one_of_four_may_fail(phase, way):
    check(4, phase, way, 2)


@pytest.mark.parametrize(
    ("phase", "victim"), [("forward", 1), *(pytest.param(*case, marks=SLOW) for case in [("exchange", 0), ("data", 0)])]
)
def test_a_rank_that_gets_sigterm_ends_after_its_batch_and_is_named(phase, victim):
    """Lightning's own handler waits for the others in a collective, and they wait for this one elsewhere."""
    assert check(2, phase, "signal", victim)[victim].error == "SIGTERMException"


def test_batches_begin_without_a_collective_of_torch():
    """Lightning's own of each batch, by which it tells of SIGTERM, waits for a rank until its process ended."""
    few, more = (processes.run(2, ranked_features.broadcasts, steps) for steps in (1, 4))
    assert few == more


@SLOW
def test_ranks_that_all_get_sigterm_end_by_it():
    endings = failing_runs.endings(2, phase="forward", way="signal", victim=None)
    assert [ending.error for ending in endings] == ["SIGTERMException"] * 2


@pytest.mark.parametrize(
    "phase",
    ["data", *(pytest.param(p, marks=pytest.mark.slow) for p in ("exchange", "deferred part", "beside backward"))],
)
@pytest.mark.seldom
def test_a_rank_that_hangs_is_named_and_ended_after_the_timeout(phase):
    endings = check(2, phase, "hang", 1, timeout=5)
    assert endings[1].status == -9  # by its own thread that watches


@pytest.mark.slow
def test_ranks_do_not_wait_for_one_that_is_stopped():
    endings = failing_runs.endings(2, phase="data", way="stop", victim=1, timeout=5, longest=30)
    assert endings[1].status == -9  # by the test: nothing in it can run
    assert endings[0].error == "PeerError" and "rank 1 did not come" in endings[0].message
    assert endings[0].at - endings[1].struck < 5 + LIMIT_S


@pytest.mark.slow
@pytest.mark.parametrize("way", ["raise", "kill"])
def test_a_failure_in_teardown_does_not_stop_the_others(way):
    endings = failing_runs.endings(2, phase="teardown", way=way, victim=1)
    assert endings[0].status == 0


@pytest.mark.parametrize(("victim", "errors"), [(None, ["ValueError"] * 2), (1, ["PeerError", "ValueError"])])
@pytest.mark.seldom
def test_ranks_that_fail_wait_for_the_checkpoint_that_the_first_one_saves(victim, errors, tmp_path):
    """A launcher ends all ranks once one has exited: each ends with its own exception, once the file is there."""
    endings = failing_runs.endings(2, phase="forward", way="raise", victim=victim, saves_to=str(tmp_path))
    assert [(ending.error, ending.status) for ending in endings] == [(error, 1) for error in errors]
    struck = max(ending.struck for ending in endings)
    assert all(ending.at - struck > failing_runs.SAVE_S for ending in endings)
    assert torch.load(tmp_path / "on_exception.ckpt", weights_only=False)["global_step"] == 1


def test_a_callback_of_the_users_that_saves_on_exception_does_not_keep_the_others_waiting(tmp_path):
    endings = failing_runs.endings(
        2, phase="forward", way="raise", victim=1, saves_to=str(tmp_path), saver="PlainSaver", timeout=40
    )
    assert [ending.error for ending in endings] == ["PeerError", "ValueError"], endings
    assert "rank 1 failed" in endings[0].message
    assert all(ending.at - endings[1].struck < 20 for ending in endings)
    assert torch.load(tmp_path / "on_exception.ckpt", weights_only=False)["global_step"] == 1


@functools.cache
def saved_of_each_step(folder):
    """Train without a failure; return the checkpoint of each step."""
    failing_runs.endings(2, phase="none", way="", victim=None, saves_to=str(folder))
    found = [torch.load(file, weights_only=False) for file in folder.iterdir()]
    return {checkpoint["global_step"]: checkpoint for checkpoint in found}


def check_saved(folder, saved, each_step):
    """Check that a checkpoint was saved of this step, with its weights and optimizer state, or none."""
    found = [torch.load(file, weights_only=False) for file in folder.iterdir()]
    assert [checkpoint["global_step"] for checkpoint in found] == ([] if saved is None else [saved])
    for checkpoint in found:
        expected = saved_of_each_step(each_step)[saved]
        seen = dict(parity.leaves(checkpoint["optimizer_states"][0]["state"]))
        for path, leaf in parity.leaves(expected["optimizer_states"][0]["state"]):
            assert parity.difference(leaf, seen[path]) is None, path
        weights = checkpoint["state_dict"]
        for name, value in expected["state_dict"].items():
            if "running" not in name and "tracked" not in name:  # buffers may be of the next forward
                assert parity.difference(value, weights[name]) is None, name


@pytest.fixture(scope="session")
def each_step(tmp_path_factory):
    return tmp_path_factory.mktemp("each_step")


@pytest.mark.parametrize(
    ("phase", "victim", "way", "saved"),
    [
        ("before the step", 1, "raise", 1),
        ("in the step", 0, "raise", None),
        ("in the step", 1, "raise", None),
        ("loop of the step", 0, "memory", None),
        pytest.param("loop of the step", 1, "kill", None, marks=pytest.mark.slow),
        ("deferred part", 1, "raise", None),
        ("promise", 1, "raise", None),
        ("beside backward", 1, "raise", None),
        pytest.param("beside backward", 1, "kill", None, marks=pytest.mark.slow),
        ("end of the step", 1, "raise", 2),  # the threads of all go on with it
    ],
)
@pytest.mark.seldom
def test_a_checkpoint_on_exception_has_a_step_of_all_ranks(phase, victim, way, saved, tmp_path, each_step):
    """Of a step that some ranks have taken their part in there is none."""
    slow = victim if phase == "deferred part" else None  # so that something is left for that
    endings = failing_runs.endings(2, phase=phase, way=way, victim=victim, saves_to=str(tmp_path), slow=slow)
    assert endings[1 - victim].error == "PeerError", endings
    check_saved(tmp_path, saved, each_step)


@pytest.mark.parametrize("way", ["raise", pytest.param("kill", marks=pytest.mark.slow)])
@pytest.mark.seldom
def test_no_checkpoint_is_saved_of_a_step_that_is_not_deferred_and_some_have_not_ended(way, tmp_path, each_step):
    phase = "end of the step"
    endings = failing_runs.endings(2, phase=phase, way=way, victim=1, saves_to=str(tmp_path), overlap=False)
    assert endings[0].error == "PeerError", endings
    check_saved(tmp_path, None, each_step)


@pytest.mark.parametrize("phase", ["in the step", "end of the step"])
def test_a_signal_handler_that_saves_while_ranks_step_is_an_error(phase, tmp_path, each_step):
    """One that saves has stepped nothing or all of its part then, and others may have begun, or may not have ended."""
    endings = failing_runs.endings(2, phase=phase, way="save", victim=0, saves_to=str(tmp_path), overlap=False)
    assert [ending.error for ending in endings] == ["ExactnessError", "PeerError"], endings
    assert "asked for in the middle of a step" in endings[0].message
    check_saved(tmp_path, None, each_step)


@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.seldom
def test_a_rank_that_fails_as_the_others_leave_is_not_told_that_it_failed(victim, nodes, tmp_path):
    endings = failing_runs.endings(
        2, phase="validation", way="raise", victim=victim, saves_to=str(tmp_path), nodes=nodes
    )
    other = 1 - victim
    assert f"rank {victim}" not in endings[victim].message, endings
    assert endings[victim].error == "ValueError" or f"rank {other}" in endings[victim].message, endings
    assert endings[other].error in ("", "PeerError"), endings


# What a rank does after it began to step beside backward. An error in it leaves a step that some have not taken, but
# for those in `WHOLE`: all have taken their parts, or their threads go on with them.
AFTER_BEGUN = [
    *("backward", "between post and sum", "exchange", "settle", "in the step", "loop of the step", "end of the step"),
    *("deferred part", "forward"),
]
WHOLE = {("end of the step", 1), ("forward", 0), ("forward", 1)}


@pytest.mark.parametrize(
    ("phase", "victim", "slow", "way"),
    [
        pytest.param(phase, victim, slow, way, marks=[] if (way, victim) == ("raise", 1) else pytest.mark.slow)
        for phase in AFTER_BEGUN
        for victim, slow, way in [(1, 0, "raise"), (1, 1, "raise"), (0, 0, "raise"), (0, 1, "raise"), (1, 1, "kill")]
        if phase != "deferred part" or slow == victim  # else it may have nothing left for that
    ],
)
@pytest.mark.few(2)
@pytest.mark.seldom
def test_a_checkpoint_has_a_step_of_all_ranks_once_one_stepped_beside_backward(
    phase, victim, slow, way, tmp_path, each_step
):
    endings = failing_runs.endings(
        2, phase=phase, way=way, victim=victim, saves_to=str(tmp_path), beside=True, slow=slow
    )
    assert endings[victim].struck and endings[1 - victim].error == "PeerError", endings
    saved = 2 if (phase, victim) in WHOLE else None
    if way == "kill" and not any(tmp_path.iterdir()):
        saved = None  # its thread had not ended by then
    check_saved(tmp_path, saved, each_step)


@pytest.mark.parametrize("phase", [*AFTER_BEGUN, "promise", "beside backward", "sum of nodes", "agreement of nodes"])
@pytest.mark.parametrize(("victim", "slow"), [(1, 0), (1, 1), (0, 0), (0, 1)])
@pytest.mark.parametrize("way", ["raise", "kill"])
@pytest.mark.few(2)
@pytest.mark.seldom
def test_a_checkpoint_of_nodes_has_all_of_a_step_that_was_begun_beside_backward_or_there_is_none(
    phase, victim, slow, way, tmp_path, each_step
):
    """A node may end a step of which another one took a part: its own copy of the model is whole then.

    It may also be ended by its own thread, in a collective of Lightning that the victim does not come to.
    """
    given = {"phase": phase, "way": way, "victim": victim, "slow": slow, "beside": True, "nodes": 2}
    endings = failing_runs.endings(2, saves_to=str(tmp_path), **given)
    if phase == "deferred part" and slow != victim and not endings[victim].struck:
        return  # nothing was left for that
    other = endings[1 - victim]
    assert endings[victim].struck and (other.error == "PeerError" or other.status == -signal.SIGKILL), endings
    steps = [torch.load(file, weights_only=False)["global_step"] for file in tmp_path.iterdir()]
    assert not steps or (way, victim) != ("kill", 0)
    check_saved(tmp_path, steps[0] if steps else None, each_step)


@pytest.mark.seldom
def test_a_rank_that_stepped_all_beside_backward_does_nothing_more_in_a_deferred_part():
    """It has told the others that it is done, so an error there would tear a step that others save."""
    endings = failing_runs.endings(2, phase="deferred part", way="raise", victim=1, beside=True, slow=0)
    assert [(ending.status, ending.struck) for ending in endings] == [(0, 0.0)] * 2


@pytest.mark.parametrize("way", ["kill"])
def test_nothing_is_left_when_all_are_killed(way):
    with failing_runs.nothing_left():
        endings = failing_runs.endings(2, phase="backward", way=way, victim=None)
    assert [ending.status for ending in endings] == [-9, -9]
    names = [f"@{name[1:]}" for ending in endings for name in ending.names]
    assert names and not any(name in failing_runs.sockets() for name in names)


def test_a_run_without_a_failure_leaves_nothing():
    with failing_runs.nothing_left():
        endings = failing_runs.endings(2, phase="none", way="", victim=None)
    assert [ending.status for ending in endings] == [0, 0]
    assert not any(ending.in_shm for ending in endings)
    names = [f"@{name[1:]}" for ending in endings for name in ending.names]
    assert names and not any(name in failing_runs.sockets() for name in names)


SCRIPT = """
import sys
import failing_runs

if __name__ == "__main__":
    failing_runs.script(sys.argv[1], sys.argv[2])
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["raise", "kill", "hang"])
@pytest.mark.parametrize("launcher", [[], ["-m", "torch.distributed.run", "--nproc-per-node=2", "--no-python"]])
def test_launchers_end_the_run_and_show_who_failed(launcher, way, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, *launcher, *([sys.executable] if launcher else []), "script.py", "forward", way]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    said = done.stdout + done.stderr
    assert done.returncode != 0, said
    what = "failed; its own error says why" if way == "raise" else "ended" if way == "kill" else "did not come"
    assert f"rank 1 {what}" in said, said
    (struck,) = (float(line.split()[-1]) for line in said.splitlines() if "the victim strikes at" in line)
    assert time.monotonic() - struck < (45 if way == "hang" else 15), said  # a launcher looks every 5 s
