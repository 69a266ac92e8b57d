"""Figures in the Trainer's log and a report at the end: of models that train, if they are asked for."""

from __future__ import annotations

import processes
import pytest
import ranked_hf
import torch
from hf_runs import llama, rows, transformers

from sp_lightning.errors import UnsupportedError
from sp_lightning.hf import streaming

FIGURES = {"step_ms", "compute_ms", "stall_weights_ms", "up_gb_per_s", "host_peak_bytes", "resident_share"}


def trained(folder, **options):
    torch.manual_seed(1)
    with streaming(window=1, **options) as stream:
        arguments = {"max_steps": 6, "logging_steps": 2, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
        trainer = transformers.Trainer(
            llama(),
            transformers.TrainingArguments(str(folder), per_device_train_batch_size=4, **arguments),
            train_dataset=rows(),
            eval_dataset=rows(4),
        )
        trainer.train()
        trainer.evaluate()
        assert stream.figures(torch.nn.Linear(2, 2)) == {}
    return trainer.state.log_history


def ours(entry):
    return {name.partition("/")[2] for name in entry if name.startswith("superpipeline/")}


@pytest.mark.few(1)
def test_the_log_of_training_gets_figures_that_were_asked_for(tmp_path, device, capfd):
    history = trained(tmp_path, log_metrics=True)
    training = [entry for entry in history if "loss" in entry]
    assert len(training) == 3 and ours(training[-1]) >= FIGURES
    assert 0 < training[-1]["superpipeline/step_ms"] < 1e5
    assert not any(ours(entry) for entry in history if "loss" not in entry)
    assert "superpipeline:" not in capfd.readouterr().err


@pytest.mark.few(1)
def test_a_report_that_was_asked_for_ends_with_the_bottleneck(tmp_path, device, capfd):
    assert not any(ours(entry) for entry in trained(tmp_path, report=True))
    said = [
        line for line in capfd.readouterr().err.splitlines() if line.startswith("superpipeline: LlamaForCausalLM: ")
    ]
    assert len(said) == 3 and "a step took" in said[0] and "host peak" in said[1]


def test_the_first_rank_reports_for_all(tmp_path):
    first, second = processes.run(2, ranked_hf.reported)
    assert "by rank: rank 0 " in first and "; rank 1 " in first and second == ""


def test_a_log_with_other_arguments_is_an_error_that_names_the_version(monkeypatch):
    from sp_lightning.compat.accelerate import trainer_log

    trainer_log.cache_clear()
    monkeypatch.setattr(transformers.Trainer, "log", lambda self, values: None)
    with pytest.raises(
        UnsupportedError, match=rf"Trainer\.log\(logs\), but transformers {transformers.__version__} has"
    ):
        streaming(log_metrics=True).__enter__()
    trainer_log.cache_clear()
    streaming(window=1).__enter__().close()  # none was left open
