"""What a user mistypes: each is one line that says what to do instead, with exit status 2, and nothing has run."""

import logging
import pathlib
import re
import socket
import sys

import pytest

from sp_lightning import cli
from sp_lightning.hf import hub

ROOT = pathlib.Path(__file__).parents[2]
FIT = f"fit --config {ROOT}/examples/finetune_llm/config.yaml"
SAID = {  # what is typed, and what the line says
    "": "the following arguments are required: command",
    "--modle": "'--modle' is not an option",
    "--verison": "did you mean --version?",
    "plann --model llama-3b": "'plann' is not a command; did you mean plan?",
    "train": "'train' is not a command: fit, validate",
    "fit": "the following arguments are required: fit.model",
    "fit --modle x": "--modle is no argument; did you mean --model?",
    "fit --model nonsense": "model: Expected a dot import path string: nonsense",
    "fit --model examples.finetune_llm.modul.FineTuneLLM": "has no attribute 'modul'",
    "fit --config nowhere.yaml": "config: File does not exist",
    f"{FIT} --config wrong.yaml": "trainr.max_epochs is no argument; did you mean --trainer.max_epochs?",
    f"{FIT} --trainer.strategy superpipelin": "did you mean superpipeline?",
    f"{FIT} --trainer.strategy.windw 2": "did you mean --trainer.strategy.window?",
    f"{FIT} --trainer.strategy.window 0": "window must be an int >= 1 or 'auto', got 0",
    f"{FIT} --trainer.strategy.window 2 --trainer.strategy.transfer 3": "transfer must be at most window (2), got 3",
    f"{FIT} --trainer.strategy.memory_budget 64": "memory_budget must be a size with its unit",
    f"{FIT} --trainer.strategy.activations recomput": "did you mean recompute?",
    f"{FIT} --trainer.max_epochs many": "trainer.max_epochs: Expected a int; Given value: many",
    f"{FIT} --trainer.accelerator warp": "invalid accelerator name: `accelerator='warp'`",
    f"{FIT} --max_epochs 2": "--max_epochs is no argument; did you mean --trainer.max_epochs?",
    f"{FIT} --window 2": "--window is no argument; did you mean --trainer.strategy.window?",
    f"{FIT} --data.blok_size 128": "--data.blok_size is no argument",
    f"{FIT} --data.path nowhere.jsonl": "data.path must be a file of JSON lines (No such file or directory)",
    f"plan{FIT[3:]} --data.path nowhere.jsonl --machine rtx3060": "data.path must be a file of JSON lines",
    f"{FIT} --ckpt_path nowhere.ckpt": "ckpt_path must be a checkpoint that a run wrote, or one of last",
    f"{FIT} --trainer.default_root_dir /proc/runs": "trainer.default_root_dir must be in a folder that can be written",
    f"predict --config {ROOT}/examples/finetune_vision/config.yaml": "`Trainer.predict` requires `forward`",
    f"{FIT} --model.name_or_path some/model": "model.name_or_path must be a checkpoint's directory",
    f"plan{FIT[3:]} --model.name_or_path some/model": "or its name on the hub (huggingface.co cannot be reached",
    "plan --model llama-8b --machine rtx306": "did you mean rtx3060?",
    "plan --model some/model --machine rtx3060": "(huggingface.co cannot be reached: no network)",
    "plan --model . --machine rtx3060": "(it has no config.json), got '.'",
    f"plan --config {ROOT}/examples/finetune_vision/config.yaml --data.path nowhere --machine rtx3060": (
        "the data of this config could not be read"
    ),
    "doctor --device warp:0": "device must be one of '",
    "doctor --disk nowhere": "disk must be a directory that can be written",
    "doctor --devise cpu": "did you mean --device?",
    "launch": "the script must be after --",
    "launch nowhere.py": "put -- before the script",
    "launch -- nowhere.py": "the script must be a file, or -m and a module",
    "launch --windw 2 -- nowhere.py": "did you mean --window?",
    "launch --window 0 -- file": "window must be an int >= 1",
    "launch -- -m no_such_module": "the module must be one that Python can import",
}


@pytest.fixture(autouse=True)
def nothing_is_there(tmp_path, monkeypatch):
    """A folder with one file that is of no use, and no network."""
    pytest.importorskip("transformers")
    pytest.importorskip("jsonargparse")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("nothing\n")
    (tmp_path / "wrong.yaml").write_text("trainr:\n  max_epochs: 1\n")
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setattr(sys, "argv", ["sp_lightning"])
    monkeypatch.setattr(logging, "raiseExceptions", False)  # Lightning logs to the stderr of the test that imported it

    def connect(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr(socket, "create_connection", connect)
    hub.why_unreachable.cache_clear()
    yield
    hub.why_unreachable.cache_clear()


FEW = [typed if number % 4 == 0 else pytest.param(typed, marks=pytest.mark.slow) for number, typed in enumerate(SAID)]


@pytest.mark.parametrize("typed", FEW)
def test_what_is_mistyped_is_one_line_and_exit_status_2(typed, capfd):
    with pytest.raises(SystemExit) as stopped:
        cli.main(typed.split())
    out, err = capfd.readouterr()
    *before, last = err.splitlines()
    assert stopped.value.code == 2 and last.startswith("python -m sp_lightning") and SAID[typed] in last, err
    said = re.compile(r"^Traceback|^usage:|^error:|Retrying")
    assert [line for line in [*before, *out.splitlines()] if said.search(line)] == []


def test_an_error_of_the_users_own_code_keeps_its_traceback(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    code = "import lightning\n\n\nclass Mine(lightning.LightningModule):\n    def __init__(self):\n        1 / 0\n"
    (tmp_path / "mine.py").write_text(code)
    with pytest.raises(ValueError, match="division by zero"):
        cli.main(["fit", "--model", "mine.Mine"])


def test_a_proxy_is_left_to_find_the_hub(monkeypatch):
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    assert hub.why_unreachable() == ""
