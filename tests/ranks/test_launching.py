"""A user's script trains on two devices as under DDP, whoever starts its processes."""

import collections
import os
import pathlib
import subprocess
import sys

import lightning as L
import processes
import pytest
import torch

import models
import parity
import sp_lightning

PACKAGE = pathlib.Path(sp_lightning.__file__).parent
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


def test_steps_on_one_device_run_no_code_of_several():
    entered = collections.Counter()

    class Watch(L.Callback):
        def on_train_batch_start(self, *_):
            sys.setprofile(note)

        def on_train_batch_end(self, *_):
            sys.setprofile(None)

    def note(frame, event, _):
        path = pathlib.Path(frame.f_code.co_filename)
        if event == "call" and PACKAGE in path.parents:
            entered[path.relative_to(PACKAGE).as_posix()] += 1

    trainer = L.Trainer(
        strategy=sp_lightning.SuperpipelineStrategy(window=1),
        accelerator="cpu",
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[Watch()],
    )
    case = models.case("llama")
    trainer.fit(models.ZooModule(case), models.loader(case, 3))
    assert entered["runtime/engine.py"] and entered["lightning/strategy.py"]
    assert not [path for path in entered if path.startswith("ranks/") or path == "lightning/several_devices.py"]
