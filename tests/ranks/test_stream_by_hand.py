"""A loop by hand over `stream(group=...)` is the same loop over DDP: ranks skip blocks, users edit what they like."""

import os

import forks
import loops
import processes
import pytest
import torch
from refusals import refusal

import parity
from sp_lightning.errors import ExactnessError
from sp_lightning.ranks.exchange import AHEAD


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
        ("cpu", {"accumulate": 2, "clip": True}),
        ("cpu", {"accumulate": 2, "clip": True, "holds": True}),
        pytest.param("simgpu", {"accumulate": 2, "edits": True}, marks=pytest.mark.simgpu),
        pytest.param("simgpu", {"of_users": True}, marks=pytest.mark.simgpu),
        pytest.param("simgpu", {"optimizer": "sgd", "keeps_zeros": True}, marks=pytest.mark.simgpu),
    ],
)
@pytest.mark.few(1)
def test_two_ranks_are_ddp(device, settings):
    check(2, device, **settings)


def test_optimizers_may_die_on_one_rank_and_live_on_another():
    check(2, "cpu", renewals=4)


def test_an_optimizer_steps_weights_that_are_not_streamed_with_their_state():
    for theirs, ours in zip(
        processes.run(2, loops.beside_the_streamed, False),
        processes.run(2, loops.beside_the_streamed, True),
        strict=True,
    ):
        seen = dict(parity.leaves(ours))
        assert not [path for path, leaf in parity.leaves(theirs) if parity.difference(leaf, seen.pop(path))]
        assert not seen


def test_a_net_may_have_more_units_than_a_process_opens_files_by_default():
    expected = processes.run(2, loops.with_few_descriptors, None)
    found = processes.run(2, loops.with_few_descriptors, {"window": 2, "units": ["Linear"]})
    for theirs, ours in zip(expected, found, strict=True):
        assert not [n for n, pair in enumerate(zip(theirs, ours, strict=True)) if parity.difference(*pair)]


@pytest.mark.parametrize("who", ["another unit", "no unit"])
def test_a_weight_that_was_given_the_place_of_another_one_leaves_those_beside_that_alone(who):
    units = {"window": 1, "units": ["Adapted"]}
    expected = processes.run(2, loops.exchange_places, None, who)
    for theirs, ours in zip(expected, processes.run(2, loops.exchange_places, units, who), strict=True):
        assert all(map(torch.equal, theirs, ours))


@pytest.mark.parametrize("left_out", [loops.left_out_in_a_fit, loops.left_out_by_hand])
def test_a_backward_in_no_sync_may_follow_one_that_failed(left_out):
    expected = processes.run(2, left_out, None)
    for theirs, ours in zip(expected, processes.run(2, left_out, {"window": 1, "units": ["Block"]}), strict=True):
        assert all(map(torch.equal, theirs, ours))


@pytest.mark.parametrize("device", ["cpu", pytest.param("simgpu", marks=pytest.mark.simgpu)])
@pytest.mark.few(1)
def test_a_hook_of_backward_may_replay_parts_of_which_the_last_one_is_exchanged(device):
    expected = processes.run(2, loops.replayed_in_a_hook, None)
    streamed = processes.run(2, loops.replayed_in_a_hook, {"window": 1, "units": ["Block"]}, device)
    for theirs, ours in zip(expected, streamed, strict=True):
        assert not [n for n, pair in enumerate(zip(theirs, ours, strict=True)) if parity.difference(*pair)]


def test_a_block_may_begin_to_run_twice():
    check(2, "cpu", repeats_from=4)


@pytest.mark.parametrize("accumulate", [3, 5])
@pytest.mark.few(1)
def test_a_module_may_grow_while_gradients_accumulate(accumulate):
    """Before a backward in `no_sync`; before one that exchanges gradients of a block that it does not reach."""
    check(2, "cpu", accumulate=accumulate, clip=True, grows_at=4)


@pytest.mark.parametrize("where", ["", "in no_sync", "fails"])
@pytest.mark.parametrize("rank_alone", [True, False])
def test_gradients_of_inputs_may_be_taken_between_clipping_and_step(rank_alone, where):
    expected, found = [
        processes.run(2, loops.differentiated_once_clipped, streams, rank_alone, where) for streams in (False, True)
    ]
    for theirs, ours in zip(expected, found, strict=True):
        assert all(map(torch.equal, theirs, ours))


def test_a_rank_that_is_gone_is_named_where_others_wait_for_its_buffers():
    first, second = processes.run(2, loops.left_before_a_forward)
    assert first.startswith("ValueError") and second.startswith("PeerError: rank 0 failed")


SCRIPT = """
import logging, sys, time
from datetime import timedelta

from sp_lightning.runtime.handle import stream as stream_before
from sp_lightning.runtime.handle import stream as stream_before
import torch
import torch.distributed as dist

logging.basicConfig(stream=sys.stdout)
dist.init_process_group("gloo")
net = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
stream_before(net, "cpu", group=dist.group.WORLD, units=["Linear"], timeout=timedelta(seconds=2))
optimizer = torch.optim.AdamW(net.parameters())
for step in range(3):
    net(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
if dist.get_rank() == 0:
    until = time.monotonic() + 6
    while time.monotonic() < until:
        with torch.no_grad():
            net(torch.ones(2, 8))
        time.sleep(0.1)
    print("evaluated")
elif FAILS:
    raise ValueError("as it happens")
"""


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.seldom
def test_a_rank_whose_script_ends_without_closing_the_handle_has_left_and_one_with_an_error_failed(fails):
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(processes.free_port())}
    script = SCRIPT.replace("FAILS", repr(fails))
    ranks = [forks.Program(script, env=os.environ | place | {"RANK": str(rank)}) for rank in range(2)]
    first, second = (rank.wait(100) for rank in ranks)
    assert (second.returncode != 0) == fails, second.stderr
    assert ("rank 1 failed; its own error says why" in first.stdout) == fails, first.stdout
    if not fails:
        assert (first.returncode, first.stdout) == (0, "evaluated\n"), first.stderr


def test_a_rank_that_computes_or_saves_for_long_is_not_ended_where_another_failed():
    assert processes.run(2, loops.outlasts_another, "") == [["rank 1 failed; its own error says why"], []]


def test_a_rank_that_is_in_a_collective_to_which_a_failed_one_does_not_come_is_ended():
    with pytest.raises(processes.RankFailed, match="rank 0: EOFError"):
        processes.run(2, loops.outlasts_another, "barrier")


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


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.seldom
def test_a_rank_that_is_ahead_holds_few_gradients(shares):
    """From the first step on; what cannot be summed beside backward lies in the boxes whole."""
    near = processes.run(2, loops.straggle, 1, True, shares)
    far = processes.run(2, loops.straggle, 1, False, shares)
    at_once = AHEAD + 2  # those on their way, the unit's own, and one that is given up at the end of the next exchange
    for (regions, gradients), (all_regions, expected) in zip(near, far, strict=True):
        assert max(regions) <= at_once < 12 <= max(all_regions)
        for one, other in zip(expected, gradients, strict=True):
            assert {name: parity.difference(grad, other[name]) for name, grad in one.items()} == dict.fromkeys(one)


def test_gradients_that_come_again_after_they_may_have_been_summed_are_an_error():
    with pytest.raises(processes.RankFailed, match="came again after autograd was done with its weights"):
        processes.run(2, loops.unusual, "again", True)
    first, second = processes.run(2, loops.unusual, "again", False)
    assert all(torch.equal(first[name], second[name]) for name in first)


@refusal(
    "in a Trainer on several devices, `backward()` of the module reads a gradient, or clips, once its backward has run",
    ExactnessError,
    "`on_after_backward`, or `configure_gradient_clipping`",
)
def test_a_module_that_reads_gradients_before_they_are_exchanged_is_an_error():
    with pytest.raises(processes.RankFailed, match=r"blocks\.0\.norm\.weight was read after backward and before it is"):
        processes.run(2, loops.unusual, "clips", True)


@pytest.mark.seldom
def test_a_nested_backward_brings_parts():
    """Of a block's gradients twice, and of all units the whole on every rank."""
    for nested, plain in zip(
        *[processes.run(2, loops.unusual, how, True) for how in ("nested", "plainly")], strict=True
    ):
        assert all(torch.equal(nested[name], plain[name]) for name in plain)
    one, other = [processes.run(2, loops.unusual, "nested", overlap)[0] for overlap in (False, True)]
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("at", ["earlier", "with a hook", "unexchanged"])
@pytest.mark.few(1)
def test_hooks_in_backward_see_gradients_of_this_rank_as_under_ddp(at):
    expected = processes.run(2, loops.looks_in_backward, None, at)
    found = processes.run(2, loops.looks_in_backward, {"window": 1, "units": ["Block"]}, at)
    seen = dict(parity.leaves(found))
    for path, leaf in parity.leaves(expected):
        assert parity.difference(leaf, seen.pop(path)) is None, path
    assert not seen


@refusal(
    "on several devices, a hook in backward reads the gradient of a weight without hooks that backward has passed, and "
    "that is yet to be exchanged",
    ExactnessError,
    "a hook on the weight itself, or after backward",
)
@pytest.mark.simgpu
@pytest.mark.parametrize("device", ["cpu", "simgpu"])
def test_a_hook_that_reads_a_gradient_on_its_way_to_other_ranks_is_an_error(device):
    options = {"window": 1, "units": ["Block"]}
    for error in processes.run(2, loops.looks_in_backward, options, "later", device):
        assert error.startswith("the gradient of 2.up.weight was read in a hook of backward, and is on its way"), error


@pytest.mark.simgpu
@pytest.mark.parametrize("device", ["cpu", "simgpu"])
@pytest.mark.parametrize("overlap", [True, False])
def test_sums_flush_denormal_numbers_where_those_of_ddp_do(overlap, device):
    flushes = (False, True, False) if device == "cpu" else (False, False, False)  # a device flushes none
    options = {"window": 1, "units": ["Linear"], "optimizer_overlap": overlap}
    expected = processes.run(2, loops.flushing, None, "cpu", flushes)
    found = processes.run(2, loops.flushing, options, device, (False, True, False))
    if len(found[0]) < len(flushes):
        pytest.skip("this processor flushes nothing")
    assert found == expected


CLIPS = (
    "plainly",
    "reads",
    "holds",
    "holds a view",
    "replaces",
    "twice",
    "twice, then reads",
    "some",
    "accumulates",
    "edits before",
    "edits after",
    "writes beside",
    *loops.IN_HOOKS,
)


def check_clipping(size, how, device="cpu"):
    """Train as under DDP; return the most pages that any rank had for itself after a step."""
    expected = processes.run(size, loops.clipping, None, how)
    found = processes.run(size, loops.clipping, {"window": 2}, how, device)
    for (theirs, *_), (ours, *_) in zip(expected, found, strict=True):
        seen = dict(parity.leaves(ours))
        for path, leaf in parity.leaves(theirs):
            assert parity.difference(leaf, seen.pop(path)) is None, path
        assert not seen
    assert all(faces == 1 for *_, faces in found) == (how not in ("holds", "holds a view", "replaces"))
    return [max(pages) for _, pages, _ in found]


OFTEN = {
    "plainly",
    "reads",
    "holds",
    "replaces",
    "accumulates",
    "edits before",
    "writes beside",
    "twice, then reads",
    "with a norm",
    "in hooks, of the same data",
}


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(how, marks=[] if how in OFTEN else pytest.mark.slow)
        for how in [*CLIPS, "sgd", "foreach", "adafactor", "with a norm"]
    ],
)
@pytest.mark.few(1)
def test_clipping_is_as_under_ddp(how):
    pages = check_clipping(2, how)
    if how in ("plainly", "sgd", "some"):
        assert pages == [0, 0]  # gradients exist once
    if how == "reads":
        assert pages[0] and not pages[1]


@pytest.mark.slow
@pytest.mark.parametrize("how", CLIPS)
@pytest.mark.parametrize(("size", "device"), [(2, "simgpu"), (3, "cpu"), (4, "cpu")])
@pytest.mark.simgpu
def test_clipping_on_other_devices_and_more_ranks(size, device, how):
    check_clipping(size, how, device)


def test_a_rank_that_clips_alone_is_an_error():
    with pytest.raises(processes.RankFailed, match=r"ExactnessError.*clipped gradients in different ways"):
        processes.run(2, loops.clipping, {"window": 2}, "one rank alone")
