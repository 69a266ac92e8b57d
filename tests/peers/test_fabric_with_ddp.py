"""Fabric with several devices is Fabric with DDP, to the last bit."""

import os
import time

import forks
import processes
import pytest
import ranked_fabric
from ranked_parity import check

import parity


@pytest.mark.parametrize(
    ("loop", "device", "precision", "options"),
    [
        ("plainly", "cpu", "32-true", {"window": 2}),
        ("accumulating", "cpu", "32-true", {"window": 1}),
        ("gan", "cpu", "bf16-mixed", {"window": "auto"}),
        ("resuming", "cpu", "32-true", {"window": 2}),
        ("keeping", "cpu", "32-true", {"window": 2}),
        ("moving", "cpu", "32-true", {"window": 1}),
        ("stepping_together", "cpu", "32-true", {"window": 1}),
        ("in_phases", "cpu", "32-true", {"window": 1}),
        pytest.param("gan", "simgpu", "32-true", {"window": 1, "activations": "recompute"}, marks=pytest.mark.simgpu),
        pytest.param("accumulating", "simgpu", "32-true", {"window": 2}, marks=pytest.mark.simgpu),
        pytest.param("moving", "simgpu", "32-true", {"window": 1}, marks=pytest.mark.simgpu),
        pytest.param("stepping_together", "simgpu", "32-true", {"window": 1}, marks=pytest.mark.simgpu),
        pytest.param("in_phases", "simgpu", "32-true", {"window": 2}, marks=pytest.mark.simgpu),
    ],
)
@pytest.mark.seldom
def test_two_ranks_are_ddp(loop, device, precision, options):
    check(ranked_fabric.record, loop, options, device, precision=precision)


@pytest.mark.simgpu
@pytest.mark.seldom
def test_ranks_that_are_in_different_modules_of_one_backward_do_not_wait_for_each_other():
    expected = processes.run(2, ranked_fabric.slow_gan, None)
    found = processes.run(2, ranked_fabric.slow_gan, {"window": 1}, "simgpu")
    for theirs, ours in zip(expected, found, strict=True):
        parity.compare(theirs, ours)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("copy", "UnsupportedError: a deep copy of what Fabric set up on several devices is not streamed"),
        ("part", "UnsupportedError: a module is set up on several devices that is a part of another one, which fabric"),
        ("optimizer", "UnsupportedError: on several devices an optimizer cannot step modules that were set up one by"),
    ],
)
@pytest.mark.few(1)
def test_what_several_devices_cannot_do_is_said(what, said):
    for error in processes.run(2, ranked_fabric.refused, what):
        assert error.startswith(said), error


SCRIPT = """
import sp_lightning
import torch
from lightning.fabric import Fabric

fabric = Fabric(accelerator="cpu", devices=2, strategy="superpipeline")
fabric.launch()
net = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
net, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))


def fail(place):
    if fabric.global_rank == 1 and step == 1 and place == FAILS:
        raise RuntimeError("as it happens")


net.module[1].register_full_backward_pre_hook(lambda *_: fail("in backward"))
for step in range(3):
    fabric.backward(net(torch.ones(2, 8)).sum())
    optimizer.step()
    fail("after a step")
"""


@pytest.mark.parametrize("fails", ["after a step", "in backward", None])
@pytest.mark.seldom
def test_a_rank_that_ends_by_an_error_is_named_and_one_that_is_done_is_not(fails):
    place = {"WORLD_SIZE": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(processes.free_port())}
    script = SCRIPT.replace("FAILS", repr(fails))
    began = time.monotonic()
    ranks = [forks.Program(script, env=os.environ | place | {"LOCAL_RANK": str(rank)}) for rank in range(2)]
    ended = [rank.wait(200) for rank in ranks]
    said = [rank.stderr for rank in ended]
    assert [rank.returncode != 0 for rank in ended] == [fails is not None] * 2, said
    assert ("PeerError: rank 1 failed; its own error says why" in said[0]) == (fails is not None), said[0]
    assert time.monotonic() - began < 150
