"""The callback: there when the user added none, silent without a logger, and without effect on what is trained."""

import functools

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger

import models
import parity
import sp_lightning

pytestmark = [pytest.mark.simgpu, pytest.mark.filterwarnings("ignore")]
CASE = models.case("mlp")
QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "limit_val_batches": 1, "max_epochs": 1}


class Kept(Logger):
    """Keeps what it is given."""

    name, version = "kept", 0

    def __init__(self):
        super().__init__()
        self.lines = []

    def log_metrics(self, metrics, step=None):
        self.lines.append((step, metrics))

    def log_hyperparams(self, *args, **kwargs):
        pass


class First(Callback):
    pass


class Second(Callback):
    pass


def fit(callbacks=(), logger=False, batches=4, **options):
    module = models.ZooModule(CASE, "sgd")
    options = {"enable_checkpointing": False, "accelerator": "cpu", **QUIET, **options}
    strategy = sp_lightning.SuperpipelineStrategy(window=2)
    trainer = L.Trainer(strategy=strategy, callbacks=[*callbacks], logger=logger, devices=1, **options)
    trainer.fit(module, models.loader(CASE, batches), models.loader(CASE, 1))
    return trainer


def kinds(trainer):
    return [type(callback).__name__ for callback in trainer.callbacks]


def test_the_strategy_adds_one_and_keeps_the_order_of_the_others(tmp_path):
    trainer = fit([Second(), ModelCheckpoint(tmp_path), First()], enable_checkpointing=True)
    assert kinds(trainer) == ["Second", "First", "SuperpipelineCallback", "ModelCheckpoint"]
    trainer.fit_loop.max_epochs = 2
    trainer.fit(trainer.lightning_module, models.loader(CASE, 1))
    assert kinds(trainer).count("SuperpipelineCallback") == 1


def test_the_users_own_is_the_only_one():
    own = sp_lightning.SuperpipelineCallback()
    trainer = fit([own, First()])
    assert trainer.callbacks == [own, trainer.callbacks[1]] and kinds(trainer)[1:] == ["First"]


def test_it_is_not_in_checkpoints(tmp_path):
    trainer = fit([First()])
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    assert torch.load(tmp_path / "end.ckpt", weights_only=False)["callbacks"] == {}


def test_it_refuses_another_strategy():
    callback = sp_lightning.SuperpipelineCallback()
    trainer = L.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, callbacks=callback)
    said = "the Trainer uses SingleDeviceStrategy; pass strategy='superpipeline' or remove the callback"
    with pytest.raises(sp_lightning.errors.UnsupportedError, match=said):
        trainer.fit(models.ZooModule(CASE), models.loader(CASE, 1))


def moved(logger):
    return {step: metrics for step, metrics in logger.lines if any("superpipeline" in name for name in metrics)}


def test_it_reports_what_a_step_moved_in_the_loggers_rhythm():
    logger = Kept()
    trainer = fit(logger=logger, batches=6, log_every_n_steps=2, max_epochs=2)
    lines = moved(logger)
    assert sorted(lines) == [1, 3, 5, 7, 9, 11]
    streamed = [unit.nbytes for unit in trainer.strategy.handle.units]
    gradients = sum(p.numel() * p.element_size() for p in trainer.lightning_module.parameters())
    for metrics in lines.values():
        assert list(metrics) == ["superpipeline/fetches", "superpipeline/bytes_up", "superpipeline/bytes_down"]
        assert metrics["superpipeline/bytes_down"] == gradients
        assert metrics["superpipeline/fetches"] >= len(streamed)
        assert metrics["superpipeline/bytes_up"] > sum(streamed)


def test_what_it_reports_adds_up():
    """Every step, validation apart."""
    logger = Kept()
    trainer = fit(logger=logger, log_every_n_steps=1, limit_val_batches=0)
    stats = trainer.strategy.handle.stats()
    for name in ("fetches", "bytes_up", "bytes_down"):
        assert sum(metrics[f"superpipeline/{name}"] for metrics in moved(logger).values()) == stats[name] > 0


def test_it_leaves_metrics_and_progress_alone(tmp_path):
    trainer = fit(logger=CSVLogger(tmp_path), log_every_n_steps=1)
    assert not [name for name in {**trainer.callback_metrics, **trainer.logged_metrics} if "superpipeline" in name]
    with open(trainer.logger.experiment.metrics_file_path) as file:
        assert "superpipeline/bytes_up" in file.read()


def test_a_change_of_the_model_begins_new_counts_and_never_negative_ones():
    class Growing(Callback):
        def on_train_batch_start(self, trainer, module, batch, index):
            if index == 2:
                module.net.blocks[0].extra = torch.nn.Linear(2, 2)

    logger = Kept()
    fit([Growing()], logger=logger, log_every_n_steps=1)
    values = [value for metrics in moved(logger).values() for value in metrics.values()]
    assert len(values) == 12 and min(values) > 0


@pytest.mark.parametrize("accelerator", ["cpu", "simgpu"])
def test_it_has_no_effect_on_results(accelerator):
    make_module = functools.partial(models.ZooModule, CASE)

    def run(callbacks):
        strategy = parity.streaming_strategy(accelerator, window=2)
        options = {"logger": Kept(), "log_every_n_steps": 1, "callbacks": callbacks}
        return parity.record(make_module, strategy, accelerator=accelerator, **options)

    class Silent(sp_lightning.SuperpipelineCallback):
        def on_train_batch_start(self, *args):
            pass

    parity.compare(run([Silent()]), run([]))


def test_statistics_stay_available_after_the_run():
    trainer = fit()
    assert trainer.strategy.handle.closed
    assert trainer.strategy.handle.stats()["fetches"] > 0
