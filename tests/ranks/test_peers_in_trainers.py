"""A Trainer with several devices has the bits of DDP, and checkpoints that any number of devices goes on from."""

import peer_runs
import processes
import pytest
import torch
from peer_runs import Case

pytestmark = pytest.mark.filterwarnings("ignore")
CASES = [
    (Case("tied", "adamw", accumulated=2, clipped=0.5), {}),
    (Case("pictures", "sgd"), {"by_hand": True}),
    (Case("skipping", "fused"), {"precision": "bf16-mixed"}),
    (Case("plain", "adamw"), {"precision": "bf16-true"}),
]


@pytest.mark.parametrize("case, settings", CASES, ids=lambda one: one.net if isinstance(one, Case) else "")
def test_two_devices_of_a_trainer_have_the_bits_of_ddp(case, settings, tmp_path):
    assert processes.run(2, peer_runs.fit_differences, case, str(tmp_path), **settings) == [[], []]


def test_two_devices_of_fabric_have_the_bits_of_ddp(tmp_path):
    case = Case("pictures", "adamw", accumulated=2)
    assert processes.run(2, peer_runs.fabric_differences, case, str(tmp_path)) == [[], []]


def test_checkpoints_go_from_two_devices_to_one_and_back(tmp_path):
    [two, _] = processes.run(2, peer_runs.fit, Case("tied", steps=2), True, str(tmp_path))
    folders = [tmp_path / name for name in ("plain", "one", "again")]
    [plain] = processes.run(1, peer_runs.fit, Case("tied"), False, str(folders[0]), source=two["path"])
    [one] = processes.run(1, peer_runs.fit, Case("tied"), True, str(folders[1]), source=two["path"])
    assert peer_runs.unlike(plain["saved"], one["saved"]) == []
    case = Case("tied", steps=6)
    theirs, ours = (
        processes.run(2, peer_runs.fit, case, streamed, str(folders[2]), source=plain["path"])[0]["saved"]
        for streamed in (False, True)
    )
    assert peer_runs.unlike(theirs, ours) == []
    assert not torch.equal(theirs["state_dict"]["net.head.weight"], plain["saved"]["state_dict"]["net.head.weight"])
