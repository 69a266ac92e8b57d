"""Optimizer state that is divided among nodes: the bits of a run whose nodes each have all, in a part of the memory."""

import divided
import failing_runs
import linked_nodes
import loops
import pretended_nodes
import processes
import pytest
import ranked_fabric
import ranked_parity
import ranked_runs
import stepping
import test_nodes
import test_resume
import test_steps_in_backward
import torch

import parity
import sp_lightning

pytestmark = [pytest.mark.simgpu, pytest.mark.filterwarnings("ignore")]
DIVIDED = {"divide_state": True}
SLOW = pytest.mark.slow
ELEMENTWISE = [row for row, case in enumerate(test_nodes.COVER) if dict(case)["optimizer"] in ("adamw", "sgd", "two")]


@pytest.mark.parametrize(
    ("size", "nodes", "settings"),
    [
        (2, 2, {"accumulate": 2, "clip": True}),
        pytest.param(4, 2, {}, marks=pytest.mark.seldom),
        pytest.param(4, 2, {"edits": "weights", "clip": True, "optimizer": "sgd"}, marks=pytest.mark.seldom),
        pytest.param(4, 4, {"optimizer": "foreach"}, marks=SLOW),
        pytest.param(4, 2, {"renewals": 4}, marks=SLOW),
        pytest.param(4, 2, {"keeps_zeros": True, "accumulate": 3}, marks=SLOW),
        pytest.param(4, 2, {"accumulate": 2, "device": "simgpu"}, marks=SLOW),
    ],
)
def test_a_loop_with_shares_of_the_state_is_ddp_with_the_tree(size, nodes, settings):
    settings = dict(settings)
    device = settings.pop("device", "cpu")
    expected = processes.run(size, loops.train, None, **settings)
    options = {"window": 2, **DIVIDED}
    test_nodes.compare(
        expected, processes.run(size, pretended_nodes.run, nodes, loops.train, options, device, **settings)
    )


@pytest.mark.parametrize("row", [pytest.param(row, marks=[SLOW] * (row != ELEMENTWISE[0])) for row in ELEMENTWISE])
@pytest.mark.seldom
def test_a_trainer_with_shares_of_the_state_is_ddp_with_the_tree(row):
    case = test_nodes.OFTEN[row % len(test_nodes.OFTEN)]
    test_nodes.check(case, test_nodes.COVER[row], **DIVIDED)


STEPS = {**test_steps_in_backward.OPTIONS, **DIVIDED}
READ = {"touches all", "writes state", "refers to state", "refers to state of one rank"}  # the state
NO_EDITS = [what for what in test_steps_in_backward.HINDERED if what not in {*READ, "replicated"}]


@pytest.mark.parametrize("slow_rank", [1, pytest.param(None, marks=SLOW)])
def test_units_that_are_stepped_beside_backward_get_the_other_nodes_weights(slow_rank):
    ahead, held = test_steps_in_backward.check(2, STEPS, nodes=2, slow_rank=slow_rank)
    assert (ahead, held) == ([test_steps_in_backward.ALL] * 2, [0] * 2)


@pytest.mark.parametrize("what", ["sees weights", pytest.param("evaluates on one rank", marks=SLOW)])
@pytest.mark.parametrize("accelerator", ["simgpu"])
@pytest.mark.seldom
def test_code_that_looks_at_a_deferred_step_sees_what_all_nodes_made_of_it(what, accelerator):
    given = {"nodes": 2, "slow_rank": 3, "defers": True, "accelerator": accelerator}
    _, held = test_steps_in_backward.check(4, STEPS, what=what, **given)
    assert held == [stepping.STEPS - 2] * 4


@SLOW
@pytest.mark.parametrize("what", ["skips", "no state", *NO_EDITS])
@pytest.mark.parametrize("defers", [False, True])
def test_steps_of_any_kind(what, defers):
    test_steps_in_backward.check(4, STEPS, nodes=2, what=what, defers=defers, slow_rank=3)


def test_weights_that_are_slow_to_come_in_any_order_are_those_of_the_step():
    found = processes.run(2, pretended_nodes.run, 2, divided.trained_with_slow_weights)
    test_nodes.compare(processes.run(2, loops.train, None), found)


def test_a_node_that_leaves_has_sent_its_weights():
    (first, _), (second, _) = processes.run(2, pretended_nodes.run, 2, divided.end_of_a_short_run, slow=0)
    assert all(map(torch.equal, first, second))


@pytest.mark.seldom
def test_a_node_that_leaves_has_sent_its_state():
    (_, state), _ = processes.run(2, pretended_nodes.run, 2, divided.end_of_a_short_run, slow=1)
    assert len(state) == 3 * 8 and all(value.isfinite().all() for value in state)


@pytest.mark.parametrize(("size", "nodes"), [(2, 2), pytest.param(4, 2, marks=SLOW), pytest.param(4, 4, marks=SLOW)])
def test_a_node_has_the_memory_of_its_share(size, nodes):
    for weights, state in processes.run(size, pretended_nodes.run, nodes, divided.bytes_of_state):
        assert state == pytest.approx(2 * weights / nodes, rel=0.05)


@pytest.mark.seldom
def test_without_the_option_a_node_has_all():
    for weights, state in processes.run(2, pretended_nodes.run, 2, divided.bytes_of_state, divide_state=False):
        assert state == pytest.approx(2 * weights, rel=0.05)


@pytest.mark.parametrize("nodes", [2, pytest.param(4, marks=SLOW)])
def test_a_node_sends_its_new_weights_beside_the_sums(nodes):
    found = processes.run(nodes, pretended_nodes.run, nodes, linked_nodes.message_nbytes_of_steps, **DIVIDED)
    for nbytes in found:  # to each other node its part of the sum, the sum of the own part, and the own new weights
        assert nbytes == pytest.approx(3 * 4 * (nodes - 1) / nodes, rel=0.02)


# --- Checkpoints


@pytest.mark.seldom
def test_checkpoints_are_whole_and_other_numbers_of_nodes_resume_from_them(tmp_path):
    """Plain Lightning, 2 x 2 nodes, 2 x 1, and plain Lightning again."""
    ends = []
    for sides in (["plain"] * 4, ["plain", "streaming", "streaming", "plain"]):
        source = None
        for number, (size, side, nodes) in enumerate(zip((1, 4, 2, 1), sides, (1, 2, 2, 1), strict=True)):
            steps, target = 3 * (number + 1), str(tmp_path / f"{'-'.join(sides)} {number}.ckpt")
            of_leg = (ranked_runs.leg,) if side == "plain" else (pretended_nodes.trainer, nodes, ranked_runs.leg)
            options = DIVIDED if side == "streaming" else None
            given = {"source": source, "target": target, "steps": steps, "save_after": steps, "options": options}
            processes.run(size, *of_leg, "batch_norm", side, **given)
            source = target
        ends.append(test_resume.contents(source))
    parity.compare(*ends)


@pytest.mark.parametrize("loop", ["resuming", pytest.param("gan", marks=SLOW)])
@pytest.mark.seldom
def test_fabric_saves_and_loads_the_whole_state(loop):
    ranked_parity.check(ranked_fabric.record, loop, DIVIDED, size=4, nodes=2)


def test_state_that_is_loaded_is_divided_again():
    assert processes.run(2, pretended_nodes.run, 2, divided.loaded_again) == [(True, True)] * 2


def test_a_checkpoint_after_the_run_has_weights_alone(tmp_path):
    for (fit, whole, weights), *_ in processes.run(2, pretended_nodes.trainer, 2, divided.checkpoints, str(tmp_path)):
        assert whole.startswith("UnsupportedError: the optimizer's state is divided among machines"), whole
        assert not fit and not weights


@pytest.mark.seldom
def test_on_an_exception_no_checkpoint_is_saved(tmp_path):
    found = processes.run(2, pretended_nodes.trainer, 2, divided.checkpoints, str(tmp_path), fails=True)
    for (error,), said, files in found:
        assert error.startswith("ValueError: every rank fails") and not files
        assert "no checkpoint is saved of this exception, since the optimizers' state is divided" in said


# --- What cannot be done with it


def test_any_access_to_state_is_an_error_that_says_what_to_do():
    first, second = processes.run(2, pretended_nodes.run, 2, divided.errors_of_reads)
    for rank, said in enumerate((first, second)):
        assert said.pop("shape") == "(64, 64) torch.float32"
        assert bool(said.pop("whole")) == (rank == 1)
        for what, error in said.items():
            assert error.startswith("RuntimeError: "), f"{what}: {error}"
            assert "divided among machines (divide_state=True)" in error and "optimizer_state(optimizer)" in error, what


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("adafactor", "OptionError: divide_state must be False with Adafactor, which each machine steps as a whole"),
        ("lbfgs", "OptionError: divide_state must be False with LBFGS, which each machine steps as a whole"),
        ("nesterov", "OptionError: divide_state must be False with SGD, which each machine steps as a whole"),
        ("moved", "UnsupportedError: state of an optimizer was moved to another parameter"),
        ("grows", "UnsupportedError: state of an optimizer was moved to another parameter, or the module's parameters"),
        ("other data", "UnsupportedError: 0.weight was given other data, or other state, after its optimizer's state"),
    ],
)
@pytest.mark.few(3)
def test_what_each_node_would_have_to_step_as_a_whole_is_refused(what, said):
    for error in processes.run(2, pretended_nodes.run, 2, divided.refused, what):
        assert error.startswith(said), error


def test_a_disk_is_refused():
    with pytest.raises(sp_lightning.errors.OptionError, match="divide_state must be False with disk or host_budget"):
        sp_lightning.SuperpipelineStrategy(divide_state=True, disk="/somewhere")


# --- Failures

PHASES = ["sending new weights", "taking new weights", "in the step", "end of the step"]
CASES = [(phase, way, victim) for phase in PHASES for way in ("raise", "kill") for victim in (0, 3)]
EVERY_DAY = {("taking new weights", "kill", 3)}


@pytest.mark.parametrize(
    ("phase", "way", "victim"), [pytest.param(*case, marks=[] if case in EVERY_DAY else SLOW) for case in CASES]
)
@pytest.mark.seldom
def test_all_ranks_of_all_nodes_end_when_one_fails_in_a_step(phase, way, victim):
    endings = failing_runs.endings(4, phase=phase, way=way, victim=victim, nodes=2, divides=True)
    assert endings[victim].struck, f"nothing failed: {endings}"
    for rank, ending in enumerate(endings):
        if rank != victim:
            late = ending.at - endings[victim].struck
            assert late < test_nodes.LIMIT_S + 2, f"rank {rank}: {ending}"
            assert (ending.error, ending.status) == ("PeerError", 1) or ending.status == -9, f"rank {rank}: {ending}"


@SLOW
def test_no_checkpoint_has_weights_of_two_steps(tmp_path):
    """Once nodes began to step, only those that have all of a step could save it, and none does."""
    for phase in ("sending new weights", "taking new weights"):
        folder = tmp_path / phase
        folder.mkdir()
        failing_runs.endings(4, phase=phase, way="raise", victim=3, nodes=2, divides=True, saves_to=str(folder))
        assert not list(folder.iterdir())
