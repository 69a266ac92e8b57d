"""The callback: there when the user added none, silent unless it is to log, and without effect on what is trained."""

import functools
import json
import re
from dataclasses import replace

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, Logger
from often import often

import models
import parity
import sp_lightning
from sp_lightning.host.device import aligned
from sp_lightning.lightning import callback

pytestmark = [pytest.mark.simgpu, pytest.mark.filterwarnings("ignore")]
CASE = models.case("mlp")
LOGGING = functools.partial(sp_lightning.SuperpipelineCallback, log_metrics=True)


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


def trainer_of(callbacks=(), logger=False, accelerator="cpu", **options):
    options = {"limit_val_batches": 1, "max_epochs": 1, "callbacks": [*callbacks], "logger": logger, **options}
    return parity.make_trainer(parity.streaming_strategy(accelerator, window=2), accelerator, **options)


def fit(callbacks=(), logger=False, batches=4, **options):
    trainer = trainer_of(callbacks, logger, **options)
    trainer.fit(models.ZooModule(CASE, "sgd"), models.loader(CASE, batches), models.loader(CASE, 1))
    return trainer


class Kinds(Callback):
    """Keeps who is there while it trains."""

    def __init__(self):
        self.seen = []

    def on_train_start(self, trainer, module):
        self.seen.append([type(callback).__name__ for callback in trainer.callbacks])


def test_the_strategy_adds_one_before_all_others(tmp_path):
    kinds = Kinds()
    trainer = trainer_of([kinds, ModelCheckpoint(tmp_path)], enable_checkpointing=True)
    for _ in range(2):
        trainer.fit(models.ZooModule(CASE, "sgd"), models.loader(CASE, 1))
        trainer.fit_loop.max_epochs += 1
    assert kinds.seen == [["SuperpipelineCallback", "Kinds", "ModelCheckpoint"]] * 2


def test_the_users_own_is_the_only_one():
    own, kinds = sp_lightning.SuperpipelineCallback(), Kinds()
    trainer = fit([own, kinds])
    assert kinds.seen == [["SuperpipelineCallback", "Kinds"]] and trainer.callbacks == [own, kinds]


def test_it_is_not_in_checkpoints(tmp_path):
    trainer = fit()
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    assert torch.load(tmp_path / "end.ckpt", weights_only=False)["callbacks"] == {}


def test_it_refuses_another_strategy():
    callback = LOGGING()
    trainer = L.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, callbacks=callback)
    said = "the Trainer uses SingleDeviceStrategy; pass strategy='superpipeline' or remove the callback"
    with pytest.raises(sp_lightning.errors.UnsupportedError, match=said):
        trainer.fit(models.ZooModule(CASE), models.loader(CASE, 1))


def moved(logger):
    return {step: metrics for step, metrics in logger.lines if any("superpipeline" in name for name in metrics)}


@pytest.mark.parametrize("own", [None, 2])
def test_it_reports_what_a_step_moved_in_the_trainers_rhythm_or_its_own(own):
    logger, logging = Kept(), sp_lightning.SuperpipelineCallback(log_every_n_steps=own, log_metrics=True)
    every = 2 if own is None else 5
    trainer = fit([logging], logger=logger, batches=6, log_every_n_steps=every, max_epochs=2, limit_val_batches=0)
    lines = moved(logger)
    assert sorted(lines) == [3, 5, 7, 9, 11]  # what steps took is known two steps later
    units = [unit for unit in trainer.strategy.handle.units if not unit.is_held]
    gradients = sum(aligned(weight.nbytes) for unit in units for weight in unit.weights)
    for metrics in lines.values():
        assert metrics["superpipeline/bytes_down"] == gradients
        assert metrics["superpipeline/bytes_up"] > sum(unit.nbytes for unit in units)


FIGURES = """bytes_up bytes_down step_ms floor_ms floor_share compute_ms stall_weights_ms stall_gradients_ms
stall_activations_ms stall_optimizer_ms outside_ms up_gb_per_s down_gb_per_s device_peak_bytes
host_peak_bytes resident_share samples_per_s"""


@pytest.mark.parametrize("accelerator", often(["simgpu", "cpu"]))
def test_it_logs_what_steps_took_and_waited_for(accelerator):
    logger = Kept()
    fit([LOGGING()], logger=logger, batches=6, log_every_n_steps=1, accelerator=accelerator)
    *_, last = moved(logger).values()
    figures = {name.removeprefix("superpipeline/"): value for name, value in last.items()}
    assert list(figures) == FIGURES.split()
    parts = [value for name, value in figures.items() if name.startswith(("compute_", "stall_", "outside_"))]
    assert sum(parts) == pytest.approx(figures["step_ms"])
    assert figures["samples_per_s"] == pytest.approx(models.BATCH / figures["step_ms"] * 1e3)
    assert 0 < figures["resident_share"] <= 1


OF_A_DISK = ["stall_disk_ms", "disk_in_gb_per_s", "disk_out_gb_per_s"]


def test_it_logs_what_a_disk_did_if_the_run_has_one(tmp_path):
    logger = Kept()
    trainer = trainer_of([LOGGING()], logger, log_every_n_steps=1)
    trainer.strategy.options = replace(trainer.strategy.options, host_budget=0, disk=str(tmp_path))
    case = models.case("transformer_encoder")  # whose weights are more than blocks of a disk
    trainer.fit(models.ZooModule(case, "adamw"), models.loader(case, 6), models.loader(case, 1))
    *_, last = moved(logger).values()
    figures = {name.removeprefix("superpipeline/"): value for name, value in last.items()}
    assert sorted(figures) == sorted([*FIGURES.split(), *OF_A_DISK])
    assert figures["disk_in_gb_per_s"] > 0 and figures["disk_out_gb_per_s"] > 0
    parts = [value for name, value in figures.items() if name.startswith(("compute_", "stall_", "outside_"))]
    assert sum(parts) == pytest.approx(figures["step_ms"])


def test_every_name_it_logs_is_documented():
    for name in (*FIGURES.split(), *OF_A_DISK, "tokens_per_s"):
        assert f"``{name}``" in sp_lightning.SuperpipelineCallback.__doc__


@pytest.mark.parametrize(
    ("batch", "figures"),
    [
        (torch.zeros(4, 8), {"samples_per_s": 8.0}),
        ([torch.zeros(4, 8, dtype=torch.int64), torch.zeros(4)], {"samples_per_s": 8.0, "tokens_per_s": 64.0}),
        ({"x": torch.zeros(2, 3), "input_ids": torch.zeros(2, 5, dtype=torch.int64)}, {"tokens_per_s": 20.0}),
        ({"input_ids": [[1, 2], [3]], "x": torch.zeros(2, 3)}, {"samples_per_s": 4.0}),
        ({"input_ids": None, "x": torch.zeros(2, 3)}, {"samples_per_s": 4.0}),
        ("no tensor", {}),
    ],
)
def test_a_batch_shows_its_samples_and_tokens(batch, figures):
    found = callback.per_second(batch, step_s=0.5)
    assert figures.items() <= found.items() and len(found) == (2 if "tokens_per_s" in figures else len(figures))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"log_every_n_steps": 0}, "log_every_n_steps must be None or an int >= 1, got 0"),
        ({"timeline_steps": 5}, "timeline_steps must be one or more ints >= 0, got 5"),
        ({"timeline_steps": ["5"]}, "timeline_steps must be one or more ints >= 0, got \\['5'\\]"),
        ({"timeline_steps": ()}, "timeline_steps must be one or more ints >= 0"),
        ({"timeline_steps": [-1]}, "timeline_steps must be one or more ints >= 0"),
        ({"plan": "llama-8b"}, r"plan must be None or a plan from sp_lightning.plan\(\)"),
    ],
)
def test_options_that_cannot_be_are_refused(options, said):
    with pytest.raises(sp_lightning.errors.OptionError, match=said):
        sp_lightning.SuperpipelineCallback(**options)


def test_nobody_looks_and_nothing_is_recorded(monkeypatch):
    monkeypatch.setattr(sp_lightning.Handle, "record", lambda self, recorder=None: pytest.fail("recorded"))
    monkeypatch.setattr(sp_lightning.Handle, "stats", lambda self: pytest.fail("counted"))
    fit()
    fit(logger=Kept(), log_every_n_steps=1)
    fit([sp_lightning.SuperpipelineCallback(progress=False)], enable_progress_bar=True)


BARS = [TQDMProgressBar, RichProgressBar]


@pytest.mark.parametrize("bar", often(BARS))
def test_the_progress_bar_shows_memory_and_waiting(bar):
    shown = []

    class Asking(Callback):
        def on_train_batch_end(self, trainer, module, *_):
            shown.append(trainer.progress_bar_callback.get_metrics(trainer, module))

    own = bar()
    trainer = fit([Asking(), own], enable_progress_bar=True, batches=6)
    assert re.fullmatch(r"[\d.]+ [KM]?i?B", shown[-1]["device"]) and re.fullmatch(r"\d+%", shown[-1]["waits"])
    assert "get_metrics" not in vars(own) and "device" not in own.get_metrics(trainer, trainer.lightning_module)
    assert not {"device", "waits"} & {*trainer.callback_metrics, *trainer.progress_bar_metrics}


def said(caplog):
    return [record.getMessage() for record in caplog.records if record.name.startswith("lightning")]


def test_a_timeline_that_cannot_be_written_is_refused_first(tmp_path):
    (tmp_path / "file").touch()
    said = r"timeline must be in a folder that can be written \(.*: Not a directory\), got '.*file'"
    with pytest.raises(sp_lightning.errors.OptionError, match=said):
        fit([sp_lightning.SuperpipelineCallback(timeline=tmp_path / "file")])


def test_it_leaves_metrics_and_progress_alone(tmp_path):
    trainer = fit([LOGGING()], logger=CSVLogger(tmp_path), log_every_n_steps=1)
    assert not [name for name in {**trainer.callback_metrics, **trainer.logged_metrics} if "superpipeline" in name]
    with open(trainer.logger.experiment.metrics_file_path) as file:
        assert "superpipeline/bytes_up" in file.read()


def test_a_table_before_and_three_lines_after(caplog):
    with caplog.at_level("INFO"):
        fit(enable_progress_bar=True, batches=5)
    lines = said(caplog)
    (table,) = [line for line in lines if "superpipeline" in line and "window" in line and "transfer" in line]
    assert re.search(r"units +4, and [\d.]+ KiB that stay", table) and re.search(r"window +2 of them on", table)
    assert re.search(r"device +[\d.]+ KiB for weights and gradients, plus activations", table)
    assert re.search(r"host +weights [\d.]+ KiB, gradients [\d.]+ KiB, and the optimizer's state", table)
    took, memory, sentence = [line for line in lines if line.startswith("superpipeline: ")]
    assert re.match(r"superpipeline: a step took .* ms, floor .* ms \(.* of the step\): .*compute \d+ %", took)
    assert "device peak" in memory and "for weights and gradients" in memory
    assert "each step" in sentence or "bounds the step" in sentence


def test_with_a_plan_planned_stands_beside_measured(caplog):
    class Plan:
        window, device_nbytes, step_s = 2, 3 << 20, 0.25

    with caplog.at_level("INFO"):
        fit([sp_lightning.SuperpipelineCallback(plan=Plan())], enable_progress_bar=True, batches=5)
    table, took, memory, _ = (line for line in said(caplog) if "superpipeline" in line)
    assert re.search(r"device +3\.00 MiB planned", table) and re.search(r"step +250 ms planned", table)
    assert "(250 ms planned)" in took and "(3.00 MiB planned) with window 2" in memory


@pytest.mark.parametrize(
    ("batches", "steps", "names"), [(9, (3, 4), ["step 3", "step 4"]), (3, (10, 11), ["step 1", "step 2"])]
)
def test_a_timeline_has_the_steps_that_were_asked_for(batches, steps, names, tmp_path):
    pytest.importorskip("matplotlib")
    fit([sp_lightning.SuperpipelineCallback(timeline=tmp_path / "run", timeline_steps=steps)], batches=batches)
    events = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    assert [event["name"] for event in events if event["ph"] == "X" and event["tid"] == 0] == names
    lanes = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert lanes >= {"host to device", "compute", "device to host", "optimizer on the host"}
    assert (tmp_path / "run" / "timeline.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("accelerator", often(["simgpu", "cpu"]))
def test_it_has_no_effect_on_results(accelerator):
    make_module = functools.partial(models.ZooModule, CASE)

    def run(own):
        strategy = parity.streaming_strategy(accelerator, window=2)
        options = {"logger": Kept(), "log_every_n_steps": 1, "callbacks": [own]}
        return parity.record(make_module, strategy, accelerator=accelerator, **options)

    class Silent(sp_lightning.SuperpipelineCallback):
        def on_train_batch_start(self, *args):
            pass

    parity.compare(run(Silent()), run(LOGGING()))
