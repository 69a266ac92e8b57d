"""Two ranks whose optimizer state is in one scratch file train as under DDP, to the last bit (``disk=``)."""

from __future__ import annotations

import os

import pretended_nodes
import processes
import pytest
import ranked_disk
import ranked_features
import ranked_runs
import torch
from ranked_features import FEATURES

import parity
from sp_lightning.disk.direct_file import BLOCK
from sp_lightning.memory.layout import Layout
from sp_lightning.nodes.shares import CUT, is_large, owned

pytestmark = [pytest.mark.simgpu, pytest.mark.filterwarnings("ignore")]
SLOW = pytest.mark.slow
COVER = parity.pairwise(
    case=["llama", "tied_embedding", "mixture_of_experts", "skipped_block", "batch_norm", "frozen_prefix"],
    window=[1, 2, 99],
    activations=["keep", "recompute", "offload"],
    optimizer=["adamw", "sgd", "adagrad", "adafactor"],
    optimizer_overlap=[True, False],
    accumulate=[1, 2],
    clip=[None, ("norm", 0.1), ("value", 0.01)],
    precision=["32-true", "bf16-mixed", "bf16-true"],
    accelerator=["cpu", "simgpu"],
)
DAILY = 0, 5


@pytest.fixture(autouse=True)
def in_a_folder_on_a_disk(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def options(**given):
    return {"disk": os.getcwd(), **given}


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=[SLOW] * (place not in DAILY)) for place, row in enumerate(COVER)]
)
def test_two_ranks_whose_state_is_on_a_disk_are_ddp(row):
    check_row(row)


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=[SLOW] * (place != DAILY[1])) for place, row in enumerate(COVER)]
)
def test_nodes_whose_state_is_on_a_disk_of_each_are_ddp(row):
    check_row(row, size=4 if row["accumulate"] == 1 else 2, nodes=2)


def check_row(row, **where):
    settings = dict(row)
    given = {key: settings.pop(key) for key in ("window", "activations", "optimizer_overlap")}
    if row["precision"] == "bf16-mixed":
        settings["accelerator"] = "cpu"  # on a device autocast casts at other operations
    found = ranked_disk.check(ranked_runs.fit, settings.pop("case"), options(**given), **where, **settings)
    if row["optimizer"] == "adamw" and row["case"] == "llama":
        assert found[0].telemetry["disk_read"] > 0 and found[0].telemetry["disk_written"] > 0


@pytest.mark.parametrize("dtype", ["float32", *(pytest.param(one, marks=SLOW) for one in ("bfloat16", "float64"))])
@pytest.mark.parametrize(("size", "nodes"), [(2, 1), (2, 2), *(pytest.param(4, n, marks=SLOW) for n in (1, 2))])
@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=SLOW)])
def test_state_of_several_portions_is_stepped_by_its_owners(dtype, size, nodes, overlap):
    given = options(window=1, optimizer_overlap=overlap)
    found = ranked_disk.check(ranked_disk.fit_wide, dtype, given, size=size, nodes=nodes, batches=5)
    for rank, ours in enumerate(found):
        owns = dtype != "bfloat16" or not rank % (size // nodes)  # shares.owned
        assert (ours.telemetry["disk_read"] > 0) == (ours.telemetry["disk_written"] > 0) == owns
        assert (ours.telemetry["stepped_ahead"] > 0) == overlap


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "swapped state" else [SLOW]) for name in sorted(FEATURES)]
)
@pytest.mark.seldom
def test_a_feature_with_state_on_a_disk_is_as_under_ddp(name):
    ranked_disk.check(ranked_features.run, name, options(window=2))


@pytest.mark.parametrize("name", ["state of one rank", "replaced state of one rank"])
@pytest.mark.seldom
def test_state_on_a_disk_that_one_rank_writes_is_an_error(name):
    with pytest.raises(processes.RankFailed, match="wrote different optimizer state"):
        processes.run(2, ranked_disk.run, ranked_features.run, name, ranked_disk.OPTIONS | options(window=2))


def test_no_two_ranks_write_to_a_block():
    blocks = processes.run(2, ranked_disk.written_blocks, options(window=1))
    assert all(blocks) and not set(blocks[0]) & set(blocks[1])


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_ranges_of_large_parameters_are_whole_blocks(dtype, size):
    shapes = [(3,), (CUT + 1,), (5 * CUT - 1,), (257, 130), (8 * CUT,)]
    layout = Layout.of((str(shape), torch.empty(shape, dtype=dtype, device="meta")) for shape in shapes)
    layout = layout.at_multiples(BLOCK)
    for field in layout.fields:
        ranges = [owned(field, rank, size) for rank in range(size)]
        numel = field.nbytes // dtype.itemsize
        assert [0, *(part.stop for part in ranges)] == [*(part.start for part in ranges), numel]
        starts = [field.offset + part.start * dtype.itemsize for part in ranges if part.start < part.stop]
        assert not is_large(field) or all(start % BLOCK == 0 for start in starts)
    assert {is_large(field) for field in layout.fields} == {True, False}


@pytest.mark.parametrize("sides", [(1, 2, 1), pytest.param((1, 2, 4, 1), marks=SLOW)])
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.seldom
def test_another_number_of_devices_resumes_with_and_without_a_disk(sides, nodes, tmp_path):
    plain, found = None, None
    for number, size in enumerate(sides):
        steps, places = 3 * (number + 1), [str(tmp_path / f"{side} {number}.ckpt") for side in ("plain", "streaming")]
        processes.run(size, ranked_runs.leg, "llama", "plain", plain, places[0], steps)
        disk = ranked_disk.OPTIONS | options() if size > 1 else None
        on_nodes = pretended_nodes.trainer, nodes if size > 1 else 1, ranked_disk.run, ranked_runs.leg
        processes.run(size, *on_nodes, "llama", "streaming", found, places[1], steps, options=disk)
        plain, found = places
    parity.compare(*map(contents, (plain, found)))


def contents(path):
    checkpoint = torch.load(path, weights_only=False)
    kept = {name: checkpoint[name] for name in ("state_dict", "optimizer_states", "lr_schedulers", "global_step")}
    return parity.Record([parity.Entry("at the end", "", leaf) for _, leaf in parity.leaves(kept)])


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=SLOW)])
@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=pytest.mark.seldom)])
def test_a_disk_that_fails_on_one_rank_ends_all_with_its_error(call, victim, nodes):
    found = processes.run(2, pretended_nodes.trainer, nodes, ranked_disk.fail, call, victim, options(window=1))
    assert found[victim]["error"] == "DiskError" and "Input/output error" in found[victim]["said"]
    assert found[1 - victim]["error"] == "PeerError" and f"rank {victim}" in found[1 - victim]["said"]
    assert found[victim]["torn"]
    if nodes == 1:  # whose ranks step one copy of the weights
        assert found[1 - victim]["torn"]
    elif not found[1 - victim]["torn"]:  # its node has a copy of its own, of which nothing or all is stepped then
        steps = processes.run(2, pretended_nodes.trainer, nodes, ranked_disk.fail, call, None, options(window=1))
        assert found[1 - victim]["weights"] in steps[0]["steps"]


@pytest.mark.parametrize(("size", "nodes"), [(2, 1), (4, 2)])
def test_ranks_that_find_unlike_memory_have_one_budget(size, nodes):
    first, *others = processes.run(size, pretended_nodes.trainer, nodes, ranked_disk.unlike_memory, os.getcwd())
    assert first and others == [first] * (size - 1)


def test_what_ranks_do_not_cut_has_its_state_in_memory():
    for found in processes.run(2, ranked_disk.state_of_adafactor, os.getcwd()):
        assert found == (
            0,
            [
                "superpipeline: every rank steps Adafactor, or some of its parameters, as a whole: "
                "their state is in memory"
            ],
        )


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_disk_that_is_full_on_one_rank_leaves_what_was_before_the_step(victim, nodes):
    found = processes.run(2, pretended_nodes.trainer, nodes, ranked_disk.fill, victim, options(window=1))
    assert found[victim][0] == "DiskError" and "nothing was stepped" in found[victim][1]
    assert found[1 - victim][0] == "PeerError" and f"rank {victim}" in found[1 - victim][1]
    assert [stepped for *_, stepped in found] == [False] * 2
    assert nodes > 1 or [torn for *_, torn, _ in found] == [False] * 2


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=SLOW)])
def test_a_disk_that_is_full_once_units_were_stepped_beside_backward_says_so(victim):
    found = processes.run(2, ranked_disk.fail, "posix_fallocate", victim, options(window=1))
    assert found[victim]["error"] == "DiskError" and "No space left" in found[victim]["said"]
    assert "had stepped some of 9 parameters" in found[victim]["said"], found[victim]["said"]
    assert found[1 - victim]["error"] == "PeerError" and f"rank {victim}" in found[1 - victim]["said"]
    assert all(one["torn"] for one in found)
