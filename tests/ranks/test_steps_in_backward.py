"""Several ranks step their parts beside backward where all of them would, and only there; the bits are DDP's."""

import functools

import pretended_nodes
import processes
import pytest
import stepping

import parity

UNITS = stepping.BLOCKS + 1
STEPPED = stepping.STEPS - 1  # the first one makes the state
ALL = 2 * UNITS * STEPPED
PACE = {"slow_rank", "defers"}  # settings without effect under DDP
OPTIONS = {"window": 2, "units": ["Linear"]}
# How many parameters each rank steps beside backward.
HINDERED = {
    "looks at gradients of one rank": 0,
    "looks at gradients": 0,
    "replicated": 0,
    "no state": ALL,
    "touches all": ALL,
    "amsgrad": ALL,
    "groups": ALL,  # of which one steps its parameters by operators for lists
    "writes weights": ALL - 2 * STEPPED,  # those of a unit
    "writes state": ALL - 2 * STEPPED,
    "refers to weights of one rank": ALL - 2 * 4,  # from the third step on
    "refers to state": ALL - 4,  # a parameter
    "refers to state of one rank": ALL - 2 * 4,  # the other rank would step that parameter
    "reads weights in backward": ALL - 2 * STEPPED,
    "reads weights in backward of one rank": ALL - 2 * STEPPED,
}
OFTEN = {"looks at gradients of one rank", "refers to state of one rank", "writes weights", "no state", "groups"}


@functools.cache
def of_ddp(size, **settings):
    return processes.run(size, stepping.train, None, **settings)


def check(size=2, options=OPTIONS, accelerator="cpu", nodes=1, **settings):
    """Compare with DDP; return what each rank stepped beside backward, and how many steps it deferred."""
    expected = of_ddp(size, **{name: value for name, value in settings.items() if name not in PACE})
    found = processes.run(size, pretended_nodes.trainer, nodes, stepping.train, options, accelerator, **settings)
    for rank, ((theirs, *_), (ours, *_)) in enumerate(zip(expected, found, strict=True)):
        seen = dict(parity.leaves(ours))
        for path, leaf in parity.leaves(theirs):
            assert parity.difference(leaf, seen.pop(path)) is None, f"{path} of rank {rank}"
        assert not seen
    return [ahead for _, ahead, _ in found], [held for *_, held in found]


@pytest.mark.simgpu
@pytest.mark.parametrize("slow_rank", [None, 0, 1])
@pytest.mark.parametrize("accelerator", ["cpu", "simgpu"])
@pytest.mark.few(2)
def test_all_units_are_stepped_beside_backward_and_equal_ddps(slow_rank, accelerator):
    assert check(slow_rank=slow_rank, accelerator=accelerator) == ([ALL] * 2, [0] * 2)


@pytest.mark.simgpu
@pytest.mark.parametrize("slow_rank", [0, 1])
@pytest.mark.parametrize("accelerator", ["cpu", "simgpu"])
@pytest.mark.few(2)
def test_what_a_slow_rank_has_not_stepped_by_then_is_deferred(slow_rank, accelerator):
    ahead, held = check(slow_rank=slow_rank, accelerator=accelerator, defers=True)
    assert 0 < ahead[slow_rank] < ALL
    assert held == [STEPPED - 1] * 2  # another step follows all but the last


@pytest.mark.simgpu
@pytest.mark.parametrize(
    "what",
    ["sees weights", "sees a state dict", "sees optimizer state", "averages weights", "evaluates on one rank"],
)
@pytest.mark.parametrize("slow_rank", [0, 1])
@pytest.mark.parametrize("accelerator", ["cpu", "simgpu"])
@pytest.mark.few(3)
def test_code_that_looks_at_a_step_sees_what_all_ranks_made_of_it(what, slow_rank, accelerator):
    ahead, held = check(what=what, slow_rank=slow_rank, defers=True, accelerator=accelerator)
    assert 0 < ahead[slow_rank] < ALL
    assert held == [STEPPED - 1] * 2


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=[pytest.mark.slow] * (what not in OFTEN)) for what in HINDERED]
)
@pytest.mark.few(1)
def test_ranks_step_beside_backward_what_all_would(what):
    assert check(what=what, slow_rank=1) == ([HINDERED[what]] * 2, [0] * 2)


@pytest.mark.parametrize("slow_rank", [None, pytest.param(2, marks=pytest.mark.seldom)])
def test_nodes_step_all_units_beside_backward_and_equal_ddp_with_the_tree(slow_rank):
    assert check(4, nodes=2, slow_rank=slow_rank) == ([ALL] * 4, [0] * 4)


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=[pytest.mark.slow] * ("of one rank" not in what)) for what in HINDERED]
)
@pytest.mark.few(1)
def test_nodes_step_beside_backward_what_the_ranks_of_all_would(what):
    assert check(nodes=2, what=what, slow_rank=1) == ([HINDERED[what]] * 2, [0] * 2)


def test_blocks_that_a_node_skips_are_stepped_later():
    (first, second), _ = check(nodes=2, what="skips", slow_rank=1)
    assert 0 < first < ALL and first == second


@pytest.mark.parametrize(
    ("trainer", "ahead"), [({"accumulate_grad_batches": 2}, 2 * UNITS * 2), ({"gradient_clip_val": 0.1}, 0)]
)
def test_accumulated_gradients_are_stepped_with_and_clipped_ones_are_not(trainer, ahead):
    assert check(slow_rank=0, **trainer) == ([ahead] * 2, [0] * 2)


def test_blocks_that_a_rank_skips_are_stepped_later():
    (first, second), _ = check(what="skips", slow_rank=1)
    assert 0 < first < ALL and first == second


def test_without_overlap_nothing_is_stepped_beside_backward():
    assert check(options={**OPTIONS, "optimizer_overlap": False})[0] == [0] * 2


@pytest.mark.parametrize("what", ["scales unseen", "clips unseen"])
def test_gradients_that_code_changes_after_they_were_stepped_with_are_an_error(what):
    with pytest.raises(
        processes.RankFailed, match=r"the gradient of .* was changed after backward, when the optimizer"
    ):
        processes.run(2, stepping.train, OPTIONS, what=what)


def test_ranks_with_different_options_step_nothing_beside_backward():
    """So the error comes before any rank has stepped, and what was trained until then may be saved."""
    for said, torn in processes.run(2, stepping.after_drifting):
        assert "gave their optimizers different options" in said and torn is None


@pytest.mark.slow
@pytest.mark.simgpu
@pytest.mark.parametrize("what", ["", "skips", *HINDERED])
@pytest.mark.parametrize("defers", [False, True])
@pytest.mark.parametrize(("size", "nodes", "accelerator"), [(2, 1, "simgpu"), (4, 1, "cpu"), (4, 2, "simgpu")])
def test_on_other_devices_and_more_ranks(what, defers, size, nodes, accelerator):
    check(size, nodes=nodes, what=what, defers=defers, slow_rank=size - 1, accelerator=accelerator)
