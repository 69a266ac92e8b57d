"""Two ranks whose frozen weights stay in files train as under DDP, to the last bit (``host_budget="0B"``)."""

from __future__ import annotations

import pretended_nodes
import processes
import pytest
import ranked_disk
import ranked_parity
import ranked_runs
import torch
from refusals import refusal

import models
import parity
from sp_lightning.errors import UnsupportedError

pytestmark = [pytest.mark.simgpu, pytest.mark.filterwarnings("ignore")]
COVER = parity.pairwise(
    case=["mlp", "tied_embedding", "mixture_of_experts", "skipped_block", "batch_norm"],
    window=[1, 2, 99],
    activations=["keep", "recompute", "offload", "recompute+offload"],
    accumulate=[1, 2],
    clip=[None, ("norm", 0.1), ("value", 0.01)],
    precision=["32-true", "bf16-mixed", "bf16-true"],
    accelerator=["cpu", "simgpu"],
)
DAILY = 0, 5


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=[pytest.mark.slow] * (place not in DAILY)) for place, row in enumerate(COVER)]
)
def test_two_ranks_whose_frozen_weights_are_in_files_are_ddp(row, tmp_path):
    check_row(row, tmp_path)


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=[pytest.mark.slow] * (place != DAILY[1])) for place, row in enumerate(COVER)]
)
def test_nodes_whose_frozen_weights_are_in_files_of_each_are_ddp(row, tmp_path):
    check_row(row, tmp_path, size=4, nodes=2)


def check_row(row, folder, **where):
    settings = dict(row)
    name, window, activations = (settings.pop(key) for key in ("case", "window", "activations"))
    options = {"window": window, "activations": activations, "host_budget": "0B"}
    if row["precision"] == "bf16-mixed":
        settings["accelerator"] = "cpu"  # on a device autocast casts at other operations
    settings |= {"folder": str(folder), **where}
    for ours in ranked_parity.check(ranked_runs.fit_in_files, name, options, **settings):
        assert ours.telemetry["disk_read"] > 0 or "writes" in models.case(name).tags


OPTIONS = {"window": 1, "host_budget": "0B"}


def check(function, *given, folder, nodes=1, options=OPTIONS):
    """Compare two ranks whose frozen weights are in files with ranks that have them in memory; return telemetry."""
    expected = processes.run(2, function, *given, None, folder)
    found = processes.run(2, pretended_nodes.trainer, nodes, function, *given, options, folder)
    for theirs, ours in zip(expected, found, strict=True):
        parity.compare(theirs, ours)
    return [ours.telemetry for ours in found]


@pytest.mark.seldom
@pytest.mark.parametrize("where", ["everywhere", "for a while"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_weight_in_a_file_that_ranks_write_is_written(where, nodes, tmp_path):
    for telemetry in check(ranked_runs.edit_in_files, where, folder=str(tmp_path), nodes=nodes):
        assert telemetry["disk_read"] > 0


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_weight_in_a_file_that_one_rank_writes_is_an_error(nodes, tmp_path):
    edits = pretended_nodes.trainer, nodes, ranked_runs.edit_in_files
    with pytest.raises(
        processes.RankFailed, match="wrote different values to weights that have other data or are in files"
    ):
        processes.run(2, *edits, "on the last", OPTIONS, str(tmp_path))


@pytest.mark.parametrize("nodes", [1, 2])
def test_weights_of_unlike_files_are_the_first_ranks(nodes, tmp_path):
    for telemetry in check(ranked_runs.begin_unlike, folder=str(tmp_path), nodes=nodes):
        assert telemetry["disk_read"] == 0  # in memory, which the ranks share


@pytest.mark.seldom
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("when", ["before", "after a forward"])
def test_weights_in_files_that_come_to_train_are_shared(when, nodes, tmp_path):
    for telemetry in check(ranked_runs.thaw_in_files, when, folder=str(tmp_path), nodes=nodes):
        assert telemetry["disk_read"] > 0


@refusal(
    "on several devices, a weight that lies in its file (`host_budget=`) is unfrozen within a step",
    UnsupportedError,
    "unfreeze it before the step (`on_train_batch_start`), or have it in memory (`p.data = p.data.clone()`)",
)
@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=pytest.mark.seldom)])
def test_weights_in_files_that_come_to_train_in_a_forward_are_an_error_alike(nodes, tmp_path):
    expected = processes.run(2, ranked_runs.thaw_in_forward, None, str(tmp_path))
    found = processes.run(2, pretended_nodes.trainer, nodes, ranked_runs.thaw_in_forward, OPTIONS, str(tmp_path))
    for (_, theirs), (said, ours) in zip(expected, found, strict=True):
        assert "lies in its file, and was unfrozen within a step" in said and "on_train_batch_start" in said
        assert all(map(torch.equal, theirs, ours))


@pytest.mark.simgpu
@pytest.mark.seldom
def test_weights_in_files_that_are_unfrozen_between_steps_may_be_read_there(tmp_path):
    expected = processes.run(2, ranked_runs.read_what_thaws, None, str(tmp_path))
    found = processes.run(2, ranked_runs.read_what_thaws, OPTIONS, str(tmp_path))
    assert all(all(map(torch.equal, theirs, ours)) for theirs, ours in zip(expected, found, strict=True))


@pytest.mark.simgpu
@pytest.mark.seldom
def test_parts_whose_weights_in_files_come_to_train_are_not_called_before_the_whole(tmp_path):
    expected = processes.run(2, ranked_runs.thaw_for_parts, None, str(tmp_path))
    found = processes.run(2, ranked_runs.thaw_for_parts, OPTIONS, str(tmp_path))
    for (_, theirs), (said, ours) in zip(expected, found, strict=True):
        assert "or since the whole module was last called" in said
        assert all(map(torch.equal, theirs, ours))


def test_a_weight_in_a_file_that_comes_to_train_within_the_budget_is_shared(tmp_path):
    disk = {"window": 1, "host_budget": "3400000B", "disk": str(tmp_path)}
    check(ranked_disk.thaw_within_budget, folder=str(tmp_path), options=disk)
