"""Several ranks that train by hand have the bits of DDP, and with more than two those of DDP with the tree's order."""

import peer_runs
import processes
import pytest
from peer_runs import Case

pytestmark = [pytest.mark.simgpu, pytest.mark.filterwarnings("ignore")]
SLOW = pytest.mark.slow
CASES = [
    Case("tied", "fused", accumulated=2, clipped=0.3, device="simgpu"),
    Case("frozen", "sgd", options={"window": 1}),
    Case("plain", "fused", scaled=True),
    Case("skipping", "adamw", accumulated=2, edits=True),
    Case("pictures", "sgd", device="simgpu", compiled=True),
    Case("pictures", "foreach", device="simgpu", options={"window": 1, "activations": "recompute+offload"}),
    Case("plain", "adamw", accumulated=2, syncs=False),
    Case("skipping", "adafactor", edits=True, device="simgpu", options={"host_memory": "pageable"}),
    Case("skipping", "own", accumulated=2, edits=True),
    Case("plain", "sgd", clipped=0.3, options={"optimizer_overlap": False}),
    Case("tied", "adamw", accumulated=2, machines=2),
    Case("tied", "adamw", device="simgpu", options={"resident": 2}),
    Case("filed", "adamw", edits=True, options={"host_budget": 0}),
    Case("filed", "fused", accumulated=2, clipped=0.3, device="simgpu", options={"host_budget": 0}),
]


@pytest.mark.parametrize(
    "case",
    [*CASES[:5], *(pytest.param(case, marks=SLOW) for case in CASES[5:])],
    ids=lambda case: f"{case.net}-{case.optimizer}-{case.device}",
)
def test_two_ranks_have_the_bits_of_ddp(case):
    assert processes.run(2, peer_runs.differences, case) == [[], []]


@pytest.mark.parametrize(
    ("size", "case"),
    [(4, CASES[3]), *(pytest.param(3, case, marks=SLOW) for case in CASES if case.machines == 1)],
)
def test_more_ranks_have_the_bits_of_the_tree(size, case):
    assert processes.run(size, peer_runs.differences, case) == [[]] * size


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=SLOW)])
@pytest.mark.parametrize("name", peer_runs.PROGRAMS)
def test_what_user_code_does_to_gradients_and_state_has_the_bits_of_ddp(name, size):
    assert processes.run(size, peer_runs.differ, name) == [[]] * size


@SLOW
@pytest.mark.parametrize("name", ["views_of_sums", "kept_views"])
def test_what_user_code_reads_between_steps_has_the_bits_of_ddp_on_a_device(name):
    assert processes.run(2, peer_runs.differ, name, "simgpu") == [[], []]


@SLOW
def test_two_machines_of_two_ranks_have_the_bits_of_the_tree():
    for net in ("tied", "skipping"):
        assert processes.run(4, peer_runs.differences, Case(net, machines=2)) == [[]] * 4
