"""Checkpoints cross over between this strategy and plain Lightning, both ways, and have the same size."""

import errno
import functools
import os
import resource

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from often import often, slow

import models
import parity
from sp_lightning.lightning.checkpoint_io import new_file

pytestmark = [pytest.mark.simgpu, pytest.mark.filterwarnings("ignore")]
BOTH = pytest.mark.parametrize("accelerator", [pytest.param("cpu", marks=pytest.mark.slow), "simgpu"])
SIDES = {
    "plain": parity.plain_strategy,
    "streaming": functools.partial(parity.streaming_strategy, window=2),
    "on disk": lambda accelerator: parity.streaming_strategy(accelerator, window=2, host_budget="0B", disk=os.getcwd()),
}
CROSSINGS = [(one, other) for one in SIDES for other in SIDES if (one, other) != ("plain", "plain")]
SIDES["auto"] = parity.streaming_strategy
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
    options = {"max_epochs": 2, "limit_val_batches": 2, **options}
    return parity.make_trainer(SIDES[side](accelerator), accelerator, **options)


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


def tensors(checkpoint):
    return {path: value for path, value in parity.leaves(checkpoint) if isinstance(value, torch.Tensor)}


@BOTH
@pytest.mark.parametrize("writer, reader", often(CROSSINGS, ("plain", "streaming"), ("streaming", "plain")))
def test_a_run_resumes_within_an_epoch_wherever_it_was_written(writer, reader, accelerator, tmp_path):
    """Six of eight steps by one strategy, the rest by another: equal to the plain one in both parts."""

    def interrupted(first, second):
        fit(first, accelerator, max_steps=6, save=tmp_path / "middle.ckpt")
        return state_of(*fit(second, accelerator, ckpt_path=tmp_path / "middle.ckpt"))

    parity.assert_same(interrupted("plain", "plain"), interrupted(writer, reader))


@BOTH
@pytest.mark.parametrize("side", often(["streaming", "on disk"]))
@pytest.mark.parametrize("optimizer", often(["two", "sgd", "adafactor"]))
def test_states_of_other_optimizers_cross_over(optimizer, side, accelerator, tmp_path):
    make_module = functools.partial(Module, optimizer)
    expected = state_of(*fit("plain", accelerator, make_module))
    fit(side, accelerator, make_module, max_epochs=1, save=tmp_path / "first.ckpt")
    parity.assert_same(expected, state_of(*fit("plain", accelerator, make_module, ckpt_path=tmp_path / "first.ckpt")))
    fit("plain", accelerator, make_module, max_epochs=1, save=tmp_path / "first.ckpt")
    parity.assert_same(expected, state_of(*fit(side, accelerator, make_module, ckpt_path=tmp_path / "first.ckpt")))


@pytest.mark.parametrize("make_module", often([Module, Filtered, Adapted]))
def test_files_hold_the_same_bytes(make_module, tmp_path):
    """Written while weights stream, by a callback, and after the run, by hand."""
    folders = {"plain": tmp_path / "1", "streaming": tmp_path / "2"}  # files hold these names
    for side, folder in folders.items():
        saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
        options = {"callbacks": [saver], "enable_checkpointing": True, "save": folder / "end.ckpt"}
        fit(side, make_module=make_module, **options)
    plain, streaming = (sorted(folder.iterdir()) for folder in folders.values())
    assert [path.name for path in plain] == [path.name for path in streaming] and len(plain) == 9
    assert [path.stat().st_size for path in plain] == [path.stat().st_size for path in streaming]
    for ours, theirs in zip(streaming, plain, strict=True):
        actual, expected = (torch.load(path, weights_only=False) for path in (ours, theirs))
        assert list(actual) == list(expected)
        parity.assert_same(tensors(expected), tensors(actual))


# ---- where what was loaded lies


def mapped_files(tensors):
    """The files in whose mapped memory any of these tensors lies."""
    with open("/proc/self/maps") as file:
        lines = [line.split() for line in file]
    ranges = [(*(int(part, 16) for part in line[0].split("-")), line[5]) for line in lines if len(line) > 5]
    found = {path for start, end, path in ranges for tensor in tensors if start <= tensor.data_ptr() < end}
    return {path for path in found if path.startswith("/") and not path.startswith("/dev/")}


def test_only_weights_and_optimizer_states_of_a_file_are_mapped(tmp_path):
    fit("plain", max_epochs=1, save=tmp_path / "end.ckpt", callbacks=[Scores()])
    checkpoint = make_trainer("streaming").strategy.load_checkpoint(tmp_path / "end.ckpt")
    plain = make_trainer("plain").strategy.load_checkpoint(tmp_path / "end.ckpt")
    parity.assert_same(tensors(plain), tensors(checkpoint))
    assert list(plain) == list(checkpoint)
    everything = set(tensors(checkpoint))
    file = {str(tmp_path / "end.ckpt")}
    in_file = {path for path, value in tensors(checkpoint).items() if mapped_files([value]) == file}
    assert {path for path in everything if path.startswith(("state_dict", "optimizer_states"))} == in_file
    assert everything - in_file == {"callbacks.Scores.best"}


class Scores(Callback):
    def state_dict(self):
        return {"best": torch.ones(3)}


def test_what_was_loaded_outlives_its_file(tmp_path):
    """Overwritten in place, as a copy does, a mapped file would end the process at the next read."""
    path = tmp_path / "first.ckpt"
    fit("plain", max_epochs=1, save=path)

    class Overwriting(Callback):
        def on_train_start(self, trainer, module):
            path.write_bytes(b"")

    expected = state_of(*fit("plain"))
    parity.assert_same(expected, state_of(*fit("streaming", ckpt_path=path, callbacks=[Overwriting()])))


@pytest.mark.parametrize("inner", [None, TorchCheckpointIO()])
def test_the_users_checkpoint_io_is_used(inner, tmp_path):
    class Own(TorchCheckpointIO):
        calls = []

        def load_checkpoint(self, *args, **kwargs):
            self.calls.append("load")
            return super().load_checkpoint(*args, **kwargs)

    fit("plain", max_epochs=1, save=tmp_path / "first.ckpt")
    fit("streaming", ckpt_path=tmp_path / "first.ckpt", plugins=[Own()])
    assert Own.calls == ["load"]
    wrapped = AsyncCheckpointIO(inner)
    trainer, _ = fit("streaming", ckpt_path=tmp_path / "first.ckpt", plugins=[wrapped])
    assert trainer.strategy.checkpoint_io is wrapped
    assert type(wrapped.checkpoint_io).__name__ == ("MappedCheckpointIO" if inner is None else "TorchCheckpointIO")


def test_a_file_that_is_not_local_is_left_to_lightning():
    expected = state_of(*fit("plain"))
    fit("streaming", max_epochs=1, save="memory://checkpoints/end.ckpt")
    parity.assert_same(expected, state_of(*fit("streaming", ckpt_path="memory://checkpoints/end.ckpt")))


def test_a_missing_file_is_the_error_that_it_is_plainly(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.ckpt"):
        fit("streaming", ckpt_path=tmp_path / "none.ckpt")


# ---- written in the middle of things


def limit_files_to(nbytes):
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))


def test_when_the_disk_is_full_the_previous_file_stays_whole(tmp_path):
    trainer, _ = fit("streaming", save=tmp_path / "last.ckpt")
    before = (tmp_path / "last.ckpt").read_bytes()
    previous, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit_files_to(len(before) // 2)  # a write beyond it fails, as on a full disk
    try:
        with pytest.raises(OSError, match=r"File too large; the previous checkpoint is intact: '.*/last.ckpt'"):
            trainer.save_checkpoint(tmp_path / "last.ckpt")
        with pytest.raises(OSError, match=r"File too large; nothing has this name, others are intact: '.*/first.ckpt'"):
            trainer.save_checkpoint(tmp_path / "first.ckpt")
    finally:
        limit_files_to(previous)
    assert (tmp_path / "last.ckpt").read_bytes() == before
    assert [path.name for path in tmp_path.glob("last*")] == ["last.ckpt"]


def recorded(monkeypatch, error=None):
    """What is asked of the system, in order, by whom; a file cannot be synchronised because of this error."""
    calls = []

    def sync(file, original=os.fsync):
        calls.append(("fsync", os.path.basename(os.readlink(f"/proc/self/fd/{file}")), os.fstat(file).st_size))
        if error is not None:
            raise OSError(error, os.strerror(error))
        original(file)

    def replace(old, new, original=os.replace):
        calls.append(("replace", os.path.basename(old), os.path.basename(new)))
        original(old, new)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", replace)
    return calls


@pytest.mark.parametrize("error", [None, slow(errno.EINVAL)])
def test_a_file_is_on_the_disk_before_it_replaces_the_old_one(error, tmp_path, monkeypatch):
    """Where the file system knows of such a thing; where it does not, it is written all the same."""
    trainer, _ = fit("streaming", save=tmp_path / "run" / "last.ckpt")
    before = (tmp_path / "run" / "last.ckpt").read_bytes()
    calls = recorded(monkeypatch, error)
    trainer.save_checkpoint(tmp_path / "run" / "last.ckpt")
    assert calls == [("fsync", "last.ckpt.part", len(before)), ("replace", "last.ckpt.part", "last.ckpt")]
    assert (tmp_path / "run" / "last.ckpt").read_bytes() == before
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["last.ckpt"]


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_a_file_that_misses_the_disk_leaves_the_old_one_whole(error, tmp_path, monkeypatch):
    trainer, module = fit("streaming", save=tmp_path / "last.ckpt")
    before = (tmp_path / "last.ckpt").read_bytes()
    module.net.head.bias.data.add_(1)
    calls = recorded(monkeypatch, error)
    with pytest.raises(
        OSError, match=rf"{os.strerror(error)}; the previous checkpoint is intact: '.*/last.ckpt'"
    ) as info:
        trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert info.value.errno == error and [name for name, *_ in calls] == ["fsync"]
    assert (tmp_path / "last.ckpt").read_bytes() == before
    assert [path.name for path in tmp_path.glob("last*")] == ["last.ckpt"]


def test_what_a_killed_save_leaves_is_no_checkpoint_of_slurms(tmp_path):
    """Lightning takes each name with "hpc_ckpt_" in a folder for that of a checkpoint to go on from."""
    made = tmp_path / "hpc_ckpt_1.ckpt"
    with new_file(str(made)) as file:
        file.write(b"whole")
        assert not [path for path in tmp_path.iterdir() if "hpc_ckpt_" in path.name]
    assert made.read_bytes() == b"whole" and list(tmp_path.iterdir()) == [made]


@pytest.mark.parametrize("error", [ValueError("of a step"), OSError(errno.ENOENT, "no such data")])
def test_an_error_that_is_being_handled_is_no_cause_of_another_one(error, tmp_path):
    with pytest.raises(RuntimeError, match="of the writer"):
        try:
            raise error
        except type(error):
            with new_file(str(tmp_path / "last.ckpt")):
                raise RuntimeError("of the writer")  # noqa: B904  # as within torch
