"""A loop by hand over `stream(group=...)` is the same loop over DDP: ranks skip blocks, users edit what they like."""

import loops
import processes
import pytest
import torch

import parity


def check(size, device, **settings):
    expected = processes.run(size, loops.train, None, **settings)
    found = processes.run(size, loops.train, {"window": 2}, device, **settings)
    for rank, (theirs, ours) in enumerate(zip(expected, found, strict=True)):
        for what, one, other in zip(theirs._fields, theirs, ours, strict=True):
            seen = dict(parity.leaves(other))
            assert {path: parity.difference(leaf, seen.pop(path)) for path, leaf in parity.leaves(one)} == (
                dict.fromkeys(dict(parity.leaves(one)))
            ), f"{what} of rank {rank}"
            assert not seen


@pytest.mark.parametrize(
    ("device", "settings"),
    [
        ("cpu", {"edits": True, "clip": True}),
        ("cpu", {"optimizer": "adafactor", "edits": True}),
        ("cpu", {"optimizer": "foreach", "accumulate": 2}),
        pytest.param("simgpu", {"accumulate": 2, "edits": True}, marks=pytest.mark.simgpu),
        pytest.param("simgpu", {"optimizer": "sgd", "keeps_zeros": True}, marks=pytest.mark.simgpu),
    ],
)
def test_two_ranks_are_ddp(device, settings):
    check(2, device, **settings)


def test_optimizers_may_die_on_one_rank_and_live_on_another():
    check(2, "cpu", renewals=4)


def test_a_block_may_begin_to_run_twice():
    check(2, "cpu", repeats_from=4)


def test_buffers_of_any_type_are_the_first_ranks():
    """Backends of process groups do not know all of them."""
    expected = dict(loops.Buffers(0).named_buffers())
    for found in processes.run(2, loops.buffers_of_the_first):
        assert found.keys() == expected.keys()
        assert all(
            torch.equal(found[name], value) and found[name].dtype is value.dtype for name, value in expected.items()
        )


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("optimizer", loops.OPTIMIZERS)
def test_more_ranks_are_ddp_with_the_hook(size, optimizer):
    check(size, "cpu", optimizer=optimizer, edits=True, accumulate=2, clip=True)
