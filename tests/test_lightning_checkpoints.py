"""Checkpoints cross over between this strategy and plain Lightning, both ways, and have the same size."""

import functools
import gc
import os
import weakref

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

import models
import parity

pytestmark = [pytest.mark.simgpu, pytest.mark.filterwarnings("ignore")]
BOTH = pytest.mark.parametrize("accelerator", ["cpu", "simgpu"])
SIDES = {"plain": parity.plain_strategy, "streaming": functools.partial(parity.streaming_strategy, window=2)}
CASE = models.case("mlp")


class Module(models.ZooModule):
    """Weights in several blocks, a scheduler, and what a user would add to a checkpoint."""

    def __init__(self, optimizer="adamw", lr=1e-2):
        super().__init__(CASE, optimizer, lr)
        self.save_hyperparameters()

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        if isinstance(optimizer, list):
            return optimizer
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class Adapted(models.ZooModule):
    """Saves only what it trains, as adapters do."""

    def __init__(self):
        super().__init__(models.case("adapters"), "adamw")

    def on_save_checkpoint(self, checkpoint):
        trained = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
        checkpoint["state_dict"] = {name: value for name, value in checkpoint["state_dict"].items() if name in trained}

    def on_load_checkpoint(self, checkpoint):
        self.strict_loading = False


class Filtered(Module):
    def state_dict(self, *args, **kwargs):
        return {name: value for name, value in super().state_dict(*args, **kwargs).items() if "blocks" not in name}


def make_trainer(side, accelerator="cpu", **options):
    if accelerator == "simgpu":
        import simgpu.lightning
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    options = {"enable_checkpointing": False, "max_epochs": 2, "limit_val_batches": 2, **quiet, **options}
    return L.Trainer(strategy=SIDES[side](accelerator), accelerator=accelerator, devices=1, **options)


def fit(side, accelerator="cpu", make_module=Module, ckpt_path=None, batches=4, save=None, **options):
    """A run from a seeded module; gives its trainer and module."""
    L.seed_everything(0, verbose=False)
    module = make_module()
    trainer = make_trainer(side, accelerator, **options)
    trainer.fit(module, models.loader(module.case, batches), models.loader(module.case, 2), ckpt_path=ckpt_path)
    if save:
        trainer.save_checkpoint(save)
    return trainer, module


def state_of(trainer, module):
    names = {parameter: name for name, parameter in module.named_parameters()}
    optimizers = [parity.named_state(optimizer, names) for optimizer in trainer.optimizers]
    schedulers = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
    return dict(parity.leaves({"weights": dict(module.state_dict()), "optimizers": optimizers, "rates": schedulers}))


def assert_same(expected, actual):
    assert expected.keys() == actual.keys()
    for name, value in expected.items():
        found = actual[name]
        value, found = (item.cpu() if isinstance(item, torch.Tensor) else item for item in (value, found))
        assert not (wrong := parity.difference(value, found)), f"{name}: {wrong}"


def tensors(checkpoint):
    return {path: value for path, value in parity.leaves(checkpoint) if isinstance(value, torch.Tensor)}


@BOTH
@pytest.mark.parametrize("writer, reader", [("plain", "streaming"), ("streaming", "plain"), ("streaming", "streaming")])
def test_a_run_resumes_from_the_middle_of_an_epoch_wherever_it_was_written(writer, reader, accelerator, tmp_path):
    """Six of eight steps by one strategy, the rest by another: equal to the plain one in both parts."""

    def interrupted(first, second):
        fit(first, accelerator, max_steps=6, save=tmp_path / "middle.ckpt")
        return state_of(*fit(second, accelerator, ckpt_path=tmp_path / "middle.ckpt"))

    assert_same(interrupted("plain", "plain"), interrupted(writer, reader))


@BOTH
@pytest.mark.parametrize("optimizer", ["sgd", "adafactor", "two"])
def test_states_of_other_optimizers_cross_over(optimizer, accelerator, tmp_path):
    make_module = functools.partial(Module, optimizer)
    expected = state_of(*fit("plain", accelerator, make_module))
    fit("streaming", accelerator, make_module, max_epochs=1, save=tmp_path / "first.ckpt")
    assert_same(expected, state_of(*fit("plain", accelerator, make_module, ckpt_path=tmp_path / "first.ckpt")))
    fit("plain", accelerator, make_module, max_epochs=1, save=tmp_path / "first.ckpt")
    assert_same(expected, state_of(*fit("streaming", accelerator, make_module, ckpt_path=tmp_path / "first.ckpt")))


@pytest.mark.parametrize("make_module", [Module, Filtered, Adapted])
def test_files_hold_the_same_bytes(make_module, tmp_path):
    """Written while weights stream, by a callback, and after the run, by hand: on the CPU to the byte."""
    sizes = {}
    for side in SIDES:
        saver = ModelCheckpoint(tmp_path / side, "{step}", every_n_train_steps=1, save_top_k=-1)
        fit(side, make_module=make_module, callbacks=[saver], enable_checkpointing=True, save=tmp_path / side / "end.ckpt")
        sizes[side] = {path.name: path.stat().st_size for path in sorted((tmp_path / side).iterdir())}
        if side == "streaming":
            for name in sizes["plain"]:
                plain, ours = (torch.load(tmp_path / s / name, weights_only=False) for s in SIDES)
                assert plain.keys() == ours.keys()
                assert_same(tensors(plain), tensors(ours))
    assert len(sizes["plain"]) == 9
    assert set(sizes["plain"]) == set(sizes["streaming"])
    for name, size in sizes["plain"].items():
        assert abs(sizes["streaming"][name] - size) <= 8 * len(name)  # directory names are in the files
