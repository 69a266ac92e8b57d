"""A user's script trains on two devices as under DDP, whoever starts its processes."""

import os
import pathlib
import subprocess
import sys

import processes
import pytest
import torch

import parity

RIGS = pathlib.Path(__file__).parents[1] / "rigs"
LAUNCHERS = {
    "lightning": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=PORT"],
}


def run(launcher, strategy, folder):
    """Run the script; return what its ranks left."""
    folder.mkdir()
    port = str(processes.free_port())
    command = [part.replace("PORT", port) for part in LAUNCHERS[launcher]]
    environment = {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "WORLD_SIZE")}
    environment |= {"PYTHONPATH": os.pathsep.join([str(RIGS), *filter(None, sys.path)]), "MASTER_PORT": port}
    done = subprocess.run(
        [*command, str(RIGS / "ranked_script.py"), strategy, str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    ranks = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]
    return [parity.Record([parity.Entry("", name, value) for name, value in rank.items()]) for rank in ranks]


@pytest.mark.parametrize("launcher", ["lightning", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_a_script_runs_as_under_ddp(launcher, tmp_path):
    expected = run(launcher, "ddp", tmp_path / "ddp")
    for theirs, ours in zip(expected, run(launcher, "superpipeline", tmp_path / "ours"), strict=True):
        parity.compare(theirs, ours)
