"""Every feature of a Trainer under the strategy: the bits of plain Lightning, with the weights on the host.

Both sides of a comparison are one real run each, recorded by parity.py.
"""

import functools
import inspect
import re

import lightning as L
import pytest
import rounding
import torch
import torchmetrics
import yaml
from lightning.pytorch import callbacks as cb
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from often import often
from torch._dynamo.utils import counters
from torch.optim.swa_utils import get_swa_avg_fn

import models
import parity
import sp_lightning
from sp_lightning.errors import PartitionError, UnsupportedError

pytestmark = [pytest.mark.simgpu, pytest.mark.filterwarnings("ignore")]
BOTH = pytest.mark.parametrize("accelerator", [pytest.param("cpu", marks=pytest.mark.slow), "simgpu"])


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


class DefaultDevice(cb.Callback):
    """Tensors that are made without saying where are made on the device."""

    def setup(self, trainer, pl_module, stage):
        torch.set_default_device(trainer.strategy.root_device)

    def teardown(self, trainer, pl_module, stage=None):
        torch.set_default_device(None)

    on_exception = teardown


FEATURES = {
    "early_stopping": lambda: {
        "epochs": 5,
        "callbacks": [cb.EarlyStopping("val_loss", patience=0, min_delta=0.05)],
    },
    "lr_finder": lambda: {"callbacks": [cb.LearningRateFinder(num_training_steps=6)]},
    "ema": lambda: {"epochs": 2, "callbacks": [cb.EMAWeightAveraging(decay=0.9)]},
    # The function is given: torch chooses one by the device of the averages.
    "weight_averaging": lambda: {"callbacks": [EveryOther(avg_fn=get_swa_avg_fn())]},
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
    "default_device": lambda: {"callbacks": [DefaultDevice()], "clip": ("norm", 0.1)},
    "clip_value": lambda: {"clip": ("value", 0.01), "accumulate": 3},
}


@BOTH
@pytest.mark.parametrize("feature", often(FEATURES, "ema", "swa", "clip_norm", "validation_within_an_epoch"))
def test_feature(feature, accelerator):
    name = "batch_norm" if feature in ("swa", "ema") else "mlp"
    run_both(zoo(name), accelerator, FEATURES[feature])


# ---- modules that use more of Lightning than the zoo's


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
@pytest.mark.parametrize("make_module", [Measured, Scheduled])
def test_module(make_module, accelerator):
    options = {"make_loader": functools.partial(models.loader, models.case("mlp"))}
    run_both(make_module, accelerator, epochs=2, **options)


class ReadsInItsStep(models.ZooModule):
    """Computes from weights in the step itself, without gradients, and writes one, alone and by rows."""

    def __init__(self, case, optimizer):
        super().__init__(case, optimizer)
        self.frozen = torch.nn.Linear(models.FEATURES, models.FEATURES).requires_grad_(False)

    def training_step(self, batch, index):
        with torch.no_grad():
            scale = 1 + self.net.head.weight.norm() + self.frozen.weight.norm()
            self.net.blocks[1].up.weight.clamp_(-0.1, 0.1)
            self.net.blocks[2].up.weight[0].mul_(0.5)
        assert self.frozen.weight.device == self.net.head.weight.device == batch[0].device
        x = torch.nn.functional.linear(batch[0], self.frozen.weight)
        return super().training_step((x, batch[1]), index) * scale


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_code_of_a_step_reads_and_writes_weights_on_the_device(precision):
    options = {"window": 2, "transfer": 1, "optimizer_overlap": False}
    settings = {"accelerator": "simgpu", "precision": precision, "kind": ReadsInItsStep}
    with rounding.norms_round_otherwise():
        parity.check(models.case("mlp"), options, **settings)


@BOTH
def test_finetuning_adds_groups_during_the_run(accelerator):
    run_both(zoo("mlp", optimizer="sgd"), accelerator, lambda: {"callbacks": [Unfreezing()]}, epochs=3)


# ---- one run after another


def trainer_with(strategy, accelerator="cpu", **options):
    return parity.make_trainer(strategy, accelerator, **{"max_epochs": 1, **options})


def seeded(make_module):
    L.seed_everything(0, verbose=False)
    return make_module()


@BOTH
@pytest.mark.parametrize("trainers", often([2, 1]))
def test_all_four_commands_run_in_turn_on_one_and_two_trainers(trainers, accelerator):
    def run(make_strategy):
        module = seeded(zoo("batch_norm"))
        loader = models.loader(module.case, 3)
        pool = [trainer_with(make_strategy(accelerator), accelerator) for _ in range(trainers)]
        found = []
        for command in ("validate", "fit", "test", "predict", "fit", "predict", "validate"):
            trainer = pool[len(found) % trainers]
            if command == "fit":
                trainer.fit_loop.max_epochs = trainer.current_epoch + 1
                found.append((trainer.fit(module, loader, loader), dict(module.state_dict())))
            else:
                found.append(getattr(trainer, command)(module, loader))
            found[-1] = [parity.keep(value) for _, value in parity.leaves(found[-1])]
        return found

    expected = run(parity.plain_strategy)
    parity.assert_same(expected, run(functools.partial(parity.streaming_strategy, window=2)))


class WithoutParameters(L.LightningModule):
    """Normalises with running statistics, and has nothing to learn."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(8, affine=False)

    def forward(self, batch):
        return self.norm(batch)

    def training_step(self, batch, index):
        batch.requires_grad_()
        loss = (self(batch) ** 4).sum()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.log("val", self(batch).sum())

    test_step = validation_step

    def configure_optimizers(self):
        return None


@BOTH
@pytest.mark.parametrize("bar", often([False, True]))
def test_a_module_without_parameters_runs_all_four_commands(bar, accelerator, tmp_path):
    def run(make_strategy):
        module, loader = seeded(WithoutParameters), torch.utils.data.DataLoader(torch.randn(6, 8), batch_size=2)
        options = {"enable_progress_bar": bar, "logger": CSVLogger(tmp_path) if bar else False, "log_every_n_steps": 1}
        trainer = trainer_with(make_strategy(accelerator), accelerator, **options)
        found = [trainer.validate(module, loader), trainer.test(module, loader), trainer.predict(module, loader)]
        trainer.fit(module, loader, loader)
        found += [dict(trainer.callback_metrics), dict(module.state_dict()), trainer.predict(module, loader)]
        return {"found": found}

    parity.assert_same(run(parity.plain_strategy), run(functools.partial(parity.streaming_strategy, window=2)))


# ---- copies of a Trainer


@BOTH
def test_a_module_is_on_the_computing_device_only_during_a_run(accelerator):
    class Looking(cb.Callback):
        seen = set()

        def see(self, trainer, module, *_, **__):
            self.seen.add((module.device.type, trainer.strategy.root_device.type))

        setup = on_fit_start = on_train_batch_start = on_before_zero_grad = on_validation_end = on_train_end = see

    module = seeded(zoo("batch_norm"))
    trainer = trainer_with(parity.streaming_strategy(accelerator), accelerator, callbacks=[Looking()])
    trainer.fit(module, models.loader(module.case, 2), models.loader(module.case, 1))
    assert Looking.seen == {(accelerator, accelerator)}
    assert module.device.type == "cpu"
    assert {tensor.device.type for tensor in module.state_dict().values()} == {"cpu"}


@BOTH
def test_averages_stay_on_the_host(accelerator):
    """Unless the user names a device; and the callback is what it was when the run is over."""

    class Looking(cb.Callback):
        def __init__(self, averaging):
            self.averaging, self.seen = averaging, set()

        def on_train_batch_end(self, *_):
            average = self.averaging._average_model
            self.seen |= {(tensor.device.type) for tensor in average.state_dict().values()}

    module = seeded(zoo("batch_norm"))
    for device, expected in ((None, {"cpu"}), (torch.device(accelerator), {accelerator})):
        for averaging in (
            cb.EMAWeightAveraging(device=device),
            cb.StochasticWeightAveraging(1e-2, swa_epoch_start=1, device=device),
        ):
            looking = Looking(averaging)
            strategy = parity.streaming_strategy(accelerator, window=2)
            trainer = trainer_with(strategy, accelerator, callbacks=[averaging, looking])
            trainer.fit(module, models.loader(module.case, 2))
            assert looking.seen == expected
            assert averaging._device == device


class Sized(models.ZooModule):
    """Its batch size and learning rate are to be found."""

    def __init__(self):
        super().__init__(models.case("mlp"))
        self.batch_size = 2

    def train_dataloader(self):
        batches = [self.case.batch(index) for index in range(8)]
        data = torch.utils.data.TensorDataset(*map(torch.cat, zip(*batches, strict=True)))
        return torch.utils.data.DataLoader(data, self.batch_size)

    val_dataloader = train_dataloader


@BOTH
def test_the_tuner_finds_what_a_plain_one_does_and_keeps_weights(accelerator):
    def run(make_strategy):
        module = seeded(Sized)
        before = {name: value.clone() for name, value in module.state_dict().items()}
        tuner = L.pytorch.tuner.Tuner(trainer_with(make_strategy(accelerator), accelerator))
        size = tuner.scale_batch_size(module, mode="power", steps_per_trial=2, max_trials=3)
        after_sizing = dict(module.state_dict())
        finder = tuner.lr_find(module, num_training=8)
        parity.assert_same(before, after_sizing)
        parity.assert_same(before, dict(module.state_dict()))
        return {"size": size, "rate": finder.suggestion(), "losses": finder.results["loss"], "lr": module.lr}

    parity.assert_same(run(parity.plain_strategy), run(functools.partial(parity.streaming_strategy, window=2)))


# ---- who makes the weights, and where


class Configured(models.ZooModule):
    """Builds its net when the Trainer asks for it."""

    def __init__(self):
        super().__init__(models.case("mlp"))
        self.net = None

    def configure_model(self):
        if self.net is None:
            self.net = self.case.make()


def build_configured(trainer):
    return Configured()


def build_in_init_module(trainer):
    with trainer.init_module():
        return zoo("mlp")()


def build_empty(trainer):
    with trainer.init_module(empty_init=True):
        module = zoo("mlp")()
    for parameter in module.parameters():
        torch.nn.init.uniform_(parameter, -0.1, 0.1)
    return module


def build_on_meta(trainer):
    with trainer.init_module(), torch.device("meta"):
        return zoo("mlp")()


def build_tied_on_meta(trainer):
    with trainer.init_module(), torch.device("meta"):
        module = zoo("tied_embedding")()
    assert module.net.head.weight is module.net.embedding.weight
    return module


WAYS = [build_configured, build_in_init_module, build_empty, build_on_meta, build_tied_on_meta]


@pytest.mark.parametrize("build", often(WAYS, build_empty, build_tied_on_meta))
@pytest.mark.parametrize("precision", often(["32-true", "bf16-true"]))
def test_weights_are_made_on_the_host(build, precision):
    import simgpu

    trainer = trainer_with(parity.streaming_strategy("simgpu", window=1), "simgpu", precision=precision)
    L.seed_everything(0, verbose=False)
    simgpu.config.capacity = 0
    module = build(trainer)
    assert {parameter.device.type for parameter in module.parameters()} <= {"cpu", "meta"}
    simgpu.config.capacity = 2**30
    names = [name for name, _ in module.named_parameters()]
    parameters = list(module.parameters())
    trainer.fit(module, models.loader(module.case, 2))
    kept = dict(module.named_parameters(remove_duplicate=False))
    if names:
        assert all(one is other for one, other in zip(parameters, module.parameters(), strict=True))
    if build is build_tied_on_meta:
        assert kept["net.head.weight"] is kept["net.embedding.weight"]
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    assert {(parameter.device.type, parameter.dtype) for parameter in kept.values()} == {("cpu", dtype)}
    assert all(parameter.isfinite().all() for parameter in kept.values())


def test_weights_are_the_plain_ones_wherever_they_were_made():
    def run(make_strategy, build):
        trainer = trainer_with(make_strategy("cpu"))
        L.seed_everything(0, verbose=False)
        module = build(trainer)
        trainer.fit(module, models.loader(module.case, 2))
        return dict(module.state_dict())

    for build in (build_configured, build_in_init_module):
        parity.assert_same(run(parity.plain_strategy, build), run(parity.streaming_strategy, build))


class OnMeta(models.ZooModule):
    """Makes its net on the meta device when it is configured."""

    def __init__(self, case):
        super().__init__(case)
        del self.net

    def configure_model(self):
        if not hasattr(self, "net"):
            with torch.device("meta"):
                self.net = self.case.make()


@pytest.mark.parametrize("device", often(["simgpu", "cpu"]))
def test_a_checkpoint_goes_into_weights_made_on_the_meta_device(device, tmp_path):
    """It is loaded before the module is set up, and torch loads nothing into weights on the meta device."""
    case, path = models.case("mlp"), tmp_path / "of.ckpt"
    first = trainer_with(parity.plain_strategy(device), device, max_steps=2)
    first.fit(models.ZooModule(case), models.loader(case, 4))
    first.save_checkpoint(path)
    resumed = []
    for kind, strategy in ((models.ZooModule, parity.plain_strategy), (OnMeta, parity.streaming_strategy)):
        L.seed_everything(5, verbose=False)
        module, looks = kind(case), kind(case)
        trainer_with(strategy(device), device, max_steps=4).fit(module, models.loader(case, 4), ckpt_path=path)
        trainer = trainer_with(strategy(device), device)
        trainer.validate(looks, models.loader(case, 2), ckpt_path=path, verbose=False)
        resumed.append({**module.state_dict(), **{f"validated.{name}": p for name, p in looks.state_dict().items()}})
    parity.assert_same(*resumed)


def test_meta_weights_that_nothing_can_make_are_refused_by_name():
    class Bare(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(3))

    trainer = trainer_with(parity.streaming_strategy("cpu"))
    with torch.device("meta"):
        module = zoo("mlp")()
        module.net.bare = Bare()
    with pytest.raises(PartitionError, match=r"net\.bare has parameters on the meta device and no reset_parameters"):
        trainer.fit(module, models.loader(module.case, 1))


# ---- which device


def test_by_name_on_the_accelerator_that_the_trainer_chose():
    trainer = trainer_with("superpipeline", "simgpu")
    assert trainer.strategy.root_device == torch.device("simgpu", 0)
    module = seeded(zoo("mlp"))
    trainer.fit(module, models.loader(module.case, 2))
    assert torch.accelerator.max_memory_allocated() > 0


def test_mps_is_refused_and_told_what_to_use():
    said = r"device 'mps' shares its memory with the host.*use Lightning's default strategy \(strategy='auto'\)"
    strategy = sp_lightning.SuperpipelineStrategy()
    with pytest.raises(UnsupportedError, match=said):
        strategy.parallel_devices = [torch.device("mps", 0)]  # as the Trainer does


# ---- compiled modules


def compiled_whole(module, backend):
    return torch.compile(module, backend=backend)


def compiled_blocks(module, backend):
    for block in module.net.blocks:
        block.compile(backend=backend)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("compiled", [compiled_whole, compiled_blocks])
def test_a_compiled_module_computes_what_it_does_plainly(backend, activations, compiled):
    """Blocks that are alike share a graph; those of a whole module end where units begin."""

    def run(strategy):
        torch.compiler.reset()
        counters.clear()
        module = seeded(zoo("mlp"))
        trainer, loader = trainer_with(strategy), models.loader(module.case, 4)
        fitted = compiled(module, backend)
        trainer.fit(fitted, loader, loader)
        found = {"weights": dict(module.state_dict()), "predictions": trainer.predict(fitted, loader)}
        return found, counters["stats"]["unique_graphs"]

    expected, plain = run(parity.plain_strategy("cpu"))
    actual, streamed = run(parity.streaming_strategy("cpu", window=2, activations=activations))
    parity.assert_same(expected, actual)
    assert 0 < plain <= streamed <= plain + 8 * (compiled is compiled_whole)


# ---- LightningCLI


@pytest.fixture
def cli(monkeypatch, capsys):
    """Runs LightningCLI with a strategy's init_args, as YAML has them; gives the trainer."""
    from lightning.pytorch.cli import LightningCLI
    from lightning.pytorch.demos.boring_classes import BoringModel

    def run(*arguments, **init_args):
        strategy = {"class_path": "sp_lightning.SuperpipelineStrategy", "init_args": init_args}
        options = {"accelerator": "cpu", "fast_dev_run": 1, "strategy": strategy, "enable_progress_bar": False}
        with open("config.yaml", "w") as file:
            yaml.safe_dump({"trainer": options}, file)
        monkeypatch.setattr("sys.argv", ["program"])
        arguments = arguments or ("--config", "config.yaml")
        return LightningCLI(BoringModel, args=["fit", *arguments], save_config_callback=None).trainer

    return run


def test_yaml_gives_every_argument_as_number_or_text(cli):
    given = {"window": 2, "transfer": "1", "units": ["Linear"], "memory_budget": "1 GB", "activations": "recompute"}
    options = cli(**given, optimizer_overlap=False).strategy.options
    expected = (2, 1, ("Linear",), 10**9, "recompute", False)
    names = ("window", "transfer", "units", "memory_budget", "activations", "optimizer_overlap")
    assert tuple(getattr(options, name) for name in names) == expected
    assert cli(window="3", memory_budget=10**9).strategy.options.window == 3


def test_the_command_line_describes_every_argument(cli, capsys):
    with pytest.raises(SystemExit):
        cli("--trainer.strategy.help", "sp_lightning.SuperpipelineStrategy")
    text = capsys.readouterr().out
    for name in inspect.signature(sp_lightning.SuperpipelineStrategy).parameters:
        described = re.search(rf"\n  --trainer\.strategy\.{name},? .*\n((?: {{12,}}.*\n)+)", text)
        assert described, f"{name} is not listed"
        assert len(described[1].split("(type:")[0].split()) >= 5, f"{name} is not described"


def test_an_unknown_init_arg_is_named(cli, capsys):
    with pytest.raises(SystemExit):
        cli(windw=2)
    assert "Option 'windw' is not accepted" in capsys.readouterr().err
