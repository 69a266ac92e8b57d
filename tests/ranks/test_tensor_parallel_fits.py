"""A Trainer streams modules that cut their layers in `configure_model`, to the bits of Lightning's own strategy."""

from __future__ import annotations

import functools
from typing import Any

import processes
import pytest
import sharded
import sharded_fabric
import sharded_fits

from sp_lightning.errors import OptionError


@functools.cache
def plain(size: int, name: str, settings: tuple[tuple[str, Any], ...]) -> list[dict[str, Any]]:
    """Return what each rank saw under Lightning's strategy; run it once."""
    return processes.run(size, sharded_fits.run, name, None, **dict(settings))


def check(name: str, options: dict[str, Any], accelerator: str = "cpu", size: int = 2, **settings: Any) -> None:
    expected = plain(size, name, tuple(settings.items()))
    found = processes.run(size, sharded_fits.run, name, options, accelerator, **settings)
    for rank, (theirs, ours) in enumerate(zip(expected, found, strict=True)):
        assert len(theirs) > 100
        assert not (names := sharded.difference(theirs, ours)), f"rank {rank}: {names[:8]} of {len(theirs)}"


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "options", "settings"),
    [
        ("in sequence", {}, {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}),
        ("in blocks", {"activations": "recompute"}, {"optimizer": "sgd"}),
        pytest.param("sharded loss", {"activations": "offload", "window": 2}, {"gradient_clip_val": 0.1}, marks=SLOW),
        pytest.param("tied", {"activations": "recompute+offload"}, {"optimizer": "foreach"}, marks=SLOW),
        pytest.param("in sequence", {}, {"averages": True}, marks=SLOW),
        pytest.param("in blocks", {}, {"precision": "bf16-mixed"}, marks=SLOW),
    ],
)
def test_a_trainer_trains_shards_as_lightnings_own_strategy_does(name, options, settings):
    check(name, options, **settings)


@pytest.mark.simgpu
@pytest.mark.parametrize(
    ("name", "options", "settings"),
    [
        ("in sequence", {}, {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}),
        pytest.param("sharded loss", {"activations": "recompute+offload"}, {}, marks=SLOW),
    ],
)
def test_a_trainer_trains_shards_on_a_device(name, options, settings):
    # With gloo, which the plain run has, Lightning predicts without inference mode, where DTensors take other kernels.
    check(name, options, "simgpu", inference_mode=False, **settings)


@pytest.mark.parametrize(
    ("name", "options", "accelerator"),
    [
        ("in sequence", {}, "cpu"),
        pytest.param("in sequence", {"activations": "recompute"}, "simgpu", marks=[pytest.mark.simgpu, SLOW]),
    ],
)
def test_two_by_two_ranks_train_as_with_fsdp_along_the_data_axis(name, options, accelerator):
    check(name, options, accelerator, size=4, data=2, inference_mode=False)


@pytest.mark.parametrize(
    ("first", "then", "distributed"),
    [
        ({}, None, True),
        (None, {}, True),
        pytest.param(None, {}, False, marks=SLOW),
    ],
)
def test_a_run_goes_on_from_a_checkpoint_of_either_strategy(first, then, distributed, tmp_path):
    def go_on(one: dict[str, Any] | None, other: dict[str, Any] | None, folder: str) -> Any:
        path = str(tmp_path / folder)
        kinds = processes.run(2, sharded_fits.halfway, path, one, distributed, 1)
        assert set(kinds) == {"folder" if distributed else "file"}
        return processes.run(2, sharded_fits.went_on, path, other, 1)

    for theirs, ours in zip(go_on(None, None, "plain"), go_on(first, then, "streamed"), strict=True):
        assert any(name.startswith("4.") for name in theirs) and not any(name.startswith("2.") for name in theirs)
        assert not (names := sharded.difference(theirs, ours)), names[:8]


@pytest.mark.slow
def test_two_by_two_ranks_go_on_from_shards(tmp_path):
    path = str(tmp_path)
    processes.run(4, sharded_fits.halfway, path, {}, True, 2)
    expected, found = (processes.run(4, sharded_fits.went_on, path, one, 2) for one in (None, {}))
    assert [sharded.difference(*pair) for pair in zip(expected, found, strict=True)] == [[]] * 4


def test_axes_that_the_devices_do_not_fill_are_refused():
    with pytest.raises(OptionError, match="tensor_parallel_size must be an int >= 1 or 'auto', got 0"):
        sharded_fits.sp_lightning.SuperpipelineStrategy(tensor_parallel_size=0)
    with pytest.raises(OptionError, match="data_parallel_size must be given with tensor_parallel_size, got 2"):
        sharded_fits.sp_lightning.SuperpipelineStrategy(data_parallel_size=2)
    for error in processes.run(2, sharded_fits.refused, "sizes"):
        assert error.startswith("OptionError: tensor_parallel_size must be such that their product is the number of")
        assert "got '2 with data_parallel_size=3'" in error


def test_a_module_without_shards_is_refused():
    for error in processes.run(2, sharded_fits.refused, "whole"):
        assert error.startswith("OptionError: tensor_parallel_size must be 1 for a module none of whose parameters")


def test_a_module_under_fully_shard_is_refused():
    for error in processes.run(2, sharded_fits.refused, "fully sharded"):
        assert error.startswith("PartitionError: net is sharded by fully_shard")


@pytest.mark.parametrize(
    ("name", "options", "settings"),
    [
        ("in sequence", {}, {}),
        pytest.param(
            "in sequence",
            {"activations": "offload"},
            {"accelerator": "simgpu", "saves": False},
            marks=[pytest.mark.simgpu, SLOW],
        ),
        pytest.param("in sequence", {}, {"data": 2}, marks=SLOW),
    ],
)
def test_a_fabric_loop_trains_shards_as_with_lightnings_strategy(name, options, settings, tmp_path):
    def run(folder, options, accelerator="cpu", **settings):
        size = 2 * settings.get("data", 1)
        return processes.run(size, sharded_fabric.run, name, options, str(tmp_path / folder), accelerator, **settings)

    expected = run("plain", None, **{key: value for key, value in settings.items() if key != "accelerator"})
    found = run("streamed", options, **settings)
    for theirs, ours in zip(expected, found, strict=True):
        assert len(theirs) > 100 and theirs["loaded"] == 2
        assert not (names := sharded.difference(theirs, ours)), names[:8]


@SLOW
@pytest.mark.parametrize("first", [None, {}])
def test_a_fabric_loop_resumes_a_checkpoint_of_either_strategy(first, tmp_path):
    path = str(tmp_path / "saved")
    processes.run(2, sharded_fabric.run, "in sequence", first, str(tmp_path))
    expected, found = (
        processes.run(2, sharded_fabric.run, "in sequence", one, str(tmp_path), ckpt_path=path) for one in (None, {})
    )
    assert [sharded.difference(*pair) for pair in zip(expected, found, strict=True)] == [[], []]


def test_fabric_refuses_modules_that_are_uncut_or_fully_sharded():
    for error in processes.run(2, sharded_fabric.refused, "whole"):
        assert error.startswith("OptionError: tensor_parallel_size must be 1 for a module none of whose parameters")
        assert "fabric.strategy.device_mesh" in error
    for error in processes.run(2, sharded_fabric.refused, "fully sharded"):
        assert error.startswith("PartitionError: FSDPSequential is sharded by fully_shard")
