"""Several ranks step their parts beside the next forward, and nobody sees it half done."""

import functools

import deferring
import processes
import pytest
import torch

import parity

LOOKS = [
    *("reads", "writes", "writes beside", "writes an array", "reads gradients", "writes gradients", "takes gradients"),
    *("reads state", "reads state on one rank", "writes state", "evaluates on one rank", "steps again"),
    "writes beside, by a view",
]
OFTEN = {"reads", "writes beside, by a view", "takes gradients", "reads state on one rank", "steps again"}
PACE = {"slow_rank", "keeps"}  # settings without effect under DDP
HELD = {"writes state": 0, "writes beside, by a view": 0, "steps again": 2 * deferring.STEPS - 1}
UNHINDERED = deferring.STEPS - 1  # the first step makes the state


@functools.cache
def of_ddp(size, **settings):
    return processes.run(size, deferring.train, None, **settings)


def check(size=2, **settings):
    """Compare with DDP; return how many steps each rank deferred."""
    device = settings.pop("device", "cpu")
    expected = of_ddp(size, **{name: value for name, value in settings.items() if name not in PACE})
    found = processes.run(size, deferring.train, {"window": 2}, device, **settings)
    for rank, ((theirs, _), (ours, _)) in enumerate(zip(expected, found, strict=True)):
        seen = dict(parity.leaves(ours))
        for path, leaf in parity.leaves(theirs):
            assert parity.difference(leaf, seen.pop(path)) is None, f"{path} of rank {rank}"
        assert not seen
    return [held for *_, held in found]


@pytest.mark.parametrize("slow_rank", [None, 0, 1])
@pytest.mark.few(1)
def test_steps_are_deferred_and_equal_ddps(slow_rank):
    assert check(slow_rank=slow_rank) == [UNHINDERED] * 2


@pytest.mark.simgpu
@pytest.mark.parametrize("slow_rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_steps_are_deferred_on_a_device(slow_rank):
    assert check(slow_rank=slow_rank, device="simgpu") == [UNHINDERED] * 2


@pytest.mark.parametrize("what", [pytest.param(what, marks=[pytest.mark.slow] * (what not in OFTEN)) for what in LOOKS])
@pytest.mark.few(1)
def test_user_code_after_a_deferred_step_is_as_under_ddp(what):
    """One rank is slow to step what it owns: the first, where that lies in a page with what user code writes."""
    held = check(what=what, slow_rank=int("beside" not in what))
    assert held == [HELD.get(what, UNHINDERED)] * 2


@pytest.mark.parametrize("keeps", [0, 1])
@pytest.mark.parametrize("slow_rank", [0, 1])
@pytest.mark.few(1)
def test_a_rank_may_defer_a_step_that_another_one_does_not(keeps, slow_rank):
    held = check(keeps=keeps, slow_rank=slow_rank)
    assert (held[keeps], held[1 - keeps]) == (0, UNHINDERED)


@pytest.mark.parametrize(("optimizer", "expected"), [("sgd", 1), ("foreach", UNHINDERED), ("adafactor", 0)])
@pytest.mark.seldom
def test_other_optimizers(optimizer, expected):
    held = check(optimizer=optimizer, slow_rank=1)
    assert held == [UNHINDERED if expected else 0] * 2


@pytest.mark.parametrize("slow_rank", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.seldom
def test_several_optimizers_step_parts_of_the_same_units(slow_rank):
    assert min(check(several=2, slow_rank=slow_rank)) >= UNHINDERED


def test_what_two_optimizers_clip_in_the_other_order_may_be_multiplied_late():
    expected, found = [processes.run(2, deferring.clipped_one_by_one, streams) for streams in (False, True)]
    for (theirs, _), (ours, held) in zip(expected, found, strict=True):
        assert all(map(torch.equal, theirs, ours))
        assert held == deferring.STEPS  # the first one's


def test_without_overlap_nothing_is_deferred():
    found = processes.run(2, deferring.train, {"window": 2, "optimizer_overlap": False})
    assert [held for *_, held in found] == [0, 0]


def test_an_error_in_the_next_forward_leaves_the_weights_of_a_whole_step():
    first, second = processes.run(2, deferring.after_an_error, "forward")
    assert (first, second) == (("MemoryError", True), ("PeerError", True))


def test_an_error_of_one_ranks_thread_tears_the_step_of_all():
    first, second = processes.run(2, deferring.after_an_error, "thread")
    assert (first, second) == (("MemoryError, torn", False), ("PeerError, torn", False))


@pytest.mark.slow
@pytest.mark.parametrize("what", LOOKS)
@pytest.mark.parametrize(("size", "device"), [(2, "simgpu"), (4, "cpu")])
@pytest.mark.simgpu
def test_user_code_on_other_devices_and_more_ranks(what, size, device):
    check(size, what=what, slow_rank=size - 1, device=device)
