"""A checkpoint that is written while training goes on has the bytes of its step, whoever writes weights meanwhile."""

import copy
import errno
import functools
import os
import pickle
import signal
import threading
import time
from typing import ClassVar

import forks
import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.io import AsyncCheckpointIO

import models
import parity
from sp_lightning.compat import references
from sp_lightning.disk import checkpoint_file
from sp_lightning.disk.checkpoint_file import CopiesToFile
from sp_lightning.errors import CheckpointError, OptionError
from sp_lightning.lightning.strategy import SuperpipelineStrategy
from sp_lightning.runtime.optimizer_steps import OptimizerSteps
from sp_lightning.storage.checkpoint_beside import CheckpointBeside

pytestmark = [pytest.mark.simgpu, pytest.mark.filterwarnings("ignore")]
FOUND_BY_OTHERS = 30  # seconds: a copy that nobody waits for


class Latest:
    """Copies that begin no sooner than some code waits for the tensor, or for one behind it, or for the file."""

    def __init__(self, monkeypatch):
        self.waited: list[str] = []  # for tensors, by name
        self.left: list[int] = []  # tensors that were not in the file when a wait ended
        self.files = 0
        self._wanted = set()
        monkeypatch.setattr(checkpoint_file, "LARGE", 64)
        begin_pieces, wait, finish = CopiesToFile._begin_pieces, CheckpointBeside._wait, CheckpointBeside.finish
        begin = CheckpointBeside.begin

        def late_pieces(copies, hole, owner):
            if hasattr(owner, "in_file"):
                behind = [kept for kept, _ in copies._later if kept.place >= owner.place]
                until = time.monotonic() + FOUND_BY_OTHERS
                while self._wanted.isdisjoint(behind) and not copies._failed:
                    assert time.monotonic() < until, f"nobody waits for {owner.name}"
                    time.sleep(0.001)
            begin_pieces(copies, hole, owner)

        def noted_wait(beside, kept):
            kept = [one for one in kept if not one.in_file.is_set()]
            self.waited += [one.name for one in kept]
            self._wanted.update(kept)
            wait(beside, kept)
            if kept:
                self.left.append(sum(not one.in_file.is_set() for one in beside._kept))

        def noted_finish(beside):
            self._wanted.update(beside._kept)
            finish(beside)

        def noted_begin(beside, *args):
            begin(beside, *args)
            self.files += 1

        monkeypatch.setattr(CopiesToFile, "_begin_pieces", late_pieces)
        monkeypatch.setattr(CheckpointBeside, "_wait", noted_wait)
        monkeypatch.setattr(CheckpointBeside, "finish", noted_finish)
        monkeypatch.setattr(CheckpointBeside, "begin", noted_begin)


@pytest.fixture
def latest(monkeypatch):
    return Latest(monkeypatch)


class Module(models.ZooModule):
    def __init__(self, case="mlp", optimizer="adamw"):
        super().__init__(models.case(case), optimizer, 1e-2)

    def configure_optimizers(self):
        made = super().configure_optimizers()
        return made if isinstance(made, list) else ([made], [torch.optim.lr_scheduler.ExponentialLR(made, 0.9)])


class WithRate(Module):
    lr = 1e-2  # which a finder looks for


def fit(folder, checkpoints="beside", accelerator="simgpu", make=Module, callbacks=(), saver=None, **given):
    """Train for two epochs of four steps, saving after each step; return what each file has."""
    if accelerator == "simgpu":
        import simgpu.lightning  # noqa: F401
    of_strategy = given.pop("strategy", {})
    strategy = parity.streaming_strategy(accelerator, window=2, checkpoints=checkpoints, **of_strategy)
    saver = saver or ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    options = {"max_epochs": 2, "limit_val_batches": 2, **quiet, **given}
    L.seed_everything(0, verbose=False)
    module = make()
    trainer = L.Trainer(
        strategy=strategy,
        accelerator=accelerator,
        devices=1,
        callbacks=[*(kind() for kind in callbacks), saver],
        **options,
    )
    trainer.fit(module, models.loader(module.case, 4), models.loader(module.case, 2))
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def contents(folder):
    found = {}
    for path in sorted(folder.iterdir()):
        loaded = torch.load(path, weights_only=False)
        loaded["callbacks"] = {key: value for key, value in loaded["callbacks"].items() if "Checkpoint" not in key}
        found[path.name] = dict(parity.leaves(loaded))
    return found


def assert_same_files(folder, beside, waiting, count=8):
    """Files of a run have what those of another run have, to the bit."""
    expected, actual = contents(folder / waiting), contents(folder / beside)
    assert expected.keys() == actual.keys() and len(expected) == count
    for name, leaves in expected.items():
        assert leaves.keys() == actual[name].keys()
        for path, value in leaves.items():
            assert not (wrong := parity.difference(value, actual[name][path])), f"{name}, {path}: {wrong}"


class Writer(Callback):
    """Writes weights in place between two steps, as a user's callback may."""

    def on_train_batch_start(self, trainer, module, batch, index):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(0.99)


class WriterOfData(Callback):
    def on_train_batch_start(self, trainer, module, batch, index):
        for parameter in module.parameters():
            parameter.data.mul_(0.99)


class Keeper(Callback):
    """Keeps the tensors that it is given for a checkpoint, and writes to them in the next step."""

    kept: ClassVar[dict] = {}

    def on_save_checkpoint(self, trainer, module, checkpoint):
        self.kept = dict(checkpoint["state_dict"])

    def on_before_zero_grad(self, trainer, module, optimizer):
        for tensor in self.kept.values():
            if tensor.is_floating_point():
                tensor.data.mul_(0.99)
        self.kept = {}


class Frozen(Module):
    def __init__(self):
        super().__init__()
        for parameter in list(self.parameters())[:2]:
            parameter.requires_grad_(False)


SETTINGS = {
    "in memory": {},
    "on the CPU": {"accelerator": "cpu"},
    "the whole step after backward": {"gradient_clip_val": 0.1},
    "no overlap": {"strategy": {"optimizer_overlap": False}},
    "momentum": {"make": lambda: Module(optimizer="sgd")},
    "an optimizer of unknown steps": {"make": lambda: Module(optimizer="lbfgs")},
    "several optimizers": {"make": lambda: Module(optimizer="two")},
    "each tensor's own step": {"make": lambda: Module(optimizer="adafactor")},
    "bf16": {"precision": "bf16-mixed"},
    "recompute": {"strategy": {"activations": "recompute+offload"}},
    "accumulation": {"accumulate_grad_batches": 2},
    "writes in place": {"callbacks": [Writer]},
    "writes of data": {"callbacks": [WriterOfData]},
    "kept tensors": {"callbacks": [Keeper]},
    "an average of weights": {"callbacks": [EMAWeightAveraging]},
    "frozen weights": {"make": Frozen},
    "model code that writes a weight": {"make": lambda: Module("rescaled_weight")},
    "model code that writes data": {"make": lambda: Module("rescaled_data")},
    "buffers": {"make": lambda: Module("batch_norm")},
    "tied weights": {"make": lambda: Module("tied_embedding")},
    "on the disk": {"strategy": {"host_budget": "0B", "disk": "."}},
    "on the device": {"strategy": {"optimizer_device": "device"}},
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.few(6)
def test_each_file_is_of_its_step_however_late_its_bytes_are_copied(setting, latest, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = dict(SETTINGS[setting])
    if given.get("strategy", {}).get("disk"):
        given["strategy"] = {**given["strategy"], "disk": str(tmp_path)}
    waiting = fit(tmp_path / "waiting", "wait", **given)
    assert not latest.files
    fit(tmp_path / "beside", **given)
    assert latest.files == len(waiting) - 1  # the last one is complete before the run ends
    assert_same_files(tmp_path, "beside", "waiting", len(waiting))
    assert not references._kept


# Each wait of the code that writes weights, and a setting whose files show that it is missing.
WAITS = {
    "of a unit's step": ("in memory", CheckpointBeside, "_before"),
    "of user code": ("writes in place", CheckpointBeside, "wait_for"),
    "of data that user code has": ("writes of data", CheckpointBeside, "wait_for"),
    "of a write-back": ("model code that writes a weight", CheckpointBeside, "wait_for"),
    "of steps of unknown code": ("an optimizer of unknown steps", OptimizerSteps, "_wait_for_file"),
    "of tensors that a callback keeps": ("kept tensors", CheckpointBeside, "_wait_for_shared"),
}


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.few(3)
def test_without_a_wait_a_file_is_wrong_or_an_error(wait, latest, tmp_path, monkeypatch):
    setting, owner, name = WAITS[wait]
    waiting = fit(tmp_path / "waiting", "wait", **SETTINGS[setting])
    monkeypatch.setattr(owner, name, lambda *_: None)
    with pytest.raises((AssertionError, CheckpointError)):
        fit(tmp_path / "beside", **SETTINGS[setting])
        assert_same_files(tmp_path, "beside", "waiting", len(waiting))


# ---- files, and what fails


class Initial(Callback):
    """Saves before the first step."""

    def on_train_start(self, trainer, module):
        trainer.save_checkpoint(trainer.checkpoint_callback.dirpath + "/initial.ckpt")


def test_an_optimizers_first_step_waits_for_the_file(latest, tmp_path):
    for checkpoints in ("wait", "beside"):
        fit(tmp_path / checkpoints, checkpoints, max_steps=3, callbacks=[Initial])
    assert latest.files
    assert_same_files(tmp_path, "beside", "wait", count=4)


def test_a_learning_rate_finder_goes_back_to_what_it_saved(latest, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for checkpoints in ("wait", "beside"):
        finder = functools.partial(LearningRateFinder, num_training_steps=3, update_attr=False)
        fit(tmp_path / checkpoints, checkpoints, max_steps=3, make=WithRate, callbacks=[finder])
    assert latest.files
    assert_same_files(tmp_path, "beside", "wait", count=3)


class Uploads(DummyLogger):
    """Notes whether the file is there when it is told of it."""

    def __init__(self, log_model):
        super().__init__()
        self._log_model, self.found = log_model, []

    def after_save_checkpoint(self, saver):
        self.found.append(os.path.exists(saver.best_model_path))


@pytest.mark.parametrize("log_model", [True, "all", False])
@pytest.mark.few(1)
def test_a_logger_that_logs_models_finds_each_file(log_model, latest, tmp_path):
    logger = Uploads(log_model)
    fit(tmp_path, max_steps=3, logger=logger)
    assert logger.found == ([True] * 3 if log_model else [False, False, True])
    assert latest.files == (0 if log_model else 2)


class Gate:
    """Copies that begin once they are let."""

    def __init__(self, monkeypatch):
        self.open, self.begun = threading.Event(), threading.Event()
        monkeypatch.setattr(checkpoint_file, "LARGE", 64)
        copy_later = CopiesToFile.copy_later

        def gated(copies):
            self.begun.set()
            assert self.open.wait(60)
            copy_later(copies)

        monkeypatch.setattr(CopiesToFile, "copy_later", gated)


@pytest.fixture
def gate(monkeypatch):
    return Gate(monkeypatch)


class Looking(Callback):
    """Notes what is in the folder when a step begins, and lets the copies begin in this one."""

    def __init__(self, gate, folder, at):
        self.gate, self.folder, self.at, self.seen = gate, folder, at, []

    def on_train_batch_start(self, trainer, module, batch, index):
        self.seen.append(sorted(path.name for path in self.folder.iterdir()) if self.folder.exists() else [])
        if trainer.global_step >= self.at:
            self.gate.open.set()


def test_a_file_has_its_name_once_it_is_complete_and_only_then_replaces_the_one_before(gate, tmp_path):
    """The first step after a save runs in full only once its bytes are in the file, so the gate opens in it."""
    looking = Looking(gate, tmp_path, at=2)
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=1, monitor="step", mode="max")
    fit(tmp_path, callbacks=[lambda: looking], saver=saver)
    assert looking.seen[:3] == [[], [], []]  # of the first file nothing is there
    assert all(looking.seen[4:])  # and from its end on there is always one
    assert [path.name for path in tmp_path.iterdir()] == ["step=8.ckpt"]


def test_a_name_that_is_being_written_is_taken(gate, tmp_path):
    """As in a plain run, which finds the file there."""

    class TwoSaves(Callback):
        found = None

        def on_train_batch_end(self, trainer, module, outputs, batch, index):
            saver = trainer.checkpoint_callback
            if trainer.global_step == 1:
                trainer.save_checkpoint(tmp_path / "last.ckpt")
                assert not (tmp_path / "last.ckpt").exists()
                TwoSaves.found = saver.file_exists(str(tmp_path / "last.ckpt"), trainer)
                gate.open.set()

    saver = ModelCheckpoint(tmp_path, "last", every_n_train_steps=2, save_top_k=-1)
    fit(tmp_path, callbacks=[TwoSaves], saver=saver, max_epochs=1)
    assert TwoSaves.found is True
    assert "file_exists" not in vars(saver)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last-v1.ckpt", "last.ckpt"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.few(1)
def test_a_disk_that_fails_is_the_next_steps_error_and_leaves_the_file_before(number, latest, tmp_path, monkeypatch):
    steps = []

    class Failing(Callback):
        def on_train_batch_start(self, trainer, module, batch, index):
            steps.append(trainer.global_step)
            if trainer.global_step == 3:

                def failing(copies, memory, at):
                    raise OSError(number, os.strerror(number))

                monkeypatch.setattr(CopiesToFile, "_write", failing)

    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, save_top_k=1, monitor="step", mode="max")
    saved = fit(tmp_path, max_steps=3, saver=saver)["step=3.ckpt"]
    (tmp_path / "step=3.ckpt").write_bytes(b"of an earlier run")
    saver = ModelCheckpoint(
        tmp_path,
        "{step}",
        every_n_train_steps=3,
        save_top_k=1,
        monitor="step",
        mode="max",
        enable_version_counter=False,
    )
    with pytest.raises(CheckpointError, match=f"step=3.ckpt could not be written .*{os.strerror(number)}.* is intact"):
        fit(tmp_path, callbacks=[Failing], saver=saver)
    assert steps in ([0, 1, 2, 3], [0, 1, 2, 3, 4])  # the copies fail as soon as the step waits for them
    assert [path.name for path in tmp_path.iterdir()] == ["step=3.ckpt"]
    assert (tmp_path / "step=3.ckpt").read_bytes() == b"of an earlier run" != saved
    assert not references._kept


KILLED = """
import os, pathlib, signal, sys
sys.path.insert(0, sys.argv[1])
import pytest
import test_checkpoints_beside as beside

folder = pathlib.Path(sys.argv[2])
gate = beside.Gate(pytest.MonkeyPatch())

class Killed(beside.Callback):
    def on_train_batch_start(self, trainer, module, batch, index):
        if trainer.global_step == 2:
            assert gate.begun.wait(60)
            os.kill(os.getpid(), signal.SIGKILL)

given = {"every_n_train_steps": 2, "enable_version_counter": False}
beside.fit(folder, accelerator="cpu", callbacks=[Killed], saver=beside.ModelCheckpoint(folder, "last", **given))
"""


def test_a_process_that_is_killed_leaves_the_file_before(tmp_path):
    (tmp_path / "last.ckpt").write_bytes(b"of an earlier run")
    done = forks.run(KILLED, os.path.dirname(__file__), str(tmp_path))
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]
    assert (tmp_path / "last.ckpt").read_bytes() == b"of an earlier run"


def test_state_that_a_callback_writes_in_place_is_an_error_and_no_wrong_file(latest, tmp_path):
    class WriterOfState(Callback):
        def on_train_batch_start(self, trainer, module, batch, index):
            for state in trainer.optimizers[0].state.values():
                state["exp_avg"].mul_(2)

    with pytest.raises(CheckpointError, match=r"exp_avg of .* was written before it was in the file"):
        fit(tmp_path, callbacks=[WriterOfState])
    assert not list(tmp_path.iterdir())


def test_a_unit_waits_for_its_own_bytes_alone(latest, tmp_path):
    """Backward steps the last blocks first, while nothing of the others is in the file.

    Of two units that have arrived the thread steps the newer one; backward goes on to the first two blocks once it has.
    """

    class Slow(Module):
        def on_fit_start(self):
            super().on_fit_start()
            self.net.blocks[2].register_forward_pre_hook(self.note)

        def note(self, block, given):
            if given[0].requires_grad and self.trainer.global_step:
                given[0].register_hook(self.wait)

        def wait(self, gradient):
            until = time.monotonic() + FOUND_BY_OTHERS
            while not latest.waited:
                assert time.monotonic() < until
                time.sleep(0.001)

    fit(tmp_path, max_steps=2, make=Slow, saver=ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1))
    assert not latest.waited[0].startswith(("net.blocks.0", "net.blocks.1", "net.stem"))
    assert latest.left[0] > 0


@pytest.mark.parametrize("what", ["a checkpoint", "state"])
def test_a_load_waits_for_the_file(what, gate, tmp_path):
    """As Lightning's tuners load what they have just saved; an optimizer may load into the tensors that it has."""
    path = tmp_path / "step=1.ckpt"

    class Loading(Callback):
        found = None

        def on_train_batch_start(self, trainer, module, batch, index):
            if trainer.global_step == 1 and not gate.open.is_set():
                state = {"optimizer_states": [copy.deepcopy(trainer.optimizers[0].state_dict())]}
                threading.Timer(0.5, gate.open.set).start()
                if what == "state":
                    trainer.strategy.load_optimizer_state_dict(state)
                    assert path.exists()
                Loading.found = trainer.strategy.load_checkpoint(path, weights_only=False)

    fit(tmp_path, max_steps=2, callbacks=[Loading])
    assert Loading.found["global_step"] == 1


def test_units_that_are_made_anew_wait_for_the_file(gate, tmp_path):
    """The copies of weights that it waits for are not those of the units that come."""
    there = []

    class Growing(Callback):
        def on_train_batch_start(self, trainer, module, batch, index):
            if trainer.global_step == 1 and not gate.open.is_set():
                module.extra = torch.nn.Linear(4, 4)
                threading.Timer(0.5, gate.open.set).start()

        def on_before_backward(self, *_):
            there.append((tmp_path / "step=1.ckpt").exists())

    fit(tmp_path, max_steps=2, callbacks=[Growing], saver=ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1))
    assert there == [False, True]


@pytest.mark.parametrize("where", ["a callback", "the file"])
def test_what_was_kept_for_a_checkpoint_that_an_error_ended_is_let_go(where, gate, tmp_path, monkeypatch):
    def fail(*_):
        assert references._kept
        raise ZeroDivisionError

    class Failing(Callback):
        on_save_checkpoint = fail

    if where == "the file":
        monkeypatch.setattr(CopiesToFile, "begin", fail)
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, max_steps=2, callbacks=[Failing] * (where == "a callback"))
    assert not references._kept


def test_what_was_kept_for_a_file_that_failed_is_let_go_where_no_step_follows(tmp_path, monkeypatch):
    def fail(_):
        assert references._kept
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    class Stops(Callback):
        def on_train_batch_start(self, trainer, module, batch, index):
            if trainer.global_step == 1:
                raise ZeroDivisionError

    monkeypatch.setattr(checkpoint_file, "LARGE", 64)
    monkeypatch.setattr(CopiesToFile, "copy_later", fail)
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, callbacks=[Stops])
    assert not references._kept and not list(tmp_path.iterdir())


def test_files_are_complete_when_training_has_ended(tmp_path, monkeypatch):
    """Callbacks and the module find the last file of training, and those that they save themselves."""
    finish, seen = CopiesToFile.finish, []

    def late(copies):
        time.sleep(0.5)
        finish(copies)

    def there():
        return sorted(path.name for path in tmp_path.iterdir())

    class Saves(Callback):
        def on_train_end(self, trainer, module):
            assert os.path.isfile(trainer.checkpoint_callback.best_model_path)
            seen.append(there())
            trainer.save_checkpoint(tmp_path / "last.ckpt")

    class Looks(Module):
        def on_train_end(self):
            seen.append(there())

    monkeypatch.setattr(CopiesToFile, "finish", late)
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1)
    fit(tmp_path, make=Looks, max_steps=3, callbacks=[Saves], saver=saver)
    assert seen == [["step=2.ckpt"], ["last.ckpt", "step=2.ckpt"]]


def test_what_a_checkpoint_leaves_out_is_not_waited_for(latest, tmp_path):
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_weights_only=True)
    fit(tmp_path, max_steps=2, saver=saver)
    assert latest.waited and not [name for name in latest.waited if name.startswith("exp_avg")]


def test_what_is_not_kept_is_in_the_file_when_a_save_returns(tmp_path, monkeypatch):
    """A callback that gives a tensor of its own to a checkpoint may write to it after that."""
    monkeypatch.setattr(checkpoint_file, "LARGE", 64)
    copy_piece = CopiesToFile._copy
    monkeypatch.setattr(CopiesToFile, "_copy", lambda *given: (time.sleep(0.2), copy_piece(*given))[1])

    class Own(Callback):
        own = torch.zeros(1000)

        def on_save_checkpoint(self, trainer, module, checkpoint):
            checkpoint["own"] = self.own

        def on_train_batch_end(self, trainer, module, outputs, batch, index):
            trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")
            self.own += 1

    (tmp_path / "others").mkdir()
    fit(tmp_path / "others", max_steps=2, callbacks=[Own], saver=ModelCheckpoint(every_n_train_steps=100))
    found = [torch.load(tmp_path / f"{step}.ckpt", weights_only=False)["own"] for step in (1, 2)]
    assert [(own.min(), own.max()) for own in found] == [(0, 0), (1, 1)]


def test_a_copy_of_a_callback_or_of_the_strategy_has_nothing_of_what_is_written(gate, tmp_path):
    class Copying(Callback):
        def on_train_batch_start(self, trainer, module, batch, index):
            if trainer.global_step == 1:
                pickle.dumps(trainer.strategy._writer)
                gate.open.set()  # to copy the weights, which Lightning's callback leads to, waits for them
                copied = copy.deepcopy(trainer.checkpoint_callback)
                assert "file_exists" not in vars(copied) or copied.file_exists.__func__

    fit(tmp_path, max_steps=2, callbacks=[Copying])


@pytest.mark.parametrize(
    "given, message",
    [
        ({"checkpoints": "later"}, "checkpoints must be one of 'wait', 'beside', got 'later'"),
        ({"plugins": [AsyncCheckpointIO()]}, "'wait' with the checkpoint plugin AsyncCheckpointIO"),
        ({"saver": ModelCheckpoint(save_last="link")}, "'wait' with ModelCheckpoint.save_last='link'."),
    ],
)
def test_what_cannot_be_written_beside_training_is_refused(given, message, tmp_path):
    with pytest.raises(OptionError, match=message):
        fit(tmp_path, **given)


def test_several_devices_are_refused():
    strategy = SuperpipelineStrategy(checkpoints="beside")
    with pytest.raises(OptionError, match="checkpoints must be 'wait' with several devices"):
        L.Trainer(strategy=strategy, accelerator="cpu", devices=2)
