"""Workers of Ray Train, on a real cluster of this machine, train as under Ray's own DDP strategy, to the last bit."""

import os
import pathlib
import subprocess
import sys

import pytest
import torch

import parity

pytestmark = pytest.mark.slow
RIGS = pathlib.Path(__file__).parents[1] / "rigs"
NO_MONITOR = {"RAY_memory_monitor_refresh_ms": "0"}  # which ends workers where others fill the machine's memory
KEPT = "state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch", "loops"


def script(run, folder):
    """Run the script of this name; return how its process ended."""
    folder.mkdir()
    return subprocess.run(
        [sys.executable, str(RIGS / "ray_workers.py"), str(folder), run],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(RIGS), *filter(None, sys.path)]), **NO_MONITOR},
        capture_output=True,
        text=True,
        timeout=500,
    )


def ended(run, folder):
    """What the script of this name left: its last checkpoint, what it reported to Ray, and the metrics of each rank."""
    done = script(run, folder)
    assert done.returncode == 0, done.stderr[-4000:]
    kept = {name: torch.load(folder / "end.ckpt", weights_only=False)[name] for name in KEPT}
    kept["reported"] = torch.load(folder / "reported", weights_only=False)
    kept |= {path.name: torch.load(path) for path in sorted(folder.glob("*.metrics"))}
    return parity.Record([parity.Entry("", name, leaf) for name, leaf in parity.leaves(kept)])


@pytest.fixture(scope="module")
def under_ddp(tmp_path_factory):
    return ended("ddp", tmp_path_factory.mktemp("ray") / "ddp")


@pytest.mark.parametrize("run", ["one machine", "two machines"])
def test_two_workers_train_as_under_rays_ddp(run, under_ddp, tmp_path):
    parity.compare(under_ddp, ended(run, tmp_path / "ours"))
    assert len(list((tmp_path / "ours").glob("* ran on 0, cpu"))) == 2


def test_workers_that_ray_restarts_go_on_from_their_checkpoint(tmp_path):
    parity.compare(ended("killed under ddp", tmp_path / "ddp"), ended("killed", tmp_path / "killed"))
    began = sorted(path.name for path in (tmp_path / "killed").glob("began *"))
    assert began == [f"began {rank} at {step}" for rank in range(2) for step in (0, 4)]


def test_one_worker_trains_as_under_rays_ddp(tmp_path):
    parity.compare(ended("alone under ddp", tmp_path / "ddp"), ended("alone", tmp_path / "ours"))


def test_another_accelerator_than_rays_is_an_error(tmp_path):
    done = script("other accelerator", tmp_path / "run")
    assert done.returncode != 0
    message = "accelerator must be 'auto', or that of the workers' devices, which is cpu"
    assert f"OptionError: {message}" in done.stderr
