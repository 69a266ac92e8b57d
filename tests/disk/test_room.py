"""Checkpoints that go to the disk that optimizer state lies on have room there before anything is stepped."""

import copy
import functools
import os

import lightning as L
import pytest
import torch

import models
import parity
from sp_lightning.disk import scratch_file, state_ring
from sp_lightning.errors import DiskError
from sp_lightning.lightning import checkpoint_io
from sp_lightning.memory.layout import aligned


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch):
    monkeypatch.setattr(state_ring, "BUFFER", 1 << 15)
    monkeypatch.setattr(state_ring, "SMALLEST", 1 << 15)


def fit(folder, module=None, callbacks=(), **options):
    module = module or models.ZooModule(models.case("mlp"), optimizer="adamw")
    strategy = parity.streaming_strategy("cpu", host_budget="0B", disk=os.getcwd())
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=list(callbacks),
        **{"max_epochs": 2, "limit_val_batches": 0, **options},
    )
    trainer.fit(module, models.loader(models.case("mlp"), 2))
    return module


class Trained(models.ZooModule):
    """A module whose checkpoints have what trains."""

    def on_save_checkpoint(self, checkpoint):
        del checkpoint["state_dict"]["frozen"]


SAVES = functools.partial(L.pytorch.callbacks.ModelCheckpoint, every_n_train_steps=1)
NBYTES = [p.nbytes for p in models.ZooModule(models.case("mlp"), optimizer="adamw").parameters()]
WEIGHTS, STATE = sum(NBYTES), 2 * sum(map(aligned, NBYTES))


@pytest.mark.parametrize(
    "options, checkpoints",
    [
        ({}, 2 * (WEIGHTS + STATE)),  # the next one and the one that it replaces
        ({"max_epochs": 1}, WEIGHTS + STATE),
        ({"callbacks": [lambda path: SAVES(path, save_weights_only=True)]}, 2 * WEIGHTS),
        ({"callbacks": [SAVES, lambda path: SAVES(path, every_n_train_steps=2)]}, 4 * (WEIGHTS + STATE)),
        ({"callbacks": [lambda path: SAVES(path, save_top_k=0)]}, 0),
        ({"enable_checkpointing": False}, 0),
    ],
)
def test_the_next_checkpoint_and_the_one_that_it_replaces_have_room(options, checkpoints, tmp_path, monkeypatch):
    options = {**options, "callbacks": [make(tmp_path) for make in options.get("callbacks", ())]}
    needed = STATE + checkpoints
    for free in (needed, needed - 1):
        with monkeypatch.context() as full:
            full.setattr(scratch_file, "free_nbytes", lambda folder, free=free: free)
            module = models.ZooModule(models.case("mlp"), optimizer="adamw")
            before = copy.deepcopy(module.state_dict())
            if free == needed:
                fit(tmp_path / str(free), module, **copy.deepcopy(options))
            else:
                said = "next checkpoint with the one that it replaces need" if checkpoints else "Optimizer state needs"
                with pytest.raises(DiskError, match=said):
                    fit(tmp_path / str(free), module, **copy.deepcopy(options))
                assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
        for path in tmp_path.rglob("*.ckpt"):
            path.unlink()


def test_a_run_that_goes_on_replaces_a_checkpoint_that_is_there(tmp_path, monkeypatch):
    fit(tmp_path)
    monkeypatch.setattr(scratch_file, "free_nbytes", lambda folder: STATE + WEIGHTS + STATE)
    fit(tmp_path)


def test_checkpoints_on_another_disk_need_no_room_on_this_one(tmp_path, monkeypatch):
    monkeypatch.setattr(scratch_file, "free_nbytes", lambda folder: STATE)
    with monkeypatch.context() as other:
        other.setattr(checkpoint_io, "_disk_of", lambda path: path)
        fit(tmp_path)
    with pytest.raises(DiskError):
        fit(tmp_path / "here")


def test_weights_that_a_checkpoint_may_leave_out_need_no_room(tmp_path, monkeypatch):
    made = []
    for kind in (models.ZooModule, Trained):
        module = kind(models.case("mlp"), optimizer="adamw")
        module.frozen = torch.nn.Parameter(torch.zeros(WEIGHTS), requires_grad=False)
        made.append(module)
    monkeypatch.setattr(scratch_file, "free_nbytes", lambda folder: STATE + 2 * (WEIGHTS + STATE))
    with pytest.raises(DiskError):
        fit(tmp_path, made[0])
    fit(tmp_path, made[1])
