"""A Trainer whose frozen weights stay in files, or whose state is on a disk, has the bits of a plain run."""

import errno
import functools
import os
import random
import signal
import subprocess

import forks
import pytest
import torch
from stream_programs import stream
from test_disks_that_fail import failing
from torch import nn

import models
import parity
from sp_lightning.errors import DiskError
from sp_lightning.lightning.checkpoint_io import MappedCheckpointIO
from sp_lightning.store import pipeline, placement

SETTINGS = {
    "precision": ["32-true", "bf16-mixed", "bf16-true", "bf16-true, masters", "16-mixed"],
    "optimizer": ["adamw", "sgd", "adafactor", "two"],
    "accumulate": [1, 3],
    "clip": [None, ("norm", 0.5), ("value", 0.01)],
    "accelerator": ["simgpu", "cpu"],
    "overlap": [True, False],
    "trips": [False, True],
    "activations": ["keep", "recompute", "offload"],
}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """The nets have weights of a few hundred bytes, which move as well, through buffers that hold a few."""
    monkeypatch.setattr(placement, "LEAST", 1)
    for name in ("MOST", "LEAST", "SMALLEST"):
        monkeypatch.setattr(pipeline, name, 1 << 16)


def rows():
    nets = list(models.ZOO)
    for number, row in enumerate(parity.pairwise(case=nets, **SETTINGS)):
        if row["precision"] == "16-mixed" or row["trips"]:
            row |= {"accelerator": "simgpu"}
        if row["optimizer"] == "two":  # which are stepped by hand
            row |= {"accumulate": 1, "clip": None}
        marks = [pytest.mark.simgpu] * (row["accelerator"] != "cpu") + [pytest.mark.slow] * (number % 60 > 0)
        yield pytest.param(row, id="-".join(map(str, row.values())), marks=marks)


@pytest.mark.parametrize("row", list(rows()))
def test_training_from_a_disk_is_plain_training(row):
    case = models.case(row["case"])
    if "writes" in case.tags:  # a write in a forward is a typed error in these settings, wherever weights are
        row = {**row, "activations": "keep", "precision": "32-true"}
    precision, _, masters = row["precision"].partition(", ")

    def run(strategy):
        return parity.record(
            functools.partial(models.ZooModule, case, optimizer=row["optimizer"]),
            strategy,
            accelerator=row["accelerator"],
            precision=precision,
            accumulate=row["accumulate"],
            clip=row["clip"],
            batches=6 if row["accumulate"] > 1 else 4,
        )

    alike = {"master_weights": True} if masters else {}  # plainly there is no such precision
    expected = run(
        parity.streaming_strategy(row["accelerator"], **alike) if masters else parity.plain_strategy(row["accelerator"])
    )
    options = {"host_budget": "0B", "disk": os.getcwd(), "window": 2, "activations": row["activations"], **alike}
    options |= {"optimizer_overlap": row["overlap"], "optimizer_device": "device" if row["trips"] else "host"}
    actual = run(parity.streaming_strategy(row["accelerator"], **options))
    parity.compare(expected, actual)
    if row["optimizer"] == "adamw":
        assert actual.telemetry["disk_written"] > 0 and actual.telemetry["disk_read"] > 0


def test_a_checkpoint_from_a_disk_is_torchs_past_the_page_cache(monkeypatch):
    model = nn.Sequential(nn.Linear(1000, 70), nn.Linear(70, 999))
    optimizer = torch.optim.AdamW(model.parameters())
    with stream(model, "cpu", host_budget=0, disk=os.getcwd(), window=1):
        model(torch.ones(2, 1000)).sum().backward()
        optimizer.step()
        saved = {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()], "epoch": 3}
        moved = []
        with monkeypatch.context() as counted:
            write = os.pwritev
            counted.setattr(os, "pwritev", lambda fd, views, at: moved.append(len(views[0])) or write(fd, views, at))
            MappedCheckpointIO().save_checkpoint(saved, "last.ckpt")
        assert sum(moved) > 0.9 * os.path.getsize("last.ckpt")
        for is_mapped in (True, False):
            found = torch.load("last.ckpt", mmap=is_mapped)
            torch.testing.assert_close(saved, found, rtol=0, atol=0)
        with monkeypatch.context() as broken:
            failing(broken, "pwritev", errno.ENOSPC, 1)
            with pytest.raises(DiskError, match=r"No space left on device .* The previous checkpoint is intact"):
                MappedCheckpointIO().save_checkpoint(saved, "last.ckpt")
        torch.testing.assert_close(saved, torch.load("last.ckpt"), rtol=0, atol=0)


RUN = "import sys, killed_runs; killed_runs.main(sys.argv[1])"


def started(folder):
    return forks.Program(RUN, str(folder), modules=("sp_lightning", "lightning", "killed_runs"))


@pytest.mark.slow
def test_runs_that_are_killed_at_random_times_lose_nothing(tmp_path):
    """Twenty times; what a run leaves are whole checkpoints."""

    def end(folder):
        found = torch.load(folder / "end.ckpt", weights_only=False)
        return [found[name] for name in ("state_dict", "optimizer_states", "lr_schedulers", "global_step")]

    (whole := tmp_path / "whole").mkdir()
    assert started(whole).wait(300).returncode == 0
    generator, kills, number = random.Random(0), 0, 0
    while kills < 20:
        number += 1
        (folder := tmp_path / str(number)).mkdir()
        while not (folder / "end.ckpt").exists():
            program = started(folder)
            try:
                done = program.wait(generator.uniform(0.3, 1.5) if kills < 20 else 300)
                assert done.returncode == 0, done.stderr
            except subprocess.TimeoutExpired:
                program.kill()
                done = program.wait(60)
                assert done.returncode in (0, -signal.SIGKILL), done.stderr  # 0: it had ended by itself
                kills += done.returncode != 0
            assert {path.suffix for path in folder.rglob("*.*")} <= {".ckpt", ".part"}
        torch.testing.assert_close(end(folder), end(whole), rtol=0, atol=0)
