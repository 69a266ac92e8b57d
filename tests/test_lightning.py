"""Every feature of a Trainer under the strategy: the same bits as plain Lightning, and nothing of the model on the device.

Both sides of a comparison are one real run each, recorded by parity.py.
"""

import functools

import lightning as L
import pytest
import torch
import torchmetrics
from lightning.pytorch import callbacks as cb
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.io import AsyncCheckpointIO

import models
import parity

pytestmark = [pytest.mark.simgpu, pytest.mark.filterwarnings("ignore")]
BOTH = pytest.mark.parametrize("accelerator", ["cpu", "simgpu"])


def zoo(name, **options):
    """A LightningModule around a case of the zoo."""
    return functools.partial(models.ZooModule, models.case(name), **options)


def run_both(make_module, accelerator, make_options=dict, window=2, **options):
    """Runs it plainly, then streaming; the two must be equal bit for bit. Each run's options are made for it."""
    expected = parity.record(
        make_module, parity.plain_strategy(accelerator), accelerator=accelerator, **options, **make_options()
    )
    strategy = parity.streaming_strategy(accelerator, window=window)
    actual = parity.record(make_module, strategy, accelerator=accelerator, **options, **make_options())
    parity.compare(expected, actual)
    assert actual.telemetry["fetches"] > actual.telemetry["units"] > 1  # it did stream
    return actual


# ---- callbacks and Trainer options of which each run has its own


class EveryOther(cb.WeightAveraging):
    def should_update(self, step_idx=None, epoch_idx=None):
        return step_idx is not None and step_idx % 2 == 0


FEATURES = {
    "early_stopping": lambda: {
        "epochs": 5,
        "callbacks": [cb.EarlyStopping("val_loss", patience=0, min_delta=0.05)],
    },
    "lr_finder": lambda: {"callbacks": [cb.LearningRateFinder(num_training_steps=6)]},
    "ema": lambda: {"epochs": 2, "callbacks": [cb.EMAWeightAveraging(decay=0.9)]},
    "weight_averaging": lambda: {"callbacks": [EveryOther()]},
    "swa": lambda: {"epochs": 4, "callbacks": [cb.StochasticWeightAveraging(1e-2, swa_epoch_start=2, device=None)]},
    "pruning": lambda: {
        "epochs": 2,
        "callbacks": [cb.ModelPruning("l1_unstructured", amount=0.5, use_lottery_ticket_hypothesis=False)],
    },
    "device_stats": lambda: {
        "callbacks": [cb.DeviceStatsMonitor(cpu_stats=False)],
        "logger": CSVLogger("."),
        "log_every_n_steps": 1,
    },
    "rate_monitor": lambda: {"callbacks": [cb.LearningRateMonitor()], "logger": CSVLogger("."), "log_every_n_steps": 1},
    "summary": lambda: {"callbacks": [cb.ModelSummary(max_depth=3)], "enable_model_summary": True},
    "progress": lambda: {"callbacks": [cb.TQDMProgressBar()], "enable_progress_bar": True},
    "accumulation_schedule": lambda: {"epochs": 3, "callbacks": [cb.GradientAccumulationScheduler({0: 1, 1: 2, 2: 4})]},
    "asynchronous_checkpoints": lambda: {
        "plugins": [AsyncCheckpointIO()],
        "callbacks": [cb.ModelCheckpoint(every_n_train_steps=1, save_top_k=-1)],
        "enable_checkpointing": True,
    },
    "checkpoint_on_exception": lambda: {"callbacks": [cb.OnExceptionCheckpoint(".")], "enable_checkpointing": True},
    "timer": lambda: {"callbacks": [cb.Timer(duration="00:01:00:00")]},
    "simple_profiler": lambda: {"profiler": "simple"},
    "advanced_profiler": lambda: {"profiler": "advanced"},
    "pytorch_profiler": lambda: {"profiler": "pytorch"},
    "barebones": lambda: dict.fromkeys(("logger", "enable_checkpointing"), False) | {"barebones": True},
    "overfit": lambda: {"overfit_batches": 2, "epochs": 2},
    "fast_dev_run": lambda: {"fast_dev_run": 2},
    "no_sanity_check": lambda: {"num_sanity_val_steps": 0},
    "validation_within_an_epoch": lambda: {"val_check_interval": 2},
    "anomaly_detection": lambda: {"detect_anomaly": True},
    "no_inference_mode": lambda: {"inference_mode": False},
    "clip_norm": lambda: {"clip": ("norm", 0.1), "accumulate": 2},
    "clip_value": lambda: {"clip": ("value", 0.01), "accumulate": 3},
}


@BOTH
@pytest.mark.parametrize("feature", FEATURES)
def test_feature(feature, accelerator):
    name = "batch_norm" if feature in ("swa", "ema") else "mlp"
    run_both(zoo(name), accelerator, FEATURES[feature])


# ---- modules that use more of Lightning than the zoo's


class Adversaries(L.LightningModule):
    """Two optimizers that take turns, each with only its own half trainable."""

    def __init__(self):
        super().__init__()
        self.case = models.case("mlp")
        self.automatic_optimization = False
        self.generator, self.critic = self.case.make(), self.case.make()

    def training_step(self, batch, index):
        for optimizer, net in zip(self.optimizers(), (self.generator, self.critic)):
            self.toggle_optimizer(optimizer)
            scores = self.critic(torch.cat([self.generator(batch[0]), batch[0][:, :7]], dim=1))
            loss = torch.nn.functional.cross_entropy(scores, batch[1]) * (1 if net is self.critic else -1)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.log(f"loss {type(net).__name__}", loss)
        return loss

    def predict_step(self, batch, index):
        return self.critic(batch[0])

    def configure_optimizers(self):
        options = {"foreach": False, "fused": False}
        generator = torch.optim.Adam(self.generator.parameters(), 1e-2, **options)
        return generator, torch.optim.RMSprop(self.critic.parameters(), 1e-2, foreach=False)


class Closures(models.ZooModule):
    """LBFGS calls its closure several times in a step."""

    def __init__(self):
        super().__init__(models.case("mlp"))

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4, line_search_fn="strong_wolfe")


class Measured(models.ZooModule):
    """Metrics inside of the module, in a list, and logged as objects; numbers and tensors logged across devices."""

    def __init__(self):
        super().__init__(models.case("mlp"))
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(models.CLASSES)
        self.more = torch.nn.ModuleList([torchmetrics.MeanMetric()])
        self.seen = set()

    def training_step(self, batch, index):
        scores = self.net(batch[0])
        loss = torch.nn.functional.cross_entropy(scores, batch[1])
        self.accuracy(scores, batch[1])
        self.more[0](loss)
        self.seen |= {self.device, self.accuracy.tp.device, self.more[0].mean_value.device, loss.device}
        self.log("accuracy", self.accuracy, on_epoch=True)
        self.log_dict({"number": 2.5, "tensor": loss}, sync_dist=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", self.case.loss(self.net, batch), sync_dist=True)
        self.log("val_number", float(index), sync_dist=True)


class Scheduled(models.ZooModule):
    """Param groups, a frozen part, weight decay on some, and two kinds of scheduler."""

    def __init__(self):
        super().__init__(models.case("mlp"))

    def configure_optimizers(self):
        self.net.stem.requires_grad_(False)
        decayed = [p for p in self.parameters() if p.ndim > 1]
        rest = [p for p in self.parameters() if p.ndim <= 1]
        optimizer = torch.optim.SGD([{"params": decayed, "weight_decay": 0.1}, {"params": rest}], 1e-1, foreach=False)
        schedulers = [
            {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "interval": "step"},
            {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), "monitor": "val_loss"},
        ]
        return [optimizer], schedulers


class Unfreezing(cb.BaseFinetuning):
    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.net.blocks)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net.blocks[2:], optimizer)


@BOTH
@pytest.mark.parametrize("make_module", [Adversaries, Closures, Measured, Scheduled])
def test_module(make_module, accelerator):
    options = {"make_loader": functools.partial(models.loader, models.case("mlp"))}
    run_both(make_module, accelerator, epochs=2, **options)


@BOTH
def test_finetuning_adds_groups_during_the_run(accelerator):
    run_both(zoo("mlp", optimizer="sgd"), accelerator, lambda: {"callbacks": [Unfreezing()]}, epochs=3)
