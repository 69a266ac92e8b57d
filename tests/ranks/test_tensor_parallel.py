"""Models whose parameters are DTensors stream as they train under torch's tensor parallelism, to the last bit."""

from __future__ import annotations

import processes
import pytest
import sharded
import sharded_draws
import torch

KEEP, RECOMPUTE, OFFLOAD = {}, {"activations": "recompute"}, {"activations": "offload", "window": 2}
BOTH = {"activations": "recompute+offload"}


def check(name, simulated, options, size=2, **settings):
    for rank, found in enumerate(processes.run(size, sharded.compare, name, simulated, options, **settings)):
        assert not found["differ"], f"rank {rank}: {found['differ'][:8]} of {found['seen']}"
        assert not found["differ once closed"], f"rank {rank}: {found['differ once closed'][:8]}"
        assert found["kinds"]
        assert found["fetches"] > 0


def case(*values, slow=True, **settings):
    return pytest.param(*values, settings, marks=[pytest.mark.slow] * slow)


@pytest.mark.parametrize(
    ("name", "options", "settings"),
    [
        case("in blocks", {"window": 8}, slow=False, edits=True),
        case("in blocks", RECOMPUTE, accumulate=2),
        case("in blocks", OFFLOAD, kind="several"),
        case("in sequence", RECOMPUTE, slow=False, accumulate=3, clip=0.1),
        case("in sequence", OFFLOAD, kind="foreach", clip=0.1),
        case("in sequence", {"window": 2, "transfer": 2}, kind="several", clip=0.1, accumulate=2),
        case("in sequence", BOTH, accumulate=2, edits=True),
        case("read outside", KEEP, accumulate=2, freezes=True),
        case("tied", KEEP, accumulate=2, clip=0.1),
        case("sharded loss", OFFLOAD, accumulate=2, clip=0.1),
    ],
)
def test_shards_train_as_under_plain_tensor_parallelism(name, options, settings):
    check(name, False, options, **settings)


DEVICE = pytest.mark.simgpu


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "simulated", "options"),
    [
        ("mixtral from a checkpoint", False, BOTH),
        pytest.param("llama from a checkpoint", True, OFFLOAD, marks=DEVICE),
        pytest.param("qwen3 from a checkpoint", True, KEEP, marks=DEVICE),  # whose norms have a collective in a hook
    ],
)
def test_a_checkpoint_cut_by_transformers_trains_as_unstreamed(name, simulated, options):
    check(name, simulated, options, accumulate=2)


@pytest.mark.simgpu
@pytest.mark.parametrize(
    ("name", "options", "settings"),
    [
        case("in blocks", {"window": 8}, edits=True),
        case("in sequence", BOTH, slow=False, kind="several", accumulate=2),
        case("tied", OFFLOAD, accumulate=2, clip=0.1),
        case("sharded loss", RECOMPUTE, clip=0.1),
    ],
)
def test_a_device_trains_shards_as_the_unstreamed_cpu_does(name, options, settings):
    check(name, True, options, **settings)


def test_ranks_cut_a_model_alike_if_one_has_no_part_of_a_layer():
    first, second = processes.run(2, sharded.units_where_one_rank_has_nothing)
    assert first == second and first[1] == ("1", ["1"])


@pytest.mark.simgpu
@pytest.mark.parametrize("compare", [sharded_draws.compare, sharded_draws.compare_initialised])
def test_random_numbers_for_shards_are_those_of_the_meshs_device(compare):
    for differ, seen in processes.run(2, compare):
        assert seen > 20 and not differ, f"{differ[:8]} of {seen}"


def test_a_ranks_host_holds_its_shards_once():
    for found in processes.run(2, sharded.compare, "in sequence", False, KEEP, steps=1):
        assert found["slabs"] == found["bytes"]
        assert found["in slabs"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("streams", "kind", "simulated"),
    [
        ((False, True), "foreach", False),
        ((True, False), "several", False),
        pytest.param((True, True), "several", True, marks=DEVICE),
    ],
)
def test_a_run_goes_on_plainly_and_streamed(streams, kind, simulated):
    assert processes.run(2, sharded.resumed, "in sequence", streams, kind, simulated) == [[], []]


def on_a_grid(name, options, simulated=False, often=False, **settings):
    marks = [pytest.mark.simgpu] * simulated + [pytest.mark.slow] * (not often)
    return pytest.param(name, simulated, options, settings, marks=marks)


@pytest.mark.parametrize(
    ("name", "simulated", "options", "settings"),
    [
        on_a_grid("in blocks", RECOMPUTE, accumulate=2),
        on_a_grid("in sequence", KEEP, often=True, simulated=True),
        on_a_grid("in sequence", BOTH, accumulate=2, kind="several", clip=0.1),
        on_a_grid("in sequence", OFFLOAD, simulated=True, accumulate=3, clip=0.1),
        on_a_grid("tied", KEEP, accumulate=2, clip=0.1),
        on_a_grid("tied", BOTH, simulated=True, accumulate=2, kind="foreach"),
        on_a_grid("sharded loss", OFFLOAD, simulated=True, accumulate=2, clip=0.1),
        on_a_grid("skipping", OFFLOAD, simulated=True, accumulate=2),
    ],
)
def test_two_by_two_ranks_are_ddp_over_the_same_shards(name, simulated, options, settings):
    for rank, found in enumerate(processes.run(4, sharded.compare_on_a_grid, name, simulated, options, **settings)):
        assert not found["differ"], f"rank {rank}: {found['differ'][:8]} of {found['seen']}"
        assert found["shared"] and found["fetches"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "name", "options", "settings"),
    [
        (1, "in sequence", KEEP, {"accumulate": 2}),
        (3, "unevenly", RECOMPUTE, {"accumulate": 2}),
    ],
)
def test_one_and_three_ranks_train_as_plain_tensor_parallel_ones(ranks, name, options, settings):
    for found in processes.run(ranks, sharded.compare, name, False, options, **settings):
        assert not found["differ"] and found["fetches"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cut", "name", "simulated", "options", "settings"),
    [
        (1, "in sequence", False, KEEP, {"accumulate": 2, "clip": 0.1}),
        pytest.param(1, "in blocks", True, KEEP, {}, marks=pytest.mark.simgpu),
        (2, "in sequence", False, KEEP, {"accumulate": 2, "clip": 0.1}),
        (2, "in blocks", False, RECOMPUTE, {"kind": "several"}),
        pytest.param(2, "tied", True, OFFLOAD, {"accumulate": 2}, marks=pytest.mark.simgpu),
    ],
)
def test_three_along_the_data_axis_are_ddp_that_adds_in_a_tree(cut, name, simulated, options, settings):
    for found in processes.run(3 * cut, sharded.compare_on_a_grid, name, simulated, options, data=3, **settings):
        assert not found["differ"] and found["shared"] and found["fetches"] > 0


@pytest.mark.slow
def test_one_by_two_ranks_are_plain_tensor_parallelism():
    for found in processes.run(2, sharded.compare, "in sequence", False, KEEP, accumulate=3, grouped=True):
        assert not found["differ"] and found["fetches"] > 0


def test_ranks_with_different_shards_are_not_taken_for_equal():
    for error in processes.run(4, sharded.mixed_up):
        assert (
            error.startswith("UnsupportedError: the ranks' models differ: ") and "1.up.weight ((Shard(dim=0),)" in error
        )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"optimizer_device": "device"}, "optimizer_device='device'"),
        ({"master_weights": True}, "master_weights=True"),
        ({"compile_units": True}, "compile_units=True"),
        ({"host_budget": "1GiB"}, "disk= or host_budget="),
    ],
)
def test_what_shards_are_not_streamed_with_is_named(options, said):
    for error in processes.run(2, sharded.refused, "in blocks", options):
        assert error.startswith("PartitionError: 1.up.weight is a DTensor") and said in error


def test_fabric_without_axes_names_the_shards_that_differ():
    for error in processes.run(2, sharded.refused_by_fabric):
        assert error.startswith("UnsupportedError: the ranks' models differ: ") and "tensor_parallel_size=" in error


@pytest.mark.simgpu
def test_a_mesh_of_another_device_is_named():
    for error in processes.run(2, sharded.refused_on_another_device):
        assert error.startswith("PartitionError: 1.up.weight is a DTensor over a mesh of 'cpu'") and "simgpu:0" in error


def test_a_backward_of_some_dtensors_brings_their_gradients():
    for plain, streamed in zip(*(processes.run(2, sharded.of_some, streams) for streams in (False, True)), strict=True):
        assert sum(grad is not None for grad in plain) == 5
        for found, grad in zip(streamed, plain, strict=True):
            assert found is grad is None or torch.equal(found, grad)


def test_gradients_of_dtensors_may_be_asked_for():
    plain, streamed = (processes.run(2, sharded.asked_for, streams) for streams in (False, True))
    assert all(torch.equal(*pair) for ranks in zip(plain, streamed, strict=True) for pair in zip(*ranks, strict=True))


@pytest.mark.simgpu
def test_what_is_set_on_dtensors_stays_as_they_move_to_the_host():
    for kept, error in processes.run(2, sharded.marked):
        assert kept and all(kept)
        assert error.startswith("UnsupportedError: ") and "recorded before its module was streamed" in error


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("hook", "hooks get no gradients"),
        ("hook from before", "1.norm.weight is a DTensor with a hook"),
        ("data", "data was assigned"),
        ("create_graph", "create_graph=True"),
        ("apart", "0.weight arrived as (Replicate(),), where the one that it would be added to is (Shard(dim=0),)"),
        ("layout", "arrived as (Partial(sum),), where the one that it would be added to is (Replicate(),)"),
    ],
)
def test_a_use_that_streamed_dtensors_do_not_have_is_named(how, said):
    for error in processes.run(2, sharded.misused, how):
        assert error.startswith("UnsupportedError: ") and said in error
